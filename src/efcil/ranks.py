"""One run in several processes: who this process is, and how it talks to the others.

`torchrun` starts the processes and numbers them (ranks). All of them execute the same program and hold the same state.
What is shared is the network: `network/split.py` lets every process compute its part of a batch. The processes of one
machine also share the work of decoding images, and one copy of them (`data/together.py`). Only the first one reads and
writes the files of a run, and prints.

This is the only module that imports torch.distributed. In a single process everything here returns at once.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeVar

from efcil.errors import DataError, TrainingError

if TYPE_CHECKING:
    from torch import Tensor

#: Seconds that a process waits for the others: longer than any of them may compute or write alone.
PATIENCE = 300.0
POLL_SECONDS = 0.02
#: Seconds in which all processes have ended after a request to stop was obeyed, or after a mistake; torchrun gives them
#: thirty.
LEAVING_SECONDS = 25.0
#: Numbers that are computed by every process for itself may differ by this share of the largest one.
TOLERANCE = 0.02
#: With the value `host`, NCCL is not used: a GPU can then be tried out with several processes. With `uncaptured`, its
#: messages are no part of a CUDA graph, and neither is a training step.
MESSAGES_VARIABLE = "EFCIL_MESSAGES"
#: What torchrun sets, and other launchers do not.
RUN_VARIABLE = "TORCHELASTIC_RUN_ID"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Place:
    """The number of this process, and how many there are: in all, and on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


@dataclass
class _World:
    """The processes that this one has joined; `store` holds small values that all of them can read."""

    place: Place = Place()
    store: Any = None
    #: How many times something was left to one process; it names the place of the answer in the store.
    asked: int = 0
    #: The ranks of the processes on this machine that can open each other's files, in order; none: only this one.
    mates: range = range(0)


_world = _World()


class Lost(TrainingError):
    """Another process of the run has ended, or does not answer."""


class Followed(TrainingError):
    """The first process has stopped, and has said why."""


# -- who we are ------------------------------------------------------------------------------------------------------


def launched() -> Place:
    """Return what the environment says of this process, before it has joined the others."""
    if any(name not in os.environ for name in _NEEDED):
        return Place()
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return Place(rank, size, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    except ValueError:
        return Place()


def place() -> Place:
    """Return which process of the run this is."""
    return _world.place


def count() -> int:
    """Return the number of processes of the run."""
    return _world.place.size


def several() -> bool:
    """Return whether the run has more than one process."""
    return _world.place.size > 1


def first() -> bool:
    """Return whether this process reads and writes the files of the run, and prints."""
    return _world.place.rank == 0


def through_host() -> bool:
    """Return whether tensors of GPUs are sent through the memory of the host, so that processes may share a GPU."""
    return os.environ.get(MESSAGES_VARIABLE) == "host"


def capturable() -> bool:
    """Return whether what the processes send each other may be part of a CUDA graph: NCCL's messages only."""
    return not several() or os.environ.get(MESSAGES_VARIABLE) not in ("host", "uncaptured")


@contextmanager
def joined() -> Iterator[None]:
    """Connect the processes that `torchrun` has started; does nothing if there is only one."""
    found = launched()
    if found.size < 2 or several():
        yield
        return
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise TrainingError("This build of PyTorch cannot train in several processes. Start efcil without torchrun.")
    timeout = datetime.timedelta(seconds=PATIENCE)
    # Messages between processes that are not about tensors on a GPU never wait for one.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and not through_host() else "gloo"
    with _connected():
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
        store.set_timeout(timeout)
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout
        )
    _world.place, _world.store, _world.asked = found, dist.PrefixStore("efcil", store), 0
    try:
        _world.mates = _found_mates()
        yield
        anyone(False)  # the last one to finish may still need the others
        with suppress(RuntimeError):
            dist.destroy_process_group()
    except KeyboardInterrupt:
        _leave_together()
        raise
    finally:
        _world.place, _world.store, _world.mates = Place(), None, range(0)


def _leave_together() -> None:
    """Wait for the others to have stopped too."""
    _ignore_torchrun()
    end = time.monotonic() + LEAVING_SECONDS
    with suppress(RuntimeError):
        _world.store.set(f"left/{_world.place.rank}", "")
        others = [f"left/{rank}" for rank in range(count())]
        while not _world.store.check(others) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)


def leave_silently() -> None:
    """Let the first process say what is wrong before this one ends, which has nothing to add.

    torchrun ends all processes as soon as one has ended: this one now waits for that.
    """
    if RUN_VARIABLE in os.environ:
        with suppress(KeyboardInterrupt):
            time.sleep(LEAVING_SECONDS)


