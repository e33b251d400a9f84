"""The `efcil` command: finds the sub-command, and turns errors into sentences and exit codes.

Exit codes: 0 done; 1 a run failed; 2 a mistake in the command, the settings or the data; 130 interrupted.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from efcil import ranks
from efcil.commands.build import build_parser
from efcil.commands.parser import refuse_wrong
from efcil.errors import EfcilError, GridError, SettingsError, TrainingError, closest
from efcil.output import lines, printable_warnings

FAILED, MISTAKE, INTERRUPTED = 1, 2, 130
#: Errors of disks and file systems: full, over quota, failing, read-only, gone.
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EFBIG}
#: By format, how bytes of a file name that are not text are written: JSON escapes them, CSV keeps the bytes.
_UNDECODABLE = {"json": "backslashreplace", "csv": "surrogateescape"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the run
    try:
        with printable_warnings():
            code = _dispatch(given)
        sys.stdout.flush()  # here, where a closed pipe is still handled
        return code
    except KeyboardInterrupt as interruption:
        # The message of a command that can be resumed says how.
        return INTERRUPTED if ranks.launched().rank else _fail(str(interruption) or "Interrupted.", INTERRUPTED)
    except BrokenPipeError:
        # The reader of the pipe (`| head`) has closed it; nothing more can be printed, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if "--debug" in given:
            traceback.print_exc()
        if isinstance(error, ranks.Lost) and ranks.launched().rank > 0:
            return FAILED  # the first process says so, or the one that has ended
        if isinstance(error, ranks.Followed | SettingsError) and ranks.launched().rank > 0:
            ranks.leave_silently()  # the first process makes the same mistake, or says what has happened
            return MISTAKE if isinstance(error, SettingsError) else FAILED
        if isinstance(error, TrainingError) and not (isinstance(error, GridError) and error.mistake):
            return _fail(str(error), FAILED)
        if isinstance(error, EfcilError):
            return _fail(str(error), MISTAKE)
        if isinstance(error, PermissionError) and error.filename is not None:
            advice = "Change its permissions, or those of its folder."
            return _fail(f"{error.filename} cannot be opened ({error.strerror}). {advice}", MISTAKE)
        if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            place = error.filename if error.filename is not None else "A file"
            advice = "Fix the cause, and run the same command again."
            return _fail(f"{place} cannot be read or written ({error.strerror}). {advice}", FAILED)
        advice = "" if "--debug" in given else " Add --debug to see where."
        said = f": {error}" if str(error) else ""
        return _fail(f"Unexpected {type(error).__name__}{said.rstrip('.')}.{advice}", FAILED)


def command() -> NoReturn:
    """Run the command line as a process of its own, and end it.

    Python collects garbage once more when it ends, which takes a third of a second with torch: nothing is left to do.
    Triton, where it was loaded, would print what is not collected.

    A process of several ends at once: a thread of torch.distributed may still be releasing the tensor of the last
    message, and the process would be aborted if Python was ending by then.
    """
    code = main()
    if ranks.launched().size > 1:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    if "triton" not in sys.modules:
        gc.freeze()
    sys.exit(code)


def flags() -> list[str]:
    """Return every flag of every sub-command, one per line, such as `run --seed`; a test keeps this list as it is."""
    parser, commands = build_parser()
    own = [f"efcil {flag}" for flag in parser.flags]
    return own + [f"efcil {name} {flag}" for name in sorted(commands) for flag in commands[name].flags]


def _dispatch(given: list[str]) -> int:
    parser, commands = build_parser()
    command = next((argument for argument in given if not argument.startswith("-")), None)
    if command is not None and command not in commands:
        raise SettingsError(f"There is no command {command!r}.{closest(command, commands)}")
    try:
        arguments, unknown = parser.parse_known_args(given)
    except SystemExit as leaving:  # --help and --version have printed their text
        return leaving.code if isinstance(leaving.code, int) else 0
    if unknown:
        commands.get(arguments.command, parser).refuse(unknown)
    if arguments.command is None:
        parser.print_help()
        return 0
    if arguments.command != "run" and ranks.launched().size > 1:
        raise SettingsError(f"`efcil {arguments.command}` works in one process. Start it without torchrun.")
    if not getattr(arguments, "names_all_mistakes", False):
        refuse_wrong(arguments)
    _prepare_output(getattr(arguments, "format", ""))
    code: int = arguments.execute(arguments)
    return code


def _open_closed_streams() -> None:
    """Give a process started with closed streams (`>&-`) new ones; else the first file it opens would replace them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open as long as the process


def _prepare_output(form: str) -> None:
    """Write output for programs as UTF-8, whatever the terminal uses, and keep file names that are not valid text."""
    if form in _UNDECODABLE and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors=_UNDECODABLE[form])


def _fail(message: str, code: int) -> int:
    sys.stdout.flush()
    rank = ranks.launched().rank
    print(f"efcil{f' (rank {rank})' if rank else ''}: " + lines(message), file=sys.stderr)
    return code
