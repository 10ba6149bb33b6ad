"""Which jobs have been submitted from this machine by this user: a line each in a file of theirs."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import yaml

from launch.job import Cluster, Record
from trainer.config import Kinds, decode
from trainer.errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)

KINDS = Kinds("launch")
CLUSTER = "cluster.yaml"
_FILE = "jobs.jsonl"


def state_folder() -> Path:
    """Where this user's programs keep what they remember (XDG Base Directory Specification)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "samestep"


def add(record: Record) -> None:
    """Remembers a job."""
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True)
    # The line before may have been cut short, as by a full disk.
    line = f"\n{json.dumps({**asdict(record), 'folder': str(record.folder)})}\n".encode()
    with (folder / _FILE).open("ab") as file:  # one write, which nobody else's come into
        file.write(line)


def newest_first() -> list[Record]:
    """The jobs whose folders are still there."""
    file = state_folder() / _FILE
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    for number, line in enumerate(lines, start=1):
        if line:
            try:
                found.append(_parse(line))
            except (ValueError, TypeError, KeyError):
                logger.warning(
                    "%s, line %d is no job of this version of samestep; passing over it",
                    file,
                    number,
                )
    return [record for record in reversed(found) if record.folder.is_dir()]


def _parse(line: bytes) -> Record:
    tree = json.loads(line)
    texts = {name: tree[name] for name in ("id", "kind", "name", "output")} | tree.get("about", {})
    if not all(isinstance(text, str) for text in texts.values()):
        raise TypeError(texts)
    return Record(**{**tree, "folder": Path(tree["folder"]), "time": float(tree["time"])})


def find(job: str) -> Record:
    """A job by its id, or by the run folder that it works on: the newest.

    Args:
        job: the id may be that of a later segment, or of a task of an array (4711_3).

    Raises:
        LaunchError: there is none.
    """
    number, place = re.sub(r"_\d+$", "", job), os.path.abspath(job)
    for record in newest_first():
        ids = (record.id, *record.about.get("segments", "").split())
        if (
            number in ids
            or job.rstrip("/") == record.output
            or place in (str(record.folder), record.output)
        ):
            return record
    raise LaunchError(
        f"no job {job} has been submitted from here by you; `samestep jobs` lists yours. Others' jobs, and those "
        "submitted elsewhere, are for the cluster's own commands"
    )


def cluster_of(record: Record) -> Cluster:
    """The cluster that a job was submitted to, as it was described then.

    Raises:
        LaunchError: the description is gone, or of another version.
    """
    file = record.folder / CLUSTER
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        return decode(Annotated[Cluster, KINDS], tree, "cluster")
    except (OSError, ValueError, yaml.YAMLError, AttributeError, KeyError, ConfigError) as error:
        raise LaunchError(
            f"{file}, which says where job {record.id} was submitted to, cannot be read: {error}; the cluster's own "
            f"commands know the job. Remove {record.folder} to forget it"
        ) from error
