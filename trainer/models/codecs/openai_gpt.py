"""GPT-1 in Hugging Face files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from samestep.errors import ConfigError
from trainer.models.codecs import ConfigJson, gpt2
from trainer.models.config import Activation
from trainer.models.families import openai_gpt


class Codec(gpt2.Codec[openai_gpt.Config]):
    """GPT-1 in Hugging Face files."""

    model_type: ClassVar[str] = "openai-gpt"
    prefix_in_peft: ClassVar[bool] = False
    architecture: ClassVar[str] = "OpenAIGPTLMHeadModel"
    table_names: ClassVar[Mapping[str, str]] = {
        "embeddings.tokens.weight": "transformer.tokens_embed.weight",
        "embeddings.positions.weight": "transformer.positions_embed.weight",
    }
    activation_key: ClassVar[str] = "afn"
    # Its "gelu" is the tanh approximation.
    activations: ClassVar[Mapping[str, Activation]] = {"gelu": "gelu_tanh", "relu": "relu"}

    def to_huggingface(self) -> ConfigJson:
        tree, config = super().to_huggingface(), self.config
        if tree.pop("n_inner") != 4 * config.width:
            raise ConfigError(
                f"ffn_width {config.ffn_width} cannot be exported: {self.model_type} in "
                f"transformers has 4 times the width. Train with ffn_width={4 * config.width}."
            )
        return tree
