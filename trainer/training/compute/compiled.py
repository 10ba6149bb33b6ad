"""Layers under torch.compile: a static graph for each shape, and an error instead of eager layers.

Layers are compiled one by one. All share the code of `nn.Module`'s call, so equal layers share
graphs, and Dynamo counts the graphs of a whole model, and of a teacher, against one limit. A graph
is for one combination of:

    the layer's configuration, and whether it computes all positions (the last layer does not)
    rows and positions of a micro-batch: each phase has its own
    training or evaluation

BERT with two phases and evaluation needs 8. Dynamo's own limit is 8, after which it runs further
shapes in eager mode and only logs a warning.

The values of a batch never choose a graph: a rank that compiled in the middle of a phase, because
of its own data, would let all others wait for seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from samestep.environment import number
from samestep.errors import ConfigError, SamestepError
from trainer.accelerators import Accelerator
from trainer.models import Model

LIMIT = 64
"""The most graphs of one piece of code, such as a layer."""

# torch._dynamo is imported by the functions that need it: it takes as long as half of torch.


def compile_units(model: Model, accelerator: Accelerator, many_widths: bool = False) -> None:
    """Compiles each of a model's units in place, before a strategy wraps them.

    Args:
        accelerator: of the run; it knows the options of torch.compile.
        many_widths: whether the width of batches varies (`data.group_by_length`). Graphs then have
            symbolic sizes from the second width on.

    Raises:
        ConfigError: the model has no such units.
    """
    import torch._dynamo.config as dynamo

    if not model.compiled_units():
        raise ConfigError(
            "training.compile is true, and this model has no layers to compile. Set it to false."
        )
    dynamo.recompile_limit = LIMIT
    # A limit that is hit would leave layers in eager mode, at half the throughput, unnoticed.
    dynamo.fail_on_recompile_limit_hit = True
    # Dynamo would split a layer's graph where a bucket of DDP ends, to overlap communication.
    # Layers are separate graphs already, and DDP's hooks run between them.
    dynamo.optimize_ddp = False
    # With None, graphs have symbolic sizes once a size has changed. They are slower for all shapes,
    # and each mask and last layer has several before its sizes are symbolic.
    options = {"dynamic": None if many_widths else False, **accelerator.compile_options}
    if options["backend"] == "inductor":
        _share_cores()
    for unit in model.compiled_units():
        unit.compile(**options)
        _explain(unit)


def graphs() -> int:
    """The number of graphs that this process has compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _share_cores() -> None:
    """Divides the compiler's worker processes among the ranks of this machine.

    By default, each rank has one for each core, 32 at most: 256 with 8 GPUs. All compile at the
    same time, and a rank that waits for its graphs holds up the others.
    """
    import torch._inductor.config as inductor

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        ranks = max(1, number("LOCAL_WORLD_SIZE", 1))
        inductor.compile_threads = max(1, min(32, len(os.sched_getaffinity(0)) // ranks))


def _explain(unit: nn.Module) -> None:
    """Lets a compiled unit raise an error that names the settings that change shapes."""
    # Its own call, as `nn.Module.compile` leaves it. The backward pass calls the unit again if it
    # recomputes activations, so no caller of the model would see all errors.
    own = unit._compiled_call_impl
    assert own is not None
    unit._compiled_call_impl = partial(_call, own)


def _call(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    try:
        return compiled(*args, **kwargs)
    except FailOnRecompileLimitHit as error:
        raise SamestepError(
            f"training.compile needs more than {LIMIT} graphs of a layer, because the shapes of "
            "batches keep changing. Set data.group_by_length=null, let phases and evaluation "
            "share micro-batch sizes, or set training.compile=false. TORCH_LOGS=recompiles shows "
            "what has changed."
        ) from error
