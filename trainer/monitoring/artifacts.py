"""Committed checkpoints as W&B artifacts, logged beside training."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 10.0  # listing is some requests to an object store, and rows may come many a second


class CheckpointArtifacts:
    """Logs each checkpoint as a version of the artifact `checkpoint-RUN_ID`, with the alias `step-N`.

    Files of a folder are uploaded; what lies behind a URL is referred to. After a restart all checkpoints that still
    exist are logged again: W&B knows equal content and uploads nothing twice.
    """

    def __init__(self, wandb: ModuleType, run: Any, committed: Callable[[], Sequence[str]]) -> None:
        self._wandb, self._run, self._committed = wandb, run, committed
        self._thread: Thread | None = None
        self._seen: set[str] = set()
        self._looked = -math.inf

    def look(self) -> None:
        """Has new checkpoints logged, unless that is going on or was done just before; returns at once."""
        if time.monotonic() - self._looked >= _LOOK_SECONDS and (
            self._thread is None or not self._thread.is_alive()
        ):
            self._looked = time.monotonic()
            self._thread = Thread(target=self._log_new, name="wandb-artifacts", daemon=True)
            self._thread.start()

    def close(self, timeout: float) -> None:
        """Has the last ones logged, for so many seconds at most."""
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            self._thread.join(timeout)
        self._looked = -math.inf
        self.look()  # what was going on may have begun before the last checkpoint
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _log_new(self) -> None:
        try:
            new = [place for place in self._committed() if place not in self._seen]
        except Exception as error:  # as of an object store; the next look tries again
            logger.warning("W&B: the checkpoints cannot be listed for artifacts: %s", error)
            return
        for place in new:
            self._seen.add(place)
            try:
                self._log(place)
            except Exception as error:  # as when retention has just removed it
                logger.warning(
                    "W&B: the checkpoint %s is not logged as an artifact: %s", place, error
                )

    def _log(self, place: str) -> None:
        step = int(re.findall(r"\d+", place)[-1])
        artifact = self._wandb.Artifact(
            f"checkpoint-{self._run.id}", type="model", metadata={"step": step}
        )
        if "://" in place:
            artifact.add_reference(place, checksum=False)
        else:
            for file in sorted(Path(place).iterdir()):
                artifact.add_file(str(file), skip_cache=True)
        self._run.log_artifact(artifact, aliases=[f"step-{step}", "latest"])
