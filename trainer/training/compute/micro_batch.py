"""Measures how many examples fit into a device's memory, for `micro_batch_size: auto`.

The memory of a forward and backward pass is a constant (weights, gradients, optimizer state) plus
an amount for each example. Passes over 1, 2, 4, ... real examples tell both, and how far to go. No
pass may run out of memory: after a failed one, the other ranks would wait for its collectives for
ever.

With `training.compile`, each size has its own graphs, which take seconds to compile, and their
memory counts. So few sizes are tried, and the graphs of the last one stay for the run. The
pass over one example is not compiled: it takes more memory than a compiled one, so the next size,
which is predicted from it, fits. Where the size is set, nothing is measured.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from samestep.config import to_tree
from samestep.errors import SamestepError
from samestep.hashing import json_hash
from samestep.storage.local import write_text
from samestep.stored_json import Count, read_json
from trainer.objectives import Objective
from trainer.strategies import Strategy
from trainer.training.experiment import Experiment
from trainer.training.passes import Loader, accumulate_gradients
from trainer.training.phases import Phase

logger = logging.getLogger(__name__)

SHARE = 0.9  # of the memory; the rest is for fragmentation and for collectives' buffers


def largest(peak: Callable[[int], int], budget: int, most: int, sparse: bool = False) -> int:
    """Returns the largest number of examples, at most `most`, whose pass stays in the budget.

    The size at most doubles from one pass to the next, and never goes beyond the prediction from
    the last two passes. Example: 2 GiB without a pass, 3 GiB with 1 example, a budget of 10 GiB. So
    1 GiB an example, and 8 would fit: the passes are over 1, 2, 4 and 8 examples.

    Args:
        peak: runs a pass over a number of examples and returns the peak memory in bytes; for 0
            examples, the memory without a pass.
        budget: bytes.
        sparse: whether to try few sizes: a size may be more than twice the one before, and fills
            the micro-batches of a step evenly (of 100 examples 50 instead of 60, as both take two).

    Returns:
        At least 1, even if a single example is too much.
    """
    fits, rows, used = 1, 1, peak(1)
    start = peak(0)
    previous_rows, previous_used = 0, start
    while used <= budget:
        fits = rows
        each = max(1, (used - previous_used) // (rows - previous_rows))
        more = min(2 * rows, most, rows + (budget - used) // each)
        if sparse:
            # As if all memory of the pass were the examples': this is never too much, however far
            # it goes.
            in_proportion = rows * (budget - start) // max(1, used - start)
            more = min(most, max(more, in_proportion))
            more = -(-most // -(-most // more))
        if more == rows:
            break
        if rows > 1 or not sparse:  # no prediction mixes passes with and without compiling
            previous_rows, previous_used = rows, used
        rows, used = more, peak(more)
    return fits


def probe(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    strategy: Strategy,
    open_loader: Callable[[int], Loader],
    most: int,
    memory: int,
    compiles: bool = False,
) -> int:
    """Measures how many examples fit on every device. Collective; parameters stay as they are.

    Args:
        model, optimizer: as `strategy.prepare` returns them. The optimizer must have its state,
            which takes memory, too.
        open_loader: opens a loader of micro-batches of a number of examples.
        most: examples of a device in a step.
        memory: bytes of this device.
        compiles: whether layers are compiled.
    """
    accelerator = strategy.accelerator
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
            with _new_graphs(rows) if compiles else nullcontext():
                accumulate_gradients(model, objective, strategy, next(iter(loader)))
            loader.close()
        optimizer.zero_grad(set_to_none=True)
        return over_ranks(accelerator.peak_memory() or 0)

    # The smallest device decides: the minimum, as minus the maximum of the negative values.
    budget = -over_ranks(-int(SHARE * memory))
    return largest(peak, budget, most, sparse=compiles)


@contextmanager
def _new_graphs(rows: int) -> Iterator[None]:
    """Surrounds a pass that compiles new graphs, and none for a single example."""
    torch.compiler.reset()  # forgets the graphs of the size before
    with torch.compiler.set_stance("force_eager" if rows == 1 else "default"):
        yield


def with_micro_batch(
    phase: Phase,
    experiment: Experiment,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    strategy: Strategy,
    open_split: Callable[[Phase], Loader],
    memory: int,
) -> Phase:
    """Resolves a phase's micro-batch size: as set, or what fits into the devices' memory.

    Args:
        memory: bytes of this device.
    """
    # 100 examples on 3 devices are at most 34 per device.
    devices, wanted = strategy.replica.count * strategy.replica.devices, phase.micro_batch_size
    most = -(-phase.global_batch_size // devices)
    compiles = experiment.training.compile
    # Units of bitwise runs have the same size on all devices, and other sizes than the one that is
    # set would have to be compiled.
    if wanted != "auto" and (experiment.training.is_bitwise or compiles):
        return phase
    if wanted != "auto":
        most = min(wanted, most)

    def open_sized(rows: int) -> Loader:
        # Two if a step has several: during the second, the first one's gradients are in memory,
        # whole under FSDP2.
        examples = rows * devices
        if examples < phase.global_batch_size:
            examples *= 2
        return open_split(replace(phase, micro_batch_size=rows, global_batch_size=examples))

    # Measured even if the size is set: a message for a lack of memory names a size that fits.
    measure = partial(
        probe, model, optimizer, objective, strategy, open_sized, most, memory, compiles
    )
    fits = _once(measure, experiment, strategy, [phase.index, most])
    return replace(phase, micro_batch_size=fits if wanted == "auto" else wanted, fits=fits)


def _once(
    measure: Callable[[], int],
    experiment: Experiment,
    strategy: Strategy,
    subject: Sequence[int],
) -> int:
    """What `measure` finds, or found at an earlier start of the run on such devices. Collective.

    The run's folder keeps it, in `micro_batch.json`.

    Args:
        subject: what is measured, besides the experiment.
    """
    device = [strategy.accelerator.description, strategy.replica.count, torch.__version__]
    key = json_hash([*device, *subject, to_tree(experiment)])[:16]
    file = Path(experiment.output) / "micro_batch.json"
    # Rank 0 reads for all: the others may not see its folder.
    known = _read(file) if strategy.world.rank == 0 else {}
    if found := int(strategy.all_reduce(torch.tensor(known.get(key, 0)), "max")):
        return found
    measured = measure()
    if strategy.world.rank == 0:
        write_text(file, json.dumps(known | {key: measured}, indent=1) + "\n")
    return measured


def _read(file: Path) -> dict[str, int]:
    try:
        return read_json(file, dict[str, Count])
    except (OSError, ValueError):  # it does not exist, or was damaged: measure again
        return {}


def out_of_memory(
    experiment: Experiment, strategy: Strategy, phase: Phase | None, error: Exception
) -> SamestepError:
    """Explains a lack of device memory, in a phase or (None) before the first step."""
    lower = ""
    size = None if phase is None else phase.micro_batch_size
    if phase is not None and isinstance(size, int) and size > 1:
        smaller = phase.fits if phase.fits is not None and phase.fits < size else size // 2
        section = f"phases.{phase.index}" if experiment.phases else "training"
        changes = "memory and speed only"
        if experiment.training.is_bitwise:
            changes = "the bits of the result, so it needs a new run"
        lower = f"set {section}.micro_batch_size={smaller} (it is {size}; it changes {changes}), "
    return SamestepError(
        f"the memory of {strategy.accelerator.description} is used up: {error}; {lower}set "
        "training.activation_checkpointing=true, or use more devices"
    )
