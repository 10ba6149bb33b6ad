"""Weights & Biases: one W&B run for a run folder, whatever its restarts.

W&B gets each step of metrics.jsonl exactly once. When a run resumes, W&B may have fewer steps than
that file (its process was killed with steps in its buffers) or more (the run went back to a
checkpoint). Online, steps that the server has are not sent again, since repeated steps give the
same values; missing ones are sent from the file. Offline, a restart writes the whole history to a
new folder and removes the older ones, because `wandb sync` does not join the folders of one run.

A step may have several rows in that file: of training, of the held-out data, of probes. W&B cannot
add to a step that it has, so a step is sent as a whole, once a row of the next step has come or the
run has ended. A run that fails sends nothing of its last step: it may have failed between two rows,
and a restart sends all of them.

W&B's own process writes the folder of an offline run. After a full disk it writes nothing more, and
does not say so. So the file is read at the end, and written anew if a step is missing.
"""

from __future__ import annotations

import json
import logging
import math
import netrc
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, TypedDict
from urllib.parse import urlparse

from samestep import storage
from samestep.config import Tree
from samestep.errors import ConfigError, MissingExtra, StorageError
from samestep.stored_json import damage_of, read_json
from trainer.monitoring import Level, Tracker, WeightsAndBiases, transaction_log
from trainer.monitoring.artifacts import CheckpointArtifacts
from trainer.monitoring.jsonl import read_rows
from trainer.monitoring.sections import sectioned

logger = logging.getLogger(__name__)

FINISH_SECONDS = 60.0
"""How long the end of a run waits for uploads; `wandb sync` can send the rest."""

ALERT_SECONDS = 3.0
"""How long an alert may delay a run. Its end must take less than the 5 s that the agent grants."""

_FILE = "wandb_run.json"
_WRITTEN_SECONDS = 10.0  # W&B's process writes the end of its file after `finish`
_FORMER_SERVER = "api.wandb.ai"  # where logins before wandb 0.31 were; their keys are still valid
# W&B sends one request after the other, and the interpreter waits for it at exit, so a request that
# is not answered must not take minutes.
_REQUEST_SECONDS = 15.0
_REQUEST_RETRIES = 2


def claim(folder: Path) -> None:
    """Assigns a run folder to this trial of a sweep, if there is one, before the run is read.

    Raises:
        ConfigError: the folder belongs to another run, which the trial would resume.
    """
    trial = _trial()
    if trial is None:
        return
    started, known = (folder / "starts.jsonl").exists(), (folder / _FILE).exists()
    # A run without W&B has no id to compare. A new folder gets the trial's own id here.
    if (started and not known) or _run_id(folder) != trial:
        held = f"the W&B run {_run_id(folder)}" if known else "a run without W&B"
        raise ConfigError(
            f"output {folder} holds {held}, and trial {trial} of a sweep would resume it; give "
            "each trial its own folder, such as output=runs/sweep/$WANDB_RUN_ID (see "
            "configs/sweeps/bert_mini.yaml)"
        )


def holds(config: WeightsAndBiases, folder: Path, most: float = math.inf) -> bool:
    """Whether W&B has all steps of the metrics.jsonl of a run folder.

    Online, the note of the last upload tells; offline, the file that waits for `wandb sync`.

    Args:
        most: leaves out later steps of metrics.jsonl, which may lack rows.
    """
    steps = {row["step"] for row in read_rows(folder / "metrics.jsonl")}
    steps = {step for step in steps if step <= most}
    try:
        mode = resolve_mode(config.mode)
        if mode == "disabled" or max(steps, default=-1) <= _read_note(folder).get("sent", -1):
            return True
        return mode == "offline" and steps <= _offline_steps(folder)
    except transaction_log.UnknownFormatError as error:
        logger.warning("whether W&B has all steps is unknown: %s", error)
        return True
    except ValueError:  # an invalid setting of W&B, which the tracker reports
        return False


