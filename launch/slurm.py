"""Slurm: a batch script whose only step is one `samestep train --elastic` a node."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from launch import command_line, logs
from launch.environment import Environment
from launch.job import CANCEL, EXIT, LOG, SCRIPT, Cluster, JobSpec, Record, State, Submission
from launch.nodes import device_counts, node_range
from trainer.errors import EXIT_PREEMPTED, EXIT_UNAVAILABLE, ConfigError, LaunchError

_WORD = re.compile(r"[\w.:,@+\-*/&|()\[\]=%]+")
_FOREIGN = re.compile(r"SLURM_(?!CONF$)|SBATCH_|SRUN_|SQUEUE_|SCANCEL_")
_ASK_SECONDS = 15.0  # between two questions whether a job that is followed goes on
_TIME = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?")
_OURS = {
    "array",
    "clusters",
    "job-name",
    "nodes",
    "ntasks",
    "open-mode",
    "output",
    "parsable",
    "signal",
    "wait",
}
_STARTUP = 60  # seconds beyond those for a checkpoint: Slurm may be late with its signal
_STOPS = 5  # in a row from the same step, after which a run is not requeued
_HINTS = {
    "invalid partition": "`sinfo --summarize` lists the partitions; set cluster.partition to one of them",
    "invalid account": "`sacctmgr show associations user=$USER` lists your accounts; set cluster.account to one",
    "node configuration is not available|node count specification invalid|more processors requested": (
        "no node of the partition has that many GPUs, cores or that much memory, or it has too few nodes: see "
        "`sinfo --Node --long`, and lower cluster.gpus_per_node or cluster.nodes"
    ),
    "invalid generic resource|invalid gres": "its nodes have no such GPUs: see `sinfo --format='%N %G'`",
    "time limit": "`sinfo` shows the partition's limit; lower cluster.time: the run goes on in a requeued job",
    "unable to contact slurm controller|connection refused|configuration source": (
        "Slurm's controller cannot be reached from here; try on a login node, or ask `scontrol ping`"
    ),
    "invalid user|access/permission denied|expired|munge": "log in again, and see `munge -n | unmunge`",
    "invalid job id": "`samestep jobs` lists yours",
}
_SELECTION = ("nodes", "partition", "account", "qos", "constraint", "memory", "gpu_type")


@dataclass(frozen=True)
class Container:
    """An image that the command runs in.

    Attributes:
        kind: pyxis (srun's --container-image, with enroot) or apptainer.
        image: a file, or a name that the kind knows how to find.
        mounts: further folders that are seen inside, at the same place, or FROM:TO. Those of the run and of the launch
            are there already.
    """

    image: str
    kind: Literal["pyxis", "apptainer"] = "pyxis"
    mounts: tuple[str, ...] = ()

    def words(self, job: JobSpec, gpus: bool) -> list[str]:
        """What goes between srun and the command."""
        folders = dict.fromkeys((str(job.directory), str(job.folder.parents[1])))
        mounts = [*(f"{folder}:{folder}" for folder in folders), *self.mounts]
        if wrong := [mount for mount in mounts if "," in mount or mount.count(":") > 1]:
            raise ConfigError(
                f"container.mounts: {wrong[0]!r} has a comma or colon in it, which separate mounts"
            )
        if self.kind == "apptainer":
            place = ["--pwd", str(job.directory), "--bind", ",".join(mounts)]
            return ["apptainer", "exec", *["--nv"] * gpus, *place, self.image]
        # Enroot takes what is no path for an image of a registry.
        image = str(job.directory / self.image) if self.image.endswith(".sqsh") else self.image
        options = [f"--container-image={image}", f"--container-workdir={job.directory}"]
        # Images with PyTorch in them are given ranks, which the agent would take for another launcher's.
        without = ["env", "-u", "RANK", "-u", "WORLD_SIZE", "-u", "LOCAL_RANK"]
        return [*options, f"--container-mounts={','.join(mounts)}", *without]


@dataclass(frozen=True)
class Config(Cluster):
    """A partition of a Slurm cluster whose nodes share files with the machine that submits.

    Attributes:
        nodes: a number, or a range as 2-8: the run starts as soon as it can have the fewest, and each time it is
            requeued with what is free then.
        gpus_per_node: GPUs, with one process for each; 0 trains on the CPU.
        gpu_type: Slurm's name of the GPUs, where it has several types.
        processes_per_node: without GPUs.
        cpus_per_node: cores; None takes what the partition gives, all of them if `exclusive`.
        memory: of a node, as Slurm writes it (200G; 0 is all); None takes what the partition gives.
        partition: None takes the cluster's own.
        account: what the time is charged to.
        qos: quality of service.
        constraint: features that nodes must have.
        time: limit of one job, as 2d, 12h or 1d6h30m. The run is not bound by it: shortly before, it saves a checkpoint
            and is requeued. None takes the partition's.
        exclusive: whether no other job shares the nodes.
        requeue: whether a run that was stopped by the limit, by pre-emption or by a node's failure goes on by itself.
        segments: jobs that are submitted at once, each of which goes on when the one before has not finished the run:
            for clusters that allow no requeuing. They take the place of `requeue`.
        interface: the network interface of NCCL and gloo, as ib0; None leaves the choice to them.
        container: an image to run in; None takes the environment.
        environment: what is set up before the command.
        code: snapshot copies what git knows of the folder that you submit from, which then comes before what is
            installed; installed takes that alone.
        options: further options of sbatch, as --reservation=week7.
    """

    nodes: str | int = 1
    gpus_per_node: int = 0
    gpu_type: str | None = None
    processes_per_node: int = 1
    cpus_per_node: int | None = None
    memory: str | int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | None = None
    exclusive: bool = False
    requeue: bool = True
    segments: int = 1
    interface: str | None = None
    container: Container | None = None
    environment: Environment = field(default_factory=Environment)
    code: Literal["snapshot", "installed"] = "snapshot"
    options: tuple[str, ...] = ()

    shares_files: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in _SELECTION:
            value = getattr(self, name)
            if value is not None and not _WORD.fullmatch(str(value)):
                raise ConfigError(f"{name} {value!r} is nothing that Slurm would have a name for")
        command_line.check_options(self.options, "sbatch")
        for option in self.options:
            if option.removeprefix("--").partition("=")[0] in _OURS:
                raise ConfigError(
                    f"options: {option!r} would undo what samestep launch sets; leave it out"
                )
        for name in ("processes_per_node", "segments", "cpus_per_node"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.gpus_per_node < 0:
            raise ConfigError(f"gpus_per_node must be at least 0, not {self.gpus_per_node}")
        _ = self.node_range, self.minutes  # refuses what is none

    @property
    def node_range(self) -> tuple[int, int]:
        """The fewest nodes, and the most."""
        return node_range(self.nodes)

    @property
    def minutes(self) -> int | None:
        """The limit of one job."""
        if self.time is None:
            return None
        match = _TIME.fullmatch(self.time)
        days, hours, minutes = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
        if not (total := 60 * (24 * days + hours) + minutes):
            raise ConfigError(f"time must be written as 2d, 12h, 90m or 1d6h30m, not {self.time}")
        return total

    @property
    def devices(self) -> tuple[int, ...]:
        """One number for each number of nodes."""
        return device_counts(self.node_range, self.gpus_per_node or self.processes_per_node)

    @property
    def takes_snapshot(self) -> bool:
        return self.code == "snapshot"

    @property
    def waits_for_jobs(self) -> bool:
        return any(option.startswith("--dependency") for option in self.options)

    @property
    def exported(self) -> Mapping[str, str]:
        return self.environment.variables

    def render(self, job: JobSpec) -> Submission:
        """One batch script."""
        build = job.action == "build"
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in self._options(job))]
        lines += [
            "",
            "# Written by samestep launch. Slurm runs it on the first node, again after each requeue.",
        ]
        ended = f'"$launch/{EXIT}{"-$SLURM_ARRAY_TASK_ID" if build else ""}"'
        lines += [
            f"launch={shlex.quote(str(job.folder))}",
            f"rm -f -- {ended}",
            f"trap 'echo 1 > {ended}' EXIT",
        ]
        lines += [f"cd -- {shlex.quote(str(job.directory))} || exit 1"]
        lines += [*self.environment.lines(own=self.container is None), "trap - EXIT", "set +eu"]
        lines += [
            *job.exports(),
            'export SAMESTEP_JOB="$SLURM_JOB_ID" SAMESTEP_NODES="$SLURM_JOB_NODELIST"',
        ]
        if self.interface:
            lines += [
                f"export {name}_SOCKET_IFNAME={shlex.quote(self.interface)}"
                for name in ("NCCL", "GLOO")
            ]
        lines.append("")
        lines += self._build(job, ended) if build else self._train(job, ended)
        log = _pattern(job.folder / ("job-%a.log" if build else LOG))
        return Submission(
            {SCRIPT: "\n".join(lines) + "\n"}, ("sbatch", "--parsable", f"--output={log}", SCRIPT)
        )

    def _options(self, job: JobSpec) -> list[str]:
        build, (fewest, most) = job.action == "build", self.node_range
        chain = hashlib.sha256(str(job.folder).encode()).hexdigest()[
            :6
        ]  # whose name no other jobs may have
        options = [
            f"--job-name={job.name}" + f"-{chain}" * (self.segments > 1),
            "--open-mode=append",
        ]
        options += ["--dependency=singleton"] * (self.segments > 1)
        if build:
            options += ["--nodes=1", f"--array=1-{job.tasks}"]
        else:
            options += [f"--nodes={fewest}-{most}" if most > fewest else f"--nodes={fewest}"]
        if self.gpus_per_node and not build:
            of_type = f"{self.gpu_type}:" if self.gpu_type else ""
            options.append(
                f"--gres=gpu:{of_type}{self.gpus_per_node}"
            )  # which every select plugin takes
        named = {"mincpus": self.cpus_per_node, "mem": self.memory, "partition": self.partition}
        named |= {"account": self.account, "qos": self.qos, "constraint": self.constraint}
        options += [f"--{name}={value}" for name, value in named.items() if value is not None]
        if self.minutes is not None:
            days, minutes = divmod(self.minutes, 24 * 60)
            options.append(f"--time={days}-{minutes // 60:02}:{minutes % 60:02}:00")
        options += ["--exclusive"] * (self.exclusive and not build)
        if not build and job.stop_signals:
            name = "SIGUSR1" if "SIGUSR1" in job.stop_signals else job.stop_signals[0]
            lead = round(job.stop_seconds) + _STARTUP
            if self.minutes is not None and self.minutes * 60 < 2 * lead:
                raise ConfigError(
                    f"time {self.time} is too short: {lead} s before its end the run is told to save a checkpoint; "
                    "raise cluster.time, or lower training.preemption.deadline"
                )
            options.append(f"--signal={name.removeprefix('SIG')}@{lead}")
        options.append("--requeue" if build or self._requeues else "--no-requeue")
        named_by_user = (option.partition("=") for option in self.options)
        return [
            *options,
            *(
                f"{name}{equals}{shlex.quote(value) if value else ''}"
                for name, equals, value in named_by_user
            ),
        ]

    @property
    def _requeues(self) -> bool:
        return self.requeue and self.segments == 1

    def _build(self, job: JobSpec, ended: str) -> list[str]:
        """One slice a task; the last one merges and verifies."""
        slice_ = ["--slice", f'"$SLURM_ARRAY_TASK_ID/{job.tasks}"']
        lines = [" ".join(self._srun(job, gpus=False)) + " \\", "  " + job.shell_command(*slice_)]
        return [*lines, "code=$?", f"echo $code > {ended}", "exit $code"]

    def _srun(self, job: JobSpec, gpus: bool) -> list[str]:
        """What runs a command on each node."""
        # The batch script asks for no tasks: Slurm would stop at nodes for those, and take the fewest of a range.
        srun = ["srun", '--ntasks="$SLURM_JOB_NUM_NODES"', "--ntasks-per-node=1", "--cpu-bind=none"]
        srun += [f"--cpus-per-task={self.cpus_per_node}"] * bool(self.cpus_per_node)
        inside = self.container.words(job, gpus) if self.container else []
        return [*srun, "--kill-on-bad-exit=0", *map(shlex.quote, inside)]

    def _train(self, job: JobSpec, ended: str) -> list[str]:
        processes = [] if self.gpus_per_node else ["--processes", str(self.processes_per_node)]
        elastic = [
            "--elastic",
            f'"{self.node_range[0]}:$SLURM_JOB_NUM_NODES"',
            "--rendezvous",
            '"$rendezvous"',
        ]
        srun = self._srun(job, gpus=bool(self.gpus_per_node))
        cancel, stops = (f'"$launch/{name}"' for name in (CANCEL, "stops"))
        lines = [
            "# The nodes meet at the first of them.",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            'rendezvous="$first:$((20000 + SLURM_JOB_ID % 10000))"',
        ]
        lines += [
            f"[ ! -e {cancel} ] || exit {EXIT_PREEMPTED}",
            "",
            " ".join(srun) + " \\",
            "  " + job.shell_command(*processes, *elastic),
            "code=$?",
        ]
        # 128 and a signal's number: it was not done with its checkpoint in time, or killed, as for want of memory.
        signals = {_number(each) for each in (*job.stop_signals, "SIGKILL")}
        codes = (EXIT_UNAVAILABLE, EXIT_PREEMPTED, *(128 + number for number in sorted(signals)))
        stopped = "|".join(map(str, codes))
        if self._requeues:
            starts = shlex.quote(str(job.folder.parents[1] / "starts.jsonl"))
            lines += [
                "",
                "# If it was stopped, it goes on from its newest checkpoint, unless it comes no further by that.",
                f"case $code in {stopped})",
                f"  {{ tail -n 1 -- {starts} | grep -o '\"step\": *[0-9]*' || echo none; }} >> {stops}",
                f"  if tail -n {_STOPS} -- {stops} | uniq -c | grep -q '^ *{_STOPS} '; then",
                f'    echo "stopped {_STOPS} times without a newer checkpoint: not requeued" >&2',
                f"  elif [ ! -e {cancel} ]; then",
                '    scontrol requeue "$SLURM_JOB_ID" && exit $code',
                "  fi ;;",
                "esac",
            ]
        elif self.segments > 1:
            lines += [
                "",
                "# Unless it was stopped, there is nothing left for the segments after it.",
                f"case $code in {stopped}) ;; *)",
                '  scancel --state=PENDING --user="$(id -un)" --name="$SLURM_JOB_NAME" ;;',
                "esac",
            ]
        return [*lines, f"echo $code > {ended}", "exit $code"]

    def check(self) -> None:
        """Looks for Slurm's commands."""
        command_line.require("sbatch", "jobs are submitted from a login node of the Slurm cluster")

    def submit(self, submission: Submission, folder: Path) -> tuple[str, Mapping[str, str]]:
        """All segments, or none; the id is that of the first one."""
        ids: list[str] = []
        try:
            for _ in range(self.segments):
                ids.append(_identity(_run(submission.command, folder)))
        except LaunchError:
            if ids:
                _run(["scancel", *ids])
            raise
        array = re.search(r"^#SBATCH --array=1-(\d+)$", submission.files[SCRIPT], re.M)
        return ids[0], {"segments": " ".join(ids), "tasks": array[1] if array else "1"}

    def states(self, records: Iterable[Record]) -> Mapping[str, State]:
        """Those that wait or run as Slurm's queue has them, the others by what their script has left."""
        queue = _queue()
        return {record.id: _state(record, queue) for record in records}

    def logs(self, record: Record, follow: bool) -> Iterable[str]:
        """The log of the first segment or task on; all nodes write into one."""
        return logs.read(
            record.folder, lambda: follow and self.states([record])[record.id].active, _ASK_SECONDS
        )

    def cancel(self, record: Record) -> None:
        """A run that goes on saves a checkpoint, however long that takes; asked twice, it is ended at once."""
        queue, mark = _queue(), record.folder / CANCEL
        states = {job: queue[job][0][0] for job in record.about["segments"].split() if job in queue}
        if not states:
            raise LaunchError(f"{record.id} has ended already")
        saves = re.search(
            r"^#SBATCH --signal=(\w+)@", (record.folder / SCRIPT).read_text(encoding="utf-8"), re.M
        )
        again = mark.exists()
        gently = saves is not None and not again
        told = [job for job, state in states.items() if state == "RUNNING" and gently]
        mark.touch()
        try:
            if ended := [job for job in states if job not in told]:
                _run(["scancel", *ended])
            if told and saves:
                _run(["scancel", f"--signal={saves[1]}", *told])
        except LaunchError:
            if not again:
                mark.unlink()
            raise


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    """What a command of Slurm's prints, whatever the shell has of settings, or of a job that it is part of."""
    environment = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
    return command_line.run(command, _HINTS, folder, environment=environment)


def _queue() -> dict[str, list[list[str]]]:
    """This user's jobs that wait or run, by number: state, nodes, restarts and reason of each task."""
    form = "ArrayJobID:|,State:|,NodeList:|,RestartCnt:|,Reason:"
    queue: dict[str, list[list[str]]] = {}
    for line in _run(["squeue", "--me", "--noheader", "--array", f"--Format={form}"]).splitlines():
        number, *rest = (part.strip() for part in line.split("|"))
        queue.setdefault(number, []).append(rest)
    return queue


def _state(record: Record, queue: Mapping[str, list[list[str]]]) -> State:
    found = [each for number in record.about["segments"].split() for each in queue.get(number, [])]
    if not found:
        return logs.state_of_ended(record.folder, int(record.about["tasks"]))
    words = Counter(word.lower() for word, *_ in found)
    word = (
        next(iter(words))
        if len(words) == 1
        else ", ".join(f"{count} {word}" for word, count in words.items())
    )
    _, nodes, restarts, reason = next((each for each in found if each[0] == "RUNNING"), found[0])
    return State(word, True, nodes, int(restarts or 0), "" if reason == "None" else reason)


def _identity(printed: str) -> str:
    """The job's id, out of what sbatch --parsable prints; clusters may greet before it."""
    match = re.fullmatch(r"(\d+)(;\S+)?", printed.strip().rpartition("\n")[2])
    if match is None:
        raise LaunchError(
            f"sbatch printed no job id but {printed.strip()!r}; `squeue --me` says whether there is a job"
        )
    return match[1]


def _number(name: str) -> int:
    return signal.Signals[name] if name in signal.Signals.__members__ else 0


def _pattern(path: Path) -> str:
    """A path as sbatch's --output takes it, but for the %a of an array.

    Raises:
        ConfigError: there is no way to write it.
    """
    if "\\" in str(path):
        raise ConfigError(
            f"output {path} has a backslash in it, which Slurm takes for something else; choose another"
        )
    return str(path.parent).replace("%", "%%") + "/" + path.name
