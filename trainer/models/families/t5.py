"""T5 (Raffel et al. 2020), T5 v1.1 (Shazeer 2020), and their names in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeAlias

from torch import Tensor, nn

from samestep.config import decode
from samestep.errors import ConfigError
from samestep.tasks import TASKS
from trainer.models import huggingface
from trainer.models.config import Activation, Head, NormKind, TaskHead
from trainer.models.encoder_decoder import EncoderDecoder
from trainer.models.family import Family
from trainer.models.heads import LanguageModelHead, PooledHead, TokenHead
from trainer.models.huggingface import ConfigJson
from trainer.models.layers.relative import RelativeBias
from trainer.models.transformer import Transformer

START = 0
"""Id of the decoder's first input token, which is padding."""

Architecture: TypeAlias = Literal[
    "encoder_decoder", "shared_encoder_decoder", "language_model", "prefix_lm"
]

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
    **{kind: f"T5For{TASKS[kind].architecture}" for kind in _EXPORTED},
}
_POOLED = {"pooler": "classification_head.dense", "classifier": "classification_head.out_proj"}
_HEADS: dict[Head, dict[str, str]] = {
    "classification": _POOLED,
    "multiple_choice": _POOLED,
    "tagging": {"classifier": "classifier"},
    "question_answering": {"classifier": "qa_outputs"},
}
# Precedes all names of models with a task's head, except the head's own, and except question
# answering.
_PREFIX = "transformer."
# Stored by the first checkpoints.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_ALIASES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