class WandbTracker(Tracker):
    """Sends metrics to one W&B run. An error in W&B is logged once and does not stop training.

    First it sends the rows of metrics.jsonl that W&B lacks.

    Args:
        folder: its metrics.jsonl has been truncated to the step that training resumes from.
        description: the experiment's configuration.
        checkpoints: lists folders or addresses of the committed checkpoints, oldest first.
        summary: facts about the newest start of the run, besides its metrics.
        most: leaves out later steps of metrics.jsonl, which may lack rows.

    Raises:
        MissingExtra: the package wandb is not installed.
    """

    def __init__(
        self,
        config: WeightsAndBiases,
        folder: Path,
        description: Tree,
        checkpoints: Callable[[], Sequence[str]],
        summary: Mapping[str, str | int],
        most: float = math.inf,
    ) -> None:
        self._config, self._folder, self._description = config, folder, description
        self._checkpoints, self._summary, self._most = checkpoints, summary, most
        self._run: Any = None
        self._artifacts: CheckpointArtifacts | None = None
        self._last_held = -1  # the last step that W&B had before this start
        # The rows of the newest step, merged; sent when the step is complete.
        self._step = -1
        self._row: dict[str, float] = {}
        self._mode = "disabled"
        self._has_failed = self._is_late = False
        self._open()

    def _open(self) -> None:
        config, folder = self._config, self._folder
        try:
            self._mode = mode = resolve_mode(config.mode)
            if mode == "disabled":
                return
            wandb = _package()
            run_id = _run_id(folder)
            replaced = _offline_folders(folder, run_id)
            # W&B names a folder by the second.
            while any(time.strftime("%Y%m%d_%H%M%S") in old.name for old in replaced):
                time.sleep(0.05)
            self._run = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                name=config.name or folder.resolve().name,
                tags=config.tags,
                config=dict(self._description),
                dir=str(folder),
                id=run_id,
                mode=mode,
                resume="allow" if mode == "online" else None,
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    finish_timeout=FINISH_SECONDS,
                    finish_timeout_raises=True,
                    x_graphql_timeout_seconds=_REQUEST_SECONDS,
                    x_graphql_retry_max=_REQUEST_RETRIES,
                ),
            )
            self._run.summary.update(dict(self._summary))
            # Online, the steps that the server has are skipped. Offline the run is new.
            self._last_held = self._run.starting_step - 1
            for row in read_rows(folder / "metrics.jsonl"):
                row["_timestamp"] = row.pop("time")
                if (step := row.pop("step")) <= self._most:
                    self.log(step, row)
            # The file ends with a checkpoint's step, which has all its rows.
            self._send_step()
            where = self._run.url
            if mode == "offline":
                # Only now: until the history is in the new folder, the old ones are all there is.
                for old in replaced:
                    shutil.rmtree(old, ignore_errors=True)
                where = f"upload it with: wandb sync {self._run.settings.sync_dir}"
            logger.info("W&B          %s run %s; %s", mode, run_id, where)
            if config.log_checkpoints:
                self._artifacts = CheckpointArtifacts(wandb, self._run, self._checkpoints)
        except MissingExtra:
            raise
        except Exception as error:
            self._give_up(error)

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
    ) -> None:
        """Adds metrics to a step, unless W&B had it before the restart; sends the step before."""
        if self._run is None or step <= self._last_held:
            return
        if step != self._step:
            self._send_step()
            # The time of the step, rather than the time at which it is sent.
            self._step, self._row = step, {"_timestamp": time.time()}
        self._row |= sectioned(metrics)
        if self._artifacts is not None:
            self._artifacts.look()

    def _send_step(self) -> None:
        """Sends the newest step; the caller knows that all its rows have come."""
        row, self._row = self._row, {}
        if self._run is None or not row:
            return
        try:
            self._run.log(row, step=self._step, commit=True)
        except Exception as error:
            self._give_up(error)

    def alert(self, level: Level, title: str, text: str) -> None:
        """Sends an alert. An ERROR also flushes all complete steps and marks the run as failed.

        It is sent from a thread, because the training thread, or W&B itself, may hang.
        """
        if self._run is not None and self._config.alerts:
            sending = Thread(
                target=self._send, args=(level, title, text), name="wandb-alert", daemon=True
            )
            sending.start()
            sending.join(ALERT_SECONDS)

    def _send(self, level: Level, title: str, text: str) -> None:
        try:
            self._run.alert(title=title, text=storage.shown(text), level=level)
        except Exception as error:
            self._give_up(error)
        # After an ERROR the process ends, maybe before W&B's own process has sent the alert: wait.
        if level == "ERROR" and self._run is not None:
            run, self._run = self._run, None
            with suppress(Exception):  # W&B logs it itself
                run.finish(exit_code=1)

    def close(self) -> None:
        """Sends the last step, and waits for uploads, a minute at most."""
        self._send_step()
        if self._run is not None:
            try:
                if self._artifacts is not None:
                    self._artifacts.close(FINISH_SECONDS)
                self._run.finish()
                if self._mode == "online":
                    _update_note(self._folder, sent=max(self._step, self._last_held))
            except TimeoutError:
                self._is_late = True
            except Exception as error:
                self._give_up(error)
            self._run = None

    def complete(self) -> bool:
        """Sends the history again if W&B lacks steps of it, as after a full disk."""
        if not self._has_all() and not self._is_late:
            logger.info("W&B          lacks steps, and gets them again from metrics.jsonl")
            self._has_failed, self._step, self._row = False, -1, {}
            self._open()
            self.close()
        has_all = self._has_all()
        if not has_all:
            logger.warning("W&B lacks steps: send them with samestep sync %s", self._folder)
        return has_all

    def _has_all(self) -> bool:
        if self._has_failed or self._is_late:
            return False
        # Online, `finish` has waited for all uploads.
        deadline = time.monotonic() + _WRITTEN_SECONDS
        while not (has_all := holds(self._config, self._folder, self._most)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return has_all

    def _give_up(self, error: Exception) -> None:
        self._run = self._artifacts = None
        self._has_failed = True
        logger.warning(
            "W&B failed and is switched off: %s. Training continues; metrics.jsonl has every "
            "metric, and W&B gets the missing ones at the end of the run, at its next start, or by "
            "samestep sync.",
            error,
        )


def resolve_mode(mode: str) -> str:
    """Resolves auto: WANDB_MODE if it is set, else online if there is an API key."""
    wanted = os.environ.get("WANDB_MODE", "")
    if mode != "auto":
        return mode
    if wanted in ("online", "offline", "disabled"):
        return wanted
    return "online" if has_key() else "offline"


def has_key() -> bool:
    """Whether there is an API key where W&B looks for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    address = server()
    # A server of one's own has its own entry, with its port.
    machines = [urlparse(address).netloc]
    if address == _package().Settings().base_url:
        machines.append(_FORMER_SERVER)
    try:
        logins = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return any(logins.authenticators(machine) for machine in machines)


def server() -> str:
    """The address of the W&B server: WANDB_BASE_URL, or what `wandb login --host` has stored.

    Raises:
        MissingExtra: the package wandb is not installed.
        ValueError: a setting of W&B is invalid.
    """
    if address := os.environ.get("WANDB_BASE_URL"):
        return str(_package().Settings(base_url=address).base_url)
    # Unlike `wandb.setup()`, this starts no process of W&B.
    return str(_package().sdk.wandb_setup.singleton().settings.base_url)


def _package() -> ModuleType:
    try:
        return import_module("wandb")
    except ImportError as error:
        raise MissingExtra("wandb", "wandb", "tracking.wandb") from error


def _run_id(folder: Path) -> str:
    """The W&B id of the run in a folder, the same after every restart."""
    run_id = _read_note(folder).get("id")
    if run_id is None:
        run_id = _trial() or uuid.uuid4().hex[:8]
        _update_note(folder, id=run_id)
    return str(run_id)


def _read_note(folder: Path) -> dict[str, Any]:
    """Reads the id of the W&B run of a folder, and the last step that was uploaded."""
    # A file of the run folder, so that a copy of the folder resumes the same W&B run elsewhere.
    path = folder / _FILE
    with damage_of(path, StorageError, "Restore it, or remove it to begin a new run in W&B."):
        return dict(read_json(path, _Note)) if path.exists() else {}


class _Note(TypedDict, total=False):
    id: str
    sent: int


def _update_note(folder: Path, **values: str | int) -> None:
    storage.write_text(folder / _FILE, json.dumps({**_read_note(folder), **values}) + "\n")


def _offline_folders(folder: Path, run_id: str) -> list[Path]:
    return list((folder / "wandb").glob(f"offline-run-*-{run_id}"))


def _offline_steps(folder: Path) -> set[int]:
    """The steps of a run in the folder that waits for `wandb sync`."""
    steps: set[int] = set()
    for offline in _offline_folders(folder, _read_note(folder).get("id", "")):
        for path in offline.glob("*.wandb"):
            steps |= transaction_log.steps(path)
    return steps


def _trial() -> str | None:
    """The W&B id that the agent of a sweep has given this run; W&B accepts no other."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
