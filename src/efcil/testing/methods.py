"""The checks that every method must pass, in the package and of one's own. CHECKS, at the end, lists them all.

Each asserts what its documentation says first. They compute on a CPU, on three tasks of a few digits; those that need a
GPU are left out where there is none.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from efcil import methods
from efcil.core import classifiers
from efcil.engine import feed as feed_module
from efcil.engine import lifecycle
from efcil.engine.evaluate import scorer
from efcil.engine.execution import Execution
from efcil.engine.feed import Feed
from efcil.engine.hardware import switches
from efcil.engine.trainer import MOST_TERMS
from efcil.errors import SettingsError, some
from efcil.methods.base import Method, Plan, Traits
from efcil.presets import load_preset, presets
from efcil.resolution import load_config, resolve, to_yaml
from efcil.settings import Recipe, Settings, options
from efcil.settings.options import Option
from efcil.testing.compare import (
    State,
    assert_equal,
    clone,
    kept_tensors,
    longest_run,
    require,
    require_close,
)
from efcil.testing.pretended import missing, pretended
from efcil.testing.stream import FUSED, PLAIN, SHORT, SIZES, blueprint, fitting, short_stream
from efcil.testing.trial import LAST, Trial, history, resumed, run
from efcil.testing.verdicts import Check, LeftOut

# -- what a class says -----------------------------------------------------------------------------------------------


def check_says_what_it_is(trial: Trial) -> None:
    """It has a name, a summary and a documentation, and its family has a recipe in every preset."""
    cls = trial.method
    require(bool(cls.name), f"{cls.__name__} has no `name`.")
    fits = re.fullmatch(r"[\w.+-]+", cls.name) is not None
    require(fits, f"{cls.name!r} also names folders: use letters, digits, and the characters . + - _ alone.")
    require(bool(cls.summary), f"{cls.__name__} has no `summary`.")
    require(bool(vars(cls).get("__doc__")), f"{cls.__name__} has no documentation: write a docstring.")
    for preset in presets():
        load_preset(preset).later(_traits(trial).family)  # which says which families there are


def check_settings_are_explained(trial: Trial) -> None:
    """Every setting says what it does, in a sentence."""
    for key, known in options(trial.method.Settings).items():
        require(
            known.help.endswith("."), f"The help of the setting {key} is not a sentence that ends with a full stop."
        )


def check_settings_survive_yaml(trial: Trial) -> None:
    """Settings that differ from the defaults are the same after they were written to a file and read."""
    name = trial.method.name
    if methods.available().get(name) is not trial.method:
        raise LeftOut("It is not registered under its name; $EFCIL_METHODS names the files of methods.")
    changed = {key: _another(known) for key, known in options(trial.method.Settings).items()}
    settings = Settings(method=name, overrides=changed)
    same = resolve(settings).method == resolve(Settings(method=name)).method
    require(not (changed and same), "Settings that were changed are resolved to the defaults.")
    with tempfile.TemporaryDirectory(prefix="efcil-") as folder:
        file = Path(folder) / "settings.yaml"
        file.write_text(to_yaml(settings), encoding="utf-8")
        (again,) = load_config(file)
    require(resolve(again) == resolve(settings), "Settings that were written and read are not the same.")


# -- learning --------------------------------------------------------------------------------------------------------


def check_learns_unequal_tasks(trial: Trial) -> None:
    """Tasks of unequal size, one of a single class, are learned; every loss term and every score is finite."""
    _, records = history(trial)
    for record, task in zip(records, short_stream().tasks, strict=True):
        shape = tuple(record.scores.shape)
        require(shape[1:] == (task.seen,), f"After {task.seen} classes, scores have the shape {shape}.")
        require(bool(torch.isfinite(record.scores).all()), f"After {task.seen} classes, a score is not finite.")
        for terms in record.terms:
            require(0 < len(terms) <= MOST_TERMS, f"A loss has 1 to {MOST_TERMS} terms; this one has {len(terms)}.")
            require(all(map(math.isfinite, terms.values())), f"A loss term is not finite: {terms}.")


def check_scores_are_deterministic(trial: Trial) -> None:
    """Scores repeat to the bit, have no gradient, and those of an image do not depend on the others of its batch."""
    method, records = history(trial)
    images = short_stream().test_images[short_stream().test_labels < sum(SIZES)]
    expected = records[-1].scores
    require(torch.equal(method.scores(images), expected), "Scores of the same images differ the second time.")
    require_close(method.scores(images[5:12]), expected[5:12], "The score of an image in another batch", 1e-4, 1e-4)
    require(not method.scores(images).requires_grad, "Scores have a gradient: write @torch.no_grad() above `scores`.")


def check_runs_repeat(trial: Trial) -> None:
    """Two runs with one seed are equal to the bit, whatever PyTorch's global random state."""
    stream = short_stream()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        _, again = run(stream, trial.make(stream), 0)
    for first, second in zip(history(trial)[1], again, strict=True):
        assert_equal(first.state, second.state)
        require(torch.equal(first.scores, second.scores), "Scores of two runs differ.")


