"""`efcil run`: train the grid that the command line and the settings file describe."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from efcil import ranks
from efcil.commands.engines import add_flags, add_print_commands, chosen, commands, train
from efcil.commands.parser import (
    Parser,
    add_checkpoint_steps,
    add_debug,
    add_jobs_per_gpu,
    add_log,
    add_option,
    take_wrong,
    trackers,
    varied,
)
from efcil.errors import ABBREVIATIONS, GridError, Mistakes, SettingsError, unknown
from efcil.resolution import chosen_class_order, expand, read_config, validate
from efcil.resolution.config import VARY_KEY, is_record
from efcil.resolution.identity import class_order_identity
from efcil.resolution.unused import refuse_unused, without_unused
from efcil.settings import Recipe, Settings, options
from efcil.settings.benchmark import NAMED_CLASS_ORDERS, TASK_SETTINGS
from efcil.settings.engine import Engine
from efcil.settings.recipe import STAGES

DEFAULT_METHODS = ["efc", "finetune"]
#: Flags that describe a whole scenario, and all that belong to one.
_SCENARIO = frozenset({"scenario", "tasks", "task_sizes"})
_OF_SCENARIO = ("scenario", *TASK_SETTINGS)

HELP = "train methods on a stream of tasks"
DESCRIPTION = """\
Train methods on a stream of tasks and print their accuracy. Options that take several values make a grid: every
combination is one run. Without any option, EFC and fine-tuning learn the bundled digits in five tasks.

