"""GPT-1 (Radford et al. 2018): GPT-2 with post-norm and fewer positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trainer.models.config import Norm
from trainer.models.families import gpt2


@dataclass(frozen=True)
class Config(gpt2.Config):
    """GPT-1.

    Attributes:
        initializer_range: standard deviation of the initial weights.
    """

    codec: ClassVar[str] = "trainer.models.codecs.openai_gpt"

    vocab_size: int = 40478
    max_positions: int = 512

    @property
    def norm(self) -> Norm:
        return "post"

    def initial_std(self, name: str) -> tuple[float, ...]:
        return (self.initializer_range,)
