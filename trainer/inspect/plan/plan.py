"""Plans an experiment: one step is traced, and divided by each strategy."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.config import decode
from samestep.errors import ConfigError, SamestepError
from samestep.untrusted import read_stored
from trainer.accelerators import DTYPES
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
from trainer.strategies import ShardedConfig
from trainer.strategies.deepspeed import settings
from trainer.strategies.kinds import deepspeed, fsdp
from trainer.training.compatibility import check_needs
from trainer.training.compute.micro_batch import SHARE
from trainer.training.experiment import Experiment
from trainer.training.phases import Phase

STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
_NODE = 8  # devices per copy of the model under HSDP, unless the experiment sets it


@dataclass(frozen=True)
class Plan:
    """Memory and traffic of one strategy on each device.

    Attributes:
        strategy: one of `STRATEGIES`.
        micro_batch: examples of a forward and backward pass.
        micro_batches: number of them in a step.
        held: bytes.
        exchanged: collectives of a step.
        largest: largest micro-batch that fits the given memory, 0 if a single example does not;
            None if no memory was given.
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
        devices: number of devices to use.
        step: of the experiment; traced once for all phases.
    """

    def __init__(
        self,
        experiment: Experiment,
        phase: Phase,
        devices: int,
        step: Step,
    ) -> None:
        self._experiment, self._phase, self._devices, self._step = experiment, phase, devices, step
        self._objective = phase.objective.build(stand_in(experiment.model.vocab_size))
        check_needs(replace(experiment, objective=phase.objective), self._objective, step.model)
        self._example = example(experiment, self._objective, phase)
        self._traced: dict[tuple[int, bool], Activations] = {}

    def plan(self, strategy: str, memory: int | None = None, fused: bool | None = None) -> Plan:
        """Plans for a strategy, with the experiment's settings of it.

        Args:
            strategy: one of `STRATEGIES`.
            memory: bytes per device. If the experiment sets no micro-batch, the plan has the
                largest that fits; without `memory`, a single example.
            fused: whether attention is fused; None: if it is in the run.

        Raises:
            ConfigError: the strategy cannot run on this number of devices.
        """
        devices, most = self._devices_of(strategy), self._most(strategy)
        division = divide(strategy, self._experiment, self._step, devices)
        fuses = self._step.fuses_attention if fused is None else fused

        def held(size: int, activations: Activations) -> Held:
            found = division.held(activations, accumulates=size < most)
            return replace(found, parameters=found.parameters + self._step.frozen)

        largest = None
        if memory is not None:
            budget = int(SHARE * memory)
            # The total grows with the size, except for the last: a step of one micro-batch does not
            # accumulate gradients and may hold less than a step of two. So that one goes first.
            whole = self._activations(most, fuses)
            if held(most, whole).total <= budget:
                largest = most
            else:
                # Two traces, of one example and of all rows of a device; others are interpolated.
                bounds = sorted({1: self._activations(1, fuses), most: whole}.items(), key=_size)

                def total(size: int) -> int:
                    return held(size, interpolate(size, bounds)).total

                largest = bisect_right(range(1, most), budget, key=total)
                # Large logits are computed in chunks, whose memory stops to grow, so interpolation
                # may be too low: what it finds is traced, and becomes a bound if it is too much.
                while largest > 1:
                    exact = self._activations(largest, fuses)
                    if held(largest, exact).total <= budget:
                        break
                    bounds = sorted([*bounds, (largest, exact)], key=_size)
                    largest = bisect_right(range(1, largest), budget, key=total)
        wanted = self._phase.micro_batch_size
        size = min(most, wanted) if isinstance(wanted, int) else largest or 1
        count = -(-most // size)
        found = held(size, self._activations(size, fuses))
        return Plan(strategy, size, count, found, division.exchanged(count), largest)

    def _devices_of(self, strategy: str) -> int:
        return 1 if strategy == "single" else self._devices

    def _most(self, strategy: str) -> int:
        return -(-self._phase.global_batch_size // self._devices_of(strategy))

    def _activations(self, size: int, fused: bool) -> Activations:
        if (size, fused) not in self._traced:
            found = self._step.activations(self._objective, self._example, size, fused)
            self._traced[size, fused] = found
        return self._traced[size, fused]


def _size(bound: tuple[int, Activations]) -> int:
    return bound[0]


def divide(strategy: str, experiment: Experiment, step: Step, devices: int) -> Division:
    """Divides a step by a strategy, with the experiment's settings if it is the experiment's own.

    Raises:
        ConfigError: the strategy cannot run on this number of devices.
    """
    own = experiment.strategy
    width = DTYPES[experiment.training.precision].itemsize
    sizes = (list(step.parameters.values()), step.update, width, devices)
    if strategy in ("single", "ddp"):
        return Whole(*sizes)
    if strategy in ("fsdp", "hsdp"):
        copies = copies_of(experiment, devices) if strategy == "hsdp" else 1
        if devices % copies:
            raise ConfigError(
                f"{strategy} with {copies} copies of the model does not divide {devices} devices. "
                "Set strategy.replicas to a divisor of them, or plan for another strategy"
            )
        config = own if isinstance(own, fsdp.Config) else fsdp.Config()
        return Rows(
            *sizes,
            parts=devices // copies,
            reshard=config.reshard_after_forward,
            reduce_each=config.reduce_each_micro_batch,
        )
    # "zero3" -> 3. Buffers are DeepSpeed's defaults unless the experiment uses this stage.
    stage = int(strategy[-1])
    if not isinstance(own, deepspeed.Config) or own.stage != stage:
        return Ranges(*sizes, stage)
    zero = {}
    if own.config:
        zero = settings.zero_section(settings.read(own.config))
    keys = {
        "bucket": "reduce_bucket_size",
        "prefetch": "stage3_prefetch_bucket_size",
        "persistent": "stage3_param_persistence_threshold",
        "reuse": "stage3_max_reuse_distance",
    }
    given = {ours: int(zero[theirs]) for ours, theirs in keys.items() if theirs in zero}
    buffers = Buffers(overlap=zero.get("overlap_comm") is True, **given)
    return Ranges(*sizes, stage, own.offload_optimizer, own.offload_parameters, buffers)


def copies_of(experiment: Experiment, devices: int) -> int:
    """Returns the copies of the model under HSDP: the experiment's, one per 8 devices, or two."""
    own = experiment.strategy
    if isinstance(own, ShardedConfig) and own.replicas > 1:
        return own.replicas
    return devices // _NODE if devices > _NODE and devices % _NODE == 0 else 2


