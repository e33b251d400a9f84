"""Where runs train: the interface of executors, the local ones, what a cluster executes, and printed commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import efcil
from efcil.cli import main
from efcil.commands.run import planned
from efcil.engine import checkpoint
from efcil.engine.interrupt import Interrupted
from efcil.errors import EfcilError, GridError, SettingsError, TrainingError
from efcil.experiment import executors, grid, run_grid, workers
from efcil.experiment.engines import open_executor
from efcil.experiment.executors import Handle, Job, Refused, State, cluster, ray_cluster, remote, submitit_jobs
from efcil.experiment.executors.cluster import ClusterHandle, Orders
from efcil.experiment.executors.local import Processes
from efcil.files import locked
from efcil.model.folder import STEM as MODEL
from efcil.runfolder import RunFolder, locate
from efcil.settings import Settings
from efcil.settings.engine import Engine

TINY: dict[str, Any] = {"scenario": "custom", "tasks": 2, "epochs": 1, "batch_size": 64, "device": "cpu"}


def job(number: int, folder: Path, **settings: Any) -> Job:
    return Job(number, Settings(**settings), folder / str(number))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (workers, cluster, remote):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.01)


# -- the scheduler and any executor ----------------------------------------------------------------------------------


class FakeHandle:
    """A job whose states are given: the last one stays."""

    def __init__(self, job: Job, states: list[tuple[State, list[str]]], reason: str = "It broke.") -> None:
        self.job = job
        self.states = states
        self.reason = reason
        self.error: EfcilError | None = None
        self.cancelled = False
        self._places: list[str] = []

    def state(self) -> State:
        state, self._places = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return state

    def places(self) -> Sequence[str]:
        return self._places

    def result(self) -> Path:
        if self.states[-1][0] is State.FAILED:
            raise self.error or TrainingError(self.reason)
        return self.job.folder

    def cancel(self) -> None:
        self.cancelled = True

    def log(self) -> str:
        return "what the job wrote"


class FakeExecutor:
    def __init__(self, states: dict[int, list[tuple[State, list[str]]]]) -> None:
        self.states = states
        self.handles: list[FakeHandle] = []
        self.closed = False

    def submit(self, job: Job) -> Handle:
        self.handles.append(FakeHandle(job, self.states[job.number]))
        return self.handles[-1]

    def close(self) -> None:
        self.closed = True


def on_cluster(monkeypatch: pytest.MonkeyPatch, executor: Any, jobs: list[Job], output: Path, **options: Any) -> Any:
    """Run jobs on an engine whose executor is given; return the failures and what was said."""
    monkeypatch.setattr(workers, "open_executor", lambda *_: executor)
    said: list[str] = []
    failures = workers.run_on_engine(jobs, output, Engine("ray", **options), None, None, said.append, debug=False)
    # However long it took.
    return failures, [re.sub(r"after \d+ s\.$", "after 0 s.", line.replace(f"{output}/", "")) for line in said]


def test_any_executor_serves_the_scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waits, runs, done = (State.WAITING, list[str]()), (State.RUNNING, ["a"]), (State.DONE, ["a"])
    executor = FakeExecutor(
        {
            0: [waits, waits, runs, done],
            1: [waits, runs, (State.RUNNING, ["a", "b"]), (State.DONE, ["a", "b"])],
            2: [waits, runs, (State.FAILED, ["a"])],
        }
    )
    failures, said = on_cluster(monkeypatch, executor, [job(number, tmp_path) for number in range(3)], tmp_path)
    assert {number: str(error) for number, error in failures.items()} == {2: "It broke."}
    assert executor.closed
    assert [line for line in said if line.startswith("0: ")] == ["0: queued.", "0: started on a.", "0: done after 0 s."]
    assert [line for line in said if line.startswith("1: ")] == [
        "1: queued.",
        "1: started on a.",
        "1: started again on b.",
        "1: done after 0 s.",
    ]
    assert [line for line in said if line.startswith("2: ")][-1] == "2: failed. It broke."
    assert len(list((tmp_path / cluster.FOLDER).iterdir())) == 1  # what failed runs wrote is kept


def test_no_more_runs_are_submitted_than_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    most = 0

    class Counting(FakeExecutor):
        def submit(self, job: Job) -> Handle:
            nonlocal most
            handle = super().submit(job)
            most = max(most, sum(not each.states[0][0].over for each in self.handles))
            return handle

    executor = Counting({n: [(State.RUNNING, ["a"]), (State.RUNNING, ["a"]), (State.DONE, ["a"])] for n in range(5)})
    jobs = [job(number, tmp_path) for number in range(5)]
    assert on_cluster(monkeypatch, executor, jobs, tmp_path, options={"at_once": "2"})[0] == {}
    assert most == 2
    assert not (tmp_path / cluster.FOLDER).exists()


def test_a_run_that_is_not_possible_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where runs train on this machine: its folder holds another run, which is said at the end."""
    executor = FakeExecutor({1: [(State.RUNNING, ["a"]), (State.DONE, ["a"])]})
    monkeypatch.setattr(workers, "open_executor", lambda *_: executor)
    settings = [Settings(method="finetune", seed=seed, **TINY) for seed in (0, 1)]
    locate(tmp_path, settings[0]).write_settings(Settings(method="lwf", **TINY))
    with pytest.raises(GridError, match=r"1 of 2 runs failed.* holds a run with other settings"):
        run_grid(settings, tmp_path, quiet=True, engine=Engine("ray"))
    assert [handle.job.number for handle in executor.handles] == [1]


