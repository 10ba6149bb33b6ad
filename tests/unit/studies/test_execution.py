"""How jobs are executed, and what happens to the others when one of them fails."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from samestep.errors import DataError
from tests.waiting import until
from trainer.studies import execution
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

    jobs_run = Execution[Job, str]([{}], work, lambda job, result: None)
    problems = jobs_run.run(jobs)
    assert problems[0] == message
    assert problems[1].startswith("four was not started")
    assert done == ["one", "three"]
    assert str(error) not in logged["one"]
    assert str(error) in logged["three"]


def test_the_logs_of_running_jobs_are_quoted_while_none_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run may take hours, and nothing else says that it goes on."""
    monkeypatch.setattr(execution, "_QUIET", 0.01)
    (tmp_path / "log.txt").write_text("loading\nstep 10/150\n")

    def work(job: Job, slot: Slot) -> str:
        until(lambda: "step 10/150" in caplog.text)
        return job.digest

    with caplog.at_level("INFO"):
        assert (
            Execution[Job, str]([{}], work, lambda job, result: None).run([Job("one", tmp_path)])
            == []
        )
    assert f"{tmp_path}: step 10/150" in caplog.messages
    assert "loading" not in caplog.text