def as_json(plan: Plan) -> dict[str, object]:
    """Converts a plan for `samestep plan --json`."""
    return {
        "strategy": plan.strategy,
        "micro_batch": plan.micro_batch,
        "micro_batches": plan.micro_batches,
        "bytes": {**vars(plan.held), "state": plan.held.state, "total": plan.held.total},
        "collectives": [{**vars(each), "sent": round(each.sent)} for each in plan.exchanged],
        "largest_micro_batch": plan.largest,
    }


def memory_of_run(folder: Path) -> float | None:
    """Returns the planned peak memory of a run that was started, in GiB per device.

    Returns:
        None if the run was never started, has a strategy that is not planned (such as
        `accelerate`), or cannot be read: its files are gone, or are of another version.
    """
    starts = list(read_rows(folder / "starts.jsonl"))
    try:
        experiment = decode(Experiment, read_stored(folder / "config.yaml"))
        strategy = experiment.strategy.plan
        if not starts or strategy is None:
            return None
        # For example "4 x NVIDIA H100", and "16, 8" with the micro-batches of two phases.
        devices, _, description = starts[-1]["devices"].partition(" x ")
        sizes = str(starts[-1]["micro_batch"]).split(", ")
        step, peaks = Step(experiment, on_cpu=description.startswith("CPU")), []
        for phase, size in zip(experiment.resolved_phases(), sizes, strict=True):
            # As started: `auto` may have found another size than the plan would.
            started = replace(phase, micro_batch_size=int(size))
            plan = Planner(experiment, started, int(devices), step).plan(strategy)
            peaks.append(plan.held.total)
    except (SamestepError, LookupError, ValueError):
        return None
    return max(peaks) / 2**30
