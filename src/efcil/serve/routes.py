"""The interface as one table, from which both the application and its OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import efcil
from efcil.serve import api
from efcil.serve.schemas import SCHEMAS, Schema, ref

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Endpoint = Callable[["Request"], Awaitable["Response"]]

_IMAGE: Schema = {"type": "string", "format": "binary"}
_ONE_IMAGE = {name: {"schema": _IMAGE} for name in ("image/*", "application/octet-stream")}
_SENTENCES = {
    400: "The request is wrong.",
    401: "The token is missing or wrong.",
    403: "The request comes from another page.",
    404: "There is no such thing.",
    408: "The body arrived too slowly.",
    409: "The model is not in a state for this.",
    413: "Too large, or too many images.",
    421: "The server does not answer to this name.",
    422: "An image cannot be read.",
    429: "Too many requests; see Retry-After.",
    503: "Too much waits already; see Retry-After.",
    504: "The answer took too long.",
}
_ALWAYS = (401, 421, 429)


@dataclass(frozen=True)
class Operation:
    """One thing that can be asked for: where, what it takes, what it answers."""

    method: str
    path: str
    endpoint: Endpoint
    summary: str
    #: Name of the schema of the answer, None for plain text or nothing.
    answers: str | None
    description: str = ""
    status: int = 200
    kind: str = "application/json"
    parameters: tuple[Mapping[str, Any], ...] = ()
    body: Mapping[str, Any] | None = None
    errors: tuple[int, ...] = field(default=())

    def to_openapi(self) -> dict[str, Any]:
        """Return its entry in the document."""
        schema = {"type": "string"} if self.answers is None else ref(self.answers)
        content = {} if self.status == 204 else {"content": {self.kind: {"schema": schema}}}
        responses: dict[str, Any] = {str(self.status): {"description": self.summary, **content}}
        for status in sorted({*self.errors, *_ALWAYS}):
            responses[str(status)] = {
                "description": _SENTENCES[status],
                "content": {"application/json": {"schema": ref("Error")}},
            }
        entry: dict[str, Any] = {
            "operationId": self.endpoint.__name__,
            "summary": self.summary,
            "description": self.description,
            "responses": responses,
        }
        if self.parameters:
            entry["parameters"] = [dict(each) for each in self.parameters]
        if self.body is not None:
            entry["requestBody"] = {"required": True, "content": dict(self.body)}
        return entry


def _parameter(name: str, where: str, schema: Schema, description: str) -> Mapping[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": schema, "description": description}


def _fields(**properties: Schema) -> Mapping[str, Any]:
    return {"application/json": {"schema": {"type": "object", "required": list(properties), "properties": properties}}}


_NAME: Schema = {"type": "string", "maxLength": 80}
_NAMES: Schema = {"type": "array", "items": _NAME}
_JOB = _parameter("id", "path", {"type": "string"}, "the teaching's id")

OPERATIONS = (
    Operation(
        "POST", "/api/predict", api.predict, "The likeliest classes of images", "Predictions",
        description="Send one image as the body, or several in a form. An image that cannot be read gets a sentence "
        "in its place, unless none of them can.",
        parameters=(
            _parameter("top", "query", {"type": "integer", "minimum": 1, "default": 5}, "how many classes"),
            _parameter("unknown", "query", {"type": "number", "minimum": 0, "maximum": 1}, "the share below which "
                       "an image is called unknown"),
        ),
        body={
            "multipart/form-data": {
                "schema": {"type": "object", "properties": {"image": {"type": "array", "items": _IMAGE}}}
            },
            **_ONE_IMAGE,
        },
        errors=(400, 403, 408, 409, 413, 422, 503, 504),
    ),
    Operation("GET", "/api/model", api.model, "The model in use", "Model"),
    Operation("GET", "/api/classes", api.classes, "What the model knows", "Classes"),
    Operation(
        "POST", "/api/teach", api.teach, "Begin a teaching", "Job", status=202,
        description="A form in which a field `class` names the class of the images after it. New names are a task of "
        "new classes, known names are more images of these; both may come together. Predictions come "
        "from the old model until the new one takes over. With `discard` an unfinished teaching is discarded.",
        body={
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["class", "image"],
                    "properties": {
                        "class": {"type": "array", "items": {"type": "string", "maxLength": 80}},
                        "image": {"type": "array", "items": _IMAGE},
                        "discard": {"type": "boolean"},
                    },
                }
            }
        },
        errors=(400, 403, 408, 409, 413, 422, 503),
    ),
    Operation(
        "GET", "/api/jobs/{id}", api.job, "How far a teaching is", "Job", parameters=(_JOB,), errors=(404,),
        description="With `Accept: text/event-stream`, every change as a server-sent event until it has ended.",
    ),
    Operation(
        "DELETE", "/api/jobs/{id}", api.stop, "Ask a teaching to stop", "Job", parameters=(_JOB,), status=202,
        errors=(403, 404),
        description="It saves its state first, to be resumed with the same pictures; asked twice, it stops at once.",
    ),
    Operation(
        "DELETE", "/api/unfinished", api.discard, "Discard the unfinished teaching", "Model", errors=(403, 409),
    ),
    Operation(
        "POST", "/api/classes/rename", api.rename, "Give a class another name", "Classes",
        body=_fields(name=_NAME, to=_NAME), errors=(400, 403, 408, 409, 413),
    ),
    Operation(
        "POST", "/api/classes/forget", api.forget, "Forget classes", "Classes",
        description="All that is stored about these classes alone is removed; what all classes share stays.",
        body=_fields(names=_NAMES), errors=(400, 403, 408, 409, 413),
    ),
    Operation(
        "POST", "/api/classes/merge", api.merge, "Make several classes one", "Classes",
        body=_fields(names=_NAMES, into=_NAME), errors=(400, 403, 408, 409, 413),
    ),
    Operation("GET", "/health", api.health, "Whether the server works", "Health",
              description="The same with status 503 as long as there is no model that can be asked."),
    Operation("GET", "/metrics", api.metrics, "Counters for Prometheus", None, kind="text/plain"),
    Operation("GET", "/openapi.json", api.openapi, "This document", None),
)  # fmt: skip


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method.lower()] = each.to_openapi()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "efcil serve",
            "version": efcil.__version__,
            "description": "A classifier of images that learns new classes and keeps no image.",
        },
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }
