"""Mixtures: several datasets in one run, in exact proportions, which may change on the way.

Each lane of the order takes its examples from the sources in turn, by a table of `PERIOD` places
that spreads each source evenly; lanes start at different places of it. For example, with the shares
2 : 1, the table is A B A A B A ..., and a lane that starts at its beginning takes its examples 0,
2, 3 and 5 from A. How many examples of a source come before a place is looked up, not counted, so
finding an example costs the same anywhere. Each source has its own `Order`, and its own epochs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.order.example_order import ExampleOrder, Lanes, Location, Order
from data_pipeline.order.exclusions import Exclusions
from data_pipeline.order.sources import PERIOD, Shares, round_weights
from data_pipeline.packing import Int64
from samestep.errors import DataError

logger = logging.getLogger(__name__)

# Each lane starts this many places after the lane before. A source recurs at regular distances, and
# lanes that started in step with it would all take it at once. For 16, 64 and 256 lanes, this step
# was found to avoid that: one turn of all lanes is within 9 examples of the shares.
_LANE_STEP = 1117


@dataclass(frozen=True)
class Schedule:
    """The shares of the sources, and the global example from which each set applies.

    Attributes:
        parts: (first example, shares), the first from example 0.
    """

    parts: tuple[tuple[int, Shares], ...]

    @classmethod
    def of(cls, parts: Iterable[tuple[int, Shares]]) -> Schedule:
        """Builds a schedule from parts in order; drops empty and repeated parts."""
        kept: list[tuple[int, Shares]] = []
        for first, shares in parts:
            if kept and kept[-1][0] == first:
                kept.pop()
            ordered = {key: share for key, share in sorted(shares.items()) if share}
            if not kept or kept[-1][1] != ordered:
                kept.append((first, ordered))
        return cls(tuple(kept))

    @classmethod
    def weighted(
        cls, parts: Iterable[tuple[int, Mapping[str, float]]], keys: Mapping[str, str]
    ) -> Schedule:
        """Builds a schedule from parts in order, with weights by name and the key of each name.

        Raises:
            ConfigError: see `round_weights`.
        """
        shares = ((first, round_weights(weights)) for first, weights in parts)
        return cls.of(
            (first, {keys[name]: share for name, share in each.items()}) for first, each in shares
        )

    def at(self, example: int) -> Shares:
        """Returns the shares at a global example."""
        return next(shares for first, shares in reversed(self.parts) if first <= max(example, 0))

    def after(self, past: Schedule, example: int) -> Schedule:
        """Returns a schedule: `past` before `example`, and these shares from there on."""
        before = [part for part in past.parts if part[0] < example]
        return Schedule.of(
            [
                *before,
                (example, self.at(example)),
                *(part for part in self.parts if part[0] > example),
            ]
        )


@functools.lru_cache
def _spread(shares: tuple[int, ...]) -> npt.NDArray[np.int16]:
    """Returns the source of each place of a period.

    After any number of places, the count of each source is less than 1 off its share. Of the
    sources that would not get too far ahead of their share, the one with the earliest deadline is
    taken (Tijdeman 1980, "The chairman assignment problem").
    """
    slack = max(1, 2 * len(shares) - 2)  # a source is at most 1 - 1 / slack off
    taken = [0] * len(shares)
    places = np.empty(PERIOD, dtype=np.int16)
    for place in range(PERIOD):
        ready = (
            i
            for i, w in enumerate(shares)
            if slack * (w * (place + 1) - taken[i] * PERIOD) >= PERIOD
        )
        source = min(ready, key=lambda i: (slack - 1 + slack * taken[i]) / shares[i])
        places[place] = source
        taken[source] += 1
    return places


class MixedOrder(Lanes):
    """The endless shuffled order of a mixture.

    The shards of all sources are numbered as one list, in the order of the sources.

    Attributes:
        examples: total number of examples in one epoch of every source.

    Args:
        schedule: the shares, by keys of sources.
        orders: the order of each source, by key, all with the same number of lanes. Sources that
            are only part of the past may be missing.
        lanes: number of lanes that each have their table; None: as many as each source's order.
    """

    def __init__(
        self, schedule: Schedule, orders: Mapping[str, Order], lanes: int | None = None
    ) -> None:
        super().__init__(lanes or next(iter(orders.values())).lanes)
        self.examples = sum(order.examples for order in orders.values())
        self._keys = sorted({key for _, shares in schedule.parts for key in shares})
        self._orders = [orders.get(key) for key in self._keys]
        # Two sources of 3 and 2 shards have the numbers 0, 1, 2 and 3, 4.
        shards_before = np.cumsum([0, *(order.shards for order in orders.values())]).tolist()
        first_shard = dict(zip(orders, shards_before, strict=False))
        self._first_shard = [first_shard.get(key, 0) for key in self._keys]
        self._first = np.array([first for first, _ in schedule.parts])
        self._share = np.array(
            [[shares.get(key, 0) for key in self._keys] for _, shares in schedule.parts]
        )
        # The source of each place: [parts, PERIOD].
        self._place = np.stack([self._spread_shares(shares) for shares in self._share])
        is_source = self._place[:, None] == np.arange(len(self._keys))[:, None]
        # The number of examples of a source before each place: [parts, sources, PERIOD].
        self._before = np.cumsum(is_source, axis=-1, dtype=np.int16) - is_source
        # A lane has consumed examples in earlier parts, too. `_base` corrects the count that the
        # table of a part gives, so that it continues where the part before ended: [parts, sources,
        # lanes].
        lane = np.arange(self.lanes)
        self._base = np.zeros((len(self._first), len(self._keys), self.lanes), dtype=np.int64)
        for part, first in enumerate(self._first.tolist()):
            walked = self._walked(lane, self.turn(lane, first))
            taken = self._base[part - 1] + self._count(part - 1, walked) if part else 0
            self._base[part] = taken - self._count(part, walked)

    @staticmethod
    def _spread_shares(shares: Int64) -> npt.NDArray[np.int16]:
        # A source of weight 0 changes no place, so it can be added to a run that has begun.
        present = np.flatnonzero(shares)
        return present.astype(np.int16)[_spread(tuple(shares[present].tolist()))]

    def _walked(self, lane: Int64, turn: Int64) -> Int64:
        """Each lane's position in the endlessly repeated table, its starting place included."""
        # Lanes begin at different places, or all would take the same source in the same turn.
        return turn + lane * _LANE_STEP % PERIOD

    def _count(self, part: int, walked: Int64) -> Int64:
        """The number of examples of each source before places of a part: int64 [sources, N]."""
        period, place = np.divmod(walked, PERIOD)
        count: Int64 = self._share[part][:, None] * period + self._before[part][:, place]
        return count

    def locate(self, number: npt.ArrayLike) -> Location:
        """Returns where examples are stored; the epoch is the one of the example's source.

        Raises:
            DataError: an example's source is no longer part of the run.
        """
        source, nth = self._find(np.asarray(number, dtype=np.int64))
        at = Location(*np.empty((3, len(source)), dtype=np.int64))
        for each in set(source.tolist()):
            order = self._orders[each]
            if order is None:
                raise DataError(
                    f"the dataset of digest {self._keys[each][:12]}... is no longer in "
                    "data.sources, and examples come from it; add it again, with weight 0"
                )
            rows = np.flatnonzero(source == each)
            found = order.locate(nth[rows])
            at.epoch[rows], at.index[rows] = found.epoch, found.index
            at.shard[rows] = found.shard + self._first_shard[each]
        return at

    def working_set(self, size: int, index: int, count: int) -> int:
        return sum(
            order.working_set(size, index, count) for order in self._orders if order is not None
        )

    def shards_ahead(self, start: int, size: int, index: int, count: int) -> Int64:
        lane = self.lanes_of(start, size, index, count)
        number = self.turn(lane, start) * self.lanes + lane
        part = np.searchsorted(self._first, number, side="right") - 1
        current, following = list[Int64](), list[Int64]()
        for source, order in enumerate(self._orders):
            if order is None or not self._share[part, source].any():
                continue
            window, next_window = order.ahead(lane, self._taken(np.full_like(lane, source), number))
            current.append(window + self._first_shard[source])
            following.append(next_window + self._first_shard[source])
        return np.concatenate([*current, *following])

    def _find(self, number: Int64) -> tuple[Int64, Int64]:
        """The sources of global examples, and their numbers in the orders of these."""
        part, lane, _, place = self._walk(number)
        source = self._place[part, place].astype(np.int64)
        # The n-th example of a source in a lane is number n * lanes + lane of its order.
        return source, self._taken(source, number) * self.lanes + lane

    def _walk(self, number: Int64) -> tuple[Int64, Int64, Int64, Int64]:
        """The part, the lane, and the period and place in the table of global examples."""
        turn, lane = np.divmod(number, self.lanes)
        part = np.searchsorted(self._first, number, side="right") - 1
        return part, lane, *np.divmod(self._walked(lane, turn), PERIOD)

    def _taken(self, source: Int64, number: Int64) -> Int64:
        """The number of examples of sources before global examples, in the lanes of these."""
        part, lane, period, place = self._walk(number)
        in_part: Int64 = self._share[part, source] * period + self._before[part, source, place]
        return self._base[part, source, lane] + in_part


