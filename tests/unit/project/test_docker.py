"""The images, as far as that can be seen without building one.

What they copy, install and start.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from samestep.config import recipes

ROOT = Path(__file__).parents[3]
ENTRYPOINT = ROOT / "docker" / "entrypoint.sh"
DOCKERFILES = [ROOT / "docker" / name for name in ("cuda.Dockerfile", "tpu.Dockerfile")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
both = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)


def tool(name: str) -> str:
    """A command that pip has put beside Python, or any other."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    return found or pytest.skip(f"{name} is not installed")


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, the rest of its line), in order."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [re.sub(r"\s+", " ", line) for line in text.replace("\\\n", " ").splitlines()]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def rest_of(dockerfile: Path, instruction: str) -> list[str]:
    return [rest for word, rest in instructions(dockerfile) if word == instruction]


def arguments(dockerfile: Path) -> dict[str, str]:
    """Build arguments and their defaults."""
    pairs = (rest.partition("=") for rest in rest_of(dockerfile, "ARG"))
    return {name: default for name, _, default in pairs}


def copied(dockerfile: Path) -> list[str]:
    """What is copied from the folder of the build."""
    words = (rest.split() for rest in rest_of(dockerfile, "COPY"))
    return [source for line in words for source in line[:-1] if not source.startswith("--")]


def lists(folder: Path, dockerfile: Path) -> dict[str, list[str]]:
    """What the first stage of an image makes of the files that it copies."""
    stage = instructions(dockerfile)[: [word for word, _ in instructions(dockerfile)].index("RUN")]
    for source in (
        " ".join(rest for word, rest in stage if word == "COPY").replace(" ./", "").split()
    ):
        shutil.copy(ROOT / source, folder)
    command = rest_of(dockerfile, "RUN")[0].replace('"${EXTRAS}"', arguments(dockerfile)["EXTRAS"])
    assert command.startswith("python3 lists.py ")
    subprocess.run([sys.executable, *command.split()[1:]], cwd=folder, check=True)
    names = ("requirements.txt", "constraints.txt", "torch.txt")
    return {name: (folder / name).read_text(encoding="utf-8").splitlines() for name in names}


