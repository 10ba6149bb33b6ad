"""A slice of Cloud TPU, and what its run keeps in a bucket: what is asked of gcloud, and what it answers."""

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
from typing import Any, NamedTuple, TypeAlias

from launch import command_line
from launch.job import EXIT
from trainer.errors import EXIT_DONE, EXIT_PREEMPTED, LaunchError

logger = logging.getLogger(__name__)

Resource: TypeAlias = Mapping[str, Any]

FILE = "slice.json"
STARTUP = "startup.sh"
WORK = "/var/lib/samestep"
"""Where a run lives on the machines of its slice: a folder of the slice's name in here."""
MARK = "samestep-job"
"""The label that tells a job's slice from others of its name."""

_POLL_SECONDS = 5.0
_LOG_SECONDS = 10.0
_MISSING = re.compile(r"NOT_FOUND(?!.*\blocation .* (not found|access))", re.IGNORECASE | re.DOTALL)
_NOTICE_SECONDS = (
    60.0  # until machines have found a note by themselves, and have said that they are done
)

HINTS = {
    "active account|auth login|UNAUTHENTICATED|reauth|invalid_grant|problem refreshing": (
        "log in again: gcloud auth login (on a machine that runs alone: with a service account, gcloud auth "
        "activate-service-account)"
    ),
    "SERVICE_DISABLED|has not been used in project|API .* disabled": (
        "switch the interfaces on: gcloud services enable tpu.googleapis.com compute.googleapis.com "
        "storage.googleapis.com, and wait some minutes"
    ),
    "RESOURCE_EXHAUSTED|quota": (
        "the project may not have so many chips of this kind in this zone: ask for more in the console under IAM & "
        "Admin, Quotas (spot, on-demand and reserved chips have quotas of their own), or take a smaller slice, another "
        "zone or another cluster.capacity"
    ),
    "ALREADY_EXISTS": (
        "the name is taken: `samestep jobs` lists your jobs, gcloud compute tpus queued-resources list everybody's; "
        "delete that one, or choose an output of another name"
    ),
    "pre-conditions": (
        "another launch has put its files there: choose an output of another name or another folder in cluster.staging"
    ),
    "location .* (not found|access)|invalid zone": (
        "there is no such zone for TPUs, or the project may not use it: `gcloud compute tpus locations list` lists them"
    ),
    "PERMISSION_DENIED|HTTPError 403|does not have .* access": (
        "your account needs the roles TPU Admin, Service Account User and Storage Object Admin, see docs/cloud_tpu.md; "
        "or cluster.project is another's"
    ),
    "gs://[^ ]+ not found|bucket does not exist": "make the bucket, or name another in cluster.staging",
    "components install|Invalid choice: 'alpha'": (
        "cluster.reservation and cluster.topology need gcloud's alpha commands: gcloud components install alpha"
    ),
    r"ssh.*(exited|return code|\[255\])|port 22|Permission denied \(publickey": (
        "machines without external addresses, or behind a firewall, are reached from their own network only"
    ),
    "ConnectionError|unable to find the server|UNAVAILABLE|'status': 50|network connectivity|timed out": (
        "Google's servers cannot be reached from here, or do not answer: see gcloud info --run-diagnostics"
    ),
}


class Kept(NamedTuple):
    """A file in a bucket."""

    size: int
    generation: str  # another one whenever it is written


