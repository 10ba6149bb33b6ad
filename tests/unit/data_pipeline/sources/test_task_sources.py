"""Sources of rows of tasks: the same rows from every format, and a reason for each row that is not
one.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from data_pipeline.sources import BadRecord, Record, TaskSource, table
from data_pipeline.sources.kinds import (
    classification,
    huggingface,
    multiple_choice,
    question_answering,
    regression,
    table_pairs,
    tagging,
)
from data_pipeline.sources.table import HubDataset
from data_pipeline.sources.unlabeled import PASSAGES, Passages, Unlabeled
from samestep.config import Kinds, decode, to_tree
from samestep.errors import ConfigError
from samestep.examples import TaskRow

LABELS = ("no", "yes")
BIO = ("O", "B-PER", "I-PER", "B-LOC")


def parsed(source: TaskSource) -> list[tuple[int, TaskRow | str]]:
    """(line, row or reason) of each record."""
    found: list[tuple[int, TaskRow | str]] = []
    for record in source.records():
        try:
            found.append((record.line, source.parse_row(record)))
        except BadRecord as error:
            found.append((record.line, str(error)))
    return found


def row_or_reason(source: TaskSource, row: Any) -> TaskRow | str:
    """What the source makes of one row."""
    try:
        return source.parse_row(Record(0, 1, json.dumps(row).encode(), 1.0))
    except BadRecord as error:
        return str(error)


def write(path: Path, data: str | bytes) -> str:
    data = data.encode() if isinstance(data, str) else data
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    path.write_bytes(compress.get(path.suffix.lower(), bytes)(data))
    return str(path)


@pytest.fixture
def file(tmp_path) -> str:
    """A file that stands for those that a test does not read."""
    return write(tmp_path / "stand-in.jsonl", "{}\n")


ROWS = [
    {"a": 'say "hi"', "b": "one, two", "label": "yes"},
    {"a": "größer", "b": "drei", "label": "no"},
    {"a": "5", "b": " x ", "label": "1"},
]
TASK_ROWS = [
    TaskRow(('say "hi"', "one, two"), 1.0),
    TaskRow(("größer", "drei"), 0.0),
    TaskRow(("5", " x "), 1.0),
]


def parquet_of(rows: list[dict[str, Any]], kind: pa.DataType | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pylist(rows)
    if kind is not None:
        table = table.cast(pa.schema([(name, kind) for name in table.column_names]))
    pq.write_table(table, sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


def doubled(*names: str) -> bytes:
    """A table of columns with these names."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays([pa.array(["no"])] * len(names), list(names)), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "data", "lines"),
    [
        ("a.jsonl", "\n".join(map(json.dumps, ROWS)), [1, 2, 3]),
        ("a.jsonl.gz", "\n\n".join(map(json.dumps, ROWS)), [1, 3, 5]),
        ("a.json", "\ufeff" + "\n".join(map(json.dumps, ROWS)), [1, 2, 3]),
        ("a.json", json.dumps(ROWS), [1, 2, 3]),
        ("a.json", json.dumps(ROWS, indent=2), [1, 2, 3]),
        (
            "a.csv",
            '\ufeffa,"b",label\r\n"say ""hi""","one, two",yes\r\n\r\ngrößer,drei,no\r\n5, x ,1',
            [2, 4, 5],
        ),
        ("a.TSV", 'b\ta\tlabel\none, two\tsay "hi"\tyes\ndrei\tgrößer\tno\n x \t5\t1\n', [2, 3, 4]),
        ("a.jsonl", json.dumps(ROWS), [1, 2, 3]),
        ("a.csv.GZ", 'a,b,label\n"say ""hi""","one, two",yes\ngrößer,drei,no\n5, x ,1', [2, 3, 4]),
        ("a.jsonl.bz2", "\n".join(map(json.dumps, ROWS)), [1, 2, 3]),
        ("a.json.xz", json.dumps(ROWS), [1, 2, 3]),
        ("a.parquet", parquet_of(ROWS), [1, 2, 3]),
        ("a.parquet", parquet_of(ROWS, pa.dictionary(pa.int8(), pa.string())), [1, 2, 3]),
        ("a.parquet", parquet_of(ROWS, pa.string_view()), [1, 2, 3]),
        ("a.parquet", parquet_of(ROWS, pa.binary()), [1, 2, 3]),
        ("a.parquet.gz", parquet_of(ROWS), [1, 2, 3]),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path, name, data, lines):
    path = write(tmp_path / name, data)
    source = classification.Config((path,), texts=("a", "b"), labels=LABELS).build()
    assert parsed(source) == list(zip(lines, TASK_ROWS, strict=True))
    assert (source.kind, source.labels, source.first_heldout) == ("classification", LABELS, None)
    assert (
        source.parse(next(source.records())) == 'say "hi"\none, two'
    )  # what a tokenizer is trained on
    assert all(isinstance(json.loads(record.data), dict) for record in source.records())
    assert 0 < list(source.records())[-1].read <= 1


def test_cells_of_csv_hold_line_breaks_and_lines_are_those_of_the_file(tmp_path):
    rows = [
        b"text,label",
        b'"two\nlines, and\n\nmore",yes',
        b"",
        b"a,b,c",
        b"\xff,no",
        b'"x"y,no',
        b" ,no",
        b"end,no",
    ]
    source = classification.Config(
        (write(tmp_path / "a.csv", b"\n".join(rows)),), labels=LABELS
    ).build()
    assert parsed(source) == [
        (2, TaskRow(("two\nlines, and\n\nmore",), 1.0)),
        (7, "not as many cells as the line of names has: 3, not 2"),
        (8, "invalid UTF-8"),
        (9, "invalid CSV: ',' expected after '\"'"),
        (10, "empty text"),
        (11, TaskRow(("end",), 0.0)),
    ]