def check_gradients_reach_what_is_trained(trial: Trial) -> None:
    """Every parameter that the optimiser gets has a gradient, no other one has, and teachers do not train."""
    method, stream = trial.begun(), short_stream()
    given = [parameter for group in method.parameter_groups(SHORT) for parameter in group["params"]]
    require(len({id(parameter) for parameter in given}) == len(given), "A parameter is in two groups.")
    _total(method.loss(stream.batch(method, LAST, 1))).backward()
    for key, parameter in method.named_parameters():
        if any(parameter is one for one in given):
            old = key.startswith("network.heads.") and parameter is not method.network.heads[-1]
            hint = (
                " If the loss trains the newest head only, call self.freeze_old_heads() in begin_task." if old else ""
            )
            require(parameter.grad is not None, f"{key} gets no gradient.{hint}")
            assert parameter.grad is not None
            require(bool((parameter.grad != 0).any()), f"The gradient of {key} is zero.")
            require(bool(torch.isfinite(parameter.grad).all()), f"The gradient of {key} is not finite.")
        else:
            require(parameter.grad is None, f"{key} gets a gradient but is not in parameter_groups.")
    hidden = [value for module in method.modules() for value in vars(module).values() if isinstance(value, nn.Module)]
    for teacher in hidden:  # a base method holds the network itself in this way too
        if teacher is not method.network:
            require(not teacher.training, f"A {type(teacher).__name__} that is not trained is in training mode.")
            still = not any(parameter.requires_grad for parameter in teacher.parameters())
            require(still, f"A {type(teacher).__name__} that is not trained requires gradients.")


def check_training_is_announced(trial: Trial) -> None:
    """The optimiser gets parameters exactly where `traits` say that later tasks train."""
    given, said = bool(trial.begun().parameter_groups(SHORT)), _traits(trial).trains_later
    hint = "" if given else " Methods that train nothing later begin as FrozenBackbone does (efcil.methods.frozen)."
    found = "some" if given else "nothing"
    require(given == said, f"`trains_later` is {said}, but parameter_groups gives {found}.{hint}")


def check_normalisation_may_be_chosen(trial: Trial) -> None:
    """The setting `train_normalisation` decides whether BatchNorm is trained."""
    for trains in (True, False):
        settings = replace(trial.settings, train_normalisation=trains)
        method = Trial(trial.method, settings).make(short_stream())
        expected, found = "trained" if trains else "frozen", fitting(method, SHORT).normalisation
        require(found == expected, f"With train_normalisation={trains}, BatchNorm is {found}.")


