"""Self-attention with rotary positions (Su et al. 2021), to all positions or to near ones."""

from __future__ import annotations

import torch
from torch import Tensor

from samestep.errors import ConfigError
from trainer.models.config import TransformerConfig
from trainer.models.layers.attention import SelfAttention
from trainer.models.stack import Context


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotates pairs of features by angles proportional to the position.

    Features k and k + K/2 form a pair, with the angle position * theta^(-2k/K) (section 3.2.2, in
    the order of GPT-NeoX). Products of a query and a key then depend on their distance alone.

    Args:
        x: [B, H, S, K].
        positions: int [B, S].
        theta: base of the frequencies.
    """
    # With K = 4, features (0, 2) turn by the position itself, (1, 3) by position / sqrt(theta).
    half = x.shape[-1] // 2
    exponent = torch.arange(half, dtype=torch.float32, device=x.device) / half
    angle = positions[:, None, :, None].float() * theta**-exponent
    return turn(x, angle.cos(), angle.sin())


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the features k and k + K/2 of x, [B, H, S, K], by angles [B, 1, S, K/2]."""
    # Pairs are half a head apart: with K = 4, features 0 and 2, and 1 and 3. In fp32, since
    # bf16 has 8 bits for a cosine.
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def check_width(config: TransformerConfig) -> None:
    """Rejects heads whose features do not form pairs.

    Raises:
        ConfigError: their width is odd.
    """
    if config.head_width % 2:
        raise ConfigError(
            f"width {config.width} by heads {config.heads} gives heads of {config.head_width}, but "
            "rotary positions need an even number. Change heads."
        )


class RotaryAttention(SelfAttention):
    """Self-attention with rotary positions, read from the column `positions`.

    Args:
        config: of the model.
        theta: base of the frequencies.
        window: see `SelfAttention`. Distances in the row equal those in the sequence.
    """

    def __init__(self, config: TransformerConfig, theta: float, window: int | None) -> None:
        super().__init__(config)
        self.theta, self.window = theta, window

    def place(self, query: Tensor, key: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        positions = context.columns["positions"]
        return rotate(query, positions, self.theta), rotate(key, positions, self.theta)
