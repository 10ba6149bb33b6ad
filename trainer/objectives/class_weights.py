"""The weights of classes in a cross-entropy, for labels that are rarer than others."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import ConfigError
from trainer.objectives import ObjectiveConfig

ClassWeights: TypeAlias = Literal["balanced"] | dict[str, float] | None


class InOrder(dict[str, float]):
    """A weight for every label, in the order of the dataset's labels."""


class ClassLossConfig(ObjectiveConfig):
    """Settings of a cross-entropy of classes.

    Attributes:
        class_weights: label -> weight of its rows; 1 for labels that are left out. `balanced` gives
            each label the same weight in total.
        label_smoothing: probability of each label that is spread evenly over all labels.
    """

    class_weights: ClassWeights
    label_smoothing: float

    def check_class_loss(self) -> None:
        """Rejects weights and probabilities that are none."""
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing}. Use a fraction as 0.1, or 0 for none."
            )
        if isinstance(self.class_weights, dict):
            for label, weight in self.class_weights.items():
                if not 0 <= weight < math.inf:
                    raise ConfigError(
                        f"class_weights.{label} is {weight}. Use a number of at least 0."
                    )

    def of_dataset(self, labels: Sequence[str], counts: Callable[[], Sequence[int]] | None) -> Self:
        if self.class_weights is None:
            return self
        # The objective sees class numbers only, so names are put in the order of the labels here.
        if self.class_weights == "balanced":
            # For a plan, which has no rows, any weights do.
            found = [1] * len(labels) if counts is None else list(counts())
            if absent := [labels[i] for i, count in enumerate(found) if not count]:
                raise ConfigError(
                    f"class_weights is balanced, and no training row has {', '.join(absent)}. "
                    "Name the weights, or leave such labels out of the dataset."
                )
            # As scikit-learn's "balanced": n rows of k labels, `count` of them with this one.
            # Labels with 6, 1 and 3 of 10 rows get 10 / (3 * 6) = 0.56, 3.33 and 1.11. Each label
            # has 3.33 in total then, and a row 1 on average.
            weights = [sum(found) / (len(labels) * count) for count in found]
            return self._with(zip(labels, weights, strict=True))
        if unknown := sorted(self.class_weights.keys() - set(labels)):
            names = f"labels of the dataset are {', '.join(labels)}. Correct the names."
            if not labels:
                names = "labels are unknown. Name them in model.labels, as a run does itself."
            raise ConfigError(f"class_weights has {', '.join(unknown)}, and the {names}")
        return self._with((label, self.class_weights.get(label, 1.0)) for label in labels)

    def _with(self, weights: Iterable[tuple[str, float]]) -> Self:
        # `replace` would need the type of a subclass, and check its settings again.
        changed = copy.copy(self)
        object.__setattr__(changed, "class_weights", InOrder(weights))
        return changed


class ClassLoss:
    """Cross-entropy in float32 of logits over classes, for each row.

    Equals `F.cross_entropy(..., weight=, label_smoothing=)` if the sum over the global batch is
    divided by the sum of `weights` over it.
    """

    def __init__(self, config: ClassLossConfig) -> None:
        self._smoothing, self._weights = config.label_smoothing, config.class_weights

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        """The loss of each row, without the row's own weight: [N].

        Args:
            logits: [N, C].
            target: int64 [N], the class; or float32 [N, C], the probability of each.
        """
        weight = None
        if self._weights is not None:
            weight = self._table().to(logits.device, non_blocking=True)
        # torch scales the term of the label by the label's weight, and the smoothed terms by the
        # weights of their own classes. The caller divides, by the weights of the global batch.
        return F.cross_entropy(
            logits.float(),
            target,
            weight,
            reduction="none",
            ignore_index=-1,
            label_smoothing=self._smoothing,
        )

    def weights(self, target: Tensor, weights: Tensor) -> Tensor:
        """The weights of rows, times the weights of their classes.

        Args:
            target: int64, the class; -1 for a row without one.
            weights: as many, the weight of each row.
        """
        if self._weights is None:
            return weights
        # The device does not wait: the copy is queued before what reads it.
        table = self._table().to(target.device, non_blocking=True)
        # -1 takes the weight of class 0, but such a position has the weight 0 itself.
        return weights * table[target.clamp(min=0)]

    def total(self, batch: Mapping[str, object]) -> float:
        """The sum of `weights` over a micro-batch in host memory, by its labels and weights."""
        # In fp64: float32 sums of weights such as 0.56 would depend on the micro-batches.
        weights = np.asarray(batch["weights"], dtype=np.float64)
        if self._weights is not None:
            weights = weights * self._in_order()[np.maximum(np.asarray(batch["labels"]), 0)]
        return float(weights.sum())

    def _table(self) -> Tensor:
        # Made anew, so that it is a fake tensor while a plan traces the step.
        return torch.tensor(self._in_order().tolist())

    def _in_order(self) -> npt.NDArray[np.float32]:
        if not isinstance(self._weights, InOrder):
            raise ConfigError(
                "class_weights are known by names, and the objective knows no dataset. Build it by "
                "samestep.open_parts."
            )
        return np.array(list(self._weights.values()), dtype=np.float32)