class Limited(FakeExecutor):
    """Accepts no second job until it was asked for it so many times."""

    refusals = 0

    def submit(self, job: Job) -> Handle:
        if job.number == 1 and self.refusals > 0:
            self.refusals -= 1
            raise Refused(f"Slurm refused the job of {job.folder}. Too many jobs.")
        return super().submit(job)


def test_a_run_refused_beside_others_is_submitted_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workers, "REFUSED_SECONDS", 0.0)
    executor = Limited({n: [(State.RUNNING, ["a"])] * 4 + [(State.DONE, ["a"])] for n in range(2)})
    executor.refusals = 2
    failures, said = on_cluster(monkeypatch, executor, [job(number, tmp_path) for number in range(2)], tmp_path)
    assert failures == {}
    assert [handle.job.number for handle in executor.handles] == [0, 1]
    assert not any(handle.cancelled for handle in executor.handles)
    again = "Slurm refused the job of 1. Too many jobs. It is submitted again every 0 s; the other runs continue."
    assert said.count(again) == 1, "a limit may last for hours"


class LostOnce(FakeExecutor):
    """Its job 1 is lost, and refused when its handle submits it again."""

    def submit(self, job: Job) -> Handle:
        first = job.number == 1 and all(handle.job.number != 1 for handle in self.handles)
        handle = super().submit(job)
        if first:
            self.handles[-1].states = [(State.RUNNING, ["a"]), (State.FAILED, ["a"])]
            self.handles[-1].error = Refused("Slurm refused the job of 1. Too many jobs.")
        return handle


def test_a_lost_run_that_is_refused_waits_with_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workers, "REFUSED_SECONDS", 0.0)
    executor = LostOnce({n: [(State.RUNNING, ["a"])] * 4 + [(State.DONE, ["a"])] for n in range(2)})
    failures, said = on_cluster(monkeypatch, executor, [job(number, tmp_path) for number in range(2)], tmp_path)
    assert failures == {}
    assert [handle.job.number for handle in executor.handles] == [0, 1, 1]
    assert (
        "Slurm refused the job of 1. Too many jobs. It is submitted again every 0 s; the other runs continue." in said
    )


def test_a_lost_run_that_is_refused_with_no_other_ends_the_grid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=r"Too many jobs\.$"):
        on_cluster(monkeypatch, LostOnce({1: []}), [job(1, tmp_path)], tmp_path)


def test_a_run_refused_with_no_other_ends_the_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    executor = Limited({})
    executor.refusals = 1
    with pytest.raises(TrainingError, match=r"Too many jobs\.$"):
        on_cluster(monkeypatch, executor, [job(1, tmp_path)], tmp_path)


