"""Checks of a rendered job: a launch makes them first, and --dry-run reports them."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from launch import experiment, records
from launch.submission.submit import Launch, output_of
from samestep.config import Tree
from samestep.errors import ConfigError, LaunchError, SamestepError

logger = logging.getLogger(__name__)

_XLA = "Set accelerator=xla strategy=xla_spmd."
# The kinds of accelerator that compute on each kind of hardware. Kinds of other packages are not
# judged.
_FITTING = {"gpu": "cuda", "cpu": "cpu", "tpu": "xla"}
_ACCELERATORS = ("cpu", "cuda", "tpu", "xla")


def require(launch: Launch) -> None:
    """Rejects a job that would fail only after it has waited in the queue.

    Raises:
        ConfigError: the run does not fit the devices, or its files would not be there.
        LaunchError: there is no client, or another job works on the same output.
    """
    for check in _CHECKS.values():
        check(launch)


def report(launch: Launch) -> Iterator[str]:
    """Makes all checks, and asks the cluster itself; yields a line for each.

    Raises:
        SamestepError: one of them refuses the job; if several do, with all their reasons.
    """
    refusals: dict[str, SamestepError] = {}
    for name, check in {**_CHECKS, "cluster": _cluster}.items():
        # Without a client there is nobody to ask.
        if name == "cluster" and "client" in refusals:
            continue
        try:
            if found := check(launch):
                yield f"  ok       {name}: {found}\n"
        except SamestepError as error:
            refusals[name] = error
            yield f"  refused  {name}\n"
    if len(refusals) == 1:
        raise next(iter(refusals.values()))
    if refusals:
        reasons = "\n".join(f"  {name}: {error}" for name, error in refusals.items())
        first = next(iter(refusals.values()))
        kind = ConfigError if isinstance(first, ConfigError) else LaunchError
        raise kind(f"it would not start, for {len(refusals)} reasons:\n{reasons}")
    yield f"would start: {_summary(launch)}\n"


def _summary(launch: Launch) -> str:
    job, where = launch.job, f"kind {launch.kind}"
    if job.action == "build":
        return f"{job.name}, {job.tasks} task{'s' if job.tasks > 1 else ''} of a build ({where})"
    return f"{job.name} on {launch.cluster.size} ({where})"


def _client(launch: Launch) -> str:
    launch.cluster.check()
    return "jobs can be submitted from here"


def _accelerator(launch: Launch) -> str:
    """The experiment's accelerator and strategy must use the hardware that the cluster grants."""
    if launch.job.action == "build":
        return "a build uses the CPU"
    tree, hardware = launch.job.tree, launch.cluster.hardware
    kind = experiment.kind_of(tree, "accelerator")
    if hardware == "here":
        return kind or "the best one of this machine"
    _check_accelerator(kind, hardware, launch.cluster.size)
    _check_strategy(tree, hardware)
    return f"{kind or 'none is set, so what the nodes have'}, for {launch.cluster.size}"


def _check_accelerator(kind: str | None, hardware: str, size: str) -> None:
    if hardware == "tpu" and kind is None:
        raise ConfigError(f"accelerator is not set, and the job gets {size}. {_XLA}")
    if kind not in _ACCELERATORS or kind == _FITTING[hardware]:
        return
    fixes = {
        "gpu": "Set accelerator=cuda, or cluster.gpus_per_node=0.",
        "cpu": "Set accelerator=cpu, or request devices with cluster.gpus_per_node.",
        "tpu": _XLA,
    }
    raise ConfigError(f"accelerator {kind} does not use {size}. {fixes[hardware]}")


def _check_strategy(tree: Tree, hardware: str) -> None:
    kind = experiment.kind_of(tree, "strategy")
    if hardware == "tpu" and "." not in str(kind) and kind != "xla_spmd":
        raise ConfigError(f"strategy {kind or 'fsdp'} is not for XLA. {_XLA}")
    if hardware != "tpu" and kind == "xla_spmd":
        raise ConfigError("strategy xla_spmd is for TPUs. Set strategy=fsdp.")


def _data(launch: Launch) -> str:
    """The machines must find all that the job reads."""
    inputs, words = experiment.inputs(launch.job.tree), []
    for setting, path in inputs.items():
        if not experiment.is_local(path):
            words.append(f"{setting} is a URL")
            continue
        place = launch.cluster.place_of(path, launch.job, launch.submission)
        if place is None:
            raise ConfigError(
                f"{setting} {path} is not there for the job: its machines have no such folder. "
                f"{launch.cluster.reach}"
            )
        unseen = "" if launch.cluster.shares_files else ", unseen from here"
        words.append(f"{setting} in {place.name}{unseen}")
    return ", ".join(words) or "none is read from a file"


