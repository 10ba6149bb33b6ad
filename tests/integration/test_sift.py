"""Fine-tuning with SiFT through the real command, at several world sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.conformance.worker import run_once
from tests.integration import tasks
from tests.integration.commands import Samestep
from tests.integration.test_distillation import STUDENT
from tests.processes import run_ranks

STRATEGIES = ["ddp", "fsdp", "{kind: deepspeed, stage: 2}", "{kind: deepspeed, stage: 3}"]


@pytest.fixture(scope="module")
def experiment(
    finished_run: Path, dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("sift")
    file = tasks.tune("classification", folder, finished_run, dataset_folder / "tokenizer")
    tree = yaml.safe_load(file.read_text())
    del tree["init_from"]
    tree["model"] = {**STUDENT, "head": "classification", "labels": ["about_class", "about_file"]}
    tree["objective"] = {"kind": "sift", "of": tree["objective"], "noise": 0.1, "step": 0.01}
    (folder / "sift.yaml").write_text(yaml.safe_dump(tree | {"output": str(folder / "sift")}))
    return folder / "sift.yaml"


@pytest.mark.long
def test_it_learns_and_logs_both_losses(
    experiment: Path, tmp_path: Path, samestep: Samestep
) -> None:
    run = tmp_path / "run"
    assert samestep("train", experiment, f"output={run}").code == 0
    rows = [row for row in tasks.rows_of(run) if "train/loss" in row]
    for row in rows:
        whole = row["train/task_loss"] + row["train/sift_loss"]
        assert row["train/loss"] == pytest.approx(whole, rel=1e-4)
    assert all(row["train/sift_loss"] > 0 for row in rows)
    scored = [row for row in tasks.rows_of(run) if "heldout/accuracy" in row][-1]
    assert scored["heldout/accuracy"] > 0.9
    assert samestep("evaluate", run).code == 0
    assert samestep("replay", run, 10, "--exact").code == 0


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_number_of_processes_makes_the_same_steps(
    strategy: str, experiment: Path, tmp_path: Path
) -> None:
    settings = ["training.steps=6", "training.evaluate_every=null", f"output={tmp_path}"]
    (one,) = run_ranks(1, run_once, str(experiment), [*settings, "strategy=single"])
    micro = "training.micro_batch_size=2"
    found = run_ranks(2, run_once, str(experiment), [*settings, micro, f"strategy={strategy}"])[0]
    np.testing.assert_allclose(found, one, rtol=2e-6)


def test_a_model_without_a_norm_after_its_embeddings_is_refused(
    experiment: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    shape = "layers: 1, width: 16, heads: 2, ffn_width: 32, max_positions: 32"
    labels = "head: classification, labels: [about_class, about_file]"
    model = f"model={{kind: gpt2, vocab_size: 600, {shape}, {labels}}}"
    result = samestep(
        "train",
        experiment,
        f"output={tmp_path}",
        model,
        "objective.of.reads=last",
    )
    assert result.code == 2
    assert "needs inputs.noise" in result.message, result.message
