"""Cloud TPU: machines of a queued resource install and start the run; a supervisor runs here."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import posixpath
import re
import signal
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from launch import experiment, logs
from launch.clients import command_line
from launch.environment import check_secrets, check_setup, check_variables
from launch.job import (
    CANCEL,
    CODE,
    CONFIG,
    EXIT,
    LOG,
    Cluster,
    JobSpec,
    Place,
    Record,
    State,
    Submission,
)
from launch.settings import check_options, check_patterns, check_sigterm
from launch.tpu import slice as tpu_slice
from launch.tpu import supervisor as tpu_supervisor
from launch.tpu import types as tpu_types
from launch.tpu.slice import FILE, HINTS, STARTUP, Slice
from launch.tpu.startup import SETTINGS, Startup
from launch.tpu.supervisor import Memory
from samestep.errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)

_ARCHIVE = "code.tar.gz"
_DELETION_SECONDS = 600.0
_CANCELED = 128 + signal.SIGTERM  # of a job that has left no exit code, as it was in the queue

_PATTERNS = {
    "project": re.compile(r"[a-z][a-z0-9.:-]*[a-z0-9]"),
    "zone": re.compile(r"[a-z]+-[a-z]+\d+-[a-z]"),
    "runtime_version": re.compile(r"[a-z0-9][\w.-]*"),
    "reservation": re.compile(r"[\w./-]+"),
    "service_account": re.compile(r"[\w.-]+@[\w.-]+"),
    "network": re.compile(r"[\w./-]+"),
    "subnetwork": re.compile(r"[\w./-]+"),
    "user": re.compile(r"[a-z_][a-z0-9_-]{0,31}"),
}
_ADDRESS = re.compile(r"gs://[a-z0-9][\w.-]*(/[^*?#\[\]{}]*)?")  # gcloud expands patterns
_LABEL = re.compile(r"[a-z0-9_-]{0,63}")
_SECRET = re.compile(r"[\w-]{1,255}")


@dataclass(frozen=True)
class Config(Cluster):
    """A slice of Cloud TPU, requested as a queued resource.

    Attributes:
        accelerator_type: type to request, as v4-8, v5litepod-16 or v6e-8; with `topology` only its
            first part.
        project: the project that pays.
        zone: of the machines, as us-central2-b.
        staging: a folder in a bucket, gs://BUCKET/FOLDER, in the region of the zone: the code and
            the configuration reach the machines through it; it keeps their logs, exit codes and the
            small files of the run's folder.
        topology: arrangement of the chips, as 2x2x4.
        runtime_version: image of the machines; None takes the usual one for the type.
        capacity: spot is much cheaper, and taken away at any time; on_demand; or reserved, from a
            reservation.
        reservation: by name, if the project has several.
        service_account: the machines' identity; None takes Compute Engine's default in the project.
        network: None takes the network named default.
        subnetwork: of that network.
        internal_ips: gives the machines no external addresses; they need Cloud NAT to install from
            package indices.
        labels: of the node, for bills.
        code: snapshot copies the files that git knows in the folder that you submit from; installed
            takes `package` alone.
        package: for the machines to install: a requirement of pip, or a wheel,
            gs://BUCKET/FILE.whl. The snapshot precedes it. None installs the snapshot, which must
            be a copy of samestep then.
        extras: of samestep, when the snapshot or a wheel is installed.
        user: who runs the experiment on the machines; created if necessary, unless it is root.
        mounts: buckets or folders in them, gs://BUCKET/FOLDER, by the folder of the machines where
            gcsfuse mounts them.
        secrets: names in Secret Manager, by the environment variables that get their newest values.
        variables: environment variables of the run. Not for secrets, as others can read the
            machines' metadata.
        setup: further lines of shell, run as root on each machine before the run.
        supervise: starts a process on this machine that requests the slice again whenever it was
            taken away, and deletes it when the run has ended. Without it both are left to you.
        poll_seconds: time between two polls of that process; more while Google does not answer.
        silence_minutes: after this time that process deletes machines that exist and write nothing
            into `staging`; every 20 s they copy their logs there. The job ends if they have never
            written; else the slice is requested again.
        options: further options of `gcloud compute tpus queued-resources create`, as
            --valid-until-duration=12h.
    """

    accelerator_type: str
    project: str
    zone: str
    staging: str
    topology: str | None = None
    runtime_version: str | None = None
    capacity: Literal["spot", "on_demand", "reserved"] = "spot"
    reservation: str | None = None
    service_account: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    internal_ips: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    code: Literal["snapshot", "installed"] = "snapshot"
    package: str | None = None
    extras: tuple[str, ...] = ("gcs", "tpu", "wandb")
    user: str = "samestep"
    mounts: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    supervise: bool = True
    poll_seconds: float = 60.0
    silence_minutes: float = 30.0
    options: tuple[str, ...] = ()

    shares_files: ClassVar[bool] = False
    reach: ClassVar[str] = (
        "Put it into a bucket (`samestep data push` does that with datasets) and name it as "
        "gs://..., or mount one with cluster.mounts."
    )
    keeping: ClassVar[str] = "Set checkpoint.folder=gs://BUCKET/FOLDER."

    def __post_init__(self) -> None:
        check_patterns(self, _PATTERNS, "Google Cloud")
        addresses = {"staging": self.staging}
        addresses |= {f"mounts.{folder}": address for folder, address in self.mounts.items()}
        for name, address in addresses.items():
            if not _ADDRESS.fullmatch(address) or not address.isprintable():
                raise ConfigError(
                    f"{name} must be gs://BUCKET/FOLDER, without any of *?#[]{{}}, not {address!r}"
                )
        if not self.staging.removeprefix("gs://").strip("/").partition("/")[2]:
            raise ConfigError(
                f"staging {self.staging} is a whole bucket. Name a folder: gs://BUCKET/FOLDER."
            )
        for folder in self.mounts:
            if not folder.startswith("/"):
                raise ConfigError(
                    f"mounts: {folder!r} is not a folder of the machines. Begin it with /."
                )
        for key, value in self.labels.items():
            if not _LABEL.fullmatch(value) or not _LABEL.fullmatch(key) or not key[:1].isalpha():
                raise ConfigError(
                    f"labels: {key}={value} is not a label. Use lower-case letters, digits, - and "
                    "_, and begin the key with a letter."
                )
        check_secrets(
            self.secrets, _SECRET, "the name of a secret in Secret Manager, such as wandb-key"
        )
        check_variables(self.variables)
        check_setup(self.setup)
        check_options(self.options, "gcloud")
        if self.reservation is not None and self.capacity != "reserved":
            raise ConfigError(
                f"reservation is {self.reservation}, but capacity is {self.capacity}. Set "
                "capacity=reserved, or remove reservation."
            )
        if self.package is None and self.code == "installed":
            raise ConfigError(
                "code=installed needs a package for the machines to install. Set package, as to "
                "samestep[gcs,tpu]."
            )
        for name, number in (
            ("poll_seconds", self.poll_seconds),
            ("silence_minutes", self.silence_minutes),
        ):
            if not number > 0:
                raise ConfigError(f"{name} must be above 0, not {number}")
        _ = self.devices  # raises if the type is invalid

    @property
    def devices(self) -> tuple[int, ...]:
        """The XLA devices of the slice."""
        return (tpu_types.devices(self.accelerator_type, self.topology),)

    @property
    def hardware(self) -> Literal["gpu", "tpu", "cpu", "here"]:
        return "tpu"

    @property
    def size(self) -> str:
        return f"1 slice {self.accelerator_type} x {self.devices[0]} TPU devices"

    def render(self, job: JobSpec) -> Submission:
        """The machines' script, and a file by which this machine finds them again."""
        if job.action == "build":
            raise ConfigError(
                "a dataset is not built on Cloud TPU, where chips would wait for it. Build it with "
                "another kind of cluster (slurm, kubernetes, local) or `samestep data build`, then "
                "`samestep data push` it to a bucket in the region of the zone."
            )
        check_sigterm(job, "Cloud TPU")
        tree = job.tree
        output = str(tree["output"])
        # Launches with the same output and checkpoints continue the same run.
        setting, folder = experiment.checkpoints(tree)
        run = f"{output}\n{folder if setting == 'checkpoint.folder' else None}"
        place = f"{self.staging.rstrip('/')}/{job.name}-{_digest(run)[:8]}"
        # Others launch runs of the same name, so the slice's name holds a digest of the launch.
        launch = _digest(run, self.staging, str(job.folder), str(os.getuid()), platform.node())
        name = f"samestep-{job.name}-{launch[:8]}-{job.folder.name}"
        # What a machine runs at every boot. It is part of the request, so it cannot change later,
        # and a machine that Google reboots runs it again.
        startup = Startup(
            name=name,
            staging=f"{place}/{job.folder.name}",
            stop_seconds=job.stop_seconds,
            kept=f"{place}/run",
            output=output,
            project=self.project,
            user=self.user,
            code=job.code,
            package=self.package,
            extras=self.extras,
            mounts=self.mounts,
            secrets=self.secrets,
            variables=self.variables,
            setup=self.setup,
        )
        script, settings = startup.render(), startup.settings()
        # The mark identifies this launch's slice, even among slices of the same name.
        mark = _digest(script, settings, job.config)[:16]
        command = self._create(name, job.name, mark)
        slice_file = Slice(
            name,
            self.project,
            self.zone,
            startup.staging,
            mark=mark,
            create=command,
            stop_seconds=job.stop_seconds,
            supervise=self.supervise,
            poll_seconds=self.poll_seconds,
            silence_seconds=60 * self.silence_minutes,
        ).dump()
        return Submission({STARTUP: script, SETTINGS: settings, FILE: slice_file}, command)

    def place_of(self, path: str, job: JobSpec, submission: Submission) -> Place | None:
        """A mounted bucket; with `setup`, any other absolute path may be there, too."""
        place = posixpath.normpath(path)
        for folder, address in self.mounts.items():
            if f"{place}/".startswith(f"{posixpath.normpath(folder)}/"):
                return Place(address)
        return Place("what cluster.setup provides") if self.setup and path[:1] == "/" else None

    def check_code(self, job: JobSpec, files: Sequence[Path]) -> str:
        """The snapshot, or the package, has to have both samestep and the experiment's code."""
        names = {str(path) for path in files}
        if self.package is None and "pyproject.toml" not in names:
            raise LaunchError(
                "the machines would have nothing to install: the folder that you submit from is no "
                "clone of samestep (git knows of no pyproject.toml in it). Submit from a clone, or "
                "set cluster.package."
            )
        for setting, module in experiment.own_modules(job.tree).items():
            path = module.replace(".", "/")
            local = [name for name in (f"{path}.py", f"{path}/__init__.py") if Path(name).exists()]
            if local and names.isdisjoint(local):
                fix = "Have git know it (a snapshot is without ignored files)"
                fix = fix if self.code == "snapshot" else "Set cluster.code=snapshot"
                raise ConfigError(
                    f"{setting} {module} is code of this folder that nothing brings to the "
                    f"machines. {fix}, or put it into cluster.package."
                )
        snapshot = f"a snapshot of {len(files)} files" if files else ""
        return " over ".join(filter(None, (snapshot, self.package)))

    def _create(self, name: str, job: str, mark: str) -> tuple[str, ...]:
        """The command that requests the slice."""
        # Only gcloud's alpha commands have these two options.
        alpha = ["alpha"] if self.reservation or self.topology else []
        words = ["gcloud", *alpha, "compute", "tpus", "queued-resources", "create", name]
        words += [f"--node-id={name}", f"--project={self.project}", f"--zone={self.zone}"]
        if self.topology:
            words += [f"--type={self.accelerator_type}", f"--topology={self.topology}"]
        else:
            words.append(f"--accelerator-type={self.accelerator_type}")
        image = self.runtime_version or tpu_types.image(self.accelerator_type)
        words.append(f"--runtime-version={image}")
        if self.capacity != "on_demand":
            words.append(f"--{self.capacity}")
        if alpha and self.capacity == "spot":
            # Else the request would say both spot and, by default, the standard model.
            words.append("--provisioning-model=spot")
        named = {
            "reservation": self.reservation,
            "service-account": self.service_account,
            "network": self.network,
            "subnetwork": self.subnetwork,
        }
        words += [f"--{option}={value}" for option, value in named.items() if value is not None]
        words += ["--internal-ips"] * self.internal_ips
        # Our own labels last: a user's label of the same name must not hide the mark.
        labels = {"samestep": job} | self.labels | {tpu_slice.MARK: mark}
        words.append(f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}")
        return (*words, f"--metadata-from-file=startup-script={STARTUP}", *self.options, "--quiet")

    def check(self) -> None:
        """Requests the zone's types, which needs an account, the API, the project and the zone."""
        command_line.require("gcloud", "install it: https://cloud.google.com/sdk/docs/install")
        words = tpu_slice.tpus(
            self.project, self.zone, "tpu-vm", "accelerator-types", "list", "--format=value(type)"
        )
        types = command_line.run(words, HINTS).split()
        if self.topology is None and self.accelerator_type not in types:
            # List the types of the same generation, such as v5e of v5e-16.
            kind = self.accelerator_type.partition("-")[0]
            same = sorted(type_ for type_ in types if type_.startswith(f"{kind}-"))
            same.sort(key=len)  # v4-8 before v4-16
            has = f"of these it has {', '.join(same)}" if same else f"it has none of {kind}"
            raise LaunchError(
                f"zone {self.zone} has no {self.accelerator_type}: {has}; choose another type or "
                "zone"
            )

    def submit(self, submission: Submission, folder: Path) -> tuple[str, Mapping[str, str]]:
        """Uploads the machines' files, requests the machines, and starts the supervisor."""
        place, files = Slice.of(folder), [folder / CONFIG, folder / SETTINGS]
        archive = folder / _ARCHIVE
        if (folder / CODE).is_dir():
            # One archive: a bucket has no folders, and each object costs a request.
            with tarfile.open(archive, "w:gz") as tar:
                tar.add(folder / CODE, arcname=".")
            files.append(archive)
        # The files first: machines that boot before them would find nothing to run.
        place.upload(files)
        try:
            place.request(folder)
            archive.unlink(missing_ok=True)
            if self.supervise:
                tpu_supervisor.start(folder)
        except BaseException:  # Ctrl-C, too: a slice that nobody knows of would cost money
            place.take_back()
            with suppress(LaunchError):
                place.remove_files()
            raise
        return place.name, {}

    def states(self, records: Iterable[Record]) -> Mapping[Path, State]:
        """Google's states for existing slices, else from the exit codes."""
        found: dict[Path, State] = {}
        queued: dict[tuple[str, str], dict[str, tpu_slice.Resource]] = {}  # one request per zone
        for record in records:
            if (record.folder / EXIT).exists():
                found[record.folder] = _ended(record.folder)
                continue
            place = Slice.of(record.folder)
            zone = place.project, place.zone
            if zone not in queued:
                queued[zone] = tpu_slice.listed(*zone)
            resource = queued[zone].get(place.name) or place.queued()
            found[record.folder] = _state(record.folder, place, tpu_slice.state_of(resource))
        return found

    def logs(self, record: Record, follow: bool) -> Iterable[str]:
        """The machines' copies of their logs, boot by boot; before the first copy by ssh."""
        place = Slice.of(record.folder)
        nothing_kept = not tpu_slice.logs_in(place.objects())
        if not follow and nothing_kept and tpu_slice.state_of(place.queued()) == "ACTIVE":
            yield place.ssh(f"tail -n +1 {tpu_slice.WORK}/{place.name}/{LOG}")
            return
        yield from place.kept_logs(lambda: follow and self.is_active(record))

    def cancel(self, record: Record) -> None:
        """Gives the run time for a checkpoint, then deletes the slice; returns when it is gone."""
        place = Slice.of(record.folder)
        resource = place.queued()
        has_ended = (record.folder / EXIT).exists()
        if resource is None and (has_ended or Memory.of(record.folder).phase != "recreating"):
            raise LaunchError(f"job {record.id} has ended already: there is nothing to cancel.")
        # 1. Tell a supervisor, here by a file and elsewhere by the bucket. 2. Let the run save.
        # 3. Delete. 4. Wait until the slice is gone, because until then it costs money.
        (record.folder / CANCEL).touch()
        place.ask_to_stop()  # before the deletion, or a supervisor would request the slice again
        code = place.end_run() if tpu_slice.state_of(resource) == "ACTIVE" else None
        place.delete()
        # Asked twice: one answer of NOT_FOUND may be wrong.
        if not tpu_slice.comes_true(
            lambda: not (place.queued() or place.queued()), _DELETION_SECONDS
        ):
            raise LaunchError(
                f"{place.name} is still being deleted after {_DELETION_SECONDS:.0f} s, and may "
                f"cost money until it is gone: gcloud compute tpus queued-resources describe "
                f"{place.name} --project={place.project} --zone={place.zone}"
            )
        tpu_slice.note_end(record.folder, code)


def _state(folder: Path, place: Slice, word: str) -> State:
    memory = Memory.of(folder)
    if not word and memory.phase != "recreating":
        with suppress(LaunchError):  # the bucket may have exit codes that this machine lacks
            code = tpu_slice.outcome(place.exits(place.objects()), 1)
            if code is None and (folder / CANCEL).exists():
                code = _CANCELED  # noted like any other, so nobody asks for this job again
            tpu_slice.note_end(folder, code)
        return _ended(folder)
    # The supervisor's reason says more than Google's state while it deletes or requests the slice.
    detail = "" if memory.phase == "running" else memory.why
    if place.supervise and not tpu_supervisor.is_running(folder):
        detail = f"no supervisor runs here; python -m launch.tpu.supervisor {folder} starts it"
    return State(
        word.lower() or "gone, to be requested again",
        active=place.supervise or word not in ("SUSPENDED", "FAILED"),
        nodes=place.name if word == "ACTIVE" else "",
        restarts=memory.restarts,
        detail=detail,
    )


def _ended(folder: Path) -> State:
    state, memory = logs.state_of_ended(folder), Memory.of(folder)
    return replace(state, detail=memory.why) if state.word == "failed" and memory.why else state


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