@pytest.mark.parametrize(("name", "mark"), [("a.tsv", "\t"), ("a.csv", ",")])
def test_files_without_a_line_of_names(tmp_path, name, mark):
    rows = [("no", "text"), ("yes", "the first"), ("no",), ("no", "x", "y")]
    path = write(tmp_path / name, "\n".join(mark.join(cells) for cells in rows))
    source = classification.Config((path,), labels=LABELS, header=("label", "text")).build()
    assert parsed(source) == [
        (1, TaskRow(("text",), 0.0)),
        (2, TaskRow(("the first",), 1.0)),
        (3, "not as many cells as header has: 1, not 2"),
        (4, "not as many cells as header has: 3, not 2"),
    ]


def test_a_header_that_nothing_needs_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "x", "label": "no"}')
    with pytest.raises(ConfigError, match=r"a\.jsonl has names in it. Leave header out"):
        classification.Config((path,), labels=LABELS, header=("label", "text")).build()
    with pytest.raises(ConfigError, match="header names two columns 'text'"):
        classification.Config((path,), labels=LABELS, header=("text", "text"))


def test_a_long_cell_is_read_and_a_quote_that_is_never_closed_is_named(tmp_path):
    source = classification.Config(
        (write(tmp_path / "a.csv", f'text,label\n{"x" * 300_000},no\n"a,no\nb,no\n'),),
        labels=LABELS,
    )
    long, *lost = parsed(source.build())
    assert long == (2, TaskRow(("x" * 300_000,), 0.0))
    reason = "invalid CSV: unexpected end of data, in a quotation from line 3 to line 4"
    assert lost == [(3, reason), (4, reason)]


def test_every_line_that_an_open_quotation_swallows_is_counted(tmp_path, monkeypatch):
    lines = ["text,label", *(f"{number},no" for number in range(2, 40))]
    lines[4] = '"five,no'
    lines[9] = 'a "ten,no'  # this mark ends the quotation, within a cell
    lines[19] = '"twenty,no'
    lines[24] = '",no,more'  # here a quotation ends well, but its row has three cells
    lines[29] = '"thirty'
    lines[34] = '",yes'  # and this row is as it should be
    path = write(tmp_path / "a.csv", "\n".join(lines))
    source = classification.Config((path,), labels=LABELS).build()
    found = dict(parsed(source))
    bad = {line: reason for line, reason in found.items() if isinstance(reason, str)}
    mark = "invalid CSV: ',' expected after '\"', in a quotation from line 5 to line 10"
    cells = "not as many cells as the line of names has: 3, not 2"
    assert bad == {
        **dict.fromkeys(range(5, 11), mark),
        **dict.fromkeys(range(20, 26), f"{cells}, in a quotation from line 20 to line 25"),
    }
    assert sorted({*found} - {*bad}) == [
        *range(2, 5),
        *range(11, 20),
        *range(26, 31),
        *range(36, 40),
    ]
    monkeypatch.setattr(table, "_LONGEST_CELL", 50)
    found = dict(parsed(source))
    # Behind a cell that is too long, nobody knows where the quotation ends.
    assert [line for line, reason in found.items() if isinstance(reason, str)] == [
        *range(5, 11),
        *range(20, 26),
    ]
    lines[9] = "no mark"
    write(tmp_path / "a.csv", "\n".join(lines))
    found = dict(parsed(source))
    assert [line for line, reason in found.items() if isinstance(reason, TaskRow)] == [2, 3, 4]
    assert len(found) == 38


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.csv", "", [(1, "empty file")]),
        ("a.csv", "text,label\n", [(1, "empty file")]),
        ("a.json", "[]", [(1, "empty file")]),
        ("a.parquet", parquet_of([{"text": "x", "label": "no"}])[:-9], [(1, "corrupt file")]),
        (
            "a.parquet",
            parquet_of([{"x": "1", "y": "2"}]),
            [(1, "no column 'text': there are x, y")],
        ),
        ("a.tsv", "x\ty\n1\t2\n", [(2, "no column 'text': there are x, y")]),
        (
            "a.csv",
            "text;label\nx;1\n",
            [
                (
                    2,
                    "no column 'text': there are text;label, in one column: cells of .csv end at "
                    "commas, of .tsv at tabs",
                )
            ],
        ),
        ("a.csv", "text,label\r\nx,1\r\n".encode("utf-16"), [(1, "invalid UTF-8")]),
        ("a.csv", "text,label\nx,1\n".encode("utf-16-be"), [(1, "invalid UTF-8")]),
        ("a.csv", "text,text,label\n1,2,3\n", [(1, "two columns are named 'text'")]),
        ("a.parquet", doubled("text", "text", "label"), [(1, "two columns are named 'text'")]),
        ("a.parquet", doubled("text", "label", "label"), [(1, "two columns are named 'label'")]),
        ("a.parquet", doubled("text", "n", "n"), [(1, "no column 'label': there are text, n, n")]),
        (
            "a.jsonl",
            b'{"text": "\xff"}\n{\n[1]\n{"text": 3}',
            [
                (1, "invalid UTF-8"),
                (2, "invalid JSON"),
                (3, "not a JSON object"),
                (4, "column 'text' is not text"),
            ],
        ),
        (
            "a.json",
            '{\n[]\n{"text": "x", "label": 1}',
            [(1, "invalid JSON"), (2, "not a JSON object"), (3, TaskRow(("x",), 1.0))],
        ),
        (
            "a.json",
            '["x", {"text": "\\ud83d"}]',
            [(1, "not a JSON object"), (2, "invalid Unicode")],
        ),
    ],
)
def test_what_cannot_be_read_is_named_and_reading_goes_on(tmp_path, name, data, expected):
    source = classification.Config((write(tmp_path / name, data),), labels=LABELS).build()
    assert parsed(source) == expected


