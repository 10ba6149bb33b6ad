"""Going on after a death: from the kill of one of several workers to the next step done, from
memory and from disk.

    python -m benchmarks.recovery

An elastic run trains a model with AdamW under FSDP2, takes a snapshot, or else saves a checkpoint,
every few steps, and loses a worker to SIGKILL again and again. The figures are read from what it
writes to metrics.jsonl.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.dataset import write_dataset
from benchmarks.pairing import Comparison, arguments, publish
from benchmarks.step import SHAPES, bert
from trainer.monitoring.jsonl import read_rows

WAYS = {"memory": "snapshot_every: {every}, every: 1000000", "disk": "every: {every}"}
_PATIENCE_SECONDS = 300

Row: TypeAlias = dict[str, Any]


@dataclass
class Recoveries:
    """What the deaths of one run came to.

    Attributes:
        seconds: from each kill to the next step done.
        redone: steps that were taken again after each.
        stalls: seconds that each snapshot or checkpoint held training up; the first, which takes
            memory, left out.
    """

    seconds: list[float] = field(default_factory=list)
    redone: list[int] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)


def recover(
    folder: Path, model: str, processes: int, way: str, every: int, kills: int
) -> Recoveries:
    """Trains and kills so many times, each time when there is something new to go on from."""
    found = Recoveries()
    with tempfile.TemporaryDirectory(dir=folder) as output:
        metrics = Path(output) / "metrics.jsonl"
        steps = 3 * every * (kills + 1)  # more than are needed
        with _training(
            folder, Path(output), model, processes, steps, WAYS[way].format(every=every)
        ) as pid:
            reached = 0
            for _ in range(kills):
                last = reached + 2 * every + every // 2
                rows = _rows_until(metrics, last)
                found.stalls += stalls(rows, reached, every)
                killed = time.time()
                os.kill(_children(_children(pid)[0])[-1], signal.SIGKILL)
                first = _rows_until(metrics, 0, last, killed)[-1]
                found.seconds.append(first["time"] - killed)
                found.redone.append(last + 1 - first["step"])
                reached = first["step"]
    return found


@contextmanager
def _training(
    folder: Path, output: Path, model: str, processes: int, steps: int, checkpoint: str
) -> Iterator[int]:
    """A run that goes on in the process whose number this is, and ends with the block."""
    file = folder / "experiment.yaml"
    file.write_text(f"""
accelerator: cpu
data: {{path: {folder}, sequence_length: 32}}
model: {bert(model)}
objective: {{kind: mlm}}
optimizer: {{kind: adamw, lr: 1e-4}}
training: {{steps: {steps}, global_batch_size: {processes}, micro_batch_size: 1, log_every: 1}}
checkpoint: {{{checkpoint}}}
""")
    command = [
        sys.executable,
        "-m",
        "trainer.cli",
        "train",
        str(file),
        f"output={output}",
        "--elastic",
        "1",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "--processes", str(processes)], env=environment) as process:
        try:
            yield process.pid
        finally:
            process.kill()  # with which its workers end, too


def _rows_until(metrics: Path, step: int, most: float = math.inf, since: float = 0.0) -> list[Row]:
    """The rows up to the first of a step from `step` to `most` that ended after `since`, once it is
    there.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        rows = list(read_rows(metrics)) if metrics.exists() else []
        for number, row in enumerate(rows):
            if step <= row["step"] <= most and row["time"] > since:
                return rows[: number + 1]
        time.sleep(0.02)
    raise TimeoutError(f"the run did not get on within {_PATIENCE_SECONDS} s; see its messages")


def stalls(rows: Sequence[Row], reached: int, every: int) -> list[float]:
    """Seconds of the saves since a step, but for the first.

    What follows step n is in the row of step n + 1.
    """
    found = [
        (now["time"] - before["time"]) * now["time/checkpoint"]
        for before, now in pairwise(rows)
        if before["step"] > reached and before["step"] % every == 0
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
    args = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder))
        runs = {
            way: recover(Path(folder), args.model, args.processes, way, args.every, args.repeats)
            for way in WAYS
        }
    title = f"Recovery of BERT-{args.model} from the death of one of {args.processes} workers"
    compared = Comparison(
        title,
        "recoveries",
        "wall",
        {way: [1 / s for s in run.seconds] for way, run in runs.items()},
    )
    for way, run in runs.items():
        compared.notes[way] = (
            f"{1 / compared.rate(way):.2f} s each, {max(run.redone)} of at most {args.every} steps "
            "redone, "
            f"{statistics.median(run.stalls):.3f} s a save"
        )
    publish([compared], args.json)


if __name__ == "__main__":
    main()
