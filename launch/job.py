"""What is submitted, and what a kind of cluster has to offer."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

CONFIG = "config.yaml"
CODE = "code"
SCRIPT = "job.sh"
LOG = "job.log"
EXIT = "exit"  # the job's exit code, once it has ended by itself
CANCEL = "cancel"  # is there once the job has been asked to end


@dataclass(frozen=True)
class JobSpec:
    """Work for a cluster of any kind.

    Attributes:
        name: of small letters, digits and dashes.
        action: train an experiment, or build a dataset.
        config: the experiment or dataset, its bases and overrides merged, as YAML; it lies in `folder` as config.yaml.
        folder: what is kept of this launch: what was rendered, the configuration, the code, logs.
        directory: where the configuration's relative paths start, on machines that share files with this one.
        code: whether `folder` holds a snapshot of the code, which goes before what is installed.
        tasks: the jobs of an array that a dataset is built by.
        stop_signals: those upon which a run saves a checkpoint and exits with code 75.
        stop_seconds: that it gets for that.
    """

    name: str
    action: Literal["train", "build"]
    config: str
    folder: Path
    directory: Path
    code: bool = False
    tasks: int = 1
    stop_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    stop_seconds: float = 120.0

    @property
    def command(self) -> tuple[str, ...]:
        """The command that does the work, but for the configuration's file."""
        return ("samestep", "train") if self.action == "train" else ("samestep", "data", "build")

    def shell_command(self, *more: str) -> str:
        """The command as a line of shell, on machines that see `folder`.

        Args:
            more: further arguments, quoted where they need to be.
        """
        return " ".join([*self.command, shlex.quote(str(self.folder / CONFIG)), *more])

    def exports(self) -> list[str]:
        """Lines of shell that tell the command where it belongs, on machines that see `folder`."""
        lines = [f"export SAMESTEP_LOGS={shlex.quote(str(self.folder / 'logs'))}"]
        if self.code:
            lines.append(
                f'export PYTHONPATH={shlex.quote(str(self.folder / CODE))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
            )
        return lines


@dataclass(frozen=True)
class Submission:
    """What a job has become for one kind of cluster.

    Attributes:
        files: texts by name; they are written into the job's folder.
        command: what submits them, run in the job's folder without a shell.
    """

    files: Mapping[str, str]
    command: tuple[str, ...]


@dataclass(frozen=True)
class State:
    """How a job stands.

    Attributes:
        word: in the cluster's own words, in small letters.
        active: whether it waits or runs.
        nodes: where, if that is known.
        restarts: how often it was started again, if that is known.
        detail: why it waits, or how it ended.
    """

    word: str
    active: bool
    nodes: str = ""
    restarts: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class Record:
    """A job that was submitted.

    Attributes:
        id: the cluster's name of it.
        kind: of cluster.
        name: of the job.
        output: the run's folder or dataset's: absolute, or as those see it who do not share files.
        folder: what is kept of the launch.
        time: of submission, in seconds since the epoch.
        about: what else the cluster needs to find it again.
    """

    id: str
    kind: str
    name: str
    output: str
    folder: Path
    time: float
    about: Mapping[str, str] = field(default_factory=dict)


class Cluster(ABC):
    """A kind of cluster: the base of the `Config` of its module."""

    shares_files: ClassVar[bool]
    """Whether the machines see the folders of the one that submits."""

    @property
    @abstractmethod
    def devices(self) -> tuple[int | Literal["here"], ...]:
        """All numbers of devices that a run may get."""

    @property
    def takes_snapshot(self) -> bool:
        """Whether jobs run a copy of the code that they are submitted from."""
        return False

    @property
    def waits_for_jobs(self) -> bool:
        """Whether jobs wait for others, which may write what they read."""
        return False

    @property
    def exported(self) -> Mapping[str, str]:
        """Environment variables of a job that also hold while it is checked on this machine."""
        return {}

    @abstractmethod
    def render(self, job: JobSpec) -> Submission:
        """Makes the script or manifest; pure.

        Raises:
            ConfigError: the cluster's settings cannot do this.
        """

    @abstractmethod
    def check(self) -> None:
        """Looks whether jobs can be submitted from here at all.

        Raises:
            LaunchError: they cannot.
        """

    @abstractmethod
    def submit(self, submission: Submission, folder: Path) -> tuple[str, Mapping[str, str]]:
        """Submits what lies in `folder`; returns the id, and what else finds the job again.

        Raises:
            LaunchError: it is refused; then nothing is left on the cluster.
        """

    @abstractmethod
    def states(self, records: Iterable[Record]) -> Mapping[str, State]:
        """How jobs stand, by id; those that the cluster has forgotten are left out.

        Raises:
            LaunchError: the cluster does not answer.
        """

    @abstractmethod
    def logs(self, record: Record, follow: bool) -> Iterable[str]:
        """What the job has written, in pieces; `follow` goes on until it ends.

        Raises:
            LaunchError: there is none.
        """

    @abstractmethod
    def cancel(self, record: Record) -> None:
        """Ends the job: a run saves a checkpoint first.

        Raises:
            LaunchError: that is not possible.
        """
