"""Settings in a tokenizer's folder: the ids of `transformers`, or a refusal that names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import transformers

from data_pipeline.building.build import build
from data_pipeline.building.config import Config as BuildConfig
from data_pipeline.reading.dataset import Dataset
from data_pipeline.sources.kinds import jsonl
from data_pipeline.tokenizers.foreign_settings import BERT_CLASSES, GPT2_CLASSES
from data_pipeline.tokenizers.tokenizer import Config, Tokenizer
from samestep.errors import DataError
from trainer.models.families import bert as family
from trainer.publish.tokenizer import adapt

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "mochte",
    "möchte",
    "Möchte",
    "er",
    "covid",
    "##19",
    "19",
    "[",
    "]",
    "url",
    "unused",
    "##1",
]
WORDS += ["中", "国", "##国", "中国", ".", "1", "ab", "##ab", "<", ">", "new", "##s"]
SIZE = len(SPECIAL + WORDS)
TEXTS = ["Er möchte, MÖCHTE er?", "covid19 [url] covid 19 [unused1]", "中国 中 国.", "ab abab", ""]
TEXTS += ["<new> news [URL]<e>ab", " ab  ab "]
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def write(folder: Path, **files: object) -> Path:
    """Writes JSON files of these names, without .json, to a folder."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def bert(folder: Path, special: list[str] = SPECIAL, **files: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n")
    settings = {"do_lower_case": True, "tokenizer_class": "BertTokenizer"}
    settings |= files.pop("tokenizer_config", {})
    others = {"config": {"model_type": "bert"}, **files}
    return write(folder, tokenizer_config=settings, **others)


def gpt2(folder: Path, **files: object) -> Path:
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *BYTES, "ab", "<mask>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    folder.mkdir(exist_ok=True)
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    defaults = {"tokenizer_config": {}, "config": {"model_type": "roberta"}}
    return write(folder, vocab=vocab, **(defaults | files))


def assert_ids_of_transformers(folder: Path, export: Path) -> Tokenizer:
    """Compares the ids, and those of the folder that `save` writes, read by both."""
    ours = Tokenizer.load(folder)
    ids = [tokens.tolist() for tokens in ours.encode_batch(TEXTS)]
    ours.save(export)
    shutil.copy(folder / "config.json", export)
    for source in (folder, export):
        # No text of samestep becomes a special token.
        theirs = transformers.AutoTokenizer.from_pretrained(source, split_special_tokens=True)
        assert theirs(TEXTS, add_special_tokens=False)["input_ids"] == ids
        assert len(theirs) == ours.vocabulary.size
    for saved in (False, True):
        again = Tokenizer.load(export, saved=saved)
        assert again.fingerprint == ours.fingerprint
        assert again.vocabulary == ours.vocabulary
    return ours


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"strip_accents": False},
        {"strip_accents": True, "do_lower_case": False},
        {"do_lower_case": False},
        {"tokenize_chinese_chars": False},
        {"strip_accents": None, "never_split": None, "do_basic_tokenize": True},
        {"tokenizer_class": "DistilBertTokenizer", "strip_accents": False},
        {"tokenizer_class": "ElectraTokenizerFast", "do_lower_case": False},
        {"tokenizer_class": "MobileBertTokenizer", "tokenize_chinese_chars": False},
        {"model_max_length": 512, "name_or_path": "x", "unknown": 3, "padding_side": "left"},
    ],
)
def test_settings_of_bert_are_those_of_transformers(settings, tmp_path):
    assert_ids_of_transformers(
        bert(tmp_path / "bert", tokenizer_config=settings), tmp_path / "export"
    )


@pytest.mark.parametrize("add_prefix_space", [True, False])
@pytest.mark.parametrize("kind", ["RobertaTokenizer", "GPT2Tokenizer", "BlenderbotTokenizer"])
def test_a_space_before_a_text_is_that_of_transformers(add_prefix_space, kind, tmp_path):
    settings = {"tokenizer_class": kind, "add_prefix_space": add_prefix_space}
    settings |= {"unk_token": "<unk>", "pad_token": "<pad>"}
    settings |= dict.fromkeys(("bos_token", "cls_token"), "<s>")
    settings |= dict.fromkeys(("eos_token", "sep_token"), "</s>")
    folder = gpt2(tmp_path / "gpt2", tokenizer_config={**settings, "mask_token": "<mask>"})
    assert_ids_of_transformers(folder, tmp_path / "export")