def test_one_text_of_parquet_that_is_no_utf_8_spoils_its_row_only(tmp_path):
    text = pa.array([b"one", b"\xff", b"two"], pa.binary()).view(pa.string())
    pq.write_table(
        pa.table({"text": text, "label": [0, 1, 1], "image": [b"\x00"] * 3}), tmp_path / "a.parquet"
    )
    source = classification.Config((f"{tmp_path}/a.parquet",), labels=LABELS).build()
    assert parsed(source) == [
        (1, TaskRow(("one",), 0.0)),
        (2, "invalid UTF-8"),
        (3, TaskRow(("two",), 1.0)),
    ]
    assert set(json.loads(next(source.records()).data)) == {
        "text",
        "label",
    }  # no other column is read


def test_held_out_files_come_behind_the_others(tmp_path):
    for name in ("train-b.jsonl", "train-a.csv", "dev.jsonl", "also-dev.csv"):
        line = json.dumps({"text": name, "label": 0})
        write(tmp_path / name, f"text,label\n{name},no\n" if name.endswith(".csv") else line)
    config = classification.Config((f"{tmp_path}/train-*",), (f"{tmp_path}/*dev*",), labels=LABELS)
    source = config.build()
    names = ["train-a.csv", "train-b.jsonl", "also-dev.csv", "dev.jsonl"]
    assert [Path(file).name for file in source.files] == names
    assert source.first_heldout == 2
    records = list(source.records())
    assert [source.parse_row(record).texts[0] for record in records] == names
    assert [record.file for record in records] == [0, 1, 2, 3]
    shares = [record.read for record in records]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    with pytest.raises(
        ConfigError, match=r"dev\.jsonl is both in paths and in heldout\. Make the pattern"
    ):
        classification.Config(
            (f"{tmp_path}/*.jsonl",), (f"{tmp_path}/dev.jsonl",), labels=LABELS
        ).build()


def test_where_rows_are_is_said_once_and_in_a_known_format(tmp_path):
    dataset = HubDataset("owner/name")
    with pytest.raises(
        ConfigError, match=r"there are 0 paths and dataset is None\. Name either files in paths, or"
    ):
        regression.Config()
    with pytest.raises(ConfigError, match="there are 1 paths and dataset is owner/name"):
        regression.Config(("a.csv",), dataset=dataset)
    with pytest.raises(ConfigError, match="there are 1 paths and dataset is owner/name"):
        regression.Config(heldout=("a.csv",), dataset=dataset)
    with pytest.raises(ConfigError, match="split and heldout are both 'train'"):
        HubDataset("owner/name", heldout="train")
    conll = write(tmp_path / "a.conll.gz", "EU B-ORG\n")
    with pytest.raises(
        ConfigError,
        match=r"must end in \.jsonl, \.json, \.csv, \.tsv, \.parquet, and then in \.gz, \.bz2, ",
    ):
        regression.Config((conll,)).build()


def test_a_file_to_label_has_no_two_columns_of_one_name(tmp_path):
    """All its columns go to the labeled file, not only those of the texts."""
    path = write(tmp_path / "a.parquet", doubled("text", "n", "n"))
    assert parsed(Unlabeled.open(path, ("text",), {})) == [(1, "two columns are named 'n'")]


def test_passages_to_label_are_a_list_in_json_and_no_other_text(tmp_path):
    """A list that is read as one text would get one score."""
    lines = ["query,positive,negatives", 'a,b,"[""c"", ""d""]"', """a,b,"['c', 'd']\""""]
    source = Passages.open(write(tmp_path / "a.csv", "\n".join(lines)), PASSAGES, {})
    good, bad = source.records()
    assert [row.texts for row in source.rows(good)] == [("a", "b"), ("a", "c"), ("a", "d")]
    with pytest.raises(BadRecord, match="'negatives' has a list in Python's notation"):
        source.rows(bad)


@dataclass(frozen=True)
class Holder:
    source: Annotated[Any, Kinds("data_pipeline.sources.kinds")]


@pytest.mark.parametrize(
    "source",
    [
        {"kind": "classification", "paths": ["a.csv"], "labels": ["a", "b"]},
        {"kind": "regression", "dataset": {"path": "owner/name", "heldout": "validation"}},
        {"kind": "multiple_choice", "paths": ["a.csv"]},
        {"kind": "question_answering", "paths": ["a.json"]},
        {"kind": "tagging", "paths": ["a.conll"], "labels": ["O", "B-X"]},
    ],
)
def test_a_configuration_becomes_a_tree_and_is_the_same_again(source):
    config = decode(Holder, {"source": source})
    assert decode(Holder, to_tree(config)) == config


