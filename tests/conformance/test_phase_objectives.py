"""Left-to-right, then masked language modeling of the same weights, in one data order.

The same run at any world size, and when it is cut in either phase.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from samestep.cli import main
from tests.conformance.matrix import RELATIVE
from tests.conformance.worker import run_once
from tests.processes import run_ranks
from trainer.training.ledger import intact_rows

SETTINGS = [
    "model.also_causal=true",
    "model.dropout=0.1",
    "phases=[{steps: 8, objective: {kind: causal_lm}}, {steps: 6}]",
    "training.steps=14",
    "checkpoint.every=4",
    "checkpoint.keep_last=9",
]


@pytest.fixture(scope="module")
def whole(
    experiment_file: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float]]:
    """The run in three FSDP2 processes, with checkpoints at steps 4, 8 (the border), 12 and 14."""
    output = tmp_path_factory.mktemp("whole")
    return output, run_ranks(3, run_once, experiment_file, [f"output={output}", *SETTINGS])[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(1, "single"), (2, "ddp"), (2, "{kind: deepspeed, stage: 3}")],
)
def test_other_processes_take_the_same_steps(
    experiment_file: str,
    tmp_path: Path,
    whole: tuple[Path, list[float]],
    world_size: int,
    strategy: str,
) -> None:
    settings = [f"output={tmp_path}", f"strategy={strategy}", *SETTINGS]
    losses = run_ranks(world_size, run_once, experiment_file, settings)[0]
    np.testing.assert_allclose(losses, whole[1], rtol=RELATIVE)


@pytest.mark.long
@pytest.mark.parametrize(("step", "world_size"), [(4, 1), (8, 2), (12, 2)])
def test_a_run_that_was_cut_goes_on_in_its_phase(
    experiment_file: str, whole: tuple[Path, list[float]], step: int, world_size: int
) -> None:
    output, losses = whole
    overrides = [f"output={output}", *SETTINGS, "checkpoint.every=1000"]
    resumed = run_ranks(world_size, run_once, experiment_file, overrides, step)[0]
    np.testing.assert_allclose(resumed, losses[step:], rtol=RELATIVE)


def test_the_second_phase_predicts_masked_tokens_of_the_examples_that_follow(
    experiment_file: str, tmp_path: Path
) -> None:
    settings = [f"output={tmp_path / 'run'}", "strategy=single", *SETTINGS]
    assert main(["train", experiment_file, *settings]) == 0
    rows = [row for row, _ in intact_rows(tmp_path / "run" / "ledger.jsonl")]
    orders = [row for row in rows if row["kind"] == "order"]
    assert [row["objective"]["kind"] for row in orders] == ["causal_lm", "mlm"]
    assert [row["order"] for row in orders] == [0, 0]
    # One pass over the data: no example of the first phase comes again.
    fed = [row["examples"] for row in rows if row["kind"] == "fed"]
    edges = [each for ranges in fed for each in ranges]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    assert main(["ledger", "verify", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["phases=[{steps: 8, objective: {kind: causal_lm}}, {steps: 6}]"],
            "the objective, causal_lm, needs next_tokens",
        ),
        (
            ["model.nsp=true", "phases=[{steps: 8}, {steps: 6, objective: {kind: mlm_nsp}}]"],
            "phases.1 has another objective than the phase before it, which cuts",
        ),
        (
            [
                "model.nsp=true",
                "phases=[{steps: 8, sequence_length: 16}, {steps: 6, objective: {kind: mlm_nsp}}]",
            ],
            "parameters for next_sentence, which the objective, mlm, does not train",
        ),
        (
            [
                "phases=[{steps: 8}, {steps: 6, objective: {kind: distillation, teacher: runs/a, "
                "of: {kind: mlm}}}]"
            ],
            "phases.1.objective learns from a teacher",
        ),
    ],
)
def test_objectives_that_contradict_the_run_are_refused(
    experiment_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: list[str],
    message: str,
) -> None:
    given = [f"output={tmp_path / 'run'}", "strategy=single", "training.steps=14", *settings]
    assert main(["train", experiment_file, *given]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
