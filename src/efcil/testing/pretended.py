"""A pretended GPU, for mistakes of device placement: real values on the CPU, in tensors that say they are on CUDA.

Inside `pretended()`, an operation between a tensor of the device and one of the CPU raises, as it would on a GPU. So
does a generator of the other device. A captured step runs as it is written, but may not wait for the device, copy to it
or draw from a generator. Our own kernels are left out, and so is bfloat16. Inside a backward pass devices may mix:
autograd's gradients do not know theirs. Other threads know nothing of the pretence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from efcil import compiled
from efcil.engine import capture
from efcil.network.fast import attack

DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_RealGenerator = torch.Generator


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: What makes a tensor on the device that is asked for, the CPU by default, whatever else it gets.
_MAKING = _words("arange empty empty_strided eye full linspace ones rand randint randn randperm zeros")
#: What may have numbers of the CPU (tensors without dimensions) beside tensors of the device.
_WITH_NUMBERS = _words(
    "add sub rsub mul div truediv floordiv floor_divide remainder mod pow eq ne lt le gt ge and or xor logical_and "
    "logical_or maximum minimum where clamp clamp_min clamp_max masked_fill fill lerp addcmul addcdiv logaddexp"
)
#: What the host waits for.
_WAITING = _words(
    "item tolist cpu numpy nonzero argwhere __bool__ __int__ __float__ __index__ __contains__ equal allclose unique "
    "one_hot bincount masked_select linalg_cholesky linalg_cholesky_ex linalg_eigh linalg_eigvalsh linalg_svd "
    "linalg_svdvals linalg_inv linalg_solve linalg_lstsq"
)


class _There(Tensor):
    """A tensor on the device; its operations are those of the CPU, and `_Pretence` marks their results."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = copied = self.detach().clone().requires_grad_(self.requires_grad)
            vars(copied).update(vars(self))
        return memo[id(self)]


class _Generator(_RealGenerator):
    """A generator of random numbers that knows which device it was made for."""

    device = property(lambda self: DEVICE if self.there else _CPU)

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        self.there = _means_there(device)


class _Stream:
    """A stream, or an event: everything happens at once, so nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = __init__


def _means_there(device: Any) -> bool:
    return torch.device(device).type == DEVICE.type


def _marked(tensor: Tensor, there: bool) -> Tensor:
    """Let a tensor be of the device, or of the CPU."""
    if there != isinstance(tensor, _There):
        parameter = isinstance(tensor, nn.Parameter)
        tensor.__class__ = _There if there else nn.Parameter if parameter else Tensor
        if there and parameter:
            tensor._is_param = True
    return tensor


def _all(value: Any, kind: type) -> Iterator[Any]:
    """Yield everything of a kind in arguments or results."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _all(each, kind)
    elif isinstance(value, dict):
        yield from _all(list(value.values()), kind)
    elif isinstance(value, slice):
        yield from _all((value.start, value.stop, value.step), kind)


def _mixed(name: str) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (in {name})"
    )


class _Pretence(TorchFunctionMode):
    """Looks at every operation: refuses what the device would, and marks what comes out."""

    capturing = False
    #: Whether PyTorch has begun to use the device.
    begun = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = function.__name__, dict(kwargs or {})
        for key in ("pin_memory", "non_blocking"):
            kwargs.pop(key, None)
        tensors = list(_all((args, kwargs), Tensor))
        there = any(isinstance(each, _There) for each in tensors)
        if there and self.capturing:
            self._refuse_waiting(name, args, kwargs)
        if there and name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if name in ("__get__", "__set__"):
            return self._attribute(function, args, there)
        if name in ("to", "cpu", "cuda"):
            return self._moved(name, args, kwargs)
        asked = kwargs.pop("device", None)
        if asked is not None:
            there = _means_there(asked)
        elif name in _MAKING or (name == "tensor" and not isinstance(args[0], Tensor)):
            there = False
        elif there:
            self._refuse_mixed(name, args, [each for each in tensors if not isinstance(each, _There)])
        self.begun |= there
        if there and self.capturing and name in ("tensor", "as_tensor"):
            raise RuntimeError(f"torch.{name} copies from the host, which a captured step cannot.")
        for generator in _all((args, kwargs), _RealGenerator):
            if getattr(generator, "there", False) != there:
                raise RuntimeError(f"Expected a {DEVICE.type if there else 'cpu'} device type for generator in {name}.")
            if self.capturing:
                raise RuntimeError(f"{name} draws from a generator that a captured step does not know.")
        result = function(*args, **kwargs)
        if isinstance(result, Tensor) and there != isinstance(result, _There):
            result = result.clone() if any(result is each for each in tensors) else result
            return _marked(result, there)
        for each in _all(result, Tensor) if there else ():
            _marked(each, True)
        return result

    def _attribute(self, function: Any, args: Any, there: bool) -> Any:
        """Read or write an attribute such as `grad` or `data`."""
        name, reads = function.__self__.__name__, function.__name__ == "__get__"
        if name == "grad" and len({isinstance(each, _There) for each in args if isinstance(each, Tensor)}) > 1:
            raise _mixed(name)
        result = function(*args)
        if reads:
            return _marked(result, there) if isinstance(result, Tensor) and there else result
        if name == "data":
            _marked(args[0], isinstance(args[1], _There))
        return result

    def _moved(self, name: str, args: Any, kwargs: Any) -> Tensor:
        """Return what `to`, `cpu` or `cuda` give: a copy, if the device is another one."""
        tensor, rest = args[0], list(args[1:])
        before = after = isinstance(tensor, _There)
        if name != "to":
            after, rest = name == "cuda", []
        elif rest and isinstance(rest[0], Tensor):
            after, rest = isinstance(rest[0], _There), [rest[0].dtype]
        elif rest and isinstance(rest[0], str | int | torch.device):
            after, rest = _means_there(rest[0]), rest[1:]
        asked = kwargs.pop("device", None)
        after = after if asked is None else _means_there(asked)
        self.begun |= after
        if before != after and self.capturing:
            raise RuntimeError(f"{name} copies between host and device, which a captured step cannot.")
        rest = [each for each in rest if isinstance(each, torch.dtype)] or [kwargs.pop("dtype", None) or tensor.dtype]
        moved = tensor.to(*rest, **{**kwargs, **({"copy": True} if before != after else {})})
        return moved if moved is tensor else _marked(moved, after)

    def _refuse_waiting(self, name: str, args: Any, kwargs: Any) -> None:
        """Refuse what a captured step cannot do, given tensors of the device."""
        waits = name in _WAITING or (name == "where" and len(args) == 1)
        if name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], Tensor):
            waits = kwargs.get("output_size") is None
        if name in ("__getitem__", "__setitem__"):
            index = list(_all(args[1], Tensor))
            masked = any(each.dtype == torch.bool for each in index)
            # One number is filled in wherever a mask selects; for all else, what it selects must be counted.
            counted = masked and (len(args) == 2 or isinstance(args[2], Tensor))
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            waits = counted or any(isinstance(each, list) for each in parts) or any(not each.is_cuda for each in index)
        if waits:
            raise RuntimeError(f"{name} makes the host wait for the device, which a captured step cannot.")

    def _refuse_mixed(self, name: str, args: Any, here: list[Tensor]) -> None:
        """Refuse an operation of tensors of the device with those `here`, of the CPU, unless CUDA has it."""
        if not here or name == "_has_compatible_shallow_copy_type" or torch._C._current_graph_task_id() != -1:
            return
        if name == "copy_":
            if self.capturing:
                raise RuntimeError("copy_ copies between host and device, which a captured step cannot.")
            return
        numbers = not any(each.dim() for each in here)
        if name in ("__getitem__", "__setitem__"):
            if not isinstance(args[0], _There) and (name == "__getitem__" or list(_all(args[1], Tensor))):
                raise _mixed(name)
            if name == "__setitem__" and isinstance(args[2], Tensor) and list(_all(args[1], Tensor)):
                value = args[2]
                if value.dim() and isinstance(args[0], _There) != isinstance(value, _There):
                    raise _mixed(name)
            return
        in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        bare = name.strip("_")
        known = bare in _WITH_NUMBERS or (name.startswith("__") and bare[1:] in _WITH_NUMBERS)  # __radd__, __iadd__
        if not numbers or not known or (in_place and not isinstance(args[0], _There)):
            raise _mixed(name)


