"""`efcil paper`: the tables and figures of the EFC paper, each by one command, ours beside the paper's."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from efcil.commands.engines import add_flags, chosen, train
from efcil.commands.parser import Parser, add_checkpoint_steps, add_jobs_per_gpu, add_log, read_seeds, trackers
from efcil.errors import EfcilError, GridError, Mistakes, SettingsError, printable, unknown
from efcil.output import counted

if TYPE_CHECKING:
    from efcil.settings import Settings
    from efcil.settings.engine import Engine
    from efcil.studies.measures import Measured
    from efcil.studies.plan import Hardware, Planned
    from efcil.studies.study import Cell, Study

HELP = "make a table or figure of the EFC paper, ours beside the paper's"
DESCRIPTION = """\
List the studies of the EFC paper, or make some: their runs are planned and trained, and the results are printed and
written below OUTPUT/paper, ours beside the paper's. Finished runs are skipped and unfinished ones resumed, so the same
command can be repeated at any time. STUDY may also be a YAML file of your own. Studies that are made together are one
grid, and train what they share once.

The result always shows the whole study on the chosen datasets; --scenario, --method and --seeds choose what is trained.
"""
ALL = "all"


def add_arguments(parser: Parser) -> None:
    """Add the arguments and flags."""
    parser.add_argument(
        "study", nargs="*", metavar="STUDY", help=f"names of studies, YAML files, or {ALL}; none: list them"
    )
    what = parser.add_argument_group("what to train")
    what.add_argument("--dataset", nargs="+", action="extend", metavar="NAME", help="datasets (default: the first)")
    what.add_argument(
        "--data", metavar="DIR", help="file or folder of the dataset; see `efcil data` for where to get it"
    )
    what.add_argument("--scenario", nargs="+", action="extend", metavar="NAME", help="only these scenarios")
    what.add_argument("--method", nargs="+", action="extend", metavar="NAME", help="only these methods or rows")
    what.add_argument(
        "--seeds",
        "--seed",
        nargs="+",
        action="extend",
        metavar="N",
        help="seeds, such as 0-4 or 0 1 2 (default: the study's)",
    )
    what.add_argument(
        "--fast", action="store_true", help="a short schedule and one seed, for a look; every output says so"
    )
    what.add_argument("--dry-run", action="store_true", help="print the plan and the expected time, and train nothing")
    what.add_argument("--no-training", action="store_true", help="write the result of what there is, and train nothing")
    work = parser.add_argument_group("this command")
    work.add_argument("--output", metavar="DIR", type=Path, default=Path("runs"), help="where runs go (default: runs)")
    work.add_argument(
        "--results",
        metavar="DIR",
        type=Path,
        help="folder of results files (CSV): what they hold is not run again, and is part of the result",
    )
    work.add_argument(
        "--against",
        metavar="ROW",
        help="also show every row less this one, seed by seed (default: the study's reference, if it names one)",
    )
    add_jobs_per_gpu(work)
    add_flags(work)
    add_checkpoint_steps(work)
    add_log(work)
    work.add_argument("--quiet", action="store_true", help="print only the result")


def execute(arguments: argparse.Namespace) -> int:
    """List the studies, or plan, train and write some."""
    from efcil import studies

    if not arguments.study:
        print(_listing())
        return 0
    if arguments.dry_run and arguments.no_training:
        raise SettingsError(
            "--dry-run prints what would be trained, --no-training the result of what there is. Leave out one of them."
        )
    log, engine = trackers(arguments), chosen(arguments)
    names = studies.names() if arguments.study == [ALL] else list(dict.fromkeys(arguments.study))
    found = [studies.load(name) for name in names]
    return _make(_those_that_fit(arguments, found), arguments, log, engine)


def _those_that_fit(arguments: argparse.Namespace, found: Sequence[Study]) -> list[_Command]:
    """Return the studies as the command line asks for them; several are asked for what they have, or left out."""
    if len(found) == 1:
        return [_Command(arguments, found[0])]
    commands, refused = [], []
    for study in found:
        try:
            commands.append(_Command(_narrowed(arguments, study, found), study))
        except SettingsError as error:
            refused.append((study.name, error))
    if not commands:
        raise refused[0][1]
    _data(arguments.data, list(dict.fromkeys(dataset for command in commands for dataset in command.datasets)))
    if not arguments.quiet:
        for name, reason in refused:
            print(f"{name} is left out. {reason}")
    return commands


def _narrowed(arguments: argparse.Namespace, study: Study, among: Sequence[Study]) -> argparse.Namespace:
    """Return the arguments with the names that this study has; where it has none, with all of them.

    A name that none of the studies has is refused.
    """
    narrowed = argparse.Namespace(**vars(arguments))
    for kind, known in study.choices.items():
        asked: list[str] = getattr(arguments, kind) or []
        everywhere = list(dict.fromkeys(name for each in among for name in each.choices[kind]))
        for name in asked:
            if name not in everywhere:
                raise unknown(kind, name, everywhere)
        if kept := [name for name in asked if name in known]:
            setattr(narrowed, kind, kept)
    return narrowed


def _make(
    commands: Sequence[_Command], arguments: argparse.Namespace, log: Sequence[str], engine: Engine | None
) -> int:
    """Plan, train, and write the results; what failed is raised at the end."""
    from efcil.studies.plan import Hardware, filled, summed_up

    hardware = Hardware.here()
    plans = [command.plan(hardware) for command in commands]
    runs = _each_once(plans)
    if arguments.dry_run or not (arguments.quiet or arguments.no_training):
        for command, plan in zip(commands, plans, strict=True):
            command.show(plan)
        print(filled(summed_up(runs, arguments.output, hardware, arguments.jobs_per_gpu)) + "\n")
    if arguments.dry_run:
        return 0
    if not arguments.no_training:
        _warn_of_changes(runs)
    failure: BaseException | None = None
    if not arguments.no_training and any(run.wanted for run in runs):
        failure = _train(runs, arguments, log, engine)
        if isinstance(failure, GridError) and failure.mistake and not any(map(_is_there, failure.paths)):
            raise failure  # nothing could be trained: a table without ours would only hide the reason
    for command in commands:
        failure = command.conclude() or failure
    if failure is not None:
        raise failure
    return 0


def _each_once(plans: Sequence[Sequence[Planned]]) -> list[Planned]:
    """Return the runs of all plans: a run is to be trained if any study lacks something of it."""
    found: dict[Path, Planned] = {}
    for run in (run for plan in plans for run in plan):
        if run.wanted or run.folder.path not in found:
            found[run.folder.path] = run
    return list(found.values())


def _warn_of_changes(runs: Sequence[Planned]) -> None:
    """Say which finished runs were made with another version of a user's own method, or with other images."""
    from efcil.experiment.grid import DataShelf, out_of_date
    from efcil.studies.plan import FINISHED

    shelf = DataShelf()
    for run in runs:
        if run.state == FINISHED and (changed := out_of_date(run.folder, run.settings, shelf)):
            print(printable(" ".join([f"{run.folder.path}: finished before.", *changed])), file=sys.stderr)


