"""The work of one machine of a TPU slice: runs the experiment, and reports on it in a bucket.

The script of `startup.sh.jinja` installs the package as root, and becomes this command as the user:

    python -m launch.tpu.machine FILE EXPERIMENT [key=value ...]

FILE holds the `Settings`. The folder that it starts in is where relative paths start. It restarts a
run that ended for an unknown reason, passes a preemption, the system's shutdown and a cancellation
on to it, and copies its log, the small files of its folder and its exit code into the bucket.
"""

from __future__ import annotations

import http.client
import itertools
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from samestep.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    LaunchError,
)
from samestep.stored_json import JsonError, read_json

T = TypeVar("T")

logger = logging.getLogger("launch.tpu.machine")  # also when this module is run as __main__

PORT = 29400  # of the rendezvous, as in docs/tpu.md
# Of a run that was stopped for an unknown reason, or has waited in vain for others, per boot.
_RESTARTS = 5
_RESTART_SECONDS = 5.0
_POLL_SECONDS = 1.0  # a spot machine is taken away 30 seconds after the notice
_METADATA_SECONDS = 3.0
_COPY_SECONDS = 20.0
_GCLOUD_SECONDS = 300  # a gcloud that hangs would cost money forever
_LAST_COPY_SECONDS = 900.0
_PAUSES = (2.0, 10.0, 30.0, 60.0)  # networks come and go
# Parts of a run's folder that exist elsewhere, or are of this machine only.
_NOT_COPIED = (".owner", "checkpoints", "profile", "tensorboard", "wandb")


@dataclass(frozen=True)
class Settings:
    """The run of a machine.

    Attributes:
        name: of the slice.
        work: folder of the run on each machine, with its log and the user's home.
        staging: folder in a bucket for logs and exit codes.
        kept: folder in a bucket with a copy of the run's folder, from which the run continues on
            other machines.
        output: the run's folder, as the experiment names it.
        variables: environment variables of the run.
    """

    name: str
    work: str
    staging: str
    kept: str
    output: str
    variables: dict[str, str]


