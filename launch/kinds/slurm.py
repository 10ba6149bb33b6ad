"""Slurm: the only step of a batch script runs one `samestep train --elastic` on each node."""

from __future__ import annotations

import hashlib
import re
import shlex
import signal
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from launch import logs
from launch.clients import command_line
from launch.clients import slurm as slurm_client
from launch.environment import Container, Environment, exports
from launch.job import CANCEL, EXIT, LOG, SCRIPT, JobSpec, Place, Record, State, Submission
from launch.settings import NodeCluster, check_least, check_options, check_patterns
from samestep.errors import EXIT_PREEMPTED, EXIT_UNAVAILABLE, ConfigError, LaunchError

_WORD = re.compile(r"[\w.:,@+\-*/&|()\[\]=%]+")
_WORDS = dict.fromkeys(
    ("nodes", "partition", "account", "qos", "constraint", "memory", "gpu_type"), _WORD
)
# Days, hours and minutes, each optional: 2d, 12h, 1d6h30m.
_TIME = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?")
# Options that the batch script sets itself.
_OWN_OPTIONS = re.compile(
    "--(array|clusters|job-name|nodes|ntasks|open-mode|output|parsable|signal|wait)(=.*)?"
)
_POLL_SECONDS = 15.0  # between two requests for the state of a job whose log is followed
_SIGNAL_MARGIN = 60  # seconds: Slurm may be late with its signal
# Two jobs on one node need different ports, and all nodes must know the port without asking: it
# follows from the job's id.
RENDEZVOUS = (
    'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    'rendezvous="$first:$((20000 + SLURM_JOB_ID % 10000))"',
)
_MAX_STOPS = 5  # in a row from the same step; a run is not requeued after that


