"""Scores of predictions, computed from all examples of a split; fractions are in [0, 1]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from samestep.errors import ConfigError


def check_names(names: Sequence[str], known: Iterable[str]) -> None:
    """Rejects names of unknown metrics."""
    unknown = [name for name in names if name not in set(known)]
    if unknown:
        raise ConfigError(f"metrics has {', '.join(unknown)}. Use some of {', '.join(known)}.")


def check_installed(names: Sequence[str]) -> None:
    """Computes metrics of two rows: a missing package fails here instead of after hours.

    Raises:
        MissingExtra: naming the package.
    """
    from trainer.metrics import entities, labels

    of_entities = [name for name in names if name in entities.METRICS]
    others = [name for name in names if name not in entities.METRICS]
    values, tags = np.array([0, 1]), [["B-X"], ["O"]]
    labels.scores(others, values, values, ("a", "b"))
    entities.scores(of_entities, tags, tags)
