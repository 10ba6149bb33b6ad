"""Gathering what a task's scores are computed from, over the batches and replicas of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.examples import TaskRow
from trainer.objectives import Predictions

_COLUMNS = ("source", "document", "begin", "column", "length", "examples")


class Gatherer:
    """Keeps a replica's outputs where they were computed, and puts those of all replicas in order at the end.

    Args:
        examples: of the split.
    """

    def __init__(self, examples: int) -> None:
        self._examples = examples
        self._outputs: list[Tensor] = []
        self._batches: list[Mapping[str, Tensor]] = []

    def add(self, batch: Mapping[str, Tensor], outputs: Tensor) -> None:
        """Adds a micro-batch: its host columns, and its outputs [B, ...]; does not wait for the device."""
        self._batches.append({name: batch[name] for name in ("number", "digest", *_COLUMNS)})
        self._outputs.append(outputs)

    def predictions(
        self,
        rows_on_host: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        all_reduce: Callable[[Tensor], Tensor],
        rows: Sequence[Sequence[TaskRow]],
        labels: tuple[str, ...],
    ) -> Predictions:
        """What all replicas have added, which call this together: each example is of one of them.

        Args:
            rows_on_host: brings this replica's rows of outputs to the host.
            all_reduce: sums a tensor over the replicas.
            rows: of each source of the split.
            labels: the names of classes or tags.
        """
        host = {
            name: torch.cat([batch[name] for batch in self._batches]) for name in self._batches[0]
        }
        fed = (host["number"] >= 0) & (host["digest"] != 0)
        # Rows are as wide as their batch's longest, in batches of all replicas alike.
        found = rows_on_host(self._outputs)
        widest = max(outputs.shape[1] for outputs in found)
        shapes = [(*[0, 0] * (outputs.ndim - 2), 0, widest - outputs.shape[1]) for outputs in found]
        padded = [F.pad(outputs, shape) for outputs, shape in zip(found, shapes, strict=True)]
        at, mine = host["number"][fed], torch.cat(padded).float()[fed]
        outputs = torch.zeros(self._examples, *mine.shape[1:])
        outputs[at] = mine
        columns = torch.zeros(self._examples, 1 + len(_COLUMNS), dtype=torch.float64)
        seen = torch.ones(len(at))
        columns[at] = torch.stack(
            [each.double() for each in (seen, *(host[name][fed] for name in _COLUMNS))], dim=1
        )
        outputs, columns = all_reduce(outputs).cpu(), all_reduce(columns).cpu()
        table = columns[columns[:, 0] > 0, 1:].long().numpy()
        outputs = outputs[columns[:, 0] > 0]
        first = np.cumsum([0, *map(len, rows[:-1])])
        table[:, 1] += first[table[:, 0]]
        # Of an evaluation of some batches only, the rows that it has met, with all that became of them.
        whole = np.bincount(table[:, 1])[table[:, 1]] == table[:, 5]
        _, document, begin, column, length, _ = table[whole].T
        met, document = np.unique(document, return_inverse=True)
        every = [row for each in rows for row in each]
        return Predictions(
            outputs=outputs.numpy()[whole],
            document=document,
            begin=begin,
            column=column,
            length=length,
            rows=[every[number] for number in met.tolist()],
            number=met,
            labels=labels,
        )
