"""CEDAR: EFC++ where its own parts are off, and each of these parts against the obvious computation."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import FIRST, LATER, SHORT, Stream, assert_equal, clone, make_stream, short_stream

from efcil import studies
from efcil.core import pseudo_old, transport
from efcil.core.class_transport import class_maps
from efcil.core.feature_matrix import feature_matrix
from efcil.core.gaussians import mixture_covariance
from efcil.engine import lifecycle
from efcil.methods import get
from efcil.methods.base import Method, Piece
from efcil.methods.cedar import Cedar
from efcil.presets import load_preset
from efcil.resolution.unused import refuse_unused
from efcil.testing import on_trial
from efcil.testing.stream import blueprint
from efcil.testing.trial import LAST, resumed

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "benchmarks" / "studies").glob("*.yaml"))
AS_EFC: dict[str, Any] = {"pseudo_old": False, "damping": 0.1, "prototype_update": "efm"}


def learned(**settings: Any) -> tuple[Stream, Cedar]:
    """A method before the last task."""
    stream = short_stream()
    method = stream.learn(stream.start("cedar", **{"rebalance_epochs": 2, **settings}), LAST - 1, SHORT)
    assert isinstance(method, Cedar)
    return stream, method


def begun(**settings: Any) -> tuple[Stream, Cedar]:
    """A method at the beginning of the last task."""
    stream, method = learned(**settings)
    method.begin_task(stream.tasks[LAST])
    return stream, method


def piece_of(stream: Stream, epoch: int = 0) -> Piece:
    data = stream.data[LAST]

    def at(other: int) -> torch.Tensor:
        return data.render(data.view("epoch", other, training=True), 0, len(data))[0]

    return Piece(at(epoch), epoch, 0, 5, at)


def clone_of(method: Cedar, **settings: Any) -> Cedar:
    """The same method at the same place, with some other settings and nothing made yet."""
    other = copy.copy(method)
    other.settings, other._made = replace(method.settings, **settings), {}
    return other


def made_for(method: Cedar, piece: Piece) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return method._made_for(piece, method.old_network.features(piece.images))


def test_without_its_parts_it_is_efc_plus_plus() -> None:
    stream = short_stream()
    ours = stream.learn(stream.start("cedar", rebalance_epochs=3, **AS_EFC), LAST, SHORT)
    theirs = stream.learn(stream.start("efc++", rebalance_epochs=3), LAST, SHORT)
    assert_equal(clone(ours.state_dict()), clone(theirs.state_dict()))


def test_defaults_are_those_of_the_leads() -> None:
    settings = Cedar.Settings()
    assert (settings.efm_weight, settings.damping, settings.prototype_update) == (10.0, 0.0, "linear-residual")
    assert (settings.transport_views, settings.attack_steps, settings.attack_length) == (3, 4, 6.0)
    assert (settings.pseudo_old, settings.pseudo_old_weight, settings.pseudo_old_transport) == (True, 1.0, True)


@pytest.mark.parametrize(("fade", "share"), [(0.0, 1.0), (1.0, 0.5), (3.0, 0.125)])
def test_loss_by_hand(fade: float, share: float) -> None:
    stream, method = begun(pseudo_old_weight=3.0, pseudo_old_fade=fade, pseudo_old_copies=2, damping=0.2)
    batch = stream.batch(method, LAST)
    with torch.no_grad():  # a network that has not moved has no drift
        for each in method.network.backbone.parameters():
            each += 0.1 * each.std() * torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel()))
    images = [batch.frozen[f"images-{copy}"] for copy in range(2)]
    with torch.no_grad():
        terms = method.loss(batch)
        features = method.network.features(torch.cat([batch.images, *images]))
        old = method.old_network.features(torch.cat(images))
    penalty = method.settings.efm_weight * method.feature_matrix + 0.2 * torch.eye(64)
    size = batch.size
    own, others = features[:size] - batch.frozen["features"], features[size:] - old
    torch.testing.assert_close(terms["drift"], torch.stack([d @ penalty @ d for d in own]).mean())
    expected = 3.0 * share * torch.stack([d @ penalty @ d for d in others]).mean()  # the second task after the first
    torch.testing.assert_close(terms["pseudo-old"], expected, rtol=1e-4, atol=0.0)
    assert float(expected) > 1e-3


@pytest.mark.parametrize("sources", ["each", "near"])
@pytest.mark.parametrize("targets", ["round", "gaussian"])
def test_pseudo_old_images_are_nearer_to_their_targets(sources: str, targets: str) -> None:
    stream, method = begun(pseudo_old_sources=sources, pseudo_old_targets=targets, pseudo_old_copies=2)
    piece = piece_of(stream)
    with torch.no_grad():
        features = method.old_network.features(piece.images)
        choice = method._choose(features, torch.Generator().manual_seed(0))
        made, theirs = method._make(piece.images[choice.sources], choice.targets)
    count = 2 * len(piece.images)
    assert made.shape == (count, *piece.images.shape[1:])
    torch.testing.assert_close(theirs, method.old_network.features(made).detach())
    before = (features[choice.sources] - choice.targets).norm(dim=1)
    assert float(((theirs - choice.targets).norm(dim=1) < before).float().mean()) > 0.95
    # Steps are in proportion to the side of an image: a quarter of 32 pixels.
    moved = (made - piece.images[choice.sources]).flatten(1).norm(dim=1)
    assert float(moved.max()) <= 4 * 6.0 / 4 * 1.001
    if sources == "each":
        assert choice.sources.tolist() == [*range(count // 2), *range(count // 2)]


def test_near_sources_serve_every_class_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, method = begun(pseudo_old_sources="near", pseudo_old_choice="nearest")
    seen: list[torch.Tensor] = []
    choose = pseudo_old.choose_sources
    monkeypatch.setattr(
        pseudo_old, "choose_sources", lambda d, labels, n: (seen.append(labels), choose(d, labels, n))[1]
    )
    with torch.no_grad():
        features = method.old_network.features(piece_of(stream).images)
        choice = method._choose(features, torch.Generator().manual_seed(0))
    counts = torch.bincount(seen[0], minlength=5)
    assert int(counts.max() - counts.min()) <= 1
    distances = torch.cdist(features, method.memory.means)  # standardising does not change who is nearest to a class
    assert torch.equal(choice.sources, distances.argmin(dim=0)[seen[0]])


def test_images_made_once_are_used_again_and_made_again_after_a_pause() -> None:
    stream, method = begun(pseudo_old_every=0)
    with torch.no_grad():
        first, later = (method.ahead(piece_of(stream, epoch))["images-0"] for epoch in (0, 3))
        method._made.clear()  # as if the task was resumed in epoch 3
        again = method.ahead(piece_of(stream, 3))["images-0"]

    assert torch.equal(in_order([first]), in_order([later]))
    assert not torch.equal(first, later), "they meet other images"
    assert torch.equal(later, again)


def in_order(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same images in the same order, whatever the order that they came in."""
    flat = torch.cat(list(images)).flatten(1)
    return flat[flat[:, 0].argsort()]


