"""The first lines of pages of measurements say what the rows below them say."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conformance.matrix import render

DOCS = Path(__file__).parents[3] / "docs"


def test_conclusions_of_benchmarks_are_in_the_rows():
    lines = (DOCS / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    numbers = re.findall(r"\d+\.\d+|\d+ %", "\n".join(lines[:10]))
    below = re.findall(r"\d+\.\d+|\d+ %", "\n".join(lines[10:]))
    assert len(numbers) > 10
    assert [number for number in numbers if number not in below] == []


def test_the_page_of_conformance_is_as_its_command_writes_it():
    """But for the date and the machine, in its last line."""
    page = (DOCS / "conformance.md").read_text(encoding="utf-8")
    row = r"^\| `(\w+)` \| (\d+) \| ([\w-]+) \| (\d+) of (\d+) \| (\S+) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert all(agree == count for *_, agree, count, _ in rows)
    worst = {
        (task, int(size), strategy): [float(largest)] * int(count)
        for task, size, strategy, _, count, largest in rows
    }
    ((ties, samples),) = re.findall(r"apart\. (\d+) of ([\d,]+) did\.", page)
    written = render(worst, int(ties), int(samples.replace(",", "")))
    assert written.splitlines()[:-1] == page.splitlines()[:-1]
    cases = sum(map(len, worst.values()))
    assert f"**{cases} of {cases} cases" in "".join(written.splitlines()[:10])
