"""Recurrent language models of one direction (Mikolov et al. 2010; Jozefowicz et al. 2016).

An LSTM reads a text and predicts each next token. The settings cover the models of Zaremba et al.
2014 (dropout between layers), Jozefowicz et al. 2016 (projections) and Merity et al. 2018
(AWD-LSTM: dropout of tokens, embeddings, outputs and recurrent weights).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.models import Model, Outputs
from trainer.models.base import layer_numbers
from trainer.models.cache import Cache
from trainer.models.heads import answer
from trainer.models.inputs import Inputs
from trainer.models.layers.attention import take
from trainer.models.recurrent.config import RecurrentConfig
from trainer.models.recurrent.lstm_layers import StateCache, resets
from trainer.models.recurrent.model import RecurrentModel
from trainer.models.stack import Context, Stack


@dataclass(frozen=True)
class Config(RecurrentConfig):
    """An LSTM language model: the medium size of Zaremba et al. 2014, with tied embeddings."""

    @property
    def causal(self) -> bool:
        return True

    def build(self) -> Model:
        return Lstm(self)


class Lstm(RecurrentModel):
    """A stack of LSTM layers and a head; see `trainer.models.Model`."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, ("next_tokens",))
        self.layers = Stack(config.build_layers())

    @property
    def stacks(self) -> tuple[Stack]:
        return (self.layers,)

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        """Computes the outputs, by name (see `trainer.models.Outputs`)."""
        embedded = self.embed(inputs)
        hidden, (keys,) = embedded.hidden, embedded.keys
        columns = {} if inputs.segments is None else {"resets": resets(inputs.segments)}
        context = Context(sites=self.config.dropout_sites, keys=keys, columns=columns)
        numbers = self.numbers(outputs)
        if numbers:
            hidden, states, _ = self.layers.states(
                hidden, None, None, context, numbers, len(self.layers)
            )
        else:
            hidden, states = self.layers.run(hidden, None, None, context), {}
        found = {f"layer.{n}": states[n] for n in layer_numbers(outputs)}
        if "hidden" in outputs:
            found["hidden"] = hidden
        found |= self.task_outputs(hidden, states, inputs, outputs, embedded)
        if "next_tokens" in outputs:
            hidden, target = take(hidden, inputs.predicted), inputs.targets.get("next_tokens")
            size, matrix = self.config.vocab_size, embedded.matrix
            found |= answer("next_tokens", self.head, target, size, hidden, matrix)
        return found

    @torch.no_grad()
    def start(self, inputs: Inputs, capacity: int) -> tuple[Tensor, Cache]:
        """Processes prompts; see `trainer.generation.generates.Generates`.

        The cache is as large for a long text as for a short one, so `capacity` is not needed.
        """
        assert inputs.segments is not None, "padding is marked by segments"
        cache = StateCache(len(self.layers), inputs.segments > 0)
        return self._decode(inputs.tokens, cache, {"resets": resets(inputs.segments)}), cache

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Processes one token per row: int [B] -> the logits [B, V] of the next ones."""
        return self._decode(tokens[:, None], cache, {})

    def _decode(self, tokens: Tensor, cache: Cache, columns: dict[str, Tensor]) -> Tensor:
        hidden, matrix = self.embeddings(tokens)
        hidden = self.layers.run(hidden, None, None, Context(columns=columns), None, cache)
        logits: Tensor = self.head(hidden[:, -1:], matrix)[:, 0]
        return logits
