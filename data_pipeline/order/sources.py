"""Settings of mixtures, and the shares that follow from weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from samestep.errors import ConfigError

PERIOD = 4096  # shares are multiples of 1 / PERIOD

Shares: TypeAlias = dict[str, int]
"""The share of each source by its key, in 1 / PERIOD; sources without a share are absent."""


@dataclass(frozen=True)
class Source:
    """One dataset of a mixture.

    Attributes:
        path: its folder or address, like `data.path`.
        weight: relative to the other sources; 0 leaves the source out, until `data.weights` changes
            it.
        name: its name in `data.weights` and messages; null takes the last part of its path.
    """

    path: str
    weight: float = 1.0
    name: str | None = None

    @property
    def label(self) -> str:
        """The name, or the last part of the path."""
        return self.name or self.path.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class Weights:
    """The weights of all sources after a step.

    Attributes:
        step: last step with the previous weights; these apply from step + 1 on.
        weights: by name of the source.
    """

    step: int
    weights: dict[str, float]


@dataclass(frozen=True)
class Proportional:
    """Mixing in proportion to the sizes of datasets (Raffel et al. 2020, section 3.5.2).

    A dataset of n documents, or pairs, has the rate min(n, limit) ^ (1 / temperature). Its weight
    is a factor of this rate.

    Attributes:
        limit: the size that counts for larger datasets, so that they do not crowd out small ones;
            null: there is none.
        temperature: 1 mixes in proportion; larger values bring the rates closer together.
    """

    limit: int | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit is {self.limit}. Use 1 or more, such as 65536, or null.")
        if not 1 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}. Use 1 or more, such as 2.")

    def rates(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """The rate of each dataset by its size."""
        limit = math.inf if self.limit is None else self.limit
        return {name: min(size, limit) ** (1 / self.temperature) for name, size in sizes.items()}


def check_sources(sources: Sequence[Source], changes: Sequence[Weights]) -> None:
    """Rejects sources with equal names, and weights that are incomplete or out of order.

    Raises:
        ConfigError: names them.
    """
    names = [source.label for source in sources]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two sources have the same name in {', '.join(names)}; set data.sources.N.name"
        )
    round_weights({source.label: source.weight for source in sources})
    for before, change in zip((None, *changes), changes, strict=False):
        if change.step < 1 or (before and change.step <= before.step):
            raise ConfigError(
                f"weights: step {change.step} must be at least 1, and later than the entry "
                "before it"
            )
        if not names or set(change.weights) != set(names):
            raise ConfigError(
                f"weights of step {change.step} name {', '.join(change.weights) or 'no source'}; "
                f"name all sources: {', '.join(names) or 'none, since data.path is one dataset'}"
            )
        round_weights(change.weights)


def round_weights(weights: Mapping[str, float]) -> Shares:
    """Rounds weights to shares, largest remainders first.

    For example, with a period of 10, weights 1, 1 and 1 are 3.33 each and become 4, 3 and 3.

    Raises:
        ConfigError: a weight is negative, all are 0, or one is too small to be a share.
    """
    total = sum(weights.values())
    if not all(0 <= weight < math.inf for weight in weights.values()) or (weights and total == 0):
        raise ConfigError(f"weights must not be negative, nor all 0, but are {dict(weights)}")
    exact = {name: weight / total * PERIOD for name, weight in weights.items() if weight > 0}
    shares = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: PERIOD - sum(shares.values())]:
        shares[name] += 1
    for name, share in shares.items():
        if share == 0:
            raise ConfigError(
                f"the weight of {name} is below 1/{PERIOD} of the total; raise it, set it to 0, or "
                "lower data.proportional.limit"
            )
    return shares
