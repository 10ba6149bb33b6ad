"""Tokenizers of Hugging Face and SentencePiece."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from data_pipeline.tokenizers.tokenizer import Config, Tokenizer
from tests.fuzz.mutations import blobs, jsons, one_of
from tests.fuzz.trial import Files, Target

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a pool of threads does not survive a fork
_TEXTS = ["the quick brown fox, jumps [MASK] over é漢字 \u200b<extra_id_0> 1234", "", " \n a"]
_TEXT = "the quick brown fox jumps over a lazy dog and runs through the old green wood"
_WORDS = _TEXT.split()
_CORPUS = [" ".join(_WORDS[i % 5 : i % 11 + 6] + _WORDS[i % 7 :]) for i in range(60)]


def read(folder: Path) -> object:
    """Loads the tokenizer in a folder, of a dataset as well, uses it, and saves it."""
    if (folder / "tokenizer.json").exists() or (folder / "spiece.model").exists():
        _use(Tokenizer.load(folder, saved=True))
    tokenizer = Tokenizer.load(folder)
    _use(tokenizer)
    tokenizer.save(folder / "saved")
    return Tokenizer.load(folder / "saved", saved=True)


def _use(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_batch(_TEXTS)
    tokenizer.encode_aligned(_TEXTS)
    tokenizer.encode_prompts(_TEXTS)
    tokenizer.decode(ids[0])
    tokenizer.fingerprint, tokenizer.normalized("É x"), tokenizer.has("fox")
    tokenizer.spellings()


@cache
def trained(algorithm: str) -> Files:
    """The files of a small tokenizer."""
    size = {"bpe": 261, "wordpiece": 50}.get(algorithm, 35)
    tokenizer = Config("", algorithm, size).train(_CORPUS)  # type: ignore[arg-type]
    backend = tokenizer._backend
    files = dict(backend.files())
    files["tokenizer_config.json"] = json.dumps(backend.settings).encode()
    return files


# Parts of tokenizer.json that samestep does not train, but others use.
_NORMALIZERS = [
    {"type": "Replace", "pattern": {"Regex": "(a|b)*c"}, "content": "xyz" * 9},
    {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 100000},
    {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"}]},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Strip", "strip_left": True, "strip_right": True},
]
_SPLITTERS = [
    {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated", "invert": False},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "Digits", "individual_digits": True},
]
_POST = [
    {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    },
    {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": True,
     "add_prefix_space": False},
]  # fmt: skip
_ADDED = [
    {"id": 100, "content": "<x>", "single_word": False, "lstrip": True, "rstrip": False,
     "normalized": True, "special": False},
    {"id": 4, "content": "[MASK]", "single_word": False, "lstrip": False, "rstrip": False,
     "normalized": False, "special": True},
]  # fmt: skip


@cache
def _seeds() -> list[object]:
    plain = [json.loads(trained(kind)["tokenizer.json"]) for kind in ("wordpiece", "bpe", "words")]
    richer = [
        {**tree, "normalizer": normalizer, "pre_tokenizer": splitter, "post_processor": post,
         "added_tokens": [*tree["added_tokens"], *_ADDED]}
        for tree, normalizer, splitter, post in zip(
            plain * 2, _NORMALIZERS, _SPLITTERS * 2, _POST * 3, strict=False)
    ]  # fmt: skip
    unigram = {
        **plain[0],
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]],
                  "byte_fallback": False},
    }  # fmt: skip
    return [*plain, *richer, unigram]


_settings = {
    "tokenizer_class": "BertTokenizer", "do_lower_case": True, "unk_token": "[UNK]",
    "mask_token": {"content": "[MASK]", "lstrip": True}, "additional_special_tokens": ["[X]"],
    "added_tokens_decoder": {"21": {"content": "[X]", "special": True, "lstrip": False}},
    "extra_special_tokens": {"a": "[X]"}, "strip_accents": None, "model_max_length": 10**30,
    "never_split": ["[MASK]"], "auto_map": {}, "extra_ids": 3, "sp_model_kwargs": {},
}  # fmt: skip
_vocab = "\n".join(
    ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*_WORDS}), "##s"]
).encode()
_vocab_json = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4, "<mask>": 5}
_merges = b"#version: 0.2\na b\n"
_settings_of_any = st.one_of(
    jsons(_settings),
    jsons({"tokenizer_class": "PreTrainedTokenizerFast"}),
)


def sentencepiece_mutants() -> st.SearchStrategy[Files]:
    seeds = [trained(kind) for kind in ("unigram", "sentencepiece_bpe")]
    return one_of(
        seeds[0],
        {
            "spiece.model": blobs(*(files["spiece.model"] for files in seeds)),
            "tokenizer_config.json": jsons(
                json.loads(seeds[0]["tokenizer_config.json"]), _settings
            ),
        },
    )


TARGETS = [
    Target(
        "tokenizer.json",
        lambda: one_of(
            {"tokenizer.json": json.dumps(_seeds()[0]).encode()},
            {"tokenizer.json": jsons(*_seeds())},
        ),
        read,
    ),
    Target(
        "tokenizer's settings",
        lambda: one_of(
            {"vocab.txt": _vocab, "tokenizer_config.json": b"{}"},
            {
                "tokenizer_config.json": _settings_of_any,
                "special_tokens_map.json": jsons(_settings),
                "added_tokens.json": jsons({"[X]": 21, "[Z]": 22}),
                "config.json": jsons({"model_type": "bert", "tokenizer_class": None}),
                "vocab.txt": blobs(_vocab),
            },
        ),
        read,
    ),
    Target(
        "vocab.json and merges.txt",
        lambda: one_of(
            {"vocab.json": json.dumps(_vocab_json).encode(), "merges.txt": _merges},
            {
                "vocab.json": jsons(_vocab_json),
                "merges.txt": blobs(_merges),
                "tokenizer_config.json": _settings_of_any,
            },
        ),
        read,
    ),
    Target("spiece.model", sentencepiece_mutants, read),
]  # fmt: skip
