import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers

from data_pipeline.tokenizers.tokenizer import Config, Tokenizer
from samestep.errors import ConfigError, DataError

TEXT = "the quick brown fox jumps over a lazy dog while naive café owners pack fifty boxes of jugs"
HARD = [
    "The quick brown fox.",
    "",
    " ",
    "naïve café — ÉCOLE",
    "日本語 and 😀 and \x00\x01 and ﬁ",
    "supercalifragilistic" * 10,
    "tabs\tand\n\nlines\r\n",
    "[MASK] [CLS] <mask> </s><s> <|endoftext|> [PAD]",
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def train(algorithm: str, lowercase: bool = False, strip_accents: bool | None = None) -> Tokenizer:
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(TEXT.split(), 30)).capitalize() + "." for _ in range(200)]
    case = {"lowercase": lowercase, "strip_accents": strip_accents}
    return Config("unused", algorithm, vocab_size=400, **case).train(texts)


@pytest.fixture(
    scope="module",
    params=["wordpiece", "wordpiece-lowercase", "wordpiece-accents", "bpe", "bpe-lowercase"],
)
def tokenizer(request) -> Tokenizer:
    algorithm, _, case = request.param.partition("-")
    return train(algorithm, bool(case), False if case == "accents" else None)


def ids_of(tokenizer, texts=HARD):
    return [tokens.tolist() for tokens in tokenizer.encode_batch(texts)]


def test_a_saved_tokenizer_is_the_same_tokenizer(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.vocabulary == tokenizer.vocabulary
    assert ids_of(loaded) == ids_of(tokenizer)
    loaded.save(tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_transformers_loads_it_and_gives_the_same_ids(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [
        text for text in HARD if "MASK" not in text
    ]  # they read "[MASK]" in a text as the special token
    assert theirs(texts, add_special_tokens=False)["input_ids"] == ids_of(tokenizer, texts)
    v = tokenizer.vocabulary
    assert (theirs.pad_token_id, theirs.cls_token_id, theirs.sep_token_id) == (v.pad, v.cls, v.sep)
    assert theirs.mask_token_id == v.mask
    assert theirs("fox")["input_ids"] == [v.cls, *ids_of(tokenizer, ["fox"])[0], v.sep]


def test_no_text_produces_a_special_token(tokenizer):
    special = {i for i in tokenizer.vocabulary.special if tokenizer.token(i) != "[UNK]"}
    assert not special.intersection(token for ids in ids_of(tokenizer) for token in ids)


def test_special_tokens_have_the_ids_of_bert_and_roberta():
    bert, roberta = train("wordpiece"), train("bpe")
    assert [bert.token(i) for i in range(5)] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    v = bert.vocabulary
    assert (v.pad, v.cls, v.sep, v.mask, v.special) == (0, 2, 3, 4, (0, 1, 2, 3, 4))
    assert [roberta.token(i) for i in range(4)] == ["<s>", "<pad>", "</s>", "<unk>"]
    v = roberta.vocabulary
    assert (v.pad, v.cls, v.sep, v.mask) == (1, 0, 2, v.size - 1)
    assert v.special == (0, 1, 2, 3, v.size - 1)
    assert v.size <= 400


@pytest.mark.parametrize("algorithm", ["wordpiece", "words", "bpe", "unigram", "sentencepiece_bpe"])
def test_two_trainings_give_the_same_tokenizer(algorithm: str) -> None:
    # Many words are equally frequent, so that there are ties between merges.
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("aábcdefgh"), 6)) for _ in range(600)]
    config = Config("unused", algorithm, vocab_size=300)
    one, two = (config.train([" ".join(words)]) for _ in range(2))
    assert one.fingerprint == two.fingerprint


def test_a_vocabulary_has_the_most_frequent_characters() -> None:
    # 1,001 letters, of which one occurs once; they begin and continue words.
    letters = [chr(code) for code in range(0x1000, 0x8000) if chr(code).isalpha()][:1001]
    texts = [" ".join(letters[:-1]) + " " + "".join(letters[:-1]), letters[-1]]
    vocab = Config("unused", "wordpiece", vocab_size=4000).train(texts)
    assert vocab.has(letters[0])
    assert not vocab.has(letters[-1])


