"""Replays a step of a run in one process: its batch from the dataset, weights from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

import numpy as np

from samestep.config import decode
from samestep.errors import ConfigError
from samestep.terminal import Console
from trainer.accelerators.kinds import cpu
from trainer.inspect.audit.batches import Place, places
from trainer.inspect.replay.past import Past, open_past, settings_at
from trainer.strategies.kinds import single
from trainer.training.evaluation import score_each
from trainer.training.experiment import Experiment
from trainer.training.ledger import Row
from trainer.training.observers.settings import Faults
from trainer.training.phases import phase_of

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
        weights_of: the step of the weights that scored it.
        compared: first and last step of the ledger's row, which has the right digest; None if the
            ledger has no row of this step.
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
    experiment = _on_one_cpu(decode(Experiment, settings_at(folder, step, overrides)))
    if step > experiment.training.steps:
        steps = experiment.training.steps
        raise ConfigError(f"STEP is {step}, and the run has {steps} steps. Use 1 to {steps}.")
    with open_past(experiment, step - 1) as past:
        excluded = past.excluded(step)
        if skipped and not excluded:
            first = past.trainer.state.step + 1
            raise ConfigError(
                f"the run skipped no examples from step {first} to {step}. Leave --skipped out."
            )
        # A batch from before an exclusion is not in the ledger, which has what was consumed.
        compared = None if skipped else past.compare(step)
        if exact:
            for _ in past.train(step - 1):
                pass
        # Without the last exclusion, the loader gives what the step had before it.
        loss, examples = _score(past, step, excluded[:-1] if skipped else excluded)
        weights_of = past.trainer.state.step
    return Replayed(
        step=step, weights_of=weights_of, compared=compared, loss=loss, examples=examples
    )


def _on_one_cpu(experiment: Experiment) -> Experiment:
    """Returns the same run for one process on the CPU, without settings that change no result."""
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
        faults=Faults(),
    )
    phases = tuple(replace(phase, micro_batch_size=None) for phase in experiment.phases)
    return replace(
        experiment,
        training=training,
        phases=phases,
        strategy=single.Config(),
        accelerator=cpu.Config(),
    )


def _score(
    past: Past, step: int, excluded: Sequence[Row]
) -> tuple[float | None, list[ScoredExample]]:
    """Returns the loss of a step and its examples, highest loss first."""
    trainer = past.trainer
    objective = trainer.objectives[phase_of(trainer.phases, step - 1).index]
    # Dropout as in training: its keys come with the rows.
    trainer.model.train()
    # One example per micro-batch gives one loss per example; dropout is keyed by example, so
    # the masks do not change.
    with past.open_loader(step, excluded, micro_batch_size=1) as loader:
        # An example of a corrupt shard comes without content.
        rows = [row for row in next(iter(loader)) if int(row["filled"])]
        numbers = [int(row["number"]) for row in rows]
        documents = loader.documents(np.array(numbers))
    losses = score_each(trainer.model, objective, trainer.strategy, rows)
    examples: list[ScoredExample] = []
    for number, row, loss, sources in zip(numbers, rows, losses, documents, strict=True):
        # As the model reads them, masks included.
        tokens = row["tokens"][row["segments"] > 0][:_TEXT_TOKENS]
        examples.append(
            {
                "number": number,
                "loss": _mean(*loss),
                "predicted": int(next(iter(objective.weights(row).values()))),
                "documents": places(sources),
                "text": past.dataset.tokenizer.decode(tokens.tolist()),
            }
        )
    # Non-finite losses first: they are what the user looks for.
    examples.sort(key=lambda each: (each["loss"] is not None, -(each["loss"] or 0.0)))
    return _mean(*(sum(column) for column in zip(*losses, strict=True))), examples


def _mean(total: float, weight: float) -> float | None:
    """Divides a loss by its weight; None if it is not finite."""
    value = total / weight if weight else 0.0
    return value if math.isfinite(value) else None


def report(found: Replayed, top: int, console: Console) -> None:
    """Prints the examples of the highest loss, the weights and the ledger's row."""
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
