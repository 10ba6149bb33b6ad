"""An encoder-decoder made of a decoder alone (Zhang et al. 2025, "Encoder-Decoder Gemma").

Both stacks start from the same layers. Cross-attention starts from the self-attention of its layer,
which has matrices of the same shapes.
"""

from __future__ import annotations

from dataclasses import replace

from samestep.errors import ConfigError
from trainer.models import Start, Stored
from trainer.models.encoder_decoder import EncoderDecoder

_STACKS = ("encoder", "decoder")
_CROSS_ATTENTION = {
    "cross_attention.query.weight": "attention.qkv.query.weight",
    "cross_attention.kv.weight": "attention.qkv.kv.weight",
    "cross_attention.out.weight": "attention.out.weight",
    "cross_attention_norm.weight": "attention_norm.weight",
}


class Halves(EncoderDecoder):
    """An encoder-decoder that starts from weights with one stack, or from its own kind."""

    def start_from(self, stored: Stored) -> Start:
        """Initializes parameters from tensors of the same names, or of a model with one stack.

        Raises:
            ConfigError: that model has another number of layers than one of the stacks.
        """
        start = super().start_from(stored)
        if stored.config.encoder_decoder:
            return start
        # A decoder of 30 layers gives an encoder of 30 and a decoder of 30.
        layers = stored.config.layers
        if (len(self._encoder_layers), len(self.decoder)) != (layers, layers):
            raise ConfigError(
                f"layers is {self.config.layers} and decoder_layers is {len(self.decoder)}, but "
                f"the weights of init_from have {layers} layers. Set both to that, or choose "
                "layers with init_layers."
            )
        sources = {
            name: None if source is None else _source(name)
            for name, source in start.sources.items()
        }
        return replace(start, sources=sources)


def _source(name: str) -> str:
    """The name of a parameter's source in a model with one stack."""
    # Example: decoder.3.cross_attention.out.weight starts from layers.3.attention.out.weight.
    stack, _, rest = name.partition(".")
    if stack in _STACKS:
        number, _, part = rest.partition(".")
        return f"layers.{number}.{_CROSS_ATTENTION.get(part, part)}"
    return f"final_norm.{rest}" if stack.removesuffix("_norm") in _STACKS else name