class Machine:
    """One boot of a machine.

    Args:
        arguments: of `samestep train`: the experiment, and overrides.
    """

    def __init__(self, settings: Settings, arguments: Sequence[str]) -> None:
        self._settings, self._arguments = settings, arguments
        self._work = work = Path(settings.work)
        self._log = (work / "job.log").resolve()  # of this boot, by whose time it is named
        self._output = Path(settings.output)
        self._scratch = work / "home" / ".machine"
        self._worker, self._hosts = platform.node(), [""]
        # Set by signals and threads; only the main thread signals the run.
        self._leaving = self._stop = False
        self._copying = threading.Lock()
        self._ended = threading.Event()

    def run(self) -> int:
        """Runs the experiment; returns the exit code of this process."""
        signal.signal(signal.SIGTERM, lambda *_: self._leave("the system shuts down"))
        try:
            self._scratch.mkdir(exist_ok=True)
            self._worker = _again(lambda: _metadata("attributes/agent-worker-number"))
            # Each is like unknown:unknown:10.0.0.1, in the order of the machines.
            endpoints = _again(lambda: _metadata("attributes/worker-network-endpoints"))
            self._hosts = [endpoint.split(":")[2] for endpoint in endpoints.split(",")]
            logger.info("this is machine %s of %d", self._worker, len(self._hosts))
            staged = _again(lambda: _listed(self._settings.staging))
            if f"exit-{self._worker}" in staged:
                logger.info("the run has ended already")
                return EXIT_DONE
            self._stop = "stop" in staged
            threading.Thread(target=self._watch_bucket, daemon=True).start()
            if self._is_first:
                if "versions" not in staged:
                    self._keep_versions()
                if not self._output.exists():
                    self._bring_back()
            return self._run_until_it_ends()
        except LaunchError as error:
            logger.error("%s", error)
        except Exception:  # whoever waits for the run has to learn of its end
            logger.exception("this machine cannot start the run")
        return self._finish(EXIT_FAILED)

    @property
    def _is_first(self) -> bool:
        # Rank 0 writes the run's folder, usually on the machine that hosts the rendezvous.
        return self._worker == "0"

    def _run_until_it_ends(self) -> int:
        for restarts in itertools.count():
            self._look()
            if self._stop:
                return self._finish(EXIT_PREEMPTED)
            code = self._run_once() if not self._leaving else EXIT_PREEMPTED
            if self._leaving and code != EXIT_DONE:
                logger.info(
                    "exit code %d; the run goes on when the machine is there again, or another in "
                    "its place",
                    code,
                )
                self._ended.set()
                self._copy()
                return EXIT_DONE
            # Other codes are errors, which would come again.
            may_go_on = code in (EXIT_PREEMPTED, EXIT_UNAVAILABLE) or code > 128
            if self._stop or restarts >= _RESTARTS or not may_go_on:
                return self._finish(code)
            logger.info("the run has ended with exit code %d, and is started again", code)
            time.sleep(_RESTART_SECONDS)
        raise AssertionError

    def _run_once(self) -> int:
        """Runs the experiment until it ends; returns its exit code as a shell's."""
        nodes = ["--elastic", str(len(self._hosts))]
        if len(self._hosts) > 1:
            nodes += ["--rendezvous", f"{self._hosts[0]}:{PORT}"]
        samestep = str(self._work / "home" / "env" / "bin" / "samestep")
        job = {"SAMESTEP_JOB": self._settings.name, "SAMESTEP_NODES": ",".join(self._hosts)}
        process = subprocess.Popen(
            [samestep, "train", *self._arguments, *nodes],
            env={**os.environ, **job, **self._settings.variables},
        )
        is_signaled = False
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(_POLL_SECONDS)
                    return code if code >= 0 else 128 - code
                self._look()
                # Once only: a second signal would end the run without a checkpoint.
                if (self._leaving or self._stop) and not is_signaled:
                    is_signaled = True
                    process.terminate()
        finally:
            # After an error here: systemd would kill the run without a checkpoint.
            if process.poll() is None:
                if not is_signaled:
                    process.terminate()
                process.wait()

    def _look(self) -> None:
        """Notices a cancellation by ssh, and a preemption."""
        if (self._work / "stop").exists():
            self._stop = True
        with suppress(OSError, http.client.HTTPException):
            if not self._leaving and _metadata("preempted") == "TRUE":
                self._leave("this machine is taken away")

    def _leave(self, why: str) -> None:
        logger.info("%s", why)
        self._leaving = True

    def _finish(self, code: int) -> int:
        """Reports the end of the run to whoever waits for it."""
        logger.info("the run has ended with exit code %d", code)
        self._ended.set()
        self._copy(_PAUSES[:1])  # no later copy makes up for one that fails
        target = f"{self._settings.staging}/exit-{self._worker}"
        text = f"{self._worker} {code}\n"
        try:
            _again(lambda: _gcloud("storage", "cp", "-", target, text=text))
        except LaunchError as error:
            logger.error("the exit code could not be kept: %s", error)
        return code

    def _watch_bucket(self) -> None:
        while True:
            with suppress(LaunchError, OSError):
                if "stop" in _listed(self._settings.staging):
                    self._stop = True
            self._copy()
            if self._ended.wait(_COPY_SECONDS):
                return

    def _copy(self, pauses: Sequence[float] = ()) -> None:
        """Copies the run's small files and the log into the bucket.

        Args:
            pauses: see `_again`.
        """
        # One at a time, or an older copy might replace a newer one.
        if not self._copying.acquire(timeout=_LAST_COPY_SECONDS):
            logger.warning("copies take too long")
            return
        try:
            for what, copy in (("the run's folder", self._copy_run), ("this log", self._copy_log)):
                try:
                    _again(copy, pauses)
                except (LaunchError, OSError) as error:
                    logger.warning("%s could not be copied: %s", what, error)
        finally:
            self._copying.release()

    def _copy_run(self) -> None:
        if not self._is_first or not self._output.is_dir():
            return
        copy = self._scratch / "run"
        shutil.rmtree(copy, ignore_errors=True)
        try:
            shutil.copytree(self._output, copy, ignore=self._not_copied)
        except shutil.Error as error:
            # A run replaces its files while they are read: what has just gone comes with the next
            # copy. Half a file, as on a full disk, must not replace a whole one in the bucket.
            for _, part, _ in error.args[0]:
                Path(part).unlink(missing_ok=True)
        _gcloud("storage", "rsync", "--recursive", str(copy), self._settings.kept)

    def _not_copied(self, folder: str, names: Iterable[str]) -> set[str]:
        excluded = _NOT_COPIED if Path(folder) == self._output else ()
        # gcloud would copy what a link leads to.
        return {name for name in names if name in excluded or Path(folder, name).is_symlink()}

    def _copy_log(self) -> None:
        # Whole lines of valid UTF-8, as readers fetch ranges of bytes.
        content = self._log.read_bytes()
        whole = content[: content.rfind(b"\n") + 1].decode("utf-8", "ignore")
        file = self._scratch / "log"
        file.write_text(whole, encoding="utf-8")
        name = f"{self._log.stem}-worker-{self._worker}.log"
        _gcloud("storage", "cp", str(file), f"{self._settings.staging}/log/{name}")

    def _keep_versions(self) -> None:
        installed = {f"{each.name}=={each.version}" for each in metadata.distributions()}
        text = "".join(f"{each}\n" for each in sorted(installed))
        target = f"{self._settings.staging}/versions"
        try:
            _gcloud("storage", "cp", "--if-generation-match=0", "-", target, text=text)
        except LaunchError as error:
            logger.warning("the installed versions could not be kept: %s", error)

    def _bring_back(self) -> None:
        """Brings back the run's folder of earlier machines, if there is one.

        Raises:
            LaunchError: no answer. A run that began anew would overwrite what was kept.
        """
        if not _again(lambda: _listed(self._settings.kept)):
            return
        logger.info("bringing back the run's folder")
        # All or nothing: a half would be copied over what was kept.
        self._output.parent.mkdir(parents=True, exist_ok=True)
        half = self._output.with_name(f".{self._output.name}.back")
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir()
        rsync = ["storage", "rsync", "--recursive", self._settings.kept, str(half)]
        _again(lambda: _gcloud(*rsync))
        # In one step: a boot that is cut off here finds no half of a run.
        half.rename(self._output)


