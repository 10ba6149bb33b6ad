"""The names of `import samestep` stay, are imported when they are used, and have their types."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import samestep
from samestep import _MODULES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")

# Programs of users depend on these. Removing one needs an entry in CHANGELOG.md.
NAMES = """
AnswerPrediction Batch Batches CheckpointError ClassPrediction ConfigError DataError Examples
Experiment Family Inputs JsonlTracker Loss Model ModelConfig NumberPrediction Objective
ObjectiveConfig PackSpec Parts Rows SamestepError TagsPrediction TokenObjective TrainedModel
Transformer Vocabulary __version__ accumulate_gradients build_dataset evaluate export
load_experiment load_model means open_batches open_dataset open_parts read_metrics score train
train_tokenizer
"""


def test_the_names_stay():
    assert samestep.__all__ == NAMES.split()
    assert dir(samestep) == sorted(samestep.__all__)
    for name in samestep.__all__:
        assert getattr(samestep, name).__doc__ or name == "__version__", name
    with pytest.raises(AttributeError, match="module 'samestep' has no attribute 'trian'"):
        _ = samestep.trian  # type: ignore[attr-defined]


def test_type_checkers_see_what_is_imported():
    stub = Path(samestep.__file__).with_suffix(".pyi")
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    found: dict[str, tuple[str, ...]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names = tuple(alias.asname or "" for alias in node.names)
            found[node.module or ""] = (*found.get(node.module or "", ()), *names)
    assert found == _MODULES


def test_every_name_is_in_its_module():
    for module, names in _MODULES.items():
        for name in names:
            assert getattr(samestep, name) is getattr(importlib.import_module(module), name)


def test_torch_is_imported_when_it_is_used():
    code = (
        "import sys, samestep\n"
        "samestep.ConfigError, samestep.build_dataset\n"
        "assert 'torch' not in sys.modules\n"
        "samestep.open_batches\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_page_lists_the_names():
    (table,) = re.findall(r"^## Names\n(.*)", PAGE, re.MULTILINE | re.DOTALL)
    listed = re.findall(r"`(\w+)`", table)
    assert sorted([*listed, "__version__"]) == NAMES.split()


def test_settings_in_the_table_of_callbacks_exist():
    """Those that are written as section.key, in the reference of all settings."""
    (table,) = re.findall(r"^## What callbacks.*?\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    keys = re.findall(r"`((?:training|checkpoint|tracking)\.\w+)", table)
    assert len(keys) > 10
    from samestep.config.synonyms import _sections
    from trainer.training.experiment import Experiment

    sections = _sections(Experiment)
    for key in keys:
        section, _, name = key.rpartition(".")
        assert name in sections[section], key