def check_backbone_has_its_own_learning_rate(trial: Trial) -> None:
    """What trains inside the backbone follows its learning rate; heads and all else that is new do not."""
    method = trial.begun()
    inside = {
        id(parameter): key
        for key, parameter in method.named_parameters()
        if key.startswith(("network.backbone.", "adapters."))  # SSRE's adapters stand inside it too
    }
    heads = {id(parameter) for parameter in method.network.head_parameters()}
    usual: dict[int, float] = {}  # layers of a method's own may have any rate, if it is not the backbone's
    for slow in (None, 1e-5):
        for group in method.parameter_groups(replace(SHORT, learning_rate=1e-2, backbone_learning_rate=slow)):
            for parameter in group["params"]:
                found, known = group["learning_rate"], id(parameter) in inside or id(parameter) in heads
                rate = 1e-2 if known else usual.setdefault(id(parameter), found)
                expected = slow if slow and id(parameter) in inside else rate
                what = inside.get(id(parameter), "A parameter outside the backbone")
                require(found == expected, f"{what} has the learning rate {found}, and {expected} was expected.")


def check_normalisation_is_frozen_or_learns(trial: Trial) -> None:
    """BatchNorm stays as it is to the bit where its recipe freezes it, and moves where it is trained."""
    method, records = history(trial)
    for record in records[1:]:
        before, after = record.normalisation_before, record.normalisation_after
        if fitting(method, SHORT).normalisation == "frozen":
            assert_equal(before, after)
        else:
            moved = [key for key, value in before.items() if not torch.equal(value, after[key])]
            learns = any(key.endswith("running_mean") for key in moved)
            require(learns, "BatchNorm is to be trained, but its running means stay as they are.")


def check_classifiers_fit_the_method(trial: Trial) -> None:
    """Each classifier that `traits` allow is built from the method's own features, heads and statistics."""
    method, images = history(trial)[0], short_stream().test_images[:20]
    with torch.no_grad():
        features, embedded = method.network.features(images), method.embed(images)
    heads, statistics, keeps = method.network.head_weight().detach(), method.statistics(), set(method.about.keeps)
    missing = keeps & {"means", "covariances"} and statistics is None
    require(not missing, "`traits` say that it keeps means, but `statistics` gives none.")
    if "heads" in keeps:
        expected = features @ heads.T / method.head_temperature
        require_close(scorer(method, "heads")(images), expected, "The score by the heads", 1.3e-6, 1e-5)
    if statistics is not None:
        expected = classifiers.nearest_mean(statistics)(embedded)
        require_close(scorer(method, "nearest-mean")(images), expected, "The score by nearest means", 1.3e-6, 1e-5)
        if {"heads", "covariances"} <= keeps:
            expected = classifiers.rebalanced(replace(statistics, heads=heads))(embedded)
            require_close(scorer(method, "rebalanced")(images), expected, "The rebalanced score", 1.3e-6, 1e-5)


def check_probabilities_are_those_trained(trial: Trial) -> None:
    """Scores are divided by the temperature that the heads are trained with, from the second task on."""
    stream = short_stream()
    images, settings = stream.test_images[:20], replace(trial.settings, temperature=0.5)
    method = Trial(trial.method, settings).make(stream)
    stream.end(method, 0)

    def logits() -> Tensor:
        return (method.network.features(images) @ method.network.head_weight().T).detach()

    require_close(method.scores(images), logits(), "The score after the shared first task", 1.3e-6, 1e-5)
    stream.learn(method, 1, SHORT)
    require_close(method.scores(images), 2.0 * logits(), "The score under temperature 0.5", 1.3e-6, 1e-5)
    require_close(scorer(method, "heads")(images), 2.0 * logits(), "The score by the heads", 1.3e-6, 1e-5)


# -- state -----------------------------------------------------------------------------------------------------------


def check_saved_state_is_complete(trial: Trial) -> None:
    """A saved state that is loaded into a new method predicts and learns the next task as before, to the bit."""
    stream, (_, records) = short_stream(), history(trial)
    for task, record in zip(stream.tasks, records, strict=True):
        twin = trial.reload(record.state)
        assert_equal(clone(twin.state_dict()), record.state)
        require(torch.equal(stream.scores(twin, task.seen), record.scores), "Scores differ after loading.")
    _, rest = run(stream, trial.reload(records[LAST - 1].state), LAST)
    assert_equal(rest[-1].state, records[LAST].state)