def _train(
    runs: Sequence[Planned], arguments: argparse.Namespace, log: Sequence[str], engine: Engine | None
) -> BaseException | None:
    """Train what is missing, the longest first; return the error, so that results are written before it ends."""
    from efcil.studies.plan import longest_first

    try:
        train(_validated(longest_first(runs)), arguments, log, engine)
    except (EfcilError, KeyboardInterrupt) as error:
        if not isinstance(error, GridError):
            print("Stopped; this is the result of what there is.\n")
        return error
    return None


def _listing() -> str:
    """Return a line or two for every study."""
    from efcil import studies

    lines = []
    width = max(map(len, studies.names()))
    for name in studies.names():
        study = studies.load(name)
        runs = counted(len(study.cells()) * len(study.seeds), "run")
        makes = f"{study.makes} {study.table}" if study.table else study.makes
        lines.append(f"{name:<{width}}  {makes}, {runs}: {', '.join(study.datasets)}; {', '.join(study.scenarios)}")
        lines.append(" " * (width + 2) + study.about)
    lines.append("\nws10: warm start, a large first task and then 10 steps; cs10: cold start, 10 equal tasks")
    lines.append("Make one: efcil paper table1 --dataset cifar100 --data DIR [--fast] [--dry-run]")
    lines.append(
        "One cell of it: efcil paper table1 --data DIR --dataset cifar100 --scenario cs10 --method EFC --seeds 0"
    )
    lines.append(f"Or several, which train what they share once: efcil paper losses covariances ..., or {ALL}")
    return "\n".join(lines)


