"""ELECTRA from pre-training to exports, features and fine-tuning, by the commands of the docs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoTokenizer

from tests.integration import tasks
from tests.integration.commands import Samestep, losses
from trainer.checkpoint.huggingface import load_folder

MODEL = (
    "model={kind: electra, vocab_size: 600, layers: 2, width: 32, heads: 2, ffn_width: 64, "
    "embedding_width: 20, max_positions: 32, generator_divisor: 2}"
)


@pytest.fixture(scope="module")
def run(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from samestep.cli import main

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


@pytest.mark.long
def test_fine_tuning_starts_from_the_discriminator(
    run: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    tokenizer = dataset_folder / "tokenizer"
    tasks.tune("classification", tmp_path, run, tokenizer, "training.steps=20")
    config = (tmp_path / "run-classification" / "config.yaml").read_text()
    assert "kind: electra" in config
    assert samestep("evaluate", tmp_path / "run-classification").code == 0


@pytest.mark.long
def test_two_stage_training(
    experiment_file: str, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """A generator alone, then a discriminator that starts from it, beside the frozen generator."""
    shape = MODEL.removesuffix("generator_divisor: 2}")
    first, second = tmp_path / "first", tmp_path / "second"
    stage = ("train", experiment_file, f"output={first}", f"model={shape[6:]}masked_lm: true}}")
    assert samestep(*stage, "objective=mlm").code == 0
    model = f"model={shape[6:]}generator_divisor: 1, share_embeddings: false}}"
    settings = (f"output={second}", model, "objective=replaced_tokens", f"init_from={first}")
    frozen = ("frozen=[generator]", "training.steps=6", "checkpoint.every=3")
    assert samestep("train", experiment_file, *settings, *frozen).code == 0
    assert samestep("train", experiment_file, *settings, *frozen, "training.steps=9").code == 0
    found = {}
    for folder, part in ((first, ()), (second, ("--part", "generator"))):
        out = tmp_path / f"{folder.name}_hf"
        assert samestep("export", folder, out, *part).code == 0
        found[folder.name] = load_folder(out)[1]
    assert found["first"].keys() == found["second"].keys()
    for name, tensor in found["first"].items():
        assert torch.equal(tensor, found["second"][name]), name
    assert samestep("export", second, tmp_path / "discriminator").code == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("head", "masked_only"), [("tokens", True), ("tokens_or_copy", False), ("detector", True)]
)
def test_variants_of_the_paper_learn(
    experiment_file: str, tmp_path: Path, samestep: Samestep, head: str, masked_only: bool
) -> None:
    kind = "replaced_tokens" if head == "detector" else "replaced_mlm"
    result = samestep(
        "train",
        experiment_file,
        f"output={tmp_path / 'run'}",
        f"{MODEL[:-1]}, main_head: {head}}}",
        f"objective={{kind: {kind}, masked_only: {str(masked_only).lower()}}}",
    )
    assert result.code == 0, result.message
    values = list(losses(tmp_path / "run").values())
    assert values[-1] < values[0]
    assert samestep("export", tmp_path / "run", tmp_path / "hf").code == 0
    kinds = AutoModelForPreTraining if head == "detector" else AutoModelForMaskedLM
    _, report = kinds.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report


def test_a_head_that_does_not_fit_the_objective_is_refused(
    experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    for model, objective, fix in (
        (MODEL, "{kind: replaced_mlm}", "model.main_head=tokens"),
        (f"{MODEL[:-1]}, main_head: tokens}}", "{kind: replaced_mlm}", "tokens_or_copy"),
        (f"{MODEL[:-1]}, main_head: tokens}}", "replaced_tokens", "model.main_head=detector"),
        (
            f"{MODEL[:-1]}, main_head: tokens_or_copy}}",
            "{kind: replaced_mlm, masked_only: true}",
            "set model.main_head=tokens, or",
        ),
    ):
        result = samestep(
            "train", experiment_file, f"output={tmp_path}", model, f"objective={objective}"
        )
        assert (result.code, fix in result.message) == (2, True), result.message


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