def test_an_interruption_cancels_what_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Interrupting(FakeHandle):
        def state(self) -> State:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().state()

    class Executor(FakeExecutor):
        def submit(self, job: Job) -> Handle:
            self.handles.append(Interrupting(job, [(State.RUNNING, ["a"])]))
            return self.handles[-1]

    executor = Executor({})
    with pytest.raises(Interrupted, match="Run the same command again"):
        on_cluster(monkeypatch, executor, [job(0, tmp_path)], tmp_path)
    assert executor.closed
    assert [handle.cancelled for handle in executor.handles] == [True]


def test_runs_with_different_first_tasks_are_submitted_first(tmp_path: Path) -> None:
    def label(each: Job) -> str:
        return f"{each.settings.method}{each.settings.seed}"

    settings = [Settings(method=method, seed=seed) for seed in (0, 1) for method in ("efc", "lwf", "finetune")]
    jobs = [Job(number, each, tmp_path) for number, each in enumerate(settings)]
    assert [label(each) for each in grid.leaders_first(jobs)] == [
        "efc0",
        "efc1",
        "lwf0",
        "lwf1",
        "finetune0",
        "finetune1",
    ]


# -- executors of this machine ----------------------------------------------------------------------------------------


def test_processes_have_states_and_last_words(tmp_path: Path) -> None:
    scripts = ["exit 0", "echo one >&2; echo 'efcil: A mistake.' >&2; exit 2", "exit 3", "sleep 600", 'test "$X" = y']
    executor = Processes(lambda each: ["sh", "-c", scripts[each.number]], tmp_path, {"PATH": os.environ["PATH"]})
    done, mistake, silent, sleeping = (executor.submit(job(number, tmp_path)) for number in range(4))
    own = executor.submit(Job(4, Settings(), tmp_path, environment={"X": "y"}))
    assert done.result() == tmp_path / "0"
    assert own.result() == tmp_path
    with pytest.raises(SettingsError, match=r"^A mistake\.$"):
        mistake.result()
    assert mistake.log() == "one\nefcil: A mistake."
    with pytest.raises(TrainingError, match="ended with code 3"):
        silent.result()
    assert [each.state() for each in (done, mistake, silent)] == [State.DONE, State.FAILED, State.FAILED]
    assert (sleeping.state(), list(sleeping.places())) == (State.RUNNING, [""])
    executor.close()
    assert sleeping.state() is State.FAILED


# -- what a cluster executes -----------------------------------------------------------------------------------------


def order(tmp_path: Path, code: str, **changes: Any) -> remote.RemoteRun:
    """A run whose command is Python code."""
    orders = Orders(lambda each: ["python", "-c", code], tmp_path, threads=1)
    run = orders.write(job(0, tmp_path / "runs", device="cpu"))
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def outcome(run: remote.RemoteRun) -> dict[str, Any]:
    """Execute a run as a cluster would, from text, and return what it says."""
    text = remote.train(cluster.facts(run))
    assert Path(f"{run.stem}.json").read_text() == text
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_a_command_runs_with_its_variables_and_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFCIL_CACHE", "/somewhere")
    monkeypatch.setenv("EFCIL_TOKEN", "secret")
    code = (
        "import os, sys; print(sys.executable, os.environ['EFCIL_CACHE'], os.environ['OMP_NUM_THREADS'], os.getcwd(),"
    )
    run = order(tmp_path, code + " os.environ['EFCIL_COMMAND'], file=sys.stderr); sys.exit(7)")
    assert "EFCIL_TOKEN" not in run.environment
    assert outcome(run) == {"host": os.uname().nodename, "code": 7, "stopped": False}
    printed = Path(f"{run.stem}.err").read_text()
    assert printed.startswith(f"{sys.executable} /somewhere 1 {Path.cwd()} ")
    assert Path(f"{run.stem}.started").read_text() == f"{os.uname().nodename}\n"


def test_a_machine_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    run = order(tmp_path, "")
    Path(f"{run.stem}.control").unlink()
    assert "must be on storage that all machines of the cluster share" in outcome(run)["problem"]
    Path(f"{run.stem}.control").write_text("the token of another command")
    assert "does not see" in outcome(run)["problem"]
    assert not Path(f"{run.stem}.started").exists()


