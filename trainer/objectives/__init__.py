"""What is predicted and how it is scored: each module defines one objective, its `Config` and its `collate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from trainer.examples import Batch, Examples, PackSpec


@dataclass(frozen=True)
class Loss:
    """The loss of one micro-batch.

    Attributes:
        total: scalar to call `backward` on; over all micro-batches and replicas of a step these add up to the loss.
        metrics: detached (sum, weight) scalars by name; a mean is the sum of sums over the sum of weights.
    """

    total: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]


class Objective(Protocol):
    """Turns packed examples into a batch, and a model's outputs on it into a loss.

    Means are taken over the whole step, never over a micro-batch, because micro-batches hold different numbers of
    predictions: `weights` gives the denominator of each loss term before the forward pass, the caller sums it over
    micro-batches and replicas, and `loss` divides by those totals.

    Attributes:
        model_settings: settings of the model that must be on, as {"nsp": True}.
    """

    model_settings: Mapping[str, bool]

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
