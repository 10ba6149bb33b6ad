"""ZeRO's partitions as segments, and all accesses to the internals of DeepSpeed 0.19.

DeepSpeed gathers the parameters that a pass needs, and reduces gradients into the partition of each
rank. It makes no updates: the optimizer that it gets never takes a step.

For example, parameters A [2, 3] and B [4] on 2 ranks are partitioned as

    stages 1, 2   A and B lie end to end in 10 elements: rank 0 has elements 0 to 4 of A, and rank 1
                  has element 5 of A, and B
    stage 3       rank 0 has elements 0 to 2 of A, and 0 and 1 of B; rank 1 has the others
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple, Protocol, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch import Tensor, nn

from samestep.config import Tree
from trainer.partition import Segment, SegmentParameter
from trainer.strategies.world import World


class Engine(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's engine around a model without initial values.

    Args:
        model: on the meta device. It gets memory on the device; under stage 3, partitions do.
        dtype: of the copy that passes use.
        device: of the passes.
        settings: as in DeepSpeed's JSON.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, device: torch.device, settings: Tree
    ) -> None:
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
        # Without these, DeepSpeed would compile collectives for gloo, and create a process group
        # with time-outs of its own.
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed()
        groups._WORLD_GROUP = dist.group.WORLD
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        if settings[ZERO_OPTIMIZATION]["stage"] == 3:
            _partition(model, dtype, device, settings)
        else:
            model.to_empty(device=device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.0)
        super().__init__(
            None, model, optimizer, config=settings, config_class=DeepSpeedConfig(settings)
        )

    def _do_sanity_check(self) -> None:
        """Does nothing: DeepSpeed's own check rejects fp16 on CPUs."""

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        """Uses ZeRO's optimizer in every precision; DeepSpeed has another for stage 1 in bf16."""
        return str(ZERO_OPTIMIZATION)

    def _broadcast_model(self) -> None:
        """Does nothing: there are no values yet."""

    def begin_backward(self, last: bool) -> None:
        """Prepares a backward pass, as the engine's `forward` and its hooks do.

        Passes call the model without the engine, whose `forward` would disable autocast.

        Args:
            last: whether gradients are complete after this backward pass.
        """
        self.set_gradient_accumulation_boundary(last)
        self.optimizer.clear_backward_seen_flag()
        self._backward_prologue()

    def end_backward(self) -> None:
        """Ends a backward pass, unless the hooks of gradients have done so.

        Stage 1 has no hooks without contiguous gradients.
        """
        if self.optimizer._backward_active_depth:
            self._backward_epilogue()

    def partitions(self, world: World) -> Partitions:
        """The partitions of this process."""
        zero, group = self.optimizer, dist.group.WORLD
        if torch.device(zero.device).type != self.device.type:  # offloaded to the host
            group = world.host_group()
        assert group is not None
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            return PartitionedParameters(zero, group)
        return PartitionedState(zero, group)


def _partition(model: nn.Module, dtype: torch.dtype, device: torch.device, settings: Tree) -> None:
    """Partitions a meta model under stage 3, one module at a time: no process ever holds it whole.

    As a side effect, `torch.nn.functional.linear` is DeepSpeed's in this process. torch's own would
    keep a view of each gathered weight until the backward pass, and so the whole model.
    """
    # `Init` of the first module sets DeepSpeed up; its parameter then converts the others'
    # parameters.
    first: nn.Parameter | None = None
    for module in reversed(list(model.modules())):
        if own := list(module.parameters(recurse=False)):
            module.to_empty(device=device, recurse=False)
            own = list(module.parameters(recurse=False))
            if first is None:
                first = own[0]
                deepspeed.zero.Init(module, config_dict_or_path=settings, dtype=dtype)
            else:
                first.convert_to_zero_parameters(own)  # type: ignore[attr-defined]


class _Place(NamedTuple):
    """The position of a local segment in DeepSpeed's memory.

    Attributes:
        parameter: the parameter.
        shape: of the whole parameter.
        start: first element of the segment in the flattened parameter.
        flat: DeepSpeed's memory: the segment is `flat[begin:end]`.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    start: int
    flat: Tensor
    begin: int
    end: int


class Partitions(ABC):
    """The fp32 parameters that this process updates, as segments in DeepSpeed's memory.

    Args:
        zero: DeepSpeed's optimizer of the stage.
        group: for collectives of tensors on the partitions' device.
    """

    def __init__(
        self, zero: DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3, group: dist.ProcessGroup
    ) -> None:
        self._zero, self._group = zero, group

    def segments(self) -> Iterator[tuple[nn.Parameter, SegmentParameter]]:
        """Each trained parameter with its local segment, which may be empty."""
        for parameter, shape, start, flat, begin, end in self._places():
            segment = Segment(shape, start, self._group)
            yield parameter, SegmentParameter(flat.detach()[begin:end], segment)

    @abstractmethod
    def frozen(self, parameter: nn.Parameter) -> nn.Parameter:
        """The local part of a parameter that is not trained, in the memory that passes use."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Takes the segments' gradients from DeepSpeed, after the last backward pass of a step."""

    @abstractmethod
    def refresh(self) -> None:
        """Updates the copies that passes use. A collective."""

    @abstractmethod
    def _places(self) -> Iterator[_Place]: ...


