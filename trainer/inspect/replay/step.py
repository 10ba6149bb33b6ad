"""A step of a run, made again in one process.

Its batch from the dataset, its weights from a checkpoint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypedDict

import numpy as np
from rich.console import Console

from data_pipeline.reading.loader import StreamingLoader
from data_pipeline.reading.mixed_dataset import AnyDataset
from trainer.accelerators import cpu
from trainer.checkpoint import integrity
from trainer.checkpoint.manager import Checkpointer
from trainer.config import Tree, decode
from trainer.config.renamed import read_stored
from trainer.config.tree import merge, parse_override
from trainer.errors import ConfigError, DataError
from trainer.examples import LoaderState
from trainer.strategies import single
from trainer.training.experiment import Experiment
from trainer.training.faults import Config as FaultsConfig
from trainer.training.ledger import Row, corrupt_shards, intact_rows
from trainer.training.loop import Trainer
from trainer.training.passes import score_each
from trainer.training.phases import MicroBatchSize, phase_of
from trainer.training.run import build_trainer, checkpoint_folder, open_loader, open_strategy

logger = logging.getLogger(__name__)

_TEXT_TOKENS = 24


class Place(TypedDict):
    """Where a document was read from."""

    file: str
    line: int


class ScoredExample(TypedDict):
    """An example of a step.

    Attributes:
        number: among all examples of its data order.
        loss: None if it is not finite.
        predicted: number of predicted tokens.
        documents: it is made of.
        text: its first tokens.
    """

    number: int
    loss: float | None
    predicted: int
    documents: list[Place]
    text: str


class Replayed(TypedDict):
    """What `samestep replay --json` prints.

    Attributes:
        step: its number.
        weights_of: the step whose weights scored it.
        compared: first and last step whose digest is the ledger's; None if it has no such row.
        loss: of the step; None if it is not finite.
        examples: those of the highest loss first.
    """

    step: int
    weights_of: int
    compared: tuple[int, int] | None
    loss: float | None
    examples: list[ScoredExample]


def replay(
    folder: str, step: int, overrides: Sequence[str], *, exact: bool, skipped: bool
) -> Replayed:
    """Makes the batch of a step again, and scores each of its examples as in training, dropout
    included.

    Args:
        folder: of the run.
        step: its number, from 1; it need not have been taken.
        overrides: settings that replace those of the run.
        exact: whether to train up to the step; otherwise the weights are those of the checkpoint.
        skipped: whether the batch is the one that the step had before examples were last passed
            over.

    Raises:
        ConfigError: there is no such run or step.
        DataError: the batch is not the one that the run was fed.
    """
    experiment = _on_one_cpu(decode(Experiment, _settings(folder, step, overrides)))
    if step > experiment.training.steps:
        raise ConfigError(
            f"the run has {experiment.training.steps} steps, so there is no step {step}"
        )
    with open_strategy(experiment) as strategy:
        checkpointer = Checkpointer(
            checkpoint_folder(experiment), experiment.checkpoint, rank=0, world_size=1
        )
        before = checkpointer.latest(most=step - 1)
        dataset = experiment.data.open()
        weights = experiment.init_from if before is None or experiment.freezes else None
        trainer = build_trainer(experiment, dataset, strategy, checkpointer, weights)
        if before is not None:
            trainer.restore(before)
        past = _Past(experiment, dataset, trainer)
        passed_over = past.passed_over(step)
        if skipped and not passed_over:
            raise ConfigError(
                f"the run passed over nothing from step {trainer.state.step + 1} to {step}"
            )
        compared = None if skipped else past.compare(step)
        if exact:
            past.train_until(step - 1)
        loss, examples = past.score(step, passed_over[:-1] if skipped else passed_over)
        trainer.close()
    return Replayed(
        step=step, weights_of=trainer.state.step, compared=compared, loss=loss, examples=examples
    )


def _settings(folder: str, step: int, overrides: Sequence[str]) -> Tree:
    """The run's settings at the time of a step.

    Those of the first checkpoint since, or else its newest ones.
    """
    if not (Path(folder) / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} is no run (no config.yaml in it); name the output folder of a run"
        )
    newest = {**read_stored(Path(folder) / "config.yaml", overrides), "output": folder}
    checkpoints = checkpoint_folder(decode(Experiment, newest))
    since = next((each for each in integrity.committed_steps(checkpoints) if each >= step), None)
    if since is None:
        return newest
    tree: Tree = integrity.read_meta(integrity.step_folder(checkpoints, since))["config"]
    for override in overrides:
        tree = merge(tree, parse_override(override))
    return {**tree, "output": folder}


def _on_one_cpu(experiment: Experiment) -> Experiment:
    """The same run with what changes no step as one process on a CPU has it."""
    training = replace(
        experiment.training,
        micro_batch_size="auto",
        precision="fp32",
        compile=False,
        activation_checkpointing=False,
        faults=FaultsConfig(),
    )
    return replace(
        experiment,
        training=training,
        phases=tuple(replace(phase, micro_batch_size=None) for phase in experiment.phases),
        strategy=single.Config(),
        accelerator=cpu.Config(),
    )


class _Past:
    """A run at one of its checkpoints, and the steps that followed.

    Args:
        experiment: the run, on one CPU.
        dataset: that of the experiment.
        trainer: stands at the checkpoint.
    """

    def __init__(self, experiment: Experiment, dataset: AnyDataset, trainer: Trainer) -> None:
        self._experiment, self._dataset, self._trainer = experiment, dataset, trainer
        self._step, self._phase, self._place = (
            trainer.state.step,
            trainer.phase,
            trainer.loader.state_dict(),
        )
        path = Path(experiment.output) / "ledger.jsonl"
        self._ledger = [row for row, _ in intact_rows(path)] if path.exists() else []

    def passed_over(self, step: int) -> list[Row]:
        """What the run passed over after the checkpoint and before it took a step."""
        return [
            row
            for row in self._ledger
            if row["kind"] == "excluded" and self._step < row["step"] <= step
        ]

    def compare(self, step: int) -> tuple[int, int] | None:
        """Makes the batches of the ledger's row with a step again.

        Returns:
            The first and the last step of the row; None if there is none yet.

        Raises:
            DataError: they are not those that the run was fed.
        """
        fed = (row for row in self._ledger if row["kind"] == "fed")
        row = next((row for row in fed if row["first_step"] <= step <= row["step"]), None)
        if row is None:
            return None
        first, last = row["first_step"], row["step"]
        with self._loader(first, self.passed_over(last)) as loader:
            steps = islice(loader, last - first + 1)
            digest = (
                sum(
                    int(batch["digest"].sum()) for micro_batches in steps for batch in micro_batches
                )
                % 2**64
            )
        if f"{digest:016x}" != row["digest"]:
            raise DataError(
                f"the batches of steps {first} to {last}, made again, have the digest "
                f"{digest:016x}, and the ledger of "
                f"{self._experiment.output} says {row['digest']}: the dataset or the settings are "
                "not those that the "
                "run had; look for the difference with: samestep ledger verify"
            )
        return first, last

    def train_until(self, step: int) -> None:
        """Trains from the checkpoint to a step, in memory only."""
        trainer, order = self._trainer, -1
        trainer.model.train()
        trainer.recorder.means()  # leaves out the steps before the checkpoint
        while trainer.state.step < step:
            if trainer.phase.order != order:
                order = trainer.phase.order
                begin = trainer.loader.state_dict()
                trainer.loader.load_state_dict(
                    self._state(trainer.state.step + 1, self.passed_over(step), begin)
                )
            trainer.train_step(next(iter(trainer.loader)))
            logger.info("step %d  loss %.4f", trainer.state.step, trainer.recorder.means()["loss"])

    def score(
        self, step: int, passed_over: Sequence[Row]
    ) -> tuple[float | None, list[ScoredExample]]:
        """The loss of a step and of its examples, highest first, with the trainer's weights."""
        trainer = self._trainer
        trainer.model.train()
        with self._loader(step, passed_over, micro_batch_size=1) as loader:
            rows = [
                row for row in next(iter(loader)) if int(row["filled"])
            ]  # or it is of a corrupt shard
            documents = loader.documents(np.array([int(row["number"]) for row in rows]))
        losses = score_each(trainer.model, trainer.objective, trainer.strategy, rows)
        examples: list[ScoredExample] = [
            {
                "number": int(row["number"]),
                "loss": _finite(total / weight if weight else 0.0),
                "predicted": int(next(iter(trainer.objective.weights(row).values()))),
                "documents": [
                    {"file": file, "line": line} for file, line in dict.fromkeys(sources)
                ],
                "text": self._dataset.tokenizer.decode(
                    row["tokens"][row["segments"] > 0][:_TEXT_TOKENS].tolist()
                ),
            }
            for row, (total, weight), sources in zip(rows, losses, documents, strict=True)
        ]
        examples.sort(key=lambda each: (each["loss"] is not None, -(each["loss"] or 0.0)))
        total, weight = (sum(column) for column in zip(*losses, strict=True))
        return _finite(total / weight if weight else 0.0), examples

    def _loader(
        self, step: int, passed_over: Sequence[Row], micro_batch_size: MicroBatchSize = "auto"
    ) -> StreamingLoader:
        """A loader that stands before a step, which passes over what these rows of the ledger say."""
        phase = replace(phase_of(self._trainer.phases, step - 1), micro_batch_size=micro_batch_size)
        strategy, objective = self._trainer.strategy, self._trainer.objective
        loader = open_loader(self._experiment, self._dataset, objective, strategy.replica, phase)
        loader.load_state_dict(self._state(step, passed_over, loader.state_dict()))
        return loader

    def _state(self, step: int, passed_over: Sequence[Row], begin: LoaderState) -> LoaderState:
        """The state of a loader before a step.

        `begin` is that at the beginning of the step's data order.
        """
        phases = self._trainer.phases
        order = phase_of(phases, step - 1).order
        counted, place = self._step, self._place  # how far the run was, and where the loader stood
        if order != self._phase.order:
            counted, place = (
                min(phase.first_step for phase in phases if phase.order == order),
                begin,
            )
        sign = 1 if step > counted else -1
        between = range(min(counted, step - 1), max(counted, step - 1))
        examples = sign * sum(phase_of(phases, each).global_batch_size for each in between)
        ranges = [part for row in passed_over if row["order"] == order for part in row["examples"]]
        return {
            **place,
            "example": place["example"] + examples,
            "excluded": [*place["excluded"], *ranges],
            "corrupt": corrupt_shards(self._ledger, order),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def report(found: Replayed, top: int, console: Console) -> None:
    """Prints the examples of the highest loss, and what they were scored and compared with."""
    compared, examples = found["compared"], found["examples"]
    checked = "the ledger has no row of it to compare with"
    if compared is not None:
        checked = f"the digest of steps {compared[0]} to {compared[1]} is that of the ledger"
    console.print(
        f"step {found['step']}: {len(examples)} examples, loss {_shown(found['loss'])}; {checked}"
    )
    console.print(f"scored with the weights of step {found['weights_of']}, in fp32")
    row = "{:>12}  {:>10}  {:>9}  {}  {}"
    console.print(row.format("example", "loss", "predicted", "source", "text"))
    for example in examples[:top]:
        sources = ", ".join(f"{each['file']}:{each['line']}" for each in example["documents"])
        text = " ".join(example["text"].split())
        console.print(
            row.format(
                example["number"], _shown(example["loss"]), example["predicted"], sources, text
            )
        )


def _shown(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"
