"""What a command would do, before it does it: every run, how far it is, and how long it will take."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from efcil import methods
from efcil.errors import printable, some
from efcil.methods.base import Method
from efcil.report.cells import seeds_in_words
from efcil.resolution import scenario_name
from efcil.runfolder import RunFolder, locate
from efcil.settings import Settings
from efcil.studies import estimate
from efcil.studies.estimate import Estimate, Times
from efcil.studies.measures import CLASSIFIERS, Key, Measured, key_of
from efcil.studies.study import Cell

FINISHED, KNOWN, UNFINISHED, TO_DO = "finished", "in the results", "unfinished", "to do"


@dataclass(frozen=True)
class Planned:
    """A run: its folder, how far it is, what is left to train, and the expected time of that (None: unknown).

    `rows` are the rows of a study that read it.
    """

    settings: Settings
    folder: RunFolder
    state: str
    estimate: Estimate | None = None
    rows: tuple[str, ...] = ()

    @property
    def wanted(self) -> bool:
        """Whether it has to be trained."""
        return self.state in (UNFINISHED, TO_DO)


@dataclass(frozen=True)
class Hardware:
    """What this machine trains on: the name of its first GPU or of its processor, and the number of GPUs."""

    name: str
    gpus: int

    @classmethod
    def here(cls) -> Hardware:
        """Ask the machine."""
        from efcil.environment import hardware

        found = hardware()
        return cls(str((found["gpus"] or [found["cpu"]])[0]), len(found["gpus"]))


def plan_runs(settings: Sequence[Settings], output: Path, times: Times, known: Collection[int] = ()) -> list[Planned]:
    """Return the state of every run; those whose numbers are in `known` need no training, whatever their folder says.

    A folder that holds another run raises.
    """
    found = []
    for number, each in enumerate(settings):
        folder = locate(output, each)
        state = _state(folder, each)
        if state != FINISHED and number in known:
            state = KNOWN
        planned = Planned(each, folder, state)
        found.append(replace(planned, estimate=_left(folder, each, state, times)) if planned.wanted else planned)
    return found


def _state(folder: RunFolder, settings: Settings) -> str:
    if folder.is_finished(settings):
        return FINISHED
    return UNFINISHED if folder.settings_file.exists() else TO_DO


def _left(folder: RunFolder, settings: Settings, state: str, times: Times) -> Estimate | None:
    whole = times.of(settings)
    if whole is None or state == TO_DO:
        return whole
    # Its first task is its own by now.
    return Estimate(0.0, whole.seconds * (1 - estimate.done_share(folder, settings)), (), whole.source)


def longest_first(runs: Sequence[Planned]) -> list[Settings]:
    """Return what is to be trained, so that several at a time end together: the longest first, unknown ones before."""
    wanted = [run for run in runs if run.wanted]
    return [run.settings for run in sorted(wanted, key=lambda run: -_seconds(run))]


def _seconds(run: Planned) -> float:
    return float("inf") if run.estimate is None else run.estimate.seconds


def listed(runs: Sequence[Planned]) -> str:
    """Return name, state and expected time of every run; seeds that are equally far share a line."""
    if not runs:
        return "No runs."
    groups: dict[tuple[Path, str, str], list[Planned]] = {}
    for run in runs:
        time = _about(run.estimate) if run.wanted else ""
        groups.setdefault((run.folder.path.parent, run.state, time), []).append(run)
    names = [printable(_name(members)) for members in groups.values()]
    width = max(map(len, names))
    lines = []
    for name, (_, state, time), members in zip(names, groups, groups.values(), strict=True):
        each = " each" if len(members) > 1 and time.startswith("about") else ""
        lines.append(f"{name:<{width}}  {state}  {time}{each}".rstrip())
    return "\n".join(lines)


def _name(members: Sequence[Planned]) -> str:
    """Return what seeds are called: the rows of a study that read them, else their folders, .../seed0-4 for five."""
    seeds = seeds_in_words([run.settings.seed for run in members])
    settings, rows = members[0].settings, members[0].rows
    if rows:
        several = "s" if len(members) > 1 else ""
        return f"{settings.dataset} {scenario_name(settings)}: {some(rows, 3)}, seed{several} {seeds}"
    return f"{members[0].folder.path.parent / 'seed'}{seeds.replace(' ', ',')}"


def _about(expected: Estimate | None) -> str:
    return "time unknown" if expected is None else f"about {estimate.in_words(expected.seconds)}"


def summed_up(runs: Sequence[Planned], output: Path, hardware: Hardware, jobs: int | None) -> str:
    """Return how many runs are to be trained, how long that takes, and where the times are from."""
    wanted = [run for run in runs if run.wanted]
    done = len(runs) - len(wanted)
    text = f"{_runs(len(runs))}: {done} done, {len(wanted)} to train"
    unfinished = sum(run.state == UNFINISHED for run in wanted)
    text += f" ({unfinished} unfinished, to be resumed)." if unfinished else "."
    if not wanted:
        return text
    expected = [run.estimate for run in wanted if run.estimate is not None]
    sources = ["" if run.estimate is None else run.estimate.source for run in wanted]
    if expected:
        # Times that were measured elsewhere are those of a GPU, whatever this machine has.
        on_gpu = hardware.gpus > 0 or all(each.source != estimate.HERE for each in expected)
        together = jobs if jobs is not None and on_gpu else 1
        gpus = max(hardware.gpus, 1) if jobs is not None else 1
        seconds = estimate.total(expected, together, gpus)
        beside = f" with {together} at a time on each of {gpus} GPUs" if gpus > 1 else ""
        one_by_one = " one after the other" if len(wanted) > 1 else ""
        beside = beside or (f" with {together} at a time" if together > 1 else one_by_one)
        text += f" About {estimate.in_words(seconds)}{beside}{_without([run for run in wanted if not run.estimate])}."
    return " ".join([text, *estimate.sources_in_words(sources, hardware.name, output)])


def _without(unknown: Sequence[Planned]) -> str:
    if not unknown:
        return ""
    methods = ", ".join(dict.fromkeys(run.settings.method for run in unknown))
    return f", without {_runs(len(unknown))} whose time is not known ({methods})"


def described(settings: Sequence[Settings], output: Path, jobs: int | None) -> str:
    """Return what a grid would do: a line for every run, and all of it in a sentence."""
    hardware = Hardware.here()
    runs = plan_runs(settings, output, Times(output, hardware.name))
    return f"{listed(runs)}\n{filled(summed_up(runs, output, hardware, jobs))}"


def filled(words: str) -> str:
    """Return a paragraph for a terminal."""
    return textwrap.fill(printable(words), 100, break_long_words=False, break_on_hyphens=False)


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def runs_of(cells: Sequence[Cell], seeds: Sequence[int]) -> list[tuple[tuple[Cell, ...], Settings]]:
    """Return the runs of a study, each once with the rows that read it."""
    found: dict[Key, list[Cell]] = {}
    for cell in cells:
        for seed in seeds:
            found.setdefault(key_of(cell, seed), []).append(cell)
    return [(tuple(rows), replace(rows[0].settings, seed=key[-1])) for key, rows in found.items()]


def known_numbers(
    runs: Sequence[tuple[Sequence[Cell], Settings]], measured: Measured, measures: Collection[str]
) -> set[int]:
    """Return the numbers of the runs whose measures are all known from results files."""
    return {
        number
        for number, (rows, settings) in enumerate(runs)
        if all(measured.has(measurable(cell, measures), cell, settings.seed) for cell in rows)
    }


def measurable(cell: Cell, measures: Iterable[str]) -> list[str]:
    """Return the measures that a row can have.

    Only low-rank covariances have a number of components, and only methods that keep a feature matrix have a spectrum
    and directions. The results of other classifiers are its accuracies, where it names one.
    """
    never = {CLASSIFIERS}
    if cell.settings.overrides.get("covariance") != "low-rank":
        never.add("components")
    if methods.get(cell.variant.method).importance_matrix is Method.importance_matrix:
        never |= {"spectrum", "perturbation"}
    return [name for name in measures if name not in never]
