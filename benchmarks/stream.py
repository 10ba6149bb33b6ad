"""Streaming from an object store on this machine: a whole pass over the data, by wall time.

    python -m benchmarks.stream --corpus corpus/*.jsonl.zst

First beside local files, as fast as it goes. The store takes CPU time from what it serves, so it
says more about the cost of downloading, checking and caching than about networks. Then from a store
with a limited bandwidth, without and with failures, beside s3fs's own download of the same files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import fsspec

from benchmarks.corpus import data_arguments, prepare_dataset
from benchmarks.loader import open_loader
from benchmarks.object_store import object_store
from benchmarks.pairing import Comparison, Contender, compare, publish
from data_pipeline.building.push import push
from data_pipeline.reading.cache import ShardCache
from data_pipeline.reading.dataset import Dataset

_LENGTH, _BATCH_SIZE = 128, 64
_SHARD_BYTES = 2**20


def one_pass(dataset: Dataset) -> float:
    """Reads as many batches as there are in an epoch; returns their examples."""
    with open_loader(dataset, _LENGTH, _BATCH_SIZE, threads=1) as loader:
        batches = loader.examples // _BATCH_SIZE
        for _ in range(batches):
            next(loader)
    return batches * _BATCH_SIZE


def compare_streaming(folder: Path, repeats: int) -> Comparison:
    """Measures passes over local files, over a cold and over a warm cache."""
    url = "s3://bucket/dataset"
    push(folder, url)

    def cold() -> float:
        with tempfile.TemporaryDirectory() as cache:
            return one_pass(Dataset.open(url, ShardCache.open_folder(cache, "100GB")))

    with tempfile.TemporaryDirectory() as cache:
        contenders = [
            Contender("S3, cold cache", cold),
            Contender("local files", lambda: one_pass(Dataset.open(folder))),
            Contender(
                "S3, warm cache",
                lambda: one_pass(Dataset.open(url, ShardCache.open_folder(cache, "100GB"))),
            ),
        ]
        return compare(
            f"Streaming, {_LENGTH} tokens", "examples", contenders, repeats, clock="wall"
        )


def compare_limited(folder: Path, limit: float, failures: float, repeats: int) -> Comparison:
    """Measures passes over a cold cache, and downloads of all shards, from a slow store.

    Args:
        limit: of the store, in MB a second.
        failures: share of reads that fail.
    """
    with object_store(limit * 1e6, failures) as counts:
        url = "s3://bucket/dataset"
        push(folder, url)
        shards = Dataset.open(folder).shards("train")
        megabytes = sum(shard.bytes for shard in shards) / 1e6

        def ours() -> float:
            with tempfile.TemporaryDirectory() as cache:
                one_pass(Dataset.open(url, ShardCache.open_folder(cache, "100GB")))
            return megabytes

        def plain() -> float:
            with tempfile.TemporaryDirectory() as target:
                fsspec.filesystem("s3").get([f"{url}/{shard.name}" for shard in shards], target)
            return megabytes

        contenders = [Contender("samestep", ours), Contender("s3fs, download only", plain)]
        found = compare("", "megabytes", contenders, repeats, clock="wall")
    for name in found.rates:
        rate = found.rate(name)
        found.notes[name] = f"{rate / limit:.2f} of the limit, {megabytes / rate:.1f} s"
    reads, failed = counts
    title = f"A store of {limit:g} MB a second; {failed} of {reads} reads failed"
    return replace(found, title=title)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = data_arguments(__doc__)
    parser.add_argument(
        "--limits",
        type=float,
        nargs="*",
        default=[2, 8],
        help="bandwidths of the slow store, in MB a second (default: 2 8)",
    )
    parser.add_argument(
        "--failures", type=float, default=0.1, help="share of reads that fail (default: 0.1)"
    )
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = prepare_dataset(args, Path(temporary), _SHARD_BYTES)
        with object_store():
            compared = [compare_streaming(folder, args.repeats)]
        compared += [
            compare_limited(folder, limit, failures, args.repeats)
            for limit in args.limits
            for failures in (0.0, args.failures)
        ]
    publish(compared, args.json)


if __name__ == "__main__":
    main()
