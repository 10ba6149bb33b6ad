"""The jobs that this user has submitted from this machine: one line of JSON each, and a table."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

from launch.job import CONFIG, Cluster, Record, State
from samestep.config import Kinds, decode
from samestep.config.tree import parse_file
from samestep.environment import expand_home
from samestep.errors import ConfigError, LaunchError
from samestep.stored_json import Count, JsonError, Matching, Seconds, checked, parse_json
from samestep.untrusted import open_regular, read_regular

if TYPE_CHECKING:
    from samestep.terminal import Console

logger = logging.getLogger(__name__)

KINDS = Kinds("launch.kinds")
CLUSTER = "cluster.yaml"
_FILE = "jobs.jsonl"
_MOST_BYTES = 2**20  # of the description of a cluster, or a configuration
_ENDED = 10  # listed jobs that have ended
_TAIL_BYTES = 2**16
_HEADINGS = ("JOB", "KIND", "STATE", "STEP", "RESTARTS", "NODES", "AGE", "OUTPUT")


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


def show(console: Console, everything: bool) -> None:
    """Prints the jobs that wait or run, and the newest of those that have ended."""
    from rich.table import Table  # submitting a job needs no terminal

    found = newest_first()
    if not found:
        console.print("no job has been submitted from here; see samestep launch --help")
        return
    states = _states(found)
    unknown = State("unknown", False)
    active = [record for record in found if states.get(record.folder, unknown).active]
    ended = [record for record in found if record not in active]
    newest = {record.output: record for record in reversed(found)}
    table = Table(header_style="dim", box=None, padding=(0, 2, 0, 0))
    for heading in _HEADINGS:
        table.add_column(heading, no_wrap=heading != "OUTPUT", overflow="fold")
    for record in (*active, *ended[: None if everything else _ENDED]):
        state = states.get(record.folder, unknown)
        word = f"{state.word} ({state.detail})" if state.detail and state.active else state.word
        step, restarts = "", state.restarts
        if newest[record.output] is record:  # the run's files are about its newest job
            step = _step(record)
            restarts = _restarts(record) if restarts is None else restarts
        table.add_row(
            record.id,
            record.kind,
            word,
            step,
            str(restarts or ""),
            state.nodes,
            _age(time.time() - record.time),
            _output(record),
        )
    console.print(table)


def _states(found: list[Record]) -> dict[Path, State]:
    """States by folder, without the jobs of clusters that do not answer."""
    states: dict[Path, State] = {}
    for kind in dict.fromkeys(record.kind for record in found):
        of_kind = [record for record in found if record.kind == kind]
        try:
            states |= _cluster(of_kind).states(of_kind)
        except LaunchError as error:
            logger.warning("%s", error)
    return states


def _cluster(of_kind: list[Record]) -> Cluster:
    """The newest readable description of a cluster: each can ask for all jobs of its kind.

    Raises:
        LaunchError: there is none.
    """
    for record in of_kind:
        with suppress(LaunchError):
            return cluster_of(record)
    return cluster_of(of_kind[0])


def _step(record: Record) -> str:
    """The last logged step and the number of steps; empty if it is not visible from here."""
    try:
        config = read_regular(record.folder / CONFIG, _MOST_BYTES)
        training = parse_file(config, record.folder / CONFIG).get("training") or {}
        with open_regular(Path(record.output) / "metrics.jsonl") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            last = parse_json(file.read(_TAIL_BYTES).splitlines()[-1], _Metrics)
        return f"{last['step']}/{checked(training, _Training).get('steps', '?')}"
    except (OSError, ValueError, LookupError, ConfigError):
        return ""  # either file may be cut short


class _Metrics(TypedDict):
    step: Count


class _Training(TypedDict, total=False):
    steps: Count | str


def _restarts(record: Record) -> int:
    """Number of restarts of the run, over all of its jobs."""
    try:
        return max(0, len((Path(record.output) / "starts.jsonl").read_bytes().splitlines()) - 1)
    except OSError:
        return 0


def _output(record: Record) -> str:
    """The output, relative to the current folder if it lies in it."""
    place, here = Path(record.output), Path.cwd()
    return str(place.relative_to(here)) if place.is_relative_to(here) else record.output


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0, seconds):.0f}s"  # the clock may have been set back