def test_another_version_is_refused(tmp_path: Path) -> None:
    problem = outcome(order(tmp_path, "", version="0.0.1"))["problem"]
    assert problem.endswith(
        f"has version {efcil.__version__} of efcil, and this machine 0.0.1. Install the same version everywhere."
    )


def test_a_run_that_must_stop_saves_or_does_not_start(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"""
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
pathlib.Path({str(ready)!r}).touch()
time.sleep(600)
"""
    run = order(tmp_path, code)
    started = Path(f"{run.stem}.started")

    def stop() -> None:
        while not ready.exists():
            time.sleep(0.01)
        Path(f"{run.stem}.control").write_text(remote.STOP)

    thread = threading.Thread(target=stop)
    thread.start()
    found = outcome(run)
    thread.join()
    assert found["stopped"]
    assert found["code"] == 130
    started.unlink()
    assert outcome(run)["code"] == 130
    assert not started.exists()


def test_a_run_waits_for_the_process_that_still_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = order(tmp_path, "")
    waits = threading.Event()

    def sleep(seconds: float) -> None:
        waits.set()
        time.sleep(seconds)

    monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    second = threading.Thread(target=outcome, args=(run,))
    with locked(Path(run.folder) / ".lock"):
        second.start()
        assert waits.wait(600)
        assert not Path(f"{run.stem}.started").exists()
    second.join(600)
    assert Path(f"{run.stem}.started").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process that its parent died")
def test_a_command_saves_if_its_worker_dies(tmp_path: Path) -> None:
    """Another worker resumes the run, so this one must end."""
    saved, ready = tmp_path / "saved", tmp_path / "ready"
    command = textwrap.dedent(f"""
        import pathlib, signal, sys, time
        def save(*_):
            pathlib.Path({str(saved)!r}).touch()
            sys.exit(130)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path({str(ready)!r}).touch()
        time.sleep(600)
    """)
    text = cluster.facts(order(tmp_path, command))
    worker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from efcil.experiment.executors import remote; remote.train(sys.argv[1])",
            text,
        ],
        env={**os.environ, "PYTHONPATH": str(Path(efcil.__file__).parents[1])},
    )
    end = time.monotonic() + 600
    while not ready.exists() and time.monotonic() < end:
        time.sleep(0.05)
    worker.kill()
    worker.wait()
    while not saved.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert saved.exists()


def test_signals_of_schedulers_do_not_end_the_command(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); os.kill(os.getpid(), signal.SIGUSR2)"
    assert outcome(order(tmp_path, code))["code"] == 0


