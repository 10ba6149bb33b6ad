"""The configuration of recurrent language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias, get_args

from samestep.config import kind_name
from samestep.errors import ConfigError
from trainer.models import ModelConfig, Outputs
from trainer.models.config import TaskHead, check_labels
from trainer.models.extras.task_parts import check_task_parts
from trainer.models.recurrent.characters import Characters
from trainer.models.recurrent.lstm_layers import Rates, RecurrentLayer
from trainer.models.recurrent.sentences import Sentences

_RATES = ("dropout", "embedding_dropout", "output_dropout", "weight_dropout", "token_dropout")

HeadKind: TypeAlias = Literal["language_model", "classification", "tagging", "question_answering"]


@dataclass(frozen=True)
class RecurrentConfig(ModelConfig):
    """Shape and regularization of recurrent language models.

    Attributes:
        vocab_size: rows of the token embeddings; at least the tokenizer's size.
        layers: number of layers, in each direction.
        hidden_size: H, of the cell and the gates of a layer.
        last_hidden_size: H of the last layer, as E, so that a tied matrix needs no projection; 0:
            as `hidden_size`.
        proj_size: P, to which the output of a layer is projected (Sak et al. 2014); 0: it is H
            wide.
        embedding_width: E, of the token embeddings.
        characters: computes the token embeddings from the characters of tokens
            (`trainer.models.recurrent.characters`); null: each token has its own.
        residual: adds the input of each layer but the first to its output.
        norm: layer normalization of the output of each layer.
        norm_eps: added to the variance in norms.
        clip: bound of the cell of each layer, and of its projection (ELMo: 3), by a loop over
            positions, which takes several times as long; null: none.
        dropout: dropout rate of the embeddings and of each layer's output.
        embedding_dropout: of the embeddings; null: `dropout`.
        output_dropout: of the last layer's output; null: `dropout`.
        weight_dropout: of the recurrent matrices, with one mask for all rows of a step (Merity et
            al. 2018).
        variational: dropout has the same mask at all positions of a row.
        token_dropout: rate of tokens whose embedding is 0 in a whole row (Gal & Ghahramani 2016).
        tied: the output matrix is the token embeddings'. If the last layer's output is not E wide,
            it is projected to E first.
        head: predicts tokens (`language_model`); or, fine-tuned for a task, the class of a sequence
            from all of its states (`classification`, see `concat_pooling`), a tag of each word
            (`tagging`), or an answer's first and last token (`question_answering`).
        labels: names of classes; `classification` with a single label is a regression.
        head_width: hidden units of the classifier of sequences.
        head_dropout: dropout rates of the pooled states and of these hidden units; the first, of
            the states that other heads read.
        scalar_mix: whether a task's head reads a learned mean of all layers instead of the last
            one (ELMo), for frozen layers.
        scalar_mix_l2: coefficient of the sum of that mean's squared scores in the loss, which keeps
            layers close to equal; 0: none.
        head_lstm: number of bidirectional LSTM layers between states and a task's head.
        crf: scores transitions between tags, for `tagging` with `objective.crf`.
        sentences: a classifier that encodes the two texts of a pair apart, in place of the one of
            pooled states (`trainer.models.recurrent.sentences`); null: none.
    """

    vocab_size: int
    layers: int = 2
    hidden_size: int = 650
    last_hidden_size: int = 0
    proj_size: int = 0
    embedding_width: int = 650
    characters: Characters | None = None
    residual: bool = False
    norm: bool = False
    norm_eps: float = 1e-5
    clip: float | None = None
    dropout: float = 0.5
    embedding_dropout: float | None = None
    output_dropout: float | None = None
    weight_dropout: float = 0.0
    variational: bool = False
    token_dropout: float = 0.0
    tied: bool = True
    head: HeadKind = "language_model"
    labels: tuple[str, ...] = ()
    head_width: int = 50
    head_dropout: tuple[float, float] = (0.4, 0.1)
    scalar_mix: bool = False
    scalar_mix_l2: float = 0.0
    head_lstm: int = 0
    crf: bool = False
    sentences: Sentences | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "hidden_size", "embedding_width", "head_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}. Use 1 or more.")
        if not 0 <= self.proj_size < self.hidden_size:
            raise ConfigError(
                f"proj_size is {self.proj_size}. Use 0 for no projection, or a number below "
                f"hidden_size, {self.hidden_size}."
            )
        if self.last_hidden_size < 0 or (
            self.last_hidden_size and (self.proj_size or self.residual)
        ):
            raise ConfigError(
                f"last_hidden_size is {self.last_hidden_size}. Use 0 or more; with proj_size or "
                "residual, 0."
            )
        for name in _RATES:
            if not 0 <= (getattr(self, name) or 0.0) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}. Use a number in [0, 1).")
        if not self.norm_eps > 0:
            raise ConfigError(f"norm_eps is {self.norm_eps}. Use a number above 0.")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"clip is {self.clip}. Use a number above 0, or null for no bound.")
        if not all(0 <= rate < 1 for rate in self.head_dropout):
            raise ConfigError(
                f"head_dropout is {list(self.head_dropout)}. Use two numbers in [0, 1)."
            )
        check_labels(self.head, self.labels)
        # Tied weights are the matrix of tokens, which the output layer reads.
        if self.characters is not None and self.tied:
            raise ConfigError(
                "tied is true, but embeddings of characters have no matrix of tokens. Set tied to "
                "false."
            )
        check_task_parts(self)
        if self.sentences is not None and (self.head != "classification" or self.head_lstm):
            raise ConfigError(
                f"sentences is set, but head is {self.head} and head_lstm {self.head_lstm}. Use it "
                "for classification or regression, with head_lstm 0, or set it to null."
            )
        if self.scalar_mix and len(self.mixed_layers) <= self.layers:
            raise ConfigError(
                "scalar_mix adds up layers, and these have different widths. Set embedding_width "
                f"to a layer's width, {self.output_width}, or scalar_mix to false."
            )
        if self.head_lstm and self.width % 2:
            raise ConfigError(
                f"head_lstm is {self.head_lstm}, each direction of which is half as wide as the "
                f"states, and these are {self.width} wide. Use layers of an even width."
            )

    @property
    def mixed_layers(self) -> list[int]:
        """Layers that are as wide as the last one; 0 is the embeddings."""
        widths = [*self.input_widths, self.output_width]
        # A mean of layers adds their states up, so all must be of one width.
        return [n for n, width in enumerate(widths) if width == self.output_width]

    @property
    def predicts(self) -> str:
        return "next_tokens" if self.head == "language_model" else self.head

    @property
    def settings_for(self) -> Mapping[str, str]:
        settings = {head: f"model.head={head}" for head in get_args(HeadKind)[1:]}
        return {**settings, "tag_transitions": "model.crf=true"}

    def for_needs(self, needs: Outputs, labels: tuple[str, ...] = ()) -> Self:
        heads: tuple[HeadKind, ...] = get_args(HeadKind)
        if others := needs.intersection(get_args(TaskHead)).difference(heads):
            raise ConfigError(
                f"a model of kind {kind_name(self)} has no {min(others)} head. Use objective "
                "classification, regression, tagging or question_answering, or another kind of "
                "model, as bert."
            )
        head: HeadKind = next((head for head in heads if head in needs), "language_model")
        return replace(self, head=head, labels=labels)

    @property
    def classes(self) -> int:
        """C, the outputs of a task's head."""
        return 2 if self.head == "question_answering" else len(self.labels)

    @property
    def output_width(self) -> int:
        """P, of the output of the last layer in one direction."""
        return self.proj_size or self.hidden_sizes[-1]

    @property
    def hidden_sizes(self) -> list[int]:
        """H of each layer."""
        return [self.hidden_size] * (self.layers - 1) + [self.last_hidden_size or self.hidden_size]

    @property
    def input_widths(self) -> list[int]:
        """The width of each layer's input."""
        return [self.embedding_width, *(self.proj_size or size for size in self.hidden_sizes[:-1])]

    @property
    def dropout_sites(self) -> tuple[str, ...]:
        """Where a layer applies dropout; the keys of `recurrent` are the step's."""
        return ("output", "recurrent") if self.weight_dropout else ("output",)

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.output_width

    def build_layers(self) -> list[RecurrentLayer]:
        """The layers of one direction."""
        rates = [self.dropout] * (self.layers - 1)
        rates.append(self.dropout if self.output_dropout is None else self.output_dropout)
        shapes = zip(self.input_widths, self.hidden_sizes, rates, strict=True)
        return [
            RecurrentLayer(
                inputs,
                size,
                self.proj_size,
                self.norm_eps if self.norm else None,
                self.residual and index > 0,
                Rates(rate, self.variational, self.weight_dropout),
                self.clip,
            )
            for index, (inputs, size, rate) in enumerate(shapes)
        ]
