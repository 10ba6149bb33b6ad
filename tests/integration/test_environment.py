"""What samestep needs of the system, and what it takes from the folder in which it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_POSIX = """
import sys
for module in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[module] = None
from samestep.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(folder: Path, *command: object) -> str:
    """Runs a command in a folder, and returns what it prints."""
    environment = {**os.environ, "USER": "someone"}
    ended = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        ("--help",),
        ("recipes",),
        ("config", "recipes/debug/demo"),
        ("train", "EXPERIMENT", "training.steps=2", "schedule.warmup_steps=1", "output=run"),
    ],
    ids=" ".join,
)
def test_no_module_of_posix_is_needed(
    command: tuple[str, ...], experiment_file: str, tmp_path: Path
) -> None:
    arguments = (word.replace("EXPERIMENT", experiment_file) for word in command)
    run(tmp_path, sys.executable, "-c", WITHOUT_POSIX, *arguments)


@pytest.mark.long
def test_packages_of_the_user_with_our_names_are_left_alone(
    experiment_file: str, dataset_folder: Path, tmp_path: Path
) -> None:
    """In processes that samestep starts, too."""
    for name in ("trainer", "launch", "data_pipeline", "examples"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a module of the user')")
    (tmp_path / "text.jsonl").write_text('{"text": "a b c d"}\n' * 50)
    samestep = Path(sys.executable).with_name("samestep")
    steps = ("training.steps=2", "schedule.warmup_steps=1", "output=run")
    run(tmp_path, samestep, "train", experiment_file, "--processes", "2", *steps)
    tokenizer = f"tokenizer.path={dataset_folder / 'tokenizer'}"
    build = ("data", "build", "recipes/data/jsonl", "source.paths=[text.jsonl]", "output=built")
    assert "built" in run(tmp_path, samestep, *build, tokenizer, "workers=2")
    assert "step" in run(tmp_path, samestep, "evaluate", "run", "--processes", "2")
    assert "would" in run(
        tmp_path,
        samestep,
        "launch",
        "recipes/launch/local",
        experiment_file,
        "--dry-run",
        "output=other",
    )
