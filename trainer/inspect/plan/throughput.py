"""Throughput of a run on devices that need not be there: time of a step, of the run, and its cost.

A micro-batch and an update are traced, become the kernels of an implementation (`fusion`), and
take the time that a device needs for these (`roofline`). Gradients and weights are exchanged as
`strategies` counts them, during the passes where the strategy allows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from samestep.errors import ConfigError
from trainer.inspect.plan import host
from trainer.inspect.plan.batch import example, stand_in
from trainer.inspect.plan.datasheets import DEVICES, DataSheet
from trainer.inspect.plan.fusion import EAGER, IMPLEMENTATIONS, Implementation, Kernel, kernels
from trainer.inspect.plan.operators import Operator
from trainer.inspect.plan.plan import Plan, Planner, divide
from trainer.inspect.plan.roofline import Estimate, Rates, SheetRates, estimate
from trainer.inspect.plan.strategies import Collective
from trainer.inspect.plan.trace import Activations, Step
from trainer.training.experiment import Experiment
from trainer.training.forecast import flops_of_step
from trainer.training.phases import Phase

HOST = "cpu"
NETWORK = 0.8
"""Share of the links' peak that large ring collectives reach: NCCL's tests reach 360 of 450 GB/s
with eight H100."""


@dataclass(frozen=True)
class Prediction:
    """Throughput of a phase with one implementation on one kind of device.

    Attributes:
        device, implementation: their names.
        sequence_length: of the phase.
        micro_batch, micro_batches: of a device in a step.
        fits: whether a single example fits the device's memory.
        step: time of a step on each device, without communication.
        communication: seconds of a step that collectives take.
        exposed: of these, seconds in which nothing else is computed.
        sequences: per second and device.
        tokens: per second and device, padding and packed sequences alike.
        mfu: model FLOPs utilization (Chowdhery et al. 2022).
        hours: of all steps of the phase.
    """

    device: str
    implementation: str
    sequence_length: int
    micro_batch: int
    micro_batches: int
    fits: bool
    step: Estimate
    communication: float
    exposed: float
    sequences: float
    tokens: float
    mfu: float
    hours: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.step.total + self.exposed


def check_device(name: str) -> None:
    """Rejects unknown devices.

    Raises:
        ConfigError: with the names that there are.
    """
    if name not in (HOST, *DEVICES):
        raise ConfigError(
            f"--throughput {name} is unknown. Use {', '.join(DEVICES)}; or {HOST}, which is "
            "measured"
        )


def implementations(name: str) -> dict[str, Implementation]:
    """The implementations that a device can run, by name."""
    if name == HOST:
        return {"eager": EAGER}
    if DEVICES[name].compiles:
        found = {each: replace(how, whole=True) for each, how in IMPLEMENTATIONS.items()}
        return {each: found[each] for each in ("compiled", "fused")}
    return dict(IMPLEMENTATIONS)


class Predictor:
    """Predicts an experiment's throughput.

    Args:
        devices: number of devices.
        strategy: of `plan.STRATEGIES`.
        only: implementations by name, instead of each device's own.

    Raises:
        ConfigError: the model's layers cannot be predicted.
    """

    def __init__(
        self,
        experiment: Experiment,
        step: Step,
        devices: int,
        strategy: str,
        only: Mapping[str, Implementation] | None = None,
    ) -> None:
        self._experiment, self._step = experiment, step
        self._devices, self._only = devices, only
        self._strategy = "single" if devices == 1 else strategy
        with torch.device("meta"):
            self._model = experiment.build_model()
        if not self._model.compiled_units():
            raise ConfigError(
                "--throughput is given, and layers of this model are loops inside of a kernel, "
                "whose time is not predicted. Leave it out; memory and FLOPs are counted."
            )
        self._update = step.update_operators()
        self._passes: dict[tuple[int, int], list[Operator]] = {}
        self._host: host.HostRates | None = None

    def predictions(
        self, phases: Sequence[Phase], names: Sequence[str]
    ) -> Iterator[tuple[Phase, list[Prediction]]]:
        """Each phase, with a prediction for each device and implementation."""
        for phase in phases:
            planner = Planner(self._experiment, phase, self._devices, self._step)
            found = []
            for name in names:
                memory = None if name == HOST else int(DEVICES[name].gibibytes * 2**30)
                for label, how in (self._only or implementations(name)).items():
                    # A program that is compiled as a whole cannot call a kernel of ours.
                    fused = how.fuses_attention and not how.whole
                    plan = planner.plan(self._strategy, memory, fused)
                    found.append(self._predict(phase, plan, name, label, how))
            yield phase, found

    def _rates(self, name: str) -> Rates:
        if name != HOST:
            return SheetRates(DEVICES[name])
        if self._devices > 1:
            raise ConfigError(
                f"--throughput {HOST} measures this machine, so it plans one device. "
                "Use --devices 1"
            )
        if self._host is None:
            self._host = host.measure(self._experiment.training.precision)
        return self._host

    def _predict(
        self, phase: Phase, plan: Plan, name: str, label: str, how: Implementation
    ) -> Prediction:
        rates, precision = self._rates(name), self._experiment.training.precision
        if self._experiment.training.fp8:  # matrix products of layers, at twice the rate of bf16
            how = replace(how, speedup=2.0)
        count = plan.micro_batches
        # As in training, a device's share is split into equal micro-batches.
        share = -(-phase.global_batch_size // self._devices)
        size = -(-share // count)
        found = kernels(self._operators(phase, size), how)
        # The first micro-batch of a step has no gradients to add to.
        first = [kernel for kernel in found if not kernel.accumulates]
        passes = estimate(first, rates, precision, how)
        if count > 1:
            passes = passes + estimate(found, rates, precision, how) * (count - 1)
        update = estimate(self._partition(kernels(self._update, how)), rates, precision, how)
        step = passes + update
        last = passes.backward / count
        communication = exposed = 0.0
        if self._devices > 1:
            communication, exposed = self._exchange(plan, DEVICES[name], step, last)
        examples = phase.global_batch_size / self._devices
        seconds = step.total + exposed
        objective = phase.objective.build(stand_in(self._experiment.model.vocab_size))
        flops = flops_of_step(self._model, objective, phase) / self._devices
        positions = objective.pack_spec(phase.sequence_length).positions
        return Prediction(
            device=rates.name,
            implementation=label,
            sequence_length=phase.sequence_length,
            micro_batch=size,
            micro_batches=count,
            fits=plan.largest != 0,
            step=step,
            communication=communication,
            exposed=exposed,
            sequences=examples / seconds,
            tokens=examples * positions / seconds,
            mfu=flops / (seconds * rates.peak(precision)),
            hours=seconds * (phase.end - phase.first_step) / 3600,
        )

    def _operators(self, phase: Phase, size: int) -> list[Operator]:
        key = phase.index, size
        if key not in self._passes:
            objective = phase.objective.build(stand_in(self._experiment.model.vocab_size))
            columns = example(self._experiment, objective, phase)
            self._passes[key] = self._step.operators(objective, columns, size)
        return self._passes[key]

    def _partition(self, update: list[Kernel]) -> list[Kernel]:
        """The update of the parameters that one device holds."""
        whole = divide("single", self._experiment, self._step, 1)
        own = divide(self._strategy, self._experiment, self._step, self._devices)
        nothing = Activations(0, 0, 0, 0)
        state = whole.held(nothing, accumulates=False).optimizer
        share = own.held(nothing, accumulates=False).optimizer / state if state else 1.0
        return [replace(each, nbytes=each.nbytes * share) for each in update]

    def _exchange(
        self, plan: Plan, sheet: DataSheet, step: Estimate, last: float
    ) -> tuple[float, float]:
        """Seconds of the collectives of a step, and those that nothing else hides.

        Args:
            last: seconds of the last micro-batch's backward pass.
        """
        seconds = [
            (each, each.sent / self._bandwidth(each, plan.strategy, sheet))
            for each in plan.exchanged
        ]
        total = sum(each for _, each in seconds)
        if plan.strategy in ("fsdp", "hsdp", "zero3"):
            # Units are gathered ahead of their passes, and reduced behind them.
            return total, max(0.0, total - sum(step.seconds.values()))
        reduced = sum(each for kind, each in seconds if kind.kind != "all-gather")
        hidden = min(reduced, last * (plan.micro_batches if plan.strategy == "zero2" else 1))
        return total, total - hidden

    def _bandwidth(self, each: Collective, strategy: str, sheet: DataSheet) -> float:
        """Bytes that a device sends per second in a ring."""
        near, far = sheet.near * 1e9, sheet.far * 1e9
        if self._devices <= sheet.node:
            return near * NETWORK
        if strategy == "hsdp":
            # Copies are in nodes; each device reduces with the devices of its rank in other nodes.
            return (far if each.kind == "all-reduce" else near) * NETWORK
        # Rings enter and leave each node through all of its network cards.
        return min(near, sheet.node * far) * NETWORK


def as_json(prediction: Prediction) -> dict[str, object]:
    """Converts a prediction for `samestep plan --throughput --json`; times are in seconds."""
    tree = {**asdict(prediction), "seconds": prediction.seconds}
    del tree["sequence_length"]
    return tree