def test_a_job_that_is_requeued_ends_its_command_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit calls `checkpoint` from the handler of a signal, in the middle of anything."""
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "submitit.helpers", SimpleNamespace(DelayedSubmission=lambda run: ("again", run)))
    run = order(tmp_path, "import time; time.sleep(600)")
    again = []

    def requeue(number: int, frame: Any) -> None:
        again.append(run.checkpoint())
        raise SystemExit

    before = signal.signal(signal.SIGUSR2, requeue)
    try:
        main_thread = os.getpid()

        def send() -> None:
            while run._process is None:
                time.sleep(0.01)
            os.kill(main_thread, signal.SIGUSR2)

        threading.Thread(target=send).start()
        with pytest.raises(SystemExit):
            run()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert again == [("again", run)]
    assert run.__getstate__()["_process"] is None
    assert run._process is not None
    assert run._process.wait(600) == -15
    assert not Path(f"{run.stem}.json").exists()
    assert len(Path(f"{run.stem}.requeued").read_text().splitlines()) == 1


# -- handles of clusters ----------------------------------------------------------------------------------------------


class Backend(ClusterHandle):
    """A job of a cluster that does what the test says."""

    def __init__(self, tmp_path: Path, retries: int = 1) -> None:
        super().__init__(job(0, tmp_path / "runs"), order(tmp_path, ""), retries)
        self.submitted = self.withdrawn = 0
        self.text: str | None = None

    def submit(self) -> None:
        self.submitted += 1
        self.text = None

    def returned(self) -> str | None:
        return self.text

    def withdraw(self) -> None:
        self.withdrawn += 1

    def lost(self) -> str:
        return "It was lost."

    def end(self, **outcome: Any) -> State:
        self.text = json.dumps(outcome)
        return self.state()


def test_a_run_that_was_interrupted_from_outside_is_submitted_again(tmp_path: Path) -> None:
    handle = Backend(tmp_path)
    handle.submit()
    assert handle.state() is State.WAITING
    Path(f"{handle.run.stem}.started").write_text("node\n")
    assert handle.state() is State.RUNNING
    assert handle.end(code=-9, stopped=False) is State.WAITING
    assert handle.submitted == 2
    Path(f"{handle.run.stem}.err").write_text("efcil: Killed again.\n")
    assert handle.end(code=130, stopped=False) is State.FAILED
    with pytest.raises(TrainingError, match=r"^Killed again\.$"):
        handle.result()


def test_a_cluster_that_refuses_a_run_the_second_time_says_so(tmp_path: Path) -> None:
    class Full(Backend):
        def submit(self) -> None:
            super().submit()
            if self.submitted > 1:
                raise Refused("The queue is full.")

    handle = Full(tmp_path)
    handle.submit()
    assert handle.end(code=-9, stopped=False) is State.FAILED
    with pytest.raises(Refused, match="The queue is full"):
        handle.result()


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    handle = Backend(tmp_path)
    handle.submit()
    assert handle.end(code=2, stopped=False) is State.FAILED
    assert handle.submitted == 1
    handle = Backend(tmp_path)
    assert handle.end(problem="No storage.") is State.FAILED
    with pytest.raises(TrainingError, match="No storage"):
        handle.result()


def test_what_a_job_left_is_read_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Backend(tmp_path)
    handle.text = ""
    assert handle.state() is State.RUNNING  # the file may need time to appear
    Path(f"{handle.run.stem}.json").write_text('{"code": 0}')
    assert handle.state() is State.DONE
    assert handle.result() == handle.job.folder
    monkeypatch.setattr(cluster, "GRACE_SECONDS", 0.0)
    lost = Backend(tmp_path)
    Path(f"{lost.run.stem}.json").unlink()
    lost.text = ""
    assert lost.state() is State.FAILED
    with pytest.raises(TrainingError, match="It was lost"):
        lost.result()


def test_a_cancelled_job_is_stopped_or_withdrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Backend(tmp_path)
    handle.cancel()
    assert Path(f"{handle.run.stem}.control").read_text() == remote.STOP
    assert (handle.withdrawn, handle.state()) == (1, State.FAILED)
    running = Backend(tmp_path)
    started, requeued = (Path(f"{running.run.stem}.{kind}") for kind in ("started", "requeued"))
    started.write_text("node\n")
    running.cancel()
    assert (running.withdrawn, running.state()) == (0, State.RUNNING)
    assert running.end(code=130, stopped=True) is State.FAILED
    requeued.write_text("node\n")
    again = Backend(tmp_path)
    assert again.state() is State.WAITING
    cluster.stop_all([running, again])
    assert (running.withdrawn, again.withdrawn) == (0, 1)
    started.write_text("node\nnode\n")
    slow = Backend(tmp_path)
    monkeypatch.setattr(cluster, "SAVE_SECONDS", 0.05)
    cluster.stop_all([slow])
    assert slow.withdrawn == 1


class Here(ClusterHandle):
    """A cluster of one machine: the job runs when it is submitted."""

    text = ""

    def submit(self) -> None:
        self.text = remote.train(cluster.facts(self.run))

    def returned(self) -> str | None:
        return self.text

    def withdraw(self) -> None:
        raise AssertionError

    def lost(self) -> str:
        raise AssertionError


def test_a_cluster_leaves_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: settings as a file, a command in a process of its own, results as in this process."""

    class Executor:
        def __init__(self, orders: Orders) -> None:
            self.orders = orders

        def submit(self, each: Job) -> Handle:
            handle = Here(each, self.orders.write(each), 0)
            handle.submit()
            return handle

        def close(self) -> None:
            return

    def opened(engine: Engine, command: executors.CommandOf, scratch: Path, *_: Any) -> Executor:
        return Executor(Orders(command, scratch, torch.get_num_threads()))

    monkeypatch.setattr(workers, "open_executor", opened)
    monkeypatch.setenv("PYTHONPATH", str(Path(efcil.__file__).parents[1]))
    settings = [Settings(method="finetune", **TINY)]
    (there,) = run_grid(settings, tmp_path / "there", quiet=True, engine=Engine("ray"))
    (here,) = run_grid(settings, tmp_path / "here", quiet=True)
    assert there.relative_to(tmp_path / "there") == here.relative_to(tmp_path / "here")
    assert sorted(file.name for file in there.iterdir()) == sorted(file.name for file in here.iterdir())
    assert {file.name: file.read_bytes() for file in there.glob("*.csv")} == {
        file.name: file.read_bytes() for file in here.glob("*.csv")
    }
    ours, theirs = (checkpoint.read(RunFolder(path).model, MODEL).tensors for path in (here, there))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert RunFolder(there).read_summary()["made_with"] == RunFolder(here).read_summary()["made_with"]


