"""Replays a step of a run in one process: its batch from the dataset, weights from a checkpoint."""

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

from data_pipeline.reading.concat_dataset import AnyDataset
from data_pipeline.reading.loader import StreamingLoader
from trainer.accelerators import cpu
from trainer.checkpoint import integrity
from trainer.checkpoint.manager import Checkpointer
from trainer.config import Tree, decode
from trainer.config.renamed import read_stored
from trainer.config.tree import merge, parse_override
from trainer.errors import ConfigError, DataError
from trainer.examples import LoaderState
from trainer.inspect.audit.batches import Place, places
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


class ScoredExample(TypedDict):
    """An example of a step.

    Attributes:
        number: in its data order, over all passes.
        loss: None if it is not finite.
        predicted: number of predicted tokens.
        documents: where the example's documents were read from.
        text: its first tokens.
    """

    number: int
    loss: float | None
    predicted: int
    documents: list[Place]
    text: str


class Replayed(TypedDict):
    """The output of `samestep replay --json`.

    Attributes:
        step: that was replayed.
        weights_of: the step whose weights scored it.
        compared: first and last step of the ledger's row, whose digest is right; None if the ledger
            has no row of this step.
        loss: of the step; None if it is not finite.
        examples: highest loss first.
    """

    step: int
    weights_of: int
    compared: tuple[int, int] | None
    loss: float | None
    examples: list[ScoredExample]


def replay(
    folder: str, step: int, overrides: Sequence[str], *, exact: bool, skipped: bool
) -> Replayed:
    """Recomputes the batch of a step and scores each of its examples as in training, with dropout.

    Args:
        folder: of the run.
        step: from 1; the run need not have come to it.
        overrides: settings that override the run's.
        exact: trains up to the step first; otherwise the checkpoint's weights are used.
        skipped: takes the batch that the step had before examples were last excluded.

    Raises:
        ConfigError: there is no such run or step.
        DataError: the batch is not the one that the run has consumed.
    """
    experiment = _on_one_cpu(decode(Experiment, _settings(folder, step, overrides)))
    if step > experiment.training.steps:
        raise ConfigError(f"the run has {experiment.training.steps} steps, and no step {step}")
    with open_strategy(experiment) as strategy:
        root = checkpoint_folder(experiment)
        checkpointer = Checkpointer(root, experiment.checkpoint, rank=0, world_size=1)
        # The newest weights that the step could have started from.
        before = checkpointer.latest(most=step - 1)
        dataset = experiment.data.open()
        # A checkpoint holds all weights, unless some are frozen: these are in `init_from`.
        weights = experiment.init_from if before is None or experiment.freezes else None
        trainer = build_trainer(
            experiment,
            dataset,
            strategy,
            checkpointer,
            weights,
            to_restore=before is not None,
        )
        if before is not None:
            trainer.restore(before)
        past = _Past(experiment, dataset, trainer)
        excluded = past.excluded(step)
        if skipped and not excluded:
            first = trainer.state.step + 1
            raise ConfigError(f"the run skipped nothing from step {first} to {step}")
        # A batch from before an exclusion is not in the ledger, which has what was consumed.
        compared = None if skipped else past.compare(step)
        if exact:
            past.train_until(step - 1)
        loss, examples = past.score(step, excluded[:-1] if skipped else excluded)
        trainer.close()
    return Replayed(
        step=step, weights_of=trainer.state.step, compared=compared, loss=loss, examples=examples
    )


def _settings(folder: str, step: int, overrides: Sequence[str]) -> Tree:
    """Returns the run's settings at a step: of the first checkpoint since, or else the newest.

    A run that is resumed may get other settings from then on.
    """
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        raise ConfigError(
            f"{folder} is no run (no config.yaml in it). Name the output folder of a run"
        )
    tree: Tree = {**read_stored(path, overrides), "output": folder}
    root = checkpoint_folder(decode(Experiment, tree))
    # Settings of the first checkpoint at or after the step were in force when it was taken.
    for since in integrity.committed_steps(root):
        if since >= step:
            tree = integrity.read_meta(integrity.step_folder(root, since))["config"]
            for override in overrides:
                tree = merge(tree, parse_override(override))
            return {**tree, "output": folder}
    return tree


