"""Work of a CUDA device, recorded once and replayed with one call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

#: How often the most memory that was ever in use a process may hold before it gives back what it does not use.
_MOST_HELD = 3


def capture(action: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Record what `action` launches on the current stream, which must not be the default one, without running it.

    Run `action` once before, so that everything it compiles and keeps is there. Graphs of one `pool` share their memory
    and must not be replayed at the same time.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.current_stream().synchronize()
    if _crowded():
        torch.cuda.empty_cache()
    collecting = gc.isenabled()
    gc.disable()  # a tensor freed by the collector during a capture would invalidate it
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            action()
        except BaseException:
            with suppress(RuntimeError):  # else the stream would stay in capture mode, where all else fails
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    return graph


def _crowded() -> bool:
    """Return whether the memory that this process holds and does not use should be given back before a capture.

    A capture gets its own memory: it can reuse neither what eager work left nor what belonged to graphs that are gone,
    which PyTorch keeps. So every task would add to what a process holds, and other runs on the GPU would find none.
    """
    most = torch.cuda.max_memory_allocated()
    return torch.cuda.mem_get_info()[0] < most or torch.cuda.memory_reserved() > _MOST_HELD * most
