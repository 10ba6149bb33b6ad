"""Processes that fail, are killed or are interrupted.

Nobody hangs, nothing is left behind, and the run goes on.

A run is brought to a certain point by an objective of the test's own (a dotted kind) that stalls
there on all ranks, or raises on one.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.integration.commands import SAMESTEP, Process, Samestep, Start, losses
from tests.waiting import until
from trainer.checkpoint import lock

TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "samestep.cli",
)
OBJECTIVE = """
import os, time
from dataclasses import dataclass
from samestep.errors import DataError
from trainer.objectives.kinds import mlm

@dataclass(frozen=True)
class Config(mlm.Config):
    at_step: int = 9
    does: str = "stall"
    rank: int = 1

    def build(self, vocabulary):
        return Objective(self, vocabulary)

class Objective(mlm.MaskedLM):
    step = 0

    def weights(self, batch):  # called once a step, as one micro-batch holds all rows of a rank
        self.step += 1
        if self.step == self.config.at_step:
            if self.config.does == "stall":
                time.sleep(100)
            elif self.config.rank == int(os.environ.get("RANK", "0")):
                raise DataError("in its own words") if self.config.does == "refuse" else KeyError("a bug")
        return super().weights(batch)
"""  # noqa: E501


@pytest.fixture
def stalled(start: Start, objective: str, experiment_file: str, tmp_path: Path) -> Process:
    """Two processes that wait in step 9 of a run, whose steps 4 and 8 have checkpoints."""
    process = start(
        "train", experiment_file, *overrides(tmp_path), f"objective={objective}", "--processes", 2
    )
    process.wait_for_step(tmp_path / "run", 8)
    return process


@pytest.fixture
def objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of the objective above."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "objective.py").write_text(OBJECTIVE)
    monkeypatch.syspath_prepend(tmp_path)
    return "own.objective"


def overrides(tmp_path: Path) -> list[str]:
    return [f"output={tmp_path / 'run'}", "checkpoint.every=4", "training.micro_batch_size=10"]


def assert_gone(processes: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"processes {left} live on"
        time.sleep(0.05)


def test_killed_worker(
    stalled: Process,
    samestep: Samestep,
    experiment_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a run goes on its folder is refused to others.

    A killed worker ends it with an explanation.
    """
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.3)
    second = samestep("train", experiment_file, *overrides(tmp_path))
    assert second.code == 2
    assert f"another training is running in {tmp_path / 'run' / 'checkpoints'}: " in second.message
    assert ", process " in second.message
    workers = stalled.workers
    os.kill(workers[1], signal.SIGKILL)
    result = stalled.wait(30)
    assert result.code == 1
    assert "rank 1 was killed by SIGKILL" in result.message
    assert "continue from the newest checkpoint" in result.message
    assert_gone(workers, 0)
    assert not stalled.leftovers


@pytest.mark.long
def test_killed_agent_and_resume(
    stalled: Process,
    start: Start,
    samestep: Samestep,
    experiment_file: str,
    finished_run: Path,
    tmp_path: Path,
) -> None:
    """Workers end with their agent, leave nothing behind, and under torchrun the run comes to the
    same end.
    """
    workers = stalled.workers
    os.kill(stalled.popen.pid, signal.SIGKILL)
    result = stalled.wait()
    assert_gone(workers, 20)
    assert "Traceback" not in result.err
    assert not stalled.leftovers

    resumed = start("train", experiment_file, *overrides(tmp_path), command=TORCHRUN)
    assert resumed.wait().code == 0
    whole, run = losses(finished_run), losses(tmp_path / "run")
    assert list(run) == list(whole) == list(range(1, 13))
    np.testing.assert_allclose(list(run.values()), list(whole.values()), rtol=1e-5)
    assert samestep("ledger", "verify", tmp_path / "run").code == 0


@pytest.mark.long
def test_killed_with_frozen_weights_and_resumed(
    start: Start,
    samestep: Samestep,
    objective: str,
    experiment_file: str,
    finished_run: Path,
    tmp_path: Path,
) -> None:
    """Killed two steps after a checkpoint, which leaves out what is frozen, a run with LoRA comes
    to the same end.
    """
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = [
        *overrides(tmp_path),
        "checkpoint.every=6",
        f"init_from={finished_run}",
        "model.peft=lora",
    ]
    assert samestep("train", experiment_file, *settings, f"output={whole}").code == 0
    killed = start("train", experiment_file, *settings, f"objective={objective}", "--processes", 1)
    killed.wait_for_step(run, 6)
    while 8 not in losses(run):
        time.sleep(0.05)
    killed.popen.kill()
    killed.wait()
    assert samestep("train", experiment_file, *settings).code == 0
    assert list(losses(run)) == list(range(1, 13))
    assert losses(run) == pytest.approx(losses(whole), rel=1e-6)


