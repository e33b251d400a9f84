"""The checks that every method must pass; a new file in efcil/methods is covered by existing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import (
    FUSED,
    PLAIN,
    SHORT,
    SIZES,
    assert_equal,
    clone,
    fitting,
    history,
    kept_tensors,
    longest_run,
    quick,
    reload,
    resumed,
    run,
    short_stream,
)
from torch import Tensor, nn

from efcil.core import classifiers
from efcil.engine import feed as feed_module
from efcil.engine.evaluate import scorer
from efcil.engine.feed import Feed
from efcil.engine.hardware import switches
from efcil.engine.trainer import MOST_TERMS, Execution, Trainer
from efcil.methods import available, bundled, incremental
from efcil.methods.base import Method, Plan
from efcil.resolution import load_config, resolve, to_yaml
from efcil.settings import Settings, options
from efcil.settings.options import Option

METHODS = sorted(available())
#: Joint training is one large first task: it has no later task to check.
INCREMENTAL = sorted(incremental())
LAST = len(SIZES) - 1

every_method = pytest.mark.parametrize("name", INCREMENTAL)


def begun(name: str) -> Method:
    """The method at the beginning of the last task, reached through a saved state."""
    method = reload(name, history(name)[1][LAST - 1].state)
    method.begin_task(short_stream().tasks[LAST])
    method.training_mode(fitting(method, SHORT))
    return method


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_a_summary_and_a_page(name: str) -> None:
    cls = available()[name]
    assert cls.summary
    assert cls.__doc__
    if name not in bundled():
        return  # somebody's own, whose page is not ours to ask for
    page = Path(__file__).parents[2] / "docs" / "methods" / f"{name.replace('++', '-plus-plus')}.md"
    assert page.is_file(), f"Write {page}: idea, command, settings, deviations, results."
    text = page.read_text(encoding="utf-8")
    for setting in options(cls.Settings):
        assert f"`{setting}`" in text, f"{page.name} does not mention the setting {setting}."


# -- learning --------------------------------------------------------------------------------------------------------


@every_method
def test_unequal_tasks_and_a_single_class_are_learned(name: str) -> None:
    _, records = history(name)
    for record, task in zip(records, short_stream().tasks, strict=True):
        assert record.scores.shape[1] == task.seen
        assert bool(torch.isfinite(record.scores).all())
        for terms in record.terms:
            assert 0 < len(terms) <= MOST_TERMS
            assert all(map(torch.isfinite, map(torch.tensor, terms.values()))), terms


@every_method
def test_scores_are_deterministic_and_an_image_does_not_depend_on_its_neighbours(name: str) -> None:
    method, records = history(name)
    images = short_stream().test_images[short_stream().test_labels < sum(SIZES)]
    assert torch.equal(method.scores(images), records[-1].scores)
    torch.testing.assert_close(method.scores(images[5:12]), records[-1].scores[5:12], rtol=1e-4, atol=1e-4)
    assert not method.scores(images).requires_grad


@every_method
def test_two_runs_with_one_seed_are_equal(name: str) -> None:
    """Bit for bit, whatever the global random state: everything random comes from named streams."""
    stream = short_stream()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        _, again = run(stream, quick(stream, name), 0)
    for first, second in zip(history(name)[1], again, strict=True):
        assert_equal(first.state, second.state)
        assert torch.equal(first.scores, second.scores)


@every_method
def test_gradients_reach_what_the_optimiser_gets_and_nothing_else(name: str) -> None:
    method, stream = begun(name), short_stream()
    groups = method.parameter_groups(SHORT)
    given = [parameter for group in groups for parameter in group["params"]]
    assert len({id(parameter) for parameter in given}) == len(given), "A parameter is in two groups."
    if not given:
        pytest.skip(f"{name} trains nothing by gradient after the first task.")
    sum(method.loss(stream.batch(method, LAST, 1)).values()).backward()
    for key, parameter in method.named_parameters():
        if any(parameter is one for one in given):
            assert parameter.grad is not None, f"{key} gets no gradient."
            assert bool((parameter.grad != 0).any()), f"The gradient of {key} is zero."
            assert bool(torch.isfinite(parameter.grad).all()), key
        else:
            assert parameter.grad is None, f"{key} gets a gradient but is not in parameter_groups."
    hidden = [value for module in method.modules() for value in vars(module).values() if isinstance(value, nn.Module)]
    for teacher in hidden:  # a base method holds the network itself in this way too
        if teacher is not method.network:
            assert not teacher.training
            assert not any(parameter.requires_grad for parameter in teacher.parameters())


@every_method
@pytest.mark.parametrize("trains", [True, False])
def test_whether_normalisation_learns_may_be_chosen(name: str, trains: bool) -> None:
    if "train_normalisation" not in options(available()[name].Settings):
        pytest.skip(f"{name} leaves no choice.")
    method = short_stream().make(name, train_normalisation=trains)
    assert fitting(method, SHORT).normalisation == ("trained" if trains else "frozen")


@every_method
def test_the_backbone_has_a_learning_rate_of_its_own(name: str) -> None:
    """What trains inside it (SSRE's adapters too) follows it; heads and all else that is new do not."""
    method = begun(name)
    inside = {id(p) for key, p in method.named_parameters() if key.startswith(("network.backbone.", "adapters."))}
    for slow in (1e-5, None):
        for group in method.parameter_groups(replace(SHORT, learning_rate=1e-2, backbone_learning_rate=slow)):
            for parameter in group["params"]:
                assert group["learning_rate"] == (slow if slow and id(parameter) in inside else 1e-2)


@every_method
def test_normalisation_is_frozen_or_learns(name: str) -> None:
    method, records = history(name)
    for record in records[1:]:
        if fitting(method, SHORT).normalisation == "frozen":
            assert_equal(record.normalisation_before, record.normalisation_after)
        else:
            after = record.normalisation_after
            moved = [key for key, value in record.normalisation_before.items() if not torch.equal(value, after[key])]
            assert any(key.endswith("running_mean") for key in moved)


@every_method
def test_classifiers_are_built_from_the_features_and_heads_that_the_method_has(name: str) -> None:
    method, images = history(name)[0], short_stream().test_images[:20]
    with torch.no_grad():
        features, embedded = method.network.features(images), method.embed(images)
    heads, statistics = method.network.head_weight().detach(), method.statistics()
    if "heads" in method.about.keeps:
        expected = features @ heads.T / method.head_temperature
        torch.testing.assert_close(scorer(method, "heads")(images), expected)
    if statistics is not None:
        expected = classifiers.nearest_mean(statistics)(embedded)
        torch.testing.assert_close(scorer(method, "nearest-mean")(images), expected)
    if {"heads", "covariances"} <= set(method.about.keeps):
        expected = classifiers.rebalanced(replace(statistics, heads=heads))(embedded)
        torch.testing.assert_close(scorer(method, "rebalanced")(images), expected)


def has_a_temperature(name: str) -> bool:
    """Whether later tasks train the heads under the setting `temperature`."""
    cls = available()[name]
    if "temperature" not in options(cls.Settings):
        return False
    return cls.traits(replace(cls.Settings(), temperature=0.5)).temperature == 0.5


@pytest.mark.parametrize("name", list(filter(has_a_temperature, INCREMENTAL)))
def test_probabilities_are_those_of_the_softmax_that_was_trained(name: str) -> None:
    stream = short_stream()
    method, images = stream.start(name, temperature=0.5), stream.test_images[:20]

    def logits() -> Tensor:
        return (method.network.features(images) @ method.network.head_weight().T).detach()

    torch.testing.assert_close(method.scores(images), logits())  # the shared first task has no temperature
    stream.learn(method, 1, SHORT)
    torch.testing.assert_close(method.scores(images), 2.0 * logits())
    torch.testing.assert_close(scorer(method, "heads")(images), 2.0 * logits())


# -- state -----------------------------------------------------------------------------------------------------------


@every_method
def test_a_saved_state_predicts_and_learns_on_bit_for_bit(name: str) -> None:
    stream, (_, records) = short_stream(), history(name)
    for task, record in zip(stream.tasks, records, strict=True):
        twin = reload(name, record.state)
        assert_equal(clone(twin.state_dict()), record.state)
        assert torch.equal(stream.scores(twin, task.seen), record.scores)
    _, rest = run(stream, reload(name, records[LAST - 1].state), LAST)
    assert_equal(rest[-1].state, records[LAST].state)


@every_method
def test_a_loaded_state_is_a_copy(name: str) -> None:
    """What a method learns later must not change the tensors it was loaded from."""
    state = clone(history(name)[1][LAST].state)
    method = quick(short_stream(), name)
    method.load_tensors(state)
    for key, value in method.state_dict().items():
        assert value.numel() == 0 or value.data_ptr() != state[key].data_ptr(), key


@every_method
def test_an_interrupted_task_goes_on_bit_for_bit(name: str) -> None:
    if not begun(name).parameter_groups(SHORT):
        pytest.skip(f"{name} trains nothing by gradient after the first task.")
    stream, (_, records) = short_stream(), history(name)
    before = records[LAST - 1].state
    twin = resumed(stream, reload(name, before), reload(name, before), LAST, steps=7)
    assert_equal(clone(twin.state_dict()), records[LAST].state)


@every_method
def test_no_image_outlives_its_task(name: str) -> None:
    method, records = history(name)
    assert all(record.images_gone for record in records), "Something still holds a task's images."
    stream = short_stream()
    seen = torch.cat([images for data in stream.data for images, _ in data.augmented("check")])
    raw = torch.cat([data.images for data in stream.data])
    allowed = torch.cat([seen.unique(), raw.unique().float(), raw.unique().float() / 255]).unique()
    assert longest_run(seen[0], allowed) == seen[0].numel()
    side = seen.shape[-1]
    for key, value in kept_tensors(method):
        if key.startswith("network."):
            continue
        assert tuple(value.shape[-3:]) not in {(3, side, side), (side, side, 3)}, f"{key} has the shape of images."
        assert longest_run(value.float(), allowed) < 2 * side, f"{key} holds pixels."


@every_method
def test_storage_does_not_grow_with_the_number_of_images(name: str) -> None:
    many = short_stream(32)
    assert all(len(data) > len(few) for data, few in zip(many.data, short_stream().data, strict=True))
    _, records = run(many, quick(many, name), 0, replace(SHORT, epochs=1))
    shapes = {key: tuple(value.shape) for key, value in history(name)[1][-1].state.items()}
    assert {key: tuple(value.shape) for key, value in records[-1].state.items()} == shapes


# -- execution -------------------------------------------------------------------------------------------------------


@every_method
def test_a_step_never_waits_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step can neither read a number back nor bring one over."""
    method, stream = begun(name), short_stream()
    if not method.parameter_groups(SHORT):
        pytest.skip(f"{name} trains nothing by gradient after the first task.")
    batch = stream.batch(method, LAST, 1)

    def forbid(what: str) -> Callable[..., Any]:
        def refuse(*arguments: Any, **others: Any) -> Any:
            raise AssertionError(f"{what} is not possible inside a captured step.")

        return refuse

    for attribute in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(Tensor, attribute, forbid(attribute))
    for function in ("tensor", "as_tensor", "nonzero", "rand", "randn", "randint", "randperm"):
        monkeypatch.setattr(torch, function, forbid(function))
    sum(method.loss(batch).values()).backward()


@every_method
def test_draws_have_one_row_per_step(name: str) -> None:
    method = begun(name)
    size = SHORT.batch_size
    generator = torch.Generator().manual_seed(0)
    draws = method.draw(Plan(5, size, torch.tensor([0, size, size, 3, size])), generator)
    for key, value in draws.items():
        assert len(value) == 5, key
        assert bool(torch.isfinite(value.float()).all()), key


@every_method
def test_frozen_networks_say_the_same_in_any_piece(name: str) -> None:
    method, stream = begun(name), short_stream()
    images = stream.test_images[:12]
    with torch.no_grad():
        whole, part = method.frozen(images), method.frozen(images[4:9])
    for key, value in whole.items():
        assert len(value) == 12, key
        assert not value.requires_grad
        torch.testing.assert_close(part[key], value[4:9], rtol=1e-4, atol=1e-5)


@every_method
def test_plain_and_fused_backbone_agree(name: str) -> None:
    stream, state = short_stream(), history(name)[1][LAST - 1].state
    task, data = stream.tasks[LAST], stream.data[LAST]
    # SGD, because the first steps of Adam turn rounding errors of tiny gradients into whole steps.
    recipe = replace(SHORT, optimiser="sgd", learning_rate=1e-4, epochs=1)
    results = []
    for execution in (PLAIN, FUSED):
        method = reload(name, state)
        execution.equip(method)
        assert method.network.path == ("fused" if execution.fused else "plain")
        method.begin_task(task)
        if not method.parameter_groups(recipe):
            pytest.skip(f"{name} trains nothing by gradient after the first task.")
        trainer = Trainer(method, data, task, fitting(method, recipe), execution)
        trainer.run()
        results.append((trainer.losses.clone(), clone(method.state_dict())))
    (losses, plain), (fused_losses, fused) = results
    torch.testing.assert_close(fused_losses, losses, rtol=2e-3, atol=1e-4)
    for key, value in plain.items():
        if not key.endswith("num_batches_tracked"):
            close = torch.allclose(fused[key].double(), value.double(), rtol=1e-3, atol=2e-4)
            assert close, f"{key} differs by up to {(fused[key] - value).abs().max()}"


@every_method
def test_what_a_task_leaves_does_not_depend_on_the_pieces_it_is_seen_in(name: str) -> None:
    """Tasks of more images than fit one piece of memory are the rule, and tests' tasks are not among them."""
    stream, left = short_stream(), []
    for pieces in (None, 10):
        method, data = begun(name), stream.images(LAST)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in method.network.backbone.parameters():  # as if it had been trained
                parameter.mul_(1.0 + 0.02 * torch.randn(parameter.shape, generator=generator))
            if pieces is not None:
                data.chunk_size = lambda pieces=pieces: pieces  # type: ignore[method-assign]
            method.eval()
            method.end_task(stream.tasks[LAST], data)
        left.append(method.state_dict())
    for key, value in left[0].items():
        # As far as a solver that stops early agrees with itself when its last bits differ.
        close = torch.allclose(left[1][key].double(), value.double(), rtol=1e-2, atol=5e-3)
        assert close, f"{key} differs by up to {(left[1][key] - value).abs().max()}"


def terms_on_a_gpu(name: str, execution: Execution) -> list[dict[str, float]]:
    """Loss terms of every epoch of the last task."""
    stream, state = short_stream(), history(name)[1][LAST - 1].state
    task, method = stream.tasks[LAST], reload(name, state).to(execution.device)
    terms: list[dict[str, float]] = []
    with execution.stream():
        execution.equip(method)
        method.begin_task(task)
        trainer = Trainer(method, stream.images(LAST, execution), task, fitting(method, SHORT), execution)
        trainer.run(on_epoch=lambda report: terms.append(report.terms))
        torch.cuda.synchronize()
    return terms


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_method
@pytest.mark.parametrize("block", [4, feed_module.BLOCK])
def test_captured_steps_do_what_eager_ones_do(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one precision, on one path: what differs is when things happen, and a stale batch or rate would show.

    Blocks of few steps make the preparation of the next one run beside the present one many times.
    """
    monkeypatch.setattr(feed_module, "BLOCK", block)
    eager = replace(PLAIN, device=torch.device("cuda", 0), half=True, fused=True)
    with switches(eager, deterministic=False):
        expected = terms_on_a_gpu(name, eager)
        found = terms_on_a_gpu(name, replace(eager, captured=True))
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=0.05, abs=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_method
def test_bfloat16_on_the_fused_path_does_about_what_float32_does(name: str) -> None:
    exact = replace(PLAIN, device=torch.device("cuda"))
    expected = terms_on_a_gpu(name, exact)
    found = terms_on_a_gpu(name, replace(exact, half=True, fused=True, captured=True))
    for one, other in zip(expected, found, strict=True):
        # SSRE's sum of norms is the most sensitive, at 22 %.
        assert other == pytest.approx(one, rel=0.3, abs=0.05)


@every_method
def test_feed_prepares_what_the_loss_asks_for(name: str) -> None:
    method, stream = begun(name), short_stream()
    data, task = stream.data[LAST], stream.tasks[LAST]
    feed = Feed(method, data, task, SHORT.batch_size)
    steps = feed.load(0, 0)
    short = feed.batch(steps - 1, feed.batch_length(steps - 1))
    assert 0 < short.size < SHORT.batch_size, "The stream is meant to end with a short batch."
    if method.parameter_groups(SHORT):
        assert all(bool(torch.isfinite(value)) for value in method.loss(short).values())


# -- settings --------------------------------------------------------------------------------------------------------


def another(known: Option) -> Any:
    """A value of an option that is not its default."""
    if known.choices is not None:
        return next(choice for choice in known.choices if choice != known.default)
    if isinstance(known.default, bool):
        return not known.default
    if isinstance(known.default, int | float):
        if known.maximum is None:
            return known.default + 1
        limit = known.maximum if known.default != known.maximum else known.minimum or 0.0
        return type(known.default)((known.default + limit) / 2)
    if known.default is None:
        return known.minimum or 1
    if isinstance(known.default, tuple):
        return (*known.default, *(known.default[-1:] or (1,)))
    raise AssertionError(f"Say here what another value of {known.name} could be.")


@pytest.mark.parametrize("name", METHODS)
def test_settings_survive_yaml(name: str, tmp_path: Path) -> None:
    changed = {key: another(known) for key, known in options(available()[name].Settings).items()}
    settings = Settings(method=name, overrides=changed)
    assert resolve(settings).method != resolve(Settings(method=name)).method or not changed
    file = tmp_path / "settings.yaml"
    file.write_text(to_yaml(settings))
    (again,) = load_config(file)
    assert resolve(again) == resolve(settings)


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_says_what_it_does(name: str) -> None:
    for key, known in options(available()[name].Settings).items():
        assert known.help.endswith("."), f"{name}: the help of {key} is not a sentence."
