"""Datasets of retrieval: passages stored once, and the passages that each epoch's examples have."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.building import decontamination, pool
from data_pipeline.building.build import build
from data_pipeline.building.config import Config
from data_pipeline.building.export import export
from data_pipeline.building.slices import Slice
from data_pipeline.building.units import CONTAMINATED
from data_pipeline.building.verify import verify
from data_pipeline.format.manifest import Manifest
from data_pipeline.format.shards import Shard
from data_pipeline.format.writing import write_shard
from data_pipeline.inspection.report import inspect
from data_pipeline.order.example_order import Location
from data_pipeline.reading import several_datasets
from data_pipeline.reading.cache import ShardCache
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.packed_split import PackedSplit
from data_pipeline.reading.passage_counts import count_passages
from data_pipeline.sources import BadRecord
from data_pipeline.sources.beir import Folder
from data_pipeline.sources.kinds import jsonl, retrieval
from data_pipeline.sources.table import HubDataset
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import ConfigError, CorruptError, DataError
from samestep.examples import Examples, PackSpec, Parts
from tests.web import WebServer

TEXT = "the quick brown fox jumps over a lazy dog while owners pack fifty boxes of jugs"
WORDS = TEXT.split()
ROWS, HELDOUT = 40, 10
PARTS = Parts("retrieval", between=2, negatives=2)
SPEC = PackSpec(96, 1, 1, parts=PARTS)


def text(number: int) -> str:
    draw = np.random.default_rng(number)
    return " ".join(draw.choice(WORDS, draw.integers(2, 9)).tolist())


def row(number: int) -> dict[str, Any]:
    """Rows share passages: 30 texts, of which a row has one or two positives and 3 negatives."""
    draw = np.random.default_rng(1000 + number)
    count = 1 + number % 2
    found = [int(each) for each in draw.choice(30, count + 3, replace=False)]
    return {
        "query": f"{text(number)} {number}",
        "positive": found[:count],
        "negatives": found[count:],
    }


def with_texts(of: dict[str, Any]) -> dict[str, Any]:
    sides = {name: [text(100 + each) for each in of[name]] for name in ("positive", "negatives")}
    return {**of, **sides}


def write(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows with texts, with ids of a corpus, and as a folder of BEIR; a tokenizer."""
    folder = tmp_path_factory.mktemp("retrieval")
    rows = [row(number) for number in range(ROWS + HELDOUT)]
    corpus = [{"_id": str(each), "text": text(100 + each)} for each in range(30)]
    for name, part in (("train", rows[:ROWS]), ("dev", rows[ROWS:])):
        write(folder / f"{name}.jsonl", [with_texts(each) for each in part])
        write(folder / f"ids-{name}.jsonl", part)
        lines = ["query-id\tcorpus-id\tscore"]
        for number, each in enumerate(rows):
            judged = [(passage, 1) for passage in each["positive"]]
            judged += [(passage, 0) for passage in each["negatives"]]
            if each in part:
                lines += [f"q{number}\t{passage}\t{score}" for passage, score in judged]
        (folder / "beir" / "qrels").mkdir(parents=True, exist_ok=True)
        (folder / "beir" / "qrels" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    write(folder / "beir" / "corpus.jsonl", corpus)
    queries = [{"_id": f"q{n}", "text": each["query"]} for n, each in enumerate(rows)]
    write(folder / "beir" / "queries.jsonl", queries)
    lines = [f"query: passage: fox an {text(number)} {number}" for number in range(200)]
    TokenizerConfig("", vocab_size=250).train(iter(lines)).save(folder / "tokenizer")
    return folder


@pytest.fixture(autouse=True)
def in_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting workers takes a second; only long tests do."""

    def process(items: Iterator[Any], start: Callable[[], Any], workers: int) -> Iterator[Any]:
        work = start()
        for item in items:
            yield item, work(item)

    if request.node.get_closest_marker("long") is None:
        monkeypatch.setattr(pool, "process", process)


def config_of(folder: Path, output: Path, source: Any = None, **changes: Any) -> Config:
    if source is None:
        paths = (str(folder / "train.jsonl"),), (str(folder / "dev.jsonl"),)
        source = retrieval.Config(*paths, **PROMPTS)
    settings = {"workers": 1, "shard_bytes": 2000, **changes}
    return Config(source, TokenizerConfig(str(folder / "tokenizer")), str(output), **settings)


@pytest.fixture
def built(folder: Path, tmp_path: Path) -> Path:
    build(config_of(folder, tmp_path / "built"))
    return tmp_path / "built"


def read(
    dataset: Path | Dataset, epoch: int, spec: PackSpec = SPEC, split: str = "train", seed: int = 5
) -> Examples:
    """All examples of a split in an epoch, in the order of its rows."""
    opened = dataset if isinstance(dataset, Dataset) else Dataset.open(dataset)
    packed = PackedSplit(opened, split, spec, "padded", seed)
    shard = np.repeat(np.arange(len(packed.counts)), packed.counts)
    index = np.concatenate([np.arange(count) for count in packed.counts])
    at = Location(np.full(len(shard), epoch), shard, index)
    if spec.parts is not None and spec.parts.choices == 1:
        last = packed.positions(at)
        found = packed.read(at, np.ones(len(shard), np.float32))
        ends = (found.column + found.length + spec.suffix).reshape(len(shard), -1)[:, -1]
        assert last.tolist() == ends.tolist()
        return found
    return packed.read(at, np.ones(len(shard), np.float32))


def texts_of(examples: Examples, dataset: Path) -> list[list[str]]:
    tokenizer = Dataset.open(dataset).tokenizer
    texts = np.split(examples.tokens, np.cumsum(examples.length)[:-1])
    decoded = [tokenizer.decode(each.tolist()).replace(" : ", ": ") for each in texts]
    bounds = np.searchsorted(examples.row, np.arange(examples.key.size + 1))
    return [decoded[first:end] for first, end in itertools.pairwise(bounds)]


def test_each_epoch_has_one_positive_and_other_negatives(built: Path) -> None:
    assert verify(built) == []
    manifest = Manifest.load(built)
    passages = sum(shard.documents for shard in manifest.splits["passages"])
    assert (passages, manifest.documents_in) == (30, ROWS + HELDOUT)
    assert len(manifest.splits["train"]) > 2
    lengths = inspect(Dataset.open(built)).text_lengths
    assert {name: len(each) for name, each in lengths.items()} == {"query": ROWS, "passage": 30}
    rows = [with_texts(row(number)) for number in range(ROWS)]
    chosen = []
    for epoch in range(3):
        examples = read(built, epoch)
        found = texts_of(examples, built)
        for each, (query, positive, *negatives) in zip(rows, found, strict=True):
            assert query == f"query: {each['query']}"
            assert positive.removeprefix("passage: ") in each["positive"]
            assert {other.removeprefix("passage: ") for other in negatives} <= {*each["negatives"]}
            assert len({*negatives}) == 2
        labels = examples.labels
        assert labels is not None
        assert labels.ranks is not None
        assert labels.ranks.all()
        assert labels.values.reshape(ROWS, 3).tolist() == [[1, 0, 0]] * ROWS
        assert labels.document.tolist() == list(range(ROWS))
        chosen.append(found)
    assert len({str(each) for each in chosen}) == 3
    # Every passage of a row is chosen by some row in some epoch: by its slot.
    slots = {
        (len(each["positive"]), each["negatives"].index(other.removeprefix("passage: ")))
        for epoch in chosen
        for each, texts in zip(rows, epoch, strict=True)
        for other in texts[2:]
    }
    assert {slot for _, slot in slots} == {0, 1, 2}


def test_an_example_depends_on_its_row_and_epoch_alone(built: Path) -> None:
    packed = PackedSplit(Dataset.open(built), "train", SPEC, "padded", 5)
    everything = read(built, 2)
    at = Location(np.array([2, 0, 2]), np.array([1, 0, 0]), np.array([0, 3, 3]))
    few = packed.read(at, np.ones(3, np.float32))
    first = int(packed.counts[0])
    for row, number in ((0, first), (2, 3)):
        tokens = np.repeat(few.row, few.length) == row
        expected = np.repeat(everything.row, everything.length) == number
        assert few.tokens[tokens].tolist() == everything.tokens[expected].tolist()
    other = read(built, 2, seed=6)
    assert other.tokens.tolist() != everything.tokens.tolist()


def test_held_out_rows_have_the_same_passages_for_every_seed(built: Path) -> None:
    first, other = (read(built, 0, split="heldout", seed=seed) for seed in (5, 6))
    assert first.tokens.tolist() == other.tokens.tolist()
    assert first.key.tolist() != other.key.tolist(), "masks and dropout are the seed's"
    assert {each.size for each in (first.key, other.key)} == {HELDOUT}


PROMPTS = {"query_prompt": "query: ", "passage_prompt": "passage: "}


def assert_same(folder: Path, tmp_path: Path, sources: dict[str, Any]) -> None:
    """Builds a dataset of each source, and of the rows with texts, and compares examples."""
    found = {}
    for name, source in {"texts": None, **sources}.items():
        build(config_of(folder, tmp_path / name, source))
        found[name] = [read(tmp_path / name, 1), read(tmp_path / name, 0, split="heldout")]
    for name in sources:
        for one, other in zip(found["texts"], found[name], strict=True):
            assert one.tokens.tolist() == other.tokens.tolist(), name
            assert one.column.tolist() == other.column.tolist(), name


def test_ids_and_folders_of_beir_give_the_same_examples(folder: Path, tmp_path: Path) -> None:
    ids = (str(folder / "ids-train.jsonl"),), (str(folder / "ids-dev.jsonl"),)
    corpus = (str(folder / "beir" / "corpus.jsonl"),)
    beir = Folder(str(folder / "beir"), heldout="dev")
    sources = {
        "ids": retrieval.Config(*ids, passages=corpus, **PROMPTS),
        "beir": retrieval.Config(beir=beir, **PROMPTS),
    }
    assert_same(folder, tmp_path, sources)
    assert Dataset.open(tmp_path / "ids").passages.length.shape == (30,)
    rows = Dataset.open(tmp_path / "beir").rows("heldout")
    assert rows[0].texts == (f"query: {row(ROWS)['query']}",)
    # A tokenizer learns from all passages, and from the queries.
    for config in sources.values():
        source = config.build()
        texts = [source.parse(each) for each in (*source.passages(), *source.records())]
        assert texts[0] == f"passage: {text(100)}"
        assert texts[30] == f"query: {row(0)['query']}"
        assert len(texts) == 30 + ROWS + HELDOUT


@pytest.mark.long
def test_tables_give_the_same_examples(folder: Path, tmp_path: Path) -> None:
    """CSV, Parquet, and a dataset of Hugging Face."""
    datasets = pytest.importorskip("datasets")
    lines = [with_texts(row(number)) for number in range(ROWS + HELDOUT)]
    splits = {"train": lines[:ROWS], "dev": lines[ROWS:]}
    for name, part in splits.items():
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, ["query", "positive", "negatives"])
            table.writeheader()
            for each in part:
                cells = {side: json.dumps(each[side]) for side in ("positive", "negatives")}
                table.writerow({**each, **cells})
        datasets.Dataset.from_list(part).to_parquet(tmp_path / f"{name}.parquet")
    saved = {name: datasets.Dataset.from_list(part) for name, part in splits.items()}
    datasets.DatasetDict(saved).save_to_disk(tmp_path / "saved")
    sources = {
        ending: retrieval.Config(
            (str(tmp_path / f"train.{ending}"),), (str(tmp_path / f"dev.{ending}"),), **PROMPTS
        )
        for ending in ("csv", "parquet")
    }
    hub = HubDataset(str(tmp_path / "saved"), heldout="dev")
    assert_same(folder, tmp_path, {**sources, "hub": retrieval.Config(dataset=hub, **PROMPTS)})


def test_triples(folder: Path, tmp_path: Path) -> None:
    lines = ["query\tpositive\tnegative", "who\tthe fox\tthe dog", "what\tthe dog\tthe fox"]
    (tmp_path / "triples.tsv").write_text("\n".join(lines))
    source = retrieval.Config((str(tmp_path / "triples.tsv"),))
    build(config_of(folder, tmp_path / "data", source, heldout_fraction=0.0))
    spec = PackSpec(48, 1, 1, parts=Parts("retrieval", between=2, negatives=1))
    found = texts_of(read(tmp_path / "data", 0, spec), tmp_path / "data")
    assert found == [["who", "the fox", "the dog"], ["what", "the dog", "the fox"]]
    assert Dataset.open(tmp_path / "data").passages.length.shape == (2,)


def test_the_build_says_how_many_passages_rows_have(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"query": "who", "positive": "the fox", "negatives": ["a", "b", "c"], "scores": [1] * 4},
        {"query": "what", "positive": "the dog", "negatives": ["a"], "scores": [1, 0]},
    ]
    source = retrieval.Config((write(tmp_path / "rows.jsonl", rows),))
    with caplog.at_level("INFO"):
        build(config_of(folder, tmp_path / "data", source, heldout_fraction=0.0))
    said = "rows (train / heldout): 2 / 0, with 1 positive and 1 to 3 negatives, and scores"
    assert said in caplog.messages
    assert count_passages(Dataset.open(tmp_path / "data")) == said
    # Columns that the source does not name are not read: here, all negatives.
    bare = {"query": "who", "positive": ["a", "b"], "negative_1": "c"}
    source = retrieval.Config((write(tmp_path / "bare.jsonl", [bare]),))
    build(config_of(folder, tmp_path / "bare", source, heldout_fraction=0.0))
    assert count_passages(Dataset.open(tmp_path / "bare")) == (
        "rows (train / heldout): 1 / 0, with 2 positives and 0 negatives"
    )


def test_scores_follow_the_chosen_passages_and_choices_repeat_the_query(
    folder: Path, tmp_path: Path
) -> None:
    rows = [with_texts(row(number)) for number in range(12)]
    scores = {}
    for number, each in enumerate(rows):
        passages = each["positive"] + each["negatives"]
        each["scores"] = [number + slot / 8 for slot in range(len(passages))]
        scores.update({(number, t): s for t, s in zip(passages, each["scores"], strict=True)})
    source = retrieval.Config((write(tmp_path / "rows.jsonl", rows),))
    build(config_of(folder, tmp_path / "data", source, heldout_fraction=0.0))
    parts = Parts("retrieval", negatives=2, choices=3, arrangement="choices")
    examples = read(tmp_path / "data", 3, PackSpec(48, 1, 1, parts=parts))
    found = texts_of(examples, tmp_path / "data")
    assert examples.labels is not None
    values = examples.labels.values.reshape(12, 3)
    for number, (texts, own) in enumerate(zip(found, values.tolist(), strict=True)):
        assert [*texts[::2]] == [rows[number]["query"]] * 3
        assert own == [scores[number, passage] for passage in texts[1::2]]
    columns = examples.column.reshape(12, 6)
    assert columns[:, ::2].tolist() == [[1, 49, 97]] * 12
    assert (columns[:, 1] == 2 + examples.length.reshape(12, 6)[:, 0]).all()


def test_each_side_has_its_length(built: Path) -> None:
    parts = Parts("retrieval", between=2, negatives=2, query_length=5, passage_length=7)
    examples = read(built, 0, PackSpec(26, 1, 1, parts=parts))
    length = examples.length.reshape(-1, 4)
    assert length[:, 0].max() == 3
    assert length[:, 1:].max() == 5
    whole = read(built, 0, SPEC)
    assert length.tolist() == np.minimum(whole.length.reshape(-1, 4), [3, 5, 5, 5]).tolist()


def test_all_positives_of_a_row_are_known(built: Path, folder: Path, tmp_path: Path) -> None:
    spec = replace(SPEC, parts=replace(PARTS, known_positives=2))
    examples, found = read(built, 1, spec), texts_of(read(built, 1), built)
    assert texts_of(examples, built) == found
    assert examples.labels is not None
    known = examples.labels.passages
    assert known is not None
    # Of each row: a positive and two negatives, and then its one or two positives.
    texts: dict[int, str] = {}
    for numbers, (_, *passages) in zip(known[:, :3].tolist(), found, strict=True):
        for number, passage in zip(numbers, passages, strict=True):
            assert texts.setdefault(number, passage) == passage
    for number, numbers in enumerate(known[:, 3:].tolist()):
        positives = {f"passage: {each}" for each in with_texts(row(number))["positive"]}
        assert len({*numbers}) == len(positives) == 1 + number % 2
        assert {texts.get(each, "of no row") for each in numbers} <= {*positives, "of no row"}
        assert known[number, 0] in numbers
    assert 0 <= known.min() <= known.max() < 2**48
    build(config_of(folder, tmp_path / "other", retrieval.Config((str(folder / "dev.jsonl"),))))
    other = read(tmp_path / "other", 1, spec)
    assert other.labels is not None
    assert other.labels.passages is not None
    assert np.intersect1d(known, other.labels.passages).size == 0
    parts = [(np.arange(ROWS), examples), (ROWS + np.arange(len(other.key)), other)]
    merged = several_datasets.merge(parts, np.ones(ROWS + len(other.key), np.float32)).labels
    assert merged is not None
    assert merged.passages is not None
    assert merged.passages[ROWS:].tolist() == other.labels.passages.tolist()
    with pytest.raises(DataError, match=r":2: the row has 2 positives and .*positives is 1 "):
        read(built, 0, replace(SPEC, parts=replace(PARTS, known_positives=1)))


def test_too_few_negatives_and_too_short_sequences_are_named(built: Path, folder: Path) -> None:
    many = PackSpec(96, 1, 1, parts=Parts("retrieval", between=2, negatives=4))
    message = rf"{folder}/train.jsonl:1: the row has 3 negatives and the objective reads 4 \(too"
    with pytest.raises(DataError, match=message):
        read(built, 0, many)
    short = PackSpec(11, 1, 1, parts=PARTS)
    with pytest.raises(ConfigError, match=r"sequence_length is 11, .* use at least 12"):
        read(built, 0, short)
    other = PackSpec(96, 1, 1, parts=Parts("classification"))
    with pytest.raises(DataError, match="use the objective contrastive or ranking"):
        read(built, 0, other)


QUERY, GOOD = {"query": "a fox"}, {"query": "a fox", "positive": "the dog"}
BAD: dict[str, tuple[Any, str]] = {
    "empty positive": ({**QUERY, "positive": " "}, "empty positive"),
    "empty among several": ({**QUERY, "positive": ["a", ""]}, r"empty positive\[1\]"),
    "no positive": ({**QUERY, "positive": []}, "no positive"),
    "no column": (QUERY, "no column 'positive': there are query"),
    "empty query": ({"query": "", "positive": "the"}, "empty query"),
    "list of pandas": (
        {**GOOD, "negatives": """['a', "b's"]"""},
        "column 'negatives' has a list in Python's notation, not in JSON",
    ),
    "number": ({**QUERY, "positive": 3}, "positive holds what is not text: 3"),
    "empty negative": ({**GOOD, "negatives": ["a", "\t"]}, r"empty negatives\[1\]"),
    "missing scores": (
        {**GOOD, "negatives": ["a"], "scores": [1]},
        "scores has not a number for each passage: 1, 2",
    ),
    "empty score": (
        {**GOOD, "negatives": ["a"], "scores": [1, None]},
        "scores holds what is no finite number",
    ),
    "large score": ({**GOOD, "scores": [1e39]}, "scores holds what is no finite number"),
    "both": ({**GOOD, "negatives": ["a", "the dog"]}, "a negative equals a positive: 'the dog'"),
    "positive twice": ({**QUERY, "positive": ["a", "a"]}, "a positive comes twice: 'a'"),
    "negative twice": (
        {**GOOD, "negatives": ["b", "a"], "negative": "a"},
        "a negative comes twice: 'a'",
    ),
    "no tokens": ({**GOOD, "negatives": ["\u200b"]}, "no tokens in a positive or negative"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(name: str, folder: Path, tmp_path: Path) -> None:
    bad, reason = BAD[name]
    file = write(tmp_path / "rows.jsonl", [GOOD, bad, {"query": "b", "positive": "the fox"}])
    config = config_of(folder, tmp_path / "data", retrieval.Config((file,)), heldout_fraction=0.0)
    with pytest.raises(DataError, match=f"{file}:2: {reason}"):
        build(config)
    skipping = config_of(
        folder, tmp_path / "data", config.source, heldout_fraction=0.0, on_error="skip"
    )
    manifest = build(skipping)
    assert manifest is not None
    assert sum(manifest.documents_rejected.values()) == 1
    spec = PackSpec(48, 1, 1, parts=Parts("retrieval", between=2))
    assert len(read(tmp_path / "data", 0, spec).key) == 2


def test_scores_that_a_loss_is_not_defined_for_are_named(folder: Path, tmp_path: Path) -> None:
    """When shards are counted, and not with cached counts of a loss that takes any."""
    rows = [{**GOOD, "query": f"fox {number}", "scores": [0.5]} for number in range(3)]
    file = write(tmp_path / "rows.jsonl", [*rows, {**GOOD, "scores": [1.5]}])
    config = config_of(folder, tmp_path / "data", retrieval.Config((file,)), heldout_fraction=0.0)
    build(config)

    def split(score_range: tuple[float, float] | None) -> PackedSplit:
        parts = Parts("retrieval", score_range=score_range)
        spec = PackSpec(48, 1, 1, parts=parts)
        return PackedSplit(Dataset.open(tmp_path / "data"), "train", spec, "padded", 5)

    assert split(None).counts.sum() == split((0, 64)).counts.sum() == 4
    with pytest.raises(DataError, match=rf"{file}:4: the row has the score 1.5, .* from 0 to 1;"):
        split((0, 1))


def test_an_id_that_comes_twice_in_a_row_is_named(tmp_path: Path) -> None:
    passages = (write(tmp_path / "passages.jsonl", [{"_id": 1, "text": "a fox"}]),)
    file = write(tmp_path / "rows.jsonl", [{**QUERY, "positive": 1, "negatives": ["1"]}])
    source = retrieval.Config((file,), passages=passages).build()
    with pytest.raises(BadRecord, match="a negative equals a positive: '1'"):
        source.parse_row(next(source.records()))


def test_scores_of_some_rows_only(folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [GOOD, {**GOOD, "query": "b", "scores": [2]}])
    source = retrieval.Config((file,))
    with pytest.raises(DataError, match=f"{file}:1: the row has no scores, and {file}:2 has"):
        build(config_of(folder, tmp_path / "data", source))
    without = retrieval.Config((file,), scores=None)
    assert build(config_of(folder, tmp_path / "data", without, heldout_fraction=0.0)) is not None


def beir_with(folder: Path, name: str, line: str) -> Folder:
    """A folder with a line more in a file."""
    for file in ("corpus.jsonl", "queries.jsonl", "qrels/train.tsv"):
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "corpus.jsonl": '{"_id": "d1", "title": "fox", "text": "a fox"}\n',
            "queries.jsonl": '{"_id": "q1", "text": "a dog"}\n',
            "qrels/train.tsv": "query-id\tcorpus-id\tscore\nq1\td1\t1\n",
        }[file]
        target.write_text(content + line * (file == name))
    return Folder(str(folder))


BAD_BEIR = {
    "document": ("qrels/train.tsv", "q1\td9\t1\n", "qrels/train.tsv:2: no passage has this id"),
    "query": ("qrels/train.tsv", "q9\td1\t1\n", "qrels/train.tsv:3: query-id names no query: 'q9'"),
    "judged": ("qrels/train.tsv", "q1\td1\t0\n", "train.tsv:3: judged before, with another score"),
    "fields": ("qrels/train.tsv", "q1 d1 1\n", "train.tsv:3: not query-id, corpus-id and score"),
    "number": ("qrels/train.tsv", "q1\td1\tx\n", "train.tsv:3: the score is not a whole number"),
    "twice": ("corpus.jsonl", '{"_id": "d1", "text": "b"}\n', "jsonl:2: duplicate id: 'd1'"),
    "queries": ("queries.jsonl", '{"_id": "q1", "text": "b"}\n', "jsonl:2: duplicate id: 'q1'"),
    "empty": ("corpus.jsonl", '{"_id": "d2", "text": ""}\n', "corpus.jsonl:2: empty passage"),
}


@pytest.mark.parametrize("name", BAD_BEIR)
def test_bad_folders_of_beir_are_named(name: str, folder: Path, tmp_path: Path) -> None:
    file, line, reason = BAD_BEIR[name]
    source = retrieval.Config(beir=beir_with(tmp_path / "beir", file, line))
    with pytest.raises(DataError, match=reason):
        build(config_of(folder, tmp_path / "data", source, heldout_fraction=0.0))
    source = retrieval.Config(beir=beir_with(tmp_path / "beir", "", ""))
    build(config_of(folder, tmp_path / "data", source, heldout_fraction=0.0))
    spec = PackSpec(48, 1, 1, parts=Parts("retrieval", between=2))
    assert texts_of(read(tmp_path / "data", 0, spec), tmp_path / "data") == [["a dog", "fox a fox"]]


def test_wrong_settings_of_the_source() -> None:
    with pytest.raises(ConfigError, match="beir is x, which has rows and passages"):
        retrieval.Config(("a.jsonl",), beir=Folder("x"))
    for name, value in (("negatives", ()), ("query", "q"), ("positive", "p"), ("scores", None)):
        with pytest.raises(ConfigError, match="beir is x, whose rows have columns of their own"):
            retrieval.Config(beir=Folder("x"), **{name: value})
    with pytest.raises(ConfigError, match=r"beir.split and beir.heldout are both 'dev'"):
        Folder("x", "dev", "dev")
    with pytest.raises(ConfigError, match=r"nowhere has no queries.jsonl"):
        Folder("nowhere").queries()


@pytest.mark.parametrize("by_ids", [True, False])
def test_rows_with_a_passage_of_the_test_are_left_out(
    by_ids: bool, folder: Path, tmp_path: Path
) -> None:
    test = decontamination.Config(jsonl.Config((write(tmp_path / "t.jsonl", [{"text": TEXT}]),)))
    texts = {"1": TEXT, "2": "a dog", "3": "a fox"}
    corpus = [{"_id": name, "text": each} for name, each in texts.items()]
    rows = [("who", "2", ["1"]), ("what", "3", ["2"]), ("why", "1", ["3"])]
    names = {name: name for name in texts} if by_ids else texts
    lines = [
        {"query": query, "positive": names[positive], "negatives": [names[n] for n in negatives]}
        for query, positive, negatives in rows
    ]
    passages = (write(tmp_path / "corpus.jsonl", corpus),) if by_ids else ()
    source = retrieval.Config((write(tmp_path / "rows.jsonl", lines),), passages=passages)
    settings = {"heldout_fraction": 0.0, "decontaminate": test}
    manifest = build(config_of(folder, tmp_path / "data", source, **settings))
    assert manifest is not None
    assert manifest.documents_rejected == {CONTAMINATED: 2 + by_ids}
    spec = PackSpec(48, 1, 1, parts=Parts("retrieval", between=2, negatives=1))
    found = read(tmp_path / "data", 0, spec)
    assert texts_of(found, tmp_path / "data") == [["what", "a fox", "a dog"]]
    if by_ids:
        write(tmp_path / "rows.jsonl", [*lines, {"query": "who", "positive": "4"}])
        with pytest.raises(DataError, match=r"rows.jsonl:4: no passage has this id: '4'"):
            build(config_of(folder, tmp_path / "again", source, **settings))


def test_numbers_of_passages_are_exact(tmp_path: Path) -> None:
    """Some are beyond what a float holds."""
    numbers = np.array([2**24 + 1, 2**32 - 1, 8_800_001], np.uint32)
    tokens, origin = [np.arange(3, dtype=np.uint16)], np.zeros((1, 2), np.uint32)
    dtype, path = np.dtype(np.uint16), tmp_path / "train-000000.tar"
    parts, scores = [np.zeros(1, np.int64)], [np.zeros(0, np.float32)]
    passages = [(numbers[:1], numbers[1:])]
    write_shard(path, tokens, origin, dtype, parts, scores, None, passages)
    shard = Shard.open(path, dtype, labels=True)
    assert shard.passages.tolist() == numbers.tolist()
    assert shard.passage_start.tolist() == [0, 1, 3]


def test_a_strangers_number_of_a_passage_is_refused(built: Path) -> None:
    dataset = Dataset.open(built)
    shard = dataset.open_shard(dataset.shards("train")[0], labels=True)
    shard.passages[0] = 30  # of 0 to 29
    with pytest.raises(CorruptError, match="names passage 30 of 30"):
        dataset.passages.check(shard, "train-000000.tar")


def test_rows_without_texts_are_not_exported(built: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has rows that name passages by numbers"):
        export(str(built), str(tmp_path / "exported"))


def test_passages_are_fetched_whole_before_the_first_step(built: Path, tmp_path: Path) -> None:
    expected = read(built, 1)
    with closing(WebServer(built)) as web:
        dataset = Dataset.open(web.url, ShardCache(tmp_path / "cache", 10**9))
        packed = PackedSplit(dataset, "train", SPEC, "padded", 5)
        held = {path.stem for path in (tmp_path / "cache").rglob("*.tar")}
        assert held == {shard.sha256 for shard in Manifest.load(built).splits["passages"]}
        del packed
        assert read(dataset, 1).tokens.tolist() == expected.tokens.tolist()


@pytest.mark.long
def test_workers_slices_and_interruptions_do_not_matter(folder: Path, tmp_path: Path) -> None:
    """A build that stops between units continues, and gives the same bytes."""
    whole = build(config_of(folder, tmp_path / "one"))
    assert whole is not None
    several = build(config_of(folder, tmp_path / "several", workers=3))
    for index in (3, 1, 2):
        sliced = build(config_of(folder, tmp_path / "sliced"), part=Slice(index, 3))
    assert sliced is not None
    assert several is not None
    assert whole.digest == several.digest == sliced.digest
    # Half of a build of changed rows, then the original ones: earlier units renumber passages.
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    file = tmp_path / "train.jsonl"
    write(file, [{**rows[0], "positive": "an owner packs"}, *rows[1:]])
    source = retrieval.Config(
        (str(file),),
        (str(folder / "dev.jsonl"),),
        **PROMPTS,
    )
    assert build(config_of(folder, tmp_path / "resumed", source), part=Slice(2, 2)) is None
    write(file, rows)
    resumed = build(config_of(folder, tmp_path / "resumed", source))
    assert resumed is not None
    assert resumed.digest == whole.digest
