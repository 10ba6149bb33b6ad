"""Which jobs have been submitted from this machine by this user: a line each in a file of theirs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from launch.job import Record
from trainer.config import Kinds, decode
from trainer.errors import LaunchError

KINDS = Kinds("launch")
CLUSTER = "cluster.yaml"


def state_folder() -> Path:
    """Where this user's programs keep what they remember (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "samestep"


def add(record: Record) -> None:
    """Remembers a job."""
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "jobs.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**asdict(record), "folder": str(record.folder)}) + "\n")


def newest_first() -> list[Record]:
    """The jobs whose folders are still there."""
    try:
        lines = (state_folder() / "jobs.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    trees = [json.loads(line) for line in reversed(lines)]
    found = [Record(**{**tree, "folder": Path(tree["folder"])}) for tree in trees]
    return [record for record in found if record.folder.is_dir()]


def find(job: str) -> Record:
    """A job by its id, or by the run folder that it works on: the newest.

    Raises:
        LaunchError: there is none.
    """
    for record in newest_first():
        if job in (record.id, record.output) or Path(job).absolute() in (record.folder, Path(record.output)):
            return record
    raise LaunchError(
        f"no job {job} has been submitted from here by you; `samestep jobs` lists yours. Others' jobs, and those "
        "submitted elsewhere, are for the cluster's own commands"
    )


def cluster_of(record: Record) -> Any:
    """The cluster that a job was submitted to, as it was described then."""
    tree = yaml.safe_load((record.folder / CLUSTER).read_text(encoding="utf-8"))
    return decode(KINDS.schema(tree.pop("kind"), "cluster"), tree, "cluster")
