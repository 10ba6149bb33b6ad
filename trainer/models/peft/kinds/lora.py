"""LoRA (Hu et al. 2021, arXiv 2106.09685): low-rank updates of projections.

A projection y = W x + b becomes y = W x + b + (alpha / rank) B A x. If a matrix fuses several of
the paper's (queries, keys and values), each target among them has its own A and B.
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

from samestep.errors import ConfigError
from trainer.models.layers import Projection, WrappedProjection, put_in_place
from trainer.models.peft import Peft

_ADDED = re.compile(r"(.*)\.lora\.(\w+)\.([ab])\.weight")


class Change(NamedTuple):
    """The update of one part of a projection's matrix.

    Attributes:
        linear: name of the projection.
        target: name of the part, such as "query".
        part: index of the part among the `parts` equal ones stacked in the matrix.
        parts: number of parts.
    """

    linear: str
    target: str
    part: int
    parts: int

    def name(self, matrix: str) -> str:
        """Name of the parameter A ("a") or B ("b")."""
        return f"{self.linear}.lora.{self.target}.{matrix}.weight"


@dataclass(frozen=True)
class Config(Peft):
    """LoRA: low-rank updates of chosen projections, which an export merges into the weights.

    Attributes:
        rank: r, of each update.
        alpha: updates are multiplied by alpha / rank.
        targets: the projections to update in each layer: query, key, value, out, up, down; gate in
            gated feed-forward networks; cross_query, cross_key, cross_value and cross_out in
            decoders.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("query", "value")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank is {self.rank}. Use 1 or more, such as 8.")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"alpha is {self.alpha}. Use a number above 0, such as 16.")
        if not self.targets:
            raise ConfigError("targets is empty. Name projections, such as [query, value].")

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    @property
    def merges(self) -> bool:
        return True

    def add_to(self, model: nn.Module) -> None:
        known = known_targets(model)
        for target in self.targets:
            if target not in known:
                close = difflib.get_close_matches(target, known, n=1)
                meant = f" Did you mean {close[0]!r}?" if close else ""
                raise ConfigError(
                    f"model.peft.targets has {target!r}, which this model lacks.{meant} Known: "
                    f"{', '.join(known)}"
                )
        # A list, because the modules are replaced during the loop.
        for name, projection in list(_projections(model)):
            if not set(projection.parts).isdisjoint(self.targets):
                put_in_place(model, name, LoraLinear(projection, self))

    def initial_std(self, name: str, shape: Sequence[int]) -> float | None:
        # B is 0, so training starts from the unchanged model. A has the variance of peft's A.
        found = _ADDED.fullmatch(name)
        if found is None:
            return None
        return float((3 * shape[1]) ** -0.5) if found[3] == "a" else 0.0

    def changes(self, model: nn.Module) -> list[Change]:
        """All updates of a model."""
        return [
            Change(name, target, part, len(projection.parts))
            for name, projection in _projections(model)
            for part, target in enumerate(projection.parts)
            if target in self.targets
        ]

    def merge(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Adds the updates to the weights; updated ones become fp32."""
        merged = {name: tensors[name] for name in tensors if not self.owns(name)}
        for change in self.changes(model):
            whole = merged[f"{change.linear}.weight"].float().clone()
            a, b = (tensors[change.name(matrix)].float() for matrix in "ab")
            # chunk returns views, so this updates the part's rows of the fused matrix in place.
            whole.chunk(change.parts)[change.part].add_(self.scale * (b @ a))
            merged[f"{change.linear}.weight"] = whole
        return merged


class LowRank(nn.Module):
    """The product of two matrices: from `width` through `rank` to `out` features."""

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
    """A model's projection with its own parameters, and updates of some of its parts."""

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
        # The fused output [..., 3 * inner] has a part for each of query, key and value.
        parts = super().forward(x).chunk(len(self.parts), -1)
        changed = [
            part + self.lora[target](x) if target in self.lora else part
            for target, part in zip(self.parts, parts, strict=True)
        ]
        return changed[0] if len(changed) == 1 else torch.cat(changed, -1)


def known_targets(model: nn.Module) -> tuple[str, ...]:
    """Names of all parts of projections that LoRA can update."""
    every = (part for _, projection in _projections(model) for part in projection.parts)
    return tuple(dict.fromkeys(every))


def _projections(model: nn.Module) -> Iterator[tuple[str, Projection]]:
    """The projections in a model's layers, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, Projection):
            yield name, module
