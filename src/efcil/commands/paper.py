"""`efcil paper`: the tables and figures of the EFC paper, each by one command, ours beside the paper's."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efcil.commands.engines import add_flags, chosen
from efcil.commands.parser import add_checkpoint_steps, add_debug, add_jobs_per_gpu, add_log, counted, trackers
from efcil.errors import EfcilError, GridError, Mistakes, SettingsError

if TYPE_CHECKING:
    from efcil.settings import Settings
    from efcil.studies.measures import Measured
    from efcil.studies.plan import Planned
    from efcil.studies.study import Study

DESCRIPTION = """\
List the studies of the EFC paper, or make one: its runs are planned and trained, and the result is printed and written
below OUTPUT/paper, ours beside the paper's. Finished runs are skipped and unfinished ones resumed, so the same command
can be repeated at any time. STUDY may also be a YAML file of your own.

The result always shows the whole study on the chosen datasets; --scenario, --method and --seeds choose what is trained.
"""
_SEEDS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_MOST_SEEDS = 1000


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "paper",
        help="make a table or figure of the EFC paper, ours beside the paper's",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", nargs="?", metavar="STUDY", help="name of a study, or a YAML file; none: list them")
    what = parser.add_argument_group("what to train")
    what.add_argument("--dataset", nargs="+", action="extend", metavar="NAME", help="datasets (default: the first)")
    what.add_argument("--data", metavar="DIR", help="file or folder of the dataset")
    what.add_argument("--scenario", nargs="+", action="extend", metavar="NAME", help="only these scenarios")
    what.add_argument("--method", nargs="+", action="extend", metavar="NAME", help="only these methods or rows")
    what.add_argument(
        "--seeds", nargs="+", action="extend", metavar="N", help="seeds, such as 0-4 or 0 1 2 (default: the study's)"
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
    add_jobs_per_gpu(work)
    add_flags(work)
    add_checkpoint_steps(work)
    add_log(work)
    work.add_argument("--quiet", action="store_true", help="print only the result")
    add_debug(work)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """List the studies, or plan, train and write one."""
    from efcil import studies

    if arguments.study is None:
        print(_listing())
        return 0
    study = studies.load(arguments.study)
    return _Command(arguments, study).execute()


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
    lines.append("\nMake one: efcil paper table1 --dataset cifar100 --data DIR [--fast] [--dry-run]")
    return "\n".join(lines)


class _Command:
    """One study, as the command line asks for it."""

    def __init__(self, arguments: argparse.Namespace, study: Study) -> None:
        self.arguments = arguments
        self.study = study
        self.fast: bool = arguments.fast
        self.log = trackers(arguments)
        self.engine = chosen(arguments)
        self.output: Path = arguments.output
        datasets = list(dict.fromkeys(arguments.dataset or study.datasets[:1]))
        data = _data(arguments.data, datasets)
        self.chosen = study.cells(datasets, arguments.scenario, arguments.method, self.fast, data)
        self.cells = study.cells(datasets, fast=self.fast, data=data)
        usual = study.seeds[:1] if self.fast else study.seeds
        self.seeds = list(usual) if arguments.seeds is None else read_seeds(arguments.seeds)
        self.shown = sorted({*usual, *self.seeds})

    def execute(self) -> int:
        """Plan, train, and write the result; what failed is raised at the end."""
        from efcil.studies.result import conclude, read_runs, write

        measured = self._measured()
        runs = self._plan(measured)
        if self.arguments.dry_run:
            return 0
        failure: BaseException | None = None
        if not self.arguments.no_training and any(run.wanted for run in runs):
            failure = self._train(runs)
            if isinstance(failure, GridError) and failure.mistake and not any(map(_is_there, failure.paths)):
                raise failure  # nothing could be trained: a table without ours would only hide the reason
        read_runs(self.cells, self.shown, self.output, measured)
        failure = self._compute(measured) or failure
        result = conclude(self.study, self.cells, self.shown, measured, self.fast)
        print(result.text(shutil.get_terminal_size((80, 24)).columns), end="")
        files, trouble = write(result, self.output, measured)
        print(f"\nWritten: {len(files)} files in {files[0].parent}")
        if trouble:
            print(trouble)
        if failure is not None:
            raise failure
        return 0

    def _measured(self) -> Measured:
        from efcil.studies.measures import Measured

        measured = Measured()
        if self.arguments.results is not None:
            measured.read_results(self.arguments.results)
        return measured

    def _plan(self, measured: Measured) -> list[Planned]:
        """Return the runs to train, and print the plan."""
        from efcil.studies.estimate import Times
        from efcil.studies.plan import Hardware, filled, known_numbers, listed, plan_runs, settings_of, summed_up
        from efcil.studies.result import measures_of, titled

        pairs = settings_of(self.chosen, self.seeds)
        hardware = Hardware.here()
        known = known_numbers(pairs, measured, measures_of(self.study))
        if not self.arguments.no_training:
            _refuse_mistakes([settings for number, (_, settings) in enumerate(pairs) if number not in known])
        runs = plan_runs([settings for _, settings in pairs], self.output, Times(self.output, hardware.name), known)
        if not self.arguments.quiet or self.arguments.dry_run:
            print(titled(self.study, self.fast))
            shown = runs if self.arguments.dry_run else [run for run in runs if run.wanted]
            if shown and not self.arguments.no_training:
                print(listed(shown))
            print(filled(summed_up(runs, self.output, hardware, self.arguments.jobs_per_gpu)) + "\n")
        return runs

    def _train(self, runs: Sequence[Planned]) -> BaseException | None:
        """Train what is missing, the longest first; return the error, so that the result is written before it ends."""
        from efcil.studies.plan import longest_first

        try:
            settings = _validated(longest_first(runs))
            from efcil.experiment import run_grid

            run_grid(
                settings,
                self.output,
                jobs_per_gpu=self.arguments.jobs_per_gpu,
                quiet=self.arguments.quiet,
                checkpoint_steps=self.arguments.checkpoint_steps,
                debug=getattr(self.arguments, "debug", False),
                log=self.log,
                engine=self.engine,
            )
        except (EfcilError, KeyboardInterrupt) as error:
            if not isinstance(error, GridError):
                print("Stopped; this is the result of what there is.\n")
            return error
        return None

    def _compute(self, measured: Measured) -> BaseException | None:
        """Measure what needs a model and the images; return the first error."""
        from efcil.studies.result import measures_of, perturb_runs

        if self.arguments.no_training or "perturbation" not in measures_of(self.study):
            return None
        say = (lambda text: None) if self.arguments.quiet else print
        return perturb_runs(self.cells, self.shown, self.output, measured, say)


def _is_there(path: Path) -> bool:
    from efcil.runfolder import RunFolder

    return RunFolder(path).summary_file.exists()


def _refuse_mistakes(settings: Sequence[Settings]) -> None:
    """Refuse settings that no run can have, before the plan is printed; all mistakes are named, each once."""
    from efcil.data.sources import sources
    from efcil.resolution import validate

    found = Mistakes()
    for each in settings:
        # Without a source, runs can be planned all the same.
        if each.dataset in sources():
            with found.caught():
                validate(each)
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


def read_seeds(words: Sequence[str]) -> list[int]:
    """Read seeds: numbers, and ranges such as 0-4."""
    found: dict[int, None] = {}
    for word in (part for each in words for part in each.split(",") if part):
        match = _SEEDS.fullmatch(word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first >= _MOST_SEEDS:
            raise SettingsError(f"--seeds takes numbers and ranges, such as 0-4 or 0 1 2, but it got {word!r}.")
        found.update(dict.fromkeys(range(first, last + 1)))
    if not found:
        raise SettingsError("--seeds names no seed. Give some, such as 0-4, or leave it out.")
    return list(found)