@pytest.mark.parametrize("form", ["parquet", "saved"])
@pytest.mark.parametrize(
    ("labels", "settings", "expected"),
    [
        (("no", "maybe", "yes"), {}, [0.0, 1.0, 2.0]),  # as the dataset numbers them
        (("yes", "no", "maybe"), {}, [1.0, 2.0, 0.0]),
        (("no", "yes"), {}, [0.0, "label is not one of no, yes: 'maybe'", 1.0]),
        (("neg", "neutral", "pos"), {}, [0.0, 1.0, 2.0]),  # other names: the numbers count
        (("yes", "no"), {"ignore": ("1",)}, [0.0, "label is not one of yes, no: 2"]),
        (("yes", "no"), {"words": {"label": {"0": "no", "1": "no", "2": "yes"}}}, [1.0, 1.0, 0.0]),
    ],
)
def test_numbers_of_classes_mean_the_names_in_the_dataset(
    form, labels, settings, expected, tmp_path
):
    """In whatever order source.labels has the names: the same number is another class there."""
    import datasets

    names = datasets.ClassLabel(names=["no", "maybe", "yes"])
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    rows = [{"text": "x", "label": number} for number in (0, 1, 2)]
    source = written(datasets.Dataset.from_list(rows, features), form, tmp_path)
    config = classification.Config(**source, labels=labels, **settings)
    found = [row if isinstance(row, str) else row.label for _, row in parsed(config.build())]
    assert found == expected


def test_numbers_of_tags_and_targets_mean_the_names_in_the_dataset(tmp_path):
    import datasets

    tags = datasets.List(datasets.ClassLabel(names=["O", "B-X", "B-Y"]))
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "tags": tags})
    rows = [{"tokens": ["a", "b", "c"], "tags": [0, 2, 1]}]
    table = datasets.Dataset.from_list(rows, features)
    for form in ("parquet", "saved"):
        source = written(table, form, tmp_path / form)
        config = tagging.Config(**source, tags="tags", labels=("B-X", "O", "B-Y"))
        ((_, row),) = parsed(config.build())
        assert [label for *_, label in row.spans] == [1, 2, 0]
    names = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"source": datasets.Value("string"), "target": names})
    pairs = datasets.Dataset.from_list([{"source": "x", "target": 1}], features)
    for form in ("parquet", "saved"):
        source = written(pairs, form, tmp_path / f"pairs-{form}")
        reader = table_pairs.Config(**source, labels=("yes", "no")).build()
        assert [reader.parse_pair(record) for record in reader.records()] == [("x", "yes")]


def written(table: Any, form: str, folder: Path) -> dict[str, Any]:
    """The settings of a source that reads a dataset of `datasets` from a file or a folder."""
    folder.mkdir(exist_ok=True)
    if form == "parquet":
        table.to_parquet(folder / "a.parquet")
        return {"paths": (f"{folder}/a.parquet",)}
    table.save_to_disk(folder / "saved")
    return {"dataset": HubDataset(f"{folder}/saved")}


def test_splits_of_a_hugging_face_dataset_stand_for_files(tmp_path, monkeypatch):
    import datasets

    features = datasets.Features(
        {
            "s": {"text": datasets.Value("string")},
            "label": datasets.ClassLabel(names=list(LABELS)),
            "n": datasets.Value("int64"),
        }
    )
    rows = [
        {"s": {"text": text}, "label": label, "n": 1}
        for text, label in (("x", 1), (" ", 0), ("z", -1))
    ]
    train = datasets.Dataset.from_list(rows, features)
    datasets.DatasetDict({"train": train, "dev": train.select([0])}).save_to_disk(tmp_path / "d")
    train.save_to_disk(tmp_path / "single")

    def source(texts=("s.text",), **dataset):
        settings = {"path": f"{tmp_path}/d", "heldout": "dev"} | dataset
        return classification.Config(
            dataset=HubDataset(**settings), texts=texts, labels=LABELS
        ).build()

    found = source()
    assert found.files == (f"{tmp_path}/d train", f"{tmp_path}/d dev")
    assert found.first_heldout == 1
    assert [record.file for record in found.records()] == [0, 0, 0, 1]
    reasons = [(2, "empty s.text"), (3, "label is not one of no, yes: -1")]
    assert parsed(found) == [(1, TaskRow(("x",), 1.0)), *reasons, (1, TaskRow(("x",), 1.0))]
    assert set(json.loads(next(found.records()).data)) == {"s", "label"}
    assert parsed(source(("t",), heldout=None)) == [(1, "no column 't': there are s, label, n")]
    with pytest.raises(ConfigError, match=r"single holds a single split, so 'dev' is not in it"):
        source(path=f"{tmp_path}/single")
    monkeypatch.setattr(huggingface.Config, "open", lambda *_, **__: train.select([]))
    assert parsed(source(heldout=None)) == [(1, "empty split")]


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("yes", 1.0),
        (0, 0.0),
        ("1", 1.0),
        (1.0, 1.0),
        ("1.0", 1.0),
        ("1.00", 1.0),
        ("1.5", "label is not one of no, yes: '1.5'"),
        (2, "label is not one of no, yes: 2"),
        ("-1", "label is not one of no, yes: '-1'"),
        (True, "label is not one of no, yes: True"),
        (None, "label is not one of no, yes: None"),
        ("Yes", "label is not one of no, yes: 'Yes'"),
        ([0.25, 0.75], (0.25, 0.75)),
        ("[1, 0]", (1.0, 0.0)),
        ({"yes": 0.75, "no": 0.25}, (0.25, 0.75)),
        ('{"yes": 1, "no": 0}', (0.0, 1.0)),
        ({"yes": 0.5, "maybe": 0.5}, "label has probabilities of other labels: yes, maybe"),
        ({"yes": 0.5, "no": 0.2}, "probabilities of label do not sum to 1: 0.7"),
        ([0.25, 0.7], "probabilities of label do not sum to 1: 0.95"),
        ([1.0], "label has 1 probabilities for 2 labels"),
        ([-0.5, 1.5], "label holds what is no probability: [-0.5, 1.5]"),
        ([float("nan"), 1], "label holds what is no probability: [nan, 1]"),
        (["1", 0], "label holds what is no probability: ['1', 0]"),
        ([10**400, 0], f"label holds what is no probability: [1{'0' * 95}..."),
    ],
)
def test_a_class_is_a_name_or_an_index_or_a_distribution(file, label, expected):
    source = classification.Config((file,), labels=LABELS).build()
    found = row_or_reason(source, {"text": "x", "label": label})
    if isinstance(expected, str):
        assert found == expected
    elif isinstance(expected, tuple):
        assert found == TaskRow(("x",), None, probabilities=expected)
    else:
        assert found == TaskRow(("x",), expected)


