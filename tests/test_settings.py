from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

import efcil.presets
from efcil.errors import EfcilError, SettingsError
from efcil.presets import load_preset, parse_preset, presets
from efcil.resolution import (
    expand,
    identity,
    label,
    load_config,
    read_config,
    resolve,
    scenario_name,
    to_yaml,
    validate,
    validate_training,
)
from efcil.resolution.documentation import documentation
from efcil.resolution.identity import differences, pin
from efcil.settings import NAMED_CLASS_ORDERS, Recipe, Settings, TrainingSettings, method_settings, option, options

ROOT = Path(__file__).resolve().parent.parent


def planned(arguments: str) -> list[Settings]:
    """The runs of a command line, EFC's unless it says something else."""
    from efcil.cli import build_parser
    from efcil.commands.run import plan

    words = arguments.split()
    if "--method" not in words and "--config" not in words:
        words += ["--method", "efc"]
    return plan(build_parser()[0].parse_args(["run", *words]))


@dataclass(frozen=True)
class Example:
    weight: float = option(10.0, "A weight.", minimum=0)
    count: int = option(3, "A count.")
    active: bool = option(True, "A switch.")
    update: str = option("efm", "A choice.", choices=("efm", "none"))
    limit: int | None = option(None, "A limit.")
    steps: tuple[int, ...] = option((1,), "Steps.")
    mode: Literal["a", "b"] = option("a", "A literal.")


class TestValues:
    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("weight", "0.1", 0.1),
            ("weight", "1e-3", 1e-3),
            ("weight", 2, 2.0),
            ("count", "7", 7),
            ("active", "false", False),
            ("active", "Yes", True),
            ("update", "none", "none"),
            ("limit", "none", None),
            ("limit", "4", 4),
            ("steps", "1,2", (1, 2)),
            ("steps", [3, 4], (3, 4)),
            ("steps", 5, (5,)),
            ("mode", "b", "b"),
        ],
    )
    def test_text_becomes_the_annotated_type(self, name: str, value: object, expected: object) -> None:
        result = getattr(method_settings(Example, {name: value}), name)
        assert result == expected
        assert type(result) is type(expected)

    @pytest.mark.parametrize(
        ("name", "value", "says"),
        [
            ("weight", "many", "a number of at least 0"),
            ("weight", "-1", "a number of at least 0"),
            ("weight", "nan", "a number"),
            ("count", "2.5", "a whole number"),
            ("count", 2.5, "a whole number"),
            ("count", True, "a whole number"),
            ("active", "maybe", "true or false"),
            ("limit", "x", "a whole number or none"),
            ("steps", "1,b", "whole numbers separated by commas"),
            ("update", "emf", "Did you mean 'efm'"),
            ("update", 3, "one of efm, none"),
            ("mode", "c", "Valid: a, b"),
        ],
    )
    def test_wrong_values_say_what_was_expected(self, name: str, value: object, says: str) -> None:
        with pytest.raises(SettingsError) as error:
            method_settings(Example, {name: value})
        assert says in str(error.value)
        assert repr(name) in str(error.value)

    def test_unknown_setting_names_the_closest_and_all(self) -> None:
        with pytest.raises(SettingsError, match="Did you mean 'weight'") as error:
            method_settings(Example, {"wieght": 1})
        assert all(name in str(error.value) for name in options(Example))

    def test_a_number_of_tasks_implies_a_scenario_of_its_own(self) -> None:
        assert Settings(tasks=3).scenario == "custom"

    def test_settings_check_themselves(self) -> None:
        wrongs: list[dict[str, Any]] = [
            {"epochs": 0},
            {"seed": -1},
            {"precision": "fp16"},
            {"held_out": 1.0},
            {"scenario": "cs5", "tasks": 3},
        ]
        for wrong in wrongs:
            with pytest.raises(SettingsError):
                Settings(**wrong)
        with pytest.raises(SettingsError, match="needs the number of tasks"):
            Settings(first_task_classes=4)
        with pytest.raises(SettingsError, match="--tasks N"):
            Settings(scenario="custom")

    def test_settings_can_be_compared_hashed_and_sent_to_a_process(self) -> None:
        settings = Settings(overrides={"efm_weight": 5.0})
        assert settings == Settings(overrides={"efm_weight": 5.0}) != Settings()
        assert len({settings, Settings(overrides={"efm_weight": 5.0})}) == 1
        assert pickle.loads(pickle.dumps(settings)) == settings

    def test_the_word_none_is_an_augmentation(self) -> None:
        assert resolve(Settings(augmentation="none")).augmentation == "none"
        assert resolve(Settings()).augmentation == load_preset("digits").augmentation() != "none"

    def test_default_mapping_is_not_shared(self) -> None:
        assert Settings().overrides is not Settings().overrides


class TestRecipe:
    @pytest.mark.parametrize(
        ("epochs", "milestones"),
        [(100, (45, 90)), (200, (90, 180)), (50, (22, 45)), (10, (4, 9)), (3, (1, 2)), (2, (1,)), (1, ())],
    )
    def test_milestones_scale(self, epochs: int, milestones: tuple[int, ...]) -> None:
        recipe = Recipe(epochs=100, schedule="steps", milestones=(45, 90)).with_epochs(epochs)
        assert (recipe.epochs, recipe.milestones) == (epochs, milestones)

    def test_milestones_stay_distinct_and_inside(self) -> None:
        long = Recipe(epochs=160, schedule="steps", milestones=(80, 120, 150))
        for epochs in range(1, 200):
            scaled = long.with_epochs(epochs).milestones
            assert list(scaled) == sorted(set(scaled))
            assert all(1 <= milestone < epochs for milestone in scaled)
            assert len(scaled) == min(3, epochs - 1)

    def test_milestones_must_grow(self) -> None:
        with pytest.raises(SettingsError, match="must grow"):
            Recipe(milestones=(5, 5))