@pytest.mark.parametrize("every", [0, 2, 3])
@pytest.mark.parametrize("paused", [False, True])
def test_images_are_made_anew_after_so_many_epochs(every: int, paused: bool) -> None:
    """Until then they are those that are made in every epoch where none are used again, with other neighbours."""
    stream, anew = begun(pseudo_old_copies=2)
    method = clone_of(anew, pseudo_old_every=every)
    orders: dict[int, list[torch.Tensor]] = {}
    for epoch in range(5):
        if paused:  # as if the task was resumed in this epoch
            method._made.clear()
        made_in = epoch // every * every if every else 0
        with torch.no_grad():
            found = made_for(method, piece_of(stream, epoch))
            expected = made_for(anew, piece_of(stream, made_in))
        assert [len(side) for side in found] == [2, 2], "one for every copy"
        assert all(len(each) == len(stream.data[LAST]) for side in found for each in side)
        for side, other in zip(found, expected, strict=True):
            torch.testing.assert_close(in_order(side), in_order(other))
        features = method.old_network.features(torch.cat(found[0])).detach()
        torch.testing.assert_close(torch.cat(found[1]), features, rtol=1e-4, atol=1e-5)
        orders.setdefault(made_in, []).append(torch.cat(found[0]))
    for same in orders.values():
        assert not any(torch.equal(one, other) for one, other in itertools.pairwise(same))


def test_every_piece_of_an_epoch_has_images_of_its_own() -> None:
    """Pieces are told apart by where they begin, and one that has become shorter, where training resumed, is new."""
    stream, method = begun(pseudo_old_every=0, pseudo_old_copies=2)
    whole = piece_of(stream)
    pieces = [replace(whole, images=whole.images[a:b], start=a) for a, b in ((0, 10), (10, 20), (0, 10), (0, 6))]
    with torch.no_grad():
        first, second, again, shorter = (made_for(method, piece)[0] for piece in pieces)
    assert torch.equal(in_order(first), in_order(again))
    assert not torch.equal(in_order(first), in_order(second))
    assert [len(each) for each in shorter] == [6, 6]
    assert len(method._made) == 2


