"""Logs committed checkpoints as W&B artifacts, in a thread beside training."""

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

# Listing costs requests to an object store, and many rows may come in a second.
_LOOK_SECONDS = 10.0


class CheckpointArtifacts:
    """Logs each checkpoint as a version of artifact `checkpoint-RUN_ID`, with alias `step-N`.

    Files in a folder are uploaded; an address is logged as a reference. After a restart, all
    existing checkpoints are logged again: W&B compares their content and uploads nothing twice.
    """

    def __init__(
        self,
        wandb: ModuleType,
        run: Any,
        committed: Callable[[], Sequence[str]],
    ) -> None:
        self._wandb, self._run, self._committed = wandb, run, committed
        self._thread: Thread | None = None
        self._seen: set[str] = set()
        self._looked = -math.inf

    def look(self) -> None:
        """Starts logging new checkpoints, unless this just happened; returns at once."""
        running = self._thread is not None and self._thread.is_alive()
        if not running and time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            self._thread = Thread(target=self._log_new, name="wandb-artifacts", daemon=True)
            self._thread.start()

    def close(self, timeout: float) -> None:
        """Logs the last checkpoints; waits at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            self._thread.join(timeout)
        self._looked = -math.inf
        # The thread that just ended may have listed checkpoints before the last one was saved.
        self.look()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _log_new(self) -> None:
        try:
            new = [place for place in self._committed() if place not in self._seen]
        except Exception as error:  # of an object store; the next call tries again
            logger.warning("W&B: cannot list checkpoints for artifacts: %s", error)
            return
        for place in new:
            self._seen.add(place)
            try:
                self._log(place)
            except Exception as error:  # retention may have just removed it
                logger.warning("W&B: cannot log checkpoint %s as an artifact: %s", place, error)

    def _log(self, place: str) -> None:
        # A folder may have the number of a lease, too: step-00001000-lease-2.
        step = int(re.findall(r"step-(\d+)", place)[-1])
        name = f"checkpoint-{self._run.id}"
        artifact = self._wandb.Artifact(name, type="model", metadata={"step": step})
        if "://" in place:
            # A checksum would download every object.
            artifact.add_reference(place, checksum=False)
        else:
            # W&B's cache would be a second copy of each checkpoint on this disk.
            for file in sorted(Path(place).iterdir()):
                artifact.add_file(str(file), skip_cache=True)
        self._run.log_artifact(artifact, aliases=[f"step-{step}", "latest"])
