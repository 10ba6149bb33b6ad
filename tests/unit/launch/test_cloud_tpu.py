"""Cloud TPU without one: the real gcloud talks to a control plane on loopback.

Buckets and ssh are programs of the tests, and so is gcloud where the real one only costs time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud import tpu_v2, tpu_v2alpha1

from launch import records
from launch.job import EXIT, JobSpec, Record
from launch.kinds.cloud_tpu import Config
from launch.submission import checks, submit
from launch.tpu import slice as tpu_slice
from launch.tpu import supervisor as tpu_supervisor
from launch.tpu.slice import FILE, HINTS, STARTUP, Slice
from launch.tpu.supervisor import Memory
from samestep.config import decode, to_tree
from samestep.errors import ConfigError, LaunchError
from tests.unit.launch.tpu_control_plane import REAL_GCLOUD, TOKEN, ControlPlane, install
from tests.waiting import until

STRANGE = 'it\'s a "run" $(touch pwned) `touch pwned`\n; touch pwned & %s \\ end'
CLUSTER = Config("v4-8", "my-project", "us-central2-b", "gs://bucket/a folder")
NAME = re.compile(r"samestep-run-[0-9a-f]{8}-001")
needs_gcloud = pytest.mark.skipif(not Path(REAL_GCLOUD).exists(), reason="gcloud is not installed")


def job(
    folder: Path,
    config: str = "output: runs/run\ncheckpoint: {folder: gs://bucket/run}\n",
    **more: Any,
) -> JobSpec:
    return JobSpec("run", "train", config, folder / "001", folder, **{"code": True, **more})


@pytest.fixture
def thin(plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A gcloud that is quick; its folder."""
    for name, value in install(tmp_path / "gcloud", plane, thin=True).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "gcloud"


