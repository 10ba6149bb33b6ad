"""A small dataset written straight as shards, for tests of everything that reads one."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.format.manifest import FORMAT, Manifest
from data_pipeline.format.writing import write_shard
from samestep.hashing import combine

VOCAB_SIZE = 40_000

WriteDataset = Callable[..., Path]


@pytest.fixture(scope="session")
def write_dataset_to() -> WriteDataset:
    """Writes shards of random documents.

    Every token is distinct, so that a token names its place.
    """

    def write(
        folder: Path, shards: int = 6, documents: int = 40, heldout: int = 1, longest: int = 59
    ) -> Path:
        splits = {}
        next_token = 0
        for split, number in (("train", shards), ("heldout", heldout)):
            infos = []
            for shard in range(number):
                lengths = np.minimum(
                    np.uint64(1) + combine(len(split), shard, np.arange(documents)) % np.uint64(59),
                    longest,
                ).astype(np.int64)
                bounds = next_token + np.concatenate(([0], np.cumsum(lengths)))
                next_token = int(bounds[-1])
                texts = [
                    np.arange(begin, end, dtype=np.uint16)
                    for begin, end in itertools.pairwise(bounds)
                ]
                origin = np.stack((np.zeros(documents), np.arange(documents)), axis=1).astype(
                    np.uint32
                )
                infos.append(
                    write_shard(
                        folder / f"{split}-{shard:06d}.tar", texts, origin, np.dtype(np.uint16)
                    )
                )
            splits[split] = tuple(infos)
        assert next_token <= VOCAB_SIZE
        total = (shards + heldout) * documents
        Manifest(FORMAT, "none", VOCAB_SIZE, "uint16", {}, ("corpus.txt",), total, {}, splits).save(
            folder
        )
        return folder

    return write


@pytest.fixture
def write_dataset(write_dataset_to: WriteDataset, tmp_path: Path) -> WriteDataset:
    """The same, in a folder of the test."""
    return lambda name="dataset", **options: write_dataset_to(tmp_path / name, **options)
