"""The script that machines of a slice boot with, run for real in a folder.

Metadata comes from a server on loopback; gcloud, uv, pip and samestep are programs of the tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from launch.kinds import local
from launch.tpu import slice as tpu_slice
from launch.tpu import startup as tpu_startup
from launch.tpu.slice import STARTUP, Slice
from launch.tpu.startup import SETTINGS, Startup
from tests.unit.launch.tpu_control_plane import ControlPlane, install
from tests.waiting import until

NAME = "samestep-run-001"
STRANGE = 'it\'s a "run" $(touch pwned) `touch pwned`\n; touch pwned & %s \\ end'
SECRET = "the-value-of-the-secret"

STARTUPS: dict[str, Startup] = {
    "plain": Startup(
        name=NAME,
        staging="gs://bucket/stage",
        stop_seconds=25.0,
        kept="gs://bucket/kept",
        output="runs/run",
        project="my-project",
        user="root",
        code=True,
        package=None,
        extras=("gcs", "tpu"),
        mounts={},
        secrets={"WANDB_API_KEY": "wandb"},
        variables={},
        setup=(),
    )
}
STARTUPS["strange"] = replace(
    STARTUPS["plain"],
    staging=f"gs://bucket/{STRANGE.splitlines()[0]}",
    kept="gs://bucket/kept it's",
    output=f"runs/{STRANGE}",
    variables={"STRANGE": STRANGE},
    mounts={
        "/mnt/it's $(touch pwned)": "gs://bucket/a folder/$(touch pwned)",
        "/whole": "gs://other",
    },
    setup=(f"printf '%s\\n' {json.dumps('$STRANGE')} > setup-ran", "touch setup-ran-2"),
)
STARTUPS["package"] = replace(
    STARTUPS["plain"], package="samestep[tpu]==1.0; python_version > '3'", user="samestep"
)
STARTUPS["wheel"] = replace(
    STARTUPS["plain"], package="gs://bucket/wheels/samestep-1.0-py3-none-any.whl", code=False
)

UV = """#!/bin/bash
echo "uv $*" >> "$RECORD"
[ "$1" = venv ] || exit 1
mkdir -p "${@: -1}/bin"
printf '%s\\n' '#!/bin/bash' 'echo "pip $*" >> "$RECORD"; [ ! -e "$RECORD.no-pip" ]' \\
  > "${@: -1}/bin/pip"
