"""Puts a plan together: an experiment's step, traced, and what each strategy makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.accelerators import DTYPES
from trainer.config import decode
from trainer.config.renamed import read_stored
from trainer.errors import ConfigError, SamestepError
from trainer.inspect.plan.batch import example, stand_in
from trainer.inspect.plan.strategies import (
    Buffers,
    Collective,
    Division,
    Held,
    Ranges,
    Rows,
    Whole,
    interpolate,
)
from trainer.inspect.plan.trace import Activations, Step
from trainer.monitoring.jsonl import read_rows
from trainer.strategies import ShardedConfig, deepspeed, fsdp
from trainer.training.experiment import Experiment
from trainer.training.micro_batch import SHARE
from trainer.training.phases import Phase

STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
_NODE = 8  # devices that HSDP splits a copy of the model over, unless the experiment says otherwise


@dataclass(frozen=True)
class Plan:
    """What one strategy takes of each device.

    Attributes:
        strategy: one of `STRATEGIES`.
        micro_batch: examples of a forward and backward pass.
        micro_batches: of a step.
        held: bytes.
        exchanged: collectives of a step.
        largest: the largest micro-batch that fits into the memory that was asked about; 0 if a
            single example does not, None if it was not asked.
    """

    strategy: str
    micro_batch: int
    micro_batches: int
    held: Held
    exchanged: list[Collective]
    largest: int | None


class Planner:
    """Plans a phase of an experiment.

    Args:
        experiment: what is to be trained.
        phase: the phase.
        devices: over which it is to be spread.
        step: that of the experiment, so that it is traced once for all phases.
    """

    def __init__(self, experiment: Experiment, phase: Phase, devices: int, step: Step) -> None:
        self._experiment, self._phase, self._devices, self._step = experiment, phase, devices, step
        self._objective = experiment.objective.build(stand_in(experiment.model.vocab_size))
        self._example = example(experiment, self._objective, phase)
        self._traced: dict[int, Activations] = {}

    def plan(self, strategy: str, memory: int | None = None) -> Plan:
        """Plans for a strategy, with the experiment's settings of it.

        Args:
            strategy: one of `STRATEGIES`.
            memory: bytes of a device; where the experiment leaves the micro-batch to be found, it
                is the largest that fits into them, else a single example.

        Raises:
            ConfigError: the strategy cannot be had with so many devices.
        """
        devices = 1 if strategy == "single" else self._devices
        most = -(-self._phase.global_batch_size // devices)
        division = divide(strategy, self._experiment, self._step, devices)

        def held(rows: int, activations: Activations) -> Held:
            found = division.held(activations, accumulates=rows < most)
            return replace(found, parameters=found.parameters + self._step.frozen)

        largest = None
        if memory is not None:
            bounds = [(rows, self._activations(rows)) for rows in sorted({1, most})]
            largest = _largest(
                lambda rows: held(rows, interpolate(rows, bounds)).total, int(SHARE * memory), most
            )
        wanted = self._phase.micro_batch_size
        rows = min(most, wanted) if isinstance(wanted, int) else largest or 1
        micro_batches = -(-most // rows)
        return Plan(
            strategy,
            rows,
            micro_batches,
            held(rows, self._activations(rows)),
            division.exchanged(micro_batches),
            largest,
        )

    def _activations(self, rows: int) -> Activations:
        if rows not in self._traced:
            self._traced[rows] = self._step.activations(self._objective, self._example, rows)
        return self._traced[rows]


def divide(strategy: str, experiment: Experiment, step: Step, devices: int) -> Division:
    """How a strategy, with the experiment's settings where it is the experiment's own, divides a
    step.

    Raises:
        ConfigError: it cannot be had with so many devices.
    """
    width = DTYPES[experiment.training.precision].itemsize
    sizes = (step.parameters.values(), step.update, width, devices)
    if strategy in ("single", "ddp"):
        return Whole(*sizes)
    if strategy in ("fsdp", "hsdp"):
        copies = copies_of(experiment, devices) if strategy == "hsdp" else 1
        if devices % copies:
            raise ConfigError(
                f"{strategy} with {copies} copies of the model does not divide {devices} devices; "
                "set "
                "strategy.replicas to a divisor of them, or plan for another strategy"
            )
        own = experiment.strategy
        reshard = not isinstance(own, fsdp.Config) or own.reshard_after_forward
        return Rows(*sizes, parts=devices // copies, reshard=reshard)
    stage, config = int(strategy[-1]), experiment.strategy
    if not isinstance(config, deepspeed.Config) or config.stage != stage:
        return Ranges(*sizes, stage=stage)
    zero = (
        deepspeed.settings.zero_section(deepspeed.settings.read(config.config))
        if config.config
        else {}
    )
    known = {
        "bucket": "reduce_bucket_size",
        "prefetch": "stage3_prefetch_bucket_size",
        "persistent": "stage3_param_persistence_threshold",
        "reuse": "stage3_max_reuse_distance",
    }
    given = {ours: int(zero[theirs]) for ours, theirs in known.items() if theirs in zero}
    offloads = (config.offload_optimizer, config.offload_parameters)
    buffers = Buffers(overlap=zero.get("overlap_comm") is True, **given)
    return Ranges(*sizes, stage=stage, offloads=offloads, buffers=buffers)


def copies_of(experiment: Experiment, devices: int) -> int:
    """Copies of the model under HSDP.

    The experiment's, or one for each node of 8 devices, or two.
    """
    own = experiment.strategy
    if isinstance(own, ShardedConfig) and own.replicas > 1:
        return own.replicas
    return devices // _NODE if devices > _NODE and devices % _NODE == 0 else 2


def _largest(total: Callable[[int], int], budget: int, most: int) -> int:
    """The most rows whose total is inside the budget; 0 if a single one is not.

    Totals grow with the rows, but for the last: a step of one micro-batch may hold less than one of
        two.
    """
    if total(most) <= budget:
        return most
    fits, too_many = 0, most
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if total(middle) <= budget else (fits, middle)
    return fits


def as_json(plan: Plan) -> dict[str, object]:
    """A plan as the command prints it."""
    return {
        "strategy": plan.strategy,
        "micro_batch": plan.micro_batch,
        "micro_batches": plan.micro_batches,
        "bytes": {**vars(plan.held), "state": plan.held.state, "total": plan.held.total},
        "collectives": [{**vars(each), "sent": round(each.sent)} for each in plan.exchanged],
        "largest_micro_batch": plan.largest,
    }


def memory_of_run(folder: Path) -> float | None:
    """What the plan says of the peak of a run that has been started, in GiB of each device.

    Returns:
        None where the run has no start to plan for, its strategy is none of `STRATEGIES` (as
        `accelerate` is not), what it was made of is no longer there, or other versions have changed
        what it wrote.
    """
    starts = list(read_rows(folder / "starts.jsonl"))
    try:
        experiment = decode(Experiment, read_stored(folder / "config.yaml"))
        strategy = experiment.strategy.plan
        if not starts or strategy is None:
            return None
        devices, _, description = starts[-1]["devices"].partition(" x ")
        step, peaks = Step(experiment, on_cpu=description.startswith("CPU")), []
        sizes = str(starts[-1]["micro_batch"]).split(", ")
        for phase, size in zip(experiment.resolved_phases(), sizes, strict=True):
            started = replace(phase, micro_batch_size=int(size))
            peaks.append(Planner(experiment, started, int(devices), step).plan(strategy).held.total)
    except (SamestepError, LookupError, ValueError):
        return None
    return max(peaks) / 2**30
