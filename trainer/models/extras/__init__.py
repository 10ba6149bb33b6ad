"""Extras: optional parts of a Transformer, beside its head or between its layers and the head.

A family builds the extras that its settings ask for, and `Transformer` runs whichever it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from trainer.models import Outputs
from trainer.models.inputs import Inputs


class HeadInput(NamedTuple):
    """What the heads of a model read.

    Attributes:
        inputs: of the model.
        outputs: that are asked for.
        whole: hidden states after the last layer, [B, n + S, D] with the n positions of a prompt;
            or of the positions that heads need, [B, R, D].
        hidden: the same, without a prompt's positions.
        matrix: the token embeddings, [V, E].
    """

    inputs: Inputs
    outputs: Outputs
    whole: Tensor
    hidden: Tensor
    matrix: Tensor


class Extra(nn.Module):
    """An optional part of a Transformer.

    Attributes:
        name: of its module in the model; the names of its parameters begin with it.
        offers: outputs that it adds to the model's.
        trains: see `trainer.models.Model`.
        columns: of `Inputs.extra` that its outputs need.
        needs_positions: the positions whose hidden states it needs after the last layer.
        is_below_head: whether it overrides `below_head`, which computes what the head reads.
        needs_layers: whether it needs the states of all layers.
        pretraining: the setting that adds it, if fine-tuning leaves it out.
        has_labels: whether its parameters belong to the labels of a task's head.
        initial_mean: of the initial values of its parameters.
        starts_anew: whether trained weights that a run starts from give it no values.
        lends: prefixes of a new head's parameters -> prefixes of the extra's that they start from.
    """

    name: ClassVar[str]
    offers: ClassVar[Outputs] = frozenset()
    trains: ClassVar[Mapping[str, str]] = MappingProxyType({})
    columns: ClassVar[tuple[str, ...]] = ()
    needs_positions: ClassVar[Literal["none", "first", "all"]] = "none"
    is_below_head: ClassVar[bool] = False
    needs_layers: ClassVar[bool] = False
    pretraining: ClassVar[str] = ""
    has_labels: ClassVar[bool] = False
    initial_mean: ClassVar[float] = 0.0
    starts_anew: ClassVar[bool] = False
    lends: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def add_to(self, model: nn.Module) -> None:
        """Registers its parameters in the model."""
        model.add_module(self.name, self)

    def is_needed(self, outputs: Outputs) -> bool:
        """Whether these outputs use this part."""
        return self.is_below_head or not self.offers.isdisjoint(outputs)

    def below_head(
        self,
        hidden: Tensor,
        layers: Sequence[Tensor],
        segments: Tensor | None,
        dropout_key: Tensor | None,
    ) -> Tensor:
        """Computes what the head reads from the states after the last layer; of the same shape.

        Args:
            hidden: [B, n + S, D], with the n positions of a prompt.
            layers: [B, S, D] each, states of all layers from the embeddings on, if it needs them.
            segments: int [B, S], see `trainer.models.inputs`.
            dropout_key: int32 [B]; None: no dropout.
        """
        return hidden

    def compared(self, hidden: Tensor) -> Tensor:
        """Projects the states of a layer, [B, S, D], for the output `compared.N`."""
        return hidden

    def answer(self, model: nn.Module, head_input: HeadInput) -> dict[str, Tensor]:
        """Computes its outputs among those that are asked for."""
        return {}

    def initial_std(self, shape: Sequence[int]) -> float | None:
        """Standard deviation of the initial values of a parameter; None: as the family's others."""
        return None

    def stacked(self) -> dict[str, int]:
        """See `trainer.models.Model.stacked`."""
        return {}
