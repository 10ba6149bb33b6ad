"""The rows that the demo fine-tunes on; `make demo` checks the rest itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import wrong_words


def read(file: Path) -> list[dict[str, list[str]]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.long
def test_each_row_has_one_wrong_word(tmp_path: Path) -> None:
    """No sentence is in both files, and another run writes equal files."""
    train, heldout = wrong_words.write_rows(tmp_path / "rows")
    wrong_words.write_rows(tmp_path / "again")
    sentences = []
    for name, rows in (("train", train), ("heldout", heldout)):
        file = tmp_path / "rows" / f"{name}.jsonl"
        assert file.read_bytes() == (tmp_path / "again" / f"{name}.jsonl").read_bytes()
        assert len(read(file)) == rows > 200
        for row in read(file):
            assert len(row["tokens"]) == len(row["tags"]) >= 5
            assert row["tags"].count("B-WRONG") == 1
            wrong = row["tags"].index("B-WRONG")
            sentences.append(tuple(row["tokens"][:wrong] + row["tokens"][wrong + 1 :]))
    assert len(set(sentences)) > 0.99 * len(sentences)
