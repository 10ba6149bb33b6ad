"""Networks that cannot be trusted: in parts, one-way, slow; frozen machines and wrong clocks.

The machines are namespaces (`network`). After each fault the run ends as one that nothing happened
to: the same losses and weights, and a ledger that proves it.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.chaos import network
from tests.chaos.network import PORT, SUBNET, Network
from tests.chaos.runs import assert_same_run
from tests.integration.commands import Samestep, children
from trainer.checkpoint import integrity
from trainer.monitoring.jsonl import read_rows

STEPS = 60
STEP_SECONDS = 0.25
SCHEDULE = "schedule.decay=constant"  # a run of fewer steps is then the start of a longer one
# What takes long on real machines, for tests that are not about how long it takes.
QUICK = {
    "trainer.checkpoint.lock._STALE_SECONDS": 4.0,
    "trainer.checkpoint.lock._RENEW_SECONDS": 1.0,
    "trainer.elastic.host._RENEW_SECONDS": 0.5,
    "trainer.elastic.host._SILENT_SECONDS": 2.0,
    "trainer.elastic.rounds.SILENT_SECONDS": 4.0,
    "trainer.elastic.rendezvous._GREETING_SECONDS": 2.0,
    "trainer.elastic.agent._LEAVE_SECONDS": 1.0,
}

why_not = network.why_not()
pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(why_not is not None, reason=str(why_not)),
]
CHAOS = (pytest.mark.chaos, pytest.mark.timeout(600))

Fault = Callable[[Network], None]


class Watched:
    """A run on a network, and what it writes.

    Attributes:
        rows: time and step of every row that the run has written, taken back or not.
    """

    def __init__(self, net: Network, experiment: str, folder: Path, steps: int = STEPS) -> None:
        self.net, self.folder = net, folder
        self.rows: set[tuple[float, int]] = set()
        self._settings = (
            experiment,
            f"output={folder}",
            f"training.steps={steps}",
            "training.micro_batch_size=50",
            "training.collective_timeout=20",
            SCHEDULE,
            "data.threads=0",
            "strategy=ddp",
            "checkpoint.every=5",
            "checkpoint.keep_last=3",
            f"objective={{kind: tests.chaos.paced, seconds: {STEP_SECONDS}}}",
            "--processes=1",
            f"--rendezvous={SUBNET}.1:{PORT}",
        )

    def start(self, elastic: str, *numbers: int) -> list[subprocess.Popen[bytes]]:
        return [
            self.net.machines[number].start("train", *self._settings, f"--elastic={elastic}")
            for number in numbers or self.net.machines
        ]

    @property
    def step(self) -> int:
        """The last step that the run has taken so far."""
        rows = read_rows(self.folder / "metrics.jsonl")
        found = {(row["time"], row["step"]) for row in rows if "train/loss" in row}
        self.rows |= found
        return max((step for _, step in found), default=0)

    @property
    def starts(self) -> int:
        return sum(1 for _ in read_rows(self.folder / "starts.jsonl"))

    def until(self, what: Callable[[], bool], seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def reach(self, step: int) -> None:
        self.until(lambda: self.step >= step)

    def end(self, commands: Sequence[subprocess.Popen[bytes]], seconds: float = 240) -> None:
        """Waits until the commands have ended, all of them well."""
        self.until(lambda: self.step < 0 or all(c.poll() is not None for c in commands), seconds)
        assert [command.returncode for command in commands] == [0] * len(commands), self.said()

    def said(self) -> str:
        """What the machines have said, for the message of a failed test."""
        return "\n".join(
            f"--- machine {number}\n{machine.stderr.read_text()[-4000:]}"
            for number, machine in self.net.machines.items()
            if machine.stderr.exists()
        )

    def outcome(self, fault: str, struck: float, before: int, sign: str, noticed: float) -> str:
        """A row of the table in docs/reliability.md."""
        new = min(when for when, step in self.rows if when > struck and step > before)
        redone = len(self.rows) - len({step for _, step in self.rows})
        return f"| {fault} | {sign} | {noticed - struck:.0f} | {new - struck:.0f} | {redone} |"


@pytest.fixture(scope="module")
def undisturbed(
    experiment_file: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """Returns the folder of a run of so many steps, by one process that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")

    def run(steps: int) -> Path:
        output = folder / str(steps)
        if not output.exists():
            settings = (f"output={output}", f"training.steps={steps}", "checkpoint.every=1000")
            micro = ("training.micro_batch_size=50", "data.threads=0", "strategy=single", SCHEDULE)
            command = [*network.SAMESTEP, "train", experiment_file, *settings, *micro]
            subprocess.run(command, check=True, capture_output=True)
        return output

    return run