def test_full_stops_are_the_tokens_that_are_nothing_else(tokenizer):
    stops = tokenizer.vocabulary.full_stops
    assert {tokenizer.token(i) for i in stops} <= {".", "##.", "Ġ."}
    assert tokenizer.encode_batch(["One."])[0][-1] in stops


def test_byte_level_bpe_keeps_every_text():
    tokenizer = train("bpe")
    for text, ids in zip(HARD, tokenizer.encode_batch(HARD), strict=True):
        assert tokenizer.decode(ids) == text


def test_lowercase_and_cased_differ_as_said():
    cased, uncased = train("wordpiece"), train("wordpiece", lowercase=True)
    assert ids_of(uncased, ["THE CAFÉ"]) == ids_of(uncased, ["the cafe"])
    assert ids_of(cased, ["THE"]) != ids_of(cased, ["the"])


@pytest.mark.parametrize("algorithm", ["wordpiece", "words"])
def test_lower_case_may_keep_accents(algorithm: str, tmp_path: Path):
    text = "Die Straße führt über Köln nach Süden"
    config = partial(Config, "unused", algorithm, 200, min_frequency=1)
    german = config(lowercase=True, strip_accents=False).train([text])
    assert german.normalized("KÖLN") == "köln"
    (upper,), (lower,) = ids_of(german, [text.upper().replace("SS", "ß")]), ids_of(german, [text])
    assert upper == lower
    assert german.has("köln") or german.has("kö")
    assert ids_of(german, ["Köln"]) != ids_of(german, ["Koln"])
    german.save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["do_lower_case"], settings["strip_accents"]) == (True, False)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs([text], add_special_tokens=False)["input_ids"] == [lower]
    if algorithm == "wordpiece":
        bert = transformers.BertTokenizerFast.from_pretrained(tmp_path)
        assert bert([text], add_special_tokens=False)["input_ids"] == [lower]
    # One spelling of each: what the default says as well is the same tokenizer.
    for lowercase in (True, False):
        said, silent = (
            config(lowercase=lowercase, strip_accents=lowercase),
            config(lowercase=lowercase),
        )
        assert said.train([text]).fingerprint == silent.train([text]).fingerprint
    assert config(strip_accents=True).train([text]).normalized("Köln") == "Koln"


def test_other_algorithms_keep_accents():
    for algorithm in ("bpe", "unigram", "sentencepiece_bpe"):
        with pytest.raises(ConfigError, match=f"strip_accents is true, and {algorithm} keeps"):
            Config("unused", algorithm, strip_accents=True)
    assert train("bpe", lowercase=True, strip_accents=False).normalized("KÖLN") == "köln"


def test_arrays_have_the_narrowest_type(tokenizer):
    assert {tokens.dtype for tokens in tokenizer.encode_batch(HARD)} == {np.dtype(np.uint16)}
    assert tokenizer.encode_batch([]) == []


def test_the_fingerprint_tells_tokenizers_apart(tmp_path):
    tokenizers_ = [
        train("wordpiece"),
        train("wordpiece", lowercase=True),
        train("bpe"),
        train("bpe", lowercase=True),
    ]
    prints = {tokenizer.fingerprint for tokenizer in tokenizers_}
    tokenizers_[0].save(tmp_path)
    tree = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tree["model"]["vocab"]
    vocab["the"], vocab["fox"] = vocab["fox"], vocab["the"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    prints.add(Tokenizer.load(tmp_path).fingerprint)
    assert len(prints) == 5


def test_the_fingerprint_is_the_same_for_every_version_of_tokenizers(tmp_path):
    """Golden values, the same in versions 0.21.0 and 0.23.3.

    Any other would disown the tokenizers of all datasets.
    """
    wordpiece, bpe = tmp_path / "wordpiece", tmp_path / "bpe"
    wordpiece.mkdir()
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es"]
    (wordpiece / "vocab.txt").write_text("\n".join(vocab) + "\n")
    assert (
        Tokenizer.load(wordpiece).fingerprint
        == "52f8d7c45ae8acbac4059e1352a1360c7ced1f431ce736849ca712269e968011"
    )
    bpe.mkdir()
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        *alphabet,
        *("".join(merge) for merge in merges),
        "<mask>",
    ]
    (bpe / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocab)}))
    (bpe / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(merge) for merge in merges) + "\n"
    )
    assert (
        Tokenizer.load(bpe).fingerprint
        == "0df38a37213417cd18cb4717415fae13d43788d1cb03a86167e59558c46e1e9e"
    )


