"""Going on at any point of an epoch: opening a dataset and its loader, up to the first batch.

    python -m benchmarks.resume --corpus corpus/*.jsonl.zst

Nothing is cached from one resume to the next but the file system's pages.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.corpus import data_arguments, prepare_dataset
from benchmarks.loader import open_loader
from benchmarks.pairing import Comparison, Contender, compare, publish
from data_pipeline.reading.dataset import Dataset

PLACES = (0.01, 0.5, 0.99)  # of an epoch
_LENGTH, _BATCH_SIZE = 128, 64
_SHARD_BYTES = 2**17


def resume(folder: Path, place: float) -> float:
    """Goes on at a place of the first epoch."""
    with open_loader(Dataset.open(folder), _LENGTH, _BATCH_SIZE) as loader:
        loader.load_state_dict({**loader.state_dict(), "example": int(place * loader.examples)})
        next(loader)
    return 1


def compare_places(folder: Path, repeats: int) -> Comparison:
    """Measures all places in turn."""
    contenders = [Contender(f"{place:.0%}", partial(resume, folder, place)) for place in PLACES]
    compared = compare("Resume at a place of an epoch", "resumes", contenders, repeats)
    notes = {name: f"{1 / compared.rate(name):.3f} s each" for name in compared.rates}
    return dataclasses.replace(compared, notes=notes)


def main(arguments: Sequence[str] | None = None) -> None:
    args = data_arguments(__doc__).parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepare_dataset(args, Path(temporary), _SHARD_BYTES)
        compared = compare_places(
            folder, max(args.repeats, 25)
        )  # each takes a fraction of a second
    publish([compared], args.json)


if __name__ == "__main__":
    main()