def missing() -> str | None:
    """Return why nothing can be pretended here; None if it can."""
    if torch.cuda.is_available():
        return "There is a GPU here, which is better than a pretended one."
    parts = (torch._C, "_current_graph_task_id"), (torch._C, "_group_tensors_by_device_and_dtype")
    absent = [name for where, name in (*parts, (torch.autograd, "_engine_run_backward")) if not hasattr(where, name)]
    return f"PyTorch {torch.__version__} has no {absent[0]}." if absent else None


@contextmanager
def pretended() -> Iterator[torch.device]:
    """Pretend that there is a GPU, which is the device that this gives."""
    pretence, run_backward = _Pretence(), torch.autograd._engine_run_backward
    by_device = torch._C._group_tensors_by_device_and_dtype
    streams = [_Stream(), _Stream()]

    class Graph:
        def __init__(self, action: Callable[[], None], pool: Any = None) -> None:
            self.action = action

        def replay(self) -> None:
            with mock.patch.object(pretence, "capturing", True):
                self.action()

    @contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    def backward(*args: Any, **kwargs: Any) -> Any:
        with pretence:  # which is off in functions of PyTorch's, and this one calls ours
            return run_backward(*args, **kwargs)

    def grouped(lists: Any, with_indices: bool) -> Any:
        groups = by_device(lists, with_indices).items()
        return {(next(_all(found[0], Tensor)).device, kind): found for (_, kind), found in groups}

    def begin() -> None:
        pretence.begun = True

    def reset_peak(*_: Any) -> None:
        if not pretence.begun:
            raise RuntimeError("Allocator not initialized for device 0: did you call init?")

    plenty = 1 << 34
    with ExitStack() as stack:
        for where, name, instead in (
            (torch, "Generator", _Generator),
            (torch.autograd, "_engine_run_backward", backward),
            (torch._C, "_group_tensors_by_device_and_dtype", grouped),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "init", begin),
            (torch.cuda, "reset_peak_memory_stats", reset_peak),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "get_device_name", lambda *_: "a pretended GPU"),
            (torch.cuda, "get_device_capability", lambda *_: (7, 0)),  # of those that compute in float32
            (torch.cuda, "set_device", lambda *_: None),
            (torch.cuda, "Stream", _Stream),
            (torch.cuda, "Event", _Stream),
            (torch.cuda, "stream", on),
            (torch.cuda, "current_stream", lambda *_: streams[-1]),
            (torch.cuda, "default_stream", lambda *_: streams[0]),
            (torch.cuda, "is_current_stream_capturing", lambda: pretence.capturing),
            (torch.cuda, "graph_pool_handle", _Stream),
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.cuda, "mem_get_info", lambda *_: (plenty, plenty)),
            (torch.cuda, "memory_reserved", lambda *_: 0),
            (torch.cuda, "memory_allocated", lambda *_: 0),
            (compiled, "_triton", lambda: False),
            (capture, "capture", Graph),
            (attack, "capture", Graph),
        ):
            stack.enter_context(mock.patch.object(where, name, instead))
        stack.enter_context(pretence)
        yield DEVICE