@dataclass(frozen=True)
class Config(Family):
    """T5-base; with `tied: false`, `activation: geglu_tanh` and `ffn_width: 2048`, T5 v1.1-base.

    Attributes:
        heads: H, attention heads.
        head_width: K, the width of an attention head; heads need not fill the width.
        dropout: dropout rate of embeddings, inside the feed-forward network, of each branch's
            output and after the last norm.
        decoder_layers: number of the decoder's layers, if it differs from `layers`.
        architecture: see section 3.2.1. `shared_encoder_decoder` uses the same layers in both
            stacks; `language_model` and `prefix_lm` have a decoder only, the latter with relative
            positions in both directions.
        tied: whether the head shares the token embeddings and scales hidden states by
            width ** -0.5 (v1.0); v1.1 does neither.
        relative_buckets: number of buckets of relative positions.
        relative_std: standard deviation of the initial relative biases; null: width ** -0.5, as for
            linear layers. Scores have a deviation of about 1, so with the default attention hardly
            sees positions at first; very small models learn more with 2.
        max_distance: all larger distances share a bucket.
        head: predicts tokens (`language_model`); or, fine-tuned for a task, from the decoder, which
            gets the text too: its class (`classification`), a score for choosing among texts
            (`multiple_choice`), or the first and last token of an answer (`question_answering`);
            or from the encoder, without a decoder: a tag for each token (`tagging`).
        labels: names of classes or tags; `classification` with a single label is a regression.
    """

    model_type: ClassVar[str] = "t5"

    vocab_size: int = 32128
    head_width: int = 64
    decoder_layers: int | None = None
    norm_eps: float = 1e-6
    activation: Activation = "relu"
    architecture: Architecture = "encoder_decoder"
    tied: bool = True
    relative_buckets: int = 32
    relative_std: float | None = None
    max_distance: int = 128
    head: Head = "language_model"
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head != "language_model" and self.architecture != "encoder_decoder":
            raise ConfigError(
                f"architecture {self.architecture} is for language models, but head is "
                f"{self.head}. Set architecture to encoder_decoder, or leave head out."
            )
        self.check_task(*_HEADS)
        self.check_positive("head_width")
        if self.decoder_layers is not None:
            self.check_positive("decoder_layers")
        one_stack = self.architecture != "encoder_decoder"
        if one_stack and self.decoder_layers not in (None, self.layers):
            raise ConfigError(
                f"decoder_layers is {self.decoder_layers}, but architecture {self.architecture} "
                f"has one stack of {self.layers} layers. Leave decoder_layers out."
            )
        if self.relative_buckets < 4 or self.relative_buckets % 4:
            raise ConfigError(
                f"relative_buckets is {self.relative_buckets}. Use a multiple of 4, such as 32."
            )
        if self.relative_std is not None and self.relative_std <= 0:
            raise ConfigError(
                f"relative_std is {self.relative_std}. Use a positive number, or null."
            )
        if self.max_distance <= self.relative_buckets // 2:
            raise ConfigError(
                f"max_distance is {self.max_distance}, but {self.relative_buckets} buckets need "
                f"more than {self.relative_buckets // 2}. Use 128, for example."
            )

    @property
    def start_token(self) -> int | None:
        return START

    @property
    def attention_scale(self) -> float | None:
        return 1.0  # the initial weights of the queries contain the scale

    @property
    def norm_kind(self) -> NormKind:
        return "rms"

    @property
    def projection_bias(self) -> bool:
        return False

    @property
    def settings_for(self) -> Mapping[str, str]:
        outputs: dict[Architecture, str] = {
            "encoder_decoder": "target_tokens",
            "prefix_lm": "prefixed_tokens",
            "language_model": "next_tokens",
        }
        heads = {head: f"model.head={head}" for head in _HEADS}
        if self.head != "language_model":
            return heads | dict.fromkeys(outputs.values(), "model.head=language_model")
        return heads | {out: f"model.architecture={name}" for name, out in outputs.items()}

    @property
    def encoder_decoder(self) -> bool:
        return self.decoder and not self.causal

    @property
    def reads_sources(self) -> bool:
        return not self.causal or self.prefix_lm

    @property
    def causal(self) -> bool:
        return self.architecture in ("language_model", "prefix_lm")

    @property
    def decoder(self) -> bool:
        return self.head != "tagging"

    @property
    def prefix_lm(self) -> bool:
        return self.architecture == "prefix_lm"

    @property
    def dropout_sites(self) -> tuple[str, ...]:
        of_branches = ("attention", "attention_output", "ffn_output")
        return (*of_branches, "ffn_hidden", "cross_attention", "cross_attention_output")

    @property
    def final_dropout(self) -> bool:
        return True

    def initial_std(self, name: str) -> tuple[float, ...]:
        """As in mesh-tensorflow; an untied head too, which transformers initializes with 1."""
        width, query = self.width**-0.5, (self.width * self.head_width) ** -0.5
        # Queries absorb the missing scale of the scores, 1 / sqrt(K).
        of_ends = {
            "attention.qkv.weight": (query, width, width),
            "attention.query.weight": (query,),
            "attention.kv.weight": (width, width),
            "attention.out.weight": ((self.heads * self.head_width) ** -0.5,),
            ".ffn.down.weight": (self.ffn_width**-0.5,),
            "embeddings.tokens.weight": (1.0,),
            "_bias.weight": (width if self.relative_std is None else self.relative_std,),
        }
        return next((stds for end, stds in of_ends.items() if name.endswith(end)), (width,))

    def build_base(self) -> EncoderDecoder | Transformer:
        head = self._build_head()
        if self.causal:
            return Transformer(self, head, relative_bias=self._bias(bidirectional=self.prefix_lm))
        return EncoderDecoder(
            self,
            head,
            encoder_bias=self._bias(bidirectional=True),
            decoder_bias=self._bias(bidirectional=False),
            decoder_layers=self._stacks.get("decoder", 0),
            shared=self.architecture == "shared_encoder_decoder",
        )

    @property
    def _stacks(self) -> dict[str, int]:
        """Number of layers of each stack."""
        decoder = {"decoder": self.decoder_layers or self.layers} if self.decoder else {}
        return {"encoder": self.layers, **decoder}

    def _build_head(self) -> nn.Module:
        if self.head == "language_model":
            return LanguageModelHead(self, scale=self.width**-0.5)
        if self.head in ("classification", "multiple_choice"):
            return PooledHead(self, self.classes, dropout_first=True)
        drops = self.head == "tagging"
        return TokenHead(self.width, self.classes, self.head_dropout if drops else 0.0)

    def _bias(self, bidirectional: bool) -> RelativeBias:
        return RelativeBias(self.relative_buckets, self.max_distance, self.heads, bidirectional)

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
            head: (_ARCHITECTURES[head], f"{_HEADS[head]['classifier']}.weight")
            for head in _EXPORTED
        }
        head, labels = huggingface.read_task(config, tuple(tensors), heads)
        fixed: dict[str, Any] = {"model_type": cls.model_type}
        if head != "tagging":
            fixed["is_encoder_decoder"] = True
        # These heads run the decoder on the shifted input, so its first token matters.
        if head in ("classification", "question_answering"):
            fixed["decoder_start_token_id"] = START
        fields = huggingface.read_settings(config, _FIELDS, fixed, _ACTIVATIONS)
        # transformers 5 sets tie_word_embeddings for every model; this key distinguishes v1.1.
        tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
        own = {
            "tied": tied,
            "attention_dropout": fields["dropout"],
            "head": head,
            "labels": list(labels),
        }
        decoded: Self = decode(cls, {**fields, **own}, "config.json")
        return decoded

    def to_huggingface(self) -> ConfigJson:
        known = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
        if self.architecture != "encoder_decoder" or self.activation not in known:
            raise ConfigError(
                f"architecture {self.architecture} with activation {self.activation} cannot be "
                "exported: t5 in transformers is an encoder_decoder, and its gated activation is "
                "geglu_tanh. Train with those."
            )
        if self.head not in _ARCHITECTURES:
            raise ConfigError(
                f"a {self.head} head cannot be exported: t5 in transformers has none. Export the "
                "model that it was fine-tuned from."
            )
        return {
            "architectures": [_ARCHITECTURES[self.head]],
            "model_type": self.model_type,
            **{theirs: getattr(self, ours) for ours, theirs in _FIELDS.items()},
            "feed_forward_proj": known[self.activation],
            "tie_word_embeddings": self.tied,
            "is_encoder_decoder": self.encoder_decoder,
            "pad_token_id": START,
            "eos_token_id": 1,
            "decoder_start_token_id": START,
            **({} if self.head == "language_model" else {"classifier_dropout": self.dropout}),
            **huggingface.name_labels(self.labels),
        }

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name.removeprefix(_PREFIX): tensors[name] for name in tensors}
        found.pop(_UNUSED, None)
        table = self._table()
        aliases = (*_ALIASES, "lm_head.weight") if self.tied else _ALIASES
        huggingface.keep_one(found, "shared.weight", *aliases)
        has_own_head = "head.decoder.weight" in table
        if has_own_head and "lm_head.weight" not in found and "shared.weight" in found:
            # transformers 5 ties new models of v1.1, too, and then stores the matrix once.
            found["lm_head.weight"] = found["shared.weight"].clone()
        return huggingface.join_tensors(found, table, self)

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return huggingface.split_tensors(parameters, self.tensor_names(), self)

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        """Parameter name -> names of transformers' tensors that are concatenated in its rows."""
        table = self._table()
        if self.head in ("language_model", "question_answering"):
            return table
        # In these models only the head itself has no prefix.
        own = tuple(_HEADS[self.head].values())
        return {
            ours: tuple(name if name.startswith(own) else f"{_PREFIX}{name}" for name in names)
            for ours, names in table.items()
        }

    def _table(self) -> dict[str, tuple[str, ...]]:
        table: dict[str, tuple[str, ...]] = {"embeddings.tokens.weight": ("shared.weight",)}
        up = ("wi_1", "wi_0") if self.gated else ("wi",)  # in our fused matrix the gate comes last
        for stack, layers in self._stacks.items():
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
        for part, theirs in _HEADS.get(self.head, {}).items():
            for kind in ("weight", "bias"):
                table[f"head.{part}.{kind}"] = (f"{theirs}.{kind}",)
        if self.head == "language_model" and not self.tied:
            table["head.decoder.weight"] = ("lm_head.weight",)
        return table
