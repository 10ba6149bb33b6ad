"""The list of jobs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from launch import records
from launch.job import CONFIG, Cluster, Record, State
from trainer.errors import LaunchError

logger = logging.getLogger(__name__)

_ENDED = 10  # that are listed
_TAIL_BYTES = 2**16


def show(console: Console, everything: bool) -> None:
    """Prints the jobs that wait or run, and the newest of those that have ended."""
    found = records.newest_first()
    states = _states(found)
    active = [record for record in found if record.id in states and states[record.id].active]
    ended = [record for record in found if record not in active][: None if everything else _ENDED]
    if not found:
        console.print("no job has been submitted from here; see samestep launch --help")
        return
    newest = {record.output: record for record in reversed(found)}
    table = Table(header_style="dim", box=None, padding=(0, 2, 0, 0))
    for heading in ("JOB", "KIND", "STATE", "STEP", "RESTARTS", "NODES", "AGE", "OUTPUT"):
        table.add_column(heading, no_wrap=heading != "OUTPUT", overflow="fold")
    for record in (*active, *ended):
        state = states.get(record.id, State("unknown", False))
        word = f"{state.word} ({state.detail})" if state.detail and state.active else state.word
        step, restarts = "", state.restarts
        if newest[record.output] is record:  # whose the run's files are now
            step, restarts = _step(record), _restarts(record) if restarts is None else restarts
        age = _age(time.time() - record.time)
        table.add_row(
            record.id,
            record.kind,
            word,
            step,
            str(restarts or ""),
            state.nodes,
            age,
            _shown(record),
        )
    console.print(table)


def _states(found: list[Record]) -> dict[str, State]:
    """How they stand; a kind of cluster that does not answer is reported, and leaves its jobs out."""
    states: dict[str, State] = {}
    for kind in dict.fromkeys(record.kind for record in found):
        of_kind = [record for record in found if record.kind == kind]
        try:
            states |= _cluster(of_kind).states(of_kind)
        except LaunchError as error:
            logger.warning("%s", error)
    return states


def _cluster(of_kind: list[Record]) -> Cluster:
    """The newest description that can be read: all know how the jobs of a kind stand.

    Raises:
        LaunchError: there is none.
    """
    for record in of_kind:
        with suppress(LaunchError):
            return records.cluster_of(record)
    return records.cluster_of(of_kind[0])


def _step(record: Record) -> str:
    """The last step that was logged, of how many; empty where that cannot be seen from here."""
    try:
        training = (
            yaml.safe_load((record.folder / CONFIG).read_text(encoding="utf-8")).get("training")
            or {}
        )
        with (Path(record.output) / "metrics.jsonl").open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            rows = file.read().splitlines()
        last: Mapping[str, float] = json.loads(rows[-1])
        return f"{last['step']}/{training.get('steps', '?')}"
    except (
        OSError,
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
        yaml.YAMLError,
    ):  # cut short, perhaps
        return ""


def _restarts(record: Record) -> int:
    """How often the run was started again, over all of its jobs."""
    try:
        return max(0, len((Path(record.output) / "starts.jsonl").read_bytes().splitlines()) - 1)
    except OSError:
        return 0


def _shown(record: Record) -> str:
    """The output, from here on where it lies here."""
    place, here = Path(record.output), Path.cwd()
    return str(place.relative_to(here)) if place.is_relative_to(here) else record.output


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"