class TestFiles:
    def test_round_trip_is_exact(self, tmp_path: Path) -> None:
        settings = Settings(
            method="finetune",
            dataset="cifar100",
            data="/a b/ü",
            seed=3,
            class_seed=1,
            epochs=7,
            held_out=0.1,
            overrides={"x": "0.1", "y": 1e-05, "z": (1, 2), "flag": True, "nothing": None, "word": "none"},
        )
        (tmp_path / "s.yaml").write_text(to_yaml(settings), encoding="utf-8")
        assert load_config(tmp_path / "s.yaml") == [settings]
        assert to_yaml(load_config(tmp_path / "s.yaml")[0]) == to_yaml(settings)

    def test_lists_make_a_grid(self, tmp_path: Path) -> None:
        (tmp_path / "s.yaml").write_text("method: [efc, finetune]\nseed: [0, 1, 1]\nscenario: cs5\nepochs: 2\n")
        runs = load_config(tmp_path / "s.yaml")
        assert [(run.seed, run.method) for run in runs] == list(itertools.product((0, 1), ("efc", "finetune")))
        assert all(run.epochs == 2 for run in runs)

    def test_words_that_yaml_reads_as_numbers_are_words(self, tmp_path: Path) -> None:
        (tmp_path / "s.yaml").write_text("images_per_class: 20\ndata: 2024\n")
        (run,) = load_config(tmp_path / "s.yaml")
        assert (run.images_per_class, run.data) == ("20", "2024")
        assert Settings(images_per_class=20) == Settings(images_per_class="20")  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="must be text"):
            Settings(images_per_class=True)  # type: ignore[arg-type]

    def test_tasks_imply_a_custom_scenario(self) -> None:
        (run,) = expand({"tasks": 4, "first_task_classes": 3})
        assert run.scenario == "custom"
        assert scenario_name(run) == "custom-4-first-3"
        assert scenario_name(replace(run, first_task_classes=None)) == "custom-4"
        assert scenario_name(Settings()) == "cs5"

    def test_tasks_of_any_sizes(self) -> None:
        first, second = (expand({"task_sizes": text, "method": "efc"})[0] for text in ("4, 3,03", "4,6x1"))
        assert [run.scenario for run in (first, second)] == ["custom", "custom"]
        assert [run.sizes for run in (first, second)] == [(4, 3, 3), (4, 1, 1, 1, 1, 1, 1)]
        assert [scenario_name(run) for run in (first, second)] == ["custom-of-4-2x3", "custom-of-4-6x1"]
        assert first == Settings(method="efc", task_sizes="4,2x3")
        long = [scenario_name(Settings(task_sizes=",".join(map(str, range(1, 99))) + end)) for end in ("", ",1")]
        assert len(set(long)) == 2
        assert max(map(len, long)) <= 60

    @pytest.mark.parametrize("text", ["", "4,", "4;6", "0,10", "4x", "x4", "-4,6", "4.0", "5 5", "20000x1", "1x" * 9])
    def test_task_sizes_that_are_none(self, text: str) -> None:
        with pytest.raises(SettingsError, match="such as 50,30,20 or 50,5x10"):
            Settings(task_sizes=text)

    def test_task_sizes_beside_other_descriptions(self) -> None:
        for other in ({"tasks": 2}, {"first_task_classes": 4}):
            with pytest.raises(SettingsError, match="Leave out tasks and first_task_classes, or task_sizes"):
                Settings(task_sizes="5,5", **other)  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="'cs5' has its own tasks, so their sizes cannot be set"):
            Settings(task_sizes="5,5", scenario="cs5")

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("methd: efc", "Did you mean 'method'"),
            ("epochs: many", "a whole number"),
            ("epochs: [1, 2]", "takes one value"),
            ("seed: []", "empty list"),
            ("- a\n- b", "name: value"),
            ("a: [1", "not valid YAML"),
            ("seed: 0\nmethod: efc\nseed: 1", "'seed' is given twice"),
            ("overrides: {damping: 1, damping: 2}", "'damping' is given twice"),
            ("resolved: 3", "resolved"),
        ],
    )
    def test_mistakes_name_the_file(self, tmp_path: Path, text: str, says: str) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        with pytest.raises(SettingsError, match=r"mine\.yaml") as error:
            read_config(path)
        assert says in str(error.value)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("efm_weight: 5", r"'efm_weight' is a setting of cedar, efc, .* overrides: \{efm_weight: \.\.\.\}"),
            ("learning_rate: 0.01", r"overrides: \{first_task\.learning_rate: \.\.\.\} or \{later\.learning_rate"),
            ("later: {epochs: 3}", "'later' belongs under 'overrides'"),
            ("later.epochs: 3", r"overrides: \{later\.epochs: \.\.\.\}"),
        ],
    )
    def test_what_belongs_under_overrides_is_told_so(self, tmp_path: Path, text: str, says: str) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        with pytest.raises(SettingsError, match=says):
            read_config(path)

    def test_overrides_may_be_nested_by_stage(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text("overrides: {efm_weight: 5, later: {learning_rate: 0.01, milestones: [3, 4]}}")
        flat = {"efm_weight": 5, "later.learning_rate": 0.01, "later.milestones": (3, 4)}
        assert read_config(path)["overrides"] == flat
        assert load_config(path) == [Settings(overrides=flat)]
        assert Settings(overrides={"later": {"epochs": 3}}) == Settings(overrides={"later.epochs": 3})
        for wrong in ("overrides: {x: {y: 1}}", "overrides: {later: {later: {epochs: 3}}}"):
            path.write_text(wrong)
            (run,) = load_config(path)
            with pytest.raises(SettingsError):
                validate(run)

    def test_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match=r"nowhere\.yaml"):
            read_config(tmp_path / "nowhere.yaml")

    def test_record_of_a_run_keeps_its_meaning_when_presets_change(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = Settings(seed=2)
        before = identity(settings)
        path = tmp_path / "settings.yaml"
        path.write_text(to_yaml(settings, resolved=before))
        assert load_config(path) == [settings]

        preset = load_preset("digits")
        changed = replace(preset, first_task=replace(preset.first_task, learning_rate=0.5, milestones=(2,)))
        monkeypatch.setattr(efcil.presets, "load_preset", lambda dataset: changed)
        (again,) = load_config(path)
        assert identity(Settings(seed=2)) != before
        assert identity(again) == before
        assert again.overrides["first_task.learning_rate"] == preset.first_task.learning_rate


class TestTraining:
    """What a model is trained with needs no dataset; a run of a benchmark adds one."""

    def test_a_model_needs_no_dataset(self) -> None:
        settings = TrainingSettings(method="lwf", overrides={"later.epochs": "7"})
        assert settings.preset == "folder"
        assert not {"dataset", "scenario", "data"} & set(options(TrainingSettings))
        assert validate_training(settings).overrides == {"later.epochs": 7}
        assert resolve(settings, 32).network == resolve(Settings(method="lwf", dataset="folder"), 32).network

    def test_a_preset_may_be_named(self) -> None:
        chosen = TrainingSettings(preset="digits", epochs=3)
        assert resolve(chosen) == resolve(Settings(dataset="digits", epochs=3))
        with pytest.raises(SettingsError, match="digits"):
            validate_training(replace(chosen, preset="digit"))

    def test_a_run_has_the_preset_of_its_dataset_and_no_other(self) -> None:
        run = Settings(dataset="cifar100")
        assert isinstance(run, TrainingSettings)
        assert (run.preset, replace(run, dataset="digits").preset) == ("cifar100", "digits")
        assert "preset" not in options(Settings)
        with pytest.raises(TypeError):
            Settings(preset="folder")  # type: ignore[call-arg]

    def test_what_a_run_adds_is_listed_where_it_belongs(self) -> None:
        names = list(options(Settings))
        assert names[:6] == ["method", "dataset", "scenario", "seed", "data", "tasks"]
        assert names[names.index("held_out") + 1] == "image_size"
        assert names[-1] == "overrides"

    def test_settings_that_belong_to_runs_are_no_settings_of_a_model(self) -> None:
        with pytest.raises(SettingsError, match="Give it as --preset"):
            resolve(TrainingSettings(overrides={"preset": "digits"}))
        with pytest.raises(SettingsError, match="'tasks'"):
            resolve(TrainingSettings(overrides={"tasks": 3}))

    def test_models_of_format_1_call_the_preset_dataset(self) -> None:
        from efcil.model.card import read_card
        from efcil.model.in_memory import Model

        card = Model.create(TrainingSettings(preset="digits", device="cpu"), 8).card
        written = json.loads(json.dumps(card.to_json()))
        assert read_card(written).settings == card.settings
        written["settings"]["dataset"] = written["settings"].pop("preset")
        assert read_card({**written, "format": 1}).settings == card.settings


def test_settings_import_nothing_that_stands_above_them() -> None:
    files = list((ROOT / "src" / "efcil" / "settings").glob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            own = [name for name in names if name.startswith("efcil.")]
            assert all(name.startswith(("efcil.settings.", "efcil.errors.", "efcil.safe_json.")) for name in own), (
                f"{file.name}: {own}"
            )


class TestResolvedOnce:
    @pytest.fixture
    def worked_out(self, monkeypatch: pytest.MonkeyPatch) -> list[TrainingSettings]:
        """The settings that were worked out, from a clean start."""
        from efcil.resolution.resolve import _resolve

        asked: list[TrainingSettings] = []

        def counted(settings: TrainingSettings, *rest: Any) -> Any:
            asked.append(settings)
            return _resolve(settings, *rest)

        module = sys.modules["efcil.resolution.resolve"]
        monkeypatch.setattr(module, "_resolve", counted)
        monkeypatch.setattr(module, "_kept", {})
        return asked

    def test_label_and_identity_do_not_work_the_same_out_again(self, worked_out: list[TrainingSettings]) -> None:
        for _ in range(3):
            settings = Settings(epochs=7, overrides={"efm_weight": 3})
            assert label(settings) == "efc+efm_weight=3+epochs=7"
            assert identity(settings)["later"]["epochs"] == 7
        assert len(worked_out) == 3  # as given, without the weight, and without the epochs

    def test_what_equals_is_not_always_the_same(self) -> None:
        assert Settings(overrides={"later.epochs": 1}) == Settings(overrides={"later.epochs": True})
        assert resolve(Settings(overrides={"later.epochs": 1})).later.epochs == 1
        with pytest.raises(SettingsError, match="whole number"):
            resolve(Settings(overrides={"later.epochs": True}))

    def test_what_a_method_does_to_its_settings_stays_its_own(self) -> None:
        first = resolve(Settings()).method
        object.__setattr__(first, "efm_weight", 123.0)
        assert resolve(Settings()).method.efm_weight != 123.0

    def test_no_more_is_kept_than_there_is_room_for(
        self, worked_out: list[TrainingSettings], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = sys.modules["efcil.resolution.resolve"]
        monkeypatch.setattr(module, "_MOST_KEPT", 3)
        for seed in range(8):
            resolve(Settings(seed=seed))
            assert 1 <= len(vars(module)["_kept"]) <= 3
        assert len(worked_out) == 8


class TestResolution:
    def test_epochs_reach_both_recipes_unless_the_first_task_has_its_own(self) -> None:
        both = resolve(Settings(dataset="cifar100", epochs=10))
        assert (both.first_task.epochs, both.later.epochs) == (10, 10)
        assert both.first_task.milestones == (4, 9)
        own = resolve(Settings(dataset="cifar100", epochs=10, first_task_epochs=20))
        assert (own.first_task.epochs, own.later.epochs) == (20, 10)
        first_only = resolve(Settings(dataset="cifar100", first_task_epochs=20))
        assert (first_only.first_task.epochs, first_only.later.epochs) == (20, 100)

    def test_overrides_reach_recipes_and_method(self) -> None:
        changes = {
            "first_task.learning_rate": "0.5",
            "later.epochs": "50",
            "later.milestones": "7,9",
            "efm_weight": "3",
        }
        resolved = resolve(Settings(overrides=changes, batch_size=16))
        assert resolved.first_task.learning_rate == 0.5
        assert (resolved.later.epochs, resolved.later.milestones) == (50, (7, 9))
        assert resolved.method.efm_weight == 3.0
        assert resolved.first_task.batch_size == resolved.later.batch_size == 16

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("efm_wieght", "efm_weight"),
            ("latr.epochs", "later"),
            ("later.epoch", "epochs"),
            ("first_task.x", "optimiser"),
        ],
    )
    def test_unknown_overrides_name_the_closest(self, name: str, says: str) -> None:
        with pytest.raises(SettingsError, match=says):
            resolve(Settings(overrides={name: "1"}))

    def test_network_of_a_folder_follows_its_image_size(self) -> None:
        settings = Settings(dataset="folder", data="x")
        assert resolve(settings).network is None
        small, large = resolve(settings, image_size=96), resolve(settings, image_size=97)
        assert (small.network, small.augmentation) == ("resnet18-small", "crop-flip")
        assert (large.network, large.augmentation) == ("resnet18", "resized-crop")
        assert resolve(replace(settings, image_size=224)).network == "resnet18"
        assert resolve(replace(settings, network="slim"), image_size=224).network == "slim"


class TestLabel:
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, "efc"),
            ({"seed": 4, "device": "cpu"}, "efc"),
            ({"dataset": "cifar100", "epochs": 100, "batch_size": 64, "network": "resnet18-small"}, "efc"),
            ({"dataset": "cifar100", "epochs": 100, "first_task_epochs": 100}, "efc"),
            ({"overrides": {"efm_weight": "10", "prototype_update": "efm"}}, "efc"),
            ({"overrides": {"prototype_update": "none"}, "epochs": 5}, "efc+prototype_update=none+epochs=5"),
            ({"epochs": 5, "first_task_epochs": 5}, "efc+epochs=5"),
            ({"class_order": "natural", "class_seed": 0}, "efc+class_order=natural+class_seed=0"),
            ({"dataset": "cifar100", "overrides": {"later.learning_rate": "1e-4", "damping": 2.5}}, "efc+damping=2.5"),
            (
                {"precision": "fp32", "path": "plain", "deterministic": True},
                "efc+precision=fp32+path=plain+deterministic=true",
            ),
            ({"dataset": "folder", "data": "/x/my flowers", "held_out": 0.2}, "efc+data=my-flowers+held_out=0.2"),
        ],
    )
    def test_names_only_what_changes_the_result(self, changes: dict[str, Any], expected: str) -> None:
        assert label(Settings(**changes)) == expected

    def test_settings_that_are_redundant_only_together_are_kept(self) -> None:
        # Later tasks have 100 epochs here and the first one 160: each setting alone repeats what the other implies.
        both = Settings(dataset="imagenet-subset", epochs=100, first_task_epochs=100)
        assert resolve(both) != resolve(Settings(dataset="imagenet-subset"))
        assert label(both) == "efc+first_task_epochs=100"

    def test_class_order_file_is_named_by_its_stem(self, tmp_path: Path) -> None:
        path = tmp_path / "my order.txt"
        path.write_text("1\n0\n")
        assert label(Settings(class_order=str(path))) == "efc+class_order=my-order"

    def test_long_labels_are_cut_and_stay_distinct(self) -> None:
        changes = {"efm_weight": 1.5, "damping": 0.25, "feature_weight": 3.5, "symmetric_weight": 4.5}
        settings = Settings(overrides={**changes, "drift_sigma": 0.3}, epochs=3, batch_size=8)
        one, two = label(settings), label(replace(settings, epochs=4))
        assert one != two
        assert max(len(one), len(two)) <= 80
        assert one.startswith("efc+damping=0.25")
        assert label(settings, whole=True) == (
            "efc+damping=0.25+drift_sigma=0.3+efm_weight=1.5+feature_weight=3.5+symmetric_weight=4.5"
            "+epochs=3+batch_size=8"
        )