def check_loaded_state_is_a_copy(trial: Trial) -> None:
    """What a method learns does not change the tensors that it was loaded from."""
    state = clone(history(trial)[1][LAST].state)
    method = trial.make(short_stream())
    method.load_tensors(state)
    for key, value in method.state_dict().items():
        shared = value.numel() > 0 and value.data_ptr() == state[key].data_ptr()
        require(not shared, f"{key} is the very tensor that it was loaded from.")


def check_interrupted_task_is_resumed(trial: Trial) -> None:
    """A task that is interrupted after some steps and resumed from its checkpoint ends equal to the bit."""
    stream, (_, records) = short_stream(), history(trial)
    before = records[LAST - 1].state
    twin = resumed(stream, trial.reload(before), trial.reload(before), LAST, steps=7)
    assert_equal(clone(twin.state_dict()), records[LAST].state)


def check_no_image_is_kept(trial: Trial) -> None:
    """When a task has ended, nothing holds its images, and no tensor that is kept holds their pixels."""
    method, records = history(trial)
    require(all(record.images_gone for record in records), "Something still holds the images of a task that has ended.")
    stream = short_stream()
    seen = torch.cat([images for data in stream.data for images, _ in data.augmented("check")])
    raw = torch.cat([data.images for data in stream.data])
    allowed = torch.cat([seen.unique(), raw.unique().float(), raw.unique().float() / 255]).unique()
    require(longest_run(seen[0], allowed) == seen[0].numel(), "An image is not recognised; this check is broken.")
    side = seen.shape[-1]
    for key, value in kept_tensors(method):
        if key.startswith("network."):
            continue
        shaped = tuple(value.shape[-3:]) in {(3, side, side), (side, side, 3)}
        require(not shaped, f"{key} has the shape of images.")
        require(longest_run(value.float(), allowed) < 2 * side, f"{key} holds pixels.")


def check_storage_does_not_grow_with_images(trial: Trial) -> None:
    """What is kept has the same size however many images the classes have."""
    many = short_stream(32)
    larger = all(len(data) > len(few) for data, few in zip(many.data, short_stream().data, strict=True))
    require(larger, "There are not more images; this check is broken.")
    _, records = run(many, trial.make(many), 0, replace(SHORT, epochs=1))
    more = {key: tuple(value.shape) for key, value in records[-1].state.items()}
    for key, value in history(trial)[1][-1].state.items():
        shape = tuple(value.shape)
        require(
            more.pop(key, None) == shape, f"{key}, of shape {shape}, has another one where classes have more images."
        )
    require(not more, f"{', '.join(more)} exists only where classes have more images.")


# -- execution -------------------------------------------------------------------------------------------------------


def check_step_never_waits_for_the_device(trial: Trial) -> None:
    """A loss neither reads a number back from the device nor draws one, so that a GPU can replay the step."""
    method, stream = trial.begun(), short_stream()
    batch = stream.batch(method, LAST, 1)

    def forbid(what: str) -> Callable[..., Any]:
        def refuse(*arguments: Any, **others: Any) -> Any:
            raise AssertionError(f"`{what}` is not possible inside a captured step. Random numbers come from `draw`.")

        return refuse

    with ExitStack() as patches:
        for name in ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
            patches.enter_context(mock.patch.object(Tensor, name, forbid(name)))
        for name in ("tensor", "as_tensor", "nonzero", "rand", "randn", "randint", "randperm"):
            patches.enter_context(mock.patch.object(torch, name, forbid(f"torch.{name}")))
        _total(method.loss(batch)).backward()


