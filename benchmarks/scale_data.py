"""The cost of a start against the number of shards: opening, counting, the first batch, resuming.

All shards are links to one file of random tokens, so they take no space, and their pages are in
memory; a run on a disk or a store waits for these in addition.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.dataset import write_dataset
from benchmarks.growth import Figures, Growth, cpu_timed, in_fresh_process, measure, resident
from benchmarks.loader import open_loader
from data_pipeline.building import example_counts
from data_pipeline.format.manifest import Manifest
from data_pipeline.reading.dataset import Dataset
from samestep.examples import LoaderState

DOCUMENTS = 1000
"""Documents of a shard."""
_TOKENS = 430  # of a document, about as in C4
_LINKS = 30_000  # to a file; ext4 takes 65,000
_LENGTH, _UNCOMMON_LENGTH = 128, 100  # the build counts examples of the first only
_BATCH = 256


def write_shards(folder: Path, shards: int, documents: int = DOCUMENTS) -> None:
    """Writes a dataset of equal shards, with the counts that a build makes."""
    # Lengths from 1 to twice the mean, in an order that looks random.
    lengths = [1 + 7919 * number % (2 * _TOKENS) for number in range(documents)]
    write_dataset(folder, lengths)
    manifest = Manifest.load(folder)
    (first,) = manifest.splits["train"]
    content = (folder / first.name).read_bytes()
    infos = [dataclasses.replace(first, name=f"train-{n:06d}.tar") for n in range(shards)]
    for number, info in enumerate(infos[1:], start=1):
        if number % _LINKS == 0:
            (folder / info.name).write_bytes(content)
        else:
            os.link(folder / infos[number - number % _LINKS].name, folder / info.name)
    splits = {"train": tuple(infos), "heldout": ()}
    manifest = dataclasses.replace(manifest, splits=splits, documents_in=documents * shards)
    counts = example_counts.count(np.array(lengths, dtype=np.int64))
    example_counts.save(folder, manifest, {"train": [counts] * shards})
    manifest.save(folder)


def start_without_counts(folder: Path) -> Figures:
    """Opens a dataset whose examples nobody has counted under this packing."""
    seconds = cpu_timed(lambda: open_loader(Dataset.open(folder), _UNCOMMON_LENGTH, 1))[0]
    return {"open dataset and loader, examples not counted yet, CPU s": seconds}


def start(folder: Path) -> Figures:
    """Opens a dataset with the counts of its build, takes a batch, and resumes late."""
    before = resident()
    reading, _ = cpu_timed(lambda: Manifest.load(folder))
    opening, dataset = cpu_timed(lambda: Dataset.open(folder))
    counted, loader = cpu_timed(lambda: open_loader(dataset, _LENGTH, _BATCH))
    memory = resident(before)
    with loader:
        first, _ = cpu_timed(lambda: next(loader))
        late = 40 * loader.examples + loader.examples // 2
        state: LoaderState = {**loader.state_dict(), "example": late}

    def resume() -> None:
        with open_loader(Dataset.open(folder), _LENGTH, _BATCH) as loader:
            loader.load_state_dict(state)
            next(loader)

    return {
        "read the manifest, CPU s": reading,
        "open the dataset, CPU s": opening,
        "open the loader, counts from the build, CPU s": counted,
        "first batch, CPU s": first,
        "open all and resume in epoch 40, with a batch, CPU s": cpu_timed(resume)[0],
        "memory of manifest, counts and order, MiB": memory,
    }


def costs(sizes: Sequence[int], seconds: float, documents: int = DOCUMENTS) -> list[Growth]:
    """Measures starts with these numbers of shards."""
    with tempfile.TemporaryDirectory() as temporary:

        def measured(shards: int, work: Callable[[Path], Figures]) -> Figures:
            folder = Path(temporary) / str(shards)
            if not folder.exists():
                write_shards(folder, shards, documents)
            return in_fresh_process(work, folder)

        counting = measure("shards", sizes, lambda n: measured(n, start_without_counts), seconds)
        starting = measure("shards", sizes, lambda n: measured(n, start), seconds)
    return [*starting, *counting]
