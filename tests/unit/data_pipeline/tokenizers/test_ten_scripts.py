"""Folders of every form that is read give the ids of `transformers` for text in twelve scripts."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
from pathlib import Path

import pytest
import sentencepiece
import transformers

from data_pipeline.tokenizers.tokenizer import Config, Tokenizer
from samestep.errors import DataError

# First and last letter of Latin, its accents, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Thai,
# Hangul, Chinese, Hiragana and Georgian.
SCRIPTS = ["az", "Àſ", "Αω", "Аџ", "את", "ءي", "अौ", "กฺ", "가걀", "一习", "ぁゖ", "აჰ"]
MARKS = ["\u0301", "\u0308", "\u093e", "\u064e", "\u200d", "\u200b", "\u00ad"]
OTHERS = ["12", "3.14", "``x''", "don't", "😀", "ﬁ", "\uff21", "½", "…", "。", "،", "x@y.z", "#a"]
OTHERS += ["\u3000", "İ", "ß", "\ttab", "a  b", "[x]", "</a>"]


def lines(count: int) -> list[str]:
    """Lines of words from one script each, some with marks, capitals, digits and signs."""
    rng = random.Random(1)

    def word(first: str, last: str) -> str:
        letters = [chr(rng.randint(ord(first), ord(last))) for _ in range(rng.randint(1, 7))]
        text = "".join(letters) + (rng.choice(MARKS) if rng.random() < 0.1 else "")
        return text.capitalize() if rng.random() < 0.2 else text

    found = ["", " ", " first", "last ", "x\u00a0y", "\x00a", "\ufffd"]
    for number in range(count):
        script = SCRIPTS[number % len(SCRIPTS)]
        words = [
            word(*script) if rng.random() < 0.8 else rng.choice(OTHERS)
            for _ in range(rng.randint(1, 12))
        ]
        found.append(rng.choice([" ", " ", "  ", ""]).join(words) + rng.choice(["", ".", " ", "!"]))
    return found


TEXTS = lines(250)
UNKNOWN = [*TEXTS, "a ꙮ b"]
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
BOS = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
# File, and the special pieces of a published model, by model_type.
MODELS = {
    "t5": ("spiece.model", T5),
    "albert": (
        "spiece.model",
        {
            **T5,
            "unk_id": 1,
            "eos_id": -1,
            "control_symbols": ["[CLS]", "[SEP]", "[MASK]"],
            "user_defined_symbols": ["x@", "½"],
        },
    ),
    "xlnet": (
        "spiece.model",
        {
            **BOS,
            "control_symbols": ["<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"],
            "user_defined_symbols": ["."],
        },
    ),
    "camembert": ("sentencepiece.bpe.model", BOS),
    "xlm-roberta": ("sentencepiece.bpe.model", BOS),
    "deberta-v2": (
        "spm.model",
        {
            "pad_id": 0,
            "bos_id": 1,
            "eos_id": 2,
            "unk_id": 3,
            "pad_piece": "[PAD]",
            "bos_piece": "[CLS]",
            "eos_piece": "[SEP]",
            "unk_piece": "[UNK]",
        },
    ),
    "pegasus": ("spiece.model", T5),
    "big_bird": ("spiece.model", BOS),
}


def folder_of(root: Path, model_type: str) -> Path:
    """A folder with the files of a published model of a type, without tokenizer.json."""
    folder = root / model_type
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if model_type in MODELS:
        name, special = MODELS[model_type]
        content = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(text for text in TEXTS if text.strip()),
            model_writer=content,
            vocab_size=1000,
            hard_vocab_limit=False,
            character_coverage=0.98,
            num_sub_iterations=1,
            minloglevel=2,
            **special,
        )
        (folder / name).write_bytes(content.getvalue())
    elif model_type == "roberta":
        trained = Config("", "bpe", vocab_size=600).train(TEXTS)
        trained.save(root / "trained")
        model = json.loads((root / "trained" / "tokenizer.json").read_text())["model"]
        vocab = model["vocab"] | {"<mask>": len(model["vocab"])}
        (folder / "vocab.json").write_text(json.dumps(vocab))
        merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    else:
        trained = Config("", "wordpiece", vocab_size=600).train(TEXTS)
        tokens = [trained.token(i) for i in range(trained.vocabulary.size)]
        if model_type == "mpnet":  # which keeps BERT's special tokens as ordinary ones
            tokens = ["<s>", "<pad>", "</s>", "<unk>", *tokens, "<mask>"]
        (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
        settings = {"do_lower_case": False, "model_max_length": 4}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def assert_ids_of_transformers(folder: Path, texts: list[str], most: int = 0) -> None:
    """Compares sizes, special tokens and ids; `most` texts may have others."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    ours = Tokenizer.load(folder)
    expected = theirs(texts, add_special_tokens=False)["input_ids"]
    differ = [
        (text, ids.tolist(), own)
        for text, ids, own in zip(texts, ours.encode_batch(texts), expected, strict=True)
        if ids.tolist() != own
    ]
    assert len(differ) <= most, differ[0]
    assert ours.vocabulary.size == len(theirs)
    for role in ("pad", "cls", "sep", "mask"):
        if (named := getattr(theirs, f"{role}_token_id")) is not None:
            assert getattr(ours.vocabulary, role) == named, role


