"""Kinds that installed packages add, and the names of modules in strings."""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest

from samestep.config import Kinds, decode, kind_name
from samestep.errors import ConfigError
from tests.distributions import write_distribution

ROOT = Path(__file__).parents[4]
SCHEDULE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Config:
    rate: float
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with two kinds of optimizers, one of them named as one of ours."""
    kinds = dict.fromkeys(("slow", "adamw", "adamw-scale"), "plugin_slow")
    kinds["gone"] = "plugin_gone"
    write_distribution(tmp_path, "plugin", {"trainer.optim.kinds": kinds})
    (tmp_path / "plugin_slow.py").write_text(SCHEDULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("plugin")
def test_a_kind_of_an_installed_package_is_decoded_and_listed() -> None:
    kinds = Kinds("trainer.optim.kinds")
    assert "plugin_slow" not in sys.modules
    assert {"slow", "adamw"} <= set(kinds.available())
    assert "plugin_slow" not in sys.modules
    decoded = decode(Annotated[Any, kinds], {"kind": "slow", "rate": 0.5}, "optimizer")
    assert (type(decoded).__module__, decoded.rate) == ("plugin_slow", 0.5)
    assert kinds.kind_of(decoded) == "slow"  # so a stored experiment can be read again
    assert kind_name(decoded) == "slow"


@pytest.mark.usefixtures("plugin")
def test_messages_name_a_kind_as_its_user_has_written_it(tmp_path: Path) -> None:
    kinds = Kinds("trainer.optim.kinds")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "fast.py").write_text(SCHEDULE)
    for kind in ("mine.fast", "slow"):
        decoded = decode(Annotated[Any, kinds], {"kind": kind, "rate": 0.5}, "optimizer")
        assert kind_name(decoded) == kind
    assert kind_name(kinds.schema("adamw-scale", "optimizer")(lr=0.5)) == "adamw_scale"


@pytest.mark.usefixtures("plugin")
def test_a_package_does_not_replace_a_kind_of_ours() -> None:
    schema = Kinds("trainer.optim.kinds").schema("adamw", "optimizer")
    assert schema.__module__ == "trainer.optim.kinds.adamw"
    schema = Kinds("trainer.optim.kinds").schema("adamw-scale", "optimizer")
    assert schema.__module__ == "trainer.optim.kinds.adamw_scale"


@pytest.mark.usefixtures("plugin")
def test_a_kind_whose_package_is_broken_is_named() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.kind: no module for 'gone'"):
        Kinds("trainer.optim.kinds").schema("gone", "optimizer")


def test_listing_kinds_imports_none() -> None:
    names = set(sys.modules)
    Kinds("trainer.objectives.kinds").available()
    assert {name for name in sys.modules if name.startswith("trainer.objectives.kinds.")} <= names


def test_packages_of_kinds_that_are_named_in_strings_exist() -> None:
    named = {
        name
        for package in ("samestep", "trainer", "data_pipeline", "launch")
        for path in ROOT.glob(f"{package}/**/*.py")
        for name in re.findall(
            r"""Kinds\(\s*["'](\w+\.[\w.]+)["']""", path.read_text(encoding="utf-8")
        )
    }
    assert len(named) > 5
    for name in named:
        assert name.rpartition(".")[2] in ("kinds", "families", "stages"), name
        assert list(pkgutil.iter_modules(importlib.import_module(name).__path__)), name
