"""The loader: the same global batches at any number of replicas and threads.

A step's batch is a pure function of its first global example number. Threads make batches earlier,
never different ones. So the loader's state is that number, with the names of everything that
determines the order it counts in.

From a number to a batch:

    steps       numbers of the global batch       Exclusions skip some     (`order.exclusions`)
    numbers     locations (epoch, shard, index)   the order                (`order.mixture`)
    locations   examples                          memory-mapped shards     (`reading.dataset`)
    examples    arrays                            the objective's collate  (`reading.rows`)
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from data_pipeline.order.example_order import ORDER_VERSION, ExampleOrder, Order, SinglePass
from data_pipeline.order.exclusions import Exclusions
from data_pipeline.order.sources import PERIOD
from data_pipeline.packing.policy import packing_digest
from data_pipeline.reading.batches import BatchLayout, BatchMaker, Plan, error_ahead
from data_pipeline.reading.concat_dataset import AnyDataset, ConcatSplit, sources_of
from data_pipeline.reading.config import Config, check_identity
from data_pipeline.reading.dataset import CorruptShardError, Dataset
from data_pipeline.reading.packed_shard import check_open_shards, max_open_shards
from data_pipeline.reading.rows import RowMaker
from samestep.errors import DataError
from samestep.examples import Batch, Examples, LoaderState, PackSpec, TaskRow

if TYPE_CHECKING:
    from data_pipeline.format.manifest import ShardInfo
    from data_pipeline.order.mixture import WeightedMixture
    from data_pipeline.reading.corruption import Announcements, CorruptShards
    from data_pipeline.reading.prefetch import Prefetcher

logger = logging.getLogger(__name__)

MicroBatch: TypeAlias = dict[str, torch.Tensor]
Block: TypeAlias = list[list[MicroBatch]]
"""Consecutive steps that are made together, each as its micro-batches."""


@dataclass(frozen=True)
class SplitOrder:
    """The order of a split; with the dataset and the `data` section, it determines every batch.

    Attributes:
        seed: of the order, the masks and the dropout.
        split: "train" or "heldout".
        finite: for evaluation: one pass in a fixed order (`SinglePass`) with fixed keys, restarted
            by every `iter()`, the last batch padded. Otherwise endless and shuffled, and `iter()`
            continues.
        example_after: number of examples consumed after a number of steps; None means the global
            batch size per step.
    """

    seed: int
    split: str = "train"
    finite: bool = False
    example_after: Callable[[int], int] | None = None


class StreamingLoader:
    """Yields one optimizer step's micro-batches at a time, for one replica.

    Every replica gets the same number of micro-batches of the same shape. Rows without an example
    are copies of another with weight 0 (padding rows). For example, 10 rows on 3 replicas in
    micro-batches of 2: the replicas have 3, 3 and 4 rows, so each gets 2 micro-batches, and the
    first two replicas one padding row.

    Each micro-batch of B rows has the arrays of `collate`, and

        dropout_key   int32 [B], by global example number; [B, sequences] if rows hold several
        step_key      int32 [B], a key of the step: the same in all of its rows, on all replicas
        number        int64 [B], the global example number; -1 for padding rows
        source        int64 [B], index of its dataset in `sources`
        example       int64 [B], its index in the dataset's split; -1 for padding rows
        epoch         int64 [B], the epoch of that split
        digest        int64 [B], hash of dataset, epoch, example and tokens; 0 for padding rows
        filled        int64 [B], number of positions with a token; 0 for padding rows

    For rows of a task, also

        document      int64 [B], the row's index in its dataset's split; -1 for padding rows
        begin         int64 [B], first token of the row's last chunk, counted through its texts
        column        int64 [B], position of that token
        length        int64 [B], tokens of that chunk
        examples      int64 [B], number of examples (windows) that the row became

    A row in a skipped corrupt shard keeps its number, example and epoch, but holds another example
    with weight, digest and filled 0, and document -1.

    Attributes:
        micro_batches: number of micro-batches per step, the same on all replicas.
        sources: name and number of examples of each dataset.

    Args:
        dataset: a dataset or a mixture.
        config: the `data` section.
        layout: how a global batch is divided.
        pack_spec: the objective's, for `config.sequence_length`.
        collate: the objective's; makes the arrays of a micro-batch from its examples and their
            `sequence_length`.
        announcements: of the replicas, if `config.on_corrupt` is skip; None: of this one alone.

    Raises:
        ConfigError: fewer examples in the split than lanes, or more shards to read at a time than
            may be open.
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
        announcements: Announcements | None = None,
    ) -> None:
        self._named = named = sources_of(dataset, order.split, order.finite)
        self._order, self._batch_size = order, layout.global_batch_size
        self._group, self._prefetch = config.group_by_length, config.prefetch
        self._by_source, self._lanes = config.group_by_source, config.lanes
        self._accept_change = config.on_change == "accept"
        self._announcements: Announcements | None = None
        if config.on_corrupt == "skip":
            from data_pipeline.reading.corruption import OwnAnnouncements

            self._announcements = announcements or OwnAnnouncements()
        self._packed = ConcatSplit(named, order.split, pack_spec, config.packing, order.seed)
        self.sources, self.micro_batches = self._packed.sizes, layout.micro_batches
        if self._group is not None:
            from data_pipeline.reading.length_groups import check_groups

            check_groups(config, pack_spec)
        self._excluded = self._configured = Exclusions(() if order.finite else config.exclude)
        # Evaluation reads each source once, so only training has a mixture with weights.
        self._rates = () if order.finite else config.rates(named)
        self._orders: dict[str, Order] = {}
        self._mixture: WeightedMixture | None = None
        examples: ExampleOrder
        if order.finite:
            examples = SinglePass(self._packed.counts)
            cached = examples.working_set(*self._reach(layout))
        else:
            self._orders = self._packed.orders(
                self._keys, seed=order.seed, lanes=config.lanes, window=config.window
            )
            (examples, *others) = self._orders.values()
            if others or len(self._rates) > 1 or config.proportional is not None:
                self._mixture = self._mixed()
                examples = self._mixture.order
            cached = self._keep_shards_open(config, examples, self._reach(layout))
        shards = [(each, shard) for each in named.values() for shard in each.shards(order.split)]
        self._prefetcher = _prefetcher(shards, cached)
        row_maker = RowMaker(tuple(named.values()), self._packed, pack_spec, collate, order.seed)
        self._maker = BatchMaker(
            self._grouped(examples),
            self._packed.counts,
            row_maker,
            pack_spec.positions,
            layout,
            self._prefetcher,
        )
        self._shards = [(source.manifest.digest, shard.name) for source, shard in shards]
        self._corrupt: CorruptShards | None = None
        self._threads = ThreadPoolExecutor(config.threads, "loader") if config.threads else None
        # Blocks being made by threads, in order; then the steps of the block that is being read.
        self._ahead: deque[tuple[Plan, Future[Block | CorruptShardError]]] = deque()
        self._ready: deque[list[MicroBatch]] = deque()
        # Global example numbers, which count skipped examples too. With batches of 10: after step 3
        # of a run that prefetches two steps, `_last_start` is 20, `_position` 30, `_planned` 50.
        self._last_start = 0  # first example of the step taken last
        self._position = 0  # first example of the next step
        self._planned = 0  # first example of the next block to hand to the threads
        self._block_steps, self._blocks = 1, 0  # steps of the next block, and its number
        # Everything that decides what a global example number means. A checkpoint with another
        # identity cannot be continued.
        self._identity: LoaderState = {
            "order": ORDER_VERSION,
            "seed": order.seed,
            "lanes": config.lanes,
            "window": config.window,
            "packing": packing_digest(pack_spec, config.packing),
            "group_by_length": config.group_by_length,
        }
        if config.group_by_source is not None:  # older checkpoints have no such key
            self._identity["group_by_source"] = config.group_by_source

    def _reach(self, layout: BatchLayout) -> tuple[int, int, int]:
        """Examples that are read together: a batch size, this reader's index, and their count."""
        if self._group is not None:  # every replica sorts whole pools of groups by length
            from data_pipeline.reading.length_groups import GROUPS

            return GROUPS * self._group, 0, 1
        # Groups of 3 on 2 lanes begin in different lanes, so the rows of a replica do, too.
        if layout.units or (self._by_source or 0) % self._lanes:
            return layout.global_batch_size, 0, 1
        return layout.global_batch_size, layout.replica.index, layout.replica.count

    @property
    def _keys(self) -> dict[str, str]:
        return {name: source.manifest.digest for name, source in self._named.items()}

    def _mixed(self) -> WeightedMixture:
        """The endless order of all sources."""
        from data_pipeline.order.mixture import WeightedMixture

        orders, keys = self._orders, self._keys
        return WeightedMixture(
            self._rates, orders, keys, self._consumed_after, self._excluded, self._by_source
        )

    def _consumed_after(self, step: int) -> int:
        after = self._order.example_after
        return step * self._batch_size if after is None else after(step)

    def _keep_shards_open(
        self, config: Config, examples: ExampleOrder, reach: tuple[int, int, int]
    ) -> int:
        """Sets how many shards of each source stay open; returns how many of these are remote.

        Raises:
            ConfigError: the process may not open enough files.
        """
        check_open_shards(examples.working_set(*reach), config.lanes, config.window)
        of_each = [each.working_set(*reach) for each in self._orders.values()]
        spare = max(0, max_open_shards() - sum(of_each)) // len(of_each)
        # An open shard cannot be evicted from the cache, so remote sources keep no spare ones.
        remote = [source.remote is not None for source in self._named.values()]
        self._packed.keep_open(
            [each + (0 if far else spare) for each, far in zip(of_each, remote, strict=True)]
        )
        return sum(each for each, far in zip(of_each, remote, strict=True) if far)

    @property
    def examples(self) -> int:
        """Number of examples of the split in all sources."""
        return self._maker.order.examples

    def _grouped(self, order: ExampleOrder) -> ExampleOrder:
        if self._group is None:
            return order
        from data_pipeline.reading.length_groups import LengthGroups

        return LengthGroups(
            order, self._packed.positions, self._group, self._order.seed, self._order.finite
        )

    def __iter__(self) -> StreamingLoader:
        if self._order.finite:
            self._go_to(0)
        return self

    def __next__(self) -> list[MicroBatch]:
        try:
            self._make_ready()
        except BaseException:
            # The failed block is no longer ahead: plan again from the step that is due.
            self._go_to(self._position)
            raise
        if not self._ready:
            raise StopIteration
        self._last_start = self._position
        self._position = self._excluded.after(self._position, self._batch_size)
        return self._ready.popleft()

    def _make_ready(self) -> None:
        """Makes the next step ready, if there is one, the same on all replicas."""
        while not self._ready:
            plan, block = self._next_block()
            announced = self._announcements
            shard = -1 if announced is None else announced.largest(plan.number) - 1
            if shard < 0:
                assert not isinstance(block, CorruptShardError)
                self._ready.extend(block)
                return
            # If one replica finds a shard corrupt, all skip it from this step on. Perhaps only a
            # later step of the block needs the shard; then they retry with a block of one.
            if len(plan.starts) == 1:
                if isinstance(block, CorruptShardError) and block.shard == shard:
                    logger.warning(
                        "skipping the shard's examples from here on (data.on_corrupt is skip): %s",
                        block,
                    )
                self._skip([*self.corrupt, (*self._shards[shard], self._position)])
            self._go_to(self._position)

    def _skip(self, found: Sequence[Sequence[str | int]]) -> None:
        """Skips these corrupt shards instead; see `CorruptShards`."""
        self._corrupt = None
        if found:
            from data_pipeline.reading.corruption import CorruptShards

            self._corrupt = CorruptShards(self._shards, found)

    def _next_block(self) -> tuple[Plan, Block | CorruptShardError]:
        if self._threads is None:
            return (plan := self._plan_block()), self._make(plan)
        # One more than `prefetch`: the first is about to be read.
        while len(self._ahead) <= self._prefetch:
            plan = self._plan_block()
            self._ahead.append((plan, self._threads.submit(self._make, plan)))
        plan, made = self._ahead.popleft()
        return plan, made.result()

    def error_ahead(self, steps: int) -> DataError | None:
        """Returns the error that one of the next `steps` will raise, if it is known."""
        return error_ahead((made for _, made in self._ahead), steps - len(self._ready))

    def _plan_block(self) -> Plan:
        """Plans the next block; blocks grow, so that the first batch comes soon."""
        starts = []
        for _ in range(self._block_steps):
            starts.append(self._planned)
            self._planned = self._excluded.after(self._planned, self._batch_size)
        self._block_steps = min(2 * self._block_steps, self._maker.most_steps)
        self._blocks += 1
        return Plan(self._blocks, starts, self._excluded, self._corrupt)

    def _make(self, plan: Plan) -> Block | CorruptShardError:
        """Makes a block; returns a corrupt shard's error if such shards are skipped.

        Raises:
            CorruptShardError: a shard is corrupt, and `on_corrupt` is stop.
        """
        announced = self._announcements
        try:
            steps = self._maker.make(plan)
        except CorruptShardError as error:
            if announced is None:
                raise
            announced.announce(plan.number, error.shard + 1)
            return error
        if announced is not None:
            announced.announce(plan.number, 0)
        return [
            [{name: torch.from_numpy(array) for name, array in arrays.items()} for arrays in step]
            for step in steps
        ]

    def _go_to(self, example: int) -> None:
        # Whatever was made ahead starts elsewhere. Running threads finish, and their blocks are
        # dropped.
        for _, made in self._ahead:
            made.cancel()
        self._ahead.clear()
        self._ready.clear()
        self._position = self._planned = example
        self._block_steps = 1

    def documents(self, numbers: npt.NDArray[np.int64]) -> list[list[tuple[str, int]]]:
        """The (source file, line) of each chunk of global examples, example by example.

        Empty for skipped corrupt shards.
        """
        at = self._maker.order.locate(numbers)
        if self._corrupt is None:
            return self._packed.documents(at)
        rows = np.flatnonzero(~self._corrupt.has(numbers, at.shard))
        found = dict(zip(rows.tolist(), self._packed.documents(at[rows]), strict=True))
        return [found.get(row, []) for row in range(len(numbers))]

    def task_rows(self) -> tuple[list[list[TaskRow]], tuple[str, ...]]:
        """The rows of a task in each of the `sources`, and the task's labels.

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
        """Skipped shards: digest of the dataset, name of the shard, first skipped example."""
        return () if self._corrupt is None else self._corrupt.found

    @property
    def consumed(self) -> list[list[int]]:
        """Ranges [first, end) of the global examples of the step taken last, over all replicas."""
        return self._excluded.kept(self._last_start, self._position)

    def exclude(self, first: int, end: int) -> None:
        """Skips the global examples [first, end) from now on.

        They may belong to the step taken last, which then counts as not taken: it is taken again,
        with the examples that follow.
        """
        assert self._last_start <= first < end
        # Exclusions are immutable, so threads that use the old ones are not disturbed.
        self._excluded |= Exclusions([(first, end)])
        if self._mixture is not None and self._mixture.exclude(self._excluded, self._position):
            self._maker.order = self._grouped(self._mixture.order)
        elif end <= self._position:
            return  # prefetched steps are still right
        self._go_to(self._position)

    @property
    def _alone(self) -> list[list[int | dict[str, int]]]:
        """The state of a mixture that is one source from the beginning; [] for evaluation."""
        return [[0, {key: PERIOD}] for key in self._orders]

    def state_dict(self) -> LoaderState:
        """Number of consumed (not prefetched) examples, exclusions, and the order's identity."""
        return {
            **self._identity,
            "mixture": self._mixture.state() if self._mixture else self._alone,
            "example": self._position - self._excluded.before(self._position),
            "excluded": self._excluded.ranges,
            "corrupt": [list(shard) for shard in self.corrupt],
        }

    def load_state_dict(
        self, state: LoaderState, step: int | None = None, as_recorded: bool = False
    ) -> None:
        """Continues where another loader stopped; batch sizes, replicas and threads may differ.

        Args:
            step: number of steps that have consumed the examples before, perhaps in batches of
                another size, so that `data.weights` still change at the steps that they name.
                None: all of these steps had the current batch size.
            as_recorded: uses the recorded mixture from there on, whatever the configuration says.

        Raises:
            DataError: the state belongs to another order or mixture, or has consumed examples that
                `data.exclude` excludes.
        """
        check_identity(state, self._identity)
        # "example" counts consumed examples, and positions count skipped ones too: with [3, 5)
        # excluded, 10 consumed examples end at position 12.
        excluded = Exclusions(state.get("excluded", ()))
        position = excluded.after(0, int(state["example"]))
        if (excluded | self._configured).before(position) > excluded.before(position):
            raise DataError(
                f"data.exclude {self._configured.ranges} has examples before {position}, which the "
                f"run has already consumed (it has skipped {excluded.ranges}). Exclude later ones, "
                "continue from an older checkpoint, or start a new run."
            )
        self._excluded = excluded | self._configured
        # Checkpoints from before mixtures existed name a single dataset.
        parts = state.get("mixture") or [[0, {str(state.get("manifest")): PERIOD}]]
        if self._mixture is None and self._orders and parts != self._alone:
            self._mixture = self._mixed()
        if self._mixture is not None:
            surplus = 0 if step is None else int(state["example"]) - self._consumed_after(step)
            accept = None if as_recorded else self._accept_change
            self._mixture.load(parts, self._excluded, position, surplus, accept=accept)
            self._maker.order = self._grouped(self._mixture.order)
        self._skip(state.get("corrupt", ()))
        self._go_to(position)
        self._last_start = position

    def close(self) -> None:
        """Stops the threads and drops prefetched batches."""
        self._go_to(self._position)
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if self._prefetcher is not None:
            self._prefetcher.close()

    def __enter__(self) -> StreamingLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _prefetcher(shards: Sequence[tuple[Dataset, ShardInfo]], cached: int) -> Prefetcher | None:
    """Copies remote shards ahead of need, `cached` of them; None if all are local."""
    if not any(source.remote for source, _ in shards):
        return None
    from data_pipeline.reading.prefetch import Prefetcher

    return Prefetcher([(source.remote, shard) for source, shard in shards], cached)