def saved_by_transformers(folder: Path) -> Path:
    """A folder with the tokenizer.json and the settings that `save_pretrained` writes."""
    target = folder.parent / "saved"
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    shutil.copy(folder / "config.json", target)
    return target


READ_WITHOUT_JSON = ("bert", "roberta", "t5", "albert", "xlnet", "camembert", "xlm-roberta")
READ_WITHOUT_JSON += ("deberta-v2", "mpnet")
TYPES = ("bert", "roberta", "mpnet", *MODELS)


@pytest.mark.parametrize("model_type", READ_WITHOUT_JSON)
def test_files_of_a_vocabulary_give_the_ids_of_transformers(model_type, tmp_path):
    folder = folder_of(tmp_path, model_type)
    assert_ids_of_transformers(folder, UNKNOWN)
    tokenizer = Tokenizer.load(folder)
    tokenizer.save(tmp_path / "copy")
    for saved in (True, False):
        copy = Tokenizer.load(tmp_path / "copy", saved=saved)
        assert copy.fingerprint == tokenizer.fingerprint
        assert copy.vocabulary == tokenizer.vocabulary
    if model_type != "t5":  # whose spiece.model needs a class
        theirs, exported = map(
            transformers.AutoTokenizer.from_pretrained, (folder, tmp_path / "copy")
        )
        assert exported(TEXTS, TEXTS[::-1])["input_ids"] == theirs(TEXTS, TEXTS[::-1])["input_ids"]


def test_only_the_tokens_with_a_role_are_special_in_mpnet(tmp_path):
    folder = folder_of(tmp_path, "mpnet")
    ours, theirs = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.vocabulary.special == tuple(sorted(theirs.all_special_ids))
    assert len(ours.vocabulary.special) == 5


