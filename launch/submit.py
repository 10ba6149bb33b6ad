"""From two files to a job: read, render, check, write down, submit."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import yaml

from launch import records, snapshot
from launch.environment import SECRET_ADDRESS
from launch.job import CODE, CONFIG, Cluster, JobSpec, Record, Submission
from trainer.config import Tree, decode, read_tree, to_tree
from trainer.errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)

_CLUSTER = "cluster."
_PACKAGES = ("trainer", "data_pipeline", "launch")


@dataclass(frozen=True)
class Launch:
    """A job that has been rendered, and not submitted yet.

    Attributes:
        kind: of cluster.
        cluster: where it is to run.
        job: what is to run.
        submission: what the job has become there.
        arguments: file and overrides, as they were typed.
        output: the folder of the run or dataset.
        code: the files of the snapshot; None takes none.
    """

    kind: str
    cluster: Cluster
    job: JobSpec
    submission: Submission
    arguments: tuple[str, ...]
    output: str
    code: tuple[Path, ...] | None


def prepare(
    cluster_file: str, file: str, overrides: Sequence[str], tasks: int | None = None
) -> Launch:
    """Renders a job; writes nothing and asks nobody.

    Args:
        cluster_file: describes the cluster.
        file: an experiment, or a dataset to build.
        overrides: settings of the file, and of the cluster where they begin with `cluster.`.
        tasks: of the array that builds a dataset.

    Raises:
        ConfigError: a file is not what it should be.
    """
    of_cluster = [each.removeprefix(_CLUSTER) for each in overrides if each.startswith(_CLUSTER)]
    settings_of_run = [each for each in overrides if not each.startswith(_CLUSTER)]
    settings = read_tree(cluster_file, of_cluster)
    cluster = decode(Annotated[Cluster, records.KINDS], settings, "cluster")
    tree = read_tree(file, settings_of_run)
    action: Literal["train", "build"] = "build" if "source" in tree else "train"
    if not isinstance(output := tree.get("output"), str) or not output:
        raise ConfigError(f"{file} names no output, the folder that is written; add output=FOLDER")
    config = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    if SECRET_ADDRESS.search(config):
        raise ConfigError(
            f"{file} holds a password or a signature in an address, which would be kept with the job for others to "
            "read; let the store's own tools find the credentials (docs/object_stores.md)"
        )
    if action == "train" and tasks is not None:
        raise ConfigError(
            f"--tasks is for building a dataset, and {file} is an experiment; leave it out"
        )
    if tasks is not None and tasks < 1:
        raise ConfigError(f"--tasks must be at least 1, not {tasks}")
    name = re.sub(r"[^a-z0-9]+", "-", Path(output).name.lower()).strip("-")[:40].strip("-") or "run"
    folder = (
        _folder(output, action)
        if cluster.shares_files
        else records.state_folder() / "launches" / name
    )
    written = (Path(output).absolute(), folder)
    files = snapshot.files_of(Path.cwd(), written) if cluster.takes_snapshot else None
    _check_names(files or [])
    job = JobSpec(
        name,
        action,
        config,
        _next_folder(folder),
        Path.cwd(),
        code=bool(files),
        tasks=tasks or 1,
        **_stop(tree),
    )
    return Launch(
        settings["kind"],
        cluster,
        job,
        cluster.render(job),
        (file, *settings_of_run),
        output,
        tuple(files) if files else None,
    )


class _Stop(TypedDict, total=False):
    stop_signals: tuple[str, ...]
    stop_seconds: float


def _stop(tree: Tree) -> _Stop:
    """The settings of `training.preemption`, where there are any; wrong ones are left for the check to refuse."""
    found: _Stop = {}
    training = tree.get("training")
    preemption = training.get("preemption") if isinstance(training, dict) else None
    if not isinstance(preemption, dict):
        return found
    if isinstance(names := preemption.get("signals"), list):
        found["stop_signals"] = tuple(map(str, names))
    with suppress(TypeError, ValueError):
        found["stop_seconds"] = float(preemption["deadline"]) if "deadline" in preemption else 120.0
    return found


def _check_names(files: Sequence[Path]) -> None:
    """Refuses code that would be taken for this program's own, unless it is."""
    names = {path.parts[0].removesuffix(".py") for path in files}
    if Path("trainer/cli.py") not in files and (
        clash := [name for name in _PACKAGES if name in names]
    ):
        raise ConfigError(
            f"the folder that you submit from has a {clash[0]} of its own, which would hide samestep's module of that "
            "name from the job; rename it, or set cluster.code=installed"
        )


