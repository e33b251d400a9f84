"""`efcil export`: a model for other programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from efcil.commands.parser import Parser
from efcil.errors import printable, unknown

HELP = "write a model for other programs"
DESCRIPTION = (
    "Write a model as ONNX or as a torch.export archive, including normalisation and class names. The exported model "
    "takes uint8 images of the model's size. Its scores are checked against the original's."
)


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    parser.add_argument("--to", required=True, metavar="KIND", help="onnx or torch")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write (default: MODEL.onnx or MODEL.pt2)")


def execute(arguments: argparse.Namespace) -> int:
    """Write the file."""
    from efcil.model.export import SUFFIXES, export
    from efcil.model.in_memory import Model

    if arguments.to not in SUFFIXES:
        raise unknown("kind of export", arguments.to, SUFFIXES)
    folder: Path = arguments.model.expanduser()
    model = Model.load(folder, device="cpu")
    file = arguments.output or folder.absolute().with_name(folder.absolute().name + SUFFIXES[arguments.to])
    refuse_own(folder, file)
    difference = export(model, arguments.to, file)
    print(f"{printable(file)}: {len(model.card.classes)} classes, at most {difference:.1e} from the original.")
    return 0


def refuse_own(folder: Path, file: Path) -> None:
    """Refuse to overwrite a file of the model itself."""
    from efcil.engine import checkpoint
    from efcil.model import ModelError
    from efcil.model.folder import STEM

    if checkpoint.owns(file.name, STEM) and file.parent.resolve() == folder.resolve():
        raise ModelError(f"{file} is a file of the model itself. Choose another --output.")
