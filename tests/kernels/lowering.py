"""Lowers a compiled layer for a GPU that does not exist, as far as its list of kernels.

torch.compile's passes run as for a real GPU, up to the scheduler, which decides what is fused.
No code is generated, and the graphs themselves run on the CPU, operation by operation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._inductor.compile_fx import compile_fx, record_original_output_strides
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    NopKernelSchedulerNode,
)
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

_GPU = torch.device("cuda", 0)
_H100 = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 * 2**30,
)
_INTERFACE = "torch._dynamo.device_interface.CudaInterface"
_PATCHES = {
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda.get_device_properties": lambda *_: _H100,
    "torch.cuda.get_device_capability": lambda *_: (_H100.major, _H100.minor),
    "torch._inductor.scheduler.has_triton": lambda *_: True,
    f"{_INTERFACE}.get_device_properties": lambda *_: _H100,
    f"{_INTERFACE}.Worker.get_device_properties": lambda *_: _H100,
    f"{_INTERFACE}.get_compute_capability": lambda *_: 90,
}


@dataclass(frozen=True)
class Kernel:
    """A kernel of a graph.

    Attributes:
        library: whether a library computes it, as a matrix product.
        operations: names of the operations that it computes, or whose results it recomputes.
        moved: bytes that it reads and writes.
    """

    library: bool
    operations: frozenset[str]
    moved: int


@dataclass
class Lowering:
    """A back-end for torch.compile that keeps the kernels of each graph, in their order."""

    forward: list[Kernel] = field(default_factory=list)
    backward: list[Kernel] = field(default_factory=list)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx(graph, inputs, inner_compile=self._lower)

    def _lower(
        self,
        module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        *,
        is_backward: bool = False,
        **_: Any,
    ) -> Callable[..., Any]:
        lowered = copy.deepcopy(module)
        record_original_output_strides(lowered)
        post_grad_passes(lowered, is_inference=False)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        _move_to_gpu(lowered, mode)
        fake = [_on_gpu(each, mode) for each in inputs]
        with V.set_fake_mode(mode), _pretended_gpu():
            graph = GraphLowering(lowered, example_inputs=fake, is_backward=is_backward)
            with (
                V.set_graph_handler(graph),
                V.set_debug_handler(DebugContext()),
                V.set_extern_kernel_nodes([]),
            ):
                graph.run(*fake)
                graph.init_wrapper_code()
                graph._update_scheduler()
                found = [_kernel(node) for node in graph.scheduler.nodes if _computes(node)]
        (self.backward if is_backward else self.forward).extend(found)
        boxed: Callable[..., Any] = make_boxed_func(module.forward)
        return boxed


@contextmanager
def _pretended_gpu() -> Iterator[None]:
    with ExitStack() as patches:
        for name, replacement in _PATCHES.items():
            patches.enter_context(patch(name, replacement))
        yield


def _on_gpu(value: Any, mode: FakeTensorMode) -> Any:
    """A tensor without memory of the same layout on the pretended GPU; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_GPU)


def _move_to_gpu(module: torch.fx.GraphModule, mode: FakeTensorMode) -> None:
    for node in module.graph.nodes:
        # Constants, as the shifts of dropout's hash, stay on the host.
        if "val" in node.meta and node.op != "get_attr":
            node.meta["val"] = tree_map(lambda value: _on_gpu(value, mode), node.meta["val"])
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": _GPU}


def _computes(node: BaseSchedulerNode) -> bool:
    return not isinstance(node, NopKernelSchedulerNode)


def _kernel(node: BaseSchedulerNode) -> Kernel:
    origins = {
        str(origin.target).removeprefix("aten.").partition(".")[0]
        for each in node.get_nodes()
        if each.node is not None
        for origin in each.node.get_origins()
        if origin.op == "call_function"
    }
    return Kernel(
        isinstance(node, ExternKernelSchedulerNode),
        frozenset(origins),
        int(node.get_read_write_buffers_sizes()),
    )
