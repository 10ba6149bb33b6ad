"""Cloud TPU: a queued resource whose machines install and start the run by themselves, and a supervisor beside it."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import tarfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import yaml

from launch import command_line, logs
from launch.environment import VARIABLE, check_setup, check_variables
from launch.job import CANCEL, CODE, CONFIG, EXIT, LOG, Cluster, JobSpec, Record, State, Submission
from launch.tpu import slice as tpu_slice
from launch.tpu import supervisor as tpu_supervisor
from launch.tpu import types as tpu_types
from launch.tpu.slice import FILE, HINTS, STARTUP, Slice
from launch.tpu.startup import Startup
from launch.tpu.supervisor import Memory
from trainer.config import Tree
from trainer.errors import ConfigError, LaunchError

logger = logging.getLogger(__name__)

_ARCHIVE = "code.tar.gz"
_DELETION_SECONDS = 600.0

_WORD = {
    "project": re.compile(r"[a-z][a-z0-9.:-]*[a-z0-9]"),
    "zone": re.compile(r"[a-z]+-[a-z]+\d+-[a-z]"),
    "runtime_version": re.compile(r"[a-z0-9][\w.-]*"),
    "reservation": re.compile(r"[\w./-]+"),
    "service_account": re.compile(r"[\w.-]+@[\w.-]+"),
    "network": re.compile(r"[\w./-]+"),
    "subnetwork": re.compile(r"[\w./-]+"),
    "user": re.compile(r"[a-z_][a-z0-9_-]{0,31}"),
}
_ADDRESS = re.compile(
    r"gs://[a-z0-9][\w.-]*(/[^*?#\[\]{}]*)?"
)  # without what gcloud takes for a pattern
_LABEL = re.compile(r"[a-z0-9_-]{0,63}")
_SECRET = re.compile(r"[\w-]{1,255}")


@dataclass(frozen=True)
class Config(Cluster):
    """A slice of Cloud TPU, asked for as a queued resource.

    Attributes:
        accelerator_type: what to ask for, as v4-8, v5litepod-16 or v6e-8; with `topology` its first part alone.
        project: that pays.
        zone: of the machines, as us-central2-b.
        staging: a folder in a bucket, gs://BUCKET/FOLDER, in the region of the zone: the code and the configuration go
            to the machines through it; it keeps their logs, exit codes and the small files of the run's folder.
        topology: the chips' arrangement, as 2x2x4.
        runtime_version: the machines' image; None takes the usual one for the type.
        capacity: spot is much cheaper, and taken away at any time; on_demand; or reserved, from a reservation.
        reservation: by name, where the project has several.
        service_account: as whom the machines act; None takes the project's default one of Compute Engine.
        network: None takes the network named default.
        subnetwork: of that network.
        internal_ips: gives the machines no external addresses; they need Cloud NAT to install from package indices.
        labels: of the node, for bills.
        code: snapshot copies what git knows of the folder that you submit from; installed takes `package` alone.
        package: what the machines install: a requirement of pip, or a wheel, gs://BUCKET/FILE.whl. The snapshot goes
            before it. None installs the snapshot, which must be samestep itself or a copy of it then.
        extras: of samestep, when the snapshot or a wheel is installed.
        user: who runs the experiment on the machines; it is made if need be. root has no need of that.
        mounts: buckets or folders in them, gs://BUCKET/FOLDER, as folders of the machines, by where they are to be
            seen (gcsfuse).
        secrets: names in Secret Manager, by the environment variables that get their newest values.
        variables: environment variables of the run. Not for secrets, which would lie in the machines' metadata.
        setup: further lines of shell, run as root on each machine before the run.
        supervise: starts a process on this machine that asks for the slice again whenever it was taken away, and
            deletes it when the run has ended. Without it both are left to you.
        poll_seconds: between two looks of that process; more while Google does not answer.
        silence_minutes: after which that process deletes machines that are there and write nothing into `staging`:
            every 20 s they copy their logs there. The job ends if they never have; else the slice is asked for again.
        options: further options of `gcloud compute tpus queued-resources create`, as --valid-until-duration=12h.
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

    def __post_init__(self) -> None:
        for name, form in _WORD.items():
            value = getattr(self, name)
            if value is not None and not form.fullmatch(value):
                raise ConfigError(
                    f"{name} {value!r} is nothing that Google Cloud would have a name for"
                )
        addresses = {"staging": self.staging} | {
            f"mounts.{where}": address for where, address in self.mounts.items()
        }
        for name, address in addresses.items():
            if not _ADDRESS.fullmatch(address) or not address.isprintable():
                raise ConfigError(
                    f"{name} must be gs://BUCKET/FOLDER, without any of *?#[]{{}}, not {address!r}"
                )
        if not self.staging.removeprefix("gs://").strip("/").partition("/")[2]:
            raise ConfigError(
                f"staging {self.staging} is a whole bucket; name a folder in it: gs://BUCKET/FOLDER"
            )
        if relative := [where for where in self.mounts if not where.startswith("/")]:
            raise ConfigError(
                f"mounts: {relative[0]!r} does not begin with /, as a folder of the machines has to"
            )
        for key, value in self.labels.items():
            if not _LABEL.fullmatch(value) or not _LABEL.fullmatch(key) or not key[:1].isalpha():
                raise ConfigError(
                    f"labels: {key}={value} has more in it than small letters, digits, - and _"
                )
        for variable, secret in self.secrets.items():
            if not VARIABLE.fullmatch(variable) or not _SECRET.fullmatch(secret):
                raise ConfigError(
                    f"secrets.{variable} must give an environment variable the name of a secret in Secret Manager, as "
                    "WANDB_API_KEY: wandb-key; the secret itself has no place here"
                )
        check_variables(self.variables)
        check_setup(self.setup)
        command_line.check_options(self.options, "gcloud")
        if self.reservation is not None and self.capacity != "reserved":
            raise ConfigError(
                f"reservation {self.reservation} needs capacity=reserved, not {self.capacity}"
            )
        if self.package is None and self.code == "installed":
            raise ConfigError(
                "code=installed needs package: what the machines are to install, as samestep[gcs,tpu]"
            )
        for name in ("poll_seconds", "silence_minutes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        _ = self.devices  # refuses what is no type

    @property
    def devices(self) -> tuple[int | Literal["here"], ...]:
        """Those that XLA sees on the slice."""
        return (tpu_types.devices(self.accelerator_type, self.topology),)

    @property
    def takes_snapshot(self) -> bool:
        return self.code == "snapshot"

    def render(self, job: JobSpec) -> Submission:
        """The machines' script, and what this machine has to know to find them again."""
        if job.action == "build":
            raise ConfigError(
                "a dataset is not built on Cloud TPU, where chips would wait for it: build it with another kind of "
                "cluster (slurm, kubernetes, local) or `samestep data build`, then `samestep data push` it to a bucket "
                "in the region of the zone"
            )
        tree: Tree = yaml.safe_load(job.config)
        output = str(tree["output"])
        run = f"{output}\n{(tree.get('checkpoint') or {}).get('folder')}"  # what makes another launch the same run
        place = f"{self.staging.rstrip('/')}/{job.name}-{_digest(run)[:8]}"
        mine = _digest(run, self.staging, str(job.folder), str(os.getuid()), platform.node())
        name = f"samestep-{job.name}-{mine[:8]}-{job.folder.name}"  # others launch runs of the same name
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
        script = startup.render()
        mark = _digest(script, job.config)[:16]
        command = self._create(name, job.name, mark)
        of_slice = Slice(
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
        )
        return Submission({STARTUP: script, FILE: of_slice.dump()}, command)

    def _create(self, name: str, job: str, mark: str) -> tuple[str, ...]:
        """The command; of gcloud's alpha only where nothing else has the option."""
        alpha = ["alpha"] if self.reservation or self.topology else []
        words = [
            "gcloud",
            *alpha,
            "compute",
            "tpus",
            "queued-resources",
            "create",
            name,
            f"--node-id={name}",
        ]
        words += [f"--project={self.project}", f"--zone={self.zone}"]
        if self.topology:
            words += [f"--type={self.accelerator_type}", f"--topology={self.topology}"]
        else:
            words.append(f"--accelerator-type={self.accelerator_type}")
        words.append(
            f"--runtime-version={self.runtime_version or tpu_types.image(self.accelerator_type)}"
        )
        if self.capacity != "on_demand":
            words.append(f"--{self.capacity}")
        if alpha and self.capacity == "spot":
            words.append("--provisioning-model=spot")  # else it says standard, and spot beside it
        named = {"reservation": self.reservation, "service-account": self.service_account}
        named |= {"network": self.network, "subnetwork": self.subnetwork}
        words += [f"--{option}={value}" for option, value in named.items() if value is not None]
        words += ["--internal-ips"] * self.internal_ips
        labels = {"samestep": job} | self.labels | {tpu_slice.MARK: mark}
        words.append(f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}")
        return (*words, f"--metadata-from-file=startup-script={STARTUP}", *self.options, "--quiet")

    def check(self) -> None:
        """Asks which types the zone has, which needs an account, the interface, the project and the zone."""
        command_line.require("gcloud", "install it: https://cloud.google.com/sdk/docs/install")
        words = tpu_slice.tpus(
            self.project, self.zone, "tpu-vm", "accelerator-types", "list", "--format=value(type)"
        )
        types = command_line.run(words, HINTS).split()
        if self.topology is None and self.accelerator_type not in types:
            kind = self.accelerator_type.partition("-")[0]
            known = sorted(
                (each for each in types if each.startswith(f"{kind}-")),
                key=lambda each: (len(each), each),
            )
            has = f"of these it has {', '.join(known)}" if known else f"it has none of {kind}"
            raise LaunchError(
                f"zone {self.zone} has no {self.accelerator_type}: {has}; choose another type or zone"
            )

    def submit(self, submission: Submission, folder: Path) -> tuple[str, Mapping[str, str]]:
        """Uploads what the machines need, asks for them, and starts the supervisor."""
        tree: Tree = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        _refuse_what_is_lost(tree, folders_come=bool(self.mounts or self.setup))
        if self.package is None and not (folder / CODE / "pyproject.toml").is_file():
            raise LaunchError(
                "the machines would have nothing to install: the folder that you submit from is no clone of samestep "
                "(git knows of no pyproject.toml in it); go there, or set cluster.package to what they are to install"
            )
        place, files = Slice.of(folder), [folder / CONFIG]
        if (folder / CODE).is_dir():
            with tarfile.open(folder / _ARCHIVE, "w:gz") as archive:
                archive.add(folder / CODE, arcname=".")
            files.append(folder / _ARCHIVE)
        place.upload(files)
        try:
            place.request(folder)
            (folder / _ARCHIVE).unlink(missing_ok=True)
            if self.supervise:
                tpu_supervisor.start(folder)
        except BaseException:  # Ctrl-C, too: whatever has come of the request would cost money
            place.take_back()
            with suppress(LaunchError):
                place.remove_files()
            raise
        return place.name, {}

    def states(self, records: Iterable[Record]) -> Mapping[str, State]:
        """Those that Google knows of as it calls them, the others by their exit codes."""
        listed = list(records)
        ended = {record.id for record in listed if (record.folder / EXIT).exists()}
        places = {record.id: Slice.of(record.folder) for record in listed if record.id not in ended}
        zones = {(place.project, place.zone) for place in places.values()}
        queued = {zone: tpu_slice.listed(*zone) for zone in zones}
        found = {}
        for record in listed:
            if record.id in ended:
                found[record.id] = _ended(record.folder)
            else:
                place = places[record.id]
                resource = queued[place.project, place.zone].get(place.name) or place.queued()
                found[record.id] = _state(record.folder, place, tpu_slice.state_of(resource))
        return found

    def logs(self, record: Record, follow: bool) -> Iterable[str]:
        """What all machines have copied to the bucket, boot by boot; by ssh what they have not copied."""
        place = Slice.of(record.folder)
        nothing_kept = not tpu_slice.logs_in(place.objects())
        if not follow and nothing_kept and tpu_slice.state_of(place.queued()) == "ACTIVE":
            yield place.ssh(f"tail -n +1 {tpu_slice.WORK}/{place.name}/{LOG}")
            return
        yield from place.kept_logs(lambda: follow and self.states([record])[record.id].active)

    def cancel(self, record: Record) -> None:
        """Gives the run its time for a checkpoint, then deletes the slice; returns when it is gone."""
        place = Slice.of(record.folder)
        resource = place.queued()
        if resource is None and (
            (record.folder / EXIT).exists() or Memory.of(record.folder).phase != "recreating"
        ):
            raise LaunchError(f"{record.id} has ended already")
        (record.folder / CANCEL).touch()
        place.ask_to_stop()  # before anything is deleted: a supervisor must not ask for it again
        code = place.end_run() if tpu_slice.state_of(resource) == "ACTIVE" else None
        place.delete()
        if not tpu_slice.comes_true(
            lambda: not (place.queued() or place.queued()), _DELETION_SECONDS
        ):
            raise LaunchError(
                f"{place.name} is still being deleted after {_DELETION_SECONDS:.0f} s, and may cost money until it is "
                f"gone: gcloud compute tpus queued-resources describe {place.name} --project={place.project} "
                f"--zone={place.zone}"
            )
        tpu_slice.note_end(record.folder, code)


def _state(folder: Path, place: Slice, word: str) -> State:
    memory = Memory.of(folder)
    if not word and memory.phase != "recreating":
        with suppress(LaunchError):  # the machines may have left more than this one knows
            tpu_slice.note_end(folder, tpu_slice.outcome(place.exits(place.objects()), 1))
        return _ended(folder)
    detail = "" if memory.phase == "running" else memory.why
    if place.supervise and not tpu_supervisor.is_running(folder):
        detail = f"nobody looks after it here; python -m launch.tpu.supervisor {folder} does"
    return State(
        word.lower() or "gone, to be asked for again",
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


def _refuse_what_is_lost(experiment: Tree, folders_come: bool) -> None:
    """Refuses an experiment whose files the machines would not find, or would take with them.

    Raises:
        ConfigError: naming the setting.
    """
    strategy = experiment.get("strategy")
    kind = strategy.get("kind") if isinstance(strategy, dict) else strategy
    if kind != "xla_spmd":
        raise ConfigError(
            f"strategy {kind or 'fsdp'} is not for XLA: add accelerator=xla strategy=xla_spmd"
        )

    def stays(path: object) -> bool:
        return not isinstance(path, str) or "://" in path or (path.startswith("/") and folders_come)

    data, checkpoint = experiment.get("data") or {}, experiment.get("checkpoint") or {}
    read = {"init_from": experiment.get("init_from"), "data.path": data.get("path")}
    read |= {
        f"data.sources.{i}.path": each.get("path")
        for i, each in enumerate(data.get("sources") or ())
    }
    for name, path in read.items():
        if not stays(path):
            raise ConfigError(
                f"{name} {path} is a folder that the machines do not have; put it into a bucket (`samestep data push` "
                "does that with datasets) and name it as gs://..., or mount one with cluster.mounts"
            )
    if not stays(folder := checkpoint.get("folder") or "OUTPUT/checkpoints"):
        raise ConfigError(
            f"checkpoint.folder {folder} is on the machines' disks, which are deleted with them; set it to "
            "gs://BUCKET/FOLDER"
        )
