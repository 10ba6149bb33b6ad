"""Finds the part of the training loop that a process executes, from its Python stacks.

Neither the observed thread nor the device takes part.
"""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass

# (module, function) -> the part of the loop that it stands for, in the order of a step. If several
# are on a stack, the innermost counts.
PARTS = {
    ("data_pipeline.reading.loader", "StreamingLoader.__next__"): "data fetch",
    ("trainer.training.passes", "accumulate_gradients"): "forward",
    ("trainer.strategies", "Strategy.backward"): "backward",
    ("trainer.strategies.xla.spmd", "XlaSpmd.backward"): "backward",
    ("trainer.strategies", "Strategy.clip_grad_norm"): "optimizer",
    ("trainer.strategies", "Strategy.step"): "optimizer",
    ("trainer.accelerators.kinds.xla", "XlaAccelerator._compile"): "compilation",
    ("trainer.training.loop", "Trainer._log_training"): "logging",
    ("trainer.training.loop", "Trainer.evaluate"): "evaluation",
    ("trainer.training.loop", "Trainer.save"): "checkpoint",
    ("trainer.training.checkpoints", "Checkpoints.wait_for_snapshot"): "checkpoint",
    # Waits for the last save at the end of a run.
    ("trainer.checkpoint.manager", "Checkpointer.settle"): "checkpoint",
}
ELSEWHERE = "the training loop"
_COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")


@dataclass(frozen=True)
class Place:
    """The place of a thread in the program.

    Attributes:
        doing: the part of the loop.
        collective: the name of the collective that it waits in, or "". DDP waits in C++ during a
            backward pass, and a GPU after the host has gone on; neither shows in a Python stack.
            The thread is in "backward" then, or in the part that waits for the device next.
        exact: each function on the stack, and the current instruction in it.
    """

    doing: str
    collective: str
    exact: tuple[tuple[int, int], ...]


def place_of(thread: int) -> Place:
    """The place of the living thread with this identifier."""
    doing = collective = ""
    exact = []
    for frame, _ in traceback.walk_stack(sys._current_frames()[thread]):  # innermost first
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        doing = doing or PARTS.get((module, name), "")
        if module in _COLLECTIVES:
            collective = name  # the outermost: an all_gather_object consists of others
        exact.append((id(frame.f_code), frame.f_lasti))
    return Place(doing or ELSEWHERE, collective, tuple(exact))


def all_stacks() -> str:
    """The stacks of all threads of this process, the main thread's first."""
    frames = sys._current_frames()
    stacks = [(thread.name, frames.get(thread.ident or 0)) for thread in threading.enumerate()]
    return "\n".join(
        f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in stacks if frame
    )
