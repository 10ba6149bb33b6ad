import io
import os
import re
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import webdataset

from data_pipeline.format import writing
from data_pipeline.format.shards import Shard
from data_pipeline.format.writing import write_shard
from samestep.errors import DataError
from samestep.storage import atomic_write
from tests.damage import sparse_tar

UINT16 = np.dtype(np.uint16)


def make_documents(lengths, dtype=UINT16):
    draw = np.random.default_rng(0)
    documents = [
        draw.integers(0, np.iinfo(dtype).max, length, dtype, endpoint=True) for length in lengths
    ]
    origin = np.stack([np.arange(len(lengths)) // 3, np.arange(len(lengths)) + 1], axis=1).astype(
        np.uint32
    )
    return documents, origin


@pytest.fixture
def shard_path(tmp_path: Path) -> Path:
    path = tmp_path / "train-000000.tar"
    write_shard(path, *make_documents([5, 300, 1, 40]), UINT16)
    return path


@pytest.mark.parametrize("dtype", [np.dtype(np.uint16), np.dtype(np.uint32)])
@pytest.mark.parametrize("lengths", [[1], [0, 0], [7, 0, 3000, 1], [100] * 500, [5000, 1, 1]])
def test_what_is_written_is_read_back_as_plain_slices(tmp_path, monkeypatch, dtype, lengths):
    monkeypatch.setattr(writing, "CHUNK_TOKENS", 1000)  # several chunks, some of one long document
    documents, origin = make_documents(lengths, dtype)
    info = write_shard(tmp_path / "a.tar", documents, origin, dtype)
    shard = Shard.open(tmp_path / "a.tar", dtype)
    assert (info.documents, info.tokens) == (len(lengths), sum(lengths))
    assert info.bytes == (tmp_path / "a.tar").stat().st_size
    np.testing.assert_array_equal(shard.length, lengths)
    np.testing.assert_array_equal(shard.origin, origin)
    for document, start, length in zip(documents, shard.start, shard.length, strict=True):
        np.testing.assert_array_equal(shard.tokens[start : start + length], document)
    assert isinstance(shard.tokens, np.memmap)


def test_the_bytes_depend_on_the_content_only(tmp_path):
    documents, origin = make_documents([3, 4])
    (tmp_path / "elsewhere").mkdir()
    first = write_shard(tmp_path / "a.tar", documents, origin, UINT16)
    again = write_shard(tmp_path / "elsewhere" / "a.tar", documents, origin, UINT16)
    other = write_shard(tmp_path / "b.tar", documents[::-1], origin, UINT16)
    assert first == again
    assert first.sha256 != other.sha256


def test_webdataset_reads_a_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "CHUNK_TOKENS", 64)
    documents, origin = make_documents([30, 50, 10, 200, 5])
    write_shard(tmp_path / "a.tar", documents, origin, UINT16)
    samples = list(webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).decode())
    found = [
        part
        for sample in samples
        for part in np.split(sample["tokens.npy"], sample["offsets.npy"][1:-1])
    ]
    assert len(samples) > 1
    for document, part in zip(documents, found, strict=True):
        np.testing.assert_array_equal(part, document)
    np.testing.assert_array_equal(
        np.concatenate([sample["origin.npy"] for sample in samples]), origin
    )


def test_a_shard_cut_short_anywhere_is_refused(shard_path):
    whole = shard_path.read_bytes()
    for size in [0, 1, 511, 512, *range(1024, len(whole) - 1024, 512), len(whole) - 1]:
        shard_path.write_bytes(whole[:size])
        if any(whole[max(0, size - 1024) : size]) or size % 512:
            with pytest.raises(DataError, match=r"train-000000\.tar is truncated or damaged"):
                Shard.open(shard_path, UINT16)


def test_damage_to_the_structure_is_an_error_of_the_data_and_nothing_else(shard_path):
    whole = shard_path.read_bytes()
    intact = Shard.open(shard_path, UINT16)
    refused = 0
    for position in range(0, 8192, 17):
        damaged = bytearray(whole)
        damaged[position] ^= 0x55
        shard_path.with_name("b.tar").write_bytes(damaged)
        try:
            shard = Shard.open(shard_path.with_name("b.tar"), UINT16)
        except DataError:
            refused += 1
        else:
            assert shard.start.max() + shard.length.max() <= len(shard.tokens)
            assert len(shard.length) == len(intact.length)
    assert refused > 100


def test_headers_are_parsed_by_one_thread_at_a_time(shard_path, monkeypatch):
    """CPython 3.11.7 now and then fails if not, and sound shards passed for damaged."""
    parse, under_way, most = np.lib.format.read_array_header_1_0, [0], [0]

    def slowly(stream):
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        time.sleep(0.002)
        under_way[0] -= 1
        return parse(stream)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", slowly)
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(lambda _: Shard.open(shard_path, UINT16), range(8)))) == 8
    assert most == [1]


def test_a_missing_shard_and_another_type_are_named(shard_path, tmp_path):
    with pytest.raises(DataError, match=r"gone\.tar is missing"):
        Shard.open(tmp_path / "gone.tar", UINT16)
    with pytest.raises(DataError, match="holds uint16, not uint32"):
        Shard.open(shard_path, np.uint32)


def test_a_tar_of_something_else_is_refused(tmp_path):
    for name in ("picture.jpg", "000000.tokens.npy"):
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"abcd"))
        with pytest.raises(DataError, match=r"no member|no readable header"):
            Shard.open(tmp_path / "a.tar", UINT16)
    with tarfile.open(tmp_path / "a.tar", "w"):
        pass
    with pytest.raises(DataError, match="is empty"):
        Shard.open(tmp_path / "a.tar", UINT16)


def test_a_member_cannot_declare_more_than_there_is(tmp_path):
    for name in ("000000.tokens.npy", "000000.rows.jsonl"):
        (tmp_path / "a.tar").write_bytes(sparse_tar(name, 2**50))
        with pytest.raises(DataError, match=r"is no plain file|no member"):
            Shard.open(tmp_path / "a.tar", UINT16)


def test_arrays_of_objects_are_refused(tmp_path):
    """They are pickles, which may run code."""
    array = io.BytesIO()
    np.save(array, np.array([Evil()], dtype=object), allow_pickle=True)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo("000000.tokens.npy")
        member.size = len(array.getvalue())
        tar.addfile(member, io.BytesIO(array.getvalue()))
    with pytest.raises(DataError, match="holds object, not uint16"):
        Shard.open(tmp_path / "a.tar", UINT16)


class Evil:
    def __reduce__(self):
        return pytest.fail, ("the pickle was read",)


def test_a_write_that_fails_leaves_nothing(tmp_path):
    def write_and_fail():
        with atomic_write(tmp_path / "file") as file:
            file.write(b"half")
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_on_the_disk_under_its_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    with atomic_write(tmp_path / "file") as file:
        temporary = Path(file.name).name
        file.write(b"whole")
    assert synced == [str(tmp_path / temporary), str(tmp_path)]
    assert re.fullmatch(r"\.file\.[0-9a-f]{16}\.tmp", temporary)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_written_is_one_paragraph(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(
        DataError, match=r"cannot write .*file/a\.tar: .*check the permissions of the folder"
    ):
        write_shard(tmp_path / "file" / "a.tar", *make_documents([1]), UINT16)
