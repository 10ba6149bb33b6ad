"""T5 in Hugging Face files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from torch import Tensor

from samestep.config import decode
from samestep.errors import ConfigError
from samestep.tasks import TASKS
from trainer.models import codecs
from trainer.models.codecs import ConfigJson, settings
from trainer.models.codecs.tensors import join_tensors, keep_one, split_tensors
from trainer.models.config import Head, TaskHead
from trainer.models.families import t5
from trainer.models.families.t5 import START

_FIELDS = {
    "vocab_size": "vocab_size",
    "layers": "num_layers",
    "decoder_layers": "num_decoder_layers",
    "width": "d_model",
    "heads": "num_heads",
    "head_width": "d_kv",
    "ffn_width": "d_ff",
    "relative_buckets": "relative_attention_num_buckets",
    "max_distance": "relative_attention_max_distance",
    "dropout": "dropout_rate",
    "norm_eps": "layer_norm_epsilon",
    "activation": "feed_forward_proj",
}
_OFTEN_ABSENT = {
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "relu",
    "num_decoder_layers": None,
}
_ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu_tanh", "gelu": "gelu", "gelu_new": "gelu_tanh"}
_ATTENTION = {"attention.qkv": ("q", "k", "v"), "attention.out": ("o",)}
_CROSS_ATTENTION = {
    "cross_attention.query": ("q",),
    "cross_attention.kv": ("k", "v"),
    "cross_attention.out": ("o",),
}
_EXPORTED: tuple[TaskHead, ...] = ("classification", "tagging", "question_answering")
"""Tasks for which transformers has a T5."""
_ARCHITECTURES: dict[str, str] = {
    "language_model": "T5ForConditionalGeneration",
    "embedding": "T5EncoderModel",
    **{kind: f"T5For{TASKS[kind].architecture}" for kind in _EXPORTED},
}
_POOLED = {"pooler": "classification_head.dense", "classifier": "classification_head.out_proj"}
_HEADS: dict[Head, dict[str, str]] = {
    "classification": _POOLED,
    "multiple_choice": _POOLED,
    "tagging": {"classifier": "classifier"},
    "question_answering": {"classifier": "qa_outputs"},
}
_DECODER = ("decoder.block", "decoder.final_layer_norm")
# Precedes all names of models with a task's head, except the head's own, and except question
# answering.
_PREFIX = "transformer."
# Stored by the first checkpoints.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_ALIASES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def _modules() -> dict[str, tuple[str, ...]]:
    """The modules of each architecture beside its encoder."""
    found = {
        _ARCHITECTURES[head]: (*_HEADS[head].values(), *(() if head == "tagging" else _DECODER))
        for head in _EXPORTED
    }
    return found | dict.fromkeys(("T5Model", _ARCHITECTURES["language_model"]), _DECODER)


class Codec(codecs.Codec[t5.Config]):
    """T5 in Hugging Face files."""

    model_type: ClassVar[str] = "t5"

    @classmethod
    def from_huggingface(
        cls, family: type[t5.Config], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> t5.Config:
        if config.get("model_type") == "mt5":
            # Its class never scales what the decoder says.
            config = {**settings.renamed(config, "t5", "MT5", "T5"), "scale_decoder_outputs": False}
        config = {**_OFTEN_ABSENT, **config}
        names = [name.removeprefix(_PREFIX) for name in tensors]
        settings.check_named(config, names, _modules())
        head, labels = settings.read_task(
            config, {head: _ARCHITECTURES[head] for head in _EXPORTED}
        )
        if head == "language_model" and names and not any(n.startswith("decoder.") for n in names):
            head = "embedding"
        fixed: ConfigJson = {"model_type": cls.model_type}
        if head not in ("tagging", "embedding"):
            fixed["is_encoder_decoder"] = True
        # These heads run the decoder on the shifted input, so its first token matters.
        if head in ("classification", "question_answering"):
            fixed["decoder_start_token_id"] = START
        fields = settings.read_settings(config, _FIELDS, fixed, _ACTIVATIONS)
        # transformers 5 sets tie_word_embeddings for every model; this key distinguishes v1.1.
        tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
        own = {
            "tied": tied,
            "attention_dropout": fields["dropout"],
            "head": head,
            "labels": list(labels),
        }
        decoded: t5.Config = decode(family, {**fields, **own}, "config.json")
        return decoded

    def to_huggingface(self) -> ConfigJson:
        config = self.config
        known = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
        if config.architecture != "encoder_decoder" or config.activation not in known:
            raise ConfigError(
                f"architecture {config.architecture} with activation {config.activation} cannot be "
                "exported: t5 in transformers is an encoder_decoder, and its gated activation is "
                "geglu_tanh. Train with those."
            )
        if config.head not in _ARCHITECTURES:
            raise ConfigError(
                f"a {config.head} head cannot be exported: t5 in transformers has none. Export the "
                "model that it was fine-tuned from."
            )
        return {
            "architectures": [_ARCHITECTURES[config.head]],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
            "feed_forward_proj": known[config.activation],
            "tie_word_embeddings": config.tied,
            "is_encoder_decoder": config.encoder_decoder,
            "pad_token_id": START,
            "eos_token_id": 1,
            "decoder_start_token_id": START,
            **({} if config.head == "language_model" else {"classifier_dropout": config.dropout}),
            **settings.name_labels(config.labels),
        }

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name.removeprefix(_PREFIX): tensors[name] for name in tensors}
        found.pop(_UNUSED, None)
        table = self._table()
        aliases = (*_ALIASES, "lm_head.weight") if self.config.tied else _ALIASES
        keep_one(found, "shared.weight", *aliases)
        has_own_head = "head.decoder.weight" in table
        if has_own_head and "lm_head.weight" not in found and "shared.weight" in found:
            # transformers 5 ties new models of v1.1, too, and then stores the matrix once.
            found["lm_head.weight"] = found["shared.weight"].clone()
        return join_tensors(found, table, self.config)

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return split_tensors(parameters, self.tensor_names(), self.config)

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        table = self._table()
        if self.config.head in ("language_model", "question_answering", "embedding"):
            return table
        # In these models only the head itself has no prefix.
        own = tuple(_HEADS[self.config.head].values())
        return {
            ours: tuple(name if name.startswith(own) else f"{_PREFIX}{name}" for name in names)
            for ours, names in table.items()
        }

    def _table(self) -> dict[str, tuple[str, ...]]:
        config = self.config
        table: dict[str, tuple[str, ...]] = {"embeddings.tokens.weight": ("shared.weight",)}
        # In our fused matrix the gate comes last.
        up = ("wi_1", "wi_0") if config.gated else ("wi",)
        for stack, layers in config.stacks.items():
            bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            table[f"{stack}_bias.weight"] = (bias,)
            table[f"{stack}_norm.weight"] = (f"{stack}.final_layer_norm.weight",)
            branches = [("attention", "SelfAttention", _ATTENTION)]
            if stack == "decoder":
                branches.append(("cross_attention", "EncDecAttention", _CROSS_ATTENTION))
            branches.append(("ffn", "DenseReluDense", {"ffn.up": up, "ffn.down": ("wo",)}))
            for layer in range(layers):
                for place, (branch, module, parts) in enumerate(branches):
                    theirs = f"{stack}.block.{layer}.layer.{place}"
                    norm = f"{theirs}.layer_norm.weight"
                    table[f"{stack}.{layer}.{branch}_norm.weight"] = (norm,)
                    for part, names in parts.items():
                        joined = tuple(f"{theirs}.{module}.{name}.weight" for name in names)
                        table[f"{stack}.{layer}.{part}.weight"] = joined
        for part, theirs in _HEADS.get(config.head, {}).items():
            for kind in ("weight", "bias"):
                table[f"head.{part}.{kind}"] = (f"{theirs}.{kind}",)
        if config.head == "language_model" and not config.tied:
            table["head.decoder.weight"] = ("lm_head.weight",)
        return table
