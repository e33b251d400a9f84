"""The inputs of training steps, prepared ahead for a block of steps.

A block is up to `BLOCK` consecutive steps of an epoch. Before it starts, its images are augmented, frozen networks
process them in large batches, and the method's random numbers are drawn. The results are in tensors that keep their
addresses from block to block, so that a captured step can read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from efcil import ranks, seeds
from efcil.compiled import compiled
from efcil.data.store import TaskImages, View
from efcil.data.tiers import DEVICE
from efcil.methods.base import Batch, Method, Piece, Plan, Task

if TYPE_CHECKING:
    from efcil.engine.gather_kernel import Gathering

BLOCK = 128
LARGE_BLOCK = 16
FROZEN_PIECE = 1280


def block_steps(data: TaskImages, batch_size: int) -> int:
    """Return how many steps are prepared together."""
    # Fixed by the image size alone: random draws must not depend on the memory of the machine.
    return min(-(-len(data) // batch_size), BLOCK if data.size <= 64 else LARGE_BLOCK)


def prepared_bytes(data: TaskImages, batch_size: int) -> int:
    """Return the bytes on the device of prepared images; on CUDA those of two blocks, and of pieces being sent."""
    images = (block_steps(data, batch_size) + 1) * batch_size
    block = images * 3 * data.size**2 * data.dtype.itemsize
    if data.device.type != "cuda":
        return block
    piece = min(FROZEN_PIECE, data.chunk_size())
    # Where images are sent, the next piece may be on its way while one is rendered.
    on_the_way = 0 if data.kept.tier == DEVICE else 2 * piece * data.kept.bytes // max(len(data), 1)
    return 2 * block + on_the_way


def staged_bytes(data: TaskImages, batch_size: int) -> int:
    """Return the bytes on the host of images on their way to the device: a block read ahead, and one being sent."""
    if data.device.type != "cuda" or data.kept.tier == DEVICE:
        return 0
    return 2 * block_steps(data, batch_size) * batch_size * data.kept.bytes // max(len(data), 1)


class Feed:
    """Prepares blocks of steps for a learner and returns their batches."""

    def __init__(
        self, learner: Method, data: TaskImages, task: Task, batch_size: int, label_smoothing: float = 0.0
    ) -> None:
        self.learner = learner
        self.label_smoothing = label_smoothing
        self.data = data
        self.task = task
        self.batch_size = batch_size
        self.steps_per_epoch = -(-len(data) // batch_size)
        self.remainder = len(data) % batch_size
        self.repeats = learner.previous_images(task) if task.index > 0 else 0
        self.block_steps = block_steps(data, batch_size)
        rows = (self.block_steps + 1) * batch_size
        self.labels = torch.zeros(rows, device=data.device, dtype=torch.int64)
        self.frozen: dict[str, Tensor] = {}
        self.draws: dict[str, Tensor] = {}
        # On CUDA the next block is prepared during the steps of the present one, in a second set of tensors.
        self._beside = _second_stream(data.device) if data.device.type == "cuda" else None
        self._staged: tuple[int, int] | None = None
        self._taken: torch.cuda.Event | None = None
        self._back: dict[str, Tensor] = {}
        self._views: dict[int, View] = {}
        place = torch.arange(max(batch_size, self.repeats), device=data.device)
        self._rows = {
            length: torch.cat([place[:length] + batch_size, place[: self.repeats]])
            for length in {batch_size, self.remainder or batch_size}
        }
        #: Whether a captured step's batch is copied by one kernel, and not tensor by tensor.
        self.at_once = compiled(data.device)
        self._gathered: dict[int, tuple[dict[str, Tensor], Gathering]] = {}
        self._piece = min(FROZEN_PIECE, data.chunk_size())
        if task.index > 0:
            with torch.no_grad():
                learner.prepare(task, data)

    @cached_property
    def images(self) -> Tensor:
        """The images of the present block. They may be a gigabyte, which a task that trains nothing does not need."""
        shape, layout = (len(self.labels), 3, self.data.size, self.data.size), torch.channels_last
        return torch.empty(shape, device=self.data.device, dtype=self.data.dtype, memory_format=layout).zero_()

    def blocks(self) -> range:
        """Return the first step of every block of an epoch."""
        return range(0, self.steps_per_epoch, self.block_steps)

    def batch_length(self, step: int) -> int:
        """Return how many images step `step` of an epoch has; the last one may be short."""
        last = step == self.steps_per_epoch - 1
        return self.remainder if last and self.remainder else self.batch_size

    def load(self, epoch: int, first_step: int) -> int:
        """Make the block that starts at `first_step` of `epoch` the present one; return how many steps it has."""
        if self._staged != (epoch, first_step):
            self.stage(epoch, first_step)
        steps = min(self.block_steps, self.steps_per_epoch - first_step)
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)
            for name, value in self._back.items():
                self._front(name, value).copy_(value)
            self._taken = torch.cuda.Event()
            self._taken.record()
        self._staged = None
        return steps

    def stage(self, epoch: int, first_step: int) -> None:
        """Prepare a block; on CUDA this runs in parallel with other work of the device."""
        self._staged = (epoch, first_step)
        if self._beside is None:
            self._prepare(epoch, first_step)
            return
        if self._taken is None or ranks.several():  # messages of processes must not overtake those of the steps
            self._beside.wait_stream(torch.cuda.current_stream())
        else:
            self._beside.wait_event(self._taken)  # what is overwritten now has been read; the steps may still run
        with torch.cuda.stream(self._beside):
            self._prepare(epoch, first_step)

    def fetch(self, epoch: int, first_step: int) -> None:
        """Begin to read the images of a block from the host, if they are kept there, while steps run."""
        if not self.data.apart:
            return
        with nullcontext() if self._beside is None else torch.cuda.stream(self._beside):
            view = self._epoch_view(epoch)
            for begin, end in self._pieces(first_step):
                self.data.fetch(view, begin, end)

    def _pieces(self, first_step: int) -> Iterator[tuple[int, int]]:
        """Yield which images of the epoch are rendered together for the block that starts at `first_step`."""
        stop = min((first_step + self.block_steps) * self.batch_size, len(self.data))
        for begin in range(first_step * self.batch_size, stop, self._piece):
            yield begin, min(begin + self._piece, stop)

    def next_block(self, epoch: int, first_step: int) -> tuple[int, int]:
        """Return epoch and first step of the block after the one at `first_step` of `epoch`."""
        following = first_step + self.block_steps
        return (epoch, following) if following < self.steps_per_epoch else (epoch + 1, 0)

    def _front(self, name: str, like: Tensor) -> Tensor:
        """Return the tensor that steps read `name` from, created on first use."""
        if name == "images":
            return self.images
        if name == "labels":
            return self.labels
        kind, _, key = name.partition("/")
        group = self.frozen if kind == "frozen" else self.draws
        if key not in group:
            group[key] = torch.zeros_like(like)
        return group[key]

    def _into(self, name: str, value: Tensor, rows: slice, length: int) -> None:
        """Write `value` into rows of the tensor called `name`, of `length` rows, of the block being prepared."""
        if self._beside is None:
            # Expanded, so that it has the shape without the memory.
            like = value[:1].expand(length, *value.shape[1:])
            self._front(name, like)[rows].copy_(value)
            return
        if name not in self._back:
            layout = torch.channels_last if value.dim() == 4 else torch.contiguous_format
            self._back[name] = value.new_zeros(length, *value.shape[1:]).contiguous(memory_format=layout)
        self._back[name][rows].copy_(value)

    @torch.no_grad()
    def _prepare(self, epoch: int, first_step: int) -> None:
        size, total = self.batch_size, len(self.labels)
        steps = min(self.block_steps, self.steps_per_epoch - first_step)
        if self.repeats:
            self._prepare_previous(epoch, first_step)
        view = self._epoch_view(epoch)
        start = first_step * size
        for begin, end in self._pieces(first_step):
            images, labels = self.data.render(view, begin, end)
            rows = slice(begin - start + size, end - start + size)
            self._into("images", images, rows, total)
            self._into("labels", labels, rows, total)
            for name, value in self.learner.ahead(self._as_piece(images, epoch, begin)).items():
                self._into(f"frozen/{name}", value, rows, total)
        generator = seeds.generator(self.data.device, self.task.seed, "draw", self.task.index, epoch, first_step)
        plan = Plan(steps, size, self._previous_counts(epoch, first_step, steps))
        for name, value in self.learner.draw(plan, generator).items():
            self._into(f"draws/{name}", value, slice(0, steps), self.block_steps)

    def _as_piece(self, images: Tensor, epoch: int, begin: int) -> Piece:
        def at(other: int) -> Tensor:
            view = self.data.view("epoch", other, training=True)
            return self.data.render(view, begin, begin + len(images))[0]

        return Piece(images, epoch, begin, seeds.derive(self.task.seed, "ahead", self.task.index), at)

    def _epoch_view(self, epoch: int) -> View:
        if epoch not in self._views:
            self._views = {e: v for e, v in self._views.items() if e == epoch - 1}
            self._views[epoch] = self.data.view("epoch", epoch, training=True)
        return self._views[epoch]

    def _prepare_previous(self, epoch: int, first_step: int) -> None:
        """Put the previous batch in front of the block; it is rendered again, so nothing depends on earlier blocks."""
        if first_step == 0 and epoch == 0:
            return
        before = first_step - 1 if first_step else self.steps_per_epoch - 1
        view = self._epoch_view(epoch if first_step else epoch - 1)
        start = before * self.batch_size
        length = min(self.repeats, self.batch_length(before))
        images, labels = self.data.render(view, start, start + length)
        self._into("images", images, slice(0, length), len(self.labels))
        self._into("labels", labels, slice(0, length), len(self.labels))

    def _previous_counts(self, epoch: int, first_step: int, steps: int) -> Tensor:
        # Only the last batch of an epoch may be short, and only the first step of the next epoch follows it.
        counts = torch.full((steps,), self.batch_size, device=self.data.device)
        if first_step == 0:
            counts[:1].fill_(self.batch_length(self.steps_per_epoch - 1) if epoch > 0 else 0)
        return counts

    def batch(self, place: int | Tensor, length: int) -> Batch:
        """Return the batch at `place` of the block: a number, or a one-element tensor when the step is captured."""
        size = self.batch_size
        if isinstance(place, int):
            start = (place + 1) * size
            images = self.images[start : start + length]
            if self.repeats:
                images = torch.cat([images, self.images[start - size : start - size + self.repeats]])
            return Batch(
                images,
                self.labels[start : start + length],
                self.labels[start - size : start - size + self.repeats],
                {name: value[start : start + length] for name, value in self.frozen.items()},
                {name: value[place] for name, value in self.draws.items()},
                self.label_smoothing,
            )
        if self.at_once:
            return self._batch_at_once(place, length)
        rows = self._rows[length] + place * size
        labels = self.labels.index_select(0, rows)
        return Batch(
            self.images.index_select(0, rows),
            labels[:length],
            labels[length:],
            {name: value.index_select(0, rows[:length]) for name, value in self.frozen.items()},
            {name: value.index_select(0, place)[0] for name, value in self.draws.items()},
            self.label_smoothing,
        )

    def _batch_at_once(self, place: Tensor, length: int) -> Batch:
        """As `batch`, by one kernel that writes to the same memory in every step.

        The table of addresses is made in the first step of a length, which is not captured.
        """
        tensors, gathering = self._gathered.get(length) or self._gather(length)
        gathering.run(place)
        frozen = {name: tensors[f"frozen/{name}"] for name in self.frozen}
        draws = {name: tensors[f"draws/{name}"][0] for name in self.draws}
        labels = tensors["labels"]
        return Batch(tensors["images"], labels[:length], labels[length:], frozen, draws, self.label_smoothing)

    def _gather(self, length: int) -> tuple[dict[str, Tensor], Gathering]:
        from efcil.engine.gather_kernel import Gathering, Part

        size, tensors, parts = self.batch_size, {}, []
        for name, source in (("images", self.images), ("labels", self.labels)):
            whole = tensors[name] = self._like(source, length + self.repeats)
            parts.append(Part(source, whole[:length], size, size))
            if self.repeats:
                parts.append(Part(source, whole[length:], size, 0))
        for name, source in self.frozen.items():
            part = tensors[f"frozen/{name}"] = self._like(source, length)
            parts.append(Part(source, part, size, size))
        for name, source in self.draws.items():
            part = tensors[f"draws/{name}"] = self._like(source, 1)
            parts.append(Part(source, part, 1, 0))
        self._gathered[length] = tensors, Gathering(parts)
        return self._gathered[length]

    @staticmethod
    def _like(source: Tensor, rows: int) -> Tensor:
        """Return memory for rows of a tensor, each laid out as there."""
        return source.new_empty_strided((rows, *source.shape[1:]), source.stride()).zero_()


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all tasks: PyTorch's cached memory belongs to a stream, and would be lost with it.
    return torch.cuda.Stream(device)
