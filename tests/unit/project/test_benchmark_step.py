import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import step, step_encoders
from tests.integration import tasks
from trainer.cli import main


@pytest.fixture
def job(tmp_path: Path) -> step.Job:
    step.write_dataset(tmp_path, tokens=2**16, documents=2)
    return step.Job("cpu", "tiny", length=128, batch=4, turn=1, threads=1, folder=str(tmp_path))


def test_their_examples_are_ours(job: step.Job):
    examples = step.ready_examples(job)
    full = [example for example in examples if example["attention_mask"].all()]
    assert len(examples) == 64 * 4
    assert len(full) > 240
    for example in full:
        predicted = example["labels"] != -100
        assert predicted.sum() == 20
        assert example["input_ids"][0] == 2  # [CLS]
        assert (example["input_ids"] == 4)[predicted].sum() > 8  # [MASK] for about 16 of 20
        assert not (example["input_ids"] == 4)[~predicted].any()


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a CUDA device, and something to measure"
)
def test_says_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["step", "--device", "cuda"])
    step.main()
    assert capsys.readouterr().out == "nothing measured: torch finds no CUDA device here\n"


@pytest.mark.long
@pytest.mark.skipif(
    not importlib.util.find_spec("accelerate"), reason="Hugging Face Trainer needs accelerate"
)
def test_smallest_run(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.step",
        "--model",
        "tiny",
        "--length",
        "32",
        "--batch",
        "2",
    ]
    subprocess.run(
        [*command, "--turn", "1", "--repeats", "1", "--json", tmp_path / "figures"],
        check=True,
        timeout=200,
    )
    (measured,) = json.loads((tmp_path / "figures").read_text())["measured"]
    assert {name: len(rates) for name, rates in measured["rates"].items()} == {
        "samestep": 1,
        "Hugging Face Trainer": 1,
    }


@pytest.mark.long
@pytest.mark.skipif(
    not importlib.util.find_spec("accelerate"), reason="Hugging Face Trainer needs accelerate"
)
def test_smallest_fine_tuning(dataset_folder: Path, tmp_path: Path):
    build = tasks.write_build("classification", tmp_path, dataset_folder / "tokenizer")
    assert main(["data", "build", str(build)]) == 0
    command = [
        sys.executable,
        "-m",
        "benchmarks.finetune",
        tmp_path / "data-classification",
        "--model",
        "tiny",
    ]
    options = ["--batch", "4", "--turn", "2", "--repeats", "1", "--json", tmp_path / "figures"]
    subprocess.run([*command, *options], check=True, timeout=200)
    (measured,) = json.loads((tmp_path / "figures").read_text())["measured"]
    assert {name: len(rates) for name, rates in measured["rates"].items()} == {
        "samestep": 1,
        "Hugging Face Trainer": 1,
    }


@pytest.mark.parametrize("work", [pytest.param("step", marks=pytest.mark.long), "equal"])
@pytest.mark.parametrize("family", ["electra", "deberta", "modernbert"])
def test_encoders_have_the_losses_of_transformers(
    family: step_encoders.Family, work: step_encoders.Work
):
    found = step_encoders.measure(family, work, size=2, repeats=1)  # compares the losses first
    assert list(found.rates) == ["samestep", "transformers"]
