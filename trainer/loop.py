"""The training loop: one optimizer step after another, the same at any world size."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.accelerators import Precision
from trainer.checkpoint.manager import Checkpointer
from trainer.config import Tree, differences
from trainer.errors import CheckpointError, ConfigError, SamestepError
from trainer.examples import HOST_COLUMNS
from trainer.monitoring import Tracker
from trainer.monitoring.jsonl import JsonlTracker
from trainer.monitoring.meter import Meter
from trainer.monitoring.throughput import Throughput
from trainer.objectives import Objective
from trainer.optim import groups, schedules
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
            into equal parts; changes memory and speed only.
        precision: of matrix products; parameters and optimizer state stay in fp32.
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
    micro_batch_size: int = 8
    precision: Precision = "fp32"
    max_grad_norm: float | None = 1.0
    activation_checkpointing: bool = False
    compile: bool = False
    log_every: int = 10
    evaluate_every: int | None = None
    evaluate_batches: int | None = None
    collective_timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_size", "micro_batch_size", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("evaluate_every", "evaluate_batches"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, or null for none, not {getattr(self, name)}")
        if self.max_grad_norm is not None and not 0 < self.max_grad_norm < math.inf:
            raise ConfigError(f"max_grad_norm must be above 0, or null for no clipping, not {self.max_grad_norm}")
        if not 0 < self.collective_timeout < math.inf:
            raise ConfigError(f"collective_timeout must be above 0 seconds, not {self.collective_timeout}")


MicroBatches = Sequence[Mapping[str, Tensor]]


class Loader(Protocol):
    """An iterable over steps, whose state is where the consumer stands."""

    def __iter__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


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
        schedule: schedules.Schedule,
        loader: Loader,
        heldout: Callable[[], Loader],
        checkpointer: Checkpointer,
        description: Mapping[str, Any],
    ) -> None:
        self.config = config
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.strategy = strategy
        self.schedule = schedule
        self.loader = loader
        self.heldout = heldout
        self.checkpointer = checkpointer
        self.description = description
        self.state = TrainState()
        self._trackers: Sequence[Tracker] = ()
        self._ledger: JsonlTracker | None = None
        self._throughput: Throughput | None = None
        self._meter = Meter()
        self._grad_norm = torch.zeros(())
        self._logged_tokens = 0
        self._digest = 0
        self._waited = 0.0
        self._evaluated = 0.0

    def fit(
        self,
        trackers: Sequence[Tracker] = (),
        ledger: JsonlTracker | None = None,
        throughput: Throughput | None = None,
    ) -> None:
        """Trains from where the state stands to the last step, evaluating, logging and saving on the way.

        Args:
            trackers: what gets the metrics, on rank 0.
            ledger: what gets the digests of the rows that were fed, on rank 0.
            throughput: turns steps and times into rates; None leaves those out.

        Raises:
            SamestepError: the loss or the gradient is not finite.
        """
        self._trackers, self._ledger, self._throughput = trackers, ledger, throughput
        self.model.train()
        batches = iter(self.loader)
        while self.state.step < self.config.steps:
            asked = time.perf_counter()
            micro_batches = next(batches)
            self._waited += time.perf_counter() - asked
            self.train_step(micro_batches)
            if self._due(self.config.log_every):
                self._log_training()
            if self._due(self.config.evaluate_every):
                began = time.perf_counter()
                self._log({f"heldout/{name}": value for name, value in self.evaluate().items()})
                self._evaluated += time.perf_counter() - began
            if self._due(self.checkpointer.config.every):
                self.save()
        self.checkpointer.wait()

    def train_step(self, micro_batches: MicroBatches) -> None:
        """Takes one optimizer step on this replica's rows of a global batch.

        The loss terms are divided by their weights over the whole global batch, so gradients, summed over
        micro-batches and replicas, do not depend on how the batch was cut.
        """
        fraction = schedules.lr_fraction(self.schedule, self.state.step, self.config.steps)
        groups.set_lr(self.optimizer, self.optimizer.defaults["lr"] * fraction)
        totals = _totals(self.objective, self.strategy, micro_batches)
        for i, host_batch in enumerate(micro_batches):
            batch = _to_device(self.strategy, host_batch)
            with self.strategy.accumulate(last=i == len(micro_batches) - 1):
                with self.strategy.autocast():
                    loss = self.objective.loss(self.model, batch, totals)
                self.strategy.backward(loss.total)
            self._meter.add(loss.metrics)
            self._digest += int(host_batch["digest"].sum())
        self._grad_norm = self.strategy.clip_grad_norm(self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.strategy.accelerator.step_boundary()
        self.state.step += 1
        self.state.examples += self.config.global_batch_size
        self.state.tokens += self.config.global_batch_size * micro_batches[0]["tokens"].shape[1]

    def evaluate(self) -> dict[str, float]:
        """Scores the model on the held-out documents."""
        scores = score(self.model, self.objective, self.strategy, self.heldout(), self.config.evaluate_batches)
        self.model.train()
        return scores

    def save(self) -> None:
        """Starts a checkpoint of everything that the next step depends on."""
        window = self._meter.totals(self.strategy.all_reduce)
        self._require_finite({name: total for name, (total, _) in window.items()})
        meta = {
            **self.description,
            "state": self.state.state_dict(),
            "data": self.loader.state_dict(),
            "window": window,
            "digest": self._global_digest(),
        }
        self.checkpointer.save(self.state.step, self._tensors(), meta)

    def restore(self, step: int | None) -> None:
        """Continues from a checkpoint that any world size and strategy may have written."""
        groups.prime(self.optimizer)
        meta = self.checkpointer.restore(self._tensors(), step)
        self._compare_settings(meta["config"], meta["step"])
        self.state.load_state_dict(meta["state"])
        groups.set_step(self.optimizer, self.state.step)
        self.loader.load_state_dict(meta["data"])
        self._logged_tokens = self.state.tokens
        if self.strategy.replica.index == 0:  # these are sums over all replicas
            self._digest = int(meta["digest"], 16)
            window = {name: torch.tensor(pair, dtype=torch.float64) for name, pair in meta["window"].items()}
            self._meter.add({name: (pair[0], pair[1]) for name, pair in window.items()})

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
        for name, value in {**values, "grad_norm": float(self._grad_norm)}.items():
            if not math.isfinite(value):
                raise SamestepError(
                    f"train/{name} is {value} at step {self.state.step}, so the weights are lost; the checkpoints "
                    "before it are sound: lower optimizer.lr or training.max_grad_norm and run the same command again"
                )

    def _global_digest(self) -> str:
        """The digests of all rows that all replicas have fed since the last row of metrics, summed modulo 2**64."""
        mine = (self._digest + 2**63) % 2**64 - 2**63
        total = self.strategy.all_reduce(torch.tensor(mine, device=self.strategy.accelerator.device))
        return f"{int(total) % 2**64:016x}"

    def _due(self, every: int | None) -> bool:
        return every is not None and (self.state.step % every == 0 or self.state.step == self.config.steps)

    def _log_training(self) -> None:
        """One row of metrics: means since the last row, and the state they led to. Waits for the device."""
        means = self._meter.compute(self.strategy.all_reduce)
        self._require_finite(means)
        rates = {}
        if self._throughput is not None:
            tokens, now = self.state.tokens - self._logged_tokens, time.perf_counter() - self._evaluated
            rates = self._throughput.measure(self.state.step, tokens, self._waited, now)
        memory = self.strategy.accelerator.peak_memory()
        if memory is not None:
            rates["perf/peak_memory_gib"] = memory / 2**30
        self._logged_tokens, self._waited = self.state.tokens, 0.0
        digest, self._digest = self._global_digest(), 0
        if self._ledger is not None:
            self._ledger.log(self.state.step, {"examples": self.state.examples, "digest": digest})
        self._log(
            {f"train/{name}": value for name, value in means.items()}
            | {
                "train/grad_norm": float(self._grad_norm),
                "train/lr": self.optimizer.param_groups[0]["lr"],
                "train/examples": self.state.examples,
                "train/tokens": self.state.tokens,
            }
            | rates
        )

    def _log(self, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(self.state.step, metrics)


@torch.no_grad()
def score(
    model: nn.Module, objective: Objective, strategy: Strategy, loader: Loader, batches: int | None
) -> dict[str, float]:
    """Scores a model: means over the batches of a loader, which it closes, and the loss as perplexity.

    Args:
        model: as `strategy.prepare` returns it; left in eval mode.
        objective: what it is scored by.
        strategy: that of the model.
        loader: whose batches; this replica's part of them.
        batches: how many global batches to take; None takes all.
    """
    model.eval()
    meter = Meter()
    for micro_batches in itertools.islice(loader, batches):
        totals = _totals(objective, strategy, micro_batches)
        for host_batch in micro_batches:
            batch = _to_device(strategy, host_batch)
            with strategy.autocast():
                meter.add(objective.loss(model, batch, totals).metrics)
    loader.close()
    means = meter.compute(strategy.all_reduce)
    return {**means, "perplexity": math.exp(min(means["loss"], 700.0))}


def _totals(objective: Objective, strategy: Strategy, micro_batches: MicroBatches) -> dict[str, Tensor]:
    """Each loss term's weight over the whole global batch; one small collective, no wait for the device."""
    sums: dict[str, float] = {}
    for batch in micro_batches:
        for name, weight in objective.weights(batch).items():
            sums[name] = sums.get(name, 0.0) + weight
    totals = torch.tensor(list(sums.values()), dtype=torch.float64)  # float32 cannot count beyond 2**24
    totals = totals.to(strategy.accelerator.device, non_blocking=True)
    return dict(zip(sums, strategy.all_reduce(totals).float(), strict=True))


def _to_device(strategy: Strategy, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    columns = {name: column for name, column in batch.items() if name not in HOST_COLUMNS}
    return strategy.accelerator.to_device(columns)
