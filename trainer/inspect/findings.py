"""What checks have found, as `samestep doctor` prints it: a line each, with the fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

State = Literal["ok", "warning", "failed"]

_STYLES: dict[State, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        subject: what was looked at.
        state: whether a run can rely on it.
        found: what was seen.
        fix: what to do about it; empty where there is nothing to do.
    """

    subject: str
    state: State
    found: str
    fix: str = ""


def report(findings: Iterable[Finding], console: Console) -> bool:
    """Prints a table of findings; returns whether a run can go ahead."""
    table, states = Table(show_header=False, box=None, padding=(0, 2, 0, 0)), []
    with console.status("trying things out"):
        for finding in findings:
            states.append(finding.state)
            text = Text(finding.found)
            if finding.fix:
                text.append(f"\n→ {finding.fix}", style="dim" if finding.state == "ok" else "bold")
            table.add_row(Text(finding.state, style=_STYLES[finding.state]), finding.subject, text)
    console.print(table)
    return "failed" not in states