@dataclass(frozen=True)
class Config(NodeCluster):
    """A partition of a Slurm cluster. Its nodes share files with the machine that submits.

    Attributes:
        nodes: number of nodes, or a range as 2-8: the run starts as soon as it can have the least,
            and whenever it is requeued it takes the nodes that are free.
        gpus_per_node: GPUs, with one process for each; 0 trains on the CPU.
        gpu_type: Slurm's name of the GPUs, if the cluster has several types.
        processes_per_node: number of processes on a node without GPUs.
        cpus_per_node: cores; None takes the partition's default, all of them if `exclusive`.
        memory: memory of a node, as Slurm writes it (200G; 0 is all); None takes the partition's
            default, or all of it for a run with `exclusive`.
        partition: None takes the cluster's default.
        account: account that is charged.
        qos: quality of service.
        constraint: features that nodes must have.
        time: limit of one job, as 2d, 12h or 1d6h30m. The run may take longer: shortly before the
            limit it saves a checkpoint and is requeued. None takes the partition's limit.
        exclusive: whether no other job shares the nodes.
        requeue: whether a run that was stopped by the limit, by pre-emption or by a node's failure
            continues by itself.
        segments: number of jobs that are submitted at once, each of which continues the run if the
            one before has not finished it: for clusters without requeuing. Replaces `requeue`.
        interface: the network interface of NCCL and gloo, as ib0; None lets them choose.
        container: an image to run in; None takes the environment.
        environment: the set-up before the command.
        code: snapshot copies the files that git knows in the folder that you submit from, and
            prefers them to the installed package; installed takes the package alone.
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
    time: str | int | None = None
    exclusive: bool = False
    requeue: bool = True
    segments: int = 1
    interface: str | None = None
    container: Container | None = None
    environment: Environment = field(default_factory=Environment)
    code: Literal["snapshot", "installed"] = "snapshot"
    options: tuple[str, ...] = ()

    shares_files: ClassVar[bool] = True
    reach: ClassVar[str] = "Add its folder to cluster.container.mounts."
    keeping: ClassVar[str] = reach

    def __post_init__(self) -> None:
        check_patterns(self, _WORDS, "Slurm")
        check_options(self.options, "sbatch")
        for option in self.options:
            if _OWN_OPTIONS.fullmatch(option):
                raise ConfigError(
                    f"options: {option!r} would undo what samestep launch sets. Remove it."
                )
        self.check_node_settings()
        check_least(self, segments=1)
        self._check_dependencies()
        _ = self.minutes  # raises if `time` is invalid

    @property
    def minutes(self) -> int | None:
        """The limit of one job."""
        if self.time is None:
            return None
        # Without quotes, YAML reads 24:00:00 as the number 86400.
        match = _TIME.fullmatch(str(self.time))
        days, hours, minutes = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
        total = 60 * (24 * days + hours) + minutes
        if not total:
            raise ConfigError(
                f"time is {self.time}. Write it as 2d, 12h, 90m or 1d6h30m, not as 24:00:00 or a "
                "number."
            )
        return total

    @property
    def _dependencies(self) -> list[str]:
        """The jobs to wait for, joined, as sbatch obeys only the last --dependency."""
        name = "--dependency="
        named = [each.removeprefix(name) for each in self.options if each.startswith(name)]
        # Jobs of one user and name run one after the other.
        return named + ["singleton"] * (self.segments > 1)

    def _check_dependencies(self) -> None:
        """Rejects a dependency on any of several jobs, joined by `?`, together with another one."""
        either = next((each for each in self._dependencies if "?" in each), None)
        if either is None or len(self._dependencies) == 1:
            return
        other, fix = "the job waits for another --dependency", "keep one --dependency"
        if self.segments > 1:
            other = f"segments {self.segments} makes each job wait for the one before"
            fix = "set segments=1, with one --dependency"
        raise ConfigError(
            f"options: --dependency={either} means any of several jobs, and {other}, too. Separate "
            f"the jobs by commas, or {fix}."
        )

    @property
    def waits_for_jobs(self) -> bool:
        return any(option.startswith("--dependency") for option in self.options)

    def render(self, job: JobSpec) -> Submission:
        """One batch script."""
        build = job.action == "build"
        log = _pattern(job.folder / ("job-%a.log" if build else LOG))
        exit_file = f'"$launch/{EXIT}{"-$SLURM_ARRAY_TASK_ID" if build else ""}"'
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in self.batch_options(job)),
            # Also here, for readers of the script; no line can hold a folder with a line break.
            *([] if "\n" in log else [f"#SBATCH --output={shlex.quote(log)}"]),
            "",
            "# Written by samestep launch. Slurm runs it on the first node, and again after each",
            "# requeue.",
            f"launch={shlex.quote(str(job.folder))}",
            # Until the environment is set up, any end of the script leaves a failure's exit code.
            f"rm -f -- {exit_file}",
            f"trap 'echo 1 > {exit_file}' EXIT",
            f"cd -- {shlex.quote(str(job.directory))} || exit 1",
            *self.environment.lines(own=self.container is None),
            # The user's setup may have set -e, under which exit codes below would end the script.
            "trap - EXIT",
            "set +eu",
            *job.exports(),
            'export SAMESTEP_JOB="$SLURM_JOB_ID" SAMESTEP_NODES="$SLURM_JOB_NODELIST"',
            *exports(self.socket_variables()),
            "",
            *(self._build(job) if build else self._train(job)),
            f"echo $code > {exit_file}",
            "exit $code",
        ]
        command = ("sbatch", "--parsable", f"--output={log}", SCRIPT)
        return Submission({SCRIPT: "\n".join(lines) + "\n"}, command)

    def batch_options(self, job: JobSpec) -> list[str]:
        """The options of sbatch, all but the log's name."""
        build = job.action == "build"
        options = ["--open-mode=append"]
        if self.segments > 1:
            # A segment waits for all jobs of its name, so no other jobs may have the name.
            digest = hashlib.sha256(str(job.folder).encode()).hexdigest()[:6]
            options.insert(0, f"--job-name={job.name}-{digest}")
        else:
            options.insert(0, f"--job-name={job.name}")
        if self._dependencies:
            options.append(f"--dependency={shlex.quote(','.join(self._dependencies))}")
        least, most = self.node_range
        # A build is an array of independent one-node jobs, a run is one job of several nodes.
        if build:
            options += ["--nodes=1", f"--array=1-{job.tasks}"]
        else:
            options.append(f"--nodes={least}-{most}" if most > least else f"--nodes={least}")
            if self.gpus_per_node:  # --gres works with every select plugin, --gpus-per-node not
                of_type = f"{self.gpu_type}:" if self.gpu_type else ""
                options.append(f"--gres=gpu:{of_type}{self.gpus_per_node}")
        named = {
            "mincpus": self.cpus_per_node,
            "mem": self._memory(build),
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
        }
        options += [f"--{name}={value}" for name, value in named.items() if value is not None]
        if self.minutes is not None:
            days, minutes = divmod(self.minutes, 24 * 60)
            options.append(f"--time={days}-{minutes // 60:02}:{minutes % 60:02}:00")
        if not build:
            options += ["--exclusive"] * self.exclusive + self._signal_option(job)
        # The next segment takes the place of a requeued job.
        options.append("--requeue" if build or self._requeues else "--no-requeue")
        for option in self.options:
            name, equals, value = option.partition("=")
            if name != "--dependency":
                options.append(f"{name}{equals}{shlex.quote(value) if value else ''}")
        return options

    def _memory(self, build: bool) -> str | int | None:
        """The memory to request on each node."""
        # --exclusive grants all cores of a node, but only the partition's default memory.
        named = any(option.startswith("--mem") for option in self.options)
        whole = self.exclusive and not build and not named
        return 0 if self.memory is None and whole else self.memory

    def _signal_option(self, job: JobSpec) -> list[str]:
        """Has Slurm signal a run before the job's limit, in time for a checkpoint."""
        if not job.restart_signals:
            return []
        name = "SIGUSR1" if "SIGUSR1" in job.restart_signals else job.restart_signals[0]
        # With stop_seconds = 300, Slurm is asked for the signal 360 s before the limit, and the run
        # has 300 s for its checkpoint even if the signal comes a minute late.
        lead = round(job.stop_seconds) + _SIGNAL_MARGIN
        if self.minutes is not None and self.minutes * 60 < 2 * lead:
            raise ConfigError(
                f"time {self.time} is too short: {lead} s before its end the run must save a "
                "checkpoint. Raise cluster.time, or lower training.preemption.deadline."
            )
        return [f"--signal={name.removeprefix('SIG')}@{lead}"]

    @property
    def _requeues(self) -> bool:
        return self.requeue and self.segments == 1

    def _build(self, job: JobSpec) -> list[str]:
        """Each task of the array builds one slice; the last one to finish merges and verifies."""
        slice_ = ["--slice", f'"$SLURM_ARRAY_TASK_ID/{job.tasks}"']
        return [*self.srun(job, job.shell_command(*slice_), gpus=False), "code=$?"]

    def srun(self, job: JobSpec, command: str, gpus: bool) -> list[str]:
        """Runs a command once on each node."""
        # The batch script requests no tasks: Slurm would stop adding nodes once it has enough for
        # the tasks, and take the least of a range.
        srun = ["srun", '--ntasks="$SLURM_JOB_NUM_NODES"', "--ntasks-per-node=1", "--cpu-bind=none"]
        srun += [f"--cpus-per-task={self.cpus_per_node}"] * bool(self.cpus_per_node)
        inside = self.container.words(*_folders(job), gpus) if self.container else []
        words = [*srun, "--kill-on-bad-exit=0", *map(shlex.quote, inside)]
        return [" ".join(words) + " \\", f"  {command}"]

    def _train(self, job: JobSpec) -> list[str]:
        gpus = bool(self.gpus_per_node)
        nodes = f'"{self.node_range[0]}:$SLURM_JOB_NUM_NODES"'
        command = job.shell_command(*self.train_arguments(nodes, '"$rendezvous"', gpus))
        cancel, stops = f'"$launch/{CANCEL}"', '"$launch/stops"'
        lines = [
            "# The first node hosts the rendezvous.",
            *RENDEZVOUS,
            f"[ ! -e {cancel} ] || exit {EXIT_PREEMPTED}",
            "",
            *self.srun(job, command, gpus),
            "code=$?",
        ]
        stopped = "|".join(map(str, codes_of_stops(job)))
        if self._requeues:
            starts = shlex.quote(str(job.folder.parents[1] / "starts.jsonl"))
            note, is_stuck = progress_of_stops(starts, stops)
            most = _MAX_STOPS
            lines += [
                "",
                "# A run that was stopped is requeued and continues from its newest checkpoint,",
                "# unless it makes no progress that way.",
                f"case $code in {stopped})",
                f"  {note}",
                f"  if {is_stuck}; then",
                f'    echo "stopped {most} times without a newer checkpoint: not requeued" >&2',
                f"  elif [ ! -e {cancel} ]; then",
                '    scontrol requeue "$SLURM_JOB_ID" && exit $code',
                "  fi ;;",
                "esac",
            ]
        elif self.segments > 1:
            lines += [
                "",
                "# A run that was not stopped leaves nothing to do for the segments after it.",
                f"case $code in {stopped}) ;; *)",
                '  scancel --state=PENDING --user="$(id -un)" --name="$SLURM_JOB_NAME" ;;',
                "esac",
            ]
        return lines

    def check(self) -> None:
        """Checks that Slurm's commands are installed."""
        command_line.require("sbatch", "jobs are submitted from a login node of the Slurm cluster")

    def place_of(self, path: str, job: JobSpec, submission: Submission) -> Place | None:
        """The shared file system, or in a container its mounts."""
        if self.container is None:
            return Place("files that the nodes share with this machine")
        sees = self.container.sees(path, *_folders(job))
        return Place("a mount of the container") if sees else None

    def ask(self, submission: Submission) -> str:
        """The answer of `sbatch --test-only`, as "Job 7 to start at 2026-11-22T10:00:00 ..."."""
        command = ["sbatch", "--test-only"]
        said = slurm_client.run(command, text=submission.files[SCRIPT], with_stderr=True)
        return said.strip().removeprefix("sbatch: ")

    def submit(self, submission: Submission, folder: Path) -> tuple[str, Mapping[str, str]]:
        """Submits all segments or none; returns the first one's id."""
        cluster, ids = "", list[str]()
        with suppress(LaunchError):  # without its name, a job counts as one of any cluster
            cluster = slurm_client.cluster_name()
        try:
            for _ in range(self.segments):
                ids.append(slurm_client.job_id(slurm_client.run(submission.command, folder)))
        except LaunchError:
            if ids:
                slurm_client.run(["scancel", *ids])
            raise
        # An array is done when each of its tasks has left an exit code.
        array = re.search(r"^#SBATCH --array=1-(\d+)$", submission.files[SCRIPT], re.M)
        about = {"segments": " ".join(ids), "tasks": array[1] if array else "1"}
        return ids[0], about | ({"cluster": cluster} if cluster else {})

    def states(self, records: Iterable[Record]) -> Mapping[Path, State]:
        """From Slurm's queue for jobs that wait or run, else from the exit code that they left."""
        jobs, here = list(records), ""
        try:
            if any("cluster" in record.about for record in jobs):
                here = slurm_client.cluster_name()
            queue = slurm_client.queue()
        except LaunchError:
            # The exit codes of jobs that have certainly ended need no answer.
            if not all(map(_has_ended, jobs)):
                raise
            queue = {}
        return {record.folder: _state(record, queue, here) for record in jobs}

    def logs(self, record: Record, follow: bool) -> Iterable[str]:
        """All nodes and segments write into one log; the tasks of an array have one each."""
        return logs.read(record.folder, lambda: follow and self.is_active(record), _POLL_SECONDS)

    def cancel(self, record: Record) -> None:
        """The run saves a checkpoint, however long that takes. A second call ends it at once."""
        if "cluster" in record.about and _is_elsewhere(record, here := slurm_client.cluster_name()):
            raise LaunchError(
                f"job {record.id} was submitted to the cluster {record.about['cluster']}, and this "
                f"machine is on {here}. Cancel it there, or, if it has ended, remove "
                f"{record.folder}."
            )
        queue, mark = slurm_client.queue(), record.folder / CANCEL
        states = {job: queue[job][0][0] for job in _segments(record) if job in queue}
        if not states:
            raise LaunchError(f"job {record.id} has ended already: there is nothing to cancel.")
        script = (record.folder / SCRIPT).read_text(encoding="utf-8")
        saves = re.search(r"^#SBATCH --signal=(\w+)@", script, re.M)
        again = mark.exists()
        # Only a running job can save a checkpoint; the others are ended at once.
        signalled = [
            job for job, state in states.items() if saves and state == "RUNNING" and not again
        ]
        ended = [job for job in states if job not in signalled]
        mark.touch()  # before the signal: the script must not requeue
        try:
            if ended:
                slurm_client.run(["scancel", *ended])
            if signalled and saves:
                slurm_client.run(["scancel", f"--signal={saves[1]}", *signalled])
        except LaunchError:
            if not again:
                mark.unlink()
            raise