def _again(function: Callable[[], T], pauses: Sequence[float] | None = None) -> T:
    """Calls a function until it raises neither `LaunchError` nor `OSError`.

    Args:
        pauses: before each further call, in seconds; None makes four of them.
    """
    for pause in _PAUSES if pauses is None else pauses:
        try:
            return function()
        except (LaunchError, OSError) as error:
            logger.warning("%s; again in %.0f s", error, pause)
            time.sleep(pause)
    return function()


def _listed(folder: str) -> set[str]:
    """Names in a folder of a bucket. Nothing is an answer, and no answer is an error."""
    try:
        listing = _gcloud("storage", "ls", f"{folder}/**")
    except LaunchError as error:
        if "matched no objects" in str(error):
            return set()
        raise
    return {line.removeprefix(f"{folder}/") for line in listing.splitlines()}


def _gcloud(*words: str, text: str = "") -> str:
    """Runs gcloud with this standard input; returns its output.

    Raises:
        LaunchError: with the end of what it said.
    """
    command = ["timeout", "--kill-after=10", str(_GCLOUD_SECONDS), "gcloud", "--quiet", *words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LaunchError(f"gcloud {' '.join(words[:2])}: {said[-500:]}")
    return done.stdout


def _metadata(key: str) -> str:
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{key}", headers={"Metadata-Flavor": "Google"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_METADATA_SECONDS) as answer:
        return str(answer.read().decode())


def main(arguments: Sequence[str]) -> int:
    """`python -m launch.tpu.machine FILE EXPERIMENT [key=value ...]`."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s startup: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    if len(arguments) < 2:
        logger.error("give the file of a run's settings, and the experiment")
        return EXIT_USAGE
    try:
        settings = read_json(Path(arguments[0]), Settings)
    except (OSError, JsonError) as error:
        logger.error("%s cannot be read: %s", arguments[0], error)
        return EXIT_FAILED
    return Machine(settings, arguments[1:]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
