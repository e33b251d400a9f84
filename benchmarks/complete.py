"""Train what the results files still lack: the table of every method, over as many sittings as it takes.

    python benchmarks/complete.py --data DATA --output runs    # then: collect.py runs
    python benchmarks/complete.py --dry-run                    # says what is missing, and trains nothing

Runs that the results files have are not made again, wherever they were made. The longest come first, by the seconds
that runs of the same kind have taken, so that several at a time end together. An interruption (Ctrl-C, SIGTERM) saves
what is under way; the same command goes on with it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

from collect import RESULTS, VARIANTS, read  # beside this script
from efcil.experiment.grid import run_grid
from efcil.resolution import label, validate
from efcil.settings import Settings

SCENARIOS = ("cs10", "ws10", "cs20", "ws20")
#: Three seeds of what the paper compares, in all scenarios; one of the others, in the first two.
COMPARED = ("finetune", "ewc", "lwf", "pass", "ssre", "fetril", "efc", "efc++")
OTHERS = ("il2a", "sdc", "fd", "fusion", "ldc", "fecam", "adagauss", "dpcr", "joint")
#: Other readings of what the paper leaves open, seed 0: scenario, method, settings.
READINGS: list[tuple[str, str, dict[str, object]]] = [
    # BatchNorm frozen in part or whole, and rotations as in the EFC authors' first task too.
    ("cs10", "pass", {"train_normalisation": False}),
    ("ws10", "pass", {"train_normalisation": False}),
    ("ws10", "pass", {"train_scales": False}),
    ("ws10", "pass", {"train_normalisation": False, "rotation_rows": "current", "replay_rows": "heads"}),
    # The rehearsal of IL2A without a temperature, but with its authors' scale.
    ("cs10", "il2a", {"temperature": 1.0}),
    ("ws10", "il2a", {"temperature": 1.0}),
]
#: Seconds that nobody has measured: more than any, so that they are not found out last.
UNKNOWN = 1e6


def table() -> Iterator[tuple[str, str, int, dict[str, object]]]:
    """Yield (scenario, method, seed, overrides) of every run that the two results files are to have."""
    for scenario in SCENARIOS:
        for method, seed in itertools.product(COMPARED, range(3)):
            yield scenario, method, seed, {}
        for method in OTHERS if scenario in SCENARIOS[:2] else ():
            yield scenario, method, 0, {}
    for scenario, method, overrides in READINGS:
        yield scenario, method, 0, overrides


def rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of both results files."""
    return [row for name in ("cifar100", VARIANTS) for row in read(folder / f"{name}.csv")]


def missing(known: list[dict[str, str]], data: str | None) -> list[Settings]:
    """Return the runs that are in no results file, the longest first."""
    present = {(row["scenario"], row["method"], int(row["seed"])) for row in known}
    seconds: dict[tuple[str, str], float] = {}
    for row in known:
        seconds[row["scenario"], row["method"]] = float(row["seconds"])
    wanted: list[tuple[float, Settings]] = []
    for scenario, method, seed, overrides in table():
        settings = Settings(
            method=method, dataset="cifar100", scenario=scenario, seed=seed, data=data, overrides=overrides
        )
        name = label(settings, whole=True)
        if (scenario, name, seed) not in present:
            kinds = ((scenario, name), (scenario, method), ("cs10", method))
            wanted.append((next((seconds[kind] for kind in kinds if kind in seconds), UNKNOWN), settings))
    return [settings for _, settings in sorted(wanted, key=lambda pair: -pair[0])]


def main() -> None:
    """Train the missing runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder that holds CIFAR-100")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="where runs are written (default: runs)")
    parser.add_argument("--jobs-per-gpu", type=int, default=5, help="runs at a time on a GPU (default: 5)")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, help="only these scenarios")
    parser.add_argument("--method", nargs="+", choices=(*COMPARED, *OTHERS), help="only these methods")
    parser.add_argument("--seed", nargs="+", type=int, help="only these seeds")
    parser.add_argument("--dry-run", action="store_true", help="print what is missing, and stop")
    options = parser.parse_args()
    wanted = [
        settings
        for settings in missing(rows(RESULTS), None if options.data is None else str(options.data.absolute()))
        if settings.scenario in (options.scenario or [settings.scenario])
        and settings.method in (options.method or [settings.method])
        and settings.seed in (options.seed or [settings.seed])
    ]
    for settings in wanted:
        print(f"missing: {settings.scenario} {label(settings)} seed {settings.seed}")
    if wanted and not options.dry_run:
        run_grid([validate(settings) for settings in wanted], options.output, jobs_per_gpu=options.jobs_per_gpu)


if __name__ == "__main__":
    main()
