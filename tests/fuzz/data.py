# ruff: noqa: E501
"""Manifests, shards and the files that datasets are built from."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import zstandard
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from data_pipeline.format import row_lines, shards, writing
from data_pipeline.format.manifest import Manifest
from data_pipeline.format.shards import Shard
from data_pipeline.sources import BadRecord, PairSource, Source, TaskSource
from data_pipeline.sources.kinds import (
    classification,
    jsonl,
    parquet,
    question_answering,
    table,
    table_pairs,
    tagging,
    text,
    webdataset,
)
from samestep.examples import TaskRow
from tests.fuzz.mutations import blobs, jsons, named, one_of, trees, values
from tests.fuzz.trial import Files, Target

_SHA = "0" * 64
_TOKENIZER = "tokenizer/tokenizer.json"
_MANIFEST = {
    "format": 1, "tokenizer_fingerprint": _SHA, "vocab_size": 100, "dtype": "uint16",
    "source": {"kind": "jsonl", "paths": ["a.jsonl"]}, "files": ["a.jsonl"], "documents_in": 3,
    "documents_rejected": {"empty document": 1}, "duplicates": 0,
    "splits": {"train": [{"name": "train-00000.tar", "documents": 2, "tokens": 9, "bytes": 10,
                          "sha256": _SHA}], "heldout": []},
    "settings": {"sentences": {"splitter": "x"}, "task": {"target": "classification", "labels": ["a", "b"]}},
    "small_files": {_TOKENIZER: {"sha256": hashlib.sha256(b"{}").hexdigest(), "bytes": 2}},
}  # fmt: skip


def read_manifest(folder: Path) -> object:
    manifest = Manifest.load(folder)
    manifest.check_tokenizer(folder)
    return (
        manifest.digest,
        manifest.task,
        manifest.shards,
        manifest.target_file,
        manifest.has_sentences,
    )


@cache
def _shard() -> bytes:
    documents = [np.arange(n, dtype=np.uint16) for n in (3, 0, 70)]
    with TemporaryDirectory() as folder:
        path = Path(folder, "shard.tar")
        writing.write_shard(
            path,
            documents,
            np.array([[0, 1], [0, 2], [0, 3]], np.uint32),
            np.dtype(np.uint16),
            [np.array(starts, np.int64) for starts in ([0], [], [0, 4])],
            [np.array(labels, np.float32) for labels in ([1], [], [0, 1])],
            [TaskRow(("a",))] * 3,
        )
        return path.read_bytes()


@st.composite
def _tars(
    draw: DrawFn, members: dict[str, bytes], changed: dict[str, SearchStrategy[bytes]]
) -> bytes:
    """A tar of some members, with hostile headers and names among them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            content = draw(changed[name]) if name in changed and draw(st.booleans()) else content
            info.size = len(content)
            if draw(st.integers(0, 9)) == 0:
                info.type = draw(
                    st.sampled_from([b"0", b"1", b"2", b"3", b"5", b"6", b"S", b"x", b"L"])
                )
                info.name = draw(st.sampled_from(["../x", "/etc/x", name, "é.txt", "a" * 300]))
                info.linkname = "/etc/passwd"
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _npy(text: str, body: bytes = bytes(8)) -> bytes:
    text = text.ljust(-(len(text) + 11) % 64 + len(text)) + "\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode() + body


@cache
def _chunk() -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(_shard())) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]


_headers = st.sampled_from([
    _npy(f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}")
    for descr in ("<i8", "<u2", "|O", "<f4", [("a", "<u4", (10**9,))])
    for order in ("True", "False", "[]" * 999)
    for shape in ("(10**12,)", "(1000000000000,)", "()", "(-1,)", "(4,)", "x", "(" * 99 + ")" * 99)
])  # fmt: skip


def read_shard(folder: Path) -> object:
    path = folder / "train-00000.tar"
    shard = Shard.open(path, np.uint16, sentences=True, labels=True)
    shards.check_tokens(shard, str(path), 100)
    for start, length in zip(shard.start, shard.length, strict=True):
        shard.tokens[start : start + length].sum()
    with path.open("rb") as file:
        return row_lines.read_rows(file, str(path), len(shard.start))


def _use(source: Source) -> None:
    """Reads all records of a source, as the coordinator and the workers of a build do."""
    for number, record in enumerate(source.records()):
        try:
            if isinstance(source, TaskSource):
                source.parse_row(record)
            elif isinstance(source, PairSource):
                source.parse_pair(record)
            else:
                source.parse(record)
        except BadRecord:
            continue
        if number > 10**6:
            raise AssertionError("a small file has a million records")


_ROWS = [
    {"text": "a b c", "label": 1, "target": "x", "tokens": ["a", "b"], "tags": [0, 1], "id": "7",
     "question": "who?", "context": "it is me", "answers": {"text": ["me"], "answer_start": [6]}},
    {"text": "d é", "label": "b", "target": "y", "tokens": ["c"], "tags": ["O"], "id": 8,
     "question": "q", "context": "c", "answers": {"text": [], "answer_start": []}},
]  # fmt: skip


