"""Layers of long short-term memory (LSTM) that read packed rows.

Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000:

    i, f, o = sigmoid(W x_t + U h_{t-1} + b)     the input, forget and output gate, [H] each
    g = tanh(W x_t + U h_{t-1} + b)              with rows of W, U and b of their own
    c_t = f c_{t-1} + i g                        the cell
    h_t = o tanh(c_t)                            the output; [H], or with a projection R h_t, [P]

PyTorch's kernel runs a whole row in one call, several times faster on a CPU than a loop over
positions. It cannot reset the state between packed sequences, but its gates can: with all three
closed, c_t and h_t are 0, and so are all derivatives. So the last token of each sequence that
another one follows closes the gates, and the next sequence begins with the state 0:

    tokens     [CLS] a b [SEP] [CLS] c [SEP] [PAD]
    resets     0     0 0 1     0     0 0     0

The output of that token is lost, and objectives predict nothing from it. All other outputs are
those that the sequence has in a row of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.accelerators.kernels import autocast_dtype, is_eager, without_autocast
from trainer.models.cache import Cache, LayerCache
from trainer.models.layers import LayerNorm
from trainer.models.layers.dropout import dropout
from trainer.models.stack import Context

_CLOSED = -1e4  # exp(-1e4) is 0 in fp32, so a gate is exactly 0; in the range of fp16, too
_COLUMNS = 8  # of resets beside the inputs: a multiple of 8, for the 16-bit products of GPUs


def resets(segments: Tensor) -> Tensor:
    """The positions after which the state is reset: int [B, S] -> bool [B, S].

    The last one before each sequence. Padding on the left counts, padding on the right does not.
    """
    before, after = segments[:, :-1], segments[:, 1:]
    return F.pad((after != before) & (after > 0), (0, 1))


def drop(x: Tensor, p: float, key: Tensor | None, variational: bool) -> Tensor:
    """Dropout of [B, S, D]; `variational` has one mask for all positions (Gal & Ghahramani 2016).

    Arguments as for `trainer.models.layers.dropout.dropout`.
    """
    if key is None or not variational:
        return dropout(x, p, key)
    return x * dropout(x.new_ones(len(x), 1, x.shape[-1]), p, key)


class Rates(NamedTuple):
    """Dropout rates of a layer.

    Attributes:
        output: of the output.
        variational: see `drop`.
        weights: of `weight_hh`, at the site "recurrent" (DropConnect; Merity et al. 2018, section
            2).
    """

    output: float = 0.0
    variational: bool = False
    weights: float = 0.0


_NO_DROPOUT = Rates()


class LayerState(LayerCache):
    """The state of one layer after the last position.

    Attributes:
        state: h, [1, B, P], and c, [1, B, H]; None before the first position.
    """

    def __init__(self) -> None:
        super().__init__(capacity=0)
        self.state: tuple[Tensor, Tensor] | None = None

    def select(self, rows: Tensor, sources: Tensor | slice) -> None:
        if self.state is not None:
            hidden, cell = self.state
            self.state = (hidden[:, rows], cell[:, rows])


class StateCache(Cache):
    """The states of all layers, of constant size, in place of keys and values.

    Args:
        is_text: see `Cache`.
    """

    def __init__(self, layers: int, is_text: Tensor) -> None:
        super().__init__(0, is_text.shape[1], is_text)
        self.layers = [LayerState() for _ in range(layers)]


class RecurrentLayer(nn.Module):
    """An LSTM in one direction; norm and dropout of its output; a residual connection.

    The gates are stacked in the order of `torch.nn.LSTM`: i, f, g, o. There is one bias, where
    `torch.nn.LSTM` adds two.

    Args:
        inputs: width of the input.
        hidden_size: H.
        proj_size: P; 0: none, and P is H.
        norm_eps: of a layer norm of the output; None: no norm.
        residual: whether the input is added to the output.
        rates: of dropout.
        clip: bound of c_t, and of the projection R h_t; None: no bounds. PyTorch's kernel has none,
            so a loop over positions takes its place.
    """

    def __init__(
        self,
        inputs: int,
        hidden_size: int,
        proj_size: int = 0,
        norm_eps: float | None = None,
        residual: bool = False,
        rates: Rates = _NO_DROPOUT,
        clip: float | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.width = proj_size or hidden_size
        self.residual, self.rates, self.clip = residual, rates, clip
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden_size, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden_size, self.width))
        self.weight_hr = nn.Parameter(torch.empty(proj_size, hidden_size)) if proj_size else None
        self.bias = nn.Parameter(torch.empty(4 * hidden_size))
        self.norm = None if norm_eps is None else LayerNorm(self.width, eps=norm_eps)

    def forward(
        self, hidden: Tensor, memory: Tensor | None, bias: Tensor | None, context: Context
    ) -> Tensor:
        """[B, S, E] -> [B, S, P]; called as `Stack` calls layers.

        Args:
            context: its columns may have `resets`, bool [B, S]; its cache is a `LayerState`.
        """
        cache = context.cache
        assert cache is None or isinstance(cache, LayerState)
        state = None if cache is None else cache.state
        recurrent: Tensor = self.weight_hh
        if (step_keys := context.key("recurrent")) is not None:
            # All rows of a step have the same key, so that they can share a matrix.
            recurrent = dropout(recurrent[None], self.rates.weights, step_keys[:1])[0]
        output, state = self._recur(hidden, recurrent, context.columns.get("resets"), state)
        if cache is not None:
            cache.state = state
        if self.norm is not None:
            output = self.norm(output)
        output = drop(output, self.rates.output, context.key("output"), self.rates.variational)
        return output + hidden if self.residual else output

    def _recur(
        self,
        hidden: Tensor,
        recurrent: Tensor,
        resets: Tensor | None,
        state: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The outputs [B, S, P], and the state after the last position."""
        device = hidden.device
        if not is_eager(device):
            raise ConfigError(
                "the model has LSTM layers (kind lstm or bilm, or head_lstm), each step of which "
                f"would be part of the graphs that {device} compiles. Use a CPU or a GPU."
            )
        # The kernel takes tensors of one dtype, and autocast does not know it on all devices.
        dtype = autocast_dtype(device) or hidden.dtype
        inputs, weight = hidden.to(dtype), self.weight_ih.to(dtype)
        if resets is not None:
            inputs = torch.cat([inputs, F.pad(resets[..., None], (0, _COLUMNS - 1)).to(dtype)], -1)
            closed = weight.new_full((4, self.hidden_size, 1), _CLOSED)
            closed[2] = 0  # g is no gate
            weight = torch.cat([weight, F.pad(closed.flatten(0, 1), (0, _COLUMNS - 1))], 1)
        bias = self.bias.to(dtype)
        weights = [weight, recurrent.to(dtype), bias, torch.zeros_like(bias)]
        if self.weight_hr is not None:
            weights.append(self.weight_hr.to(dtype))
        if state is None:
            rows = len(hidden)
            state = (
                inputs.new_zeros(1, rows, self.width),
                inputs.new_zeros(1, rows, self.hidden_size),
            )
        with without_autocast(device):
            if self.clip is not None:
                return _clipped(inputs, state, weights, self.clip)
            output, last, cell = torch._VF.lstm(
                inputs,
                state,
                weights,
                True,  # biases
                1,  # layer
                0.0,  # dropout
                torch.is_grad_enabled(),  # whether there will be a backward pass
                False,  # bidirectional
                True,  # batch first
            )
        return output, (last, cell)


