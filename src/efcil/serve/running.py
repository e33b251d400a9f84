"""Running a server until it is asked to stop."""

from __future__ import annotations

import os
import socket
from typing import Any

import uvicorn

from efcil.errors import RunFolderError, printable
from efcil.serve.app import create_app
from efcil.serve.options import ServeOptions

#: Seconds that an idle connection stays open, and that open requests have to end when the server stops.
KEEP_ALIVE, LAST_SECONDS = 15, 5
MOST_CONNECTIONS = 1000


def serve(options: ServeOptions) -> None:
    """Serve a model until Ctrl-C or SIGTERM; what is being learned then is saved first."""
    listening = _listen(options)
    app = create_app(options)
    service = app.state.service

    class Server(uvicorn.Server):
        """Tells those who follow a teaching to let go when the server stops."""

        def handle_exit(self, sig: int, frame: Any) -> None:
            service.closing.set()
            # After a second Ctrl-C uvicorn would skip the rest of its end: nobody would stop a teaching then, and this
            # process would wait for it. The end takes a few seconds, a minute where a teaching does not answer.
            if not self.should_exit:
                super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=LAST_SECONDS,
        limit_concurrency=MOST_CONNECTIONS,
        lifespan="on",
    )
    print(_welcome(options, listening, len(service.labels)), flush=True)
    Server(config).run([listening])


def _listen(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((options.host, options.port))
    except OSError as error:
        listening.close()
        raise RunFolderError(
            f"Nothing can listen at {options.host} port {options.port} ({error.strerror or error}). Choose another "
            "--port, or --host."
        ) from None
    return listening


def _welcome(options: ServeOptions, listening: socket.socket, classes: int) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    knows = f"knows {classes} class{'' if classes == 1 else 'es'}" if classes else "knows nothing yet"
    address = f"http://{host}:{listening.getsockname()[1]}"
    name = printable(options.folder.resolve().name)
    return f"{name} {knows}. The page is at {address}, the interface at {address}/docs. Ctrl-C stops it."