def _output(launch: Launch) -> str:
    """The job's output must outlive its machines."""
    setting, folder = experiment.checkpoints(launch.job.tree)
    if not experiment.is_local(folder):
        return f"{setting} is a URL"
    place = launch.cluster.place_of(folder, launch.job, launch.submission)
    if place is None or not place.keeps:
        where = f"in {place.name}" if place else "on the machines' own disks"
        raise ConfigError(
            f"{setting} {folder} is {where}, and what is written there would be lost with the job. "
            f"{launch.cluster.keeping}"
        )
    return f"{setting} in {place.name}"


def _code(launch: Launch) -> str:
    return launch.cluster.check_code(launch.job, launch.code or ())


def _other_jobs(launch: Launch) -> str:
    """Two jobs would write the same checkpoints, whatever kind of cluster each is on."""
    for record in records.newest_first():
        if record.output != output_of(launch):
            continue
        cluster = records.cluster_of(record)
        try:
            state = cluster.states([record]).get(record.folder)
        except LaunchError as error:
            raise LaunchError(
                f"whether job {record.id} still works on {launch.output} cannot be asked from here "
                f"({error}). Launch where its cluster answers, or, if it has ended, remove "
                f"{record.folder}."
            ) from error
        if state is not None and state.active:
            raise LaunchError(
                f"job {record.id} ({state.word}) works on {launch.output} already. "
                f"`samestep cancel {record.id}` ends it, or choose another output."
            )
        break  # only the newest job of an output can be active
    return f"none works on {launch.output}"


def require_settings(launch: Launch) -> None:
    """Rejects unknown keys and invalid values; files and devices are not looked at.

    Raises:
        ConfigError: there is one.
    """
    command = ["config"] if launch.job.action == "train" else ["data", "build", "--check"]
    arguments = [*command, *launch.arguments, "--elsewhere"]
    _ask(arguments, launch.cluster.environment.variables)


def _settings(launch: Launch) -> str:
    """`samestep config` or `samestep data build --check` reads all settings and their files."""
    logger.info("checking whether this could start there")
    variables = launch.cluster.environment.variables
    elsewhere = not launch.cluster.shares_files
    if launch.job.action == "build":
        paths = experiment.inputs(launch.job.tree).values()
        unseen = elsewhere and any(map(experiment.is_local, paths))
        flags = ["--check", *["--elsewhere"] * unseen]
        _ask(["data", "build", *launch.arguments, *flags], variables)
        return "those of the dataset are valid" + ", its files are unseen from here" * unseen
    arguments = [*launch.arguments]
    if launch.cluster.waits_for_jobs:
        # The weights of init_from may not exist yet. Without `model.kind` in the experiment they
        # would say which model it is, so it is checked as one whose files are on other machines.
        model = launch.job.tree.get("model") or {}
        unknown = isinstance(model, dict) and "kind" not in model
        elsewhere = elsewhere or unknown
        arguments.append("init_from=of_the_job_before" if unknown else "init_from=null")
    # The experiment must fit the least and the most devices that the cluster may give it.
    devices = ",".join(map(str, launch.cluster.devices))
    _ask(
        ["config", *arguments, "--devices", devices, *["--elsewhere"] * elsewhere],
        variables,
    )
    least, most = launch.cluster.devices[0], launch.cluster.devices[-1]
    number = f"{least}" if least == most else f"{least} to {most}"
    return f"batch, model and strategy fit {number.replace('here', 'its')} devices"


def _cluster(launch: Launch) -> str:
    return launch.cluster.ask(launch.submission)


_CHECKS = {
    "client": _client,
    "other jobs": _other_jobs,
    "accelerator": _accelerator,
    "data": _data,
    "output": _output,
    "code": _code,
    "settings": _settings,  # last: it takes seconds
}


def _ask(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Runs a `samestep` command with the job's environment variables; raises its error."""
    # A process of its own: it imports torch, and needs the job's variables from the start.
    # -P: do not import from the current folder, which may have a `trainer` of its own.
    command = [sys.executable, "-P", "-m", "samestep.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
    if done.returncode < 0:
        raise LaunchError(
            "checking whether the run could start was ended by "
            f"{signal.Signals(-done.returncode).name}: has this machine too little memory? Try "
            f"`{shlex.join(['samestep', *arguments])}` by itself."
        )
    if done.returncode:
        _, found, message = done.stderr.partition("error: ")
        raise ConfigError(message.strip() if found else done.stderr.strip())