def _folder(output: str, action: str) -> Path:
    """Where launches are kept: in the run's folder, but beside a dataset's, which is nothing but the dataset."""
    place = Path(os.path.abspath(output))
    return place / "launch" if action == "train" else place.with_name(f"{place.name}.launch")


def _next_folder(folder: Path) -> Path:
    numbers = [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal()]
    return folder / f"{max(numbers, default=0) + 1:03}"


def check(launch: Launch) -> None:
    """Refuses what would fail only once the job has waited for its turn.

    Raises:
        ConfigError: the run does not fit the devices, or its files are not there.
        LaunchError: there is no client, or another job works on the same output.
    """
    launch.cluster.check()
    busy = [record for record in records.newest_first() if record.output == _place(launch)]
    for record in busy[:1]:
        state = records.cluster_of(record).states([record]).get(record.id)
        if state is not None and state.active:
            raise LaunchError(
                f"job {record.id} ({state.word}) is about {launch.output} already; `samestep cancel {record.id}` ends "
                "it, or choose another output"
            )
    logger.info("looking whether this could start there")
    if launch.job.action == "build":
        _ask(["data", "build", *launch.arguments, "--check"], launch.cluster.exported)
        return
    elsewhere = not launch.cluster.shares_files
    devices = ",".join(map(str, launch.cluster.devices))
    later = launch.cluster.waits_for_jobs  # one of them may be to make the weights
    model = yaml.safe_load(launch.job.config).get("model") or {}
    without = ["init_from=null"] if later else []
    if later and isinstance(model, dict) and "kind" not in model:  # which those weights are to tell
        elsewhere, without = True, ["init_from=of_the_job_before"]
    flags = ["--elsewhere"] if elsewhere else []
    _ask(
        ["config", *launch.arguments, *without, "--devices", devices, *flags],
        launch.cluster.exported,
    )


def _place(launch: Launch) -> str:
    """The output, written in one way only."""
    return (
        os.path.abspath(launch.output) if launch.cluster.shares_files else launch.output.rstrip("/")
    )


def _ask(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    command = [sys.executable, "-P", "-m", "trainer.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
    if done.returncode < 0:
        raise LaunchError(
            f"looking whether the run could start was ended by {signal.Signals(-done.returncode).name}: has this "
            f"machine too little memory? Try `{shlex.join(['samestep', *arguments])}` by itself"
        )
    if done.returncode:
        _, found, message = done.stderr.partition("error: ")
        raise ConfigError(message.strip() if found else done.stderr.strip())


def submit(launch: Launch) -> Record:
    """Writes down what is submitted, and submits it; if that fails, nothing is left.

    Raises:
        LaunchError: it is refused, or cannot be written.
    """
    folder = launch.job.folder
    with _uninterrupted(), _made(folder):
        _write(launch)
        identity, about = launch.cluster.submit(launch.submission, folder)
        record = Record(
            identity, launch.kind, launch.job.name, _place(launch), folder, time.time(), about
        )
        try:
            records.add(record)
        except OSError as error:
            launch.cluster.cancel(record)
            raise LaunchError(
                f"cannot write {records.state_folder()}: {error.strerror}; the job was taken back"
            ) from error
    return record


def _write(launch: Launch) -> None:
    """Puts into the job's folder what it needs, and what tells later what it was.

    Raises:
        LaunchError: that is not possible.
    """
    folder = launch.job.folder
    try:
        for name, text in launch.submission.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / CONFIG).write_text(launch.job.config, encoding="utf-8")
        described = {"kind": launch.kind, **to_tree(launch.cluster)}
        (folder / records.CLUSTER).write_text(
            yaml.safe_dump(described, sort_keys=False), encoding="utf-8"
        )
        if launch.code is not None:
            snapshot.take(launch.job.directory, list(launch.code), folder / CODE)
    except OSError as error:
        raise LaunchError(f"cannot write {error.filename or folder}: {error.strerror}") from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds signals back until the cluster has answered, lest there be a job that nobody knows of."""
    held: list[int] = []

    def hold(number: int, _: object) -> None:
        held.append(number)
        logger.warning(
            "waiting for the cluster's answer; `samestep jobs` will list the job if it takes it"
        )

    before = {
        number: signal.signal(number, hold)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Makes a folder with those above it; takes back what it has made if what follows fails.

    Those above it stay where others have put something into them meanwhile, such as the other runs of a sweep.
    """
    above = [place for place in folder.parents if not place.exists()]
    try:
        (folder / "logs").mkdir(parents=True)
    except OSError as error:
        raise LaunchError(
            f"cannot write {folder}: {error.strerror}; choose another output"
        ) from error
    try:
        yield
    except BaseException:
        shutil.rmtree(folder)
        with suppress(OSError):  # not empty
            for place in above:
                place.rmdir()
        raise
