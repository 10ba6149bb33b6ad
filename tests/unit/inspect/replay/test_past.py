"""The settings that a run had at a step, with overrides."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from samestep.config import read_tree
from samestep.errors import ConfigError
from trainer.inspect.replay import past

DEMO = Path(__file__).parents[4] / "configs" / "debug" / "demo.yaml"


def test_an_override_that_a_later_one_drops_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has another optimizer than the newest start of the run."""
    tree = {**read_tree(DEMO), "optimizer": {"kind": "lamb"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    older = {**tree, "optimizer": {"kind": "adamw"}}
    monkeypatch.setattr(past.integrity, "committed_steps", lambda _: [4])
    monkeypatch.setattr(past, "read_meta", lambda _: {"config": older})
    found = past.settings_at(str(tmp_path), 3, ["optimizer=lamb", "optimizer.lr=0.001"])
    assert found["optimizer"] == {"kind": "lamb", "lr": 0.001}
    with pytest.raises(ConfigError, match=r"optimizer=lamb comes after optimizer.lr and drops it"):
        past.settings_at(str(tmp_path), 3, ["optimizer.lr=0.001", "optimizer=lamb"])
