"""Which device, precision and implementation a run gets, and the global switches of PyTorch that go with them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from efcil import ranks
from efcil.engine.trainer import Execution
from efcil.errors import SettingsError, TrainingError
from efcil.settings import TrainingSettings

PHASES = ("start_up", "train", "statistics", "evaluation")
VISIBLE = "CUDA_VISIBLE_DEVICES"
MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
#: Threads of the host beside a GPU. It has little to compute there, and threads of several runs wait for each other.
_BESIDE_GPU = 2


def choose_execution(settings: TrainingSettings) -> Execution:
    """Return how a run is executed on this machine; settings left open get the fastest value that applies."""
    device = choose_device(settings.device)
    on_cuda = device.type == "cuda"
    suited = multiplies_bf16(device)
    half = suited if settings.precision == "auto" else settings.precision == "bf16"
    fused = suited and half if settings.path == "auto" else settings.path == "fused"
    if fused and half and not on_cuda:
        raise SettingsError("The fused path computes in bf16 on GPUs only. Use --precision fp32, or --path plain.")
    if fused and half and not suited:
        raise SettingsError(
            f"The fused path computes in bf16 on NVIDIA GPUs of compute capability 8.0 (Ampere) or later only, and "
            f"this is {torch.cuda.get_device_name(device)}. Leave out --precision and --path."
        )
    # fp32 and tf32 on the plain path are the reference for everything faster, so they stay eager.
    captured = on_cuda and (half or fused) and ranks.capturable()
    return Execution(device, half=half, fused=fused, captured=captured, tf32=on_cuda and settings.precision == "tf32")


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is a GPU if there is one. Processes of one run have one GPU each."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not name.startswith("cuda"):
        return torch.device(name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise SettingsError(f"Device {name} was requested, but PyTorch finds no GPU here. Use --device cpu, or auto.")
    device = torch.device(name)
    if ranks.several():
        return _own_gpu(device, count)
    index = 0 if device.index is None else device.index
    if index >= count:
        raise SettingsError(f"Device {name} was requested, but there are {count} GPUs here, numbered from 0.")
    return torch.device("cuda", index)


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether a device has units for bf16: NVIDIA's GPUs since Ampere. Others emulate it, or raise."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def processor_multiplies_bf16() -> bool:
    """Return whether the CPU has units for bf16 (AMX, AVX512-BF16), as far as PyTorch says. Others emulate it."""
    tests = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return any(bool(test()) for test in tests if test is not None)


def _own_gpu(device: torch.device, count: int) -> torch.device:
    """Return the GPU of this process, of `count` on this machine."""
    here = ranks.place()
    if device.index is not None:
        raise SettingsError(f"Every process of a run has its own GPU, so it cannot be {device}. Use --device cuda.")
    if ranks.through_host():
        return torch.device("cuda", here.local_rank % count)
    if here.local_size > count:
        raise SettingsError(
            f"torchrun has started {here.local_size} processes on this machine, which has {count} GPUs. Use "
            f"--nproc-per-node {count}, or --device cpu."
        )
    return torch.device("cuda", here.local_rank)


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, each as CUDA_VISIBLE_DEVICES would name it alone."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return named[:count] if named else [str(index) for index in range(count)]


@cache
def wake(device: torch.device) -> None:
    """Start initialising a GPU, which takes seconds, while the caller reads images; a second call does nothing."""

    def touch() -> None:
        with suppress(RuntimeError):  # the run will meet the same error and report it
            torch.zeros(1, device=device)

    if device.type == "cuda":
        threading.Thread(target=touch, daemon=True).start()


def describe(execution: Execution, deterministic: bool) -> dict[str, Any]:
    """Return what may change the bits of a result, as plain values."""
    return {
        "device": execution.device.type,
        "precision": "bf16" if execution.half else "tf32" if execution.tf32 else "fp32",
        "path": "fused" if execution.fused else "plain",
        "deterministic": deterministic,
    }


def threads(execution: Execution) -> dict[str, int]:
    """Return the number of threads if it affects how sums are rounded: on a CPU."""
    return {"threads": torch.get_num_threads()} if execution.device.type == "cpu" else {}


def sharing() -> dict[str, int]:
    """Return how many processes share a run, if there are several; they round sums differently than one does."""
    return {"ranks": ranks.count()} if ranks.several() else {}


@contextmanager
def switches(execution: Execution, deterministic: bool) -> Iterator[None]:
    """Set PyTorch's global switches for a run, and restore them afterwards."""
    backend: Any = torch.backends.cudnn
    filling: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        filling.fill_uninitialized_memory,
        torch.get_float32_matmul_precision(),
        (backend.deterministic, backend.benchmark, backend.allow_tf32),
        os.environ.get(_WORKSPACE),
        torch.get_num_threads(),
    )
    try:
        torch.set_float32_matmul_precision("highest")
        backend.allow_tf32 = execution.tf32 or (backend.allow_tf32 and execution.half)
        backend.deterministic = deterministic
        backend.benchmark = False  # cuDNN's default choice was as fast as its tuned one, and does not vary
        if deterministic:
            os.environ[_WORKSPACE] = ":4096:8"  # read when cuBLAS starts, which happens inside this context
            filling.fill_uninitialized_memory = False
        _allow_only_repeating(deterministic)
        if execution.device.type == "cuda":
            torch.cuda.set_device(execution.device)
            torch.set_num_threads(min(before[6], _BESIDE_GPU))
        with torch.inference_mode(False), torch.enable_grad():  # the caller may have switched gradients off
            yield
    finally:
        _allow_only_repeating(before[0], warn_only=before[1])
        filling.fill_uninitialized_memory = before[2]
        torch.set_float32_matmul_precision(before[3])
        backend.deterministic, backend.benchmark, backend.allow_tf32 = before[4]
        if before[5] is None:
            os.environ.pop(_WORKSPACE, None)
        else:
            os.environ[_WORKSPACE] = before[5]
        if torch.get_num_threads() != before[6]:
            torch.set_num_threads(before[6])


