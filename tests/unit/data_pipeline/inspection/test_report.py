"""`samestep data inspect` and `samestep data show` print datasets and batches."""

import argparse
import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import cli
from data_pipeline.format.manifest import FORMAT, Manifest
from data_pipeline.format.writing import write_shard
from data_pipeline.inspection.report import inspect, plot, report
from data_pipeline.inspection.show import show
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.packed_split import PackedSplit
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import ConfigError, DataError, MissingExtra
from samestep.examples import PackSpec
from samestep.terminal import Console

SENTENCES = [
    "the cat sat on the mat",
    "a dog barks",
    "[MASK] is no mask here",
    "çedilla and naïve words\nin two lines",
]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cli.register(parser.add_subparsers())
    args = parser.parse_args(["data", *arguments])
    return int(args.run(args))


@pytest.fixture(params=["wordpiece", "bpe"])
def text_dataset(tmp_path: Path, request) -> Path:
    """Real text under a real tokenizer: document i is line i of corpus.txt."""
    folder = tmp_path / request.param
    texts = [f"{sentence}, number {i}" for i, sentence in enumerate(SENTENCES * 30)]
    tokenizer = TokenizerConfig("x", request.param, 400, lowercase=False).train(texts)
    tokenizer.save(folder / "tokenizer")
    origin = np.stack((np.zeros(len(texts)), np.arange(len(texts))), axis=1).astype(np.uint32)
    shard = write_shard(
        folder / "train-000000.tar", tokenizer.encode_batch(texts), origin, np.dtype(np.uint16)
    )
    splits = {"train": (shard,), "heldout": ()}
    size = tokenizer.vocabulary.size
    Manifest(
        FORMAT,
        tokenizer.fingerprint,
        size,
        "uint16",
        {},
        ("corpus.txt",),
        123,
        {"broken JSON": 3},
        splits,
    ).save(folder)
    return folder


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    file = tmp_path / "experiment.yaml"
    file.write_text(
        "model: {kind: bert}\nobjective: {kind: mlm}\ndata: {path: elsewhere, sequence_length: 64, "
        "lanes: 4}\n"
    )
    return str(file)


def printed(folder: Path, experiment: str, *overrides: str, index: int = 0, count: int = 1) -> str:
    console = Console(file=io.StringIO(), width=100)
    show(str(folder), experiment, overrides, index, count, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_figures_are_those_of_the_shards(write_dataset) -> None:
    dataset = Dataset.open(write_dataset(shards=3, documents=50))
    inspection = inspect(dataset)
    tokens = sum(shard.tokens for shard in dataset.shards("train"))
    assert inspection.histogram.sum() == 150
    lengths = np.concatenate(
        [dataset.open_shard(shard).length for shard in dataset.shards("train")]
    )
    assert inspection.histogram.tolist() == [
        ((lengths >= lo) & (lengths < hi)).sum()
        for lo, hi in [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64)]
    ]
    assert len(inspection.forecasts) == 6
    for forecast in inspection.forecasts:
        spec = PackSpec(forecast.sequence_length, 1, 1)
        assert forecast.tokens == tokens
        assert (
            forecast.examples
            == PackedSplit(dataset, "train", spec, forecast.policy, seed=0).counts.sum()
        )
        assert forecast.real_share == tokens / (forecast.examples * forecast.sequence_length)


def test_tables_name_what_was_rejected(text_dataset) -> None:
    console = Console(file=io.StringIO(), width=120)
    report(inspect(Dataset.open(text_dataset)), console)
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert "123 documents read, 3 rejected (broken JSON: 3)" in output
    assert "best_fit" in output


def test_reasons_with_brackets_are_printed_as_they_are(text_dataset) -> None:
    manifest = Manifest.load(text_dataset)
    reasons = {"label is not one of [/neg], pos": 1}
    dataclasses.replace(manifest, documents_rejected=reasons).save(text_dataset)
    console = Console(file=io.StringIO(), width=120)
    report(inspect(Dataset.open(text_dataset)), console)
    assert isinstance(console.file, io.StringIO)
    assert f"1 rejected ({next(iter(reasons))}: 1)" in console.file.getvalue()


