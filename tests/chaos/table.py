"""`python -m tests.chaos.table`.

Lets every fault happen, and writes what each has cost to docs/reliability.md.
"""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path("docs/reliability.md")
BEGIN, END = "<!-- begin: written by make chaos -->\n", "<!-- end -->"
_STEP_SECONDS = "0.3"
_HEAD = """\
| fault | noticed after, s | next new step after, s | steps redone | examples lost | repeated | skipped | goodput |
|---|---|---|---|---|---|---|---|
"""  # noqa: E501


class Outcomes:
    """A plug-in of pytest that collects what tests record as `outcome`."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.found += [value for name, value in report.user_properties if name == "outcome"]


def main() -> int:
    os.environ["CHAOS_STEP_SECONDS"] = _STEP_SECONDS
    outcomes = Outcomes()
    code = pytest.main(
        ["tests/chaos/test_faults.py", "-m", "chaos or not chaos", "-p", "no:cacheprovider"],
        [outcomes],
    )
    if code == pytest.ExitCode.OK:
        page = PAGE.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(
            before + BEGIN + render(outcomes.found) + END + rest.partition(END)[2], encoding="utf-8"
        )
        sys.stdout.write(f"{len(outcomes.found)} faults, all got over; see {PAGE}\n")
    return int(code)


def render(outcomes: list[dict[str, Any]]) -> str:
    """The table, and what it was measured on."""
    rows = "".join(
        f"| {each['fault']} | {_seconds(each['detected'])} | {_seconds(each['recovered'])} | "
        f"{each['redone']} | "
        f"{each['lost']} | {each['repeated']} | {each['excluded']} | {each['goodput']:.0%} |\n"
        for each in outcomes
    )
    return (
        f"{_HEAD}{rows}\n{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} CPU cores "
        f"({platform.machine()}), load "
        f"{os.getloadavg()[2]:.0f}, torch {torch.__version__}, Python {platform.python_version()}; "
        "24 steps of "
        f"{_STEP_SECONDS} s.\n"
    )


def _seconds(value: float | None) -> str:
    return "no need" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
