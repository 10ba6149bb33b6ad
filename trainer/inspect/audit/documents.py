"""`samestep ledger step`: the documents in the examples of a step."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from samestep.errors import ConfigError
from samestep.terminal import Console
from trainer.inspect.audit.batches import Place, Run, columns, places
from trainer.training.ledger import Row

Example = TypedDict(
    "Example",
    {"number": int, "source": str, "pass": int, "example": int, "documents": list[Place]},
)
"""Global number; name of the source; its epoch (from 1) and index in it; documents."""


class Seen(TypedDict):
    """The examples of a step in ascending order, and the number of their data order."""

    step: int
    order: int
    examples: list[Example]


def documents(run: Run, step: int) -> Seen:
    """Returns the examples of a step, each with the source files and lines of its documents.

    Raises:
        ConfigError: the ledger has no such step.
        DataError: the dataset is damaged, or not the run's.
    """
    order, row = _find(run, step)
    # All steps of a row have the same batch size. Of steps 4 to 6 with examples [[30, 60]], step 5
    # has the second ten of them: 40 to 49.
    numbers = np.concatenate([np.arange(first, end) for first, end in row["examples"]])
    size = len(numbers) // (row["step"] - row["first_step"] + 1)
    begin = (step - row["first_step"]) * size
    numbers = numbers[begin : begin + size]
    first, end = int(numbers[0]), int(numbers[-1]) + 1
    examples: list[Example] = []
    with run.loader(order, first, end) as loader:
        parts = list(columns(loader, ("source", "epoch", "example"), end))
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for number, texts in zip(numbers.tolist(), loader.documents(numbers), strict=True):
            source, epoch, example = (
                int(found[name][number - first]) for name in ("source", "epoch", "example")
            )
            examples.append(
                {
                    "number": number,
                    "source": loader.sources[source][0],
                    "pass": epoch + 1,
                    "example": example,
                    "documents": places(texts),
                }
            )
    return {"step": step, "order": row["order"], "examples": examples}


def _find(run: Run, step: int) -> tuple[Row, Row]:
    """Returns the row that begins a step's data order, and the row of the step."""
    order: Row = {}
    steps = []
    for row in run.rows:
        if row["kind"] == "order":
            order = row
        elif row["kind"] == "fed":
            if row["first_step"] <= step <= row["step"]:
                return order, row
            steps.append(row)
    known = f"steps {steps[0]['first_step']} to {steps[-1]['step']}" if steps else "no step"
    if len(run.rows) < run.lines:
        known += ", up to a line that was changed (see samestep ledger verify)"
    raise ConfigError(f"STEP is {step}, and the ledger of {run.folder} has {known}.")


def report(found: Seen, console: Console) -> None:
    """Prints a line per example."""
    examples = found["examples"]
    console.print(f"step {found['step']}: {len(examples)} examples of data order {found['order']}")
    several = len({example["source"] for example in examples}) > 1
    for example in examples:
        source = f" of {example['source']}" if several else ""
        listed = ", ".join(f"{each['file']}:{each['line']}" for each in example["documents"])
        listed = listed or "of a corrupt shard"
        console.print(f"example {example['number']} (pass {example['pass']}{source}): {listed}")
