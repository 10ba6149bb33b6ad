"""Fine-tuning under torch-xla's SPMD, on 4 devices, beside the same runs of one process of torch on
the CPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.integration import tasks
from tests.integration.commands import Samestep
from tests.xla.conftest import Work

RELATIVE = 1e-4
MODEL = "model={kind: bert, vocab_size: 600, layers: 3, width: 32, heads: 2, ffn_width: 64, max_positions: 32}"  # noqa: E501
TASKS = {
    "classification": (
        "model.head=classification",
        "model.labels=[about_class,about_file]",
        "objective.metrics=[accuracy]",
        "optimizer.layer_decay=0.8",
        "strategy.scan_layers=false",
    ),
    "question_answering": ("model.head=question_answering",),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind",
    [
        "classification",
        pytest.param("question_answering", marks=pytest.mark.exhaustive),
    ],
)
def test_losses_and_scores_are_those_of_the_cpu(
    work: Work, samestep: Samestep, dataset_folder: Path, tmp_path: Path, kind: str
) -> None:
    """Two micro-batches a step, and evaluations whose last batch is not full.

    Outputs are gathered without a graph.
    """
    assert (
        samestep(
            "data", "build", tasks.write_build(kind, tmp_path, dataset_folder / "tokenizer")
        ).code
        == 0
    )
    file = tasks.write_experiment(kind, tmp_path, tmp_path / "none", steps=20)
    batches = (
        "training.global_batch_size=16",
        "training.micro_batch_size=2",
        "training.evaluate_every=10",
    )
    settings = ("init_from=null", MODEL, *TASKS[kind], *batches)
    own = [each for each in settings if not each.startswith("strategy")]
    assert samestep("train", file, f"output={tmp_path / 'cpu'}", *own).code == 0
    rows = tasks.rows_of(tmp_path / "cpu")
    report = work(str(file), f"output={tmp_path / 'xla'}", *settings)
    expected = [row["train/loss"] for row in rows if "train/loss" in row]
    np.testing.assert_allclose(report["losses"], expected, rtol=RELATIVE)
    scores = [
        {name: row[name] for name in row if "/" in name} for row in rows if "heldout/loss" in row
    ]
    assert report["scores"] == [pytest.approx(each, rel=RELATIVE) for each in scores]
    assert len(scores) == 2
    assert report["compiled"] == 4  # the start, the step, the reading of metrics, the evaluation
    assert report["fallbacks"] == []


@pytest.mark.timeout(600)
def test_a_student_learns_beside_its_teacher(
    work: Work, samestep: Samestep, dataset_folder: Path, tmp_path: Path
) -> None:
    """The teacher is whole on each device, and part of the step's graph."""
    assert (
        samestep(
            "data",
            "build",
            tasks.write_build("classification", tmp_path, dataset_folder / "tokenizer"),
        ).code
        == 0
    )
    file = tasks.write_experiment("classification", tmp_path, tmp_path / "none", steps=10)
    batches = (
        "training.global_batch_size=16",
        "training.micro_batch_size=2",
        "training.evaluate_every=null",
    )
    settings = ("init_from=null", MODEL, *TASKS["classification"][:2], *batches)
    teacher = tmp_path / "teacher"
    assert samestep("train", file, f"output={teacher}", *settings).code == 0
    of = f"objective={{kind: distillation, teacher: {teacher}, of: classification, hard: 0.5, cosine: 1.0}}"  # noqa: E501
    student = (*settings, of, "model.layers=2", "seed=3")
    assert samestep("train", file, f"output={tmp_path / 'cpu'}", *student).code == 0
    report = work(str(file), f"output={tmp_path / 'xla'}", *student)
    expected = [row["train/loss"] for row in tasks.rows_of(tmp_path / "cpu") if "train/loss" in row]
    np.testing.assert_allclose(report["losses"], expected, rtol=RELATIVE)
    assert report["fallbacks"] == []
    assert max(report["compilations"].values()) == 1


def test_lora_is_that_of_the_cpu(
    work: Work, samestep: Samestep, finished_run: Path, dataset_folder: Path, tmp_path: Path
) -> None:
    """Its layers are a loop, too.

    Frozen parameters are there, and not in what a checkpoint gets.
    """
    assert (
        samestep(
            "data",
            "build",
            tasks.write_build("classification", tmp_path, dataset_folder / "tokenizer"),
        ).code
        == 0
    )
    file = tasks.write_experiment("classification", tmp_path, finished_run, steps=6)
    settings = (
        "training.global_batch_size=16",
        "training.micro_batch_size=2",
        "training.evaluate_every=null",
    )
    lora = "model.peft={kind: lora, rank: 4, targets: [query, value, up]}"
    assert samestep("train", file, f"output={tmp_path / 'cpu'}", lora, *settings).code == 0
    report = work(str(tmp_path / "cpu" / "config.yaml"), f"output={tmp_path / 'xla'}")
    expected = [row["train/loss"] for row in tasks.rows_of(tmp_path / "cpu") if "train/loss" in row]
    np.testing.assert_allclose(report["losses"], expected, rtol=RELATIVE)
    assert all(".lora." in name or "/head." in name for name in report["splits"])
    assert report["fallbacks"] == []