class TestIdentity:
    def test_spelling_does_not_matter(self) -> None:
        base = Settings(dataset="cifar100", seed=1)
        same = replace(base, epochs=100, class_seed=1, device="cpu", data="/x", overrides={"efm_weight": "10"})
        assert identity(base) == identity(same)

    @pytest.mark.parametrize(
        "change",
        [
            {"method": "finetune"},
            {"dataset": "cifar100"},
            {"scenario": "ws5"},
            {"seed": 1},
            {"class_seed": 5},
            {"class_order": "icarl"},
            {"epochs": 3},
            {"first_task_epochs": 3},
            {"batch_size": 7},
            {"network": "resnet18"},
            {"augmentation": "none"},
            {"precision": "fp32"},
            {"path": "plain"},
            {"deterministic": True},
            {"image_size": 16},
            {"overrides": {"damping": 1}},
            {"overrides": {"later.decay": 0.5}},
        ],
    )
    def test_whatever_changes_the_result_changes_the_identity(self, change: dict[str, Any]) -> None:
        assert differences(identity(Settings()), identity(Settings(**change)))

    def test_class_order_file_counts_by_content(self, tmp_path: Path) -> None:
        one, copy, other = (tmp_path / name for name in ("one", "copy", "other"))
        one.write_text("0\n1\n")
        copy.write_text("0\n1\n")
        other.write_text("1\n0\n")
        first, second, third = (identity(Settings(class_order=str(path))) for path in (one, copy, other))
        assert first == second != third

    def test_folders_differ_by_place(self) -> None:
        one = identity(Settings(dataset="folder", data="/a/images"))
        assert one != identity(Settings(dataset="folder", data="/b/images"))