def _ignore_torchrun() -> None:
    """Let this process, which is about to end, say why: torchrun ends all of them as soon as one has ended."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def _connected() -> Iterator[None]:
    """Turn the errors of a broken connection into a sentence."""
    try:
        yield
    except RuntimeError as error:
        _ignore_torchrun()
        raise Lost(
            "Another process of this run has ended, or does not answer. The last checkpoint is intact: run the same "
            "command again to resume."
        ) from error


# -- tensors ---------------------------------------------------------------------------------------------------------


def share(rows: int) -> slice:
    """Return the part of `rows` rows that this process computes."""
    here = _world.place
    return slice(here.rank * rows // here.size, (here.rank + 1) * rows // here.size)


def gather(own: Tensor) -> Tensor:
    """Return the tensors of all processes, which have one shape, stacked in their order."""
    import torch.distributed as dist

    own = own.detach().contiguous()
    if not several():
        return own[None]
    sent = _sent(own)
    found = sent.new_empty(count(), *sent.shape)
    with _connected():
        dist.all_gather(list(found.unbind()), sent)
    return found.to(own.device)


def gather_rows(own: Tensor, rows: int) -> Tensor:
    """Return all `rows` rows of a tensor of which every process has its `share`."""
    import torch

    size = count()
    most = -(-rows // size)
    padded = own.new_zeros(most, *own.shape[1:])
    padded[: len(own)] = own
    lengths = [(rank + 1) * rows // size - rank * rows // size for rank in range(size)]
    return torch.cat([part[:length] for part, length in zip(gather(padded), lengths, strict=True)])


def average(tensors: Sequence[Tensor]) -> None:
    """Replace every tensor by its mean over all processes, in place; summed in float32 at least."""
    if not several() or not tensors:
        return
    import torch
    import torch.distributed as dist

    narrow = (torch.bfloat16, torch.float16)
    alone = tensors[0] if len(tensors) == 1 else None
    direct = alone is not None and alone.is_contiguous() and alone.dtype not in narrow
    # As one message: every message has to wait for the slowest process.
    flat = alone if direct else torch.cat([_wide(tensor).reshape(-1) for tensor in tensors])
    assert flat is not None
    sent = _sent(flat)
    with _connected():
        dist.all_reduce(sent)
    sent.mul_(1.0 / count())
    if sent is not flat:
        flat.copy_(sent)
    if not direct:
        for tensor, piece in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def _sent(tensor: Tensor) -> Tensor:
    """Return the tensor where it can be sent from."""
    return tensor.cpu() if tensor.is_cuda and through_host() else tensor


def _wide(tensor: Tensor) -> Tensor:
    import torch

    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def settle(state: Mapping[str, Tensor], what: str) -> bool:
    """Check that all processes hold the same state; return whether it had to be made the same in its last bits.

    What every process computes for itself from the same numbers is equal on equal CPUs. GPUs may add in another order:
    then the numbers of the first process are copied to the others. A larger difference raises.
    """
    if not several():
        return False
    import torch

    digests = gather(torch.tensor(list(_digest(state)), dtype=torch.uint8))
    if bool((digests == digests[0]).all()):
        return False
    shapes = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in state.items()]
    refused = _different(what)
    if anyone(json.dumps(shapes) != json.dumps(from_first(shapes))):
        raise refused
    far = False
    for tensor in state.values():
        wanted = broadcast(tensor)
        size = float(wanted.double().abs().max()) if tensor.numel() else 0.0
        distance = float((wanted.double() - tensor.double()).abs().max()) if tensor.numel() else 0.0
        far = far or not distance <= TOLERANCE * size
        with torch.no_grad():
            tensor.copy_(wanted)
    if anyone(far):
        raise refused
    return True


def _different(what: str) -> TrainingError:
    return TrainingError(
        f"The processes of this run do not agree on {what}, so that their results cannot be used. Run with the same "
        "versions and the same kind of device in every process; the last checkpoint is intact."
    )


def _digest(state: Mapping[str, Tensor]) -> bytes:
    import torch

    total = hashlib.sha256()
    for name, tensor in state.items():
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        total.update(plain.view(torch.uint8).numpy().data if plain.numel() else b"")
    return total.digest()


def broadcast(tensor: Tensor, source: int = 0) -> Tensor:
    """Return one process's tensor, the first one's unless said otherwise; all have one shape and type."""
    import torch.distributed as dist

    sent = _sent(tensor.detach().contiguous().clone())
    if several():
        with _connected():
            dist.broadcast(sent, source)
    return sent.to(tensor.device)


# -- decisions and small values --------------------------------------------------------------------------------------


def anyone(flag: bool) -> bool:
    """Return whether the flag is set in any process."""
    if not several():
        return flag
    import torch
    import torch.distributed as dist

    both = torch.tensor([int(flag)])
    with _connected():
        dist.all_reduce(both, dist.ReduceOp.MAX)
    return bool(both)


def from_first(value: Any) -> Any:
    """Return the first process's value, which JSON can hold."""
    if not several():
        return value
    return json.loads(bytes_from_first(json.dumps(value).encode()))


def bytes_from_first(content: bytes) -> bytes:
    """Return the first process's bytes."""
    return _bytes_from(0, content) if several() else content


