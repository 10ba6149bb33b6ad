"""Training objectives: each module defines one, with its `Config` and its `collate`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from samestep.examples import Batch, Examples, PackSpec, TaskRow, Vocabulary
from trainer.models import Outputs

if TYPE_CHECKING:
    from trainer.metrics.per_class import ClassReport

Tensors: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch.

    Attributes:
        total: scalar to call `backward` on; over all micro-batches and replicas of a step these add
            up to the loss.
        metrics: detached (sum, weight) scalars by name, one of them `loss`. A mean is the sum of
            sums over the sum of weights; of several steps see `Objective.loss_of`.
        outputs: float [B, ...], detached, from which the scores of a `Task` are computed; None for
            other objectives.
    """

    total: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]
    outputs: Tensor | None = None


@dataclass(frozen=True)
class Predictions:
    """A model's outputs on the N examples of a split, in order.

    A row of a task may become several examples: the windows of a long text.

    Attributes:
        outputs: float32 [N, ...], `Loss.outputs`.
        document: int64 [N], the row of each example, an index of `rows`.
        begin, column, length: int64 [N], of each example's last chunk: its first token, counted
            through the texts of the row; the position of that token; and the number of tokens.
        rows: the R rows of the split, or those that a partial evaluation has covered completely.
        number: int64 [R], the index of each row in its split; in a mixture's, counted through all
            datasets in order.
        labels: names of classes or tags.
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

    Means are over the whole step, never over a micro-batch, because micro-batches hold different
    numbers of predictions. So `weights` gives the denominators before the forward pass, the caller
    sums them over micro-batches and replicas, and `loss` divides by those totals. Example: two
    replicas with 3 and 5 predictions divide their sums of cross-entropies by 8, and the sum of
    both is the mean over all 8. A mean of their means would weight 3 predictions like 5.

    Attributes:
        predicts: the model output that holds the logits; see `trainer.models.Outputs`.
        needs: outputs, and capabilities such as `last_position`, that the model has to offer.
        denominator: name of the number of predictions, in `weights` and in the totals of a step.
        columns: columns of its batches that a model may list in `reads`.
        step: number of steps taken in this phase, for terms whose weights change; training sets it
            before each step. None, outside of training, stands for a late step.
    """

    predicts: str
    needs: Outputs
    denominator: str
    columns: frozenset[str] = frozenset()
    step: int | None = None

    @abstractmethod
    def pack_spec(self, sequence_length: int) -> PackSpec:
        """The positions of an example to reserve for the objective's special tokens."""

    @abstractmethod
    def predictions(self, sequence_length: int) -> int:
        """P, the number of positions of an example whose logits are computed."""

    @abstractmethod
    def collate(self, examples: Examples, sequence_length: int) -> Batch:
        """Builds the arrays of a batch; each row depends only on its own tokens and key.

        Args:
            examples: B packed examples.
            sequence_length: S.

        Returns:
            Arrays [B, ...] by name: the columns of `trainer.models.inputs.Inputs` that the model
            needs, and columns that `weights` and `loss` read, such as labels [B, P].
        """

    def weights(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """This micro-batch's part of the denominator of each loss term, by name.

        Args:
            batch: the arrays of `collate`, in host memory.
        """
        return {self.denominator: float(batch["weights"].sum())}

    @abstractmethod
    def loss(self, model: nn.Module, batch: Tensors, totals: Tensors) -> Loss:
        """Runs the model on a micro-batch and scores it; never waits for the device.

        Args:
            model: called with `Inputs` and the names of outputs.
            batch: the arrays of `collate` as tensors on the device.
            totals: scalars, the sums of `weights` over the global batch, by name.
        """

    def terms(self) -> Mapping[str, float]:
        """The metrics that the loss is a sum of, with their factors.

        Terms have different denominators, so a mean of the steps' losses would depend on which
        predictions were in a step together.
        """
        return {"loss": 1.0}

    def loss_of(self, means: Mapping[str, float]) -> float:
        """The loss over several steps or batches, from the means of their metrics."""
        return sum(factor * means.get(name, 0.0) for name, factor in self.terms().items())


class Task(Objective):
    """An objective with scores that are not means over examples, such as F1 or a correlation.

    Attributes:
        score_names: names of its scores.
        mean_names: names of the metrics of its `Loss` that evaluations have, too.
    """

    score_names: tuple[str, ...]
    mean_names: tuple[str, ...] = ("loss",)

    @abstractmethod
    def scores(self, predictions: Predictions) -> dict[str, float]:
        """The scores of a split by name; fractions are in [0, 1]."""

    @abstractmethod
    def row_predictions(self, predictions: Predictions) -> Iterator[dict[str, object]]:
        """Label and prediction of each of `predictions.rows`, in order, as values for JSON."""

    def class_report(self, predictions: Predictions) -> ClassReport | None:
        """Scores of each class or kind of entity; None for tasks without any."""

    def combined(self, outputs: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        """The outputs of an ensemble, [N, ...]: the mean of its members', for example of logits."""
        mean: npt.NDArray[np.float32] = np.mean(outputs, axis=0, dtype=np.float32)
        return mean


class Taught(Objective):
    """An objective that also runs a trained model, the teacher."""

    @abstractmethod
    def attach(self, teacher: nn.Module) -> None:
        """Sets the teacher, in eval mode and without gradients, before the first pass."""


class OverBatch(Objective):
    """An objective whose rows are compared with all rows of the global batch.

    Before the passes of a step, `summary` is computed for all rows, without gradients, and gathered
    over replicas. `over_batch` maps the summaries to the column `over_batch` of each micro-batch.
    """

    @abstractmethod
    def summary(self, model: nn.Module, batch: Tensors) -> Tensor:
        """Values of each row of a micro-batch that other rows need: float32 [B, K]."""

    @abstractmethod
    def over_batch(self, table: Tensor) -> Tensor:
        """Values that `loss` needs for each row of a global batch: [N, K] -> [N, M].

        Args:
            table: the summaries of all rows, padding rows included.
        """


class ObjectiveConfig(ABC):
    """Settings of an objective: the base of each module's `Config`.

    Attributes:
        metrics: scores of the held-out split besides the loss.
        writes_text: whether the model learns to write a text for each source.
        masked: whether its accuracy is of masked positions.
        target_length: maximum number of tokens of a target, if that is a setting.
        teacher_setting: name of the setting that holds `teacher_path`.
        teacher_embeds: whether the teacher only embeds texts, and need not be like the student.
        embeds: whether it has the settings of `sentence_pairs.EmbeddingConfig`.
    """

    teacher_setting = "teacher"
    teacher_embeds = False
    embeds = False
    metrics: tuple[str, ...] = ()
    writes_text = False
    masked = False
    target_length: int | None = None

    @property
    def teacher_path(self) -> str | None:
        """Path of a trained model that the objective learns from."""
        return None

    def longest_text(self, sequence_length: int) -> int:
        """The most positions that a sequence of the model can have."""
        return sequence_length

    @property
    def task(self) -> ObjectiveConfig:
        """The objective that makes the batches: this one, or the one that a distillation wraps."""
        return self

    @property
    def reads_probabilities(self) -> bool:
        """Whether rows may be labeled with a probability for each class."""
        return False

    @property
    def needs_scores(self) -> str | None:
        """The setting that needs a teacher's score of each passage, as objective.loss=mse."""
        return None

    @property
    def compares_hidden(self) -> bool:
        """Whether hidden states are compared with the teacher's."""
        return False

    @property
    def layer_pairs(self) -> Mapping[str, str]:
        """A student's outputs of layers -> the teacher's outputs to compare them with."""
        return {}

    def adapted(self, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
        """Settings (key=value) that avoid `missing` outputs, or need `offers` instead."""
        return ()

    def of_dataset(
        self,
        labels: Sequence[str],
        counts: Callable[[], Sequence[int]] | None,
    ) -> Self:
        """Replaces settings that depend on the dataset; by default, there are none.

        Args:
            labels: names of classes or tags.
            counts: returns the number of training rows of each label; None if there is no dataset.

        Raises:
            ConfigError: a setting contradicts the labels.
        """
        return self

    def check_labels(self, labels: Sequence[str]) -> None:  # noqa: B027
        """Rejects settings that do not fit the labels of a dataset; by default, all fit.

        Args:
            labels: names of classes or tags; empty for documents and for tasks without any.

        Raises:
            ConfigError: names the setting and the labels.
        """

    @abstractmethod
    def build(self, vocabulary: Vocabulary) -> Objective:
        """Builds the objective for a tokenizer.

        Raises:
            ConfigError: the vocabulary lacks a token that the objective needs.
        """


def adapted_inside(of: ObjectiveConfig, missing: Outputs, offers: Outputs) -> tuple[str, ...]:
    """`ObjectiveConfig.adapted` of an objective whose settings are `objective.of`."""
    settings = of.adapted(missing, offers)
    return tuple(setting.replace("objective.", "objective.of.", 1) for setting in settings)
