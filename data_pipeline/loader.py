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

from data_pipeline.dataset import Dataset, PackedSplit, max_open_shards, packing_digest
from data_pipeline.order import ORDER_VERSION, ExampleOrder, Order, SinglePass, share
from trainer.errors import ConfigError, DataError
from trainer.examples import Batch, Examples, PackSpec, Policy
from trainer.hashing import combine, mix, name_key

MicroBatch: TypeAlias = dict[str, torch.Tensor]

_DROPOUT = name_key("dropout")


@dataclass(frozen=True)
class Config:
    """The `data` section of an experiment.

    Attributes:
        path: folder of a built dataset.
        sequence_length: cells of an example, special tokens included.
        packing: how documents become examples: concat, best_fit or padded.
        lanes: independent readers that the order deals examples from; part of the order, so fixed for a run.
        window: shards' worth of examples that a lane shuffles together; part of the order, so fixed for a run.
        threads: threads that make batches; 0 makes them in the training thread.
        prefetch: steps of batches that threads keep ready.
    """

    path: str
    sequence_length: int = 128
    packing: Policy = "concat"
    lanes: int = 64
    window: int = 4
    threads: int = 1
    prefetch: int = 2

    def __post_init__(self) -> None:
        for name, least in (("sequence_length", 1), ("lanes", 1), ("window", 1), ("threads", 0), ("prefetch", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")


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
        self._sequence_length = pack_spec.sequence_length
        self._seed = seed
        self._batch_size = global_batch_size
        most_rows = -(-global_batch_size // replica.count)
        self.micro_batches = -(-most_rows // micro_batch_size)
        self._rows = -(-most_rows // self.micro_batches)
        self._replica = replica
        self._prefetch = config.prefetch if config.threads else 0
        self._threads = ThreadPoolExecutor(config.threads, "loader") if config.threads else None
        self._ahead: deque[Future[list[MicroBatch]]] = deque()
        self._example = 0
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
        step = self._next_step()
        if not step:
            raise StopIteration
        self._example += self._batch_size
        return step

    def _next_step(self) -> list[MicroBatch]:
        if self._threads is None:
            return self._make(self._example)
        while len(self._ahead) <= self._prefetch:
            start = self._example + len(self._ahead) * self._batch_size
            self._ahead.append(self._threads.submit(self._make, start))
        return self._ahead.popleft().result()

    def _make(self, start: int) -> list[MicroBatch]:
        """The replica's micro-batches of the global batch that begins with example `start`, or none after the end."""
        batch = self._order.batch(start, self._batch_size)
        if not len(batch):
            return []
        mine = batch[share(len(batch), self._replica.index, self._replica.count)]
        rows = self.micro_batches * self._rows
        # A padding row is a valid example: softmax over a row without any token would be NaN.
        padding = np.resize(mine[:1] if len(mine) else batch[:1], rows - len(mine))
        number = np.concatenate((mine, padding))
        at = self._order.locate(number)
        valid = np.arange(rows) < len(mine)
        dropout_key = combine(self._seed, _DROPOUT, number).astype(np.uint32).view(np.int32)
        example = np.where(valid, self._packed.ids(at), -1)
        step = []
        for first in range(0, rows, self._rows):
            cut = slice(first, first + self._rows)
            examples = self._packed.read(at[cut], valid[cut].astype(np.float32))
            arrays = dict(self._collate(examples, self._sequence_length))
            arrays |= {"dropout_key": dropout_key[cut], "example": example[cut], "epoch": at.epoch[cut]}
            arrays["digest"] = np.where(valid[cut], _digest(arrays), 0)
            step.append({name: torch.from_numpy(array) for name, array in arrays.items()})
        return step

    def _go_to(self, example: int) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._example = example

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
    return combine(arrays["epoch"], arrays["example"], (tokens * factors).sum(axis=1)).view(np.int64)


_SAME_AGAIN = {
    "order": "use the program's version that wrote it",
    "seed": "set seed to the checkpoint's",
    "lanes": "set data.lanes to the checkpoint's",
    "window": "set data.window to the checkpoint's",
    "manifest": "point data.path to the dataset that the run was started with",
    "packing": "set data.packing and data.sequence_length, and the objective, as the run was started with",
}
