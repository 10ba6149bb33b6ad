"""The training loop: one optimizer step after another, the same at any world size.

`Trainer.train_step` takes one step on this replica's share of a global batch:

1. Set the learning rate.
2. Forward and backward (`trainer.training.passes`). Before the first forward pass, the weight of
   each loss term (for masked language modeling, the number of masked tokens) is summed over the
   whole global batch. Every micro-batch divides its loss by this global weight, so gradients only
   have to be added up, over micro-batches and replicas.
3. Clip the gradients by their global norm.
4. If `training.faults` asks for it, check the loss and the norm. A faulty step is recomputed once;
   if the fault persists, its examples are skipped, or the run rewinds or stops.
5. Update the parameters.

Why one division by global weights: micro-batches hold different numbers of predictions, so a mean
of means depends on the split. Say rank 0 predicts three tokens with a loss of 1 each, and rank 1
one token with a loss of 5. The mean of the ranks' means is (1 + 5) / 2 = 3. The loss of the batch
is 8 / 4 = 2, where each token counts the same, whichever rank has it.

The host only enqueues work in a step. It waits until the device has begun the step before
(`StopRequest.decide`), and in `_log_training`, every `log_every` steps, where it reads the
accumulated metrics. Evaluations, probes and saves wait as well, and so do optional checks: of
faults (each step) and of the state's bits (`verify_state_every`, `digest_every`). With a snapshot
of each step, an update waits for the snapshot of the step before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor, nn

from trainer.checkpoint.manager import Checkpointer
from trainer.objectives import Objective
from trainer.optim import groups
from trainer.strategies import Strategy
from trainer.training.checkpoints import Checkpoints, Found, capture, restore
from trainer.training.observers import Observer
from trainer.training.observers.faults import FaultCheck
from trainer.training.passes import (
    Gradients,
    Loader,
    MicroBatch,
    MicroBatches,
    accumulate_gradients,
    loss_and_norm,
)
from trainer.training.phase_loaders import PhaseLoaders
from trainer.training.phases import Phase, objective_settings, phase_of
from trainer.training.preemption import StopRequest
from trainer.training.recorder import Destinations, Recorder
from trainer.training.settings import Config
from trainer.training.state import Meta, TrainState, state_tensors

logger = logging.getLogger(__name__)


class Trainer:
    """Drives one run. It builds none of the parts: see `trainer.training.compose.build_trainer`."""

    def __init__(
        self,
        config: Config,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objectives: Sequence[Objective],
        strategy: Strategy,
        loaders: PhaseLoaders,
        checkpoints: Checkpoints,
        description: Meta,
    ) -> None:
        self.config = config
        self.model = model
        self.optimizer = optimizer
        # One for each phase.
        self.objectives = objectives
        self.strategy = strategy
        # Loaders are opened phase by phase; a new sequence length needs another packing.
        self.phases = loaders.phases
        self.loaders = loaders
        self.checkpoints = checkpoints
        self.description = description
        self.state = TrainState()
        self.recorder = Recorder(strategy, compiles=config.compile)
        output = str(description["config"]["output"])
        self.faults = FaultCheck(config.faults, strategy.loss_scale is not None, output)
        # In the order in which their hooks are called. `compose.build_trainer` fills it.
        self.observers: tuple[Observer, ...] = ()
        self._stop = StopRequest(config.preemption)
        # Of the last step, on the device: the host reads it when it writes a row or a checkpoint.
        self._grad_norm = torch.zeros(())

    def fit(
        self,
        destinations: Destinations | None = None,
        stop: StopRequest | None = None,
    ) -> str | None:
        """Trains from the current step to the last, with evaluations, logs and checkpoints.

        Args:
            destinations: where metrics and the record of the consumed data go.
            stop: ends the run early, after a step and its checkpoint.

        Returns:
            None if the run finished, ran out of patience or was asked to stop. Otherwise the fault
            of the next step, which asks for a rewind to a checkpoint: see
            `trainer.training.rewind`.

        Raises:
            SamestepError: the loss or the gradient is not finite, and `training.faults` says stop.
        """
        self._stop = stop or self._stop
        self.recorder.open(self.state.step, destinations or Destinations())
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        with ExitStack() as contexts:
            for observer in self.observers:
                observer.open(self.recorder.folder, self.state.step)
                contexts.enter_context(observer)
            contexts.enter_context(self.recorder.held_rows(self.checkpoints.keeps_each_step))
            while not (self.finished or self._stop.agreed):
                if fault := self._run_phase(self.phase):
                    return fault
            # The last checkpoint is still being written in the background.
            self.checkpoints.durable.wait()
        return None

    @property
    def finished(self) -> bool:
        """Whether the run is at its last step, or out of patience for a better evaluation."""
        return self._at_last_step or self._out_of_patience

    @property
    def _out_of_patience(self) -> bool:
        return any(observer.ends_run for observer in self.observers)

    @property
    def _best_step(self) -> int | None:
        return next((step for each in self.observers if (step := each.best_step) is not None), None)

    @property
    def phase(self) -> Phase:
        """The phase of the next step; after the end of the run, the last one."""
        return phase_of(self.phases, self.state.step)

    @property
    def loader(self) -> Loader:
        """The loader of the next step."""
        return self.loaders.train(self.phase)

    def _run_phase(self, phase: Phase) -> str | None:
        """Trains to the end of a phase, or until a stop is requested; returns the same as `fit`.

        A phase has one sequence length and one batch size. Its last step always ends a row of
        metrics, so no row mixes two phases.
        """
        batches, end_section = iter(self.loader), self.recorder.end_section
        begin = self.state.step
        self.record_order()
        while self.state.step < phase.end:
            next_step = self.state.step + 1
            # The first step of a phase may be slow: shapes are new, and kernels are compiled.
            first, look = self.state.step == begin, self._due(self.config.log_every)
            for observer in self.observers:
                observer.begin_step(next_step, first, look)
            # Each section has the time since the one before it, so their sum is the wall time.
            end_section("logging")
            micro_batches = next(batches)
            self._stop.find(self.loader.error_ahead(phase.end - next_step))
            end_section("data_wait")
            if fault := self.train_step(micro_batches):
                if not self.faults.skips(next_step, fault):
                    return fault
                # The same step comes again, with the examples that follow.
                self.recorder.alert("WARN", "A step was skipped", f"step {next_step}: {fault}")
                self.skip_examples(self.loader.consumed, fault)
                continue
            if self.state.step == begin + 1:
                # A program's own optimizer creates its state in the first update, so memory for
                # saves can be reserved only now.
                self.checkpoints.reserve(self.strategy.to_host(self.tensors(), copy=False))
            for observer in self.observers:
                if metrics := observer.end_step(self.state.step):
                    self.recorder.log(self.state.step, metrics)
            logged = self._due(self.config.log_every) or self.state.step == phase.end
            if logged:
                self._log_training(phase)
                end_section("logging")
            if self._due(self.config.evaluate_every):
                self._evaluate_and_log(phase)
                end_section("evaluation")
            for observer in self.observers:
                for scores in observer.scores(self.state.step, self._at_last_step):
                    if scores:
                        self.recorder.log(self.state.step, scores)
                    end_section("evaluation")
            if self._out_of_patience and not logged:
                self._log_training(phase)
            # Every rank calls `decide` after every step, so all of them stop after the same one.
            stopping = self._stop.decide(self.state.step, self.checkpoints.durable)
            stopping |= self._out_of_patience
            ending = stopping or self._at_last_step
            is_best = self.state.step == self._best_step
            if due := self.checkpoints.due(self.state.step, is_best, ending):
                self.save(due)
                end_section("checkpoint")
            if stopping:
                return None
        return None

    def train_step(self, micro_batches: MicroBatches) -> str | None:
        """Takes one optimizer step on this replica's share of a global batch; see the module.

        Returns:
            The fault of the step; parameters, optimizer state and step count are then unchanged.
            None if there is none.
        """
        phase, step = self.phase, self.state.step + 1
        checks = self.faults.checks_steps
        self._set_lr(phase)
        # A compiling accelerator makes one graph of a step. If the host has to check the gradients
        # before the update, it needs two: gradients and update.
        with self._graph("step", separate=not checks):
            gradients = self._compute_gradients(micro_batches)
            if checks:
                gradients, fault = self._check(step, gradients, micro_batches)
                if fault is not None:
                    self.optimizer.zero_grad(set_to_none=True)
                    return fault
            self._grad_norm = gradients.norm
            self.recorder.add_batch(step, micro_batches, self.loader)
            # The last moment to see whether bits have flipped since the previous update.
            for observer in self.observers:
                observer.before_update(step)
            self.checkpoints.copied()
            with self._graph("update", separate=checks):
                for metrics in gradients.metrics:
                    self.recorder.meter.add(metrics)
                self.strategy.step(self.optimizer, self._grad_norm)
                self.optimizer.zero_grad(set_to_none=True)
        self.state.step = step
        for observer in self.observers:
            observer.after_update(step, micro_batches, gradients)
        self.recorder.end_section("optimizer")
        self._count(phase, micro_batches[0])
        if step == phase.end:
            # Losses of another sequence length or batch size cannot be compared with these.
            self.faults.clear_window()
            self.loaders.end(phase)
        return None

    def _set_lr(self, phase: Phase) -> None:
        """Sets the learning rate of the next update."""
        # The step's number starts at 0 here: warmup gives the first update a rate of 0.
        lr = self.optimizer.defaults["lr"] if phase.lr is None else phase.lr
        groups.set_lr(self.optimizer, lr * phase.lr_fraction(self.state.step))

    def _compute_gradients(self, micro_batches: MicroBatches) -> Gradients:
        """Computes the clipped gradients of a global batch; they stay in the parameters."""
        end_section, objective = self.recorder.end_section, self.objectives[self.phase.index]
        objective.step = self.state.step - self.phase.first_step
        with self._graph("gradients", separate=self.faults.checks_steps):
            metrics = accumulate_gradients(
                self.model,
                objective,
                self.strategy,
                micro_batches,
                end_section,
                lambda weights: self._stop.all_reduce(self.strategy, weights),
            )
            if self.checkpoints.keeps_each_step:
                self.checkpoints.wait_for_snapshot()
                self.recorder.release()  # the last step is safe
                end_section("snapshot")
            # Before clipping: frozen layers have no part in the norm.
            groups.freeze(self.optimizer, self.state.step)
            # Clipping would spread an error in one tensor over all of them.
            for observer in self.observers:
                observer.before_clipping(self.state.step + 1)
            return Gradients(metrics, self.strategy.clip_grad_norm(self.config.max_grad_norm))

    def _check(
        self, step: int, gradients: Gradients, micro_batches: MicroBatches
    ) -> tuple[Gradients, str | None]:
        """Checks a step's loss and gradient norm. Recomputes a faulty step from the same batch.

        A transient hardware error disappears when the step is recomputed. A fault in the data or
        the model does not.

        Returns:
            The gradients to use, and their fault.
        """
        fault = self._find_fault(gradients)
        if fault is None:
            return gradients, None
        self._warn("step %d: %s; recomputing it from the same batch", step, fault)
        self.optimizer.zero_grad(set_to_none=True)
        gradients = self._compute_gradients(micro_batches)
        fault = self._find_fault(gradients)
        if fault is None:
            self._warn(
                "step %d: recomputed, its loss and gradient norm are fine: a transient fault", step
            )
        return gradients, fault

    def _find_fault(self, gradients: Gradients) -> str | None:
        with self.strategy.accelerator.graph("loss and norm"):
            loss, grad_norm = loss_and_norm(gradients, self.strategy)
        return self.faults.check(loss, grad_norm)

    def _count(self, phase: Phase, batch: MicroBatch) -> None:
        """Counts the examples and positions of a step; `batch` is any of its micro-batches."""
        # Positions, padding included: the shapes are known on the host without a count. An
        # encoder-decoder reads two sequences in each example.
        lengths = [batch[name].shape[1] for name in ("tokens", "target_tokens") if name in batch]
        self.state.examples += phase.global_batch_size
        self.state.tokens += phase.global_batch_size * sum(lengths)

    def _graph(self, work: str, separate: bool) -> AbstractContextManager[object]:
        """Surrounds work that is a separate graph where graphs are compiled; no-op otherwise."""
        if not separate:
            return nullcontext()
        return self.strategy.accelerator.graph(self._graph_name(work, self.phase))

    def _graph_name(self, work: str, phase: Phase) -> str:
        """Phases have different shapes, so each needs graphs of its own."""
        return work if len(self.phases) == 1 else f"{work} of phase {phase.index}"

    def skip_examples(self, examples: Sequence[Sequence[int]], reason: str) -> None:
        """Skips ranges [first, end) of global examples from the next step on.

        Args:
            examples: ranges at or after the start of the batch that the loader returned last; that
                batch then counts as not consumed.
            reason: for the ledger.
        """
        step = self.state.step + 1
        for first, end in examples:
            self.loader.exclude(first, end)
        self.recorder.ledger.exclude(step, self.phase.order, examples, reason)
        self.record_order()  # later changes of a mixture are delayed
        ranges = ", ".join(f"{first} to {end - 1}" for first, end in examples)
        self._warn("from step %d on, the examples %s are skipped: %s", step, ranges, reason)

    def record_order(self) -> None:
        """Writes to the ledger which data order the next steps consume."""
        objective = objective_settings(self.description["config"], self.phase)
        self.recorder.begin_order(self.state.step, self.phase, objective, self.loader.state_dict())

    def evaluate(self, phase: Phase) -> dict[str, float]:
        """Scores the model on the held-out documents, in examples of the phase's length.

        Observers may add scores on other data.
        """
        from trainer.training.evaluation import score

        scores = score(
            self.model,
            self.objectives[phase.index],
            self.strategy,
            self.loaders.heldout(phase),
            self.config.evaluate_batches,
            self._graph_name("evaluation", phase),
        ).scores
        for observer in self.observers:
            scores |= observer.heldout_scores(phase.index)
        self.model.train()
        return scores

    def _evaluate_and_log(self, phase: Phase) -> None:
        scores = self.evaluate(phase)
        row = {f"heldout/{name}": value for name, value in scores.items()}
        self.recorder.log(self.state.step, row)
        scored = [phase.sequence_length, objective_settings(self.description["config"], phase)]
        for observer in self.observers:
            observer.evaluated(self.state.step, scores, scored)

    def save(self, checkpointers: Sequence[Checkpointer]) -> None:
        """Starts checkpoints of everything that the next step depends on."""
        with self.strategy.accelerator.graph("metrics"):
            recorded = self.recorder.state_dict()
        totals = {name: total for name, (total, _) in recorded["window"].items()}
        self.faults.require_finite(self.state.step, totals, float(self._grad_norm))
        durable = self.checkpoints.durable
        failed = None
        if durable in checkpointers:
            # The previous save must have ended: if it failed, its step cannot be the best.
            durable.settle()
            failed = durable.failed
        # Corrupt state must not replace the valid checkpoints before it.
        for observer in self.observers:
            observer.before_save(self.state.step, failed)
        order, data = self.loaders.state(self.state.step)
        tensors, meta = capture(self.strategy, self.optimizer, self.description, order, data)
        meta["state"] = self.state.state_dict()
        for observer in self.observers:
            meta |= observer.state_dict()
        meta |= recorded
        if self.faults.checks_steps:
            meta["faults"] = {**self.faults.state_dict(), "batch": self._batch()}
        for checkpointer in checkpointers:
            keep = self._best_step if checkpointer is durable else None
            # The next step computes gradients meanwhile, and waits before its update.
            checkpointer.save(self.state.step, tensors, meta, keep, wait_for_copy=False)

    def restore(self, step: int | None, checkpointer: Checkpointer | None = None) -> str:
        """Restores the checkpoint of a step.

        Args:
            step: None for the newest.
            checkpointer: None for the run's durable checkpoints.
        """
        source = checkpointer or self.checkpoints.durable
        return self.restore_found(Found(source, source.open_step(step)))

    def restore_found(self, found: Found) -> str:
        """Restores a checkpoint, which any world size and strategy may have written.

        Returns:
            The settings that have changed since then, as text.
        """
        self.checkpoints.copied()
        changes = restore(found, self.strategy, self.optimizer, self.description)
        meta = found.opened.meta
        self.description = {**self.description, "start": meta.get("start")}
        self.state.load_state_dict(meta["state"])
        if "faults" in meta:
            self.faults.load_state_dict(meta["faults"])
            if meta["faults"].get("batch", self._batch()) != self._batch():
                # Losses of another sequence length or batch size cannot be compared.
                self.faults.clear_window()
        for observer in self.observers:
            observer.load_state_dict(meta)
        self.loaders.resume(self.state.step, meta.get("order", 0), meta["data"])
        self.recorder.load_state_dict(meta, self.state.tokens)
        return changes

    def _batch(self) -> list[int]:
        """What the losses of a step depend on beside the model."""
        return [self.phase.global_batch_size, self.phase.sequence_length]

    def tensors(self, frozen: bool = False) -> dict[str, Tensor]:
        """The state that steps change, by name; with `frozen`, frozen parameters as well."""
        return state_tensors(self.strategy.parameters, self.optimizer, frozen)

    def _due(self, every: int | None) -> bool:
        return every is not None and (self.state.step % every == 0 or self._at_last_step)

    @property
    def _at_last_step(self) -> bool:
        return self.state.step >= self.config.steps

    def _log_training(self, phase: Phase) -> None:
        """Writes a row: means since the last row, and the state after it. Waits for the device."""
        with self.strategy.accelerator.graph("metrics"):
            means = self.recorder.means()
        if means:  # none if nothing was predicted
            means["loss"] = self.objectives[phase.index].loss_of(means)
        grad_norm = float(self._grad_norm)
        self.faults.require_finite(self.state.step, means, grad_norm)
        row = {f"train/{name}": value for name, value in means.items()}
        # With layer-wise decay, each group has its own factor on the rate of the schedule.
        group = self.optimizer.param_groups[0]
        row["train/lr"] = group["lr"] / group.get("lr_scale", 1.0)
        if math.isfinite(grad_norm):  # not finite in a step that fp16's loss scale has skipped
            row["train/grad_norm"] = grad_norm
        self.recorder.log(self.state.step, row | self.recorder.rates(self.state))

    def _warn(self, message: str, *values: object) -> None:
        if self.strategy.world.rank == 0:
            logger.warning(message, *values)

    def close(self) -> None:
        """Closes the observers, and stops background threads of the loaders."""
        for observer in self.observers:
            observer.close()
        self.loaders.close()
