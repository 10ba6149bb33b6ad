"""BART in Hugging Face files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from samestep.config import decode
from samestep.tasks import TASKS
from trainer.models import codecs
from trainer.models.codecs import ConfigJson, settings
from trainer.models.codecs.tensors import join_tensors, keep_one, split_tensors
from trainer.models.config import Head, TaskHead
from trainer.models.families import bart

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


class Codec(codecs.Codec[bart.Config]):
    """BART in Hugging Face files."""

    model_type: ClassVar[str] = "bart"

    @classmethod
    def from_huggingface(
        cls, family: type[bart.Config], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> bart.Config:
        config = {**_OFTEN_ABSENT, **config}
        heads: dict[Head, str] = {head: _ARCHITECTURES[head] for head in _HEADS}
        modules = {_ARCHITECTURES[head]: tuple(_HEADS[head].values()) for head in _HEADS}
        settings.check_named(config, tuple(tensors), modules)
        head, labels = settings.read_task(config, heads)
        fixed = {"model_type": cls.model_type, **_FIXED}
        # samestep has one number of heads and one inner width for both stacks.
        for name in ("attention_heads", "ffn_dim"):
            if f"encoder_{name}" in config:
                fixed[f"decoder_{name}"] = config[f"encoder_{name}"]
        fields = settings.read_settings(config, _FIELDS, fixed, settings.ACTIVATIONS)
        if fields["decoder_layers"] == fields["layers"]:
            fields["decoder_layers"] = None
        decoded: bart.Config = decode(
            family, {**fields, "head": head, "labels": list(labels)}, "config.json"
        )
        return decoded

    def to_huggingface(self) -> ConfigJson:
        config = self.config
        activation = settings.write_activation(
            config.activation, settings.ACTIVATIONS, self.model_type
        )
        return {
            "architectures": [_ARCHITECTURES[config.head]],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
            "decoder_layers": config.stacks["decoder"],
            "decoder_attention_heads": config.heads,
            "decoder_ffn_dim": config.ffn_width,
            "activation_function": activation,
            "is_encoder_decoder": True,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "pad_token_id": 1,
            "eos_token_id": config.start_token,
            # By default transformers puts </s> at the end of texts of the maximum length.
            "forced_eos_token_id": None,
            **settings.name_labels(config.labels),
        }

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        config = self.config
        found = {}
        for name, tensor in tensors.items():
            # A checkpoint of the bare model (BartModel) has no "model." before its names.
            is_bare = name.startswith(("shared.", "encoder.", "decoder."))
            full = f"model.{name}" if is_bare else name
            if not _UNUSED.fullmatch(full):
                found[full] = tensor
        keep_one(found, "model.shared.weight", *_ALIASES)
        bias = found.pop(_LOGITS_BIAS, None)
        if config.head == "language_model":
            # The bare model has none, for which transformers takes zeros.
            found[_LOGITS_BIAS] = torch.zeros(config.vocab_size) if bias is None else bias.flatten()
        return join_tensors(found, self.tensor_names(), config)

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        exported = split_tensors(parameters, self.tensor_names(), self.config)
        if _LOGITS_BIAS in exported:
            exported[_LOGITS_BIAS] = exported[_LOGITS_BIAS][None]
        return exported

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        config = self.config
        table: dict[str, tuple[str, ...]] = {"embeddings.tokens.weight": ("model.shared.weight",)}
        modules: dict[str, tuple[str, ...]] = {}
        for stack, layers in config.stacks.items():
            positions = f"{stack}_positions"
            table[f"{positions}.table.weight"] = (f"model.{stack}.embed_positions.weight",)
            modules[f"{positions}.norm"] = (f"model.{stack}.layernorm_embedding",)
            for layer in range(layers):
                begin = f"model.{stack}.layers.{layer}"
                for ours, theirs in _LAYERS[stack].items():
                    joined = tuple(f"{begin}.{name}" for name in theirs)
                    modules[f"{stack}.{layer}.{ours}"] = joined
        if config.head == "language_model":
            table["head.bias"] = (_LOGITS_BIAS,)
        else:
            parts = next(parts for head, parts in _HEADS.items() if head == config.head)
            modules |= {f"head.{part}": (name,) for part, name in parts.items()}
        # Each of these modules has a weight and a bias.
        for ours, names in modules.items():
            for kind in ("weight", "bias"):
                table[f"{ours}.{kind}"] = tuple(f"{name}.{kind}" for name in names)
        return table