def assert_survived(samestep: Samestep, run: Path, undisturbed: Path) -> None:
    """The same run, and one line of checkpoints."""
    assert_same_run(samestep, run, undisturbed)
    root = run / "checkpoints"
    steps = integrity.committed_steps(root)
    assert steps == sorted(set(steps))
    assert len(steps) <= 3
    for step in steps:
        integrity.check_content(integrity.step_folder(root, step))


def keep(record_property: Callable[[str, object], None], outcome: str) -> None:
    """Keeps a measurement, for docs/reliability.md: in the report, and in the file CHAOS_ROWS."""
    record_property("network", outcome)
    with Path(os.environ.get("CHAOS_ROWS", os.devnull)).open("a") as file:
        file.write(outcome + "\n")


def quicken(net: Network) -> None:
    for machine in net.machines.values():
        machine.environment["CHAOS_SECONDS"] = json.dumps(QUICK)


@pytest.mark.long
def test_the_machine_of_the_rendezvous_dies(
    experiment_file: str,
    undisturbed: Callable[[int], Path],
    samestep: Samestep,
    tmp_path: Path,
) -> None:
    """The short one: two machines, of which the other goes on."""
    with Network(2, tmp_path) as net:
        quicken(net)
        run = Watched(net, experiment_file, tmp_path / "run", steps=12)
        commands = run.start("1:2")
        run.reach(6)
        net.machines[1].close()
        run.end(commands[1:])
    assert_survived(samestep, tmp_path / "run", undisturbed(12))


def cut(*groups: Sequence[int]) -> Fault:
    return lambda net: net.part(groups)


def freeze(*numbers: int) -> Fault:
    def fault(net: Network) -> None:
        for number in numbers:
            net.machines[number].freeze()

    return fault


def disturb(number: int, **settings: float) -> Fault:
    return lambda net: net.disturb(number, {"to": 0, "from": 0, "delay": 0, **settings})


def lose_power(number: int) -> Fault:
    return lambda net: net.lose_power(number)


def heal(net: Network) -> None:
    """Ends every fault but the loss of power."""
    net.join()
    net.disturb(2, {"to": 0, "from": 0, "delay": 0})
    for machine in net.machines.values():
        machine.wake()


LOST = "rank .* is gone|another machine stopped"
FAULTS = {
    "network in parts, host \\| 3 others": ("2:4", cut([1], [2, 3, 4])),
    "network in parts, 3 with the host \\| 1": ("2:4", cut([1, 2, 3], [4])),
    "network in parts, 2 \\| 2": ("2:4", cut([1, 3], [2, 4])),
    "network in parts, 2 \\| 2, and 1 would be enough": ("1:4", cut([1, 3], [2, 4])),
    "nothing that a machine sends arrives": ("2:4", disturb(2, **{"from": 1.0})),
    "nothing arrives at a machine": ("2:4", disturb(2, to=1.0)),
    "the host is frozen and wakes up": ("2:4", freeze(1)),
    "a machine is frozen and wakes up": ("2:4", freeze(3)),
    "two machines are frozen and wake up": ("2:4", freeze(1, 4)),
    "the host loses power": ("2:4", lose_power(1)),
    "a machine loses power": ("2:4", lose_power(3)),
}


