"""How jobs are executed, and what happens to the others when one of them fails."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from samestep.errors import DataError
from trainer.studies.execution import Execution, Slot


@dataclass(frozen=True)
class Job:
    digest: str
    folder: Path
    after: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("error", "message"),
    [(DataError("no rows"), "no rows"), (ValueError("none"), "two: ValueError: none")],
)
def test_the_others_run_on_if_one_fails(
    error: Exception, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if it fails by a defect, which has no message of its own. The log says so at once."""
    jobs = [Job(name, Path(name)) for name in ("one", "two", "three")]
    jobs.append(Job("four", Path("four"), ("two",)))
    done = []
    logged: dict[str, str] = {}

    def work(job: Job, slot: Slot) -> str:
        if job.digest == "two":
            raise error
        logged[job.digest] = caplog.text
        done.append(job.digest)
        return job.digest

    execution = Execution[Job, str]([{}], work, lambda job, result: None)
    problems = execution.run(jobs)
    assert problems[0] == message
    assert problems[1].startswith("four was not started")
    assert done == ["one", "three"]
    assert str(error) not in logged["one"]
    assert str(error) in logged["three"]
