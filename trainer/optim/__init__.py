"""Optimizers (each module defines a `Config` that builds one), parameter groups and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

from torch import nn
from torch.optim import Optimizer


class Config(Protocol):
    """The section `optimizer` of an experiment; each optimizer's module has one."""

    def build(
        self, parameters: Iterable[tuple[str, nn.Parameter]], stacked: Mapping[str, int] = MappingProxyType({})
    ) -> Optimizer:
        """Makes the optimizer of these named parameters, on the device they are on.

        Args:
            parameters: by name.
            stacked: number of equally sized matrices stacked in a parameter, by its name; 1 if absent.
        """
        ...
