"""Slurm's batch script, with commands of Slurm that only record their calls."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch import job, logs, records
from launch.job import Record
from launch.kinds.slurm import Config
from launch.submission import checks, submit
from samestep.errors import ConfigError, LaunchError, fix_of
from tests.failing_files import each_failure
from tests.integration.commands import Samestep
from tests.waiting import until


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, whose `srun` exits with the number in the file `code`."""
    (tmp_path / "slurm.yaml").write_text("kind: slurm\ncode: installed\n")
    (tmp_path / "run.yaml").write_text("output: run\nmodel: {kind: bert}\ntraining: {steps: 5}\n")
    commands = {
        "srun": 'exit "$(cat code)"',
        "scontrol": '[ "$1" = requeue ] && echo "$2" >> requeued || echo here',
        "sbatch": "echo 4711",
        "scancel": 'echo "$@" >> cancelled',
        "squeue": "echo '4711|RUNNING|node1|0|None'",
    }
    (tmp_path / "bin").mkdir()
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\ncd '{tmp_path}'\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "_ask", lambda arguments, variables: None)
    return tmp_path


def submitted(*settings: str) -> Record:
    return submit.submit(submit.prepare("slurm.yaml", "run.yaml", settings))


def run_job(record: Record, code: int, step: int | None = None) -> int:
    """What the script does when the run ends with a code, having begun at a step."""
    Path("code").write_text(str(code))
    if step is not None:
        with Path("run/starts.jsonl").open("a") as file:
            file.write(f'{{"step": {step}, "devices": "2 x CPU"}}\n')
    return subprocess.run(["bash", record.folder / "job.sh"], stderr=subprocess.DEVNULL).returncode


def requeued(project: Path) -> int:
    return (
        len((project / "requeued").read_text().splitlines())
        if (project / "requeued").exists()
        else 0
    )


@pytest.mark.parametrize(
    ("code", "again"), [(0, 0), (1, 0), (2, 0), (69, 1), (75, 1), (137, 1), (138, 1), (143, 1)]
)
def test_what_was_stopped_is_requeued(project: Path, code: int, again: int) -> None:
    record = submitted()
    assert run_job(record, code, step=0) == code
    assert requeued(project) == again
    assert (record.folder / "exit").exists() == (not again)


def test_a_run_that_comes_no_further_is_not_requeued_for_ever(project: Path) -> None:
    record = submitted()
    for step in (0, 10, 10, 10, 10, 20):
        run_job(record, 75, step)
    assert requeued(project) == 6
    for number in range(5):  # it has not even begun
        run_job(record, 75)
        assert requeued(project) == 6 + min(number + 1, 3)
    assert logs.state_of_ended(record.folder).word == "stopped"


def test_cancelled_runs_are_told_first_and_ended_if_asked_twice(
    project: Path, samestep: Samestep
) -> None:
    record = submitted()
    assert samestep("cancel", "4711").code == 0
    assert (project / "cancelled").read_text() == "--signal=USR1 4711\n"
    assert logs.state_of_ended(record.folder).word == "cancelled"
    samestep("cancel", "4711")
    assert (project / "cancelled").read_text() == "--signal=USR1 4711\n4711\n"
    assert run_job(record, 0) == 75  # it does not begin
    assert not (record.folder / job.EXIT).exists()
    (project / "bin" / "squeue").write_text("#!/bin/sh\n")
    assert "4711 has ended already" in samestep("cancel", "4711").message


def test_cancelled_runs_are_not_requeued(project: Path) -> None:
    record = submitted()
    (project / "bin" / "srun").write_text(f"#!/bin/bash\ntouch '{record.folder}/cancel'\nexit 75\n")
    assert run_job(record, 75) == 75
    assert requeued(project) == 0
    assert logs.state_of_ended(record.folder).word == "stopped"


def test_a_cancellation_that_failed_was_none(project: Path, samestep: Samestep) -> None:
    record = submitted()
    (project / "bin" / "scancel").write_text(
        "#!/bin/sh\necho 'scancel: error: Connection refused' >&2; exit 1\n"
    )
    assert "controller cannot be reached" in samestep("cancel", "4711").message
    assert not (record.folder / job.CANCEL).exists()
    (record.folder / job.CANCEL).touch()  # an earlier one stays
    samestep("cancel", "4711")
    assert (record.folder / job.CANCEL).exists()


def test_a_set_up_that_fails_ends_the_job(project: Path) -> None:
    record = submitted("cluster.environment.setup=[cat nothing]")
    assert run_job(record, 0) == 1
    assert "exit code 1" in logs.state_of_ended(record.folder).detail


