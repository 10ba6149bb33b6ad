"""TensorBoard: RUN/tensorboard holds each step of metrics.jsonl once, whatever the restarts.

Each start writes the whole history to a new event file and then removes the older ones. So nothing
is missing that a killed process had not written, and no step is there twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from trainer.config import Tree
from trainer.errors import MissingExtra
from trainer.monitoring import Tracker
from trainer.monitoring.jsonl import read_rows

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 10


@dataclass(frozen=True)
class Config:
    """TensorBoard event files in RUN/tensorboard."""

    def build(self, folder: Path, description: Tree) -> TensorBoardTracker:
        """Builds the tracker of a run folder; `description` is the experiment's configuration.

        metrics.jsonl must have been truncated to the step that training resumes from.

        Raises:
            MissingExtra: the package tensorboard is not installed.
        """
        return TensorBoardTracker(folder, description)


class TensorBoardTracker(Tracker):
    """Writes metrics as scalars. An error is logged once and does not stop training."""

    def __init__(self, folder: Path, description: Tree) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.compat.proto.tensor_pb2 import TensorProto
            from tensorboard.plugins.text.metadata import create_summary_metadata
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard", "tracking.tensorboard") from error
        self._event, self._summary = Event, Summary
        self._writer: EventFileWriter | None = None
        events = folder / "tensorboard"
        replaced = list(events.glob("events.out.tfevents.*"))
        text = f"```yaml\n{yaml.safe_dump(dict(description), sort_keys=False)}```".encode()
        config = Summary.Value(
            tag="config/text_summary",
            metadata=create_summary_metadata("config", ""),
            tensor=TensorProto(dtype="DT_STRING", string_val=[text]),
        )
        try:
            self._writer = EventFileWriter(str(events), flush_secs=_FLUSH_SECONDS)
            # Tells a running TensorBoard to drop the steps that it has read, before they come
            # again.
            self._writer.add_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))
            self._writer.add_event(Event(step=0, summary=Summary(value=[config])))
            for row in read_rows(folder / "metrics.jsonl"):
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
                self._writer.close()
        except Exception as error:
            self._give_up(error)

    def _add(
        self,
        step: int,
        wall_time: float,
        metrics: Mapping[str, float],
    ) -> None:
        # After a failure there is no writer, and the run goes on without one.
        if self._writer is not None:
            value = self._summary.Value
            values = [value(tag=name, simple_value=number) for name, number in metrics.items()]
            summary = self._summary(value=values)
            self._writer.add_event(self._event(step=step, wall_time=wall_time, summary=summary))

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        logger.warning(
            "TensorBoard failed and is switched off: %s. Training continues; metrics.jsonl has "
            "every metric, and a restart writes all of them.",
            error,
        )
