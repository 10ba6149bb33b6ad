"""ELECTRA from pre-training to exports, features and fine-tuning, by the commands of the docs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

from tests.integration import tasks
from tests.integration.commands import Samestep, losses

MODEL = (
    "model={kind: electra, vocab_size: 600, layers: 2, width: 32, heads: 2, ffn_width: 64, "
    "embedding_width: 20, max_positions: 32, generator_divisor: 2}"
)


@pytest.fixture(scope="module")
def run(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from trainer.cli import main

    folder = tmp_path_factory.mktemp("electra") / "run"
    settings = (MODEL, "objective=replaced_tokens", "training.evaluate_every=12")
    assert main(["train", experiment_file, f"output={folder}", *settings]) == 0
    return folder


def test_it_learns_and_logs_both_losses(run: Path) -> None:
    (row,) = (row for row in tasks.rows_of(run) if "heldout/rtd_loss" in row)
    assert 0 < row["heldout/replaced"] <= 1
    assert row["heldout/rtd_accuracy"] > 0.5
    assert row["heldout/mlm_loss"] < 7
    values = list(losses(run).values())
    assert values[-1] < values[0]


def test_both_models_are_exported(run: Path, tmp_path: Path, samestep: Samestep) -> None:
    assert samestep("export", run, tmp_path / "discriminator").code == 0
    assert samestep("export", run, tmp_path / "generator", "--part", "generator").code == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "generator")
    inputs = tokenizer("a class of the module", return_tensors="pt")
    for name, auto, shape in (
        ("discriminator", AutoModelForPreTraining, inputs["input_ids"].shape),
        ("generator", AutoModelForMaskedLM, (*inputs["input_ids"].shape, 600)),
    ):
        model, report = auto.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(report.values()), report
        assert model(**inputs).logits.shape == torch.Size(shape)
    card = (tmp_path / "discriminator" / "README.md").read_text()
    assert "pipeline_tag: feature-extraction" in card


def test_masks_are_filled_and_features_computed(
    run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """The generator fills; the discriminator reads texts as they are."""
    filled = samestep("fill", run, "the [MASK] of the module")
    assert (filled.code, len(filled.out.splitlines()) > 1) == (0, True)
    text, found = tmp_path / "texts.txt", tmp_path / "features.npy"
    text.write_text("the class of the module\nanother one\n")
    assert samestep("features", run, text, "--output", found).code == 0
    assert np.load(found).shape == (2, 32)
    assert samestep("export", run, tmp_path / "discriminator").code == 0
    refused = samestep("fill", tmp_path / "discriminator", "the [MASK]")
    assert (refused.code, "does not offer tokens" in refused.message) == (2, True)


def test_an_unknown_part_is_refused(
    run: Path, finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    result = samestep("export", run, tmp_path / "out", "--part", "head")
    assert (result.code, "--part is head, but" in result.message) == (2, True)
    assert "has only generator" in result.message
    result = samestep("export", finished_run, tmp_path / "out", "--part", "generator")
    assert (result.code, "has no parts. Leave --part out" in result.message) == (2, True)
    assert not (tmp_path / "out").exists()


def test_fine_tuning_starts_from_the_discriminator(
    run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    tokenizer = dataset_folder / "tokenizer"
    tasks.tune("classification", tmp_path, run, tokenizer, "training.steps=20")
    config = (tmp_path / "run-classification" / "config.yaml").read_text()
    assert "kind: electra" in config
    assert samestep("evaluate", tmp_path / "run-classification").code == 0


def test_an_objective_that_does_not_fit_is_refused(
    experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    """Without a generator, and with a model of another kind."""
    without = MODEL.replace("generator_divisor: 2", "generator_divisor: 0")
    for model, fix in (
        (without, "model.generator_divisor=4"),
        ("model.kind=bert", "choose another"),
    ):
        result = samestep(
            "train", experiment_file, f"output={tmp_path}", model, "objective=replaced_tokens"
        )
        assert result.code == 2
        assert "needs" in result.message
        assert fix in result.message, result.message
    result = samestep("train", experiment_file, f"output={tmp_path}", MODEL)
    assert (result.code, "replaced" in result.message) == (2, True)
