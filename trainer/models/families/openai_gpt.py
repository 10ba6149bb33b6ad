"""GPT-1 (Radford et al. 2018): GPT-2 with post-norm and fewer positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from samestep.errors import ConfigError
from trainer.models.config import Norm
from trainer.models.families import gpt2
from trainer.models.huggingface import ConfigJson


@dataclass(frozen=True)
class Config(gpt2.Config):
    """GPT-1.

    Attributes:
        initializer_range: standard deviation of the initial weights.
    """

    model_type: ClassVar[str] = "openai-gpt"
    prefix_in_peft: ClassVar[bool] = False
    architecture: ClassVar[str] = "OpenAIGPTLMHeadModel"
    table_names: ClassVar[Mapping[str, str]] = {
        "embeddings.tokens.weight": "transformer.tokens_embed.weight",
        "embeddings.positions.weight": "transformer.positions_embed.weight",
    }
    activation_key: ClassVar[str] = "afn"
    # Its "gelu" is the tanh approximation.
    activations: ClassVar[Mapping[str, str]] = {"gelu": "gelu_tanh", "relu": "relu"}

    vocab_size: int = 40478
    max_positions: int = 512

    @property
    def norm(self) -> Norm:
        return "post"

    def initial_std(self, name: str) -> tuple[float, ...]:
        return (self.initializer_range,)

    def to_huggingface(self) -> ConfigJson:
        config = super().to_huggingface()
        if config.pop("n_inner") != 4 * self.width:
            raise ConfigError(
                f"ffn_width {self.ffn_width} cannot be exported: {self.model_type} in transformers "
                f"has 4 times the width. Train with ffn_width={4 * self.width}."
            )
        return config
