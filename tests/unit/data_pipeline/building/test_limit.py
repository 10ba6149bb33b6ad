"""`limit`: the first documents of a source, always the same ones, and a dataset of its own."""

from __future__ import annotations

import json

import pytest

from data_pipeline.building.build import build
from data_pipeline.building.config import Config as BuildConfig
from data_pipeline.building.tokenizer_training import train_tokenizer
from data_pipeline.reading.dataset import Dataset
from data_pipeline.sources.kinds import jsonl
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.errors import ConfigError, DataError

LINES = [json.dumps({"text": f"a line of text {i:05d}"}) + "\n" for i in range(2000)]
SIZE = len(LINES[0])


@pytest.fixture
def config(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_text(
            "".join(LINES[number * 1000 : (number + 1) * 1000])
        )

    def make(limit=None, output="dataset", **settings):
        return BuildConfig(
            source=jsonl.Config((str(tmp_path / "*.jsonl"),)),
            tokenizer=TokenizerConfig(path=str(tmp_path / "tokenizer"), vocab_size=200),
            output=str(tmp_path / output),
            limit=limit,
            shard_bytes=300 * SIZE,
            heldout_fraction=0,
            workers=1,
            **settings,
        )

    train_tokenizer(make())
    return make


@pytest.mark.parametrize(
    ("limit", "documents"),
    [
        (f"{SIZE}B", 1),
        (f"{SIZE + 1}B", 2),
        ("10kB", -(-10_000 // SIZE)),
        (f"{1500 * SIZE}B", 1500),
        ("1GB", 2000),
    ],
)
def test_reading_ends_with_the_document_that_reaches_the_limit(config, limit, documents):
    assert build(config(limit)).documents_in == documents
    dataset = Dataset.open(config().output)
    lines = [
        tuple(row)
        for shard in dataset.shards("train")
        for row in dataset.open_shard(shard).origin.tolist()
    ]
    assert lines == [(i // 1000, i % 1000 + 1) for i in range(documents)]


def test_the_limit_is_part_of_what_a_dataset_is(config):
    build(config("10kB"))
    build(config("10000B"))  # the same, however it is written
    with pytest.raises(DataError, match="another source, tokenizer or settings"):
        build(config("20kB"))
    with pytest.raises(DataError, match="another source, tokenizer or settings"):
        build(config())


def test_a_limit_that_is_no_size_is_refused(config):
    with pytest.raises(ConfigError, match=r"limit must be a size such as .*'1G'"):
        config("1G")


def test_a_tokenizer_is_trained_on_no_more_than_the_limit(config, monkeypatch):
    seen = []
    monkeypatch.setattr(
        TokenizerConfig, "train", lambda self, texts: seen.extend(texts) or original(self, seen)
    )
    train_tokenizer(config(f"{5 * SIZE}B"), force=True)
    assert seen == [json.loads(line)["text"] for line in LINES[:5]]


original = TokenizerConfig.train
