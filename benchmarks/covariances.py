"""What cheaper covariances cost in accuracy: re-balanced heads on real features, with every form of covariances.

    python benchmarks/covariances.py --data DATA --features features.pt --output benchmarks/results/covariances-cpu.csv

DATA is Tiny-ImageNet as Parquet shards. Features are those of the pre-trained EfficientNet-lite0 for its training
images, enlarged to 96 pixels; they are computed once and kept in the file. Test images are not used: 50 training images
of every class are held out, and accuracy is measured on them.

Ten tasks of 20 classes. Heads are trained on each task alone; then all are re-balanced as by EFC++ after the last task:
on real features of its classes, and on features drawn from the Gaussians of all others. The network does not change, so
that nothing but the covariances differs. With 512 features, these are 512 of the 1,280, chosen at random.
"""

from __future__ import annotations

import argparse
import io
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from efcil.core.heads import softmax_epoch
from efcil.methods.memory import ClassMemory
from speed import Table

PIXELS, TASKS = 96, 10
# EFC++ takes 50 epochs, with all images of a class and a rate of 1e-3; here fewer steps are larger.
EPOCHS, ALONE_EPOCHS, DRAWN, BATCH, RATE, MOMENTUM, DECAY, JITTER = 15, 10, 100, 256, 1e-2, 0.9, 5e-4, 1e-5


@dataclass(frozen=True)
class Form:
    """A form of covariances: what ClassMemory calls it, the share of variance, and the type that it is kept in."""

    covariances: str
    share: float = 0.99
    kept: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """What the table calls it."""
        share = f" {self.share:g}" if self.covariances == "low-rank" else ""
        kept = "" if self.kept == torch.float32 else f", {str(self.kept).removeprefix('torch.')}"
        return f"{self.covariances}{share}{kept}"


FORMS = (
    Form("class"),
    Form("class", kept=torch.bfloat16),
    Form("class", kept=torch.float16),
    Form("low-rank", 0.99),
    Form("low-rank", 0.95),
    Form("low-rank", 0.9),
    Form("task"),
    Form("last-task"),
    Form("diagonal"),
)


@dataclass(frozen=True, eq=False)
class Data:
    """Features (N, n) and labels (N) of the images learned, and of those held out."""

    features: Tensor
    labels: Tensor
    held_features: Tensor
    held_labels: Tensor

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return int(self.labels.max()) + 1


def compute_features(folder: Path) -> tuple[Tensor, Tensor]:
    """Return features (N, 1280) in half precision, and labels (N), of all training images."""
    import numpy as np
    import pyarrow.parquet as parquet
    from PIL import Image

    from efcil.network.backbones import locate

    backbone = locate("efficientnet-lite0")
    assert backbone.weights is not None
    network, view = backbone.build(0).eval(), backbone.weights.view
    mean, deviation = (torch.tensor(each).view(1, 3, 1, 1) for each in (view.mean, view.std))
    found, labels = [], []
    for file in sorted(folder.glob("train*.parquet")):
        for rows in parquet.ParquetFile(file).iter_batches(256):
            content = rows.to_pydict()
            pixels = [np.asarray(Image.open(io.BytesIO(each["bytes"])).convert("RGB")) for each in content["image"]]
            images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
            images = functional.interpolate(images, size=(PIXELS, PIXELS), mode="bilinear", align_corners=False)
            with torch.no_grad():
                found.append(network((images - mean) / deviation).half())
            labels += content["label"]
    return torch.cat(found), torch.tensor(labels)


def divide(features: Tensor, labels: Tensor, size: int, held_out: int, seed: int) -> Data:
    """Choose `size` features and the images that are held out of every class; classes get a random order."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randperm(features.shape[1], generator=generator)[:size].sort().values
    order = torch.randperm(int(labels.max()) + 1, generator=generator)
    labels = order[labels]
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(len(order)):
        rows = (labels == label).nonzero()[:, 0]
        held[rows[torch.randperm(len(rows), generator=generator)[:held_out]]] = True
    features = features[:, columns].float()
    return Data(features[~held], labels[~held], features[held], labels[held])


def remember(data: Data, form: Form, tasks: int) -> ClassMemory:
    """Measure all classes, task after task; what is kept of covariances is rounded to the type asked for."""
    memory = ClassMemory(data.features.shape[1], why="", covariances=form.covariances, share=form.share, table=True)
    size = data.classes // tasks
    for first in range(0, data.classes, size):
        rows = (data.labels >= first) & (data.labels < first + size)
        memory.add(data.features[rows], data.labels[rows], range(first, first + size))
    name = "compact" if form.covariances in ("low-rank", "diagonal") else "covariances"
    setattr(memory, name, getattr(memory, name).to(form.kept).float())
    memory.restored()
    return memory


def separate_heads(data: Data, tasks: int, seed: int) -> Tensor:
    """Return heads (C, n), each task's trained on its own features alone."""
    size, generator = data.classes // tasks, torch.Generator().manual_seed(seed)
    heads = []
    for first in range(0, data.classes, size):
        rows = ((data.labels >= first) & (data.labels < first + size)).nonzero()[:, 0]
        weight = torch.zeros(size, data.features.shape[1])
        velocity = torch.zeros_like(weight)
        for _ in range(ALONE_EPOCHS):
            mixed = rows[torch.randperm(len(rows), generator=generator)]
            _epoch(weight, velocity, data.features[mixed], data.labels[mixed] - first)
        heads.append(weight)
    return torch.cat(heads)


