"""Machines in Linux namespaces, on a network that can be cut, slowed down and made to lose frames.

A machine is a network namespace and a process namespace, held by its first process; so is the
switch that they are connected to. None has a name: when the processes end, the kernel removes the
namespaces and all that is in them. Each process ends with the one that started it, so nothing is
left even if the test is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

SAMESTEP = (sys.executable, "-m", "samestep.cli")
SUBNET = "10.231.77"
PORT = 29400

_PR_SET_PDEATHSIG = 1


def why_not() -> str | None:
    """Returns why there can be no such machines here; None if there can."""
    if os.getuid() != 0:
        return "namespaces of a network need root"
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)} (Debian: iproute2, util-linux)"
    probe = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "type", "veth"], capture_output=True
    )
    return None if probe.returncode == 0 else "this kernel makes no network namespaces"


class Namespace:
    """A network and a process namespace, for as long as the context lasts.

    Attributes:
        pid: of its first process.
        net: the file of its network namespace.
    """

    def __init__(self) -> None:
        command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._popen = subprocess.Popen(
            [*command, "sh", "-c", "echo; exec sleep infinity"],
            stdout=subprocess.PIPE,
            preexec_fn=_end_with_parent,
        )
        assert self._popen.stdout is not None
        self._popen.stdout.readline()  # from here on, the first process is there
        children = Path(f"/proc/{self._popen.pid}/task/{self._popen.pid}/children").read_text()
        self.pid = int(children)
        self.net = f"/proc/{self.pid}/ns/net"
        self.run("ip", "link", "set", "lo", "up")

    def run(self, *command: str) -> None:
        """Runs a command that configures the network."""
        subprocess.run(["nsenter", f"--net={self.net}", *command], check=True, capture_output=True)

    def processes(self) -> list[int]:
        """The processes in it, but for the first."""
        if not Path(self.net).exists():  # it has lost power
            return []
        mine, found = os.readlink(self.net), []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(process / "ns" / "net") == mine:
                    found.append(int(process.name))
        return [pid for pid in found if pid != self.pid]

    def freeze(self) -> None:
        """Stops all processes in it, but for the first."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def wake(self) -> None:
        """Lets all processes go on."""
        # `nsenter` stops itself when it finds its child stopped, perhaps after it was continued.
        for _ in range(20):
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            time.sleep(0.05)

    def close(self) -> None:
        """Ends all processes in it at once."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()


class Machine(Namespace):
    """A machine on the network.

    Attributes:
        address: IPv4 address.
        stderr: what its commands have said.
    """

    def __init__(self, number: int, folder: Path) -> None:
        super().__init__()
        self.address = f"{SUBNET}.{number}"
        self.stderr = folder / f"machine-{number}.log"
        self.commands: list[subprocess.Popen[bytes]] = []
        self.environment: dict[str, str] = {}

    def start(self, *arguments: object) -> subprocess.Popen[bytes]:
        """Starts the command samestep in the background."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TMPDIR": str(self.stderr.parent / "temporary"),
            "PYTHONPATH": str(Path(__file__).parents[2]),  # for `tests`, and the code beside it
            **self.environment,
        }
        command = ["nsenter", f"--target={self.pid}", "--net", "--pid", "--mount"]
        with self.stderr.open("a") as stderr:
            started = subprocess.Popen(
                [*command, sys.executable, "-m", "tests.chaos.machine", *map(str, arguments)],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        self.commands.append(started)
        return started

    def said(self, text: str) -> bool:
        return self.stderr.exists() and text in self.stderr.read_text()


class Network:
    """A switch and machines; use as a context.

    Args:
        count: number of machines, which have the numbers 1 to `count`.
        folder: for what the machines say.
        bad: numbers of machines whose link may lose and delay frames.
    """

    def __init__(self, count: int, folder: Path, bad: Iterable[int] = ()) -> None:
        (folder / "temporary").mkdir(exist_ok=True)
        self._stack = ExitStack()
        self._switch = Namespace()
        self._stack.callback(self._switch.close)
        self.machines = {}
        self._links: dict[int, subprocess.Popen[str]] = {}
        for number in range(1, count + 1):
            self._switch.run("ip", "link", "add", f"group{number}", "type", "bridge")
            self._switch.run("ip", "link", "set", f"group{number}", "up")
        for number in range(1, count + 1):
            machine = Machine(number, folder)
            self._stack.callback(machine.close)
            self.machines[number] = machine
            self._connect(number, machine, number in set(bad))
        self.join()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for machine in self.machines.values():
            for command in machine.commands:
                command.wait()

    def _connect(self, number: int, machine: Machine, is_bad: bool) -> None:
        port = f"port{number}"
        if is_bad:
            link = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("bad_link.py")),
                    self._switch.net,
                    machine.net,
                    port,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=_end_with_parent,
            )
            self._links[number] = link
            self._stack.callback(_close_link, link)
            assert link.stdout is not None
            assert link.stdout.readline() == "ready\n"
        else:
            pair = ["type", "veth", "peer", "name", "eth0", "netns", str(machine.pid)]
            self._switch.run("ip", "link", "add", port, *pair)
        self._switch.run("ip", "link", "set", port, "up")
        machine.run("ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
        machine.run("ip", "link", "set", "eth0", "up")

    def join(self) -> None:
        """All machines reach each other."""
        self.part([list(self.machines)])

    def part(self, groups: Sequence[Sequence[int]]) -> None:
        """Only machines of the same group reach each other; a machine in no group reaches none."""
        connected = {number: index for index, group in enumerate(groups, 1) for number in group}
        for number in self.machines:
            index = connected.get(number, number)
            state = "up" if number in connected else "down"
            self._switch.run("ip", "link", "set", f"port{number}", "master", f"group{index}")
            self._switch.run("ip", "link", "set", f"port{number}", state)

    def disturb(self, number: int, settings: Mapping[str, float]) -> None:
        """Sets loss and delay of a bad link, see `bad_link`."""
        stdin = self._links[number].stdin
        assert stdin is not None
        stdin.write(json.dumps(settings) + "\n")
        stdin.flush()

    def limit(self, number: int, rate: str) -> None:
        """Limits what a machine receives, such as 10mbit."""
        limit = ["tbf", "rate", rate, "burst", "16kb", "latency", "200ms"]
        self._switch.run("tc", "qdisc", "add", "dev", f"port{number}", "root", *limit)

    def lose_power(self, number: int) -> None:
        """A machine is gone at once: the others hear nothing of it any more."""
        self._switch.run("ip", "link", "set", f"port{number}", "down")
        self.machines[number].close()


def wait(commands: Iterable[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Returns the exit codes of commands."""
    deadline = time.monotonic() + seconds
    return [command.wait(max(0.1, deadline - time.monotonic())) for command in commands]


def _close_link(link: subprocess.Popen[str]) -> None:
    link.kill()
    link.wait()
    for pipe in (link.stdin, link.stdout):
        if pipe is not None:
            pipe.close()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
