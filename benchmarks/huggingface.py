"""The other side of a comparison of training steps: Hugging Face `Trainer`.

It finds its batches ready in memory, so nothing is measured of how they are made. Its batches are
ours, from the experiment's own loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import import_transformers
from benchmarks.sides import Job, Turns
from trainer.models.codecs import codec_of
from trainer.strategies import Replica
from trainer.training.compose import open_loader

transformers = import_transformers()
Trainer: Any = transformers.Trainer
TrainerCallback: Any = transformers.TrainerCallback

BATCHES = 16
"""Number of ready steps, which are repeated."""


def pretrain(job: Job, turns: Turns, compiled: bool = False) -> None:
    """Pre-trains the experiment's model on its own batches."""
    train(job, turns, build_model(job.experiment().model), ready_batches(job), compiled)


def build_model(config: Any) -> Any:
    """The model of `transformers` for a configuration of ours, with weights of its own."""
    settings = codec_of(config).to_huggingface()
    (architecture,) = settings["architectures"]
    model = getattr(transformers, architecture)(transformers.AutoConfig.for_model(**settings))
    # transformers unties the two only when it reads a checkpoint.
    if not settings.get("tie_word_embeddings", True):
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
    return model


def ready_batches(job: Job) -> list[dict[str, Tensor]]:
    """The first micro-batches of our loader, with the columns of their models."""
    experiment = job.experiment()
    dataset, (phase,) = experiment.data.open(), experiment.resolved_phases()
    offset = getattr(experiment.model, "position_offset", 0)
    with open_loader(experiment, dataset, Replica(0, 1), phase) as loader:
        steps = list(islice(loader, BATCHES))
    return [their_columns(batch, offset) for step in steps for batch in step]


def their_columns(batch: Mapping[str, Tensor], position_offset: int = 0) -> dict[str, Tensor]:
    """A batch of masked language modeling or of span corruption, as their models take it.

    Args:
        position_offset: the row of their position table that has position 0.
    """
    columns = {"input_ids": batch["tokens"].long()}
    if "target_tokens" in batch:
        labels = batch["labels"].long().masked_fill(batch["weights"] == 0, -100)
        return columns | {"decoder_input_ids": batch["target_tokens"].long(), "labels": labels}
    # Unused predictions point at position 0, which is never predicted.
    label = batch["labels"].long().masked_fill(batch["weights"] == 0, -100)
    columns["labels"] = torch.full_like(columns["input_ids"], -100)
    columns["labels"].scatter_(1, batch["predicted"].long(), label)
    segments = batch["segments"]
    if segments.max() > 1:
        # Several documents in a row: each attends to itself and counts its positions from 0.
        columns["attention_mask"] = segments[:, None, :, None] == segments[:, None, None, :]
        columns["position_ids"] = batch["positions"].long() + position_offset
    elif segments.min() == 0:
        columns["attention_mask"] = (segments > 0).long()
    # Without padding there is no mask, so that they may take their fastest attention.
    return columns


def train(
    job: Job,
    turns: Turns,
    model: Any,
    micro_batches: list[dict[str, Tensor]],
    compiled: bool = False,
) -> None:
    """Trains a model on ready micro-batches, in turns."""
    if job.threads is not None:
        torch.set_num_threads(job.threads)

    class InTurns(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            turns.hold(parts["model"], parts["optimizer"])
            turns.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not turns.step()

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> None:
            return None

        def get_batch_samples(self, *arguments: Any) -> Any:
            with turns.waiting_for_data():
                return super().get_batch_samples(*arguments)

    arguments = transformers.TrainingArguments(
        output_dir=f"{job.folder}/theirs",
        max_steps=1_000_000,
        learning_rate=1e-4,
        weight_decay=0.01,
        per_device_train_batch_size=1,  # one ready micro-batch
        gradient_accumulation_steps=job.batch // job.micro_batch,
        use_cpu=job.device == "cpu",
        bf16=job.device == "cuda",
        torch_compile=compiled,
        torch_compile_backend=job.backend if compiled else None,
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it waits for the GPU in each step
        report_to="none",
        disable_tqdm=True,
    )
    InOrder(
        model,
        arguments,
        data_collator=itemgetter(0),
        train_dataset=micro_batches,
        callbacks=[InTurns()],
    ).train()
