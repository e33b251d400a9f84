"""The application: interface, page and guard around a service."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from efcil.errors import EfcilError, TrainingError
from efcil.files import RunFolderError
from efcil.serve import routes, uploads
from efcil.serve.guard import COOKIE, Guard, same, session
from efcil.serve.options import ServeOptions
from efcil.serve.refusal import Refused
from efcil.serve.service import Service

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
LONGEST_LOGIN, LOGIN_SECONDS = 4096, 10.0
#: How long a wrong token waits for its answer, so that guessing is slow.
WRONG_SECONDS = 1.0
_COOKIE_SECONDS = 30 * 86_400


def create_app(options: ServeOptions) -> Starlette:
    """Return the application of a server; it loads the model at once, and raises where it cannot."""
    service = Service(options)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        service.closing.set()
        await asyncio.to_thread(service.close)

    app = Starlette(
        routes=[
            *(Route(each.path, each.endpoint, methods=[each.method]) for each in routes.OPERATIONS),
            *(
                Route(path, _page(file), methods=["GET"])
                for path, file in (("/", "index.html"), ("/docs", "docs.html"))
            ),
            Route("/login", _page("login.html"), methods=["GET"]),
            Route("/login", _login, methods=["POST"]),
            Route("/page/{file}", _asset, methods=["GET"]),
        ],
        middleware=[Middleware(Guard, options=options, metrics=service.metrics)],
        exception_handlers={
            Refused: _refused,
            EfcilError: _mistake,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
            Exception: _unexpected,
        },
        lifespan=lifespan,
    )
    app.state.service = service
    app.state.document = routes.document()
    return app


def asset(name: str) -> bytes | None:
    """Return a file of the page, None where there is none of that name."""
    files = {file.name: file for file in resources.files("efcil.serve").joinpath("page").iterdir()}
    return files[name].read_bytes() if name in files and name.rpartition(".")[2] in KINDS else None


def _page(file: str) -> Any:
    async def page(_: Request) -> Response:
        return _file(file)

    return page


async def _asset(request: Request) -> Response:
    return _file(request.path_params["file"])


def _file(name: str) -> Response:
    content = asset(name)
    if content is None:
        raise Refused(404, "There is no such page.")
    return Response(content, media_type=KINDS[name.rpartition(".")[2]], headers={"Cache-Control": "no-cache"})


async def _login(request: Request) -> Response:
    """Set a cookie for someone who knows the token."""
    token = request.app.state.service.options.token
    content = await uploads.small(request, LONGEST_LOGIN, LOGIN_SECONDS)
    given = parse_qs(content.decode("utf-8", "replace")).get("token", [""])[0].strip()
    if token is not None and not same(given, token):
        await asyncio.sleep(WRONG_SECONDS)
        return RedirectResponse("/login#wrong", 303)
    response = RedirectResponse("/", 303)
    if token is not None:
        response.set_cookie(
            COOKIE,
            session(token),
            max_age=_COOKIE_SECONDS,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
    return response


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse({"error": str(error)}, error.status, error.headers)


async def _mistake(_: Request, error: Exception) -> Response:
    busy = isinstance(error, RunFolderError | TrainingError)
    return JSONResponse({"error": str(error)}, 409 if busy else 400)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentences = {
        404: "There is nothing here. /docs lists what can be asked for.",
        405: f"{request.method} is not possible here. /docs lists what can be asked for.",
    }
    return JSONResponse({"error": sentences.get(error.status_code, error.detail)}, error.status_code, error.headers)


async def _gone(_: Request, error: Exception) -> Response:
    """Answer someone who has left: nobody reads it, and it is no error of ours."""
    return JSONResponse({"error": "The connection was closed."}, 400)


async def _unexpected(_: Request, error: Exception) -> Response:
    traceback.print_exception(error)
    return JSONResponse({"error": f"Unexpected {type(error).__name__}. The server's log says more."}, 500)
