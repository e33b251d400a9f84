"""Photographs of one task, decoded and kept by several processes of one machine: seconds, or memory, of all of them.

    python benchmarks/photographs.py FOLDER --images 2400 --classes 6
    torchrun --nproc-per-node 2 benchmarks/sharing.py FOLDER
    torchrun --nproc-per-node 2 benchmarks/sharing.py FOLDER --memory
    python benchmarks/sharing.py FOLDER                            # one process, to compare with

Memory is the proportional share (PSS) that Linux states for every process, summed: a page that two of them have counts
once. It is read before and after, so that Python and PyTorch do not count, and once every 50 ms, for the peak. Reading
it takes time, so that seconds are measured without.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path

import torch

from efcil import ranks
from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.sources import SourceOptions, load_dataset
from efcil.data.tiers import TIERS, Keeping
from efcil.data.whole import WholeTaskImages, task_images

PAGE = 4096


def memory(process: int) -> int:
    """Return the bytes that a process has, each shared page divided among those that have it."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class Watch:
    """The memory of some processes together, and the most that it was, read again and again by a thread."""

    def __init__(self, processes: list[int]) -> None:
        self.processes = processes
        self.before = self.peak = self.now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def now(self) -> int:
        """Return the sum now."""
        return sum(memory(process) for process in self.processes)

    def _work(self) -> None:
        while not self._ended.wait(0.05):
            self.peak = max(self.peak, self.now())

    def end(self) -> str:
        """Return what came on top, now and at the peak."""
        self._ended.set()
        self._thread.join()
        now = self.now()
        top, peak = ((each - self.before) / 1e6 for each in (now, max(self.peak, now)))
        return f"{top:,.0f} MB, at the peak {peak:,.0f} MB"


def main() -> None:
    """Decode all training images as one task, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep-images", choices=TIERS, default="host")
    parser.add_argument("--memory", action="store_true", help="measure memory in place of time")
    options = parser.parse_args()
    dataset = load_dataset("imagenet-1k", options.folder, SourceOptions())
    with ranks.joined():
        processes = ranks.gather(torch.tensor(os.getpid())).tolist()
        watch = Watch(processes) if options.memory and ranks.first() else None
        ranks.anyone(False)
        start, used = time.perf_counter(), time.process_time()
        data = task_images(
            dataset.train.images, dataset.train.labels, augmentation=make_augmentation("resized-crop"),
            normalisation=Normalisation(dataset.mean, dataset.std), device=torch.device("cpu"), seed=0, name="task0",
            keeping=Keeping(options.keep_images),
        )  # fmt: skip
        assert isinstance(data, WholeTaskImages)
        ranks.anyone(False)
        seconds = time.perf_counter() - start
        processor = float(ranks.gather(torch.tensor(time.process_time() - used)).sum())
        data.images.pixels[::PAGE].sum()  # every process reads every page
        ranks.anyone(False)
        if ranks.first():
            found = f"{seconds:.1f} s, of the processor {processor:.1f} s" if watch is None else watch.end()
            size = f"{len(data):,} images, {data.kept.bytes / 1e6:,.0f} MB"
            print(f"{size}, processes {len(processes)}, {options.keep_images}: {found}")
        ranks.anyone(False)


if __name__ == "__main__":
    main()
