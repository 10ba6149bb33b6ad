"""Digests of what steps compute, in RUN/digests.jsonl, for `samestep diff`.

Every `training.digest_every` steps a row has the digests of one step, in the order in which it
computes them:

    batch      rows of the examples
    loss       of the global batch
    gradients  by parameter, before clipping
    state      by tensor: weights and optimizer state after the update

and `norms`: the norms of the gradient in the steps up to this one, since the row before it or the
last restart. Norms cost nothing, so they are of all steps.

A digest is the same however a tensor is partitioned. In bitwise runs, rows are the same at any
world size, and the state is chained into the ledger. In other runs, rows are the same if everything
is repeated with the same layout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from samestep.hashing import hexadecimal
from trainer.monitoring.jsonl import JsonlTracker
from trainer.partition import state_like
from trainer.partition.digest import digests
from trainer.strategies import Strategy
from trainer.training.ledger import Ledger
from trainer.training.observers import Observer
from trainer.training.observers.settings import DIGESTS
from trainer.training.passes import Gradients, MicroBatches, loss_and_norm
from trainer.training.recorder import over_replicas

Row: TypeAlias = dict[str, Any]


class Digests(Observer):
    """Computes the rows of a run. Collective; all ranks do so alike.

    Args:
        every: steps between two rows; None only cuts off rows of an earlier start.
        ledger: gets the digest of the state, in bitwise runs.
        state: returns the state by name.

    Attributes:
        row: the last row, without step and time.
    """

    def __init__(
        self,
        strategy: Strategy,
        every: int | None,
        ledger: Ledger,
        state: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._strategy, self._every, self._ledger, self._state = strategy, every, ledger, state
        self._file: JsonlTracker | None = None
        self._gradients: dict[str, str] = {}
        self._norms: list[Tensor] = []  # on the device, of the steps since the last row
        self.row: Row = {}

    def open(self, folder: Path | None, step: int) -> None:
        """Opens the file, without rows after `step`."""
        self.close()
        self._norms.clear()
        if folder is not None and (self._every is not None or (folder / DIGESTS).exists()):
            self._file = JsonlTracker(folder / DIGESTS, resume_step=step)

    def before_clipping(self, step: int) -> None:
        """Takes the digests of the gradients of a step, if it has a row."""
        if not self._is_due(step):
            return
        gradients = {
            name: state_like(parameter.grad, parameter)
            for name, parameter in self._strategy.parameters.items()
            if parameter.grad is not None
        }
        self._gradients = digests(gradients)

    def after_update(self, step: int, micro_batches: MicroBatches, gradients: Gradients) -> None:
        """Writes the row of a step, if it has one."""
        if self._every is None:
            return
        self._norms.append(gradients.norm.detach().double())
        if not self._is_due(step):
            return
        own = sum(int(batch["digest"].sum()) for batch in micro_batches)
        (batch,) = over_replicas(self._strategy, own)
        loss, _ = loss_and_norm(gradients, self._strategy)
        tensors = digests(self._state())
        self.row = {
            "batch": hexadecimal(batch),
            "loss": loss,
            "norms": torch.stack(self._norms).tolist(),
            "gradients": self._gradients,
            "state": tensors,
        }
        self._norms.clear()
        if self._strategy.exact:
            text = json.dumps(tensors, sort_keys=True)
            self._ledger.add_state(step, hashlib.sha256(text.encode()).hexdigest())
        if self._file is not None:
            self._file.log(step, self.row)

    def _is_due(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def digests_of(observers: Iterable[Observer]) -> Digests:
    """The digests among the observers of a run that has `training.digest_every`."""
    return next(each for each in observers if isinstance(each, Digests))
