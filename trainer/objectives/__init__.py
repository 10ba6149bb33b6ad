"""What is predicted and how it is scored: each module defines one objective, its `Config` and its `collate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from trainer.examples import Batch, Examples, PackSpec, TaskRow


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch.

    Attributes:
        total: scalar to call `backward` on; over all micro-batches and replicas of a step these add up to the loss.
        metrics: detached (sum, weight) scalars by name; a mean is the sum of sums over the sum of weights.
        outputs: float [B, ...], detached: what the scores of a `Task` are computed from; None for other objectives.
    """

    total: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]
    outputs: Tensor | None = None


@dataclass(frozen=True)
class Predictions:
    """What a model gave for all examples of a split, N of them, in order.

    Attributes:
        outputs: float32 [N, ...], `Loss.outputs`.
        document: int64 [N], the row of each example, an index of `rows`.
        begin, column, length: int64 [N], of each example's last piece: its first token, counted through the row's
            texts, the cell where that stands, and how many tokens it has.
        rows: of the split, R of them; of an evaluation of some batches only, those that it has met.
        number: int64 [R], of each row in its split, from 0; of a mixture's, through all datasets in their order.
        labels: the names of classes or tags.
    """

    outputs: npt.NDArray[np.float32]
    document: npt.NDArray[np.int64]
    begin: npt.NDArray[np.int64]
    column: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    rows: Sequence[TaskRow]
    number: npt.NDArray[np.int64]
    labels: tuple[str, ...]


class Objective(Protocol):
    """Turns packed examples into a batch, and a model's outputs on it into a loss.

    Means are taken over the whole step, never over a micro-batch, because micro-batches hold different numbers of
    predictions: `weights` gives the denominator of each loss term before the forward pass, the caller sums it over
    micro-batches and replicas, and `loss` divides by those totals.
    """

    @property
    def model_settings(self) -> Mapping[str, bool | str]:
        """Settings that the model must have, as {"nsp": True}, or {"head": "classification"}."""
        ...

    def pack_spec(self, sequence_length: int) -> PackSpec:
        """The cells of an example that must be left to the objective's special tokens."""
        ...

    def predictions(self, sequence_length: int) -> int:
        """The cells of an example whose logits are computed, P."""
        ...

    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Makes the arrays of a batch; each row is a function of that row's tokens and key alone."""
        ...

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """The denominator that this micro-batch adds to each loss term; `batch` is in host memory."""
        ...

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]) -> Loss:
        """Runs the model on a micro-batch and scores it; never waits for the device."""
        ...


class Task(Objective, Protocol):
    """An objective whose scores are no means over examples, as F1 or a correlation, but computed from all of them."""

    @property
    def score_names(self) -> tuple[str, ...]:
        """The names of its scores."""
        ...

    def scores(self, predictions: Predictions) -> dict[str, float]:
        """The scores of a split, by name; what is a share is in [0, 1]."""
        ...

    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """What is right and what is predicted of each of `predictions.rows`, in their order, as values for JSON."""
        ...


class Taught(Objective, Protocol):
    """An objective that asks a trained model, the teacher, besides: one whose settings name a `teacher`."""

    def attach(self, teacher: nn.Module) -> None:
        """Takes the teacher, in eval mode and without gradients; `loss` needs it, and nothing else does."""
        ...


def teacher_of(config: Any) -> str | None:
    """What the settings of an objective name as its teacher, if it has one."""
    name: str | None = getattr(config, "teacher", None)
    return name


def task_of(config: Any) -> Any:
    """The settings of an objective, or of the one that it is put around, as a distillation."""
    return getattr(config, "of", config)
