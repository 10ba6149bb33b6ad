"""Rows of Parquet files are documents, in order, with their row numbers.

What cannot be read is named.
"""

from __future__ import annotations

import errno
import gzip

import pyarrow as pa
import pytest
import zstandard as zstd
from pyarrow import parquet as pq

from data_pipeline.sources import BadRecord
from data_pipeline.sources.kinds import parquet


def write(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)


def parsed(source):
    """(file, line, text or reason) of each record."""
    result = []
    for record in source.records():
        try:
            result.append(
                (source.files[record.file].rpartition("/")[2], record.line, source.parse(record))
            )
        except BadRecord as error:
            result.append((source.files[record.file].rpartition("/")[2], record.line, f"! {error}"))
    return result


def source_of(*paths, field="text"):
    return parquet.Config(tuple(map(str, paths)), field).build()


def test_rows_are_documents_over_files_and_row_groups(tmp_path):
    texts = [f"document {i} ü" for i in range(3000)]
    write(tmp_path / "b.parquet", {"text": ["last"]})
    write(tmp_path / "a.parquet", {"id": range(3000), "text": texts}, row_group_size=700)
    source = source_of(tmp_path / "*.parquet")
    assert parsed(source) == [
        *(("a.parquet", row, text) for row, text in enumerate(texts, start=1)),
        ("b.parquet", 1, "last"),
    ]
    shares = [record.read for record in source.records()]
    assert shares == sorted(shares)
    assert 0 < shares[0] <= shares[-1] <= 1


def test_a_row_group_is_not_read_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_BUFFER", 2**16)
    write(
        tmp_path / "a.parquet", {"text": [f"{i} " * 100 for i in range(20_000)]}, compression="none"
    )
    shares = [record.read for record in source_of(tmp_path / "a.parquet").records()]
    assert shares[0] < 0.2  # of the bytes of the file
    assert shares[-1] > 0.9


KINDS = {
    "string": pa.string(),
    "large": pa.large_string(),
    "view": pa.string_view(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "binary": pa.binary(),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_row_without_text_is_one_bad_record(tmp_path, kind):
    write(tmp_path / "a.parquet", {"text": pa.array(["one", None, "", "two"], kind)})
    assert parsed(source_of(tmp_path / "a.parquet")) == [
        ("a.parquet", 1, "one"),
        ("a.parquet", 2, "! empty document"),
        ("a.parquet", 3, "! empty document"),
        ("a.parquet", 4, "two"),
    ]


def test_the_text_may_be_inside_a_struct(tmp_path):
    write(
        tmp_path / "a.parquet",
        {"meta": [{"text": {"body": "one"}, "n": 1}, None, {"text": {"body": "two"}, "n": 2}]},
    )
    found = parsed(source_of(tmp_path / "a.parquet", field="meta.text.body"))
    assert [text for _, _, text in found] == ["one", "! empty document", "two"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_text_of_any_type_may_be_inside_a_struct_or_no_utf_8(tmp_path, kind):
    texts = pa.array(["one", "zwölf"], kind)
    write(tmp_path / "a.parquet", {"s": pa.StructArray.from_arrays([texts], ["text"])})
    write(tmp_path / "b.parquet", {"s.text": pa.array([b"\xff", b"x"], pa.binary())})
    found = parsed(source_of(tmp_path / "?.parquet", field="s.text"))
    assert [text for _, _, text in found] == ["one", "zwölf", "! invalid UTF-8", "x"]


def test_a_categorical_of_pandas_is_text(tmp_path):
    pandas = pytest.importorskip("pandas")
    texts = pandas.Categorical(["one", "two", "one"])
    pandas.DataFrame({"text": texts}).to_parquet(tmp_path / "a.parquet")
    assert [t for _, _, t in parsed(source_of(tmp_path / "a.parquet"))] == ["one", "two", "one"]


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"meta.text": ["flat"], "meta": [{"n": 1}]}, "flat"),
        ({"meta.text": ["flat"], "meta": ["other"]}, "flat"),
        ({"meta": [{"text": "deep"}], "text": ["other"]}, "deep"),
        (
            {"meta.text": ["flat"], "meta": [{"text": "deep"}]},
            "! 'meta.text' is both a name with dots and a path to a nested value. Rename one",
        ),
    ],
)
def test_a_name_may_have_dots_itself_but_not_two_meanings(tmp_path, columns, found):
    write(tmp_path / "a.parquet", columns)
    assert parsed(source_of(tmp_path / "a.parquet", field="meta.text")) == [("a.parquet", 1, found)]