# -- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--engine rya", "Did you mean 'ray'"),
        ("--address somewhere:1", "--address is that of a Ray cluster"),
        ("--engine slurm --address somewhere:1", "--address is that of a Ray cluster"),
        ("--engine-option time=60", "Give --engine too"),
        ("--engine ray --engine-option at_once=none", "'at_once' must be a whole number"),
        ("--engine ray --engine-option num_cpus", "--engine-option takes name=value"),
        ("--engine submitit-local --jobs-per-gpu 2", "Slurm gives each run GPUs of its own"),
        ("--print-commands --engine ray", "--engine has no effect"),
        ("--print-commands --jobs-per-gpu 2", "--jobs-per-gpu has no effect"),
    ],
)
def test_mistakes_are_sentences(words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "--output", str(tmp_path / "out"), *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("settings.yaml"))


@pytest.mark.parametrize(
    ("engine", "package", "extra"),
    [("ray", "ray", "ray"), ("slurm", "submitit", "slurm"), ("submitit-local", "submitit", "slurm")],
)
def test_missing_packages_are_named(
    engine: str, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingsError, match=rf"The engine {engine} needs .*pip install 'efcil\[{extra}\]'"):
        run_grid([Settings(**TINY)], tmp_path, quiet=True, engine=Engine(engine))


