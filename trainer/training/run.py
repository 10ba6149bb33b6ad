"""Runs an experiment: from its newest checkpoint, through faults, to its end or a stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import torch

from data_pipeline.reading.concat_dataset import AnyDataset
from samestep.errors import EXIT_DONE, DataError, SamestepError
from trainer.monitoring import Tracker
from trainer.training import forecast, run_folder
from trainer.training.checkpoints import Checkpoints, open_snapshots
from trainer.training.compatibility import check_best
from trainer.training.compose import (
    build_trainer,
    only_writer_of,
    open_checkpointer,
    open_strategy,
    write_description,
)
from trainer.training.experiment import Experiment
from trainer.training.loop import Trainer
from trainer.training.model import for_dataset
from trainer.training.observers import Observer
from trainer.training.preemption import StopRequest
from trainer.training.recorder import Destinations
from trainer.training.state import Meta

logger = logging.getLogger(__name__)


def train(experiment: Experiment) -> int:
    """Runs an experiment from its newest checkpoint, if any, to its end or a requested stop.

    Returns:
        The exit code: 0 at the end, else 75, 76 or 130; see `trainer.training.preemption`.

    Raises:
        SamestepError: the run cannot start or go on; the message says why, and how to continue.
    """
    trackers: list[Tracker] = []
    with (
        StopRequest(experiment.training.preemption, joins=True) as stop,
        open_strategy(experiment) as strategy,
        run_folder.alert_on_failure(trackers),
        ExitStack() as locks,
    ):
        # Before the lock makes the run's folder, so that a typo in data.path leaves none behind.
        dataset = experiment.data.open()
        # Stored with the weights of classes, so evaluations on other rows have the same loss.
        experiment = for_dataset(experiment, dataset)
        # Before looking for checkpoints: see rule 2 of `trainer.checkpoint.lease`.
        lease = locks.enter_context(only_writer_of(experiment, strategy.world.rank))
        if experiment.tracking.wandb is not None and strategy.world.rank == 0:
            from trainer.monitoring import wandb

            wandb.claim(Path(experiment.output))
        stop.join(strategy.world)
        checkpointer = open_checkpointer(experiment, strategy.world, lease)
        snapshots = open_snapshots(experiment, strategy.world)
        found = Checkpoints(checkpointer, snapshots).newest()
        step = None if found is None else found.opened.step
        checkpointer.continue_from(step)
        if found is not None and (reason := _reason_to_end(experiment, found.opened.meta)):
            logger.info("nothing to do: %s %s", experiment.output, reason)
            if strategy.world.rank == 0:
                try:
                    run_folder.sync(experiment, checkpointer.folder)
                except Exception as error:  # as of trackers while training: the run is complete
                    logger.warning("the metrics are not sent again: %s", error)
            return EXIT_DONE
        # A checkpoint holds everything but frozen parameters.
        weights = experiment.init_from if step is None or experiment.freezes else None
        trainer: Trainer | None = None
        try:
            trainer = build_trainer(
                experiment, dataset, strategy, checkpointer, weights, snapshots, step is not None
            )
            if experiment.training.evaluate_every is not None:
                _check_evaluations(experiment, trainer)
            trainer.observers += tuple(_readers(experiment, dataset, trainer))
            if found is not None:
                changes = trainer.restore_found(found)
                changed = f" with {changes}" if changes else ""
                logger.info("continuing   at step %d%s", step, changed)
            strategy.world.tell_progress(trainer.state.step)
            _fit(experiment, dataset, trainer, trackers, stop)
            if not trainer.finished:
                logger.info(
                    "stopped      saved step %d; the same command continues", trainer.state.step
                )
                return stop.exit_code
            _report_end(experiment, trainer.state.step, trainer.observers)
            for tracker in trackers:
                tracker.complete()
            return EXIT_DONE
        except torch.OutOfMemoryError as error:
            from trainer.training.compute.micro_batch import out_of_memory

            phase = None if trainer is None else trainer.phase
            raise out_of_memory(experiment, strategy, phase, error) from error
        finally:
            if trainer is not None:
                trainer.close()


def _reason_to_end(experiment: Experiment, meta: Meta) -> str | None:
    """Says why nothing is left to do after a checkpoint; None if there is."""
    from trainer.training.finished import check_origin, check_settings, reason_to_end

    check_origin(experiment, meta)
    reason = reason_to_end(experiment, meta)
    if reason is not None:
        check_settings(experiment, meta)
    return reason


def _report_end(experiment: Experiment, step: int, observers: Iterable[Observer]) -> None:
    """Logs where the result of a finished run is."""
    if experiment.training.best is None:
        logger.info("finished     step %d, in %s", step, experiment.output)
        return
    from trainer.training.observers.best import BestEvaluation

    best = next(each for each in observers if isinstance(each, BestEvaluation))
    early = f"stopped early at step {step}: " if best.ends_run else ""
    checkpoint = f"{experiment.output}/best"
    logger.info("finished     %s%s; its checkpoint is %s", early, best, checkpoint)


def _readers(experiment: Experiment, dataset: AnyDataset, trainer: Trainer) -> Iterator[Observer]:
    """Yields the observers that read data of their own."""
    strategy = trainer.strategy
    if experiment.training.retrieval is not None:
        from trainer.training.observers.retrieval import build_retrieval

        yield build_retrieval(experiment, dataset, trainer.model, strategy)
    if experiment.probes:
        from trainer.training.observers.probe_rows import build_probes
        from trainer.training.observers.probes import Probes

        readers = build_probes(experiment, dataset, strategy.replica, strategy.world)
        yield Probes(readers, trainer.model, strategy)


def _check_evaluations(experiment: Experiment, trainer: Trainer) -> None:
    """Rejects what would fail at the first evaluation, which may be hours away."""
    from trainer.metrics import check_installed

    import_module("trainer.training.evaluation")  # now, as its file may be replaced meanwhile
    trainer.loaders.heldout(trainer.phase).close()  # a split without examples
    for phase in trainer.phases:
        check_installed(phase.objective.task.metrics)
    check_best(experiment, trainer.objectives)


def _fit(
    experiment: Experiment,
    dataset: AnyDataset,
    trainer: Trainer,
    trackers: list[Tracker],
    stop: StopRequest,
) -> None:
    """Trains to the end; after a fault, goes back to a checkpoint and trains on.

    Args:
        trackers: is filled with the open trackers, for an alert if the run fails.
    """
    folder = Path(experiment.output)
    fault: str | None = None
    go_back: Callable[[Trainer, str], None] | None = None
    if experiment.training.faults.action == "rewind":
        from trainer.training.rewind import rewind as go_back
    while True:
        ledger = None
        # Once more after a rewind: the trackers cut their files back to the restored step.
        if trainer.strategy.replica.index == 0:
            write_description(experiment, dataset)
            forecast.report(experiment, dataset, trainer)
            trackers[:] = run_folder.open_trackers(experiment, trainer, fault)
            ledger = folder / "ledger.jsonl"
        throughput = forecast.throughput(experiment, trainer)
        try:
            fault = trainer.fit(Destinations(trackers, ledger, throughput), stop)
        except DataError:
            _save_last_step(trainer)
            raise
        if stop.error is not None and not trainer.finished:
            raise stop.error
        for tracker in trackers:
            tracker.close()
        if fault is None:
            return
        assert go_back is not None, "only training.faults.action=rewind returns a fault"
        go_back(trainer, fault)


def _save_last_step(trainer: Trainer) -> None:
    """Saves the last whole step before an error of the data ends a run of one process.

    Of several processes, the others are in the next step by now: see `StopRequest.find`.
    """
    step, checkpointer = trainer.state.step, trainer.checkpoints.durable
    if trainer.strategy.world.size > 1 or step in (0, checkpointer.saved):
        return
    try:
        trainer.save([checkpointer])
        checkpointer.wait()
    except SamestepError as error:
        logger.warning("step %d is lost: %s", step, error)
    else:
        logger.info("saved        step %d, as an error ends the run", step)