def _on_one_cpu(experiment: Experiment) -> Experiment:
    """Returns the same run for one process on the CPU, without what changes no result."""
    # Micro-batches, strategy and compilation change no result beyond rounding.
    training = replace(
        experiment.training,
        micro_batch_size="auto",
        exact="tolerance",
        precision="fp32",
        residual="fp32",
        fp8=False,
        compile=False,
        activation_checkpointing=False,
        faults=FaultsConfig(),
    )
    phases = tuple(replace(phase, micro_batch_size=None) for phase in experiment.phases)
    return replace(
        experiment,
        training=training,
        phases=phases,
        strategy=single.Config(),
        accelerator=cpu.Config(),
    )


class _Past:
    """A run at one of its checkpoints, and the steps that followed.

    Args:
        trainer: restored from the checkpoint.
    """

    def __init__(self, experiment: Experiment, dataset: AnyDataset, trainer: Trainer) -> None:
        self._experiment, self._dataset, self._trainer = experiment, dataset, trainer
        # Where the checkpoint stands; `train_until` moves the trainer on.
        self._step, self._order = trainer.state.step, trainer.phase.order
        self._place = trainer.loader.state_dict()
        path = Path(experiment.output) / "ledger.jsonl"
        self._ledger = [row for row, _ in intact_rows(path)] if path.exists() else []

    def excluded(self, step: int) -> list[Row]:
        """Returns the rows of examples that were excluded between the checkpoint and a step."""
        rows = (row for row in self._ledger if row["kind"] == "excluded")
        return [row for row in rows if self._step < row["step"] <= step]

    def compare(self, step: int) -> tuple[int, int] | None:
        """Recomputes all batches of the ledger's row with a step, and compares their digest.

        Returns:
            The first and the last step of the row; None if the ledger has no row of this step.

        Raises:
            DataError: the digest differs.
        """
        for row in self._ledger:
            if row["kind"] == "fed" and row["first_step"] <= step <= row["step"]:
                break
        else:
            return None
        first, last = row["first_step"], row["step"]
        # A row has one digest for all its steps, so all of them are needed to check one.
        digest = 0
        with self._loader(first, self.excluded(last)) as loader:
            for micro_batches in islice(loader, last - first + 1):
                digest += sum(int(batch["digest"].sum()) for batch in micro_batches)
        found = f"{digest % 2**64:016x}"
        if found != row["digest"]:
            raise DataError(
                f"the recomputed batches of steps {first} to {last} have the digest {found}, and "
                f"the ledger of {self._experiment.output} says {row['digest']}: the dataset or the "
                "settings differ from the run's. Find the difference with: samestep ledger "
                "verify"
            )
        return first, last

    def train_until(self, step: int) -> None:
        """Trains from the checkpoint to a step, in memory only."""
        trainer, order = self._trainer, -1
        trainer.model.train()
        trainer.recorder.means()  # drops the steps before the checkpoint from the next means
        while trainer.state.step < step:
            # A new data order starts with a new loader, at its first example.
            if trainer.phase.order != order:
                order, loader = trainer.phase.order, trainer.loader
                state = self._state(
                    trainer.state.step + 1, self.excluded(step), loader.state_dict()
                )
                loader.load_state_dict(state)
            trainer.train_step(next(iter(trainer.loader)))
            logger.info("step %d  loss %.4f", trainer.state.step, trainer.recorder.means()["loss"])

    def score(self, step: int, excluded: Sequence[Row]) -> tuple[float | None, list[ScoredExample]]:
        """Returns the loss of a step and its examples, highest loss first."""
        trainer = self._trainer
        objective = trainer.objectives[phase_of(trainer.phases, step - 1).index]
        trainer.model.train()
        # One example per micro-batch gives one loss per example; dropout is keyed by example, so
        # the masks do not change.
        with self._loader(step, excluded, micro_batch_size=1) as loader:
            # An example of a corrupt shard comes without content.
            rows = [row for row in next(iter(loader)) if int(row["filled"])]
            numbers = [int(row["number"]) for row in rows]
            documents = loader.documents(np.array(numbers))
        losses = score_each(trainer.model, objective, trainer.strategy, rows)
        examples: list[ScoredExample] = []
        for number, row, loss, sources in zip(numbers, rows, losses, documents, strict=True):
            tokens = row["tokens"][row["segments"] > 0][:_TEXT_TOKENS]
            examples.append(
                {
                    "number": number,
                    "loss": _mean(*loss),
                    "predicted": int(next(iter(objective.weights(row).values()))),
                    "documents": places(sources),
                    "text": self._dataset.tokenizer.decode(tokens.tolist()),
                }
            )
        # Non-finite losses first: they are what the user looks for.
        examples.sort(key=lambda each: (each["loss"] is not None, -(each["loss"] or 0.0)))
        return _mean(*(sum(column) for column in zip(*losses, strict=True))), examples

    def _loader(
        self, step: int, excluded: Sequence[Row], micro_batch_size: MicroBatchSize = "auto"
    ) -> StreamingLoader:
        """Opens a loader whose next batch is the step's, without the examples of these rows."""
        trainer = self._trainer
        phase = replace(phase_of(trainer.phases, step - 1), micro_batch_size=micro_batch_size)
        replica = trainer.strategy.replica
        loader = open_loader(self._experiment, self._dataset, replica, phase)
        loader.load_state_dict(self._state(step, excluded, loader.state_dict()))
        return loader

    def _state(self, step: int, excluded: Sequence[Row], begin: LoaderState) -> LoaderState:
        """Returns the state of a loader before a step.

        It is the checkpoint's, or `begin` if the step is in a later data order, moved on by the
        examples of the steps in between. A step before the checkpoint moves it back: `compare`
        starts at the first step of a ledger's row, of which the checkpoint may be in the middle.
        """
        phases = self._trainer.phases
        order = phase_of(phases, step - 1).order
        taken, place = self._step, self._place
        if order != self._order:
            taken = min(phase.first_step for phase in phases if phase.order == order)
            place = begin

        def examples(steps: range) -> int:
            return sum(phase_of(phases, each).global_batch_size for each in steps)

        # One of the two ranges is empty.
        moved = examples(range(taken, step - 1)) - examples(range(step - 1, taken))
        ranges = [part for row in excluded if row["order"] == order for part in row["examples"]]
        return {
            **place,
            "example": place["example"] + moved,
            "excluded": [*place["excluded"], *ranges],
            "corrupt": corrupt_shards(self._ledger, order),
        }


def _mean(total: float, weight: float) -> float | None:
    """Divides a loss by its weight; None if it is not finite."""
    value = total / weight if weight else 0.0
    return value if math.isfinite(value) else None


def report(found: Replayed, top: int, console: Console) -> None:
    """Prints the examples of the highest loss, and what they were scored and compared with."""
    compared, examples = found["compared"], found["examples"]
    checked = "the ledger has no row of it to compare with"
    if compared is not None:
        checked = f"the digest of steps {compared[0]} to {compared[1]} matches the ledger"
    loss = _shown(found["loss"])
    console.print(f"step {found['step']}: {len(examples)} examples, loss {loss}; {checked}")
    console.print(f"scored with the weights of step {found['weights_of']}, in fp32")
    row = "{:>12}  {:>10}  {:>9}  {}  {}"
    console.print(row.format("example", "loss", "predicted", "source", "text"))
    for each in examples[:top]:
        sources = ", ".join(f"{place['file']}:{place['line']}" for place in each["documents"])
        text = " ".join(each["text"].split())
        loss = _shown(each["loss"])
        console.print(row.format(each["number"], loss, each["predicted"], sources, text))


def _shown(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"