def progress_of_stops(starts: str, stops: str) -> tuple[str, str]:
    """Commands that note from which step a run has last started, and ask whether it is stuck.

    Args:
        starts: the run's starts.jsonl, quoted for a shell.
        stops: file of the notes, quoted.
    """
    newest_step = f"tail -n 1 -- {starts} | grep -o '\"step\": *[0-9]*'"
    same = f"tail -n {_MAX_STOPS} -- {stops} | uniq -c | grep -q '^ *{_MAX_STOPS} '"
    return f"{{ {newest_step} || echo none; }} >> {stops}", same


def codes_of_stops(job: JobSpec) -> list[int]:
    """Exit codes of a run that was stopped, and goes on when it is started again."""
    # 128 + signal: its checkpoint took too long, or it was killed, as when memory runs out.
    known = signal.Signals.__members__
    names = {*job.restart_signals, "SIGKILL"}
    numbers = sorted({known[name].value if name in known else 0 for name in names})
    return [EXIT_UNAVAILABLE, EXIT_PREEMPTED, *(128 + number for number in numbers)]


def _folders(job: JobSpec) -> tuple[Path, Path]:
    """The folders that a container always mounts: the one submitted from, and the run's."""
    return job.directory, job.folder.parents[1]


def _segments(record: Record) -> list[str]:
    return record.about["segments"].split()


