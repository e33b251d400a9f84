"""Settings: what describes one run of a benchmark, in addition to its training: dataset, class order and tasks."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from dataclasses import dataclass

from efcil.errors import SettingsError
from efcil.settings.options import option
from efcil.settings.training import TrainingSettings

CUSTOM = "custom"
NAMED_CLASS_ORDERS = ("efc", "icarl", "icarl-cifar100", "efc-imagenet", "natural", "dn4il")
#: Whose recipes a run follows: those of the papers, or the preset's own, the same for all methods.
PAPER, MODERN = "paper", "modern"
#: Other names of datasets.
SAME_DATASET = {"imagenet": "imagenet-1k"}
#: What counts as right: the answer, whichever the domain, or the class, which is an answer in a domain.
MERGED, SEPARATE = "merged", "separate"
#: The scenario in which every domain is a task, and the datasets that have it by default.
DOMAINS = "domains"
_DOMAIN_INCREMENTAL = ("domainnet",)
#: The default of all others.
_COLD_START = "cs5"
#: What describes the tasks of a scenario of one's own.
TASK_SETTINGS = ("tasks", "first_task_classes", "task_sizes")
_MOST_TASKS = 10_000
#: Longer names of scenarios are shortened: they are names of folders.
_LONGEST_NAME = 60


def read_task_sizes(text: str) -> tuple[int, ...]:
    """Return how many classes every task has, from text such as `50,30,2x10`: 50, 30, 10 and 10."""
    sizes: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(?:0*([1-9]\d{0,8})x)?0*([1-9]\d{0,8})", part.strip())
        repeats = int(found[1] or 1) if found else 0
        if found is None or len(sizes) + repeats > _MOST_TASKS:
            raise SettingsError(
                f"Setting 'task_sizes' lists how many classes every task has, such as 50,30,20 or 50,5x10 (50, then "
                f"five tasks of 10), at most {_MOST_TASKS} tasks, but it is {text!r}."
            )
        sizes += [int(found[2])] * repeats
    return tuple(sizes)


def show_task_sizes(sizes: tuple[int, ...]) -> str:
    """Return sizes as `read_task_sizes` reads them, in the shortest way."""
    runs = [(size, len(list(group))) for size, group in itertools.groupby(sizes)]
    return ",".join(f"{times}x{size}" if times > 1 else f"{size}" for size, times in runs)


def custom_name(tasks: int | None, first: int | None, sizes: tuple[int, ...] | None) -> str:
    """Return the name of a scenario of one's own: custom-7, custom-7-first-20, custom-of-50-5x10."""
    if sizes is None:
        return f"{CUSTOM}-{tasks}" + ("" if first is None else f"-first-{first}")
    name = f"{CUSTOM}-of-{show_task_sizes(sizes).replace(',', '-')}"
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: _LONGEST_NAME - 9].rstrip('-x')}-{digest}"


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """Everything that describes one run; values left open come from the dataset's preset."""

    # Not a choice: a benchmark is trained with the preset of its dataset.
    preset: str = dataclasses.field(default="", init=False, repr=False, compare=False)
    dataset: str = option("digits", "Dataset; see `efcil data`.", nargs="+", group="what to run", after="method")
    scenario: str = option(
        None,
        "How classes become tasks: ws5, ws10, ws20 (a large first task, then N steps), cs5, cs10, cs20 (N equal "
        "tasks), domains (every domain is a task), or custom, which --tasks and --task-sizes imply. Default: cs5; for "
        "domainnet and with --answers merged, domains.",
        nargs="+",
        group="what to run",
    )
    data: str | None = option(
        None,
        "File or folder of the dataset; bundled and downloaded datasets need none.",
        group="what to run",
        after="seed",
    )
    tasks: int | None = option(
        None, "Number of tasks, for a scenario of your own instead of a named one.", group="scenario", minimum=1
    )
    first_task_classes: int | None = option(
        None,
        "Classes in the first task of a scenario of your own; later tasks share the rest.",
        group="scenario",
        minimum=1,
    )
    task_sizes: str | None = option(
        None,
        "Classes of every task of a scenario of your own, instead of their number: 50,30,20, or 50,5x10 (50, then five "
        "tasks of 10). Together they are all classes.",
        group="scenario",
    )
    class_order: str | None = option(
        None,
        "Order of the classes, by default the preset's, which is efc but for imagenet-1k and domainnet: efc (the "
        "shuffle of the paper's authors), icarl (NumPy's permutation with seed 1993), icarl-cifar100 (the order of "
        "CIFAR-100 in iCaRL's own code), efc-imagenet (the authors' order of ImageNet-1K, the same for all seeds), "
        "natural, dn4il (the domains of domainnet as the authors of DN4IL have them), or a file. In the scenario "
        "domains it is the order of the domains.",
        nargs="+",
        group="scenario",
    )
    class_seed: int | None = option(
        None, "Seed of the class order (default: the seed).", nargs="+", group="scenario", minimum=0
    )
    answers: str | None = option(
        None,
        "What counts as right, of classes that are called domain/answer, such as sketch/dog: merged (the answer, in "
        "whichever domain; the default of domainnet) or separate (the class, so that dogs of two domains are two). "
        "For folder, either of them says that images are in DIR/DOMAIN/CLASS/.",
        choices=(MERGED, SEPARATE),
        group="scenario",
    )
    held_out: float | None = option(
        None,
        "Share of each class's training images that is used for testing, not for training. It replaces the "
        "dataset's test images, to choose settings without them, or because there are none (folder).",
        group="data",
        minimum=0,
        maximum=1,
    )
    recipe: str | None = option(
        None,
        "Recipe: paper (that of the EFC paper, or of the method's own) or modern (one for all methods, of the presets "
        "cifar10, cifar100 and tiny-imagenet: SGD with cosine decay, trained BatchNorm, TrivialAugment). By default "
        "modern for cedar, if the preset has it, and paper for all others.",
        choices=(PAPER, MODERN),
        group="training",
        after="weights",
    )
    class_list: str | None = option(
        None,
        "Which classes are used, of datasets that allow a choice: a file with one class per line. For imagenet-subset "
        "also first (the first 100 ids, as in the paper, its default) or lucir (100 ids drawn with seed 1993).",
        group="data",
        after="image_size",
    )
    images_per_class: str | None = option(
        None,
        "Training images of a class, by default the preset's: all, mean (at most the mean number of images of a class, "
        "as EFC's authors have it; the default of imagenet-1k and imagenet-subset), or a number. The first ones are "
        "kept.",
        group="data",
    )
    stored_side: int | None = option(
        None,
        "Datasets of large photographs (imagenet-1k, imagenet-subset, cub200, domainnet): most pixels of the shorter "
        "side of a training image; larger images are shrunk before crops are cut from them (default: 512, domainnet: "
        "256). Less saves memory.",
        group="data",
        minimum=1,
    )
    columns: str | None = option(
        None,
        "Columns of a dataset of the Hub with images and labels, if there are several: image,label.",
        group="data",
    )
    splits: str | None = option(
        None,
        "Splits of a dataset of the Hub for training and testing, if others are wanted: train,validation.",
        group="data",
    )
    keep_images: str = option(
        "auto",
        "Where the decoded images of a task are kept: device (its memory), host (the computer's), disk (a file in the "
        "cache folder, mapped into memory), or auto, the first of these that has room. Results do not depend on it.",
        choices=("auto", "device", "host", "disk"),
        group="hardware",
        after="deterministic",
    )
    prefetch: str = option(
        "auto",
        "Whether the images of the next task are decoded while a task trains, of datasets that are decoded task by "
        "task: auto (where host memory has room for them) or off. Results do not depend on it.",
        choices=("auto", "off"),
        group="hardware",
        after="keep_images",
    )
    test_views: int = option(
        1,
        "Views of an image that is tested: 1 (the image), or 2 (the image and its mirror image; the mean of their "
        "probabilities counts). Two take twice the time at test; results with them have names of their own.",
        group="evaluation",
        minimum=1,
        maximum=2,
        after="classifier",
    )

    def __post_init__(self) -> None:
        if self.scenario is None:
            domains = self.answers == MERGED or self.dataset in _DOMAIN_INCREMENTAL
            usual = DOMAINS if domains else _COLD_START
            described = self.tasks is not None or self.task_sizes is not None
            object.__setattr__(self, "scenario", CUSTOM if described else usual)
        super().__post_init__()
        object.__setattr__(self, "dataset", SAME_DATASET.get(self.dataset, self.dataset))
        object.__setattr__(self, "preset", self.dataset)
        if self.held_out is not None and not 0 < self.held_out < 1:
            raise SettingsError(
                f"Setting 'held_out' must be between 0 and 1 (0.2 keeps a fifth), but it is {self.held_out:g}."
            )
        self._check_scenario()

    def _check_scenario(self) -> None:
        if self.task_sizes is not None:
            object.__setattr__(self, "task_sizes", show_task_sizes(read_task_sizes(self.task_sizes)))
            if self.tasks is not None or self.first_task_classes is not None:
                raise SettingsError(
                    "Setting 'task_sizes' says how many tasks there are, and how many classes the first one has. Leave "
                    "out tasks and first_task_classes, or task_sizes."
                )
        if self.scenario == CUSTOM and self.tasks is None and self.task_sizes is None:
            raise SettingsError(
                "A custom scenario needs its tasks: give their number (--tasks N) or sizes (--task-sizes 50,30,20)."
            )
        if self.tasks is None and self.first_task_classes is not None:
            raise SettingsError(
                "Setting 'first_task_classes' describes a scenario of your own and needs the number of tasks too: "
                "give tasks as well (--tasks N), or leave it out and use a named scenario."
            )
        if (self.tasks is not None or self.task_sizes is not None) and self.scenario != CUSTOM:
            what, name = ("number", "tasks") if self.task_sizes is None else ("sizes", "task_sizes")
            raise SettingsError(
                f"Scenario {self.scenario!r} has its own tasks, so their {what} cannot be set. "
                f"Leave out the scenario or {name}, or set the scenario to {CUSTOM}."
            )

    @property
    def sizes(self) -> tuple[int, ...] | None:
        """How many classes every task has, if the settings say so."""
        return None if self.task_sizes is None else read_task_sizes(self.task_sizes)

    @property
    def effective_class_seed(self) -> int:
        """The seed of the class order: `class_seed`, or the seed if that is none."""
        return self.seed if self.class_seed is None else self.class_seed
