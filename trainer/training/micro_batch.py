"""How many examples fit into a device's memory at a time: `micro_batch_size: auto`, and the hint when memory runs out.

The memory of a forward and backward pass is a constant (weights, gradients, optimizer state) plus so much for each
example. Passes over 1, 2, 4, ... real examples tell both, and how far one can go; none of them is to run out of memory,
because after a failed one the ranks would wait for each other's collectives for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from trainer.objectives import Objective
from trainer.strategies import Strategy
from trainer.training.passes import Loader, accumulate_gradients

logger = logging.getLogger(__name__)

SHARE = 0.9  # of the memory; the rest is for what fragmentation wastes and for collectives' buffers
_CELLS = 4096  # of a micro-batch where memory is not measured; larger ones are no faster on a CPU


def without_probe(most: int, cells: int) -> int:
    """The micro-batch where memory sets no limit that could be measured, as on the CPU and under XLA.

    Args:
        most: examples that a device has to do in a step.
        cells: of an example.
    """
    return max(1, min(most, _CELLS // cells))


def largest(peak: Callable[[int], int], budget: int, most: int) -> int:
    """The most examples, up to `most`, with which a pass stays inside the budget.

    Args:
        peak: runs a pass over so many examples and returns the most bytes held in it; with 0, those held without one.
        budget: bytes.
        most: examples that there is work for.

    Returns:
        At least 1, even if a single example is too much.
    """
    fits, rows, used = 1, 1, peak(1)
    each = used - peak(0)
    while used <= budget:
        fits = rows
        more = min(2 * rows, most, rows + (budget - used) // max(1, each))
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
    """Measures how many examples fit on the devices of all ranks alike. Collective; parameters stay as they are.

    Args:
        model, optimizer: as `strategy.prepare` returns them; the optimizer has its state, which takes memory, too.
        objective: what is computed.
        strategy: that of the model.
        open_loader: opens a loader whose steps are micro-batches of so many examples.
        most: examples that a device has to do in a step.

    Returns:
        The number of examples, or None where the device has no memory of its own.
    """
    accelerator = strategy.accelerator
    memory = accelerator.memory()
    if memory is None:
        return None
    model.train()

    def over_ranks(value: int) -> int:
        return int(strategy.all_reduce(torch.tensor(value), "max"))

    def peak(rows: int) -> int:
        for parameter in (
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ):
            parameter.grad = torch.zeros_like(parameter)
        accelerator.reset_peak_memory()
        if rows:
            loader = open_loader(rows)
            accumulate_gradients(model, objective, strategy, next(iter(loader)))
            loader.close()
        optimizer.zero_grad(set_to_none=True)
        return over_ranks(accelerator.peak_memory() or 0)

    with torch.compiler.set_stance("force_eager"):  # or each size would be compiled for
        return largest(peak, -over_ranks(-int(SHARE * memory)), most)
