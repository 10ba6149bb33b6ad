"""Workers are killed again and again, at random moments; there is a snapshot of each step.

`CHAOS_KILLS` is how many times for each strategy.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from pathlib import Path

import pytest

from tests.chaos.outcome import Observer
from tests.chaos.runs import Run, assert_same_run
from tests.integration.commands import Process, Samestep, Start
from trainer.monitoring.jsonl import read_rows

KILLS = int(os.environ.get("CHAOS_KILLS", "100"))
LONG = (pytest.mark.chaos, pytest.mark.timeout(3600))

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "kills"),
    [
        ("ddp", 2),
        pytest.param("ddp", KILLS, marks=LONG),
        pytest.param("fsdp", KILLS, marks=LONG),
        pytest.param("{kind: fsdp, replicas: 2}", KILLS, marks=LONG),
    ],
)
def test_no_step_that_was_reported_is_taken_again(
    strategy: str,
    kills: int,
    start: Start,
    samestep: Samestep,
    experiment_file: str,
    tmp_path: Path,
) -> None:
    """Each kill comes a few steps after a start, at any moment of a step."""
    generator = random.Random(strategy)
    steps = 8 * (kills + 1)
    data = (f"training.steps={steps}", "data.threads=0")
    paced = "objective={kind: tests.chaos.paced, seconds: 0.02}"
    way = (f"strategy={strategy}", "training.micro_batch_size=16", paced)
    kept = ("checkpoint.every=100000", "checkpoint.snapshot_every=1", "--elastic=1:1")
    settings = (*data, *way, *kept, "--processes=4")
    run = Run(tmp_path / "run", experiment_file, settings, start)
    process = run.train()
    observer = Observer("", run.folder, None)
    redone, seconds, first = [], [], 1
    for _ in range(kills):
        # A run gives up when workers die again and again before there is a new snapshot.
        observer.reach(process, first + generator.randint(1, 3))
        time.sleep(generator.uniform(0, 0.15))
        killed = time.time()
        os.kill(generator.choice(process.workers), signal.SIGKILL)
        first, ended, again = next_start(observer, process, killed)
        redone.append(again)
        seconds.append(ended - killed)
    result = observer.end(process)
    assert result.code == 0, result.err
    assert not any(redone), redone
    undisturbed = tmp_path / "undisturbed"
    alone = samestep("train", experiment_file, f"output={undisturbed}", *data)
    assert alone.code == 0, alone.err
    assert_same_run(samestep, run.folder, undisturbed)
    print(
        f"{strategy}: {kills} kills; the next step after "
        f"{statistics.median(seconds):.1f} s (median; at most {max(seconds):.1f})"
    )


def next_start(observer: Observer, process: Process, killed: float) -> tuple[int, float, int]:
    """Waits for the first step of the start after a kill.

    Returns:
        Its number and time, and how many steps are taken again.
    """

    def newest_start() -> float:
        return max(row["time"] for row in read_rows(observer.run / "starts.jsonl"))

    observer.until(process, lambda: observer.last_time > newest_start() > killed)
    assert process.popen.poll() is None, process.stderr.read_text()
    began = newest_start()
    ended, first = min((when, step) for when, step in observer.rows if when > began)
    before = max(step for when, step in observer.rows if when < began)
    return first, ended, before + 1 - first
