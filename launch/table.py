"""The table of jobs."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from rich.table import Table

from launch import records
from launch.job import CONFIG, Cluster, Record, State
from samestep.config.tree import parse_file
from samestep.errors import ConfigError, LaunchError
from samestep.stored_json import Count, checked, parse_json
from samestep.terminal import Console
from samestep.untrusted import open_regular, read_regular

logger = logging.getLogger(__name__)

_ENDED = 10  # listed jobs that have ended
_TAIL_BYTES = 2**16
_MOST_BYTES = 2**20  # of a configuration
_HEADINGS = ("JOB", "KIND", "STATE", "STEP", "RESTARTS", "NODES", "AGE", "OUTPUT")


def show(console: Console, everything: bool) -> None:
    """Prints the jobs that wait or run, and the newest of those that have ended."""
    found = records.newest_first()
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
            return records.cluster_of(record)
    return records.cluster_of(of_kind[0])


def _step(record: Record) -> str:
    """The last logged step and the number of steps; empty if it is not visible from here."""
    try:
        config = read_regular(record.folder / CONFIG, _MOST_BYTES)
        training = parse_file(config, record.folder / CONFIG).get("training") or {}
        with open_regular(Path(record.output) / "metrics.jsonl") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            last = parse_json(file.read(_TAIL_BYTES).splitlines()[-1], _Row)
        return f"{last['step']}/{checked(training, _Training).get('steps', '?')}"
    except (OSError, ValueError, LookupError, ConfigError):
        return ""  # either file may be cut short


class _Row(TypedDict):
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
