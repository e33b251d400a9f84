"""`efcil export`: a model for other programs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from efcil.commands.parser import STANDARD_OUTPUT, Parser
from efcil.errors import SettingsError, printable, unknown
from efcil.output import counted

if TYPE_CHECKING:
    from efcil.model.in_memory import Model

HELP = "write a model for other programs"
DESCRIPTION = (
    "Write a model as ONNX or as a torch.export archive, including normalisation and class names. The exported model "
    "takes uint8 images of the model's size. Its scores are checked against the original's."
)


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the model")
    parser.add_argument("--to", required=True, metavar="KIND", help="onnx or torch")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write (default: MODEL.onnx or MODEL.pt2); - writes to the standard output",
    )
    parser.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="also write a Python program that reads images as efcil does and asks the ONNX model, without efcil; - "
        "writes to the standard output",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Write the file."""
    from efcil.activity import doing
    from efcil.engine.progress import Waiting
    from efcil.model.export import SUFFIXES, export, exported, script_text, write_script
    from efcil.model.in_memory import Model

    if arguments.to not in SUFFIXES:
        raise unknown("kind of export", arguments.to, SUFFIXES)
    if arguments.script is not None and arguments.to != "onnx":
        raise SettingsError("--script writes a program for ONNX models. Add --to onnx, or leave --script out.")
    streamed = arguments.output == STANDARD_OUTPUT
    if streamed and sys.stdout.isatty():
        raise SettingsError(
            "An exported model is no text for a terminal. Give a file with --output, or redirect the standard output."
        )
    folder: Path = arguments.model.expanduser()
    model = Model.load(folder, device="cpu")
    file = arguments.output or folder.absolute().with_name(folder.absolute().name + SUFFIXES[arguments.to])
    script = None if arguments.script is None else arguments.script.expanduser()
    printed = script == STANDARD_OUTPUT
    if script is not None:
        refuse_own(folder, script, "--script")
        if script.absolute() == file.absolute():
            place = "The standard output" if printed else printable(file)
            raise SettingsError(f"{place} would be both the model and the program. Choose another --script.")
    said = Waiting(lambda line: print(line, file=sys.stderr, flush=True))
    if streamed:
        with said, doing("exporting"):
            content, difference = exported(model, arguments.to)
        sys.stdout.buffer.write(content)
        print(_said("standard output", model, difference), file=sys.stderr)
    else:
        refuse_own(folder, file)
        with said, doing("exporting"):
            difference = export(model, arguments.to, file)
        print(_said(printable(file), model, difference), file=sys.stderr if printed else sys.stdout)
    if printed:
        sys.stdout.write(script_text())
    elif script is not None:
        write_script(script)
    return 0


def _said(place: str, model: Model, difference: float) -> str:
    return f"{place}: {counted(len(model.card.classes), 'class')}, at most {difference:.1e} from the original."


def refuse_own(folder: Path, file: Path, flag: str = "--output") -> None:
    """Refuse to overwrite a file of the model itself."""
    from efcil.engine import checkpoint
    from efcil.model import ModelError
    from efcil.model.folder import STEM

    if checkpoint.owns(file.name, STEM) and file.parent.resolve() == folder.resolve():
        raise ModelError(f"{file} is a file of the model itself. Choose another {flag}.")