@pytest.mark.parametrize(("make", "classes"), [(bert, BERT_CLASSES), (gpt2, GPT2_CLASSES)])
def test_every_class_that_is_read_gives_these_ids(make, classes, tmp_path):
    for kind in sorted(classes):
        if not hasattr(transformers, kind):  # removed by a newer version
            continue
        folder = make(tmp_path / kind, tokenizer_config={"tokenizer_class": kind})
        ids = [tokens.tolist() for tokens in Tokenizer.load(folder).encode_batch(TEXTS)]
        theirs = getattr(transformers, kind).from_pretrained(folder, split_special_tokens=True)
        assert theirs(TEXTS, add_special_tokens=False)["input_ids"] == ids, kind


def entry(content: str, special: bool = False, **flags: bool) -> dict[str, object]:
    fields = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": not special}
    return {"content": content, "special": special} | fields | flags


def after(size: int, *tokens: str | dict[str, object]) -> dict[str, dict[str, object]]:
    """An added_tokens_decoder whose first id is `size`."""
    entries = (entry(token) if isinstance(token, str) else token for token in tokens)
    return {str(size + i): fields for i, fields in enumerate(entries)}


ADDED = {
    "added_tokens.json": lambda n: {"added_tokens": {"covid19": n + 1, "[url]": n}},
    "special in added_tokens.json": lambda n: {
        "added_tokens": {"covid19": n + 1, "[URL]": n},
        "tokenizer_config": {"additional_special_tokens": ["[URL]"]},
    },
    "added_tokens_decoder": lambda n: {
        "tokenizer_config": {
            "added_tokens_decoder": after(
                n, "Covid19", entry("[URL]", normalized=False), entry("<e>", True)
            )
        }
    },
    "whole words": lambda n: {
        "tokenizer_config": {
            "added_tokens_decoder": after(
                n,
                entry("ovid", single_word=True),
                entry("[uRL", lstrip=True, normalized=False),
                entry("国 中", rstrip=True),
            )
        }
    },
    "additional_special_tokens": lambda n: {
        "tokenizer_config": {
            "additional_special_tokens": [
                "<e>",
                "ab",
                {"__type": "AddedToken"} | entry("<new>", True),
            ]
        }
    },
    "extra_special_tokens": lambda n: {"tokenizer_config": {"extra_special_tokens": ["<new>"]}},
    "roles": lambda n: {"special_tokens_map": {"pad_token": "<pad2>", "bos_token": entry("<b>")}},
    "both": lambda n: {
        "tokenizer_config": {"pad_token": "<p>", "added_tokens_decoder": after(n, "covid19")},
        "special_tokens_map": {"pad_token": "<q>"},
        "added_tokens": {"[url]": n},
    },
}


