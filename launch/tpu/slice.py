"""A slice of Cloud TPU and its run's files in a bucket: gcloud commands, and their answers."""

from __future__ import annotations

import json
import logging
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NamedTuple,
    NotRequired,
    TypeAlias,
    TypedDict,
    TypeVar,
)

from launch.clients import command_line
from launch.job import EXIT
from samestep.errors import EXIT_DONE, EXIT_PREEMPTED, LaunchError
from samestep.stored_json import Count, JsonError, Matching, Seconds, parse_json, read_json

if TYPE_CHECKING:
    from typing_extensions import TypeForm

logger = logging.getLogger(__name__)

T = TypeVar("T")
Resource: TypeAlias = Mapping[str, Any]

FILE = "slice.json"
STARTUP = "startup.sh"
WORK = "/var/lib/samestep"
"""Folder of the machines that holds a run's files, in a folder of the slice's name."""
MARK = "samestep-job"
"""Label that identifies a job's slice among others of its name."""

_POLL_SECONDS = 5.0
_LOG_SECONDS = 10.0
_MISSING = re.compile(r"NOT_FOUND(?!.*\blocation .* (not found|access))", re.IGNORECASE | re.DOTALL)
# Until the machines have found a note by themselves, and have reported their exit codes.
_NOTICE_SECONDS = 60.0

HINTS = {
    "active account|auth login|UNAUTHENTICATED|reauth|invalid_grant|problem refreshing": (
        "log in again: gcloud auth login (on a machine that runs alone: with a service account, "
        "gcloud auth activate-service-account)"
    ),
    "SERVICE_DISABLED|has not been used in project|API .* disabled": (
        "enable the APIs: gcloud services enable tpu.googleapis.com compute.googleapis.com "
        "storage.googleapis.com, and wait some minutes"
    ),
    "RESOURCE_EXHAUSTED|quota": (
        "the project has no quota for that many chips of this kind in this zone: ask for more in "
        "the console under IAM & Admin, Quotas (spot, on-demand and reserved chips have quotas of "
        "their own), or take a smaller slice, another zone or another cluster.capacity"
    ),
    "ALREADY_EXISTS": (
        "the name is taken: `samestep jobs` lists your jobs, gcloud compute tpus queued-resources "
        "list everybody's; delete that one, or choose an output of another name"
    ),
    "pre-conditions": (
        "another launch has put its files there: choose an output of another name or another "
        "folder in cluster.staging"
    ),
    "location .* (not found|access)|invalid zone": (
        "there is no such zone for TPUs, or the project may not use it: `gcloud compute tpus "
        "locations list` lists them"
    ),
    "PERMISSION_DENIED|HTTPError 403|does not have .* access": (
        "your account needs the roles TPU Admin, Service Account User and Storage Object Admin, "
        "see docs/cloud_tpu.md; or cluster.project is another's"
    ),
    "gs://[^ ]+ not found|bucket does not exist": (
        "make the bucket, or name another in cluster.staging"
    ),
    "components install|Invalid choice: 'alpha'": (
        "cluster.reservation and cluster.topology need gcloud's alpha commands: gcloud components "
        "install alpha"
    ),
    r"ssh.*(exited|return code|\[255\])|port 22|Permission denied \(publickey": (
        "machines without external addresses, or behind a firewall, are reached from their own "
        "network only"
    ),
    (
        "ConnectionError|unable to find the server|UNAVAILABLE|'status': 50|network connectivity"
        "|timed out"
    ): (
        "Google's servers cannot be reached from here, or do not answer: see gcloud info "
        "--run-diagnostics"
    ),
}


class _Node(TypedDict, total=False):
    labels: dict[str, str]


class _Spec(TypedDict, total=False):
    node: _Node


class _Tpu(TypedDict, total=False):
    nodeSpec: list[_Spec]


class _Error(TypedDict, total=False):
    message: str


class _Failed(TypedDict, total=False):
    error: _Error