def _allow_only_repeating(wanted: bool, warn_only: bool = False) -> None:
    """Set PyTorch's switch unless it is set already: setting it loads the compiler, which takes seconds."""
    now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if now != (wanted, warn_only):
        torch.use_deterministic_algorithms(wanted, warn_only=warn_only)


def refuse_broken_products(execution: Execution) -> None:
    """Raise if products or convolutions leave part of a result unwritten, as some do under a share of a GPU (MPS).

    With CUDA 13.0 on an H200, this was seen for matrix products in bfloat16, which no method computes. This function
    checks the types that statistics and losses are computed in, and the convolutions of a training step.
    """
    if not (_multiplies(execution.device) and _convolves(execution)):
        share = os.environ.get(MPS_SHARE, "100")
        raise TrainingError(
            f"Products on this GPU are wrong in a process that may use {share} % of it ({MPS_SHARE}). Run without "
            f"--jobs-per-gpu, or set {MPS_SHARE} to another share."
        )


def _multiplies(device: torch.device) -> bool:
    for dtype in (torch.float32, torch.float64):
        for rows, inner, columns in ((64, 512, 100), (5000, 512, 512), (512, 5000, 512)):
            left = torch.ones(rows, inner, device=device, dtype=dtype)
            right = torch.ones(inner, columns, device=device, dtype=dtype)
            result = torch.full((rows, columns), math.nan, device=device, dtype=dtype)
            torch.mm(left, right, out=result)
            if not bool((result == inner).all()):
                return False
    return True


def _convolves(execution: Execution) -> bool:
    device, dtype = execution.device, execution.dtype
    batch = 64 if device.type == "cuda" else 2
    for channels, size in ((64, 32), (128, 16), (256, 8), (512, 4)):
        for kernel, stride in ((3, 1), (1, 2)):
            images = torch.ones(batch, channels, size, size, device=device, dtype=dtype)
            weight = torch.ones(channels, channels, kernel, kernel, device=device, dtype=dtype)
            images, weight = (x.contiguous(memory_format=torch.channels_last) for x in (images, weight))
            images, weight = images.requires_grad_(), weight.requires_grad_()
            # The memory allocated next held NaN, so an element that is not written to is noticed.
            for like in (images, images[:, :, ::stride, ::stride], weight):
                torch.full(like.shape, math.nan, device=device, dtype=dtype)
            result = functional.conv2d(images, weight, stride=stride, padding=kernel // 2)
            results = [result.detach()]
            if device.type == "cuda" and execution.half:
                shape: Any = ((stride, stride), (kernel // 2, kernel // 2), (1, 1), 1)
                zeros, bias = torch.zeros_like(results[0]), torch.zeros(channels, device=device, dtype=dtype)
                fused = torch.cudnn_convolution_add_relu(images.detach(), weight.detach(), zeros, 1.0, bias, *shape)
                results.append(fused)
            gradients = torch.autograd.grad(result, (images, weight), torch.ones_like(result))
            results.append(gradients[0][:, :, ::stride, ::stride])
            if stride == 2 and bool(gradients[0][:, :, 1::2].any() or gradients[0][:, :, :, 1::2].any()):
                return False
            pixels = float(batch * result.shape[2] * result.shape[3])
            # At the edges of an image a window of 3 x 3 sees four of its nine pixels, or six.
            all_seen = [(found, float(channels * kernel * kernel), 0.4) for found in results]
            for found, whole, least in [*all_seen, (gradients[1], pixels, 0.5)]:
                if not bool(((found > least * whole) & (found < 1.01 * whole)).all()):
                    return False
    return True


class Clock:
    """Adds up seconds by phase. It waits for the device only between phases."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._earlier: dict[str, float] = dict.fromkeys((*PHASES, "total"), 0.0)
        self._now: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._started = time.perf_counter()
        self._running: tuple[str, float] | None = None

    def load(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds that `report` returned before an interruption; they replace any loaded before."""
        self._earlier = dict(seconds)

    def credit(self, seconds: float) -> None:
        """Count training that another run has done, which shares it."""
        self._earlier["train"] += seconds
        self._earlier["total"] += seconds

    def waited(self, seconds: float) -> None:
        """Leave out time spent waiting for other processes."""
        self._earlier["total"] -= seconds

    def report(self) -> dict[str, float]:
        """Return the seconds of all phases, and in total; the latter includes writing and printing."""
        now = time.perf_counter()
        current = self._now | {"total": now - self._started}
        if self._running is not None:
            phase, start = self._running
            current[phase] += now - start
        return {name: self._earlier[name] + current[name] for name in current}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as `name`."""
        self._wait()
        start = time.perf_counter()
        self._running = (name, start)
        try:
            yield
            self._wait()
        finally:
            self._running = None
        self._now[name] += time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
