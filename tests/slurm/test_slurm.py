"""`samestep launch` on a real Slurm of three virtual nodes.

Limits, dead nodes, arrays, what is refused.
"""

from __future__ import annotations

import filecmp
import json
import re
import sys
import time
from pathlib import Path

import pytest

from launch import records
from tests import waiting
from tests.integration.commands import Samestep, losses
from tests.slurm.cluster import NODES, Slurm
from tests.slurm.conftest import Launched

pytestmark = pytest.mark.timeout(600)
STEPS = 150
LONG = ("objective=own.paced", f"training.steps={STEPS}", "checkpoint.every=5")
STRANGE = 'it\'s a "run" of 50 %j $(touch pwned)\nand more'


def wait_for_step(slurm: Slurm, job: str, run: Path, step: int) -> None:
    until = time.monotonic() + 200
    while max(losses(run), default=0) < step:
        assert time.monotonic() < until, log_of(run)
        assert slurm.job(job)["JobState"] in ("PENDING", "RUNNING", "COMPLETING"), log_of(run)
        time.sleep(0.1)


def reach_limit(slurm: Slurm, job: str, run: Path) -> None:
    """Lowers the job's limit, so that its signal is due, and returns when the run has stopped."""
    days_hours, minutes, _ = slurm.job(job)["RunTime"].rsplit(":", 2)
    assert days_hours == "00"
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={int(minutes) + 3}")
    until = time.monotonic() + 120
    while "stopped      saved step" not in log_of(run):
        assert time.monotonic() < until, log_of(run)
        time.sleep(0.1)
    if slurm.job(job)["JobState"] != "FAILED":  # as a segment has
        slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    Path("slow").unlink()


def log_of(run: Path) -> str:
    return (run / "launch" / "001" / "job.log").read_text()


def starts(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]


def nodes(run: Path) -> list[str]:
    """How many nodes, of one process each, the run has had at each start."""
    return [str(start["devices"]).split()[0] for start in starts(run)]


