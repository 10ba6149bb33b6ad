"""Jobs and submissions, and the interface that every kind of cluster implements."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import yaml

from launch.environment import Environment
from samestep.config import Tree

CONFIG = "config.yaml"
CODE = "code"
SCRIPT = "job.sh"
LOG = "job.log"
EXIT = "exit"
"""File with the exit code of a job that has ended by itself."""
CANCEL = "cancel"
"""File that exists once the job was asked to end."""


@dataclass(frozen=True)
class JobSpec:
    """Work for a cluster of any kind.

    Attributes:
        name: lower-case letters, digits and dashes.
        action: train an experiment, or build a dataset.
        config: the experiment or dataset as YAML, with bases and overrides merged; lies in `folder`
            as config.yaml.
        folder: keeps the files of this launch: rendered files, configuration, code and logs.
        directory: where the configuration's relative paths start, on machines that share files with
            this one.
        code: whether `folder` holds a snapshot of the code, which precedes the installed package.
        tasks: number of jobs in the array that builds a dataset.
        stop_signals: signals on which a run saves a checkpoint and exits.
        stop_seconds: time that the run gets to do so.
    """

    name: str
    action: Literal["train", "build"]
    config: str
    folder: Path
    directory: Path
    code: bool = False
    tasks: int = 1
    stop_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
    stop_seconds: float = 120.0

    @property
    def restart_signals(self) -> tuple[str, ...]:
        """The stop signals after which a run is to be started again, with exit code 75."""
        # Ctrl-C is a user's, who wants no restart.
        return tuple(name for name in self.stop_signals if name != "SIGINT")

    @property
    def tree(self) -> Tree:
        """The experiment or dataset, as yet unchecked."""
        tree: Tree = yaml.safe_load(self.config)
        return tree

    @property
    def command(self) -> tuple[str, ...]:
        """The command, without the configuration's file."""
        return ("samestep", "train") if self.action == "train" else ("samestep", "data", "build")

    def shell_command(self, *arguments: str) -> str:
        """The command as a line of shell, on machines that see `folder`.

        Args:
            arguments: further arguments, already quoted where necessary.
        """
        # The copy in `folder`: the user may go on editing the original.
        return " ".join([*self.command, shlex.quote(str(self.folder / CONFIG)), *arguments])

    def exports(self) -> list[str]:
        """Lines of shell that tell the command where its logs and code are, in `folder`."""
        lines = [f"export SAMESTEP_LOGS={shlex.quote(str(self.folder / 'logs'))}"]
        if self.code:
            code = shlex.quote(str(self.folder / CODE))
            # Before what the machine has set, so the snapshot precedes the installed package.
            lines.append(f'export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"')
        return lines


@dataclass(frozen=True)
class Submission:
    """A job as one kind of cluster takes it.

    Attributes:
        files: texts by name, which are written into the job's folder. The cluster runs or creates
            the first.
        command: submits them; run in the job's folder without a shell.
    """

    files: Mapping[str, str]
    command: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where the machines of a job find a file or folder.

    Attributes:
        name: of the storage, as "claim samestep-work".
        keeps: whether files that are written there outlive the job's machines.
    """

    name: str
    keeps: bool = True


@dataclass(frozen=True)
class State:
    """The state of a job.

    Attributes:
        word: the cluster's own word, in lower case.
        active: whether the job waits or runs.
        nodes: names of the nodes, if known.
        restarts: number of restarts, if known.
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
        id: the cluster's identifier of the job.
        kind: kind of cluster.
        name: name of the job.
        output: folder of the run or dataset; absolute, unless the cluster shares no files.
        folder: keeps the files of the launch.
        time: of submission, in seconds since the epoch.
        about: further values that the cluster needs to find the job again.
    """

    id: str
    kind: str
    name: str
    output: str
    folder: Path
    time: float
    about: Mapping[str, str] = field(default_factory=dict)


class Cluster(ABC):
    """A kind of cluster: the base class of the `Config` in its module."""

    shares_files: ClassVar[bool]
    """Whether its machines see the folders of the machine that submits."""
    reach: ClassVar[str] = ""
    """How files get to its machines: the end of an error message."""
    keeping: ClassVar[str] = ""
    """Where checkpoints outlive the job: the end of an error message."""

    # Defaults for kinds that have no such setting; others declare a field of the same name.
    code: Literal["snapshot", "installed"] = "installed"
    environment: Environment = Environment()

    @property
    @abstractmethod
    def devices(self) -> tuple[int | Literal["here"], ...]:
        """Every number of devices that a run may get; "here" is the number on this machine."""

    @property
    @abstractmethod
    def hardware(self) -> Literal["gpu", "tpu", "cpu", "here"]:
        """The hardware that a run computes on; "here" is whatever this machine has."""

    @property
    @abstractmethod
    def size(self) -> str:
        """The nodes and devices of a run in words, as "2 to 8 nodes x 8 GPUs"."""

    @property
    def waits_for_jobs(self) -> bool:
        """Whether jobs wait for other jobs, which may write the weights that they read."""
        return False

    @abstractmethod
    def render(self, job: JobSpec) -> Submission:
        """Renders the script or manifest, without side effects.

        Raises:
            ConfigError: the cluster's settings do not allow this job.
        """

    def place_of(self, path: str, job: JobSpec, submission: Submission) -> Place | None:
        """Where the job's machines find a path that this machine names; None if nowhere."""
        return Place("files of this machine")

    def check_code(self, job: JobSpec, files: Sequence[Path]) -> str:
        """Checks that the machines get the code of the job; returns where from.

        Args:
            files: of the snapshot, relative to the folder that the job is submitted from.

        Raises:
            ConfigError: nothing brings it to them.
        """
        return f"a snapshot of {len(files)} files" if files else "the installed package"

    def ask(self, submission: Submission) -> str:
        """Asks the cluster whether it would take the job, and submits nothing; its answer.

        Raises:
            LaunchError: it would not.
        """
        return ""

    @abstractmethod
    def check(self) -> None:
        """Checks that jobs can be submitted from this machine.

        Raises:
            LaunchError: they cannot.
        """

    @abstractmethod
    def submit(self, submission: Submission, folder: Path) -> tuple[str, Mapping[str, str]]:
        """Submits the files in `folder`; returns the job's id, and `Record.about`.

        Raises:
            LaunchError: the cluster refuses it, and keeps nothing of it.
        """

    @abstractmethod
    def states(self, records: Iterable[Record]) -> Mapping[Path, State]:
        """States of jobs by folder, without those that the cluster has forgotten.

        Ids may repeat: one of a local job is the number of a process.

        Raises:
            LaunchError: the cluster does not answer.
        """

    def is_active(self, record: Record) -> bool:
        """Whether a job waits or runs."""
        state = self.states([record]).get(record.folder)
        return state is not None and state.active

    @abstractmethod
    def logs(self, record: Record, follow: bool) -> Iterable[str]:
        """The text of the job's log, in chunks; with `follow` until the job ends.

        Raises:
            LaunchError: there is no log.
        """

    @abstractmethod
    def cancel(self, record: Record) -> None:
        """Ends a job; a run saves a checkpoint first.

        Raises:
            LaunchError: it has ended, or cannot be reached.
        """
