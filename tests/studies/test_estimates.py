"""Expected times: from measured steps, from epochs of this machine, shared first tasks counted once."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from efcil.runfolder import locate
from efcil.settings import Settings
from efcil.studies import estimate
from efcil.studies.estimate import Estimate, Times, in_words, sources_in_words, speed_up, total
from efcil.studies.plan import Hardware, described, longest_first, plan_runs, summed_up

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import step_times

HERE = Path()


def cifar(**values: object) -> Settings:
    return Settings(**{"dataset": "cifar100", "scenario": "cs10", "method": "efc", **values})  # type: ignore[arg-type]


def test_the_step_times_of_the_package_are_those_of_the_results() -> None:
    assert step_times.TARGET.read_text(encoding="utf-8") == step_times.text()


def test_a_run_takes_what_was_measured() -> None:
    """One run of EFC on cs10 took 120 seconds on the card that the step times are from."""
    found = Times().of(cifar())
    assert found is not None
    assert found.source == estimate.MEASURED
    assert 100 < found.seconds < 140
    assert 20 < found.first < 32
    short = Times().of(cifar(epochs=10))
    assert short is not None
    assert short.first == pytest.approx(found.first / 10)


def test_later_tasks_of_a_method_that_trains_once_cost_nothing() -> None:
    once, trained = Times().of(cifar(method="fetril")), Times().of(cifar())
    assert once is not None
    assert trained is not None
    assert once.first == trained.first
    assert once.rest < 10


def test_other_datasets_are_scaled_and_unknown_ones_are_not_guessed() -> None:
    tiny, here = Times().of(cifar(dataset="tiny-imagenet")), Times().of(cifar())
    assert tiny is not None
    assert here is not None
    assert tiny.source in (estimate.SCALED, estimate.MEASURED)
    assert tiny.first > 2 * here.first
    assert Times().of(Settings(method="efc")) is None  # digits
    assert Times().of(cifar(network="slim")) is None
    assert Times().of(cifar(dataset="folder", data="x")) is None


def test_joint_training_sees_all_images_in_one_task() -> None:
    joint, first = Times().of(cifar(method="joint")), Times().of(cifar())
    assert joint is not None
    assert first is not None
    assert joint.first == 0
    assert joint.rest == pytest.approx(10 * first.first, rel=0.1)
    every = Times().of(cifar(method="joint", overrides={"when": "every"}))
    assert every is not None
    assert every.rest == pytest.approx(sum(range(1, 11)) * first.first, rel=0.1)


def test_a_first_task_that_runs_share_is_trained_once() -> None:
    one = Estimate(100.0, 10.0, ("a",), "")
    assert total([one]) == 110
    assert total([one, one, one]) == 130
    assert total([one, Estimate(100.0, 10.0, ("b",), "")]) == 220


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ({}, {"method": "lwf", "classifier": "all", "test_views": 2}, True),
        ({}, {"class_seed": 0}, True),
        ({"class_order": "natural", "class_seed": 1}, {"class_order": "natural", "class_seed": 2}, True),
        ({}, {"class_order": "icarl"}, False),
        ({}, {"class_seed": 1}, False),
        ({}, {"held_out": 0.1}, False),
        ({}, {"augmentation": "crop-flip"}, False),
        ({}, {"overrides": {"first_task.learning_rate": 0.5}}, False),
    ],
)
def test_first_tasks_count_once_where_training_shares_them(
    one: dict[str, object], other: dict[str, object], alike: bool
) -> None:
    first, second = Times().of(cifar(**one)), Times().of(cifar(**other))
    assert first is not None
    assert second is not None
    assert (first.first_task == second.first_task) == alike


def test_several_at_a_time_are_faster_together_but_none_is_faster_than_alone() -> None:
    runs = [Estimate(0.0, 100.0, (), "")] * 5
    assert speed_up(1) == 1
    assert 1 < speed_up(2) < speed_up(4) < speed_up(5) == speed_up(9)
    assert total(runs, 5) == pytest.approx(500 / speed_up(5))
    assert total(runs, 5, gpus=2) == pytest.approx(250 / speed_up(5))
    assert total(runs[:1], 5) == 100


def leave_epochs(output: Path, settings: Settings, seconds: float, tasks: int = 2, epochs: int = 2) -> None:
    """Write what an unfinished run leaves: its settings and the lines of its epochs."""
    run = locate(output, settings)
    run.write_settings(settings)
    for task in range(1, tasks + 1):
        for epoch in range(1, epochs + 1):
            # The first epoch of a task is longer, and must not count.
            run.append_metrics(
                {"kind": "epoch", "task": task, "epoch": epoch, "seconds": seconds * (9 if epoch == 1 else 1)}
            )


def test_epochs_of_this_machine_count_more_than_those_measured_elsewhere(tmp_path: Path) -> None:
    leave_epochs(tmp_path, cifar(seed=7), seconds=2.0)
    found = Times(tmp_path, "a laptop").of(cifar())
    assert found is not None
    assert found.source == estimate.HERE
    assert found.first == pytest.approx(200)  # 100 epochs of the same ten classes
    assert found.rest == pytest.approx(9 * 200, rel=0.05)
    other = Times(tmp_path, "a laptop").of(cifar(method="lwf"))
    assert other is not None
    assert other.source == estimate.MEASURED, "later tasks of that method were measured elsewhere alone"
    assert other.first == pytest.approx(200)


def test_runs_of_fewer_images_take_less(tmp_path: Path) -> None:
    whole, few, held_out = (Times().of(cifar(**each)) for each in ({}, {"images_per_class": "50"}, {"held_out": 0.2}))
    assert whole is not None
    assert few is not None
    assert held_out is not None
    assert few.first == pytest.approx(whole.first / 10)
    assert held_out.first == pytest.approx(0.8 * whole.first)
    leave_epochs(tmp_path, cifar(seed=7, images_per_class="50"), seconds=2.0)
    same, all_images = (Times(tmp_path, "a laptop").of(cifar(**each)) for each in ({"images_per_class": "50"}, {}))
    assert same is not None
    assert all_images is not None
    assert same.first == pytest.approx(200)
    assert all_images.first == pytest.approx(2000), "ten times as many images"


def test_rotated_images_of_later_tasks_take_their_time(tmp_path: Path) -> None:
    rotated = {"overrides": {"later.rotations": True}}
    leave_epochs(tmp_path, cifar(seed=7, **rotated), seconds=2.0)
    alike, plain = Times(tmp_path, "a laptop").of(cifar(**rotated)), Times(tmp_path, "a laptop").of(cifar())
    assert alike is not None
    assert plain is not None
    assert alike.rest == pytest.approx(9 * 200, rel=0.05), "epochs of the same images"
    assert plain.rest == pytest.approx(9 * 200 / 4, rel=0.1)
    measured, turned = Times().of(cifar()), Times().of(cifar(**rotated))
    assert measured is not None
    assert turned is not None
    assert turned.rest == pytest.approx(4 * measured.rest, rel=0.3)


def test_the_share_of_a_run_counts_rotated_images_of_later_tasks(tmp_path: Path) -> None:
    settings = cifar(overrides={"later.rotations": True, "first_task.epochs": 2, "later.epochs": 2})
    leave_epochs(tmp_path, settings, seconds=2.0)
    assert estimate.done_share(locate(tmp_path, settings), settings) == pytest.approx(2 / 10)


@pytest.mark.parametrize("tasks", [{"tasks": 6, "first_task_classes": 50}, {"task_sizes": "50,5x10"}])
def test_the_time_of_a_run_is_that_of_its_epochs_and_of_the_ends_of_its_later_tasks(
    tmp_path: Path, tasks: dict[str, object]
) -> None:
    settings = cifar(scenario="custom", epochs=4, **tasks)
    leave_epochs(tmp_path, settings, seconds=2.0)
    for task, seconds in ((1, 100.0), (2, 7.0)):
        line = {"kind": "task", "task": task, "seconds": {"statistics": seconds, "evaluation": 3.0}}
        locate(tmp_path, settings).append_metrics(line)
    found = Times(tmp_path).of(replace(settings, seed=9))
    assert found is not None
    assert found.first == pytest.approx(4 * 2.0)
    assert found.rest - estimate._START_UP == pytest.approx(5 * (4 * 2.0 + 10.0))


def test_epochs_beside_other_runs_count_as_if_alone(tmp_path: Path) -> None:
    leave_epochs(tmp_path, cifar(seed=7), seconds=2.0)
    log = locate(tmp_path, cifar(seed=7)).log_file
    log.write_text("2026-01-01 efcil 0.3.0  efcil run --jobs-per-gpu 5 --method efc\n", encoding="utf-8")
    found = Times(tmp_path, "a card").of(cifar())
    assert found is not None
    assert found.first == pytest.approx(200 * speed_up(5) / 5)


def test_digits_have_a_time_once_they_were_trained_here(tmp_path: Path) -> None:
    leave_epochs(tmp_path, Settings(method="efc", seed=7), seconds=0.5)
    found = Times(tmp_path).of(Settings(method="efc"))
    assert found is not None
    assert found.first == pytest.approx(30 * 0.5)


def test_an_unfinished_run_takes_what_is_left(tmp_path: Path) -> None:
    leave_epochs(tmp_path, cifar(epochs=3), seconds=2.0, tasks=1, epochs=3)
    (whole,) = plan_runs([cifar(epochs=3, seed=1)], tmp_path, Times(tmp_path))
    (planned,) = plan_runs([cifar(epochs=3)], tmp_path, Times(tmp_path))
    assert (planned.state, whole.state) == ("unfinished", "to do")
    assert planned.estimate is not None
    assert whole.estimate is not None
    # The first task has four rotated images for one, the nine later ones are nine times as large.
    assert planned.estimate.seconds == pytest.approx(whole.estimate.seconds * 9 / 13)


def test_the_longest_come_first_and_unknown_ones_before_them() -> None:
    runs = [cifar(method="fetril"), cifar(method="pass"), Settings(method="efc"), cifar(method="efc")]
    planned = plan_runs(runs, HERE / "nowhere", Times())
    assert [each.method for each in longest_first(planned)] == ["efc", "pass", "efc", "fetril"]
    assert longest_first(planned)[0].dataset == "digits"


def test_the_plan_says_where_its_times_are_from() -> None:
    runs = plan_runs([cifar(), cifar(method="lwf")], HERE / "nowhere", Times())
    there = summed_up(runs, HERE, Hardware("NVIDIA H200", 1), None)
    assert there.startswith("2 runs: 0 done, 2 to train. About 4 min one after the other.")
    assert "measured on one NVIDIA H200" in there
    assert "This machine" not in there
    elsewhere = summed_up(runs, HERE, Hardware("a laptop", 0), None)
    assert "This machine has a laptop" in elsewhere
    assert "with 2 at a time" in summed_up(runs, HERE, Hardware("NVIDIA H200", 1), 2)
    one = summed_up(runs[:1], HERE, Hardware("NVIDIA H200", 1), None)
    assert "one after the other" not in one
    assert one.startswith("1 run: 0 done, 1 to train. About ")
    assert "nobody" in " ".join(sources_in_words([""], "x", HERE)).lower()
    assert "this machine" in " ".join(sources_in_words([estimate.HERE], "x", HERE))


def test_runs_of_unknown_time_are_not_counted_as_none() -> None:
    mixed = [cifar(), cifar(method="cedar"), cifar(method="apr"), cifar(method="cedar", seed=1)]
    text = summed_up(plan_runs(mixed, HERE / "nowhere", Times()), HERE, Hardware("NVIDIA H200", 1), None)
    assert "one after the other, without 3 runs whose time is not known (cedar, apr)." in text
    alone = summed_up(plan_runs(mixed[1:], HERE / "nowhere", Times()), HERE, Hardware("NVIDIA H200", 1), None)
    assert "Nobody has measured how long that takes" in alone


def test_a_grid_is_described(tmp_path: Path) -> None:
    leave_epochs(tmp_path, cifar(seed=1), seconds=1.0, tasks=1)
    text = described([cifar(), cifar(seed=1)], tmp_path, None)
    first, second, *rest = text.splitlines()
    assert "seed0" in first
    assert "to do  about" in first
    assert "seed1" in second
    assert "unfinished" in second
    assert " ".join(rest).startswith("2 runs: 0 done, 2 to train (1 unfinished, to be resumed).")
    assert described([], tmp_path, None).startswith("No runs.")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "unknown"), (0.2, "1 s"), (89, "89 s"), (120, "2 min"), (7200, "2.0 h"), (400_000, "4.6 days")],
)
def test_times_in_words(seconds: float | None, words: str) -> None:
    assert in_words(seconds) == words
