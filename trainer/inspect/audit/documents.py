"""`samestep ledger step`: the documents that a step saw."""

from __future__ import annotations

from typing import TypedDict

import numpy as np
from rich.console import Console

from trainer.errors import ConfigError
from trainer.inspect.audit.batches import Run, columns
from trainer.training.ledger import Row

Example = TypedDict(
    "Example",
    {
        "number": int,
        "source": str,
        "pass": int,
        "example": int,
        "documents": list[dict[str, str | int]],
    },
)
"""An example: its global number, its source, the pass over that, its number there, its documents.
"""


class Seen(TypedDict):
    """The examples of a step in ascending order, and the number of the data order."""

    step: int
    order: int
    examples: list[Example]


def documents(run: Run, step: int) -> Seen:
    """What a step saw: its examples in the order of their numbers, each with its source files and
    lines.

    Raises:
        ConfigError: the ledger has no such step.
        DataError: the dataset is another one than the run's, or damaged.
    """
    order, row = _find(run, step)
    numbers = np.concatenate([np.arange(first, end) for first, end in row["examples"]])
    size = len(numbers) // (row["step"] - row["first_step"] + 1)
    numbers = numbers[(step - row["first_step"]) * size :][:size]
    first, end = int(numbers[0]), int(numbers[-1]) + 1
    with run.loader(order, first, end) as loader:
        parts = list(columns(loader, ("source", "epoch", "example"), end))
        every = (np.concatenate([part[name] for part in parts]) for name in parts[0])
        rows = zip(
            *(column[numbers - first].tolist() for column in every),
            loader.documents(numbers),
            strict=True,
        )
        examples: list[Example] = [
            {
                "number": number,
                "source": loader.sources[source][0],
                "pass": epoch + 1,
                "example": example,
                "documents": [{"file": file, "line": line} for file, line in dict.fromkeys(pieces)],
            }
            for number, source, epoch, example, pieces in rows
        ]
    return {"step": step, "order": row["order"], "examples": examples}


def _find(run: Run, step: int) -> tuple[Row, Row]:
    """The row of the data order that a step is of, and the row of the step."""
    order: Row = {}
    for row in run.rows:
        if row["kind"] == "order":
            order = row
        elif row["kind"] == "fed" and row["first_step"] <= step <= row["step"]:
            return order, row
    steps = [row for row in run.rows if row["kind"] == "fed"]
    known = f"steps {steps[0]['first_step']} to {steps[-1]['step']}" if steps else "no step"
    broken = (
        ""
        if len(run.rows) == run.lines
        else ", up to a line that has been changed (see samestep ledger verify)"
    )
    raise ConfigError(f"the ledger of {run.folder} has {known}{broken}, not step {step}")


def report(found: Seen, console: Console) -> None:
    """Prints a line for each example."""
    console.print(
        f"step {found['step']}: {len(found['examples'])} examples of data order {found['order']}"
    )
    several = len({example["source"] for example in found["examples"]}) > 1
    for example in found["examples"]:
        source = f" of {example['source']}" if several else ""
        documents = (
            ", ".join(f"{each['file']}:{each['line']}" for each in example["documents"])
            or "of a corrupt shard"
        )
        console.print(f"example {example['number']} (pass {example['pass']}{source}): {documents}")