class PartitionedState(Partitions):
    """Stages 1 and 2: all parameters lie end to end in a flat tensor, split into equal parts."""

    def frozen(self, parameter: nn.Parameter) -> nn.Parameter:
        return parameter

    def gradients(self) -> list[Tensor]:
        zero = self._zero
        if zero.cpu_offload:
            flat = zero.single_partition_of_fp32_groups[0].grad
            zero.reset_cpu_buffers()
            zero._offload_accumulated_param_ids = set()
        elif (flat := zero._get_preflattened_grad_partition(0)) is None:
            flat = torch.cat([gradient.flatten() for gradient in zero.averaged_gradients[0]])
        zero.averaged_gradients[0] = zero.all_grad_tensors[0] = None
        zero.micro_step_id = INITIAL_MICRO_STEP_ID
        zero.zero_grad()
        return [flat[place.begin : place.end] for place in self._places()]

    def refresh(self) -> None:
        self._zero.update_lp_params()

    def _places(self) -> Iterator[_Place]:
        zero = self._zero
        size, flat = int(zero.partition_size[0]), zero.single_partition_of_fp32_groups[0]
        for parameter, offset in zip(
            zero.round_robin_bit16_groups[0], zero.round_robin_bit16_offsets[0], strict=True
        ):
            # In this rank's partition, elements [0, size), the parameter is [first, last), which
            # may begin before it or end after it. In the module's example rank 1 has A at
            # [-5, 1) and B at [1, 5).
            first = offset - dist.get_rank() * size
            last = first + parameter.numel()
            begin, end = min(max(first, 0), size), min(max(last, 0), size)
            start = begin - first if begin < end else 0
            yield _Place(parameter, tuple(parameter.shape), start, flat, begin, end)


class PartitionedParameters(Partitions):
    """Stage 3: each parameter is split into equal parts, the last one padded.

    The parts of a rank lie end to end.
    """

    def frozen(self, parameter: nn.Parameter) -> nn.Parameter:
        start, length = _part(cast(_Partitioned, parameter))
        own: Tensor = parameter.ds_tensor.data  # type: ignore[attr-defined]
        shape = tuple(parameter.ds_shape)  # type: ignore[attr-defined]
        segment = Segment(shape, start, self._group)
        return SegmentParameter(own.view(-1)[:length], segment, requires_grad=False)

    def gradients(self) -> list[Tensor]:
        zero = self._zero
        partitions = zero.get_fp32_grad_partitions()  # by group, then by parameter
        padded: list[Tensor] = []
        for number in range(len(zero.fp16_groups)):
            padded += partitions[number].values()
        # Resets DeepSpeed, as its own step would.
        zero.averaged_gradients = {}
        zero._pre_step()
        zero.zero_grad()
        places = zip(padded, self._places(), strict=True)
        return [gradient[: place.end - place.begin] for gradient, place in places]

    def refresh(self) -> None:
        zero = self._zero
        zero._partition_all_parameters()
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if persistent := zero.persistent_parameters:
            persistent[0].all_gather(persistent)

    def _places(self) -> Iterator[_Place]:
        zero = self._zero
        groups = zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        for flat, parameters in groups:
            begin = 0
            for parameter in parameters:
                start, length = _part(parameter)
                shape = tuple(parameter.ds_shape)
                yield _Place(parameter, shape, start, flat, begin, begin + length)
                begin += parameter.partition_numel()  # with padding


class _Partitioned(Protocol):
    """The attributes that DeepSpeed adds to a parameter under stage 3."""

    ds_numel: int

    def partition_numel(self) -> int: ...


def _part(parameter: _Partitioned) -> tuple[int, int]:
    """The start of this rank's part of a parameter under stage 3, and its length without padding.

    Of 5 elements on 2 ranks, rank 0 has 3 from element 0, and rank 1 has 2 from element 3.
    """
    size, whole = parameter.partition_numel(), parameter.ds_numel
    start = min(dist.get_rank() * size, whole)
    return start, min(size, whole - start)