class _State(TypedDict, total=False):
    state: str
    failedData: _Failed


class _Described(TypedDict, total=False):
    """The keys of a queued resource or a node that are read here; others are not checked."""

    state: str | _State
    health: str
    tpu: _Tpu
    networkEndpoints: list[object]


class _Named(_Described):
    name: str


_Listed = list[_Named]


class _Object(TypedDict):
    name: str
    size: NotRequired[Annotated[str, Matching("[0-9]{1,18}")] | Count | None]
    generation: NotRequired[str | int | None]


class Kept(NamedTuple):
    """A file in a bucket."""

    size: int
    generation: str  # changes whenever the file is written


@dataclass(frozen=True)
class Slice:
    """A job's slice, as stored in the job's folder.

    Attributes:
        name: of the queued resource, and of its only node.
        project: the project that pays.
        zone: of the machines.
        staging: folder in a bucket for files that go to this job's machines or come from them.
        mark: digest of the script and the configuration; identifies this job's slice among
            slices of the same name.
        create: the command that requests the slice; run in the job's folder.
        stop_seconds: time that the run gets for its last checkpoint.
        supervise: whether a supervisor requests the slice again, and deletes it in the end.
        poll_seconds: time between two polls of the supervisor.
        silence_seconds: time after which the supervisor gives up machines that exist and write
            nothing into `staging`.
    """

    name: str
    project: str
    zone: str
    staging: str
    mark: str
    create: tuple[str, ...]
    stop_seconds: Seconds
    supervise: bool
    poll_seconds: Seconds
    silence_seconds: Seconds

    @classmethod
    def of(cls, folder: Path) -> Slice:
        """Reads the slice of a job's folder.

        Raises:
            LaunchError: the folder belongs to no job on Cloud TPU.
        """
        try:
            return read_json(folder / FILE, cls)
        except (OSError, JsonError) as error:
            raise LaunchError(
                f"{folder} is not a folder of a job on Cloud TPU: {FILE} cannot be read ({error})"
            ) from error

    def dump(self) -> str:
        """The content of `FILE`."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def queued(self) -> Resource | None:
        """The queued resource, or None if Google says that there is none."""
        return self._describe("queued-resources")

    def node(self) -> Resource | None:
        """The node, which consists of the slice's machines."""
        return self._describe("tpu-vm")

    def _describe(self, what: str) -> Resource | None:
        try:
            found: Resource = _parsed(
                self._tpus(what, "describe", self.name, "--format=json"), _Described
            )
        except LaunchError as error:
            # gcloud has no exit code of its own for this.
            if _MISSING.search(str(error)):
                return None
            raise
        return found

    def _is_ours(self, resource: Resource) -> bool:
        """Whether a resource of this name was requested for this job, and not by somebody else."""
        # The label is a digest of what the machines run: two users may choose the same name.
        for spec in resource.get("tpu", {}).get("nodeSpec", ()):
            labels = spec.get("node", {}).get("labels")
            if labels and labels.get(MARK) != self.mark:
                return False
        return True

    def request(self, folder: Path) -> None:
        """Requests the slice. A request that was accepted counts, even if its answer is lost.

        Raises:
            LaunchError: Google refuses it, or does not answer.
        """
        try:
            command_line.run(self.create, HINTS, folder)
        except LaunchError as error:
            # The connection may have broken after Google accepted the request.
            with suppress(LaunchError):
                # A slice of the same name may belong to somebody else, or be on its way out.
                found = self.queued()
                if found is not None and state_of(found) != "DELETING" and self._is_ours(found):
                    logger.warning("%s; but %s is there", error, self.name)
                    return
            raise

    def take_back(self) -> None:
        """Deletes the slice that a request may have created, or says that it may still exist."""
        try:
            found = self.queued()
            # None as well: a request may show up late, and deleting nothing does no harm.
            if found is None or self._is_ours(found):
                self.delete()
        except LaunchError as error:
            logger.error(
                "%s; %s may be there all the same, and cost money: %s",
                error,
                self.name,
                self.deletion,
            )

    def delete(self) -> None:
        """Starts to delete the slice, if it exists."""
        try:
            command_line.run(self._deletion, HINTS)
        except LaunchError as error:
            if not _MISSING.search(str(error)):
                raise

    @property
    def deletion(self) -> str:
        """The command that deletes it, for people."""
        return shlex.join(self._deletion)

    @property
    def _deletion(self) -> list[str]:
        return self._tpus("queued-resources", "delete", self.name, "--force", "--async")

    def ssh(self, command: str) -> str:
        """Runs a command on all machines; returns its output."""
        words = self._tpus("tpu-vm", "ssh", self.name, "--worker=all", f"--command={command}")
        return command_line.run(words, HINTS)

    def end_run(self) -> int | None:
        """Has the run save a checkpoint and end; returns its exit code, if it ends in time."""
        try:
            # The machines look for it every second, and every 20 seconds into the bucket.
            self.ssh(f"sudo mkdir -p {WORK}/{self.name}/stop")
        except LaunchError as error:
            logger.warning("%s; the machines will look into the bucket soon", error)
        count = machines(self.node())
        exits: dict[str, int] = {}

        def have_all_ended() -> bool:
            exits.update(self.exits(self.objects()))
            return outcome(exits, count) is not None

        # All machines must save their part of the checkpoint before the slice is deleted.
        comes_true(have_all_ended, self.stop_seconds + _NOTICE_SECONDS)
        return outcome(exits, 1)

    def _tpus(self, *words: str) -> list[str]:
        return tpus(self.project, self.zone, *words)

    def upload(self, files: Sequence[Path]) -> None:
        """Copies files into `staging`.

        Raises:
            LaunchError: another launch uses the folder, or it cannot be written.
        """
        first, *others = map(str, files)
        # The first file claims the folder: the store itself ensures that it did not exist before.
        _storage("cp", "--if-generation-match=0", first, f"{self.staging}/")
        try:
            if others:
                _storage("cp", *others, f"{self.staging}/")
        except LaunchError:
            with suppress(LaunchError):
                self.remove_files()
            raise

    def remove_files(self) -> None:
        """Removes all files in `staging`."""
        _storage("rm", "--recursive", self.staging)

    def objects(self) -> dict[str, Kept]:
        """The files in `staging`, by name."""
        # gs://bucket/folder/run -> folder/run/
        folder = self.staging.split("/", 3)[3] + "/"
        listing = ["objects", "list", f"{self.staging}/**", "--format=json(name,size,generation)"]
        return {
            found["name"].removeprefix(folder): Kept(
                int(found.get("size") or 0), str(found.get("generation"))
            )
            for found in _parsed(_gcloud_storage(*listing), list[_Object])
        }

    def exits(self, objects: Iterable[str]) -> dict[str, int]:
        """Exit codes by the number of the machine, for machines on which the run has ended."""
        if not any(name.startswith("exit-") for name in objects):
            return {}
        # Each file has one line: the machine's number and the exit code.
        lines = _storage("cat", f"{self.staging}/exit-*")
        found = re.findall(r"^(\S+) (\d+)$", lines, re.MULTILINE)
        return {machine: int(code) for machine, code in found}

    def kept_logs(self, goes_on: Callable[[], bool]) -> Iterator[str]:
        """The machines' copies of their logs, in chunks, with a heading when the machine changes.

        Args:
            goes_on: whether more may come; called before each listing.

        Raises:
            LaunchError: there is no copy, and none will come.
        """
        read: dict[str, int] = {}
        last = ""
        while True:
            # Asked before the listing, so that the last look reads the end of the logs.
            last_look, objects = not goes_on(), self.objects()
            for name in sorted(logs_in(objects)):
                # Only the bytes that were added since the last listing.
                start, end = read.get(name, 0), objects[name].size
                if end > start:
                    head = f"==> {name.removeprefix('log/')}\n" if name != last else ""
                    file = f"{self.staging}/{name}"
                    yield head + _storage("cat", "--range", f"{start}-{end - 1}", file)
                    read[name], last = end, name
            if last_look or (not self.supervise and self._all_have_ended(objects)):
                break
            time.sleep(_LOG_SECONDS)
        if not read:
            raise LaunchError(
                f"{self.name} has copied no log into {self.staging} yet. `samestep jobs` shows its "
                "state."
            )

    def _all_have_ended(self, objects: Iterable[str]) -> bool:
        exits = self.exits(objects)
        return bool(exits) and outcome(exits, machines(self.node())) is not None

    def forget_exits(self) -> None:
        """Removes the exit codes of a run that starts again."""
        if any(name.startswith("exit-") for name in self.objects()):
            _storage("rm", f"{self.staging}/exit-*")

    def ask_to_stop(self) -> None:
        """Leaves a note for the machines and the supervisor, wherever they are."""
        _storage("cp", "-", f"{self.staging}/stop", text="asked by samestep cancel\n")