@pytest.fixture
def real(plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real gcloud, but for buckets, secrets and ssh; the folder of these."""
    for name, value in install(tmp_path / "gcloud", plane, thin=False).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "gcloud"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from: a cluster, an experiment, and a snapshot that could be installed."""
    folder = tmp_path / "project"
    folder.mkdir()
    tree = {
        "kind": "cloud_tpu",
        **to_tree(replace(CLUSTER, poll_seconds=0.1, secrets={"WANDB_API_KEY": "wandb"})),
    }
    (folder / "tpu.yaml").write_text(yaml.safe_dump(tree))
    (folder / "run.yaml").write_text(
        "output: runs/run\naccelerator: xla\nstrategy: xla_spmd\n"
        "data: {path: gs://bucket/data}\ncheckpoint: "
        "{folder: gs://bucket/run}\n"
    )
    (folder / "pyproject.toml").write_text("[project]\nname = 'samestep'\n")
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tpu_slice, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(tpu_slice, "_LOG_SECONDS", 0.05)
    return folder


def launched(*overrides: str) -> Record:
    return submit.submit(submit.prepare("tpu.yaml", "run.yaml", overrides))


def staging(gcloud: Path) -> Path:
    return next((gcloud / "buckets" / "bucket" / "a folder").glob("run-*/001"))


# What is asked for


@pytest.mark.parametrize(
    ("accelerator_type", "topology", "devices"),
    [
        ("v4-8", None, 4),
        ("v5litepod-16", None, 16),
        ("v5p-32", None, 16),
        ("v6e-8", None, 8),
        ("v3-8", None, 8),
        ("v4", "2x2x4", 16),
        ("v6e", "4x4", 16),
        ("v2", "2x2", 8),
    ],
)
def test_devices_are_those_that_xla_sees(
    accelerator_type: str, topology: str | None, devices: int
) -> None:
    assert replace(CLUSTER, accelerator_type=accelerator_type, topology=topology).devices == (
        devices,
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"accelerator_type": "v9-8"}, "v9-8"),
        ({"accelerator_type": "v4"}, "v4-8"),
        ({"accelerator_type": "v4-7"}, "v4-7"),
        ({"accelerator_type": "v4-8", "topology": "2x2"}, "topology"),
        ({"project": "My Project"}, "project"),
        ({"zone": "us-central2"}, "zone"),
        ({"staging": "gs://bucket"}, "Name a folder"),
        ({"staging": "s3://bucket/x"}, "staging"),
        ({"staging": "gs://bucket/x*"}, "staging"),
        ({"mounts": {"data": "gs://bucket/data"}}, "mounts"),
        ({"mounts": {"/data": "bucket/data"}}, "mounts./data"),
        ({"labels": {"Team": "x"}}, "labels"),
        ({"secrets": {"WANDB_API_KEY": "not a name"}}, "secrets.WANDB_API_KEY"),
        ({"variables": {"WANDB_API_KEY": "x"}}, "variables.WANDB_API_KEY"),
        ({"reservation": "mine"}, "reserved"),
        ({"code": "installed"}, "package"),
        ({"options": ["-x"]}, "options"),
        ({"user": "root; reboot"}, "user"),
        ({"poll_seconds": 0}, "poll_seconds"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        decode(Config, to_tree(CLUSTER) | settings)


def test_settings_survive_yaml() -> None:
    config = replace(
        CLUSTER,
        mounts={"/a": "gs://b/c"},
        setup=(STRANGE,),
        secrets={"KEY": "key"},
        labels={"a": ""},
    )
    assert decode(Config, yaml.safe_load(yaml.safe_dump(to_tree(config)))) == config


def test_a_run_that_ignores_sigterm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cloud TPU ends runs by SIGTERM. Add SIGTERM"):
        CLUSTER.render(replace(job(tmp_path), stop_signals=("SIGUSR1",)))


def test_datasets_are_built_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="samestep data push"):
        CLUSTER.render(replace(job(tmp_path), action="build"))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("strategy=fsdp", "strategy=xla_spmd"),
        ("accelerator=null", "accelerator is not set.*accelerator=xla strategy=xla_spmd"),
        ("accelerator=cpu", "accelerator cpu does not use 1 slice v4-8 x 4 TPU devices"),
        ("accelerator={kind: cuda}", "accelerator cuda does not use"),
        ("data.path=datasets/x", "data.path datasets/x is not there.*samestep data push"),
        ("data.sources=[{path: /data/x}]", "data.sources.0.path"),
        ("init_from=runs/x", "init_from"),
        ("objective={kind: distillation, teacher: runs/x}", "objective.teacher runs/x"),
        ("checkpoint.folder=null", "output runs/run is on the .*Set checkpoint.folder=gs://"),
        ("checkpoint.folder=/mnt/x", "checkpoint.folder /mnt/x is on"),
    ],
)
def test_what_the_machines_would_lose_is_refused(
    thin: Path, project: Path, override: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        checked(override)


def checked(*overrides: str) -> None:
    checks.require(submit.prepare("tpu.yaml", "run.yaml", overrides))


@pytest.fixture
def settings_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the command that reads all settings, which takes seconds."""
    monkeypatch.setattr(checks, "_ask", lambda arguments, variables: None)


def test_what_cannot_be_installed_is_refused(
    thin: Path, project: Path, settings_are_valid: None
) -> None:
    checked()
    (project / "pyproject.toml").unlink()
    with pytest.raises(LaunchError, match=r"cluster\.package"):
        checked()
    checked("cluster.package=samestep")
    assert NAME.fullmatch(launched("cluster.package=samestep", "cluster.supervise=false").id)


def test_folders_that_the_machines_get_are_taken(
    thin: Path, project: Path, settings_are_valid: None
) -> None:
    mounted = "cluster.mounts={/mnt/data: gs://bucket/data}"
    checked("data.path=/mnt/data/wikipedia", mounted)
    with pytest.raises(ConfigError, match=r"data.path /mnt/data2"):
        checked("data.path=/mnt/data2", mounted)
    checked("data.path=/disk/data", "cluster.setup=[mount /dev/sdb /disk]")


def test_code_that_nothing_brings_to_the_machines_is_refused(
    thin: Path, project: Path, settings_are_valid: None
) -> None:
    own = "objective=own.paced"
    (project / "own").mkdir()
    (project / "own" / "paced.py").touch()
    checked(own)
    with pytest.raises(ConfigError, match=r"objective own.paced .*Set cluster.code=snapshot"):
        checked(own, "cluster.code=installed", "cluster.package=samestep")
    (project / ".gitignore").write_text("own\n")
    with pytest.raises(ConfigError, match=r"objective own.paced .*Have git know it"):
        checked(own)
    checked("objective=of_a_package.paced", "cluster.code=installed", "cluster.package=samestep")


BODIES: dict[str, tuple[Config, str, dict[str, Any]]] = {
    "spot": (CLUSTER, "v2", {"spot": {}}),
    "on_demand": (
        replace(CLUSTER, capacity="on_demand", internal_ips=True, network="n", subnetwork="s"),
        "v2",
        {},
    ),
    "reserved": (
        replace(
            CLUSTER, capacity="reserved", service_account="me@my-project.iam.gserviceaccount.com"
        ),
        "v2",
        {"reservationName": "projects/my-project/locations/us-central2-b/reservations/-"},
    ),
    "reservation": (
        replace(CLUSTER, capacity="reserved", reservation="mine", labels={"team": "a"}),
        "v2alpha1",
        {
            "guaranteed": {"reserved": True},
            "provisioningModel": "STANDARD",
            "reservationName": "projects/my-project/locations/us-central2-b/reservations/mine",
        },
    ),
    "topology": (
        replace(CLUSTER, accelerator_type="v6e", topology="4x4", options=("--tags=a",)),
        "v2alpha1",
        {"spot": {}, "provisioningModel": "SPOT"},
    ),
}


@pytest.mark.long
@needs_gcloud
@pytest.mark.parametrize("case", BODIES)
def test_bodies_that_gcloud_posts_are_googles(
    real: Path, plane: ControlPlane, tmp_path: Path, case: str
) -> None:
    config, version, tier = BODIES[case]
    submission = config.render(job(tmp_path, f"output: {json.dumps(STRANGE)}\n"))
    for name, text in submission.files.items():
        (tmp_path / name).write_text(text)
    place = Slice.of(tmp_path)
    place.request(tmp_path)
    [(posted_to, body)] = plane.bodies
    assert posted_to == version
    assert {key: value for key, value in body.items() if key != "tpu"} == tier
    body.pop("provisioningModel", None)  # which Google's client of 2026 does not know
    # A topology is sent as `type: V6E`, an enumeration, so the client rejects unknown kinds.
    module = tpu_v2 if version == "v2" else tpu_v2alpha1
    [spec] = module.QueuedResource.from_json(json.dumps(body)).tpu.node_spec
    assert (spec.parent, spec.node_id) == (
        "projects/my-project/locations/us-central2-b",
        place.name,
    )
    assert spec.node.accelerator_type == ("" if config.topology else "v4-8")
    assert spec.node.accelerator_config.topology == (config.topology or "")
    assert spec.node.metadata["startup-script"] == submission.files[STARTUP]
    assert dict(spec.node.labels) == {"samestep": "run", tpu_slice.MARK: place.mark} | config.labels
    assert spec.node.network_config.enable_external_ips is not config.internal_ips
    assert spec.node.network_config.network == (config.network or "default")
    assert spec.node.service_account.email == (config.service_account or "")
    assert list(spec.node.tags) == (["a"] if config.options else [])


# What Google says


@pytest.mark.long
@needs_gcloud
def test_refusals_of_google_come_with_a_hint(real: Path, plane: ControlPlane) -> None:
    CLUSTER.check()
    with pytest.raises(LaunchError, match=r"no v4-4096: of these it has v4-8, v4-16;"):
        replace(CLUSTER, accelerator_type="v4-4096").check()
    (real / "token").write_text("expired")
    with pytest.raises(LaunchError, match="gcloud auth login"):
        CLUSTER.check()
    (real / "token").write_text(TOKEN)
    plane.refusal = (
        403,
        "PERMISSION_DENIED",
        "Cloud TPU API has not been used in project p before or it is disabled.",
    )
    with pytest.raises(LaunchError, match="gcloud services enable"):
        CLUSTER.check()


@pytest.mark.parametrize(
    ("said", "hint"),
    [  # each was heard from gcloud 528
        (
            "You do not currently have an active account selected.\nPlease run:\n\n  $ gcloud "
            "auth login",
            "log in",
        ),
        (
            "UNAUTHENTICATED: Request had invalid authentication credentials. Expected OAuth 2 "
            "access token",
            "log in",
        ),
        (
            "There was a problem refreshing your current auth tokens: ('invalid_grant: Bad "
            "Request')",
            "log in",
        ),
        (
            "PERMISSION_DENIED: Cloud TPU API has not been used in project p before or it is "
            "disabled.",
            "services enable",
        ),
        (
            "PERMISSION_DENIED: Permission tpu.queuedResources.list denied on resource "
            "//tpu.googleapis.com",
            "TPU Admin",
        ),
        (
            "RESOURCE_EXHAUSTED: Quota limit TPUV4sPreemptiblePodPerProjectPerZoneForTPUAPI has "
            "been",
            "ask for more",
        ),
        (
            "NOT_FOUND: Location us-central9-z is not found or access is unauthorized.",
            "locations list",
        ),
        (
            "ALREADY_EXISTS: Resource projects/p/locations/z/queuedResources/q already exists",
            "taken",
        ),
        (
            "HTTPError 412: At least one of the pre-conditions you specified did not hold.",
            "another launch",
        ),
        ("gs://nobuck not found: 404.", "make the bucket"),
        (
            "gcloud crashed (ConnectionError): HTTPConnectionPool(host='x'): Max retries exceeded",
            "cannot be reached",
        ),
        (
            "HttpError accessing <x>: response: <{'status': 503}>, content <UNAVAILABLE>",
            "cannot be reached",
        ),
    ],
)
def test_what_gcloud_says_has_the_right_hint(
    said: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "gcloud"
    program.write_text('#!/bin/sh\ncat "$0.says" >&2\nexit 1\n')
    program.chmod(0o755)
    (tmp_path / "gcloud.says").write_text(f"ERROR: (gcloud.x) {said}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LaunchError) as caught:
        CLUSTER.check()
    message = str(caught.value)
    assert said.split()[0] in message
    assert sum(each in message for each in HINTS.values()) == 1
    assert hint in message.partition("; ")[2] or hint in message


def test_gcloud_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="install it"):
        CLUSTER.check()


def nothing_is_left(gcloud: Path) -> bool:
    return not list((gcloud / "buckets" / "bucket" / "a folder").glob("run-*/*")) and not (
        (records.state_folder() / "launches").exists()
    )


def test_nothing_is_left_when_google_refuses(
    thin: Path, project: Path, plane: ControlPlane
) -> None:
    plane.create_refusal = (429, "RESOURCE_EXHAUSTED", "Quota limit")
    with pytest.raises(LaunchError, match="ask for more"):
        launched()
    assert '"delete"' in (thin / "calls").read_text()
    assert nothing_is_left(thin)


def test_a_slice_of_somebody_else_is_neither_taken_nor_deleted(
    thin: Path, project: Path, plane: ControlPlane
) -> None:
    name = submit.prepare("tpu.yaml", "run.yaml", ()).submission.command[5]
    theirs = {
        "name": f"projects/p/locations/z/queuedResources/{name}",
        "state": {"state": "SUSPENDED"},
    }
    plane.queued[name] = theirs | {
        "tpu": {"nodeSpec": [{"node": {"labels": {tpu_slice.MARK: "theirs"}}}]}
    }
    with pytest.raises(LaunchError, match="ALREADY_EXISTS"):
        launched()
    assert plane.state(name) == "SUSPENDED"
    assert nothing_is_left(thin)


def test_a_request_that_was_accepted_counts_whatever_the_answer(
    thin: Path, project: Path, plane: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    plane.answers_lost = 1
    record = launched("cluster.supervise=false")
    assert plane.state(record.id) == "PROVISIONING"
    assert f"{record.id} is there" in caplog.text


def test_where_google_falls_silent_it_is_said_what_may_be_left(
    thin: Path, project: Path, plane: ControlPlane, caplog: pytest.LogCaptureFixture
) -> None:
    plane.refusal = (503, "UNAVAILABLE", "The service is currently unavailable.")
    with pytest.raises(LaunchError, match="UNAVAILABLE"):
        launched()
    assert (
        "may be there all the same, and cost money: gcloud compute tpus queued-resources delete"
        in caplog.text
    )


def test_a_slice_that_nobody_would_look_after_is_deleted(
    thin: Path, project: Path, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(tpu_supervisor, "start", full)
    with pytest.raises(OSError, match="No space"):
        launched()
    [resource] = plane.queued.values()
    assert resource["state"]["state"] == "DELETING"


def test_names_are_those_of_a_user_and_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name() -> str:
        return CLUSTER.render(job(tmp_path / "runs")).command[5]

    names = {name(), CLUSTER.render(job(tmp_path / "others")).command[5]}
    assert name() in names
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    names.add(name())
    monkeypatch.setattr("platform.node", lambda: "another-machine")
    assert len(names | {name()}) == 4
    assert all(NAME.fullmatch(each) for each in names)
    longest = CLUSTER.render(replace(job(tmp_path), name="a" * 40)).command[5]
    assert len(longest) <= 63, "Google takes no longer names"


def test_files_are_taken_back_where_not_all_can_be_put(thin: Path, project: Path) -> None:
    gcloud = thin / "bin" / "gcloud"
    rest = gcloud.read_text().partition("\n")[2]
    gcloud.write_text(
        f'#!/bin/bash\n[[ "$*" != *code.tar.gz* ]] || {{ echo no >&2; exit 1; }}\n{rest}'
    )
    with pytest.raises(LaunchError, match="no"):
        launched()
    assert nothing_is_left(thin)


def test_files_of_another_launch_are_not_touched(
    thin: Path, project: Path, plane: ControlPlane
) -> None:
    launched("cluster.supervise=false")
    shutil.rmtree(records.state_folder())  # as if it had been another machine
    (staging(thin) / "config.yaml").write_text("theirs")
    with pytest.raises(LaunchError, match="another launch"):
        launched("cluster.supervise=false")
    assert (staging(thin) / "config.yaml").read_text() == "theirs"
    assert len(plane.bodies) == 1


# Who looks after it


@pytest.fixture
def looked_after(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Record]]:
    """Launches, and kills what is left of supervisors in the end."""
    started: list[subprocess.Popen[bytes]] = []
    start = tpu_supervisor.start
    monkeypatch.setattr(tpu_supervisor, "start", lambda folder: started.append(start(folder)))
    yield launched
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.parametrize(
    "gcloud",
    [
        "thin",
        pytest.param("real", marks=[pytest.mark.chaos, needs_gcloud], id="real: 25 s of gcloud"),
    ],
)
def test_a_slice_is_asked_for_again_and_deleted_in_the_end(
    gcloud: str,
    looked_after: Callable[..., Record],
    plane: ControlPlane,
    request: pytest.FixtureRequest,
) -> None:
    folder: Path = request.getfixturevalue(gcloud)
    record = looked_after()
    assert NAME.fullmatch(record.id)
    until(lambda: plane.state(record.id) == "ACTIVE")
    plane.preempt(record.id)
    until(lambda: len(plane.bodies) == 2 and plane.state(record.id) == "ACTIVE")
    assert plane.bodies[0] == plane.bodies[1]
    assert tpu_supervisor.is_running(record.folder)
    assert Memory.of(record.folder).restarts == 1
    assert not (record.folder / EXIT).exists()
    (staging(folder) / "exit-0").write_text("0 0\n")
    until((record.folder / EXIT).exists)
    assert (record.folder / EXIT).read_text() == "0\n"
    assert plane.queued == {}
    assert plane.deleted == [record.id, record.id]
    until(lambda: not tpu_supervisor.is_running(record.folder))
    log = (record.folder / tpu_supervisor.LOG).read_text()
    assert "taken away" in log
    assert "nothing of it costs money" in log


@pytest.mark.long
@needs_gcloud
def test_what_the_real_gcloud_lists_is_understood(
    real: Path, project: Path, plane: ControlPlane
) -> None:
    folder = launched("cluster.supervise=false").folder
    place = Slice.of(folder)
    assert place.node() is None
    place.request(folder)  # it is there already
    with pytest.raises(LaunchError, match=r"ALREADY_EXISTS.*; the name is taken"):
        replace(place, mark="another").request(folder)
    plane.machines = 4
    plane.become(place.name, "ACTIVE")
    assert list(tpu_slice.listed(place.project, place.zone)) == [place.name]
    assert tpu_slice.state_of(place.queued()) == "ACTIVE"
    assert tpu_slice.machines(place.node()) == 4
    place.delete()
    place.queued()
    assert plane.deleted == [place.name]
    assert place.queued() is None
    place.delete()  # there is nothing


@pytest.mark.long
def test_a_supervisor_that_is_killed_can_be_started_again(
    thin: Path, plane: ControlPlane, looked_after: Callable[..., Record]
) -> None:
    record = looked_after("cluster.supervise=false")
    Memory(phase="recreating", restarts=1).save(
        record.folder
    )  # killed between deletion and request
    with plane.lock:
        plane.queued.clear()
    tpu_supervisor.start(record.folder)
    until(lambda: plane.state(record.id) == "ACTIVE")
    assert len(plane.bodies) == 2
    again = subprocess.run(
        [sys.executable, "-m", "launch.tpu.supervisor", str(record.folder)],
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0
    assert "another supervisor of" in again.stderr


@pytest.mark.long
def test_a_supervisor_waits_for_google_and_tries_again(
    thin: Path, plane: ControlPlane, looked_after: Callable[..., Record]
) -> None:
    record = looked_after()
    until(lambda: plane.state(record.id) == "ACTIVE")
    plane.refusal = (503, "UNAVAILABLE", "The service is currently unavailable.")
    until(lambda: (record.folder / tpu_supervisor.LOG).read_text().count("next try in") > 2)
    assert "UNAVAILABLE" in (record.folder / tpu_supervisor.LOG).read_text()
    plane.refusal = None
    (staging(thin) / "exit-0").write_text("0 1\n")
    until((record.folder / EXIT).exists)
    assert (record.folder / EXIT).read_text() == "1\n"
    assert plane.queued == {}


@pytest.mark.long
def test_requests_that_fail_again_and_again_are_given_up(
    thin: Path, plane: ControlPlane, looked_after: Callable[..., Record]
) -> None:
    record = looked_after()
    failed = {"failedData": {"error": {"code": 8, "message": "no\n such  capacity"}}}

    def given_up() -> bool:
        if plane.state(record.id) in ("WAITING_FOR_RESOURCES", "PROVISIONING"):
            plane.become(record.id, "FAILED", **failed)
        return (record.folder / EXIT).exists()

    until(given_up)
    assert len(plane.bodies) == 4
    assert plane.queued == {}
    assert "again and again: no such capacity" in (record.folder / tpu_supervisor.LOG).read_text()
    state = record_state(record)
    assert (state.word, state.detail) == (
        "failed",
        "the request fails again and again: no such capacity",
    )


@pytest.mark.long
def test_a_request_that_is_refused_is_given_up_with_the_hint(
    thin: Path, plane: ControlPlane, looked_after: Callable[..., Record]
) -> None:
    record = looked_after()
    until(lambda: plane.state(record.id) == "ACTIVE")
    plane.create_refusal = (
        403,
        "PERMISSION_DENIED",
        "Permission tpu.queuedResources.create denied",
    )
    plane.preempt(record.id)
    until((record.folder / EXIT).exists)
    assert plane.queued == {}
    assert "TPU Admin" in record_state(record).detail
    tried = [json.loads(line) for line in (thin / "calls").read_text().splitlines()]
    assert len([words for words in tried if "create" in words]) == 5


@pytest.mark.long
def test_a_request_without_capacity_is_made_again(
    thin: Path, plane: ControlPlane, looked_after: Callable[..., Record]
) -> None:
    record = looked_after()
    until(lambda: plane.state(record.id) == "ACTIVE")
    plane.create_refusal = (429, "RESOURCE_EXHAUSTED", "There is no more capacity in the zone")
    plane.preempt(record.id)
    until(lambda: (record.folder / tpu_supervisor.LOG).read_text().count("next try in") > 3)
    plane.create_refusal = None
    until(lambda: plane.state(record.id) == "ACTIVE")


@pytest.mark.long
def test_machines_that_never_write_are_deleted(
    thin: Path,
    plane: ControlPlane,
    looked_after: Callable[..., Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = looked_after("cluster.supervise=false", "cluster.silence_minutes=0.001")
    program = (
        "import sys, launch.tpu.supervisor as s; s._GRACE_SECONDS = 0; "
        "sys.exit(s.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, record.folder], timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert plane.queued == {}
    assert (record.folder / EXIT).read_text() == "1\n"
    assert "have written nothing" in record_state(record).detail


# Jobs, logs, cancellation


def record_state(record: Record) -> Any:
    return records.cluster_of(record).states([record])[record.folder]


@pytest.mark.long
def test_states_are_googles_until_the_run_has_ended(
    thin: Path, project: Path, plane: ControlPlane
) -> None:
    record = launched("cluster.supervise=false")
    state = record_state(record)
    assert (state.word, state.active, state.nodes, state.restarts) == (
        "waiting_for_resources",
        True,
        "",
        0,
    )
    assert record_state(record).word == "provisioning"
    state = record_state(record)
    assert (state.word, state.active, state.nodes) == ("active", True, record.id)
    plane.become(record.id, "SUSPENDED")
    assert record_state(record).active is False
    with plane.lock:
        plane.queued.clear()
    assert record_state(record).word == "gone"
    (staging(thin) / "exit-0").write_text("0 1\n")  # the machines had said so before they went
    state = record_state(record)
    assert (state.word, state.active) == ("failed", False)


def test_a_slice_that_is_about_to_come_back_is_active(
    thin: Path, project: Path, plane: ControlPlane
) -> None:
    record = launched("cluster.supervise=false")
    described = yaml.safe_load((record.folder / FILE).read_text()) | {"supervise": True}
    (record.folder / FILE).write_text(json.dumps(described))
    assert "python -m launch.tpu.supervisor" in record_state(record).detail
    Memory(phase="recreating", restarts=2, why="the machines were taken away").save(record.folder)
    with plane.lock:
        plane.queued.clear()
    state = record_state(record)
    assert (state.active, state.restarts) == (True, 2)


@pytest.mark.long
def test_logs_come_from_the_machines_or_from_what_they_kept(
    thin: Path, project: Path, plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpu_slice, "WORK", str(tmp_path / "machine"))
    record = launched("cluster.supervise=false")
    cluster = records.cluster_of(record)
    with pytest.raises(LaunchError, match="no log"):
        list(cluster.logs(record, False))
    plane.become(record.id, "ACTIVE")
    (tmp_path / "machine" / record.id).mkdir(parents=True)
    (tmp_path / "machine" / record.id / "job.log").write_text("why there is nothing\n")
    assert "".join(cluster.logs(record, False)) == "why there is nothing\n"
    (staging(thin) / "log").mkdir()
    kept = staging(thin) / "log" / "20261120-101500-worker-0.log"
    kept.write_text("step 1 ü\n")
    plane.become(record.id, "ACTIVE")
    following = cluster.logs(record, True)
    assert next(following) == "==> 20261120-101500-worker-0.log\nstep 1 ü\n"
    kept.write_text("step 1 ü\nstep 2\n")
    assert next(following) == "step 2\n"
    kept.with_name("20261120-111500-worker-0.log").write_text("step 3\n")  # of another slice
    (staging(thin) / "exit-0").write_text("0 0\n")
    assert "".join(following) == "==> 20261120-111500-worker-0.log\nstep 3\n"
    with plane.lock:
        plane.queued.clear()
    assert "step 2" in "".join(cluster.logs(record, False))


@pytest.mark.long
def test_logs_are_followed_until_all_machines_have_ended(
    thin: Path, project: Path, plane: ControlPlane
) -> None:
    record = launched("cluster.supervise=false")
    plane.machines = 2
    plane.become(record.id, "ACTIVE")
    (staging(thin) / "log").mkdir()
    kept = staging(thin) / "log" / "20261120-101500-worker-0.log"
    kept.write_text("step 1\n")
    (staging(thin) / "exit-1").write_text("1 0\n")
    following = records.cluster_of(record).logs(record, True)
    assert next(following).endswith("step 1\n")
    kept.write_text("step 1\nstep 2\n")
    assert next(following) == "step 2\n"
    (staging(thin) / "exit-0").write_text("0 0\n")
    assert list(following) == []


def test_one_listing_without_a_slice_says_nothing(
    thin: Path, project: Path, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = launched("cluster.supervise=false")
    monkeypatch.setattr(tpu_slice, "listed", lambda *_: {})
    assert record_state(record).active


@pytest.mark.long
def test_cancel_lets_the_run_stop_and_leaves_nothing(
    thin: Path, plane: ControlPlane, looked_after: Callable[..., Record]
) -> None:
    record = looked_after()
    until(lambda: plane.state(record.id) == "ACTIVE")
    plane.machines = 2
    plane.become(record.id, "ACTIVE")
    script = f"until [ -e '{staging(thin)}/stop' ]; do sleep 0.1; done; cd '{staging(thin)}'; "
    script += "echo 1 75 > exit-1; sleep 1; echo 0 75 > exit-0"
    machines = subprocess.Popen(["timeout", "100", "bash", "-c", script])
    records.cluster_of(record).cancel(record)
    assert machines.wait() == 0, "it was deleted before all machines had saved"
    assert plane.queued == {}
    assert len(plane.bodies) == 1
    until(lambda: not tpu_supervisor.is_running(record.folder))
    assert record_state(record).word == "stopped"
    with pytest.raises(LaunchError, match="ended already"):
        records.cluster_of(record).cancel(record)


@pytest.mark.long
def test_cancel_of_what_waits_is_immediate(
    thin: Path, plane: ControlPlane, looked_after: Callable[..., Record]
) -> None:
    record = looked_after("cluster.poll_seconds=600")
    records.cluster_of(record).cancel(record)
    assert plane.queued == {}
    assert record_state(record).word == "cancelled"
    assert '"ssh"' not in (thin / "calls").read_text()


@pytest.mark.long
def test_a_job_that_was_canceled_in_the_queue_is_not_asked_for_again(
    thin: Path, project: Path, plane: ControlPlane
) -> None:
    record = launched("cluster.supervise=false")
    records.cluster_of(record).cancel(record)
    assert record_state(record).word == "cancelled"
    calls = (thin / "calls").read_text()
    assert record_state(record).word == "cancelled"
    assert (thin / "calls").read_text() == calls


@pytest.mark.long
def test_cancel_between_deletion_and_request(
    thin: Path, plane: ControlPlane, looked_after: Callable[..., Record]
) -> None:
    record = looked_after("cluster.supervise=false")
    with plane.lock:
        plane.queued.clear()
    Memory(phase="recreating", restarts=1).save(record.folder)
    records.cluster_of(record).cancel(record)
    tpu_supervisor.start(record.folder)
    until(lambda: "nothing of it costs money" in (record.folder / tpu_supervisor.LOG).read_text())
    assert len(plane.bodies) == 1