def test_two_columns_of_one_name_are_refused_if_one_of_them_is_read(tmp_path):
    columns = [pa.array([text]) for text in ("a", "b", "c")]
    pq.write_table(pa.Table.from_arrays(columns, ["text", "n", "n"]), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_arrays(columns, ["text", "text", "n"]), tmp_path / "b.parquet")
    assert parsed(source_of(tmp_path / "?.parquet")) == [
        ("a.parquet", 1, "a"),
        ("b.parquet", 1, "! two columns are named 'text'"),
    ]


@pytest.mark.parametrize("field", ["body", "id", "meta", "meta.absent", "text.deeper"])
def test_a_column_that_is_no_text_is_named_with_those_there_are(tmp_path, field):
    write(tmp_path / "a.parquet", {"id": [1], "meta": [{"b": "x"}], "text": ["one"]})
    reason = f"! no text column {field!r} among id, meta, text"
    assert parsed(source_of(tmp_path / "a.parquet", field=field)) == [("a.parquet", 1, reason)]


def test_an_empty_or_damaged_file_is_one_bad_record_and_the_next_is_read(tmp_path):
    write(tmp_path / "z.parquet", {"text": ["after"]})
    write(tmp_path / "a.parquet", {"text": pa.array([], pa.string())})
    write(
        tmp_path / "whole.parquet",
        {"text": [f"{i} words" for i in range(5000)]},
        row_group_size=1000,
    )
    whole = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(b"")
    (tmp_path / "c.parquet").write_bytes(whole[:-100])
    (tmp_path / "d.parquet").write_bytes(b"this is no Parquet at all")
    *found, last = parsed(source_of(*(tmp_path / f"{name}.parquet" for name in "abcdz")))
    assert found == [
        ("a.parquet", 1, "! empty file"),
        ("b.parquet", 1, "! corrupt file"),
        ("c.parquet", 1, "! corrupt file"),
        ("d.parquet", 1, "! corrupt file"),
    ]
    assert last == ("z.parquet", 1, "after")


def test_a_name_that_is_no_utf_8_is_one_bad_record(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, {"text": ["a"], "\xe9": ["b"]}, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"\xc3\xa9", b"\xee\xee"))
    assert parsed(source_of(path)) == [("a.parquet", 1, "! corrupt file")]


@pytest.mark.parametrize(
    "error", [pa.ArrowNotImplementedError("x"), pa.ArrowKeyError("x"), OSError("x")]
)
def test_an_error_of_arrow_is_one_of_the_file(error):
    with pytest.raises(BadRecord, match="corrupt file"), parquet.damage_explained():
        raise error


def test_an_error_of_the_system_is_none_of_the_file():
    with pytest.raises(OSError, match="Input/output"), parquet.damage_explained():
        raise OSError(errno.EIO, "Input/output error")


def test_a_damaged_row_group_loses_what_is_behind_it(tmp_path):
    write(
        tmp_path / "a.parquet",
        {"text": [f"{i} words" for i in range(5000)]},
        row_group_size=1000,
        compression="none",
    )
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    middle = len(data) // 2
    data[middle : middle + 2000] = b"\xff" * 2000
    (tmp_path / "a.parquet").write_bytes(data)
    *found, last = parsed(source_of(tmp_path / "a.parquet"))
    assert 1000 <= len(found) < 4000
    assert last == ("a.parquet", len(found) + 1, "! corrupt file")


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd.compress)])
def test_a_compressed_file_is_read_like_a_plain_one(tmp_path, suffix, compress):
    texts = [f"{i} words" for i in range(3000)]
    write(tmp_path / "a.parquet", {"text": texts}, row_group_size=700)
    plain = (tmp_path / "a.parquet").read_bytes()
    name = f"a.parquet.{suffix}"
    (tmp_path / name).write_bytes(compress(plain))
    whole = [(name, row, text) for row, text in enumerate(texts, start=1)]
    assert parsed(source_of(tmp_path / name)) == whole
    (tmp_path / name).write_bytes(compress(plain)[:-9])
    assert parsed(source_of(tmp_path / name)) == [(name, 1, "! truncated file")]


def test_a_small_file_cannot_hold_gigabytes(tmp_path):
    indices = pa.array([0] * 10_000, pa.int32())
    texts = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 1_000_000]))
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": texts}), path, compression="zstd", store_schema=False,
        dictionary_pagesize_limit=2**24,
    )  # fmt: skip
    assert path.stat().st_size < 1000
    records = list(parquet.Config((str(path),)).build().records())
    assert records[-1].problem == "decompression bomb"
    assert sum(len(record.data) for record in records) < 2**29
