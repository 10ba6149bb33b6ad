"""License, languages and base models, from the README of a folder that may be a stranger's."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.checkpoint.layout import StoredTensors
from trainer.models.families import bert
from trainer.training.weights.loading import Weights
from trainer.training.weights.terms import terms_of


def weights_in(folder: Path, **more: Any) -> Weights:
    tensors = StoredTensors.of({"embeddings.tokens.weight": torch.zeros(1)})
    return Weights(bert.Config(), tensors, folder, folder, **more)


def terms(folder: Path, front_matter: str, text: str = "# A model\n") -> dict[str, Any]:
    (folder / "README.md").write_text(f"---\n{front_matter}\n---\n{text}", encoding="utf-8")
    return dict(terms_of(weights_in(folder)))


@pytest.mark.parametrize(
    ("front_matter", "expected"),
    [
        ("license: apache-2.0\nlanguage: en", {"license": "apache-2.0", "language": "en"}),
        # YAML 1.1 reads the code of Norwegian as false.
        ("language: no", {"language": "no"}),
        ("language:\n- 'no'\n- zh-Hans", {"language": ["no", "zh-Hans"]}),
        ("language: [en, de]\ntags: [a]", {"language": ["en", "de"]}),
        ("base_model:\n  - ada/bert\n\n  - gpt2", {"base_model": ["ada/bert", "gpt2"]}),
        (
            "license: other\nlicense_name: llama 3\nlicense_link: https://a.b/c?d=e#f",
            {
                "license": "other",
                "license_name": "llama 3",
                "license_link": "https://a.b/c?d=e#f",
            },
        ),
        ("# license: mit\nother:\n  license: mit\n", {}),
        ("license_link: LICENSE", {}),
        ("license_link: javascript:alert(1)", {}),
        ("license: {name: mit}", {}),
        ("license: 'mit\n\n  tags: [x]'", {}),
        ("license: ''\nlanguage: []\nbase_model: ", {}),
        ("base_model: /home/ada/bert", {}),
        ("base_model: a/b/c\nlicense: mit", {"license": "mit"}),
        ("language: [en, <b>]\nlicense: mit", {"license": "mit"}),
        (f"license: {'m' * 65}", {}),
        ("license: !!python/object/apply:os.getcwd []", {}),
        ("license: [mit", {}),
        ("license: " + "[" * 400, {}),
        ("language: [" + "en, " * 600 + "]", {}),
        ("license: " + "m" * 5000 + "\nlanguage: en", {}),
    ],
)
def test_known_entries_of_known_forms_are_read(
    tmp_path: Path, front_matter: str, expected: dict[str, Any]
) -> None:
    assert terms(tmp_path, front_matter) == expected


def test_scores_before_the_license_are_not_parsed(tmp_path: Path) -> None:
    scores = "model-index:\n" + "- task: {type: retrieval}\n  license: wrong\n" * 40_000
    start = time.perf_counter()
    assert terms(tmp_path, f"{scores}license: mit") == {"license": "mit"}
    assert time.perf_counter() - start < 2, "PyYAML would need far more"


@pytest.mark.parametrize(
    "text", ["", "license: mit\n", "---\nlicense: mit\n", "# a\n---\nb: c\n---"]
)
def test_a_readme_without_front_matter_says_nothing(tmp_path: Path, text: str) -> None:
    assert terms_of(weights_in(tmp_path)) == {}
    (tmp_path / "README.md").write_text(text)
    assert terms_of(weights_in(tmp_path)) == {}


def test_a_readme_that_is_no_text_or_no_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(b"---\nlicense: m\xff\n---\n")
    assert terms_of(weights_in(tmp_path)) == {}
    (tmp_path / "README.md").unlink()
    os.mkfifo(tmp_path / "README.md")  # would block a reader
    assert terms_of(weights_in(tmp_path)) == {}


def test_a_model_of_the_hub_is_the_base_model(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\nbase_model: its/origin\n---\n")
    of_hub = weights_in(tmp_path, hub="hf://ada/bert@main")
    assert terms_of(of_hub) == {"license": "mit", "base_model": "ada/bert"}


def test_an_adapter_without_terms_has_those_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    own = tmp_path / "adapter"
    own.mkdir()
    adapter = weights_in(own, base=weights_in(tmp_path, hub="hf://ada/bert"))
    assert terms_of(adapter) == {"license": "mit", "base_model": "ada/bert"}
    (own / "README.md").write_text("---\nlicense: gpl-3.0\n---\n")
    assert terms_of(adapter) == {"license": "gpl-3.0", "base_model": "ada/bert"}
    # As PEFT writes it: the license of the base stands.
    (own / "README.md").write_text("---\nbase_model: other/name\n---\n")
    assert terms_of(adapter) == {"license": "mit", "base_model": "other/name"}


@pytest.mark.parametrize("escape", ["\\UFFFFFFFF", "\\U00110000", "\\uD800"])
def test_characters_that_do_not_exist_say_nothing(tmp_path: Path, escape: str) -> None:
    (tmp_path / "README.md").write_text(f'---\nlicense: "{escape}"\n---\n')
    assert terms_of(weights_in(tmp_path)) == {}
