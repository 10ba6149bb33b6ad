"""Folders of SparseEncoder: those of SPLADE with its maximum are read, others refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import ConfigError
from trainer.models.codecs.sentence_transformers import Pooling

NEW = (
    "sentence_transformers.base.modules.transformer.Transformer",
    "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling",
)
OLD = tuple(
    f"sentence_transformers.sparse_encoder.models.{name}"
    for name in ("MLMTransformer", "SpladePooling")
)
TASK = {"transformer_task": "fill-mask"}


def write(folder: Path, kinds: tuple[str, ...], **contents: dict[str, Any]) -> Path:
    """A folder; `contents` are of transformer, pooling and settings."""
    paths = ("", "1_SpladePooling", "2_Normalize")
    modules = [{"type": kind, "path": path} for kind, path in zip(kinds, paths, strict=False)]
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": contents.get("transformer", {}),
        "1_SpladePooling/config.json": contents.get("pooling", {}),
        "config_sentence_transformers.json": contents.get("settings", {}),
    }
    (folder / "1_SpladePooling").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(("kinds", "transformer"), [(NEW, TASK), (OLD, {"max_seq_length": 64})])
def test_folders_of_both_forms_are_read(
    kinds: tuple[str, ...], transformer: dict[str, Any], tmp_path: Path
) -> None:
    prompts = {"prompts": {"query": "q: ", "document": ""}, "similarity_fn_name": None}
    folder = write(tmp_path, kinds, transformer=transformer, settings=prompts)
    found = Pooling.of(folder)
    longest = transformer.get("max_seq_length")
    assert found == Pooling("splade", False, longest, query="q: ", similarity="dot")
    # Hidden states of the encoder alone are pooled on request.
    other = Pooling.of(folder, "mean")
    assert other is not None
    assert other.pool == "mean"


@pytest.mark.parametrize(
    ("kinds", "contents", "message"),
    [
        (
            OLD,
            {"pooling": {"pooling_strategy": "sum"}},
            "pooling_strategy 'sum', and .* 'max' only",
        ),
        (OLD, {"pooling": {"activation_function": "log1p_relu"}}, "function 'log1p_relu'"),
        (OLD, {"settings": {"max_active_dims": 64}}, "max_active_dims 64, .* None only"),
        (NEW, {}, "transformer_task None, and samestep computes 'fill-mask' only"),
        ((*NEW, "sentence_transformers.models.Normalize"), {}, "SpladePooling at place 1, which"),
    ],
)
def test_other_sparse_encoders_are_refused(
    kinds: tuple[str, ...], contents: Any, message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, kinds, **contents)
    with pytest.raises(ConfigError, match=message):
        Pooling.of(folder)
