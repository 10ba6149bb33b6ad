"""What is said where torch-xla is missing or does not fit; the rest is in tests/xla."""

from __future__ import annotations

import pytest
import torch

from samestep.errors import ConfigError
from trainer.accelerators.kinds import xla


def test_without_torch_xla_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "version_of", {}.get)
    with pytest.raises(
        ConfigError, match=r"needs torch-xla and its torch\. .* pip install 'torch==2"
    ):
        xla.Config().build()


def test_another_torch_is_refused_before_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would fail with an undefined symbol."""
    monkeypatch.setattr(xla, "version_of", {"torch-xla": "2.9.0"}.get)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    with pytest.raises(
        ConfigError,
        match=r"torch-xla 2.9.0 works with torch 2.9 alone, and this is torch 2.13.0\+cpu\.",
    ):
        xla.Config().build()


def test_no_chip_is_said_before_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "version_of", {"torch-xla": "2.9.0"}.get)
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    monkeypatch.setattr(xla.chips, "count", lambda: 0)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    with pytest.raises(ConfigError, match=r"finds no TPU on this machine\. .* PJRT_DEVICE=CPU"):
        xla.Config().build()
