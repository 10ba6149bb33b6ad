"""What a run tells of its steps: the rows of metrics and of the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from trainer.examples import LoaderState
from trainer.monitoring import Level, Tracker, stragglers
from trainer.monitoring.clock import Clock
from trainer.monitoring.meter import Meter
from trainer.monitoring.resources import Resources
from trainer.monitoring.throughput import Throughput
from trainer.strategies import Strategy
from trainer.strategies.heartbeat import Beat, Heartbeat, explain
from trainer.strategies.world import World
from trainer.training.ledger import Ledger, LedgerState, Range
from trainer.training.passes import Loader, MicroBatches
from trainer.training.phases import Phase
from trainer.training.state import Meta, TrainState


class RecorderState(TypedDict):
    """What a checkpoint keeps of unwritten rows: (sum, weight) by metric, digest, ledger."""

    window: dict[str, tuple[float, float]]
    digest: str
    ledger: LedgerState


class Recorder:
    """Adds up what happens between two rows, without waiting for the device, and writes the rows.

    What it adds up since the last row is part of a checkpoint, so that the rows of a run that was cut are those of one
    that was not. Each replica adds its part; sums over replicas are made when a row or a checkpoint needs them.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._trackers: Sequence[Tracker] = ()
        self._ledger = Ledger()
        self._throughput: Throughput | None = None
        self._meter = Meter(strategy.accelerator.to_device)
        self._clock = Clock(strategy.accelerator)
        self._resources = Resources(strategy.accelerator)
        self._logged_tokens = self._digest = self._filled = 0

    def open(
        self,
        step: int,
        trackers: Sequence[Tracker],
        ledger: Path | None,
        throughput: Throughput | None = None,
    ) -> None:
        """Starts the clock at `step`, and says where rows go: nowhere, on all ranks but the first."""
        self._trackers, self._throughput = trackers, throughput
        if ledger is not None:
            self._ledger.open(ledger, step)
        self._strategy.accelerator.reset_peak_memory()
        self._clock = Clock(self._strategy.accelerator)

    def end_section(self, name: str) -> None:
        """Says that the time since the last lap went into `name`."""
        self._clock.end_section(name)

    def add(self, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Adds a micro-batch's metrics."""
        self._meter.add(metrics)

    def begin_order(self, step: int, phase: Phase, objective: object, loader: LoaderState) -> None:
        """Tells the ledger what the examples after `step` are numbers of.

        Args:
            step: the run's number of steps.
            phase: that of the next step.
            objective: its configuration, which decides what is masked.
            loader: the state of the loader of the next step.
        """
        order = {
            name: value
            for name, value in loader.items()
            if name not in ("example", "excluded", "corrupt")
        }
        basis = {"objective": objective, "sequence_length": phase.sequence_length, "data": order}
        if self._ledger.must_close_row(phase.order, basis, phase.global_batch_size):
            self._close_row(self._over_replicas(self._digest)[0])
        self._ledger.enter(step, phase.order, basis, loader.get("excluded", ()))

    def exclude(self, step: int, order: int, examples: Sequence[Range], reason: str) -> None:
        """Tells the ledger that the run passes over global examples of a data order from `step` on."""
        self._ledger.exclude(step, order, examples, reason)

    def add_batch(self, step: int, micro_batches: MicroBatches, loader: Loader) -> None:
        """Adds what the model was fed in a step: this replica's rows of the global examples that a loader gave last."""
        self._ledger.feed(step, loader.consumed, loader.corrupt)
        self._digest += sum(int(batch["digest"].sum()) for batch in micro_batches)
        self._filled += sum(int(batch["filled"].sum()) for batch in micro_batches)

    def means(self) -> dict[str, float]:
        """The metrics' means since the last row, over all replicas; the next row starts anew."""
        return self._meter.compute(self._strategy.all_reduce)

    def rates(self, state: TrainState) -> dict[str, float]:
        """Writes the ledger's row; returns counts, speed, memory and energy since the last one, which starts anew."""
        seconds, replica = self._clock.read(), self._strategy.replica
        own = [0] * replica.count
        own[replica.index] = round(1e6 * stragglers.own_work(seconds))
        joules = self._resources.joules()
        digest, filled, joules, *own = self._over_replicas(self._digest, self._filled, joules, *own)
        rates = {"train/examples": float(state.examples), "train/tokens": float(state.tokens)}
        rates |= self._resources.memory() | stragglers.slowest(
            [each / 1e6 for each in own], sum(seconds.values())
        )
        if self._throughput is not None:
            rates |= self._throughput.measure(
                state.step, state.tokens - self._logged_tokens, filled, seconds
            )
        if self._strategy.accelerator.compiles:
            rates["perf/compilations"] = float(
                sum(self._strategy.accelerator.compilations.values())
            )
        if joules:
            rates["perf/energy_joules"] = joules
        if self._strategy.loss_scale is not None:
            rates |= {
                f"train/{name}": value
                for name, value in self._strategy.loss_scale.metrics().items()
            }
        self._logged_tokens, self._filled = state.tokens, 0
        self._close_row(digest)
        return rates

    def _close_row(self, digest: int) -> None:
        self._ledger.close_row(_hexadecimal(digest))
        self._digest = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a row of metrics."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def alert(self, level: Level, title: str, text: str) -> None:
        """Tells people, on the rank that has the trackers."""
        for tracker in self._trackers:
            tracker.alert(level, title, text)

    def state_dict(self) -> RecorderState:
        """What has been added up since the last row, over all replicas, and the ledger's head; a collective."""
        return {
            "window": self._meter.totals(self._strategy.all_reduce),
            "digest": _hexadecimal(self._over_replicas(self._digest)[0]),
            "ledger": self._ledger.state_dict(),
        }

    def load_state_dict(self, state: Meta, tokens: int) -> None:
        """Goes on from there.

        Args:
            state: as `state_dict` gives it, and the `step`.
            tokens: the run's count at that moment.
        """
        self._logged_tokens, self._digest, self._filled = tokens, 0, 0
        if "ledger" in state:  # or of a version that had none
            self._ledger.load_state_dict(state["ledger"], state["step"])
        self._meter = Meter(self._strategy.accelerator.to_device, state["window"])
        if self._strategy.replica.index == 0:  # it is a sum over all replicas
            self._digest = int(state["digest"], 16)

    def _over_replicas(self, *mine: int) -> list[int]:
        """Sums of integers over all replicas, modulo 2**64 and signed."""
        signed = [(value + 2**63) % 2**64 - 2**63 for value in mine]
        sums: list[int] = self._strategy.all_reduce(torch.tensor(signed)).tolist()
        return sums


class AlertingHeartbeat(Heartbeat):
    """Tells people of a hang, on the rank that has the trackers: nobody else could before the process ends.

    Args:
        recorder: has the trackers.
        world: as in `Heartbeat`.
        timeout: as in `Heartbeat`.
        folder: as in `Heartbeat`.
    """

    def __init__(
        self, recorder: Recorder, world: World, timeout: float | None, folder: Path
    ) -> None:
        super().__init__(world, timeout, folder)
        self._recorder = recorder

    def _write_stacks(self, mine: Beat) -> None:
        """Each rank that lives comes by here once, whichever it is that ends the run some beats later."""
        super()._write_stacks(mine)
        where = f"{explain({mine.rank: mine}, [])}; the log's last line and the stacks in {self._folder} say who it is"
        self._recorder.alert("ERROR", "The run hangs", where)


def _hexadecimal(digest: int) -> str:
    return f"{digest % 2**64:016x}"
