"""What `samestep launch` renders, keeps and refuses, before any cluster is asked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch import records
from launch.environment import Environment
from launch.kinds.slurm import Config as Slurm
from launch.submission import submit
from samestep.config import decode, to_tree
from samestep.errors import ConfigError, LaunchError
from tests.integration.commands import Samestep

ROOT = Path(__file__).parents[3]
STRANGE = 'it\'s a "run" $(touch pwned) `touch pwned`\n; touch pwned & %j'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, with a cluster's file and an experiment's."""
    (tmp_path / "local.yaml").write_text("kind: local\n")
    (tmp_path / "slurm.yaml").write_text("kind: slurm\nnodes: 2-4\ngpus_per_node: 8\n")
    (tmp_path / "run.yaml").write_text("output: run\nmodel: {kind: bert}\ntraining: {steps: 5}\n")
    (tmp_path / "data.yaml").write_text("output: built\nsource: {kind: jsonl, paths: [x]}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def script(
    *overrides: str, cluster: str = "slurm.yaml", file: str = "run.yaml", tasks: int | None = None
) -> str:
    return submit.prepare(cluster, file, overrides, tasks).submission.files["job.sh"]


def options(*overrides: str, **more: str) -> list[str]:
    return [
        line.removeprefix("#SBATCH ")
        for line in script(*overrides, **more).splitlines()
        if "#SBATCH" in line
    ]


def test_rendering_imports_no_torch_and_writes_nothing(project: Path) -> None:
    code = (
        "import sys; from launch.submission import checks; from samestep.cli import main; "
        "checks._ask = lambda *_: None; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'fsspec', 'rich', 'tokenizers', 'wandb'} & set(sys.modules); "
        "sys.exit(code or ' '.join(heavy) or 0)"
    )
    before = sorted(project.iterdir())
    command = [
        sys.executable,
        "-c",
        code,
        "launch",
        "slurm.yaml",
        "run.yaml",
        "--render",
        "cluster.nodes=3",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == script("cluster.nodes=3")
    assert "#SBATCH --nodes=3\n" in done.stdout
    assert sorted(project.iterdir()) == before


@pytest.mark.parametrize(
    "name", sorted(path.name for path in (ROOT / "configs" / "launch").glob("*.yaml"))
)
def test_configurations_render(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    assert len((ROOT / "configs" / "launch" / name).read_text().splitlines()) < 40
    launch = submit.prepare(f"configs/launch/{name}", "configs/pretrain/bert_large.yaml", [])
    assert launch.submission.files
    assert all(launch.cluster.devices)
    assert decode(type(launch.cluster), to_tree(launch.cluster)) == launch.cluster


def test_plain_keys_belong_to_the_run_and_cluster_keys_to_the_cluster(project: Path) -> None:
    launch = submit.prepare(
        "slurm.yaml", "run.yaml", ["training.steps=7", "cluster.partition=a100"]
    )
    assert "steps: 7" in launch.job.config
    assert "partition" not in launch.job.config
    assert launch.arguments == ("run.yaml", "training.steps=7")
    assert "--partition=a100" in launch.submission.files["job.sh"]


def test_options_of_sbatch(project: Path) -> None:
    assert options(
        "cluster.partition=a,b",
        "cluster.account=me",
        "cluster.constraint='[r1|r2]*4'",
        "cluster.time=1d2h",
    ) == [
        "--job-name=run",
        "--open-mode=append",
        "--nodes=2-4",
        "--gres=gpu:8",
        "--partition=a,b",
        "--account=me",
        "--constraint=[r1|r2]*4",
        "--time=1-02:00:00",
        "--signal=USR1@180",
        "--requeue",
        f"--output={project}/run/launch/001/job.log",
    ]
    more = options(
        "cluster.gpu_type=h100",
        "cluster.cpus_per_node=96",
        "cluster.memory=0",
        "cluster.exclusive=true",
    )
    assert {"--gres=gpu:h100:8", "--mincpus=96", "--mem=0", "--exclusive"} <= set(more)
    assert options("cluster.options=[--reservation=week7, --comment=a b]")[-3:-1] == [
        "--reservation=week7",
        "--comment='a b'",
    ]


def test_exclusive_runs_get_all_memory(project: Path) -> None:
    """--exclusive alone grants all cores, and the partition's default memory."""

    def memory(*overrides: str, **more: str) -> list[str]:
        return [each for each in options(*overrides, **more) if each.startswith("--mem")]

    assert memory("cluster.exclusive=true") == ["--mem=0"]
    assert memory("cluster.exclusive=true", "cluster.memory=200G") == ["--mem=200G"]
    per_gpu = "cluster.options=[--mem-per-gpu=90G]"  # sbatch takes only one of these options
    assert memory("cluster.exclusive=true", per_gpu) == ["--mem-per-gpu=90G"]
    assert memory() == []
    assert memory("cluster.exclusive=true", file="data.yaml") == []  # whose tasks share nodes


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["cluster.container={image: 'a b.sqsh', mounts: [/data, '/my data:/corpora']}"],
        ["cluster.container={kind: apptainer, image: \"it's.sif\", mounts: ['/my data']}"],
        ["cluster.segments=3", "cluster.exclusive=true", "cluster.cpus_per_node=8"],
        ["cluster.requeue=false", "cluster.interface=ib0"],
        ["cluster.environment={modules: [cuda/12.8], conda: base, variables: {A: $(b)}}"],
    ],
)
def test_scripts_are_sound(project: Path, overrides: list[str]) -> None:
    """By shellcheck, for a run and for a build, but for what only a node has."""
    shellcheck = str(Path(sys.executable).with_name("shellcheck"))
    unknown = "--exclude=SC1091,SC1090,SC2016,SC2153"  # files to source; $ in names is meant
    for file in ("run.yaml", "data.yaml"):
        text = script(*overrides, file=file)
        done = subprocess.run(
            [shellcheck, unknown, "-"], input=text, capture_output=True, text=True
        )
        assert done.stdout == ""
        assert done.returncode == 0, done.stderr


