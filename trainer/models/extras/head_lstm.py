"""LSTM layers between a model's hidden states and a task's head, in both directions.

On frozen features they are the task's own model: two layers on BERT's (Devlin et al. 2019, section
5.3), or with a conditional random field on ELMo's (Peters et al. 2018, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.models.extras import Extra
from trainer.models.layers.dropout import split_key
from trainer.models.recurrent.lstm_layers import Rates, RecurrentLayer, resets, stacked_gates
from trainer.models.stack import Context


class HeadLstm(Extra):
    """Layers of a forward and a backward LSTM, each half as wide as their output.

    Args:
        layers: number of layers.
        width: D, of the hidden states; even, unless `output` is set.
        dropout: rate of each layer's output.
        output: width of the output, even; None: D.
    """

    name = "head_lstm"
    is_below_head = True
    needs_positions = "all"

    def __init__(self, layers: int, width: int, dropout: float, output: int | None = None) -> None:
        super().__init__()
        output = width if output is None else output

        def direction() -> nn.ModuleList:
            # A layer above the first reads both directions of the one below.
            return nn.ModuleList(
                RecurrentLayer(output if index else width, output // 2, rates=Rates(dropout))
                for index in range(layers)
            )

        self.forward_layers, self.backward_layers = direction(), direction()

    def forward(self, hidden: Tensor, segments: Tensor | None, key: Tensor | None) -> Tensor:
        """[B, S, D] -> [B, S, output].

        Args:
            segments: int [B, S], see `trainer.models.inputs`: a sequence and padding, as in rows of
                tasks.
            key: int32 [B], of dropout; None: no dropout.
        """
        layers = len(self.forward_layers)
        # Each layer drops other elements in each direction.
        keys = None if key is None else split_key(key, 2 * layers)
        for index in range(layers):
            read = []
            for number, stack in enumerate((self.forward_layers, self.backward_layers)):
                is_backward = number == 1
                own = None if keys is None else keys[2 * index + number, None]
                read.append(_run(stack[index], hidden, segments, own, is_backward))
            hidden = torch.cat(read, -1)
        return hidden

    def below_head(
        self,
        hidden: Tensor,
        layers: Sequence[Tensor],
        segments: Tensor | None,
        dropout_key: Tensor | None,
    ) -> Tensor:
        read: Tensor = self(hidden, segments, dropout_key)
        return read

    def initial_std(self, shape: Sequence[int]) -> float:
        return float(shape[-1] ** -0.5)

    def stacked(self) -> dict[str, int]:
        return {f"{self.name}.{name}": count for name, count in stacked_gates(self).items()}


def _run(
    layer: nn.Module,
    hidden: Tensor,
    segments: Tensor | None,
    keys: Tensor | None,
    is_backward: bool,
) -> Tensor:
    if is_backward:
        hidden = hidden.flip(1)
        segments = None if segments is None else segments.flip(1)
    columns = {} if segments is None else {"resets": resets(segments)}
    context = Context(sites=("output",), keys=keys, columns=columns)
    output: Tensor = layer(hidden, None, None, context)
    return output.flip(1) if is_backward else output