def test_a_job_that_is_killed_while_it_is_set_up_has_not_succeeded(project: Path) -> None:
    record = submitted("cluster.environment.setup=['touch begun; sleep 60 & wait']")
    with subprocess.Popen(["bash", record.folder / "job.sh"], start_new_session=True) as process:
        until((project / "begun").exists, 20)
        os.killpg(process.pid, signal.SIGTERM)
    assert logs.state_of_ended(record.folder).word == "failed"


def test_shells_that_end_upon_errors_requeue_all_the_same(project: Path) -> None:
    record = submitted("cluster.environment.setup=[set -euo pipefail]")
    assert run_job(record, 75) == 75
    assert requeued(project) == 1


def test_an_array_is_done_when_all_of_it_is(project: Path, samestep: Samestep) -> None:
    (project / "data.yaml").write_text("output: built\nsource: {kind: jsonl, paths: [x]}\n")
    record = submit.submit(submit.prepare("slurm.yaml", "data.yaml", [], tasks=3))
    (project / "bin" / "squeue").write_text("#!/bin/sh\n")
    words = []
    for task in (1, 2, 3):
        (record.folder / f"exit-{task}").write_text("0\n")
        words.append(Config().states([record])[record.folder].word)
    assert words == ["gone", "gone", "done"]
    (record.folder / "exit-2").write_text("1\n")
    assert Config().states([record])[record.folder].word == "failed"


