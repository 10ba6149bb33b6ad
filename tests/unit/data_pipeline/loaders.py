"""Loaders of small datasets, and what all replicas together get from them; for tests."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_pipeline.reading.batches import BatchLayout
from data_pipeline.reading.config import Config
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.loader import MicroBatch, SplitOrder, StreamingLoader
from samestep.examples import Batch, Examples, PackSpec
from trainer.strategies import Replica

SPEC = PackSpec(32, 1, 1)
Rows = dict[str, torch.Tensor]


def lay_out(examples: Examples, sequence_length: int) -> Batch:
    """The simplest objective: raw tokens (+ 1) at their positions, and all that it is given."""
    tokens = np.zeros((len(examples.key), sequence_length), dtype=np.int64)
    within = np.arange(len(examples.tokens)) - np.repeat(
        np.cumsum(examples.length) - examples.length, examples.length
    )
    row, column = (
        np.repeat(examples.row, examples.length),
        np.repeat(examples.column, examples.length) + within,
    )
    assert (tokens[row, column] == 0).all()
    tokens[row, column] = examples.tokens + 1
    return {"tokens": tokens, "key": examples.key.view(np.int64), "weight": examples.weight}


def make_loader(folder: Path, index: int = 0, count: int = 1, **changes: Any) -> StreamingLoader:
    config = Config(
        path=str(folder), sequence_length=32, lanes=8, threads=changes.pop("threads", 0)
    )
    config = replace(
        config,
        **{
            name: changes.pop(name)
            for name in ("packing", "lanes", "window", "prefetch", "exclude", "group_by_length")
            if name in changes
        },
    )
    sizes = (changes.pop("global_batch_size", 24), changes.pop("micro_batch_size", 4))
    replica = changes.pop("replica", Replica(index, count))
    layout = BatchLayout(*sizes, replica, changes.pop("units", False))
    objective = {
        name: changes.pop(name, default)
        for name, default in (("pack_spec", SPEC), ("collate", lay_out))
    }
    order = SplitOrder(**{"seed": 7, **changes})
    return StreamingLoader(Dataset.open(folder), config, order, layout, **objective)


def valid_rows(step: list[MicroBatch]) -> Rows:
    rows = {name: torch.cat([micro_batch[name] for micro_batch in step]) for name in step[0]}
    return {name: value[rows["example"] >= 0] for name, value in rows.items()}


def join(parts: Sequence[Rows]) -> Rows:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def global_batches(
    folder: Path, steps: int, count: int = 1, state: dict[str, Any] | None = None, **changes: Any
) -> list[Rows]:
    """What all replicas together get in each step, in their order."""
    replicas = []
    for index in range(count):
        with make_loader(folder, index, count, **changes) as loader:
            if state:
                loader.load_state_dict(state)
            replicas.append([valid_rows(next(loader)) for _ in range(steps)])
    return [join(parts) for parts in zip(*replicas, strict=True)]


def assert_same(first: list[Rows], second: list[Rows]) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name
