"""How tokens are chosen in generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """The likeliest one after the other, by beam search, or at random.

    Attributes:
        max_new_tokens: the most tokens of a generated text, the one that ends it included.
        min_new_tokens: tokens before the one that may end it.
        beams: unfinished texts that beam search keeps of each; 1 takes the likeliest token each
            time.
        length_penalty: beam search ranks finished texts by log-probability / length **
            length_penalty (Wu et al. 2016 without their offset); T5 takes 0.6.
        early_stopping: beam search ends when it has as many finished texts as beams (true), when
            texts of the present length cannot be better (false), or when none can be (never).
        sample: draw each token from the model's distribution.
        temperature: what the logits are divided by, in sampling.
        top_k: sample from the K most likely tokens; None: from all.
        top_p: sample among the likeliest tokens that together have this probability (Holtzman et
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
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.min_new_tokens < self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens is {self.min_new_tokens}; use 0 to {self.max_new_tokens - 1}, "
                "below max_new_tokens"
            )
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature must be above 0, not {self.temperature}; without sample, it is as if "
                "0"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is a probability in (0, 1], not {self.top_p}")
        if self.sample and self.beams > 1:
            raise ConfigError(
                f"sample and beams={self.beams} exclude each other; leave one of them out"
            )
        if not self.sample and (self.temperature, self.top_k, self.top_p) != (1.0, None, 1.0):
            raise ConfigError(
                "temperature, top_k and top_p have no effect without sample; add it, or leave them "
                "out"
            )