class TestValidate:
    def test_overrides_get_their_types(self) -> None:
        checked = validate(Settings(overrides={"efm_weight": "3", "later.milestones": "2,4"}))
        assert checked.overrides == {"efm_weight": 3.0, "later.milestones": (2, 4)}

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"method": "efk"}, "efc"),
            ({"dataset": "digit"}, "digits"),
            ({"scenario": "cs15"}, "cs5"),
            ({"scenario": "B50-10"}, r"described by --tasks \(with --first-task-classes\) or --task-sizes"),
            ({"network": "resnet"}, "resnet18"),
            ({"augmentation": "crop"}, "crop"),
            ({"class_order": "icrl"}, "icarl"),
            ({"device": "gpu"}, "cuda"),
            ({"dataset": "folder"}, "train/"),
            ({"data": "/not/there"}, "/not/there"),
        ],
    )
    def test_mistakes_are_found_before_training(self, change: dict[str, Any], says: str) -> None:
        with pytest.raises(EfcilError, match=says):
            validate(Settings(**change))

    def test_class_orders_are_those_of_the_scenarios(self) -> None:
        from efcil.data.scenario import class_order

        for name in NAMED_CLASS_ORDERS:
            assert sorted(class_order(name, 100, 0, [f"real/{label}" for label in range(100)])) == list(range(100))


