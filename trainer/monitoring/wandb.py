"""Weights & Biases as a projection of metrics.jsonl: one W&B run for a run folder, whatever its restarts.

W&B gets exactly the steps of metrics.jsonl, each once. When a run continues, W&B may hold fewer steps than that file
(its own process was killed with steps in its buffers) or more (the run went back to a checkpoint). Online, what the
server holds stays, rows beyond it are sent again from the file, and steps that are repeated are not sent a second time:
repeated steps give the same values. Offline, a restart writes the whole history into a new folder and removes those
that it replaces, because `wandb sync` does not join the folders of one run.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import urlparse

from trainer.errors import MissingExtra
from trainer.monitoring.artifacts import CheckpointArtifacts
from trainer.monitoring.jsonl import read_rows

logger = logging.getLogger(__name__)

FINISH_SECONDS = 60.0
"""How long the end of a run waits for uploads; what is not sent by then can be sent with `wandb sync`."""


@dataclass(frozen=True)
class Config:
    """Weights & Biases.

    Attributes:
        project: the W&B project.
        entity: user or team; None takes the account's default.
        group: groups runs in the W&B interface.
        name: the run's name; None takes the name of the run folder.
        tags: labels of the run.
        mode: online and offline as W&B has them; auto is WANDB_MODE if that is set, else online if an API key is
            found (in WANDB_API_KEY or netrc) and offline if none is; disabled switches W&B off.
        log_checkpoints: whether to log committed checkpoints as artifacts: those in folders are uploaded, those in
            object stores referred to.
    """

    project: str = "samestep"
    entity: str | None = None
    group: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    log_checkpoints: bool = False

    def build(
        self, folder: Path, description: Mapping[str, Any], checkpoints: Callable[[], Sequence[str]]
    ) -> WandbTracker:
        """Makes the tracker of a run folder, whose metrics.jsonl has been cut back to where training continues.

        Args:
            folder: the run's.
            description: the experiment's configuration.
            checkpoints: lists the folders or URLs of the committed checkpoints, oldest first.

        Raises:
            MissingExtra: the package wandb is not installed.
        """
        return WandbTracker(self, folder, description, checkpoints)


class WandbTracker:
    """Sends metrics to one W&B run. Nothing that goes wrong in W&B stops training: it is reported once."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        description: Mapping[str, Any],
        checkpoints: Callable[[], Sequence[str]],
    ) -> None:
        self._run: Any = None
        self._artifacts: CheckpointArtifacts | None = None
        self._last_held = -1  # the last step that W&B already has
        mode = resolve_mode(config.mode)
        if mode != "disabled":
            wandb = _import()
            try:
                self._start(wandb, config, mode, folder, description)
                if config.log_checkpoints:
                    self._artifacts = CheckpointArtifacts(wandb, self._run, checkpoints)
            except Exception as error:
                self._give_up(error)

    def _start(
        self, wandb: ModuleType, config: Config, mode: str, folder: Path, description: Mapping[str, Any]
    ) -> None:
        run_id = _run_id(folder)
        replaced = list((folder / "wandb").glob(f"offline-run-*-{run_id}"))
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            name=config.name or folder.resolve().name,
            tags=config.tags,
            config=dict(description),
            dir=str(folder),
            id=run_id,
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(silent=True, console="off", finish_timeout=FINISH_SECONDS),
        )
        self._last_held = self._run.starting_step - 1
        for row in read_rows(folder / "metrics.jsonl"):
            row["_timestamp"] = row.pop("time")
            self.log(row.pop("step"), row)
        if mode == "offline":
            for old in replaced:
                shutil.rmtree(old, ignore_errors=True)
        where = self._run.url if mode == "online" else f"upload it with: wandb sync {self._run.settings.sync_dir}"
        logger.info("W&B          %s run %s; %s", mode, run_id, where)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends metrics, unless W&B has this step from before the restart."""
        if self._run is None or step <= self._last_held:
            return
        try:
            self._run.log(dict(metrics), step=step)
        except Exception as error:
            self._give_up(error)
        if self._artifacts is not None:
            self._artifacts.look()

    def close(self) -> None:
        """Waits for uploads, a minute at most."""
        if self._run is not None:
            try:
                if self._artifacts is not None:
                    self._artifacts.close(FINISH_SECONDS)
                self._run.finish()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = self._artifacts = None
        logger.warning(
            "W&B is switched off until the run is continued, because it failed: %s. Training goes on; metrics.jsonl "
            "has every metric, and a restart sends W&B what it lacks.",
            error,
        )


def _import() -> ModuleType:
    try:
        import wandb
    except ImportError as error:
        raise MissingExtra("wandb", "wandb", "tracking.wandb") from error
    return wandb


def resolve_mode(mode: str) -> str:
    if mode != "auto":
        return mode
    if os.environ.get("WANDB_MODE") in ("online", "offline", "disabled"):
        return os.environ["WANDB_MODE"]
    return "online" if has_key() else "offline"


def has_key() -> bool:
    """Whether an API key is where W&B looks for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _run_id(folder: Path) -> str:
    """The W&B id of the run in this folder, the same after every restart."""
    path = folder / "wandb_run.json"
    if path.exists():
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    run_id = uuid.uuid4().hex[:8]
    path.write_text(json.dumps({"id": run_id}) + "\n", encoding="utf-8")
    return run_id