def tpus(project: str, zone: str, *words: str) -> list[str]:
    """A gcloud command about TPUs."""
    place = [f"--project={project}", f"--zone={zone}"]
    return ["gcloud", "compute", "tpus", *words, *place, "--quiet"]


def listed(project: str, zone: str) -> dict[str, Resource]:
    """The queued resources of a project in a zone, by name."""
    found = _parsed(tpus(project, zone, "queued-resources", "list", "--format=json"), _Listed)
    return {resource["name"].rpartition("/")[2]: resource for resource in found}


def logs_in(objects: Iterable[str]) -> list[str]:
    """Names of the machines' copies of their logs: one for each boot, by its time."""
    return [name for name in objects if name.startswith("log/")]


def state_of(resource: Resource | None) -> str:
    """A queued resource's state in Google's words; empty if there is no resource."""
    if resource is None:
        return ""
    return str(resource.get("state", {}).get("state", "STATE_UNSPECIFIED"))


def complaint(resource: Resource) -> str:
    """Google's error message about a request that has failed."""
    error = resource.get("state", {}).get("failedData", {}).get("error", {})
    return " ".join(str(error.get("message", "")).split())


def machines(node: Resource | None) -> int:
    """Number of machines of a node."""
    return max(1, len((node or {}).get("networkEndpoints", ())))