class TestIdle:
    """Overrides that change nothing are refused where somebody types them."""

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ("--set later.milestones=3,6", "later.schedule=steps"),
            ("--set later.decay=0.5", "schedule is constant"),
            ("--method finetune --set later.milestones=3,60", "30 epochs, and none after epoch 60"),
            ("--method finetune --epochs 10 --set first_task.milestones=10", "10 epochs, and none after epoch 10"),
            ("--epochs 1 --set first_task.decay=0.5", "no milestones"),
            ("--set later.momentum=0.9", "later.optimiser=sgd"),
            ("--method adagauss --set later.rotations=true", "first_task.rotations"),
            ("--set later.rotation_weight=2", "later.rotations=true"),
            ("--method adagauss --set later.mixing=1", "first_task.mixing"),
            ("--set first_task.mixing_weight=2", "first_task.mixing=1"),
            ("--method adagauss --set later.contrast=0.5", "first_task.contrast"),
            ("--set later.contrast_temperature=0.2", "later.contrast=0.5"),
            ("--set later.label_smoothing=0.1", "the loss of efc has no smoothed labels"),
            ("--method fetril fecam --set later.epochs=3", "only by the recipe of the first task"),
            ("--method joint --set later.learning_rate=0.1", "Change first_task.learning_rate"),
            ("--set regulariser=features efm_weight=5", "it is for regulariser=efm. Set that too"),
            ("--set drift_ridge=1", "it is for prototype_update=linear or prototype_update=linear-residual"),
            (
                "--method ewc --set fisher_trains_statistics=false fisher_batch_size=1",
                "it is not for fisher_batch_size=1. Change that too",
            ),
        ],
    )
    def test_refused(self, arguments: str, says: str) -> None:
        with pytest.raises(SettingsError, match=f"has no effect: .*{re.escape(says)}.*, or leave it out"):
            planned(arguments)

    @pytest.mark.parametrize(
        "arguments",
        [
            "--set later.schedule=steps later.milestones=3,6 later.decay=0.5",
            "--set first_task.label_smoothing=0.1 first_task.ema=0.99 later.ema=0.9",
            "--method efc++ --set later.label_smoothing=0.1",
            "--method finetune --set later.milestones=3,29",
            "--set later.optimiser=sgd later.momentum=0.9",
            "--method fetril --set first_task.epochs=3",
            "--method efc fetril --set later.epochs=3",  # of use to one of the two
            "--method efc finetune --set later.milestones=3,6",
            "--set later.schedule=constant later.milestones= later.decay=0.1",  # as it would be anyway
            "--method fecam --epochs 3 --batch-size 8",
            "--set drift_ridge=1 prototype_update=linear",
            "--method efc++ --set efm_weight=5",  # which has no regulariser to choose
            "--set regulariser=features efm_weight=10",
            "--method ewc --set fisher_trains_statistics=false fisher_batch_size=2",
        ],
    )
    def test_accepted(self, arguments: str) -> None:
        assert planned(arguments)

    def test_what_is_of_use_to_others_alone_is_left_out(self) -> None:
        efc, fetril = planned("--method efc fetril --set later.epochs=3 first_task.epochs=2")
        assert efc.overrides == {"later.epochs": 3, "first_task.epochs": 2}
        assert fetril.overrides == {"first_task.epochs": 2}

    def test_files_are_held_to_it_and_records_of_runs_are_not(self, tmp_path: Path) -> None:
        path = tmp_path / "settings.yaml"
        settings = Settings(method="fetril", overrides={"later.learning_rate": 0.1})
        path.write_text(to_yaml(settings))
        with pytest.raises(SettingsError, match=r"later\.learning_rate"):
            planned(f"--config {path}")
        path.write_text(to_yaml(settings, resolved=identity(settings)))
        assert planned(f"--config {path}") == [settings]
        with pytest.raises(SettingsError, match=r"later\.epochs"):
            planned(f"--config {path} --set later.epochs=2")

    def test_models_are_held_to_what_is_new(self) -> None:
        from efcil.model import Model

        plain = Settings(dataset="digits", method="fetril", network="slim", device="cpu")
        idle = replace(plain, overrides={"later.learning_rate": 0.1})
        with pytest.raises(SettingsError, match="only by the recipe of the first task"):
            Model.create(idle, 8)
        model = Model.create(plain, 8)
        with pytest.raises(SettingsError, match="only by the recipe of the first task"):
            model.change(idle)
        model.card = replace(model.card, settings=replace(model.card.settings, overrides=idle.overrides))
        model.change(replace(idle, precision="fp32"))
        assert model.card.settings.overrides == idle.overrides


