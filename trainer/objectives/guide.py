"""A trained encoder that says which negatives of a contrastive loss may be right, too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.errors import ConfigError
from trainer.models.pooling import Pool


@dataclass(frozen=True)
class Guide:
    """Masks candidates by the cosines of another encoder (Solatorio 2024, "GISTEmbed").

    It embeds the texts of each batch, and a candidate is no negative where its cosine is higher
    than the right pair's, minus the margin.

    Attributes:
        path: of the encoder, as for `init_from`; it has the same tokenizer and is not trained. Each
            device holds all of it.
        margin: subtracted from the cosine of the right pair.
        relative: whether the margin is a share of the right cosine's absolute value: with 0.05 and
            a right cosine of 0.8, candidates above 0.76 are masked.
        pool: as the objective's; null is the value of the weights in `path`, else the mean.
    """

    path: str
    margin: float = 0.0
    relative: bool = False
    pool: Pool | None = None

    def __post_init__(self) -> None:
        if not -2 <= self.margin <= 2:
            raise ConfigError(f"guide.margin is {self.margin}. Use -2 to 2, such as 0.05.")

    def mask(self, cosines: Tensor) -> Tensor:
        """bool [N, M], True where a candidate may be right, from the guide's cosines [N, M].

        The diagonal holds the right pairs, which are never masked. With a right cosine of 0.8 and
        a margin of 0.1, a candidate of 0.75 is masked; if it is relative, one of 0.73.
        """
        right = cosines.diagonal()[:, None]
        allowance = right.abs() * self.margin if self.relative else self.margin
        own = torch.eye(*cosines.shape, dtype=torch.bool, device=cosines.device)
        return (cosines > right - allowance) & ~own
