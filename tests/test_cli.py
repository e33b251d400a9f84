from __future__ import annotations

import math
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from efcil import __version__
from efcil.cli import flags, main
from efcil.errors import DataError, TrainingError, closest
from efcil.resolution import label, scenario_name
from efcil.runfolder import RunFolder, locate
from efcil.settings import Settings

ROOT = Path(__file__).resolve().parent.parent


class Recorder:
    """Stands in for the training: remembers what it was asked for and leaves finished run folders."""

    def __init__(self) -> None:
        self.settings: list[Settings] = []
        self.options: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.finish = True

    def run_grid(self, settings: list[Settings], output: Path, **options: Any) -> list[Path]:
        self.settings = settings
        self.options = {"output": output, **options}
        if self.error is not None:
            raise self.error
        paths = []
        for item in settings:
            run = locate(output, item)
            run.write_settings(item)
            summary = {"method": item.method, "label": label(item), "dataset": item.dataset, "seed": item.seed}
            if self.finish:
                run.write_accuracy([[70.0, math.nan], [40.0, 60.0]], [[90.0, math.nan], [80.0, 90.0]], [1, 1])
                run.write_summary({**summary, "scenario": scenario_name(item), "A_step": 50.0, "A_inc": 60.0})
            paths.append(run.path)
        return paths


def efcil(command: str) -> int:
    return main(command.split())


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    recorder = Recorder()
    module = types.ModuleType("efcil.experiment")
    module.run_grid = recorder.run_grid  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "efcil.experiment", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return recorder