def _sources(name: str) -> list[Source]:
    paths = (name,)
    return [
        classification.Config(paths=paths, labels=("a", "b"), texts=("text",)).build(),
        tagging.Config(paths=paths, tags="tags", labels=("O", "B-x")).build(),
        question_answering.Config(paths=paths).build(),
        table_pairs.Config(paths=paths, source="text", target="target").build(),
        table.Config(paths, encoding="utf-16").build(),
    ]


def read_sources(folder: Path) -> object:
    """Reads whatever files of rows and texts are in a folder."""
    for path in sorted(folder.iterdir()):
        plain = (
            path.name.removesuffix(".gz")
            .removesuffix(".zst")
            .removesuffix(".bz2")
            .removesuffix(".xz")
        )
        kind = plain.rpartition(".")[2]
        sources = [] if kind in ("tar", "txt") else _sources(path.name)
        if kind in ("jsonl", "json"):
            sources.append(jsonl.Config((path.name,)).build())
        elif kind == "parquet":
            sources.append(parquet.Config((path.name,)).build())
        elif kind == "tar":
            sources.append(webdataset.Config((path.name,)).build())
            sources.append(webdataset.Config((path.name,), "*.json").build())
        elif kind == "txt":
            sources.append(text.Config((path.name,)).build())
            sources.append(text.Config((path.name,), "paragraph", "shift_jis").build())
        for source in sources:
            _use(source)
    return None


def _lines(rows: list[object]) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows)


_CSV = b'text,label,target\n"a ""b""\nc",1,x\nd,b,y\n'
_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}  # fmt: skip


def _compressed() -> SearchStrategy[Files]:
    bombs = [b"x" * 10**6, b"\0" * 2**22, _lines(list(_ROWS)), b"[" * 10**6, b""]
    each = [
        named(f"a.{kind}{suffix}", blobs(*map(compress, bombs)))
        for suffix, compress in _COMPRESS.items()
        for kind in ("txt", "jsonl", "csv")
    ]
    return st.one_of(each)


@cache
def _tables() -> list[bytes]:
    import pyarrow as pa
    from pyarrow import parquet as pq

    table = pa.Table.from_pylist(
        [{**row, "label": str(row["label"]), "tags": [0], "id": "7"} for row in _ROWS]
    )
    repeated = pa.table(
        {"text": pa.array(["x" * 1000] * 5000).dictionary_encode(), "label": ["a"] * 5000}
    )
    found = []
    for content, options in (
        (table, {}), (table, {"compression": "zstd"}), (table, {"use_dictionary": False}),
        (repeated, {"compression": "gzip"}), (table, {"data_page_version": "2.0"}),
        (repeated, {"store_schema": False}), (table, {"use_byte_stream_split": False}),
    ):  # fmt: skip
        buffer = io.BytesIO()
        pq.write_table(content, buffer, **options)
        found.append(buffer.getvalue())
    return found


TARGETS = [
    Target(
        "manifest",
        lambda: one_of({_TOKENIZER: b"{}"}, {"manifest.json": jsons(_MANIFEST)}),
        read_manifest,
    ),
    Target(
        "shard",
        lambda: named("train-00000.tar", st.one_of(
            blobs(_shard(), most=3),
            _tars(_chunk(), {name: st.one_of(blobs(content, most=2), _headers)
                             for name, content in _chunk().items()}),
        )),
        read_shard,
    ),
    Target(
        "JSON Lines",
        lambda: st.one_of(
            named("a.jsonl", trees(_ROWS).filter(lambda t: isinstance(t, list)).map(_lines)),
            named("a.json", jsons(_ROWS, {"data": [{"paragraphs": [{"context": "c", "qas": []}]}]})),
            named("a.jsonl", blobs(_lines(list(_ROWS)))),
        ),
        read_sources,
    ),
    Target(
        "CSV and TSV",
        lambda: st.one_of(
            named("a.csv", blobs(_CSV)), named("a.tsv", blobs(_CSV.replace(b",", b"\t"))),
            named("a.csv", st.lists(values.map(str), max_size=9).map(
                lambda cells: _CSV + ",".join(cells).encode(errors="replace"))),
        ),
        read_sources,
    ),
    Target("Parquet", lambda: named("a.parquet", blobs(*_tables(), most=4)), read_sources),
    Target(
        "WebDataset",
        lambda: named("a.tar", st.one_of(
            _tars({"a.txt": b"text", "a.json": b'{"text": "x"}', "b.txt": b"t", "v1.c.json": b"{}",
                   "d.txt.gz": gzip.compress(b"t"), "e.json.zst": _COMPRESS[".zst"](b"{}")},
                  {"a.json": jsons(_ROWS[0]), "a.txt": blobs(b"text"),
                   "d.txt.gz": blobs(gzip.compress(b"t" * 999))}),
            blobs(_shard()),
        )),
        read_sources,
    ),
    Target("compressed text", _compressed, read_sources),
]  # fmt: skip
