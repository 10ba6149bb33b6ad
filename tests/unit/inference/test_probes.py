"""Files of cloze probes."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.inference.candidates import read_probes


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    text = "one\u2028two [MASK]"  # a line separator, which str.splitlines takes for an end
    row = {"text": text, "candidates": ["is", "are"], "label": "is"}
    file = tmp_path / "probes.jsonl"
    file.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert [probe.text for probe in read_probes(file)] == [text]
