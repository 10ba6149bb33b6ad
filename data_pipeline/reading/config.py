"""The `data` section of an experiment: what is read, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from data_pipeline.order.mixture import Source, Weights, check_sources
from data_pipeline.reading.cache import DEFAULT_SIZE, ShardCache
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.mixed_dataset import AnyDataset, MixedDataset
from trainer.config.sizes import parse_size
from trainer.errors import ConfigError
from trainer.examples import Policy


@dataclass(frozen=True)
class Config:
    """The `data` section of an experiment.

    Attributes:
        path: folder of a built dataset, or its address (s3://, gs://, http://, https://); shards of
            a remote one are downloaded when they are needed.
        sources: several datasets to mix, instead of `path`.
        weights: other weights of the sources, from steps on.
        on_change: what to do when a run that goes on finds other datasets, or other weights for
            where it stands, than it was stopped with: error refuses; accept goes on with the new
            ones from there.
        sequence_length: positions of an example, special tokens included.
        packing: how documents become examples: concat, best_fit, padded or pairs.
        lanes: independent readers that the order deals examples from; part of the order, so fixed
            for a run.
        window: shards' worth of examples that a lane shuffles together; part of the order, so fixed
            for a run.
        group_by_length: for rows of tasks: takes examples of about the same length in groups of so
            many, best the global batch size, and makes rows no wider than the longest of a batch;
            part of the order. None: all rows have sequence_length positions, as compilers need it.
        threads: threads that make batches; 0 makes them in the training thread.
        prefetch: steps of batches that threads keep ready, or blocks of several steps where those
            are small.
        cache: folder of the local disk for downloaded shards, which all processes and runs of a
            node may share; null is SAMESTEP_CACHE from the environment, or ~/.cache/samestep.
        cache_size: how much of them is kept, such as 500GB or 2TiB; less where the disk has no more
            to give.
        on_corrupt: what to do about a shard whose bytes are not those that were built, even when
            they are read or fetched again: stop ends the run; skip passes over the rest of its
            examples.
        exclude: ranges [first, end] of global examples, counted from 0, that a run passes over (end
            itself is not among them); of the first data order, where phases begin several.
    """

    path: str | None = None
    sources: tuple[Source, ...] = ()
    weights: tuple[Weights, ...] = ()
    on_change: Literal["error", "accept"] = "error"
    sequence_length: int = 128
    packing: Policy = "concat"
    lanes: int = 64
    window: int = 4
    group_by_length: int | None = None
    threads: int = 1
    prefetch: int = 2
    cache: str | None = None
    cache_size: str = DEFAULT_SIZE
    on_corrupt: Literal["stop", "skip"] = "stop"
    exclude: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if (self.path is None) == (not self.sources):
            raise ConfigError(
                f"path is {self.path or 'null'} and there are {len(self.sources)} sources; set "
                "path to a dataset, or "
                "sources to a list of {path, weight}, and leave the other one out (path=null, "
                "sources=[])"
            )
        check_sources(self.sources, self.weights)
        for name, least in (
            ("sequence_length", 1),
            ("lanes", 1),
            ("window", 1),
            ("threads", 0),
            ("prefetch", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.group_by_length is not None and self.group_by_length < 1:
            raise ConfigError(
                f"group_by_length must be at least 1, or null for none, not {self.group_by_length}"
            )
        parse_size(self.cache_size, "cache_size")
        for part in self.exclude:
            if len(part) != 2 or not 0 <= part[0] < part[1]:
                raise ConfigError(
                    f"exclude must be pairs [first, end] with 0 <= first < end, not {list(part)}"
                )

    @property
    def paths(self) -> tuple[str, ...]:
        """Where the datasets are."""
        return tuple(source.path for source in self.sources) if self.path is None else (self.path,)

    def open(self) -> AnyDataset:
        """Opens the dataset at `path`, or the `sources`.

        Raises:
            DataError: there is none, it is unfinished or damaged, or sources have different
                tokenizers.
            ConfigError: two sources are the same dataset.
        """
        cache, whole = (
            ShardCache.open_folder(self.cache, self.cache_size),
            self.on_corrupt == "stop",
        )
        if self.path is None:
            return MixedDataset.open(self.sources, cache, whole=whole)
        return Dataset.open(self.path, cache, whole=whole)
