"""Shards of rows of tasks: labels and rows are what was written, or refused."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.format import row_lines, writing
from data_pipeline.format.shards import Shard, ShardIndex
from data_pipeline.format.writing import write_shard
from samestep.errors import CorruptError, DataError
from samestep.examples import TaskRow

UINT16 = np.dtype(np.uint16)


def read_only(tmp_path: Path, **options: Any) -> ShardIndex:
    with (tmp_path / "a.tar").open("rb") as file:
        return ShardIndex.read(file, "a.tar", UINT16, **options)


def write(tmp_path: Path, labels: list[list[float]], rows: list[TaskRow] | None = None) -> None:
    documents = [np.arange(10 * (i + 1), dtype=np.uint16) for i in range(len(labels))]
    origin = np.zeros((len(labels), 2), dtype=np.uint32)
    texts = [np.array([0, 3]) for _ in labels]
    arrays = [np.array(numbers, dtype=np.float32) for numbers in labels]
    write_shard(tmp_path / "a.tar", documents, origin, UINT16, texts, arrays, rows)


@pytest.mark.parametrize("chunk", [15, 2**20])
def test_labels_and_rows_are_read_back_from_any_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(writing, "CHUNK_TOKENS", chunk)
    labels = [[1.0], [], [], [0.25, -3.5, 7.0], [2.0]]
    rows = [
        TaskRow(
            ("é \u2028\ud800"[: i + 1],),
            i / 3,
            ((0, 1, i),),
            ("a",) * i,
            f"g{i}",
            ((0, 1),),
            (0.5,) * i,
        )
        for i in range(5)
    ]
    write(tmp_path, labels, rows)
    index = read_only(tmp_path, labels=True)
    assert [part.tolist() for part in np.split(index.labels, index.label_start[1:-1])] == labels
    assert index.label_start[[0, -1]].tolist() == [0, 5]
    assert not len(index.sentences)
    with (tmp_path / "a.tar").open("rb") as file:
        assert row_lines.read_rows(file, "a.tar", 5) == rows
        with pytest.raises(CorruptError, match="has 5 rows for 6"):
            row_lines.read_rows(file, "a.tar", 6)
    assert not len(read_only(tmp_path).label_start)  # not read unless asked for
    write_shard(
        tmp_path / "a.tar",
        [np.arange(3, dtype=np.uint16)],
        np.zeros((1, 2), dtype=np.uint32),
        UINT16,
    )
    with pytest.raises(DataError, match=r"no member 000000\.labels\.npy"):
        read_only(tmp_path, labels=True)


def rewrite(path: Path, name: str, content: bytes) -> None:
    """Puts other content into the last of a member's bytes."""
    whole = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        member = tar.getmember(name)
    end = member.offset_data + member.size
    whole[end - len(content) : end] = content
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("labels", np.float32(np.nan).tobytes()),
        ("label_offsets", np.int64(4).tobytes()),
        ("label_offsets", np.array([3, 2, 5]).tobytes()),
        ("label_offsets", np.array([1, 1, 1, 5]).tobytes()),
    ],
)
def test_damaged_labels_are_refused(tmp_path, name, content):
    write(tmp_path, [[1.0], [2.0], [3.0, 4.0, 5.0]])
    read_only(tmp_path, labels=True)
    rewrite(tmp_path / "a.tar", f"000000.{name}.npy", content)
    with pytest.raises(CorruptError, match="the labels of chunk 000000 do not fit its documents"):
        read_only(tmp_path, labels=True)
    Shard.open(tmp_path / "a.tar", UINT16, sentences=True)


@pytest.mark.parametrize(
    "change",
    [
        "[]",
        '{"label": 1}',
        {"texts": []},
        {"texts": "fox"},
        {"texts": [1]},
        {"label": "1"},
        {"label": True},
        {"label": float("nan")},
        {"spans": [[0, 1]]},
        {"spans": [[0, 9, 0]]},
        {"spans": [[2, 1, 0]]},
        {"spans": [[0, 1, -1]]},
        {"spans": [[0, 1.5, 0]]},
        {"spans": None},
        {"offsets": [[0, 9]]},
        {"offsets": [3]},
        {"answers": [None]},
        {"group": 3},
        {"probabilities": [None]},
        {"probabilities": 1},
        {"other": 1},
        "[" * 100_000,
    ],
    ids=str,
)
def test_lines_that_are_no_rows_are_refused(change):
    row = TaskRow(("the", "fox"), 1, ((0, 1, 2),), ("a",), "g", ((0, 1), (1, 3)), (0.5, 1))
    assert row_lines.load(row_lines.dump(row)) == row
    line = (
        change
        if isinstance(change, str)
        else json.dumps({**json.loads(row_lines.dump(row)), **change})
    )
    with pytest.raises(ValueError, match=r"row|not an object|nested"):
        row_lines.load(line.encode())
