"""TensorBoard: RUN/tensorboard holds each step of metrics.jsonl once, whatever the restarts.

Each start writes the whole history to a new event file and then removes the older ones. So nothing
is missing that a killed process had not written, and no step is there twice.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from samestep.config import Tree
from samestep.errors import MissingExtra
from trainer.monitoring import Tracker
from trainer.monitoring.jsonl import read_rows
from trainer.monitoring.sections import sectioned

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

logger = logging.getLogger(__name__)

_FILES = "events.out.tfevents.*"
_FLUSH_SECONDS = 10
_CONFIG = "config/text_summary"


def holds(folder: Path) -> bool:
    """Whether the event files of a run folder have all rows of its metrics.jsonl."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    except ImportError as error:
        raise MissingExtra("tensorboard", "tensorboard", "tracking.tensorboard") from error
    rows = Counter(
        row["step"]
        for row in read_rows(folder / "metrics.jsonl")
        if row.keys() > {"step", "time"}  # an event without values is not counted
    )
    events: Counter[int] = Counter()
    for path in (folder / "tensorboard").glob(_FILES):
        for event in LegacyEventFileLoader(str(path)).Load():
            if event.summary.value and event.summary.value[0].tag != _CONFIG:
                events[event.step] += 1
    return rows <= events


class TensorBoardTracker(Tracker):
    """Writes metrics as scalars. An error is logged once and does not stop training.

    Args:
        folder: its metrics.jsonl has been truncated to the step that training resumes from.
        description: the experiment's configuration.

    Raises:
        MissingExtra: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path, description: Tree) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.compat.proto.tensor_pb2 import TensorProto
            from tensorboard.plugins.text.metadata import create_summary_metadata
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard", "tracking.tensorboard") from error
        self._event, self._summary, self._session = Event, Summary, SessionLog
        self._new_writer = EventFileWriter
        self._writer: EventFileWriter | None = None
        self._folder = folder
        text = f"```yaml\n{yaml.safe_dump(dict(description), sort_keys=False)}```".encode()
        self._config = Summary.Value(
            tag=_CONFIG,
            metadata=create_summary_metadata("config", ""),
            tensor=TensorProto(dtype="DT_STRING", string_val=[text]),
        )
        self._open()

    def _open(self) -> None:
        """Writes the history to a new file, and removes the older ones."""
        events = self._folder / "tensorboard"
        replaced = list(events.glob(_FILES))
        self._has_failed = False
        try:
            self._writer = self._new_writer(str(events), flush_secs=_FLUSH_SECONDS)
            # Tells a running TensorBoard to drop the steps that it has read, before they come
            # again.
            start = self._session(status=self._session.START)
            self._writer.add_event(self._event(step=0, session_log=start))
            self._writer.add_event(self._event(step=0, summary=self._summary(value=[self._config])))
            for row in read_rows(self._folder / "metrics.jsonl"):
                self._add(row.pop("step"), row.pop("time"), row)
            # The old files go only after the new one has their steps on the disk.
            self._writer.flush()
            for old in replaced:
                old.unlink()
            logger.info("TensorBoard  tensorboard --logdir %s", events)
        except Exception as error:
            self._give_up(error)

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
    ) -> None:
        """Writes metrics; they reach the file within ten seconds."""
        try:
            self._add(step, time.time(), metrics)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Flushes and closes the file."""
        try:
            if self._writer is not None:
                self._writer.flush()  # unlike `close`, it reports an error of the writing thread
                self._writer.close()
                self._writer = None
        except Exception as error:
            self._give_up(error)

    def complete(self) -> bool:
        """Writes the history again if an error has switched the tracker off."""
        if self._has_failed:
            self._open()
            self.close()
        if self._has_failed:
            logger.warning(
                "TensorBoard lacks steps: write them with samestep sync %s", self._folder
            )
        return not self._has_failed

    def _add(
        self,
        step: int,
        wall_time: float,
        metrics: Mapping[str, float],
    ) -> None:
        # After a failure there is no writer, and the run goes on without one.
        if self._writer is not None:
            value = self._summary.Value
            shown = sectioned(metrics).items()
            values = [value(tag=name, simple_value=number) for name, number in shown]
            summary = self._summary(value=values)
            self._writer.add_event(self._event(step=step, wall_time=wall_time, summary=summary))

    def _give_up(self, error: Exception) -> None:
        self._writer, self._has_failed = None, True
        logger.warning(
            "TensorBoard failed and is switched off: %s. Training continues; metrics.jsonl has "
            "every metric, and the end of the run, its next start or samestep sync writes all of "
            "them.",
            error,
        )
