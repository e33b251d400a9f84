"""How classes become tasks: the class order, warm and cold starts, and custom scenarios.

Cold start `csN` is N tasks. Warm start `wsN` is a large first task and N steps after it, so N + 1 tasks: half of the
classes first, then N equal steps. If half of the classes cannot be split into N equal steps, the first task gets the
size closest to half with which the rest can (the smaller of two equally close): 100 classes and 20 steps give
40 + 20 x 3. The one published exception to that rule is in `_PUBLISHED_STEPS`.

If tasks cannot be equal (cold and custom), sizes differ by at most one and the smaller tasks come last.

In `domains`, a task has all classes of a domain (`domains.py`), and the class order is one of the domains.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from efcil.data.domains import SEPARATOR, need_domains
from efcil.errors import DataError, SettingsError, closest, shortened, unknown
from efcil.safe_json import parse, read_text, whole_number
from efcil.settings.benchmark import CUSTOM, DOMAINS, custom_name, show_task_sizes

#: From the code of the authors of DN4IL (NeurAI-Lab/DUCA, datasets/dn4il.py).
DN4IL_DOMAINS = ("real", "clipart", "infograph", "painting", "sketch", "quickdraw")
ORDERS = {
    "efc": "shuffled with Python's generator and the run's seed, as EFC does",
    "icarl": "NumPy's permutation with seed 1993, as LUCIR, PASS, PyCIL and FACIL's cifar100_icarl; the run's seed is "
    "ignored",
    "icarl-cifar100": "the order in which iCaRL's own code learns CIFAR-100, as PODNet; the run's seed is ignored",
    "efc-imagenet": "the same permutation as the new label of every class, as EFC has it for ImageNet-1K",
    "natural": "as the dataset numbers its classes",
    "dn4il": "the domains of DomainNet as the authors of DN4IL train them: " + ", ".join(DN4IL_DOMAINS),
}
SCENARIOS = {
    "ws5": "warm start: half of the classes, then 5 equal steps",
    "ws10": "warm start: half of the classes, then 10 equal steps",
    "ws20": "warm start: about half of the classes, then 20 equal steps",
    "cs5": "cold start: 5 equal tasks",
    "cs10": "cold start: 10 equal tasks",
    "cs20": "cold start: 20 equal tasks",
    DOMAINS: "one domain a task, for datasets whose classes are called domain/answer",
    CUSTOM: "any number of tasks, with a first task of any size, or tasks of any sizes",
}
# (steps, classes) -> classes per step, if publications depart from the rule: ImageNet-1K as 400 + 20 x 30.
_PUBLISHED_STEPS = {(20, 1000): 30}


@dataclass(frozen=True)
class Scenario:
    """The class order and the tasks: `order[j]` is the original class at position j, tasks are ranges of positions.

    Where several classes have one answer, `answers[j]` is the number of the answer of the class at position j.
    """

    name: str
    order: tuple[int, ...]
    tasks: tuple[tuple[int, ...], ...]
    answers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        positions = [position for task in self.tasks for position in task]
        if positions != list(range(len(self.order))) or not all(self.tasks):
            raise SettingsError(
                f"The tasks of scenario {self.name} must be non-empty ranges that cover the positions 0 to "
                f"{len(self.order) - 1} one after the other."
            )
        _check_permutation(self.order, f"the class order of scenario {self.name}")
        if self.answers is not None and len(self.answers) != len(self.order):
            raise SettingsError(f"Scenario {self.name} has {len(self.order)} classes, and {len(self.answers)} answers.")

    @property
    def number_of_classes(self) -> int:
        """The total number of classes of all tasks."""
        return len(self.order)

    @property
    def number_of_tasks(self) -> int:
        """The number of tasks, including the first one."""
        return len(self.tasks)

    @property
    def task_sizes(self) -> tuple[int, ...]:
        """How many classes each task has."""
        return tuple(len(task) for task in self.tasks)

    def relabel(self, labels: np.ndarray) -> np.ndarray:
        """Return the position (int64) of every original label."""
        labels = np.asarray(labels)
        if labels.size and not 0 <= labels.min() <= labels.max() < len(self.order):
            raise DataError(
                f"Labels run from {labels.min()} to {labels.max()}, but scenario {self.name} was made for "
                f"{len(self.order)} classes, numbered from 0. Make it for the dataset at hand."
            )
        positions = np.empty(len(self.order), np.int64)
        positions[list(self.order)] = np.arange(len(self.order))
        return positions[labels]


def class_order(kind: str, classes: int, seed: int, class_names: Sequence[str] | None = None) -> tuple[int, ...]:
    """Return the original class at every position, for one of `ORDERS` or a file that lists classes.

    A file holds one class per line, or is a JSON list; a class is given by its index or by its name. Text that is a
    class name means that class even if it looks like a number.
    """
    if kind == "efc":
        # EFC uses the shuffled list as class -> new label, while most libraries use it as position -> class.
        new_labels = list(range(classes))
        random.Random(seed).shuffle(new_labels)
        return tuple(int(original) for original in np.argsort(new_labels))
    if kind == "icarl":
        return tuple(int(original) for original in np.random.RandomState(1993).permutation(classes))
    if kind == "icarl-cifar100":
        return _icarl_cifar100_order(classes)
    if kind == "efc-imagenet":
        return tuple(int(original) for original in np.argsort(np.random.RandomState(1993).permutation(classes)))
    if kind == "natural":
        return tuple(range(classes))
    if kind == "dn4il":
        return _dn4il_order(class_names or ())
    file = Path(kind).expanduser()
    if not file.is_file():
        raise SettingsError(f"Unknown class order {kind!r}, which is not a file either.{closest(kind, ORDERS)}")
    return _order_from_file(file, classes, class_names or ())


def make_scenario(
    name: str,
    classes: int,
    *,
    order: Sequence[int],
    tasks: int | None = None,
    first_task_classes: int | None = None,
    task_sizes: Sequence[int] | None = None,
    dataset: str | None = None,
) -> Scenario:
    """Split `classes` classes into the tasks of scenario `name`; error messages use the name `dataset`.

    `tasks` (including the first one) and `first_task_classes`, or instead of them `task_sizes`, are for the scenario
    "custom" only; the result is then called by them, so that different scenarios have different names.
    """
    if name not in SCENARIOS:
        raise unknown("scenario", name, SCENARIOS)
    called = dataset or "the dataset"
    if name == DOMAINS:
        raise SettingsError(f"The domains of {called} are not known, so they cannot be the tasks of a scenario.")
    if len(order) != classes:
        raise SettingsError(f"The class order lists {len(order)} classes, but {called} has {classes}.")
    if name == CUSTOM:
        given = None if task_sizes is None else tuple(task_sizes)
        sizes = _custom_sizes(classes, tasks, first_task_classes, called) if given is None else list(given)
        name = custom_name(tasks, first_task_classes, given)
        if sum(sizes) != classes:
            raise SettingsError(
                f"Tasks of {shortened(show_task_sizes(tuple(sizes)))} classes are {sum(sizes)} classes together, but "
                f"{called} has {classes}. Change task_sizes."
            )
    elif tasks is not None or first_task_classes is not None or task_sizes is not None:
        raise SettingsError(
            f"Scenario {name} has its own tasks, so tasks, first_task_classes and task_sizes cannot be set with it. "
            "Leave them out, or choose the scenario 'custom'."
        )
    elif name.startswith("cs"):
        sizes = _cold_sizes(name, int(name[2:]), classes, called)
    else:
        sizes = _warm_sizes(name, int(name[2:]), classes, called)
    return _scenario(name, order, sizes)


def domain_scenario(kind: str, seed: int, class_names: Sequence[str], dataset: str) -> Scenario:
    """Return the scenario in which every domain is a task; `kind` is the order of the domains (`class_order`)."""
    domains = need_domains(class_names, dataset, f"Scenario {DOMAINS}")
    try:
        order = class_order(kind, len(domains.names), seed, domains.names)
    except SettingsError as error:
        raise SettingsError(f"{error} (In the scenario {DOMAINS}, the class order is one of the domains.)") from None
    blocks = [domains.classes(domain) for domain in order]
    return _scenario(DOMAINS, [label for block in blocks for label in block], list(map(len, blocks)))


def _scenario(name: str, order: Sequence[int], sizes: Sequence[int]) -> Scenario:
    ends = [int(end) for end in np.cumsum(sizes)]
    blocks = tuple(tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True))
    return Scenario(name, tuple(int(original) for original in order), blocks)


def _icarl_cifar100_order(classes: int) -> tuple[int, ...]:
    """Return the order of the first run of main_cifar_100_theano.py in srebuffi/iCaRL.

    Seed 1993 is set before the data is loaded, and loading shuffles the 500 training images of every class: the order
    is what the same generator draws after that, and not the permutation that the seed alone would give.
    """
    if classes != 100:
        raise SettingsError(
            f"The class order icarl-cifar100 is one of 100 classes, but here are {classes}. Choose another class order."
        )
    generator = np.random.RandomState(1993)
    for _ in range(classes):
        generator.shuffle(np.arange(500))
    return tuple(int(original) for original in generator.permutation(classes))


def _dn4il_order(names: Sequence[str]) -> tuple[int, ...]:
    """Return classes, or domains, in the order of the domains of DN4IL."""
    domains = [name.partition(SEPARATOR)[0] for name in names]
    others = [domain for domain in domains if domain not in DN4IL_DOMAINS]
    if others or not names:
        found = f", and {others[0]!r} is none of them" if others else ""
        raise SettingsError(
            f"The class order dn4il is for the domains {', '.join(DN4IL_DOMAINS)}{found}. Choose another class order."
        )
    return tuple(sorted(range(len(names)), key=lambda place: DN4IL_DOMAINS.index(domains[place])))


def _cold_sizes(name: str, tasks: int, classes: int, called: str) -> list[int]:
    if classes < tasks:
        raise SettingsError(f"{name} needs at least {tasks} classes, one per task; {called} has {classes}.")
    return _nearly_equal(classes, tasks)


def _warm_sizes(name: str, steps: int, classes: int, called: str) -> list[int]:
    if classes < steps + 1:
        raise SettingsError(
            f"{name} needs at least {steps + 1} classes, one for the first task and one for each of the {steps} steps "
            f"after it; {called} has {classes}."
        )
    step = _PUBLISHED_STEPS.get((steps, classes))
    if step is None:
        fitting = range(1, (classes - 1) // steps + 1)
        # Twice the distance of the first task from half of the classes; of two equally close, the smaller first task.
        step = min(fitting, key=lambda size: (abs(classes - 2 * steps * size), -size))
    return [classes - steps * step] + [step] * steps


def _custom_sizes(classes: int, tasks: int | None, first: int | None, called: str) -> list[int]:
    if tasks is None:
        raise SettingsError("Scenario custom needs the number of tasks. Set tasks, including the first one.")
    if tasks < 1:
        raise SettingsError(f"A scenario has at least one task; tasks is {tasks}.")
    if first is None:
        return _cold_sizes(f"custom with {tasks} tasks", tasks, classes, called)
    if first < 1:
        raise SettingsError(f"The first task needs at least one class; first_task_classes is {first}.")
    rest, later = classes - first, tasks - 1
    if rest < later or (later == 0 and rest != 0):
        need = f"which need at least one class each, {later} in total" if later else "so no class may be left"
        raise SettingsError(
            f"A first task with {first} of the {classes} classes of {called} leaves {classes} - {first} = {rest} for "
            f"the {later} later tasks, {need}. Change tasks or first_task_classes."
        )
    return [first, *_nearly_equal(rest, later)] if later else [first]


def _nearly_equal(classes: int, tasks: int) -> list[int]:
    size, larger = divmod(classes, tasks)
    return [size + 1] * larger + [size] * (tasks - larger)


def _check_permutation(order: Sequence[int], what: str) -> None:
    seen: set[int] = set()
    for original in order:
        if original in seen:
            raise SettingsError(f"In {what} class {original} occurs twice. List every class once.")
        seen.add(original)
    missing = [original for original in range(len(order)) if original not in seen]
    if missing:
        raise SettingsError(
            f"In {what} class {missing[0]} is missing. List every class from 0 to {len(order) - 1} once."
        )


def _order_from_file(file: Path, classes: int, class_names: Sequence[str]) -> tuple[int, ...]:
    index_of = {name: index for index, name in enumerate(class_names)}
    order: list[int] = []
    seen: dict[int, str] = {}
    for place, entry in _entries(file):
        if isinstance(entry, str) and entry in index_of:
            index = index_of[entry]
        else:
            try:
                index = entry if isinstance(entry, int) else whole_number(entry)
            except ValueError:
                hint = (
                    closest(str(entry), class_names)
                    if class_names
                    else " This dataset's classes have no names; use indices."
                )
                raise SettingsError(
                    f"{place} of {file} is not a class: {shortened(str(entry))!r}.{_shortened(hint)}"
                ) from None
        if not 0 <= index < classes:
            raise SettingsError(f"{place} of {file} is class {index}, but classes run from 0 to {classes - 1}.")
        if index in seen:
            raise SettingsError(f"{place} of {file} repeats class {entry!r} of {seen[index]}. List every class once.")
        seen[index] = place.lower()
        order.append(index)
    missing = [index for index in range(classes) if index not in seen]
    if missing:
        names = ", ".join(f"{index} ({class_names[index]})" if class_names else str(index) for index in missing[:10])
        raise SettingsError(
            f"{file} lists {len(order)} of {classes} classes; missing: {names}{', ...' if len(missing) > 10 else ''}."
        )
    return tuple(order)


def _shortened(hint: str) -> str:
    # A thousand valid names would hide the suggestion in front of them.
    return hint if len(hint) <= 400 else hint[:400].rsplit(",", 1)[0] + ", ..."


def _entries(file: Path) -> list[tuple[str, int | str]]:
    """Return the entries of a class-order file, each with the words that say where it is."""
    try:
        text = read_text(file)
    except (OSError, ValueError) as error:
        raise SettingsError(f"The class order {file} cannot be read as text ({error}).") from error
    if not text.lstrip().startswith("["):
        lines = [(f"Line {number}", line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
        return [(place, line) for place, line in lines if line]
    try:
        listed = parse(text)
    except ValueError as error:
        raise SettingsError(f"The class order {file} starts like a JSON list but is not one ({error}).") from error
    for number, entry in enumerate(listed, start=1):
        if isinstance(entry, bool) or not isinstance(entry, int | str):
            raise SettingsError(
                f"Entry {number} of {file} is neither a class index nor a class name: {shortened(repr(entry))}."
            )
    return [(f"Entry {number}", entry) for number, entry in enumerate(listed, start=1)]