def test_a_label_that_is_a_number_may_be_written_as_a_float_or_a_decimal(file):
    source = classification.Config((file,), labels=("1", "0", "2.0")).build()
    labels = [row_or_reason(source, {"text": "x", "label": n}) for n in (0.0, "1.00", 2, 0.5, 3)]
    assert labels == [
        TaskRow(("x",), 1.0),
        TaskRow(("x",), 0.0),
        TaskRow(("x",), 2.0),
        "label is not one of 1, 0, 2.0: 0.5",
        "label is not one of 1, 0, 2.0: 3",
    ]


def test_labels_are_names_or_indices_of_names_and_ignored_ones_are_no_rows(tmp_path):
    data = [{"text": str(label), "label": label} for label in ("0", 1, True, "-", -1, "2")]
    path = write(tmp_path / "a.jsonl", "\n".join([*map(json.dumps, data), "{"]))
    found = parsed(
        classification.Config((path,), labels=("1", "0", "true"), ignore=("-", "-1")).build()
    )
    assert [(line, row.label if isinstance(row, TaskRow) else row) for line, row in found] == [
        (1, 1.0),
        (2, 0.0),
        (3, 2.0),
        (6, "label is not one of 1, 0, true: '2'"),
        (7, "invalid JSON"),
    ]
    named = parsed(
        classification.Config(
            (path,), labels=("a", "b", "c"), ignore=("-", "-1", "true"), group="text"
        ).build()
    )
    assert [(row.label, row.group) for _, row in named[:-1]] == [(0.0, "0"), (1.0, "1"), (2.0, "2")]


