import bz2
import dataclasses
import gzip
import io
import json
import logging
import lzma
import random
import string
import sysconfig
import tarfile
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest
import zstandard

from data_pipeline.building.config import Config as BuildConfig
from data_pipeline.sources import BadRecord, files
from data_pipeline.sources.kinds import jsonl, python_docs, text, webdataset
from samestep.config import decode, to_tree
from samestep.errors import ConfigError, DataError
from tests.damage import sparse_tar


def write(path: Path, data: bytes) -> Path:
    """Writes `data`, compressed as the name asks."""
    compress = {
        ".gz": gzip.compress,
        ".gzip": gzip.compress,
        ".tgz": gzip.compress,
        ".bz2": bz2.compress,
        ".xz": lzma.compress,
        ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
        ".zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
    }.get(path.suffix.lower(), bytes)
    path.write_bytes(compress(data))
    return path


def lines_of(count: int) -> list[bytes]:
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=8)) for _ in range(count * 20)]
    return [
        json.dumps({"text": " ".join(words[20 * i : 20 * i + 20])}).encode() + b"\n"
        for i in range(count)
    ]


def parsed(source):
    """(file, line, text or reason) of each record."""
    result = []
    for record in source.records():
        try:
            result.append((Path(source.files[record.file]).name, record.line, source.parse(record)))
        except BadRecord as error:
            result.append((Path(source.files[record.file]).name, record.line, f"! {error}"))
    return result


APART = ". If it is elsewhere in the tar, sort the tar by name"
COMPRESSED = [".gz", ".bz2", ".xz", ".zst"]


