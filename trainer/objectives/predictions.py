"""Gathers a task's predictions over the batches and replicas of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.examples import TaskRow
from trainer.objectives import Predictions, Tensors
from trainer.objectives.rows import Int64

_COLUMNS = ("source", "document", "begin", "column", "length", "examples")


class Gatherer:
    """Keeps a replica's outputs on its device, and sorts all replicas' at the end.

    Args:
        examples: number of examples of the split.
    """

    def __init__(self, examples: int) -> None:
        self._examples = examples
        self._outputs: list[Tensor] = []
        self._batches: list[Mapping[str, Tensor]] = []

    def add(self, batch: Tensors, outputs: Tensor) -> None:
        """Adds a micro-batch: its host columns and its outputs [B, ...]; no wait for the device."""
        self._batches.append({name: batch[name] for name in ("number", "digest", *_COLUMNS)})
        self._outputs.append(outputs)

    def predictions(
        self,
        rows_on_host: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        all_reduce: Callable[[Tensor], Tensor],
        rows: Sequence[Sequence[TaskRow]],
        labels: tuple[str, ...],
    ) -> Predictions:
        """Predictions of all replicas, which call this together.

        Args:
            rows_on_host: copies this replica's rows of outputs to the host.
            all_reduce: sums a tensor over the replicas.
            rows: of each source of the split.
            labels: names of classes or tags.
        """
        # Each example is on one replica. So every replica fills a table of the whole split with its
        # own examples, zeros elsewhere, and the sum of the tables is complete. Example: of 4
        # examples, replica 0 has 0 and 2, replica 1 has 1; [a 0 c 0] + [0 b 0 0] = [a b c 0].
        names = self._batches[0].keys()
        host = {name: torch.cat([batch[name] for batch in self._batches]) for name in names}
        # Without rows that only pad a batch.
        real = (host["number"] >= 0) & (host["digest"] != 0)
        number = host["number"][real]

        # Batches are as wide as their longest row, on all replicas alike.
        found = rows_on_host(self._outputs)
        widest = max(outputs.shape[1] for outputs in found)
        # `F.pad` counts dimensions from the last one; the second is padded at its end.
        before = (0, 0) * (found[0].ndim - 2)
        padded = [F.pad(each, (*before, 0, widest - each.shape[1])) for each in found]
        own = torch.cat(padded).float()[real]
        outputs = torch.zeros(self._examples, *own.shape[1:])
        outputs[number] = own
        outputs = all_reduce(outputs).cpu()
        # The first column counts the replicas that have the example: 1, or 0 if it was not scored.
        columns = torch.zeros(self._examples, 1 + len(_COLUMNS), dtype=torch.float64)
        columns[number, 0] = 1
        for slot, name in enumerate(_COLUMNS, start=1):
            columns[number, slot] = host[name][real].double()
        columns = all_reduce(columns).cpu()

        is_scored = columns[:, 0] > 0
        scored: Int64 = columns[is_scored, 1:].long().numpy()
        source, row, begin, column, length, examples = scored.T
        first_row: Int64 = np.cumsum([0, *map(len, rows[:-1])])
        document = row + first_row[source]  # counted through all sources
        # A partial evaluation keeps the rows of which it has scored every example.
        is_whole = np.bincount(document)[document] == examples
        numbers, index = np.unique(document[is_whole], return_inverse=True)
        all_rows = [row for of_source in rows for row in of_source]
        return Predictions(
            outputs=outputs[is_scored].numpy()[is_whole],
            document=index,
            begin=begin[is_whole],
            column=column[is_whole],
            length=length[is_whole],
            rows=[all_rows[number] for number in numbers.tolist()],
            number=numbers,
            labels=labels,
        )