def test_names_of_groups_and_columns_that_no_text_can_hold_are_bad_records(file, tmp_path):
    """Half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    row = {"text": "x", "label": 1, "q": "\ud83d", "question": "x", "context": "x", "answers": []}
    labeled = classification.Config((file,), labels=LABELS, group="q").build()
    assert row_or_reason(labeled, row) == "invalid Unicode in the row's group or id"
    asked = question_answering.Config((file,), id="q").build()
    assert row_or_reason(asked, row) == "invalid Unicode in the row's group or id"
    path = write(tmp_path / "a.jsonl", json.dumps({"\ud83d": 1}))
    items = classification.Config((path,), labels=LABELS, each="of").build()
    (record,) = items.records()
    assert record.problem == "no column 'of': there are ?"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"s": {"one": " ", "two": "x"}, "label": 1}, "empty s.one"),
        ({"s": {"one": "x", "two": "\ud83d"}, "label": 1}, "invalid Unicode in s.two"),
        ({"s": {"one": "x"}, "label": 1}, "no column 's.two': there are s, label"),
        ({"s": "x", "label": 1}, "no column 's.one': there are s, label"),
        (
            {"s": {"one": "x"}, "s.one": "x", "s.two": "y", "label": 1},
            "'s.one' is both a name with dots and a path to a nested value. Rename one",
        ),
        ({"s.one": "x", "s.two": "y"}, "no column 'label': there are s.one, s.two"),
        (
            {f"a{n:03}": n for n in range(99)},
            f"no column 's.one': there are {', '.join(f'a{n:03}' for n in range(16))}, a...",
        ),
    ],
)
def test_reasons_name_the_column(file, row, reason):
    source = classification.Config((file,), texts=("s.one", "s.two"), labels=LABELS).build()
    assert row_or_reason(source, row) == reason


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"labels": ("a",)}, "labels must name at least 2; it has 1: a"),
        ({"labels": ("a", "b", "a")}, "labels names 'a' twice"),
        ({"labels": LABELS, "texts": ()}, "texts is empty"),
        ({"labels": LABELS, "ignore": ("-", "no")}, "'no' is in labels and in ignore"),
    ],
)
def test_classes_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        classification.Config(("a.csv",), **settings)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3.8, 3.8),
        (-2, -2.0),
        ("4.25", 4.25),
        ("high", "score is not a finite number: 'high'"),
        (True, "score is not a finite number: True"),
        (None, "score is not a finite number: None"),
        ("nan", "score is not a finite number: 'nan'"),
        (float("inf"), "score is not a finite number: inf"),
        pytest.param(10**400, f"score is not a finite number: {str(10**400)[:97]}...", id="huge"),
    ],
)
def test_a_number_is_finite(file, value, expected):
    source = regression.Config((file,), texts=("a", "b")).build()
    assert (source.kind, source.labels) == ("regression", ("score",))
    found = row_or_reason(source, {"a": "x", "b": "y", "score": value})
    assert found == (expected if isinstance(expected, str) else TaskRow(("x", "y"), expected))


SWAG = {"sent1": "They sit.", "sent2": "He ", "ending0": "runs.", "ending1": "sleeps.", "label": 1}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, TaskRow(("They sit.", "He runs.", "He sleeps."), 1.0)),
        ({"label": "A", "sent2": ""}, TaskRow(("They sit.", "runs.", "sleeps."), 0.0)),
        ({"ending1": " "}, "empty ending1"),
        ({"sent1": ""}, "empty sent1"),
        ({"sent2": None}, "column 'sent2' is not text"),
        ({"label": 2}, "label is not the number of a choice, 0 to 1, nor its letter: 2"),
        ({"label": "C"}, "label is not the number of a choice, 0 to 1, nor its letter: 'C'"),
        (
            {"label": "runs."},
            "label is not the number of a choice, 0 to 1, nor its letter: 'runs.'",
        ),
    ],
)
def test_choices_are_columns_behind_a_question(file, changed, expected):
    config = multiple_choice.Config(
        (file,), context="sent1", question="sent2", choices=("ending0", "ending1")
    )
    source = config.build()
    assert (source.kind, source.labels) == ("multiple_choice", ())
    assert row_or_reason(source, SWAG | changed) == expected


@pytest.mark.parametrize(
    ("choices", "answer", "expected"),
    [
        (["x", "y", "z"], "C", TaskRow(("text", "x", "y", "z"), 2.0)),
        ('["x", "y"]', "1", TaskRow(("text", "x", "y"), 0.0)),
        (["x", "y"], 0, "answer is not the number of a choice, 1 to 2, nor its letter: 0"),
        (["x", ""], 1, "empty options[1]"),
        (["x"], 1, "fewer than 2 options"),
        (["x", 3], 1, "options holds what is not text"),
        ("x", 1, "column 'options' is not a list"),
    ],
)
def test_choices_are_a_list_in_one_column(file, choices, answer, expected):
    source = multiple_choice.Config(
        (file,), context="article", choices=("options",), label="answer", first=1
    ).build()
    assert (
        row_or_reason(source, {"article": "text", "options": choices, "answer": answer}) == expected
    )
    with pytest.raises(ConfigError, match=r"choices is \[\]\. Name the columns"):
        multiple_choice.Config((file,), choices=())


CONTEXT = "a bee, a bee and a bee"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], []),
        ({"text": [], "answer_start": []}, []),
        ([{"text": "bee", "answer_start": 9}], [(9, 12)]),
        ({"text": ["bee", "and"], "answer_start": [2, 13]}, [(2, 5), (13, 16)]),
        (
            [{"text": "bee", "answer_start": 12}],
            [(9, 12)],
        ),  # 3 before; the next is 7 behind
        ([{"text": "bee", "answer_start": 15}], [(19, 22)]),
        (
            [{"text": "bee", "answer_start": 14}],
            "an answer is not within 4 characters of answer_start: 'bee'",
        ),
        (
            [{"text": "bee", "answer_start": 6}],
            "an answer is more than once within 4 characters of answer_start: 'bee'",
        ),
        (
            [{"text": "bee", "answer_start": -1}, {"text": "bee", "answer_start": 22}],
            [(2, 5), (19, 22)],
        ),
        (
            [{"text": "bee", "answer_start": 2}, {"text": "bee", "answer_start": 99}],
            "an answer is not within 4 characters of answer_start: 'bee'",
        ),
        ({"text": ["bee"]}, [(2, 5)]),
        ([{"text": "bee"}, {"text": "bee", "answer_start": None}], [(2, 5), (2, 5)]),
        ('[{"text": "and", "answer_start": 13}]', [(13, 16)]),
        ([{"text": "wasp", "answer_start": 2}], "an answer is not in the context: 'wasp'"),
        ([{"text": " ", "answer_start": 1}], "empty answer"),
        (
            [{"text": "bee", "answer_start": "x"}],
            "an item of answers is not a text and where it begins: ('bee', 'x')",
        ),
        (
            {"text": ["bee"], "answer_start": [1, 2]},
            "column 'answers' holds no answers, as [{text, answer_start}]",
        ),
        (["bee"], "column 'answers' holds no answers, as [{text, answer_start}]"),
        ({"text": "bee"}, "column 'answers' holds no answers, as [{text, answer_start}]"),
        (
            {"text": ["a", "b"], "answer_start": "02"},
            "column 'answers' holds no answers, as [{text, answer_start}]",
        ),
        (None, "column 'answers' holds no answers, as [{text, answer_start}]"),
    ],
)
def test_answers_are_found_in_their_context(file, answers, expected):
    source = question_answering.Config((file,)).build()
    found = row_or_reason(
        source, {"id": 7, "question": "what?", "context": CONTEXT, "answers": answers}
    )
    if isinstance(expected, str):
        assert found == expected
        return
    spans = tuple((begin, end, 0) for begin, end in expected)
    texts = tuple(CONTEXT[begin:end] for begin, end in expected)
    assert found == TaskRow(("what?", CONTEXT), spans=spans, answers=texts, group="7")


# "Key" and "5 May" several times each; 1, 2, 3 or 4 bytes and 1 or 2 code units for a character.
REPEATED = {
    "Key": "キー は Key 。 Key is a brand ; Key made it . The key of the film is Key .",
    "5 May": "🚀🚀🚀🚀 on 5 May they flew , on 5 May they landed 🚀 , and on 5 May they slept",
    "é": "é is an é , and a café is none of them , é",
    "one": "only one , and one more",
}
UNITS = {"characters": ("utf-32-le", 4), "UTF-16": ("utf-16-le", 2), "UTF-8": ("utf-8", 1)}


def questions_in(unit: str, off: int = 0) -> tuple[list[dict[str, Any]], list[int]]:
    """A question for each occurrence of each answer, and where each answer begins."""
    encoding, size = UNITS[unit]
    rows, begins = [], []
    for answer, context in REPEATED.items():
        for begin in [i for i in range(len(context)) if context.startswith(answer, i)]:
            start = len(context[:begin].encode(encoding)) // size + off
            answers = {"text": [answer], "answer_start": [start]}
            rows.append({"id": len(rows), "question": "?", "context": context, "answers": answers})
            begins.append(begin)
    return rows, begins


def begins_of(source: TaskSource) -> list[int | str]:
    return [
        row if isinstance(row, str) else row.spans[0][0]
        for _, row in parsed(source)
        if isinstance(row, str) or row.spans
    ]


@pytest.mark.parametrize("unit", UNITS)
def test_starts_of_answers_count_in_one_unit_in_a_file(unit, tmp_path, caplog):
    """Also if they are off by one, and if only one of two files counts so."""
    other, begins = questions_in("characters")
    for off in (0, 1):
        rows, _ = questions_in(unit, off)
        paths = [
            write(tmp_path / f"{name}{off}.jsonl", "\n".join(map(json.dumps, each)))
            for name, each in (("a", rows), ("b", other))
        ]
        source = question_answering.Config(tuple(paths)).build()
        with caplog.at_level("INFO"):
            assert begins_of(source) == begins * 2
    named = [] if unit == "characters" else ["a0", "a1"]
    messages = [record.message for record in caplog.records]
    assert len(messages) == len(named)
    for name, message in zip(named, messages, strict=True):
        assert f"{name}.jsonl counts answer_start in" in message
        assert unit in message


def test_starts_of_answers_in_other_formats(tmp_path):
    """SQuAD's own JSON, CSV with lists as JSON, Parquet, and a dataset of `datasets`."""
    import datasets

    rows, begins = questions_in("UTF-8")
    articles = [
        {
            "paragraphs": [
                {
                    "context": row["context"],
                    "qas": [
                        {
                            "id": row["id"],
                            "question": "?",
                            "answers": [
                                {
                                    "text": row["answers"]["text"][0],
                                    "answer_start": row["answers"]["answer_start"][0],
                                }
                            ],
                        },
                        {"id": "none", "question": "?", "answers": [], "is_impossible": True},
                    ],
                }
            ]
        }
        for row in rows
    ]
    nested = write(tmp_path / "a.json", json.dumps({"data": articles}))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    with open(tmp_path / "a.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        writer.writerows([*list(row.values())[:3], json.dumps(row["answers"])] for row in rows)
    for settings in (
        {"paths": (nested,)},
        {"paths": (f"{tmp_path}/a.parquet",)},
        {"paths": (f"{tmp_path}/a.csv",)},
        {"dataset": HubDataset(f"{tmp_path}/saved")},
    ):
        assert begins_of(question_answering.Config(**settings).build()) == begins, settings


@pytest.mark.parametrize("sign", ["é", "😀"])
def test_a_wrong_row_does_not_change_the_unit_of_a_file(sign, tmp_path):
    """After one accent, starts in characters are near their answers in bytes, too."""

    def row(context: str, answer: str, start: int) -> str:
        answers = {"text": [answer], "answer_start": [start]}
        return json.dumps({"id": 0, "question": "?", "context": context, "answers": answers})

    rows = [row(f"{sign} word", "word", 2)] * 20 + [row(f"{sign} 22", "2", 3)]
    far = f"{sign * 6} it is the end"
    wrong = [row(far, "end", len(far[:-3].encode())), row(f"{sign} is the end", "end", 60)]
    source = question_answering.Config((write(tmp_path / "a.jsonl", "\n".join(rows + wrong)),))
    reason = "an answer is not within 4 characters of answer_start: 'end'"
    assert begins_of(source.build()) == [2] * 20 + [3, reason, reason]


def test_answers_that_fit_no_unit_are_rejected(tmp_path):
    """Of a file in characters: bytes are far from the answer, and an impossible one has none."""
    rows, begins = questions_in("characters")
    (far,) = [row for row in questions_in("UTF-8")[0] if row["id"] == 3]
    contrary = {**rows[0], "is_impossible": True}
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, [*rows, far, contrary])))
    source = question_answering.Config((path,)).build()
    *found, wrong, impossible = begins_of(source)
    assert found == begins
    assert wrong == "an answer is not within 4 characters of answer_start: 'Key'"
    assert impossible == "is_impossible is true, and there are answers"