@pytest.mark.parametrize("suffix", ["", *COMPRESSED, ".gzip", ".zstd", ".GZ"])
def test_json_lines_are_read_in_order_with_their_line_numbers(tmp_path, suffix):
    write(tmp_path / f"b.jsonl{suffix}", b'{"text": "three"}')
    write(
        tmp_path / f"a.jsonl{suffix}",
        '{"text": "onë"}\n\n  \n{"n": 1, "text": "two\\nlines"}\r\n'.encode(),
    )
    source = jsonl.Config((f"{tmp_path}/*.jsonl{suffix}",)).build()
    a, b = f"a.jsonl{suffix}", f"b.jsonl{suffix}"
    assert parsed(source) == [(a, 1, "onë"), (a, 4, "two\nlines"), (b, 1, "three")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "\xff"}', "invalid UTF-8"),
        (b'{"text": "unclosed', "invalid JSON"),
        (b"[" * 100_000, "invalid JSON"),
        (b'{"n": 1}', "no field 'text'"),
        (b'["text"]', "no field 'text'"),
        (b"null", "no field 'text'"),
        (b'{"text": null}', "field 'text' is not text"),
        (b'{"text": 3}', "field 'text' is not text"),
        (b'{"text": ""}', "empty document"),
        (b'{"text": " \\n\\t"}', "empty document"),
        (b'{"text": "half \\ud83d of a pair"}', "invalid Unicode"),
    ],
)
def test_a_bad_line_is_one_record_with_a_reason(tmp_path, line, reason):
    path = write(tmp_path / "a.jsonl", b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    found = parsed(jsonl.Config((str(path),)).build())
    assert found == [
        ("a.jsonl", 1, "before"),
        ("a.jsonl", 2, f"! {reason}"),
        ("a.jsonl", 3, "after"),
    ]


def test_a_field_may_be_nested_and_a_byte_order_mark_is_no_text(tmp_path):
    path = write(
        tmp_path / "a.jsonl", b'\xef\xbb\xbf{"meta": {"body": "deep"}}\n{"meta": "shallow"}'
    )
    found = parsed(jsonl.Config((str(path),), field="meta.body").build())
    assert [text for _, _, text in found] == ["deep", "! no field 'meta.body'"]


def test_a_key_may_have_dots_itself_but_not_two_meanings(tmp_path):
    rows = [
        {"a.b.c": "1"},
        {"a": {"b.c": "2"}},
        {"a.b": {"c": "3"}, "a": {"c": "x"}},
        {"a": {"b": {"c": "4"}}},
        {"a.b.c": "5", "a": {"b": {"c": "6"}}},
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    *texts, last = parsed(jsonl.Config((str(path),), field="a.b.c").build())
    assert [text for _, _, text in texts] == ["1", "2", "3", "4"]
    assert last[2] == "! 'a.b.c' is both a name with dots and a path to a nested value. Rename one"


@pytest.mark.parametrize("suffix", ["", *COMPRESSED])
def test_an_empty_file_is_one_bad_record(tmp_path, suffix):
    write(tmp_path / f"a.jsonl{suffix}", b"")
    (tmp_path / f"b.jsonl{suffix}").write_bytes(b"")
    source = jsonl.Config((f"{tmp_path}/*",)).build()
    assert [(line, text) for _, line, text in parsed(source)] == [(1, "! empty file")] * 2


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_truncated_file_loses_its_tail_only(tmp_path, suffix):
    lines = lines_of(3000)
    path = write(tmp_path / f"a.jsonl{suffix}", b"".join(lines))
    write(tmp_path / f"b.jsonl{suffix}", lines[0])
    whole = path.read_bytes()
    for share in (0.01, 0.5, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        *read, last = list(jsonl.Config((f"{tmp_path}/a*",)).build().records())
        assert last.problem == "truncated file"
        assert last.line == len(read) + 1
        assert [record.data for record in read] == lines[: len(read)]
        # Only whole blocks are decoded: 128 KB of Zstandard, or all of 900 KB of bzip2.
        assert len(read) > 3000 * (share - 0.35) or suffix == ".bz2"
    found = list(jsonl.Config((f"{tmp_path}/*",)).build().records())
    assert found[-1].data == lines[0]  # the next file is read as if nothing had happened


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_corrupt_file_loses_what_is_behind_the_damage(tmp_path, suffix):
    path = write(tmp_path / f"a.jsonl{suffix}", b"".join(lines_of(3000)))
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2 : len(damaged) // 2 + 64] = bytes(64)
    path.write_bytes(damaged)
    problems = [
        record.problem for record in jsonl.Config((str(path),)).build().records() if record.problem
    ]
    assert problems in (["corrupt file"], ["truncated file"])
    path.write_bytes(b"this was never compressed")
    assert parsed(jsonl.Config((str(path),)).build()) == [(path.name, 1, "! corrupt file")]


def test_all_lines_before_the_end_of_a_cut_gzip_file_are_read(tmp_path):
    whole = gzip.compress(b"".join(lines_of(500)))
    path = tmp_path / "a.jsonl.gz"
    for cut in (len(whole) // 3, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:cut])
        readable = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(whole[:cut]).count(b"\n")
        *read, last = jsonl.Config((str(path),)).build().records()
        assert len(read) == readable > 100
        assert (last.line, last.problem) == (readable + 1, "truncated file")


def test_concatenated_compressed_files_are_read_to_the_end(tmp_path):
    lines = lines_of(2)
    (tmp_path / "a.gz").write_bytes(gzip.compress(lines[0]) + gzip.compress(lines[1]))
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "b.zst").write_bytes(compress(lines[0]) + compress(b"") + compress(lines[1]))
    (tmp_path / "c.bz2").write_bytes(bz2.compress(lines[0]) + bz2.compress(lines[1]))
    padded = lzma.compress(lines[0]) + bytes(4096) + lzma.compress(lines[1]) + bytes(4)
    (tmp_path / "d.xz").write_bytes(padded)
    assert [r.data for r in jsonl.Config((f"{tmp_path}/*",)).build().records()] == lines * 4


@pytest.mark.parametrize("compress", [bz2.compress, lzma.compress, zstandard.compress])
def test_damage_behind_a_whole_frame_is_not_the_end(tmp_path, compress):
    """As it is to Python's readers of bzip2 and xz."""
    lines = lines_of(2)
    suffix = {bz2.compress: "bz2", lzma.compress: "xz"}.get(compress, "zst")
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(compress(lines[0]) + b"!" + compress(lines[1]))
    (first, last) = jsonl.Config((str(path),)).build().records()
    assert (first.data, last.line, last.problem) == (lines[0], 2, "corrupt file")


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("a.jsonl", kind) for kind in COMPRESSED] + [("a.jsonl.zst", ".gz"), ("a.txt.gz", ".xz")],
)
def test_a_file_that_is_compressed_in_another_way_than_its_name_says_is_named(
    tmp_path, name, suffix
):
    write(tmp_path / f"a{suffix}", lines_of(1)[0]).rename(tmp_path / name)
    reason = f"! compressed, but not as its name says: rename it to end in {suffix}"
    assert parsed(jsonl.Config((f"{tmp_path}/{name}",)).build()) == [(name, 1, reason)]


def test_a_json_array_is_read_like_json_lines(tmp_path):
    documents = [{"text": "one"}, {"text": "two\n", "n": [1]}, {"n": 1}]
    write(tmp_path / "a.json", json.dumps(documents).encode())
    write(tmp_path / "b.json.gz", b"\xef\xbb\xbf" + json.dumps(documents, indent=1).encode())
    write(tmp_path / "c.jsonl", b'[1\n{"text": "after a bad line"}\n')
    texts = ["one", "two\n", "! no field 'text'"]
    assert parsed(jsonl.Config((f"{tmp_path}/*",)).build()) == [
        *(("a.json", number, text) for number, text in enumerate(texts, start=1)),
        *(("b.json.gz", number, text) for number, text in enumerate(texts, start=1)),
        ("c.jsonl", 1, "! invalid JSON"),
        ("c.jsonl", 2, "after a bad line"),
    ]


def test_a_pattern_without_a_match_is_named(tmp_path):
    write(tmp_path / "a.jsonl", b"{}")
    with pytest.raises(ConfigError, match=r"no file matches .*\*\.json'"):
        jsonl.Config((f"{tmp_path}/*.jsonl", f"{tmp_path}/*.json")).build()
    with pytest.raises(ConfigError, match="paths"):
        jsonl.Config(()).build()


def test_a_name_that_exists_is_no_pattern(tmp_path):
    for name in ("a[1].txt", "a1.txt", "b[1]/c.txt", "b1/c.txt", "d2/c.txt", "e*.txt", "ef.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, name.encode())

    def names(pattern):
        return [text for _, _, text in parsed(text_source((f"{tmp_path}/{pattern}",)).build())]

    text_source = text.Config
    assert names("a[1].txt") == ["a[1].txt"]
    assert names("b[1]/*.txt") == ["b[1]/c.txt"]
    assert names("d[12]/*.txt") == ["d2/c.txt"]
    assert names("e*.txt") == ["e*.txt"]
    assert names("**/c.txt") == ["b1/c.txt", "b[1]/c.txt", "d2/c.txt"]
    (tmp_path / "a1.txt").unlink()
    assert names("a[1].txt") == ["a[1].txt"]


def test_a_folder_is_told_from_a_pattern_without_a_match(tmp_path):
    (tmp_path / "corpus[1]").mkdir()
    for pattern in ("corpus[1]", "corpus[1]/", "*"):
        with pytest.raises(ConfigError, match=r"matches a folder, and no file\. .*/\*\.jsonl\."):
            jsonl.Config((f"{tmp_path}/{pattern}",)).build()


def test_patterns_that_overlap_read_each_file_once(tmp_path):
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep" / "a.txt", b"a")
    write(tmp_path / "b.txt", b"b")
    source = text.Config(
        (f"{tmp_path}/**/*.txt", f"{tmp_path}/b.txt", str(tmp_path / "deep" / "*"))
    ).build()
    assert source.files == (f"{tmp_path}/b.txt", f"{tmp_path}/deep/a.txt")


def test_a_file_of_several_names_is_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "b.txt", b"b")
    (tmp_path / "link.txt").symlink_to("b.txt")
    (tmp_path / "folder").symlink_to(tmp_path)
    spellings = ("./b.txt", str(tmp_path / "b.txt"), "folder/b.txt", "link.txt")
    assert text.Config(("b.txt", *spellings)).build().files == ("./b.txt",)
    assert text.Config(("link.txt", "b.txt")).build().files == ("b.txt",)
    write(tmp_path / "copy.txt", b"b")
    assert text.Config(("*.txt",)).build().files == ("b.txt", "copy.txt")


def test_a_link_that_says_how_a_file_is_compressed_is_read(tmp_path, monkeypatch, caplog):
    """As in the Hugging Face cache, where the names are links to blobs without a suffix."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "data").mkdir()
    write(tmp_path / "data.gz", b"text").rename(tmp_path / "blobs" / "z")
    for name in ("3.txt.gz", "4.txt.gz", "plain"):
        (tmp_path / "data" / name).symlink_to("../blobs/z")
    with caplog.at_level(logging.INFO, "data_pipeline.sources.files"):
        found = files.find(("**",))
    assert found == ("blobs/z", "data/3.txt.gz")
    assert "source.paths: left out 2 further names of the same files" in caplog.text
    paths = ("blobs/z", "data/3.txt.gz")
    assert parsed(text.Config(paths).build())[1] == ("3.txt.gz", 1, "text")


def test_a_file_that_vanishes_is_an_error_of_the_data(tmp_path):
    source = text.Config((str(write(tmp_path / "a.txt", b"a")),)).build()
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.txt"):
        list(source.records())


def test_plain_text_is_cut_into_files_or_paragraphs(tmp_path):
    write(tmp_path / "a.txt", b"\n \nfirst line\nsecond line\n\n\nlast")
    write(tmp_path / "b.txt", b"alone\n")
    write(tmp_path / "c.txt", b"\n\n")
    by_file = parsed(text.Config((f"{tmp_path}/*",)).build())
    assert by_file == [
        ("a.txt", 1, "\n \nfirst line\nsecond line\n\n\nlast"),
        ("b.txt", 1, "alone\n"),
        ("c.txt", 1, "! empty document"),
    ]
    assert parsed(text.Config((f"{tmp_path}/*",), "paragraph").build()) == [
        ("a.txt", 3, "first line\nsecond line\n"),
        ("a.txt", 7, "last"),
        ("b.txt", 1, "alone\n"),
        ("c.txt", 1, "! empty file"),
    ]


def test_progress_ends_at_the_whole(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt.gz"):
        write(tmp_path / name, b"some text\n\nmore text\n")
    shares = [
        record.read for record in text.Config((f"{tmp_path}/*",), "paragraph").build().records()
    ]
    assert shares == sorted(shares)
    assert 0 < shares[0] <= shares[-1] == 1


def test_python_docs_come_from_the_standard_library_without_importing_it():
    whole = python_docs.Config().build()
    few = {"pydoc_data/topics.py", "json/__init__.py", "argparse.py", "antigravity.py"}
    source = dataclasses.replace(whole, files=tuple(name for name in whole.files if name in few))
    documents = {
        (source.files[record.file], record.line): source.parse(record)
        for record in source.records()
    }
    assert len(whole.files) > 300
    assert sum(map(len, documents.values())) > 400_000
    assert any("JSON (JavaScript Object Notation)" in document for document in documents.values())
    assert not any(name.startswith(("test/", "site-packages/")) for name in whole.files)
    name, line = next(
        key for key, document in documents.items() if key[1] > 1 and "topics" not in key[0]
    )
    definition = (
        (Path(sysconfig.get_path("stdlib")) / name)
        .read_text(encoding="utf-8")
        .splitlines()[line - 1]
    )
    assert definition.startswith(("def ", "class ", "async def "))


@pytest.mark.parametrize(
    "source",
    [
        "python_docs",
        {"kind": "jsonl", "paths": ["a"]},
        {"kind": "text", "paths": ["a"], "document": "file"},
        {"kind": "webdataset", "paths": ["a"]},
        {"kind": "table", "paths": ["a"], "encoding": "cp1252"},
    ],
)
def test_every_source_round_trips_through_the_configuration(source):
    tree = {"source": source, "tokenizer": {"path": "t"}, "output": "o"}
    config = decode(BuildConfig, tree)
    assert decode(BuildConfig, to_tree(config)) == config


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    from webdataset import TarWriter

    with TarWriter(str(path)) as tar:
        for key, content in members.items():
            name, suffix = key.split(".", 1)
            tar.write({"__key__": name, suffix: content})


def test_members_of_a_webdataset_are_documents(tmp_path):
    write_tar(tmp_path / "b.tar", {"0.txt": b"three"})
    write_tar(
        tmp_path / "a.tar",
        {"0.txt": b"one", "0.json": b'{"text": "other"}', "1.txt": b"", "2.txt": b"\xff"},
    )
    assert parsed(webdataset.Config((f"{tmp_path}/*.tar",)).build()) == [
        ("a.tar", 1, "one"),
        ("a.tar", 2, "! empty document"),
        ("a.tar", 3, "! invalid UTF-8"),
        ("b.tar", 1, "three"),
    ]
    other = webdataset.Config((f"{tmp_path}/a.tar",), member="json").build()
    assert parsed(other) == [
        ("a.tar", 1, "other"),
        ("a.tar", 2, f"! no member 'json' in a sample: 1.txt{APART}"),
        ("a.tar", 3, f"! no member 'json' in a sample: 2.txt{APART}"),
    ]


def test_documents_that_a_webdataset_hides_are_counted(tmp_path):
    """A suffix begins at the first dot: "v1.0.txt" and "v1.1.txt" are one sample without text."""
    names = [
        "a/0.jpg",
        "a/0.TXT",  # WebDataset ignores case
        "a/v1.0.txt",
        "a/v1.1.jpg",
        "a/v1.1.txt",
        "a/1.jpg",
        "a/2.txt",
        "a/2.de.txt",  # a further text of a sample that has one
        "a/._2.txt",
        "a/2.json",
        "a/0.json",  # its sample has ended: members of a sample follow each other
        "__meta__/x.json",
        "README",  # without a dot, a file belongs to no sample
    ]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
        link = tarfile.TarInfo("a/3.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "2.txt"
        tar.addfile(link)
    reason = "! no member 'txt' in a sample: "
    hint = ". Its suffix begins at the first dot of the name: set source.member to '*.txt'"
    assert parsed(webdataset.Config((f"{tmp_path}/a.tar",)).build()) == [
        ("a.tar", 1, "a/0.TXT"),
        ("a.tar", 2, f"{reason}a/v1.0.txt{hint}"),
        ("a.tar", 3, f"{reason}a/v1.1.txt{hint}"),
        ("a.tar", 4, f"{reason}a/1.jpg{APART}"),
        ("a.tar", 5, "a/2.txt"),
        ("a.tar", 6, f"{reason}a/0.json{APART}"),
        ("a.tar", 7, f"{reason}a/3.txt, which is a link"),
    ]


def test_a_truncated_webdataset_is_noticed(tmp_path):
    write_tar(tmp_path / "a.tar", {f"{i}.txt": b"word " * 300 for i in range(8)})
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[:9000])
    *documents, last = parsed(webdataset.Config((f"{tmp_path}/a.tar",)).build())
    assert 0 < len(documents) < 8
    assert {text for _, _, text in documents} == {"word " * 300}
    assert last == ("a.tar", len(documents) + 1, "! truncated file")


def plain_tar(count: int) -> tuple[bytes, list[int]]:
    """A tar of small members, and where the header of each begins."""
    content = io.BytesIO()
    headers = []
    with tarfile.open(fileobj=content, mode="w") as tar:
        for number in range(count):
            headers.append(content.tell())
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 600
            tar.addfile(member, io.BytesIO(b"word " * 120))
    return content.getvalue(), headers


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz", ".tar.xz"])
def test_a_webdataset_that_is_cut_anywhere_is_noticed(tmp_path, suffix):
    whole, headers = plain_tar(3)
    mark = headers[-1] + 3 * tarfile.BLOCKSIZE  # a header and two blocks of data are before it
    end = mark + 2 * tarfile.BLOCKSIZE
    cuts = {*range(0, end, tarfile.BLOCKSIZE), *(begin + 100 for begin in headers), end - 1}
    source = webdataset.Config((str(write(tmp_path / f"a{suffix}", whole)),)).build()
    assert [record.problem for record in source.records()] == [None] * 3
    for cut in sorted(cuts):
        write(tmp_path / f"a{suffix}", whole[:cut])
        *documents, last = source.records()
        assert last.problem == "truncated file", cut
        assert {len(record.data) for record in documents} <= {600}
    write(tmp_path / f"a{suffix}", whole[:end])
    assert [record.problem for record in source.records()] == [None] * 3


@pytest.mark.parametrize("damage", [b"\xff" * 4, bytes(512), bytes(1024), bytes(1536)])
def test_a_damaged_header_in_a_webdataset_is_noticed(tmp_path, damage):
    whole, headers = plain_tar(4)
    damaged = bytearray(whole)
    damaged[headers[2] : headers[2] + len(damage)] = damage
    path = write(tmp_path / "a.tar", bytes(damaged))
    *documents, last = webdataset.Config((str(path),)).build().records()
    assert len(documents) == 2
    assert (last.line, last.problem) == (3, "corrupt file")


def test_a_sparse_member_is_not_expanded(tmp_path):
    (tmp_path / "a.tar").write_bytes(sparse_tar("0001.txt", 2**50))
    (record,) = webdataset.Config((f"{tmp_path}/a.tar",)).build().records()
    assert record.problem == "sparse member"


@pytest.mark.parametrize(
    ("suffix", "size"), [(".gz", 2**28), (".bz2", 2**26), (".xz", 2**26), (".zst", 2**28)]
)
def test_a_decompression_bomb_ends_before_it_fills_the_memory(tmp_path, monkeypatch, suffix, size):
    monkeypatch.setattr(files, "_FREE_BYTES", 2**20)
    zeros = bytes(size)
    line = write(tmp_path / f"line{suffix}", b'{"text": "a"}\n').read_bytes()
    bomb = write(tmp_path / f"bomb{suffix}", zeros).read_bytes()
    (tmp_path / f"a.jsonl{suffix}").write_bytes(line + bomb)
    tracemalloc.start()
    first, last = jsonl.Config((f"{tmp_path}/a.jsonl{suffix}",)).build().records()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert first.problem is None
    assert last.problem == "decompression bomb"
    assert peak < len(zeros), "a part of it was enough"


@pytest.mark.parametrize(
    ("name", "compress", "problem"),
    [
        ("a.tar.gz", gzip.compress, "decompression bomb"),
        ("a.tgz", gzip.compress, "decompression bomb"),
        (
            "a.tar",
            gzip.compress,
            "compressed, but not as its name says: rename it to end in .gz",
        ),
        ("a.tar.xz", lzma.compress, "decompression bomb"),
    ],
)
def test_a_tar_cannot_hide_a_decompression_bomb(tmp_path, monkeypatch, name, compress, problem):
    monkeypatch.setattr(files, "_FREE_BYTES", 2**20)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        member = tarfile.TarInfo("0.txt")
        member.size = 2**23
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    (tmp_path / name).write_bytes(compress(content.getvalue()))
    (record,) = webdataset.Config((str(tmp_path / name),)).build().records()
    assert record.problem == problem


def test_a_frame_of_many_megabytes_is_copied_once(tmp_path):
    content = zstandard.ZstdCompressor().compress(bytes(2**26))
    (tmp_path / "a.txt.zst").write_bytes(content)
    began = time.process_time()
    with (tmp_path / "a.txt.zst").open("rb") as disk:
        frames = files._Frames(disk, ".zst")
        assert sum(map(len, iter(lambda: frames.read1(2**16), b""))) == 2**26
    assert time.process_time() - began < 10  # 40 s if each call copies the rest
