"""Task models of word vectors, without pre-training: CBoW, a BiLSTM, a BiLSTM with attention.

GLUE and SuperGLUE compare with them (Wang et al. 2019, table 1; Wang et al. 2019b, table 3); see
`trainer.models.recurrent.sentences`. They start from vectors by `init_embeddings`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self, get_args

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models import Model, ModelConfig, Outputs, Role, Start, Stored
from trainer.models.config import WHOLE_NORMAL, TaskHead, check_labels
from trainer.models.initialization import initial_values
from trainer.models.inputs import Inputs
from trainer.models.layers.embeddings import look_up
from trainer.models.recurrent.lstm_layers import RecurrentLayer, stacked_gates
from trainer.models.recurrent.sentences import SentenceClassifier, Sentences, number_texts
from trainer.models.stack import LayerPlace


@dataclass(frozen=True)
class Config(ModelConfig):
    """Vectors of tokens, and a classifier of texts and pairs: a BiLSTM of GLUE's size.

    Attributes:
        vocab_size: rows of the token embeddings; at least the tokenizer's size.
        embedding_width: E, of the token embeddings.
        sentences: encoder and classifier (`trainer.models.recurrent.sentences`).
        labels: names of classes; a single label is a regression.
    """

    vocab_size: int
    embedding_width: int = 300
    sentences: Sentences = field(default_factory=Sentences)
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.embedding_width < 1:
            raise ConfigError(
                f"vocab_size is {self.vocab_size} and embedding_width {self.embedding_width}. Use "
                "1 or more."
            )
        if self.labels:
            check_labels("classification", self.labels)

    @property
    def head(self) -> str:
        return "classification"

    @property
    def predicts(self) -> str:
        return "classification"

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.embedding_width

    def for_needs(self, needs: Outputs, labels: tuple[str, ...] = ()) -> Self:
        if others := needs.intersection(get_args(TaskHead)) - {"classification"}:
            raise ConfigError(
                f"a model of kind word_vectors has no {min(others)} head. Use objective "
                "classification or regression, or another kind of model, as bert."
            )
        return replace(self, labels=labels)

    def build(self) -> Model:
        check_labels("classification", self.labels)
        return WordModel(self)


class TokenTable(nn.Module):
    """The embeddings of tokens, [V, E]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.embedding_width)


class WordModel(Model):
    """Token embeddings and a classifier; see `trainer.models.Model`."""

    config: Config
    # The head reads all positions, whichever of them an objective pools.
    offers = frozenset({"classification", "first_position", "last_position", "hidden", "layer.0"})

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embeddings = TokenTable(config)
        width, classes = config.embedding_width, len(config.labels)
        self.head = SentenceClassifier(config.sentences, width, classes)

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        """Computes the outputs, by name (see `trainer.models.Outputs`)."""
        hidden, _ = look_up(self.token_embeddings, inputs.tokens)
        found = dict.fromkeys(outputs & {"hidden", "layer.0"}, hidden)
        if "classification" in outputs:
            texts = number_texts(inputs.token_types, inputs.segments)
            key = inputs.dropout_key if self.training else None
            found["classification"] = self.head(hidden, texts, key)[:, None]
        return found

    @property
    def token_embeddings(self) -> Tensor:
        return self.embeddings.tokens.weight

    @property
    def max_sequence_length(self) -> int:
        return sys.maxsize

    def sharding_units(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, RecurrentLayer)]

    def compiled_units(self) -> Sequence[nn.Module]:
        """None: a layer is one kernel, which a compiler would unroll."""
        return ()

    def layer_of(self, name: str) -> LayerPlace | None:
        return None

    def role(self, name: str) -> Role:
        part = "embedding" if name.startswith("embeddings.") else "head"
        return Role(part, "bias" if name.endswith("bias") else "weight")  # type: ignore[arg-type]

    def stacked(self) -> dict[str, int]:
        return stacked_gates(self)

    def initial_values(self, name: str, start: int, stop: int, seed: int) -> Tensor:
        """Matrices have the standard deviation 1 / sqrt(inputs), biases begin with 0."""
        if self.role(name).kind == "bias":
            return torch.zeros(stop - start)
        std = self.get_parameter(name).shape[-1] ** -0.5
        return initial_values(name, start, stop, seed=seed, std=std, bound=WHOLE_NORMAL)

    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        of_position, of_text = self.head.flops(sequence_length)
        return of_position + predicted_per_token * of_text

    def start_from(self, stored: Stored) -> Start:
        """Starts from the tensors of the same names; other labels have a new classifier."""
        sources: dict[str, str | None] = {name: name for name, _ in self.named_parameters()}
        if self.config.labels != stored.config.labels:
            new = [name for name in sources if name.startswith("head.classifier.")]
            sources |= dict.fromkeys(new)
            return Start(sources, frozenset(new), f"labels are {list(self.config.labels)}")
        return Start(sources)
