"""The training loop's source of batches.

The same global batches at any number of replicas and threads.

A step's batch is a pure function of its first global example number; threads only make batches
earlier, never different ones. So the loader's state is one number, beside the names of what that
number counts.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from data_pipeline.order.example_order import ORDER_VERSION, ExampleOrder, SinglePass
from data_pipeline.order.exclusions import Exclusions
from data_pipeline.order.mixture import PERIOD, Mixture, Schedule
from data_pipeline.packing.policy import packing_digest
from data_pipeline.reading.batches import BatchLayout, BatchMaker
from data_pipeline.reading.concat_dataset import AnyDataset, ConcatSplit, named_sources
from data_pipeline.reading.config import Config
from data_pipeline.reading.corruption import CorruptShardError, CorruptShards
from data_pipeline.reading.dataset import Dataset, max_open_shards
from data_pipeline.reading.length_groups import GROUPS, LengthGroups, check_groups
from data_pipeline.reading.prefetch import Prefetcher
from data_pipeline.reading.rows import RowMaker
from trainer.errors import ConfigError, DataError
from trainer.examples import Batch, Examples, LoaderState, PackSpec, TaskRow

logger = logging.getLogger(__name__)

MicroBatch: TypeAlias = dict[str, torch.Tensor]
Block: TypeAlias = list[list[MicroBatch]]
"""Steps that are made together, each as its micro-batches."""


@dataclass(frozen=True)
class SplitOrder:
    """The order of a split; with the dataset and the `data` section, this decides every batch.

    Attributes:
        seed: of the order, the masks and the dropout.
        split: "train" or "heldout".
        finite: one pass in a fixed order (`SinglePass`) with fixed keys, anew for every `iter()`,
            the last batch padded: evaluation. Otherwise endless, shuffled, and `iter()` goes on
            where the loader is.
        example_after: the number of examples that a run has taken of this order after a number of
            steps; None takes the global batch size for each step.
    """

    seed: int
    split: str = "train"
    finite: bool = False
    example_after: Callable[[int], int] | None = None


class StreamingLoader:
    """Yields one optimizer step's micro-batches at a time, for one replica.

    Every replica gets the same number of micro-batches of the same shape, as the largest share of a
    global batch needs. Rows that a share does not fill are copies of an example, with weight 0
    (padding rows). For example, 10 rows on 3 replicas in micro-batches of 2: shares of 3, 3 and 4
    rows, so each replica gets 2 micro-batches, and the first two replicas one padding row.

    Each micro-batch of B rows has the arrays of `collate`, and

        dropout_key   int32 [B], by global example number; [B, sequences] if rows hold several
        number        int64 [B], the global example number; -1 for padding rows
        source        int64 [B], the number of its dataset in `sources`
        example       int64 [B], its number in the split of its dataset; -1 for padding rows
        epoch         int64 [B], the epoch of that split
        digest        int64 [B], hash of dataset, epoch, example and tokens; 0 for padding rows
        filled        int64 [B], positions that hold a token; 0 for padding rows

    For rows of a task, also

        document      int64 [B], the row's number in the split of its dataset; -1 for padding rows
        begin         int64 [B], first token of the row's last chunk, counted through its texts
        column        int64 [B], position of that token
        length        int64 [B], tokens of that chunk

    A row of a corrupt shard that is skipped keeps its number, example and epoch. Another example
    takes its place, with weight, digest and filled 0, and document -1.

    Attributes:
        micro_batches: micro-batches in every step, the same on all replicas.
        sources: of each dataset, its name and number of examples.

    Args:
        dataset: a dataset or a mixture.
        config: the `data` section.
        order: which split is read, and how.
        layout: how a global batch is divided.
        pack_spec: the objective's, for `config.sequence_length`.
        collate: the objective's; makes the arrays of a micro-batch from its examples and
            `pack_spec.sequence_length`.
        largest: the largest of the numbers that replicas call it with, told to all of them; they do
            so before each step where `config.on_corrupt` is skip.

    Raises:
        ConfigError: fewer examples in the split than lanes, or more shards to read from at a time
            than may be kept open.
        DataError: the split is empty or a shard is damaged.
    """

    def __init__(
        self,
        dataset: AnyDataset,
        config: Config,
        order: SplitOrder,
        layout: BatchLayout,
        *,
        pack_spec: PackSpec,
        collate: Callable[[Examples, int], Batch],
        largest: Callable[[int], int] = int,
    ) -> None:
        self._named = named = _sources(dataset, order)
        self._order, self._batch_size, self._largest = order, layout.global_batch_size, largest
        self._group, self._prefetch = config.group_by_length, config.prefetch
        self._accept_change, self._skips_corrupt = (
            config.on_change == "accept",
            config.on_corrupt == "skip",
        )
        self._packed = ConcatSplit(named, order.split, pack_spec, config.packing, order.seed)
        self.sources, self.micro_batches = self._packed.sizes, layout.micro_batches
        if self._group is not None:
            check_groups(config, pack_spec)
        self._mixture: Mixture | None = None
        examples: ExampleOrder
        if order.finite:
            examples = SinglePass(self._packed.counts)
            cached = examples.working_set(*self._reach(layout))
        else:
            self._mixture = self._open_mixture(config)
            examples = self._mixture.order
            cached = self._keep_shards_open(config, self._mixture, self._reach(layout))
        shards = [
            (source, shard) for source in named.values() for shard in source.shards(order.split)
        ]
        self._prefetcher: Prefetcher | None = None
        if any(source.remote for source in named.values()):
            self._prefetcher = Prefetcher(
                [(source.remote, shard) for source, shard in shards], cached
            )
        row_maker = RowMaker(tuple(named.values()), self._packed, pack_spec, collate, order.seed)
        self._maker = BatchMaker(
            self._grouped(examples),
            self._packed.counts,
            row_maker,
            pack_spec.positions,
            layout,
            self._prefetcher,
        )
        self._corrupt = CorruptShards(
            [(source.manifest.digest, shard.name) for source, shard in shards]
        )
        self._threads = ThreadPoolExecutor(config.threads, "loader") if config.threads else None
        self._ahead: deque[Future[Block | CorruptShardError]] = deque()
        self._ready: deque[list[MicroBatch]] = deque()
        self._excluded = self._configured = Exclusions(() if order.finite else config.exclude)
        self._position = self._planned = self._fed_from = (
            0  # numbers of the order, skipped ones included
        )
        self._block_steps = 1
        self._identity: LoaderState = {
            "order": ORDER_VERSION,
            "seed": order.seed,
            "lanes": config.lanes,
            "window": config.window,
            "packing": packing_digest(pack_spec, config.packing),
            "group_by_length": config.group_by_length,
        }

    def _reach(self, layout: BatchLayout) -> tuple[int, int, int]:
        """The examples that are read together: a batch size, and index and count of this reader."""
        if self._group is not None:  # whole groups are sorted by length
            return GROUPS * self._group, 0, 1
        return layout.global_batch_size, layout.replica.index, layout.replica.count

    def _open_mixture(self, config: Config) -> Mixture:
        """The endless order of all sources."""
        keys = {name: source.manifest.digest for name, source in self._named.items()}
        orders = self._packed.orders(
            keys, seed=self._order.seed, lanes=config.lanes, window=config.window
        )
        example_after = self._order.example_after or (lambda step: step * self._batch_size)
        return Mixture(_schedule(config, keys, example_after), orders, keys)

    def _keep_shards_open(
        self, config: Config, mixture: Mixture, reach: tuple[int, int, int]
    ) -> int:
        """Sets how many shards of each source stay open; returns how many of these are remote.

        Raises:
            ConfigError: one process may not open as many files.
        """
        needed = mixture.order.working_set(*reach)
        if needed > max_open_shards():
            raise ConfigError(
                f"data.lanes {config.lanes} and data.window {config.window} have this process read "
                f"from {needed} "
                f"shards at a time, and it can keep {max_open_shards()} open; lower one of them "
                "(in a new run), "
                "use more devices, which share the lanes, or raise the limit of open files "
                "(ulimit -n)"
            )
        of_each = [each.working_set(*reach) for each in mixture.orders.values()]
        spare = max(0, max_open_shards() - sum(of_each)) // len(of_each)
        # A shard in the cache stays there while it is open, so remote sources have no spare ones.
        remote = [source.remote is not None for source in self._named.values()]
        self._packed.keep_open(
            [each + (0 if far else spare) for each, far in zip(of_each, remote, strict=True)]
        )
        return sum(each for each, far in zip(of_each, remote, strict=True) if far)

    @property
    def examples(self) -> int:
        """Number of examples of the split, of all sources together."""
        return self._maker.order.examples

    def _grouped(self, order: ExampleOrder) -> ExampleOrder:
        if self._group is None:
            return order
        return LengthGroups(
            order, self._packed.positions, self._group, self._order.seed, self._order.finite
        )

    def __iter__(self) -> StreamingLoader:
        if self._order.finite:
            self._go_to(0)
        return self

    def __next__(self) -> list[MicroBatch]:
        shard = self._fill()
        # All replicas skip a shard that one of them needs and finds corrupt, from this step on.
        while self._skips_corrupt and (shard := self._largest(shard)) >= 0:
            self._corrupt = self._corrupt.add(shard, self._position)
            self._go_to(self._position)
            shard = self._fill()
        if not self._ready:
            raise StopIteration
        self._fed_from, self._position = (
            self._position,
            self._excluded.after(self._position, self._batch_size),
        )
        return self._ready.popleft()

    def _fill(self) -> int:
        """Readies the next step, if there is one; returns a corrupt shard to skip first, or -1.

        Raises:
            CorruptShardError: it needs one, and none is to be skipped.
        """
        if self._ready:
            return -1
        block = self._next_block()
        if isinstance(block, CorruptShardError):
            # A block has many steps, of which a later one may need the shard. Now it has one step.
            self._go_to(self._position)
            block = self._next_block()
        if isinstance(block, CorruptShardError):
            logger.warning(
                "its examples are skipped from here on, because data.on_corrupt is skip: %s", block
            )
            return block.shard
        self._ready.extend(block)
        return -1

    def _next_block(self) -> Block | CorruptShardError:
        if self._threads is None:
            return self._make(*self._plan_block())
        while len(self._ahead) <= self._prefetch:
            self._ahead.append(self._threads.submit(self._make, *self._plan_block()))
        return self._ahead.popleft().result()

    def _plan_block(self) -> tuple[list[int], Exclusions, CorruptShards]:
        """Where the next block's steps begin.

        It has one at first, since many may read from many more shards.
        """
        starts = []
        for _ in range(self._block_steps):
            starts.append(self._planned)
            self._planned = self._excluded.after(self._planned, self._batch_size)
        self._block_steps = min(2 * self._block_steps, self._maker.most_steps)
        return starts, self._excluded, self._corrupt

    def _make(
        self, starts: list[int], excluded: Exclusions, corrupt: CorruptShards
    ) -> Block | CorruptShardError:
        """Makes a block; a corrupt shard is returned where those are skipped, else raised."""
        try:
            steps = self._maker.make(starts, excluded, corrupt)
        except CorruptShardError as error:
            if self._skips_corrupt:
                return error
            raise
        return [
            [{name: torch.from_numpy(array) for name, array in arrays.items()} for arrays in step]
            for step in steps
        ]

    def _go_to(self, example: int) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._ready.clear()
        self._position = self._planned = example
        self._block_steps = 1

    def documents(self, numbers: npt.NDArray[np.int64]) -> list[list[tuple[str, int]]]:
        """The (source file, line) of each document that global examples have pieces of, example by
        example.

        Unknown for corrupt shards that are skipped.
        """
        at = self._maker.order.locate(numbers)
        rows = np.flatnonzero(~self._corrupt.has(numbers, at.shard))
        found = dict(zip(rows.tolist(), self._packed.documents(at[rows]), strict=True))
        return [found.get(row, []) for row in range(len(numbers))]

    def task_rows(self) -> tuple[list[list[TaskRow]], tuple[str, ...]]:
        """The rows of the split of each of the `sources`, which are rows of a task, and the names
        of its labels.

        Raises:
            DataError: a shard is damaged.
        """
        (first, *_) = (source.manifest.task for source in self._named.values())
        gone = {(digest, name) for digest, name, _ in self.corrupt}
        rows = [
            source.rows(
                self._order.split,
                {name for digest, name in gone if digest == source.manifest.digest},
            )
            for source in self._named.values()
        ]
        return rows, () if first is None else first.labels

    @property
    def corrupt(self) -> tuple[tuple[str, str, int], ...]:
        """The shards that are skipped.

        Digest of the dataset, name of the shard, first global example of these.
        """
        return self._corrupt.found

    @property
    def consumed(self) -> list[list[int]]:
        """The ranges [first, end) of global examples that the step taken last had, over all
        replicas.
        """
        return self._excluded.kept(self._fed_from, self._position)

    def exclude(self, first: int, end: int) -> None:
        """Passes over the global examples [first, end) from now on.

        They are of the step taken last, or come after it. Those of that step count as if they had
        never been taken: it is taken again, with the examples that follow.
        """
        assert self._fed_from <= first < end
        self._excluded |= Exclusions([(first, end)])
        if end > self._position:  # or what has been made ahead is as it should be
            self._go_to(self._position)

    def state_dict(self) -> LoaderState:
        """How many examples were taken (not merely made ahead), which were skipped, and of
        which order.
        """
        return {
            **self._identity,
            "mixture": self._mixture.state() if self._mixture else [],
            "example": self._position - self._excluded.before(self._position),
            "excluded": self._excluded.ranges,
            "corrupt": [list(shard) for shard in self.corrupt],
        }

    def load_state_dict(self, state: LoaderState, as_recorded: bool = False) -> None:
        """Continues after the steps another loader gave.

        Batch sizes, replicas and threads may differ freely.

        Args:
            state: as `state_dict` gives it.
            as_recorded: mixes the sources from there on as that loader would have, whatever the
                configuration says.

        Raises:
            DataError: the state counts examples of another order or mixture, or has taken some that
                `data.exclude` excludes.
        """
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise DataError(
                    f"the checkpoint's data order cannot be continued: its {name} is "
                    f"{state.get(name)!r}, this run's "
                    f"is {value!r}; {_SAME_AGAIN[name]}, or start a new run from the checkpoint's "
                    "weights"
                )
        excluded = Exclusions(state.get("excluded", ()))
        position = excluded.after(0, int(state["example"]))
        if (excluded | self._configured).before(position) > excluded.before(position):
            raise DataError(
                f"data.exclude {self._configured.ranges} has examples before {position}, which the "
                "run has taken "
                f"already (it has skipped {excluded.ranges}); exclude later ones, go on from "
                "an older checkpoint, "
                "or start a new run"
            )
        if self._mixture is not None:
            # Loaders that knew no mixtures said which dataset it was.
            parts = state.get("mixture") or [[0, {str(state.get("manifest")): PERIOD}]]
            recorded = Schedule.of((first, shares) for first, shares in parts)
            self._mixture.resume(
                recorded, position, accept=self._accept_change, as_recorded=as_recorded
            )
            self._maker.order = self._grouped(self._mixture.order)
        self._corrupt = self._corrupt.replaced(state.get("corrupt", ()))
        self._excluded = excluded | self._configured
        self._go_to(position)
        self._fed_from = position

    def close(self) -> None:
        """Stops the threads; batches made ahead are dropped."""
        self._go_to(self._position)
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if self._prefetcher is not None:
            self._prefetcher.close()

    def __enter__(self) -> StreamingLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _sources(dataset: AnyDataset, order: SplitOrder) -> dict[str, Dataset]:
    """The datasets by name; for a single pass those that have the split: some hold out nothing."""
    named = named_sources(dataset)
    if not order.finite:
        return named
    return {
        name: source for name, source in named.items() if source.manifest.splits.get(order.split)
    } or named


def _schedule(
    config: Config, keys: dict[str, str], example_after: Callable[[int], int]
) -> Schedule:
    """The shares that the configuration asks for, given the key of each source by its name."""
    weights = [
        (0, {source.label: source.weight for source in config.sources} or dict.fromkeys(keys, 1.0))
    ]
    weights += [(example_after(change.step), change.weights) for change in config.weights]
    return Schedule.weighted(weights, keys)


_SAME_AGAIN = {
    "order": "use the program's version that wrote it",
    "seed": "set seed to the checkpoint's",
    "lanes": "set data.lanes to the checkpoint's",
    "window": "set data.window to the checkpoint's",
    "group_by_length": "set data.group_by_length to the checkpoint's",
    "packing": "restore data.packing, data.sequence_length and the objective",
}
