"""The common base of recurrent language models of one and of two directions."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models import Model, Outputs, Role, Start, Stored
from trainer.models.base import layer_numbers, matrix_flops
from trainer.models.config import WHOLE_NORMAL
from trainer.models.extras.head_lstm import HeadLstm
from trainer.models.extras.scalar_mix import ScalarMix
from trainer.models.heads import Factors, TokenHead, VocabularyHead
from trainer.models.initialization import initial_values
from trainer.models.inputs import Inputs
from trainer.models.layers.dropout import dropout, split_key
from trainer.models.layers.embeddings import look_up
from trainer.models.recurrent.characters import CharacterEmbeddings
from trainer.models.recurrent.concat_pooling import ConcatPoolHead, pool_directions
from trainer.models.recurrent.config import RecurrentConfig
from trainer.models.recurrent.lstm_layers import drop, stacked_gates
from trainer.models.recurrent.sentences import SentenceClassifier, number_texts
from trainer.models.stack import LayerPlace, Stack, place_in_stacks

_OPTIONAL = ("mix", "head_lstm", "tag_transitions")
"""Parts beside a task's head that a setting adds; weights of other heads lack them."""


class RecurrentEmbeddings(nn.Module):
    """Token embeddings, from a table or from characters; dropout of tokens and of elements."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        size, width = config.vocab_size, config.embedding_width
        spelled = config.characters
        self.tokens = nn.Embedding(size, width) if spelled is None else None
        self.characters = CharacterEmbeddings(spelled, size, width) if spelled else None
        own = config.embedding_dropout
        self.dropout = config.dropout if own is None else own
        self.variational = config.variational
        self.token_dropout = config.token_dropout

    def forward(
        self, tokens: Tensor, token_key: Tensor | None = None, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """int [B, S] -> [B, S, E], and the table [V, E], if there is one, for a tied head.

        Args:
            token_key, key: int32 [B], of dropout of tokens and of elements; None: no dropout.
        """
        matrix: Tensor | None = None
        if self.tokens is not None:
            hidden, matrix = look_up(self.tokens.weight, tokens)
        else:
            assert self.characters is not None
            hidden = self.characters(tokens)
        if token_key is not None and self.token_dropout:
            # Element t of a mask of V elements, so that a token is dropped wherever it occurs.
            ones = hidden.new_ones(*tokens.shape, 1)
            hidden = hidden * dropout(ones, self.token_dropout, token_key, tokens)
        return drop(hidden, self.dropout, key, self.variational), matrix


class RecurrentHead(VocabularyHead):
    """Predicts tokens: a projection to E where it is needed, the output matrix and a bias."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        inputs, width = config.output_width, config.embedding_width
        is_projected = config.tied and inputs != width
        self.projection = nn.Linear(inputs, width) if is_projected else None
        self.decoder = None if config.tied else nn.Linear(inputs, config.vocab_size, bias=False)
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def factors(self, hidden: Tensor, embedding: Tensor | None, *_columns: Any) -> Factors:
        if self.projection is not None:
            hidden = self.projection(hidden)
        matrix = embedding if self.decoder is None else self.decoder.weight
        assert matrix is not None, "a tied head needs a table of tokens"
        return hidden, matrix, self.bias


class Embedded(NamedTuple):
    """The input of the layers, and their random keys.

    Attributes:
        hidden: [B, S, E].
        matrix: [V, E], the token embeddings; None if they are computed from characters.
        keys: for each stack the dropout keys of its layers, int32 [layers, sites, B], or None.
        head_key, lstm_key: of the head and the LSTM below it, int32 [B], or None.
    """

    hidden: Tensor
    matrix: Tensor | None
    keys: Sequence[Tensor | None]
    head_key: Tensor | None = None
    lstm_key: Tensor | None = None


