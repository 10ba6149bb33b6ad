"""Runs that go on: workers and agents die, agents come, signals ask to stop.

And the losses are those of any other run.

An objective of the test's own waits at a step for as long as there is a file `hold-STEP`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.integration.commands import Process, Samestep, Start, losses
from tests.ports import free_port
from tests.waiting import until

OBJECTIVE = """
import os
import time
from dataclasses import dataclass
from pathlib import Path
from trainer.objectives.kinds import mlm

FOLDER = Path(__file__).parent.parent

@dataclass(frozen=True)
class Config(mlm.Config):
    def build(self, vocabulary):
        return Objective(self, vocabulary)

class Objective(mlm.MaskedLM):
    def weights(self, batch):  # called once a step, as one micro-batch holds all rows of a rank
        metrics = FOLDER / "run" / "metrics.jsonl"
        step = 1 + (metrics.read_text().count("train/loss") if metrics.exists() else 0)
        while (FOLDER / f"hold-{step}").exists():
            time.sleep(0.02)
        if os.environ["WORLD_SIZE"] == "1" and (FOLDER / "a second machine comes").exists():
            time.sleep(3)  # each step, until the run is cut for it
        return super().weights(batch)
"""


@pytest.fixture
def train(start: Start, experiment_file: str, tmp_path: Path) -> Callable[..., Process]:
    """Starts a training of 12 steps with a checkpoint every 2."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "holding.py").write_text(OBJECTIVE)
    settings = (
        *(
            f"output={tmp_path / 'run'}",
            "checkpoint.every=2",
            "training.micro_batch_size=10",
            "data.threads=0",
        ),
        *("strategy=ddp", "objective=own.holding"),
    )
    return lambda *arguments: start("train", experiment_file, *settings, *arguments)


@pytest.fixture
def hold(tmp_path: Path) -> Callable[[int], Path]:
    """Lets runs wait at a step; unlink the file to let them go on."""

    def create(step: int) -> Path:
        (tmp_path / f"hold-{step}").touch()
        return tmp_path / f"hold-{step}"

    return create


def assert_same_losses(run: Path, undisturbed: Path) -> None:
    expected, found = losses(undisturbed), losses(run)
    assert list(found) == list(expected) == list(range(1, 13))
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


def wait_for(text: str, process: Process) -> None:
    deadline = time.monotonic() + 60
    while text not in process.stderr.read_text():
        assert process.popen.poll() is None, process.stderr.read_text()
        assert time.monotonic() < deadline, process.stderr.read_text()
        time.sleep(0.02)


def pending(pid: int) -> set[int]:
    """The signals that a stopped process will get."""
    (mask,) = re.findall(
        r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    return {number for number in signal.Signals if int(mask, 16) >> (number - 1) & 1}


@pytest.mark.long
def test_agents_go_and_come(
    train: Callable[..., Process], hold: Callable[[int], Path], finished_run: Path, tmp_path: Path
) -> None:
    """Whichever agent dies, the host of the meeting too, the others go on.

    One that comes back costs no step.
    """
    address = f"127.0.0.1:{free_port()}"
    elastic = ("--elastic", "1:2", "--rendezvous", address, "--processes", 1)
    at_5, at_9 = hold(5), hold(9)
    (coming := tmp_path / "a second machine comes").touch()
    first = train(*elastic)
    second = train(*elastic)
    until(lambda: "2 x CPU" in first.stderr.read_text() + second.stderr.read_text())
    coming.unlink()
    first.wait_for_step(tmp_path / "run", 4)
    workers = first.workers
    os.kill(first.popen.pid, signal.SIGKILL)
    at_5.unlink()
    second.wait_for_step(tmp_path / "run", 8)
    assert "1 x CPU" in second.stderr.read_text()
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    back = train(*elastic)
    wait_for("another machine has joined", second)
    at_9.unlink()
    assert (second.wait().code, back.wait().code) == (0, 0), (
        second.stderr.read_text() + back.stderr.read_text()
    )
    assert "2 x CPU" in second.stderr.read_text()
    assert "continuing   at step 8" not in second.stderr.read_text()
    assert_same_losses(tmp_path / "run", finished_run)


@pytest.mark.long
def test_preemption(
    train: Callable[..., Process],
    hold: Callable[[int], Path],
    finished_run: Path,
    samestep: Samestep,
    experiment_file: str,
    tmp_path: Path,
) -> None:
    """The step is finished and saved, by all ranks.

    The command exits with 75, and goes on from there.
    """
    held = hold(7)
    run = train("--elastic", "1:1", "--processes", 2)
    run.wait_for_step(tmp_path / "run", 6)
    twice = run.workers[1]  # as a batch system may do it: one stop, asked for twice
    os.kill(twice, signal.SIGSTOP)
    os.kill(twice, signal.SIGUSR1)
    os.kill(run.popen.pid, signal.SIGTERM)
    until(lambda: signal.SIGTERM in pending(twice))
    os.kill(twice, signal.SIGCONT)
    wait_for("stopping     on SIGTERM", run)
    held.unlink()
    assert run.wait().code == 75
    stopped_at = max(losses(tmp_path / "run"))
    assert stopped_at in (7, 8)
    settings = (
        f"output={tmp_path / 'run'}",
        "training.micro_batch_size=10",
        "strategy=single",
        "data.threads=0",
    )
    result = samestep("train", experiment_file, *settings)
    assert result.code == 0, result.err
    assert f"continuing   at step {stopped_at}" in result.err
    assert_same_losses(tmp_path / "run", finished_run)
