"""XLNet in Hugging Face files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from samestep.tasks import TASKS
from trainer.models.codecs import ConfigJson, bert, settings
from trainer.models.codecs.tensors import join_tensors, keep_one, split_tensors
from trainer.models.config import Head
from trainer.models.families import xlnet

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


class Codec(bert.Codec[xlnet.Config]):
    """XLNet in Hugging Face files."""

    model_type: ClassVar[str] = "xlnet"
    architecture: ClassVar[str] = "XLNetLMHeadModel"
    causal_architecture: ClassVar[str] = ""
    special_ids: ClassVar[Mapping[str, int]] = {"pad_token_id": 0}
    nsp_names: ClassVar[Mapping[str, str]] = {}
    task_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **bert.Codec.task_names,
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
    # Variants of attention and of distances that no released model has.
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
    head_begins: ClassVar[tuple[str, ...]] = ("lm_loss.",)
    language_modules: ClassVar[tuple[str, ...]] = ("lm_loss",)
    bare_names: ClassVar[tuple[str, ...]] = ("word_embedding.", "mask_emb", "layer.")
    # In transformers these are parameters of the layer, not linear layers.
    targets_not_in_peft: ClassVar[frozenset[str]] = frozenset(
        {"query", "key", "value", "out", "relative"}
    )

    @classmethod
    def from_huggingface(
        cls, family: type[xlnet.Config], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> xlnet.Config:
        found = super().from_huggingface(family, {"summary_type": "last", **config}, tensors)
        # transformers has one rate for both.
        return replace(found, attention_dropout=found.dropout)

    @classmethod
    def _task_architecture(cls, head: Head) -> str:
        if head == "language_model" or head == "embedding":
            return super()._task_architecture(head)
        simple = "Simple" if head == "question_answering" else ""
        return f"XLNetFor{TASKS[head].architecture}{simple}"

    def to_huggingface(self) -> ConfigJson:
        config = self.config
        fields = {theirs: getattr(config, ours) for ours, theirs in self.their_settings.items()}
        if config.activation == "gelu_tanh":
            fields["ff_activation"] = "gelu_new"
        architecture = self.architecture
        if config.head != "language_model":
            architecture = self._task_architecture(config.head)
        return {
            "architectures": [architecture],
            "model_type": self.model_type,
            **fields,
            **self.their_constants,
            "d_head": config.head_width,
            # No memory from call to call: rows are independent of each other.
            "mem_len": None,
            "use_mems_eval": False,
            **self.pooled_constants,
            "summary_use_proj": True,
            "summary_last_dropout": config.dropout,
            **self.special_ids,
            **settings.name_labels(config.labels),
        }

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {self._canonical(name): _flat(name, each) for name, each in tensors.items()}
        if self.config.head == "language_model":
            keep_one(found, "transformer.word_embedding.weight", "lm_loss.weight")
        else:
            found.pop(_MASK, None)
        return join_tensors(found, self.tensor_names(), self.config)

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = split_tensors(parameters, self.tensor_names(), self.config)
        # transformers has the embedding of places in every model.
        flat.setdefault(_MASK, torch.zeros(self.config.width))
        return {name: self._shaped(name, each) for name, each in flat.items()}

    def _shaped(self, name: str, tensor: Tensor) -> Tensor:
        """The inverse of `_flat`."""
        config = self.config
        own, per_head = name.rpartition(".")[2], (config.heads, config.head_width)
        if own in ("q", "k", "v", "r"):
            return tensor.T.reshape(config.width, *per_head).contiguous()
        if own == "o":
            return tensor.view(config.width, *per_head)
        if own == "seg_embed":
            return tensor.view(2, *per_head)
        if own.startswith("r_"):
            return tensor.view(*per_head)
        return tensor.view(1, 1, -1) if own == "mask_emb" else tensor

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        config = self.config
        table: dict[str, tuple[str, ...]] = {
            "embeddings.tokens.weight": ("transformer.word_embedding.weight",)
        }
        for layer in range(config.layers):
            begin = f"transformer.layer.{layer}"
            table |= {
                f"layers.{layer}.{ours}": tuple(f"{begin}.{name}" for name in theirs)
                for ours, theirs in _LAYER.items()
            }
        if config.head == "language_model":
            return {**table, "mask_embedding": (_MASK,), "head.bias": ("lm_loss.bias",)}
        for ours, theirs in self.task_names.get(config.head, {}).items():
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
