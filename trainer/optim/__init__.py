"""Optimizers, parameter groups and learning-rate schedules.

Each optimizer is a module with a `Config` that builds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.models import Model


@dataclass(frozen=True)
class Structure:
    """Facts about a model's parameters that optimizers use, by name.

    Attributes:
        stacked: number of equally sized matrices stacked in a parameter's rows (3 for fused QKV),
            where there are several. Optimizers that use norms of whole matrices treat each apart.
        layers_above: number of layers between a parameter and the heads, its own included; 0 for
            parameters that are not named.
        matrices: the matrices inside layers.
        exact: updates have the same bits however parameters are partitioned (`training.exact`).
    """

    stacked: Mapping[str, int] = field(default_factory=dict)
    layers_above: Mapping[str, int] = field(default_factory=dict)
    matrices: frozenset[str] = frozenset()
    exact: bool = False

    @classmethod
    def of(cls, model: Model, exact: bool = False) -> Self:
        """The structure of a model."""
        matrices = {
            name
            for name, parameter in model.named_parameters()
            if parameter.ndim == 2 and model.role(name) == ("layer", "weight")
        }
        return cls(model.stacked(), model.layers_above(), frozenset(matrices), exact)

    def blocks(self, named: Iterable[tuple[str, nn.Parameter]]) -> dict[Tensor, int]:
        """Number of stacked matrices by parameter; parameters that hold only one are left out."""
        return {weight: self.stacked[name] for name, weight in named if name in self.stacked}


class Config(Protocol):
    """The `Config` of each optimizer module: the section `optimizer` of an experiment.

    It also has a field `lr`, the peak learning rate, which `schedule` multiplies at each step.
    """

    def build(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        structure: Structure = Structure(),
    ) -> Optimizer:
        """Builds the optimizer of these named parameters, on the device they are on.

        Args:
            parameters: this rank's partition of each parameter, by its name in the model.
            structure: what the names of the model's parameters say about them.
        """
        ...
