"""XLNet (Yang et al. 2019, arXiv 1906.08237), and its names in Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from samestep.tasks import TASKS
from trainer.models import Outputs, Start, Stored, huggingface
from trainer.models.config import Head
from trainer.models.families import bert
from trainer.models.heads import Factors, VocabularyHead
from trainer.models.huggingface import ConfigJson
from trainer.models.inputs import Inputs
from trainer.models.layers.attention import segment_mask
from trainer.models.layers.dropout import dropout, split_key
from trainer.models.layers.embeddings import Embeddings
from trainer.models.layers.two_streams import SITES, TwoStreamLayer, distance_encodings
from trainer.models.stack import Context
from trainer.models.transformer import Transformer

_PERMUTED = "permuted_tokens"
_LAYER = {
    "attention.qkv.weight": ("rel_attn.q", "rel_attn.k", "rel_attn.v"),
    "attention.out.weight": ("rel_attn.o",),
    "attention.relative.weight": ("rel_attn.r",),
    "attention.content_shift": ("rel_attn.r_w_bias",),
    "attention.distance_shift": ("rel_attn.r_r_bias",),
    "attention.segment_shift": ("rel_attn.r_s_bias",),
    "attention.segments": ("rel_attn.seg_embed",),
    **{
        f"{ours}.{kind}": (f"{theirs}.{kind}",)
        for ours, theirs in {
            "attention_norm": "rel_attn.layer_norm",
            "ffn.up": "ff.layer_1",
            "ffn.down": "ff.layer_2",
            "ffn_norm": "ff.layer_norm",
        }.items()
        for kind in ("weight", "bias")
    },
}
_MASK = "transformer.mask_emb"
_POOLED = {"pooler": "sequence_summary.summary", "classifier": "logits_proj"}


@dataclass(frozen=True)
class Config(bert.Config):
    """XLNet-base.

    Attributes:
        max_positions: maximum sequence length; there is no table of positions.
        type_vocab: number of segments that `data.packing: pairs` may mark; layers only compare
            them.
    """

    model_type: ClassVar[str] = "xlnet"
    architecture: ClassVar[str] = "XLNetLMHeadModel"
    causal_architecture: ClassVar[str] = ""
    special_ids: ClassVar[Mapping[str, int]] = {"pad_token_id": 0}
    nsp_names: ClassVar[Mapping[str, str]] = {}
    task_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **bert.Config.task_names,
        "classification": _POOLED,
        "multiple_choice": _POOLED,
    }
    their_settings: ClassVar[Mapping[str, str]] = {
        "vocab_size": "vocab_size",
        "layers": "n_layer",
        "width": "d_model",
        "heads": "n_head",
        "ffn_width": "d_inner",
        "dropout": "dropout",
        "norm_eps": "layer_norm_eps",
        "activation": "ff_activation",
        "initializer_range": "initializer_range",
    }
    their_constants: ClassVar[Mapping[str, object]] = {
        "attn_type": "bi",
        "bi_data": False,
        "clamp_len": -1,
        "same_length": False,
        "tie_word_embeddings": True,
    }
    pooled_constants: ClassVar[Mapping[str, object]] = {
        "summary_type": "first",
        "summary_activation": "tanh",
    }
    # The dropout after the last layer is the last: heads that score each position have none.
    heads_with_dropout: ClassVar[frozenset[str]] = frozenset()
    bare_names: ClassVar[tuple[str, ...]] = ("word_embedding.", "mask_emb", "layer.")
    fewest_types: ClassVar[int] = 0
    # In transformers these are parameters of the layer, not linear layers.
    targets_not_in_peft: ClassVar[frozenset[str]] = frozenset(
        {"query", "key", "value", "out", "relative"}
    )

    vocab_size: int = 32000

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "nsp",
            "span_boundary",
            "causal",
            "also_causal",
            "teacher_width",
            "scalar_mix",
            "head_lstm",
            "crf",
        ):
            if getattr(self, name):
                raise ConfigError(f"{name} is set, but XLNet has no such head. Use kind: bert.")
        if not self.tied or self.norm != "post" or self.gated:
            raise ConfigError(
                "XLNet has norm post, tied embeddings and no gated activation. Leave norm, tied "
                "and activation out, or use kind: bert."
            )
        if self.width % 2:
            raise ConfigError(f"width is {self.width}. XLNet's sinusoids need an even width.")
        if self.virtual_tokens:
            raise ConfigError(
                "model.peft adds positions, which XLNet's relative attention cannot place. Use "
                "model.peft=lora."
            )

    @property
    def predicts(self) -> str:
        return _PERMUTED if self.head == "language_model" else super().predicts

    @property
    def settings_for(self) -> Mapping[str, str]:
        settings = {name: value for name, value in super().settings_for.items() if "head" in value}
        return {**settings, _PERMUTED: "model.head=language_model"}

    @property
    def position_table(self) -> bool:
        return False

    # Embeddings go to the layers as they are: each layer normalizes its own sums.
    @property
    def normalizes_embeddings(self) -> bool:
        return False

    @property
    def dropout_sites(self) -> tuple[str, ...]:
        # The content stream's and the query stream's.
        return (*SITES, *(f"query_{site}" for site in SITES))

    @property
    def final_dropout(self) -> bool:
        return True

    def build_embeddings(self) -> nn.Module:
        # Segments are compared in the layers. They have no embeddings, whatever type_vocab says.
        return Embeddings(replace(self, type_vocab=0))

    def build_layer(self, index: int, cross_attention: bool = False) -> nn.Module:
        return TwoStreamLayer(self, index)

    def build_base(self) -> Transformer:
        return XLNet(
            self, TiedTokenHead(self) if self.head == "language_model" else self._build_head()
        )

    @classmethod
    def from_huggingface(cls, config: ConfigJson, tensors: Iterable[str] = ()) -> Self:
        found = super().from_huggingface({"summary_type": "last", **config}, tensors)
        # transformers has one rate for both.
        return replace(found, attention_dropout=found.dropout)

    @classmethod
    def _task_architecture(cls, head: Head) -> str:
        if head == "language_model" or head == "embedding":
            return super()._task_architecture(head)
        simple = "Simple" if head == "question_answering" else ""
        return f"XLNetFor{TASKS[head].architecture}{simple}"

    def to_huggingface(self) -> ConfigJson:
        fields = {theirs: getattr(self, ours) for ours, theirs in self.their_settings.items()}
        if self.activation == "gelu_tanh":
            fields["ff_activation"] = "gelu_new"
        architecture = self.architecture
        if self.head != "language_model":
            architecture = self._task_architecture(self.head)
        return {
            "architectures": [architecture],
            "model_type": self.model_type,
            **fields,
            **self.their_constants,
            "d_head": self.head_width,
            # No memory from call to call: rows are independent of each other.
            "mem_len": None,
            "use_mems_eval": False,
            **self.pooled_constants,
            "summary_use_proj": True,
            "summary_last_dropout": self.dropout,
            **self.special_ids,
            **huggingface.name_labels(self.labels),
        }

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {self._canonical(name): _flat(name, each) for name, each in tensors.items()}
        if self.head == "language_model":
            huggingface.keep_one(found, "transformer.word_embedding.weight", "lm_loss.weight")
        else:
            found.pop(_MASK, None)
        return huggingface.join_tensors(found, self.tensor_names(), self)

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = huggingface.split_tensors(parameters, self.tensor_names(), self)
        # transformers has the embedding of places in every model.
        flat.setdefault(_MASK, torch.zeros(self.width))
        return {name: self._shaped(name, each) for name, each in flat.items()}

    def _shaped(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of `_flat`."""
        own, per_head = name.rpartition(".")[2], (self.heads, self.head_width)
        if own in ("q", "k", "v", "r"):
            return tensor.T.reshape(self.width, *per_head).contiguous()
        if own == "o":
            return tensor.view(self.width, *per_head)
        if own == "seg_embed":
            return tensor.view(2, *per_head)
        if own.startswith("r_"):
            return tensor.view(*per_head)
        return tensor.view(1, 1, -1) if own == "mask_emb" else tensor

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        table: dict[str, tuple[str, ...]] = {
            "embeddings.tokens.weight": ("transformer.word_embedding.weight",)
        }
        for layer in range(self.layers):
            begin = f"transformer.layer.{layer}"
            table |= {
                f"layers.{layer}.{ours}": tuple(f"{begin}.{name}" for name in theirs)
                for ours, theirs in _LAYER.items()
            }
        if self.head == "language_model":
            return {**table, "mask_embedding": (_MASK,), "head.bias": ("lm_loss.bias",)}
        for ours, theirs in self.task_names.get(self.head, {}).items():
            table |= {f"head.{ours}.{kind}": (f"{theirs}.{kind}",) for kind in ("weight", "bias")}
        return table

    @classmethod
    def _canonical(cls, name: str) -> str:
        # A checkpoint of the bare model (XLNetModel) has no "transformer." before its names.
        return f"transformer.{name}" if name.startswith(cls.bare_names) else name


