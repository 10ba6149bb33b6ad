"""The shell lines of a job's environment, run here by a bash that is no login shell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launch.environment import Environment, check_variables
from samestep.errors import ConfigError

KEY = "0123456789abcdef"


def run(
    environment: Environment, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    (folder / "job.sh").write_text("\n".join([*environment.lines(), "echo the run"]))
    variables = {"PATH": "/usr/bin:/bin", **variables}
    return subprocess.run(
        ["bash", "job.sh"], cwd=folder, env=variables, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Environment(modules=("cuda/12.8", "other")), "module load cuda/12.8: exit code 127"),
        (Environment(conda="base"), "conda activate base: exit code 127"),
        (Environment(venv="/not/here"), "source /not/here/bin/activate: exit code 1"),
        (Environment(setup=("true", "cat /not/here", "echo later")), "cat /not/here: exit code 1"),
        (
            Environment(setup=("printf 'true\\nreturn 3' > a.sh", "source a.sh")),
            "source a.sh: exit code 3",
        ),
    ],
)
def test_what_fails_ends_the_job(environment: Environment, message: str, tmp_path: Path) -> None:
    done = run(environment, tmp_path)
    assert done.returncode == 1
    assert (
        f"the environment cannot be set up: {message}; add || true where that may be\n"
        in done.stderr
    )
    assert done.stdout == ""


def test_what_may_fail(tmp_path: Path) -> None:
    (tmp_path / "vendor.sh").write_text(
        "false\nuseful() { false; true; }\n[ -d nowhere ] && echo no\ntrue"
    )
    lines = (
        "source ./vendor.sh",
        "useful",
        "[ -d nowhere ] && echo no",
        "false || true",
        "if false; then",
        "x",
        "fi",
    )
    done = run(Environment(setup=lines, variables={"A": "b"}), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the run\n", "")
    (tmp_path / "job.sh").write_text(
        "\n".join([*Environment(setup=("true",)).lines(), "false", "echo $?"])
    )
    assert subprocess.run(["bash", "job.sh"], cwd=tmp_path, capture_output=True).stdout == b"1\n"


@pytest.mark.parametrize("variable", ["MODULESHOME", "LMOD_PKG"])
def test_the_command_module_is_looked_for(tmp_path: Path, variable: str) -> None:
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "bash").write_text('module() { echo "$@"; }')
    done = run(Environment(modules=("cuda",)), tmp_path, **{variable: str(tmp_path)})
    assert (done.stdout, done.stderr) == ("load cuda\nthe run\n", "")
    exported = {"BASH_FUNC_module%%": "() { echo own; }", variable: str(tmp_path)}
    assert run(Environment(modules=("cuda",)), tmp_path, **exported).stdout == "own\nthe run\n"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (f"export WANDB_API_KEY={KEY}", "WANDB_API_KEY"),
        (f"module load x; HF_TOKEN='{KEY}' hf auth login", "HF_TOKEN"),
        (f"tool login --password {KEY}", "--password"),
        (f"tool login --password={KEY}", "--password"),
        (f'tool --hf-token "{KEY}"', "--hf-token"),
        (f"export https_proxy=http://me:{KEY}@proxy:3128", "URL"),
        (f"pip install git+https://{KEY}@github.com/a/b", "URL"),
        (f"wandb login {KEY}", "wandb login"),
    ],
)
def test_secrets_in_the_setup(line: str, named: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"setup.*{named}.* is kept in files that others can read"
    ) as refusal:
        Environment(setup=("true", line))
    assert KEY not in str(refusal.value)


@pytest.mark.parametrize(
    "line",
    [
        "export WANDB_API_KEY=$(cat ~/.wandb_key) HF_TOKEN=`cat ~/.hf` A_TOKEN=",
        'export WANDB_API_KEY="$KEY_OF_MINE"',
        'tool login --password "$PASSWORD" --token-file ~/.token --password-stdin < file',
        "export GOOGLE_APPLICATION_CREDENTIALS=/home/me/key.json "
        "AWS_SHARED_CREDENTIALS_FILE=~/.aws/credentials",
        'export https_proxy="http://me:$PROXY_PASSWORD@proxy:3128" http_proxy=http://proxy:3128',
        "pip install git+ssh://git@github.com/a/b git+https://github.com/a/b@main",
        "sort --key=2 --key 3; export TOKENIZERS_PARALLELISM=false PAD_TOKEN=0 SSH_KEY=~/.ssh/id",
        "export HF_HUB_DISABLE_IMPLICIT_TOKEN=1; tool --use-auth-token true; wandb login "
        "--verify; source ~/.keys",
        "apptainer pull docker://ubuntu@sha256:0123456789abcdef",
    ],
)
def test_no_secrets_in_the_setup(line: str) -> None:
    assert Environment(setup=(line,)).setup == (line,)


def test_secrets_in_values() -> None:
    with pytest.raises(
        ConfigError, match=r"variables.https_proxy has a user name or password in a URL"
    ):
        check_variables({"https_proxy": f"http://me:{KEY}@proxy:3128"})
    paths = (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
    )
    check_variables(
        dict.fromkeys((*paths, "HF_TOKEN_PATH"), "/home/me/file")
        | {"http_proxy": "http://proxy:3128"}
    )
    with pytest.raises(ConfigError, match="looks like a secret"):
        check_variables({"GOOGLE_CREDENTIALS": KEY})
