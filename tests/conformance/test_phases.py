"""A LAMB run of two phases, from one dataset.

The same at any world size, and when it is cut in either phase.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from samestep.errors import CheckpointError, ConfigError
from tests.conformance.matrix import RELATIVE
from tests.conformance.worker import run_once
from tests.processes import run_ranks

PHASES = (
    "phases=[{steps: 8, sequence_length: 16, global_batch_size: 12},"
    " {steps: 6, sequence_length: 32, global_batch_size: 5, lr: 2e-3, schedule: {decay: linear, "
    "warmup_steps: 2}}]"
)
LAMB = "optimizer={kind: lamb, lr: 5e-3}"
SETTINGS = [
    PHASES,
    LAMB,
    "training.steps=14",
    "checkpoint.every=4",
    "checkpoint.keep_last=9",
    "model.dropout=0.1",
]


@pytest.fixture(scope="module")
def whole(
    experiment_file: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float]]:
    """The run in four FSDP2 processes, with checkpoints at steps 4, 8 (the border), 12 and 14."""
    output = tmp_path_factory.mktemp("whole")
    return output, run_ranks(4, run_once, experiment_file, [f"output={output}", *SETTINGS])[0]


def test_one_process_takes_the_same_steps(
    experiment_file: str, tmp_path: Path, whole: tuple[Path, list[float]]
) -> None:
    single = run_ranks(
        1, run_once, experiment_file, [f"output={tmp_path}", "strategy=single", *SETTINGS]
    )[0]
    np.testing.assert_allclose(single, whole[1], rtol=RELATIVE)


@pytest.mark.long
@pytest.mark.parametrize(("step", "world_size"), [(4, 1), (8, 3), (12, 2)])
def test_a_run_that_was_cut_goes_on_in_its_phase(
    experiment_file: str, whole: tuple[Path, list[float]], step: int, world_size: int
) -> None:
    output, losses = whole
    overrides = [f"output={output}", *SETTINGS, "checkpoint.every=1000"]
    resumed = run_ranks(world_size, run_once, experiment_file, overrides, step)[0]
    np.testing.assert_allclose(resumed, losses[step:], rtol=RELATIVE)


@pytest.mark.parametrize(
    ("phases", "problem"),
    [
        (
            "{steps: 13, sequence_length: 16}, {steps: 1, sequence_length: 32}",
            f"{ConfigError.__name__}: phases.0 had 8 steps and has 13, and it has begun",
        ),
        # With one length there is one data order.
        (
            "{steps: 8, sequence_length: 16}, {steps: 6, sequence_length: 16}",
            f"{CheckpointError.__name__}: the checkpoint of step 12 .* data order 1",
        ),
    ],
)
def test_a_step_that_would_change_its_phase_is_refused(
    experiment_file: str, whole: tuple[Path, list[float]], phases: str, problem: str
) -> None:
    overrides = [f"output={whole[0]}", *SETTINGS, f"phases=[{phases}]"]
    with pytest.raises(AssertionError, match=problem):
        run_ranks(1, run_once, experiment_file, overrides, 12)


@pytest.mark.long
def test_a_finished_run_goes_on_with_one_more_phase(
    experiment_file: str, whole: tuple[Path, list[float]]
) -> None:
    longer = PHASES[:-1] + ", {steps: 3, sequence_length: 24, global_batch_size: 4}]"
    overrides = [
        f"output={whole[0]}",
        *SETTINGS,
        longer,
        "training.steps=17",
        "checkpoint.every=1000",
    ]
    assert len(run_ranks(2, run_once, experiment_file, overrides, 14)[0]) == 3


def test_the_checkpoint_says_which_order_it_is_in(whole: tuple[Path, list[float]]) -> None:
    orders = {
        step: json.loads((whole[0] / f"checkpoints/step-{step:08d}/meta.json").read_text())["order"]
        for step in (4, 8, 12)
    }
    assert orders == {4: 0, 8: 0, 12: 1}


@pytest.mark.long
def test_phases_of_one_length_are_one_pass_over_the_data(
    experiment_file: str, tmp_path: Path
) -> None:
    """Two phases that differ in nothing are no phases.

    So the second goes on with the examples after the first.
    """
    common = ["strategy=single", "training.steps=8", "checkpoint.every=4", LAMB]
    one = run_ranks(1, run_once, experiment_file, [f"output={tmp_path / 'one'}", *common])[0]
    cut = [f"output={tmp_path / 'two'}", *common, "phases=[{steps: 4}, {steps: 4}]"]
    assert run_ranks(1, run_once, experiment_file, cut)[0] == one
    assert run_ranks(1, run_once, experiment_file, cut, 4)[0] == one[4:]  # from the border