def check_draws_have_one_row_per_step(trial: Trial) -> None:
    """What `draw` gives has one row per planned step, and is finite."""
    method, size = trial.begun(), SHORT.batch_size
    plan = Plan(5, size, torch.tensor([0, size, size, 3, size]))
    for key, value in method.draw(plan, torch.Generator().manual_seed(0)).items():
        require(len(value) == plan.steps, f"{key} has {len(value)} rows for {plan.steps} steps.")
        require(bool(torch.isfinite(value.float()).all()), f"{key} is not finite.")


def check_frozen_is_per_image(trial: Trial) -> None:
    """What `frozen` gives has one row per image, no gradient, and does not depend on the other images."""
    method, images = trial.begun(), short_stream().test_images[:12]
    with torch.no_grad():
        whole, part = method.frozen(images), method.frozen(images[4:9])
    for key, value in whole.items():
        require(len(value) == len(images), f"{key} has {len(value)} rows for {len(images)} images.")
        require(not value.requires_grad, f"{key} has a gradient.")
        require_close(part[key], value[4:9], f"{key} of an image in another batch", 1e-4, 1e-5)


def check_loss_takes_a_short_batch(trial: Trial) -> None:
    """The loss of the last batch of an epoch, which is shorter, is finite."""
    method, stream = trial.begun(), short_stream()
    feed = Feed(method, stream.data[LAST], stream.tasks[LAST], SHORT.batch_size)
    steps = feed.load(0, 0)
    short = feed.batch(steps - 1, feed.batch_length(steps - 1))
    require(0 < short.size < SHORT.batch_size, "The stream does not end with a short batch; this check is broken.")
    if _traits(trial).trains_later:
        for key, value in method.loss(short).items():
            require(bool(torch.isfinite(value)), f"The term {key} of a short batch is not finite.")


def check_plain_and_fused_paths_agree(trial: Trial) -> None:
    """A task trained on the fused path ends where it ends layer by layer, and no gradient is lost on the way."""
    stream, before = short_stream(), history(trial)[1][LAST - 1].state
    # SGD, because the first steps of Adam turn rounding errors of tiny gradients into whole steps.
    recipe = replace(SHORT, optimiser="sgd", learning_rate=1e-4, epochs=1)
    found: list[tuple[Tensor, State]] = []
    for execution in (PLAIN, FUSED):
        method = trial.reload(before, execution)
        require(method.network.path == ("fused" if execution.fused else "plain"), "The path is not the chosen one.")
        trainer = lifecycle.begin_later(
            method, stream.tasks[LAST], stream.data[LAST], fitting(method, recipe), execution
        )
        trainer.run()
        found.append((trainer.losses.clone(), clone(method.state_dict())))
    (losses, plain), (fused_losses, fused) = found
    require_close(fused_losses, losses, "A loss term on the fused path", 2e-3, 1e-4)
    for key, value in plain.items():
        if not key.endswith("num_batches_tracked"):
            require_close(fused[key], value, f"{key} on the fused path", 1e-3, 2e-4)
    _require_same_way(before, plain, fused)


def check_end_of_task_in_any_pieces(trial: Trial) -> None:
    """What a task leaves does not depend on the pieces of memory in which its images are looked at."""
    stream, left = short_stream(), []
    for pieces in (None, 10):
        method, data = trial.begun(), stream.images(LAST)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in method.network.backbone.parameters():  # as if it had been trained
                parameter.mul_(1.0 + 0.02 * torch.randn(parameter.shape, generator=generator))
        if pieces is not None:
            data.chunk_size = lambda pieces=pieces: pieces  # type: ignore[method-assign, misc]
        lifecycle.end(method, stream.tasks[LAST], data)
        left.append(method.state_dict())
    for key, value in left[0].items():
        # As far as a solver that stops early agrees with itself when its last bits differ.
        require_close(left[1][key], value, f"{key}, seen in other pieces,", 1e-2, 5e-3)