class FakeRay:
    """As much of Ray as submitting needs; jobs never end."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self.options: list[dict[str, Any]] = []
        self._nodes = nodes
        self.cloudpickle = SimpleNamespace(register_pickle_by_value=lambda module: None)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": each} for each in self._nodes] + [{"Alive": False, "Resources": {}}]

    def remote(self, function: Callable[..., Any]) -> Any:
        return SimpleNamespace(options=self._with)

    def _with(self, **options: Any) -> Any:
        self.options.append(options)
        return SimpleNamespace(remote=json.loads)


def on_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ray: FakeRay, jobs_per_gpu: int | None = None, **options: str
) -> Any:
    monkeypatch.setattr(ray_cluster, "_connected", lambda address, say: ray)
    return open_executor(Engine("ray", None, options), lambda each: ["python"], tmp_path, jobs_per_gpu, print)


@pytest.mark.parametrize(
    ("device", "nodes", "jobs_per_gpu", "asked"),
    [
        ("cpu", [{"CPU": 8.0, "GPU": 1.0}], None, (1.0, 0.0)),
        ("auto", [{"CPU": 8.0}, {"CPU": 8.0, "GPU": 1.0}], None, (1.0, 1.0)),
        ("auto", [{"CPU": 8.0, "GPU": 1.0}], 4, (1.0, 0.25)),
        ("cuda", [{"CPU": 8.0, "GPU": 1.0}], 3, (1.0, 0.3333)),
        ("auto", [{"CPU": 8.0}], 3, (1.0, 0.0)),
    ],
)
def test_a_run_asks_ray_for_its_part_of_a_gpu(
    device: str,
    nodes: list[dict[str, float]],
    jobs_per_gpu: int | None,
    asked: tuple[float, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay(*nodes)
    handle = on_ray(monkeypatch, tmp_path, ray, jobs_per_gpu).submit(job(0, tmp_path, device=device))
    assert (ray.options[0]["num_cpus"], ray.options[0]["num_gpus"]) == asked
    assert ray.options[0]["max_retries"] == cluster.RETRIES
    assert handle.run.environment.get("OMP_NUM_THREADS") == (None if device == "cuda" else "1")


def test_options_of_ray_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay({"CPU": 8.0, "GPU": 2.0, "memory": 1e10, "fast": 1.0})
    given = {"num_cpus": "4", "num_gpus": "2", "memory": "1e9", "retries": "7", "resources.fast": "0.5"}
    on_ray(monkeypatch, tmp_path, ray, None, **given).submit(job(0, tmp_path))
    asked = {name: ray.options[0][name] for name in ("num_cpus", "num_gpus", "memory", "max_retries", "resources")}
    assert asked == {"num_cpus": 4, "num_gpus": 2, "memory": 1e9, "max_retries": 7, "resources": {"fast": 0.5}}
    for wrong, message in (({"num_cpu": "4"}, "Did you mean 'num_cpus'"), ({"memory": "much"}, "must be a number")):
        with pytest.raises(SettingsError, match=message):
            on_ray(monkeypatch, tmp_path, ray, None, **wrong)


def test_a_ray_cluster_that_lacks_something_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = on_ray(monkeypatch, tmp_path, FakeRay({"CPU": 8.0}, {"CPU": 2.0}))
    with pytest.raises(
        SettingsError, match=r"asks for: 1 CPU, 1 GPU\. Its machines have: 8 CPU, 0 GPU; 2 CPU, 0 GPU\."
    ):
        executor.submit(job(0, tmp_path, device="cuda"))
    with pytest.raises(SettingsError, match="Ray chooses the GPU"):
        executor.submit(job(0, tmp_path, device="cuda:1"))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_a_ray_cluster_that_does_not_exist(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with pytest.raises(SettingsError, match=f"There is no Ray cluster at {address} .*Check --address"):
        run_grid([Settings(**TINY)], tmp_path, quiet=True, engine=Engine("ray", address))
    assert not (tmp_path / cluster.FOLDER).exists()


class FakeSubmitit:
    """submitit's two executors; they keep what they are given."""

    def __init__(self) -> None:
        self.parameters: list[dict[str, Any]] = []
        self.submitted: list[Any] = []

    def __call__(self, folder: Path, max_num_timeout: int) -> FakeSubmitit:
        return self

    def update_parameters(self, **parameters: Any) -> None:
        if "partitoin" in parameters:
            raise ValueError("Unavailable parameter(s):\n  partitoin")
        self.parameters.append(parameters)

    def submit(self, run: remote.RemoteRun) -> Any:
        self.submitted.append(run)
        return SimpleNamespace(done=lambda: False, cancel=lambda check: None)


def on_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: FakeSubmitit, local: bool, **options: str) -> Any:
    module = SimpleNamespace(SlurmExecutor=fake, LocalExecutor=fake)
    monkeypatch.setitem(sys.modules, "submitit", module)
    monkeypatch.setitem(sys.modules, "cloudpickle", SimpleNamespace(register_pickle_by_value=lambda module: None))
    engine = Engine("submitit-local" if local else "slurm", None, options)
    return open_executor(engine, lambda each: ["python"], tmp_path, None, lambda text: None)


