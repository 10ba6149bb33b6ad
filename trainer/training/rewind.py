"""Going back: a run that met a fault goes on from a checkpoint before it, without the examples around it."""

from __future__ import annotations

from trainer.ranges import global_number
from trainer.training.loop import Trainer
from trainer.training.phases import phase_of


def rewind(trainer: Trainer, fault: str) -> None:
    """Takes a run back to a checkpoint, and passes over the examples of the faulty step and of those around it.

    The checkpoint is the newest from before all of them. Where there is none in this data order, the step is skipped
    instead. Checkpoints of the steps that are given up are removed, so that a restart goes on from this one, too. The
    trainer's records are to be opened anew, cut back to where its state then stands. Collective.

    Args:
        trainer: stands before the faulty step.
        fault: what is wrong with the step.
    """
    phase, settings, faulty = trainer.phase, trainer.config.faults, trainer.state.step + 1
    step = trainer.checkpoints.durable.latest(most=trainer.state.step - settings.around)
    if step is None or phase_of(trainer.phases, step).order != phase.order:
        reason = "no checkpoint of this data order is from before the steps to pass over, so only the step is skipped"
        trainer.skip_examples(trainer.loader.consumed, f"{fault}; {reason}")
        return
    place, end = trainer.loader.state_dict(), trainer.loader.consumed[-1][1]
    around = settings.around * phase.global_batch_size
    trainer.loaders.reopen(trainer.phases[phase_of(trainer.phases, step).index : phase.index])
    trainer.checkpoints.discard_after(step)
    trainer.restore(step)
    trainer.record_order()
    now = trainer.loader.state_dict()
    # Where the batch size has changed on the way, so many examples may reach back beyond the checkpoint.
    taken = max(place["example"] - phase.global_batch_size - around, now["example"])
    ranges = [[global_number(taken, place["excluded"]), end + around]]
    # What has been passed over since the checkpoint is so from now on.
    position = global_number(now["example"], now["excluded"])
    later = [[max(first, position), end] for first, end in place["excluded"] if end > position]
    ranges += [part for part in later if part not in now["excluded"]]
    trainer.skip_examples(ranges, f"{fault} at step {faulty}, gone back to step {step}")
