"""The datasets of configs/data build from a Hub on loopback that has their layout."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from data_pipeline.building.build import build
from data_pipeline.building.config import Config as BuildConfig
from data_pipeline.building.units import limited
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.config import load
from tests.hub import running_hub

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "configs" / "data"
TEXTS = [f"The document number {i} is about this and that, and a little more." for i in range(60)]


def rows(**others) -> bytes:
    file = io.BytesIO()
    pq.write_table(
        pa.table({**{name: [value] * len(TEXTS) for name, value in others.items()}, "text": TEXTS}),
        file,
    )
    return file.getvalue()


def json_lines() -> bytes:
    lines = [
        json.dumps({"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "https://x"})
        for text in TEXTS
    ]
    return gzip.compress("\n".join(lines).encode())


# The first and another file of each, as the repositories name them, and one that must not be read.
LAYOUTS = {
    "wikipedia_en": (
        "wikimedia/wikipedia",
        ["20231101.en/train-00000-of-00041.parquet", "20231101.en/train-00040-of-00041.parquet"],
        "20231101.fr/train-00000-of-00017.parquet",
        rows(id="12", url="https://en.wikipedia.org/wiki/X", title="X"),
    ),
    "books": (
        "emozilla/pg19",
        [
            "data/train-00000-of-00023-5263dc4323e881d2.parquet",
            "data/train-00001-of-00023-2b13c68dbeba63b5.parquet",
        ],
        "data/test-00000-of-00001-29a571947c0b5ccc.parquet",
        rows(
            short_book_title="A book",
            publication_date=1880,
            url="http://www.gutenberg.org/ebooks/1",
        ),
    ),
    "c4_en": (
        "allenai/c4",
        ["en/c4-train.00000-of-01024.json.gz", "en/c4-train.01023-of-01024.json.gz"],
        "en/c4-validation.00000-of-00008.json.gz",
        json_lines(),
    ),
    "lm1b": (
        "billion-word-benchmark/lm1b",
        ["plain_text/train/0000.parquet", "plain_text/train/0001.parquet"],
        "plain_text/test/0000.parquet",
        rows(),
    ),
    "openwebtext": (
        "Skylion007/openwebtext",
        ["plain_text/train-00000-of-00080.parquet", "plain_text/train-00079-of-00080.parquet"],
        "README.md",
        rows(),
    ),
    "cc_news": (
        "vblagoje/cc_news",
        ["plain_text/train-00000-of-00005.parquet", "plain_text/train-00004-of-00005.parquet"],
        "data/cc_news.tar.gz",
        rows(title="A title", domain="x.com", date="2017-05-04", url="https://x.com/1"),
    ),
    "c4_realnewslike": (
        "allenai/c4",
        [
            "realnewslike/c4-train.00000-of-00512.json.gz",
            "realnewslike/c4-train.00511-of-00512.json.gz",
        ],
        "realnewslike/c4-validation.00000-of-00001.json.gz",
        json_lines(),
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ready") / "tokenizer"
    TokenizerConfig(str(folder), vocab_size=120).train(TEXTS).save(folder)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_ready_made_dataset_is_built_from_the_files_it_names(name, tokenizer, tmp_path):
    repository, files, other, content = LAYOUTS[name]
    settings = [f"tokenizer.path={tokenizer}", f"output={tmp_path / 'dataset'}", "workers=1"]
    config = load(BuildConfig, str(FOLDER / f"{name}.yaml"), settings)
    with running_hub(tmp_path / "repositories", tmp_path / "cache") as hub:
        for file in (*files, other):
            hub.write(f"datasets/{repository}/{file}", content)
        whole = build(config)
        assert [file.partition(repository)[2].partition("/")[2] for file in whole.files] == files
        assert (whole.documents_in, whole.documents_rejected) == (2 * len(TEXTS), {})
        config = load(BuildConfig, str(FOLDER / f"{name}.yaml"), ["limit=2kB"])
        assert (
            0
            < sum(1 for _ in limited(config.source.build().records(), config.limit_bytes))
            < len(TEXTS)
        )


def test_every_file_is_short_and_says_what_it_costs():
    for name in LAYOUTS:
        lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
        header = "\n".join(line for line in lines if line.startswith("#"))
        assert len(lines) < 40
        assert all(
            word in header for word in ("download:", "dataset:", "time:", "license:", "limit=1GB")
        )
