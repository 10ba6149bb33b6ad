"""An elastic run whose processes are killed goes on from memory.

No checkpoint was ever written to the disk.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.integration.commands import Process, Samestep, Start, losses
from tests.ports import free_port

EVERY, STEPS = 2, 12
SLOW_OBJECTIVE = """
import os
import time
from dataclasses import dataclass
from pathlib import Path
from trainer.objectives.kinds import mlm

FOLDER = Path(__file__).parents[1]

@dataclass(frozen=True)
class Config(mlm.Config):
    def build(self, vocabulary):
        return Objective(self, vocabulary)

class Objective(mlm.MaskedLM):
    def weights(self, batch):  # called in each step
        too_early = os.environ["WORLD_SIZE"] == "1" and (FOLDER / "a second machine comes").exists()
        time.sleep(3.0 if too_early else 0.05)
        metrics = FOLDER / "run" / "metrics.jsonl"
        while (FOLDER / "hold").exists() and metrics.exists() and metrics.read_text().count("train/loss") >= 10:
            time.sleep(0.02)
        return super().weights(batch)
"""  # noqa: E501


@pytest.fixture
def arguments(tmp_path: Path, experiment_file: str) -> list[str]:
    """A run with snapshots, and with checkpoints only in the end.

    While there is a file `hold`, it waits at step 11.
    """
    (tmp_path / "own").mkdir()
    (tmp_path / "hold").touch()
    (tmp_path / "own" / "slow.py").write_text(SLOW_OBJECTIVE)
    settings = [
        f"output={tmp_path / 'run'}",
        "objective=own.slow",
        f"checkpoint.snapshot_every={EVERY}",
    ]
    return ["train", experiment_file, *settings]


def step_after(process: Process, run: Path, step: int) -> int:
    """The last step that the run has logged, once that is at least `step`."""
    while not (logged := losses(run)) or max(logged) < step:
        assert process.popen.poll() is None, process.stderr.read_text()
        time.sleep(0.01)
    return max(logged)


def assert_went_on_from_memory(run: Path, killed_at: int, undisturbed: Path) -> None:
    starts = [json.loads(line)["step"] for line in (run / "starts.jsonl").read_text().splitlines()]
    assert starts[0] == 0
    # A machine that came late has made the run start anew as well.
    assert killed_at - 2 * EVERY <= starts[-1] < STEPS, (
        "the newest snapshot; if that was cut short, the one before"
    )
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-5)
    saved = {path.name for path in (run / "checkpoints").glob("step-*")}
    # Where a machine came late, there is one of the step at which the other one stopped for it,
    # too.
    assert saved - {f"step-{step:08d}" for step in starts[1:-1]} == {f"step-{STEPS:08d}"}


@pytest.mark.long
def test_a_killed_worker(
    start: Start, arguments: list[str], finished_run: Path, tmp_path: Path
) -> None:
    process = start(*arguments, "--processes", 2, "--elastic", 1)
    killed_at = step_after(process, tmp_path / "run", 6)
    os.kill(process.workers[1], signal.SIGKILL)
    (tmp_path / "hold").unlink()
    assert process.wait().code == 0
    assert_went_on_from_memory(tmp_path / "run", killed_at, finished_run)
    assert not process.leftovers


@pytest.mark.long
def test_a_killed_machine(
    start: Start, arguments: list[str], finished_run: Path, tmp_path: Path
) -> None:
    """What the other one holds is enough, and that goes on alone."""
    address = f"127.0.0.1:{free_port()}"
    arguments += ["--processes", "1", "--elastic", "1:2", "--rendezvous", address]
    (coming := tmp_path / "a second machine comes").touch()
    first, second = start(*arguments), start(*arguments)
    starts = tmp_path / "run" / "starts.jsonl"
    while not starts.exists() or "2 x" not in starts.read_text():
        assert first.popen.poll() is None, first.stderr.read_text()
        time.sleep(0.01)
    coming.unlink()
    together = json.loads(starts.read_text().splitlines()[-1])["step"]
    killed_at = step_after(first, tmp_path / "run", max(6, together + 2 * EVERY))
    first.popen.kill()
    (tmp_path / "hold").unlink()
    assert second.wait().code == 0
    assert_went_on_from_memory(tmp_path / "run", killed_at, finished_run)


def test_without_a_place_to_keep_them(samestep: Samestep, arguments: list[str]) -> None:
    result = samestep(*arguments, "objective=mlm", "training.steps=5")
    assert result.code == 0
    assert (
        "no snapshots are taken: only `samestep train --elastic` has a place to keep them"
        in result.err
    )
