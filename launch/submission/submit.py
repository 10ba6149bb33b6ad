"""From two files to a job: read, render, write, submit. `checks` comes before the last two."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import yaml

from launch import records
from launch.job import CODE, CONFIG, Cluster, JobSpec, Record, Submission
from launch.submission import snapshot
from samestep.addresses import credential_in
from samestep.config import Tree, decode, read_tree, to_tree
from samestep.errors import ConfigError, LaunchError, fix_of

logger = logging.getLogger(__name__)

_CLUSTER = "cluster."
_PACKAGES = ("samestep", "trainer", "data_pipeline", "launch")


@dataclass(frozen=True)
class Launch:
    """A job that has been rendered and not submitted yet.

    Attributes:
        kind: kind of cluster.
        submission: the job as the cluster takes it.
        arguments: file and overrides, as they were typed.
        output: folder of the run or dataset.
        code: files of the snapshot; None takes none.
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
    """Renders a job, without writing anything or asking the cluster.

    Args:
        cluster_file: describes the cluster.
        file: an experiment, or a dataset to build.
        overrides: settings of the file, or of the cluster if they begin with `cluster.`.
        tasks: number of jobs that build the dataset.

    Raises:
        ConfigError: a setting or a file is invalid.
    """
    # `cluster.nodes=4` changes the cluster's file, `training.steps=10` the experiment's.
    of_cluster = [each.removeprefix(_CLUSTER) for each in overrides if each.startswith(_CLUSTER)]
    of_file = [each for each in overrides if not each.startswith(_CLUSTER)]
    settings, tree = read_tree(cluster_file, of_cluster), read_tree(file, of_file)
    _check_order(cluster_file, settings, file, tree)
    cluster = decode(Annotated[Cluster, records.KINDS], settings, "cluster")
    # Only a dataset's file has a source; everything else is an experiment.
    build = "source" in tree
    output = tree.get("output")
    if not isinstance(output, str) or not output:
        raise ConfigError(f"{file} names no output, the folder to write. Add output=FOLDER.")
    # One file without bases and overrides: the job does not depend on files that may be edited.
    config = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    if credential := credential_in(config):
        raise ConfigError(
            f"{file} has {credential} in a URL, which would be kept with the job "
            "for others to read. Let the store's own tools find the credentials "
            "(docs/object_stores.md)."
        )
    if tasks is not None and not build:
        raise ConfigError(
            f"--tasks is for building a dataset, and {file} is an experiment. Remove it."
        )
    if tasks is not None and tasks < 1:
        raise ConfigError(f"--tasks must be at least 1, not {tasks}")
    name = re.sub(r"[^a-z0-9]+", "-", Path(output).name.lower()).strip("-")[:40].strip("-") or "run"
    place = Path(os.path.abspath(output))
    # The folder for script, config, code and logs. On a cluster with shared files it is next to the
    # output, where the job can write its log; otherwise it is only on this machine.
    if not cluster.shares_files:
        folder = records.state_folder() / "launches" / name
    elif build:  # beside the dataset, whose folder holds nothing else
        folder = place.with_name(f"{place.name}.launch")
    else:
        folder = place / "launch"
    files = None
    if cluster.code == "snapshot":
        files = snapshot.files_of(Path.cwd(), (Path(output).absolute(), folder))
        _check_names(files or [])
        if files and cluster.shares_files:
            _check_place(folder)
    # Launches of one output are numbered: 001, 002, ...
    numbers = [int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal()]
    job = JobSpec(
        name,
        "build" if build else "train",
        config,
        folder / f"{max(numbers, default=0) + 1:03}",
        Path.cwd(),
        code=bool(files),
        tasks=tasks or 1,
    )
    job = _with_preemption(job, tree)
    submission = cluster.render(job)
    arguments = (file, *of_file)
    code = tuple(files) if files else None
    return Launch(settings["kind"], cluster, job, submission, arguments, output, code)


def _check_order(cluster_file: str, settings: Tree, file: str, tree: Tree) -> None:
    """Rejects swapped files: a cluster's file alone has a `kind` outside of all sections."""
    if "kind" in tree:
        other = "an experiment or a dataset"
        fix = f"Name {other} after the cluster's file."
        if "kind" not in settings:
            fix = f"Swap the two: samestep launch {shlex.join([file, cluster_file])}"
        raise ConfigError(f"{file} describes a cluster, and not {other}. {fix}")
    if "kind" not in settings:
        raise ConfigError(
            f"{cluster_file} has no kind, so it describes no cluster. Name a file such as "
            "configs/launch/local.yaml first, then the experiment or the dataset."
        )


