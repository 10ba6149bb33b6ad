"""The training loop's source of batches: the same global batches at any number of replicas and threads.

A step's batch is a pure function of its first global example number; threads only make batches earlier, never
different ones. So the loader's state is one number, beside the names of what that number counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from data_pipeline.cache import DEFAULT_SIZE, ShardCache
from data_pipeline.dataset import Dataset, PackedSplit, max_open_shards, packing_digest
from data_pipeline.order import ORDER_VERSION, ExampleOrder, Location, Order, SinglePass, share
from data_pipeline.prefetch import Prefetcher
from trainer.config.sizes import parse_size
from trainer.errors import ConfigError, DataError
from trainer.examples import Batch, Examples, PackSpec, Policy
from trainer.hashing import combine, mix, name_key

MicroBatch: TypeAlias = dict[str, torch.Tensor]

_DROPOUT = name_key("dropout")
_BLOCK_CELLS = 2**18  # what numpy takes to begin no longer shows, and the largest arrays are of 2 MB


@dataclass(frozen=True)
class Config:
    """The `data` section of an experiment.

    Attributes:
        path: folder of a built dataset, or its address (s3://, gs://, http://, https://); shards of a remote one are
            downloaded when they are needed.
        sequence_length: cells of an example, special tokens included.
        packing: how documents become examples: concat, best_fit, padded or pairs.
        lanes: independent readers that the order deals examples from; part of the order, so fixed for a run.
        window: shards' worth of examples that a lane shuffles together; part of the order, so fixed for a run.
        threads: threads that make batches; 0 makes them in the training thread.
        prefetch: steps of batches that threads keep ready, or blocks of several steps where those are small.
        cache: folder of the local disk for downloaded shards, which all processes and runs of a node may share; null is
            SAMESTEP_CACHE from the environment, or ~/.cache/samestep.
        cache_size: how much of them is kept, such as 500GB or 2TiB; less where the disk has no more to give.
    """

    path: str
    sequence_length: int = 128
    packing: Policy = "concat"
    lanes: int = 64
    window: int = 4
    threads: int = 1
    prefetch: int = 2
    cache: str | None = None
    cache_size: str = DEFAULT_SIZE

    def __post_init__(self) -> None:
        for name, least in (("sequence_length", 1), ("lanes", 1), ("window", 1), ("threads", 0), ("prefetch", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        parse_size(self.cache_size, "cache_size")

    def open(self) -> Dataset:
        """Opens the dataset at `path`.

        Raises:
            DataError: there is none, or it is unfinished or damaged.
        """
        return Dataset.open(self.path, ShardCache.open_folder(self.cache, self.cache_size))


class Replica(Protocol):
    """Which data-parallel replica this process belongs to: `index` of `count`."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...


class StreamingLoader:
    """Yields one optimizer step's micro-batches at a time, for one replica.

    Every replica gets the same number of micro-batches of the same shape, no larger than the largest share of a global
    batch needs: rows that a share does not fill are copies of an example with weight 0. To what `collate` gives, each
    micro-batch of B rows adds

        dropout_key   int32 [B], key of the row's dropout, by global example number
        example       int64 [B], the example's number in the split; -1 for a row that only pads
        epoch         int64 [B], the pass over the split
        digest        int64 [B], a hash of epoch, example and the input tokens; 0 for a row that only pads
        filled        int64 [B], the row's cells that hold a token; 0 for a row that only pads

    Attributes:
        micro_batches: micro-batches in every step, the same on all replicas.

    Args:
        dataset: the dataset.
        config: the `data` section.
        split: "train" or "heldout".
        pack_spec: the objective's cells, for `config.sequence_length`.
        collate: the objective's; makes the arrays of a micro-batch from its examples and `pack_spec.sequence_length`.
        seed: the run's seed.
        global_batch_size: examples of one optimizer step, over all replicas.
        micro_batch_size: the most rows of one forward pass.
        replica: this process's share of each batch.
        finite: one pass in a fixed order (`SinglePass`) with fixed keys, anew for every `iter()`, the last batch
            padded: evaluation. Otherwise endless, shuffled, and `iter()` goes on where the loader is.

    Raises:
        ConfigError: fewer examples in the batch than replicas, or in the split than lanes; or more shards to read from
            at a time than may be kept open.
        DataError: the split is empty or a shard is damaged.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: Config,
        *,
        split: str = "train",
        pack_spec: PackSpec,
        collate: Callable[[Examples, int], Batch],
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        replica: Replica,
        finite: bool = False,
    ) -> None:
        if global_batch_size < replica.count:
            raise ConfigError(
                f"global_batch_size {global_batch_size} is less than the {replica.count} data-parallel replicas, so "
                f"some would have nothing to do; use at least {replica.count}, or fewer devices"
            )
        if micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size must be at least 1, not {micro_batch_size}")
        self._packed = PackedSplit(dataset, split, pack_spec, config.packing, seed)
        self._finite = finite
        self._order: ExampleOrder
        if finite:
            self._order = SinglePass(self._packed.counts)
        else:
            self._order = Order(self._packed.counts, seed=seed, lanes=config.lanes, window=config.window)
            needed = self._order.working_set(global_batch_size, replica.index, replica.count)
            if needed > max_open_shards():
                raise ConfigError(
                    f"data.lanes {config.lanes} and data.window {config.window} have this process read from {needed} "
                    f"shards at a time, and it can keep {max_open_shards()} open; lower one of them (in a new run), "
                    f"use more devices, which share the lanes, or raise the limit of open files (ulimit -n)"
                )
        self._collate = collate
        self._pack_spec = pack_spec
        self._sequence_length = pack_spec.sequence_length
        self._seed = seed
        self._batch_size = global_batch_size
        most_rows = -(-global_batch_size // replica.count)
        self.micro_batches = -(-most_rows // micro_batch_size)
        self._rows = -(-most_rows // self.micro_batches)
        self._replica = replica
        # Numpy is slow with small arrays and wants memory for large ones: rows are made in blocks of micro-batches.
        together = max(1, _BLOCK_CELLS // (self._rows * self._sequence_length))
        self._block_rows = together * self._rows
        self._most_steps = max(1, together // self.micro_batches)
        self._prefetch = config.prefetch
        self._prefetcher: Prefetcher | None = None
        if dataset.remote is not None:
            self._packed.most_open = self._order.working_set(global_batch_size, replica.index, replica.count)
            self._prefetcher = Prefetcher(dataset.remote, dataset.shards(split), self._packed.most_open)
        self._threads = ThreadPoolExecutor(config.threads, "loader") if config.threads else None
        self._ahead: deque[Future[list[list[MicroBatch]]]] = deque()
        self._ready: deque[list[MicroBatch]] = deque()
        self._example = self._planned = 0
        self._block_steps = 1
        self._identity = {
            "order": ORDER_VERSION,
            "seed": seed,
            "lanes": config.lanes,
            "window": config.window,
            "manifest": dataset.manifest.digest,
            "packing": packing_digest(pack_spec, config.packing),
        }

    @property
    def examples(self) -> int:
        """Examples in one pass over the split."""
        return self._order.examples

    def __iter__(self) -> StreamingLoader:
        if self._finite:
            self._go_to(0)
        return self

    def __next__(self) -> list[MicroBatch]:
        if not self._ready:
            self._ready.extend(self._next_block())
        if not self._ready:
            raise StopIteration
        self._example += self._batch_size
        return self._ready.popleft()

    def _next_block(self) -> list[list[MicroBatch]]:
        if self._threads is None:
            return self._make(*self._plan_block())
        while len(self._ahead) <= self._prefetch:
            self._ahead.append(self._threads.submit(self._make, *self._plan_block()))
        return self._ahead.popleft().result()

    def _plan_block(self) -> tuple[int, int]:
        """The next block's first example and its steps; one at first, since many may read from many more shards."""
        start, steps = self._planned, self._block_steps
        self._planned += steps * self._batch_size
        self._block_steps = min(2 * steps, self._most_steps)
        return start, steps

    def _make(self, start: int, steps: int) -> list[list[MicroBatch]]:
        """The replica's micro-batches of `steps` steps, of which the first begins with example `start`.

        There are fewer after the end of a finite order.
        """
        shares = [self._share(start + step * self._batch_size) for step in range(steps)]
        number, valid = (np.concatenate(parts) for parts in zip(*shares, strict=True))
        at = self._order.locate(number)
        if self._prefetcher is not None and len(number):
            replica = self._replica
            ahead = self._order.shards_ahead(int(number.min()), self._batch_size, replica.index, replica.count)
            self._prefetcher.expect(np.concatenate((at.shard, ahead)))
        cuts = [slice(first, first + self._block_rows) for first in range(0, len(number), self._block_rows)]
        made = [batch for cut in cuts for batch in self._micro_batches(number[cut], at[cut], valid[cut])]
        return [made[first : first + self.micro_batches] for first in range(0, len(made), self.micro_batches)]

    def _share(self, start: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The numbers of the replica's rows of the global batch from example `start`, and which do not only pad."""
        batch = self._order.batch(start, self._batch_size)
        mine = batch[share(len(batch), self._replica.index, self._replica.count)]
        rows = self.micro_batches * self._rows if len(batch) else 0
        # A padding row is a valid example: softmax over a row without any token would be NaN.
        padding = np.repeat(mine[:1] if len(mine) else batch[:1], rows - len(mine))
        return np.concatenate((mine, padding)), np.arange(rows) < len(mine)

    def _micro_batches(
        self, number: npt.NDArray[np.int64], at: Location, valid: npt.NDArray[np.bool_]
    ) -> list[MicroBatch]:
        """Makes rows together and cuts them into micro-batches; no row depends on those that it is made with."""
        examples = self._packed.read(at, valid.astype(np.float32))
        arrays = dict(self._collate(examples, self._sequence_length))
        arrays["dropout_key"] = combine(self._seed, _DROPOUT, number).astype(np.uint32).view(np.int32)
        arrays |= {"example": np.where(valid, self._packed.ids(at), -1), "epoch": at.epoch}
        arrays["digest"] = np.where(valid, _digest(arrays), 0)
        arrays["filled"] = np.where(valid, _filled(examples, self._pack_spec), 0)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        starts = range(0, len(number), self._rows)
        return [{name: tensor[i : i + self._rows] for name, tensor in tensors.items()} for i in starts]

    def _go_to(self, example: int) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._ready.clear()
        self._example = self._planned = example
        self._block_steps = 1

    def state_dict(self) -> dict[str, Any]:
        """The next global example after the steps that were taken (not merely prefetched), and what it counts."""
        return {**self._identity, "example": self._example}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the steps another loader gave; batch sizes, replicas and threads may differ freely.

        Raises:
            DataError: the state counts examples of another order.
        """
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise DataError(
                    f"the checkpoint's data order cannot be continued: its {name} is {state.get(name)!r}, this run's "
                    f"is {value!r}; {_SAME_AGAIN[name]}, or start a new run from the checkpoint's weights"
                )
        self._go_to(int(state["example"]))

    def close(self) -> None:
        """Stops the threads; batches made ahead are dropped."""
        self._go_to(self._example)
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if self._prefetcher is not None:
            self._prefetcher.close()

    def __enter__(self) -> StreamingLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _digest(arrays: Batch) -> npt.NDArray[np.int64]:
    """Hashes each row's name and input tokens [B, S]: int64 [B], to be summed modulo 2**64 over a batch.

    Each column has an odd factor of its own, so that no change of a single token leaves a row's sum as it was.
    """
    tokens = arrays["tokens"].astype(np.uint64)
    factors = mix(np.arange(tokens.shape[1])) | np.uint64(1)
    return combine(arrays["epoch"], arrays["example"], tokens @ factors).view(np.int64)


def _filled(examples: Examples, spec: PackSpec) -> npt.NDArray[np.int64]:
    """How many cells of each row hold a token, special tokens included: int64 [B]."""
    pieces = np.bincount(examples.row, minlength=examples.key.size)
    tokens = np.bincount(examples.row, weights=examples.length, minlength=examples.key.size).astype(np.int64)
    return tokens + spec.suffix * pieces + spec.prefix * (pieces if examples.isolated else 1)


_SAME_AGAIN = {
    "order": "use the program's version that wrote it",
    "seed": "set seed to the checkpoint's",
    "lanes": "set data.lanes to the checkpoint's",
    "window": "set data.window to the checkpoint's",
    "manifest": "point data.path to the dataset that the run was started with",
    "packing": "set data.packing and data.sequence_length, and the objective, as the run was started with",
}