def check_stays_on_the_device(trial: Trial) -> None:
    """On a pretended GPU, tasks are learned, tested, merged and forgotten without a tensor on the wrong device."""
    stream, recipe = short_stream(), replace(SHORT, epochs=1)
    for fused in (False, True):
        with pretended() as device:
            execution = replace(PLAIN, device=device, fused=fused, captured=True)
            plan, images = blueprint(trial.method, trial.settings, execution), stream.test_images[:8].to(device)
            with execution.stream():
                method = plan.around(stream.network_state)
                lifecycle.end(method, stream.tasks[0], stream.images(0, execution))
                for index in range(1, len(stream.tasks)):
                    data = stream.images(index, execution)
                    lifecycle.learn_task(plan, method, stream.tasks[index], data, fitting(method, recipe))
                    method.scores(images)
                    method.importance_matrix()
                    _require_on(device, method)
                    method = plan.load({name: value.cpu() for name, value in method.state_dict().items()})
                with suppress(SettingsError):  # what it stores may not say whether a class has rows there
                    method.merge_classes([0, 1], [1] * sum(SIZES))
                    method.forget_classes([0])
                    method.scores(images)
                _require_on(device, method)


def check_captured_steps_are_the_eager_ones(trial: Trial) -> None:
    """On a GPU, steps that are replayed as a CUDA graph do what steps one by one do."""
    # In one precision, on one path: what differs is when things happen, and a stale batch or rate would show.
    require_same_captured(trial, SHORT)


def check_bfloat16_is_about_float32(trial: Trial) -> None:
    """On a GPU, bfloat16 on the fused path gives about the loss terms of float32."""
    exact = replace(PLAIN, device=torch.device("cuda", 0))
    found = _terms(trial, replace(exact, half=True, fused=True, captured=True))
    _require_same_terms(found, _terms(trial, exact), 0.3, 0.05)  # SSRE's sum of norms is the most sensitive, at 22 %


# -- helpers ---------------------------------------------------------------------------------------------------------


def require_same_captured(trial: Trial, recipe: Recipe) -> None:
    """Require that on a GPU captured steps by this recipe give the loss terms of eager ones."""
    eager = replace(PLAIN, device=torch.device("cuda", 0), half=True, fused=True)
    for block in (4, feed_module.BLOCK):  # blocks of few steps prepare the next one beside the present one many times
        with mock.patch.object(feed_module, "BLOCK", block), switches(eager, deterministic=False):
            expected = _terms(trial, eager, recipe)
            found = _terms(trial, replace(eager, captured=True), recipe)
        _require_same_terms(found, expected, 0.05, 0.01)


def _traits(trial: Trial) -> Traits:
    return trial.method.traits(trial.settings)


def _require_on(device: torch.device, method: Method) -> None:
    """Require that whatever the method keeps is on the device."""
    away = [name.strip(".") for name, value in kept_tensors(method) if value.device != device]
    require(not away, f"What it keeps is not on the device: {some(away)}.")