class SourceGroups(MixedOrder):
    """The order of a mixture in which each `size` consecutive examples come from one source.

    The table names the source of each group. A source's groups follow each other in its own order,
    so its examples come as they would without other sources. For example, with groups of 2 and the
    shares 2 : 1, the examples are A0 A1, B0 B1, A2 A3, A4 A5, B2 B3, A6 A7, ...

    Args:
        schedule: the shares; a change within a group takes effect at the next one.
        orders: as for `MixedOrder`.
        size: number of examples in a group.
    """

    def __init__(self, schedule: Schedule, orders: Mapping[str, Order], size: int) -> None:
        # Groups take the place of examples. One lane is enough: their examples are from all lanes
        # of their source.
        groups = Schedule.of((-(-first // size), shares) for first, shares in schedule.parts)
        super().__init__(groups, orders, lanes=1)
        self._size, self._source_lanes = size, next(iter(orders.values())).lanes

    def source_of(self, number: Int64) -> Int64:
        """The number of each example's source: int64 [B]."""
        return self._find(number)[0]

    def _find(self, number: Int64) -> tuple[Int64, Int64]:
        group, within = np.divmod(number, self._size)
        source, nth = super()._find(group)
        return source, nth * self._size + within

    def batch(self, start: int, size: int) -> Int64:
        """Returns a global batch sorted by the lanes of the sources."""
        return self.rows(np.arange(start, start + size))

    def rows(self, number: Int64) -> Int64:
        return number[np.argsort(self._find(number)[1] % self._source_lanes, kind="stable")]

    def shards_ahead(self, start: int, size: int, index: int, count: int) -> Int64:
        # Groups of 3 on 2 lanes begin in different lanes, so the rows of a replica do, too.
        if self._size % self._source_lanes:
            index, count = 0, 1
        group = np.array([-(-start // self._size)])
        part = np.searchsorted(self._first, group, side="right") - 1
        current, following = list[Int64](), list[Int64]()
        for source, order in enumerate(self._orders):
            if order is None or not self._share[part, source].any():
                continue
            lane = order.lanes_of(0, size, index, count)
            consumed = int(self._taken(np.array([source]), group)[0]) * self._size
            window, next_window = order.ahead(lane, order.turn(lane, consumed))
            current.append(window + self._first_shard[source])
            following.append(next_window + self._first_shard[source])
        return np.concatenate([*current, *following])


class Mixture:
    """The sources of a run, their shares, and the resulting order.

    Attributes:
        order: of the examples; the source's own order if there has never been another source.
        orders: the order of each source, by key.

    Args:
        schedule: the shares over the run.
        orders: the order of each source, by key, all with the same number of lanes.
        keys: the key of each source, by name.
        group: the size of groups of examples from one source; None: there are no groups.
    """

    def __init__(
        self,
        schedule: Schedule,
        orders: Mapping[str, Order],
        keys: Mapping[str, str],
        group: int | None = None,
    ) -> None:
        self.orders, self._group = orders, group
        self._names = {key: name for name, key in keys.items()}
        self.follow(schedule)

    def follow(self, schedule: Schedule) -> None:
        """Replaces the shares over the run, the past ones included."""
        self._schedule = schedule
        only = list(schedule.parts[0][1]) if len(schedule.parts) == 1 else []
        # A mixture of one source has the order of that source, as if there were no mixture.
        alone = len(self.orders) == len(only) == 1 and only[0] in self.orders
        self.order: ExampleOrder
        if alone:
            self.order = self.orders[only[0]]
        elif self._group is None:
            self.order = MixedOrder(schedule, self.orders)
        else:
            self.order = SourceGroups(schedule, self.orders, self._group)

    def change(self, wanted: Schedule, example: int) -> None:
        """Replaces the shares from a global example on; those before it stay."""
        self.follow(wanted.after(self._schedule, example))

    def resume(self, recorded: Schedule, wanted: Schedule, example: int, *, accept: bool) -> None:
        """Continues from a global example; the shares before it stay as recorded.

        Args:
            recorded: the shares in the checkpoint, past and future ones.
            wanted: the shares that the configuration asks for.
            example: the next example.
            accept: whether the current shares may differ from the recorded ones.

        Raises:
            DataError: the shares differ, and `accept` is false.
        """
        # At the last consumed example: a change that is due right here is none of the past.
        before, now = recorded.at(example - 1), wanted.at(example - 1)
        if example and before != now:
            change = f"the mixture changes from {self._said(before)} to {self._said(now)}"
            if not accept:
                raise DataError(
                    f"{change} where the run was stopped; restore data.path, or data.sources and "
                    "data.weights (weights of future steps may change freely), or set "
                    f"data.on_change=accept to use the new mixture from example {example} on"
                )
            logger.info("%s at example %d, as data.on_change accepts", change, example)
        self.follow(wanted.after(recorded, example))

    def _said(self, shares: Shares) -> str:
        names = {key: self._names.get(key, f"a dataset of digest {key[:12]}...") for key in shares}
        return ", ".join(f"{names[key]} {share / PERIOD:.3g}" for key, share in shares.items())

    def state(self) -> list[list[int | Shares]]:
        """Returns the whole schedule (past, current and future shares), for a checkpoint."""
        return [[first, shares] for first, shares in self._schedule.parts]


class WeightedMixture(Mixture):
    """A mixture with the weights of a configuration, which may change at steps.

    Args:
        rates: the weights of the sources by name, after step 0 and after each change.
        orders, keys, group: as for `Mixture`.
        consumed_after: returns the number of examples that a number of steps consume.
        excluded: the examples that the run skips.
    """

    def __init__(
        self,
        rates: Sequence[tuple[int, Mapping[str, float]]],
        orders: Mapping[str, Order],
        keys: Mapping[str, str],
        consumed_after: Callable[[int], int],
        excluded: Exclusions,
        group: int | None = None,
    ) -> None:
        self._rates, self._keys, self._consumed_after = rates, keys, consumed_after
        # How many more examples the steps so far have consumed than they would have in batches of
        # the current size.
        self._surplus = 0
        super().__init__(self._wanted(excluded), orders, keys, group)

    def _wanted(self, excluded: Exclusions) -> Schedule:
        """The configured shares of the sources over time."""
        parts = []
        for step, rates in self._rates:
            # Weights change at steps, but a mixture counts examples, excluded ones included.
            consumed = self._consumed_after(step) + self._surplus if step else 0
            parts.append((excluded.after(0, max(0, consumed)), rates))
        return Schedule.weighted(parts, self._keys)

    def exclude(self, excluded: Exclusions, example: int) -> bool:
        """Lets later changes come later, as more examples are skipped; returns whether any does."""
        if len(self._rates) > 1:
            self.change(self._wanted(excluded), example)
        return len(self._rates) > 1

    def load(
        self,
        parts: Iterable[Sequence[Any]],
        excluded: Exclusions,
        example: int,
        surplus: int,
        *,
        accept: bool | None,
    ) -> None:
        """Continues from a global example; the shares before it stay as recorded.

        Args:
            parts: the `state` in the checkpoint.
            excluded: the examples that the run skips.
            example: the next example.
            surplus: number of examples that steps have consumed beyond `consumed_after`.
            accept: see `resume`; None also keeps the recorded shares of later examples.

        Raises:
            DataError: see `resume`.
        """
        self._surplus = surplus
        recorded = Schedule.of((first, shares) for first, shares in parts)
        if accept is None:
            self.follow(recorded)
        else:
            self.resume(recorded, self._wanted(excluded), example, accept=accept)
