"""Optimizers (each module defines a `Config` that builds one), parameter groups and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from torch import nn
from torch.optim import Optimizer


class Config(Protocol):
    """What the module of each optimizer has under that name: the section `optimizer` of an experiment."""

    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], stacked: Mapping[str, int] = MappingProxyType({})
    ) -> Optimizer:
        """Makes the optimizer of these named parameters, on the device they are on.

        Args:
            parameters: by name.
            stacked: how many tensors of equal size lie in a parameter's rows, by its name, where there are several.
        """
        ...