def _flat(name: str, tensor: Tensor) -> Tensor:
    """A tensor of transformers, which has a dimension for heads, in the shape of a parameter."""
    # Projections are [D, H, K] in transformers, and used as x @ w; ours are [H * K, D].
    own = name.rpartition(".")[2]
    if own in ("q", "k", "v", "r"):
        return tensor.flatten(1).T
    if own == "o":
        return tensor.flatten(1)
    return tensor.flatten() if re.fullmatch(r"r_._bias|seg_embed|mask_emb", own) else tensor


class TiedTokenHead(VocabularyHead):
    """Predicts tokens by the token embeddings and a bias."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def factors(self, hidden: Tensor, embedding: Tensor, *_columns: Any) -> Factors:
        return hidden, embedding, self.bias


class XLNet(Transformer):
    """An encoder whose pre-training predicts tokens in a factorization order.

    For `permuted_tokens` it reads the column `rank`, int [B, S]: a position attends to those of
    rank 0 and of a smaller rank than its own, in the content stream also to itself. All other
    outputs attend to all positions.

    Attributes:
        mask_embedding: the query stream's input; None with the head of a task.
    """

    config: Config

    def __init__(self, config: Config, head: nn.Module) -> None:
        super().__init__(config, head)
        predicts = config.head == "language_model"
        self.mask_embedding = nn.Parameter(torch.empty(config.width)) if predicts else None

    def reads_for(self, outputs: Outputs) -> frozenset[str]:
        return super().reads_for(outputs) | frozenset({"rank"} if _PERMUTED in outputs else ())

    def columns(self, inputs: Inputs) -> dict[str, Tensor]:
        tokens, types = inputs.tokens, inputs.token_types
        return {
            **super().columns(inputs),
            "token_types": torch.zeros_like(tokens) if types is None else types,
            "distances": distance_encodings(tokens.shape[1], self.config.width, tokens.device)[
                None
            ],
        }

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if _PERMUTED in outputs:
            found = self._permuted(inputs)
        if rest := outputs - {_PERMUTED}:
            found |= super().forward(inputs, rest)
        return found

    def _permuted(self, inputs: Inputs) -> dict[str, Tensor]:
        """Logits [B, P, V] of the predicted positions, or their scores."""
        assert inputs.predicted is not None, "only predicted positions have a query stream"
        assert self.mask_embedding is not None
        keys, at, rank = self._keys(inputs.dropout_key), inputs.predicted, inputs.extra["rank"]
        content, matrix, segments, _ = self._embed(inputs, keys.embeddings)
        # visible[b, i, j]: whether position i may read position j. With the ranks 0 2 1 of a b c, b
        # reads a and c, c reads a alone, and a reads a alone.
        visible = (rank[:, None, :] == 0) | (rank[:, None, :] < rank[:, :, None])
        if segments is not None:
            visible = visible & segment_mask(segments)[:, 0]
        # Only the content stream sees its own token: the query stream has to predict it.
        itself = torch.eye(rank.shape[1], dtype=torch.bool, device=rank.device)
        predicted = self.mask_embedding.expand(len(at), at.shape[1], -1).to(content.dtype)
        if keys.embeddings is not None:
            key = split_key(keys.embeddings, 1)[0]  # another mask than the content stream's
            predicted = dropout(predicted, self.config.dropout, key, at)
        context = Context(
            mask=(visible | itself)[:, None],
            sites=self.config.dropout_sites,
            keys=keys.layers,
            columns={
                **self.columns(inputs),
                "predicted": at,
                "visible": visible.take_along_dim(at.long()[..., None], 1)[:, None],
            },
        )
        # Passing the predicted positions marks the last layer, which needs no content stream.
        _, predicted = self.layers.run((content, predicted), None, None, context, at)
        hidden = self._finish(predicted, keys.final, at)
        return self.answer(_PERMUTED, self.head, inputs, hidden, matrix)

    def start_from(self, stored: Stored) -> Start:
        start = super().start_from(stored)
        unused = {"mask_embedding"} if self.mask_embedding is None else set()
        return replace(start, unused=start.unused | unused)

    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        """The content stream at all positions, and the query stream at the predicted ones.

        Keys of distances are projected once for a batch, and do not count; scores of distances
        do, and there are twice as many as of contents.
        """
        config = self.config
        layer = 6 * config.width * (2 * config.width + 2 * config.ffn_width)  # q, out, ffn
        keys = 6 * config.width * 2 * config.width
        attention = 24 * sequence_length * config.heads * config.head_width
        # The content stream skips the last layer, and the query stream has all of them.
        streams = config.layers - 1 + config.layers * predicted_per_token
        if config.head != "language_model":
            streams = config.layers - 1 + predicted_per_token
        shared = self.embedding_flops() + predicted_per_token * self.head_flops()
        return streams * (layer + attention) + config.layers * keys + shared