class RecurrentModel(Model):
    """Token embeddings, stacks of recurrent layers, and a head for tokens or for a task.

    Args:
        predicts: outputs of a head that predicts tokens.
    """

    config: RecurrentConfig

    def __init__(self, config: RecurrentConfig, predicts: Sequence[str]) -> None:
        super().__init__()
        self.config = config
        self.embeddings = RecurrentEmbeddings(config)
        self.head: nn.Module
        if config.head == "language_model":
            self.head = RecurrentHead(config)
            self.offers = hidden_outputs(config) | set(predicts)
            self.trains = dict.fromkeys(predicts, "")
        else:
            self.offers = hidden_outputs(config) | {config.head}
            self.trains = {config.head: "model.head=language_model"}
        if config.head == "classification":
            if config.sentences is not None:
                self.head = SentenceClassifier(config.sentences, config.width, config.classes)
            else:
                inputs, rates = 3 * config.width, config.head_dropout
                self.head = ConcatPoolHead(inputs, config.head_width, config.classes, rates)
            # It reads all positions, whichever of them an objective pools.
            self.offers |= {"first_position", "last_position"}
        elif config.head != "language_model":
            self.head = TokenHead(config.width, config.classes, config.head_dropout[0])
        self.mix = ScalarMix(config.layers + 1) if config.scalar_mix else None
        if self.mix is not None:
            self.offers |= self.mix.offers
        top = config.head_lstm
        self.head_lstm = HeadLstm(top, config.width, config.dropout) if top else None
        # Of a conditional random field, see `trainer.objectives.crf`.
        tags = len(config.labels) + 1
        self.tag_transitions = nn.Parameter(torch.empty(tags, tags)) if config.crf else None
        if config.crf:
            self.offers |= {"tag_transitions"}
            self.trains = {**self.trains, "tag_transitions": "model.crf=false"}

    @property
    @abstractmethod
    def stacks(self) -> Sequence[Stack]:
        """The stacks of layers, one for each direction."""

    def embed(self, inputs: Inputs) -> Embedded:
        """Embeds the tokens of a batch."""
        stacks, layers = len(self.stacks), self.config.layers
        if not self.training or inputs.dropout_key is None:
            hidden, matrix = self.embeddings(inputs.tokens)
            return Embedded(hidden, matrix, [None] * stacks)
        keys = split_key(inputs.dropout_key, 4 + stacks * layers)
        hidden, matrix = self.embeddings(inputs.tokens, keys[0], keys[1])
        of_layers = keys[2:-2].view(stacks, layers, 1, -1)
        if self.config.weight_dropout:
            of_step = split_key(inputs.extra["step_key"], stacks * layers)
            of_layers = torch.cat([of_layers, of_step.view_as(of_layers)], 2)
        return Embedded(hidden, matrix, list(of_layers), keys[-2], keys[-1])

    def numbers(self, outputs: Outputs) -> list[int]:
        """The layers whose states are needed: for `layer.N`, or for a mean of all layers."""
        if self.mix is not None and self.config.head in outputs:
            return self.config.mixed_layers
        return layer_numbers(outputs)

    def task_outputs(
        self,
        last: Tensor | None,
        states: Mapping[int, Tensor],
        inputs: Inputs,
        outputs: Outputs,
        embedded: Embedded,
    ) -> dict[str, Tensor]:
        """Computes the outputs of a task's head.

        Args:
            last: states after the last layer, [B, S, D]; None if no output reads them.
            states: by layer, those in `numbers`.
        """
        head, found = self.config.head, dict[str, Tensor]()
        if "tag_transitions" in outputs:
            assert self.tag_transitions is not None, "the model was built without crf"
            # A copy, as a strategy may free the gathered parameter after this pass.
            found["tag_transitions"] = self.tag_transitions.clone()
        if self.mix is not None:
            found |= self.mix.given(outputs)
        if head == "language_model" or head not in outputs:
            return found
        assert last is not None, "a task's head reads the last layer"
        hidden = last
        if self.mix is not None:
            hidden = self.mix([states[n] for n in self.config.mixed_layers])
        directions = len(self.stacks)
        if self.head_lstm is not None:
            hidden = self.head_lstm(hidden, inputs.segments, embedded.lstm_key)
            directions = 2
        if isinstance(self.head, SentenceClassifier):
            texts = number_texts(inputs.token_types, inputs.segments)
            found[head] = self.head(hidden, texts, embedded.head_key)[:, None]
        elif head == "classification":
            pooled = pool_directions(hidden, inputs.segments, directions)
            found[head] = self.head(pooled, embedded.head_key)[:, None]
        else:
            found[head] = self.head(hidden, embedded.matrix, embedded.head_key)
        return found

    @property
    def max_sequence_length(self) -> int:
        return sys.maxsize

    @property
    def token_embeddings(self) -> Tensor:
        if self.embeddings.tokens is None:
            raise ConfigError(
                "model.characters is set, so the model has no token embeddings. Set it to null, or "
                "leave out init_embeddings."
            )
        return self.embeddings.tokens.weight

    @torch.no_grad()
    def token_table(self) -> Tensor:
        spelled = self.embeddings.characters
        return super().token_table() if spelled is None else spelled.table()

    def sharding_units(self) -> list[nn.Module]:
        """The layers. Embeddings and head share a matrix, so both stay in the root."""
        return [layer for stack in self.stacks for layer in stack]

    def layer_of(self, name: str) -> LayerPlace | None:
        return place_in_stacks(self, name)

    def role(self, name: str) -> Role:
        owner, _, own = name.rpartition(".")
        is_norm = isinstance(self.get_submodule(owner), nn.LayerNorm)
        kind = "norm" if is_norm else "bias" if own == "bias" else "weight"
        part = "embedding" if name.startswith("embeddings.") else "head"
        return Role("layer" if self.layer_of(name) else part, kind)  # type: ignore[arg-type]

    def stacked(self) -> dict[str, int]:
        return stacked_gates(self)

    def initial_values(self, name: str, start: int, stop: int, seed: int) -> Tensor:
        """Matrices have the standard deviation 1 / sqrt(inputs), forget gates of layers the bias 1.

        With this bias a layer keeps its content at first (Jozefowicz et al. 2015, section 2.2).
        Transitions between tags, and the scores of a mean of layers, begin with 0.
        """
        shape = self.get_parameter(name).shape
        std = shape[-1] ** -0.5
        values = initial_values(name, start, stop, seed=seed, std=std, bound=WHOLE_NORMAL)
        if name.startswith(("mix.", "tag_transitions")):
            values[:] = 0
        elif ".highways." in name and name.endswith("gate.bias"):
            values[:] = 2  # most of the input passes (ELMo's code)
        elif self.layer_of(name) is not None and self.role(name).kind == "bias":
            # The second of four gates: elements [H, 2 H), counted from `start`.
            first, last = (max(0, at * shape[0] // 4 - start) for at in (1, 2))
            values[first:last] = 1
        return values

    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        """FLOPs per position: 6 per weight of a layer, and of the head for predicted positions.

        Each direction predicts, so a head of two directions counts twice.
        """
        layers = sum(matrix_flops(layer) for layer in self.sharding_units())
        if self.embeddings.characters is not None:
            layers += self.embeddings.characters.flops()
        if self.head_lstm is not None:
            layers += matrix_flops(self.head_lstm)
        head = matrix_flops(self.head)
        if isinstance(self.head, SentenceClassifier):
            of_position, head = self.head.flops(sequence_length)
            layers += of_position
        if self.config.head == "language_model":
            tied = 6 * self.token_embeddings.numel() if self.config.tied else 0
            head = len(self.stacks) * (head + tied)
        return layers + predicted_per_token * head

    def start_from(self, stored: Stored) -> Start:
        """Starts from the tensors of the same names; the head for a new task is initialized.

        For the same task with other labels, only the classifier's last layer is new.
        """
        config, before = self.config, stored.config
        sources: dict[str, str | None] = {name: name for name, _ in self.named_parameters()}
        own = {name for name in sources if name.partition(".")[0] in _OPTIONAL}
        sources |= dict.fromkeys(own - stored.shapes.keys())
        same = (config.head, config.labels) == (before.head, before.labels)
        if config.head == "language_model" or same:
            return Start(sources)
        other = config.head != before.head
        new = ("head.", "tag_transitions") if other else ("head.classifier.", "tag_transitions")
        sources |= {name: None for name in sources if name.startswith(new)}
        parts = {"head", *_OPTIONAL}
        unused = frozenset(name for name in stored.shapes if name.partition(".")[0] in parts)
        return Start(sources, unused, f"model.head is {config.head}")

    def compiled_units(self) -> Sequence[nn.Module]:
        """None: a layer is one kernel, which a compiler would unroll."""
        return ()


def hidden_outputs(config: RecurrentConfig) -> Outputs:
    """The outputs `hidden` and `layer.N`; of layers that are as wide as the last one."""
    return frozenset({"hidden", *(f"layer.{n}" for n in config.mixed_layers)})
