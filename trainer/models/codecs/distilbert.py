"""DistilBERT in Hugging Face files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from samestep.errors import ConfigError
from trainer.models.codecs import ConfigJson, bert
from trainer.models.families import distilbert


class Codec(bert.Codec[distilbert.Config]):
    """DistilBERT in Hugging Face files."""

    model_type: ClassVar[str] = "distilbert"
    prefix_in_peft: ClassVar[bool] = False
    architecture: ClassVar[str] = "DistilBertForMaskedLM"
    causal_architecture: ClassVar[str] = ""
    head_names: ClassVar[Mapping[str, str]] = {
        "dense": "vocab_transform",
        "norm": "vocab_layer_norm",
        "bias": "vocab_projector.bias",
        "decoder": "vocab_projector",
    }
    nsp_names: ClassVar[Mapping[str, str]] = {}
    task_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **bert.Codec.task_names,
        "classification": {"pooler": "pre_classifier", "classifier": "classifier"},
        "multiple_choice": {"pooler": "pre_classifier", "classifier": "classifier"},
    }
    their_settings: ClassVar[Mapping[str, str]] = {
        "vocab_size": "vocab_size",
        "layers": "n_layers",
        "width": "dim",
        "heads": "n_heads",
        "ffn_width": "hidden_dim",
        "max_positions": "max_position_embeddings",
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "activation": "activation",
        "tied": "tie_word_embeddings",
        "initializer_range": "initializer_range",
        "head_dropout": "seq_classif_dropout",
    }
    # With sinusoids, too, the positions are a stored table; no released model trains others.
    their_constants: ClassVar[Mapping[str, object]] = {"sinusoidal_pos_embds": False}
    embedding_names: ClassVar[Mapping[str, str]] = {
        ours: theirs
        for ours, theirs in bert.Codec.embedding_names.items()
        if ours != "types.weight"
    }
    layer_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention.qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.out": ("attention.out_lin",),
        "attention_norm": ("sa_layer_norm",),
        "ffn.up": ("ffn.lin1",),
        "ffn.down": ("ffn.lin2",),
        "ffn_norm": ("output_layer_norm",),
    }
    bare_names: ClassVar[tuple[str, ...]] = ("embeddings.", "transformer.")

    def to_huggingface(self) -> ConfigJson:
        # A constant in the code of transformers, which no config.json can change.
        if self.config.norm_eps != 1e-12:
            raise ConfigError(
                f"norm_eps {self.config.norm_eps} cannot be exported: distilbert in transformers "
                "has 1e-12. Train with that."
            )
        return super().to_huggingface()

    def layer_places(self) -> dict[int, str]:
        return {layer: f"transformer.layer.{layer}" for layer in range(self.config.layers)}
