"""samestep and Hugging Face's Trainer, which take each step one after the other."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import transformers as untyped
from torch import Tensor

import samestep

logger = logging.getLogger(__name__)
transformers: Any = untyped
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

MicroBatches = Sequence[Mapping[str, Tensor]]


class Settings(Protocol):
    """What both sides agree on; see `beside_trainer.Settings`."""

    @property
    def seed(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def warmup(self) -> int: ...
    @property
    def lr(self) -> float: ...


class Stopwatch:
    """Measures (wall, CPU) seconds of each side, step by step.

    All time outside of `samestep` counts for Trainer.
    """

    def __init__(self) -> None:
        self.steps: dict[str, list[list[float]]] = {"samestep": [], "Trainer": []}
        self.start()

    @staticmethod
    def _now() -> npt.NDArray[np.float64]:
        return np.array([time.perf_counter(), time.process_time()])

    def start(self) -> None:
        self._began, self._ours = self._now(), np.zeros(2)

    @contextmanager
    def samestep(self) -> Iterator[None]:
        began = self._now()
        yield
        self._ours = self._ours + self._now() - began

    def end_step(self) -> None:
        elapsed = self._now() - self._began
        self.steps["samestep"].append(self._ours.tolist())
        self.steps["Trainer"].append((elapsed - self._ours).tolist())
        self.start()


class Lockstep:
    """Both sides of a run.

    Attributes:
        losses: of each side, step by step.
        watch: seconds of each side.

    Args:
        parts: of samestep, before its first step.
        folder: for the export of the initial weights.
    """

    def __init__(self, parts: samestep.Parts, settings: Settings, folder: Path) -> None:
        self._parts, self._settings, self._folder = parts, settings, folder
        parts.checkpoints.save()
        parts.checkpoints.wait()
        checkpoint = next((folder / "run" / "checkpoints").glob("step-*"))
        samestep.export(str(checkpoint), str(folder / "initial"))
        kind = transformers.AutoModelForSequenceClassification
        self._theirs = kind.from_pretrained(folder / "initial")
        self._waiting: deque[MicroBatches] = deque()
        self.losses: dict[str, list[float]] = {"samestep": [], "Trainer": []}
        self.watch = Stopwatch()

    def fetch(self) -> dict[str, Tensor]:
        """Makes the next batch, and keeps it for samestep; Trainer fetches one step ahead."""
        with self.watch.samestep():
            self._waiting.append(next(self._parts.batches))
        (batch,) = self._waiting[-1]
        return their_columns(batch)

    def step(self) -> None:
        """Takes samestep's step, at the learning rate of Trainer's linear schedule."""
        parts, settings, done = self._parts, self._settings, len(self.losses["samestep"])
        with self.watch.samestep():
            rising = done / max(1, settings.warmup)
            falling = (settings.steps - done) / (settings.steps - settings.warmup)
            for group in parts.optimizer.param_groups:
                group["lr"] = settings.lr * min(rising if settings.warmup else 1.0, falling)
            loss = self._accumulate()
            parts.strategy.step(parts.optimizer, parts.strategy.clip_grad_norm(1.0))
            parts.optimizer.zero_grad()
        self.losses["samestep"].append(loss)
        if (done + 1) % 20 == 0:
            losses = ", ".join(f"{side} {each[-1]:.4f}" for side, each in self.losses.items())
            logger.info("step %d of %d, loss: %s", done + 1, settings.steps, losses)

    def _accumulate(self) -> float:
        parts = self._parts
        metrics = samestep.accumulate_gradients(
            parts.model, parts.batches.objective, parts.strategy, self._waiting.popleft()
        )
        return samestep.means(metrics, parts.strategy)["loss"]

    def train(self) -> None:
        """Trains both sides to the last step."""
        self._trainer(max_grad_norm=1.0, after_step=self.step).train()

    def gradients_of_trainer(self) -> dict[str, Tensor]:
        """Takes Trainer's step, and returns its gradients by name."""
        gradients: dict[str, Tensor] = {}

        class Kept(transformers.TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
                for name, parameter in model.named_parameters():
                    gradients[name] = parameter.grad.clone()

        trainer = self._trainer(max_grad_norm=0.0, after_step=lambda: None)
        trainer.add_callback(Kept())
        trainer.train()
        return gradients

    def save_gradients(self) -> float:
        """Computes samestep's gradients, saves them in place of the weights; returns the loss."""
        parts = self._parts
        loss = self._accumulate()
        with torch.no_grad():
            for parameter in parts.strategy.parameters.values():
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
        parts.checkpoints.save()
        parts.checkpoints.wait()
        return loss

    @torch.no_grad()
    def predict(self) -> tuple[dict[str, npt.NDArray[np.float64]], npt.NDArray[np.float64]]:
        """Outputs [N, C] of each side for the held-out rows, and their labels [N].

        The rows are in the order of their file; the order of batches is the seed's.
        """
        parts = self._parts
        scored = samestep.score(
            parts.model, parts.batches.objective, parts.strategy, parts.batches.heldout(), None
        )
        assert scored.predictions is not None
        ours = scored.predictions.outputs.astype(float)
        theirs, labels = np.zeros_like(ours), np.zeros(len(ours))
        self._theirs.eval()
        loader = parts.batches.heldout()
        for micro_batches in loader:
            for batch in micro_batches:
                real = batch["weights"] > 0  # not of rows that only fill the last batch
                columns = their_columns({name: column[real] for name, column in batch.items()})
                label, number = columns.pop("labels"), batch["number"][real].numpy()
                theirs[number] = self._theirs(**columns).logits.numpy()
                labels[number] = label.numpy()
        loader.close()
        by_row = np.argsort(scored.predictions.document)
        return {"samestep": ours[by_row], "Trainer": theirs[by_row]}, labels[by_row]

    def _trainer(self, max_grad_norm: float, after_step: Any) -> Any:
        lockstep, losses = self, self.losses["Trainer"]

        class Batches(torch.utils.data.Dataset[dict[str, Tensor]]):
            def __len__(self) -> int:
                return lockstep._settings.steps

            def __getitem__(self, _: int) -> dict[str, Tensor]:
                return lockstep.fetch()

        class InTurn(transformers.Trainer):  # type: ignore[misc]
            def training_step(self, *arguments: Any, **options: Any) -> Any:
                loss = super().training_step(*arguments, **options)
                losses.append(float(loss))
                return loss

        class Turns(transformers.TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                lockstep.watch.start()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                after_step()
                lockstep.watch.end_step()

        arguments = transformers.TrainingArguments(
            output_dir=str(self._folder / "trainer"),
            seed=self._settings.seed,
            max_steps=self._settings.steps,
            learning_rate=self._settings.lr,
            warmup_steps=self._settings.warmup,
            lr_scheduler_type="linear",
            optim="adamw_torch_fused",
            weight_decay=0.01,
            adam_epsilon=1e-8,
            max_grad_norm=max_grad_norm,
            per_device_train_batch_size=1,  # an item of the dataset is a whole batch
            train_sampling_strategy="sequential",
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = InTurn(
            self._theirs,
            arguments,
            data_collator=itemgetter(0),
            train_dataset=Batches(),
            callbacks=[Turns()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        return trainer


def their_columns(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch as BertForSequenceClassification takes it."""
    return {
        "input_ids": batch["tokens"].long(),
        "attention_mask": (batch["segments"] > 0).long(),
        "token_type_ids": batch["token_types"].long(),
        "labels": batch["labels"],
    }
