"""Gradual unfreezing in runs: frozen layers stay as they are, the same at any world size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.conformance.worker import run_once
from tests.integration import tasks
from tests.integration.commands import Samestep
from tests.processes import run_ranks
from trainer.models import ModelConfig
from trainer.training.weights.loading import load_weights

EVERY, STEPS = 3, 13
LSTM = (
    "model={kind: lstm, vocab_size: 600, layers: 2, hidden_size: 24, embedding_width: 16, "
    "head: classification, labels: [about_class, about_file]}"
)
UNFREEZE = [f"optimizer.unfreeze_every={EVERY}", f"training.steps={STEPS}"]


@pytest.fixture(scope="module")
def folder(
    dataset_folder: Path, finished_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The data of a classification, and an experiment that starts from a BERT of two layers."""
    from samestep.cli import main

    folder = tmp_path_factory.mktemp("unfreezing")
    build = tasks.write_build("classification", folder, dataset_folder / "tokenizer")
    assert main(["data", "build", str(build)]) == 0
    tasks.write_experiment("classification", folder, finished_run, STEPS)
    return folder


def rows(run: Path) -> list[tuple[float, float]]:
    """The loss and the gradient norm of each step."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["train/loss"], row["train/grad_norm"]) for row in found if "train/loss" in row]


def layers_above(config: ModelConfig) -> dict[str, int]:
    with torch.device("meta"):
        return config.build().layers_above()


@pytest.mark.long
def test_layers_are_trained_one_after_the_other(
    folder: Path, finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """First it is the run whose encoder is frozen, gradient norms included."""
    file, run = folder / "classification.yaml", tmp_path / "run"
    settings = [*UNFREEZE, "checkpoint.every=1", "checkpoint.keep_last=20", "data.threads=0"]
    assert samestep("train", file, *settings, f"output={run}").code == 0
    before = load_weights(str(finished_run)).tensors
    for step in range(1, STEPS + 1):
        weights = load_weights(str(run / "checkpoints" / f"step-{step:08d}"))
        for name, above in layers_above(weights.config).items():
            is_frozen = step <= above * EVERY
            moments = weights.optimizer[f"exp_avg_sq/{name}"]
            assert bool(moments.any()) == (not is_frozen), f"{name} after step {step}"
            if name in before and not name.startswith("head."):
                assert torch.equal(weights.tensors[name], before[name]) == is_frozen
    frozen = ["frozen=[embeddings, layers]", f"training.steps={STEPS}", "data.threads=0"]
    assert samestep("train", file, *frozen, f"output={tmp_path / 'frozen'}").code == 0
    ours, reference = rows(run), rows(tmp_path / "frozen")
    # The fourth loss is of weights from before the first layer was updated, its norm is not.
    np.testing.assert_allclose(ours[:EVERY], reference[:EVERY], rtol=1e-6)
    assert ours[EVERY][0] == pytest.approx(reference[EVERY][0], rel=1e-6)
    assert ours[EVERY][1] > (1 + 1e-4) * reference[EVERY][1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "others"),
    [
        ("lstm", []),
        pytest.param(
            "bert", [(3, "ddp"), (2, "{kind: deepspeed, stage: 2}")], marks=pytest.mark.exhaustive
        ),
    ],
)
def test_any_processes_take_the_same_steps_and_go_on_from_them(
    model: str, others: list[tuple[int, str]], folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    chosen = [LSTM] if model == "lstm" else ["model.dropout=0.1"]
    resolved = samestep("config", folder / "classification.yaml", *chosen, *UNFREEZE)
    tree = yaml.safe_load(resolved.out) | {"init_from": None}
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump(tree))

    def losses(
        processes: int, strategy: str, *settings: str, resume: int | None = None
    ) -> list[float]:
        given = [f"strategy={strategy}", "training.micro_batch_size=2", *settings]
        found: list[float] = run_ranks(processes, run_once, str(file), given, resume)[0]
        return found

    expected = losses(1, "single", f"output={tmp_path / 'one'}")
    output = f"output={tmp_path / 'two'}"
    every = ["checkpoint.every=2", "checkpoint.keep_last=9"]
    np.testing.assert_allclose(losses(2, "fsdp", output, *every), expected, rtol=1e-5)
    for processes, strategy in others:
        found = losses(processes, strategy, f"output={tmp_path / str(processes)}{strategy[:4]}")
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=strategy)
    # Step 4 is in the middle of the second stage.
    resumed = losses(1, "single", output, resume=4)
    np.testing.assert_allclose(resumed, expected[4:], rtol=1e-5)


def test_too_many_steps_for_each_layer_are_rejected(
    folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    settings = ["optimizer.unfreeze_every=5", f"output={tmp_path}"]
    message = samestep("train", folder / "classification.yaml", *settings).message
    assert "the lowest layer would begin after 15 steps, and the run has 13" in message
    assert "Use a smaller number, such as 4" in message
