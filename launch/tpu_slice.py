"""A slice of Cloud TPU, and what its run keeps in a bucket: what is asked of gcloud, and what it answers."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from launch import command_line
from launch.job import EXIT
from trainer.errors import EXIT_DONE, EXIT_PREEMPTED, LaunchError

logger = logging.getLogger(__name__)

Resource: TypeAlias = Mapping[str, Any]

FILE = "slice.json"
STARTUP = "startup.sh"
WORK = "/var/lib/samestep"
"""Where a run lives on the machines of its slice: a folder of the slice's name in here."""

_POLL_SECONDS = 5.0
_LOG_SECONDS = 10.0
_NOTICE_SECONDS = 60.0  # until machines have found a note by themselves, and have said that they are done

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
        "machines without external addresses, or behind a firewall, are reached from their own network only; what they "
        "have kept in cluster.staging is shown by `samestep logs JOB --follow`"
    ),
    "ConnectionError|unable to find the server|UNAVAILABLE|'status': 50|network connectivity|timed out": (
        "Google's servers cannot be reached from here, or do not answer: see gcloud info --run-diagnostics"
    ),
}


@dataclass(frozen=True)
class Slice:
    """Where a job is, as its folder knows it.

    Attributes:
        name: of the queued resource, and of the one node in it.
        project: that pays.
        zone: of the machines.
        staging: the folder in a bucket that holds what goes to this job's machines, and what they keep.
        create: the command that asks for the slice; it is run in the job's folder.
        stop_seconds: that the run gets for its last checkpoint.
        supervise: whether a process beside it is to ask for the slice again, and to delete it in the end.
        poll_seconds: between two looks of that process.
    """

    name: str
    project: str
    zone: str
    staging: str
    create: tuple[str, ...]
    stop_seconds: float
    supervise: bool
    poll_seconds: float

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
        """The queued resource; None where there is none (any more)."""
        return listed("queued-resources", self.project, self.zone).get(self.name)

    def node(self) -> Resource | None:
        """The machines."""
        return listed("tpu-vm", self.project, self.zone).get(self.name)

    def request(self, folder: Path) -> None:
        """Asks for the slice.

        Raises:
            LaunchError: it is refused.
        """
        command_line.run(self.create, HINTS, folder)

    def delete(self) -> None:
        """Gives everything back; returns before that is done. It is no mistake if there is nothing."""
        try:
            command_line.run(self._tpus("queued-resources", "delete", self.name, "--force", "--async"), HINTS)
        except LaunchError as error:
            if "NOT_FOUND" not in str(error):
                raise

    def ssh(self, command: str) -> str:
        """What a command prints on all machines."""
        return command_line.run(self._tpus("tpu-vm", "ssh", self.name, "--worker=all", f"--command={command}"), HINTS)

    def end_run(self) -> int | None:
        """Has the run save a checkpoint and end; its exit code, or None where that does not come in time."""
        work = f"{WORK}/{self.name}"
        try:  # as the machines do themselves when they find the note of `ask_to_stop`, if that was not yet
            self.ssh(f"sudo sh -c 'if mkdir {work}/stop && [ -e {work}/pid ]; then kill -TERM $(cat {work}/pid); fi'")
        except LaunchError as error:
            logger.warning("%s; the machines will look into the bucket soon", error)
        count, exits = machines(self.node()), dict[str, int]()

        def ended() -> bool:
            exits.update(self.exits(self.objects()))
            return outcome(exits, count) is not None

        comes_true(ended, self.stop_seconds + _NOTICE_SECONDS)
        return outcome(exits, 1)

    def _tpus(self, *words: str) -> list[str]:
        return ["gcloud", "compute", "tpus", *words, f"--project={self.project}", f"--zone={self.zone}", "--quiet"]

    def upload(self, files: Sequence[Path]) -> None:
        """Puts files into `staging`.

        Raises:
            LaunchError: another launch has used it, or it cannot be written.
        """
        first, *others = map(str, files)
        # The first file claims the folder: it may not be there yet, which the store itself makes sure of.
        _storage("cp", "--if-generation-match=0", first, f"{self.staging}/")
        if others:
            _storage("cp", *others, f"{self.staging}/")

    def remove_files(self) -> None:
        """Empties `staging`."""
        _storage("rm", "--recursive", self.staging)

    def objects(self) -> dict[str, int]:
        """The sizes of the files in `staging`, by name."""
        folder = self.staging.split("/", 3)[3] + "/"
        found = json.loads(_storage("objects", "list", f"{self.staging}/**", "--format=json(name,size)"))
        return {each["name"].removeprefix(folder): int(each.get("size") or 0) for each in found}

    def read(self, name: str, start: int, end: int) -> str:
        """Bytes of a file in `staging`."""
        return _storage("cat", "--range", f"{start}-{end - 1}", f"{self.staging}/{name}")

    def exits(self, objects: Mapping[str, int]) -> dict[str, int]:
        """The exit codes of the machines on which the run has ended, by their number."""
        if not any(name.startswith("exit-") for name in objects):
            return {}
        lines = _storage("cat", f"{self.staging}/exit-*").splitlines()
        return {machine: int(code) for machine, code in (line.split() for line in lines)}

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
            for name in sorted(name for name in objects if name.startswith("log/")):
                if objects[name] > (start := read.get(name, 0)):
                    head = f"==> {name.removeprefix('log/')}\n" if name != last else ""
                    yield head + self.read(name, start, objects[name])
                    read[name], last = objects[name], name
            if last_look or (not self.supervise and any(name.startswith("exit-") for name in objects)):
                break
            time.sleep(_LOG_SECONDS)
        if not read:
            raise LaunchError(
                f"{self.name} has copied no log into {self.staging} yet; `samestep jobs` says how it stands"
            )

    def forget_exits(self) -> None:
        """For a run that starts again."""
        if any(name.startswith("exit-") for name in self.objects()):
            _storage("rm", f"{self.staging}/exit-*")

    def ask_to_stop(self) -> None:
        """Leaves a note for the machines and the supervisor, wherever they are."""
        _storage("cp", "-", f"{self.staging}/stop", text="asked by samestep cancel\n")


def listed(what: Literal["queued-resources", "tpu-vm"], project: str, zone: str) -> dict[str, Resource]:
    """What a project has in a zone, by name."""
    command = ["gcloud", "compute", "tpus", what, "list", f"--project={project}", f"--zone={zone}", "--format=json"]
    found: list[Resource] = json.loads(command_line.run([*command, "--quiet"], HINTS))
    return {each["name"].rpartition("/")[2]: each for each in found}


def state_of(resource: Resource | None) -> str:
    """A queued resource's state in Google's words; empty where there is no resource."""
    return "" if resource is None else str(resource.get("state", {}).get("state", "STATE_UNSPECIFIED"))


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
    return min(codes - {EXIT_DONE, EXIT_PREEMPTED}, default=EXIT_PREEMPTED if EXIT_PREEMPTED in codes else EXIT_DONE)


def comes_true(what: Callable[[], bool], seconds: float) -> bool:
    """Waits for something, at most so long; what came of it."""
    deadline = time.monotonic() + seconds
    while not (true := what()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return true


def note_end(folder: Path, code: int | None) -> None:
    """Writes down how a job has ended, where that is known."""
    if code is not None:
        (folder / EXIT).write_text(f"{code}\n")


def _storage(*words: str, text: str | None = None) -> str:
    return command_line.run(["gcloud", "storage", *words, "--quiet"], HINTS, text=text)
