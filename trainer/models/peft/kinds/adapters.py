"""Adapters (Houlsby et al. 2019, arXiv 1902.00751): two small residual networks in each layer.

They follow the output projections of attention and of the feed-forward network, before dropout and
the residual sum (in the paper's code, dropout comes first). Cross-attention, which the paper's BERT
lacks, gets one too. All norms are trained with them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models.layers import Projection, WrappedProjection, put_in_place
from trainer.models.layers.layer import activate
from trainer.models.peft import Peft

_ADDED = re.compile(r".*\.adapter\.(down|up)\.(weight|bias)")


@dataclass(frozen=True)
class Config(Peft):
    """Houlsby's adapters after attention and the feed-forward network, trained with the norms.

    Attributes:
        width: of the adapters' hidden layer.
        activation: of the adapters' hidden layer.
    """

    width: int = 64
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"width is {self.width}. Use 1 or more, such as 64.")

    @property
    def trains_norms(self) -> bool:
        return True

    def add_to(self, model: nn.Module) -> None:
        outputs = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, Projection) and module.into_residual
        }
        if not outputs:
            raise ConfigError("model.peft adapters do not fit this kind of model. Use lora.")
        for name, projection in outputs.items():
            put_in_place(model, name, AdaptedLinear(projection, self))

    def initial_std(self, name: str, shape: Sequence[int]) -> float | None:
        # Nearly the identity at the start, as in the paper (section 3.6).
        return 1e-2 if _ADDED.fullmatch(name) else None


class Adapter(nn.Module):
    """A bottleneck with a residual connection."""

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
    """A model's projection with its own parameters, followed by an adapter."""

    def __init__(self, projection: Projection, config: Config) -> None:
        super().__init__(projection)
        self.adapter = Adapter(projection.out_features, config, projection.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., D]."""
        out: Tensor = self.adapter(super().forward(x))
        return out
