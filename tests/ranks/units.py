"""What is checked inside every process of a run; run by forks.py."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import Tensor, nn

from efcil import ranks
from efcil.engine.interrupt import StopRequest
from efcil.errors import TrainingError
from efcil.network import split
from efcil.network.incremental import IncrementalNetwork
from efcil.network.resnet import ResNet


def messages() -> None:
    """Every process gets what the others have."""
    here, size = ranks.place().rank, ranks.count()
    for rows in (size, 7, 8, 1):
        whole = torch.arange(3.0 * rows).view(rows, 3)
        assert torch.equal(ranks.gather_rows(whole[ranks.share(rows)], rows), whole)
    tensors = [torch.full((2, 2), float(here)), torch.full((3,), 10.0 * here, dtype=torch.bfloat16)]
    ranks.average(tensors)
    mean = (size - 1) / 2
    assert torch.equal(tensors[0], torch.full((2, 2), mean))
    assert tensors[1].dtype == torch.bfloat16
    assert torch.equal(tensors[1].float(), torch.full((3,), 10 * mean))
    assert ranks.anyone(here == size - 1)
    assert not ranks.anyone(False)
    assert ranks.from_first({"rank": here}) == {"rank": 0}
    assert ranks.bytes_from_first(bytes([here] * 5)) == bytes(5)
    assert ranks.bytes_from_first(b"") == b""
    assert ranks.first_does(lambda: [here, "text"]) == [0, "text"]
    assert ranks.in_turn(lambda: here) == here


def failure_of_the_first() -> None:
    """Where the first process fails, the others stop, and only the first says why."""

    def fail() -> None:
        raise TrainingError("there is no room")

    with pytest.raises(TrainingError, match="no room" if ranks.first() else "first process") as raised:
        ranks.first_does(fail)
    assert isinstance(raised.value, ranks.Followed) is not ranks.first()


def loss_of_another() -> None:
    """A process that has lost another one says so, whatever torchrun sends meanwhile."""
    here, store = ranks.place().rank, ranks._world.store
    store.set(f"joined/{here}", "")
    if here == 1:
        store.wait([f"joined/{rank}" for rank in range(ranks.count())])  # else the others may fail to join
        os._exit(0)
    with pytest.raises(ranks.Lost, match="Another process"), StopRequest():
        ranks.average([torch.ones(1)])
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)  # nobody is there to leave together with


def settling() -> None:
    """Last bits are taken from the first process; other numbers are refused."""
    here = ranks.place().rank
    state = {"weight": torch.tensor([1.0, 2.0]), "count": torch.tensor([3])}
    assert not ranks.settle(state, "a state")
    state["weight"] += 1e-9 * here
    assert ranks.settle(state, "a state")
    assert state["weight"].tolist() == [1.0, 2.0]
    with pytest.raises(TrainingError, match="do not agree on a state"):
        ranks.settle({"weight": torch.tensor([1.0, 2.0 + (here == 1)])}, "a state")
    with pytest.raises(TrainingError, match="do not agree on a state"):
        ranks.settle({"weight": torch.zeros(2 + here)}, "a state")


def network(cosine: bool = False) -> IncrementalNetwork:
    """Return the same small network in every process."""
    torch.manual_seed(0)
    made = IncrementalNetwork(ResNet((4, 8), (1, 1)))
    if cosine:
        made.use_cosine_heads()
    made.add_head(3)
    return made.train()


def gradients(made: IncrementalNetwork, images: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the gradients of a loss that is no mean over rows, and reads weights as well.

    It looks at more images in a second pass, as terms of a recipe do: few rows are not shared, three times as many are.
    """
    with split.averaged():
        features = made.features(images)
        turned = made.features(images.flip(3).repeat(3, 1, 1, 1))
    penalty = sum(parameter.square().sum() for parameter in made.backbone.parameters())
    loss = nn.functional.cross_entropy(made.logits(features), labels) + torch.linalg.vector_norm(features)
    loss = loss + torch.linalg.vector_norm(turned)
    (loss + 0.1 * penalty).backward()
    found = [parameter.grad for parameter in made.parameters() if parameter.grad is not None]
    ranks.average(found)
    return found


def steps() -> None:
    """Features, gradients and running statistics are those of a single process, however many rows there are."""
    for rows in (13, 2 * ranks.count(), 2 * ranks.count() - 1, 1):
        torch.manual_seed(rows)
        images, labels = torch.rand(rows, 3, 4, 4), torch.randint(3, (rows,))
        cosine = rows % 2 == 1
        shared = network(cosine)
        found = gradients(shared, images, labels)
        place, ranks._world.place = ranks._world.place, ranks.Place()
        alone = network(cosine)
        wanted = gradients(alone, images, labels)
        ranks._world.place = place
        for one, other in zip([*found, *shared.buffers()], [*wanted, *alone.buffers()], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def gradients_of_one_s_own() -> None:
    """A method that takes gradients itself, without averaging them, gets those of the whole batch."""
    images = torch.rand(12, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    made = network().eval()
    parameters = list(made.backbone.parameters())
    found = torch.autograd.grad(made.features(images).square().sum(), parameters)
    wanted = torch.autograd.grad(made.backbone(images).square().sum(), parameters)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