class TestRun:
    def test_no_arguments(self, trained: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["run"]) == 0
        assert trained.settings == [Settings(method="efc"), Settings(method="finetune")]
        assert trained.options == {
            "output": Path("runs"),
            "jobs_per_gpu": None,
            "quiet": False,
            "checkpoint_steps": None,
            "debug": False,
            "log": (),
            "engine": None,
        }
        output = capsys.readouterr().out
        assert output.startswith("digits cs5\n")
        assert "\nefc " in output
        assert "\nfinetune " in output

    def test_lists_make_a_grid(self, trained: Recorder) -> None:
        command = "run --method efc finetune --scenario cs5 ws5 --seed 0 1 2 --output out --jobs-per-gpu 3 --quiet"
        command += " --checkpoint-steps 9"
        assert main(command.split()) == 0
        assert len(trained.settings) == len(set(trained.settings)) == 12
        assert {(s.method, s.scenario, s.seed) for s in trained.settings} == {
            (method, scenario, seed)
            for method in ("efc", "finetune")
            for scenario in ("cs5", "ws5")
            for seed in range(3)
        }
        assert trained.options == {
            "output": Path("out"),
            "jobs_per_gpu": 3,
            "quiet": True,
            "checkpoint_steps": 9,
            "debug": False,
            "log": (),
            "engine": None,
        }

    def test_every_flag_reaches_the_settings(self, trained: Recorder) -> None:
        command = (
            "run --method efc --tasks 3 --first-task-classes 4 --class-seed 7 --seed 2 "
            "--network resnet18 --augmentation none --epochs 3 --first-task-epochs 4 --batch-size 8 --device cpu "
            "--precision fp32 --path plain --deterministic --set efm_weight=2 later.learning_rate=1e-2 --set damping=1"
        )
        assert main(command.split()) == 0
        assert trained.settings == [
            Settings(
                method="efc",
                scenario="custom",
                tasks=3,
                first_task_classes=4,
                class_seed=7,
                seed=2,
                network="resnet18",
                augmentation="none",
                epochs=3,
                first_task_epochs=4,
                batch_size=8,
                device="cpu",
                precision="fp32",
                path="plain",
                deterministic=True,
                overrides={"efm_weight": 2.0, "later.learning_rate": 0.01, "damping": 1.0},
            )
        ]

    def test_the_class_order_reaches_the_settings(self, trained: Recorder) -> None:
        assert main(["run", "--method", "efc", "--class-order", "natural"]) == 0  # it would refuse a seed of it
        assert trained.settings == [Settings(method="efc", class_order="natural")]

    def test_settings_of_a_method_go_to_the_methods_that_have_them(self, trained: Recorder) -> None:
        assert main(["run", "--method", "efc", "finetune", "--set", "efm_weight=2", "later.epochs=3"]) == 0
        efc, finetune = trained.settings
        assert efc.overrides == {"efm_weight": 2.0, "later.epochs": 3}
        assert finetune.overrides == {"later.epochs": 3}

    def test_flags_override_the_file(self, trained: Recorder, tmp_path: Path) -> None:
        content = {"method": ["efc", "finetune"], "seed": 4, "epochs": 9, "tasks": 2, "overrides": {"damping": 0.5}}
        Path("mine.yaml").write_text(yaml.safe_dump(content))
        assert efcil("run --config mine.yaml --method efc --epochs 2 --set efm_weight=1 --scenario cs5") == 0
        assert trained.settings == [Settings(seed=4, epochs=2, overrides={"damping": 0.5, "efm_weight": 1.0})]

    def test_a_run_can_be_repeated_from_its_settings(self, trained: Recorder) -> None:
        assert (
            main(["run", "--method", "efc", "--epochs", "2", "--seed", "3", "--set", "damping=0.2", "--tasks", "2"])
            == 0
        )
        (first,) = trained.settings
        record = locate("runs", first).settings_file
        assert main(["run", "--config", str(record), "--output", "again"]) == 0
        assert trained.settings == [first]

    def test_data_becomes_absolute(self, trained: Recorder, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / "images" / name).mkdir(parents=True)
        assert main(["run", "--method", "efc", "--dataset", "folder", "--data", "images", "--held-out", "0.2"]) == 0
        assert trained.settings[0].data == str(tmp_path / "images")

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ("--method efk", "Did you mean 'efc'"),
            ("--dataset digitz", "Did you mean 'digits'"),
            ("--scenario cs11", "Did you mean 'cs10'"),
            ("--set efm_weigth=1", "Did you mean 'efm_weight'"),
            ("--set efm_weight", "name=value"),
            ("--set efm_weight=much", "a number"),
            ("--set later.lr=1", "learning_rate"),
            ("--class-order nature", "natural"),
            ("--epochs 0", "of at least 1"),
            ("--epochs", "--epochs"),
            ("--precision fp8", "Valid: auto, bf16, fp32, tf32"),
            ("--sede 1", "Did you mean '--seed'"),
            ("--epoch=3", "Did you mean '--epochs'"),
            ("--seed x", "a whole number"),
            ("--config no.yaml", "no.yaml"),
            ("--jobs-per-gpu 0", "--jobs-per-gpu"),
            ("--checkpoint-steps x", "--checkpoint-steps"),
            ("--scenario cs5 --tasks 3", "has its own tasks"),
            ("--dataset digits cifar100 --data x", "each with its own --data"),
            ("--dataset folder", "train/"),
            ("--dataset folder --data nowhere", "nowhere"),
        ],
    )
    def test_mistakes(self, trained: Recorder, capsys: pytest.CaptureFixture[str], arguments: str, says: str) -> None:
        assert main(["run", *arguments.split()]) == 2
        captured = capsys.readouterr()
        assert says in captured.err
        assert "Traceback" not in captured.err
        assert trained.settings == []

    def test_one_wrong_combination_stops_all_before_training(self, trained: Recorder) -> None:
        assert main(["run", "--method", "efc", "fintune", "--seed", "0", "1"]) == 2
        assert trained.settings == []

    def test_unfinished_runs_give_exit_code_one(self, trained: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
        trained.finish = False
        assert main(["run", "--method", "efc"]) == 1
        captured = capsys.readouterr()
        assert "not finished" in captured.out
        assert "1 of 1 runs did not finish" in captured.err

    @pytest.mark.parametrize(
        ("error", "code", "says"),
        [
            (TrainingError("The loss is not finite."), 1, "The loss is not finite."),
            (DataError("x.parquet is truncated."), 2, "x.parquet is truncated."),
            (KeyboardInterrupt(), 130, "efcil: Interrupted.\n"),
            (KeyboardInterrupt("Stopped in task 2."), 130, "efcil: Stopped in task 2.\n"),
            (ZeroDivisionError("oops"), 1, "--debug"),
            (PermissionError(13, "Permission denied", "x"), 2, "x cannot be opened (Permission denied). Change"),
        ],
    )
    def test_exit_codes(
        self, trained: Recorder, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, says: str
    ) -> None:
        trained.error = error
        assert main(["run"]) == code
        captured = capsys.readouterr()
        assert says in captured.err
        assert "Traceback" not in captured.err

    def test_debug_shows_the_traceback(self, trained: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
        trained.error = TrainingError("The loss is not finite.")
        assert main(["run", "--debug"]) == 1
        assert trained.options["debug"], "runs of a grid fail one by one"
        assert "Traceback" in capsys.readouterr().err


class TestOthers:
    def test_unknown_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["reprot"]) == 2
        assert "Did you mean 'report'" in capsys.readouterr().err

    def test_only_what_is_alike_is_suggested(self) -> None:
        assert closest("hat", ["pants", "shirt"]) == " Valid: pants, shirt."
        assert closest("hatt", ["hat", "shirt"]) == " Did you mean 'hat'? Valid: hat, shirt."
        assert closest("cap", ["hat", "hat, red"]) == " Valid: hat; hat, red."

    def test_stray_argument(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["run", "efc"]) == 2
        assert "'efc'" in capsys.readouterr().err

    def test_version_and_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--version"]) == 0
        assert capsys.readouterr().out == f"efcil {__version__}\n"
        for arguments in ([], ["--help"], ["run", "--help"]):
            assert main(arguments) == 0
            assert "usage: efcil" in capsys.readouterr().out

    def test_help_of_learn_names_its_own_defaults(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["learn", "--help"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "see `efcil methods`. (default: lda on a pre-trained network, else efc)" in said
        assert "`pretrained` is installed, else the preset's)" in said

    def test_methods(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["methods"]) == 0
        listed = capsys.readouterr().out
        for part in ("efc", "finetune", "joint", "efm_weight=10"):
            assert part in listed
        assert main(["methods", "efc"]) == 0
        described = capsys.readouterr().out
        assert "prototype_update = efm  (one of efm, none, linear, linear-residual)" in described
        assert "With the preset" not in described
        assert main(["methods", "fetril"]) == 0
        assert "With the preset of cifar10, cifar100, domainnet, imagenet" in capsys.readouterr().out
        assert main(["methods", "efk"]) == 2

    def test_data(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["data"]) == 0
        listed = capsys.readouterr().out
        assert all(f"{name}: " in listed for name in ("cifar100", "digits", "folder", "tiny-imagenet"))
        assert main(["data", "digits"]) == 0
        described = capsys.readouterr().out
        assert "digits: 10 classes, 8 x 8 pixels" in described
        assert "1,442 images, 140 to 147 per class" in described
        assert main(["data", "digitz"]) == 2
        assert main(["data", "--data", "x"]) == 2
        assert main(["data", "folder"]) == 2

    def test_data_names_the_cache(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from PIL import Image

        for index, name in enumerate(("cat", "dog")):
            for image in range(4):
                place = tmp_path / "pets" / name
                place.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (12, 9), (40 * index, image, 0)).save(place / f"{image}.png")
        arguments = ["data", "folder", "--data", str(tmp_path / "pets"), "--held-out", "0.25", "--image-size", "8"]
        assert main(arguments) == 0
        described = capsys.readouterr().out
        assert "2 classes, 8 x 8 pixels" in described
        assert "6 images, 3 per class" in described
        assert "cat, dog" in described
        cache = Path(described.splitlines()[-1].split(maxsplit=1)[1])
        assert (cache / "manifest.json").is_file()
        assert cache.is_relative_to(tmp_path)

    def test_report(self, trained: Recorder, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        main(["run", "--seed", "0", "1"])
        shown = capsys.readouterr().out
        assert main(["report", "runs"]) == 0
        assert capsys.readouterr().out == shown
        assert main(["report"]) == 0
        assert capsys.readouterr().out == shown
        Path("runs/report.html").unlink()
        assert main(["report", "runs", "--output", "-"]) == 0
        assert capsys.readouterr().out == shown
        assert main(["report", "runs", "--output", "-", "--format", "csv"]) == 0
        assert capsys.readouterr().out.startswith("dataset,scenario,method")
        assert not Path("-").exists()
        assert not Path("runs/report.html").exists(), "the page is for those who ask for nothing else"
        assert main(["report", "runs", "--format", "csv", "--metric", "A_inc", "--output", "out/table.csv"]) == 0
        assert capsys.readouterr().out == ""
        lines = Path("out/table.csv").read_text().splitlines()
        assert lines[1].startswith("digits,cs5,efc,2,0 1,60.0000,0.0000")
        Path("taken").mkdir()
        assert main(["report", "runs", "--output", "taken"]) == 2
        assert "taken cannot be written (Is a directory)" in capsys.readouterr().err
        for wrong in ("report nowhere", "report runs --format pdf", "report runs --metric A"):
            assert main(wrong.split()) == 2

    def test_report_lists_damaged_runs(self, trained: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
        main(["run"])
        RunFolder("runs/digits/cs5/efc/seed0").summary_file.write_text("{")
        capsys.readouterr()
        assert main(["report", "runs"]) == 0
        assert "summary.json is damaged" in capsys.readouterr().out


def program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "efcil", *arguments]
    return subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False, **options)


def test_module_runs_as_a_program() -> None:
    result = program("run", "--sede", "1", stdout=subprocess.PIPE)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("efcil: `efcil run` has no option '--sede'")


def test_reader_that_has_gone_is_no_accident() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = program("data", stdout=writer)
    os.close(writer)
    assert result.returncode == 1
    assert result.stderr == ""


def test_closed_output_is_no_accident(tmp_path: Path) -> None:
    result = program("data", preexec_fn=lambda: os.close(1))
    assert (result.returncode, result.stderr) == (0, "")


def test_flags_are_frozen() -> None:
    """Scripts depend on flags: to change one on purpose, change tests/flags.txt too."""
    assert flags() == (ROOT / "tests" / "flags.txt").read_text().splitlines()


def test_a_process_ends_without_a_word_of_its_libraries(tmp_path: Path) -> None:
    """Objects that are left at the end must not make a library print about them, such as triton's bindings."""
    code = "import sys; sys.argv = ['efcil', 'methods']; import triton; from efcil.cli import command; command()"
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize(("processes", "expected"), [(1, "0\nending"), (2, "0")])
def test_a_process_of_several_ends_at_once(processes: int, expected: str) -> None:
    """While Python ends, a thread that still releases a message would abort the process."""
    code = (
        "import atexit, sys; sys.argv = ['efcil', '--version']; atexit.register(print, 'ending');"
        "from efcil.cli import command; command()"
    )
    place = {"RANK": "0", "WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    environment = {**os.environ, **place, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    version, _, rest = done.stdout.strip().partition("\n")
    assert version.startswith("efcil ")
    assert f"{done.returncode}\n{rest}".strip() == expected


class TestMistakes:
    """Every mistake in a command is named once, whatever the number of runs; the exit code is 2."""

    @staticmethod
    def named(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
        assert efcil(command) == 2
        return capsys.readouterr().err.splitlines()

    def test_all_of_them(self, trained: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
        command = "run --method efc foo lwf --scenario cs5 cs7 --seed 0 1 2 x --epochs y --set efm_weight=z bar=1"
        first, *others = self.named(command, capsys)
        assert first == "efcil: There are 6 mistakes; nothing has been trained:"
        starts = [
            "- Setting 'seed' must be a whole number of at least 0, but it is 'x'.",
            "- Setting 'epochs' must be a whole number",
            "- Unknown setting of efc, lwf: 'bar'.",
            "- Setting 'efm_weight' must be a number of at least 0, but it is 'z'.",
            "- Unknown scenario 'cs7'.",
            "- Unknown method 'foo'.",
        ]
        assert len(others) == len(starts)
        assert all(any(line.startswith(start) for line in others) for start in starts)
        assert trained.settings == []

    def test_one_in_several_runs(self, trained: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
        (line,) = self.named("run --method efc lwf --seed 0 1 2 --set later.lr=1", capsys)
        assert line.startswith("efcil: Unknown setting of later 'lr'. Did you mean 'learning_rate'?")
        assert line.endswith("(Nothing has been trained.)")

    @pytest.mark.parametrize("methods", ["lwf", "efc lwf"])
    @pytest.mark.parametrize(("short", "whole"), [("lr", "learning_rate"), ("wd", "weight_decay")])
    def test_short_names_of_other_programs(
        self, methods: str, short: str, whole: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (line,) = self.named(f"run --method {methods} --set {short}=0.1", capsys)
        assert line.startswith(f"efcil: {whole!r} is part of a recipe: first_task.{whole} is for the first task, later")

    def test_the_stage_of_a_value_is_named(self, trained: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
        _, *lines = self.named("run --set first_task.epochs=-1 later.learning_rate=fast", capsys)
        assert [line.partition(" must")[0] for line in lines] == [
            "- Setting 'first_task.epochs'",
            "- Setting 'later.learning_rate'",
        ]

    @pytest.mark.parametrize("value", ["--tasks x --scenario custom", "--first-task-classes x --tasks 3"])
    def test_what_follows_from_a_mistake_is_none(
        self, trained: Recorder, capsys: pytest.CaptureFixture[str], value: str
    ) -> None:
        assert len(self.named(f"run --method efc {value}", capsys)) == 1

    def test_an_unknown_dataset_is_one_mistake(self, trained: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
        (line,) = self.named("run --method efc lwf --dataset cifar-100", capsys)
        assert line.startswith("efcil: Unknown dataset 'cifar-100'. Did you mean 'cifar100'")

    def test_a_network_without_its_name_and_a_device_that_does_not_exist(
        self, trained: Recorder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _, *lines = self.named("run --method efc --weights w --device gpu --augmentation foo", capsys)
        assert [line.split()[1] for line in lines] == ["Weights", "Unknown", "Unknown"]

    def test_in_a_file(self, trained: Recorder, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "grid.yaml").write_text("seed: [0, x, y]\nepochs: none at all\nlearning_rate: 3\nmethod: efc\n")
        first, *lines = self.named("run --config grid.yaml --batch-size z", capsys)
        assert first == "efcil: There are 5 mistakes; nothing has been trained:"
        assert sum(line.startswith("- grid.yaml: ") for line in lines) == 4

    def test_settings_without_effect(self, trained: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
        _, *lines = self.named("run --method lwf --set later.momentum=0.3 later.head=cosine", capsys)
        assert [line.split("'")[1] for line in lines] == ["later.head", "later.momentum"]

    def test_other_commands(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        _, *lines = self.named(f"learn {tmp_path}/m --data {tmp_path} --epochs x --batch-size y", capsys)
        assert len(lines) == 2


@pytest.mark.parametrize("flag", ["--dry-run", "--print-commands"])
@pytest.mark.parametrize(
    ("dataset", "says"), [("digits", "takes no path"), ("tiny-imagenet", "holds no validation"), ("cifar10", "label")]
)
def test_another_dataset_is_refused_by_what_only_prints(
    flag: str, dataset: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "test"):
        pq.write_table(pa.table({"img": ["x"], "fine_label": [0]}), tmp_path / f"{name}-00000-of-00001.parquet")
    assert main(["run", "--dataset", dataset, "--data", str(tmp_path), flag]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert str(tmp_path) in error


@pytest.mark.parametrize("flag", ["--dry-run", "--print-commands"])
@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        ("--task-sizes 4,20", "24 classes together, but digits has 10"),
        ("--scenario cs20", "cs20 needs at least 20 classes"),
        ("--class-order icarl-cifar100", "one of 100 classes, but here are 10"),
        ("--class-order dn4il", "for the domains real, clipart"),
    ],
)
def test_tasks_that_a_dataset_cannot_have_are_refused_by_what_only_prints(
    flag: str, scenario: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would be found out only by what is trained later, on a cluster perhaps."""
    assert main(["run", *scenario.split(), flag]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert not printed.out


@pytest.mark.parametrize("flag", ["--dry-run", "--print-commands"])
def test_a_list_of_fewer_classes_has_tasks_of_its_own(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "listed.txt").write_text("n01440764\nn01443537\n", encoding="utf-8")
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "data" / "val").mkdir()
    asked = f"--dataset imagenet-subset --data {tmp_path}/data --class-list {tmp_path}/listed.txt --task-sizes 1,1"
    assert main(["run", "--method", "efc", *asked.split(), flag]) == 0
    assert "custom-of-2x1" in (out := capsys.readouterr().out) or "--task-sizes 2x1" in out


@pytest.mark.parametrize("flag", ["--seed", "--seeds"])
def test_both_commands_call_seeds_alike(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--method", "efc", flag, "0-2", "--dry-run", "--output", str(tmp_path)]) == 0
    assert "cs5/efc/seed0-2" in capsys.readouterr().out
    assert main(["paper", "table1", flag, "1-2", "--scenario", "cs10", "--method", "EFC", "--dry-run"]) == 0
    assert "EFC, seeds 1 2" in capsys.readouterr().out


def test_a_range_of_seeds_is_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--method", "efc", "--seed", "0-2", "7", "--dry-run", "--output", str(tmp_path)]) == 0
    assert "seed0,1,2,7" in capsys.readouterr().out
    assert main(["run", "--seed", "2-0", "--dry-run"]) == 2
    assert "--seed takes numbers and ranges" in capsys.readouterr().err