@dataclass(frozen=True)
class Slice:
    """Where a job is, as its folder knows it.

    Attributes:
        name: of the queued resource, and of the one node in it.
        project: that pays.
        zone: of the machines.
        staging: the folder in a bucket that holds what goes to this job's machines, and what they keep.
        mark: of what its machines run, which tells it from another job's slice of the same name.
        create: the command that asks for the slice; it is run in the job's folder.
        stop_seconds: that the run gets for its last checkpoint.
        supervise: whether a process beside it is to ask for the slice again, and to delete it in the end.
        poll_seconds: between two looks of that process.
        silence_seconds: after which it gives up machines that are there and have written nothing into `staging`.
    """

    name: str
    project: str
    zone: str
    staging: str
    mark: str
    create: tuple[str, ...]
    stop_seconds: float
    supervise: bool
    poll_seconds: float
    silence_seconds: float

    @classmethod
    def of(cls, folder: Path) -> Slice:
        """That of a job's folder.

        Raises:
            LaunchError: it is none.
        """
        try:
            tree = json.loads((folder / FILE).read_text(encoding="utf-8"))
            return cls(**{**tree, "create": tuple(tree["create"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LaunchError(
                f"{folder} is no folder of a job on Cloud TPU: {FILE} cannot be read ({error})"
            ) from error

    def dump(self) -> str:
        """The content of `FILE`."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def queued(self) -> Resource | None:
        """The queued resource; None where Google says that there is none (any more)."""
        return self._described("queued-resources")

    def node(self) -> Resource | None:
        """The machines."""
        return self._described("tpu-vm")

    def _described(self, what: str) -> Resource | None:
        try:
            found: Resource = _parsed(self._tpus(what, "describe", self.name, "--format=json"))
        except LaunchError as error:
            if _MISSING.search(str(error)):
                return None
            raise
        return found

    def is_anothers(self, resource: Resource) -> bool:
        """Whether a resource of this name was asked for by somebody else, or for another job."""
        specs = resource.get("tpu", {}).get("nodeSpec", ())
        return any(
            labels.get(MARK) != self.mark
            for spec in specs
            if (labels := spec.get("node", {}).get("labels"))
        )

    def request(self, folder: Path) -> None:
        """Asks for the slice. A request that Google has accepted counts, whatever has become of the answer.

        Raises:
            LaunchError: it is refused, or Google does not answer.
        """
        try:
            command_line.run(self.create, HINTS, folder)
        except LaunchError as error:
            with suppress(LaunchError):
                found = self.queued()
                if (
                    found is not None
                    and state_of(found) != "DELETING"
                    and not self.is_anothers(found)
                ):
                    logger.warning("%s; but %s is there", error, self.name)
                    return
            raise

    def take_back(self) -> None:
        """Deletes what may have come of a request; says so where that cannot be done."""
        try:
            found = self.queued()
            if found is None or not self.is_anothers(found):
                self.delete()
        except LaunchError as error:
            logger.error(
                "%s; %s may be there all the same, and cost money: %s",
                error,
                self.name,
                self.deletion,
            )

    def delete(self) -> None:
        """Gives everything back; returns before that is done. It is no mistake if there is nothing."""
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
        """What a command prints on all machines."""
        return command_line.run(
            self._tpus("tpu-vm", "ssh", self.name, "--worker=all", f"--command={command}"), HINTS
        )

    def end_run(self) -> int | None:
        """Has the run save a checkpoint and end; its exit code, or None where that does not come in time."""
        work = f"{WORK}/{self.name}"
        try:  # as the machines do themselves when they find the note of `ask_to_stop`, if that was not yet
            self.ssh(
                f"sudo sh -c 'if mkdir {work}/stop && [ -e {work}/pid ]; then kill -TERM $(cat {work}/pid); fi'"
            )
        except LaunchError as error:
            logger.warning("%s; the machines will look into the bucket soon", error)
        count, exits = machines(self.node()), dict[str, int]()

        def ended() -> bool:
            exits.update(self.exits(self.objects()))
            return outcome(exits, count) is not None

        comes_true(ended, self.stop_seconds + _NOTICE_SECONDS)
        return outcome(exits, 1)

    def _tpus(self, *words: str) -> list[str]:
        return tpus(self.project, self.zone, *words)

    def upload(self, files: Sequence[Path]) -> None:
        """Puts files into `staging`.

        Raises:
            LaunchError: another launch has used it, or it cannot be written.
        """
        first, *others = map(str, files)
        # The first file claims the folder: it may not be there yet, which the store itself makes sure of.
        _storage("cp", "--if-generation-match=0", first, f"{self.staging}/")
        try:
            if others:
                _storage("cp", *others, f"{self.staging}/")
        except LaunchError:
            with suppress(LaunchError):
                self.remove_files()
            raise

    def remove_files(self) -> None:
        """Empties `staging`."""
        _storage("rm", "--recursive", self.staging)

    def objects(self) -> dict[str, Kept]:
        """The files in `staging`, by name."""
        folder = self.staging.split("/", 3)[3] + "/"
        listing = ["objects", "list", f"{self.staging}/**", "--format=json(name,size,generation)"]
        return {
            each["name"].removeprefix(folder): Kept(
                int(each.get("size") or 0), str(each.get("generation"))
            )
            for each in _parsed(_gcloud_storage(*listing))
        }

    def read(self, name: str, start: int, end: int) -> str:
        """Bytes of a file in `staging`."""
        return _storage("cat", "--range", f"{start}-{end - 1}", f"{self.staging}/{name}")

    def exits(self, objects: Iterable[str]) -> dict[str, int]:
        """The exit codes of the machines on which the run has ended, by their number."""
        if not any(name.startswith("exit-") for name in objects):
            return {}
        lines = _storage("cat", f"{self.staging}/exit-*")
        return {
            machine: int(code)
            for machine, code in re.findall(r"^(\S+) (\d+)$", lines, re.MULTILINE)
        }

    def kept_logs(self, goes_on: Callable[[], bool]) -> Iterator[str]:
        """What the machines' copies of their logs say, in pieces.

        Args:
            goes_on: whether more may come; asked before each look.

        Raises:
            LaunchError: there are none, and none will come.
        """
        read: dict[str, int] = {}
        last = ""
        while True:
            last_look, objects = not goes_on(), self.objects()
            for name in sorted(logs_in(objects)):
                if (end := objects[name].size) > (start := read.get(name, 0)):
                    head = f"==> {name.removeprefix('log/')}\n" if name != last else ""
                    yield head + self.read(name, start, end)
                    read[name], last = end, name
            if last_look or (not self.supervise and self._all_have_ended(objects)):
                break
            time.sleep(_LOG_SECONDS)
        if not read:
            raise LaunchError(
                f"{self.name} has copied no log into {self.staging} yet; `samestep jobs` says how it stands"
            )

    def _all_have_ended(self, objects: Iterable[str]) -> bool:
        exits = self.exits(objects)
        return bool(exits) and outcome(exits, machines(self.node())) is not None

    def forget_exits(self) -> None:
        """For a run that starts again."""
        if any(name.startswith("exit-") for name in self.objects()):
            _storage("rm", f"{self.staging}/exit-*")

    def ask_to_stop(self) -> None:
        """Leaves a note for the machines and the supervisor, wherever they are."""
        _storage("cp", "-", f"{self.staging}/stop", text="asked by samestep cancel\n")


def tpus(project: str, zone: str, *words: str) -> list[str]:
    """A command about TPUs."""
    return [
        "gcloud",
        "compute",
        "tpus",
        *words,
        f"--project={project}",
        f"--zone={zone}",
        "--quiet",
    ]


def listed(project: str, zone: str) -> dict[str, Resource]:
    """The queued resources that a project has in a zone, by name."""
    found: list[Resource] = _parsed(
        tpus(project, zone, "queued-resources", "list", "--format=json")
    )
    return {each["name"].rpartition("/")[2]: each for each in found}


def logs_in(objects: Iterable[str]) -> list[str]:
    """The machines' copies of their logs: one for each boot, by its time."""
    return [name for name in objects if name.startswith("log/")]


def state_of(resource: Resource | None) -> str:
    """A queued resource's state in Google's words; empty where there is no resource."""
    return (
        "" if resource is None else str(resource.get("state", {}).get("state", "STATE_UNSPECIFIED"))
    )


def complaint(resource: Resource) -> str:
    """Why Google has given a request up, in its own words."""
    error = resource.get("state", {}).get("failedData", {}).get("error", {})
    return " ".join(str(error.get("message", "")).split())


def machines(node: Resource | None) -> int:
    """How many a slice has."""
    return max(1, len((node or {}).get("networkEndpoints", ())))


def outcome(exits: Mapping[str, int], count: int) -> int | None:
    """The exit code of a run whose machines have ended so; None while fewer than `count` have."""
    if len(exits) < count or not exits:
        return None
    codes = set(exits.values())
    return min(
        codes - {EXIT_DONE, EXIT_PREEMPTED},
        default=EXIT_PREEMPTED if EXIT_PREEMPTED in codes else EXIT_DONE,
    )


def comes_true(what: Callable[[], bool], seconds: float) -> bool:
    """Waits for something, at most so long; what came of it."""
    deadline = time.monotonic() + seconds
    while not (true := what()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return true


def note_end(folder: Path, code: int | None) -> None:
    """Writes down how a job has ended, where that is known."""
    if code is not None:
        written = folder / f".{EXIT}.tmp"
        written.write_text(f"{code}\n")
        written.replace(folder / EXIT)  # others look at it at any moment


def _storage(*words: str, text: str | None = None) -> str:
    return command_line.run(_gcloud_storage(*words), HINTS, text=text)


def _gcloud_storage(*words: str) -> list[str]:
    return ["gcloud", "storage", *words, "--quiet"]


def _parsed(command: Sequence[str]) -> Any:
    text = command_line.run(command, HINTS)
    try:
        return json.loads(text)
    except ValueError as error:
        raise LaunchError(f"gcloud has answered {text[:100]!r}, which is no JSON") from error
