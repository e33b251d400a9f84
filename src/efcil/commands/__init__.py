"""The sub-commands. A module has the name of its command, HELP (a line), DESCRIPTION, `add_arguments(parser)`, and
`execute(arguments)`, which does the work and returns the exit code.

Adding a command is one module and its name in COMMANDS. Modules import torch and data libraries only inside
`execute`, so that help and error messages appear fast.
"""

from __future__ import annotations

from efcil.commands import (
    audit,
    card,
    check,
    completion,
    data,
    evaluate,
    export,
    forget,
    inspect,
    learn,
    merge,
    methods,
    paper,
    predict,
    rename,
    report,
    run,
    serve,
    watch,
)

COMMANDS = (
    run,
    watch,
    report,
    paper,
    learn,
    predict,
    evaluate,
    serve,
    inspect,
    rename,
    forget,
    merge,
    card,
    export,
    audit,
    methods,
    check,
    data,
    completion,
)
