"""What is predicted and how it is scored: each module defines one objective, its `Config` and its `collate`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from trainer.examples import Batch, Examples, PackSpec, TaskRow, Vocabulary
from trainer.models import Outputs


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch.

    Attributes:
        total: scalar to call `backward` on; over all micro-batches and replicas of a step these add up to the loss.
        metrics: detached (sum, weight) scalars by name; a mean is the sum of sums over the sum of weights. One of them
            is `loss`.
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


class Objective(ABC):
    """Turns packed examples into a batch, and a model's outputs on it into a loss.

    Means are taken over the whole step, never over a micro-batch, because micro-batches hold
    different numbers of predictions: `weights` gives the denominator of each loss term before the
    forward pass, the caller sums it over micro-batches and replicas, and `loss` divides by those
    totals.

    Attributes:
        predicts: the model output that holds the logits; see `trainer.models.Outputs`.
        needs: what the model has to offer: outputs, and capabilities such as `last_position`.
        columns: columns of its batches that a model may list in `reads`.
    """

    predicts: str
    needs: Outputs
    columns: frozenset[str] = frozenset()

    @abstractmethod
    def pack_spec(self, sequence_length: int) -> PackSpec:
        """The positions of an example that must be left to the objective's special tokens."""

    @abstractmethod
    def predictions(self, sequence_length: int) -> int:
        """P, the number of positions of an example whose logits are computed."""

    @abstractmethod
    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Makes the arrays of a batch; each row depends on that row's tokens and key alone."""

    @abstractmethod
    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """What this micro-batch, in host memory, adds to the denominator of each loss term."""

    @abstractmethod
    def loss(
        self, model: nn.Module, batch: Mapping[str, Tensor], totals: Mapping[str, Tensor]
    ) -> Loss:
        """Runs the model on a micro-batch and scores it; never waits for the device."""


class Task(Objective):
    """An objective whose scores are no means over examples: F1 or a correlation, for example."""

    @property
    @abstractmethod
    def score_names(self) -> tuple[str, ...]:
        """Names of its scores."""

    @abstractmethod
    def scores(self, predictions: Predictions) -> dict[str, float]:
        """The scores of a split, by name; shares are in [0, 1]."""

    @abstractmethod
    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, Any]]:
        """Label and prediction of each of `predictions.rows`, in order, as values for JSON."""


class Taught(Objective):
    """An objective that also runs a trained model, the teacher."""

    @abstractmethod
    def attach(self, teacher: nn.Module) -> None:
        """Takes the teacher, in eval mode and without gradients; only `loss` needs it."""


class ObjectiveConfig(ABC):
    """The settings of an objective: what each module of this package has as `Config`.

    What is a property here has the value that most objectives have; some make a setting of it.
    """

    @property
    def teacher_path(self) -> str | None:
        """Path of a trained model that the objective learns from."""
        return None

    @property
    def task(self) -> ObjectiveConfig:
        """The objective that makes the batches: this one, or the one that a distillation wraps."""
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """What the held-out split is scored with, besides the loss."""
        return ()

    @property
    def writes_text(self) -> bool:
        """Whether it trains a model to write a text for each source."""
        return False

    @property
    def target_length(self) -> int | None:
        """The most tokens of a target, where there are targets and their length is a setting."""
        return None

    @property
    def reads_probabilities(self) -> bool:
        """Whether rows may be labeled with a probability for each class."""
        return False

    @property
    def compares_hidden(self) -> bool:
        """Whether hidden states are compared with the teacher's."""
        return False

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        """Settings, as key=value, with which it would do without `missing` and need an offer."""
        return ()

    @abstractmethod
    def build(self, vocabulary: Vocabulary) -> Objective:
        """Makes the objective for a tokenizer.

        Raises:
            ConfigError: the vocabulary lacks a token that the objective needs.
        """
