"""`efcil serve`: a page and a JSON interface to ask and teach a model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from efcil.commands.parser import Parser, add_checkpoint_steps, add_option, let_threads_sleep, positive
from efcil.errors import SettingsError
from efcil.settings import TrainingSettings, options

HELP = "serve a page to ask and teach a model"
DESCRIPTION = """\
Serve a page and a JSON interface to ask a model about images, to see what it knows and stores, and to teach it new
classes. MODEL is a folder; it may be new, and is then created by what it is taught first.

The server listens to this machine alone. With --host it can be reached from others, and then needs a token.
"""


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=8000, metavar="N", help="port to listen at (default: 8000)")
    parser.add_argument(
        "--token", metavar="TEXT", help="secret that every request must have (default: the variable EFCIL_TOKEN)"
    )
    parser.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME", help="name of a proxy in front of the server"
    )
    parser.add_argument(
        "--unknown",
        type=_number("--unknown"),
        default=0.05,
        metavar="SHARE",
        help="call images unknown that are less typical than this share of the known ones (default: 0.05)",
    )
    add_option(parser, options(TrainingSettings)["device"])
    add_checkpoint_steps(parser)
    limits = parser.add_argument_group("limits")
    for flag, default, what in (
        ("--max-upload", 20, "megabytes of one image"),
        ("--max-pixels", 50, "megapixels of one image"),
        ("--max-images", 64, "images of one prediction"),
        ("--max-teaching-images", 1000, "images of one teaching"),
        ("--max-waiting", 512, "images that may wait to be scored"),
    ):
        limits.add_argument(
            flag, type=positive(flag), default=default, metavar="N", help=f"most {what} (default: {default})"
        )
    limits.add_argument(
        "--rate",
        type=_number("--rate"),
        default=100.0,
        metavar="N",
        help="most requests per second and client, 0 for any number (default: 100)",
    )
    limits.add_argument(
        "--timeout",
        type=_number("--timeout"),
        default=30.0,
        metavar="SECONDS",
        help="until a request must have arrived and been answered (default: 30)",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Serve until asked to stop."""
    let_threads_sleep()
    from efcil.serve.options import Limits, ServeOptions

    chosen = ServeOptions(
        folder=arguments.model.expanduser(),
        host=arguments.host,
        port=arguments.port,
        token=arguments.token or os.environ.get("EFCIL_TOKEN") or None,
        device=getattr(arguments, "device", "auto"),
        allowed_hosts=tuple(arguments.allowed_host),
        unknown=arguments.unknown,
        checkpoint_steps=arguments.checkpoint_steps,
        limits=Limits(
            upload_bytes=arguments.max_upload << 20,
            pixels=arguments.max_pixels * 1_000_000,
            images=arguments.max_images,
            teaching_images=arguments.max_teaching_images,
            rate=arguments.rate,
            queue=arguments.max_waiting,
            seconds=max(0.1, arguments.timeout),
        ),
    )
    try:
        import python_multipart  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SettingsError(f"`efcil serve` needs {error.name}. Install it with: pip install 'efcil[serve]'.") from None
    from efcil.serve.running import serve

    serve(chosen)
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or int(text[:9]) > 65535:
        raise SettingsError(f"--port must be a whole number from 0 to 65535, but it is {text[:20]!r}.")
    return int(text)


def _number(flag: str) -> Any:
    def check(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e9:
            raise SettingsError(f"{flag} must be a number of at least 0, but it is {text[:20]!r}.")
        return value

    return check