def _total(terms: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([value.reshape(()) for value in terms.values()]).sum()


def _another(known: Option) -> Any:
    """Return a value of an option that is not its default."""
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
    if isinstance(known.default, str):
        return known.default + "x"
    raise LeftOut(f"No other value is known for the setting {known.name}, whose default is {known.default!r}.")


def _require_same_way(before: State, plain: State, fused: State) -> None:
    """Require that parameters went the same way on both paths: a lost gradient changes that most of all."""
    for key, start in before.items():
        if start.is_floating_point() and "running_" not in key:
            way, other = plain[key] - start, fused[key] - start
            # Steps of SGD from float32 weights are known to their last bits only.
            allowed = 0.02 * way.norm() + 2e-7 * start.norm() + 1e-7
            off = float((other - way).norm())
            far = f"moved by {float(way.norm()):.3g} on the plain path, and is {off:.3g} from there on the fused one"
            require(off <= float(allowed), f"{key} {far}.")


def _terms(trial: Trial, execution: Execution, recipe: Recipe = SHORT) -> list[dict[str, float]]:
    """Return the loss terms of every epoch of the last task."""
    stream, terms = short_stream(), []
    with execution.stream():
        method = trial.reload(history(trial)[1][LAST - 1].state, execution)
        data = stream.images(LAST, execution)
        trainer = lifecycle.begin_later(method, stream.tasks[LAST], data, fitting(method, recipe), execution)
        trainer.run(on_epoch=lambda report: terms.append(report.terms))
        torch.cuda.synchronize()
    return terms


def _require_same_terms(
    found: list[dict[str, float]], expected: list[dict[str, float]], rel: float, absolute: float
) -> None:
    for one, other in zip(expected, found, strict=True):
        require(one.keys() == other.keys(), f"Loss terms are {sorted(other)}, and {sorted(one)} were expected.")
        for key, value in one.items():
            near = abs(other[key] - value) <= max(rel * abs(value), absolute)
            require(near, f"The term {key} is {other[key]:.5g}, and about {value:.5g} was expected.")


# -- which checks apply ----------------------------------------------------------------------------------------------


def _without_later_tasks(trial: Trial) -> str | None:
    alone = _traits(trial).images == "task"
    return None if alone else "It is trained on the images of all tasks at once, so there is no later task."


def _without_training(trial: Trial) -> str | None:
    still = None if _traits(trial).trains_later else "It trains nothing by gradient after the first task."
    return _without_later_tasks(trial) or still


def _without_choice(trial: Trial) -> str | None:
    chosen = "train_normalisation" in options(trial.method.Settings)
    return _without_later_tasks(trial) or (None if chosen else "It has no setting `train_normalisation`.")


def _without_temperature(trial: Trial) -> str | None:
    if "temperature" in options(trial.method.Settings):
        cooled = trial.method.traits(replace(trial.settings, temperature=0.5)).temperature == 0.5
    else:
        cooled = False
    return _without_later_tasks(trial) or (None if cooled else "Its heads are not trained under a `temperature`.")


def _without_gpu(trial: Trial) -> str | None:
    there = torch.cuda.is_available()
    return _without_training(trial) or (None if there else "There is no GPU here.")


def _without_pretence(trial: Trial) -> str | None:
    return _without_later_tasks(trial) or missing()


#: Every check, in the order in which they are run; those that others build on come first.
CHECKS: tuple[Check[Trial], ...] = (
    Check(check_says_what_it_is),
    Check(check_settings_are_explained),
    Check(check_settings_survive_yaml),
    Check(check_learns_unequal_tasks, _without_later_tasks, basis=True),
    Check(check_scores_are_deterministic, _without_later_tasks),
    Check(check_runs_repeat, _without_later_tasks),
    Check(check_saved_state_is_complete, _without_later_tasks),
    Check(check_loaded_state_is_a_copy, _without_later_tasks),
    Check(check_interrupted_task_is_resumed, _without_training),
    Check(check_no_image_is_kept, _without_later_tasks),
    Check(check_storage_does_not_grow_with_images, _without_later_tasks),
    Check(check_training_is_announced, _without_later_tasks),
    Check(check_gradients_reach_what_is_trained, _without_training),
    Check(check_backbone_has_its_own_learning_rate, _without_training),
    Check(check_normalisation_is_frozen_or_learns, _without_later_tasks),
    Check(check_normalisation_may_be_chosen, _without_choice),
    Check(check_classifiers_fit_the_method, _without_later_tasks),
    Check(check_probabilities_are_those_trained, _without_temperature),
    Check(check_draws_have_one_row_per_step, _without_later_tasks),
    Check(check_frozen_is_per_image, _without_later_tasks),
    Check(check_loss_takes_a_short_batch, _without_later_tasks),
    Check(check_step_never_waits_for_the_device, _without_training),
    Check(check_plain_and_fused_paths_agree, _without_training),
    Check(check_end_of_task_in_any_pieces, _without_later_tasks),
    Check(check_stays_on_the_device, _without_pretence),
    Check(check_captured_steps_are_the_eager_ones, _without_gpu),
    Check(check_bfloat16_is_about_float32, _without_gpu),
)