@pytest.mark.long
def test_the_plot_is_an_image(write_dataset, tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    folder = str(write_dataset())
    assert run("inspect", folder, "--plot", str(tmp_path / "plot.png")) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    inspection = inspect(Dataset.open(folder))
    for path in (tmp_path / "no" / "folder.png", tmp_path / "no.format"):
        with pytest.raises(DataError, match="cannot write the plot"):
            plot(inspection, path)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"pip install .matplotlib>="):
        plot(inspection, tmp_path / "plot.png")


def test_an_empty_dataset_has_nothing_to_inspect(write_dataset) -> None:
    with pytest.raises(DataError, match=r"train split .* is empty"):
        inspect(Dataset.open(write_dataset(shards=0)))


def test_shown_text_is_the_documents_with_masks_marked(text_dataset, experiment) -> None:
    output = printed(
        text_dataset, experiment, "data.packing=padded", "objective.mask_fraction=0.3", count=120
    )
    pieces = [line for line in output.splitlines() if line.startswith("corpus.txt:")]
    assert len(pieces) == 120
    lines = {int(piece.split()[0].rpartition(":")[2]) for piece in pieces}
    assert lines == set(range(120))  # the first epoch, every document once
    for piece in pieces:
        assert "[" in piece
        number = int(piece.split()[0].rpartition(":")[2])
        if number % 4 == 1:  # without the marks the sentence is whole again
            text = piece.split("  ", 1)[1]
            for special in ("[CLS]", "[SEP]", "<s>", "</s>"):
                text = text.replace(special, "")
            plain = "".join(
                part.partition("→")[0].rstrip("=") if inside else part
                for inside, part in _marked(text)
            )
            assert plain.replace(" ", "") == f"a dog barks, number {number}".replace(" ", "")


def _marked(text: str) -> list[tuple[bool, str]]:
    """Cuts text at its [marks]."""
    parts = text.replace("]", "[").split("[")
    return [(i % 2 == 1, part) for i, part in enumerate(parts)]


def test_shown_examples_are_those_of_training(text_dataset, experiment) -> None:
    together = printed(text_dataset, experiment, count=3).split("\nexample ")
    assert (
        printed(text_dataset, experiment, index=2).split("\nexample ")[1].strip()
        == together[3].strip()
    )
    assert together[1] != printed(text_dataset, experiment, "seed=1").split("\nexample ")[1]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_every_piece_of_an_example_has_its_source(text_dataset, experiment, packing) -> None:
    output = printed(text_dataset, experiment, f"data.packing={packing}", count=5)
    assert output.count("corpus.txt:") > 5


def test_show_refuses_what_does_not_fit(text_dataset, experiment, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"set data\.lanes to at most"):
        printed(text_dataset, experiment, "data.lanes=4096")
    with pytest.raises(ConfigError, match="counts examples from 0"):
        printed(text_dataset, experiment, index=-1)
    (tmp_path / "empty.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match="objective is required with a kind out of"):
        printed(text_dataset, str(tmp_path / "empty.yaml"))
    (text_dataset / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="tokenizer in"):
        printed(text_dataset, experiment)


def test_a_tokenizer_of_another_dataset_is_refused(text_dataset, experiment) -> None:
    TokenizerConfig("x", "wordpiece", 300).train(["other words"]).save(text_dataset / "tokenizer")
    with pytest.raises(DataError, match="but the dataset was built with"):
        printed(text_dataset, experiment)


def test_the_command_shows_examples(text_dataset, experiment, capsys) -> None:
    assert (
        run("show", str(text_dataset), "--objective", experiment, "--index", "5", "--count", "2")
        == 0
    )
    output = capsys.readouterr().out
    assert "example 5:" in output
    assert "example 6:" in output
