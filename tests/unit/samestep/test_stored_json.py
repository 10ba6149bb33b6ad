"""What `parse_json` takes and refuses, and where it says that the fault is."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from samestep.errors import ConfigError
from samestep.stored_json import Between, Count, JsonError, Measure, parse_json, read_json


@dataclass(frozen=True)
class Shard:
    name: str
    bytes: Count
    loss: Measure = 0.0
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("name is empty")


class Row(TypedDict):
    step: Count
    note: NotRequired[str | None]


class _Optional(TypedDict, total=False):
    state: str


class Named(_Optional):
    name: str


@dataclass(frozen=True)
class Index:
    shards: list[Shard]
    kind: Literal["text", "pairs"] = "text"
    part: tuple[int, float] = (0, 0.5)
    settings: dict[str, Any] | None = None
    threads: Annotated[int, Between(1, 8)] = 1


def test_values_of_their_types_are_decoded_and_unknown_keys_ignored() -> None:
    index = {
        "shards": [{"name": "a", "bytes": 2**63 - 1, "loss": float("nan"), "labels": ["x", "ä"]}],
        "kind": "pairs",
        "part": [-1, 2],
        "settings": {"list": [1, None, True, {"max_length": 10**30}], "lr": float("inf")},
        "written_by": "a newer version",
    }
    found = parse_json(json.dumps(index), Index)
    (shard,) = found.shards
    assert (shard.bytes, shard.labels, shard.loss != shard.loss) == (2**63 - 1, ("x", "ä"), True)
    assert (found.kind, found.part, found.settings) == ("pairs", (-1, 2), index["settings"])
    row = parse_json(b'\xef\xbb\xbf{"step": 1, "loss": 0.5}', Row)
    assert row == {"step": 1, "loss": 0.5}
    assert parse_json('{"name": "x"}', Named) == {"name": "x"}
    assert parse_json('{"a": 1.5, "b": "x"}', dict[str, float | str]) == {"a": 1.5, "b": "x"}


def _index(**shard: object) -> str:
    return json.dumps({"shards": [{"name": "a", "bytes": 1}, {"name": "b", "bytes": 1} | shard]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ('{"shards": [', "it is not JSON: Expecting value: line 1 column 13 (char 12)"),
        (b'{"shards": "\xff"}', "it is not UTF-8 text at byte 12"),
        ("\0\0\0", "it is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[" * 200_000, "it is nested in more than 100 levels"),
        ("9" * 5000, "it has an integer of thousands of digits"),
        ("[]", "it is [], not an object"),
        ("null", "it is None, not an object"),
        ("{}", "shards is missing"),
        ('{"shards": [], "shards": []}', "it has the key 'shards' twice in one object"),
        ('{"shards": 5}', "shards is 5, not a list"),
        (_index(bytes="x"), "shards[1].bytes is 'x', not an integer"),
        (_index(bytes=True), "shards[1].bytes is True, not an integer"),
        (_index(bytes=1.0), "shards[1].bytes is 1.0, not an integer"),
        (_index(bytes=-1), "shards[1].bytes is -1, not an integer from 0 to 9223372036854775807"),
        (_index(bytes=2**63), "not an integer from 0 to 9223372036854775807"),
        (_index(bytes=float("inf")), "shards[1].bytes is inf, not an integer"),
        (_index(loss="1"), "shards[1].loss is '1', not a number"),
        (_index(loss=10**400), "shards[1].loss is an integer of more than 64 bits"),
        (_index(labels=["x", 1]), "shards[1].labels[1] is 1, not a text"),
        (_index(name="\ud800"), "shards[1].name is '\\ud800', which is not valid Unicode"),
        (_index(name=""), "shards[1] is wrong: name is empty"),
        ('{"shards": [], "kind": "x"}', "kind is 'x', not 'text' or 'pairs'"),
        ('{"shards": [], "part": [1]}', "part is [1], not a list of 2"),
        ('{"shards": [], "part": [1, NaN]}', "part[1] is nan, not a finite number"),
        ('{"shards": [], "part": [1, 1e999]}', "part[1] is inf, not a finite number"),
        ('{"shards": [], "part": [1e999, 1]}', "part[0] is inf, not an integer"),
        ('{"shards": [], "threads": 9}', "threads is 9, not an integer from 1 to 8"),
        ('{"shards": [], "settings": 1}', "settings is 1, not an object or null"),
        (f'{{"shards": [], "settings": {{"a b": {"9" * 99}}}}}', "settings['a b'] is an integer"),
        ('{"shards": [], "settings": {"\\ud800": 1}}', "which is not valid Unicode"),
        (f'{{"shards": [], "settings": {{"a": {"[" * 300 + "]" * 300}}}}}', "in more than 100"),
        (b'{"shards": "' + b"x" * 1000 + b'"}', "it has 1014 bytes, more than 1000"),
    ],
)
def test_the_message_says_where_the_fault_is(content: bytes | str, message: str) -> None:
    limit = 1000 if b"more than 1000" in message.encode() else 2**20
    with pytest.raises(JsonError) as caught:
        parse_json(content, Index, limit)
    text = str(caught.value)
    assert message in text
    assert len(text) < 250
    assert text.isprintable()


def test_many_keys_of_which_one_is_there_twice_take_no_time() -> None:
    content = "{" + ",".join(f'"{number}":1' for number in range(100_000)) + ',"5":1}'
    start = time.process_time()
    with pytest.raises(JsonError, match="'5' twice"):
        parse_json(content, dict[str, int])
    assert time.process_time() - start < 10


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "meta.json"
    path.write_text('{"step": 5}')
    assert read_json(path, Row) == {"step": 5}
    with path.open("ab") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(OSError, match="more than 1000 bytes"):
        read_json(path, Row, limit=1000)
