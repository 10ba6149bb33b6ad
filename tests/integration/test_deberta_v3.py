"""DeBERTa v3 from pre-training to exports and fine-tuning, by the commands of the docs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.integration import tasks
from tests.integration.commands import Samestep, losses
from trainer.checkpoint.huggingface import load_folder
from trainer.training.weights.loading import load_weights

MODEL = (
    "model={kind: deberta_v3, vocab_size: 600, layers: 2, width: 32, heads: 2, ffn_width: 64, "
    "max_positions: 32, position_buckets: 8, generator_layers: 1, mask_decoder: true}"
)
TABLE = "embeddings.tokens.weight"
LORA = "model.peft={kind: lora, rank: 4, targets: [query, value, up, down]}"


@pytest.fixture(scope="module")
def run(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from samestep.cli import main

    folder = tmp_path_factory.mktemp("deberta_v3") / "run"
    settings = (MODEL, "objective=replaced_tokens", "training.evaluate_every=12")
    assert main(["train", experiment_file, f"output={folder}", *settings]) == 0
    return folder


def test_it_learns(run: Path) -> None:
    values = list(losses(run).values())
    assert values[-1] < values[0]
    tensors = load_weights(run).tensors
    assert tensors[TABLE].abs().max() > 0


def test_both_models_are_exported(run: Path, tmp_path: Path, samestep: Samestep) -> None:
    assert samestep("export", run, tmp_path / "hf").code == 0
    assert samestep("export", run, tmp_path / "generator", "--part", "generator").code == 0
    tensors = load_weights(run).tensors
    ours = tensors[TABLE] + tensors[f"generator.{TABLE}"]
    (name,) = (name for name in load_folder(tmp_path / "hf")[1] if "word_embeddings" in name)
    assert torch.equal(load_folder(tmp_path / "hf")[1][name], ours)
    assert torch.equal(load_folder(tmp_path / "generator")[1][name], tensors[f"generator.{TABLE}"])


@pytest.mark.long
@pytest.mark.parametrize("settings", [("training.steps=20",), (LORA, "training.steps=20")])
def test_fine_tuning_starts_from_the_sum(
    run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep, settings: tuple[str, ...]
) -> None:
    """All weights, and a part of them beside a frozen table; the exports agree with `label`."""
    tasks.tune("classification", tmp_path, run, dataset_folder / "tokenizer", *settings)
    tuned = tmp_path / "run-classification"
    before = load_weights(run).tensors
    moved: Any = load_weights(tuned).tensors[TABLE] - before[TABLE] - before[f"generator.{TABLE}"]
    assert moved.abs().max() < (1e-7 if settings[0] == LORA else 0.05)
    assert samestep("evaluate", tuned).code == 0
    assert samestep("export", tuned, tmp_path / "hf").code == 0
    _, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert not any(report.values()), report
    assert len(AutoTokenizer.from_pretrained(tmp_path / "hf")) >= 500
