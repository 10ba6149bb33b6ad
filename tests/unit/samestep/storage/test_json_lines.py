"""Files of JSON Lines are whole under their names, or not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline.sources.files import read_records
from data_pipeline.sources.kinds.jsonl import lines, load_json
from samestep.storage import json_lines


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst"])
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    rows = [
        {"row": number, "text": "é\n東京"} for number in range(5000)
    ]  # more than are compressed together
    json_lines.write(tmp_path / name, rows)
    assert [
        load_json(record.data) for record in read_records((str(tmp_path / name),), lines)
    ] == rows


def test_half_of_a_surrogate_pair_is_written_with_an_escape(tmp_path: Path) -> None:
    """As a text that was cut in the middle of an emoji."""
    rows = [{"text": "é"}, {"text": "é \ud83d"}, {"\udc4d": 1}]
    json_lines.write(tmp_path / "rows.jsonl", rows)
    content = (tmp_path / "rows.jsonl").read_text(encoding="utf-8")
    assert content.splitlines()[:2] == ['{"text": "é"}', r'{"text": "\u00e9 \ud83d"}']
    assert [json.loads(line) for line in content.splitlines()] == rows


def test_a_file_that_fails_does_not_appear(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, int]]:
        yield from ({"row": number} for number in range(5000))
        raise ValueError("no more rows")

    with pytest.raises(ValueError, match="no more rows"):
        json_lines.write(tmp_path / "rows.jsonl", rows())
    assert not any(tmp_path.iterdir())
