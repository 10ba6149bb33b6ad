"""TPUs without a chip: how they are found, what is taken for them, and what is said where that
cannot be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from samestep.errors import ConfigError
from samestep.findings import Finding
from trainer.accelerators import chips, detect
from trainer.accelerators.kinds import cpu, tpu, xla
from trainer.inspect.doctor import checks, devices

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="is about machines where torch finds no GPU"
)

NETWORK_CARD = ("0x1ae0", "0x0042")
V5E = ("0x1ae0", "0x0063")

# What the package does where there are two chips, as far as torch does it without them.
TORCH_TPU = """
import types
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

module = types.ModuleType("torch.tpu")
module.device_count = lambda: 2
module.get_amp_supported_dtype = lambda: [torch.bfloat16]
_setup_privateuseone_for_python_backend("tpu", module)
"""

TRY_OUT = """
import json, os, torch
from trainer.accelerators import detect
from trainer.accelerators.kinds import tpu
from samestep.errors import ConfigError
from trainer.strategies.kinds import deepspeed, single, xla_spmd
from trainer.strategies.world import World

def refusal(**environment):
    os.environ |= environment
    try:
        detect.detect()
    except ConfigError as error:
        return str(error)

device, world = tpu.Config().build(), World.start(10)
single.Config().build(device, world, "fp32")
try:
    xla_spmd.Config().build(device, world, "fp32")
except ConfigError as error:
    of_xla = str(error)
try:
    deepspeed.Config().build(device, world, "fp32")
except ConfigError as error:
    of_deepspeed = str(error)
with device.autocast("bf16"):
    autocast = torch.is_autocast_enabled("tpu")
products = [torch.get_float32_matmul_precision()]
tpu.Config(bf16_products=True).build()
print(json.dumps({
    "description": device.description, "type": device.device.type, "backend": device.collective_backend,
    "autocast": autocast, "products": [*products, torch.get_float32_matmul_precision()], "of_xla": of_xla,
    "of_deepspeed": of_deepspeed,
    "no launcher": refusal(WORLD_SIZE="2", LOCAL_RANK="1"),
    "third of two": refusal(WORLD_SIZE="3", LOCAL_RANK="2"),
    "launcher": refusal(LOCAL_RANK="1", TORCH_TPU_TOPOLOGY="1,2,1", TORCH_TPU_SLICEBUILDER_ADDRESSES="a:1,b:2"),
}))
"""  # noqa: E501


def install(folder: Path, package: str, version: str, source: str = "") -> None:
    information = folder / f"{package}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    )
    (folder / f"{package}.py").write_text(source)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the /dev and the PCI bus of a machine, where nothing is at first."""
    monkeypatch.setattr(chips, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(chips, "PCI", tmp_path / "pci")
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    return tmp_path


def plug_in(machine: Path, cards: list[tuple[str, str]], nodes: tuple[str, ...]) -> None:
    for slot, card in enumerate(cards):
        folder = machine / "pci" / f"0000:00:{slot:02}.0"
        folder.mkdir(parents=True)
        for file, content in zip(("vendor", "device"), card, strict=True):
            (folder / file).write_text(f"{content}\n")
    for node in nodes:
        (machine / "dev" / node).parent.mkdir(parents=True, exist_ok=True)
        (machine / "dev" / node).touch()


@pytest.mark.parametrize(
    ("cards", "nodes", "count", "name", "tflops"),
    [
        ([], (), 0, None, None),
        (
            [NETWORK_CARD],
            ("vfio/vfio", "vfio/3"),
            0,
            None,
            None,
        ),  # a machine of Google's that lends another card
        (
            [NETWORK_CARD, *[V5E] * 4],
            ("vfio/vfio", "vfio/0", "vfio/1", "vfio/2", "vfio/3"),
            4,
            "v5e",
            197,
        ),
        ([("0x1ae0", "0x005e")] * 2, ("accel0", "accel1", "accel/other"), 2, "v4", 275),
        ([V5E], (), 0, "v5e", 197),  # inside a container that does not get it
    ],
)
def test_chips_are_counted_and_named(
    machine: Path,
    cards: list[tuple[str, str]],
    nodes: tuple[str, ...],
    count: int,
    name: str | None,
    tflops: float | None,
):
    plug_in(machine, cards, nodes)
    assert (chips.count(), chips.name()) == (count, name)
    assert chips.peak_flops("bf16") == (tflops and tflops * 1e12)
    assert chips.peak_flops("fp32") is None


def test_the_software_that_is_installed_decides_how_a_chip_is_used(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.syspath_prepend(machine)
    assert isinstance(detect.best(), cpu.Config)
    install(machine, "torch_xla", "2.9.0")
    assert isinstance(detect.best(), cpu.Config)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert isinstance(detect.best(), xla.Config)
    monkeypatch.delenv("PJRT_DEVICE")
    plug_in(machine, [V5E], ("vfio/0",))
    assert isinstance(detect.best(), xla.Config)
    install(machine, "torch_tpu", "0.2.0")
    assert isinstance(detect.best(), tpu.Config)
    assert "torch_xla" not in sys.modules
    assert "torch_tpu" not in sys.modules


def test_chips_without_software_are_named(machine: Path, caplog: pytest.LogCaptureFixture):
    plug_in(machine, [V5E], ("vfio/0",))
    assert isinstance(detect.detect(), cpu.CpuAccelerator)
    (warning,) = caplog.messages
    assert "this machine has TPUs: pip install 'torch==2.9.*'" in warning
    (finding,) = devices.available(None)
    assert (finding.state, finding.fix) == (
        "failed",
        "pip install 'torch==2.9.*' 'torch-xla[pallas,tpu]==2.9.*', in an environment of its own",
    )


def test_what_is_missing_is_said_with_the_fix(machine: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        ConfigError,
        match=r"needs TorchTPU .* pip install samestep 'torch_tpu>=0.2'.*accelerator=xla",
    ):
        tpu.Config().build()
    monkeypatch.syspath_prepend(machine)
    install(machine, "torch_tpu", "0.1.1")
    with pytest.raises(ConfigError, match=r"needs TorchTPU 0\.2 or newer, and this is 0\.1\.1"):
        tpu.Config().build()
    (machine / "torch_tpu-0.1.1.dist-info").rename(machine / "torch_tpu-0.2.0.dist-info")
    metadata = machine / "torch_tpu-0.2.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.1.1", "0.2.0"))
    with pytest.raises(ConfigError, match="TorchTPU finds no chip on this machine"):
        tpu.Config().build()


