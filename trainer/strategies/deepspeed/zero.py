"""ZeRO's partitions as segments.

All that is touched of DeepSpeed's internals, which are those of versions 0.19.

DeepSpeed gathers the parameters that a pass needs, and reduces gradients into the partition of each
process. Updates are not its business: the optimizer that it is given never takes a step.
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

from trainer.config import Tree
from trainer.partition import Segment, SegmentParameter


class Engine(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed around a model whose values are not there yet.

    Args:
        model: on the meta device; it gets memory on the device, or under stage 3 the partitions do.
        dtype: of the copy that passes work with.
        device: where they run.
        settings: as DeepSpeed's JSON.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, device: torch.device, settings: Tree
    ) -> None:
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
        deepspeed.ops.__compatible_ops__ = {}  # else it would compile collectives for gloo
        deepspeed.init_distributed()
        groups._WORLD_GROUP = dist.group.WORLD  # else it would make one with time-outs of its own
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
        """The original refuses fp16 on CPUs."""

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        """Any stage in any precision, where the original takes an optimizer of its own for stage 1
        in bf16.
        """
        return str(ZERO_OPTIMIZATION)

    def _broadcast_model(self) -> None:
        """There is nothing to tell the others."""

    def begin_backward(self, last: bool) -> None:
        """What an engine's `forward` and its hooks do.

        The model is called without it, as it would end autocast.

        Args:
            last: whether gradients are complete after this backward pass.
        """
        self.set_gradient_accumulation_boundary(last)
        self.optimizer.clear_backward_seen_flag()
        self._backward_prologue()

    def end_backward(self) -> None:
        """What hooks of gradients do where there are any.

        Stage 1 has none without contiguous gradients.
        """
        if self.optimizer._backward_active_depth:
            self._backward_epilogue()

    def partitions(self) -> Partitions:
        """What this process holds."""
        zero, group = self.optimizer, dist.group.WORLD
        if torch.device(zero.device).type != self.device.type:  # offloaded
            group = dist.new_group(backend="gloo")
        assert group is not None
        is_third = isinstance(zero, DeepSpeedZeroOptimizer_Stage3)
        return PartitionedParameters(zero, group) if is_third else PartitionedState(zero, group)


def _partition(model: nn.Module, dtype: torch.dtype, device: torch.device, settings: Tree) -> None:
    """Gives a meta model its partitions, module by module, so that no process ever holds it whole.

    From then on `torch.nn.functional.linear` is DeepSpeed's in this process: torch's own would keep
    a view of each gathered weight, and so the whole model, until the backward pass.
    """
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
    """Where the part of a parameter that is here lies.

    Its elements from `start` on are `flat[begin:end]`.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    start: int
    flat: Tensor
    begin: int
    end: int


class Partitions(ABC):
    """The part of the parameters that this process updates, in fp32, as segments in the memory of
    DeepSpeed.

    Args:
        zero: DeepSpeed's optimizer of the stage.
        group: can speak of tensors that lie where the partitions do.
    """

    def __init__(
        self, zero: DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3, group: dist.ProcessGroup
    ) -> None:
        self._zero, self._group = zero, group

    def segments(self) -> Iterator[tuple[nn.Parameter, SegmentParameter]]:
        """Each trained parameter with its local segment, which may be empty."""
        for parameter, shape, start, flat, begin, end in self._places():
            yield (
                parameter,
                SegmentParameter(flat.detach()[begin:end], Segment(shape, start, self._group)),
            )

    @abstractmethod
    def frozen(self, parameter: nn.Parameter) -> nn.Parameter:
        """What is here of a parameter that is not trained: the memory that passes work with."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """The gradients of the segments after the last backward pass of a step.

        DeepSpeed forgets them.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Brings the copies that passes work with up to date. Collective."""

    @abstractmethod
    def _places(self) -> Iterator[_Place]: ...


class PartitionedState(Partitions):
    """Stages 1 and 2: all parameters lie end to end in one flat tensor, which is cut into equal
    parts.
    """

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
            first = offset - dist.get_rank() * size
            begin, end = (min(max(place, 0), size) for place in (first, first + parameter.numel()))
            yield _Place(
                parameter,
                tuple(parameter.shape),
                begin - first if begin < end else 0,
                flat,
                begin,
                end,
            )


class PartitionedParameters(Partitions):
    """Stage 3: each parameter is cut into equal parts, the last one padded.

    Those of a process lie end to end.
    """

    def frozen(self, parameter: nn.Parameter) -> nn.Parameter:
        start, length = _part(cast(_Partitioned, parameter))
        own: Tensor = parameter.ds_tensor.data  # type: ignore[attr-defined]
        segment = Segment(tuple(parameter.ds_shape), start, self._group)  # type: ignore[attr-defined]
        return SegmentParameter(own.view(-1)[:length], segment, requires_grad=False)

    def gradients(self) -> list[Tensor]:
        zero = self._zero
        partitions = zero.get_fp32_grad_partitions()
        padded = [
            gradient
            for number in range(len(zero.fp16_groups))
            for gradient in partitions[number].values()
        ]
        zero.averaged_gradients = {}
        zero._pre_step()
        zero.zero_grad()
        places = self._places()
        return [
            gradient[: place.end - place.begin]
            for gradient, place in zip(padded, places, strict=True)
        ]

    def refresh(self) -> None:
        zero = self._zero
        zero._partition_all_parameters()
        for number in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if persistent := zero.persistent_parameters:
            persistent[0].all_gather(persistent)

    def _places(self) -> Iterator[_Place]:
        for flat, parameters in zip(
            self._zero.fp32_partitioned_groups_flat, self._zero.fp16_groups, strict=True
        ):
            begin = 0
            for parameter in parameters:
                start, length = _part(parameter)
                yield _Place(
                    parameter, tuple(parameter.ds_shape), start, flat, begin, begin + length
                )
                begin += parameter.partition_numel()


class _Partitioned(Protocol):
    """What DeepSpeed adds to a parameter under stage 3."""

    ds_numel: int

    def partition_numel(self) -> int: ...


def _part(parameter: _Partitioned) -> tuple[int, int]:
    """Where this process's part of a parameter begins under stage 3, and its length without
    padding.
    """
    size, whole = parameter.partition_numel(), parameter.ds_numel
    start = min(dist.get_rank() * size, whole)
    return start, min(size, whole - start)
