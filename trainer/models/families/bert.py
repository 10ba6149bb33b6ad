"""BERT (Devlin et al. 2019), and its names in Hugging Face checkpoints."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from torch import Tensor, nn

from samestep.config import decode
from samestep.errors import ConfigError
from samestep.tasks import TASKS
from trainer.models import huggingface
from trainer.models.base import POOLED
from trainer.models.config import Activation, Head, Norm, Pooling, TaskHead, check_task_parts
from trainer.models.family import Family
from trainer.models.heads import (
    EmbeddingHead,
    MaskedLMHead,
    NextSentenceHead,
    PooledHead,
    SpanBoundaryHead,
    TokenHead,
)
from trainer.models.huggingface import ConfigJson
from trainer.models.transformer import Transformer

logger = logging.getLogger(__name__)

_FIELDS = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_width": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab": "type_vocab_size",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "norm_eps": "layer_norm_eps",
    "activation": "hidden_act",
    "causal": "is_decoder",
    "tied": "tie_word_embeddings",
    "initializer_range": "initializer_range",
}
# transformers leaves settings with their default values out of config.json.
_OFTEN_ABSENT = {
    "is_decoder": False,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}

_EMBEDDINGS = {
    "tokens.weight": "embeddings.word_embeddings.weight",
    "positions.weight": "embeddings.position_embeddings.weight",
    "types.weight": "embeddings.token_type_embeddings.weight",
    "norm.weight": "embeddings.LayerNorm.weight",
    "norm.bias": "embeddings.LayerNorm.bias",
}
# Query, key and value are one matrix here: their rows are concatenated.
_LAYER = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.out": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "ffn.up": ("intermediate.dense",),
    "ffn.down": ("output.dense",),
    "ffn_norm": ("output.LayerNorm",),
}
_TASKS: tuple[TaskHead, ...] = (
    "classification",
    "multiple_choice",
    "tagging",
    "question_answering",
)
# Many checkpoints have a next-sentence head that a model may lack, to which the pooler belongs:
# "bert.pooler.dense.weight".
_PAIR_HEAD = re.compile(r"(\w+\.)?(pooler\.dense|seq_relationship)\.\w+")
# Stored by older versions of transformers.
_BUFFERS = re.compile(r"(\w+\.)?embeddings\.(position|token_type)_ids")


@dataclass(frozen=True)
class Config(Family):
    """BERT-base, uncased.

    Attributes:
        max_positions: maximum sequence length, in tokens.
        type_vocab: number of token types.
        norm: "post" (BERT) or "pre" (adds a norm after the last layer).
        causal: whether tokens attend only to earlier ones (a left-to-right language model, or one
            that is fine-tuned for tagging or question answering).
        also_causal: whether the model also offers left-to-right language modeling, for phases with
            different objectives; for all other outputs, tokens attend in both directions.
        tied: whether the head shares the token embeddings.
        initializer_range: standard deviation of the initial weights.
        nsp: adds a pooler and a head that predicts whether the second of two segments follows the
            first (BERT).
        span_boundary: adds a head that predicts the tokens of a masked span from the states around
            it (SpanBERT).
        teacher_width: the width of the teacher in a distillation with the term `hidden` (TinyBERT);
            hidden states are projected to it. 0: no projection.
        head: predicts tokens (`language_model`); or, fine-tuned for a task, the class of a text or
            pair (`classification`), the right one of several texts (`multiple_choice`), a tag for
            each token (`tagging`), or the first and last token of an answer
            (`question_answering`), or embeds texts (`embedding`).
        scalar_mix: whether a task's head reads a learned mean of all layers instead of the last
            one, for a frozen encoder (`frozen: [embeddings, layers]`).
        head_lstm: number of bidirectional LSTM layers between hidden states and a task's head, half
            as wide as the hidden states in each direction; for a frozen encoder, too.
        crf: scores transitions between tags, for `objective: {kind: tagging, crf: true}`.
        labels: names of classes or tags; `classification` with a single label is a regression.
    """

    model_type: ClassVar[str] = "bert"
    prefix: ClassVar[str] = ""  # of names in checkpoints, if it is not the model type
    prefix_in_peft: ClassVar[bool] = True
    architecture: ClassVar[str] = "BertForMaskedLM"
    causal_architecture: ClassVar[str] = "BertLMHeadModel"
    special_ids: ClassVar[Mapping[str, int]] = {"pad_token_id": 0}
    head_names: ClassVar[Mapping[str, str]] = {
        "dense": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.LayerNorm",
        "bias": "cls.predictions.bias",
        "decoder": "cls.predictions.decoder",
    }
    nsp_names: ClassVar[Mapping[str, str]] = {
        "pooler": "bert.pooler.dense",
        "classifier": "cls.seq_relationship",
    }
    task_names: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "classification": {"pooler": "bert.pooler.dense", "classifier": "classifier"},
        "multiple_choice": {"pooler": "bert.pooler.dense", "classifier": "classifier"},
        "tagging": {"classifier": "classifier"},
        "question_answering": {"classifier": "qa_outputs"},
    }
    classification_drops_first: ClassVar[bool] = False
    # What other families with BERT's modules replace: settings and parameters, our name -> theirs.
    their_settings: ClassVar[Mapping[str, str]] = _FIELDS
    their_constants: ClassVar[Mapping[str, object]] = {
        "position_embedding_type": "absolute",
        "add_cross_attention": False,
    }
    # What their heads that pool one position need besides.
    pooled_constants: ClassVar[Mapping[str, object]] = {}
    embedding_names: ClassVar[Mapping[str, str]] = _EMBEDDINGS
    layer_names: ClassVar[Mapping[str, tuple[str, ...]]] = _LAYER
    optional_names: ClassVar[re.Pattern[str]] = _PAIR_HEAD
    their_activations: ClassVar[Mapping[str, Activation]] = huggingface.ACTIVATIONS
    bare_names: ClassVar[tuple[str, ...]] = ("embeddings.", "encoder.", "pooler.")
    pooler_activation: ClassVar[Pooling] = "tanh"
    heads_with_dropout: ClassVar[frozenset[str]] = frozenset({"tagging"})
    fewest_types: ClassVar[int] = 1

    vocab_size: int = 30522
    max_positions: int = 512
    type_vocab: int = 2
    norm_eps: float = 1e-12
    norm: Norm = "post"
    causal: bool = False
    also_causal: bool = False
    tied: bool = True
    initializer_range: float = 0.02
    nsp: bool = False
    span_boundary: bool = False
    teacher_width: int = 0
    head: Head = "language_model"
    scalar_mix: bool = False
    head_lstm: int = 0
    crf: bool = False
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("max_positions")
        if self.type_vocab < self.fewest_types:
            raise ConfigError(f"type_vocab is {self.type_vocab}. Use {self.fewest_types} or more.")
        if not self.initializer_range > 0:
            raise ConfigError(
                f"initializer_range is {self.initializer_range}. Use a number above 0."
            )
        if self.teacher_width < 0:
            raise ConfigError(
                f"teacher_width is {self.teacher_width}. Use the teacher's width, such as 768, "
                "or 0."
            )
        self.check_heads()
        for name, enabled in {"nsp": self.nsp, "span_boundary": self.span_boundary}.items():
            if enabled and self.head != "language_model":
                raise ConfigError(
                    f"{name} needs a language-model head, but head is {self.head}. Set {name} to "
                    "false, or leave head out."
                )
        self.check_task(*_TASKS, "embedding")
        if self.causal and self.head not in ("language_model", "tagging", "question_answering"):
            raise ConfigError(
                f"causal is true, but a {self.head} head pools the first position, which sees no "
                "other. Set causal to false: the weights of a left-to-right model fit."
            )
        check_task_parts(self)

    @property
    def causal_outputs(self) -> frozenset[str]:
        offered = self.also_causal and self.predicts == "tokens"
        return frozenset({"next_tokens"} if offered else ())

    @property
    def head_activation(self) -> Activation:
        """The activation inside the masked-LM head, which is never gated."""
        return "gelu" if self.gated else self.activation

    @property
    def settings_for(self) -> Mapping[str, str]:
        heads = {head: f"model.head={head}" for head in (*_TASKS, "embedding")}
        heads["tag_transitions"] = "model.crf=true"
        if self.head != "language_model":
            return heads | dict.fromkeys(("tokens", "next_tokens"), "model.head=language_model")
        causal = "model.also_causal=true" if self.also_causal else "model.causal=true"
        tokens = {"tokens": "model.causal=false", "next_tokens": causal}
        pairs = {"next_sentence": "model.nsp=true", "span_boundary": "model.span_boundary=true"}
        return heads | tokens | pairs

    @property
    def normal_bound(self) -> float:
        return 2.0

    def initial_std(self, name: str) -> tuple[float, ...]:
        return (self.initializer_range,)

    def build_base(self) -> Transformer:
        nsp_head = NextSentenceHead(self) if self.nsp else None
        span_head = SpanBoundaryHead(self) if self.span_boundary else None
        return Transformer(self, self._build_head(), nsp_head=nsp_head, span_head=span_head)

    def _build_head(self) -> nn.Module:
        if self.head == "language_model":
            return MaskedLMHead(self, self.head_activation)
        if self.head == "embedding":
            return EmbeddingHead()
        if "pooler" in self.task_names[self.head]:
            drops_first = self.head == "classification" and self.classification_drops_first
            return PooledHead(self, self.classes, drops_first, self.pooler_activation)
        drops = self.head in self.heads_with_dropout
        return TokenHead(self.width, self.classes, self.head_dropout if drops else 0.0)

    @classmethod
    def from_huggingface(cls, config: ConfigJson, tensors: Iterable[str] = ()) -> Self:
        """Reads the content of a `config.json`.

        Args:
            tensors: names of the checkpoint's tensors, to detect heads. Many checkpoints contain a
                next-sentence head that their `architectures` do not mention.

        Raises:
            ConfigError: it describes another kind of model, or lacks a key.
        """
        config = {**_OFTEN_ABSENT, **config}
        fixed = {"model_type": cls.model_type, **cls.their_constants}
        if cls.position_offset:  # transformers counts positions from the padding id
            fixed["pad_token_id"] = cls.position_offset - 1
        fields = huggingface.read_settings(config, cls.their_settings, fixed, cls.their_activations)
        decoded: Self = decode(cls, fields, "config.json")
        # Detect heads by their tensors: `architectures` is often wrong.
        names = {cls._canonical(name) for name in tensors}
        heads: dict[Head, tuple[str, str]] = {
            head: (cls._task_architecture(head), f"{cls.task_names[head]['classifier']}.weight")
            for head in _TASKS
        }
        head, labels = huggingface.read_task(config, names, heads)
        if head in POOLED:
            huggingface.check_head(config, head, cls.pooled_constants)
        nsp = {f"{name}.weight" for name in cls.nsp_names.values()}
        return replace(
            decoded,
            max_positions=decoded.max_positions - cls.position_offset,
            nsp=head == "language_model" and bool(nsp) and nsp <= names,
            head=head,
            labels=labels,
        )

    @classmethod
    def _task_architecture(cls, head: Head) -> str:
        if head == "embedding":
            return re.sub("ForMaskedLM|LMHeadModel|Model", "", cls.architecture) + "Model"
        if head == "language_model":
            return cls.architecture
        return cls.architecture.replace("MaskedLM", TASKS[head].architecture)

    def to_huggingface(self) -> ConfigJson:
        # These are computed by samestep alone; a config.json could not express them.
        self.check_export_of_head()
        if self.norm != "post" or self.gated:
            raise ConfigError(
                f"norm {self.norm} with activation {self.activation} cannot be exported: "
                f"{self.model_type} in transformers has norm post and no gated activation. Train "
                "with those."
            )
        if self.causal and not self.causal_architecture:
            raise ConfigError(
                f"causal is true, but transformers has no causal {self.model_type}. Use the "
                "checkpoint with samestep."
            )
        fields = {theirs: getattr(self, ours) for ours, theirs in self.their_settings.items()}
        if self.activation == "gelu_tanh":
            fields[self.their_settings["activation"]] = "gelu_pytorch_tanh"
        fields["max_position_embeddings"] += self.position_offset
        if self.head != "language_model":
            architecture = self._task_architecture(self.head)
        elif self.nsp:
            architecture = self.architecture.replace("MaskedLM", "PreTraining")
        else:
            architecture = self.causal_architecture if self.causal else self.architecture
        return {
            "architectures": [architecture],
            "model_type": self.model_type,
            **fields,
            **self.special_ids,
            **huggingface.name_labels(self.labels),
        }

    def check_export_of_head(self) -> None:
        """Rejects the export of a head that transformers lacks."""
        lacking = {
            "scalar_mix": "head that reads all layers",
            "head_lstm": "head with an LSTM",
            "crf": "conditional random field",
        }
        if self.head != "language_model":
            lacking["causal"] = "left-to-right model for such tasks"
        for name, part in lacking.items():
            if getattr(self, name):
                raise ConfigError(
                    f"{name} is set, but transformers has no {part}. Use the checkpoint with "
                    "samestep."
                )

    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Names of older versions, and names without the family's prefix, are recognized.
        table = self.tensor_names()
        own = {name for names in table.values() for name in names}
        unused = [
            name
            for name in tensors
            if self.optional_names.fullmatch(name) and self._canonical(name) not in own
        ]
        ignored = [n for n in tensors if _BUFFERS.fullmatch(n)] + unused
        if ignored:
            logger.info("left out, since the model has no such parameters: %s", ", ".join(ignored))
        found = {self._canonical(name): tensors[name] for name in tensors if name not in ignored}
        if self.head == "language_model":
            self._join_copies(found)
        return huggingface.join_tensors(found, table, self)

    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # transformers has no such heads; SpanBERT and TinyBERT were published without them, too.
        absent = ("span_head.", "fit_head.")
        known = {name: parameters[name] for name in parameters if not name.startswith(absent)}
        exported = huggingface.split_tensors(known, self.tensor_names(), self)
        # An untied head of transformers has its bias twice, as `bias` and `decoder.bias`.
        if not self.tied and self.head == "language_model":
            bias = self.head_names["bias"]
            exported[f"{self.head_names['decoder']}.bias"] = exported[bias].clone()
        return exported

    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        """Parameter name -> names of transformers' tensors that are concatenated in its rows."""
        table: dict[str, tuple[str, ...]] = {
            f"embeddings.{ours}": (f"{self.prefix or self.model_type}.{theirs}",)
            for ours, theirs in self.embedding_names.items()
        }
        modules: dict[str, tuple[str, ...]] = {}
        for layer, place in self.layer_places().items():
            begin = f"{self.prefix or self.model_type}.{place}"
            for ours, theirs in self.layer_names.items():
                modules[f"layers.{layer}.{ours}"] = tuple(f"{begin}.{name}" for name in theirs)
        heads = self.task_names.get(self.head, {})
        if self.head == "language_model":
            heads = {part: self.head_names[part] for part in ("dense", "norm")}
            table["head.bias"] = (self.head_names["bias"],)
            if not self.tied:
                table["head.decoder.weight"] = (f"{self.head_names['decoder']}.weight",)
        modules |= {f"head.{part}": (name,) for part, name in heads.items()}
        if self.nsp:
            modules |= {f"nsp_head.{part}": (name,) for part, name in self.nsp_names.items()}
        # Each of these modules has a weight and a bias.
        for ours, names in modules.items():
            for kind in ("weight", "bias"):
                table[f"{ours}.{kind}"] = tuple(f"{name}.{kind}" for name in names)
        return table

    def layer_places(self) -> dict[int, str]:
        """Our number of each distinct layer -> its module in transformers."""
        return {layer: f"encoder.layer.{layer}" for layer in range(self.layers)}

    @classmethod
    def _canonical(cls, name: str) -> str:
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        # A checkpoint of the bare encoder (BertModel) has no "bert." before its names.
        has_prefix = not name.startswith(cls.bare_names)
        return name if has_prefix else f"{cls.prefix or cls.model_type}.{name}"

    def _join_copies(self, found: dict[str, Tensor]) -> None:
        """Joins the names of a tied head's matrix, and of its bias.

        transformers adds `decoder.bias`: a copy of `bias` in a tied model, otherwise the bias that
        is used.
        """
        decoder, bias = self.head_names["decoder"], self.head_names["bias"]
        decoder_bias = f"{decoder}.bias"
        if not self.tied:
            # transformers uses `decoder.bias`, even if a stale `bias` is there.
            if decoder_bias in found:
                found[bias] = found.pop(decoder_bias)
            return
        if decoder_bias != bias:
            huggingface.keep_one(found, bias, decoder_bias)
        (embedding,) = self.tensor_names()["embeddings.tokens.weight"]
        huggingface.keep_one(found, embedding, f"{decoder}.weight")