def test_the_doctor_multiplies_on_the_chip(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(detect, "best", tpu.Config)
    monkeypatch.setattr(tpu.Config, "build", lambda _: SimpleNamespace(description="a chip"))

    def tried(on, subject, precision):
        yield Finding(subject, "ok", f"{precision} on {on.description}")

    monkeypatch.setattr(devices, "product", tried)
    found = {finding.subject: finding.found for finding in checks.examine(None, None)}
    assert found["devices"] == "a chip"
    assert found["device"] == "bf16 on a chip"
    assert "all-reduce" not in found


@pytest.mark.long
def test_with_chips_the_device_is_taken_and_one_a_process(machine: Path):
    plug_in(machine, [V5E, V5E], ("vfio/0", "vfio/1"))
    install(machine, "torch_tpu", "0.2.0", TORCH_TPU)
    (machine / "try_out.py").write_text(
        f"from pathlib import Path\nfrom trainer.accelerators import chips\n"
        f"chips.DEVICES, chips.PCI = Path({str(machine / 'dev')!r}), "
        f"Path({str(machine / 'pci')!r})\n{TRY_OUT}"
    )
    found = subprocess.run(
        [sys.executable, machine / "try_out.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{machine}:{Path(__file__).parents[3]}"},
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    got = json.loads(found.stdout)
    assert got["description"] == "TPU v5e, TorchTPU 0.2.0"
    assert (got["type"], got["backend"], got["autocast"]) == ("tpu", "tpu_dist", True)
    assert got["products"] == ["highest", "medium"]
    assert "strategy xla_spmd does not fit TPU v5e" in got["of_xla"]
    assert got["of_deepspeed"].startswith("strategy deepspeed does not fit TPU v5e")
    assert got["of_deepspeed"].endswith(". Use strategy=fsdp.")
    assert 'eval "$(python -m torch.tpu.distributed' in got["no launcher"]
    assert (
        "process 2 of this machine, counted from 0, has no TPU chip: there are 2"
        in got["third of two"]
    )
    assert got["launcher"] is None