def _clipped(
    inputs: Tensor, state: tuple[Tensor, Tensor], weights: list[Tensor], clip: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """An LSTM whose cell and projection stay in [-clip, clip], position by position.

    As ELMo's (allennlp/modules/lstm_cell_with_projection.py).

    Args:
        inputs: [B, S, E].
        state: h, [1, B, P], and c, [1, B, H].
        weights: W, U, the bias and another one, and with a projection R.
    """
    weight, recurrent, bias, _, *projection = weights
    of_inputs = F.linear(inputs, weight, bias)
    hidden, cell = state[0][0], state[1][0]
    found = []
    for position in range(inputs.shape[1]):
        gates = of_inputs[:, position] + F.linear(hidden, recurrent)
        i, f, g, o = gates.chunk(4, -1)
        cell = (f.sigmoid() * cell + i.sigmoid() * g.tanh()).clamp(-clip, clip)
        hidden = o.sigmoid() * cell.tanh()
        if projection:
            hidden = F.linear(hidden, projection[0]).clamp(-clip, clip)
        found.append(hidden)
    return torch.stack(found, 1), (hidden[None], cell[None])


def stacked_gates(model: nn.Module) -> dict[str, int]:
    """The parameters that stack the matrices or biases of four gates: name -> 4."""
    return {
        f"{name}.{own}": 4
        for name, module in model.named_modules()
        if isinstance(module, RecurrentLayer)
        for own in ("weight_ih", "weight_hh", "bias")
    }
