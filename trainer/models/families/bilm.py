"""Bidirectional language models of LSTMs: the biLM of ELMo (Peters et al. 2018, section 3.1).

One stack of layers reads a text forward and predicts the next tokens, another reads it backward and
predicts the previous ones. They share the token embeddings and the output matrix. ELMo
embeds words by their characters (`model.characters`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.models import Model, Outputs
from trainer.models.base import layer_numbers
from trainer.models.heads import answer
from trainer.models.inputs import Inputs
from trainer.models.layers.attention import take
from trainer.models.recurrent.config import RecurrentConfig
from trainer.models.recurrent.lstm_layers import resets
from trainer.models.recurrent.model import RecurrentModel
from trainer.models.stack import Context, Stack


@dataclass(frozen=True)
class Config(RecurrentConfig):
    """A bidirectional LSTM language model: the size of ELMo."""

    hidden_size: int = 4096
    proj_size: int = 512
    embedding_width: int = 512
    residual: bool = True
    dropout: float = 0.1

    @property
    def width(self) -> int:  # type: ignore[override]
        """Of both directions together."""
        return 2 * self.output_width

    def build(self) -> Model:
        return BiLM(self)


class BiLM(RecurrentModel):
    """Two stacks of LSTM layers and a head; see `trainer.models.Model`.

    The output `layer.N` has the forward and the backward state side by side, [B, S, 2 P]; `layer.0`
    has the embeddings twice, as in ELMo.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config, ("next_tokens", "previous_tokens"))
        self.forward_layers = Stack(config.build_layers())
        self.backward_layers = Stack(config.build_layers())

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        return self.forward_layers, self.backward_layers

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        """Computes the outputs, by name (see `trainer.models.Outputs`)."""
        embedded = self.embed(inputs)
        numbers = self.numbers(outputs)
        is_task = self.config.head in outputs
        reads_last = is_task or "hidden" in outputs
        found: dict[str, Tensor] = {}
        both: list[list[Tensor]] = []
        for output, stack, own in zip(
            ("next_tokens", "previous_tokens"), self.stacks, embedded.keys, strict=True
        ):
            if not (numbers or reads_last or output in outputs):
                continue
            is_reversed = output == "previous_tokens"
            states = self._states(
                stack, embedded.hidden, inputs.segments, own, numbers, is_reversed
            )
            both.append(states)
            if output in outputs:
                # The state at position t + 1 predicts the token at position t.
                hidden = states[-1][:, 1:] if is_reversed else states[-1]
                hidden, target = take(hidden, inputs.predicted), inputs.targets.get(output)
                size, matrix = self.config.vocab_size, embedded.matrix
                found |= answer(output, self.head, target, size, hidden, matrix)
        if not (numbers or reads_last):
            return found | self.task_outputs(None, {}, inputs, outputs, embedded)
        *of_layers, last = [torch.cat(pair, -1) for pair in zip(*both, strict=True)]
        of_number = dict(zip(numbers, of_layers, strict=True))
        if "hidden" in outputs:
            found["hidden"] = last
        found |= {f"layer.{n}": of_number[n] for n in layer_numbers(outputs)}
        return found | self.task_outputs(last, of_number, inputs, outputs, embedded)

    def _states(
        self,
        stack: Stack,
        hidden: Tensor,
        segments: Tensor | None,
        keys: Tensor | None,
        numbers: list[int],
        is_reversed: bool,
    ) -> list[Tensor]:
        """The states [B, S, P] of one direction after the layers `numbers`, and after the last."""
        if is_reversed:
            hidden = hidden.flip(1)
            segments = None if segments is None else segments.flip(1)
        columns = {} if segments is None else {"resets": resets(segments)}
        context = Context(sites=self.config.dropout_sites, keys=keys, columns=columns)
        if numbers:
            last, states, _ = stack.states(hidden, None, None, context, set(numbers), len(stack))
            found = [*(states[number] for number in numbers), last]
        else:
            found = [stack.run(hidden, None, None, context)]
        return [each.flip(1) for each in found] if is_reversed else found
