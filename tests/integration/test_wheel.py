"""The wheel and the sdist: what they hold, and a first run from the wheel alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from samestep.config import recipes

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).parents[2]
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # building changes sys.argv
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""
# The packages that samestep needs come from this environment, and samestep itself does not.
RUN = """
import sys
from samestep import cli
assert cli.__file__.startswith(sys.argv[1]), cli.__file__
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist of what git knows."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in files.stdout.splitlines():
        if (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    subprocess.run(
        [sys.executable, "-c", BUILD, folder], cwd=source, check=True, capture_output=True
    )
    return folder


def test_the_wheel_holds_the_packages_and_the_recipes(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name.removeprefix("samestep/") for name in names if "/recipes/" in name}
    assert {f"{name.removesuffix('.yaml')}" for name in inside if name.endswith(".yaml")} == set(
        recipes.names()
    )
    assert {
        *("trainer/py.typed", "trainer/monitoring/report/page.html"),
        *("trainer/publish/templates/card.md.jinja", "launch/tpu/startup.sh.jinja"),
        *("launch/scripts/tpu.sh.jinja", "launch/scripts/tpu/bert_base_v5e16.sh"),
    } <= names
    top = {name.split("/")[0] for name in names}
    assert not top & {"tests", "docs", "examples", "benchmarks", "configs", "setup.py"}


def test_the_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        tar.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    subprocess.run(
        [sys.executable, "-c", BUILD, tmp_path], cwd=source, check=True, capture_output=True
    )
    first, second = (
        sorted(zipfile.ZipFile(next(folder.glob("*.whl"))).namelist())
        for folder in (built, tmp_path)
    )
    assert first == second


def test_a_first_run_from_the_wheel(built: Path, tmp_path: Path) -> None:
    """In an empty folder: tokenizer, dataset, training, export and fill."""
    (wheel,) = built.glob("*.whl")
    site, folder = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    folder.mkdir()

    def samestep(*arguments: str) -> str:
        command: Sequence[str] = (sys.executable, "-c", RUN, str(site), *arguments)
        ended = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout + ended.stderr

    assert "recipes/pretrain/bert_base" in samestep("recipes")
    tokenizer = "tokenizer.path=demo/tokenizer"
    samestep("data", "tokenizer", "recipes/data/python_docs", tokenizer)
    samestep("data", "build", "recipes/data/python_docs", tokenizer, "output=demo/dataset")
    steps = ("training.steps=4", "schedule.warmup_steps=1", "training.evaluate_every=null")
    output = samestep("train", "recipes/debug/demo", "--processes", "2", *steps)
    assert "step 4/4" in output
    samestep("export", "demo/run", "demo/exported")
    assert "probability" in samestep("fill", "demo/exported", "an [MASK] is raised.")
    assert samestep("finetune-suite", "--help")
