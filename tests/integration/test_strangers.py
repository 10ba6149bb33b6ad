"""Every port of this project under attack: nothing is given away, nothing breaks, nothing grows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from urllib.parse import urlsplit

import pytest

from samestep.storage.keeper import Upload, request
from tests.integration import open_ports
from tests.strangers import Stranger, record
from tests.waiting import until
from trainer.elastic import secret
from trainer.elastic.rendezvous import Rendezvous

MOST_GROWTH = 24 * 2**20  # of the memory of a process


@dataclass(frozen=True)
class Ports:
    """A process with all ports, see `open_ports`."""

    process: subprocess.Popen[str]
    rendezvous: int
    keeper: int
    url: str
    folder: Path

    @property
    def web(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    @property
    def memory(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0])

    @property
    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def agent(self) -> Rendezvous:
        return Rendezvous(f"127.0.0.1:{self.rendezvous}", 2, 2, "train", self.folder)


@pytest.fixture
def ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ports]:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text(64 * "s")
    monkeypatch.setenv(secret.ENVIRONMENT, str(file))
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, open_ports.__file__, str(tmp_path / "run")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert process.stdout is not None
        opened = json.loads(process.stdout.readline())
        yield Ports(process, *opened["ports"], opened["url"], tmp_path / "run")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "count", [100, pytest.param(4000, marks=pytest.mark.chaos)], ids=["short", "long"]
)
def test_strangers_get_nothing_and_break_nothing(ports: Ports, tmp_path: Path, count: int) -> None:
    agent = ports.agent()
    recorded = record(agent._connect)  # what a rightful agent says, without being ready
    key, keeper = agent.derived_secret("keepers"), f"127.0.0.1 {ports.keeper}"
    content = os.urandom(200_000)

    def put() -> None:
        upload = Upload((keeper,), key, "blob")
        upload.write(content)
        upload.close()

    recorded_put = record(put)
    over = Event()

    def use_rightfully() -> int:
        served = 0
        while not over.is_set() or not served:
            assert request(keeper, key, "get", ["blob"], 0, 10**6)[1] == content
            with urllib.request.urlopen(f"{ports.url}data") as response:
                assert "secret loss" in response.read().decode()
            served += 1
        return served

    def attack(seed: int, count: int) -> list[Stranger]:
        agents, writers, browsers = (
            Stranger(seed, recorded),
            Stranger(seed, recorded_put),
            Stranger(seed),
        )
        with ThreadPoolExecutor(3) as pool:
            for done in (
                pool.submit(agents.attack_channel, ports.rendezvous, count),
                pool.submit(writers.attack_channel, ports.keeper, count),
                pool.submit(browsers.attack_web, ports.web, count),
            ):
                done.result()
        for each in (agents, writers, browsers):
            each.leave()
        return [agents, writers, browsers]

    with ThreadPoolExecutor(1) as pool:
        rightful = pool.submit(use_rightfully)
        try:
            first = attack(1, count)
            before = ports.memory
            second = attack(2, count)
            growth = ports.memory - before
        finally:
            over.set()
        assert rightful.result(60) >= 1
    strangers = first + second
    connections = sum(stranger.connections for stranger in strangers)
    messages = sum(stranger.messages for stranger in strangers)
    sys.stdout.write(
        f"{connections} connections, {messages} messages, {rightful.result()} rightful rounds, "
        f"memory {before / 2**20:.0f} MiB and {growth / 2**20:+.1f} MiB\n"
    )
    assert connections >= 6 * count * 0.9
    assert [stranger.accepted for stranger in strangers] == [[]] * 6
    assert growth < MOST_GROWTH
    until(lambda: ports.threads < 30, 10)
    # The round still starts, now that a second agent is ready, and its host is alive.
    joined = agent.join(1, cancelled=lambda: False)
    assert joined is not None
    assert joined.world_size == 2
    assert ports.process.poll() is None
    assert "Traceback" not in (tmp_path / "stderr").read_text()