@pytest.mark.parametrize("settings", [{"pseudo_old_every": 0}, {"pseudo_old_every": 2, "pseudo_old_copies": 2}])
def test_a_task_is_resumed_to_the_bit_where_images_are_used_again(settings: dict[str, Any]) -> None:
    stream, recipe = short_stream(), replace(SHORT, epochs=4)
    trial = on_trial(get("cedar"), replace(Cedar.Settings(), rebalance_epochs=2, **settings))
    method = trial.make(stream)
    stream.end(method, 0)
    before = clone(method.state_dict())
    whole = stream.learn(trial.reload(before), 1, recipe)
    pieces = resumed(stream, trial.reload(before), trial.reload(before), 1, steps=5, recipe=recipe)
    assert_equal(clone(pieces.state_dict()), clone(whole.state_dict()))


@pytest.mark.parametrize("on_pseudo_old", [True, False])
def test_transport_is_fitted_on_all_views_and_on_pseudo_old_images(on_pseudo_old: bool) -> None:
    stream, method = learned(pseudo_old_transport=on_pseudo_old)
    stream.train(method, LAST, SHORT)
    data = stream.data[LAST]
    before = [method.before_and_after(data, index) for index in range(3)]
    with torch.no_grad():
        made = [(old, method.network.features(x)) for index in range(3) for x, old in method._made_of(data, index)]
        pairs = [torch.cat(side) for side in zip(*before, *(made if on_pseudo_old else ()), strict=True)]
        assert len(pairs[0]) == (6 if on_pseudo_old else 3) * len(data)
        by = transport.ridge_map(*pairs, 0.01)
        expected = by.points(method.memory.means), by.covariances(method.memory.covariances, residual=True)
        method._follow_drift(data)
    torch.testing.assert_close(method.memory.means, expected[0])
    torch.testing.assert_close(method.memory.covariances, expected[1])


@pytest.mark.parametrize("maps", ["one", "shift", "class"])
def test_transport_variants_move_the_classes_by_their_own_maps(maps: str) -> None:
    settings = {"transport_maps": maps, "transport_ridge": "whitened", "drift_ridge": 0.1}
    if maps != "one":
        settings |= {"transport_temperature": 0.7, "transport_pull": 5.0}
    stream, method = learned(**settings, pseudo_old_per_class=25)
    stream.train(method, LAST, SHORT)
    data, classes = stream.data[LAST], len(method.memory.means)
    with torch.no_grad():
        made = [(old, method.network.features(x)) for index in range(3) for x, old in method._made_of(data, index, 9)]
        current = [method.before_and_after(data, index) for index in range(3)]
        before, after = (torch.cat(side) for side in zip(*current, *made, strict=True))
        assert len(before) == 3 * (len(data) + 9 * classes), "25 images of every class need 9 in each of 3 views"
        statistics = replace(method.memory.statistics(), means=method.memory.means.clone())
        metric = mixture_covariance(statistics.means, *statistics.spread())
        common = transport.ridge_map(before, after, 0.1, metric=metric)
        each = [common] * classes
        if maps != "one":
            asked = {"temperature": 0.7, "pull": 5.0, "only_shift": maps == "shift"}
            each = list(class_maps(before, after, common, statistics, **asked))
        covariances, which = statistics.spread()
        covariances = covariances.clone()
        method._follow_drift(data)
    for row, by in enumerate(each):
        torch.testing.assert_close(method.memory.means[row], by.points(statistics.means[row][None])[0])
        expected = by.covariances(covariances[which[row]][None], residual=True)[0]
        torch.testing.assert_close(method.memory.covariances[row], expected)


def test_pseudo_old_images_of_every_class_are_chosen_near_it() -> None:
    stream, method = begun(pseudo_old_choice="nearest")
    with torch.no_grad():
        features = method.old_network.features(piece_of(stream).images)
        choice = method._choose(features, torch.Generator().manual_seed(0), per_class=3)
    nearest = torch.cdist(features, method.memory.means).argmin(dim=0)
    assert sorted(choice.sources.tolist()) == sorted(nearest.repeat(3).tolist())


@pytest.mark.parametrize("per_class", [0, 4])
def test_the_pieces_that_images_are_rendered_in_do_not_matter(per_class: int) -> None:
    stream, method = begun(attack_length=0.0)  # so that every image is the one that it is made of
    data, found = stream.images(LAST), []
    for size in (len(data), 10):
        data.chunk_size = lambda size=size: size  # type: ignore[misc]
        with torch.no_grad():
            made, features = (torch.cat(side) for side in zip(*method._made_of(data, 0, per_class), strict=True))
        torch.testing.assert_close(features, method.old_network.features(made).detach())
        found.append(made.flatten(1).unique(dim=0, return_counts=True))
    assert int(found[0][1].sum()) == (per_class * 5 or len(data))
    for whole, parts in zip(*found, strict=True):
        assert torch.equal(whole, parts)


