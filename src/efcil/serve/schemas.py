"""The shapes of what the interface answers, as JSON Schema, for its OpenAPI document."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(description: str, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "required": [name for name, schema in properties.items() if not schema.get("x-optional")],
    }


def _text(description: str, *, null: bool = False, choices: tuple[str, ...] = ()) -> Schema:
    kind: Schema = {"type": ["string", "null"] if null else "string", "description": description}
    return kind | ({"enum": list(choices)} if choices else {})


def _number(description: str, *, null: bool = False, kind: str = "number") -> Schema:
    return {"type": [kind, "null"] if null else kind, "description": description}


def _whole(description: str, *, null: bool = False) -> Schema:
    return _number(description, null=null, kind="integer")


def _flag(description: str, *, null: bool = False) -> Schema:
    return {"type": ["boolean", "null"] if null else "boolean", "description": description}


def _list(items: Schema, description: str = "") -> Schema:
    return {"type": "array", "items": items, "description": description}


def ref(name: str) -> Schema:
    """Return a reference to one of the schemas below."""
    return {"$ref": f"#/components/schemas/{name}"}


_VERSION = _text("names this state of the model; changes with every teaching", null=True)

SCHEMAS: dict[str, Schema] = {
    "Error": _object("A request that was not answered.", error=_text("a sentence that says what to do")),
    "Prediction": {
        "description": "What the model says of one image, or why it cannot.",
        "anyOf": [
            _object(
                "The likeliest classes, best first.",
                classes=_list(_object("A class.", name=_text("its name"), probability=_number("from 0 to 1"))),
                typicality=_number(
                    "about the share of images of known classes that look as untypical as this one; null where the "
                    "method keeps no class statistics",
                    null=True,
                ),
                unknown=_flag("whether the typicality is below the chosen share", null=True),
            ),
            ref("Error"),
        ],
    },
    "Predictions": _object(
        "One prediction per image, in their order.", version=_VERSION, predictions=_list(ref("Prediction"))
    ),
    "Class": _object(
        "A class that the model knows.",
        name=_text("its name as text"),
        label={"description": "its label: text, a number, or what the model folder's page describes"},
        task=_whole("the task it was learned in, from 1"),
        images=_whole("how many images it was learned from"),
        learned=_text("when"),
        measured=_whole("how many images that were not learned from were tried when it was learned"),
        right=_whole("how many of these were right"),
    ),
    "Classes": _object("What the model knows.", version=_VERSION, classes=_list(ref("Class"))),
    "Measured": _object(
        "What images that were not learned from have shown at the end of a teaching.",
        way=_text("how they were kept from being learned: held out, in folds, or measured before"),
        right=_whole("how many got the right class"),
        images=_whole("how many there were"),
        among=_whole("among how many classes"),
    ),
    "Visit": _object(
        "One teaching.",
        kind=_text("task for new classes, more for more images of known ones; others change classes"),
        classes=_whole("how many classes"),
        images=_whole("how many images"),
        date=_text("when"),
        measured={"anyOf": [ref("Measured"), {"type": "null"}]},
    ),
    "Stored": _object(
        "Numbers of one purpose that the model stores.",
        title=_text("what they are"),
        use=_text("what they are for"),
        recovery=_text("what could be recovered from them"),
        tensors=_whole("how many tensors"),
        numbers=_whole("how many numbers"),
        bytes=_whole("how many bytes"),
        per_class=_number("numbers per class, null for what all classes share", null=True),
    ),
    "Unfinished": _object(
        "A teaching that was interrupted. Its pictures were not kept: send them again to resume, or discard it.",
        classes=_list(_text("name of a class")),
        saved=_flag("whether a checkpoint is there to resume from; else it starts over"),
        problem=_text("why it cannot be resumed", null=True),
    ),
    "Model": _object(
        "The model in use, and the limits of this server.",
        name=_text("name of its folder"),
        ready=_flag("whether it can be asked: it has learned something"),
        keeps_images=_flag("always false"),
        problem=_text("why the folder's present model is not in use", null=True),
        unfinished={"anyOf": [ref("Unfinished"), {"type": "null"}]},
        teaching=_text("the teaching that runs", null=True),
        unknown_below=_number("images that are less typical are called unknown"),
        limits=_object(
            "What a request may hold.",
            upload_bytes=_whole("bytes of an image"),
            pixels=_whole("pixels of an image"),
            images=_whole("images of a prediction"),
            request_bytes=_whole("bytes of all images of a prediction"),
            teaching_images=_whole("images of a teaching"),
        ),
        version=_VERSION,
        method=_text("its method", null=True),
        network=_text("its network", null=True),
        device=_text("where it runs", null=True),
        image_size=_whole("side of the images it sees", null=True),
        learns_more=_flag("whether it can learn more images of known classes", null=True),
        classes=_whole("how many classes it knows"),
        visits=_list(ref("Visit")),
        stored=_list(ref("Stored")),
        bytes=_whole("size of everything stored"),
    ),
    "Job": _object(
        "A teaching.",
        id=_text("its number"),
        state=_text(
            "how far it is", choices=("starting", "learning", "stopping", "loading", "done", "failed", "stopped")
        ),
        kind=_text("new classes, more images of known ones, or both", choices=("task", "more", "both")),
        classes=_list(_object("A class.", name=_text("its name"), images=_whole("how many images"))),
        progress=_number("from 0 to 1, null while that is not known", null=True),
        epoch=_whole("epochs done"),
        epochs=_whole("epochs in all", null=True),
        seconds_left=_number("an estimate", null=True),
        messages=_list(_text("a line")),
        error=_text("why it failed", null=True),
        started=_text("when it began"),
        ended=_text("when it ended", null=True),
        version=_text("the state of the model that came of it", null=True),
    ),
    "Health": _object(
        "Whether the server works.",
        live=_flag("it answers"),
        ready=_flag("it has a model that can be asked"),
    ),
}
