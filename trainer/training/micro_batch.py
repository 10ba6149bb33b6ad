"""Measures how many examples fit into a device's memory, for `micro_batch_size: auto`.

The memory of a forward and backward pass is a constant (weights, gradients, optimizer state) plus
an amount for each example. Passes over 1, 2, 4, ... real examples tell both, and how far to go. No
pass may run out of memory: after a failed one, the other ranks would wait for its collectives for
ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from trainer.errors import SamestepError
from trainer.objectives import Objective
from trainer.strategies import Strategy
from trainer.training.experiment import Experiment
from trainer.training.passes import Loader, accumulate_gradients
from trainer.training.phases import Phase

logger = logging.getLogger(__name__)

SHARE = 0.9  # of the memory; the rest is for fragmentation and for collectives' buffers
_POSITIONS = 4096  # of a micro-batch without measured memory; larger ones are no faster on a CPU


def without_probe(most: int, positions: int) -> int:
    """Returns a micro-batch size without measuring memory, as on the CPU and under XLA.

    Args:
        most: examples of a device in a step.
        positions: of an example.
    """
    return max(1, min(most, _POSITIONS // positions))


def largest(peak: Callable[[int], int], budget: int, most: int) -> int:
    """Returns the largest number of examples, at most `most`, whose pass stays in the budget.

    The size at most doubles from one pass to the next, and never goes beyond the prediction from
    the last two passes. Example: 2 GiB without a pass, 3 GiB with 1 example, a budget of 10 GiB. So
    1 GiB an example, and 8 would fit: the passes are over 1, 2, 4 and 8 examples.

    Args:
        peak: runs a pass over a number of examples and returns the peak memory in bytes; for 0
            examples, the memory without a pass.
        budget: bytes.

    Returns:
        At least 1, even if a single example is too much.
    """
    fits, rows, used = 1, 1, peak(1)
    each = used - peak(0)
    while used <= budget:
        fits = rows
        predicted = rows + (budget - used) // max(1, each)
        more = min(2 * rows, most, predicted)
        if more == rows:
            break
        before, used = used, peak(more)
        each, rows = (used - before) // (more - rows), more
    return fits


def probe(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    strategy: Strategy,
    open_loader: Callable[[int], Loader],
    most: int,
) -> int | None:
    """Measures how many examples fit on every device. Collective; parameters stay as they are.

    Args:
        model, optimizer: as `strategy.prepare` returns them. The optimizer must have its state,
            which takes memory, too.
        open_loader: opens a loader of micro-batches of a number of examples.
        most: examples of a device in a step.

    Returns:
        The number of examples, or None for a device without memory of its own.
    """
    accelerator = strategy.accelerator
    memory = accelerator.memory()
    if memory is None:
        return None
    model.train()

    def over_ranks(value: int) -> int:
        return int(strategy.all_reduce(torch.tensor(value), "max"))

    def peak(rows: int) -> int:
        # As in a later micro-batch of a step, the gradients of all parameters are there.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        accelerator.reset_peak_memory()
        if rows:
            loader = open_loader(rows)
            accumulate_gradients(model, objective, strategy, next(iter(loader)))
            loader.close()
        optimizer.zero_grad(set_to_none=True)
        return over_ranks(accelerator.peak_memory() or 0)

    # The smallest device decides: the minimum, as minus the maximum of the negative values.
    budget = -over_ranks(-int(SHARE * memory))
    with torch.compiler.set_stance("force_eager"):  # or each size would be compiled for
        return largest(peak, budget, most)


def out_of_memory(
    experiment: Experiment, strategy: Strategy, phase: Phase | None, error: Exception
) -> SamestepError:
    """Explains a lack of device memory, in a phase or (None) before the first step."""
    lower = ""
    size = None if phase is None else phase.micro_batch_size
    if phase is not None and isinstance(size, int) and size > 1:
        smaller = phase.fits if phase.fits is not None and phase.fits < size else size // 2
        section = f"phases.{phase.index}" if experiment.phases else "training"
        lower = (
            f"set {section}.micro_batch_size={smaller} (it is {size}; it changes memory and speed "
            "only), "
        )
    return SamestepError(
        f"the memory of {strategy.accelerator.description} is used up: {error}; {lower}set "
        "training.activation_checkpointing=true, or use more devices"
    )
