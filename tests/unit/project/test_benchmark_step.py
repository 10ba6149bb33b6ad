import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import step, step_encoders
from benchmarks.dataset import write_dataset
from samestep.cli import main
from tests.integration import tasks


def test_their_batches_are_ours(tmp_path: Path):
    huggingface = pytest.importorskip("benchmarks.huggingface")
    # Documents of 516 rows of 126 tokens and one row of 2.
    write_dataset(tmp_path, [516 * 126 + 2] * 2)
    job = step.Job(
        folder=str(tmp_path), batch=4, micro_batch=2, threads=1, model="tiny", length=128
    )
    batches = huggingface.ready_batches(job)
    assert len(batches) == 16 * 2
    full = [batch for batch in batches if "attention_mask" not in batch]
    assert len(full) > 25
    for batch in full:
        tokens, predicted = batch["input_ids"], batch["labels"] != -100
        assert (predicted.sum(1) == 20).all()
        assert (tokens[:, 0] == 2).all()  # [CLS]
        assert (tokens == 4)[predicted].sum() > 16  # [MASK] for about 32 of 40
        assert not (tokens == 4)[~predicted].any()


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
@pytest.mark.parametrize(
    "family",
    [
        *("electra", "deberta"),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("modernbert", "mpnet", "neobert", "llama")
        ),
    ],
)
def test_encoders_have_the_losses_of_transformers(
    family: step_encoders.Family, work: step_encoders.Work
):
    found = step_encoders.measure(family, work, size=2, repeats=1)  # compares the losses first
    reference = "published" if family == "neobert" else "transformers"
    assert list(found.rates) == ["samestep", reference]
