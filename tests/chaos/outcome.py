"""What a fault costs a run, seen from outside in what the run writes."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.chaos.runs import moments
from tests.integration.commands import Process, Result
from trainer.inspect.audit.batches import Run
from trainer.inspect.audit.verify import verify
from trainer.monitoring.jsonl import read_rows


@dataclass(frozen=True)
class Outcome:
    """What a fault came to.

    Attributes:
        fault: its name.
        detected: seconds after it, when the run first said so; None if it has no need to.
        recovered: seconds after it, when a new step was done, after the last start of the run.
        redone: steps that were taken again.
        excluded: examples that the run passed over, by name, in its ledger.
        lost, repeated: examples that were, by the ledger.
        goodput: the share of the time from the first step to the last that went into steps that
            stand.
    """

    fault: str
    detected: float | None
    recovered: float
    redone: int
    excluded: int
    lost: int
    repeated: int
    goodput: float


class Observer:
    """Follows a run through a fault.

    Args:
        fault: its name.
        run: the run's folder.
        sign: a pattern of what the run says when it has noticed; None if it has no need to.

    Attributes:
        rows: the time and number of each step that was seen, taken again or not.
    """

    def __init__(self, fault: str, run: Path, sign: str | None) -> None:
        self.fault, self.run, self._sign = fault, run, sign
        self.rows: set[tuple[float, int]] = set()
        self._struck: float | None = None
        self._noticed: float | None = None

    def reach(self, process: Process, step: int) -> None:
        """Returns when the run has taken a step."""
        self.until(process, lambda: any(taken >= step for _, taken in self.rows))
        assert process.popen.poll() is None, process.stderr.read_text()

    def end(self, process: Process) -> Result:
        """Returns when the command has ended."""
        self.until(process, lambda: False)
        return process.wait()

    def until(self, process: Process, condition: Callable[[], bool]) -> None:
        """Returns when a condition holds, or the command has ended."""
        for _ in moments(process):
            rows = read_rows(self.run / "metrics.jsonl")
            self.rows |= {(row["time"], row["step"]) for row in rows if "train/loss" in row}
            if (
                self._sign
                and not self._noticed
                and re.search(self._sign, process.stderr.read_text())
            ):
                self._noticed = time.time()
            if condition():
                return

    @property
    def last_time(self) -> float:
        """When the last step was taken."""
        return max((when for when, _ in self.rows), default=0.0)

    def strike(self, when: float | None = None) -> None:
        """The fault comes now, or came at a time in seconds since 1970."""
        self._struck = when or time.time()

    def when(self, step: int) -> float:
        """The time when the run had first taken a step."""
        return min(time for time, taken in self.rows if taken == step)

    def outcome(self) -> Outcome:
        """After the run's end. Fails unless its ledger proves what it was fed."""
        verdict = verify(Run.open(str(self.run), []))
        assert not verdict.problems, "\n".join(verdict.problems)
        assert self._struck is not None
        assert self._noticed or not self._sign, f"nothing said {self._sign!r}"
        passes = [(number, tally) for tally in verdict.tallies.values() for number in tally.passes]
        rows = sorted(self.rows)
        before = max((step for when, step in rows if when <= self._struck), default=0)
        started = max(start["time"] for start in read_rows(self.run / "starts.jsonl"))
        new = [when for when, step in rows if when > max(self._struck, started) and step > before]
        steps = len({step for _, step in rows})
        pace = statistics.median(b - a for (a, _), (b, _) in pairwise(rows))
        return Outcome(
            self.fault,
            detected=self._noticed - self._struck if self._noticed else None,
            recovered=new[0] - self._struck,
            redone=len(rows) - steps,
            excluded=sum(tally.passes[number].excluded for number, tally in passes),
            lost=sum(
                tally.passes[number].missing for number, tally in passes if tally.is_over(number)
            ),
            repeated=sum(tally.passes[number].repeated for number, tally in passes),
            goodput=min(1.0, pace * (steps - 1) / (rows[-1][0] - rows[0][0])),
        )
