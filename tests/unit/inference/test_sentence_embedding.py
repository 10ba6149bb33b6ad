"""`samestep features` embeds texts as a folder of `sentence-transformers` says, or refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from samestep.errors import CheckpointError, ConfigError, SamestepError
from trainer.inference import features
from trainer.models.codecs.sentence_transformers import Pooling

THEIRS = "sentence_transformers.models."
KINDS = ("Transformer", "Pooling", "Normalize")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d", "e", "q", ":"]
MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens")


def write(folder: Path, modules: Any = 2, **files: object) -> Path:
    """Files of sentence-transformers: a list or number of modules, and the content of others."""
    kinds = (
        modules
        if isinstance(modules, list)
        else [
            {
                "idx": n,
                "name": str(n),
                "type": f"{THEIRS}{kind}",
                "path": f"{n}_{kind}" if n else "",
            }
            for n, kind in enumerate(KINDS[:modules])
        ]
    )
    contents = {
        "modules.json": kinds,
        "1_Pooling/config.json": {"embedding_dimension": 8, "pooling_mode": "cls"},
        **{name.replace("__", "/") + ".json": each for name, each in files.items()},
    }
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def legacy(mode: str) -> dict[str, object]:
    return {
        "word_embedding_dimension": 8,
        **{f"pooling_mode_{each}": each == mode for each in MODES},
    }


def test_settings_are_read(tmp_path: Path) -> None:
    assert Pooling.of(tmp_path) is None
    write(tmp_path)
    assert Pooling.of(tmp_path) == Pooling("first", False)
    prompts = {"prompts": {"query": "q: ", "document": "d: ", "none": ""}}
    more: dict[str, Any] = {
        "1_Pooling__config": legacy("max_tokens"),
        "sentence_bert_config": {"max_seq_length": 5, "do_lower_case": False},
        "config_sentence_transformers": {**prompts, "default_prompt_name": "query"},
    }
    write(tmp_path, 3, **more)
    assert Pooling.of(tmp_path) == Pooling("max", True, 5, "q: ", "d: ", "q: ")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"1_Pooling__config": legacy(mode)}, mode.removesuffix("_tokens"))
        for mode in ("mean_sqrt_len_tokens",)
    ]
    + [
        ({"1_Pooling__config": {"pooling_mode": ["cls", "max"]}}, "pools by .'cls', 'max'."),
        ({"1_Pooling__config": {}}, r"pools by \[\], which"),
        ({"modules": [{"type": f"{THEIRS}Transformer", "path": ""}]}, "no module Pooling"),
        ({"modules": [{"type": f"{THEIRS}Transformer", "path": "0"}]}, "module .*Transformer at"),
        ({"modules": [{"type": "evil.Transformer", "path": ""}]}, "module evil.Transformer at"),
        ({"sentence_bert_config": {"max_seq_length": 0}}, "max_seq_length 0"),
        ({"config_sentence_transformers": {"default_prompt_name": "x"}}, "default_prompt_name 'x'"),
        (
            {
                "1_Pooling__config": {"pooling_mode": "cls", "include_prompt": False},
                "config_sentence_transformers": {"prompts": {"x": "q"}, "default_prompt_name": "x"},
            },
            "include_prompt false",
        ),
    ],
)
def test_others_are_refused_by_name(files: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=message):
        Pooling.of(write(tmp_path, **files))


def test_prompts_of_roles_and_lower_case_are_read(tmp_path: Path) -> None:
    prompts = {"query": "find: ", "passage": "doc: ", "sts": "same: "}
    settings = {
        "prompts": prompts,
        "default_prompt_name": "sts",
        "similarity_fn_name": "dot",
    }
    more: dict[str, Any] = {
        "1_Pooling__config": legacy("weightedmean_tokens"),
        "sentence_bert_config": {"max_seq_length": 256, "do_lower_case": True},
    }
    found = Pooling.of(write(tmp_path / "a", 3, config_sentence_transformers=settings, **more))
    assert found == Pooling("weighted", True, 256, "find: ", "doc: ", "same: ", True, "dot")
    assert found is not None
    assert found.with_default_prompt("A Text") == "same: a text"
    # As in sentence-transformers, the default prompt is no query's or document's.
    settings = {"prompts": {"sts": "same: "}, "default_prompt_name": "sts"}
    found = Pooling.of(write(tmp_path / "b", config_sentence_transformers=settings))
    assert found == Pooling("first", False, default="same: ")


def test_another_pooling_needs_an_option(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, **{"1_Pooling__config": legacy("mean_sqrt_len_tokens")})
    with pytest.raises(ConfigError, match=r"pools by .*mean_sqrt_len.*With --pool"):
        Pooling.of(folder)
    found = Pooling.of(folder, "max")
    assert found is not None
    assert found.pool == "max"


def test_a_dense_layer_is_refused_by_name(tmp_path: Path) -> None:
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")]
    modules = [{"type": f"{THEIRS}{kind}", "path": path} for kind, path in kinds]
    with pytest.raises(ConfigError, match=r"has the module .*Dense at place 2"):
        Pooling.of(write(tmp_path, modules=modules))


def test_a_pooling_outside_of_the_folder(tmp_path: Path) -> None:
    modules = [
        {"type": f"{THEIRS}{kind}", "path": path}
        for kind, path in zip(KINDS[:2], ("", ".."), strict=True)
    ]
    with pytest.raises(SamestepError, match="leads out of the folder"):
        Pooling.of(write(tmp_path, modules=modules))


def bert(folder: Path) -> Path:
    settings = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=len(WORDS), intermediate_size=16, max_position_embeddings=12, **settings
    )
    transformers.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    (folder / "texts.txt").write_text("a b c\nd\na b c d e a b c d e a b c d e\n")
    return folder


def embed(folder: Path, name: str, **options: Any) -> Any:
    output = folder / f"{name}.npy"
    options = {"layers": "-1", "mix": None, "pool": None, "batch_tokens": 64, **options}
    features.run(str(folder), str(folder / "texts.txt"), None, output, **options)
    return np.load(output)


@pytest.mark.long
def test_pool_and_layers_replace_what_the_folder_says(tmp_path: Path) -> None:
    folder = bert(tmp_path)
    plain = embed(folder, "plain")
    assert np.array_equal(plain, embed(folder, "mean", pool="mean"))
    write(folder, 3)
    own = embed(folder, "own")
    first = embed(folder, "first", pool="first")
    np.testing.assert_allclose(own, first / np.linalg.norm(first, axis=1)[:, None], rtol=1e-6)
    assert np.array_equal(plain, embed(folder, "again", pool="mean"))
    with pytest.raises(ConfigError, match="other --layers and --mix need --pool"):
        embed(folder, "layers", layers="0")


def test_a_length_without_space_for_a_text_is_refused(tmp_path: Path) -> None:
    """Every text would have the vector of [CLS] [SEP]."""
    folder = write(bert(tmp_path), sentence_bert_config={"max_seq_length": 2})
    with pytest.raises(ConfigError, match="2 tokens have no space beside the 2 special ones"):
        embed(folder, "short")


@pytest.mark.long
@pytest.mark.parametrize("mode", ["cls", "mean", "max", "lasttoken", "weightedmean"])
@pytest.mark.parametrize("length", [None, 5])
def test_vectors_are_those_of_sentence_transformers(
    mode: str, length: int | None, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    prompts = {"prompts": {"query": "q: "}, "default_prompt_name": "query"}
    files: dict[str, Any] = {
        "1_Pooling__config": {"embedding_dimension": 8, "pooling_mode": mode},
        "sentence_bert_config": {"max_seq_length": length, "do_lower_case": False},
        "config_sentence_transformers": prompts if length else {},
    }
    folder = write(bert(tmp_path), 3 if mode == "mean" else 2, **files)
    texts = (folder / "texts.txt").read_text().splitlines()
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts)
    np.testing.assert_allclose(embed(folder, "ours"), theirs, atol=1e-5)