class TestVary:
    """Several values of settings that belong to methods or recipes."""

    def test_every_combination_is_a_run(self) -> None:
        runs = planned(
            "--method efc --seed 0 1 --vary efm_weight=1 10 later.milestones=3,6 9 --set later.schedule=steps"
        )
        assert [(run.seed, run.overrides["efm_weight"], run.overrides["later.milestones"]) for run in runs] == [
            (seed, weight, milestones) for seed in (0, 1) for weight in (1.0, 10.0) for milestones in ((3, 6), (9,))
        ]
        assert {run.overrides["later.schedule"] for run in runs} == {"steps"}

    def test_methods_that_lack_a_setting_are_trained_once(self) -> None:
        runs = planned("--method lwf efc fetril --vary efm_weight=1 2 --vary later.epochs=3")
        assert [label(run) for run in runs] == [
            "lwf+later.epochs=3", "efc+efm_weight=1+later.epochs=3", "efc+efm_weight=2+later.epochs=3", "fetril",
        ]  # fmt: skip

    def test_what_is_idle_beside_another_value_is_not_repeated(self) -> None:
        runs = planned("--method efc fd --vary prototype_update=efm none drift_sigma=0.1 0.3 --set efm_weight=5")
        assert [label(run) for run in runs] == [
            *("efc+drift_sigma=0.1+efm_weight=5", "efc+drift_sigma=0.3+efm_weight=5"),
            "efc+efm_weight=5+prototype_update=none",
            *("fd+drift_sigma=0.1", "fd+drift_sigma=0.3", "fd+prototype_update=none"),
        ]

    def test_a_value_given_twice_is_one_run(self) -> None:
        assert len(planned("--method efc --vary efm_weight=1 1.0 2")) == 2

    def test_what_is_idle_and_the_default_is_not_repeated_either(self) -> None:
        runs = planned("--method efc --vary prototype_update=efm none drift_sigma=0.1 0.2")
        assert [label(run) for run in runs] == ["efc+drift_sigma=0.1", "efc", "efc+prototype_update=none"]

    def test_in_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "grid.yaml"
        path.write_text("method: efc\noverrides: {damping: 0.5}\nvary:\n  efm_weight: [1, 2]\n  later: {epochs: [3]}\n")
        expected = [{"damping": 0.5, "efm_weight": weight, "later.epochs": 3} for weight in (1, 2)]
        assert [run.overrides for run in load_config(path)] == expected
        # A flag goes before the file, whether it has one value or several.
        one, two, three = (
            planned(f"--config {path} {flags}")
            for flags in ("--set efm_weight=7", "--vary efm_weight=7 8 9", "--vary damping=1 2")
        )
        assert [run.overrides["efm_weight"] for run in one] == [7.0]
        assert [run.overrides["efm_weight"] for run in two] == [7.0, 8.0, 9.0]
        assert [run.overrides["damping"] for run in three] == [1.0, 2.0, 1.0, 2.0]

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ("--vary 3", "--vary takes name=value value"),
            ("--vary efm_weight=1 2 efm_weight=3", "names 'efm_weight' twice"),
            ("--vary efm_weight=1 2 --set efm_weight=3", "'efm_weight' has one value and is also varied"),
            ("--vary efm_wait=1 2", "efm_weight"),
            ("--vary efm_weight=1 much", "much"),
            ("--method fetril --vary later.epochs=1 2", "has no effect"),
            ("--vary epochs=1 2", "later.epochs for the others, or --epochs for both"),
            ("--set learning_rate=1", "first_task.learning_rate is for the first task, later.learning_rate for the"),
        ],
    )
    def test_refused(self, arguments: str, says: str) -> None:
        with pytest.raises(SettingsError, match=re.escape(says)):
            planned(arguments)

    @pytest.mark.parametrize("text", ["vary: 3", "vary: {efm_weight: 3}", "vary: {efm_weight: []}"])
    def test_lists_are_wanted_in_a_file(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "grid.yaml"
        path.write_text(text)
        with pytest.raises(SettingsError, match=r"grid\.yaml: 'vary' .*list"):
            load_config(path)

    def test_the_record_of_a_run_is_one_run(self, tmp_path: Path) -> None:
        path = tmp_path / "settings.yaml"
        path.write_text(to_yaml(Settings(), resolved=identity(Settings())) + "vary: {efm_weight: [1, 2]}\n")
        with pytest.raises(SettingsError, match="belongs to the record of one run"):
            load_config(path)


def test_files_of_class_orders_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("\n".join(map(str, range(10))))
    monkeypatch.chdir(tmp_path)
    named, file = planned("--class-order icarl mine.txt")
    assert (named.class_order, file.class_order) == ("icarl", str(tmp_path / "mine.txt"))
    assert label(file) == "efc+class_order=mine"


def test_class_orders_of_one_name_are_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place, order in (("a", range(10)), ("b", reversed(range(10))), ("c", range(10))):
        Path(place).mkdir()
        Path(place, "order.txt").write_text("\n".join(map(str, order)))
    with pytest.raises(SettingsError, match=r"a/order.txt and .*b/order.txt would share one folder"):
        planned("--class-order a/order.txt b/order.txt")
    assert len(planned("--class-order a/order.txt c/order.txt")) == 1, "They say the same."


def test_a_class_order_that_is_always_the_same_takes_no_seed() -> None:
    with pytest.raises(SettingsError, match="'class_seed' has no effect: the class order icarl"):
        planned("--class-order icarl --class-seed 0 1")
    runs = planned("--class-order efc icarl --class-seed 3 4")
    assert [(run.class_order, run.class_seed) for run in runs] == [("efc", 3), ("efc", 4), ("icarl", None)]


class TestPresets:
    def test_every_preset_loads_and_names_what_exists(self) -> None:
        from efcil.data.augment import AUGMENTATIONS
        from efcil.data.sources import sources
        from efcil.methods import available
        from efcil.network.backbones import NETWORKS

        assert set(sources()) <= set(presets())
        for name in presets():
            preset = load_preset(name)
            for choice in preset.choices:
                assert choice.network in NETWORKS
                assert choice.augmentation in AUGMENTATIONS
            for cls in available().values():
                assert preset.later(cls.family).epochs >= 1
                resolve(Settings(dataset=name, method=cls.name), 32)
            assert set(preset.methods) <= set(available())

    def test_a_preset_may_read_a_method_as_its_benchmark_does(self) -> None:
        def views(dataset: str, **overrides: str) -> str:
            return resolve(Settings(dataset=dataset, method="fetril", overrides=overrides), 32).method.views

        assert (views("folder"), views("cifar100"), views("cifar100", views="plain")) == ("plain", "augmented", "plain")
        own = Settings(dataset="cifar100", method="fetril", overrides={"views": "plain"})
        assert label(own) == "fetril+views=plain"
        assert label(replace(own, overrides={"views": "augmented"})) == "fetril"
        # A record from before the preset said so means what was done then.
        assert label(pin(replace(own, overrides={}), identity(own), Path("settings.yaml"))) == "fetril+views=plain"

    def test_values_of_the_paper(self) -> None:
        for name in ("cifar100", "tiny-imagenet"):
            preset = load_preset(name)
            assert preset.network() == "resnet18-small"
            expected = Recipe("adam", 1e-3, None, 0.0, 2e-4, 100, "steps", (45, 90), 0.1, 64, True)
            assert preset.first_task == expected
            assert preset.later("scheduled") == replace(expected, rotations=False)
            assert preset.later("efc") == Recipe(
                "adam", 1e-4, None, 0.0, 2e-4, 100, "constant", (), 0.1, 64, normalisation="frozen"
            )
            assert preset.later("ssre") == Recipe(
                "adam", 2e-4, None, 0.0, 5e-4, 60, "steps", (45,), 0.1, 128, normalisation="frozen"
            )
        subset, full = load_preset("imagenet-subset"), load_preset("imagenet-1k")
        assert subset.first_task == Recipe("sgd", 0.1, None, 0.9, 5e-4, 160, "steps", (80, 120, 150), 0.1, 64, True)
        assert full.first_task == replace(subset.first_task, batch_size=256, rotations=False)
        assert subset.later("efc") == Recipe(
            "adam", 1e-4, 1e-5, 0.0, 2e-4, 100, "constant", (), 0.1, 64, normalisation="frozen"
        )
        assert full.later("efc") == replace(subset.later("efc"), batch_size=256)

    def test_first_task_recipe_can_be_asked_for_later_tasks(self) -> None:
        preset = load_preset("digits")
        assert preset.later("first_task") == preset.first_task

    def test_unknown_names(self) -> None:
        with pytest.raises(SettingsError, match="cifar100"):
            load_preset("cifar1000")
        with pytest.raises(SettingsError, match="scheduled"):
            load_preset("digits").later("schedule")

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("network: a\naugmentation: b\nfirst_task: {}\n", "'later' is missing"),
            ("network: a\naugmentation: b\nfirst_task: {learning_rat: 1}\nlater: {}\n", "learning_rate"),
            ("network: a\naugmentation: b\nfirst_task: {}\nlater: {efc: {epochs: x}}\n", "later: efc"),
            ("augmentation: b\nfirst_task: {}\nlater: {}\n", "network and augmentation"),
            ("netwrk: a\nfirst_task: {}\nlater: {}\n", "network"),
            ("by_image_size: [{network: a, augmentation: b, up_to: 9}]\nfirst_task: {}\nlater: {}\n", "up_to"),
            ("network: a\naugmentation: b\nfirst_task: {}\nlater: {}\nmethods: {efc: 1}\n", "for each method"),
            ("a: [", "not valid YAML"),
            ("7", "name: value"),
        ],
    )
    def test_broken_presets_are_named(self, text: str, says: str) -> None:
        with pytest.raises(SettingsError, match=r"presets/mine\.yaml") as error:
            parse_preset(text, "mine", "presets/mine.yaml")
        assert says in str(error.value)


