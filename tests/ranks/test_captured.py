"""Messages of NCCL as part of a captured step. One GPU is enough: a single process sends to itself."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from efcil import ranks
from efcil.methods import get
from efcil.testing.methods import check_captured_steps_are_the_eager_ones
from efcil.testing.trial import on_trial

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()), reason="needs a GPU and NCCL"
)


@pytest.fixture
def sending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let this process behave as one of several; the list says which messages it has sent."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    monkeypatch.setattr(ranks, "several", lambda: True)
    sent: list[str] = []
    for name in ("all_reduce", "all_gather"):
        original = getattr(dist, name)

        def send(*given: object, original: object = original, name: str = name) -> None:
            during = "captured" if torch.cuda.is_current_stream_capturing() else "at once"
            sent.append(f"{name} {during}")
            original(*given)  # type: ignore[operator]

        monkeypatch.setattr(dist, name, send)
    yield sent
    gc.collect()  # NCCL waits for ever for graphs that hold its messages
    dist.destroy_process_group()


@pytest.mark.parametrize("method", ["efc", "lwf"])  # with frozen and with trained BatchNorm
def test_steps_with_messages_can_be_captured(method: str, sending: list[str]) -> None:
    try:
        check_captured_steps_are_the_eager_ones(on_trial(get(method)))
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # pytest keeps them, and they hold such graphs
        raise
    assert {"all_reduce captured", "all_gather captured"} <= set(sending)
