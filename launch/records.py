"""The jobs that this user has submitted from this machine: one line of JSON each."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from launch.job import Cluster, Record
from samestep.config import Kinds, decode
from samestep.config.tree import parse_file
from samestep.environment import expand_home
from samestep.errors import ConfigError, LaunchError
from samestep.stored_json import JsonError, Matching, Seconds, checked, parse_json
from samestep.untrusted import read_regular

logger = logging.getLogger(__name__)

KINDS = Kinds("launch.kinds")
CLUSTER = "cluster.yaml"
_FILE = "jobs.jsonl"
_MOST_BYTES = 2**20  # of the description of a cluster


def state_folder() -> Path:
    """The user's folder for the state of samestep (XDG Base Directory Specification).

    Raises:
        ConfigError: there is no home folder.
    """
    place = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return expand_home(place, "XDG_STATE_HOME") / "samestep"


def add(record: Record) -> None:
    """Appends a job."""
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True)
    # Begins with a line break, as a full disk may have cut the line before.
    line = f"\n{json.dumps({**asdict(record), 'folder': str(record.folder)})}\n".encode()
    with (folder / _FILE).open("ab") as file:
        file.write(line)  # one write: lines of concurrent launches do not mix


def newest_first() -> list[Record]:
    """The jobs with folders that still exist; of several in one folder, the newest."""
    file = state_folder() / _FILE
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    found: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if line:
            try:
                found.append(_parse(line))
            except JsonError:
                logger.warning(
                    "%s, line %d is no job of this version of samestep; skipping it", file, number
                )
    newest: dict[Path, Record] = {}
    for record in reversed(found):
        newest.setdefault(record.folder, record)
    return [record for record in newest.values() if record.folder.is_dir()]


def _parse(line: bytes) -> Record:
    tree = parse_json(line, dict[str, object])
    row = checked(tree, _Row)
    for name in tree.keys() - asdict(row).keys():  # a newer version knows how to treat this job
        raise JsonError("is not known to this version", (name,))
    for name in row.about.keys() & {"pid", "tasks"}:
        checked(row.about[name], _Digits)
    return Record(**{**asdict(row), "folder": Path(row.folder)})


_Digits = Annotated[str, Matching("[0-9]{1,18}")]


@dataclass(frozen=True)
class _Row:
    """A line of the file: a `Record`, with the folder as text."""

    id: str
    kind: str
    name: str
    output: str
    folder: str
    time: Seconds
    about: Mapping[str, str] = field(default_factory=dict)


def find(job: str) -> Record:
    """Finds the newest job by its id, its folder, or its output.

    Args:
        job: the id may belong to a later segment, or to a task of an array (4711_3).

    Raises:
        LaunchError: there is no such job.
    """
    number, place = re.sub(r"_\d+$", "", job), os.path.abspath(job)
    for record in newest_first():
        ids = (record.id, *record.about.get("segments", "").split())
        if number in ids or job.rstrip("/") == record.output:
            return record
        if place in (str(record.folder), record.output):
            return record
    raise LaunchError(
        f"no job {job} has been submitted from here by you. `samestep jobs` lists yours; use the "
        "cluster's own commands for jobs of others, or from elsewhere."
    )


def cluster_of(record: Record) -> Cluster:
    """The cluster that a job was submitted to, as it was described then.

    Raises:
        LaunchError: the description is gone, or of another version.
    """
    file = record.folder / CLUSTER
    try:
        tree = parse_file(read_regular(file, _MOST_BYTES), file)
        return decode(Annotated[Cluster, KINDS], tree, "cluster")
    except (OSError, ValueError, AttributeError, KeyError, ConfigError) as error:
        raise LaunchError(
            f"{file}, which says where job {record.id} was submitted to, cannot be read: {error}. "
            f"Use the cluster's own commands for the job, or remove {record.folder} to forget it."
        ) from error