def _bytes_from(source: int, content: bytes) -> bytes:
    import torch

    length = broadcast(torch.tensor([len(content)]), source)
    sent = torch.zeros(int(length), dtype=torch.uint8)
    if _world.place.rank == source and content:
        sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return broadcast(sent, source).numpy().tobytes()


def fail_together(error: DataError | None) -> None:
    """Raise if this process has failed, or any other: in the first one the error of the first that has.

    The others raise `Followed`, as the sentence is to be said once.
    """
    if not several():
        if error is not None:
            raise error
        return
    import torch

    failed = gather(torch.tensor(error is not None)).tolist()
    if True not in failed:
        return
    text = _bytes_from(failed.index(True), str(error or "").encode()).decode()
    raise DataError(text) if first() else Followed("The first process of this run has stopped.")


def first_does(work: Callable[[], Result]) -> Result:
    """Let the first process do something while the others wait, as long as it takes; all get its result, as JSON.

    If it fails, its error is raised there, and `Followed` in the others. Not for use while a stop is listened for.
    """
    if not several():
        return work()
    _world.asked += 1
    key = f"first/{_world.asked}"
    if not first():
        answer = json.loads(_wait_for(key))
        if "value" not in answer:
            raise Followed("The first process of this run has stopped.")
        return answer["value"]
    try:
        result = work()
    except BaseException:
        with suppress(RuntimeError):
            _world.store.set(key, "{}")
        raise
    with _connected():
        _world.store.set(key, json.dumps({"value": result}))
    return result


def in_turn(work: Callable[[], Result]) -> Result:
    """Do something in all processes, but on every machine in one of them before the others, as long as that takes."""
    if not several():
        return work()
    _world.asked += 1
    here = _world.place
    key = f"turn/{_world.asked}/{here.rank - here.local_rank}"
    if here.local_rank == 0:
        result = work()
        with _connected():
            _world.store.set(key, "done")
        return result
    _wait_for(key)
    return work()


# -- the processes of one machine ------------------------------------------------------------------------------------


def mates() -> range:
    """Return the ranks of the processes that share one copy of images with this one, which is among them."""
    return _world.mates or range(_world.place.rank, _world.place.rank + 1)


def part(rows: int) -> slice:
    """Return the part of `rows` rows that this process brings for its machine."""
    some = mates()
    here = some.index(_world.place.rank)
    return slice(here * rows // len(some), (here + 1) * rows // len(some))


def one_file(make: Callable[[], IO[bytes]]) -> IO[bytes]:
    """Return the file that the first process of this machine makes: all of the machine have opened the same one.

    It need not have a name. So there is nothing to remove, however the processes end. All processes of a run must call
    this together; if one cannot make its file, all fail.
    """
    error, made = None, None
    if mates()[0] == _world.place.rank:
        try:
            made = make()
        except DataError as failure:
            error = failure
    fail_together(error)
    return made if made is not None and len(mates()) == 1 else _opened(made)


def _opened(made: IO[bytes] | None) -> IO[bytes]:
    """Return the file that the first process of this machine has made, which is `made` there."""
    import torch

    names = gather(torch.tensor([os.getpid(), -1 if made is None else made.fileno()])).tolist()
    process, number = names[mates()[0]]
    try:
        return made or open(f"/proc/{process}/fd/{number}", "r+b", buffering=0)
    finally:
        anyone(False)  # nobody closes it before all have opened it


def in_memory() -> IO[bytes]:
    """Return a new file without a name, in memory; only Linux has them."""
    try:
        return os.fdopen(os.memfd_create("efcil"), "r+b", buffering=0)
    except OSError as error:
        raise DataError(f"The system has no memory that processes can share ({error.strerror or error}).") from error


def _found_mates() -> range:
    """Find out whether the processes of each machine can open each other's files; none if one of them cannot."""
    import torch

    here = _world.place
    near = range(here.rank - here.local_rank, here.rank - here.local_rank + here.local_size)
    alike = here.local_size > 1 and near[0] % here.local_size == 0 and near[-1] < here.size
    alike = alike and hasattr(os, "memfd_create")
    sizes = gather(torch.tensor(here.local_size if alike else 0))
    if not bool((sizes == sizes[0]).all()) or not alike:
        return range(0)
    _world.mates = near
    try:
        with one_file(_marked) as file:
            file.seek(0)
            seen = int.from_bytes(file.read())
    except (OSError, DataError, Followed):
        seen = -1
    marks = gather(torch.tensor(seen)).tolist()
    same = seen >= 0 and seen == marks[near[0]]
    return range(0) if anyone(not same) else near


def _marked() -> IO[bytes]:
    file = in_memory()
    file.write(os.urandom(7))
    return file


def _wait_for(key: str) -> str:
    with _connected():
        while not _world.store.check([key]):
            time.sleep(POLL_SECONDS)
        found: bytes = _world.store.get(key)
    return found.decode()
