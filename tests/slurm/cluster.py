"""A Slurm of three virtual nodes on this machine.

Real daemons, in a folder of their own, without root's services.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.ports import free_port

NODES = (
    "127.0.0.1",
    "127.0.0.2",
    "127.0.0.3",
)  # each is reached at an address of its own, by its own name
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=5
SlurmctldTimeout=10
MessageTimeout=5
KillWait=30
InactiveLimit=0
MinJobAge=300
RebootProgram=/bin/true
JobRequeue=1
{nodes}
PartitionName=debug Nodes=127.0.0.[1-3] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


@dataclass
class Slurm:
    """The cluster: its folder, and its daemons by node."""

    root: Path
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, *command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def start_node(self, name: str) -> None:
        (self.root / "spool" / name).mkdir(parents=True, exist_ok=True)
        self.nodes[name] = subprocess.Popen(
            ["slurmd", "-D", "-N", name, "-f", str(self.root / "slurm.conf")],
            stderr=subprocess.DEVNULL,
        )

    def kill_node(self, name: str) -> None:
        """As when its power fails: the daemon, and what it has started."""
        self.nodes[name].kill()
        for pid in _descendants_of_steps(name):
            with suppress(ProcessLookupError):  # it has died with the one before
                os.kill(pid, signal.SIGKILL)

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, *states: str, seconds: float = 120) -> dict[str, str]:
        """Returns when a job is in one of the states."""
        until = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < until, job
            time.sleep(0.2)
        return job

    def wait_until_idle(self) -> None:
        """Returns when all nodes are there, and free."""
        until = time.monotonic() + 120
        while len(
            self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split()
        ) < len(NODES):
            assert time.monotonic() < until, self.run("sinfo", "--Node", "--long")
            time.sleep(0.1)


def _descendants_of_steps(name: str) -> list[int]:
    """Processes of a node's job steps, which know its name from their environment.

    And slurmstepd, from its own.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"SLURMD_NODENAME={name}".encode() in environment:
            found.append(int(process.name))
    return found


@contextmanager
def started(root: Path) -> Iterator[Slurm]:
    """Starts a cluster; stops it and all it has started in the end."""
    for name in ("run", "state", "spool", "log"):
        (root / name).mkdir(parents=True)
    key = root / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    ports = [free_port() for _ in range(1 + len(NODES))]
    lines = [
        f"NodeName={name} NodeHostname=localhost NodeAddr={name} Port={port} CPUs=4 "
        "RealMemory=4000 State=UNKNOWN"
        for name, port in zip(NODES, ports[1:], strict=True)
    ]
    (root / "slurm.conf").write_text(
        CONFIGURATION.format(root=root, controller=ports[0], nodes="\n".join(lines))
    )
    os.environ["SLURM_CONF"] = str(root / "slurm.conf")
    slurm = Slurm(root)
    with ExitStack() as daemons:
        daemons.callback(os.environ.pop, "SLURM_CONF")
        munge = [
            f"--{name}={root}/run/munge.{name}" for name in ("socket", "pid-file", "seed-file")
        ]
        log = f"--log-file={root}/log/munge.log"
        munged = subprocess.Popen(
            ["munged", "--force", "--foreground", f"--key-file={key}", *munge, log],
            stderr=subprocess.DEVNULL,
        )
        daemons.callback(_stop, munged)
        while not (root / "run" / "munge.socket").exists():
            assert munged.poll() is None, (root / "log" / "munge.log").read_text()
            time.sleep(0.02)
        controller = subprocess.Popen(
            ["slurmctld", "-D", "-c", "-f", str(root / "slurm.conf")], stderr=subprocess.DEVNULL
        )
        daemons.callback(_stop, controller)
        daemons.callback(lambda: [_stop(node) for node in slurm.nodes.values()])
        for name in NODES:
            slurm.start_node(name)
        daemons.callback(_cancel_all, slurm)
        slurm.wait_until_idle()
        yield slurm


def _cancel_all(slurm: Slurm) -> None:
    slurm.run("scancel", "--signal=KILL", "--full", "--user=root")
    slurm.run("scancel", "--user=root")
    until = time.monotonic() + 40
    while slurm.run("squeue", "--noheader").strip() and time.monotonic() < until:
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def missing() -> str | None:
    """Why there can be no cluster here."""
    absent = [name for name in ("munged", "slurmctld", "slurmd") if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)} here: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "the virtual nodes of Slurm need root"
