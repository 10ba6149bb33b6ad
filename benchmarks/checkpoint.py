"""What checkpoints cost training.

The stall of a save in the background beside one in place, and the steps meanwhile.

    python -m benchmarks.checkpoint

Two processes train a model with AdamW under DDP and save now and then, once in the background and
once in place; the figures are read from what the runs write to metrics.jsonl. The first save of a
run, which takes its memory for the first time, is told apart from those after it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.dataset import write_dataset
from benchmarks.pairing import Comparison, arguments, publish
from benchmarks.step import SHAPES, bert
from trainer.monitoring.jsonl import read_rows

_EVERY = 4  # steps between saves: the write is over by the step before the next


@dataclass(frozen=True)
class Run:
    """What a run took, in seconds.

    Attributes:
        stalls: of each save.
        beside: of the step after each save.
        alone: of the step before each save.
    """

    stalls: list[float]
    beside: list[float]
    alone: list[float]

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]], saves: int) -> Run:
        """Reads the rows of all steps; what follows step n is in the row of step n + 1."""
        seconds = {now["step"]: now["time"] - before["time"] for before, now in pairwise(rows)}
        stall = {
            row["step"]: row.get("time/checkpoint", 0.0) * seconds.get(row["step"], 0.0)
            for row in rows
        }
        at = [_EVERY * (number + 1) for number in range(saves)]
        return cls(
            [stall[step + 1] for step in at],
            [seconds[step + 1] - stall[step + 1] for step in at],
            [seconds[step] - stall[step] for step in at],
        )


def train(folder: Path, model: str, batch: int, saves: int, asynchronous: bool) -> Run:
    """Trains from the beginning, with so many saves, and throws the checkpoints away."""
    file = folder / "experiment.yaml"
    file.write_text(f"""
accelerator: cpu
data: {{path: {folder}, sequence_length: 128}}
model: {bert(model)}
objective: {{kind: mlm}}
optimizer: {{kind: adamw, lr: 1e-4}}
training: {{steps: {_EVERY * saves + 1}, global_batch_size: {batch}, micro_batch_size: {batch}, log_every: 1}}
checkpoint: {{every: {_EVERY}, asynchronous: {str(asynchronous).lower()}}}
strategy: ddp
""")  # noqa: E501
    with tempfile.TemporaryDirectory(dir=folder) as output:
        command = [
            sys.executable,
            "-m",
            "samestep.cli",
            "train",
            str(file),
            f"output={output}",
            "--processes",
            "2",
        ]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return Run.of(list(read_rows(Path(output) / "metrics.jsonl")), saves)


def compare(runs: dict[str, Run]) -> list[Comparison]:
    """The stalls of both ways of saving, first saves apart.

    And steps beside a save in the background and alone.
    """
    background, _ = runs.values()
    kinds = {
        "The stall of the first save": slice(0, 1),
        "The stall of each further save": slice(1, None),
    }
    found = []
    for title, which in kinds.items():
        rates = {name: [1 / stall for stall in run.stalls[which]] for name, run in runs.items()}
        found.append(_explained(Comparison(title, "saves", "wall", rates)))
    steps = {"beside a save": background.beside[1:], "alone": background.alone[1:]}
    rates = {name: [1 / seconds for seconds in taken] for name, taken in steps.items()}
    return [
        *found,
        _explained(
            Comparison("Steps while a save goes on in the background", "steps", "wall", rates)
        ),
    ]


def _explained(compared: Comparison) -> Comparison:
    compared.notes.update(
        {name: f"{1 / compared.rate(name):.3g} s each" for name in compared.rates}
    )
    return compared


def main(given: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--model", choices=SHAPES, default="base", help="which BERT (default: base)"
    )
    parser.add_argument("--batch", type=int, default=4, help="examples of a step (default: 4)")
    args = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder))
        ways = {"in the background": True, "in place": False}
        runs = {
            name: train(Path(folder), args.model, args.batch, 1 + args.repeats, way)
            for name, way in ways.items()
        }
    publish(compare(runs), args.json)


if __name__ == "__main__":
    main()
