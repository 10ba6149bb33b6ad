"""Adapters (Houlsby et al. 2019, arXiv 1902.00751): two small networks in each layer, with
skip-connections.

One is behind the output projection of attention, the other behind that of the feed-forward network,
before dropout and the residual sum (the paper's code has dropout before them). A decoder's
attention to the encoder, which the paper's BERT has not, gets one, too. Norms are trained with
them, those behind the last layer included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.models.layers import activate
from trainer.models.peft import Added
from trainer.models.projections import Projection, WrappedProjection, put_in_place

_STD = 1e-2  # of the paper: nearly the identity
_ADDED = re.compile(r".*\.adapter\.(down|up)\.(weight|bias)")


@dataclass(frozen=True)
class Config(Added):
    """Houlsby's adapters behind attention and the feed-forward network of each layer, trained with
    the norms.

    Attributes:
        width: of the adapters' hidden layer.
        activation: in it.
    """

    width: int = 64
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"width is {self.width}; use 1 or more, as 64")

    @property
    def trains_norms(self) -> bool:
        return True

    def add_to(self, model: nn.Module) -> None:
        projections = {
            name: module for name, module in model.named_modules() if isinstance(module, Projection)
        }
        behind = {
            name: projection for name, projection in projections.items() if projection.into_residual
        }
        if not behind:
            raise ConfigError(
                "model.peft is adapters, which this kind of model has no place for; use lora"
            )
        for name, projection in behind.items():
            put_in_place(model, name, AdaptedLinear(projection, self))

    def owns(self, name: str) -> bool:
        return _ADDED.fullmatch(name) is not None

    def initial_std(self, name: str, shape: Sequence[int]) -> float | None:
        return _STD if self.owns(name) else None


class Adapter(nn.Module):
    """To a narrow layer and back, beside a skip-connection."""

    def __init__(self, features: int, config: Config, device: torch.device) -> None:
        super().__init__()
        self.activation = config.activation
        self.down = nn.Linear(features, config.width, device=device)
        self.up = nn.Linear(config.width, features, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        change: Tensor = self.up(activate(self.down(x), self.activation))
        return x + change


class AdaptedLinear(WrappedProjection):
    """A projection of a model with the parameters that it had, and an adapter behind it."""

    def __init__(self, projection: Projection, config: Config) -> None:
        super().__init__(projection)
        self.adapter = Adapter(projection.out_features, config, projection.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., D]."""
        out: Tensor = self.adapter(super().forward(x))
        return out