def test_signals_and_deadline_are_those_of_the_run(project: Path) -> None:
    assert "--signal=TERM@90" in options("training.preemption={signals: [SIGTERM], deadline: 30}")
    for names in ("[]", "[SIGINT]"):  # Ctrl-C is a user's
        settings = options(f"training.preemption.signals={names}")
        assert not [each for each in settings if each.startswith("--signal")]
    (case,) = re.findall(
        r"case \$code in ([\d|]+)\)", script("training.preemption.signals=[SIGTERM]")
    )
    assert {"75", "143"} < set(case.split("|"))
    assert "138" not in case


@pytest.mark.parametrize("kind", ["slurm", "k8s", "tpu", "local"])
def test_what_the_check_will_refuse_is_rendered_all_the_same(project: Path, kind: str) -> None:
    (project / "k8s.yaml").write_text("kind: kubernetes\nimage: i\n")
    (project / "local.yaml").write_text("kind: local\ncode: installed\n")
    (project / "tpu.yaml").write_text(
        "kind: cloud_tpu\naccelerator_type: v4-8\nproject: abc\nzone: us-central2-b\n"
        "staging: gs://b/f\npackage: samestep\ncode: installed\n"
    )
    wrong = [f"training.preemption.deadline={each}" for each in (".nan", "-.inf", "x", "[]")]
    for override in (*wrong, "training=5", "training.preemption=5", "checkpoint=5"):
        assert submit.prepare(f"{kind}.yaml", "run.yaml", [override]).submission.files


def test_a_run_that_saves_on_ctrl_c_alone_is_refused_where_sigterm_ends_it(project: Path) -> None:
    (project / "local.yaml").write_text("kind: local\ncode: installed\n")
    with pytest.raises(ConfigError, match=r"preemption.signals is \[SIGINT\], and .*Add SIGTERM"):
        submit.prepare("local.yaml", "run.yaml", ["training.preemption.signals=[SIGINT]"])
    submit.prepare("local.yaml", "run.yaml", ["training.preemption.signals=[]"])


def test_without_requeuing(project: Path) -> None:
    assert "--no-requeue" in options("cluster.requeue=false")
    assert "scontrol requeue" not in script("cluster.requeue=false")
    name, *segmented = options("cluster.segments=3")
    assert name.startswith("--job-name=run-")
    assert "--dependency=singleton" in segmented
    assert options("cluster.segments=3", "output=elsewhere/run")[0] != name


def test_segments_wait_for_each_other_and_for_other_jobs(project: Path) -> None:
    """sbatch obeys only the last --dependency."""

    def dependencies(*overrides: str) -> list[str]:
        return [each for each in options(*overrides) if each.startswith("--dependency")]

    other = "cluster.options=[--dependency=afterok:5]"
    assert dependencies("cluster.segments=3", other) == ["--dependency=afterok:5,singleton"]
    assert dependencies(other) == ["--dependency=afterok:5"]
    either = "cluster.options=['--dependency=afterok:5?afterok:6']"
    assert dependencies(either) == ["--dependency='afterok:5?afterok:6'"]
    assert dependencies() == []


