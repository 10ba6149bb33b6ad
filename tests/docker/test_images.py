"""The images, built and run: on a base of their own, without a registry, a daemon or, when they
run, a network.

Each takes ten minutes and 30 GB of disk for a while, so they are built only on request, by root,
where buildah and debootstrap are:

    SAMESTEP_TEST_IMAGES=cuda,tpu pytest tests/docker

pip installs with the configuration of this machine: a mirror, a folder of wheels.
SAMESTEP_TORCH_INDEX may name an index of torch's builds for CPUs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WANTED = [name for name in os.environ.get("SAMESTEP_TEST_IMAGES", "").split(",") if name]
BASE = "localhost/samestep-base"
PACKAGES = (
    "python3,python3-venv,libpython3.11-dev,ca-certificates"  # Python's library is for torch-xla
)
TRAIN = [
    "train",
    "configs/debug/demo.yaml",
    "training.log_every=1",
    "training.steps=60",
    "schedule.warmup_steps=10",
]
XLA = ["accelerator=xla", "strategy=xla_spmd"]

pytestmark = pytest.mark.timeout(3600)


def why_not() -> str | None:
    """What keeps images from being built here."""
    if not WANTED:
        return "takes ten minutes and 30 GB; ask for it with SAMESTEP_TEST_IMAGES=cuda,tpu"
    missing = [
        name for name in ("buildah", "debootstrap", "unshare", "ip") if not shutil.which(name)
    ]
    if missing:
        return (
            f"needs {', '.join(missing)}; on Debian: apt-get install buildah debootstrap iproute2"
        )
    return None if os.getuid() == 0 else "needs root, to make a base and to change into an image"


@dataclass(frozen=True)
class Store:
    """Images of buildah in a folder of their own, of which nothing is left."""

    folder: Path

    def __call__(self, *arguments: str | Path) -> str:
        where = [
            f"--root={self.folder}/storage",
            f"--runroot={self.folder}/run",
            "--storage-driver=vfs",
        ]
        command = ["buildah", *where, *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
        return str(result.stdout).strip()


@dataclass(frozen=True)
class Image:
    """An image, laid out in a folder, that can be run as a container engine would."""

    root: Path
    config: dict[str, Any]

    def start(
        self,
        *arguments: str,
        environment: Sequence[str] = (),
        uid: int = 0,
        entrypoint: bool = True,
    ) -> Process:
        """Runs the image on these arguments.

        Process 1 of its own, no network but the loopback, the image's user.
        """
        user = f"{uid}:{uid}" if uid else self.config["User"]
        inside = [
            "env",
            "--ignore-environment",
            f"--chdir={self.config['WorkingDir']}",
            *self.config["Env"],
        ]
        script = 'ip link set lo up && mount --rbind /dev "$0/dev" && exec chroot --userspec="$1" "$0" "${@:2}"'  # noqa: E501
        own = [
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount",
            "--net",
            f"--mount-proc={self.root}/proc",
        ]
        command = [*own, "bash", "-c", script, str(self.root), user, *inside, *environment]
        command += [*(self.config["Entrypoint"] if entrypoint else []), *arguments]
        return Process(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )

    def run(self, *arguments: str, environment: Sequence[str] = (), uid: int = 0) -> str:
        """What it prints; it must end well."""
        code, output = self.start(*arguments, environment=environment, uid=uid).end()
        assert code == 0, output
        return output


@dataclass(frozen=True)
class Process:
    """A running image."""

    unshare: subprocess.Popen[str]

    @property
    def first(self) -> int:
        """Process 1, by the number that it has outside."""
        children = Path(f"/proc/{self.unshare.pid}/task/{self.unshare.pid}/children")
        return int(children.read_text())

    def wait_for(self, text: str) -> None:
        """Reads its output up to a line with this text."""
        assert self.unshare.stdout is not None
        seen = []
        for line in self.unshare.stdout:
            seen.append(line)
            if text in line:
                return
        pytest.fail(f"{text!r} never came: {''.join(seen)}")

    def end(self) -> tuple[int, str]:
        """Its exit code and the rest of its output."""
        output, _ = self.unshare.communicate(timeout=900)
        return self.unshare.returncode, output


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    """A store with the base in it."""
    if reason := why_not():
        pytest.skip(reason)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestep"
    folder = Path(tempfile.mkdtemp(prefix="samestep-images-"))
    try:
        archive = cache / f"image-base-{zlib.crc32(PACKAGES.encode()):08x}.tar"
        if not archive.exists():
            cache.mkdir(parents=True, exist_ok=True)
            options = ["--variant=minbase", f"--include={PACKAGES}", "bookworm"]
            subprocess.run(
                ["debootstrap", *options, folder / "base"], check=True, stdout=subprocess.DEVNULL
            )
            subprocess.run(
                ["tar", "-C", folder / "base", "-cf", folder / "base.tar", "."], check=True
            )
            shutil.move(folder / "base.tar", archive)
            shutil.rmtree(folder / "base")
        store = Store(folder)
        container = store("from", "scratch")
        store("add", "--quiet", container, archive, "/")
        store("commit", "--quiet", "--rm", container, BASE)
        yield store
    finally:
        shutil.rmtree(folder)


def pip_configuration(folder: Path) -> list[str]:
    """Volumes that give a build this machine's configuration of pip, with the files and folders
    that it names.
    """
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    settings = {}
    for line in lines:  # global.cert='...', :env:.cert='...'; the environment comes last and wins
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = value.strip("'").replace("\\n", " ")
    file = folder / "pip.conf"
    file.write_text(
        "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
    )
    words = {word for value in settings.values() for word in value.split()}
    paths = {Path(word) for word in words if word.startswith("/")}
    paths |= {
        Path(word[7:]).parent for word in words if word.startswith("file:///")
    }  # indexes name files beside them
    local = sorted(path for path in paths if path.exists())
    return [f"--volume={path}:{path}:ro" for path in local] + [f"--volume={file}:/etc/pip.conf:ro"]


@pytest.fixture(scope="module", params=["cuda", "tpu"])
def image(request: pytest.FixtureRequest, store: Store) -> Iterator[Image]:
    """The image, built."""
    name: str = request.param
    if name not in WANTED:
        pytest.skip(f"SAMESTEP_TEST_IMAGES does not ask for {name}")
    tag = f"localhost/samestep:{name}"
    options = ["--isolation=chroot", "--network=host", "--pull-never", f"--build-arg=BASE={BASE}"]
    if index := os.environ.get("SAMESTEP_TORCH_INDEX"):
        options.append(f"--build-arg=TORCH_INDEX={index}")
    options += pip_configuration(store.folder)
    began = time.monotonic()
    store("build", *options, f"--file={ROOT}/docker/{name}.Dockerfile", f"--tag={tag}", ROOT)
    size = json.loads(store("images", "--json", tag))[0]["size"]
    print(f"{name}: built in {time.monotonic() - began:.0f} s, {size}")
    container = store("from", tag)
    yield Image(
        Path(store("mount", container)), json.loads(store("inspect", container))["OCIv1"]["config"]
    )
    store("rm", container)
    store("rmi", tag)


def test_samestep_is_what_it_runs(image: Image):
    version = image.run("--version")
    assert re.fullmatch(r"samestep \d+\.\d+\.\d+\n", version)
    assert image.run("samestep", "--version") == version
    assert image.run().startswith("usage: samestep")
    assert image.run("bash", "-c", "id -u; id -g; pwd") == "10001\n10001\n/samestep\n"
    code, output = image.start("nothing").end()
    assert code == 2
    assert "invalid choice: 'nothing'" in output


def test_commands_are_not_hidden_by_programs(image: Image):
    names = re.findall(r"'([a-z]+)'", image.start("nothing").end()[1])
    assert {"train", "data", "export"} <= set(names)
    script = 'for name; do type -P "$name" || true; done'
    assert (
        image.run("bash", "-c", script, "-", *(name for name in names if name != "nothing")) == ""
    )


def test_configurations_are_there(image: Image):
    assert "layers: 4" in image.run("config", "configs/debug/bert_mini.yaml")
    assert "recipes/pretrain/bert_base" in image.run("recipes")
    assert "no broken requirements" in image.run("pip", "check").lower()


def test_image_has_nothing_that_it_does_not_need(image: Image):
    found = {path.name for path in (image.root / "samestep").iterdir()}
    assert found <= {"LICENSE", "configs", "examples", "demo"}  # the last is of the tests below
    assert not any((image.root / "opt/venv/lib").glob("python3.*/site-packages/tests"))
    assert not any((image.root / "var/lib/apt/lists").iterdir())
    assert not (image.root / "root/.cache").exists()


def test_any_user_may_be_named(image: Image):
    script = "import getpass, os, torch; open('a', 'w').close(); os.remove('a'); print(getpass.getuser(), os.getuid())"  # noqa: E501
    assert image.run("python", "-c", script, uid=54321) == "samestep 54321\n"
    assert image.run("sh", "-c", "touch ~/a && rm ~/a", uid=54321) == ""


def test_training_goes_on_after_a_stop(image: Image):
    """The demo's commands, offline.

    A dataset, a training that is stopped as by `docker stop`, and the rest of it.
    """
    tokenizer, data = "tokenizer.path=demo/tokenizer", "configs/data/python_docs.yaml"
    image.run("data", "tokenizer", data, tokenizer)
    image.run("data", "build", data, tokenizer, "output=demo/dataset")
    xla = "xla" in image.run("pip", "list")
    options = XLA if xla else ["--processes", "2"]
    environment = ["PJRT_DEVICE=CPU", "CPU_NUM_DEVICES=2"] if xla else []
    training = image.start(*TRAIN, *options, environment=environment)
    training.wait_for("step 2")
    os.kill(training.first, signal.SIGTERM)
    code, output = training.end()
    assert code == 75, output
    assert "step 60/60" in image.run(
        *TRAIN, *options, environment=environment
    )  # the same command goes on
    assert "verified" in image.run("ledger", "verify", "demo/run")


def test_sigterm_ends_what_has_no_handler(image: Image):
    """The reason for tini: without it the kernel drops the signal, and only the end of the grace
    period helps.
    """
    for entrypoint, ended in ((True, True), (False, False)):
        process = image.start("bash", "-c", "echo here; exec sleep 5", entrypoint=entrypoint)
        process.wait_for("here")
        time.sleep(0.5)
        os.kill(process.first, signal.SIGTERM)
        assert process.end()[0] == (128 + signal.SIGTERM if ended else 0)
