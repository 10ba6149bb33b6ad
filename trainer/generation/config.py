"""How tokens are chosen in generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from samestep.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """Greedy decoding, beam search, or sampling.

    Attributes:
        max_new_tokens: maximum number of tokens of a generated text, the end token included.
        min_new_tokens: number of tokens before the end token may come.
        beams: unfinished texts of each source that beam search keeps; 1 is greedy decoding.
        length_penalty: beam search ranks finished texts by log-probability / length **
            length_penalty (Wu et al. 2016 without their offset); T5 uses 0.6.
        early_stopping: beam search ends when it has as many finished texts as beams (true), when
            no running text could be better at its present length (false), or at any length
            (never).
        sample: sample each token from the model's distribution.
        temperature: divides the logits before sampling.
        top_k: sample from the K most likely tokens; None samples from all.
        top_p: sample from the most likely tokens that together have this probability (Holtzman et
            al. 2020).
        seed: of sampling.
        batch_size: number of texts generated together, sorted by length.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 32

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "beams", "batch_size", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}. Use at least 1.")
        if not 0 <= self.min_new_tokens < self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens is {self.min_new_tokens}; use 0 to {self.max_new_tokens - 1}, "
                "below max_new_tokens"
            )
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature is {self.temperature}. Use a number above 0, or leave sample out to "
                "take the most likely token."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}. Use a probability above 0, at most 1.")
        if self.sample and self.beams > 1:
            raise ConfigError(
                f"sample and beams={self.beams} exclude each other. Leave one of them out."
            )
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"seed is {self.seed}. Use 0 to 2**64 - 1.")
        self._check_effects()

    def _check_effects(self) -> None:
        """Rejects settings that would be ignored without a word."""
        for_sampling = (self.temperature, self.top_k, self.top_p, self.seed)
        if not self.sample and for_sampling != (1.0, None, 1.0, 0):
            raise ConfigError(
                "temperature, top_k, top_p and seed have no effect without sample. Add it, or "
                "leave them out."
            )
        if self.beams == 1 and (self.length_penalty, self.early_stopping) != (1.0, False):
            raise ConfigError(
                "length_penalty and early_stopping have no effect without beam search. Set beams "
                "to 2 or more, or leave them out."
            )