class _Command:
    """One study, as the command line asks for it."""

    def __init__(self, arguments: argparse.Namespace, study: Study) -> None:
        self.arguments = arguments
        self.study = study = study if arguments.against is None else study.beside(arguments.against)
        self.fast: bool = arguments.fast
        self.output: Path = arguments.output
        self.datasets = datasets = list(dict.fromkeys(arguments.dataset or study.datasets[:1]))
        data = _data(arguments.data, datasets)
        self.chosen = study.cells(datasets, arguments.scenario, arguments.method, self.fast, data)
        self.cells = study.cells(datasets, fast=self.fast, data=data)
        usual = study.seeds[:1] if self.fast else study.seeds
        self.seeds = list(usual) if arguments.seeds is None else read_seeds(arguments.seeds)
        self.shown = sorted({*usual, *self.seeds})

    @cached_property
    def measured(self) -> Measured:
        """What is known: of results files first, then also of runs."""
        from efcil.studies.measures import Measured

        measured = Measured()
        if self.arguments.results is not None:
            measured.read_results(self.arguments.results)
        return measured

    def plan(self, hardware: Hardware) -> list[Planned]:
        """Return its runs: those to train, and those that are done."""
        from efcil.studies.estimate import Times
        from efcil.studies.plan import known_numbers, plan_runs, runs_of
        from efcil.studies.result import measures_of

        pairs = runs_of(self.chosen, self.seeds)
        known = known_numbers(pairs, self.measured, measures_of(self.study))
        if not self.arguments.no_training:
            _refuse_mistakes([pair for number, pair in enumerate(pairs) if number not in known], self.fast)
        times = Times(self.output, hardware.name)
        planned = plan_runs([settings for _, settings in pairs], self.output, times, known)
        rows = [tuple(cell.variant.name for cell in cells) for cells, _ in pairs]
        return [replace(run, rows=names) for run, names in zip(planned, rows, strict=True)]

    def show(self, runs: Sequence[Planned]) -> None:
        """Print its plan."""
        from efcil.studies.plan import listed
        from efcil.studies.result import titled

        print(titled(self.study, self.fast))
        shown = runs if self.arguments.dry_run else [run for run in runs if run.wanted]
        if shown:
            print(listed(shown))

    def conclude(self) -> BaseException | None:
        """Print and write the result of what there is; return the first error."""
        from efcil.studies.result import conclude, read_runs, write

        read_runs(self.cells, self.shown, self.output, self.measured)
        failure = self._compute()
        result = conclude(self.study, self.cells, self.shown, self.measured, self.fast)
        print(result.text(shutil.get_terminal_size((80, 24)).columns), end="")
        files, trouble = write(result, self.output, self.measured)
        print(f"\nWritten: {len(files)} files in {files[0].parent}")
        if trouble:
            print(trouble)
        return failure

    def _compute(self) -> BaseException | None:
        """Measure what needs a model and the images; return the first error."""
        from efcil.studies.result import measures_of, perturb_runs

        if self.arguments.no_training or "perturbation" not in measures_of(self.study):
            return None
        say = (lambda text: None) if self.arguments.quiet else print
        return perturb_runs(self.cells, self.shown, self.output, self.measured, say)


def _is_there(path: Path) -> bool:
    from efcil.runfolder import RunFolder

    return RunFolder(path).summary_file.exists()


def _refuse_mistakes(runs: Sequence[tuple[Sequence[Cell], Settings]], fast: bool) -> None:
    """Refuse settings that no run can have, before the plan is printed; all mistakes are named, each once.

    Settings without effect are mistakes, too: the row would be another one under a name of its own. A short schedule
    may leave milestones without effect.
    """
    from efcil.data.sources import sources
    from efcil.resolution import validate
    from efcil.resolution.unused import refuse_unused

    found = Mistakes()
    recognised: set[str] = set()
    for rows, each in runs:
        # Without a source, runs can be planned all the same.
        if each.dataset in sources():
            with found.caught():
                validate(each)
                for name in [cell.variant.classifier for cell in rows if cell.variant.classifier is not None]:
                    validate(replace(each, classifier=name))  # the method must keep what it needs
                refuse_unused([each], () if fast else each.overrides)
                if each.data is not None and each.dataset not in recognised:
                    recognised.add(each.dataset)
                    sources()[each.dataset].recognise(Path(each.data))
    found.refuse("; nothing has been trained")


def _validated(settings: Sequence[Settings]) -> list[Settings]:
    from efcil.data.sources import sources
    from efcil.resolution import validate

    known = sources()
    for each in settings:
        if each.dataset.partition(":")[0] not in known:
            raise SettingsError(
                f"efcil has no source that reads the files of {each.dataset}: its runs are planned, but cannot be "
                f"trained here. With a source of that name they can. There are sources for {', '.join(known)}."
            )
    return [validate(each) for each in settings]


def _data(data: str | None, datasets: Sequence[str]) -> str | None:
    if data is None:
        return None
    if len(datasets) > 1:
        raise SettingsError(
            f"--data names one place, but there are several datasets ({', '.join(datasets)}). "
            "Give one --dataset at a time."
        )
    # Absolute, so that settings.yaml works from any folder.
    return str(Path(data).expanduser().absolute())
