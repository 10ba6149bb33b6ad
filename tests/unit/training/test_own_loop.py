"""Batches for a custom training loop: any start, across phases, and from a saved position."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samestep.errors import CheckpointError, ConfigError, DataError
from tests.mixtures import sources
from trainer.training.experiment import Experiment
from trainer.training.own_loop import Batches, open_batches
from trainer.training.starting import load_experiment

PHASES = (
    "phases=[{steps: 2}, {steps: 2, global_batch_size: 6}, {steps: 3, sequence_length: 16, "
    "objective: {kind: mlm, mask_fraction: 0.3}}]"
)


def opened(file: str, *overrides: str) -> Experiment:
    return load_experiment(file, ["data.threads=0", "schedule.warmup_steps=1", *overrides])


def taken(batches: Batches) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Step, example numbers and tokens of what is left."""
    with batches:
        return [
            (
                batches.step,
                torch.cat([part["number"] for part in step]),
                torch.cat([part["tokens"] for part in step]),
            )
            for step in batches
        ]


def equal(
    one: list[tuple[int, torch.Tensor, torch.Tensor]],
    other: list[tuple[int, torch.Tensor, torch.Tensor]],
) -> bool:
    return len(one) == len(other) and all(
        a[0] == b[0] and a[1].equal(b[1]) and a[2].equal(b[2])
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.long
@pytest.mark.parametrize("mixed", [False, True])
def test_any_start_and_any_saved_position_continue_the_same_batches(
    experiment_file: str, parts: dict[str, Path], mixed: bool
):
    data = ("data.path=null", sources(parts, a=2, b=1), "data.lanes=4") if mixed else ()
    experiment = opened(experiment_file, "training.steps=7", PHASES, *data)
    whole = taken(open_batches(experiment))
    assert [step for step, _, _ in whole] == list(range(1, 8))
    assert [tokens.shape[1] for _, _, tokens in whole] == [32] * 4 + [16] * 3
    for start in range(8):
        assert equal(taken(open_batches(experiment, start_step=start)), whole[start:])
        batches = open_batches(experiment)
        for _ in range(start):
            next(batches)
        saved = batches.state_dict()
        batches.close()
        resumed = open_batches(experiment)
        resumed.load_state_dict(saved)
        assert equal(taken(resumed), whole[start:])


def test_the_objective_is_that_of_the_step_taken_last(experiment_file: str):
    experiment = opened(experiment_file, "training.steps=7", PHASES)
    with open_batches(experiment, start_step=4) as batches:
        before = batches.objective.predictions(32)
        next(batches)
        assert batches.objective.predictions(32) > before
        assert batches.phase.index == 2


def test_wrong_positions_are_rejected(experiment_file: str):
    experiment = opened(experiment_file, "training.steps=7", PHASES)
    with open_batches(experiment, start_step=5) as batches:
        saved = batches.state_dict()
    with (
        open_batches(opened(experiment_file, "training.steps=7")) as other,
        pytest.raises(CheckpointError, match="was saved in data order 1"),
    ):
        other.load_state_dict(saved)
    with pytest.raises(ConfigError, match="start_step is -1"):
        open_batches(experiment, start_step=-1)
    skipping = opened(experiment_file, "data.on_corrupt=skip")
    with pytest.raises(ConfigError, match=r"data\.on_corrupt is skip"):
        open_batches(skipping, 0, 2)


def test_a_position_beyond_the_last_step_has_no_batches(experiment_file: str):
    with open_batches(opened(experiment_file, "training.steps=4"), start_step=3) as batches:
        next(batches)
        saved = batches.state_dict()
    with open_batches(opened(experiment_file, "training.steps=2")) as shorter:
        shorter.load_state_dict(saved)
        assert list(shorter) == []


def test_a_position_beyond_the_last_step_may_be_beyond_a_change_of_weights(
    experiment_file: str, parts: dict[str, Path]
):
    mixture = (
        "data.path=null",
        sources(parts, a=1, b=1),
        "data.weights=[{step: 6, weights: {a: 1, b: 3}}]",
    )
    with open_batches(opened(experiment_file, "training.steps=9", *mixture), start_step=8) as each:
        saved = each.state_dict()
    with open_batches(opened(experiment_file, "training.steps=4", *mixture)) as shorter:
        shorter.load_state_dict(saved)
        assert list(shorter) == []


def test_examples_of_an_order_that_has_ended_cannot_be_excluded(experiment_file: str):
    settings = ("training.steps=7", PHASES)
    with open_batches(
        opened(experiment_file, *settings, "data.exclude=[[3, 5]]"), start_step=4
    ) as batches:
        saved = batches.state_dict()
    for exclude in ("[[3, 5]]", "[]"):
        with open_batches(opened(experiment_file, *settings, f"data.exclude={exclude}")) as same:
            same.load_state_dict(saved)
    with (
        open_batches(opened(experiment_file, *settings, "data.exclude=[[90, 95]]")) as other,
        pytest.raises(CheckpointError, match=r"data\.exclude has new examples.* ended with step 4"),
    ):
        other.load_state_dict(saved)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("seed=9", "its seed"),
        ("data.lanes=2", "its lanes"),
        ("data.window=3", "its window"),
        ("data.packing=concat", "its packing"),
        ("data.path=OTHER", "the mixture changes"),
    ],
)
def test_the_order_that_ends_at_a_checkpoint_is_compared_as_well(
    experiment_file: str, parts: dict[str, Path], change: str, said: str
):
    with open_batches(opened(experiment_file, "training.steps=7", PHASES), start_step=4) as batches:
        saved = batches.state_dict()
    other = opened(
        experiment_file, "training.steps=7", PHASES, change.replace("OTHER", str(parts["b"]))
    )
    with open_batches(other) as batches, pytest.raises(DataError, match=said):
        batches.load_state_dict(saved)


def test_a_phase_that_has_not_begun_may_change(experiment_file: str):
    with open_batches(opened(experiment_file, "training.steps=7", PHASES), start_step=4) as batches:
        saved = batches.state_dict()
    for phases in (
        PHASES.replace("steps: 3, sequence_length: 16", "steps: 3, sequence_length: 24"),
        PHASES.replace("steps: 3, sequence_length: 16", "steps: 3"),
    ):
        experiment = opened(experiment_file, "training.steps=7", phases)
        resumed = open_batches(experiment)
        resumed.load_state_dict(saved)
        assert equal(taken(resumed), taken(open_batches(experiment))[4:])


def test_weights_change_at_their_step_after_another_batch_size(
    experiment_file: str, parts: dict[str, Path]
):
    mixture = (
        "data.path=null",
        sources(parts, a=1, b=0),
        "data.weights=[{step: 5, weights: {a: 0, b: 1}}]",
        "training.steps=8",
    )
    with open_batches(
        opened(experiment_file, *mixture, "training.global_batch_size=8"), start_step=2
    ) as batches:
        saved = batches.state_dict()
    for phases in ("[]", "[{steps: 4}, {steps: 4, global_batch_size: 6}]"):
        resumed = open_batches(
            opened(experiment_file, *mixture, "training.global_batch_size=10", f"phases={phases}")
        )
        resumed.load_state_dict(saved)
        found = [set(torch.cat([part["source"] for part in step]).tolist()) for step in resumed]
        assert found == [{0}] * 3 + [{1}] * 3
        resumed.close()
