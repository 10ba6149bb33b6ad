"""The training loop: one optimizer step after another, the same at any world size."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.checkpoint.manager import Checkpointer
from trainer.errors import CheckpointError, SamestepError
from trainer.monitoring import Tracker
from trainer.monitoring.profiler import Profiler
from trainer.monitoring.throughput import Throughput
from trainer.objectives import Objective
from trainer.optim import groups
from trainer.strategies import Strategy
from trainer.strategies.fingerprint import StateCheck
from trainer.training.best import Best
from trainer.training.checkpoints import Checkpoints
from trainer.training.guard import Guard
from trainer.training.passes import Gradients, Loader, MicroBatches, accumulate_gradients, score
from trainer.training.phase_loaders import PhaseLoaders
from trainer.training.phases import Phase, phase_of
from trainer.training.preemption import StopRequest
from trainer.training.recorder import AlertingHeartbeat, Recorder
from trainer.training.resuming import Description, changes_since
from trainer.training.settings import Config
from trainer.training.state import Meta, TrainState

logger = logging.getLogger(__name__)


class Trainer:
    """Drives one run; every part it drives is handed in."""

    def __init__(
        self,
        config: Config,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        strategy: Strategy,
        loaders: PhaseLoaders,
        checkpoints: Checkpoints,
        description: Description,
    ) -> None:
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.strategy = strategy
        self.phases = loaders.phases
        self.loaders = loaders
        self.checkpoints = checkpoints
        self.description = description
        self.state = TrainState()
        self.best = Best(config.best)
        self.recorder = Recorder(strategy)
        self.guard = Guard(config.faults, strategy, description.output)
        stacks = Path(description.output, "stacks")
        self.heartbeat = AlertingHeartbeat(
            self.recorder, strategy.world, config.hang_timeout, stacks
        )
        # A look at a compiled step's state would cut its graph in two.
        every = None if strategy.accelerator.compiles else config.verify_state_every
        self.state_check = StateCheck(strategy, partial(self._tensors, frozen=True), every)
        self._profiler: Profiler | None = None
        self._stop: StopRequest | None = None
        self._grad_norm = torch.zeros(())

    def fit(
        self,
        trackers: Sequence[Tracker] = (),
        ledger: Path | None = None,
        throughput: Throughput | None = None,
        profiler: Profiler | None = None,
        stop: StopRequest | None = None,
    ) -> str | None:
        """Trains from where the state stands to the last step, evaluating, logging and saving on the way.

        Args:
            trackers: what gets the metrics, on rank 0.
            ledger: the file that tells what the model was fed, on rank 0.
            throughput: turns steps and times into rates; None leaves those out.
            profiler: traces steps that are asked for.
            stop: ends the run early, after a step and its checkpoint; None never does.

        Returns:
            None at the end of the run. What is wrong with the next step where the run is to go back to a checkpoint,
            see `trainer.training.rewind`.

        Raises:
            SamestepError: the loss or the gradient is not finite, and nothing is to be done about it.
        """
        self._profiler, self._stop = profiler, stop
        self.recorder.open(self.state.step, trackers, ledger, throughput)
        self.model.train()
        with self.heartbeat:
            while not (self.over or (stop and stop.agreed)):
                if fault := self._run_phase(self.phase):
                    return fault
            self.checkpoints.durable.wait()
        return None

    @property
    def over(self) -> bool:
        """Whether the run has come to its end: its last step, or the last evaluation that it has patience for."""
        return self.state.step >= self.config.steps or self.best.over

    def _run_phase(self, phase: Phase) -> str | None:
        """Trains to the end of a phase; its last step ends a row of metrics, so that no row is about two phases.

        Returns:
            As `fit`.
        """
        batches, lap, began = iter(self.loader), self.recorder.end_section, self.state.step
        self.record_order()
        while self.state.step < phase.end:
            self.heartbeat.begin_step(self.state.step + 1, first=self.state.step == began)
            if self._profiler is not None:
                self._profiler.begin_step(
                    self.state.step + 1, look=self._due(self.config.log_every)
                )
            lap("logging")
            micro_batches = next(batches)
            lap("data_wait")
            if fault := self.train_step(micro_batches):
                if not self.guard.skips(self.state.step + 1, fault):
                    return fault
                self.recorder.alert(
                    "WARN", "A step was skipped", f"step {self.state.step + 1}: {fault}"
                )
                self.skip_examples(self.loader.consumed, fault)
                continue
            if self.state.step == began + 1:
                # The optimizer has its state from now on, which saves copy to the host.
                self.checkpoints.reserve(self.strategy.to_host(self._tensors(), copy=False))
            if self._profiler is not None and (shares := self._profiler.end_step(self.state.step)):
                self.recorder.log(self.state.step, shares)
            if logged := self._due(self.config.log_every) or self.state.step == phase.end:
                self._log_training()
                lap("logging")
            if self._due(self.config.evaluate_every):
                scores = self.evaluate(phase)
                self.recorder.log(
                    self.state.step, {f"heldout/{name}": value for name, value in scores.items()}
                )
                self.best.look(self.state.step, scores, self.strategy.all_reduce)
                lap("evaluation")
            if self.best.over and not logged:
                self._log_training()
            stopping = (self._stop is not None and self._stop.decide()) or self.best.over
            ending = stopping or self.state.step in (self.config.steps, self.best.step)
            if due := self.checkpoints.due(self.state.step, ending):
                self.save(due)
                lap("checkpoint")
            if stopping:
                return None
        return None

    @property
    def phase(self) -> Phase:
        """The phase of the next step; after the end of the run, the last one."""
        return phase_of(self.phases, self.state.step)

    @property
    def loader(self) -> Loader:
        """The loader of the next step."""
        return self.loaders.train(self.phase)

    def close(self) -> None:
        """Stops what makes batches in the background, and a profiler that runs."""
        if self._profiler is not None:
            self._profiler.close()
        self.loaders.close()

    def train_step(self, micro_batches: MicroBatches) -> str | None:
        """Takes one optimizer step on this replica's rows of a global batch.

        The loss terms are divided by their weights over the whole global batch, so gradients, summed over
        micro-batches and replicas, do not depend on how the batch was cut.

        Returns:
            What is wrong with the step, which then has changed nothing; None if nothing is.
        """
        phase, step, looks = self.phase, self.state.step + 1, self.config.faults.looks
        self._set_lr(phase)
        # The guard looks at numbers on the host: then a step is two graphs, gradients and update.
        with self._graph("step", apart=not looks):
            gradients = self._compute_gradients(micro_batches)
            if looks and self.guard.look(step, gradients):
                gradients = self._compute_gradients(micro_batches)  # hardware has transient faults
                if fault := self.guard.look_again(step, gradients):
                    return fault
            metrics, self._grad_norm = gradients
            self.recorder.add_batch(step, micro_batches, self.loader)
            self.state_check.before_update(self.state.step)
            with self._graph("update", apart=looks):
                for each in metrics:
                    self.recorder.add(each)
                self.strategy.step(self.optimizer, self._grad_norm)
                self.optimizer.zero_grad(set_to_none=True)
        self.state.step = step
        self.state_check.after_update(step)
        self.recorder.end_section("optimizer")
        self._count(phase, micro_batches[0])
        if step == phase.end:
            self.guard.end_phase()
            self.loaders.end(phase, self.phase)
        return None

    def _set_lr(self, phase: Phase) -> None:
        """Sets the learning rate of the next update."""
        lr = self.optimizer.defaults["lr"] if phase.lr is None else phase.lr
        groups.set_lr(self.optimizer, lr * phase.lr_fraction(self.state.step))

    def _compute_gradients(self, micro_batches: MicroBatches) -> Gradients:
        """Leaves the clipped gradients of a global batch in the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        lap = self.recorder.end_section
        with self._graph("gradients", apart=self.config.faults.looks):
            metrics = accumulate_gradients(
                self.model, self.objective, self.strategy, micro_batches, lap
            )
            return Gradients(metrics, self.strategy.clip_grad_norm(self.config.max_grad_norm))

    def _count(self, phase: Phase, batch: Mapping[str, Tensor]) -> None:
        """Counts the examples and positions of a step; `batch` is any of its micro-batches."""
        lengths = [batch[name].shape[1] for name in ("tokens", "target_tokens") if name in batch]
        self.state.examples += phase.global_batch_size
        self.state.tokens += phase.global_batch_size * sum(lengths)

    def _graph(self, work: str, apart: bool) -> AbstractContextManager[object]:
        """Surrounds work of this phase that is a graph of its own, or part of another."""
        if not apart:
            return nullcontext()
        return self.strategy.accelerator.graph(self._named(work, self.phase))

    def _named(self, work: str, phase: Phase) -> str:
        """Each phase has shapes of its own, and so graphs."""
        return work if len(self.phases) == 1 else f"{work} of phase {phase.index}"

    def skip_examples(self, examples: Sequence[Sequence[int]], reason: str) -> None:
        """Goes on without global examples [first, end) from the next step on, and says so.

        Args:
            examples: of the step taken last from the loader, which counts as not taken then, or later ones.
            reason: for the ledger.
        """
        for first, end in examples:
            self.loader.exclude(first, end)
        self.recorder.exclude(self.state.step + 1, self.phase.order, examples, reason)
        if self.strategy.world.rank == 0:
            said = ", ".join(f"{first} to {end - 1}" for first, end in examples)
            logger.warning(
                "from step %d on, the examples %s are passed over: %s",
                self.state.step + 1,
                said,
                reason,
            )

    def record_order(self) -> None:
        """Tells the ledger what the examples of the next step are numbers of."""
        objective = self.description.config["objective"]
        self.recorder.begin_order(self.state.step, self.phase, objective, self.loader.state_dict())

    def evaluate(self, phase: Phase) -> dict[str, float]:
        """Scores the model on the held-out documents, in examples as those of the phase."""
        work = self._named("evaluation", phase)
        batches = self.config.evaluate_batches
        scores = score(
            self.model, self.objective, self.strategy, self.loaders.heldout(phase), batches, work
        ).scores
        self.model.train()
        return scores

    def save(self, checkpointers: Sequence[Checkpointer]) -> None:
        """Starts checkpoints of everything that the next step depends on."""
        with self.strategy.accelerator.graph("metrics"):
            window = self.recorder.state_dict()
        self._require_finite(
            {name: total for name, (total, _) in window["window"].items()}, float(self._grad_norm)
        )
        durable = self.checkpoints.durable
        if durable in checkpointers:
            durable.settle()
            self.best.not_saved(durable.failed)
        meta = {
            **self.description.to_meta(),
            "state": self.state.state_dict(),
            "order": self.phase.order,
            "data": self.loader.state_dict(),
            **self.guard.state_dict(),
            **self.best.state_dict(),
            **window,
        }
        if self.strategy.loss_scale is not None:
            meta["loss_scale"] = self.strategy.loss_scale.state_dict()
        self.state_check.before_save(self.state.step)
        tensors = self.strategy.to_host(self._tensors())
        for checkpointer in checkpointers:
            kept = self.best.step if checkpointer is durable else None
            checkpointer.save(self.state.step, tensors, meta, kept)

    def restore(self, step: int | None, checkpointer: Checkpointer | None = None) -> str:
        """Continues from a checkpoint that any world size and strategy may have written.

        Args:
            step: of the checkpoint; None for the newest.
            checkpointer: whose it is; None for the run's own.

        Returns:
            The settings that have changed since, for the user.
        """
        self.state_check.forget()
        tensors = self._tensors()
        host = self.strategy.to_host(tensors, copy=False)
        meta = (checkpointer or self.checkpoints.durable).restore(host, step)
        self.strategy.from_host(tensors)
        self.strategy.refresh()
        changes = changes_since(meta, self.description)
        self.state.load_state_dict(meta["state"])
        groups.set_step(self.optimizer, self.state.step)
        if self.strategy.loss_scale is not None and "loss_scale" in meta:
            self.strategy.loss_scale.load_state_dict(meta["loss_scale"])
        self.guard.load_state_dict(meta)
        self.best.load_state_dict(meta, self.checkpoints.durable.holds)
        self._enter_order(meta)
        self.recorder.load_state_dict(meta, self.state.tokens)
        return changes

    def _enter_order(self, meta: Meta) -> None:
        """Goes on in the data order of the checkpoint, or begins that of the next phase.

        Raises:
            CheckpointError: the phases have been changed so that the step belongs to another order.
        """
        phase, before = self.phase, meta.get("order", 0)
        if before == phase.order:
            self.loader.load_state_dict(meta["data"])
        elif before > phase.order or self.state.step != phase.first_step:
            raise CheckpointError(
                f"the checkpoint of step {self.state.step} was saved in the data order number {before}, and by this "
                f"run's phases the step belongs to number {phase.order} (each change of the sequence length begins "
                "one); keep the phases that have begun, or start a new run from the checkpoint's weights with init_from"
            )

    def _tensors(self, frozen: bool = False) -> dict[str, Tensor]:
        """The state that steps change; with the `frozen` parameters, all that they depend on."""
        parameters = self.strategy.parameters
        tensors: dict[str, Tensor] = {
            f"model/{name}": parameter.detach()
            for name, parameter in parameters.items()
            if frozen or parameter.requires_grad
        }
        moments = groups.state_tensors(self.optimizer, parameters.items())
        return tensors | {f"optimizer/{name}": tensor for name, tensor in moments.items()}

    def _require_finite(self, values: Mapping[str, float], grad_norm: float) -> None:
        """Stops, on all ranks at once as the values are those of all, before sound checkpoints make way for others.

        Raises:
            SamestepError: a value is not finite.
        """
        fix = "set training.precision=bf16 or fp32, as fp16 overflows in the forward pass,"
        if (
            self.strategy.loss_scale is None
        ):  # with one, a step whose gradient is not finite is skipped
            values = {**values, "grad_norm": grad_norm}
            fix = "lower optimizer.lr or training.max_grad_norm"
        for name, value in values.items():
            if not math.isfinite(value):
                raise SamestepError(
                    f"train/{name} is {value} at step {self.state.step}, so what follows would be lost; the "
                    f"checkpoints before it are sound: {fix} and run the same command again. "
                    f"{self.guard.advice(self.state.step)}"
                )

    def _due(self, every: int | None) -> bool:
        return every is not None and (
            self.state.step % every == 0 or self.state.step == self.config.steps
        )

    def _log_training(self) -> None:
        """One row of metrics: means since the last row, and the state they led to. Waits for the device."""
        with self.strategy.accelerator.graph("metrics"):
            means = self.recorder.means()
        grad_norm = float(self._grad_norm)
        self._require_finite(means, grad_norm)
        row = {f"train/{name}": value for name, value in means.items()}
        group = self.optimizer.param_groups[0]
        row["train/lr"] = group["lr"] / group.get("lr_scale", 1.0)
        if math.isfinite(grad_norm):  # fp16 skips steps where it is not
            row["train/grad_norm"] = grad_norm
        self.recorder.log(self.state.step, row | self.recorder.rates(self.state))
