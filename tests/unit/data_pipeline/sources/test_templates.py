"""Texts that are made of several columns: what templates can say, and that they can say no more."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from data_pipeline.sources import BadRecord
from data_pipeline.sources.kinds import classification, table_pairs
from data_pipeline.sources.templates import columns_of, write
from samestep.errors import ConfigError

ROW = {
    "a": "one  two",
    "b": {"c": "deep"},
    "list": ["x", "y"],
    "n": 1,
    "label": 0,
    "score": 2.5,
    "gap": "@x is here",
    "x.y": "dotted",
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a", "one  two"),
        ("{a}, {b.c}", "one  two, deep"),
        ("{{{n}}}", "{1}"),
        ("{list}", "x, y"),
        ("{list.1} {x.y}", "y dotted"),
        ("{a:*n}", "one  *two*"),
        ("{gap:@x=b.c}", "deep is here"),
        ("{score:0.2} {n:0.25} {score:1}", "2.4 1.00 2"),
        ("{label} {label}", "no no"),
        ("label", "no"),
    ],
)
def test_what_templates_write(template: str, text: str):
    assert write(ROW, template, {"label": {"0": "no", "1": "yes"}}) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("n", "column 'n' is not text"),
        ("{nothing}", "no column 'nothing'"),
        ("{b}", "column 'b' holds what is no text"),
        ("{list.2}", r"no column 'list\.2'"),
        ("{a:*score}", "score is not the number of a word: there are 2 words"),
        ("{a:@x=n}", "column 'a' has no '@x'"),
        ("{a:0.2}", "a is not a finite number: 'one  two'"),
        ("{n}", "n is not one of 0, 2: '1'"),
    ],
)
def test_rows_that_a_template_does_not_fit_have_a_reason(template: str, message: str):
    with pytest.raises(BadRecord, match=message):
        write(ROW, template, {"n": {"0": "no", "2": "yes"}} if template == "{n}" else {})


@pytest.mark.parametrize(
    "template", ["{a", "a}", "{}", "{a!r}", "{a[0]}", "{a:>10}", "{a:0}", "{a:*}", "{a:{b}}"]
)
def test_nothing_else_is_a_template(template: str):
    with pytest.raises(ConfigError, match=r"is not a (template|format)"):
        columns_of((template,))


def test_attributes_of_values_are_out_of_reach():
    with pytest.raises(BadRecord, match=r"no column 'a\.__class__'"):
        write(ROW, "{a.__class__}", {})


def test_all_columns_of_templates_are_read():
    templates = ("a", "{b.c:*n} {gap:@x=list}", "{{no}} {a}")
    assert columns_of(templates) == ("a", "b.c", "n", "gap", "list")


def test_words_say_what_labels_values_mean(tmp_path):
    (tmp_path / "a.csv").write_text(
        "title,body,stars\nFine,Buy it,5\nPoor,Do not,1\nSo so,Well,3\n"
    )
    words = {"stars": {"1": "bad", "5": "good"}}
    where = {"paths": (f"{tmp_path}/a.csv",), "labels": ("bad", "good"), "words": words}
    rows = parsed(classification.Config(texts=("{title}. {body}",), label="stars", **where).build())
    assert rows == [
        (("Fine. Buy it",), 1.0),
        (("Poor. Do not",), 0.0),
        "stars is not one of 1, 5: '3'",
    ]
    pairs = table_pairs.Config(
        source="{title}. {body}", target="stars", prefix="review: ", **where
    ).build()
    found = [pairs.parse_pair(record) for record in itertools.islice(pairs.records(), 2)]
    assert found == [("review: Fine. Buy it", "good"), ("review: Poor. Do not", "bad")]


def test_pairs_of_a_table_keep_what_is_held_out(tmp_path):
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text(f"source\ttarget\n{name}\tyes\n")
    config = table_pairs.Config(paths=(f"{tmp_path}/train.tsv",), heldout=(f"{tmp_path}/dev.tsv",))
    source = config.build()
    assert source.first_heldout == 1
    assert [source.parse_pair(record)[0] for record in source.records()] == ["train", "dev"]
    assert config.at((f"{tmp_path}/dev.tsv",)).build().first_heldout is None


def parsed(source: classification.Classification) -> list[object]:
    """Texts and label, or the reason, of each record."""
    found = list[object]()
    for record in source.records():
        try:
            row = source.parse_row(record)
            found.append((row.texts, row.label))
        except BadRecord as error:
            found.append(str(error))
    return found


def each_of(tmp_path: Any, row: dict[str, Any]) -> list[object]:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    config = classification.Config(
        paths=(f"{tmp_path}/a.jsonl",),
        texts=("{query:_=entities}",),
        labels=("wrong", "right"),
        each="entities",
        label="answers",
        group="id",
    )
    source, found = config.build(), list[object]()
    for record in source.records():
        try:
            parsed = source.parse_row(record)
            found.append((record.line, parsed.texts[0], parsed.label, parsed.group))
        except BadRecord as error:
            found.append(str(error))
    return found


def test_each_item_of_a_list_is_a_row(tmp_path):
    row = {"id": 3, "query": "_ is", "entities": ["a", "b"], "answers": ["b"]}
    assert each_of(tmp_path, row) == [(1, "a is", 0.0, "3"), (1, "b is", 1.0, "3")]
    assert each_of(tmp_path, row | {"entities": []}) == ["no item in entities"]
    assert each_of(tmp_path, row | {"entities": 5}) == ["column 'entities' is not a list"]
    assert each_of(tmp_path, row | {"answers": "b"}) == ["column 'answers' is not a list"] * 2
    with pytest.raises(ConfigError, match="each is 'a' and labels names 3"):
        classification.Config(paths=("a",), labels=("a", "b", "c"), each="a")
