"""Findings of checks, as `samestep doctor` prints them: a line each, with the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.table import Table
from rich.text import Text

from samestep.errors import SamestepError
from samestep.terminal import Console

State = Literal["ok", "warning", "failed"]

_STYLES: dict[State, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        subject: the thing that was checked.
        state: whether a run can rely on it.
        found: the observation.
        fix: advice; empty if nothing needs to be done.
    """

    subject: str
    state: State
    found: str
    fix: str = ""


Check: TypeAlias = tuple[str, Callable[[], Iterator[Finding]]]
"""The subject of a check, and the function that runs it."""


def tried(subject: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yields the findings of a check; an exception in it is a finding, too."""
    try:
        yield from check()
    # Whatever a driver or an optional package raises: the other checks must still run.
    except Exception as error:
        prefix = "" if isinstance(error, SamestepError) else f"{type(error).__name__}: "
        yield Finding(subject, "failed", f"{prefix}{error}")


def report(findings: Iterable[Finding], console: Console) -> bool:
    """Prints a table of findings; returns whether a run can go ahead."""
    table, sound = Table(show_header=False, box=None, padding=(0, 2, 0, 0)), True
    with console.status("running the checks"):
        for finding in findings:
            sound = sound and finding.state != "failed"
            text = Text(finding.found)
            if finding.fix:
                text.append(f"\n→ {finding.fix}", style="dim" if finding.state == "ok" else "bold")
            table.add_row(Text(finding.state, style=_STYLES[finding.state]), finding.subject, text)
    console.print(table)
    return sound