cp "$PROGRAMS"/{samestep,python} "${@: -1}/bin"
chmod +x "${@: -1}"/bin/*
"""
# The real launch.tpu.machine, which waits less. It starts with -I, so it needs no variable.
MACHINE = f"""#!/bin/bash
if [ "$2" = -c ]; then [ ! -e "$RECORD.old-package" ]; exit; fi
exec {sys.executable} -I -c "
import sys
import launch.tpu.machine as machine
machine._POLL_SECONDS, machine._COPY_SECONDS, machine._RESTART_SECONDS = 0.01, 0.1, 0.03
machine._PAUSES = (0.01, 0.05, 0.1, 0.2)
sys.exit(machine.main(sys.argv[1:]))
" "${{@:4}}"
"""
PIP = """#!/bin/bash
echo "python3 $*" >> "$RECORD"
[ -e "$RECORD.no-uv" ] && exit 1
mkdir -p uv/bin && cp "$PROGRAMS/uv" uv/bin/uv
"""
SAMESTEP = """#!/bin/bash
trap 'echo signalled >> "$RECORD"; exit 75' TERM
echo "samestep $*" >> "$RECORD"
env -0 > "$RECORD.environment"
id -u > "$RECORD.user"
ulimit -l >> "$RECORD.user"
output="${RUN_FOLDER:-runs/run}"
mkdir -p "$output/checkpoints" && echo metrics >> "$output/metrics.jsonl"
touch "$output"/.owner "$output"/checkpoints/x
read -r code rest < "$RECORD.codes"
echo "$rest" > "$RECORD.codes"
echo "step 1 of a run that ends with $code"
printf 'no text: \\377\\n'
if [ "$code" = wait ]; then for _ in $(seq 600); do /bin/sleep 0.05; done; fi
exit "$code"
"""
SYSTEMD_RUN = """#!/bin/bash
[ -e "$RECORD.systemd" ] || exit 1
echo "systemd-run $*" >> "$RECORD"
export SAMESTEP_UNIT=1
while [[ $1 == -* ]]; do case "$1" in -p | -E) shift 2 ;; *) shift ;; esac; done
"$@" &
"""
TIMEOUT = """#!/bin/bash
if [ -e "$RECORD.impatient" ] && [ "$1" = --kill-after=10 ]; then set -- "$1" 3 "${@:3}"; fi
exec /usr/bin/timeout "$@"
"""
PROGRAMS = {
    "systemd-run": SYSTEMD_RUN,
    "timeout": TIMEOUT,
    "python3": PIP,
    "sleep": '#!/bin/bash\nexec /bin/sleep "$(echo "$1" | awk \'{print $1 / 200}\')"\n',
    "gcsfuse": '#!/bin/bash\necho "gcsfuse $*" >> "$RECORD"\n',
    "mountpoint": "#!/bin/bash\nexit 1\n",
    "useradd": '#!/bin/bash\necho "useradd $*" >> "$RECORD"\n',
    "chown": "#!/bin/bash\nexit 0\n",
    "setpriv": '#!/bin/bash\necho "setpriv $1 $2 $3" >> "$RECORD"\nexec "${@:4}"\n',
}


@dataclass
class Machine:
    """A machine of a slice that boots in a folder.

    Attributes:
        folder: with what its programs leave.
        work: where the run lives.
        plane: its metadata server.
        environment: of the script.
        startup: what it boots with.
        script: what it boots with instead, if not empty.
        booted: its scripts.
    """

    folder: Path
    work: Path
    plane: ControlPlane
    environment: Mapping[str, str]
    startup: Startup
    script: str = ""
    booted: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def boots(self, *codes: object) -> subprocess.Popen[bytes]:
        """Starts the script; the run exits with these codes, or waits for a signal."""
        (self.folder / "record.codes").write_text(" ".join(map(str, codes)) + "\n")
        (self.folder / STARTUP).write_text(self.script or self.startup.render())
        (self.stage / SETTINGS).write_text(self.startup.settings())
        process = subprocess.Popen(
            ["bash", STARTUP], cwd=self.folder, env=self.environment, start_new_session=True
        )
        self.booted.append(process)
        return process

    def runs(self, *codes: object) -> int:
        return self.boots(*codes).wait(timeout=100)

    @property
    def record(self) -> list[str]:
        file = self.folder / "record"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def starts(self) -> list[str]:
        return [line for line in self.record if line.startswith("samestep ")]

    @property
    def stage(self) -> Path:
        return self.folder / "buckets" / self.startup.staging.removeprefix("gs://")

    def bucket(self, name: str = "") -> Path:
        return self.folder / "buckets" / "bucket" / name

    @property
    def log(self) -> str:
        return (self.work / "job.log").read_text(errors="replace")


@pytest.fixture
def machine(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Machine]:
    """One that other users of this machine may enter, too."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        environment = {
            "HOME": str(folder),
            **install(folder, plane, thin=True),
            "RECORD": str(folder / "record"),
        }
        programs = folder / "programs"
        programs.mkdir()
        for program, text in PROGRAMS.items():
            (folder / "bin" / program).write_text(text)
        for program, text in {"samestep": SAMESTEP, "uv": UV, "python": MACHINE}.items():
            (programs / program).write_text(text)
        for place in (*programs.iterdir(), *(folder / "bin").iterdir()):
            place.chmod(0o755)
        environment["PROGRAMS"] = str(programs)
        (folder / "secrets" / "wandb").write_text(SECRET)
        monkeypatch.setattr(tpu_startup, "WORK", str(folder / "work"))
        startup = STARTUPS[getattr(request, "param", "plain")]
        stage = folder / "buckets" / startup.staging.removeprefix("gs://")
        stage.mkdir(parents=True)
        (stage / "config.yaml").write_text("output: runs/run\n")
        (folder / "pyproject.toml").write_text("")
        subprocess.run(
            ["tar", "-czf", stage / "code.tar.gz", "-C", folder, "pyproject.toml"], check=True
        )
        plane.metadata |= {
            "attributes/agent-worker-number": "0",
            "attributes/worker-network-endpoints": "unknown:unknown:10.0.0.1",
            "preempted": "FALSE",
        }
        machine = Machine(folder, folder / "work" / startup.name, plane, environment, startup)
        yield machine
        for process in machine.booted:  # whatever is left of a test that has failed
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("case", STARTUPS)
def test_scripts_are_sound(case: str, tmp_path: Path) -> None:
    script = tmp_path / STARTUP
    script.write_text(STARTUPS[case].render())
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [shellcheck, "--exclude=SC2016", script], capture_output=True, text=True
    )  # $ in names is meant
    assert done.stdout == ""
    assert SECRET not in script.read_text()


@pytest.mark.long
def test_a_run_that_was_stopped_is_started_again_until_it_is_done(machine: Machine) -> None:
    assert machine.runs(75, 143, 0) == 0
    assert (
        machine.starts == [f"samestep train {machine.work}/home/stage/config.yaml --elastic 1"] * 3
    )
    assert machine.bucket("stage/exit-0").read_text() == "0 0\n"
    assert [line for line in machine.record if line.startswith("pip install")] == [
        f"pip install --quiet {machine.work}/home/code[gcs,tpu] --constraint "
        f"{machine.work}/home/stage/versions"
    ]
    environment = dict(
        each.partition("=")[::2]
        for each in (machine.folder / "record.environment").read_text().split("\0")
    )
    assert environment["SAMESTEP_JOB"] == NAME
    assert environment["SAMESTEP_NODES"] == "10.0.0.1"
    assert environment["WANDB_API_KEY"] == SECRET
    assert environment["HOME"] == f"{machine.work}/home"
    [log] = machine.bucket("stage/log").iterdir()
    assert log.name.endswith("-worker-0.log")
    assert "step 1 of a run that ends with 0" in log.read_text(), (
        "what is kept is valid text, whatever was written"
    )
    kept = {
        str(each.relative_to(machine.bucket("kept"))) for each in machine.bucket("kept").rglob("*")
    }
    assert kept == {"metrics.jsonl"}
    written = [
        machine.log,
        log.read_text(),
        *machine.record,
        (machine.folder / "calls").read_text(),
    ]
    assert not any(SECRET in each for each in written)


@pytest.mark.long
def test_machines_of_a_slice_meet_at_the_first(machine: Machine) -> None:
    endpoints = ",".join(f"unknown:unknown:10.0.0.{i + 1}" for i in range(4))
    machine.plane.metadata |= {
        "attributes/agent-worker-number": "2",
        "attributes/worker-network-endpoints": endpoints,
    }
    assert machine.runs(0) == 0
    assert machine.starts == [
        f"samestep train {machine.work}/home/stage/config.yaml --elastic 4 --rendezvous "
        "10.0.0.1:29400"
    ]
    assert machine.bucket("stage/exit-2").read_text() == "2 0\n"
    assert not machine.bucket("kept").exists(), "the first machine keeps the run's folder"


@pytest.mark.long
@pytest.mark.parametrize(
    ("codes", "starts"), [((1,), 1), ((2,), 1), ((75,) * 9, 6), ((69,) * 9, 6)]
)
def test_runs_that_fail_are_not_started_again_for_ever(
    machine: Machine, codes: tuple[int, ...], starts: int
) -> None:
    assert machine.runs(*codes) == codes[0]
    assert len(machine.starts) == starts
    assert machine.bucket("stage/exit-0").read_text() == f"0 {codes[0]}\n"


@pytest.mark.long
def test_a_run_on_a_machine_that_is_taken_away_goes_on_at_the_next_boot(machine: Machine) -> None:
    script = machine.boots("wait")
    until(lambda: (machine.bucket("kept") / "metrics.jsonl").exists())  # while the run goes on
    machine.plane.metadata["preempted"] = "TRUE"
    assert script.wait(timeout=100) == 0
    assert machine.record[-1] == "signalled"
    assert not machine.bucket("stage/exit-0").exists(), "the run has not ended"
    assert "taken away" in next(machine.bucket("stage/log").iterdir()).read_text()
    machine.plane.metadata["preempted"] = "FALSE"
    assert machine.runs(0) == 0
    assert len(machine.starts) == 2
    assert len([line for line in machine.record if line.startswith("pip install")]) == 1
    assert machine.bucket("stage/exit-0").read_text() == "0 0\n"
    assert machine.runs("never") == 0, "a boot after the end does nothing"
    assert len(machine.starts) == 2


@pytest.mark.long
def test_a_gcloud_that_hangs_does_not_hold_up_the_end(machine: Machine) -> None:
    gcloud = machine.folder / "bin" / "gcloud"
    rest = gcloud.read_text().partition("\n")[2]
    hangs = '[[ "$*" != *" gs://bucket/kept" ]] || exec /bin/sleep 1000'
    gcloud.write_text(f"#!/bin/bash\n{hangs}\n{rest}")
    (machine.folder / "record.impatient").touch()
    assert machine.runs(0) == 0
    assert machine.bucket("stage/exit-0").read_text() == "0 0\n"
    [log] = machine.bucket("stage/log").iterdir()
    assert "the run's folder could not be copied" in log.read_text()


@pytest.mark.long
def test_each_boot_has_a_log_of_its_own(machine: Machine) -> None:
    machine.plane.metadata["preempted"] = "TRUE"
    boot = machine.boots("wait")
    assert boot.wait(timeout=100) == 0
    until(lambda: not local._session(boot.pid))  # its last copies of the log
    machine.plane.metadata["preempted"] = "FALSE"
    [first] = machine.bucket("stage/log").iterdir()
    before = first.read_text()
    until(lambda: first.name.partition("-worker")[0] != time.strftime("%Y%m%d-%H%M%S"))
    assert machine.runs(0) == 0
    assert first.read_text() == before
    _, second = sorted(machine.bucket("stage/log").iterdir())
    assert second.read_text().count("has booted") == 1


@pytest.mark.long
def test_the_run_is_a_unit_that_is_told_to_stop(machine: Machine) -> None:
    (machine.folder / "record.systemd").touch()
    assert machine.runs(0) == 0, "the service of startup scripts does not wait for the run"
    until(lambda: (machine.bucket("stage/exit-0")).exists())
    [unit] = [line for line in machine.record if line.startswith("systemd-run")]
    assert f"--unit={NAME} " in unit
    assert "TimeoutStopSec=85 " in unit
    assert unit.endswith(f" bash {machine.work}/startup.sh")
    assert len(machine.starts) == 1


@pytest.mark.long
def test_the_next_machines_install_the_same_versions(machine: Machine) -> None:
    assert machine.runs(1) == 1
    installed = machine.bucket("stage/versions").read_text()
    assert f"pytest=={pytest.__version__}\n" in installed
    machine.bucket("stage/versions").write_text("torch==2.9.0\n")
    machine.bucket("stage/exit-0").unlink()
    machine.work.rename(machine.folder / "before")
    assert machine.runs(0) == 0
    installs = [line for line in machine.record if line.startswith("pip install")]
    constraint = machine.work / "home" / "stage" / "versions"
    assert installs[1].endswith(f" --constraint {constraint}")
    assert constraint.read_text() == "torch==2.9.0\n"
    assert machine.bucket("stage/versions").read_text() == "torch==2.9.0\n"


@pytest.mark.long
def test_the_systems_own_shutdown_is_passed_on(machine: Machine) -> None:
    script = machine.boots("wait")
    until(lambda: machine.starts)
    script.send_signal(signal.SIGTERM)
    script.send_signal(signal.SIGTERM)
    machine.plane.metadata["preempted"] = "TRUE"
    assert script.wait(timeout=100) == 0
    assert machine.record.count("signalled") == 1
    assert not machine.bucket("stage/exit-0").exists()


@pytest.mark.long
def test_cancellation_reaches_the_run_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = machine.boots("wait")
    until(lambda: machine.starts)
    sudo = machine.folder / "bin" / "sudo"
    sudo.write_text('#!/bin/sh\nexec "$@"\n')
    sudo.chmod(0o755)
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tpu_slice, "WORK", tpu_startup.WORK)
    machine.bucket("stage/stop").write_text("")
    place = Slice(
        NAME, "my-project", "us-central2-b", "gs://bucket/stage", "", (), 20.0, True, 1.0, 60.0
    )
    machine.plane.nodes[NAME] = {"name": NAME, "state": "READY", "apiVersion": "V2"}
    assert place.end_run() == 75
    assert script.wait(timeout=100) == 75
    assert machine.record.count("signalled") == 1
    assert machine.runs("never") == 0
    assert len(machine.starts) == 1


@pytest.mark.long
def test_the_note_is_enough_where_ssh_does_not_lead(machine: Machine) -> None:
    script = machine.boots("wait")
    until(lambda: machine.starts)
    machine.bucket("stage/stop").write_text("")
    assert script.wait(timeout=100) == 75
    assert machine.bucket("stage/exit-0").read_text() == "0 75\n"


@pytest.mark.long
@pytest.mark.parametrize("lacks", ["no-uv", "no-pip", "old-package"])
def test_what_cannot_be_installed_ends_the_job(machine: Machine, lacks: str) -> None:
    (machine.folder / f"record.{lacks}").touch()
    assert machine.runs(0) == 1
    assert machine.starts == []
    assert machine.bucket("stage/exit-0").read_text() == "0 1\n"
    log = next(machine.bucket("stage/log").iterdir()).read_text()
    assert "this machine cannot start the run" in log
    assert lacks == "old-package" or "startup: again in 2 s" in log
    (machine.folder / f"record.{lacks}").unlink()
    assert machine.runs(0) == 0, "a boot after the end does nothing"
    assert machine.starts == []


@pytest.fixture
def slow_installation(machine: Machine) -> Path:
    """A file that ends an installation."""
    pip, end = machine.folder / "bin" / "python3", machine.folder / "go-on"
    pip.write_text(f"#!/bin/bash\nuntil [ -e {end} ]; do /bin/sleep 0.05; done\n{PIP}")
    return end


@pytest.mark.long
def test_the_log_is_copied_while_the_package_is_installed(
    machine: Machine, slow_installation: Path
) -> None:
    script = machine.boots(0)
    until(lambda: list(machine.bucket("stage/log").glob("*")))
    [log] = machine.bucket("stage/log").iterdir()
    first = log.stat().st_mtime_ns
    until(lambda: log.stat().st_mtime_ns > first)
    assert "has booted" in log.read_text()
    slow_installation.touch()
    assert script.wait(timeout=100) == 0
    assert [log] == list(machine.bucket("stage/log").iterdir())


@pytest.mark.long
def test_a_run_that_is_cancelled_before_its_start_does_not_start(
    machine: Machine, slow_installation: Path
) -> None:
    script = machine.boots("never")
    until(lambda: list(machine.bucket("stage/log").glob("*")))
    machine.bucket("stage/stop").write_text("")
    slow_installation.touch()
    assert script.wait(timeout=100) == 75
    assert machine.starts == []
    assert machine.bucket("stage/exit-0").read_text() == "0 75\n"


@pytest.mark.long
def test_a_shutdown_during_the_installation_leaves_it_to_the_next_boot(
    machine: Machine, slow_installation: Path
) -> None:
    script = machine.boots("never")
    until(lambda: list(machine.bucket("stage/log").glob("*")))
    script.send_signal(signal.SIGTERM)
    assert script.wait(timeout=100) == -signal.SIGTERM
    os.killpg(script.pid, signal.SIGKILL)  # as systemd does with the rest of a unit
    slow_installation.touch()
    assert not machine.bucket("stage/exit-0").exists()
    assert machine.runs(0) == 0
    assert machine.bucket("stage/exit-0").read_text() == "0 0\n"


@pytest.mark.long
def test_a_machine_that_knows_nothing_of_itself_ends_the_job(machine: Machine) -> None:
    machine.plane.metadata.clear()
    assert machine.runs("never") == 1
    assert machine.starts == []
    name = f"exit-{platform.node()}"
    assert machine.bucket(f"stage/{name}").read_text() == f"{platform.node()} 1\n"


@pytest.mark.long
@pytest.mark.parametrize("changed", [False, True])
def test_an_installer_with_another_content_is_not_used(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """With the real pip."""
    wheel = machine.folder / "uv-1-py3-none-any.whl"
    about = "Metadata-Version: 2.1\nName: uv\nVersion: 1\n"
    with zipfile.ZipFile(wheel, "w") as content:
        program = zipfile.ZipInfo("uv-1.data/scripts/uv")
        program.external_attr = 0o100755 << 16
        content.writestr(program, UV)
        content.writestr("uv-1.dist-info/METADATA", about)
        content.writestr("uv-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        content.writestr("uv-1.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes() + b"\0" * changed).hexdigest()
    monkeypatch.setattr(tpu_startup, "UV", f"uv @ {wheel.as_uri()}#sha256={digest}")
    pip = machine.folder / "bin" / "python3"
    pip.write_text(f'#!/bin/sh\nmkdir tried && exec {sys.executable} "$@"\n')
    assert machine.runs(0) == changed
    assert any(line.startswith("uv venv") for line in machine.record) is not changed
    log = next(machine.bucket("stage/log").iterdir()).read_text()
    assert ("DO NOT MATCH THE HASHES" in log) is changed


@pytest.mark.parametrize("name", STARTUPS)
def test_nothing_that_is_downloaded_goes_into_a_shell(name: str) -> None:
    script = STARTUPS[name].render()
    assert not re.search(r"(curl|wget)[^|\n]*\|\s*(\\?\n)?[^\n]*\b(ba)?sh\b", script)
    downloads = {each.partition("/")[0] for each in re.findall(r"https://(\S+)", script)}
    # Packages of gcsfuse are signed.
    signed = {"packages.cloud.google.com"} if STARTUPS[name].mounts else set()
    assert downloads == {"files.pythonhosted.org"} | signed
    assert re.search(r"https://files\.pythonhosted\.org/\S+\.whl#sha256=[0-9a-f]{64}'", script)


@pytest.mark.parametrize("name", STARTUPS)
def test_root_executes_no_file_of_the_user(name: str) -> None:
    script = replace(STARTUPS[name], user="samestep").render()
    lines = [line for line in script.replace("\\\n", " ").splitlines() if "$home/env/" in line]
    assert len(lines) == 3  # pip, the check of the package, and its command
    assert all('"${become[@]}" "$home/env/' in line for line in lines)


def test_a_usual_script_can_be_read() -> None:
    usual = replace(STARTUPS["plain"], user="samestep").render()
    assert usual.count("\n") < 60


@pytest.mark.long
def test_a_secret_that_is_not_there_ends_the_job(machine: Machine) -> None:
    (machine.folder / "secrets" / "wandb").unlink()
    assert machine.runs(0) == 1
    assert machine.starts == []


@pytest.mark.long
def test_a_new_machine_gets_the_runs_folder(machine: Machine) -> None:
    machine.bucket("kept").mkdir()
    (machine.bucket("kept") / "metrics.jsonl").write_text("before\n")
    assert machine.runs(0) == 0
    assert (machine.bucket("kept") / "metrics.jsonl").read_text() == "before\nmetrics\n"


@pytest.mark.long
def test_a_folder_that_comes_back_slowly_is_not_kept_by_halves(machine: Machine) -> None:
    machine.bucket("kept").mkdir()
    kept = machine.bucket("kept") / "metrics.jsonl"
    kept.write_text("before\n")
    gcloud = machine.folder / "bin" / "gcloud"
    rest = gcloud.read_text().partition("\n")[2]
    half = '{ : > "${@: -1}/metrics.jsonl"; /bin/sleep 1; }'
    gcloud.write_text(f'#!/bin/bash\n[[ "$*" != *"gs://bucket/kept "* ]] || {half}\n{rest}')
    assert machine.runs(0) == 0
    assert kept.read_text() == "before\nmetrics\n"


@pytest.mark.long
def test_a_bucket_that_does_not_answer_is_asked_again(machine: Machine) -> None:
    machine.bucket("kept").mkdir()
    kept = machine.bucket("kept") / "metrics.jsonl"
    kept.write_text("before\n")
    machine.bucket("stage/versions").write_text("torch==2.9.0\n")
    gcloud = machine.folder / "bin" / "gcloud"
    rest = gcloud.read_text().partition("\n")[2]
    first = f'mkdir "{machine.folder}/asked-$(tr -c "[:alnum:]\\n" - <<<"$*")" 2>/dev/null'
    fails = "{ echo 'ERROR: ConnectionError' >&2; exit 1; }"
    gcloud.write_text(f"#!/bin/bash\n{first} && {fails}\n{rest}")
    assert machine.runs(0) == 0
    assert kept.read_text() == "before\nmetrics\n"
    assert machine.bucket("stage/exit-0").read_text() == "0 0\n"
    constraint = machine.work / "home" / "stage" / "versions"
    assert constraint.read_text() == "torch==2.9.0\n"
    asked = [each.name for each in machine.folder.glob("asked-*")]
    assert len(asked) >= 8
    for each in machine.folder.glob("asked-*-rsync-*"):
        each.rmdir()
    assert machine.runs("never") == 0
    assert len(machine.starts) == 1, "the run has ended, though the bucket did not say so at once"


@pytest.mark.long
@pytest.mark.parametrize("machine", ["strange"], indirect=True)
def test_strange_names_are_names(machine: Machine) -> None:
    machine.environment = {**machine.environment, "RUN_FOLDER": machine.startup.output}
    assert machine.runs(0) == 0
    environment = dict(
        each.partition("=")[::2]
        for each in (machine.folder / "record.environment").read_text().split("\0")
    )
    assert environment["STRANGE"] == STRANGE
    stage = machine.folder / "buckets" / machine.startup.staging.removeprefix("gs://")
    assert (stage / "exit-0").read_text() == "0 0\n"
    assert machine.bucket("kept it's/metrics.jsonl").read_text() == "metrics\n"
    assert not list(machine.folder.rglob("pwned"))
    assert (machine.work / "setup-ran-2").exists()
    [first, second] = [line for line in machine.record if line.startswith("gcsfuse")]
    assert first.endswith("--only-dir a folder/$(touch pwned) bucket /mnt/it's $(touch pwned)")
    assert second.endswith("other /whole")


@pytest.mark.long
@pytest.mark.parametrize("machine", ["package"], indirect=True)
def test_a_package_goes_below_the_snapshot(machine: Machine) -> None:
    assert machine.runs(0) == 0
    assert [line for line in machine.record if line.startswith("pip install")] == [
        "pip install --quiet samestep[tpu]==1.0; python_version > '3' --constraint "
        f"{machine.work}/home/stage/versions"
    ]
    environment = (machine.folder / "record.environment").read_text().split("\0")
    assert f"PYTHONPATH={machine.work}/home/code" in environment
    assert "USER=samestep" in environment
    assert [line for line in machine.record if line.startswith("useradd")] != []


@pytest.mark.long
@pytest.mark.parametrize("machine", ["wheel"], indirect=True)
def test_a_wheel_comes_from_a_bucket(machine: Machine) -> None:
    machine.bucket("wheels").mkdir()
    (machine.bucket("wheels") / "samestep-1.0-py3-none-any.whl").touch()
    assert machine.runs(0) == 0
    wheel = machine.work / "samestep-1.0-py3-none-any.whl"
    assert wheel.exists()
    assert any(line.startswith(f"pip install --quiet {wheel}[gcs,tpu] ") for line in machine.record)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_the_run_is_of_another_user(machine: Machine) -> None:
    (machine.folder / "bin" / "chown").unlink()
    # This Python may lie in a folder of root's. Only reading is allowed.
    may_read = "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
    setpriv = shutil.which("setpriv")
    (machine.folder / "bin" / "setpriv").write_text(f'#!/bin/sh\nexec {setpriv} {may_read} "$@"\n')
    for name in ("record", "record.codes", "record.environment", "record.user", "calls"):
        (machine.folder / name).touch()
        (machine.folder / name).chmod(0o666)
    subprocess.run(["chmod", "-R", "a+rwX", machine.folder / "buckets"], check=True)
    machine.folder.chmod(0o777)  # the gcloud of the tests writes there
    machine.startup = replace(machine.startup, user="daemon")
    script = machine.boots("wait")
    until(lambda: machine.starts and machine.bucket("kept/metrics.jsonl").exists())
    user, locked = (machine.folder / "record.user").read_text().split()
    assert user != "0"
    may_lock = subprocess.run(["bash", "-c", "ulimit -l unlimited"], capture_output=True)
    assert locked == "unlimited" or may_lock.returncode
    assert Path(f"/proc/{script.pid}").stat().st_uid != 0, "it has become the user's command"
    of_root = [each for each in machine.work.iterdir() if each.stat().st_uid == 0]
    assert {each.name for each in of_root} >= {"uv", "installed", "job.log"}
    machine.plane.metadata["preempted"] = "TRUE"
    assert script.wait(timeout=100) == 0
    assert machine.record[-1] == "signalled"