@pytest.mark.parametrize("has_json", [False, True])
@pytest.mark.parametrize("make", [bert, gpt2])
@pytest.mark.parametrize("files", ADDED.values(), ids=ADDED)
def test_added_tokens_keep_their_ids(files, make, has_json, tmp_path):
    folder = make(tmp_path / "model")
    plain = Tokenizer.load(folder)
    if has_json:
        plain.save(tmp_path / "plain")
        shutil.copy(tmp_path / "plain" / "tokenizer.json", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    more = files(plain.vocabulary.size)
    more["tokenizer_config"] = settings | more.get("tokenizer_config", {})
    write(folder, **more)
    tokenizer = assert_ids_of_transformers(folder, tmp_path / "export")
    assert tokenizer.vocabulary.size > plain.vocabulary.size
    if has_json:  # a dataset of an earlier version, which has ignored the settings
        assert Tokenizer.load(folder, saved=True).fingerprint == plain.fingerprint


def test_special_tokens_may_have_other_names(tmp_path):
    special = ["<p>", "<U>", "<c>", "<S>", "<m>"]
    roles = dict(zip(("pad", "unk", "cls", "sep", "mask"), special, strict=True))
    names = {f"{role}_token": name for role, name in roles.items()}
    folder = bert(tmp_path / "bert", special, special_tokens_map=names)
    tokenizer = assert_ids_of_transformers(folder, tmp_path / "export")
    v = tokenizer.vocabulary
    assert (v.pad, v.cls, v.sep, v.mask, v.special) == (0, 2, 3, 4, (0, 1, 2, 3, 4))
    assert tokenizer.encode_batch(["unknown"])[0].tolist() == [1]
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer.load(folder).normalized("ÄB") == "ÄB"  # "Möchte" is of a cased vocabulary
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert theirs("er", "er")["input_ids"] == [2, 8, 3, 8, 3]


# What save_pretrained of several versions of transformers writes beside published tokenizers.
PUBLISHED = {
    "bert 2019": (bert, {"do_lower_case": True, "model_max_length": 512}),
    "bert 4.30": (
        bert,
        {
            **dict(
                zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=False)
            ),
            "mask_token": "[MASK]",
            "do_lower_case": True,
            "do_basic_tokenize": True,
            "never_split": None,
            "strip_accents": None,
            "tokenize_chinese_chars": True,
            "name_or_path": "x",
            "special_tokens_map_file": "/x",
            "model_max_length": 512,
            "clean_up_tokenization_spaces": True,
            "tokenizer_class": "BertTokenizer",
        },
    ),
    "bert 4.46": (
        bert,
        {
            "added_tokens_decoder": after(0, *(entry(name, True) for name in SPECIAL)),
            "extra_special_tokens": {},
            "tokenizer_class": "BertTokenizerFast",
            "max_length": 128,
            "stride": 0,
            "truncation_side": "right",
            "pad_token_type_id": 0,
        },
    ),
    "bert 5": (
        bert,
        {"backend": "tokenizers", "is_local": False, "tokenizer_class": "BertTokenizer"},
    ),
    "roberta 2019": (gpt2, {"model_max_length": 512}),
    "roberta 4.46": (
        gpt2,
        {
            "added_tokens_decoder": {
                "0": entry("<s>", True, normalized=True),
                "261": entry("<mask>", True, lstrip=True),
            },
            "add_prefix_space": False,
            "errors": "replace",
            "trim_offsets": True,
            "bos_token": "<s>",
            "cls_token": "<s>",
            "mask_token": "<mask>",
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "RobertaTokenizer",
        },
    ),
    "opt": (
        gpt2,
        {
            "bos_token": {"__type": "AddedToken"} | entry("</s>", True, normalized=True),
            "add_bos_token": True,
            "tokenizer_class": "GPT2Tokenizer",
            "unk_token": "</s>",
        },
    ),
}


