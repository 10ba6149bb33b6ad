"""Text in an encoding other than UTF-8, and documents in the column of a table."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Annotated, Any

import pytest

from data_pipeline.sources import BadRecord, PairSource, Source, TaskSource
from data_pipeline.sources.kinds import table, text
from data_pipeline.sources.table import HubDataset
from samestep.config import Kinds, decode
from samestep.errors import ConfigError
from tests.unit.data_pipeline.sources.test_sources import write_tar

KINDS = Kinds("data_pipeline.sources.kinds")
TEXTS = ("Grüße aus Köln", 'Die Straße, "Öl"')
PAIRS = tuple(zip(TEXTS, reversed(TEXTS), strict=True))


def source_of(tree: dict[str, Any]) -> Source:
    source: Source = decode(Annotated[Any, KINDS], tree, "source").build()
    return source


def parsed(source: Source) -> list[object]:
    found: list[object] = []
    for record in source.records():
        try:
            if isinstance(source, PairSource):
                found.append(source.parse_pair(record))
            elif isinstance(source, TaskSource):
                found.append(source.parse_row(record).texts[0])
            else:
                found.append(source.parse(record).rstrip("\n"))
        except BadRecord as error:
            found.append(str(error))
    return found


def table_text(delimiter: str) -> str:
    file, rows = io.StringIO(), [("text", "label"), *((each, "yes") for each in TEXTS)]
    if delimiter == "\t":  # without quoting
        return "".join("\t".join(row) + "\n" for row in rows)
    csv.writer(file).writerows(rows)
    return file.getvalue()


ROWS = "".join(json.dumps({"text": each}, ensure_ascii=False) + "\n" for each in TEXTS)


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "utf-16", "utf-16-be"])
@pytest.mark.parametrize(
    ("tree", "name", "content"),
    [
        ({"kind": "text", "document": "paragraph"}, "a.txt", "\n\n".join(TEXTS)),
        ({"kind": "jsonl"}, "a.jsonl", ROWS),
        ({"kind": "jsonl"}, "a.jsonl.gz", ROWS),
        ({"kind": "table"}, "a.csv", table_text(",")),
        ({"kind": "table"}, "a.tsv", table_text("\t")),
        ({"kind": "table"}, "a.jsonl", ROWS),
        ({"kind": "table"}, "a.json", f"[{ROWS.strip()}]".replace("\n", ",\n")),
        ({"kind": "classification", "labels": ["no", "yes"]}, "a.csv", table_text(",")),
    ],
)
def test_documents_of_any_encoding_are_the_same(
    tmp_path: Path, tree: dict[str, Any], name: str, content: str, encoding: str
):
    data = content.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    found = source_of({**tree, "paths": [str(tmp_path / name)], "encoding": encoding})
    assert parsed(found) == list(TEXTS)
    assert next(record.line for record in found.records()) == (
        2 if name[2:] in ("csv", "tsv") else 1
    )


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_pairs_and_members_of_any_encoding_are_the_same(tmp_path: Path, encoding: str):
    def write(name: str, lines: list[str]) -> str:
        (tmp_path / name).write_bytes("".join(f"{line}\n" for line in lines).encode(encoding))
        return str(tmp_path / name)

    tsv = write("a.tsv", [f"{source}\t{target}" for source, target in PAIRS])
    rows = write(
        "a.jsonl",
        [json.dumps({"source": s, "target": t}, ensure_ascii=False) for s, t in PAIRS],
    )
    both = {
        "source_paths": [write("a.de", [source for source, _ in PAIRS])],
        "target_paths": [write("a.en", [target for _, target in PAIRS])],
    }
    for tree in (
        {"kind": "tsv_pairs", "paths": [tsv]},
        {"kind": "jsonl_pairs", "paths": [rows]},
        {"kind": "parallel_text", **both},
    ):
        assert parsed(source_of({**tree, "encoding": encoding})) == list(PAIRS), tree
    members = {f"{index}.txt": each.encode(encoding) for index, each in enumerate(TEXTS)}
    write_tar(tmp_path / "a.tar", {**members, "bad.txt": b"\x81"})
    tar = {"kind": "webdataset", "paths": [str(tmp_path / "a.tar")], "encoding": encoding}
    assert parsed(source_of(tar)) == [*TEXTS, f"invalid {encoding}"]


def test_a_byte_that_means_nothing_spoils_its_record_only(tmp_path: Path):
    lines = [b"text", b"\xfcber", b"a \x81", b"\xe4"]
    path = tmp_path / "a.csv"
    path.write_bytes(b"\n".join(lines))
    assert parsed(table.Config((str(path),), encoding="cp1252").build()) == [
        *("über", "invalid cp1252", "ä")
    ]
    path.write_bytes(b"\n\n".join(lines))
    paragraphs = text.Config((str(path),), "paragraph", "cp1252").build()
    assert parsed(paragraphs) == ["text", "über", "invalid cp1252", "ä"]
    # Behind a wrong half of a surrogate pair, no place of UTF-16 is certain.
    path.write_bytes(
        "eins\n\nzwei\n".encode("utf-16") + b"\x00\xdc" + "\n\ndrei".encode("utf-16-le")
    )
    cut = text.Config((str(path),), "paragraph", "utf-16").build()
    assert parsed(cut) == ["eins", "invalid utf-16"]


def rows(count: int) -> list[str]:
    return [json.dumps({"text": f"{number} {'x' * 50}"}) + "\n" for number in range(count)]


def test_records_before_an_invalid_unit_are_read(tmp_path: Path):
    """However much of the file a buffer holds."""
    before = "".join(rows(3000)).encode("utf-16")
    (tmp_path / "a.jsonl").write_bytes(before + b"\x00\xdc" + "\nafter\n".encode("utf-16-le"))
    tree = {"kind": "jsonl", "paths": [f"{tmp_path}/a.jsonl"], "encoding": "utf-16"}
    found = parsed(source_of(tree))
    assert (len(found), found[-1]) == (3001, "invalid utf-16")


def test_a_truncated_file_has_as_many_records_in_each_encoding(tmp_path: Path):
    whole = gzip.compress("".join(rows(5000)).encode(), mtime=0)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    tree = {"kind": "jsonl", "paths": [f"{tmp_path}/a.jsonl.gz"]}
    plain, *others = (
        parsed(source_of({**tree, "encoding": name})) for name in ("utf-8", "latin-1", "cp1252")
    )
    assert len(plain) > 1000
    assert all(other == plain for other in others)


def test_another_encoding_than_the_named_one_is_noticed(tmp_path: Path):
    (tmp_path / "a.csv").write_text("text\né\ne\n", encoding="utf-8")
    source = table.Config((f"{tmp_path}/a.csv",), encoding="ascii").build()
    assert parsed(source) == ["invalid ascii", "e"]


def test_a_table_is_read_by_its_column(tmp_path: Path):
    (tmp_path / "a.csv").write_text('id,body\n1,"two\nlines"\n2,\n')
    (tmp_path / "b.tsv").write_text('3\ta "b\n')
    source = table.Config((f"{tmp_path}/a.csv",), field="body").build()
    assert parsed(source) == ["two\nlines", "empty document"]
    headless = table.Config((f"{tmp_path}/b.tsv",), header=("id", "body"), field="body").build()
    assert parsed(headless) == ['a "b']
    assert parsed(table.Config((f"{tmp_path}/a.csv",)).build())[0] == (
        "no column 'text': there are id, body"
    )


def test_what_cannot_be_an_encoding_is_refused(tmp_path: Path):
    (tmp_path / "a.csv").write_text("text\na\n")
    for name in ("utf-9", "base64", "zlib", "a b\0", "idna", "unicode_escape"):
        with pytest.raises(ConfigError, match="Use a name such as utf-8, cp1252"):
            table.Config((f"{tmp_path}/a.csv",), encoding=name).build()
    with pytest.raises(ConfigError, match="dataset names none"):
        table.Config(dataset=HubDataset("owner/name"), encoding="cp1252")
    for same in ("UTF8", "utf_8", "utf-8-sig"):
        assert table.Config((f"{tmp_path}/a.csv",), encoding=same).build().encoding == "utf-8"


def test_plain_text_warns_of_tables(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"text\na\n"))
    (tmp_path / "b.txt").write_text("a")
    text.Config((f"{tmp_path}/b.txt",)).build()
    assert caplog.text == ""
    text.Config((f"{tmp_path}/*",)).build()
    assert "a.csv.gz is a table" in caplog.text
    assert "source.kind=table" in caplog.text
