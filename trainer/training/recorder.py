"""The recorder: accumulates metrics and consumed data between two log rows, and writes the rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from samestep.errors import SamestepError
from samestep.examples import LoaderState
from samestep.hashing import hexadecimal, signed
from trainer.monitoring import Level, Tracker, performance
from trainer.monitoring.clock import Clock
from trainer.monitoring.jsonl import Row
from trainer.monitoring.meter import Meter
from trainer.monitoring.performance import Resources, Throughput
from trainer.strategies import Strategy
from trainer.training.ledger import Ledger
from trainer.training.passes import Loader, MicroBatches
from trainer.training.phases import Phase
from trainer.training.state import Meta, TrainState

logger = logging.getLogger(__name__)


class Destinations(NamedTuple):
    """Where the rows of a run go; empty on ranks that write none.

    Attributes:
        trackers: receive the metrics.
        ledger: file for a record of the consumed data.
        throughput: turns steps and seconds into rates; None leaves these out.
    """

    trackers: Sequence[Tracker] = ()
    ledger: Path | None = None
    throughput: Throughput | None = None


class Recorder:
    """Accumulates a window of steps without waiting for the device, and writes it as a row.

    The open window is part of a checkpoint, so a run that was interrupted writes the same rows as
    one that was not. Each replica accumulates its own share; shares are summed over replicas only
    when a row or a checkpoint needs them.

    Attributes:
        meter: sums of the metrics.
        ledger: record of the consumed data.
        folder: of the ledger's file; None on ranks that write none.

    Args:
        compiles: whether layers are compiled (`training.compile`).
    """

    def __init__(self, strategy: Strategy, compiles: bool = False) -> None:
        self._strategy = strategy
        self._compiles, self._graphs = compiles, 0
        self._trackers: Sequence[Tracker] = ()
        # Whether rows wait until their step is safe, and those that do: step and metrics.
        self._holds, self._held = False, list[tuple[int, Mapping[str, float]]]()
        self.ledger = Ledger()
        self._throughput: Throughput | None = None
        self.folder: Path | None = None
        self.meter = Meter(strategy.accelerator.to_device, is_exact=strategy.exact)
        self._clock = Clock(strategy.accelerator)
        self._resources = Resources(strategy.accelerator)
        # Of this replica since the last row: the hash sum of its rows and their non-padding tokens.
        self._digest = self._filled = 0
        self._logged_tokens = 0

    def open(self, step: int, destinations: Destinations) -> None:
        """Starts the clock at `step`."""
        self._trackers, self._throughput = destinations.trackers, destinations.throughput
        self.folder = None
        if destinations.ledger is not None:
            self.ledger.open(destinations.ledger, step)
            self.folder = destinations.ledger.parent
        # Excludes the start-up from throughput and peak memory.
        self._strategy.accelerator.reset_peak_memory()
        self._clock = Clock(self._strategy.accelerator)

    def end_section(self, section: str) -> None:
        """Records the time since the last call under `section`."""
        self._clock.end_section(section)

    def begin_order(self, step: int, phase: Phase, objective: object, loader: LoaderState) -> None:
        """Writes to the ledger which data order the examples after `step` are counted in.

        Args:
            step: number of steps taken.
            phase: of the next step.
            objective: its configuration; it decides which tokens are masked.
            loader: state of the loader of the next step.
        """
        # Where the loader stands is no part of the order. Each of these has rows of its own.
        position = ("example", "excluded", "corrupt")
        order = {name: value for name, value in loader.items() if name not in position}
        basis = {"objective": objective, "sequence_length": phase.sequence_length, "data": order}
        # A row of the ledger has examples of one order only.
        if self.ledger.must_close_row(phase.order, basis, phase.global_batch_size):
            self._close_row(self._over_replicas(self._digest)[0])
        self.ledger.enter(step, phase.order, basis, loader.get("excluded", ()))

    def add_batch(self, step: int, micro_batches: MicroBatches, loader: Loader) -> None:
        """Adds the data of a step: the loader's global examples, this replica's row hashes."""
        self.ledger.add_step(step, loader.consumed, loader.corrupt)
        for batch in micro_batches:
            # On the host, where batches are until they are copied: the device is not waited for.
            self._digest += int(batch["digest"].sum())
            self._filled += int(batch["filled"].sum())

    def means(self) -> dict[str, float]:
        """Returns the metrics' means over the window and all replicas, and clears them."""
        return self.meter.compute(self._strategy.all_reduce)

    def rates(self, state: TrainState) -> dict[str, float]:
        """Closes the window: writes the ledger's row, returns throughput, memory and energy."""
        reading, replica = self._clock.read(), self._strategy.replica
        seconds = reading.seconds
        # Each replica fills in its own element, so the sum over replicas is all of them (in
        # microseconds, as the collective sums integers).
        own_work = [0] * replica.count
        own_work[replica.index] = round(1e6 * performance.own_work(seconds))
        mine = (self._digest, self._filled, self._resources.joules(), *own_work)
        digest, filled, joules, *own_work = self._over_replicas(*mine)
        rates = {"train/examples": float(state.examples), "train/tokens": float(state.tokens)}
        rates |= self._resources.memory()
        rates |= performance.slowest([each / 1e6 for each in own_work], sum(seconds.values()))
        if self._throughput is not None:
            positions = state.tokens - self._logged_tokens
            rates |= self._throughput.measure(state.step, positions, filled, reading)
        accelerator, loss_scale = self._strategy.accelerator, self._strategy.loss_scale
        # A number that keeps growing means that shapes change.
        if accelerator.compiles:
            rates["perf/compilations"] = float(sum(accelerator.compilations.values()))
        elif self._compiles:
            rates["perf/compilations"] = float(self._count_graphs())
        if joules:
            rates["perf/energy_joules"] = joules
        if loss_scale is not None:
            rates |= {f"train/{name}": value for name, value in loss_scale.metrics().items()}
        self._logged_tokens, self._filled = state.tokens, 0
        self._close_row(digest)
        return rates

    def _count_graphs(self) -> int:
        """The number of graphs of compiled layers; the log says when it has changed."""
        from trainer.training.compute.compiled import LIMIT, graphs

        if (found := graphs()) != self._graphs:
            logger.info("compiled     %d graphs of layers; at most %d of one kind", found, LIMIT)
            self._graphs = found
        return found

    def _close_row(self, digest: int) -> None:
        self.ledger.close_row(hexadecimal(digest))
        self._digest = 0

    @contextmanager
    def held_rows(self, held: bool) -> Iterator[None]:
        """Within this context, rows are written by `release` only, if `held`.

        At its end the rows that are left are written, but not after an error that another rank may
        have caused, since their step may have to be taken again.
        """
        self.release()  # from the checkpoint that the run continues from
        self._holds = held
        try:
            yield
        except SamestepError:
            self.release()
            raise
        self._holds = False
        self.release()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a row of metrics, or holds it, see `held_rows`."""
        self._held.append((step, metrics))
        if not self._holds:
            self.release()

    def release(self) -> None:
        """Writes the rows that are held."""
        # Forgotten first: a tracker that fails must not get rows twice.
        rows, self._held = self._held, []
        for step, metrics in rows:
            for tracker in self._trackers:
                tracker.log(step, metrics)

    def drop_written(self, rows: Iterable[Row]) -> None:
        """Forgets held rows that the run had written before it was killed.

        Args:
            rows: all that it has written.
        """
        if self._held:
            first, _ = self._held[0]
            del self._held[: sum(row["step"] >= first for row in rows)]

    def alert(self, level: Level, title: str, text: str) -> None:
        """Notifies users, on the rank that has the trackers."""
        for tracker in self._trackers:
            tracker.alert(level, title, text)

    def state_dict(self) -> Meta:
        """The open window over all replicas, and the ledger's state. Collective."""
        held = {"held_rows": self._held} if self._held else {}
        return held | {
            "window": self.meter.totals(self._strategy.all_reduce),
            "digest": hexadecimal(self._over_replicas(self._digest)[0]),
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: Meta, tokens: int) -> None:
        """Restores the state of a checkpoint.

        Args:
            state: the content of `state_dict`, and the `step`.
            tokens: the run's count at that step.
        """
        self._logged_tokens, self._digest, self._filled = tokens, 0, 0
        self._held = [(step, metrics) for step, metrics in state.get("held_rows", ())]
        if "ledger" in state:  # older versions have none
            self.ledger.load_state_dict(state["ledger"], state["step"])
        # The window goes on where it was, so a row is the same with and without an interruption.
        self.meter = Meter(
            self._strategy.accelerator.to_device, state["window"], self._strategy.exact
        )
        if self._strategy.replica.index == 0:  # it is the sum over all replicas already
            self._digest = int(state["digest"], 16)

    def _over_replicas(self, *mine: int) -> list[int]:
        return over_replicas(self._strategy, *mine)


def over_replicas(strategy: Strategy, *mine: int) -> list[int]:
    """Sums integers over all replicas, modulo 2**64 (int64 on the device, so signed)."""
    own = torch.tensor([signed(value) for value in mine])
    sums: list[int] = strategy.all_reduce(own).tolist()
    return sums
