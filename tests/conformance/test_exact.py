"""`training.exact: bitwise`: the same bits of weights and optimizer state at any world size."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conformance.exact import run, task
from tests.conformance.worker import FAMILIES, TEXT_TASKS
from trainer.checkpoint import integrity

QUICK = ("mlm_lamb", "electra", "elmo", "bart")
"""Families that differ most: two models in one, recurrent layers, an encoder and a decoder."""


def assert_same_bits(
    file: str, folder: Path, layouts: Sequence[tuple[int, str]], *overrides: str
) -> None:
    expected = run(file, folder / "one", 1, "single", *overrides)
    for number, (size, strategy) in enumerate(layouts):
        found = run(file, folder / f"{number}", size, strategy, *overrides)
        assert found == expected, f"{size} {strategy}"


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_bert(experiment_file: str, tmp_path: Path, precision: str) -> None:
    layouts = [(2, "ddp"), (3, "fsdp")]
    assert_same_bits(experiment_file, tmp_path, layouts, *task("mlm", precision))


@pytest.mark.long
def test_t5_with_adafactor(t5_experiment: str, tmp_path: Path) -> None:
    layouts = [(4, "hsdp"), (1, "fsdp")]
    assert_same_bits(t5_experiment, tmp_path, layouts, *task("span_corruption", "bf16"))


@pytest.mark.long
def test_scattered_after_each_unit(experiment_file: str, tmp_path: Path) -> None:
    scattering = "{kind: fsdp, reduce_each_micro_batch: true}"
    assert_same_bits(experiment_file, tmp_path, [(2, scattering)], *task("mlm_lamb", "fp32"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in QUICK else pytest.mark.exhaustive)
        for name in ("mlm_lamb", *{**FAMILIES, **dict.fromkeys(TEXT_TASKS)})
    ],
)
def test_every_family_and_optimizer(
    experiment_file: str, t5_experiment: str, tmp_path: Path, name: str
) -> None:
    file = t5_experiment if name in TEXT_TASKS else experiment_file
    assert_same_bits(file, tmp_path, [(3, "fsdp"), (7, "ddp")], *task(name, "bf16"))


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_through_resumes_at_other_world_sizes(
    experiment_file: str, tmp_path: Path, precision: str
) -> None:
    changed = [*task("mlm", precision), "checkpoint.every=3", "checkpoint.keep_last=9"]
    expected, *_ = run(experiment_file, tmp_path / "whole", 1, "single", *changed)
    output = tmp_path / "resumed"
    run(experiment_file, output, 5, "fsdp", *changed)
    # Each world loses what it did after a checkpoint, as after a kill.
    for step, size, strategy in ((3, 3, "ddp"), (6, 4, "hsdp"), (9, 1, "single")):
        for later in range(step + 3, 13, 3):
            shutil.rmtree(integrity.step_folder(output / "checkpoints", later))
        found, *_ = run(experiment_file, output, size, strategy, *changed, resume=True)
        assert found == expected, f"{size} {strategy}"


@pytest.mark.long
def test_what_must_differ(experiment_file: str, tmp_path: Path) -> None:
    """Ordinary sums at another world size, units of another size, and an example left out."""
    exact, *_ = run(experiment_file, tmp_path / "exact", 1, "single")
    ordinary = "training.exact=tolerance"
    one, *_ = run(experiment_file, tmp_path / "one", 1, "single", ordinary)
    three, *_ = run(experiment_file, tmp_path / "three", 3, "ddp", ordinary)
    larger, *_ = run(
        experiment_file, tmp_path / "larger", 1, "single", "training.micro_batch_size=4"
    )
    skipped, *_ = run(experiment_file, tmp_path / "skipped", 1, "single", "data.exclude=[[17, 18]]")
    assert len({exact, one, three, larger, skipped}) == 5


PHASES = (
    "phases=[{steps: 5, sequence_length: 16, global_batch_size: 12},"
    " {steps: 7, sequence_length: 32, global_batch_size: 5, micro_batch_size: 1}]"
)
LORA = "model={kind: bert, peft: {kind: lora, rank: 4, targets: [query, value]}}"
STUDENT = (
    "objective={{kind: distillation, teacher: {run}, of: mlm, soft: 5.0, hard: 2.0, cosine: 1.0, "
    "positions: all}}"
)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["phases", "skipped", "lora", "student"])
def test_other_ways_of_training(
    experiment_file: str, finished_run: Path, tmp_path: Path, kind: str
) -> None:
    """Two phases, a step that is skipped, adapters on frozen weights, a teacher."""
    settings = {
        "phases": [PHASES],
        "skipped": [
            "objective={kind: tests.sick_objective, sick: [75]}",
            "training.faults.action=skip",
        ],
        "lora": [LORA, f"init_from={finished_run}"],
        "student": ["model.layers=1", STUDENT.format(run=finished_run)],
    }[kind]
    assert_same_bits(
        experiment_file, tmp_path, [(2, "ddp"), (3, "fsdp")], *settings, "training.precision=bf16"
    )