@pytest.mark.parametrize("indent", [None, 1])
def test_the_nested_format_of_squad_is_flattened(tmp_path, indent):
    bee = {
        "id": "q1",
        "question": "what?",
        "answers": [{"text": "bee", "answer_start": 2}],
        "is_impossible": False,
    }
    none = {"id": "q2", "question": "why?", "answers": [], "is_impossible": True}
    other = {"id": "q3", "question": "who?"}
    articles = [
        {"title": "x", "paragraphs": [{"context": CONTEXT, "qas": [bee, none]}]},
        {"title": "y", "paragraphs": [{"context": "other", "qas": [other]}, {"qas": [other]}]},
    ]
    path = write(
        tmp_path / "a.json", json.dumps({"version": "2.0", "data": articles}, indent=indent)
    )
    source = question_answering.Config((path,)).build()
    assert (source.kind, source.labels) == ("question_answering", ())
    assert parsed(source) == [
        (1, TaskRow(("what?", CONTEXT), spans=((2, 5, 0),), answers=("bee",), group="q1")),
        (2, TaskRow(("why?", CONTEXT), group="q2")),
        (3, "no column 'answers': there are id, question, context"),
        (4, "not in the format of SQuAD: no 'context'"),
    ]
    rows = [json.loads(record.data) for record in source.records() if not record.problem]
    assert rows[1] == {**none, "context": CONTEXT}
    write(tmp_path / "b.json", "\n".join(map(json.dumps, rows)))
    lines = question_answering.Config((f"{tmp_path}/b.json",)).build()
    assert parsed(lines) == parsed(source)[:3]


