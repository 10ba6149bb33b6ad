"""LoRA (Hu et al. 2021, arXiv 2106.09685): the change of a matrix as the product of two narrow
ones.

A projection y = W x + b becomes y = W x + b + (alpha / rank) B A x. Where a matrix of ours is
several of the paper's (queries, keys and values are one), each of them that is a target has an A
and a B of its own.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.models.peft import Added
from trainer.models.projections import Projection, WrappedProjection, put_in_place

_ADDED = re.compile(r"(.*)\.lora\.(\w+)\.([ab])\.weight")


class Change(NamedTuple):
    """What is added to a part of a projection's matrix.

    Attributes:
        linear: the name of the projection.
        target: what the part is called.
        part: its number among the `parts` equal ones that the matrix consists of.
        parts: how many these are.
    """

    linear: str
    target: str
    part: int
    parts: int

    def name(self, matrix: str) -> str:
        """Of the parameter "a" or "b"."""
        return f"{self.linear}.lora.{self.target}.{matrix}.weight"


@dataclass(frozen=True)
class Config(Added):
    """LoRA: low-rank changes of chosen projections, which an export adds to them.

    Attributes:
        rank: r, of each change.
        alpha: changes are multiplied by alpha / rank.
        targets: the projections of each layer that are changed: of query, key, value, out, up,
            down; gate, of gated feed-forward networks; cross_query, cross_key, cross_value and
            cross_out, of decoders.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("query", "value")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank is {self.rank}; use 1 or more, as 8")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"alpha is {self.alpha}; use a number above 0, as 16")
        if not self.targets:
            raise ConfigError("targets is empty; name what is to be changed, as [query, value]")

    @property
    def scale(self) -> float:
        """What the product of A and B is multiplied by."""
        return self.alpha / self.rank

    @property
    def merges(self) -> bool:
        return True

    def add_to(self, model: nn.Module) -> None:
        known = known_targets(model)
        for target in self.targets:
            if target not in known:
                close = difflib.get_close_matches(target, known, n=1)
                meant = f"did you mean {close[0]!r}? " if close else ""
                raise ConfigError(
                    f"model.peft.targets has {target!r}, which this model has not; {meant}Known: "
                    f"{', '.join(known)}"
                )
        for name, projection in list(_projections(model)):
            if not set(projection.parts).isdisjoint(self.targets):
                put_in_place(model, name, LoraLinear(projection, self))

    def owns(self, name: str) -> bool:
        return _ADDED.fullmatch(name) is not None

    def initial_std(self, name: str, shape: Sequence[int]) -> float | None:
        """B is 0, so that training begins with the model as it is; A has the variance of peft's."""
        found = _ADDED.fullmatch(name)
        if found is None:
            return None
        return float((3 * shape[1]) ** -0.5) if found[3] == "a" else 0.0

    def changes(self, model: nn.Module) -> list[Change]:
        """All that is added to a model."""
        return [
            Change(name, target, part, len(projection.parts))
            for name, projection in _projections(model)
            for part, target in enumerate(projection.parts)
            if target in self.targets
        ]

    def merge(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters of the model that computes the same without LoRA, fp32 where they are
        changed.

        Args:
            model: whose parameters these are, on any device.
            tensors: parameters by name.
        """
        merged = {name: tensors[name] for name in tensors if not self.owns(name)}
        for change in self.changes(model):
            whole = merged[f"{change.linear}.weight"].float().clone()
            a, b = (tensors[change.name(matrix)].float() for matrix in "ab")
            whole.chunk(change.parts)[change.part].add_(self.scale * (b @ a))
            merged[f"{change.linear}.weight"] = whole
        return merged


class LowRank(nn.Module):
    """The product of two matrices: from `width` to `rank` to `out` features."""

    def __init__(self, width: int, out: int, rank: int, scale: float, device: torch.device) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Linear(width, rank, bias=False, device=device)
        self.b = nn.Linear(rank, out, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., out]."""
        out: Tensor = self.b(self.a(x)) * self.scale
        return out


class LoraLinear(WrappedProjection):
    """A projection of a model with the parameters that it had, and changes of some of its parts."""

    def __init__(self, projection: Projection, config: Config) -> None:
        super().__init__(projection)
        width, out = projection.in_features, projection.out_features // len(projection.parts)
        device = projection.weight.device
        self.lora = nn.ModuleDict(
            {
                target: LowRank(width, out, config.rank, config.scale, device)
                for target in projection.parts
                if target in config.targets
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., out]."""
        parts = super().forward(x).chunk(len(self.parts), -1)
        changed = [
            part + self.lora[target](x) if target in self.lora else part
            for target, part in zip(self.parts, parts, strict=True)
        ]
        return changed[0] if len(changed) == 1 else torch.cat(changed, -1)


def known_targets(model: nn.Module) -> tuple[str, ...]:
    """All that LoRA could change of a model."""
    every = (part for _, projection in _projections(model) for part in projection.parts)
    return tuple(dict.fromkeys(every))


def _projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    """The projections in the layers of a model, by name."""
    for name, module in model.named_modules():
        if isinstance(module, Projection):
            yield name, module
