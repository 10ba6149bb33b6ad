"""What checks have found, as `samestep doctor` prints it: a line each, with the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.errors import SamestepError

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


Check: TypeAlias = tuple[str, Callable[[], Iterator[Finding]]]
"""The subject of a check, and the function that does it."""


def tried(subject: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What a check finds; one that breaks is a finding, too."""
    try:
        yield from check()
    except SamestepError as error:
        yield Finding(subject, "failed", str(error))
    except Exception as error:
        yield Finding(subject, "failed", f"{type(error).__name__}: {error}")


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
