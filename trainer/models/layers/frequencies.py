"""Frequencies of rotary positions, and how they are stretched for texts longer than trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from samestep.errors import ConfigError


@dataclass(frozen=True)
class Scaling:
    """Lower rotary frequencies, for texts longer than in pre-training.

    Attributes:
        kind: `linear` divides all frequencies by the factor (Chen et al. 2023); `llama3` those with
            less than `slow` turns in the original length, and none with more than `fast` (Llama
            3.1); `yarn` likewise, by a ramp over the frequencies' numbers, and it sharpens
            attention (Peng et al. 2023).
        factor: how many times longer texts are.
        original: length in pre-training, in tokens; unused by `linear`.
        slow: turns below which a frequency is divided.
        fast: turns above which a frequency is kept; null: 4 for `llama3`, 32 for `yarn`.
        attention: factor of queries and keys of `yarn`; null: 1 + ln(factor) / 10.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original: int = 8192
    slow: float = 1.0
    fast: float | None = None
    attention: float | None = None

    def __post_init__(self) -> None:
        numbers = {"factor": self.factor, "original": self.original, "slow": self.slow}
        for name, number in numbers.items():
            if not (math.isfinite(number) and number > 0):
                raise ConfigError(f"{name} is {number}. Use a number above 0.")
        if not self.slow < self.most_turns < math.inf:
            raise ConfigError(
                f"slow is {self.slow}, and fast is {self.most_turns}. Use a larger number of fast "
                "turns."
            )

    @property
    def most_turns(self) -> float:
        """The value of `fast`."""
        if self.fast is not None:
            return self.fast
        return 32.0 if self.kind == "yarn" else 4.0

    @property
    def of_attention(self) -> float:
        """The factor of rotated queries, and of rotated keys."""
        if self.kind != "yarn":
            return 1.0
        if self.attention is not None:
            return self.attention
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Scales the frequencies, [K/2], of the base `theta`."""
        if self.kind == "linear":
            return frequencies / self.factor
        # Fast pairs tell near positions apart and stay; slow ones would meet angles never trained.
        divided = frequencies / self.factor
        if self.kind == "llama3":
            # Turns in the original length: 0 below `slow`, 1 above `fast`, a ramp between them.
            # With 1 and 4, a frequency of 2 turns is kept by a third, and divided by two thirds.
            turns = self.original * frequencies / (2 * math.pi)
            kept = ((turns - self.slow) / (self.most_turns - self.slow)).clamp(0, 1)
        else:
            kept = 1 - self._ramp(len(frequencies), theta, frequencies.device)
        return divided * (1 - kept) + frequencies * kept

    def _ramp(self, count: int, theta: float, device: torch.device) -> Tensor:
        """YaRN's ramp: 0 for frequencies that stay, 1 for those that are divided."""
        # Frequency k turns original * theta^(-k/count) / (2 pi) times; solved for k.
        first, last = (
            count * math.log(self.original / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.most_turns, self.slow)
        )
        # With theta 10,000, 64 frequencies and a length of 4,096, `first` is 20.9 and `last` 45.03:
        # up to number 20 frequencies stay, from 46 on they are divided.
        low, high = max(math.floor(first), 0), min(math.ceil(last), 2 * count - 1)
        place = torch.arange(count, dtype=torch.float32, device=device)
        # As in YaRN's code, 0.001 avoids a division by 0 if both ends are one number.
        return ((place - low) / max(high - low, 0.001)).clamp(0, 1)


def angles(
    positions: Tensor, width: int, theta: float, scaling: Scaling | None
) -> dict[str, Tensor]:
    """Cosines and sines, float [B, 1, S, K/2] each, of int positions [B, S].

    Feature pair k turns by theta^(-2k/K) per position (Su et al. 2021), unless that is scaled.
    """
    # As transformers rounds them: at position 8,000 one bit of a frequency is 5e-4 of an angle.
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
    frequencies = 1.0 / theta**exponent
    if scaling is not None:
        frequencies = scaling.scale(frequencies, theta)
    angle = positions[:, None, :, None].float() * frequencies
    # Queries and keys both get the factor, so scores are multiplied by its square.
    factor = 1.0 if scaling is None else scaling.of_attention
    cos, sin = angle.cos(), angle.sin()
    return {"cos": cos, "sin": sin} if factor == 1 else {"cos": cos * factor, "sin": sin * factor}