def tagger(file: str, **settings: Any) -> TaskSource:
    return tagging.Config((file,), labels=BIO, **settings).build()


def test_spans_of_tags_are_those_of_the_words(file):
    words, tags = ["Jo", "Žižek", "saw", "👍🏽", "Bonn", "."], ["B-PER", 2, "O", "O", "3", "I-PER"]
    found = row_or_reason(tagger(file), {"tokens": words, "ner": tags})
    assert isinstance(found, TaskRow)
    (text,) = found.texts
    assert text == " ".join(words)
    assert [text[begin:end] for begin, end, _ in found.spans] == words
    assert [BIO[index] for _, _, index in found.spans] == [
        "B-PER",
        "I-PER",
        "O",
        "O",
        "B-LOC",
        "I-PER",
    ]


@pytest.mark.parametrize(
    ("tokens", "tags", "reason"),
    [
        (["a", "b"], ["O"], "tokens and ner differ in number: 2 and 1"),
        ([], [], "empty tokens"),
        (["a", ""], ["O", "O"], "empty word"),
        (["a", "b\u00a0c"], ["O", "O"], "white space in a word: 'b\\xa0c'"),
        (["a", 3], ["O", "O"], "a word is not text: 3"),
        (["a"], ["PER"], "tag is not BIO: 'PER'"),
        (["a"], ["B-"], "tag is not BIO: 'B-'"),
        (["a"], ["B-ORG"], "tag is not one of O, B-PER, I-PER, B-LOC: 'B-ORG'"),
        (["a"], [4], "tag is not one of O, B-PER, I-PER, B-LOC: 4"),
        ("a b", ["O"], "column 'tokens' is not a list"),
    ],
)
def test_words_and_tags_that_do_not_fit_are_named(file, tokens, tags, reason):
    assert row_or_reason(tagger(file), {"tokens": tokens, "ner": tags}) == reason


def test_conll_files_hold_a_word_a_line(tmp_path):
    lines = [
        b"-DOCSTART- -X- -X- O",
        b"",
        b"Jo NNP B-NP B-PER",
        b"ran\tVB  I-VP\tO\r",
        b" ",
        b"",
        b"a O",
        b"alone",
        b"b",
        b"c O",
        b"",
        b"\xff O",
        b"",
        b"-DOCSTART- O",
        b"Bonn B-LOC",
        b"",
        b"we O",
        b"saw O",
        b"Jo PER",
        b"in B-ORG",
        b"",
        b"we O",
        b"met 4",
        b"",
        b"met O",
        b"Jo 1",
    ]
    source = tagger(
        write(tmp_path / "a.conll.gz", b"\n".join(lines)), tokens="words", tags="tags.ner"
    )
    assert parsed(source) == [
        (3, TaskRow(("Jo ran",), spans=((0, 2, 1), (3, 6, 0)))),
        (8, "fewer than 2 columns"),
        (12, "invalid UTF-8"),
        (15, TaskRow(("Bonn",), spans=((0, 4, 3),))),
        (19, "tag is not BIO: 'PER'"),  # the first bad line of its sentence
        (23, "tag is not one of O, B-PER, I-PER, B-LOC: '4'"),
        (25, TaskRow(("met Jo",), spans=((0, 3, 0), (4, 6, 1)))),
    ]
    assert json.loads(next(source.records()).data) == {
        "words": ["Jo", "ran"],
        "tags.ner": ["B-PER", "O"],
    }


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ((), "labels must name at least 2"),
        (("B-X", "I-X"), "labels has no 'O'"),
        (("O", "X"), "labels names 'X', which is not BIO"),
        (("O", "B-X", "O"), "labels names 'O' twice"),
    ],
)
def test_tags_that_cannot_be_are_refused(labels, words):
    with pytest.raises(ConfigError, match=words):
        tagging.Config(("a.conll",), labels=labels)