def test_documentation_is_current() -> None:
    stored = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert stored == documentation(), "run: python -m efcil.resolution.documentation docs/settings.md"


def test_documented_examples_do_something(tmp_path: Path) -> None:
    text = documentation()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(example)
    runs = planned(f"--config {tmp_path / 'mine.yaml'}")
    assert len(runs) == 9  # lwf has no prototypes to update in two ways
    assert [len(run.overrides) for run in runs] == [3, 3, 1] * 3
    typed = re.findall(r"--set ([\w.]+=[^`\s]+)", text)
    assert len(typed) == 3
    for override in typed:
        assert resolve(planned(f"--set {override}")[0]) != resolve(Settings())


def test_help_names_all_networks_and_augmentations() -> None:
    from efcil.data.augment import AUGMENTATIONS
    from efcil.network.backbones import NETWORKS

    listed = options(Settings)["augmentation"].help.partition(": ")[2]
    assert set(re.sub(r"\(.*?\)|\.$", "", listed).replace(" ", "").split(",")) == set(AUGMENTATIONS)
    help_text = re.sub(r"\(.*?\)", "", options(Settings)["network"].help)
    named = re.findall(r"[\w/-]+(?:[:+][\w/-]+)?", help_text.partition("preset's: ")[2])
    assert [name for name in named if re.search(r"\d|[:+]|slim", name)] == [
        "resnet18-small", "resnet32", "resnet18", "resnet34", "resnet50", "slim",
        "efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2",
        "hub:OWNER/NAME", "timm:NAME", "MODULE:FUNCTION", "NAME+NAME",
    ]  # fmt: skip
    assert set(NETWORKS) <= set(named)