@pytest.mark.parametrize("on", ["gaussians", "pseudo-old"])
def test_feature_matrix_may_be_measured_on_old_classes_too(on: str) -> None:
    stream, method = begun(efm_on=on)
    task, data = stream.tasks[LAST], stream.data[LAST]
    with torch.no_grad():
        total = method._measured(task, data)
        method.settings = replace(method.settings, efm_on="current")
        alone = method._measured(task, data)
        weight = method.network.head_weight()
    old = int(method.memory.counts.sum()) if on == "gaussians" else len(data)
    assert total.count == alone.count + old
    share = (total.probability[:5].sum() / total.count, alone.probability[:5].sum() / alone.count)
    assert share[0] > share[1], "Old classes are predicted more often."
    expected = feature_matrix(weight, total.probability / total.count, total.outer / total.count)
    torch.testing.assert_close(total.matrix(weight), expected)


@pytest.mark.parametrize("on", ["current", "gaussians", "pseudo-old"])
def test_what_the_feature_matrix_of_the_second_task_is_measured_on(on: str) -> None:
    stream = short_stream()
    method, plain = (stream.start("cedar", rebalance_epochs=2, efm_on=each) for each in (on, "current"))
    assert isinstance(method, Cedar)
    assert torch.equal(method.feature_matrix, plain.feature_matrix), "the first task has no old classes"
    task, data = stream.tasks[1], stream.data[1]
    method.begin_task(task)
    with torch.no_grad():
        found = clone_of(method, efm_on=on)._measured(task, data)
        none_made = clone_of(method, efm_on=on, pseudo_old=False)._measured(task, data)
        current = clone_of(method, efm_on="current")._measured(task, data)
        images = [made for made, _ in method._made_of(data, 0)]
        with_made = method._accumulated(current, method.network.features(torch.cat(images)))
    old = {"current": 0, "gaussians": int(method.memory.counts.sum()), "pseudo-old": len(data)}[on]
    assert found.count == current.count + old
    if on == "pseudo-old":
        assert none_made.count == current.count, "there are none"
        torch.testing.assert_close(found.outer, with_made.outer)
        torch.testing.assert_close(found.probability, with_made.probability)


def test_nothing_of_the_old_network_is_left_after_a_task() -> None:
    stream, method = learned(pseudo_old_every=0)
    stream.train(method, LAST, SHORT)
    assert method._made
    stream.end(method, LAST)
    assert "_made" not in vars(method)
    assert "_old" not in vars(method)
    assert method.teacher is None


def test_learns_where_all_old_classes_were_forgotten() -> None:
    stream = short_stream()
    method: Method = stream.start("cedar", rebalance_epochs=2)
    method.forget_classes(range(4))
    method.begin_task(replace(stream.tasks[1], first_class=0))
    assert set(method.ahead(piece_of(stream))) == {"features"}


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_studies_of_the_research_log_can_be_planned(file: Path) -> None:
    study = studies.load(str(file))
    cells = study.cells()
    read = {(cell.dataset, cell.scenario, cell.label, cell.variant.classifier) for cell in cells}
    assert len(read) == len(cells), "Two rows read the same classifier of the same run."
    for cell in cells:
        refuse_unused([cell.settings], cell.settings.overrides)
    log = (ROOT / "docs" / "research-log.md").read_text(encoding="utf-8")
    assert file.name in log


def test_it_is_not_worse_than_efc_plus_plus() -> None:
    """Under the modern recipe, with trained BatchNorm; another number of threads moves values by up to 4 points."""
    first = replace(FIRST, epochs=8, learning_rate=3e-3, schedule="steps", milestones=(5,))
    stream = make_stream((4, 3, 3), per_class=35, first=first)
    modern = load_preset("cifar100").modern
    assert modern is not None
    recipe = replace(modern.of_later(LATER, "efc"), epochs=6, batch_size=LATER.batch_size)

    def mean_accuracy(name: str) -> float:
        method, found = stream.start(name, rebalance_epochs=15), 0.0
        for index in (1, 2):
            plan = blueprint(type(method), method.settings)
            lifecycle.learn_task(plan, method, stream.tasks[index], stream.data[index], recipe)
            found += stream.accuracy(method, index) / 2
        return found

    assert mean_accuracy("cedar") > mean_accuracy("efc++") - 0.02  # 67.8 and 64.9