def _is_elsewhere(record: Record, here: str) -> bool:
    """Whether a job was submitted to another cluster; a record names its cluster if Slurm did."""
    return bool(here) and record.about.get("cluster", here) != here


def _state(record: Record, queue: Mapping[str, list[list[str]]], here: str) -> State:
    # Clusters may share the folders of their jobs, and each knows only its own queue.
    elsewhere = _is_elsewhere(record, here)
    if elsewhere and not _has_ended(record):
        return State(f"on {record.about['cluster']}", True)
    found = [task for number in _segments(record) for task in queue.get(number, [])]
    # squeue forgets a job soon after its end; the script leaves the exit code in the job's folder.
    if elsewhere or not found:
        return logs.state_of_ended(record.folder, int(record.about["tasks"]))
    # An array's tasks may have several states: "3 running, 5 pending".
    words = Counter(task[0].lower() for task in found)
    word = ", ".join(f"{count} {word}" for word, count in words.items())
    if len(words) == 1:
        word = next(iter(words))
    # A running task has nodes and restarts; a pending one has only a reason.
    running = [task for task in found if task[0] == "RUNNING"]
    _, nodes, restarts, reason = (running or found)[0]
    return State(word, True, nodes, int(restarts or 0), "" if reason == "None" else reason)


def _has_ended(record: Record) -> bool:
    """Whether the exit codes alone say that a job has ended."""
    code = logs.exit_code(record.folder, int(record.about["tasks"]))
    if code is None:
        return False
    # A run that was stopped or killed (128 + signal) goes on in its next segment, or in the same
    # job if Slurm requeues it, as after a node's failure.
    goes_on = code in (EXIT_UNAVAILABLE, EXIT_PREEMPTED) or code >= 128
    if not goes_on or (record.folder / CANCEL).exists():
        return True
    script = (record.folder / SCRIPT).read_text(encoding="utf-8")
    return len(_segments(record)) == 1 and "\n#SBATCH --requeue\n" not in script


def _pattern(path: Path) -> str:
    """A path as a filename pattern of sbatch, which keeps the %a of an array in the last part.

    Raises:
        ConfigError: there is no way to write it.
    """
    if "\\" in str(path):
        raise ConfigError(
            f"output {path} has a backslash in it, which Slurm treats as an escape. Choose another "
            "output."
        )
    return str(path.parent).replace("%", "%%") + "/" + path.name