@pytest.mark.parametrize("fault", [pytest.param(name, marks=CHAOS) for name in FAULTS])
def test_a_fault(
    fault: str,
    experiment_file: str,
    undisturbed: Callable[[int], Path],
    samestep: Samestep,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """It lasts until the others have gone on; then the machine comes back."""
    elastic, strike = FAULTS[fault]
    with Network(4, tmp_path, bad=[2]) as net:
        run = Watched(net, experiment_file, tmp_path / "run")
        commands = run.start(elastic)
        run.reach(6)
        before, said = run.step, run.said()
        struck = time.time()
        strike(net)
        noticed: list[float] = []

        def has_new_step() -> bool:
            news = run.said()[len(said) :] if not noticed else ""
            if re.search(LOST, news):
                noticed.append(time.time())
            return run.step > before + 2 and run.starts > 1

        run.until(has_new_step)
        heal(net)
        lost = 1 if "loses power" in fault else 0
        gone = {"the host loses power": 0, "a machine loses power": 2}.get(fault)
        run.end([each for number, each in enumerate(commands) if number != gone])
        assert lost == (gone is not None)
        row = run.outcome(fault, struck, before, LOST, noticed[0] if noticed else struck)
        keep(record_property, row)
    assert_survived(samestep, tmp_path / "run", undisturbed(STEPS))


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", ["delay of 50 ms", "loss of 5 in 100 frames", "2 megabit a second"]
)
def test_a_slow_network_is_no_fault(
    name: str,
    experiment_file: str,
    undisturbed: Callable[[int], Path],
    samestep: Samestep,
    tmp_path: Path,
) -> None:
    """The run only takes longer: nothing is started again."""
    with Network(4, tmp_path, bad=[2]) as net:
        run = Watched(net, experiment_file, tmp_path / "run", steps=20)
        commands = run.start("4")
        run.reach(4)
        if name.startswith("delay"):
            disturb(2, delay=0.05)(net)
        elif name.startswith("loss"):
            disturb(2, **{"to": 0.05, "from": 0.05})(net)
        else:
            net.limit(3, "2mbit")
        run.end(commands)
        assert run.starts == 1
    assert_survived(samestep, tmp_path / "run", undisturbed(20))


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_wrong_clocks(
    experiment_file: str,
    undisturbed: Callable[[int], Path],
    samestep: Samestep,
    tmp_path: Path,
) -> None:
    """They are a day ahead and a day behind; the host is lost."""
    with Network(3, tmp_path) as net:
        quicken(net)
        for number, days in {1: 1, 2: -1}.items():
            net.machines[number].environment["CHAOS_SKEW"] = str(86400 * days)
        run = Watched(net, experiment_file, tmp_path / "run", steps=20)
        commands = run.start("2:3")
        run.reach(6)
        net.lose_power(1)
        run.end(commands[1:])
    assert_survived(samestep, tmp_path / "run", undisturbed(20))


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_random_partitions(
    experiment_file: str,
    undisturbed: Callable[[int], Path],
    samestep: Samestep,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Up to 200, one after another, for at most CHAOS_MINUTES (default 20)."""
    generator, began = random.Random(0), time.monotonic()
    steps, count = 5000, 0
    minutes = float(os.environ.get("CHAOS_MINUTES", "20"))
    with Network(4, tmp_path, bad=[2]) as net:
        quicken(net)
        run = Watched(net, experiment_file, tmp_path / "run", steps=steps)
        commands = run.start("2:4")
        run.reach(2)
        while count < 200 and time.monotonic() - began < 60 * minutes:
            machines = [1, 2, 3, 4]
            generator.shuffle(machines)
            size = generator.randint(1, 3)
            net.part([machines[:size], machines[size:]])
            time.sleep(generator.uniform(0, 12))
            count += 1
            if generator.random() < 0.5:
                net.join()
                time.sleep(generator.uniform(0, 6))
        net.join()
        assert all(command.poll() is None for command in commands), run.said()
        last = run.step
        run.until(lambda: run.step > last)
        for command in commands:
            for agent in children(command.pid):  # of `nsenter`, which would not pass a signal on
                os.kill(agent, signal.SIGTERM)
        run.until(lambda: all(command.poll() is not None for command in commands))
        assert count > 3
        keep(record_property, f"{count} partitions, {run.starts} starts, {run.step} steps")
    taken = max(integrity.committed_steps(tmp_path / "run" / "checkpoints"))
    expected = undisturbed(taken)
    assert_survived(samestep, tmp_path / "run", expected)


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["firewall", "interface"])
def test_ranks_that_cannot_reach_each_other_say_so(
    experiment_file: str, tmp_path: Path, fault: str
) -> None:
    """Machines 2 and 3 reach machine 1, which has the store, but not each other."""
    with Network(3, tmp_path) as net:
        for number, machine in net.machines.items():
            machine.environment = {
                "RANK": str(number - 1),
                "WORLD_SIZE": "3",
                "LOCAL_RANK": "0",
                "MASTER_ADDR": f"{SUBNET}.1",
                "MASTER_PORT": str(PORT),
            }
        if fault == "firewall":  # frames to the other one go nowhere, without an answer
            for number, other in ((2, 3), (3, 2)):
                nowhere = ["lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0"]
                address = f"{SUBNET}.{other}"
                net.machines[number].run("ip", "neigh", "replace", address, *nowhere)
        else:
            machine = net.machines[3]
            machine.run("ip", "link", "add", "other0", "type", "veth", "peer", "name", "other1")
            machine.run("ip", "address", "add", "10.99.3.1/24", "dev", "other0")
            for name in ("other0", "other1"):
                machine.run("ip", "link", "set", name, "up")
            machine.environment["GLOO_SOCKET_IFNAME"] = "other0"
        settings = [f"output={tmp_path / 'run'}", "strategy=ddp", "training.global_batch_size=6"]
        commands = [
            machine.start("train", experiment_file, *settings) for machine in net.machines.values()
        ]
        codes = network.wait(commands, 240)
        said = "".join(machine.stderr.read_text() for machine in net.machines.values())
    assert 0 not in codes
    host = "10.99.3.1" if fault == "interface" else rf"{re.escape(SUBNET)}\.[23]"
    assert re.search(rf"error: rank \d .* cannot reach rank [12] on .* at {host}:\d+ \(", said), (
        said
    )
    assert "Traceback" not in said