@pytest.mark.parametrize("has_json", [False, True])
@pytest.mark.parametrize(("make", "settings"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_settings_change_nothing(make, settings, has_json, tmp_path):
    plain = Tokenizer.load(make(tmp_path / "plain"))
    folder = make(tmp_path / "model", tokenizer_config=settings)
    if has_json:
        plain.save(tmp_path / "saved")
        shutil.copy(tmp_path / "saved" / "tokenizer.json", folder)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.fingerprint == plain.fingerprint
    assert tokenizer.vocabulary.size == plain.vocabulary.size


@pytest.mark.parametrize("file", ["tokenizer_config", "config"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        *((bert, f"{name}Tokenizer") for name in ("BertJapanese", "Bertweet", "Phobert", "Esm")),
        *((bert, f"{name}Tokenizer") for name in ("Funnel", "RoFormer", "ProphetNet", "Canine")),
        *((bert, name) for name in ("RobertaTokenizer", "ByT5Tokenizer", "OtherTokenizerFast")),
        *((gpt2, f"{name}Tokenizer") for name in ("CTRL", "CLIP", "Flaubert", "Herbert", "XLM")),
        *((gpt2, f"{name}Tokenizer") for name in ("OpenAIGPT", "BioGpt", "Qwen2", "Whisper")),
        (gpt2, "BertTokenizer"),
    ],
)
def test_files_of_another_class_are_refused_by_its_name(make, kind, file, tmp_path):
    settings = {"tokenizer_config": {"tokenizer_class": None}, "config": {}}
    settings[file] = {"tokenizer_class": kind}
    name = kind.removesuffix("Fast")
    with pytest.raises(DataError, match=rf"{name} of transformers does not use vocab.*\. [UC]"):
        Tokenizer.load(make(tmp_path / "model", **settings))


@pytest.mark.parametrize(
    ("make", "files", "message"),
    [
        (
            bert,
            {"config": {"model_type": "roformer"}, "tokenizer_config": {"tokenizer_class": None}},
            "RoFormerTokenizer of transformers",
        ),
        (gpt2, {"config": {"model_type": "clip"}}, "CLIPTokenizer of transformers"),
        (bert, {"tokenizer_config": {"never_split": ["url"]}}, r"never_split is \['url'\]"),
        (bert, {"tokenizer_config": {"do_basic_tokenize": False}}, "do_basic_tokenize is False"),
        (bert, {"tokenizer_config": {"strip_accents": "no"}}, "strip_accents is 'no'"),
        (bert, {"tokenizer_config": {"wordpieces_prefix": "@@"}}, "wordpieces_prefix is '@@'"),
        (bert, {"added_tokens": {"new word": 99}}, "'new word' has the id 99"),
        (bert, {"added_tokens": {"er": 99}}, "'er' has the id 99"),
        (bert, {"tokenizer_config": {"added_tokens_decoder": {"7": "er"}}}, "cannot be read"),
        (
            bert,
            {"tokenizer_config": {"auto_map": {"AutoTokenizer": ["a.B", None]}}},
            "auto_map in tokenizer_config.json",
        ),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(make, files, message, tmp_path):
    with pytest.raises(DataError, match=message):
        Tokenizer.load(make(tmp_path / "model", **files))


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (bert, "do_lower_case", False),
        (bert, "strip_accents", False),
        (bert, "tokenize_chinese_chars", False),
        (gpt2, "add_prefix_space", True),
    ],
)
def test_a_tokenizer_json_of_other_settings_is_refused(make, name, value, tmp_path):
    plain = make(tmp_path / "plain")
    Tokenizer.load(plain).save(tmp_path / "saved")
    folder = make(tmp_path / "model", tokenizer_config={name: value})
    shutil.copy(tmp_path / "saved" / "tokenizer.json", folder)
    with pytest.raises(DataError, match=f"{name} is {json.dumps(value)} in tokenizer_config.json"):
        Tokenizer.load(folder)
    assert Tokenizer.load(folder, saved=True).fingerprint == Tokenizer.load(plain).fingerprint
    settings = {"tokenizer_class": "BertJapaneseTokenizer"}
    with pytest.raises(DataError, match="BertJapaneseTokenizer"):
        Tokenizer.load(write(folder, tokenizer_config=settings))


def test_defaults_of_a_class_that_a_tokenizer_json_does_not_have_are_named(tmp_path, caplog):
    folder = bert(tmp_path / "cased", tokenizer_config={"do_lower_case": None})
    tokenizer = Tokenizer.load(folder)
    assert "has capital letters" in caplog.text
    tokenizer.save(tmp_path / "saved")
    shutil.copy(tmp_path / "saved" / "tokenizer.json", folder)
    caplog.clear()
    assert Tokenizer.load(folder).fingerprint == tokenizer.fingerprint
    assert "tokenizer.json has do_lower_case false" in caplog.text
    caplog.clear()
    assert Tokenizer.load(tmp_path / "saved").fingerprint == tokenizer.fingerprint
    assert not caplog.messages


@pytest.fixture(scope="module")
def t5(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("t5")
    texts = ["a few words to train on, again and again", "and some others, of more letters"] * 20
    Config("", "unigram", vocab_size=28, sentinels=3).train(texts).save(folder)
    return folder


def test_added_tokens_of_a_sentencepiece_model_are_its_sentinels(t5, tmp_path):
    size = Tokenizer.load(t5).vocabulary.size
    sentinels = {f"<extra_id_{n}>": size - 1 - n for n in range(3)}
    folder = tmp_path / "t5"
    shutil.copytree(t5, folder)
    write(folder, added_tokens=sentinels)
    assert Tokenizer.load(folder).fingerprint == Tokenizer.load(t5).fingerprint
    write(folder, added_tokens=sentinels | {"covid19": size})
    with pytest.raises(DataError, match=f"'covid19' has the id {size}.*AutoTokenizer"):
        Tokenizer.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, extra_ids=3)
    theirs.save_pretrained(tmp_path / "converted")
    ours = Tokenizer.load(tmp_path / "converted")
    ids = theirs(["a covid19 word"], add_special_tokens=False)["input_ids"]
    assert [tokens.tolist() for tokens in ours.encode_batch(["a covid19 word"])] == ids
    assert size in ids[0]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"do_lower_case": True}}, "do_lower_case is True"),
        ({"tokenizer_config": {"keep_accents": False}}, "keep_accents is False"),
        ({"tokenizer_config": {"sp_model_kwargs": {"alpha": 0.1}}}, "sp_model_kwargs is"),
        ({"special_tokens_map": {"eos_token": "<eos>"}}, "eos_token is '<eos>'"),
        ({"special_tokens_map": {"mask_token": "<m>"}}, "no special token '<m>'"),
        ({"tokenizer_config": {"additional_special_tokens": ["<x>"]}}, "no special token '<x>'"),
        *(
            ({"config": {"model_type": model}, "tokenizer_config": {}}, kind)
            for model, kind in (
                ("xlm-roberta", "XLMRobertaTokenizer"),
                ("camembert", "CamembertTokenizer"),
                ("deberta-v2", "DebertaV2Tokenizer"),
            )
        ),
        *(
            ({"tokenizer_config": {"tokenizer_class": f"{name}Tokenizer"}}, f"{name}Tokenizer")
            for name in ("Barthez", "Bartpho", "Camembert", "XLMRoberta", "Pegasus", "MBart")
        ),
    ],
)
def test_what_a_sentencepiece_model_does_not_do_is_refused(t5, files, message, tmp_path):
    folder = tmp_path / "t5"
    shutil.copytree(t5, folder)
    with pytest.raises(DataError, match=message):
        Tokenizer.load(write(folder, **files))