def test_options_of_slurm_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSubmitit()
    options = {"partition": "gpu", "time": "30", "exclusive": "true", "at_once": "3", "retries": "2"}
    on_slurm(monkeypatch, tmp_path, fake, False, **options).submit(job(0, tmp_path))
    common = {"partition": "gpu", "time": 30, "exclusive": True, "job_name": "efcil"}
    assert fake.parameters == [common | {"gpus_per_node": 1}]
    assert isinstance(fake.submitted[0], remote.RemoteRun)
    on_slurm(monkeypatch, tmp_path, fake, False, gres="shard:1").submit(job(0, tmp_path))
    assert fake.parameters[-1] == {"time": submitit_jobs.MINUTES, "job_name": "efcil", "gres": "shard:1"}
    on_slurm(monkeypatch, tmp_path, fake, False).submit(job(0, tmp_path, device="cpu"))
    assert fake.parameters[-1] == {"time": submitit_jobs.MINUTES, "job_name": "efcil", "cpus_per_task": 1}
    on_slurm(monkeypatch, tmp_path, fake, True, time="2").submit(job(0, tmp_path, device="cpu"))
    assert fake.parameters[-1] == {"timeout_min": 2}
    with pytest.raises(SettingsError, match=r"refuses these engine options\. Unavailable parameter\(s\): partitoin"):
        on_slurm(monkeypatch, tmp_path, fake, False, partitoin="gpu").submit(job(0, tmp_path))
    with pytest.raises(SettingsError, match="has no option 'partition'"):
        on_slurm(monkeypatch, tmp_path, fake, True, partition="gpu").submit(job(0, tmp_path))


# -- printed commands -------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    assert main(["run", *words, "--print-commands"]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--method", "efc", "efc++", "--seed", "3", "4", "--scenario", "cs5", "ws5"],
        ["--tasks", "3", "--first-task-classes", "4", "--deterministic", "--precision", "fp32", "--device", "cpu"],
        ["--method", "efc", "--set", "efm_weight=0.1", "later.learning_rate=1e-7", "first_task.milestones=1,2"],
        ["--method", "efc", "lwf", "--vary", "efm_weight=1", "10", "--augmentation", "none"],
        ["--class-order", "natural", "--epochs", "2", "--held-out", "0.25"],
    ],
)
def test_printed_commands_describe_the_grid(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = printed(capsys, *words, "--output", "a folder's name", "--checkpoint-steps", "7")
    starts = [line.index("efcil") for line in found]
    assert all(
        line[start - 2 : start + 2] == [sys.executable, "-m", "efcil", "run"]
        for line, start in zip(found, starts, strict=True)
    )
    ends = ["--output", str(tmp_path / "a folder's name"), "--checkpoint-steps", "7"]
    assert all(line[-4:] == ends for line in found)
    again = [planned(line[start + 2 :]) for line, start in zip(found, starts, strict=True)]
    assert all(len(each) == 1 for each in again)
    assert [each[0] for each in again] == planned(words)
    assert not (tmp_path / "a folder's name").exists()


def test_printed_commands_need_no_working_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "order.txt").write_text("\n".join(map(str, range(10))))
    own = tmp_path / "own.py"
    own.write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EFCIL_METHODS", "own.py")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PYTHONPATH", "networks")
    (line,) = printed(capsys, "--method", "efc", "--class-order", "order.txt")
    assert line[:1] == ["env"]
    assert {"OMP_NUM_THREADS=3", f"EFCIL_METHODS={own}", f"PYTHONPATH={tmp_path / 'networks'}"} <= set(line)
    assert line[line.index("--class-order") + 1] == str(tmp_path / "order.txt")


def test_printed_commands_leave_the_folders_of_the_grid(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "--method",
        "finetune",
        "efc",
        "--tasks",
        "2",
        "--epochs",
        "1",
        "--batch-size",
        "64",
        "--device",
        "cpu",
        "--quiet",
        "--output",
    ]
    found = printed(capsys, *words, str(tmp_path / "one by one"))
    assert len(found) == 2
    for line in reversed(found):
        assert main(line[line.index("efcil") + 1 :]) == 0
    settings = planned([*words, str(tmp_path)])
    paths = run_grid(settings, tmp_path / "grid", quiet=True)
    assert [locate(tmp_path / "one by one", each).path.relative_to(tmp_path / "one by one") for each in settings] == [
        path.relative_to(tmp_path / "grid") for path in paths
    ]
    for path in paths:
        other = tmp_path / "one by one" / path.relative_to(tmp_path / "grid")
        tables = [{file.name: file.read_bytes() for file in folder.glob("*.csv")} for folder in (path, other)]
        assert tables[0] == tables[1]
        assert tables[0]