Finished runs are skipped and unfinished ones resumed, so the same command can be repeated at any time.
"""


def add_arguments(parser: Parser) -> None:
    """Add the flags, which are made from the fields of Settings."""
    known = options(Settings)
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(o.group for o in known.values())}
    for option in known.values():
        if option.name == "method":
            option = dataclasses.replace(option, default=" ".join(DEFAULT_METHODS))
        add_option(groups[option.group], option)
        if option.name == "overrides":
            groups[option.group].add_argument(
                "--vary",
                nargs="+",
                action="extend",
                default=[],
                metavar="NAME=VALUE",
                help="The same with several values each (efm_weight=1 5 10): every combination is one run.",
            )
    work = parser.add_argument_group("this command")
    work.add_argument("--config", metavar="FILE", type=Path, help="settings file (YAML); flags override what it says")
    work.add_argument("--output", metavar="DIR", type=Path, default=Path("runs"), help="where runs go (default: runs)")
    work.add_argument("--dry-run", action="store_true", help="print every run and its expected time, and train nothing")
    add_jobs_per_gpu(work)
    add_flags(work)
    add_print_commands(work)
    add_checkpoint_steps(work)
    add_log(work)
    work.add_argument("--quiet", action="store_true", help="print only the final table, and which runs are out of date")
    parser.set_defaults(names_all_mistakes=True)


def execute(arguments: argparse.Namespace) -> int:
    """Check every run of the grid, train them, and print the table."""
    settings = plan(arguments)
    log = trackers(arguments)
    if arguments.dry_run or arguments.print_commands:
        _refuse_other_data(settings)
        _refuse_other_tasks(settings)
    if arguments.print_commands:
        print(*commands(settings, arguments, log, planned), sep="\n")
        return 0
    engine = chosen(arguments)
    with ranks.joined():
        return _train(arguments, settings, log, engine)


def _refuse_other_data(settings: Sequence[Settings]) -> None:
    """Refuse a place that holds another dataset, where that would be found out only by what is trained later."""
    from efcil.data.sources import find_source

    found = Mistakes()
    for dataset, data in dict.fromkeys((each.dataset, each.data) for each in settings):
        if data is not None:
            with found.caught():
                find_source(dataset).recognise(Path(data))
    found.refuse("; nothing has been trained")


def _refuse_other_tasks(settings: Sequence[Settings]) -> None:
    """Refuse tasks and class orders that a dataset cannot have, where its number of classes is published."""
    from efcil.studies.estimate import task_sizes

    found = Mistakes()
    for each in settings:
        with found.caught():
            task_sizes(each)
    found.refuse("; nothing has been trained")


def _train(arguments: argparse.Namespace, settings: list[Settings], log: Sequence[str], engine: Engine | None) -> int:
    # Imported last: training needs torch, and without it mistakes are reported faster.
    from efcil.report import render, table
    from efcil.runfolder import RunFolder

    if arguments.dry_run:
        from efcil.studies.plan import described

        print(described(settings, arguments.output, arguments.jobs_per_gpu))
        return 0
    failure: GridError | None = None
    try:
        paths = train(settings, arguments, log, engine)
    except GridError as error:  # the table still shows the runs that finished
        failure, paths = error, error.paths
    if not ranks.first():  # that one reads the results, and says what failed
        return 0
    runs = [RunFolder(path) for path in paths]
    if failure is None or any(run.summary_file.exists() for run in runs):
        print(render(table(runs), "text", width=shutil.get_terminal_size((80, 24)).columns), end="")
    if failure is not None:
        raise failure
    failed = [run for run in runs if not run.summary_file.exists()]
    if failed or len(runs) < len(settings):
        count = len(failed) + len(settings) - len(runs)
        print(
            f"efcil: {count} of {len(settings)} runs did not finish; the reason is in their log.txt.", file=sys.stderr
        )
        return 1
    return 0


def planned(words: list[str]) -> list[Settings]:
    """Return the runs that the words after `efcil run` ask for."""
    parser = Parser(prog="efcil run")
    add_arguments(parser)
    add_debug(parser)
    return plan(parser.parse_args(words))


def plan(arguments: argparse.Namespace) -> list[Settings]:
    """Return the validated runs that a command line asks for; all mistakes in it are named, each once."""
    found = Mistakes()
    grid: list[Settings] = []
    with found.caught():
        grid = share_overrides(expand(_described(arguments, found)))
        grid = _with_seeds_of_use(grid, hasattr(arguments, "class_seed"))
    in_grid = Mistakes()
    runs = _validated(grid, in_grid)
    for error in in_grid.errors:
        alone = len(grid) > 1 and not found and len(in_grid.errors) == 1
        found.add(type(error)(f"{error} (Nothing has been trained.)") if alone else error)
    found.refuse("; nothing has been trained")
    typed = _typed(arguments)
    refuse_unused(runs, typed)
    # Settings that only other runs of the grid use are left out.
    return _distinct([without_unused(run, typed) for run in runs])


def _described(arguments: argparse.Namespace, found: Mistakes) -> dict[str, Any]:
    """Return the grid that the settings file and the flags describe; what cannot be read is added to the mistakes."""
    values: dict[str, Any] = {}
    several: dict[str, list[str]] = {}
    with found.caught():
        values = read_config(arguments.config) if arguments.config is not None else {}
    with found.caught():
        several = varied(arguments.vary)
    flags = {name: getattr(arguments, name) for name in options(Settings) if hasattr(arguments, name)}
    given = take_wrong(flags, found)
    overrides = dict(given.pop("overrides", ()))
    in_file, several_in_file = values.pop("overrides", {}), values.pop(VARY_KEY, {})
    if not _SCENARIO.isdisjoint(flags):
        # The command line describes the scenario, so the file's description of the scenario no longer applies.
        values = _without(values, _OF_SCENARIO)
    if any(name in flags and name not in given for name in _OF_SCENARIO):
        given = _without(given, _OF_SCENARIO)  # half of a description would be another mistake
    values = {"method": list(DEFAULT_METHODS), **values, **given}
    values["overrides"] = {**_without(in_file, several), **overrides}
    values[VARY_KEY] = {**_without(several_in_file, overrides), **several}
    if values.get("data") is not None:
        values["data"] = _data_path(values)
    if values.get("class_list") is not None:
        values["class_list"] = _class_orders(values["class_list"])
    if "class_order" in values:
        values["class_order"] = _class_orders(values["class_order"])
    return values


def _typed(arguments: argparse.Namespace) -> set[str]:
    """Return the names of the overrides that the user has written, now or in a settings file."""
    names = {name for name, _ in getattr(arguments, "overrides", ())} | set(varied(arguments.vary))
    if arguments.config is not None and not is_record(arguments.config):
        in_file = read_config(arguments.config)
        names |= {*in_file.get("overrides", {}), *in_file.get(VARY_KEY, {})}
    return names


def _without(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _distinct(runs: Sequence[Settings]) -> list[Settings]:
    """Return every run once: a varied setting may have no effect with some methods or some other settings."""
    from efcil.runfolder import locate

    distinct: dict[Path, Settings] = {}
    for run in runs:
        other = distinct.setdefault(locate(Path(), run).path, run)
        orders = [chosen_class_order(each) for each in (other, run)]
        if class_order_identity(orders[0]) != class_order_identity(orders[1]):
            raise SettingsError(
                f"The class orders {orders[0]} and {orders[1]} would share one folder, which is named "
                "after the file alone. Give the files different names."
            )
    return list(distinct.values())


def share_overrides(grid: Sequence[Settings]) -> list[Settings]:
    """Give each run those settings of methods that its own method has.

    `--method efc finetune --set efm_weight=5` changes EFC only. A setting that none of the methods has is kept, so
    that it is reported as unknown.
    """
    from efcil import methods

    available = methods.available()
    fields = {name: set(options(cls.Settings)) for name, cls in available.items()}
    in_grid = {settings.method for settings in grid}
    elsewhere = set().union(*(fields.get(method, set()) for method in in_grid))
    shared = []
    for settings in grid:
        mine = fields.get(settings.method, set())
        others = [name for name in settings.overrides if name not in mine and name in elsewhere]
        shared.append(dataclasses.replace(settings, overrides=_without(settings.overrides, others)))
    return shared


def _validated(grid: Sequence[Settings], found: Mistakes) -> list[Settings]:
    """Return the runs, checked; what is wrong with several of them is one mistake."""
    names = _known_to_none(grid, found)
    checked = []
    for settings in grid:
        with found.caught():
            checked.append(validate(dataclasses.replace(settings, overrides=_without(settings.overrides, names))))
    return checked


def _known_to_none(grid: Sequence[Settings], found: Mistakes) -> list[str]:
    """Return the overrides that none of several methods has: one mistake, not one for every method."""
    from efcil import methods

    in_grid = [name for name in dict.fromkeys(run.method for run in grid) if name in methods.available()]
    if len(in_grid) < 2:
        return []
    fields = set().union(*(options(methods.get(name).Settings) for name in in_grid))
    given = dict.fromkeys(name for run in grid for name in run.overrides)
    # What belongs elsewhere is explained where settings are resolved, in the same words for all methods.
    elsewhere = {*fields, *options(Settings), *options(Recipe), *ABBREVIATIONS, *STAGES}
    names = [name for name in given if "." not in name and name not in elsewhere]
    for name in names:
        found.add(unknown(f"setting of {', '.join(in_grid)}:", name, fields))
    return names


def _with_seeds_of_use(runs: Sequence[Settings], typed: bool) -> list[Settings]:
    """Return the runs without the seed of the class order (`typed` in the command) if that order needs none."""
    if not typed:
        return list(runs)
    shuffled = [chosen_class_order(run) == "efc" for run in runs]
    if not any(shuffled):
        raise SettingsError(
            f"Setting 'class_seed' has no effect: the class order {chosen_class_order(runs[0])} is always the same. "
            "Leave it out, or use the class order efc."
        )
    kept = zip(runs, shuffled, strict=True)
    return [run if shuffle else dataclasses.replace(run, class_seed=None) for run, shuffle in kept]


def _class_orders(named: Any) -> Any:
    """Return class orders or lists with the files among them absolute: settings.yaml works from any folder."""
    if isinstance(named, list):
        return [_class_orders(each) for each in named]
    if not isinstance(named, str) or named in NAMED_CLASS_ORDERS or not Path(named).expanduser().is_file():
        return named
    return str(Path(named).expanduser().absolute())


def _data_path(values: dict[str, Any]) -> str:
    datasets = values.get("dataset", Settings().dataset)
    if isinstance(datasets, list) and len(set(datasets)) > 1:
        raise SettingsError(
            f"--data names one place, but there are several datasets ({', '.join(datasets)}). "
            "Run them one after the other, each with its own --data."
        )
    # Absolute, so that settings.yaml works from any folder.
    return str(Path(values["data"]).expanduser().absolute())