def test_containers(project: Path) -> None:
    place = str(project)
    text = script("cluster.container={image: images/samestep.sqsh, mounts: [/data]}")
    mounts = f"--container-mounts={place}:{place},{place}/run:{place}/run,/data"
    workdir = f"--container-workdir={place}"
    assert (
        f"--container-image={place}/images/samestep.sqsh {workdir} {mounts} env -u RANK -u "
        f"WORLD_SIZE" in text
    )
    assert "export PATH" not in text
    assert "--container-image=nvcr.io#a/b:c " in script(
        "cluster.container={image: 'nvcr.io#a/b:c'}"
    ).replace("'", "")
    text = script("cluster.container={kind: apptainer, image: a.sif}")
    assert f"apptainer exec --nv --pwd {place} --bind" in text
    assert "--nv" not in script(
        "cluster.container={kind: apptainer, image: a.sif}", "cluster.gpus_per_node=0"
    )
    assert "--container-image" in script(
        "cluster.container={image: /a.sqsh}", file="data.yaml", tasks=2
    )
    with pytest.raises(ConfigError, match="comma or colon"):
        script("cluster.container={image: image, mounts: ['a,b']}")


def test_apptainer_runs_the_command_in_the_image(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With programs that record their arguments, and run what they would run in the image."""
    tools = {
        "apptainer": f'printf "%s\\0" "$@" > {project}/apptainer; '
        'while [ "$1" != "my image.sif" ]; do shift; done; shift; exec "$@"',
        "samestep": f'printf "%s\\0" "$@" > {project}/samestep',
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "scontrol": "echo n1",
    }
    (project / "bin").mkdir()
    for name, body in tools.items():
        (project / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (project / "bin" / name).chmod(0o755)
    container = "{kind: apptainer, image: my image.sif, mounts: [/data]}"
    launch = submit.prepare("slurm.yaml", "run.yaml", [f"cluster.container={container}"])
    launch.job.folder.mkdir(parents=True)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "2"}
    paths = {"PATH": f"{project}/bin:/usr/bin:/bin"}
    command = ["bash", "-c", launch.submission.files["job.sh"]]
    done = subprocess.run(command, env=job | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    bind = f"{project}:{project},{project}/run:{project}/run,/data"
    words = (project / "apptainer").read_text().split("\0")
    assert words[:7] == ["exec", "--nv", "--pwd", str(project), "--bind", bind, "my image.sif"]
    assert words[7:9] == ["samestep", "train"]
    assert (project / "samestep").read_text().split("\0")[0] == "train"


def test_what_others_write_beside_a_launch_that_fails_stays(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = submit.prepare("slurm.yaml", "run.yaml", ["output=sweep/run"])

    def fail(*_: object) -> None:
        (project / "sweep" / "other").mkdir()
        raise LaunchError("no")

    monkeypatch.setattr(Slurm, "submit", fail)
    with pytest.raises(LaunchError):
        submit.submit(launch)
    assert [path.name for path in (project / "sweep").iterdir()] == ["other"]


def test_the_script_says_where_its_log_goes(project: Path) -> None:
    log = f"{project}/my run/launch/001/job.log"
    assert f"#SBATCH --output='{log}'\n" in script("output=my run")
    assert f"#SBATCH --output={project}/built.launch/001/job-%a.log\n" in script(file="data.yaml")
    assert f"# '{log}'.\n" in script("output=my run", cluster="local.yaml")
    # A line of the script cannot hold a line break; sbatch's own argument can.
    broken = submit.prepare("slurm.yaml", "run.yaml", ['output="a\\nb"'])
    assert "#SBATCH --output" not in broken.submission.files["job.sh"]
    assert f"--output={project}/a\nb/launch/001/job.log" in broken.submission.command


@pytest.mark.parametrize("cluster", ["local.yaml", "slurm.yaml"])
def test_names_are_quoted(project: Path, cluster: str) -> None:
    """The script is run, with commands that only show what they were given."""
    launch = submit.prepare(cluster, "run.yaml", [f"output={json.dumps(STRANGE)}"])
    tools = project / "bin"
    tools.mkdir()
    for name, body in {
        "samestep": f'printf "%s\\0" "$@" > {project}/arguments; '
        f'printf "%s" "$SAMESTEP_LOGS" > {project}/logs',
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "scontrol": "echo n1",
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    launch.job.folder.mkdir(parents=True)
    text = launch.submission.files["job.sh"].replace("export PATH=", f"export PATH={tools}: OTHER=")
    environment = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
    }
    environment |= {"SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    arguments = (project / "arguments").read_text().split("\0")
    folder = project / STRANGE / "launch" / "001"
    assert arguments[:2] == ["train", str(folder / "config.yaml")]
    assert (project / "logs").read_text() == str(folder / "logs")
    assert (folder / "exit").read_text() == "0\n"
    assert not list(project.rglob("pwned"))


def test_environments() -> None:
    lines = Environment(modules=("cuda/12.8", "a b"), conda="base").lines()
    assert lines[-5:-1] == [
        "module load cuda/12.8",
        "module load 'a b'",
        'eval "$(conda shell.bash hook)"',
        "conda activate base",
    ]
    trap, source, end = Environment(venv="/shared/my venv").lines()
    assert source == "source '/shared/my venv/bin/activate'"
    assert (trap.startswith("trap "), end) == (True, "trap - ERR")
    (line,) = Environment().lines()
    assert line == f'export PATH={sys.prefix}/bin:"$PATH"'
    variables = {"NCCL_DEBUG": "$(x)", "TOKENIZERS_PARALLELISM": "false"}
    lines = Environment(setup=("ulimit -n 65536",), variables=variables).lines(own=False)
    exports = ["export NCCL_DEBUG='$(x)'", "export TOKENIZERS_PARALLELISM=false"]
    assert lines == [trap, "ulimit -n 65536", end, *exports]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.kind=slrum"], "cluster.kind: no module for 'slrum'; did you mean 'slurm'"),
        (
            ["cluster.nodes=8-2"],
            "nodes must be a number such as 4, or a range as 2-8, not 8-2",
        ),
        (["cluster.nodes=0"], "nodes must be a number"),
        (
            ["cluster.time='24:00:00'"],
            "time is 24:00:00. Write it as 2d, 12h, 90m or 1d6h30m, not as 24:00:00",
        ),
        # Without quotes, YAML reads it as a number.
        (
            ["cluster.time=24:00:00"],
            "time is 86400. Write it as 2d, 12h, 90m or 1d6h30m, not as 24:00:00",
        ),
        (
            ["cluster.partition='a b'"],
            "partition is 'a b'. Use a value that Slurm accepts",
        ),
        (['cluster.options=["--x=1\\n#SBATCH --uid=0"]'], "is not an option of sbatch"),
        (["cluster.options=[reservation]"], "Write each one as --name=value"),
        (["cluster.segments=0"], "segments must be at least 1"),
        (
            ["cluster.segments=2", "cluster.options=['--dependency=afterok:5?afterok:6']"],
            "--dependency=afterok:5?afterok:6 means any of several jobs, and segments 2",
        ),
        (
            ["cluster.options=['--dependency=afterok:4', '--dependency=afterok:5?afterok:6']"],
            "--dependency=afterok:5?afterok:6 means any of several jobs, and the job waits for "
            "another --dependency, too. Separate the jobs by commas, or keep one --dependency.",
        ),
        (["cluster.gpus_per_node=-1"], "gpus_per_node must be at least 0"),
        (["cluster.environment={conda: a, venv: b}"], "conda a and venv b are two environments"),
        (["cluster.environment.variables.WANDB_API_KEY=abc"], "looks like a secret"),
        (["cluster.environment.variables.hf_token=abc"], "looks like a secret"),
        (
            ["cluster.environment.variables.https_proxy='http://me:pw@proxy'"],
            "https_proxy: the address has a user name or password",
        ),
        (
            ["cluster.environment.setup=[export WANDB_API_KEY=abc]"],
            "setup: the value of WANDB_API_KEY looks like",
        ),
        (["cluster.environment.variables={a-b: c}"], "is not the name of an environment variable"),
        (["output=a\\b"], "has a backslash in it"),
        (["output=null"], "names no output"),
        (["training.preemption.deadline=.inf"], "deadline is inf, and a cluster must know how"),
        (["cluster.partion=x"], "did you mean 'partition'"),
    ],
)
def test_what_is_refused(
    project: Path, samestep: Samestep, overrides: list[str], message: str
) -> None:
    result = samestep("launch", "slurm.yaml", "run.yaml", "--render", *overrides)
    assert result.code == 2
    assert message in result.message


def test_tasks_are_for_datasets(project: Path) -> None:
    with pytest.raises(ConfigError, match="is an experiment"):
        submit.prepare("slurm.yaml", "run.yaml", [], tasks=3)
    with pytest.raises(ConfigError, match="--tasks must be at least 1"):
        submit.prepare("slurm.yaml", "data.yaml", [], tasks=0)
    with pytest.raises(ConfigError, match="this machine builds a dataset in one job"):
        submit.prepare("local.yaml", "data.yaml", [], tasks=2)
    text = script(file="data.yaml", tasks=3)
    assert "#SBATCH --array=1-3" in text
    assert (
        f"samestep data build {project}/built.launch/001/config.yaml --slice "
        f'"$SLURM_ARRAY_TASK_ID/3"' in text
    )
    assert "--gpus" not in text


def test_a_secret_in_the_configuration_is_refused(project: Path) -> None:
    signed = "https://host/x.jsonl?X-Amz-Signature=abcdef"
    with pytest.raises(ConfigError, match="has a signature or token in a URL"):
        submit.prepare("slurm.yaml", "data.yaml", [f"source.paths=['{signed}']"])
    with pytest.raises(ConfigError, match=r"data\.path: the address has a user name"):
        submit.prepare("slurm.yaml", "run.yaml", ["data.path='https://me:word@host/data'"])
    harmless = [
        "init_from='hf://bert@main'",
        "data.path='s3://b/d?.tar'",
        "a='https://b/c?keyword=d'",
    ]
    assert submit.prepare("slurm.yaml", "run.yaml", harmless)
    assert submit.prepare("slurm.yaml", "run.yaml", ["training=null"])


def test_folders_are_numbered(project: Path) -> None:
    (project / "run" / "launch" / "007").mkdir(parents=True)
    assert (
        submit.prepare("slurm.yaml", "run.yaml", []).job.folder
        == project / "run" / "launch" / "008"
    )


class TestSnapshots:
    @pytest.fixture
    def repository(self, project: Path) -> Path:
        subprocess.run(["git", "init", "--quiet"], check=True)
        (project / ".gitignore").write_text("state\nignored\n")
        (project / "own").mkdir()
        (project / "own" / "part.py").write_text("before")
        (project / "ignored").write_text("x")
        return project

    def test_holds_what_git_knows(self, repository: Path) -> None:
        (repository / "run").mkdir()
        (repository / "run" / "metrics.jsonl").write_text("{}")
        launch = submit.prepare("local.yaml", "run.yaml", [])
        assert launch.job.code
        assert launch.code is not None
        names = {str(path) for path in launch.code}
        assert names == {
            ".gitignore",
            "own/part.py",
            "data.yaml",
            "local.yaml",
            "run.yaml",
            "slurm.yaml",
        }
        assert (
            f"export PYTHONPATH={repository}/run/launch/001/code"
            in launch.submission.files["job.sh"]
        )

    def test_is_not_found_behind_a_colon(self, repository: Path) -> None:
        output = "output=runs/2026-05-01T10:00"
        with pytest.raises(ConfigError, match=r"10:00/launch has a colon in it, so Python would"):
            submit.prepare("slurm.yaml", "run.yaml", [output])
        launch = submit.prepare("slurm.yaml", "run.yaml", [output, "cluster.code=installed"])
        assert launch.code is None

    def test_can_be_left_out(self, repository: Path) -> None:
        launch = submit.prepare("local.yaml", "run.yaml", ["cluster.code=installed"])
        assert launch.code is None
        assert "PYTHONPATH" not in launch.submission.files["job.sh"]

    def test_of_too_much(self, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("launch.submission.snapshot.MOST_BYTES", 3)
        with pytest.raises(LaunchError, match=r"Name in .gitignore what is no code"):
            submit.prepare("local.yaml", "run.yaml", [])


def test_nothing_is_left_when_submitting_fails(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = submit.prepare("slurm.yaml", "run.yaml", ["output=a/b/run"])

    def fail(*_: object) -> None:
        raise LaunchError("no")

    monkeypatch.setattr(Slurm, "submit", fail)
    with pytest.raises(LaunchError):
        submit.submit(launch)
    assert not (project / "a").exists()
    assert records.newest_first() == []


def test_no_client(project: Path, samestep: Samestep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project))
    result = samestep("launch", "slurm.yaml", "run.yaml")
    assert "sbatch is not on this machine; jobs are submitted from a login node" in result.message


def test_unknown_jobs(project: Path, samestep: Samestep) -> None:
    for command in ("logs", "cancel"):
        assert "no job 12 has been submitted from here by you" in samestep(command, "12").message
    assert "no job has been submitted from here" in samestep("jobs").out
