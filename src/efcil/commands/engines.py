"""The flags that choose where runs train, and the commands for clusters that `efcil run` does not know."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from efcil.commands.parser import one_of, pair
from efcil.errors import SettingsError
from efcil.settings import Settings, options
from efcil.settings.engine import ENGINES, LOCAL, Engine
from efcil.settings.options import show

#: Settings that every printed command has, so that a reader sees what runs.
_ALWAYS = ("method", "dataset", "scenario", "seed")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
#: Variables that are lists of paths; a network of one's own may be found by the second.
_PATHS = ("EFCIL_METHODS", "PYTHONPATH")


def add_flags(work: argparse._ActionsContainer) -> None:
    """Add the flags that choose an engine."""
    work.add_argument(
        "--engine",
        metavar="ENGINE",
        type=one_of("engine", ENGINES),
        default=LOCAL,
        help="what trains the runs: local (this machine, the default), ray, slurm, or submitit-local (for tests)",
    )
    work.add_argument("--address", metavar="HOST:PORT", help="the Ray cluster (default: the one of this machine)")
    work.add_argument(
        "--engine-option",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        type=lambda text: pair(text, "--engine-option", "partition=gpu"),
        help="options of the engine, such as partition=gpu time=60 gpus_per_node=1 (slurm) or num_cpus=4 (ray)",
    )


def add_print_commands(work: argparse._ActionsContainer) -> None:
    """Add the flag for clusters that no engine is for."""
    work.add_argument(
        "--print-commands",
        action="store_true",
        help="print a shell command for every run, to start on any cluster, and train nothing",
    )


def chosen(arguments: argparse.Namespace) -> Engine | None:
    """Return the engine that a command line asks for, None for this machine."""
    engine = Engine(arguments.engine, arguments.address, dict(arguments.engine_option))
    return None if engine.name == LOCAL else engine


def train(
    settings: list[Settings], arguments: argparse.Namespace, log: Sequence[str], engine: Engine | None
) -> list[Path]:
    """Train a grid as the command line asks for it, and return the folders of its runs."""
    from efcil.experiment import run_grid

    return run_grid(
        settings,
        arguments.output,
        jobs_per_gpu=arguments.jobs_per_gpu,
        quiet=arguments.quiet,
        checkpoint_steps=arguments.checkpoint_steps,
        debug=getattr(arguments, "debug", False),
        log=log,
        engine=engine,
    )


def commands(
    settings: Sequence[Settings],
    arguments: argparse.Namespace,
    log: Sequence[str],
    read: Callable[[list[str]], list[Settings]],
) -> list[str]:
    """Return a shell command for each run. `read` returns the runs that the arguments of `efcil run` ask for."""
    if arguments.engine != LOCAL or arguments.jobs_per_gpu is not None:
        flag = "--jobs-per-gpu" if arguments.engine == LOCAL else "--engine"
        raise SettingsError(f"--print-commands prints one command per run, so {flag} has no effect. Leave it out.")
    rest = ["--output", str(arguments.output.expanduser().absolute())]
    if arguments.checkpoint_steps is not None:
        rest += ["--checkpoint-steps", str(arguments.checkpoint_steps)]
    if log:
        rest += ["--log", *log]
    rest += [f"--{name}" for name in ("quiet", "debug") if getattr(arguments, name, False)]
    found = []
    for each in settings:
        flags = as_flags(each)
        if read([*flags, *rest]) != [_absolute(each)]:
            raise SettingsError(
                f"The settings of {each.method} with seed {each.seed} cannot be written as a command. Use --config."
            )
        found.append(shlex.join([*_variables(), sys.executable, "-m", "efcil", "run", *flags, *rest]))
    return found


def as_flags(settings: Settings) -> list[str]:
    """Return the flags that describe a run: what it is, and what differs from the defaults."""
    words: list[str] = []
    settings = _absolute(settings)
    for name, option in options(Settings).items():
        value = getattr(settings, name)
        if name == "overrides":
            if value:
                words += [option.flags, *(f"{key}={show(each)}" for key, each in value.items())]
        elif isinstance(value, bool):
            if value != option.default:
                words.append(option.flags if value else option.flags.replace("--", "--no-", 1))
        elif name in _ALWAYS or value != option.default:
            words += [option.flags, show(value)]
    return words


def _absolute(settings: Settings) -> Settings:
    """Return settings without relative paths; those of images and class orders are absolute already."""
    weights = settings.weights
    if weights is None or not Path(weights).expanduser().is_file():
        return settings
    return dataclasses.replace(settings, weights=str(Path(weights).expanduser().absolute()))


def _variables() -> list[str]:
    """Return the variables that a run depends on, as words of a command."""
    from efcil.experiment.executors.cluster import OWN_VARIABLES

    found = {name: os.environ[name] for name in (*_THREADS, *OWN_VARIABLES, "PYTHONPATH") if os.environ.get(name)}
    for name in _PATHS:
        if name in found:
            found[name] = os.pathsep.join(str(Path(part).absolute()) for part in found[name].split(os.pathsep) if part)
    return ["env", *(f"{name}={value}" for name, value in found.items())] if found else []
