"""The training loop: one optimizer step after another, the same at any world size."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.accelerators import Precision
from trainer.checkpoint.manager import Checkpointer
from trainer.config import Tree, differences
from trainer.errors import CheckpointError, ConfigError, SamestepError
from trainer.monitoring import Tracker
from trainer.monitoring.jsonl import JsonlTracker
from trainer.monitoring.profiler import Profiler
from trainer.monitoring.throughput import Throughput
from trainer.objectives import Objective
from trainer.optim import groups
from trainer.passes import Loader, MicroBatches, accumulate_gradients, score
from trainer.phases import MicroBatchSize, Phase, phase_of
from trainer.recorder import Recorder
from trainer.state import TrainState
from trainer.strategies import Strategy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """The `training` section of an experiment.

    Attributes:
        steps: optimizer steps of the whole run.
        global_batch_size: examples of one step, over all devices.
        micro_batch_size: the most examples of one forward and backward pass on one device, whose share of a step is cut
            into equal parts; changes memory and speed only. auto measures how many fit.
        precision: of matrix products; parameters and optimizer state stay in fp32. fp16, for GPUs without bf16,
            scales the loss.
        max_grad_norm: gradients are scaled down to this global norm; None leaves them.
        activation_checkpointing: recomputes each layer in the backward pass: less memory, a third more work.
        compile: compiles each layer with torch.compile.
        log_every: steps between two rows of metrics.
        evaluate_every: steps between evaluations on the held-out documents (and at the end); None never does.
        evaluate_batches: global batches of an evaluation; None takes all held-out documents.
        collective_timeout: seconds that ranks wait for each other before they give up.
    """

    steps: int
    global_batch_size: int = 256
    micro_batch_size: MicroBatchSize = "auto"
    precision: Precision = "fp32"
    max_grad_norm: float | None = 1.0
    activation_checkpointing: bool = False
    compile: bool = False
    log_every: int = 10
    evaluate_every: int | None = None
    evaluate_batches: int | None = None
    collective_timeout: float = 600.0

    def __post_init__(self) -> None:
        if isinstance(self.micro_batch_size, int) and self.micro_batch_size < 1:
            raise ConfigError(f"micro_batch_size must be at least 1, or auto, not {self.micro_batch_size}")
        for name in ("steps", "global_batch_size", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("evaluate_every", "evaluate_batches"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, or null for none, not {getattr(self, name)}")
        if self.max_grad_norm is not None and not 0 < self.max_grad_norm < math.inf:
            raise ConfigError(f"max_grad_norm must be above 0, or null for no clipping, not {self.max_grad_norm}")
        if not 0 < self.collective_timeout < math.inf:
            raise ConfigError(f"collective_timeout must be above 0 seconds, not {self.collective_timeout}")


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
        phases: tuple[Phase, ...],
        loaders: Sequence[Loader],
        heldout: Callable[[Phase], Loader],
        checkpointer: Checkpointer,
        description: Mapping[str, Any],
    ) -> None:
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.strategy = strategy
        self.phases = phases
        self.loaders = loaders
        self.heldout = heldout
        self.checkpointer = checkpointer
        self.description = description
        self.state = TrainState()
        self.recorder = Recorder(strategy)
        self._profiler: Profiler | None = None
        self._grad_norm = torch.zeros(())

    def fit(
        self,
        trackers: Sequence[Tracker] = (),
        ledger: JsonlTracker | None = None,
        throughput: Throughput | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        """Trains from where the state stands to the last step, evaluating, logging and saving on the way.

        Args:
            trackers: what gets the metrics, on rank 0.
            ledger: what gets the digests of the rows that were fed, on rank 0.
            throughput: turns steps and times into rates; None leaves those out.
            profiler: traces steps that are asked for.

        Raises:
            SamestepError: the loss or the gradient is not finite.
        """
        self._profiler = profiler
        self.recorder.open(trackers, ledger, throughput)
        self.model.train()
        while self.state.step < self.config.steps:
            self._run_phase(self.phase)
        self.checkpointer.wait()

    def _run_phase(self, phase: Phase) -> None:
        """Trains to the end of a phase; its last step ends a row of metrics, so that no row is about two phases."""
        batches, lap = iter(self.loader), self.recorder.lap
        while self.state.step < phase.end:
            if self._profiler is not None:
                self._profiler.begin_step(self.state.step + 1, look=self._due(self.config.log_every))
            lap("logging")
            micro_batches = next(batches)
            lap("data_wait")
            self.train_step(micro_batches)
            if self.state.step == phase.end:
                self._hand_over(phase)
            if self._profiler is not None and (shares := self._profiler.end_step(self.state.step)):
                self.recorder.log(self.state.step, shares)
            if self._due(self.config.log_every) or self.state.step == phase.end:
                self._log_training()
                lap("logging")
            if self._due(self.config.evaluate_every):
                scores = self.evaluate(phase)
                self.recorder.log(self.state.step, {f"heldout/{name}": value for name, value in scores.items()})
                lap("evaluation")
            if self._due(self.checkpointer.config.every):
                self.save()
                lap("checkpoint")

    def _hand_over(self, ended: Phase) -> None:
        """Ends a phase; one of the same data order goes on from there."""
        loader = self.loaders[ended.index]
        loader.close()
        if ended.index < self.phase.index and ended.order == self.phase.order:
            self.loader.load_state_dict(loader.state_dict())

    @property
    def phase(self) -> Phase:
        """The phase of the next step; after the end of the run, the last one."""
        return phase_of(self.phases, self.state.step)

    @property
    def loader(self) -> Loader:
        """The loader of the next step."""
        return self.loaders[self.phase.index]

    def close(self) -> None:
        """Stops what makes batches in the background, and a profiler that runs."""
        if self._profiler is not None:
            self._profiler.close()
        for loader in self.loaders:
            loader.close()

    def train_step(self, micro_batches: MicroBatches) -> None:
        """Takes one optimizer step on this replica's rows of a global batch.

        The loss terms are divided by their weights over the whole global batch, so gradients, summed over
        micro-batches and replicas, do not depend on how the batch was cut.
        """
        phase = self.phase
        lr = self.optimizer.defaults["lr"] if phase.lr is None else phase.lr
        groups.set_lr(self.optimizer, lr * phase.lr_fraction(self.state.step))
        for metrics in accumulate_gradients(self.model, self.objective, self.strategy, micro_batches):
            self.recorder.add(metrics)
        self.recorder.add_fed(micro_batches)
        self.recorder.lap("forward_backward")
        self._grad_norm = self.strategy.clip_grad_norm(self.config.max_grad_norm)
        self.strategy.step(self.optimizer, self._grad_norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.strategy.accelerator.step_boundary()
        self.recorder.lap("optimizer")
        self.state.step += 1
        self.state.examples += phase.global_batch_size
        self.state.tokens += phase.global_batch_size * phase.sequence_length

    def evaluate(self, phase: Phase) -> dict[str, float]:
        """Scores the model on the held-out documents, in examples as those of the phase."""
        scores = score(self.model, self.objective, self.strategy, self.heldout(phase), self.config.evaluate_batches)
        self.model.train()
        return scores

    def save(self) -> None:
        """Starts a checkpoint of everything that the next step depends on."""
        window = self.recorder.state_dict()
        self._require_finite({name: total for name, (total, _) in window["window"].items()})
        meta = {
            **self.description,
            "state": self.state.state_dict(),
            "order": self.phase.order,
            "data": self.loader.state_dict(),
            **window,
        }
        if self.strategy.loss_scale is not None:
            meta["loss_scale"] = self.strategy.loss_scale.state_dict()
        self.checkpointer.save(self.state.step, self._tensors(), meta)

    def restore(self, step: int | None) -> None:
        """Continues from a checkpoint that any world size and strategy may have written."""
        groups.prime(self.optimizer)
        meta = self.checkpointer.restore(self._tensors(), step)
        self._compare_settings(meta["config"], meta["step"])
        self.state.load_state_dict(meta["state"])
        groups.set_step(self.optimizer, self.state.step)
        if self.strategy.loss_scale is not None and "loss_scale" in meta:
            self.strategy.loss_scale.load_state_dict(meta["loss_scale"])
        self._enter_order(meta)
        self.recorder.load_state_dict(meta, self.state.tokens)

    def _enter_order(self, meta: Mapping[str, Any]) -> None:
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

    def _compare_settings(self, before: Tree, step: int) -> None:
        """Says which settings have changed since the checkpoint; the model's may not, dropout excepted."""
        changes = differences(before, self.description["config"])
        said = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in changes.items())
        if any(key.startswith("model.") and "dropout" not in key for key in changes):
            raise CheckpointError(f"the checkpoint is of another model ({said}); use its settings, or another output")
        logger.info("continuing   at step %d%s", step, f" with {said}" if said else "")

    def _tensors(self) -> dict[str, Tensor]:
        parameters = self.strategy.parameters
        tensors: dict[str, Tensor] = {f"model/{name}": parameter.detach() for name, parameter in parameters.items()}
        moments = groups.state_tensors(self.optimizer, parameters.items())
        return tensors | {f"optimizer/{name}": tensor for name, tensor in moments.items()}

    def _require_finite(self, values: Mapping[str, float]) -> None:
        """Stops, on all ranks at once as the values are those of all, before sound checkpoints make way for others.

        Raises:
            SamestepError: a value is not finite.
        """
        fix = "set training.precision=bf16 or fp32, as fp16 overflows in the forward pass,"
        if self.strategy.loss_scale is None:  # with one, a step whose gradient is not finite is skipped
            values = {**values, "grad_norm": float(self._grad_norm)}
            fix = "lower optimizer.lr or training.max_grad_norm"
        for name, value in values.items():
            if not math.isfinite(value):
                raise SamestepError(
                    f"train/{name} is {value} at step {self.state.step}, so what follows would be lost; the "
                    f"checkpoints before it are sound: {fix} and run the same command again"
                )

    def _due(self, every: int | None) -> bool:
        return every is not None and (self.state.step % every == 0 or self.state.step == self.config.steps)

    def _log_training(self) -> None:
        """One row of metrics: means since the last row, and the state they led to. Waits for the device."""
        means = self.recorder.means()
        self._require_finite(means)
        row = {f"train/{name}": value for name, value in means.items()}
        row["train/lr"] = self.optimizer.param_groups[0]["lr"]
        if math.isfinite(grad_norm := float(self._grad_norm)):  # fp16 skips steps where it is not
            row["train/grad_norm"] = grad_norm
        self.recorder.log(self.state.step, row | self.recorder.rates(self.state))
