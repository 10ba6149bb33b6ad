"""T5 (Raffel et al. 2020), and T5 v1.1 (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

from torch import nn

from samestep.errors import ConfigError
from trainer.models.config import Activation, Head, NormKind, TaskHead
from trainer.models.encoder_decoder import EncoderDecoder
from trainer.models.families import Family
from trainer.models.heads import EmbeddingHead, LanguageModelHead, PooledHead, TokenHead
from trainer.models.layers.relative import RelativeBias
from trainer.models.transformer import Transformer

START = 0
"""Id of the decoder's first input token, which is padding."""

Architecture: TypeAlias = Literal[
    "encoder_decoder", "shared_encoder_decoder", "language_model", "prefix_lm"
]
_TASKS: tuple[Head, ...] = (*get_args(TaskHead), "embedding")


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
            or from the encoder, without a decoder: a tag for each token (`tagging`), or nothing but
            its hidden states (`embedding`, their mean embeds a text).
        labels: names of classes or tags; `classification` with a single label is a regression.
    """

    codec: ClassVar[str] = "trainer.models.codecs.t5"

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
        self.check_task(*_TASKS)
        self.check_positive("head_width")
        if self.decoder_layers is not None:
            self.check_positive("decoder_layers")
        # Layers that both stacks share, or a decoder alone, have one number.
        one_stack = self.architecture != "encoder_decoder"
        if one_stack and self.decoder_layers not in (None, self.layers):
            raise ConfigError(
                f"decoder_layers is {self.decoder_layers}, but architecture {self.architecture} "
                f"has one stack of {self.layers} layers. Leave decoder_layers out."
            )
        # Half of the buckets are for each direction, and half of those for single distances.
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
        heads: dict[str, str] = {head: f"model.head={head}" for head in _TASKS}
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
        # Tags are read off the encoder, which sees both sides of a word.
        return self.head not in ("tagging", "embedding")

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
            bias = self._bias(bidirectional=self.prefix_lm)
            return Transformer(self, head, self.build_extras(), relative_bias=bias)
        return EncoderDecoder(
            self,
            head,
            encoder_bias=self._bias(bidirectional=True),
            decoder_bias=self._bias(bidirectional=False),
            decoder_layers=self.stacks.get("decoder", 0),
            shared=self.architecture == "shared_encoder_decoder",
        )

    @property
    def stacks(self) -> dict[str, int]:
        """Number of layers of each stack."""
        decoder = {"decoder": self.decoder_layers or self.layers} if self.decoder else {}
        return {"encoder": self.layers, **decoder}

    def _build_head(self) -> nn.Module:
        if self.head == "language_model":
            # Embeddings begin with a deviation of 1, which is too large for an output matrix.
            return LanguageModelHead(self, scale=self.width**-0.5)
        if self.head == "embedding":
            return EmbeddingHead()
        if self.head in ("classification", "multiple_choice"):
            # The last position of the decoder, which has seen the whole text.
            return PooledHead(self, self.classes, dropout_first=True)
        drops = self.head == "tagging"
        return TokenHead(self.width, self.classes, self.head_dropout if drops else 0.0)

    def _bias(self, bidirectional: bool) -> RelativeBias:
        return RelativeBias(self.relative_buckets, self.max_distance, self.heads, bidirectional)
