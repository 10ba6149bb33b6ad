"""Special tokens that are content: a text may hold them by name, if the dataset says so."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from data_pipeline.building.build import build
from data_pipeline.building.config import Config as BuildConfig
from data_pipeline.building.recipe import load_recipe
from data_pipeline.reading.dataset import Dataset
from data_pipeline.sources.kinds import jsonl
from data_pipeline.tokenizers.tokenizer import Config, Tokenizer
from samestep.errors import ConfigError
from trainer.training.weights import initial

WORDS = ["the", "a", "sat", "on", "##s", "[", "]", "<", ">", "e", "un", "##e", "##1", "sep", "1"]
TEXTS = ["the <e> A<e>sat[SEP]", "<E> on the [unused1] on[unused1]", "a sat"]
MARKERS = ("<e>", "[unused1]")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A BERT's tokenizer with a marker of entities, and an unused token."""
    folder = tmp_path / "bert"
    folder.mkdir()
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused1]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    settings = {"do_lower_case": True, "additional_special_tokens": ["<e>"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return folder


def ids(tokenizer: Tokenizer, texts: list[str] = TEXTS) -> list[list[int]]:
    return [tokens.tolist() for tokens in tokenizer.encode_batch(texts)]


def test_a_marker_is_one_token_here_in_copies_and_in_transformers(folder, tmp_path):
    plain = Tokenizer.load(folder)
    tokenizer = plain.with_content(MARKERS)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.add_tokens([transformers.AddedToken("[unused1]", normalized=False)])
    text = TEXTS[0].replace("[SEP]", "")  # which `transformers` would take for a token, too
    expected = theirs([text, *TEXTS[1:]], add_special_tokens=False)["input_ids"]
    assert ids(tokenizer, [text, *TEXTS[1:]]) == expected
    marker, sep = len(WORDS) + 6, plain.vocabulary.sep
    assert ids(tokenizer)[0].count(marker) == 2
    assert ids(tokenizer)[1].count(5) == 2
    assert sep not in ids(tokenizer)[0]
    assert not {marker, 5} & {token for tokens in ids(plain) for token in tokens}
    aligned = [tokens.tolist() for tokens, _ in tokenizer.encode_aligned(TEXTS)]
    assert aligned == ids(tokenizer)
    # Content may be masked, and special tokens may not.
    assert set(plain.vocabulary.special) - set(tokenizer.vocabulary.special) == {marker}
    tokenizer.save(tmp_path / "copy")
    shutil.copy(folder / "config.json", tmp_path / "copy")
    for saved in (True, False):
        copy = Tokenizer.load(tmp_path / "copy", saved=saved)
        assert copy.fingerprint == tokenizer.fingerprint != plain.fingerprint
        assert ids(copy) == ids(tokenizer)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert exported([text, *TEXTS[1:]], add_special_tokens=False)["input_ids"] == expected


def test_tokens_that_cannot_be_content_are_refused(folder, tmp_path):
    plain = Tokenizer.load(folder)
    assert plain.with_content(()) is plain
    with pytest.raises(ConfigError, match=r"has '\[SEP\]', which is the tokenizer's sep_token"):
        plain.with_content(["[SEP]"])
    with pytest.raises(ConfigError, match="has '<f>', which the tokenizer lacks"):
        plain.with_content(["<f>"])
    letter = next(
        token for each in range(plain.vocabulary.size) if (token := plain.token(each)).isalpha()
    )
    with pytest.raises(ConfigError, match="which ordinary text produces already"):
        plain.with_content([letter])
    texts = ["a few words to train on, again and again", "and some others, of more letters"] * 20
    with pytest.raises(ConfigError, match=r"a spiece\.model cannot say"):
        Config("", "unigram", vocab_size=28, sentinels=3).train(texts).with_content(["<s>"])


def test_a_model_may_start_from_weights_with_the_same_ids(folder):
    plain = Tokenizer.load(folder)
    content, more = plain.with_content(MARKERS), plain.with_tokens(["new"])
    assert content.keeps_ids(plain)
    assert not content.extends(plain)
    assert more.extends(plain)
    assert more.with_content(MARKERS).extends(plain)
    assert not plain.keeps_ids(more)
    weights = SimpleNamespace(folder="w", tokenizer=folder, load_tokenizer=lambda: plain)
    check = initial._check_tokenizer
    check(weights, SimpleNamespace(tokenizer=content, name="d"), may_extend=False)
    with pytest.raises(ConfigError, match="another tokenizer"):
        check(weights, SimpleNamespace(tokenizer=more, name="d"), may_extend=False)


def test_a_build_warns_of_names_in_its_texts_and_reads_those_it_is_given(folder, tmp_path, caplog):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    source = jsonl.Config((str(tmp_path / "texts.jsonl"),))
    output = str(tmp_path / "data")
    config = BuildConfig(source, Config(str(folder)), output, heldout_fraction=0, workers=1)
    with caplog.at_level("WARNING"):
        manifest = build(config)
    message = "the names of 2 special tokens, read as ordinary text"
    warnings = [each.getMessage() for each in caplog.records if message in each.getMessage()]
    assert len(warnings) == 1
    assert "<e> (1)" in warnings[0]
    assert "[SEP] (1)" in warnings[0]
    assert "content_tokens" in warnings[0]
    caplog.clear()
    again = replace(config, output=f"{output}2", content_tokens=MARKERS)
    marked = build(again)
    assert not any("<e>" in each.getMessage() for each in caplog.records)
    assert manifest is not None
    assert marked is not None
    assert manifest.digest != marked.digest
    dataset = Dataset.open(f"{output}2")
    shard = dataset.open_shard(marked.shards[0])
    stored = shard.tokens[shard.start[0] : shard.start[0] + shard.length[0]].tolist()
    assert [stored] == ids(Tokenizer.load(folder).with_content(MARKERS), TEXTS[:1])


def test_a_task_file_names_them(tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text(
        "source: {kind: jsonl, paths: [a.jsonl]}\ncontent_tokens: ['<e>']\nobjective: {}\n"
    )
    config = load_recipe(str(file), ["tokenizer.path=t", "output=o"])
    assert config.content_tokens == ("<e>",)