def test_a_model_of_t5_has_the_sentinels_of_its_class(t5, tmp_path):
    folder = tmp_path / "t5"
    shutil.copytree(t5, folder)
    for model, sentinels in (("t5", 100), ("other", 0)):
        write(folder, config={"model_type": model}, tokenizer_config={"tokenizer_class": None})
        assert len(Tokenizer.load(folder).vocabulary.sentinels) == sentinels


def test_added_tokens_reach_the_dataset_and_the_export(tmp_path):
    folder = bert(tmp_path / "model", added_tokens={"[url]": SIZE, "covid19": SIZE + 1})
    text = "Möchte er covid19 [url]?"
    (tmp_path / "texts.jsonl").write_text(f"{json.dumps({'text': text})}\n" * 4)
    source = jsonl.Config((str(tmp_path / "texts.jsonl"),))
    output = str(tmp_path / "dataset")
    config = BuildConfig(source, Config(str(folder)), output, heldout_fraction=0, workers=1)
    manifest = build(config)
    assert manifest is not None
    dataset = Dataset.open(output)
    shard = dataset.open_shard(manifest.shards[0])
    stored = shard.tokens[shard.start[0] : shard.start[0] + shard.length[0]].tolist()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert stored == theirs(text, add_special_tokens=False)["input_ids"]
    assert {SIZE, SIZE + 1} < set(stored)
    dataset.tokenizer.save(tmp_path / "export")
    model = family.Config(vocab_size=manifest.vocab_size, layers=1, width=8, heads=1, ffn_width=8)
    adapt(tmp_path / "export", model, dataset.tokenizer.vocabulary, generates_targets=False)
    write(tmp_path / "export", config={"model_type": "bert"})
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert exported(text)["input_ids"] == theirs(text)["input_ids"]
