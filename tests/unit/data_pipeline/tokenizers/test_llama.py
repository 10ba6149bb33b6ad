"""A tokenizer.json of Llama's or Qwen's kind gives the ids of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data_pipeline.tokenizers import tokenizer as ours
from samestep.errors import ConfigError
from tests.unit.data_pipeline.tokenizers.test_ten_scripts import (
    UNKNOWN,
    assert_ids_of_transformers,
    lines,
)
from trainer.objectives.kinds import mlm

TEXTS = lines(60)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
END_OF_QWEN = "<|endoftext|>"
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def of_bytes(*splitters: Any, special: list[str], nfc: bool = False) -> Tokenizer:
    """Byte-level BPE: words of a regular expression, each as bytes."""
    own_words = any(isinstance(splitter, pre_tokenizers.Split) for splitter in splitters)
    backend = Tokenizer(models.BPE(ignore_merges=own_words and not nfc))
    if nfc:
        backend.normalizer = normalizers.NFC()
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not own_words)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splitters, as_bytes])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens(special)
    return backend


def of_sentencepiece(metaspace: bool) -> Tokenizer:
    """BPE with a sign for spaces, and bytes for what the vocabulary lacks."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, special_tokens=special, limit_alphabet=200
    )
    backend.train_from_iterator(TEXTS, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    state["model"] |= {"byte_fallback": True, "fuse_unk": True}
    backend = Tokenizer.from_str(json.dumps(state))
    signs = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([signs, decoders.ByteFallback(), decoders.Fuse()])
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(spaces)
        backend.pre_tokenizer = None
    return backend


def split(pattern: str) -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3": (
        "llama",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END},
    ),
    "Qwen 2": (
        "qwen2",
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": END_OF_QWEN, "pad_token": END_OF_QWEN},
    ),
    "Llama 2": ("llama", {"tokenizer_class": "LlamaTokenizer", "legacy": False, **LLAMA}),
    "Llama 1": ("llama", LLAMA),
}


def backend_of(case: str) -> Tokenizer:
    if case == "Llama 3":
        return of_bytes(split(WORDS), special=[BEGIN, END])
    if case == "Qwen 2":
        return of_bytes(split(WORDS.replace("{1,3}", "")), special=[END_OF_QWEN], nfc=True)
    return of_sentencepiece(metaspace=case == "Llama 2")


def folder_of(root: Path, backend: Tokenizer, model_type: str, settings: dict[str, Any]) -> Path:
    backend.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps(settings))
    (root / "config.json").write_text(json.dumps({"model_type": model_type}))
    return root


@pytest.mark.parametrize("case", CASES)
def test_ids_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, backend_of(case), *CASES[case])
    assert_ids_of_transformers(folder, UNKNOWN)
    tokenizer = ours.Tokenizer.load(folder)
    text = "A word, 12345 ꙮ"
    assert tokenizer.decode(tokenizer.encode_batch([text])[0].tolist()).strip() == text
    tokenizer.save(tmp_path / "copy")
    assert ours.Tokenizer.load(tmp_path / "copy").fingerprint == tokenizer.fingerprint
    assert tokenizer.vocabulary.end is not None


def test_a_mask_token_is_added(tmp_path: Path) -> None:
    """So a decoder's tokenizer serves masked language modeling."""
    folder = folder_of(tmp_path, backend_of("Llama 3"), *CASES["Llama 3"])
    before = ours.Tokenizer.load(folder)
    size = before.vocabulary.size
    with pytest.raises(ConfigError, match=r"or add \[MASK\] by samestep data extend"):
        mlm.Config().build(before.vocabulary)
    with pytest.raises(ConfigError, match=r"no \[PAD\]\. .* or add them by samestep data extend"):
        mlm.Config().build(before.with_tokens(["[MASK]"]).vocabulary)
    before.with_tokens(["[MASK]", "[PAD]"]).save(tmp_path / "extended")
    after = ours.Tokenizer.load(tmp_path / "extended")
    assert (after.vocabulary.mask, after.vocabulary.pad) == (size, size + 1)
    assert mlm.Config().build(after.vocabulary).config.mask_fraction == 0.15
    assert_ids_of_transformers(tmp_path / "extended", TEXTS)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("LlamaTokenizer", "splits text by its model, and LlamaTokenizer of transformers 5 by Met"),
        ("GPT2Tokenizer", "splits text by ByteLevel, Digits, and GPT2Tokenizer of transformers"),
    ],
)
def test_classes_that_split_otherwise_are_named(
    kind: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first is the form of most Llama 2 folders, the second SmolLM's."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    is_llama = kind == "LlamaTokenizer"
    backend = of_sentencepiece(metaspace=False) if is_llama else of_bytes(digits, special=[END])
    names = LLAMA if is_llama else {"bos_token": END, "eos_token": END}
    folder = folder_of(tmp_path, backend, "llama", {"tokenizer_class": kind, **names})
    tokenizer = ours.Tokenizer.load(folder)
    assert message in caplog.text
    text = "in 1984"
    expected = backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_batch([text])[0].tolist() == expected
    if is_llama:  # there, these texts alone have other ids
        texts = [text for text in UNKNOWN if not text.startswith(" ")]
        assert_ids_of_transformers(folder, texts)