def rebalance(data: Data, memory: ClassMemory, heads: Tensor, tasks: int, seed: int) -> Tensor:
    """Return re-balanced heads (C, n)."""
    old = data.classes - data.classes // tasks
    sampler = memory.sampler(JITTER)
    weight = heads.clone()
    velocity, new = torch.zeros_like(weight), (data.labels >= old).nonzero()[:, 0]
    counts = [DRAWN] * old + [0] * (data.classes - old)
    for epoch in range(EPOCHS):
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        drawn, labels = sampler.classes(counts, generator)
        some = new[torch.randperm(len(new), generator=generator)[: DRAWN * (data.classes - old)]]
        features, targets = torch.cat([drawn, data.features[some]]), torch.cat([labels, data.labels[some]])
        order = torch.randperm(len(targets), generator=generator)
        _epoch(weight, velocity, features[order], targets[order])
    return weight


def _epoch(weight: Tensor, velocity: Tensor, features: Tensor, labels: Tensor) -> None:
    softmax_epoch(
        weight, velocity, features, labels,
        batch_size=BATCH, learning_rate=RATE, momentum=MOMENTUM, weight_decay=DECAY,
    )  # fmt: skip


def accuracy(data: Data, weight: Tensor) -> float:
    """Percentage of the held-out images that the heads answer rightly."""
    return 100 * float(((data.held_features @ weight.T).argmax(dim=1) == data.held_labels).float().mean())


def measure(
    data: Callable[[int], Data], forms: tuple[Form, ...], seeds: range, table: Table, tasks: int = TASKS
) -> None:
    """Accuracy over seeds, its difference to that of the first form, bytes, and components."""
    found: dict[str, list[float]] = {form.name: [] for form in forms}
    for seed in seeds:
        now = data(seed)
        heads, what = separate_heads(now, tasks, seed), f"{now.features.shape[1]} features"
        for form in forms:
            memory = remember(now, form, tasks)
            weight = rebalance(now, memory, heads, tasks, seed)
            found[form.name].append(accuracy(now, weight))
            if seed == seeds[-1]:
                kept = memory.spread()
                table.add(f"{what}, covariances", form.name, kept.numel() * form.kept.itemsize / 1e6, "MB")
                if components := memory.components():
                    table.add(f"{what}, components, mean", form.name, statistics.mean(components), "columns")
                    table.add(f"{what}, components, most", form.name, max(components), "columns")
    for name, values in found.items():
        differences = [each - full for each, full in zip(values, found[forms[0].name], strict=True)]
        table.add(f"{what}, accuracy, mean of {len(seeds)} seeds", name, statistics.mean(values), "%")
        table.add(f"{what}, accuracy less that of {forms[0].name}", name, statistics.mean(differences), "points")
        if len(seeds) > 1:
            table.add(f"{what}, its standard deviation", name, statistics.stdev(differences), "points")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the Parquet shards of Tiny-ImageNet")
    parser.add_argument("--features", type=Path, required=True, help="file that features are kept in")
    parser.add_argument("--sizes", type=int, nargs="+", default=[512], help="numbers of features")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held-out", type=int, default=50, help="images of every class that accuracy is measured on")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not arguments.features.exists():
        torch.save(compute_features(arguments.data), arguments.features)
    features, labels = torch.load(arguments.features, weights_only=True)
    table = Table()
    for size in arguments.sizes:

        def data(seed: int, size: int = size) -> Data:
            return divide(features, labels, size, arguments.held_out, seed)

        measure(data, FORMS, range(arguments.seeds), table)
    if arguments.output is not None:
        table.write(arguments.output)


if __name__ == "__main__":
    main()