def test_every_setting_is_documented() -> None:
    for definition in (TrainingSettings, Settings, Recipe):
        assert all(known.help.endswith(".") for known in options(definition).values())
        assert {field.name for field in dataclasses.fields(definition) if field.init} == set(options(definition))


def test_settings_and_help_do_not_import_torch() -> None:
    code = "import sys, efcil.cli; assert efcil.cli.main(['run', '--help']) == 0; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)


class TestOlderRecords:
    """Settings that did not exist when a run was recorded: what was in effect then, whatever the default is now."""

    def older(self, method: str, setting: str) -> dict[str, Any]:
        stored = identity(Settings(method=method))
        del stored["method_settings"][setting]
        return stored

    def test_a_setting_that_was_added_without_changing_anything_makes_no_difference(self) -> None:
        assert differences(self.older("efc", "covariance_share"), identity(Settings(method="efc"))) == {}

    @pytest.mark.parametrize("method", ["ldc", "dpcr"])
    def test_a_setting_whose_default_is_not_what_was_done_before(self, method: str) -> None:
        stored = self.older(method, "views")
        assert differences(stored, identity(Settings(method=method))) == {
            "method_settings.views": ("augmented", "plain")
        }
        again = pin(Settings(method=method), stored, Path("settings.yaml"))
        assert again.overrides == {"views": "augmented"}
        assert differences(stored, identity(again)) == {}

    def test_a_method_that_is_gone_is_compared_as_it_was_recorded(self) -> None:
        stored = {**identity(Settings()), "method": "gone"}
        assert differences(stored, stored) == {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"seed": 1}, "'seed' is not a setting of a method. Give it as --seed"),
        ({"class_order": "icarl"}, "Give it as --class-order"),
        ({"later": 3}, r"'later' is a recipe. .* such as later\.epochs"),
    ],
)
def test_what_is_no_setting_of_a_method_has_a_place(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        validate(Settings(overrides=overrides))


def test_vary_is_among_the_names_of_a_file() -> None:
    with pytest.raises(SettingsError, match="Did you mean 'vary'"):
        expand({"vari": {"efm_weight": [1, 2]}})
