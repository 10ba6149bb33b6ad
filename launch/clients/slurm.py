"""Slurm's commands: how they are called, their answers, and hints for their errors."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from launch.clients import command_line
from samestep.errors import LaunchError

# Variables of Slurm's commands: set by a user's shell, or by a job that this process is part of.
_FOREIGN = re.compile(r"SLURM_(?!CONF$)|SBATCH_|SRUN_|SQUEUE_|SCANCEL_")
_HINTS = {
    "invalid partition": (
        "`sinfo --summarize` lists the partitions; set cluster.partition to one of them"
    ),
    "invalid account": (
        "`sacctmgr show associations user=$USER` lists your accounts; set cluster.account to one"
    ),
    (
        "node configuration is not available|node count specification invalid"
        "|more processors requested"
    ): (
        "no node of the partition has that many GPUs, cores or that much memory, or it has too few "
        "nodes: see `sinfo --Node --long`, and lower cluster.gpus_per_node or cluster.nodes"
    ),
    "invalid generic resource|invalid gres": (
        "its nodes have no such GPUs: see `sinfo --format='%N %G'`"
    ),
    "time limit": (
        "`sinfo` shows the partition's limit; lower cluster.time: the run continues in a requeued "
        "job"
    ),
    "unable to contact slurm controller|connection refused|configuration source": (
        "Slurm's controller cannot be reached from here; try on a login node, or ask "
        "`scontrol ping`"
    ),
    "invalid user|access/permission denied|expired|munge": (
        "log in again, and see `munge -n | unmunge`"
    ),
    "invalid job id": "`samestep jobs` lists yours",
}


def run(
    command: Sequence[str], folder: Path | None = None, text: str = "", with_stderr: bool = False
) -> str:
    """Runs a command of Slurm without the environment variables that would change its effect."""
    environment = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
    return command_line.run(command, _HINTS, folder, text, environment, with_stderr)


def queue() -> dict[str, list[list[str]]]:
    """This user's jobs by number: state, nodes, restarts and reason of each task."""
    # The separator "|" is part of each field, since the default columns are cut at a fixed width.
    form = "ArrayJobID:|,State:|,NodeList:|,RestartCnt:|,Reason:"
    found: dict[str, list[list[str]]] = {}
    for line in run(["squeue", "--me", "--noheader", "--array", f"--Format={form}"]).splitlines():
        number, *rest = (part.strip() for part in line.split("|"))
        found.setdefault(number, []).append(rest)
    return found


def job_id(printed: str) -> str:
    """The job's id from `sbatch --parsable`, in the last line: clusters may print a greeting."""
    match = re.fullmatch(r"(\d+)(;\S+)?", printed.strip().rpartition("\n")[2])
    if match is None:
        raise LaunchError(
            f"sbatch printed no job id but {printed.strip()!r}. `squeue --me` says whether there "
            "is a job."
        )
    return match[1]


def cluster_name() -> str:
    """The name of the cluster that this machine is on; empty if Slurm does not say it."""
    match = re.search(r"^ClusterName\s*=\s*(\S+)$", run(["scontrol", "show", "config"]), re.M)
    return match[1] if match else ""
