"""Going on after a death: from the kill of one of several workers to the next step.

    python -m benchmarks.recovery

A run trains BERT with AdamW, and loses a worker to SIGKILL again and again: under `--elastic` from
memory and from the local disk, under torchrun from the disk, and as replicas of torchft if that is
installed (`benchmarks.torchft_replicas`). The figures come from the times in its metrics.jsonl.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.dataset import write_dataset
from benchmarks.pairing import Comparison, arguments, publish
from benchmarks.step import SHAPES, bert
from trainer.monitoring.jsonl import read_rows

NEVER = 1_000_000


@dataclass(frozen=True)
class Way:
    """How a run is kept, and by whom it is started again.

    Attributes:
        every: steps between snapshots or checkpoints; None: the number of the command line.
        checkpoint: settings of the run, with {every}.
        starter: `elastic`, `torchrun` or `torchft`.
    """

    every: int | None
    checkpoint: str
    starter: str = "elastic"


WAYS = {
    "memory, each step": Way(1, f"snapshot_every: {{every}}, every: {NEVER}"),
    "memory": Way(None, f"snapshot_every: {{every}}, every: {NEVER}"),
    "disk": Way(None, "every: {every}"),
    "disk, torchrun": Way(None, "every: {every}", "torchrun"),
    "torchft": Way(1, "", "torchft"),
}
_PATIENCE_SECONDS = 300
_WINDOW_SECONDS = 30.0  # after a kill, in which also a replica of torchft is back

Row: TypeAlias = dict[str, Any]


@dataclass
class Recoveries:
    """What the deaths of one run came to.

    Attributes:
        seconds: from each kill to the next step, which is the one after the longest pause.
        lost: seconds of training that each took within `_WINDOW_SECONDS`, whatever they went into.
        redone: steps that were taken again after each.
        stalls: seconds that each snapshot or checkpoint held training up; the first before each
            kill left out, as the run's first reserves memory.
        paces: seconds of a step before each kill.
    """

    seconds: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    redone: list[int] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)


def recover(
    folder: Path, model: str, processes: int, way: Way, every: int, kills: int
) -> Recoveries:
    """Trains, and kills a worker `kills` times, right after a step and with a new checkpoint."""
    found, every = Recoveries(), way.every or every
    with tempfile.TemporaryDirectory(dir=folder) as output:
        metrics = Path(output) / "metrics.jsonl"
        with _training(folder, Path(output), model, processes, way, every) as pid:
            began = 0.0
            for _ in range(kills):
                rows = _follow(metrics, began, lambda rows: len(rows) > 2 * every + every // 2 + 5)
                found.stalls += stalls(rows, every)
                _kill_last_worker(pid)
                killed, last = time.time(), rows[-1]["step"]
                seen = _follow(metrics, killed, partial(_is_over, killed + _WINDOW_SECONDS))
                pauses = [
                    now["time"] - before["time"] for before, now in pairwise([rows[-1], *seen])
                ]
                first = seen[pauses.index(max(pauses))]
                found.seconds.append(first["time"] - killed)
                found.redone.append(max(0, last + 1 - first["step"]))
                pace = statistics.median(b["time"] - a["time"] for a, b in pairwise(rows))
                found.paces.append(pace)
                new = len({row["step"] for row in seen if row["step"] > last})
                found.lost.append(max(0.0, seen[-1]["time"] - killed - new * pace))
                began = seen[-1]["time"]
    return found


def _kill_last_worker(pid: int) -> None:
    """Kills the last process that trains: a child of the command, or of its fork server."""
    workers = _children(pid)
    while len(workers) == 1:
        workers = _children(workers[0])
    os.kill(workers[-1], signal.SIGKILL)


@contextmanager
def _training(
    folder: Path, output: Path, model: str, processes: int, way: Way, every: int
) -> Iterator[int]:
    """A run that goes on in the process whose number this is, and ends with the block."""
    file = folder / "experiment.yaml"
    file.write_text(f"""
accelerator: cpu
data: {{path: {folder}, sequence_length: 32}}
model: {bert(model)}
objective: {{kind: mlm}}
optimizer: {{kind: adamw, lr: 1e-4}}
training: {{steps: {NEVER}, global_batch_size: {processes}, micro_batch_size: 1, log_every: 1}}
checkpoint: {{{way.checkpoint.format(every=every)}}}
""")
    ours = ["samestep.cli", "train", str(file), f"output={output}"]
    commands = {
        "elastic": [*ours, "--elastic", "1", "--processes", str(processes)],
        "torchrun": [
            *("torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"),
            *("--max-restarts=1000", "-m", *ours),
        ],
        "torchft": ["benchmarks.torchft_replicas", model, str(output), str(processes)],
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *commands[way.starter]]
    messages = subprocess.DEVNULL if way.starter == "torchft" else None  # it writes some each step
    with subprocess.Popen(
        command, env=environment, start_new_session=True, stderr=messages
    ) as process:
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _follow(metrics: Path, since: float, is_over: Callable[[list[Row]], bool]) -> list[Row]:
    """The rows of steps that ended after `since`, those included that the run removes again."""
    found: dict[float, Row] = {}
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for row in read_rows(metrics) if metrics.exists() else []:
            if row["time"] > since:
                found[row["time"]] = row
        rows = [found[when] for when in sorted(found)]
        if is_over(rows):
            return rows
        time.sleep(0.02)
    raise TimeoutError(f"the run did not get on within {_PATIENCE_SECONDS} s; see its messages")


def _is_over(end: float, _: list[Row]) -> bool:
    return time.time() > end


def stalls(rows: Sequence[Row], every: int) -> list[float]:
    """Seconds of the saves in these rows, but for the first.

    What follows step n is in the row of step n + 1.
    """
    found = [
        (now["time"] - before["time"]) * (now["time/checkpoint"] + now.get("time/snapshot", 0.0))
        for before, now in pairwise(rows)
        if before["step"] % every == 0 and "time/checkpoint" in now
    ]
    return found[1:]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def main(given: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--model", choices=SHAPES, default="base", help="which BERT (default: base)"
    )
    parser.add_argument("--processes", type=int, default=4, help="workers (default: 4)")
    parser.add_argument(
        "--every",
        type=int,
        default=5,
        help="steps between snapshots, or checkpoints; 3 or more (default: 5)",
    )
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=[*WAYS], help="(default: all)")
    args = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder))
        runs = {
            name: recover(Path(folder), args.model, args.processes, way, args.every, args.repeats)
            for name, way in WAYS.items()
            if name in args.ways and (way.starter != "torchft" or find_spec("torchft"))
        }
    title = f"Recovery of BERT-{args.model} from the death of one of {args.processes} workers"
    rates = {name: [1 / seconds for seconds in run.seconds] for name, run in runs.items()}
    compared = Comparison(title, "recoveries", "wall", rates)
    for name, run in runs.items():
        compared.notes[name] = (
            f"steps of {statistics.median(run.paces):.2f} s, "
            f"next step after {statistics.median(run.seconds):.2f} s, "
            f"{statistics.median(run.lost):.1f} s lost of {_WINDOW_SECONDS:.0f}, "
            f"steps redone: {', '.join(map(str, run.redone))}"
        )
        if run.stalls:
            compared.notes[name] += f"; {statistics.median(run.stalls):.3f} s a save"
    publish([compared], args.json)


if __name__ == "__main__":
    main()
