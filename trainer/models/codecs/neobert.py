"""NeoBERT in the files of its release, whose code is beside the weights (`trust_remote_code`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from samestep.errors import ConfigError
from trainer.models.codecs import ConfigJson, bert, settings
from trainer.models.config import Activation, Head
from trainer.models.families import neobert

_MULTIPLE = 8  # of the width of the feed-forward network
_CLASSES: Mapping[Head, str] = {
    "language_model": "NeoBERTLMHead",
    "classification": "NeoBERTForSequenceClassification",
    "embedding": "NeoBERT",
}
_AUTO = {
    "AutoModel": _CLASSES["embedding"],
    "AutoModelForMaskedLM": _CLASSES["language_model"],
    "AutoModelForSequenceClassification": _CLASSES["classification"],
}
# Defaults of the published code.
_OFTEN_ABSENT = {
    "hidden_act": "swiglu",
    "norm_eps": 1e-6,
    "max_length": 1024,
    "decoder_init_range": 0.02,
    "classifier_dropout": 0.1,
}


class Codec(bert.Codec[neobert.Config]):
    """NeoBERT in the files of its release."""

    model_type: ClassVar[str] = "neobert"
    prefix: ClassVar[str] = "model"
    prefix_in_peft: ClassVar[bool] = False
    prompt_in_peft: ClassVar[bool] = False
    code: ClassVar[str] = "chandar-lab/NeoBERT"
    packages: ClassVar[tuple[str, ...]] = ("xformers",)
    architecture: ClassVar[str] = _CLASSES["language_model"]
    causal_architecture: ClassVar[str] = ""
    head_names: ClassVar[Mapping[str, str]] = {"bias": "decoder.bias", "decoder": "decoder"}
    language_modules: ClassVar[tuple[str, ...]] = ("decoder",)
    nsp_names: ClassVar[Mapping[str, str]] = {}
    task_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        **bert.Codec.task_names,
        "classification": {"pooler": "dense", "classifier": "classifier"},
        "multiple_choice": {"pooler": "dense", "classifier": "classifier"},
    }
    their_settings: ClassVar[Mapping[str, str]] = {
        "vocab_size": "vocab_size",
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "ffn_width": "intermediate_size",
        "max_positions": "max_length",
        "norm_eps": "norm_eps",
        "activation": "hidden_act",
        "initializer_range": "decoder_init_range",
        "head_dropout": "classifier_dropout",
    }
    # Settings of the code that trained it; the published code has these values as constants.
    their_constants: ClassVar[Mapping[str, object]] = {
        "rope": True,
        "rms_norm": True,
        "ngpt": False,
        "rope_theta": neobert.THETA,
        "rope_scaling": None,
    }
    their_activations: ClassVar[Mapping[str, Activation]] = {"swiglu": "swiglu"}
    bare_names: ClassVar[tuple[str, ...]] = ("encoder.", "transformer_encoder.", "layer_norm.")

    @classmethod
    def from_huggingface(
        cls, family: type[neobert.Config], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> neobert.Config:
        config = {**_OFTEN_ABSENT, **config}
        config["hidden_act"] = str(config["hidden_act"]).lower()
        inner = config.get("intermediate_size")
        if isinstance(inner, int):
            # Two thirds, as the gate has the other third: 3,072 is a width of 2,048.
            config["intermediate_size"] = -(int(2 * inner / 3) // -_MULTIPLE) * _MULTIPLE
        return super().from_huggingface(family, config, tensors)

    @classmethod
    def _task_architecture(cls, head: Head) -> str:
        return _CLASSES.get(head, "")

    def to_huggingface(self) -> ConfigJson:
        config = self.config
        self.check_export_of_head()
        if config.causal or config.head not in _CLASSES:
            model = "left-to-right model" if config.causal else f"{config.head} head"
            raise ConfigError(
                f"NeoBERT's published code has no {model}. Use the checkpoint with samestep."
            )
        if config.ffn_width % _MULTIPLE:
            raise ConfigError(
                f"ffn_width {config.ffn_width} cannot be exported: NeoBERT's published code needs "
                f"a multiple of {_MULTIPLE}. Train with one."
            )
        # Dropout in layers has no key: the published code has none.
        fields = {theirs: getattr(config, ours) for ours, theirs in self.their_settings.items()}
        return {
            "architectures": [_CLASSES[config.head]],
            "model_type": self.model_type,
            "auto_map": {
                auto: f"{self.code}--model.{name}"
                for auto, name in {"AutoConfig": "NeoBERTConfig", **_AUTO}.items()
            },
            **fields,
            # The published code takes two thirds of it: 2,048 is written as 3,072.
            "intermediate_size": config.ffn_width * 3 // 2,
            "embedding_init_range": config.initializer_range,
            "classifier_init_range": config.initializer_range,
            **self.special_ids,
            **settings.name_labels(config.labels),
        }

    def import_rows(self, name: str, rows: Tensor) -> Tensor:
        if name.endswith("ffn.w12.weight"):
            # The halves of a gated projection: here the second is activated, there the first.
            return torch.cat(rows.chunk(2)[::-1])
        if not name.endswith("qkv.weight"):
            return rows
        # Theirs are query, key and value of each head, and rotate neighboring features. With K = 4,
        # features 0 1 2 3 of a query or key become 0 2 1 3: pairs are half the head apart here.
        pairs = rows.reshape(self.config.heads, 3, -1, 2, rows.shape[1]).transpose(0, 1)
        rotated = pairs[:2].transpose(2, 3)
        return torch.cat([part.reshape(-1, rows.shape[1]) for part in (rotated, pairs[2])])

    def export_rows(self, name: str, rows: Tensor) -> Tensor:
        if not name.endswith("qkv.weight"):
            return self.import_rows(name, rows)  # exchanging the halves is its own inverse
        # The inverse of `import_rows`: features 0 2 1 3 of a query or key become 0 1 2 3 again.
        halves = rows.reshape(3, self.config.heads, 2, -1, rows.shape[1])
        parts = (halves[:2].transpose(2, 3), halves[2:])
        whole = [part.reshape(-1, *halves.shape[1:]) for part in parts]
        return torch.cat(whole).transpose(0, 1).reshape(rows.shape)

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        config = self.config
        modules = {"embeddings.tokens": "model.encoder", "final_norm": "model.layer_norm"}
        for layer in range(config.layers):
            own = {
                "attention_norm": "attention_norm",
                "attention.qkv": "qkv",
                "attention.out": "wo",
                "ffn_norm": "ffn_norm",
                "ffn.up": "ffn.w12",
                "ffn.down": "ffn.w3",
            }
            modules |= {
                f"layers.{layer}.{ours}": f"model.transformer_encoder.{layer}.{theirs}"
                for ours, theirs in own.items()
            }
        table: dict[str, tuple[str, ...]] = {
            f"{ours}.weight": (f"{theirs}.weight",) for ours, theirs in modules.items()
        }
        if config.head == "language_model":
            table["head.decoder.weight"] = ("decoder.weight",)
            table["head.bias"] = ("decoder.bias",)
        for part, theirs in self.task_names.get(config.head, {}).items():
            for kind in ("weight", "bias"):
                table[f"head.{part}.{kind}"] = (f"{theirs}.{kind}",)
        return table
