"""Random events, one after another, happen to a run over a mixture.

It ends as the run of one process left alone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.runs import PATIENCE, Run, assert_same_run, kill, moments
from tests.integration.commands import Process, Samestep, Start, children
from trainer.monitoring.jsonl import read_rows

LONG = (pytest.mark.chaos, pytest.mark.timeout(3600))

pytestmark = pytest.mark.usefixtures("nothing_left")


@dataclass(frozen=True)
class Event:
    """Something that happens to a run, and how the run goes on.

    Attributes:
        what: `worker` is killed, and replaced; all processes are killed (`kill`) or asked to stop
            (`stop`), and the command is given again.
        steps: that the run takes first, after the event before; with 0 it may not even have begun.
        seconds: that then pass.
        victim: which worker is killed, as a share of them all.
        way: settings of the next command.
    """

    what: str
    steps: int
    seconds: float
    victim: float
    way: tuple[str, ...]


def draw(seed: int, kinds: list[str]) -> list[Event]:
    """Events of these kinds, in random order."""
    generator = random.Random(seed)
    generator.shuffle(kinds)
    events = []
    for what in kinds:
        # A run gives up when workers die again and again before there is a new checkpoint.
        steps = generator.randint(1 if what == "worker" else 0, 4)
        seconds = generator.uniform(0, 0.1 if steps else 4)
        events.append(Event(what, steps, seconds, generator.random(), way(generator)))
    return events


def way(generator: random.Random) -> tuple[str, ...]:
    """How to run on: what may change from one command to the next."""
    processes = generator.randint(1, 5)
    strategy = generator.choice(["ddp", "fsdp", *(["single"] if processes == 1 else [])])
    return (
        f"--processes={processes}",
        f"strategy={strategy}",
        f"training.micro_batch_size={generator.choice([4, 7, 16, 62])}",
        f"data.threads={generator.randint(0, 2)}",
        f"checkpoint.snapshot_every={generator.choice(['null', '1', '3'])}",
    )


def mixture(parts: dict[str, Path], steps: int) -> tuple[str, ...]:
    """Settings: three sources whose weights change after a sixth and a third of the steps, and odd
    batches.
    """
    weights = [
        {"a": 0.5, "b": 0.3, "c": 0.2},
        {"a": 0.1, "b": 0.2, "c": 0.7},
        {"a": 1, "b": 0, "c": 1},
    ]
    sources = [{"path": str(parts[name]), "weight": weight} for name, weight in weights[0].items()]
    changes = [{"step": steps * i // 6, "weights": weights[i]} for i in (1, 2)]
    return (
        *(
            "data.path=null",
            f"data.sources={json.dumps(sources)}",
            f"data.weights={json.dumps(changes)}",
        ),
        *(f"training.steps={steps}", "training.global_batch_size=62", "checkpoint.every=2"),
    )


@pytest.mark.parametrize(
    ("seed", "steps", "pace", "each"),
    [
        pytest.param(*(1, 24, 0.1, {"worker": 2, "kill": 1, "stop": 1}), marks=LONG),
        pytest.param(2, 300, 0.1, {"worker": 20, "kill": 15, "stop": 15}, marks=LONG),
    ],
)
def test_random_events(
    start: Start,
    samestep: Samestep,
    experiment_file: str,
    parts: dict[str, Path],
    tmp_path: Path,
    seed: int,
    steps: int,
    pace: float,
    each: dict[str, int],
) -> None:
    """Workers and runs that are killed or stopped at any moment, and go on with other numbers of
    everything.
    """
    settings = mixture(parts, steps)
    paced = f"objective={{kind: tests.chaos.paced, seconds: {pace}}}"
    run = Run(tmp_path / "run", experiment_file, (*settings, paced, "--elastic=1"), start)
    process, last = run.train(*way(random.Random(seed))), time.time()
    for event in draw(seed, [what for what, times in each.items() for _ in range(times)]):
        wait_for_steps(run, process, event.steps, last)
        time.sleep(event.seconds)
        process = happen(event, run, process)
        last = time.time()
    result = process.wait(3600)
    assert result.code == 0, result.err

    alone = (
        "strategy=single",
        "training.micro_batch_size=62",
        "checkpoint.every=1000",
        "data.threads=0",
    )
    assert (
        samestep("train", experiment_file, f"output={tmp_path / 'alone'}", *settings, *alone).code
        == 0
    )
    assert_same_run(samestep, run.folder, tmp_path / "alone")


def happen(event: Event, run: Run, process: Process) -> Process:
    """Returns the command that the run goes on by."""
    assert process.popen.poll() is None, process.stderr.read_text()
    if event.what == "worker":
        workers = process.workers
        os.kill(workers[int(event.victim * len(workers))], signal.SIGKILL)
        return process
    if event.what == "kill":
        kill(process)
    else:
        process.popen.terminate()
        result = process.wait(PATIENCE)
        assert result.code == 75 or (result.code == -signal.SIGTERM and not event.steps), result.err
    return run.train(*event.way)


def wait_for_steps(run: Run, process: Process, steps: int, event: float) -> None:
    """Returns when a run has started again since an event (at a time in seconds since 1970) and
    taken so many steps.
    """
    for _ in moments(process):
        starts, rows = (
            [row["time"] for row in read_rows(run.folder / name)]
            for name in ("starts.jsonl", "metrics.jsonl")
        )
        if not steps or (
            max(starts, default=0) > event and sum(time > starts[-1] for time in rows) >= steps
        ):
            return


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_cycles(start: Start, samestep: Samestep, experiment_file: str, tmp_path: Path) -> None:
    """One process after another of an elastic run is killed.

    The agent's ports of one round do not outlive it.
    """
    victims = (*["worker"] * 8, "agent", "server") * 10
    settings = (
        f"training.steps={6 * len(victims) + 20}",
        "checkpoint.every=2",
        "checkpoint.snapshot_every=1",
    )
    run = Run(tmp_path / "run", experiment_file, (*settings, "--elastic=1", "--processes=2"), start)
    process, last, ports = run.train(), time.time(), set()
    for victim in victims:
        wait_for_steps(run, process, 3, last)
        agent, (server,) = process.popen.pid, children(process.popen.pid)
        ports.add(listening_ports(agent))
        os.kill(
            {"worker": process.workers[0], "agent": agent, "server": server}[victim], signal.SIGKILL
        )
        if victim != "worker":
            process.wait(PATIENCE)
            process = run.train()
        last = time.time()
    result = process.wait(3600)
    assert result.code == 0, result.err
    assert len(ports) == 1, f"numbers of ports that an agent listened on: {ports}"
    assert samestep("ledger", "verify", run.folder).code == 0


def listening_ports(pid: int) -> int:
    """How many TCP ports a process listens on."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    opened = {
        os.path.realpath(descriptor).rpartition("/")[2]
        for descriptor in Path(f"/proc/{pid}/fd").iterdir()
    }
    return len(opened & listening)
