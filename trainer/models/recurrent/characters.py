"""Token embeddings from spellings, by convolutions (Kim et al. 2016; Peters et al. 2018, "ELMo").

A token is read as the bytes of its spelling, between two marks:

    cat -> [257, 100, 98, 117, 258, 0, 0, ...]      bytes are counted from 1; 0 is padding

Each byte has an embedding. A filter of width w slides over w of them at a time, and its maximum
over the token is one feature. Highway layers and a projection follow. So tokens that are spelled
alike begin alike, and one that training has never seen has an embedding, too. The tokens that begin
and end a text are spelled as the ASCII characters STX and ETX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from samestep.errors import ConfigError
from trainer.models.layers.embeddings import look_up

_BEGIN, _END = 257, 258
_SYMBOLS = 259  # padding, 256 bytes, begin, end


@dataclass(frozen=True)
class Characters:
    """Convolutions over the bytes of a token; the sizes of ELMo by default.

    Attributes:
        longest: number of bytes that are read of a token; the rest is cut off.
        width: of a byte's embedding.
        filters: widths of filters, each with the number of its filters.
        highways: number of highway layers after them (Srivastava et al. 2015).
    """

    longest: int = 50
    width: int = 16
    filters: tuple[tuple[int, int], ...] = (
        (1, 32),
        (2, 32),
        (3, 64),
        (4, 128),
        (5, 256),
        (6, 512),
        (7, 1024),
    )
    highways: int = 2

    def __post_init__(self) -> None:
        if self.longest < 1 or self.width < 1 or self.highways < 0:
            raise ConfigError(
                f"characters has longest {self.longest}, width {self.width} and highways "
                f"{self.highways}. Use 1 or more, and 0 or more highways."
            )
        most = self.longest + 2  # with the marks
        if not self.filters or any(not 1 <= w <= most or n < 1 for w, n in self.filters):
            raise ConfigError(
                f"characters.filters is {[list(each) for each in self.filters]}. Use pairs of a "
                f"width from 1 to {most} and a number of filters, as [[1, 32], [3, 64]]."
            )

    @property
    def features(self) -> int:
        """Number of filters."""
        return sum(count for _, count in self.filters)


class Highway(nn.Module):
    """y = g x + (1 - g) relu(W x + b), with the gate g = sigmoid(V x + c).

    Args:
        width: of x and y.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.gate(x).sigmoid()
        transformed: Tensor = self.transform(x).relu()
        return gate * x + (1 - gate) * transformed


class Filters(nn.Module):
    """Filters of one width, and the maximum of each over a token.

    Args:
        count: F, number of filters.
        size: their width w, in bytes.
        width: D, of a byte's embedding.
    """

    def __init__(self, count: int, size: int, width: int) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(count, size * width))  # a matrix, for optimizers
        self.bias = nn.Parameter(torch.empty(count))

    def forward(self, columns: Tensor) -> Tensor:
        """[N, D, longest + 2] -> [N, F]."""
        weight = self.weight.view(len(self.weight), self.size, -1).transpose(1, 2)  # [F, D, w]
        return F.conv1d(columns, weight, self.bias).amax(-1)


class CharacterEmbeddings(nn.Module):
    """Token embeddings from the bytes of tokens.

    Args:
        config: of the convolutions.
        vocab_size: V, number of tokens.
        width: E, of a token's embedding.
    """

    def __init__(self, config: Characters, vocab_size: int, width: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.bytes = nn.Embedding(_SYMBOLS, config.width)
        self.filters = nn.ModuleList(
            Filters(count, size, config.width) for size, count in config.filters
        )
        self.highways = nn.ModuleList(Highway(config.features) for _ in range(config.highways))
        self.projection = nn.Linear(config.features, width)
        # No buffer: it follows from the tokenizer, and strategies would empty its memory.
        self._spellings: Tensor | None = None

    def read_spellings(self, spellings: Sequence[str]) -> None:
        """Takes the spelling of each token; see `trainer.models.ReadsSpellings`."""
        padding = [""] * (self.vocab_size - len(spellings))  # rows that belong to no token
        self._spellings = spell([*spellings, *padding], self.config.longest)

    def forward(self, tokens: Tensor) -> Tensor:
        """int [B, S] -> [B, S, E]."""
        spelled = self._spelled(tokens)
        return self.embed(spelled.flatten(0, 1)).view(*tokens.shape, -1)

    def embed(self, spelled: Tensor) -> Tensor:
        """Embeds N tokens by their bytes: int [N, longest + 2] -> [N, E]."""
        characters, _ = look_up(self.bytes.weight, spelled)
        columns = characters.transpose(1, 2)
        hidden = torch.cat([filters(columns) for filters in self.filters], -1).relu()
        for highway in self.highways:
            hidden = highway(hidden)
        projected: Tensor = self.projection(hidden)
        return projected

    def table(self) -> Tensor:
        """The embeddings of all tokens, [V, E]."""
        tokens = torch.arange(self.vocab_size, device=self.bytes.weight.device)
        parts = torch.split(tokens, 4096)
        return torch.cat([self.embed(self._spelled(part[None])[0]) for part in parts])

    def _spelled(self, tokens: Tensor) -> Tensor:
        """The bytes of tokens between marks: int [B, S] -> int64 [B, S, longest + 2]."""
        if self._spellings is None:
            # `samestep plan` computes shapes only, and has no tokenizer.
            assert isinstance(tokens, FakeTensor) or tokens.is_meta, "spellings are not there"
            return tokens.new_zeros(*tokens.shape, self.config.longest + 2, dtype=torch.int64)
        if self._spellings.device != tokens.device:
            self._spellings = self._spellings.to(tokens.device)
        return self._spellings[tokens].long()

    def flops(self) -> int:
        """FLOPs of a token in a forward and backward pass: 6 for each product."""
        places = self.config.longest + 3
        products = sum((places - w) * w * self.config.width * n for w, n in self.config.filters)
        features = self.config.features
        products += 2 * self.config.highways * features**2 + self.projection.weight.numel()
        return 6 * products


def spell(spellings: Sequence[str], longest: int) -> Tensor:
    """The bytes of V tokens between marks: int16 [V, longest + 2]."""
    found = np.zeros((len(spellings), longest + 2), np.int16)
    for row, spelling in zip(found, spellings, strict=True):
        marked = [_BEGIN, *(1 + byte for byte in spelling.encode()[:longest]), _END]
        row[: len(marked)] = marked
    return torch.from_numpy(found)
