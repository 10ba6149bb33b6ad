"""The CPU is never taken in silence where there are GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from trainer.accelerators.detect import detect
from trainer.accelerators.kinds.cpu import CpuAccelerator

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="is about machines where torch finds no GPU"
)


def install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, prints: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{prints}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("cuda", "visible", "reason"),
    [
        (None, None, r"torch .* is a build for CPUs. Install one for CUDA"),
        ("13.0", "", "CUDA_VISIBLE_DEVICES hides them. Unset it"),
        ("13.0", None, r"CUDA 13\.0 cannot use them.* update the driver"),
    ],
)
def test_gpus_that_torch_cannot_use_are_named_with_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cuda: str | None,
    visible: str | None,
    reason: str,
):
    install_nvidia_smi(
        tmp_path, monkeypatch, "GPU 0: NVIDIA H100 (UUID: a)\\nGPU 1: NVIDIA H100 (UUID: b)\\n"
    )
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert isinstance(detect(), CpuAccelerator)
    (warning,) = caplog.messages
    assert "training on the CPU" in warning
    assert "nvidia-smi lists 2 (GPU 0: NVIDIA H100)" in warning
    assert re.search(reason, warning)


@pytest.mark.parametrize(
    "prints", ["", "NVIDIA-SMI has failed because it could not communicate with the driver"]
)
def test_without_gpus_there_is_nothing_to_warn_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, prints: str
):
    install_nvidia_smi(tmp_path, monkeypatch, prints)
    assert isinstance(detect(), CpuAccelerator)
    assert not caplog.messages
