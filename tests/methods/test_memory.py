"""What is kept of classes, against naive computations, in every form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checks import quick, short_stream
from torch import Tensor

from efcil.core.covariance import low_rank
from efcil.core.transport import AffineMap
from efcil.methods import available, incremental
from efcil.methods.base import Method
from efcil.methods.memory import FORMS, ClassMemory, renamed
from efcil.resolution import differences, identity, pin
from efcil.settings import Settings

SIZE = 5


def rows(classes: range, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features and labels, shuffled: 8 of the first class, 9 of the next, and so on."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.full((8 + c,), c) for c in classes])
    labels = labels[torch.randperm(len(labels), generator=generator)]
    return torch.randn(len(labels), SIZE, generator=generator) + labels[:, None], labels


def filled(form: str | None, **others: object) -> ClassMemory:
    """Three classes in a task, then two."""
    memory = ClassMemory(SIZE, why="tests", covariances=form, **others)  # type: ignore[arg-type]
    for classes in (range(3), range(3, 5)):
        memory.add(*rows(classes), classes)
    return memory


def of_class(label: int) -> Tensor:
    features, labels = rows(range(3) if label < 3 else range(3, 5))
    return features[labels == label]


def naive(form: str) -> list[Tensor]:
    """The covariance of every class as it should be seen in a form."""
    each = [of_class(c).T.cov() for c in range(5)]
    first, last = torch.stack(each[:3]).mean(dim=0), torch.stack(each[3:]).mean(dim=0)
    if form == "task":
        return [first] * 3 + [last] * 2
    if form == "last-task":
        return [last] * 5
    if form == "common":
        return [torch.stack(each).mean(dim=0)] * 5
    if form == "pooled":
        freedom = [len(of_class(c)) - 1 for c in range(5)]
        return [sum(n * one for n, one in zip(freedom, each, strict=True)) / sum(freedom)] * 5
    if form == "diagonal":
        return [torch.diag(one.diagonal()) for one in each]
    if form == "low-rank":
        return [factor @ factor.T for factor in low_rank(torch.stack(each), 0.8)]
    if form == "moments":
        return [one * (len(of_class(c)) - 1) / len(of_class(c)) for c, one in enumerate(each)]
    return each


@pytest.mark.parametrize("form", FORMS)
def test_classes_are_added_in_every_form(form: str) -> None:
    memory = filled(form, share=0.8, counts=True)
    covariances, which = memory.statistics().spread()
    for label, expected in enumerate(naive(form)):
        torch.testing.assert_close(memory.means[label], of_class(label).mean(dim=0))
        torch.testing.assert_close(covariances[which[label]], expected, rtol=1e-4, atol=1e-5)
    assert memory.counts.tolist() == [8, 9, 10, 11, 12]
    assert memory.keeps == ("means", "covariances")
    assert memory.blends == (form in ("class", "pooled"))
    groups = {"task": 2, "last-task": 1, "common": 1, "pooled": 1}
    assert len(covariances) == groups.get(form, 5)


def test_means_alone() -> None:
    memory = filled(None)
    assert list(memory.state_dict()) == ["means"]
    assert memory.statistics().covariances is None
    assert memory.keeps == ("means",)
    assert not memory.blends
    by = AffineMap(2.0 * torch.eye(SIZE).double(), torch.ones(SIZE).double(), torch.eye(SIZE).double())
    before = memory.means.clone()
    memory.carry(by)
    torch.testing.assert_close(memory.means, 2.0 * before + 1.0)
    memory.move(before)
    assert torch.equal(memory.means, before)


def as_kept(covariances: torch.Tensor, form: str, share: float) -> torch.Tensor:
    """What a memory makes of covariances (G, n, n) that it keeps in a form."""
    if form == "diagonal":
        return torch.diag_embed(covariances.diagonal(dim1=1, dim2=2))
    factors = low_rank(covariances, share)
    return factors @ factors.mT if form == "low-rank" else covariances


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("form", ["class", "task", "low-rank", "diagonal"])
def test_a_map_carries_means_and_covariances(form: str, residual: bool) -> None:
    memory = filled(form, share=0.8)
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(SIZE, SIZE, generator=generator).double()
    by = AffineMap(matrix, torch.arange(SIZE).double(), 0.5 * torch.eye(SIZE).double())
    means, covariances = memory.means.double(), memory.covariances.double()
    memory.carry(by, residual)
    torch.testing.assert_close(memory.means.double(), means @ matrix.T + by.shift, rtol=1e-4, atol=1e-4)
    moved = matrix @ covariances @ matrix.T + (by.residual if residual else 0.0)
    expected = as_kept(moved, form, 0.8 if residual else 1.0)
    torch.testing.assert_close(memory.covariances.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("form", ["class", "task", "last-task", "low-rank", "diagonal"])
def test_every_class_may_have_a_map_of_its_own(form: str, residual: bool) -> None:
    memory, generator = filled(form, share=0.8), torch.Generator().manual_seed(1)
    maps = [
        AffineMap(torch.randn(SIZE, SIZE, generator=generator).double(), torch.full((SIZE,), float(c)).double(), spread)
        for c, spread in enumerate(torch.diag_embed(torch.rand(5, SIZE, generator=generator).double()))
    ]
    means, (covariances, which) = memory.means.clone(), memory.statistics().spread()
    each = [by.covariances(covariances[g][None].double(), residual)[0] for by, g in zip(maps, which, strict=True)]
    memory.carry_each(iter(maps), residual)
    for by, before, after in zip(maps, means, memory.means, strict=True):
        torch.testing.assert_close(after, by.points(before[None])[0])
    groups = [[one for one, g in zip(each, which, strict=True) if g == group] for group in range(len(covariances))]
    moved = torch.stack([torch.stack(group).mean(dim=0) for group in groups])
    expected = as_kept(moved, form, 0.8 if residual else 1.0)
    torch.testing.assert_close(memory.covariances.double(), expected, rtol=1e-3, atol=1e-3)


def test_more_images_are_blended_as_if_measured_together() -> None:
    memory = filled("class", counts=True)
    features, labels = rows(range(1, 4), seed=7)
    memory.blend(features, labels, memory.counts.tolist())
    for label in range(5):
        both = torch.cat([of_class(label), features[labels == label]])
        torch.testing.assert_close(memory.means[label], both.mean(dim=0))
        torch.testing.assert_close(memory.covariances[label], both.T.cov(), rtol=1e-4, atol=1e-5)
        assert int(memory.counts[label]) == len(both)


@pytest.mark.parametrize("form", ["class", "task", "low-rank"])
def test_samples_have_the_statistics_of_their_classes(form: str) -> None:
    memory, generator = filled(form), torch.Generator().manual_seed(0)
    sampler = memory.sampler(0.25)
    labels = torch.arange(5).repeat(20_000)
    covariances, which = memory.statistics().spread()
    for features, drawn in (
        (sampler.features(labels, generator, most=20_000), labels),
        sampler.classes([20_000] * 5, generator),
    ):
        for label in range(5):
            own = features[drawn == label]
            assert len(own) == 20_000
            torch.testing.assert_close(own.mean(dim=0), memory.means[label], rtol=0, atol=0.1)
            expected = covariances[which[label]] + 0.25 * torch.eye(SIZE)
            torch.testing.assert_close(own.T.cov(), expected, rtol=0, atol=0.15)


def test_a_class_is_described_anew() -> None:
    memory = filled("class")
    others = memory.means.clone()
    memory.replace(1, torch.ones(SIZE).double(), 3.0 * torch.eye(SIZE).double())
    assert torch.equal(memory.means[1], torch.ones(SIZE))
    assert torch.equal(memory.covariances[1], 3.0 * torch.eye(SIZE))
    assert torch.equal(memory.means[[0, 2, 3, 4]], others[[0, 2, 3, 4]])


# -- what is stored, under which name and why ------------------------------------------------------------------------


@pytest.mark.parametrize("form", [None, *FORMS])
def test_everything_stored_has_a_purpose(form: str | None) -> None:
    memory = filled(form, table=form is not None, counts=True)
    assert set(memory.purposes()) == set(memory.state_dict())
    assert memory.purposes()["means"].use == "tests"


@pytest.mark.parametrize("name", [name for name, cls in incremental().items() if cls.traits(cls.Settings()).keeps])
def test_states_with_earlier_names_are_loaded(name: str) -> None:
    method = quick(short_stream(), name)
    short_stream().end(method, 0)
    state = method.state_dict()
    earlier = {key.removeprefix("memory.").replace("base.memory.", "base."): value for key, value in state.items()}
    assert list(renamed(earlier, state)) == list(state)
    again = quick(short_stream(), name)
    again.load_tensors(earlier)
    images = short_stream().test_images[:9]
    assert torch.equal(again.scores(images), method.scores(images))


def test_a_buffer_of_somebodys_own_keeps_its_name() -> None:
    assert list(renamed({"means": 1}, ["means", "memory.means"])) == ["means"]
    assert list(renamed({"means": 1}, ["centres"])) == ["means"]


# -- traits ----------------------------------------------------------------------------------------------------------


def test_traits_follow_from_what_a_method_defines() -> None:
    class Rehearsing(Method):
        @classmethod
        def remembers(cls, settings: Method.Settings, size: int) -> ClassMemory:
            return ClassMemory(size, why="tests", covariances="class")

    class Nearest(Rehearsing):
        def scores(self, images: Tensor) -> Tensor:
            return images

    settings = Method.Settings()
    assert Method.traits(settings).keeps == ("heads",)
    assert not Method.traits(settings).learns_more
    assert Rehearsing.traits(settings).keeps == ("heads", "means", "covariances")
    assert Rehearsing.traits(settings).learns_more
    assert Rehearsing.traits(settings).decides_by_heads
    assert not Nearest.traits(settings).learns_more
    assert not Nearest.traits(settings).decides_by_heads


def test_traits_of_the_methods() -> None:
    traits = {name: cls.traits(cls.Settings()) for name, cls in available().items()}
    assert [name for name, each in traits.items() if each.learns_more] == ["cedar", "efc", "efc++", "fd", "il2a", "lda"]
    assert [name for name, each in traits.items() if not each.trains_later] == [
        "ds-al",
        "fecam",
        "fetril",
        "joint",
        "lda",
    ]
    assert [name for name, each in traits.items() if each.images == "all"] == ["joint"]
    efc = available()["efc"]
    assert not efc.traits(replace(efc.Settings(), covariance="low-rank")).learns_more


@pytest.mark.parametrize("name", ["keeps", "trains_normalisation", "purposes"])
def test_attributes_that_are_no_longer_read_are_refused(name: str) -> None:
    from efcil.errors import SettingsError

    with pytest.raises(SettingsError, match=f"sets '{name}', which is not read"):
        type("Old", (Method,), {name: ("means",)})


# -- records from before ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(available()))
def test_records_without_the_new_fields_of_recipes_are_of_the_same_run(name: str) -> None:
    settings = Settings(method=name)
    stored = identity(settings)
    for stage in ("first_task", "later"):
        stored[stage] = {k: v for k, v in stored[stage].items() if k not in ("gradient_clip", "normalisation")}
    if name == "fd":
        stored["method_settings"] |= {"regulariser": "features", "efm_weight": 10.0, "damping": 0.1}
    assert differences(stored, identity(settings)) == {}
    assert pin(settings, stored, Path("settings.yaml")) == settings
    changed = replace(settings, overrides={"later.gradient_clip": 7.0})
    assert "later.gradient_clip" in differences(stored, identity(changed))
