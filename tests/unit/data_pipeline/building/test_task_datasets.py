"""Datasets of rows of tasks: what is to be predicted goes from the source to the batches, and rows
to the scores.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import tarfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.building.build import build
from data_pipeline.building.config import Config
from data_pipeline.building.task_rows import encode
from data_pipeline.building.units import Outcome, outcome_path
from data_pipeline.building.verify import verify
from data_pipeline.format.manifest import Manifest, TaskLabels
from data_pipeline.inspection.report import inspect, report
from data_pipeline.inspection.show import show
from data_pipeline.order.example_order import Location
from data_pipeline.reading.cache import ShardCache
from data_pipeline.reading.concat_dataset import ConcatSplit
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.packed_split import PackedSplit
from data_pipeline.sources import TaskSource
from data_pipeline.sources.kinds import (
    classification,
    multiple_choice,
    question_answering,
    regression,
    tagging,
)
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.config import to_tree
from samestep.errors import ConfigError, CorruptError, DataError
from samestep.examples import Examples, PackSpec, Parts, TaskRow
from samestep.terminal import Console
from tests.unit.data_pipeline.format.test_task_shards import rewrite
from tests.unit.data_pipeline.loaders import assert_same, global_batches, lay_out, make_loader
from tests.web import WebServer

TEXT = "the quick brown fox jumps over a lazy dog while naïve café owners pack fifty boxes of jugs in Zürich"  # noqa: E501
WORDS = TEXT.split()
CLASSES, TAGS = ("no", "maybe", "yes"), ("O", "B-X", "I-X")
TRAIN, HELDOUT = 60, 25
UINT16 = np.dtype(np.uint16)


def words(number: int, count: int) -> list[str]:
    return np.random.default_rng(number).choice(WORDS, count).tolist()


def row_of(kind: str, number: int) -> dict[str, Any]:
    """A row of each kind; `number` is in no text, but decides it."""
    draw = np.random.default_rng(number)
    text = " ".join(words(number, draw.integers(1, 9)))
    other = [" ".join(words(1000 * i + number, draw.integers(1, 12))) for i in range(1, 4)]
    if kind == "classification":
        return {"a": text, "b": other[0], "label": CLASSES[number % 3]}
    if kind == "soft":
        return {"text": text, "label": draw.dirichlet(np.ones(3)).tolist()}
    if kind == "regression":
        return {"text": text, "score": number / 7}
    if kind == "multiple_choice":
        return {"context": text, "choices": other, "label": number % 3}
    if kind == "tagging":
        tokens = words(number, draw.integers(1, 40))
        return {"tokens": tokens, "ner": draw.choice(TAGS, len(tokens)).tolist()}
    context = words(number, draw.integers(4, 60))
    first = int(draw.integers(0, len(context) - 2))
    answer = " ".join(context[first : first + 2])
    found = [{"text": answer, "answer_start": len(" ".join([*context[:first], ""]))}]
    return {
        "id": f"q{number}",
        "question": text,
        "context": " ".join(context),
        "answers": found * (number % 4 > 0),
    }


SOURCES: dict[str, Any] = {
    "classification": partial(classification.Config, texts=("a", "b"), labels=CLASSES),
    "soft": partial(classification.Config, labels=CLASSES),
    "regression": regression.Config,
    "multiple_choice": multiple_choice.Config,
    "tagging": partial(tagging.Config, labels=TAGS),
    "question_answering": question_answering.Config,
}
LENGTH = 24
PARTS = {
    "classification": Parts("classification"),
    "soft": Parts("classification"),
    "regression": Parts("regression"),
    "multiple_choice": Parts("multiple_choice", choices=3),
    "tagging": Parts("tagging"),
    "question_answering": Parts("question_answering", stride=5, most=6, between=2),
}
SPECS = {kind: PackSpec(LENGTH, 1, 1, parts=parts) for kind, parts in PARTS.items()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Rows of each kind in a file to train on and one that is held out, and a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    for kind in SOURCES:
        for name, numbers in (("train", range(TRAIN)), ("dev", range(TRAIN, TRAIN + HELDOUT))):
            lines = [json.dumps(row_of(kind, number)) + "\n" for number in numbers]
            (folder / f"{kind}-{name}.jsonl").write_text("".join(lines))
    lines = [" ".join(words(number, 20)) for number in range(100)]
    TokenizerConfig("", "bpe", 300).train(lines).save(folder / "tokenizer")
    return folder


def config_of(corpus: Path, kind: str, output: Path, **changes: Any) -> Config:
    source = SOURCES[kind](
        paths=(f"{corpus}/{kind}-train.jsonl",), heldout=(f"{corpus}/{kind}-dev.jsonl",)
    )
    tokenizer = TokenizerConfig(str(corpus / "tokenizer"), "bpe")
    settings = {"source": source, "shard_bytes": 3000, "workers": 1, **changes}
    return Config(tokenizer=tokenizer, output=str(output), **settings)


@pytest.fixture(scope="module")
def built(corpus, tmp_path_factory) -> dict[str, Path]:
    """A dataset of each kind."""
    parent = tmp_path_factory.mktemp("built")
    for kind in SOURCES:
        build(config_of(corpus, kind, parent / kind))
    return {kind: parent / kind for kind in SOURCES}


@pytest.fixture(params=SOURCES)
def kind(request) -> str:
    return request.param


def parsed(source: TaskSource) -> dict[tuple[str, int], TaskRow]:
    """The rows of a source by file and line."""
    return {(source.files[r.file], r.line): source.parse_row(r) for r in source.records()}


def every(packed: PackedSplit | ConcatSplit) -> Location:
    """Where all examples of a split are, mixed up."""
    index = [(shard, i) for shard, count in enumerate(packed.counts.tolist()) for i in range(count)]
    shard, within = np.random.default_rng(0).permutation(index).T
    return Location(np.zeros(len(shard), dtype=np.int64), shard, within)


def read(packed: PackedSplit | ConcatSplit, at: Location) -> Examples:
    return packed.read(at, np.ones(len(at.index), dtype=np.float32))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_labels_reach_the_examples_of_each_target(corpus, built, tmp_path, kind, split):
    dataset = Dataset.open(built[kind])
    rows = parsed(config_of(corpus, kind, tmp_path).source.build())
    packed = PackedSplit(dataset, split, SPECS[kind], "padded", 3)
    at = every(packed)
    examples, labels = read(packed, at), read(packed, at).labels
    assert labels is not None
    assert not examples.isolated
    values = np.split(labels.values, np.cumsum(labels.count)[:-1])
    last = np.searchsorted(examples.row, np.arange(len(values)), side="right") - 1
    places, numbered = packed.documents(at), {}
    for number, (place, value) in enumerate(zip(places, values, strict=True)):
        row = rows[place[0]]
        assert numbered.setdefault(int(labels.document[number]), place[0]) == place[0]
        texts = [tokens.tolist() for tokens in dataset.tokenizer.encode_batch(row.texts)]
        whole = list(itertools.chain.from_iterable(texts))
        piece = slice(
            *np.cumsum(examples.length)[[last[number] - 1, last[number]]]
            if last[number]
            else (0, None)
        )
        begin, length = labels.begin[number], examples.length[last[number]]
        assert examples.tokens[piece][:length].tolist() == whole[begin : begin + length]
        if kind == "tagging":
            assert len(value) == len(whole)
            word_begins = [len(part) for part in row.texts[0].split()]
            word_begins = np.cumsum([0, *(size + 1 for size in word_begins)])[:-1].tolist()
            assert sorted(word_begins) == [span[0] for span in row.spans]
            tagged = np.flatnonzero(value >= 0)
            assert value[tagged].tolist() == [tag for _, _, tag in row.spans]
            pieces = [
                dataset.tokenizer.decode(p.tolist()) for p in np.split(np.array(whole), tagged[1:])
            ]
            assert [piece.strip() for piece in pieces] == row.texts[0].split()
        elif kind == "question_answering":
            assert len(value) == 2 * bool(row.spans)
            for first, end in [value.astype(int)] * bool(row.spans):
                assert dataset.tokenizer.decode(whole[first : end + 1]).strip() == row.answers[0]
                assert first >= len(texts[0])
        else:
            assert value.tolist() == np.float32(row.probabilities or [row.label]).tolist()
    assert sorted(numbered) == list(range(len(numbered)))
    assert len(numbered) == (TRAIN if split == "train" else HELDOUT)
    assert len(values) > len(numbered) or kind not in ("tagging", "question_answering")


def test_rows_that_are_held_out_come_back_as_they_were_in_the_order_of_their_documents(
    corpus, built, tmp_path, kind
):
    dataset = Dataset.open(built[kind])
    rows = [
        row
        for (file, _), row in parsed(config_of(corpus, kind, tmp_path).source.build()).items()
        if "dev" in file
    ]
    assert len(dataset.shards("heldout")) > 1 or kind in ("soft", "regression")
    found = dataset.rows("heldout")
    assert all(again is row for again, row in zip(dataset.rows("heldout"), found, strict=True)), (
        "read once"
    )
    assert [dataclasses.replace(row, offsets=()) for row in found] == rows
    for row in found:
        if kind in ("tagging", "question_answering"):
            ((_, spans),) = dataset.tokenizer.encode_aligned(row.texts[-1:])
            assert np.array(row.offsets).tolist() == spans.tolist()
        else:
            assert row.offsets == ()
    packed = PackedSplit(dataset, "heldout", SPECS[kind], "padded", 3)
    at = every(packed)
    for number, place in zip(read(packed, at).labels.document, packed.documents(at), strict=True):
        assert rows[number] == rows[place[0][1] - 1]
    with closing(WebServer(built[kind])) as web:
        cache = ShardCache(tmp_path / "cache", 10**9)
        assert Dataset.open(web.url, cache).rows("heldout") == found


def test_the_manifest_says_what_rows_are_for_and_others_stay_as_they_are(built, kind):
    manifest = Manifest.load(built[kind])
    names = {"classification": CLASSES, "soft": CLASSES, "tagging": TAGS, "regression": ("score",)}
    assert manifest.task == TaskLabels(PARTS[kind].kind, names.get(kind, ()))
    assert not manifest.has_sentences
    assert verify(built[kind]) == []
    members = set()
    for path in built[kind].glob("*.tar"):
        with tarfile.open(path) as tar:
            found = {name.partition(".")[2] for name in tar.getnames()}
        members |= found
        assert ("rows.jsonl" in found) == path.name.startswith("heldout")
    arrays = {
        f"{name}.npy"
        for name in ("tokens", "offsets", "origin", "sentences", "labels", "label_offsets")
    }
    assert members == arrays | {"rows.jsonl"}
    settings = {**manifest.settings, "task": {"target": "nonsense", "labels": []}}
    content = json.dumps(
        dataclasses.asdict(dataclasses.replace(manifest, settings=settings))
    ).encode()
    with pytest.raises(DataError, match=r"m.json is damaged \(settings.task is"):
        Manifest.parse(content, "m.json")


def test_a_build_is_resumed_by_the_digest_of_names_that_never_change(corpus, tmp_path):
    (tmp_path / "bad.jsonl").write_text("{}\n")
    source = SOURCES["tagging"](
        paths=(f"{corpus}/tagging-train.jsonl", str(tmp_path / "bad.jsonl"))
    )
    config = config_of(corpus, "tagging", tmp_path / "data", source=source)
    with pytest.raises(DataError, match=r"bad.jsonl:1: no column"):
        build(config)
    settings = {
        "heldout_fraction": 0.005,
        "shard_bytes": 3000,
        "task": {"target": "tags", "labels": list(TAGS)},
    }
    tree = to_tree(config)["source"]
    del tree["header"], tree["encoding"]  # which digests leave out where they are not used
    recipe = [1, tokenizer_of(corpus).fingerprint, tree, settings]
    outcome = Outcome.load(outcome_path(tmp_path / "data", 0))
    assert outcome is not None
    assert outcome.build == hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def test_any_number_of_workers_gives_the_same_bytes(corpus, built, tmp_path):
    build(config_of(corpus, "question_answering", tmp_path / "other", workers=2))
    for file in built["question_answering"].glob("*.[tj]*"):
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes()


def test_without_files_to_hold_out_the_texts_choose_the_split(corpus, tmp_path):
    source = regression.Config(paths=(f"{corpus}/regression-*.jsonl",))
    twice = dataclasses.replace(source, paths=(*source.paths, f"{tmp_path}/again.jsonl"))
    (tmp_path / "again.jsonl").write_text((corpus / "regression-train.jsonl").read_text())
    build(config_of(corpus, "regression", tmp_path / "data", source=twice, heldout_fraction=0.3))
    dataset = Dataset.open(tmp_path / "data")
    lines: dict[str, set[int]] = {"train": set(), "heldout": set()}
    for split, found in lines.items():
        for info in dataset.shards(split):
            origin = dataset.open_shard(info).origin
            found.update(origin[origin[:, 0] != 0, 1].tolist())  # of the file that is there twice
    assert lines["train"] | lines["heldout"] == set(range(1, TRAIN + 1))
    assert not lines["train"] & lines["heldout"]
    assert len(lines["heldout"]) > 5


def test_rows_to_evaluate_on_are_a_dataset_of_their_own(corpus, tmp_path, caplog):
    source = SOURCES["classification"](heldout=(f"{corpus}/classification-dev.jsonl",))
    build(config_of(corpus, "classification", tmp_path / "data", source=source))
    assert "this dataset is for evaluation only" in caplog.text
    dataset = Dataset.open(tmp_path / "data")
    assert len(dataset.rows("heldout")) == HELDOUT
    assert (
        PackedSplit(dataset, "heldout", SPECS["classification"], "padded", 0).counts.sum()
        == HELDOUT
    )
    assert inspect(dataset).split == "heldout"
    with pytest.raises(DataError, match=r"has held-out rows only\. Train on another dataset"):
        PackedSplit(dataset, "train", SPECS["classification"], "padded", 0)


def test_reasons_are_counted_without_the_values_of_rows(corpus, tmp_path, caplog):
    """Or the manifest would have an entry, and texts, of every bad row."""
    rows = [row_of("question_answering", number) for number in range(TRAIN)]
    for number, row in enumerate(rows[:5]):
        row["answers"] = [{"text": f"person {number}", "answer_start": 0}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = question_answering.Config(paths=(str(tmp_path / "rows.jsonl"),))
    output = tmp_path / "data"
    built = build(config_of(corpus, "question_answering", output, source=source, on_error="skip"))
    assert built.documents_rejected == {"an answer is not in the context": 5}
    assert "rejected 5: an answer is not in the context (see" in caplog.text
    listed = [json.loads(line)["reason"] for line in (output / "rejected.jsonl").open()]
    assert listed == [f"an answer is not in the context: 'person {n}'" for n in range(5)]


def test_files_that_hold_no_rows_out_are_named(corpus, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n" * 3)
    source = SOURCES["regression"](paths=(f"{corpus}/regression-train.jsonl",), heldout=(str(bad),))
    config = config_of(corpus, "regression", tmp_path / "data", source=source, on_error="skip")
    with pytest.raises(
        DataError, match=rf"no held-out row .* from {bad} on: 63 read, 3 rejected.*or leave it out"
    ):
        build(config)
    with pytest.raises(DataError, match=r"leave it out, or raise limit"):
        build(dataclasses.replace(config, limit="1KB"), force=True)
    nothing = dataclasses.replace(
        source, paths=(str(bad),), heldout=(f"{corpus}/regression-dev.jsonl",)
    )
    with pytest.raises(DataError, match="holds no document to train on"):
        build(dataclasses.replace(config, source=nothing), force=True)
    with pytest.raises(
        ConfigError, match="sentences is rules, but pairs and rows of a task have none"
    ):
        build(dataclasses.replace(config, sentences="rules"))


def test_the_signatures_of_held_out_addresses_are_not_kept(corpus, tmp_path, monkeypatch):
    source = SOURCES["regression"](
        paths=(f"{corpus}/regression-train.jsonl",), heldout=("https://h/dev.jsonl?key=secret",)
    )
    local = dataclasses.replace(source, heldout=(f"{corpus}/regression-dev.jsonl",)).build()
    monkeypatch.setattr(regression.Config, "build", lambda self: local)
    manifest = build(config_of(corpus, "regression", tmp_path / "data", source=source))
    assert to_tree(source)["heldout"] == ["https://h/dev.jsonl?key=secret"]
    assert "secret" not in (tmp_path / "data" / "manifest.json").read_text()
    assert manifest.source["heldout"] == ["https://h/dev.jsonl"]


def tokenizer_of(corpus: Path) -> Tokenizer:
    return Tokenizer.load(corpus / "tokenizer")


def test_rows_with_nothing_to_predict_or_to_read_are_given_a_reason(corpus, tmp_path):
    wordpiece = TokenizerConfig("", "wordpiece", 100).train(WORDS)
    rows = [
        TaskRow(("fox", "\x01"), 1.0),
        TaskRow(("fox",), 1e300),
        TaskRow(("fox",)),
        TaskRow(("fox",), 2.0),
    ]
    *reasons, good = encode(rows, wordpiece, "regression")
    assert reasons == [
        "no tokens in a text",
        "the label is no finite number",
        "the label is no finite number",
    ]
    assert good.labels.tolist() == [2.0]
    spans = [((4, 5, 0),), (), ((0, 3, 0), (4, 5, 0)), ((3, 3, 0),)]
    rows = [TaskRow(("dog", "fox \x01 dog"), spans=span) for span in spans]
    lost, none, first, empty = encode(rows, wordpiece, "question_answering")
    assert lost == empty == "answer without tokens"
    assert none.labels.tolist() == []
    fox = len(wordpiece.encode_batch(["fox"])[0])
    assert first.labels.tolist() == [first.parts[1], first.parts[1] + fox - 1]
    (tags,) = encode(
        [TaskRow(("fox \x01 dog",), spans=((0, 3, 1), (4, 5, 2), (6, 9, 0)))], wordpiece, "tagging"
    )
    assert tags.labels[tags.labels >= 0].tolist() == [1, 0]  # a word without tokens is left out
    assert tags.labels[[0, fox]].tolist() == [1, 0]


def test_a_damaged_row_is_not_scored(built, tmp_path):
    dataset = dataclasses.replace(Dataset.open(built["tagging"]), path=tmp_path)
    for info in dataset.shards("heldout"):
        (tmp_path / info.name).write_bytes((built["tagging"] / info.name).read_bytes())
    assert len(dataset.rows("heldout")) == HELDOUT
    rewrite(tmp_path / info.name, "000000.rows.jsonl", b"0\n")
    with pytest.raises(
        CorruptError, match=rf"{info.name} is truncated or damaged \(its SHA-256 is not"
    ):
        dataclasses.replace(dataset).rows("heldout")  # which has not read them yet
    with pytest.raises(CorruptError, match="has 0 rows for"):
        Dataset.open(built["tagging"]).rows("train")


def batches(
    folder: Path, kind: str, count: int = 1, **changes: Any
) -> list[dict[str, torch.Tensor]]:
    spec = SPECS[kind]
    settings = {
        "pack_spec": spec,
        "packing": "padded",
        "collate": lambda each, _: lay_out(each, spec.positions),
        "lanes": 4,
    }
    return global_batches(folder, 5, count, **{**settings, **changes})


def test_batches_say_which_row_they_are_of_and_are_the_same_at_any_number_of_replicas(built, kind):
    alone, dataset = batches(built[kind], kind), Dataset.open(built[kind])
    tokens = []
    for info in dataset.shards("train"):
        shard = dataset.open_shard(info)
        tokens += [shard.tokens[a : a + n] for a, n in zip(shard.start, shard.length, strict=True)]
    for batch in alone:
        for name in ("document", "begin", "column", "length"):
            assert batch[name].dtype == torch.int64
        assert batch["dropout_key"].dtype == torch.int32
        for row in range(len(batch["document"])):
            document, begin, column, length = (
                int(batch[name][row]) for name in ("document", "begin", "column", "length")
            )
            cells = batch["tokens"][row, column : column + length]
            assert (cells - 1).tolist() == tokens[document][begin : begin + length].tolist()
            assert not batch["tokens"][row, column + length :].any()  # it is the last piece
    keys = torch.cat([batch["dropout_key"] for batch in alone])
    assert keys.shape[1:] == ((3,) if kind == "multiple_choice" else ())
    assert len(keys.unique()) == keys.numel()
    for count in (2, 3):
        assert_same(batches(built[kind], kind, count, micro_batch_size=count), alone)


def test_rows_that_only_pad_are_of_no_document(built):
    spec = SPECS["regression"]
    settings: dict[str, Any] = {
        "pack_spec": spec,
        "packing": "padded",
        "split": "heldout",
        "finite": True,
    }
    with make_loader(built["regression"], **settings) as loader:
        steps = [
            {name: torch.cat([each[name] for each in step]) for name in step[0]} for step in loader
        ]
    documents = torch.cat([step["document"] for step in steps])
    padding = torch.cat([step["example"] for step in steps]) < 0
    assert padding.any()
    assert (documents[padding] == -1).all()
    assert sorted(documents[~padding].tolist()) == list(range(HELDOUT))
    rows, labels = loader.task_rows()
    assert [len(each) for each in rows] == [HELDOUT]
    assert labels == ("score",)


def test_labels_of_concat_datasets_are_those_of_each(corpus, built, tmp_path, kind):
    other = dataclasses.replace(
        config_of(corpus, kind, tmp_path / "other").source,
        paths=(f"{corpus}/{kind}-dev.jsonl",),
        heldout=(),
    )
    build(config_of(corpus, kind, tmp_path / "other", source=other, heldout_fraction=0))
    sources = {"a": Dataset.open(built[kind]), "b": Dataset.open(tmp_path / "other")}
    mixed = ConcatSplit(sources, "train", SPECS[kind], "padded", 3)
    at = every(mixed)
    together, source = read(mixed, at), mixed.source(at)
    assert 0 < source.sum() < len(source)
    for number, dataset in enumerate(sources.values()):
        mine = np.flatnonzero(source == number)
        first = number * len(sources["a"].shards("train"))
        alone = PackedSplit(dataset, "train", SPECS[kind], "padded", 3)
        expected = read(
            alone, Location(at.epoch[mine], at.shard[mine] - first, at.index[mine])
        ).labels
        values = np.split(together.labels.values, np.cumsum(together.labels.count)[:-1])
        assert np.concatenate([values[row] for row in mine]).tolist() == expected.values.tolist()
        for name in ("count", "document", "begin"):
            assert getattr(together.labels, name)[mine].tolist() == getattr(expected, name).tolist()


@pytest.mark.parametrize("policy", ["concat", "best_fit", "padded"])
def test_the_texts_of_rows_can_be_trained_on_as_documents(built, kind, policy):
    packed = PackedSplit(Dataset.open(built[kind]), "train", PackSpec(LENGTH, 1, 1), policy, 3)
    examples = read(packed, every(packed))
    assert examples.labels is None
    assert len(examples.tokens) == sum(
        shard.tokens for shard in Dataset.open(built[kind]).shards("train")
    )
    settings = {
        "pack_spec": PackSpec(LENGTH, 1, 1),
        "packing": policy,
        "lanes": 4,
        "global_batch_size": 4,
    }
    assert "document" not in global_batches(built[kind], 1, **settings)[0]


def test_a_row_of_another_number_of_choices_is_named_when_the_run_starts(built):
    spec = PackSpec(LENGTH, 1, 1, parts=Parts("multiple_choice", choices=4))
    with pytest.raises(
        DataError,
        match=r"multiple_choice-train.jsonl:1: the row has 4 texts and the objective reads 5",
    ):
        PackedSplit(Dataset.open(built["multiple_choice"]), "train", spec, "padded", 0)


def printed(function: Any, *arguments: Any) -> str:
    console = Console(file=io.StringIO(), width=100)
    function(*arguments, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rows_are_counted_text_by_text(built, kind):
    inspection = inspect(Dataset.open(built[kind]))
    texts = {"classification": 2, "multiple_choice": 4, "question_answering": 2}
    assert list(inspection.text_lengths) == [
        f"text {number + 1}" for number in range(texts.get(kind, 1))
    ]
    assert {len(lengths) for lengths in inspection.text_lengths.values()} == {TRAIN}
    output = printed(report, inspection)
    assert f"rows for {kind}" in output or (
        kind == "soft" and "rows for classification: no, maybe, yes" in output
    )
    assert "Tokens of training rows" in output


def test_rows_are_shown_with_what_is_to_be_predicted(built, tmp_path, kind):
    rest = {
        "soft": "{kind: classification, soft: true}",
        "multiple_choice": "{kind: multiple_choice, choices: 3}",
        "question_answering": "{kind: question_answering, question_length: 10, stride: 9, impossible: true}",  # noqa: E501
    }
    data = f"data: {{path: x, sequence_length: 40, packing: padded, lanes: 4}}\nobjective: {rest.get(kind, kind)}\n"  # noqa: E501
    (tmp_path / "experiment.yaml").write_text(data)
    output = printed(show, str(built[kind]), str(tmp_path / "experiment.yaml"), [], 0, 12)
    _, *shown = output.split("\nexample ")
    assert len(shown) == 12
    for example in shown:
        header, place, *texts = example.strip().splitlines()
        assert header.endswith("positions of padding")
        number = int(place.rpartition(":")[2]) - 1
        row = row_of(kind, number)
        if kind == "classification":
            assert texts[-1] == f"→ {row['label']}"
            assert row["a"].startswith(texts[0].strip())
            assert row["b"].startswith(texts[1].strip())
        elif kind == "soft":
            shares = {
                name: float(share)
                for name, share in (part.split() for part in texts[-1][2:].split(", "))
            }
            assert shares == pytest.approx(dict(zip(CLASSES, row["label"], strict=True)), rel=1e-5)
        elif kind == "regression":
            assert float(texts[-1].split()[1]) == pytest.approx(row["score"], rel=1e-5)
        elif kind == "multiple_choice":
            assert [text.strip().startswith("[→ ") for text in texts[1:]] == [
                i == row["label"] for i in range(3)
            ]
        elif kind == "tagging":
            marked = [
                word for word, tag in zip(row["tokens"], row["ner"], strict=True) if tag != "O"
            ]
            shown_words = [part.split("]")[0].split()[1] for part in texts[0].split("[")[1:]]
            assert " ".join(shown_words) in " ".join(marked)  # of a window
        elif "[→" in texts[-1]:
            assert texts[-1].partition("[→ ")[2].partition("]")[0] in row["answers"][0]["text"]
