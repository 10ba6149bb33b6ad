"""The `data` section of an experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from data_pipeline.order.sources import Proportional, Source, Weights, check_sources
from data_pipeline.reading import DEFAULT_CACHE
from data_pipeline.reading.concat_dataset import AnyDataset
from data_pipeline.reading.dataset import Dataset
from samestep.config import parse_size
from samestep.errors import ConfigError, DataError
from samestep.examples import LoaderState, Policy
from samestep.storage import is_url


@dataclass(frozen=True)
class Config:
    """The `data` section of an experiment.

    Attributes:
        path: folder of a built dataset, or its URL (s3://, gs://, http://, https://); remote shards
            are downloaded when they are needed.
        sources: several datasets to mix, instead of `path`.
        weights: changes of the sources' weights after given steps.
        proportional: of `sources`: weights are factors of rates that follow from their sizes; null:
            weights are the rates themselves.
        on_change: reaction if a continued run has other datasets, or other weights at its current
            step, than before: error rejects; accept continues with the new ones from there.
        sequence_length: positions of an example, special tokens included.
        packing: how documents become examples: concat, full_sentences, best_fit, padded or pairs.
        lanes: number of spans of the data that a batch takes turns reading; part of the order, so
            fixed for a run.
        window: number of shards in which a lane shuffles examples; part of the order, so fixed for
            a run.
        group_by_length: for rows of tasks: the size of groups of examples of similar length, best
            the global batch size; rows are then no wider than the longest of their batch. Part of
            the order. None: all rows have sequence_length positions, as compilers need.
        group_by_source: of `sources`: the size of groups of consecutive examples from one source,
            which divides the global batch size; `group_by_length` must be the same, if it is set.
            Part of the order. None: each example's source is chosen by itself.
        threads: number of threads that make batches; 0 makes them in the training thread.
        prefetch: number of global batches that threads keep ready, or of blocks of several small
            ones.
        cache: local folder for downloaded shards, which all processes and runs of a node can share;
            null is SAMESTEP_CACHE from the environment, or ~/.cache/samestep.
        cache_size: maximum size of the cache, such as 500GB or 2TiB; less on a smaller disk.
        on_corrupt: reaction to a shard whose bytes differ from those that were built, even when
            read or downloaded again: stop ends the run; skip skips the rest of its examples.
        exclude: ranges [first, end) of global examples to skip, counted from 0, in the first data
            order (phases may begin others).
    """

    path: str | None = None
    sources: tuple[Source, ...] = ()
    weights: tuple[Weights, ...] = ()
    proportional: Proportional | None = None
    on_change: Literal["error", "accept"] = "error"
    sequence_length: int = 128
    packing: Policy = "concat"
    lanes: int = 64
    window: int = 4
    group_by_length: int | None = None
    group_by_source: int | None = None
    threads: int = 1
    prefetch: int = 2
    cache: str | None = None
    cache_size: str = DEFAULT_CACHE
    on_corrupt: Literal["stop", "skip"] = "stop"
    exclude: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if (self.path is None) == (not self.sources):
            raise ConfigError(
                f"path is {self.path or 'null'} and there are {len(self.sources)} sources. Set "
                "either path to a dataset, or sources to a list of {path, weight}."
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
                raise ConfigError(f"{name} is {getattr(self, name)}. Use {least} or more.")
        for name in ("group_by_length", "group_by_source"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"{name} is {size}. Use 1 or more, or null.")
        parse_size(self.cache_size, "cache_size")
        for part in self.exclude:
            if len(part) != 2 or not 0 <= part[0] < part[1]:
                raise ConfigError(
                    f"exclude has {list(part)}. Use pairs [first, end] with 0 <= first < end."
                )
            size = self.group_by_source or 1
            if any(bound % size for bound in part):
                whole = [part[0] // size * size, -(-part[1] // size) * size]
                raise ConfigError(
                    f"exclude has {list(part)}, and group_by_source makes groups of {size}, which "
                    f"batches hold whole. Exclude whole groups, as {whole}."
                )

    @property
    def blocks_ahead(self) -> int:
        """Number of blocks that threads have made when a block is needed."""
        return self.prefetch if self.threads else 0

    @property
    def paths(self) -> tuple[str, ...]:
        """The locations of the datasets."""
        return tuple(source.path for source in self.sources) if self.path is None else (self.path,)

    def rates(self, named: Mapping[str, Dataset]) -> list[tuple[int, dict[str, float]]]:
        """The rates of the datasets after step 0, and after each change of weights."""
        first = {source.label: source.weight for source in self.sources}
        weights = [(0, first or dict.fromkeys(named, 1.0))]
        weights += [(change.step, change.weights) for change in self.weights]
        if self.proportional is None:
            return weights
        shards = {name: dataset.manifest.splits["train"] for name, dataset in named.items()}
        sizes = {name: sum(shard.documents for shard in own) for name, own in shards.items()}
        rates = self.proportional.rates(sizes)
        return [
            (step, {name: w * rates[name] for name, w in each.items()}) for step, each in weights
        ]

    def open(self) -> AnyDataset:
        """Opens the dataset at `path`, or the `sources`.

        Raises:
            DataError: there is none, it is unfinished or damaged, or sources have different
                tokenizers.
            ConfigError: two sources are the same dataset.
        """
        # Only remote datasets have one: a user without a home folder has no default.
        cache = None
        if any(map(is_url, self.paths)):
            from data_pipeline.reading.cache import ShardCache

            cache = ShardCache.open_folder(self.cache, self.cache_size)
        whole = self.on_corrupt == "stop"
        if self.path is None:
            from data_pipeline.reading.several_datasets import ConcatDataset

            return ConcatDataset.open(self.sources, cache, whole=whole)
        return Dataset.open(self.path, cache, whole=whole)


_SAME_AGAIN = {
    "order": "use the program's version that wrote it",
    "seed": "set seed to the checkpoint's",
    "lanes": "set data.lanes to the checkpoint's",
    "window": "set data.window to the checkpoint's",
    "group_by_length": "set data.group_by_length to the checkpoint's",
    "group_by_source": "set data.group_by_source to the checkpoint's",
    "packing": "restore data.packing, data.sequence_length and the objective",
}
"""What to do about another value in a checkpoint, by key of a loader's state."""


def check_identity(state: LoaderState, identity: LoaderState) -> None:
    """Checks that a loader's state counts examples in the order that an identity describes.

    Raises:
        DataError: it counts in another order.
    """
    for name, fix in _SAME_AGAIN.items():
        value = identity.get(name)
        if state.get(name) != value:
            raise DataError(
                f"the checkpoint's data order cannot be continued: its {name} is "
                f"{state.get(name)!r}, but this run's is {value!r}. To continue, "
                f"{fix}, or start a new run from the checkpoint's weights."
            )
