"""Rewinding: after a fault, continue from an earlier checkpoint without the examples around it."""

from __future__ import annotations

from data_pipeline.order.exclusions import global_number
from trainer.training.loop import Trainer
from trainer.training.phases import phase_of


def rewind(trainer: Trainer, fault: str) -> None:
    """Restores a checkpoint and skips the examples of the faulty step and the steps around it.

    It takes the newest checkpoint from before all of these steps. If this data order has none, only
    the faulty step is skipped. Checkpoints after the chosen one are removed, so a restart continues
    from it, too. The caller must reopen the run's trackers, cut back to the new step. Collective.

    Args:
        trainer: at the faulty step, which was not taken.
        fault: description of the fault.
    """
    phase, around, taken = trainer.phase, trainer.config.faults.around, trainer.state.step
    step = trainer.checkpoints.durable.latest(most=taken - around)
    target = None if step is None else phase_of(trainer.phases, step)
    if step is None or target is None or target.order != phase.order:
        # Part of the ledger's hash chain: the wording must not change.
        reason = (
            "no checkpoint of this data order is from before the steps to pass over, so only the "
            "step is skipped"
        )
        trainer.skip_examples(trainer.loader.consumed, f"{fault}; {reason}")
        return
    # The loader's position counts the faulty step, whose examples are from `faulty` to `end`.
    fault_place, consumed = trainer.loader.state_dict(), trainer.loader.consumed
    faulty, end = consumed[0][0], consumed[-1][1]
    trainer.checkpoints.discard_after(step)
    trainer.restore(step)
    trainer.record_order()
    place = trainer.loader.state_dict()
    # Global examples to skip, for batches of 10 and around=2: step 8, with [70, 80), is faulty, so
    # [50, 100) are skipped. Where the batch size has changed on the way, counting back in the
    # current size may reach beyond the checkpoint: not further than its position.
    size = phase.global_batch_size
    first = max(fault_place["example"] - size - around * size, place["example"])
    first = global_number(first, fault_place["excluded"])
    # A mixture that changes after excluded examples changes later, so a range across a change would
    # give the numbers after it to other examples.
    changes = [number for number, _ in fault_place["mixture"] if number <= faulty]
    ranges = [[max([first, *changes]), end + around * size]]
    # Exclusions made since the checkpoint are in the future again. Repeat them.
    position = global_number(place["example"], place["excluded"])
    for begin, stop in fault_place["excluded"]:
        later = [max(begin, position), stop]
        if stop > position and later not in place["excluded"]:
            ranges.append(later)
    trainer.skip_examples(ranges, f"{fault} at step {taken + 1}, gone back to step {step}")