def test_weights_that_a_job_before_is_to_make(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(checks, "_ask", lambda arguments, _: asked.append(arguments))
    for options in ("[]", "[--dependency=afterok:1]"):
        checks.require(
            submit.prepare(
                "slurm.yaml", "run.yaml", [f"cluster.options={options}", "init_from=other"]
            )
        )
    assert ["init_from=null" in arguments for arguments in asked] == [False, True]
    Path("task.yaml").write_text(
        "base: run.yaml\nmodel: null\n"
    )  # the weights say which model it is
    checks.require(
        submit.prepare("slurm.yaml", "task.yaml", [f"cluster.options={options}", "init_from=other"])
    )
    assert "--elsewhere" in asked[-1]
    assert asked[-1].index("init_from=other") < asked[-1].index("init_from=of_the_job_before")


def test_every_number_of_nodes_must_fit() -> None:
    assert Config(nodes="2-4", gpus_per_node=8).devices == (16, 24, 32)


def test_ctrl_c_leaves_no_job_that_nobody_knows_of(project: Path) -> None:
    (project / "bin" / "sbatch").write_text(
        f"#!/bin/sh\ntouch '{project}/asked'\nsleep 1\necho 4711\n"
    )
    code = (
        "import sys; from launch.submission import checks; checks.require = lambda launch: None; "
        "from samestep.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "launch", "slurm.yaml", "run.yaml"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        until(lambda: (project / "asked").exists() or process.poll() is not None, 60)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "waiting for the cluster's answer" in said
    assert records.find("4711").output == str(project / "run")


def test_a_job_that_cannot_be_remembered_is_taken_back(project: Path) -> None:
    (project / "state").write_text("a file")
    with pytest.raises(LaunchError, match="The job was canceled"):
        submitted()
    assert (project / "cancelled").exists()
    assert not (project / "run").exists()


def test_a_job_is_recorded_or_taken_back_on_a_failing_disk(project: Path) -> None:
    """No line of another job is torn, and the same command then submits it."""
    submitted("output=other")

    def check(what: str, error: OSError, raised: Exception | None) -> None:
        if raised is not None:
            assert isinstance(raised, LaunchError), what
            assert fix_of(error) in str(raised), what
            assert (project / "cancelled").exists(), what
            assert not (project / "run").exists(), what
            (project / "cancelled").unlink()
            submitted()
        outputs = [Path(record.output).name for record in records.newest_first()]
        assert outputs == ["run", "other"], what
        shutil.rmtree(project / "run")

    assert each_failure(project / "state", submitted, check) >= 3


def test_one_job_for_one_output(project: Path) -> None:
    """However it is written, and whatever kind of cluster has it."""
    submitted("output=runs/a")
    (project / "local.yaml").write_text("kind: local\ncode: installed\n")
    for output in ("runs/a", "runs/b/../a", str(project / "runs" / "a")):
        with pytest.raises(LaunchError, match=r"job 4711 .running. works on"):
            checks.require(submit.prepare("local.yaml", "run.yaml", [f"output={output}"]))
    checks.require(submit.prepare("local.yaml", "run.yaml", ["output=runs/b"]))


def test_a_job_whose_cluster_cannot_be_asked(project: Path) -> None:
    """Its exit code says whether it has ended; without one, nobody knows."""
    record = submitted("output=runs/a", "cluster.requeue=false")
    (project / "local.yaml").write_text("kind: local\ncode: installed\n")
    (project / "bin" / "squeue").write_text("#!/bin/sh\necho 'squeue: error: no' >&2; exit 1\n")
    launch = submit.prepare("local.yaml", "run.yaml", ["output=runs/a"])
    unknown = r"job 4711 still works on runs/a cannot be asked.*squeue: no.*remove /.*/001"
    with pytest.raises(LaunchError, match=unknown):
        checks.require(launch)
    (record.folder / job.EXIT).write_text("75\n")
    checks.require(launch)
    # Slurm itself may have requeued the job, which then waits.
    script = (record.folder / job.SCRIPT).read_text()
    (record.folder / job.SCRIPT).write_text(script.replace("--no-requeue", "--requeue"))
    with pytest.raises(LaunchError, match=unknown):
        checks.require(launch)
    (record.folder / job.CANCEL).touch()
    checks.require(launch)
    (record.folder / job.CANCEL).unlink()
    (record.folder / job.EXIT).write_text("1\n")
    checks.require(launch)
    (record.folder / job.EXIT).write_text("75\n")
    (record.folder / job.SCRIPT).write_text(script)
    # The next segment continues a run that was stopped, and nothing is left for it otherwise.
    segmented = replace(record, about={**record.about, "segments": "4711 4712"})
    with pytest.raises(LaunchError, match="squeue: no"):
        Config().states([segmented])
    (record.folder / job.EXIT).write_text("0\n")
    assert Config().states([segmented])[segmented.folder].word == "done"


def test_a_job_of_another_cluster_with_the_same_home(project: Path, samestep: Samestep) -> None:
    """The queue here does not know it, and may have another job of its number."""

    def be_on(cluster: str, *jobs: str) -> None:
        name = f"SLURM_VERSION           = 25.05\nClusterName             = {cluster}\n"
        queue = "".join(f"{job}|RUNNING|node1|0|None\n" for job in jobs)
        for command, text in (("scontrol", name), ("squeue", queue)):
            (project / "bin" / command).write_text(f"#!/bin/sh\ncat <<'.'\n{text}.\n")

    be_on("east")
    east = submitted("output=runs/a")
    be_on("west", "4711")
    west = submitted("output=runs/b")
    older = replace(west, folder=east.folder, about={"segments": "4712", "tasks": "1"})
    assert [record.about["cluster"] for record in (east, west)] == ["east", "west"]
    states = {line.split()[-1]: line for line in samestep("jobs").out.splitlines()}
    assert " on east " in states["runs/a"]
    assert " running " in states["runs/b"]
    assert Config().states([older])[older.folder].word == "gone"
    with pytest.raises(LaunchError, match=r"job 4711 .on east. works on runs/a already"):
        checks.require(submit.prepare("slurm.yaml", "run.yaml", ["output=runs/a"]))
    result = samestep("cancel", "runs/a")
    assert "submitted to the cluster east, and this machine is on west" in result.message
    (east.folder / job.EXIT).write_text("0\n")
    assert Config().states([east])[east.folder].word == "done"
    checks.require(submit.prepare("slurm.yaml", "run.yaml", ["output=runs/a"]))
    be_on("east", "4711")
    assert Config().states([east])[east.folder].word == "running"


def test_code_that_would_hide_this_program(project: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], check=True)
    (project / "trainer.py").touch()
    with pytest.raises(ConfigError, match=r"has a trainer of its own.*cluster.code=installed"):
        submit.prepare("slurm.yaml", "run.yaml", ["cluster.code=snapshot"])
    submit.prepare("slurm.yaml", "run.yaml", [])


def test_a_check_that_was_killed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text("#!/bin/bash\nkill -9 $$\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError, match=r"SIGKILL.*too little memory.*`samestep config x.yaml`"):
        checks._ask(["config", "x.yaml"], {})


@pytest.mark.parametrize(
    "option", ["--nodes=3", "--output=x", "--clusters=other", "--signal=B:TERM"]
)
def test_options_that_are_the_launchers(option: str) -> None:
    with pytest.raises(ConfigError, match="would undo what samestep launch sets"):
        Config(options=(option,))


def test_a_limit_that_leaves_no_time_to_train(project: Path) -> None:
    with pytest.raises(ConfigError, match="time 5m is too short: 180 s before its end"):
        submit.prepare("slurm.yaml", "run.yaml", ["cluster.time=5m"])
    submit.prepare("slurm.yaml", "run.yaml", ["cluster.time=6m"])


def test_a_piece_of_a_log_may_end_within_a_character(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_CHUNK", 3)
    (project / "job.log").write_text("zwölf Züge\n")
    assert "".join(logs.read(project, lambda: False)) == "zwölf Züge\n"