@pytest.fixture(scope="module")
def undisturbed(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same run in one process."""
    from samestep.cli import main

    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(["train", experiment_file, f"output={run}", f"training.steps={STEPS}"]) == 0
    return losses(run)


def test_two_nodes_the_time_limit_and_on_from_there(
    slurm: Slurm,
    launched: Launched,
    project: Path,
    samestep: Samestep,
    undisturbed: dict[int, float],
) -> None:
    """The signal before the limit, exit 75, a requeue, the end.

    One run, in a folder of a name that means mischief.
    """
    run = project / STRANGE
    wandb = "tracking.wandb={project: test}"
    job = launched(f"output={json.dumps(str(run))}", *LONG, wandb, "cluster.time=1h")
    wait_for_step(slurm, job, run, 3)
    reach_limit(slurm, job, run)
    slurm.wait_for(job, "COMPLETED", seconds=300)
    text = log_of(run)
    assert "stopping     on SIGUSR1" in text
    assert text.count("2 x CPU") == len(starts(run)) >= 2
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)
    assert (
        int(slurm.job(job)["Restarts"]) >= len(starts(run)) - 1
    )  # the signal may come before the run has begun
    assert {start["job"] for start in starts(run)} == {job}
    assert (run / "launch" / "001" / "exit").read_text() == "0\n"
    assert sorted(path.name for path in (run / "launch" / "001" / "logs").iterdir()) == [
        "rank-00000.log",
        "rank-00001.log",
    ]
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1
    assert not list(project.rglob("pwned"))
    assert " done " in samestep("jobs").out
    assert samestep("logs", job).out == text


def test_a_dead_node_and_on_with_those_that_are_left(
    slurm: Slurm, launched: Launched, project: Path, undisturbed: dict[int, float]
) -> None:
    """Its power fails: the job is requeued on the two other nodes, and goes on from the newest
    checkpoint.
    """
    run = project / "run"
    job = launched(f"output={run}", *LONG, "cluster.nodes=2-3", "tracking.wandb={project: test}")
    wait_for_step(slurm, job, run, 12)
    waiting.until(lambda: "3" in nodes(run))  # the run begins without one that is late
    slurm.kill_node(NODES[2])
    Path("slow").unlink()
    try:
        slurm.wait_for(job, "COMPLETED", seconds=300)
    finally:
        slurm.start_node(NODES[2])
    assert nodes(run)[-1] == "2"
    assert int(str(starts(run)[-1]["step"])) >= 10
    assert losses(run) == pytest.approx(undisturbed, rel=1e-5)
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1


def test_cancelled_with_a_checkpoint(
    slurm: Slurm, launched: Launched, project: Path, samestep: Samestep
) -> None:
    """And what runs is the code of the moment of submission."""
    run = project / "run"
    job = launched("output=run", *LONG)
    (project / "own" / "paced.py").write_text(
        "raise SystemExit('edited while the job was waiting')"
    )
    wait_for_step(slurm, job, run, 2)
    assert records.find(job).about["cluster"] == "test"
    assert " running " in samestep("jobs").out
    again = samestep(
        "launch", "cluster.yaml", run / "launch" / "001" / "config.yaml", "objective=mlm"
    )
    assert f"job {job} (running) works on run already" in again.message
    assert samestep("cancel", job).code == 0
    slurm.wait_for(job, "FAILED")  # which any exit code but 0 is to Slurm
    step = max(losses(run))
    assert (run / "checkpoints" / f"step-{step:08d}" / "COMMITTED").exists()
    assert slurm.job(job)["Restarts"] == "0"
    assert " stopped " in samestep("jobs").out


def test_cancelled_before_it_has_begun(
    slurm: Slurm, launched: Launched, project: Path, samestep: Samestep
) -> None:
    job = launched("output=run", "cluster.options=[--begin=now+1hour]")
    assert samestep("cancel", job).code == 0
    slurm.wait_for(job, "CANCELLED")
    assert " cancelled " in samestep("jobs").out


def test_segments_where_requeuing_is_not_allowed(
    slurm: Slurm, launched: Launched, project: Path
) -> None:
    """The second job goes on where the first was stopped, and takes back those after it."""
    run = project / "run"
    job = launched("output=run", *LONG, "cluster.time=1h", "cluster.segments=4")
    wait_for_step(slurm, job, run, 3)
    reach_limit(slurm, job, run)
    record = json.loads((project.parent / "state" / "samestep" / "jobs.jsonl").read_text())
    jobs = record["about"]["segments"].split()
    assert jobs[0] == job
    assert len(jobs) == 4
    # A job that has ended is COMPLETING for a while, and its dependents go ahead in the meantime.
    for each, state in zip(jobs, ["FAILED", "COMPLETED", "CANCELLED", "CANCELLED"], strict=True):
        slurm.wait_for(each, state, seconds=300)
    assert max(losses(run)) == STEPS


def test_a_dataset_built_by_an_array(
    slurm: Slurm, launched: Launched, project: Path, samestep: Samestep, dataset_folder: Path
) -> None:
    lines = [
        json.dumps({"text": f"{number} bottles of beer on the wall. " * 20})
        for number in range(600)
    ]
    (project / "texts.jsonl").write_text("\n".join(lines))
    (project / "data.yaml").write_text(
        "source: {kind: jsonl, paths: [texts.jsonl]}\ntokenizer: {path: "
        f"{dataset_folder / 'tokenizer'}}}\n"
        "output: built\nshard_bytes: 20000\nheldout_fraction: 0.1\nworkers: 1\n"
    )
    job = launched("--tasks", "3", file="data.yaml")
    until = time.monotonic() + 200
    while (
        not (project / "built" / "manifest.json").exists()
        or slurm.run("squeue", "--noheader").strip()
    ):
        assert time.monotonic() < until, [
            log.read_text() for log in project.glob("built.launch/*/*.log")
        ]
        time.sleep(0.2)
    assert "built" in samestep("logs", job).out
    assert " done " in samestep("jobs").out
    assert samestep("data", "build", "data.yaml", "output=alone").code == 0
    names = sorted(path.relative_to("alone") for path in Path("alone").rglob("*") if path.is_file())
    same, different, absent = filecmp.cmpfiles("alone", "built", map(str, names), shallow=False)
    assert not different
    assert not absent
    assert len(same) > 3


APPTAINER = """#!/bin/bash
echo "$@" >> '{folder}/apptainer'
while [ "$1" != samestep.sif ]; do shift; done
shift
exec "$@"
"""


def test_apptainer_on_each_node(slurm: Slurm, launched: Launched, project: Path) -> None:
    """A program of that name, which records its arguments and runs the command without an image."""
    tools, own = project / "bin", Path(sys.executable).parent
    tools.mkdir()
    (tools / "apptainer").write_text(APPTAINER.format(folder=project))
    (tools / "apptainer").chmod(0o755)
    setup = json.dumps([f"export PATH={tools}:{own}:$PATH"])
    container = "{kind: apptainer, image: samestep.sif, mounts: [/tmp]}"
    settings = (f"cluster.container={container}", f"cluster.environment.setup={setup}")
    (project / "slow").unlink()
    job = launched("output=run", *settings, "cluster.exclusive=true")
    slurm.wait_for(job, "COMPLETED", seconds=300)
    lines = (project / "apptainer").read_text().splitlines()
    assert len(lines) == 2  # one on each node
    assert all(
        f"--bind {project}:{project},{project}/run:{project}/run,/tmp" in each for each in lines
    )
    assert slurm.job(job)["MinMemoryNode"] == "0"


def test_a_dry_run_asks_slurm(
    slurm: Slurm, project: Path, samestep: Samestep, experiment_file: str, dataset_folder: Path
) -> None:
    """For a job of a range of nodes, for segments that wait for each other, and for an array."""
    slurm.wait_until_idle()
    (project / "texts.jsonl").write_text(json.dumps({"text": "a"}))
    (project / "data.yaml").write_text(
        "source: {kind: jsonl, paths: [texts.jsonl]}\noutput: built\n"
        f"tokenizer: {{path: {dataset_folder / 'tokenizer'}}}\n"
    )
    run = (experiment_file, "output=run", "cluster.exclusive=true")
    for more in (
        [*run, "cluster.nodes=2-3"],
        [*run, "cluster.segments=3"],
        ["data.yaml", "--tasks", "3"],
    ):
        result = samestep("launch", "cluster.yaml", *more, "--dry-run")
        assert result.code == 0, result.err
        assert re.search(r"ok +cluster: Job \d+ to start at .* on nodes 127", result.out)
    refused = samestep("launch", "cluster.yaml", *run, "cluster.partition=nope", "--dry-run")
    assert refused.code == 1
    assert "invalid partition" in refused.message.lower()
    assert not slurm.run("squeue", "--noheader").strip()
    assert not (project / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["cluster.partition=nope"], "invalid partition.*sinfo.*cluster.partition"),
        (["cluster.gpus_per_node=4", "accelerator=cuda"], "generic resource.*no such GPUs"),
        (["cluster.memory=900G"], "lower cluster.gpus_per_node or cluster.nodes"),
        (["cluster.nodes=20-30"], "global_batch_size 10 is less than the 20"),
        (["cluster.partition=nope", "cluster.segments=3"], "invalid partition"),
        (["data.path=nowhere"], "nowhere holds no finished dataset"),
        (["cluster.time=24:00:00"], "time is 86400. Write it as 2d"),
    ],
)
def test_what_is_refused_leaves_nothing(
    slurm: Slurm,
    project: Path,
    samestep: Samestep,
    experiment_file: str,
    settings: list[str],
    message: str,
) -> None:
    result = samestep("launch", "cluster.yaml", experiment_file, "output=run", *settings)
    assert result.code in (1, 2)
    assert re.search(message, result.message, re.IGNORECASE), result.message
    assert not (project / "run").exists()
    assert not slurm.run("squeue", "--noheader").strip()
    assert "no job" in samestep("jobs").out


def test_a_job_of_somebody_else(slurm: Slurm, project: Path, samestep: Samestep) -> None:
    (project / "job.sh").write_text("#!/bin/sh\nsleep 30\n")
    other = slurm.run(
        "sbatch", "--parsable", "--uid=nobody", "--output=/dev/null", "job.sh"
    ).strip()
    assert (
        f"no job {other} has been submitted from here by you" in samestep("cancel", other).message
    )
    slurm.run("scancel", other)


def test_slurm_does_not_answer(
    slurm: Slurm,
    project: Path,
    samestep: Samestep,
    experiment_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (project / "slurm.conf").write_text(
        "ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\n"
    )
    monkeypatch.setenv("SLURM_CONF", str(project / "slurm.conf"))
    result = samestep("launch", "cluster.yaml", experiment_file, "output=run")
    assert "Slurm's controller cannot be reached" in result.message
    assert not (project / "run").exists()
