"""The scripts of launch/scripts: what their generator writes, valid, and short enough to read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from launch.scripts import FOLDER, FORECASTS
from launch.scripts.__main__ import forecast, runs, texts
from samestep.config import read_tree
from tests.unit.launch.test_kubernetes import VERSIONS

TEXTS = texts()
SHELL = [name for name in TEXTS if name.endswith(".sh")]
MANIFESTS = [name for name in TEXTS if name.endswith(".yaml")]
REASON = "change launch/scripts/write_*.py, and run: python -m launch.scripts"


@pytest.mark.parametrize("name", TEXTS)
def test_each_script_is_what_its_generator_writes(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == TEXTS[name], REASON


def test_there_is_no_other_script() -> None:
    there = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("[!_]*/*")}
    assert there == set(TEXTS)


@pytest.mark.parametrize("name", SHELL)
def test_a_script_of_shell_is_short_and_valid(name: str) -> None:
    assert len(TEXTS[name].splitlines()) < 60
    assert all(len(line) <= 105 or "https://" in line for line in TEXTS[name].splitlines())
    # The script of a machine is a here-document, which shellcheck does not read.
    of_machine = TEXTS[name].partition("<<'END'\n")[2].partition("\nEND\n")[0]
    variables = "NAME='' STAGING='' OUTPUT='' PACKAGE='' ARGUMENTS=()"
    for text in [TEXTS[name], f"#!/bin/bash\n{variables}\n{of_machine}\n"][: 1 + bool(of_machine)]:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        # A file of the environment, which is not here.
        shellcheck = [Path(sys.executable).with_name("shellcheck"), "--exclude=SC1091", "-"]
        done = subprocess.run(shellcheck, input=text, capture_output=True, text=True)
        assert done.stdout == ""


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_what_its_schemas_say(name: str) -> None:
    *others, jobset = yaml.safe_load_all(TEXTS[name])
    (group,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", **group["template"]}
    pod = {"apiVersion": "v1", "kind": "Pod", **job["spec"]["template"]}
    for version in VERSIONS:
        for each in (*others, job, pod):
            kubernetes_validate.validate(each, version, strict=True)
    read = JobsetV1alpha2JobSet.from_dict(jobset)
    assert read is not None
    assert read.to_dict() == jobset
    first = others[0]
    assert first["kind"] == "ConfigMap"  # what a user changes comes first
    assert TEXTS[name].index("config.yaml") < TEXTS[name].index("kind: JobSet")
    config = yaml.safe_load(first["data"]["config.yaml"])
    assert read_tree(config["base"])


def test_the_settings_of_a_script_are_its_experiments(tmp_path: Path) -> None:
    """Variables of the environment replace them; nothing in them is run by the shell."""
    (tmp_path / "bin").mkdir()
    for name, text in {
        "srun": 'printf "%s\\n" "${@}" > arguments; exit "$CODE"',
        "scontrol": '[ "$1" = requeue ] && touch requeued || echo node-1',
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin" / "activate").write_text("")

    def submitted(code: int, **variables: str) -> tuple[int, list[str]]:
        environment = {
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "12345",
            "SLURM_JOB_NAME": "run",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_JOB_NODELIST": "node-[1-3]",
            "VENV": str(tmp_path),
            "CODE": str(code),
            **variables,
        }
        command = ["bash", FOLDER / "slurm" / "roberta_large.sh"]
        done = subprocess.run(command, cwd=tmp_path, env=environment)
        return done.returncode, (tmp_path / "arguments").read_text().splitlines()

    code, words = submitted(0)
    start = words.index("samestep")
    assert code == 0
    assert words[start:] == [
        *("samestep", "train", "configs/pretrain/roberta_large.yaml", "output=runs/roberta_large"),
        *("training.compile=true", "--elastic", "3", "--rendezvous", "node-1:22345"),
    ]
    strange = "a $(touch pwned) 'b'"
    _, words = submitted(0, OUTPUT=strange, DATA=strange, OVERRIDES="optimizer.lr=1e-3 a=`id`")
    assert words[start + 3 : start + 8] == [
        *(f"output={strange}", f"data.path={strange}"),
        *("training.compile=true", "optimizer.lr=1e-3", "a=`id`"),
    ]
    assert not list(tmp_path.rglob("pwned"))
    # A run that was stopped goes on, one that has failed does not, and none without progress.
    requeued = tmp_path / "requeued"
    assert submitted(1)[0] == 1
    assert not requeued.exists()

    def goes_on(code: int, step: int | None) -> bool:
        requeued.unlink(missing_ok=True)
        if step is not None:
            (tmp_path / "runs" / "roberta_large").mkdir(parents=True, exist_ok=True)
            with (tmp_path / "runs" / "roberta_large" / "starts.jsonl").open("a") as file:
                file.write(f'{{"step": {step}, "devices": "8 x GPU"}}\n')
        assert submitted(code)[0] == code
        return requeued.exists()

    assert [goes_on(69, None) for _ in range(5)] == [True] * 4 + [False]
    assert [goes_on(75, step) for step in (0, 100, 200, 300, 400, 500)] == [True] * 6
    assert [goes_on(137, 600) for _ in range(5)] == [True] * 4 + [False]


def test_each_script_has_a_forecast() -> None:
    known = json.loads(FORECASTS.read_text())
    assert set(known) == {run.key for run in runs().values()}
    for name, run in runs().items():
        cost = re.search(r"([\d.,]+) hours on (\d+) ", TEXTS[name].replace("\n# ", " "))
        assert cost is not None
        assert float(cost[1].replace(",", "")) == pytest.approx(known[run.key]["hours"], rel=0.06)
        assert int(cost[2]) == run.devices


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_forecast_is_what_plan_says() -> None:
    """Of the quickest one: `python -m launch.scripts --forecasts` makes all of them."""
    run = runs()["kubernetes/bert_base_v5e16.yaml"]
    assert forecast(run) == json.loads(FORECASTS.read_text())[run.key]