def test_interrupted(stalled: Process) -> None:
    """Ctrl-C at a terminal reaches all processes. The first waits for the step, which does not end
    here; the second does not.
    """
    workers = stalled.workers
    os.killpg(stalled.popen.pid, signal.SIGINT)
    until(
        lambda: "stopping     on SIGINT, after one of the next steps" in stalled.stderr.read_text()
    )
    time.sleep(1.1)  # what comes within a second is one request
    os.killpg(stalled.popen.pid, signal.SIGINT)
    result = stalled.wait(30)
    assert result.code == 130
    assert result.err.count("stopping     on SIGINT") == 1
    assert "at once: a second signal (SIGINT); no step is lost" in result.err
    assert "Traceback" not in result.err
    assert_gone(workers, 0)


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_saves(
    start: Start, samestep: Samestep, experiment_file: str, tmp_path: Path, processes: int
) -> None:
    """The same command continues after the step that is named, and no step comes twice."""
    run = tmp_path / "run"
    settings = [f"output={run}", "checkpoint.every=5", "training.micro_batch_size=10"]
    endless = ["training.steps=100000", "--processes", processes]
    interrupted = start("train", experiment_file, *settings, *endless)
    interrupted.wait_for_step(run, 5)
    os.killpg(interrupted.popen.pid, signal.SIGINT)
    result = interrupted.wait(60)
    assert result.code == 130
    assert "Traceback" not in result.err
    (saved,) = re.findall(r"stopped      saved step (\d+); the same command continues", result.err)
    assert list(losses(run)) == list(range(1, int(saved) + 1))
    steps = int(saved) + 2
    continued = samestep("train", experiment_file, *settings, f"training.steps={steps}")
    assert continued.code == 0, continued.err
    assert f"continuing   at step {saved}" in continued.err
    assert list(losses(run)) == list(range(1, steps + 1))


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_the_end_of_the_terminal_saves(
    start: Start, samestep: Samestep, experiment_file: str, tmp_path: Path, processes: int
) -> None:
    """A closed terminal sends SIGHUP to all processes; the same command continues."""
    run = tmp_path / "run"
    settings = [f"output={run}", "checkpoint.every=1000", "training.micro_batch_size=10"]
    endless = ["training.steps=100000", "--processes", processes]
    process = start("train", experiment_file, *settings, *endless)
    until(lambda: len(losses(run)) >= 3)
    os.killpg(process.popen.pid, signal.SIGHUP)
    result = process.wait(60)
    assert result.code == 75, result.err
    assert "stopping     on SIGHUP" in result.err
    (saved,) = re.findall(r"stopped      saved step (\d+); the same command continues", result.err)
    continued = samestep("train", experiment_file, *settings, f"training.steps={int(saved) + 1}")
    assert continued.code == 0, continued.err
    assert f"continuing   at step {saved}" in continued.err


@pytest.mark.long
def test_under_nohup_a_run_outlives_its_terminal(
    start: Start, experiment_file: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = ["training.micro_batch_size=10", "training.steps=60", "--processes", 2]
    nohup = ("nohup", *SAMESTEP)
    process = start("train", experiment_file, f"output={run}", *settings, command=nohup)
    until(lambda: len(losses(run)) >= 3)
    os.killpg(process.popen.pid, signal.SIGHUP)
    assert 60 not in losses(run)  # the signal came before the end
    result = process.wait(60)
    assert result.code == 0, result.err
    assert "SIGHUP" not in result.err
    assert list(losses(run)) == list(range(1, 61))


def test_failing_rank(start: Start, objective: str, experiment_file: str, tmp_path: Path) -> None:
    """Only that rank's message appears, and the others do not wait for a time-out."""
    kind = f"objective={{kind: {objective}, does: refuse}}"
    result = start("train", experiment_file, *overrides(tmp_path), kind, "--processes", 2).wait(50)
    assert result.code == 1
    assert result.message == "in its own words"
    assert "[rank 1] error:" in result.err
    assert list(losses(tmp_path / "run")) == list(range(1, 9))


def test_mistake_that_all_ranks_notice(start: Start, experiment_file: str, tmp_path: Path) -> None:
    result = start(
        "train", experiment_file, *overrides(tmp_path), "strategy=single", "--processes", 2
    ).wait()
    assert result.code == 2
    assert "strategy single runs in one process, and there are 2" in result.message


def test_bug(samestep: Samestep, objective: str, experiment_file: str, tmp_path: Path) -> None:
    """What is nobody's foreseen mistake keeps its stack trace."""
    kind = f"objective={{kind: {objective}, does: crash, rank: 0}}"
    result = samestep("train", experiment_file, *overrides(tmp_path), kind)
    assert result.code == 1
    assert "Traceback" in result.err
    assert "KeyError: 'a bug'" in result.err


def test_a_loss_that_is_not_finite_stops_the_run(
    samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    run = (
        f"output={tmp_path / 'run'}",
        "checkpoint.every=2",
        "schedule.warmup_steps=0",
        "training.max_grad_norm=null",
    )
    result = samestep("train", experiment_file, *run, "optimizer.lr=1e30")
    assert result.code == 1
    assert "error: train/loss is nan at step" in result.err
    assert "Traceback" not in result.err
    assert "nan" not in (tmp_path / "run" / "metrics.jsonl").read_text().lower()