@pytest.mark.parametrize(
    ("model_type", "name", "value"),
    [
        ("albert", "do_lower_case", False),
        ("albert", "keep_accents", True),
        ("albert", "add_prefix_space", False),
        ("camembert", "add_prefix_space", False),
        ("camembert", "additional_special_tokens", ["<e>"]),
        ("deberta-v2", "do_lower_case", True),
        ("deberta-v2", "split_by_punct", True),
        ("deberta-v2", "add_prefix_space", False),
        ("xlm-roberta", "mask_token", "<m>"),
        ("xlnet", "do_lower_case", True),
    ],
)
def test_settings_beside_a_sentencepiece_model_count(model_type, name, value, tmp_path):
    folder = folder_of(tmp_path, model_type)
    (folder / "tokenizer_config.json").write_text(json.dumps({name: value}))
    assert_ids_of_transformers(folder, UNKNOWN)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("mbart", r"sentencepiece\.bpe\.model of an unknown class is not read"),
        ("camembert", "sp_model_kwargs is"),
    ],
)
def test_other_sentencepiece_models_are_refused(model_type, message, tmp_path):
    folder = folder_of(tmp_path, "camembert")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text('{"sp_model_kwargs": {"alpha": 0.1}}')
    with pytest.raises(DataError, match=message):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("name", "value"), [("keep_accents", True), ("additional_special_tokens", ["<eop>", "<eod>"])]
)
def test_settings_of_xlnet_that_transformers_reads_otherwise_are_refused(name, value, tmp_path):
    folder = folder_of(tmp_path, "xlnet")
    (folder / "tokenizer_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(DataError, match=name):
        Tokenizer.load(folder)


@pytest.mark.parametrize("model_type", TYPES)
def test_tokenizer_json_gives_the_ids_of_transformers(model_type, tmp_path):
    saved = saved_by_transformers(folder_of(tmp_path, model_type))
    assert_ids_of_transformers(saved, UNKNOWN)
    # Many published folders have no other file: the class knows the names of special tokens.
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (saved / name).unlink(missing_ok=True)
    if model_type not in ("bert", "mpnet"):  # whose classes would convert the text to lower case
        assert_ids_of_transformers(saved, UNKNOWN)


@pytest.mark.long
@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("model_type", TYPES)
def test_ids_of_twenty_thousand_lines_are_those_of_transformers(model_type, is_saved, tmp_path):
    if not is_saved and model_type not in READ_WITHOUT_JSON:
        pytest.skip("these files are refused by name")
    folder = folder_of(tmp_path, model_type)
    texts = lines(20_000)
    # Google's library, which runs a T5's model here, normalizes letters with several marks by
    # longest match, and `transformers` by grapheme.
    most = len(texts) // 200 if model_type == "t5" and not is_saved else 0
    assert_ids_of_transformers(saved_by_transformers(folder) if is_saved else folder, texts, most)


@pytest.mark.parametrize(
    ("model_type", "name", "value"),
    [
        ("albert", "do_lower_case", False),
        ("albert", "keep_accents", True),
        ("albert", "add_prefix_space", False),
        ("xlnet", "do_lower_case", True),
        ("deberta-v2", "do_lower_case", True),
        ("deberta-v2", "split_by_punct", True),
        ("camembert", "unk_token", "</s>"),
        ("xlm-roberta", "add_prefix_space", False),
        ("bert", "unk_token", "[MASK]"),
    ],
)
def test_settings_that_contradict_tokenizer_json_are_refused(model_type, name, value, tmp_path):
    saved = saved_by_transformers(folder_of(tmp_path, model_type))
    before = transformers.AutoTokenizer.from_pretrained(saved)(UNKNOWN)["input_ids"]
    file = saved / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    assert transformers.AutoTokenizer.from_pretrained(saved)(UNKNOWN)["input_ids"] != before
    with pytest.raises(DataError, match=re.escape(f"{name} is {json.dumps(value)}")):
        Tokenizer.load(saved)


QUOTES = {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
DIGITS = {"type": "Digits", "individual_digits": True}
LOWER, ACCENTS = {"type": "Lowercase"}, {"type": "StripAccents"}
EDITS = [
    ("bert", "normalizer", None, "no normalizer BertNormalizer"),
    ("bert", "normalizer", LOWER, "the normalizer Lowercase"),
    ("bert", "pre_tokenizer", {"type": "Whitespace"}, "the pre-tokenizers Whitespace"),
    ("bert", "pre_tokenizer", [DIGITS], "the pre-tokenizers BertPreTokenizer, Digits"),
    ("bert", "model", {"max_input_chars_per_word": 3}, "max_input_chars_per_word 3"),
    ("roberta", "normalizer", LOWER, "the normalizer Lowercase"),
    ("roberta", "pre_tokenizer", [DIGITS], "the pre-tokenizers ByteLevel, Digits"),
    ("albert", "normalizer", [QUOTES], "the normalizer Replace a b"),
    ("albert", "pre_tokenizer", [DIGITS], "the pre-tokenizers WhitespaceSplit, Metaspace, Digits"),
    ("t5", "normalizer", [LOWER], "the normalizer Lowercase"),
    ("xlm-roberta", "normalizer", [ACCENTS], "the normalizer StripAccents"),
    ("deberta-v2", "pre_tokenizer", [DIGITS], "the pre-tokenizers Metaspace, Digits"),
]


@pytest.mark.parametrize(
    ("model_type", "section", "edit", "message"),
    [
        each if each[0] in ("bert", "roberta") else pytest.param(*each, marks=pytest.mark.long)
        for each in EDITS
    ],
)
def test_an_edited_tokenizer_json_is_refused_where_the_class_ignores_it(
    model_type, section, edit, message, tmp_path
):
    saved = saved_by_transformers(folder_of(tmp_path, model_type))
    file, config = saved / "tokenizer.json", saved / "tokenizer_config.json"
    content, texts = json.loads(file.read_text()), [*UNKNOWN, "ABC 123 abcdefgh"]
    if section == "model":
        content[section] |= edit
    elif isinstance(edit, list):  # after the class's own
        own, name = content[section], "normalizers" if section == "normalizer" else "pretokenizers"
        members = own.get(name, [own]) if own else []
        content[section] = {"type": "Sequence", name: [*members, *edit]}
    else:
        content[section] = edit
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=re.escape(message)):
        Tokenizer.load(saved)
    settings = json.loads(config.read_text())
    # The class may also be that of config.json's model_type.
    config.write_text(json.dumps({**settings, "tokenizer_class": None}))
    with pytest.raises(DataError, match=re.escape(message)):
        Tokenizer.load(saved)
    config.write_text(json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}))
    assert_ids_of_transformers(saved, texts)
