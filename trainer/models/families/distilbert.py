"""DistilBERT (Sanh et al. 2019) in its own format: BERT without token types and pooler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from samestep.errors import ConfigError
from trainer.models.config import Pooling
from trainer.models.families import bert
from trainer.models.huggingface import ConfigJson


@dataclass(frozen=True)
class Config(bert.Config):
    """DistilBERT-base, uncased.

    Attributes:
        head_dropout: dropout rate in the head of a task.
    """

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
        **bert.Config.task_names,
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
        for ours, theirs in bert.Config.embedding_names.items()
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
    pooler_activation: ClassVar[Pooling] = "relu"
    heads_with_dropout: ClassVar[frozenset[str]] = frozenset({"tagging", "question_answering"})
    fewest_types: ClassVar[int] = 0

    layers: int = 6
    type_vocab: int = 0
    head_dropout: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("type_vocab", self.type_vocab), ("nsp", self.nsp)):
            if value:
                raise ConfigError(
                    f"{name} is {value}, but DistilBERT has none. Leave it out, or use kind: bert."
                )
        self.check_rate("head_dropout")

    @property
    def normalizes_embeddings(self) -> bool:
        return True

    def to_huggingface(self) -> ConfigJson:
        if self.norm_eps != 1e-12:
            raise ConfigError(
                f"norm_eps {self.norm_eps} cannot be exported: distilbert in transformers has "
                "1e-12. Train with that."
            )
        return super().to_huggingface()

    def layer_places(self) -> dict[int, str]:
        return {layer: f"transformer.layer.{layer}" for layer in range(self.layers)}
