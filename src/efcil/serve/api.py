"""The endpoints. Each reads its request within the limits, asks the service, and answers JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from efcil import safe_json
from efcil.errors import EfcilError
from efcil.serve import uploads
from efcil.serve.jobs import Job
from efcil.serve.names import shown_file
from efcil.serve.refusal import Refused
from efcil.serve.service import Service, Upload

if TYPE_CHECKING:
    from starlette.requests import Request

DEFAULT_TOP = 5
#: Bytes of a change of classes.
LONGEST_CHANGE = 1 << 16
#: Seconds between two looks at a teaching that is followed, and between two signs of life.
LOOK_SECONDS, SIGN_SECONDS = 0.15, 15.0


def service_of(request: Request) -> Service:
    """Return the service that a request is for."""
    service: Service = request.app.state.service
    return service


async def predict(request: Request) -> Response:
    """Answer the likeliest classes of images."""
    service = service_of(request)
    top = _whole(request, "top", DEFAULT_TOP)
    share = _share(request, "unknown", service.options.unknown)
    service.loaded()
    try:
        async with asyncio.timeout(service.options.limits.seconds):
            with service.budget.lease() as take:
                found = await _images(request, service, take)
                return JSONResponse(await service.predict(found, top, share))
    except TimeoutError:
        raise Refused(504, "The answer took too long. Ask again, or with fewer images.") from None


async def _images(request: Request, service: Service, take: Callable[[int], None]) -> list[Upload]:
    limits = service.options.limits
    if not uploads.is_form(request):
        content = await uploads.raw(request, limits, take)
        if not content:
            raise Refused(400, "The request has no image. Send one as the body, or several in a form.")
        return [Upload(content, "The picture")]
    found: list[Upload] = []
    async for part in uploads.parts(request, limits, limits.images, limits.request_bytes, take):
        if part.is_file:
            found.append(Upload(part.content, shown_file(part.file, len(found) + 1)))
    if not found:
        raise Refused(400, "The form has no image. Send at least one file.")
    return found


async def model(request: Request) -> Response:
    """Describe the model."""
    return JSONResponse(await asyncio.to_thread(service_of(request).describe))


async def classes(request: Request) -> Response:
    """List what the model knows."""
    return JSONResponse(service_of(request).classes())


async def rename(request: Request) -> Response:
    """Give a class another name."""
    service, given = service_of(request), await _fields(request, name=str, to=str)
    return await _changed(service, lambda: service.rename(given["name"], given["to"]))


async def forget(request: Request) -> Response:
    """Forget classes."""
    service, given = service_of(request), await _fields(request, names=list)
    return await _changed(service, lambda: service.forget(given["names"]))


async def merge(request: Request) -> Response:
    """Make several classes one."""
    service, given = service_of(request), await _fields(request, names=list, into=str)
    return await _changed(service, lambda: service.merge(given["names"], given["into"]))


async def _changed(service: Service, change: Callable[[], None]) -> Response:
    try:
        await asyncio.to_thread(change)
    except Refused:
        raise
    except EfcilError as error:
        raise Refused(409, str(error)) from None
    return JSONResponse(service.classes())


async def _fields(request: Request, **kinds: type) -> dict[str, Any]:
    """Return the fields of a JSON body: text, or lists of text."""
    content = await uploads.small(request, LONGEST_CHANGE, service_of(request).options.limits.seconds)
    try:
        given = safe_json.parse(content.decode("utf-8"))
    except ValueError:
        given = None
    listed = f"{', '.join(kinds)}"
    if not isinstance(given, dict) or given.keys() != kinds.keys():
        raise Refused(400, f"Send a JSON object with these fields: {listed}.")
    for name, kind in kinds.items():
        texts = given[name] if kind is list else [given[name]]
        if not isinstance(given[name], kind) or not all(isinstance(each, str) for each in texts):
            raise Refused(400, f"{name} must be {'a list of names' if kind is list else 'a name'}.")
    return given


async def teach(request: Request) -> Response:
    """Begin a teaching."""
    service = service_of(request)
    limits = service.options.limits
    if not uploads.is_form(request):
        raise Refused(400, "Teaching takes a form (multipart/form-data): a field `class`, then its images.")
    try:
        async with asyncio.timeout(limits.teaching_seconds):
            most = limits.teaching_images * (limits.upload_bytes + uploads.LONGEST_FIELD)
            started = await service.teach(uploads.parts(request, limits, limits.teaching_images, most))
    except TimeoutError:
        raise Refused(408, "The pictures took too long to arrive. Nothing has been learned.") from None
    return JSONResponse(started.to_json(), 202, {"Location": f"/api/jobs/{started.id}"})


async def job(request: Request) -> Response:
    """Say how far a teaching is, once or until it ends."""
    service = service_of(request)
    found = service.jobs.get(request.path_params["id"])
    if "text/event-stream" in request.headers.get("accept", ""):
        return StreamingResponse(_events(service, found), media_type="text/event-stream")
    return JSONResponse(found.to_json())


async def _events(service: Service, followed: Job) -> AsyncIterator[str]:
    """Yield every change of a teaching until it has ended, or the server stops."""
    seen, silent = -1, 0.0
    while True:
        revision, running = followed.revision, followed.running
        if revision != seen:
            seen, silent = revision, 0.0
            yield f"data: {json.dumps(followed.to_json())}\n\n"
        elif silent > SIGN_SECONDS:
            silent = 0.0
            yield ": still here\n\n"
        if service.closing.is_set() or (not running and revision == followed.revision):
            return
        await asyncio.sleep(LOOK_SECONDS)
        silent += LOOK_SECONDS


async def stop(request: Request) -> Response:
    """Ask a teaching to stop."""
    service = service_of(request)
    found = service.jobs.get(request.path_params["id"])
    service.jobs.stop(found)
    return JSONResponse(found.to_json(), 202)


async def discard(request: Request) -> Response:
    """Discard the unfinished teaching."""
    service = service_of(request)
    await asyncio.to_thread(service.discard)
    return JSONResponse(await asyncio.to_thread(service.describe))


async def health(request: Request) -> Response:
    """Say whether the server works."""
    ready = service_of(request).keeper.current is not None
    return JSONResponse({"live": True, "ready": ready}, 200 if ready else 503)


async def metrics(request: Request) -> Response:
    """Return counters for Prometheus."""
    return PlainTextResponse(service_of(request).metrics.text(), media_type="text/plain; version=0.0.4")


async def openapi(request: Request) -> Response:
    """Return the OpenAPI document."""
    document: dict[str, Any] = request.app.state.document
    return JSONResponse(document)


def _whole(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not 1 <= int(text[:9]) <= 1_000_000:
        raise Refused(400, f"{name} must be a whole number, at least 1.")
    return int(text[:9])


def _share(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise Refused(400, f"{name} must be a share from 0 to 1.")
    return value