def outcome(exits: Mapping[str, int], count: int) -> int | None:
    """The exit code of a run, or None while fewer than `count` machines have ended.

    An error of one machine is the run's error: {0: 75, 1: 1} gives 1, and {0: 75, 1: 0} gives 75.
    """
    if len(exits) < count or not exits:
        return None
    # 75 (preempted) wins over 0: the run has to continue as long as one machine was stopped.
    codes = set(exits.values())
    errors = codes - {EXIT_DONE, EXIT_PREEMPTED}
    return min(errors) if errors else max(codes)


def comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Polls a condition for at most this time; returns its last value."""
    deadline = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return true


def note_end(folder: Path, code: int | None) -> None:
    """Writes the exit code of a job into its folder, if it is known."""
    if code is not None:
        written = folder / f".{EXIT}.tmp"
        written.write_text(f"{code}\n")
        written.replace(folder / EXIT)  # atomic, as others read it at any time


def _storage(*words: str, text: str = "") -> str:
    return command_line.run(_gcloud_storage(*words), HINTS, text=text)


def _gcloud_storage(*words: str) -> list[str]:
    return ["gcloud", "storage", *words, "--quiet"]


def _parsed(command: Sequence[str], schema: TypeForm[T]) -> T:
    text = command_line.run(command, HINTS)
    try:
        return parse_json(text, schema)
    except JsonError as error:
        raise LaunchError(f"gcloud has answered {text[:100]!r}: {error}") from error
