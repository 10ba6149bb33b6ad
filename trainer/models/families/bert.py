"""BERT (Devlin et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from torch import nn

from samestep.errors import ConfigError
from trainer.models import Outputs
from trainer.models.base import POOLED
from trainer.models.config import Activation, Head, Norm, Pooling, TaskHead
from trainer.models.extras import Extra
from trainer.models.families import Family
from trainer.models.heads import (
    EmbeddingHead,
    MaskedLMHead,
    PooledHead,
    TokenHead,
)
from trainer.models.transformer import Transformer


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
        scalar_mix_l2: coefficient of the sum of that mean's squared scores in the loss, which keeps
            layers close to equal; 0: none.
        head_lstm: number of bidirectional LSTM layers between hidden states and a task's head, half
            as wide as the hidden states in each direction; for a frozen encoder, too.
        crf: scores transitions between tags, for `objective: {kind: tagging, crf: true}`.
        labels: names of classes or tags; `classification` with a single label is a regression.
    """

    codec: ClassVar[str] = "trainer.models.codecs.bert"
    classification_drops_first: ClassVar[bool] = False
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
    scalar_mix_l2: float = 0.0
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
        self.check_task(*get_args(TaskHead), "embedding")
        # A head that reads each position can be causal: fine-tuned, it predicts from the left.
        if self.causal and self.head not in ("language_model", "tagging", "question_answering"):
            raise ConfigError(
                f"causal is true, but a {self.head} head pools the first position, which sees no "
                "other. Set causal to false: the weights of a left-to-right model fit."
            )
        if self._has_task_parts:
            from trainer.models.extras.task_parts import check_task_parts

            check_task_parts(self)

    @property
    def _has_task_parts(self) -> bool:
        return self.scalar_mix or self.scalar_mix_l2 != 0 or self.head_lstm != 0 or self.crf

    @property
    def causal_outputs(self) -> frozenset[str]:
        # One head for both directions: only the mask differs.
        offered = self.also_causal and self.predicts == "tokens"
        return frozenset({"next_tokens"} if offered else ())

    @property
    def head_activation(self) -> Activation:
        """The activation inside the masked-LM head, which is never gated."""
        return "gelu" if self.gated else self.activation

    @property
    def settings_for(self) -> Mapping[str, str]:
        heads = {head: f"model.head={head}" for head in (*get_args(TaskHead), "embedding")}
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

    def extras_for(self, needs: Outputs) -> dict[str, Any]:
        return {"nsp": "next_sentence" in needs, "span_boundary": "span_boundary" in needs}

    def build_extras(self) -> Sequence[Extra]:
        # The order is the order of parameters in checkpoints: new extras come last.
        extras: list[Extra] = []
        if self._has_task_parts:
            from trainer.models.extras.task_parts import build_task_parts

            extras += build_task_parts(self)
        if self.nsp:
            from trainer.models.extras.next_sentence import NextSentence

            extras.append(NextSentence(self))
        if self.span_boundary:
            from trainer.models.extras.span_boundary import SpanBoundary

            extras.append(SpanBoundary(self))
        if self.teacher_width:
            from trainer.models.extras.teacher_width import TeacherWidth

            extras.append(TeacherWidth(self.width, self.teacher_width))
        return [*extras, *super().build_extras()]

    def build_base(self) -> Transformer:
        return Transformer(self, self._build_head(), self.build_extras())

    def _build_head(self) -> nn.Module:
        if self.head == "language_model":
            return MaskedLMHead(self, self.head_activation)
        if self.head == "embedding":
            return EmbeddingHead()
        # BERT pools [CLS] by the pooler that next-sentence prediction has trained.
        if self.head in POOLED:
            drops_first = self.head == "classification" and self.classification_drops_first
            activation = self.pooler_activation
            return PooledHead(self, self.classes, drops_first, activation, self.head_lstm)
        drops = self.head in self.heads_with_dropout
        return TokenHead(self.width, self.classes, self.head_dropout if drops else 0.0)