def test_settings_that_say_nothing_do_not_change_the_fingerprint(tmp_path):
    tokenizer = train("bpe")
    tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text())
    for name in ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges"):
        del tree["model"][name]  # as a version before that setting would write it
    tree["model"]["continuing_subword_prefix"] = ""
    file.write_text(json.dumps(tree))
    assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint
    tree["pre_tokenizer"]["add_prefix_space"] = True
    file.write_text(json.dumps(tree))
    assert Tokenizer.load(tmp_path, saved=True).fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize("lowercase", [True, False])
def test_bert_vocab_txt_gives_the_ids_of_transformers(tmp_path, lowercase):
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pieces = [*letters, *(f"##{c}" for c in letters), "fox", "##ing", "café", ".", "日", "the"]
    pieces += [] if lowercase else ["The", "[unused1]"]
    vocab = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    ours = Tokenizer.load(tmp_path)
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=lowercase)
    texts = [*HARD[:-1], "The foxing 日本"]
    assert ids_of(ours, texts) == theirs(texts, add_special_tokens=False)["input_ids"]
    assert ours.vocabulary.size == len(vocab)
    assert ours.vocabulary.special == (0, 2, 3, 4, 5)
    theirs.save_pretrained(tmp_path / "theirs")  # the same tokenizer as a Hugging Face folder
    assert ids_of(Tokenizer.load(tmp_path / "theirs"), texts) == ids_of(ours, texts)
    ours.save(tmp_path / "ours")
    assert Tokenizer.load(tmp_path / "ours").fingerprint == ours.fingerprint


@pytest.mark.parametrize(
    "special", [["<|endoftext|>"], ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]]
)
def test_gpt2_vocab_json_and_merges_give_the_ids_of_transformers(tmp_path, special):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("f", "o"), ("fo", "x")]
    vocab = {
        token: i
        for i, token in enumerate([*special, *alphabet, *("".join(merge) for merge in merges)])
    }
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(merge) for merge in merges) + "\n"
    )
    ours = Tokenizer.load(tmp_path)
    kind = transformers.GPT2Tokenizer if len(special) == 1 else transformers.RobertaTokenizer
    theirs = kind(vocab=vocab, merges=merges)
    assert ids_of(ours, HARD[:-1]) == theirs(HARD[:-1], add_special_tokens=False)["input_ids"]
    assert ours.vocabulary.special == tuple(range(len(special)))
    expected = (None, 0, 0, None) if len(special) == 1 else (1, 0, 2, 4)
    v = ours.vocabulary
    assert (v.pad, v.cls, v.sep, v.mask) == expected
    theirs.save_pretrained(tmp_path / "theirs")
    between = Tokenizer.load(tmp_path / "theirs").vocabulary.between
    assert between == v.between == (1 if len(special) == 1 else 2)


def test_roles_come_from_the_settings_of_the_folder(tmp_path):
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2, "X": 3}, unk_token="X")
    )
    backend.add_special_tokens(["</s>", "<pad>", "<extra_id_0>"])
    backend.enable_truncation(1)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": "</s>",
                "pad_token": {"content": "<pad>"},
                "mask_token": "X",
                "cls_token": "new",
            }
        )
    )
    tokenizer = Tokenizer.load(tmp_path)
    v = tokenizer.vocabulary
    assert (v.size, v.pad, v.cls, v.sep, v.mask, v.special) == (6, 0, 5, 1, 3, (0, 1, 3, 4, 5))
    assert (v.eos, v.sentinels) == (1, (4,))
    assert ids_of(tokenizer, ["a"]) == [[2]]  # neither cut nor padded
    assert tokenizer.token(4) == "<extra_id_0>"
    assert tokenizer.token(99) == "<99>"


def test_what_cannot_be_loaded_is_explained(tmp_path):
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "folders" / name).mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "gone", tmp_path / "folders"):
        with pytest.raises(
            DataError, match=rf"no tokenizer in {folder}: .*samestep data tokenizer"
        ):
            Tokenizer.load(folder)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "setting",
    [{"vocab_size": 3}, {"algorithm": "bpe", "vocab_size": 260}, {"sample": 0.0}, {"sample": 1.5}],
)
def test_settings_that_cannot_be_are_refused(setting):
    with pytest.raises(ConfigError, match=r"vocab_size|sample"):
        Config("path", **setting)
