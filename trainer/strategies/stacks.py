"""Where a process is, read off its Python stacks.

Neither the thread that is looked at nor the device is asked.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

# Functions that stand for a part of the loop, in the order of a step; of those on a stack, the
# innermost counts.
PARTS = {
    ("data_pipeline.reading.loader", "StreamingLoader.__next__"): "data fetch",
    ("trainer.training.passes", "accumulate_gradients"): "forward",
    ("trainer.strategies", "Strategy.backward"): "backward",
    ("trainer.strategies.xla.spmd", "XlaSpmd.backward"): "backward",
    ("trainer.strategies", "Strategy.clip_grad_norm"): "optimizer",
    ("trainer.strategies", "Strategy.step"): "optimizer",
    ("trainer.accelerators.xla", "XlaAccelerator._compile"): "compilation",
    ("trainer.training.loop", "Trainer._log_training"): "logging",
    ("trainer.training.loop", "Trainer.evaluate"): "evaluation",
    ("trainer.training.loop", "Trainer.save"): "checkpoint",
    (
        "trainer.checkpoint.manager",
        "Checkpointer.settle",
    ): "checkpoint",  # of the last save, at the end of a run
}
ELSEWHERE = "the training loop"
_COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")


@dataclass(frozen=True)
class Place:
    """Where a thread is.

    Attributes:
        doing: the part of the loop.
        collective: the collective that it is in; "" if there is none. (What DDP waits for in a
            backward pass, and a GPU in any, is in no Python stack: it shows as "backward", or as
            what next waits for the device.)
        exact: each function on the stack, and the instruction that it has got to.
    """

    doing: str
    collective: str
    exact: tuple[tuple[int, int], ...]


def place_of(thread: int) -> Place:
    """Where the thread with this identifier is; it must be alive."""
    doing = collective = ""
    exact = []
    for frame in _outward(sys._current_frames()[thread]):
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        doing = doing or PARTS.get((module, name), "")
        if module in _COLLECTIVES:
            collective = name  # the outermost: an all_gather_object is made of others
        exact.append((id(frame.f_code), frame.f_lasti))
    return Place(doing or ELSEWHERE, collective, tuple(exact))


def all_stacks() -> str:
    """The stacks of all threads of this process, the main thread's first."""
    frames = sys._current_frames()
    stacks = [(thread.name, frames.get(thread.ident or 0)) for thread in threading.enumerate()]
    return "\n".join(
        f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in stacks if frame
    )


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
