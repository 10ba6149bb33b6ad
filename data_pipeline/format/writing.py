"""Writes shards; `shards` describes the format."""

from __future__ import annotations

import hashlib
import io
import itertools
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_pipeline.format import row_lines
from data_pipeline.format.manifest import ShardInfo
from data_pipeline.format.shards import Tokens
from samestep.examples import TaskRow
from samestep.storage import atomic_write
from samestep.untrusted import open_regular

CHUNK_TOKENS = 2**20


def write_shard(
    path: Path,
    documents: Sequence[Tokens],
    origin: npt.NDArray[np.uint32],
    dtype: np.dtype[np.generic],
    sentences: Sequence[npt.NDArray[np.int64]] | None = None,
    labels: Sequence[npt.NDArray[np.float32]] | None = None,
    rows: Sequence[TaskRow] | None = None,
    passages: Sequence[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]] | None = None,
) -> ShardInfo:
    """Writes documents to a new shard, atomically.

    Its bytes depend only on the arguments, not on time or machine.

    Args:
        path: the shard's file.
        documents: D arrays of tokens.
        origin: [D, 2], the (source file, line) of each document.
        dtype: of the stored tokens.
        sentences: D arrays with the offset of each sentence's first token within its document,
            ascending; the first is 0.
        labels: D arrays with the labels of a task's rows.
        rows: D rows of a task, from which scores are computed.
        passages: D pairs of the numbers of a row's positives and of its negatives.

    Raises:
        DataError: the file cannot be written.
    """
    assert len(documents) == len(origin) > 0
    lengths = [len(document) for document in documents]
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    # A document belongs to the chunk in which it starts: with chunks of 10 tokens, documents of 6,
    # 8 and 3 tokens start at 0, 6 and 14, so the first chunk holds two documents (14 tokens).
    bounds = [*np.flatnonzero(np.diff(offsets[:-1] // CHUNK_TOKENS, prepend=-1)), len(documents)]
    with atomic_write(path) as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for chunk, (first, end) in enumerate(itertools.pairwise(bounds)):
                own = offsets[first : end + 1] - offsets[first]
                arrays = {
                    "tokens": np.concatenate(documents[first:end]).astype(dtype, copy=False),
                    "offsets": own,
                    "origin": origin[first:end].astype(np.uint32, copy=False),
                }
                if sentences is not None:
                    pairs = zip(own[:-1], sentences[first:end], strict=True)
                    starts = np.concatenate([at + within for at, within in pairs])
                    arrays["sentences"] = starts.astype(np.uint32)
                if labels is not None:
                    counts = [len(values) for values in labels[first:end]]
                    arrays["labels"] = np.concatenate(labels[first:end]).astype(np.float32)
                    arrays["label_offsets"] = np.cumsum([0, *counts], dtype=np.int64)
                if passages is not None:
                    sides = [side for both in passages[first:end] for side in both]
                    arrays["passages"] = np.concatenate(sides).astype(np.uint32)
                    sizes = [len(side) for side in sides]
                    arrays["passage_offsets"] = np.cumsum([0, *sizes], dtype=np.int64)
                for name, array in arrays.items():
                    _add(tar, f"{chunk:06d}.{name}.npy", _npy(array))
                if rows is not None:
                    lines = b"".join(map(row_lines.dump, rows[first:end]))
                    _add(tar, f"{chunk:06d}.rows.jsonl", lines)
        size = file.tell()
    with open_regular(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return ShardInfo(path.name, len(documents), int(offsets[-1]), size, sha256)


def _npy(array: npt.NDArray[np.generic]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # time 0, owner 0, mode 644: the same bytes everywhere
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
