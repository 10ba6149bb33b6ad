"""Counts what processes exchange in a training step, collective by collective, as the strategies
call for them.

For FSDP2 and HSDP it takes one process: the strategy's own code runs as one rank of many, in
PyTorch's fake process group, whose collectives return at once, and on tensors without memory. So a
step of T5-11B on 512 ranks can be counted on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.inspect.plan.batch import example, stand_in
from trainer.strategies import Strategy
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.phases import Phase

Kind: TypeAlias = Literal["all-gather", "reduce-scatter", "all-reduce", "broadcast"]

# Operators of torch.distributed: what they do, and which argument has the whole tensors.
_OPERATORS: dict[str, tuple[Kind, int]] = {
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::allgather_": ("all-gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::allreduce_coalesced_": ("all-reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
}
_LARGE = (
    2**10
)  # bytes; below are norms and counts (and biases, in models as small as those of tests)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the tensors of the collectives that are called while it is on, but for norms and
    counts.

    Attributes:
        nbytes: by kind.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: dict[Kind, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (name := func.name().partition(".")[0]) in _OPERATORS:
            kind, place = _OPERATORS[name]
            size = sum(
                tensor.nbytes for tensor in tree_leaves(args[place]) if isinstance(tensor, Tensor)
            )
            if size >= _LARGE:
                self.nbytes[kind] = self.nbytes.get(kind, 0) + size
        return func(*args, **(kwargs or {}))


def count_step(
    experiment: Experiment, phase: Phase, strategy: Strategy, rows: int, micro_batches: int
) -> dict[Kind, int]:
    """Takes two steps with a strategy's own code.

    Returns the bytes of the collectives in the second, by kind.

    In the first, ZeRO's stage 3 does not know yet in which order parameters are needed.

    Args:
        experiment: what is trained; of its own strategy nothing is used.
        phase: whose examples.
        strategy: what to count.
        rows: of a micro-batch.
        micro_batches: of a step.
    """
    objective = experiment.objective.build(stand_in(experiment.model.vocab_size))
    made = example(experiment, objective, phase)
    columns = {
        name: torch.from_numpy(column).expand(rows, *column.shape[1:]).contiguous()
        for name, column in made.items()
    }
    model: Any = experiment.model.build()
    model.activation_checkpointing = experiment.training.activation_checkpointing
    wrapped, optimizer = strategy.prepare(model, experiment.optimizer.build, _zeros)
    wrapped.train()
    totals = {name: torch.ones(()) for name in objective.weights(made)}
    for _ in range(2):
        with Collectives() as collectives:
            for number in range(micro_batches):
                with strategy.accumulate(last=number == micro_batches - 1):
                    with strategy.autocast():
                        loss = objective.loss(wrapped, columns, totals)
                    strategy.backward(loss.total)
            strategy.step(optimizer, strategy.clip_grad_norm(None))
    counted: dict[Kind, int] = collectives.nbytes
    return counted


def _zeros(_name: str, start: int, stop: int) -> Tensor:
    return torch.zeros(stop - start)


def count_fake(
    experiment: Experiment, phase: Phase, strategy: Any, devices: int, micro_batches: int
) -> dict[Kind, int]:
    """Counts a step of FSDP2 or HSDP, with micro-batches of one example, as rank 0 of processes
    that are not there.

    Args:
        experiment, phase, micro_batches: as for `count_step`.
        strategy: a configuration of `trainer.strategies.kinds.fsdp`.
        devices: ranks.
    """
    with _fake_world(devices) as world:
        built = strategy.build(
            CpuAccelerator(), world, experiment.training.precision
        )  # its mesh has real tensors
        with FakeTensorMode(allow_non_fake_inputs=True):
            return count_step(experiment, phase, built, 1, micro_batches)


@contextmanager
def _fake_world(size: int) -> Iterator[World]:
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield World(0, size, None, timedelta(minutes=1))
    finally:
        dist.destroy_process_group()