def _with_preemption(job: JobSpec, tree: Tree) -> JobSpec:
    """Applies `training.preemption`; invalid values are left for the check to report."""
    training = tree.get("training")
    preemption = training.get("preemption") if isinstance(training, dict) else None
    if isinstance(preemption, dict):
        if isinstance(names := preemption.get("signals"), list):
            job = replace(job, stop_signals=tuple(map(str, names)))
        seconds = math.nan
        with suppress(TypeError, ValueError):
            seconds = float(preemption.get("deadline", job.stop_seconds))
        if seconds == math.inf:  # valid for samestep train
            raise ConfigError(
                "training.preemption.deadline is inf, and a cluster must know how long a run takes "
                "to stop. Set a number of seconds."
            )
        if math.isfinite(seconds):
            job = replace(job, stop_seconds=seconds)
    return job


def _check_names(files: Sequence[Path]) -> None:
    """Rejects code with the names of this program's packages, unless it is this program."""
    names = {path.parts[0].removesuffix(".py") for path in files}
    clash = [name for name in _PACKAGES if name in names]
    if clash and Path("samestep/cli.py") not in files:
        raise ConfigError(
            f"the folder that you submit from has a {clash[0]} of its own, which would hide "
            "samestep's module of that name from the job. Rename it, or set cluster.code=installed."
        )


def _check_place(folder: Path) -> None:
    """Rejects a folder of a snapshot that PYTHONPATH cannot name: a colon ends a folder there."""
    if ":" in str(folder):
        raise ConfigError(
            f"{folder} has a colon in it, so Python would not find the snapshot of the code there. "
            "Choose another output, or set cluster.code=installed."
        )


def output_of(launch: Launch) -> str:
    """The output in a normalized form, by which two launches of the same one are recognized."""
    shared = launch.cluster.shares_files
    return os.path.abspath(launch.output) if shared else launch.output.rstrip("/")


def submit(launch: Launch) -> Record:
    """Writes the job's files and submits it; a failure leaves nothing behind.

    Raises:
        LaunchError: the cluster refuses it, or a file cannot be written.
    """
    folder = launch.job.folder
    # The order of undoing: first the folder, then the signals, which may end this process.
    with _deferred_signals(), _created(folder):
        _write(launch)
        id_, about = launch.cluster.submit(launch.submission, folder)
        record = Record(
            id_, launch.kind, launch.job.name, output_of(launch), folder, time.time(), about
        )
        try:
            records.add(record)
        except OSError as error:
            # A job that `samestep jobs` does not list could not be watched or cancelled.
            launch.cluster.cancel(record)
            raise LaunchError(
                f"cannot write {records.state_folder()}: {error.strerror}. The job was canceled; "
                f"{fix_of(error, 'make that folder writable')}, and submit again."
            ) from error
    return record


def _write(launch: Launch) -> None:
    """Writes the job's files into its folder.

    Raises:
        LaunchError: one of them cannot be written.
    """
    folder = launch.job.folder
    described = {"kind": launch.kind, **to_tree(launch.cluster)}
    texts = {
        **launch.submission.files,
        CONFIG: launch.job.config,
        records.CLUSTER: yaml.safe_dump(described, sort_keys=False),
    }
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        if launch.code is not None:
            snapshot.take(launch.job.directory, list(launch.code), folder / CODE)
    except OSError as error:
        raise LaunchError(
            f"cannot write {error.filename or folder}: {error.strerror}; "
            f"{fix_of(error, 'make its folder writable')}, or choose another output."
        ) from error


@contextmanager
def _deferred_signals() -> Iterator[None]:
    """Defers signals until the cluster has answered, or there might be a job without a record."""
    deferred: list[int] = []

    def defer(number: int, _: object) -> None:
        deferred.append(number)
        logger.warning(
            "waiting for the cluster's answer; `samestep jobs` will list the job if it takes it"
        )

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, defer) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if deferred:
            signal.raise_signal(deferred[0])


@contextmanager
def _created(folder: Path) -> Iterator[None]:
    """Creates a folder and its parents, and removes them if the block fails.

    Parents stay if others have put something into them meanwhile, such as other runs of a sweep.
    """
    parents = [place for place in folder.parents if not place.exists()]
    try:
        (folder / "logs").mkdir(parents=True)
    except OSError as error:
        raise LaunchError(
            f"cannot write {folder}: {error.strerror}; "
            f"{fix_of(error, 'make its folder writable')}, or choose another output."
        ) from error
    try:
        yield
    except BaseException:
        shutil.rmtree(folder)
        with suppress(OSError):  # not empty
            for place in parents:
                place.rmdir()
        raise
