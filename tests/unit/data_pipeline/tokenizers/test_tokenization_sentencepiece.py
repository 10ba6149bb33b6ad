"""SentencePiece tokenizers: the library's own ids, T5's special tokens, and what transformers makes
of the files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import sentencepiece
import torch
import transformers
from sentencepiece import sentencepiece_model_pb2

from data_pipeline.building import build
from data_pipeline.building.config import Config as BuildConfig
from data_pipeline.building.push import push
from data_pipeline.building.tokenizer_training import train_tokenizer
from data_pipeline.building.verify import verify
from data_pipeline.format.shards import Shard
from data_pipeline.reading.dataset import Dataset
from data_pipeline.sources.kinds import jsonl
from data_pipeline.tokenizers.sentencepiece import SentencePiece, sample
from data_pipeline.tokenizers.tokenizer import Config, Tokenizer
from samestep.errors import ConfigError, DataError
from trainer.checkpoint.huggingface import save_folder
from trainer.publish.fast_tokenizer import convert

TEXTS = [topics[name] for name in sorted(topics)]
# Short texts without runs of a character: transformers adds up scores in fp64, and by words, so
# that it cuts one of two ways that score the same, or nearly so in a long text, where SentencePiece
# may cut the other.
LINES = [re.sub(r"(.)\1{2,}", r"\1", line) for text in TEXTS for line in text.splitlines()]
WHITE = "".join(chr(c) for c in range(0x3001) if chr(c).isspace()) + "\u180e\u200b\u2060\ufeff▁"
# Combining marks, joiners, characters that NFKC spells with a space or as several, other scripts.
HARD = (
    WHITE
    + "   \n\n\t\r\x00\x01\x1b\x7f\u0301\u0308\u200d\xad\u00b4\u00a8ﷺ…½²ﬁ"
    + "'_,.-(5abstÉßΣςİǅ日本の한ع😀\U000e0001</s><extra_id_0>"
)
MODELS = {
    "unigram": {"algorithm": "unigram"},
    "unigram-lowercase": {"algorithm": "unigram", "lowercase": True},
    "unigram-bytes": {"algorithm": "unigram", "byte_fallback": True},
    "bpe-bytes": {"algorithm": "sentencepiece_bpe", "byte_fallback": True},
}


def train(size: int = 1200, texts: list[str] = TEXTS[::4], **settings: object) -> Tokenizer:
    return Config("unused", **{"algorithm": "unigram", "vocab_size": size, **settings}).train(texts)


@pytest.fixture(scope="module")
def trained() -> dict[str, Tokenizer]:
    return {name: train(**settings) for name, settings in MODELS.items()}


@pytest.fixture(params=MODELS)
def tokenizer(request, trained) -> Tokenizer:
    return trained[request.param]


@pytest.fixture(scope="module")
def t5(trained) -> Tokenizer:
    return trained["unigram"]


def processor(tokenizer: Tokenizer) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(
        model_proto=tokenizer._backend.files()["spiece.model"]
    )


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokens.tolist() for tokens in tokenizer.encode_batch(texts)]


def test_special_tokens_and_sentinels_have_the_ids_of_t5(t5) -> None:
    v = t5.vocabulary
    assert (v.size, v.pad, v.eos, v.sep, v.cls, v.mask) == (1300, 0, 1, 1, None, None)
    assert v.sentinels == tuple(range(1299, 1199, -1))
    assert v.special == (0, 1, 2, *range(1200, 1300))
    assert [t5.token(i) for i in (0, 1, 2, 1299, 1200, 1300)] == [
        "<pad>",
        "</s>",
        "<unk>",
        "<extra_id_0>",
        "<extra_id_99>",
        "<1300>",
    ]
    assert set(v.continuing) == {i for i in range(1200) if not t5.token(i).startswith("▁")}


def test_full_stops_are_the_pieces_that_are_nothing_else(t5) -> None:
    stops = t5.vocabulary.full_stops
    assert {t5.token(i) for i in stops} == {".", "▁."} & {t5.token(i) for i in range(1200)}
    assert t5.encode_batch(["One."])[0][-1] in stops


def test_ids_are_those_of_the_library(tokenizer) -> None:
    texts = [*TEXTS, HARD, "", " "]
    assert ids_of(tokenizer, texts) == processor(tokenizer).encode(texts)
    assert {tokens.dtype for tokens in tokenizer.encode_batch(texts)} == {np.dtype(np.uint16)}
    assert tokenizer.encode_batch([]) == []


def model_of(tokenizer: Tokenizer, path: Path) -> Path:
    path.write_bytes(tokenizer._backend.files()["spiece.model"])
    return path


def test_no_text_produces_a_special_token(tokenizer) -> None:
    unknown = processor(tokenizer).unk_id()
    texts = ["</s> <pad><unk> <extra_id_0>", HARD]
    found = {i for ids in ids_of(tokenizer, texts) for i in ids}
    assert not found.intersection(set(tokenizer.vocabulary.special) - {unknown})
    assert (unknown in found) == (not processor(tokenizer).is_byte(3))


def test_ids_become_text_again(tokenizer) -> None:
    text = "this is a class, with (several) methods and attributes."
    assert tokenizer.decode(tokenizer.encode_batch([text])[0]) == text
    a, b = ids_of(tokenizer, ["a class", "the rest"])
    first, second = tokenizer.vocabulary.sentinels[:2]
    beyond = (
        tokenizer.vocabulary.size + 5
    )  # a model's table of tokens has more rows than there are tokens
    ids = [first, *a, second, *b, beyond, tokenizer.vocabulary.eos, tokenizer.vocabulary.pad]
    assert tokenizer.decode(ids) == "<extra_id_0> a class<extra_id_1> the rest</s><pad>"
    assert tokenizer.decode([]) == ""


def test_bytes_spell_what_has_no_piece(trained) -> None:
    text = "日本 😀"
    assert trained["bpe-bytes"].decode(trained["bpe-bytes"].encode_batch([text])[0]) == text
    assert (
        trained["unigram"].decode(trained["unigram"].encode_batch([text])[0])
        == " <unk> <unk>".strip()
    )


def test_lowercase_folds_case(trained) -> None:
    folded = trained["unigram-lowercase"]
    assert ids_of(folded, ["THE Class"]) == ids_of(folded, ["the class"])


def test_a_saved_tokenizer_is_the_same_tokenizer(tokenizer, tmp_path) -> None:
    tokenizer.save(tmp_path / "a")
    loaded = Tokenizer.load(tmp_path / "a")
    assert (loaded.fingerprint, loaded.vocabulary) == (tokenizer.fingerprint, tokenizer.vocabulary)
    loaded.save(tmp_path / "b")
    names = ("spiece.model", "tokenizer_config.json", "special_tokens_map.json")
    assert {file.name for file in (tmp_path / "b").iterdir()} == set(names)
    assert all(
        (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        for name in names
    )


def test_nothing_is_left_of_the_tokenizer_that_was_there(t5, tmp_path) -> None:
    wordpiece = Config("unused", vocab_size=300).train(TEXTS[:1])
    for tokenizer in (wordpiece, t5, wordpiece):
        tokenizer.save(tmp_path)
        assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint
    assert not (tmp_path / "spiece.model").exists()


@pytest.mark.long
def test_a_dataset_is_built_with_it_and_copied_with_it(s3_folder, tmp_path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    wanted = Config(str(tmp_path / "tokenizer"), "unigram", vocab_size=1200, sample=0.5)
    config = BuildConfig(
        jsonl.Config((str(corpus),)),
        wanted,
        str(tmp_path / "dataset"),
        heldout_fraction=0,
        workers=1,
    )
    tokenizer = train_tokenizer(config)
    assert tokenizer.vocabulary.size == 1300
    assert build.build(config).tokenizer_fingerprint == tokenizer.fingerprint
    dataset = Dataset.open(tmp_path / "dataset")
    shard = Shard.open(tmp_path / "dataset" / "train-000000.tar", np.uint16)
    cells = zip(shard.start, shard.length, strict=True)
    assert [shard.tokens[i : i + n].tolist() for i, n in cells] == ids_of(tokenizer, TEXTS)
    assert dataset.tokenizer.vocabulary == tokenizer.vocabulary
    push(tmp_path / "dataset", s3_folder)
    assert verify(s3_folder) == []


@pytest.mark.long
@pytest.mark.parametrize("load", [transformers.AutoTokenizer, transformers.T5TokenizerFast])
def test_transformers_loads_it_and_gives_the_same_ids(t5, tmp_path, load) -> None:
    t5.save(tmp_path / "tokenizer")
    save_folder(
        tmp_path / "exported",
        {"model_type": "t5"},
        {"weight": torch.zeros(1)},
        tmp_path / "tokenizer",
    )
    theirs = load.from_pretrained(tmp_path / "exported")
    assert theirs(LINES, add_special_tokens=False)["input_ids"] == ids_of(t5, LINES)
    v = t5.vocabulary
    assert (len(theirs), theirs.pad_token_id, theirs.eos_token_id) == (v.size, v.pad, v.eos)
    assert (
        tuple(theirs.convert_tokens_to_ids([f"<extra_id_{n}>" for n in range(100)])) == v.sentinels
    )
    ids = theirs("a <extra_id_0> class")["input_ids"]
    assert theirs.decode(ids) == t5.decode(ids)


def test_files_of_transformers_give_the_same_vocabulary(t5, tmp_path) -> None:
    t5.save(tmp_path / "ours")
    transformers.T5TokenizerFast.from_pretrained(tmp_path / "ours").save_pretrained(
        tmp_path / "theirs"
    )
    theirs = Tokenizer.load(tmp_path / "theirs")
    assert (tmp_path / "theirs" / "tokenizer.json").exists()
    assert theirs.vocabulary.sentinels == t5.vocabulary.sentinels
    assert (theirs.vocabulary.eos, theirs.vocabulary.pad) == (1, 0)
    assert ids_of(theirs, LINES) == ids_of(t5, LINES)


LOADERS = [
    transformers.AutoTokenizer.from_pretrained,
    transformers.T5TokenizerFast.from_pretrained,
    # As any program reads it that knows the package `tokenizers` alone.
    lambda folder: transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json")
    ),
]


@pytest.mark.parametrize("load", LOADERS)
def test_tokenizer_json_of_an_export_gives_the_same_ids(t5, tmp_path, load) -> None:
    t5.save(tmp_path)
    convert(tmp_path, t5.vocabulary)
    assert Tokenizer.load(tmp_path).fingerprint == t5.fingerprint, "spiece.model is read first"
    theirs = load(tmp_path)
    # All but NEL, U+0085, which T5's class in transformers takes for white space.
    hard = [f"a{character}b {character}x" for character in HARD if character != "\x85"]
    texts = [*LINES, *hard, "", " "]
    assert theirs(texts, add_special_tokens=False)["input_ids"] == ids_of(t5, texts)
    assert theirs("a class")["input_ids"] == [*ids_of(t5, ["a class"])[0], t5.vocabulary.eos]
    assert len(theirs) == t5.vocabulary.size


PROMPTS = [
    "<extra_id_0> walks in <extra_id_1> park",
    "a<extra_id_99>,b",
    "<extra_id_0><extra_id_1>",
    "x <extra_id_100> y",
    "  <extra_id_3>\u3000\u00a0b\tc  ",
    "<extra_id_10>",
    " <EXTRA_ID_0> <extra_id_00>",
    "no sentinel",
    "",
]


def test_prompts_have_sentinels_where_transformers_has_them(t5, tmp_path) -> None:
    t5.save(tmp_path / "ours")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    wanted = theirs(PROMPTS, add_special_tokens=False)["input_ids"]
    theirs.save_pretrained(tmp_path / "theirs")
    for tokenizer in (t5, Tokenizer.load(tmp_path / "theirs")):
        found = tokenizer.encode_prompts(PROMPTS)
        assert [tokens.tolist() for tokens in found] == wanted
        assert {tokens.dtype for tokens in found} == {np.dtype(np.uint16)}
    assert t5.vocabulary.sentinels[10] in wanted[5]
    plain = train(sentinels=0)
    assert ids_of(plain, PROMPTS) == [tokens.tolist() for tokens in plain.encode_prompts(PROMPTS)]


@pytest.mark.parametrize("name", ["unigram-bytes", "bpe-bytes"])
def test_a_model_that_transformers_cannot_run_gets_no_tokenizer_json(
    trained, tmp_path, name
) -> None:
    trained[name].save(tmp_path)
    convert(tmp_path, trained[name].vocabulary)
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.parametrize("name", ["unigram-bytes", "bpe-bytes"])
def test_transformers_is_not_told_to_load_what_it_would_read_otherwise(
    trained, tmp_path, name
) -> None:
    trained[name].save(tmp_path)
    with pytest.raises(ValueError, match="instantiate the backend tokenizer"):
        transformers.AutoTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("settings", "count"),
    [({"extra_ids": 7}, 7), ({"tokenizer_class": "T5Tokenizer"}, 100), ({}, 0)],
)
def test_the_settings_of_a_folder_say_how_many_sentinels_there_are(
    t5, tmp_path, settings, count
) -> None:
    model_of(t5, tmp_path / "spiece.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.vocabulary.sentinels) == count
    assert tokenizer.vocabulary.size == 1200 + count
    assert ids_of(tokenizer, TEXTS[:1]) == ids_of(t5, TEXTS[:1])
    assert (tokenizer.fingerprint == t5.fingerprint) == (count == 100)


def with_sentinels_inside(tokenizer: Tokenizer, folder: Path, kind: str, spelling: str) -> Path:
    """Writes a model with 100 sentinels among its pieces, as mT5's, and mT5's settings."""
    content = tokenizer._backend.files()["spiece.model"]
    model = sentencepiece_model_pb2.ModelProto.FromString(content)
    for number in range(99, -1, -1):
        piece = model.pieces.add()
        piece.piece, piece.type = spelling.format(number), getattr(piece, kind)
    (folder / "spiece.model").write_bytes(model.SerializeToString())
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("spelling", ["▁<extra_id_{}>", "<extra_id_{}>"])
@pytest.mark.parametrize("kind", ["NORMAL", "USER_DEFINED", "CONTROL"])
def test_sentinels_among_the_pieces_are_found(t5, tmp_path, kind, spelling) -> None:
    """mT5 has them at the end, spelled "▁<extra_id_0>", in descending order like T5."""
    folder = with_sentinels_inside(t5, tmp_path, kind, spelling)
    tokenizer = Tokenizer.load(folder)
    v = tokenizer.vocabulary
    assert (v.size, v.sentinels) == (1300, tuple(range(1299, 1199, -1)))
    assert v.special == t5.vocabulary.special
    texts = [*TEXTS[:5], HARD, "a <extra_id_0> b<extra_id_1>"]
    found = ids_of(tokenizer, texts)
    assert found == ids_of(t5, texts)
    assert not {i for ids in found for i in ids}.intersection(v.sentinels)
    assert [ids.tolist() for ids in tokenizer.encode_prompts(PROMPTS)] == [
        ids.tolist() for ids in t5.encode_prompts(PROMPTS)
    ]
    assert tokenizer.decode([1299, 1200]) == "<extra_id_0><extra_id_99>"
    tokenizer.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    assert (again.fingerprint, again.vocabulary) == (tokenizer.fingerprint, v)
    (folder / "tokenizer_config.json").unlink()
    assert Tokenizer.load(folder).vocabulary == v


def test_sentinels_are_not_added_to_a_model_that_has_some(t5, tmp_path) -> None:
    folder = with_sentinels_inside(t5, tmp_path, "USER_DEFINED", "▁<extra_id_{}>")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    assert Tokenizer.load(folder).vocabulary.size == 1300
    (folder / "tokenizer_config.json").write_text('{"extra_ids": 100}')
    with pytest.raises(
        DataError, match=r"100 sentinels .* extra_ids is 100, .* Set extra_ids to 0"
    ):
        Tokenizer.load(folder)
    # Of an earlier version, it keeps the ids with which a dataset was built.
    old = SentencePiece((folder / "spiece.model").read_bytes(), {"extra_ids": 100})
    assert (old.vocabulary.size, old.vocabulary.sentinels) == (1400, tuple(range(1399, 1299, -1)))


def test_transformers_finds_sentinels_among_the_pieces_at_the_same_ids(t5, tmp_path) -> None:
    folder = with_sentinels_inside(t5, tmp_path, "USER_DEFINED", "▁<extra_id_{}>")
    tokenizer = Tokenizer.load(folder)
    tokenizer.save(tmp_path / "ours")
    convert(tmp_path / "ours", tokenizer.vocabulary)
    text = "a <extra_id_0> class <extra_id_1>"
    for path in (folder, tmp_path / "ours"):
        theirs = transformers.AutoTokenizer.from_pretrained(path)
        assert len(theirs) == tokenizer.vocabulary.size
        assert theirs(text, add_special_tokens=False)["input_ids"] == (
            tokenizer.encode_prompts([text])[0].tolist()
        )
        assert theirs(LINES[:200], add_special_tokens=False)["input_ids"] == ids_of(
            tokenizer, LINES[:200]
        )
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "spiece.model").unlink(missing_ok=True)
    assert Tokenizer.load(tmp_path / "theirs").vocabulary.sentinels == (
        tokenizer.vocabulary.sentinels
    )


def test_a_bare_model_file_has_no_sentinels_and_may_lack_special_tokens(t5, tmp_path) -> None:
    tokenizer = Tokenizer.load(model_of(t5, tmp_path / "some.model"))
    assert tokenizer.vocabulary.sentinels == ()
    model = sentencepiece_model_pb2.ModelProto.FromString((tmp_path / "some.model").read_bytes())
    model.pieces[0].type, model.trainer_spec.pad_id = model.SentencePiece.UNUSED, -1
    (tmp_path / "some.model").write_bytes(model.SerializeToString())
    assert Tokenizer.load(tmp_path / "some.model").vocabulary.pad is None


def test_training_is_a_function_of_the_texts(t5) -> None:
    assert train(texts=TEXTS[::4][::-1]).fingerprint == t5.fingerprint
    assert train(texts=TEXTS[::4], sample_size="1GB").fingerprint == t5.fingerprint


def test_a_sample_is_bounded_and_does_not_depend_on_the_order() -> None:
    texts = [f"{i} " + "é" * (i % 50) for i in range(1000)]
    size = sum(len(text.encode()) for text in texts)
    chosen = sample(texts, size // 4)
    assert chosen == sample(texts[::-1], size // 4)
    assert 0.2 * size < sum(len(text.encode()) for text in chosen) <= size // 4
    assert set(chosen) < set(sample(texts, size // 2))
    assert sorted(sample(texts, size)) == sorted(texts)
    assert len(sample(texts, 1)) == 1
    assert sample([], 10) == []


def test_what_cannot_be_trained_is_explained() -> None:
    for algorithm in ("unigram", "sentencepiece_bpe"):
        with pytest.raises(
            ConfigError, match=r"vocabulary of 90000: .* a value <= \d+\. Or use other"
        ):
            train(90_000, texts=TEXTS[:3], algorithm=algorithm)
    with pytest.raises(ConfigError, match=r"vocabulary of 20: .* required_chars\. 20 vs \d+"):
        train(20, texts=TEXTS[:3])
    for nothing in ([], ["", " \n \n"]):
        with pytest.raises(DataError, match="no text to train"):
            train(texts=nothing)


@pytest.mark.parametrize(
    "setting",
    [
        {"vocab_size": 3},
        {"byte_fallback": True, "vocab_size": 259},
        {"character_coverage": 0.5},
        {"sentinels": -1},
        {"sample_size": "many"},
    ],
)
def test_settings_that_cannot_be_are_refused(setting) -> None:
    with pytest.raises(ConfigError, match=next(iter(reversed(setting)))):
        Config("path", "unigram", **setting)


def test_a_damaged_model_is_named(t5, tmp_path) -> None:
    file = model_of(t5, tmp_path / "spiece.model")
    whole = file.read_bytes()
    pieces = sentencepiece_model_pb2.ModelProto.FromString(whole)
    pieces.ClearField("normalizer_spec")
    for content in (
        b"",
        b"not a model",
        whole[: len(whole) // 2],
        whole[:-1],
        pieces.SerializeToString(),
    ):
        file.write_bytes(content)
        for path in (file, tmp_path):
            with pytest.raises(
                DataError, match=rf"cannot read the tokenizer in {path}: it is damaged.*again"
            ):
                Tokenizer.load(path)


def test_models_whose_ids_transformers_shifts_are_refused(t5, tmp_path) -> None:
    model_of(t5, tmp_path / "spiece.model")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PegasusTokenizer"}')
    with pytest.raises(
        DataError, match=r"PegasusTokenizer of transformers changes the ids .* tokenizer\.json"
    ):
        Tokenizer.load(tmp_path)
