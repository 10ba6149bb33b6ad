"""Scores of what is predicted, computed from all examples of a split; shares of the whole are in [0, 1]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from trainer.errors import ConfigError


def check_names(names: Sequence[str], known: Iterable[str]) -> None:
    """Refuses names of metrics that there are not."""
    unknown = [name for name in names if name not in set(known)]
    if unknown:
        raise ConfigError(f"metrics has {', '.join(unknown)}; there are {', '.join(known)}")


def check_installed(names: Sequence[str]) -> None:
    """Computes metrics of two rows, so that a package that is not installed is named now rather than after hours.

    Raises:
        MissingExtra: naming the package.
    """
    from trainer.metrics import entities, labels

    values, tags = np.array([0, 1]), [["B-X"], ["O"]]
    labels.scores(
        [name for name in names if name not in entities.METRICS], values, values, ("a", "b")
    )
    entities.scores([name for name in names if name in entities.METRICS], tags, tags)
