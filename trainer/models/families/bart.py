"""BART (Lewis et al. 2020, arXiv 1910.13461), and its names in Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from samestep.config import decode
from samestep.errors import ConfigError
from samestep.tasks import TASKS
from trainer.models import huggingface
from trainer.models.config import Head, Norm, TaskHead
from trainer.models.encoder_decoder import EncoderDecoder
from trainer.models.family import Family
from trainer.models.heads import LanguageModelHead, PooledHead, TokenHead
from trainer.models.huggingface import ConfigJson
from trainer.models.layers.dropout import dropout
from trainer.models.layers.embeddings import Embeddings

UNUSED_ROWS = 2
"""Rows at the start of the position tables that nothing reads, as in fairseq."""

_FIELDS = {
    "vocab_size": "vocab_size",
    "layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "width": "d_model",
    "heads": "encoder_attention_heads",
    "ffn_width": "encoder_ffn_dim",
    "max_positions": "max_position_embeddings",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "ffn_dropout": "activation_dropout",
    "head_dropout": "classifier_dropout",
    "activation": "activation_function",
    "initializer_range": "init_std",
    "scale_embeddings": "scale_embedding",
    "start_token": "decoder_start_token_id",
}
# transformers leaves settings with their default values out of config.json.
_OFTEN_ABSENT = {
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "classifier_dropout": 0.0,
    "activation_function": "gelu",
    "init_std": 0.02,
    "scale_embedding": False,
    "decoder_start_token_id": 2,
}
# Variants of the architecture that older versions of transformers computed.
_FIXED = {
    "is_encoder_decoder": True,
    "tie_word_embeddings": True,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "normalize_before": False,
    "normalize_embedding": True,
    "add_final_layer_norm": False,
    "static_position_embeddings": False,
}
_SELF_ATTENTION = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.out_proj",),
    "attention_norm": ("self_attn_layer_norm",),
}
_CROSS_ATTENTION = {
    "cross_attention.query": ("encoder_attn.q_proj",),
    "cross_attention.kv": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross_attention.out": ("encoder_attn.out_proj",),
    "cross_attention_norm": ("encoder_attn_layer_norm",),
}
_FEED_FORWARD = {"ffn.up": ("fc1",), "ffn.down": ("fc2",), "ffn_norm": ("final_layer_norm",)}
_LAYERS = {
    "encoder": {**_SELF_ATTENTION, **_FEED_FORWARD},
    "decoder": {**_SELF_ATTENTION, **_CROSS_ATTENTION, **_FEED_FORWARD},
}
_HEADS: dict[TaskHead, dict[str, str]] = {
    "classification": {
        "pooler": "classification_head.dense",
        "classifier": "classification_head.out_proj",
    },
    "question_answering": {"classifier": "qa_outputs"},
}
_ARCHITECTURES: dict[str, str] = {
    "language_model": "BartForConditionalGeneration",
    **{kind: f"BartFor{TASKS[kind].architecture}" for kind in _HEADS},
}
_LOGITS_BIAS = "final_logits_bias"  # [1, V]
_ALIASES = (
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)
# Stored by fairseq and the first checkpoints.
_UNUSED = re.compile(r"model\.(encoder|decoder)\.version")


@dataclass(frozen=True)
class Config(Family):
    """BART-base; with 12 layers, width 1024, 16 heads and `ffn_width: 4096`, BART-large.

    Attributes:
        layers: number of the encoder's layers.
        decoder_layers: number of the decoder's layers, if it differs from `layers`.
        max_positions: maximum length of sources and targets, in tokens.
        ffn_dropout: dropout rate inside the feed-forward network.
        head_dropout: dropout rate in the head for classification.
        scale_embeddings: whether token embeddings are multiplied by the square root of the width.
        initializer_range: standard deviation of the initial weights.
        start_token: id of the decoder's first input token, before each target: the tokenizer's
            `</s>`, as 2 in BART's own.
        head: predicts tokens (`language_model`); or, fine-tuned for a task, from the decoder, which
            gets the text too: its class (`classification`), or the first and last token of an
            answer (`question_answering`).
        labels: names of classes; `classification` with a single label is a regression.
    """

    model_type: ClassVar[str] = "bart"

    vocab_size: int = 50265
    layers: int = 6
    decoder_layers: int | None = None
    max_positions: int = 1024
    ffn_dropout: float = 0.0
    head_dropout: float = 0.0
    scale_embeddings: bool = False
    initializer_range: float = 0.02
    start_token: int = 2
    head: Head = "language_model"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("max_positions")
        if self.decoder_layers is not None:
            self.check_positive("decoder_layers")
        for name in ("ffn_dropout", "head_dropout"):
            self.check_rate(name)
        if not self.initializer_range > 0:
            raise ConfigError(
                f"initializer_range is {self.initializer_range}. Use a number above 0."
            )
        if not 0 <= self.start_token < self.vocab_size:
            raise ConfigError(
                f"start_token is {self.start_token}, and vocab_size {self.vocab_size}. Use the id "
                "of the tokenizer's </s>."
            )
        self.check_heads()
        self.check_task(*_HEADS)

    @property
    def norm(self) -> Norm:
        return "post"

    @property
    def position_table(self) -> bool:
        return False  # each stack has its own, beside the shared table of tokens

    @property
    def normalizes_embeddings(self) -> bool:
        return False  # after the positions, see `LearnedPositions`

    @property
    def embedding_dropout(self) -> float:
        return 0.0  # likewise

    @property
    def settings_for(self) -> Mapping[str, str]:
        heads: dict[str, str] = {head: f"model.head={head}" for head in _HEADS}
        return {"target_tokens": "model.head=language_model", **heads}

    @property
    def encoder_decoder(self) -> bool:
        return True

    @property
    def decoder(self) -> bool:
        return True

    @property
    def sets_start(self) -> bool:
        return True

    @property
    def reads_sources(self) -> bool:
        return True

    @property
    def dropout_sites(self) -> tuple[str, ...]:
        of_branches = ("attention", "attention_output", "ffn_output")
        return (*of_branches, "ffn_hidden", "cross_attention", "cross_attention_output")

    def initial_std(self, name: str) -> tuple[float, ...]:
        return (self.initializer_range,)

    def build_embeddings(self) -> nn.Module:
        return ScaledEmbeddings(self) if self.scale_embeddings else Embeddings(self)

    def build_base(self) -> EncoderDecoder:
        return EncoderDecoder(
            self,
            self._build_head(),
            decoder_layers=self._stacks["decoder"],
            encoder_positions=LearnedPositions(self),
            decoder_positions=LearnedPositions(self),
        )

    @property
    def _stacks(self) -> dict[str, int]:
        """Number of layers of each stack."""
        return {"encoder": self.layers, "decoder": self.decoder_layers or self.layers}

    def _build_head(self) -> nn.Module:
        if self.head == "language_model":
            return LanguageModelHead(self, bias=True)
        if self.head == "classification":
            return PooledHead(self, self.classes, dropout_first=True)
        return TokenHead(self.width, self.classes)

    @classmethod
    def from_huggingface(cls, config: ConfigJson, tensors: Iterable[str] = ()) -> Self:
        """Reads the content of a `config.json`.

        Args:
            tensors: names of the checkpoint's tensors, to detect a task's head.

        Raises:
            ConfigError: it describes another kind of model, or lacks a key.
        """
        config = {**_OFTEN_ABSENT, **config}
        heads: dict[Head, tuple[str, str]] = {
            head: (_ARCHITECTURES[head], f"{_HEADS[head]['classifier']}.weight") for head in _HEADS
        }
        head, labels = huggingface.read_task(config, tuple(tensors), heads)
        fixed = {"model_type": cls.model_type, **_FIXED}
        # samestep has one number of heads and one inner width for both stacks.
        for name in ("attention_heads", "ffn_dim"):
            if f"encoder_{name}" in config:
                fixed[f"decoder_{name}"] = config[f"encoder_{name}"]
        fields = huggingface.read_settings(config, _FIELDS, fixed, huggingface.ACTIVATIONS)
        if fields["decoder_layers"] == fields["layers"]:
            fields["decoder_layers"] = None
        decoded: Self = decode(cls, {**fields, "head": head, "labels": list(labels)}, "config.json")
        return decoded

    def to_huggingface(self) -> ConfigJson:
        known = {ours: theirs for theirs, ours in huggingface.ACTIVATIONS.items()}
        if self.activation not in known:
            raise ConfigError(
                f"activation {self.activation} cannot be exported: bart in transformers has no "
                "gated one. Train with another."
            )
        return {
            "architectures": [_ARCHITECTURES[self.head]],
            "model_type": self.model_type,
            **{theirs: getattr(self, ours) for ours, theirs in _FIELDS.items()},
            "decoder_layers": self._stacks["decoder"],
            "decoder_attention_heads": self.heads,
            "decoder_ffn_dim": self.ffn_width,
            "activation_function": known[self.activation],
            "is_encoder_decoder": True,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "pad_token_id": 1,
            "eos_token_id": self.start_token,
            # By default transformers puts </s> at the end of texts of the maximum length.
            "forced_eos_token_id": None,
            **huggingface.name_labels(self.labels),
        }

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            # A checkpoint of the bare model (BartModel) has no "model." before its names.
            is_bare = name.startswith(("shared.", "encoder.", "decoder."))
            full = f"model.{name}" if is_bare else name
            if not _UNUSED.fullmatch(full):
                found[full] = tensor
        huggingface.keep_one(found, "model.shared.weight", *_ALIASES)
        bias = found.pop(_LOGITS_BIAS, None)
        if self.head == "language_model":
            # The bare model has none, for which transformers takes zeros.
            found[_LOGITS_BIAS] = torch.zeros(self.vocab_size) if bias is None else bias.flatten()
        return huggingface.join_tensors(found, self.tensor_names(), self)

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        exported = huggingface.split_tensors(parameters, self.tensor_names(), self)
        if _LOGITS_BIAS in exported:
            exported[_LOGITS_BIAS] = exported[_LOGITS_BIAS][None]
        return exported

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        """Parameter name -> names of transformers' tensors that are concatenated in its rows."""
        table: dict[str, tuple[str, ...]] = {"embeddings.tokens.weight": ("model.shared.weight",)}
        modules: dict[str, tuple[str, ...]] = {}
        for stack, layers in self._stacks.items():
            positions = f"{stack}_positions"
            table[f"{positions}.table.weight"] = (f"model.{stack}.embed_positions.weight",)
            modules[f"{positions}.norm"] = (f"model.{stack}.layernorm_embedding",)
            for layer in range(layers):
                begin = f"model.{stack}.layers.{layer}"
                for ours, theirs in _LAYERS[stack].items():
                    joined = tuple(f"{begin}.{name}" for name in theirs)
                    modules[f"{stack}.{layer}.{ours}"] = joined
        if self.head == "language_model":
            table["head.bias"] = (_LOGITS_BIAS,)
        else:
            parts = next(parts for head, parts in _HEADS.items() if head == self.head)
            modules |= {f"head.{part}": (name,) for part, name in parts.items()}
        # Each of these modules has a weight and a bias.
        for ours, names in modules.items():
            for kind in ("weight", "bias"):
                table[f"{ours}.{kind}"] = tuple(f"{name}.{kind}" for name in names)
        return table


class ScaledEmbeddings(Embeddings):
    """Token embeddings times the square root of their width (Vaswani et al. 2017, section 3.4)."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `Embeddings.forward`; the matrix for the head is not scaled."""
        hidden, matrix = super().forward(*args, **kwargs)
        return hidden * matrix.shape[1] ** 0.5, matrix


class LearnedPositions(nn.Module):
    """Adds a stack's learned positions to embeddings, normalizes the sum and applies dropout."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.table = nn.Embedding(config.max_positions + UNUSED_ROWS, config.width)
        self.norm = config.build_norm()

    def forward(self, hidden: Tensor, positions: Tensor, key: Tensor | None = None) -> Tensor:
        """[B, S, D], int [B, S] or [1, S] -> [B, S, D]; key: int32 [B], None means no dropout."""
        hidden = hidden + self.table(positions + UNUSED_ROWS)
        return dropout(self.norm(hidden), self.dropout, key)
