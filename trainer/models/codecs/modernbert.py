"""ModernBERT in Hugging Face files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from samestep.errors import ConfigError
from trainer.models.codecs import ConfigJson, bert, settings
from trainer.models.config import Activation
from trainer.models.families import modernbert

_THETAS = {"global_theta": "full_attention", "local_theta": "sliding_attention"}
_TASKS = {"dense": "head.dense", "norm": "head.norm", "classifier": "classifier"}


class Codec(bert.Codec[modernbert.Config]):
    """ModernBERT in Hugging Face files."""

    model_type: ClassVar[str] = "modernbert"
    prefix_in_peft: ClassVar[bool] = False
    architecture: ClassVar[str] = "ModernBertForMaskedLM"
    causal_architecture: ClassVar[str] = ""
    head_names: ClassVar[Mapping[str, str]] = {
        "dense": "head.dense",
        "norm": "head.norm",
        "bias": "decoder.bias",
        "decoder": "decoder",
    }
    nsp_names: ClassVar[Mapping[str, str]] = {}
    task_names: ClassVar[Mapping[str, Mapping[str, str]]] = dict.fromkeys(
        bert.Codec.task_names, _TASKS
    )
    their_settings: ClassVar[Mapping[str, str]] = {
        "vocab_size": "vocab_size",
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "ffn_width": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "attention_dropout": "attention_dropout",
        "norm_eps": "norm_eps",
        "activation": "hidden_activation",
        "tied": "tie_word_embeddings",
        "initializer_range": "initializer_range",
        "head_dropout": "classifier_dropout",
        "local_window": "local_attention",
    }
    their_constants: ClassVar[Mapping[str, object]] = {
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "decoder_bias": True,
        "classifier_bias": False,
        "classifier_activation": "gelu",
    }
    pooled_constants: ClassVar[Mapping[str, object]] = {"classifier_pooling": "cls"}
    their_activations: ClassVar[Mapping[str, Activation]] = {
        "gelu": "geglu",
        "gelu_pytorch_tanh": "geglu_tanh",
        "silu": "swiglu",
    }
    head_begins: ClassVar[tuple[str, ...]] = ("decoder.",)
    language_modules: ClassVar[tuple[str, ...]] = ("head.dense", "head.norm", "decoder")
    bare_names: ClassVar[tuple[str, ...]] = ("embeddings.", "layers.", "final_norm.")

    @classmethod
    def from_huggingface(
        cls, family: type[modernbert.Config], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> modernbert.Config:
        found = super().from_huggingface(family, config, tensors)
        rope = config.get("rope_parameters") or {}
        thetas: dict[str, float] = {}
        for ours, kind in _THETAS.items():
            settings = rope.get(kind) or {}
            if settings.get("rope_type", "default") != "default":
                raise ConfigError(
                    f"config.json has rope_type {settings['rope_type']!r} for {kind}. Only default "
                    "is supported."
                )
            # Older files have "global_rope_theta" and "local_rope_theta" beside the other settings.
            old = config.get(ours.replace("_theta", "_rope_theta"), getattr(family, ours))
            if old is None:  # null for local layers: as in global ones
                old = thetas.get("global_theta", family.global_theta)
            thetas[ours] = float(settings.get("rope_theta", old))
        # Newer files list the kind of every layer; older ones have the number.
        every = config.get("global_attn_every_n_layers", 3)
        kinds = config.get("layer_types")
        if kinds is not None:
            others = (n for n in range(1, len(kinds)) if kinds[n] == "full_attention")
            every = next(others, len(kinds))
        found = replace(
            found,
            global_every=int(every),
            global_theta=thetas["global_theta"],
            local_theta=thetas["local_theta"],
        )
        if kinds is not None and list(kinds) != cls(found)._layer_types():
            raise ConfigError(
                "config.json has layer_types that do not repeat. Only one global layer in every n, "
                "from the first on, is supported."
            )
        return found

    def _layer_types(self) -> list[str]:
        kinds = ("sliding_attention", "full_attention")
        return [kinds[self.config.is_global(index)] for index in range(self.config.layers)]

    def to_huggingface(self) -> ConfigJson:
        config = self.config
        self.check_export_of_head()
        if config.causal:
            raise ConfigError(
                "causal is true, but transformers has no causal modernbert. Use the checkpoint "
                "with samestep."
            )
        # Dropout after attention has no key: transformers does not apply it.
        fields = {theirs: getattr(config, ours) for ours, theirs in self.their_settings.items()}
        names = {ours: theirs for theirs, ours in self.their_activations.items()}
        architecture = self.architecture
        if config.head != "language_model":
            architecture = self._task_architecture(config.head)
        return {
            "architectures": [architecture],
            "model_type": self.model_type,
            **fields,
            **self.their_constants,
            **self.pooled_constants,
            "hidden_activation": names[config.activation],
            "layer_types": self._layer_types(),
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": getattr(config, ours)}
                for ours, kind in _THETAS.items()
            },
            # Older versions of transformers read these.
            "global_attn_every_n_layers": config.global_every,
            "global_rope_theta": config.global_theta,
            "local_rope_theta": config.local_theta,
            **self.special_ids,
            # The defaults are ids of the published tokenizer, which a smaller vocabulary lacks.
            **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
            **settings.name_labels(config.labels),
        }

    def import_rows(self, name: str, rows: Tensor) -> Tensor:
        # The halves of a gated projection: here the second is activated, there the first.
        return torch.cat(rows.chunk(2)[::-1]) if name.endswith("mlp.Wi.weight") else rows

    def export_rows(self, name: str, rows: Tensor) -> Tensor:
        return self.import_rows(name, rows)  # exchanging the halves is its own inverse

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        config = self.config
        modules = {
            "embeddings.tokens": "model.embeddings.tok_embeddings",
            "embeddings.norm": "model.embeddings.norm",
            "final_norm": "model.final_norm",
        }
        if config.head != "embedding":
            modules |= {"head.dense": "head.dense", "head.norm": "head.norm"}
        for layer in range(config.layers):
            own = {
                "attention_norm": "attn_norm",
                "attention.qkv": "attn.Wqkv",
                "attention.out": "attn.Wo",
                "ffn_norm": "mlp_norm",
                "ffn.up": "mlp.Wi",
                "ffn.down": "mlp.Wo",
            }
            if layer == 0:
                del own["attention_norm"]
            modules |= {
                f"layers.{layer}.{ours}": f"model.layers.{layer}.{name}"
                for ours, name in own.items()
            }
        table: dict[str, tuple[str, ...]] = {
            f"{ours}.weight": (f"{theirs}.weight",) for ours, theirs in modules.items()
        }
        if config.head == "language_model":
            table["head.bias"] = ("decoder.bias",)
            if not config.tied:
                table["head.decoder.weight"] = ("decoder.weight",)
        elif config.head in self.task_names:
            for kind in ("weight", "bias"):
                table[f"head.classifier.{kind}"] = (f"classifier.{kind}",)
        return table

    @classmethod
    def _canonical(cls, name: str) -> str:
        return f"model.{name}" if name.startswith(cls.bare_names) else name
