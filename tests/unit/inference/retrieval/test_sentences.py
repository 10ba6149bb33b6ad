"""The settings of folders of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import ConfigError
from trainer.inference.sentence_embedding import Pooling


def written(folder: Path, pooling: Any, settings: Any = None, normalized: bool = False) -> Path:
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [("2_Normalize", "Normalize")] * normalized
    (folder / "1_Pooling").mkdir(parents=True)
    files = {
        "modules.json": [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (path, kind) in enumerate(modules)
        ],
        "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": True},
        "config_sentence_transformers.json": settings or {},
        "1_Pooling/config.json": pooling,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def test_settings_are_read(tmp_path: Path) -> None:
    flags = {"pooling_mode_cls_token": False, "pooling_mode_weightedmean_tokens": True}
    prompts = {"query": "find: ", "passage": "doc: ", "sts": "same: "}
    settings = {
        "prompts": prompts,
        "default_prompt_name": "sts",
        "similarity_fn_name": "dot",
    }
    found = Pooling.of(written(tmp_path / "a", flags, settings, normalized=True))
    assert found == Pooling("weighted", True, 256, "find: ", "doc: ", "same: ", True, "dot")
    # As in sentence-transformers, the default prompt is no query's or document's.
    settings = {"prompts": {"sts": "same: "}, "default_prompt_name": "sts"}
    found = Pooling.of(written(tmp_path / "b", {"pooling_mode": "cls"}, settings))
    assert found == Pooling("first", False, 256, "", "", "same: ", True)


def test_another_pooling_needs_an_option(tmp_path: Path) -> None:
    flags = {"pooling_mode_mean_sqrt_len_tokens": True}
    folder = written(tmp_path / "a", flags)
    with pytest.raises(ConfigError, match=r"pools by .*mean_sqrt_len.*With --pool"):
        Pooling.of(folder)
    assert Pooling.of(folder, "max").pool == "max"
    folder = written(tmp_path / "b", {"pooling_mode": "mean", "include_prompt": False})
    with pytest.raises(ConfigError, match="include_prompt"):
        Pooling.of(folder, "max")