@pytest.fixture(scope="module")
def module() -> ModuleType:
    """docker/lists.py."""
    spec = importlib.util.spec_from_file_location("lists", ROOT / "docker" / "lists.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@both
def test_hadolint_has_nothing_to_say(dockerfile: Path):
    result = subprocess.run([tool("hadolint"), str(dockerfile)], capture_output=True, text=True)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


@both
def test_base_is_pinned(dockerfile: Path):
    assert re.fullmatch(
        r"python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", arguments(dockerfile)["BASE"]
    )
    assert {line.split()[0] for line in rest_of(dockerfile, "FROM")} == {"${BASE}"}


def test_images_have_one_base_and_one_end():
    cuda, tpu = (path.read_text(encoding="utf-8") for path in DOCKERFILES)
    assert arguments(DOCKERFILES[0])["BASE"] == arguments(DOCKERFILES[1])["BASE"]
    assert cuda.partition("# What changes most")[2] == tpu.partition("# What changes most")[2] != ""


@pytest.mark.parametrize(
    ("dockerfile", "expected"),
    [
        (
            DOCKERFILES[0],
            {
                "accelerate",
                "deepspeed",
                "hf",
                "s3",
                "gcs",
                "wandb",
                "tasks",
                "tensorboard",
                "text",
                "parquet",
            },
        ),
        (DOCKERFILES[1], {"tpu", "gcs", "tasks"}),
    ],
    ids=["cuda", "tpu"],
)
def test_extras_exist(dockerfile: Path, expected: set[str]):
    extras = set(arguments(dockerfile)["EXTRAS"].split(","))
    assert expected <= extras <= PROJECT["project"]["optional-dependencies"].keys()


@both
def test_all_that_samestep_asks_for_is_pinned(dockerfile: Path, tmp_path: Path, module: ModuleType):
    written = lists(tmp_path, dockerfile)
    pinned = [module.name(pin) for pin in written["constraints.txt"]]
    assert len(pinned) == len(set(pinned))
    assert {module.name(line) for line in written["requirements.txt"]} <= set(pinned)
    assert {"setuptools", "setuptools-scm"} <= set(pinned)  # what builds those that come as source
    assert set(written["torch.txt"]) < set(written["constraints.txt"])
    for command in rest_of(dockerfile, "RUN"):
        from_index = "pip install" in command and "--no-index" not in command
        assert not from_index or re.search(
            r"--constraint /lists/(constraints|torch)\.txt", command
        ), command


def test_each_image_has_its_torch(tmp_path: Path):
    for dockerfile, constraints in zip(
        DOCKERFILES, ("constraints.txt", "constraints-xla.txt"), strict=True
    ):
        folder = tmp_path / dockerfile.stem
        folder.mkdir()
        (torch,) = [
            pin for pin in lists(folder, dockerfile)["torch.txt"] if pin.startswith("torch==")
        ]
        assert torch in (ROOT / constraints).read_text(encoding="utf-8").splitlines()


def test_torch_layer_has_all_of_torch(module: ModuleType):
    needed = {
        module.name(line)
        for line in importlib.metadata.requires("torch") or ()
        if "extra ==" not in line
    }
    assert {name for name in needed if not module.TORCH.fullmatch(name)} == set()


def test_lists_know_their_place(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A new torch brings other libraries along: constraints-cuda.txt is to be made again then."""
    monkeypatch.chdir(ROOT)
    (version,) = [
        pin for pin in module.constraints(["constraints.txt"]) if pin.startswith("torch==")
    ]
    assert (
        f"torch {version.partition('==')[2]} "
        in (ROOT / "docker" / "constraints-cuda.txt").read_text()
    )
    for own, other in (
        ("docker/constraints-cuda.txt", "constraints.txt"),
        ("docker/constraints-tpu.txt", "constraints-xla.txt"),
    ):
        names = [{module.name(pin) for pin in module.constraints([file])} for file in (own, other)]
        assert names[0].isdisjoint(names[1])


def test_unknown_extra_is_refused(tmp_path: Path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, str(ROOT / "docker" / "lists.py"), "gcs,nothing"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert "no extra 'nothing'" in result.stderr


@both
def test_user_is_not_root(dockerfile: Path):
    assert rest_of(dockerfile, "USER") == ["10001:10001"]
    last = [word for word, _ in instructions(dockerfile)]
    assert last.index("USER") > max(
        index for index, word in enumerate(last) if word in ("RUN", "COPY")
    )


@both
def test_sources_exist_and_reach_the_builder(dockerfile: Path):
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"  # all that is not named stays out
    let_in = {line[1:] for line in rules if line.startswith("!")}
    sources = copied(dockerfile)
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert {source.split("/")[0] for source in sources} <= let_in
    assert let_in == {source.split("/")[0] for path in DOCKERFILES for source in copied(path)}
    assert "**/__pycache__" in rules


@both
def test_all_packages_are_copied_after_what_they_need_is_installed(dockerfile: Path):
    packages = {
        name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    assert packages < set(copied(dockerfile))
    steps = instructions(dockerfile)
    final = steps[max(index for index, (word, _) in enumerate(steps) if word == "FROM") :]
    first_code = next(
        index
        for index, (_, rest) in enumerate(final)
        if rest.startswith("--chmod=755 docker/entrypoint")
    )
    assert not any("--requirement" in rest or "apt-get" in rest for _, rest in final[first_code:])


@pytest.mark.long
@both
def test_wheel_of_the_image_has_the_recipes(dockerfile: Path, tmp_path: Path):
    steps = instructions(dockerfile)
    begin = steps.index(("FROM", "${BASE} AS code"))
    end = next(i for i, (word, _) in enumerate(steps) if i > begin and word == "FROM")
    without = shutil.ignore_patterns("__pycache__")
    for *sources, target in (rest.split() for word, rest in steps[begin:end] if word == "COPY"):
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target, ignore=without)
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".yaml")}
    assert {f"samestep/{name}.yaml" for name in recipes.names()} <= inside


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment whose `samestep` shows its arguments, ends with a given code, or waits for
    SIGTERM.
    """
    fake = tmp_path / "samestep"
    fake.write_text(
        "#!/usr/bin/env bash\n"
        'case ${1-} in\n  code) exit "$2" ;;\n'
        "  wait) trap 'exit 75' TERM; echo $$; while :; do sleep 0.05; done ;;\n"
        '  *) printf "[%s]" samestep "$@" ;;\nesac\n'
    )
    fake.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ([], "[samestep][--help]"),
        (["--version"], "[samestep][--version]"),
        (["train", "a.yaml"], "[samestep][train][a.yaml]"),
        (["samestep", "train", "a.yaml"], "[samestep][train][a.yaml]"),
        (
            ["export", "runs/a", "b c", "*", ""],
            "[samestep][export][runs/a][b c][*][]",
        ),  # `export` is a shell's, too
        (["jobs"], "[samestep][jobs]"),
        (["diff", "runs/a", "runs/b"], "[samestep][diff][runs/a][runs/b]"),
        (["watch", "runs/a"], "[samestep][watch][runs/a]"),
        (["-x", "--"], "[samestep][-x][--]"),
        ([""], "[samestep][]"),
        (["bash", "-c", "printf %s $((6*7))"], "42"),
        (["/bin/echo", "-n", "a"], "a"),
    ],
    ids=str,
)
def test_entrypoint_tells_programs_from_commands(
    given: list[str], printed: str, programs: dict[str, str]
):
    result = subprocess.run(
        ["bash", str(ENTRYPOINT), *given], env=programs, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, printed, "")


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_exit_codes_come_back(code: int, programs: dict[str, str]):
    assert (
        subprocess.run(["bash", str(ENTRYPOINT), "code", str(code)], env=programs).returncode
        == code
    )


def test_sigterm_reaches_the_command(programs: dict[str, str]):
    with subprocess.Popen(
        [str(ENTRYPOINT), "wait"], env=programs, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert (
            int(process.stdout.readline()) == process.pid
        )  # the same process, with nothing in between
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 75


def test_entrypoint_is_sound():
    assert subprocess.run(["bash", "-n", str(ENTRYPOINT)]).returncode == 0
    assert ENTRYPOINT.stat().st_mode & 0o111 == 0o111
    for dockerfile in DOCKERFILES:
        (entrypoint,) = rest_of(dockerfile, "ENTRYPOINT")
        assert entrypoint == '["/usr/bin/tini", "-s", "--", "/usr/local/bin/entrypoint.sh"]'
        assert rest_of(dockerfile, "CMD") == []
