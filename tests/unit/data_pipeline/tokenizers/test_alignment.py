"""Which characters tokens stand for, whatever a tokenizer makes of a text."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import normalizers, pre_tokenizers, processors

from data_pipeline.tokenizers.alignment import trim
from data_pipeline.tokenizers.tokenizer import Config, Tokenizer

CORPUS = "the quick brown fox jumps over a lazy dog while naive café owners pack fifty boxes of jugs in Zürich 1\u20442"  # noqa: E501
LINES = [" ".join(np.random.default_rng(seed).permutation(CORPUS.split())) for seed in range(50)]
TEXTS = [
    "The quick  brown fox.",
    "",
    " ",
    "   lead\n\nthe\tdog \r\n",
    "Zürich, Übergrößen; naïve cafe\u0301s — ÉCOLE",
    "日本語 and 한국어 and 😀😀 👩‍🔬 fox",
    "ﬁve½ …owners… \uff26\uff2f\uff38 İstanbul ß",
    "\u00a0the\u2003dog\u3000in\u200bthe \x00box\x01",
    "supercalifragilistic" * 10,
    "</s> [SEP] <unk> ▁the Ġdog ##ing",
]


def metaspace() -> tokenizers.Tokenizer:
    """As the tokenizer.json of T5 and XLM-R.

    Unigram, where a piece stands for what NFKC makes of a character.
    """
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram())
    backend.normalizer, backend.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=80,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    backend.train_from_iterator([*LINES, *TEXTS * 20], trainer)
    return backend


def gpt2(folder: Path) -> Tokenizer:
    """Byte-level BPE that leaves spaces in its spans, and puts one before a text."""
    Config("", "bpe", 400).train(LINES).save(folder)
    tree = json.loads((folder / "tokenizer.json").read_text())
    tree["post_processor"], tree["pre_tokenizer"]["add_prefix_space"] = None, True
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return Tokenizer.load(folder, saved=True)


def saved(backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


MAKERS: dict[str, Callable[[Path], Tokenizer]] = {
    "wordpiece": lambda _: Config("", "wordpiece", 400).train(LINES),
    "wordpiece-lowercase": lambda _: Config("", "wordpiece", 400, lowercase=True).train(LINES),
    "words": lambda _: Config("", "words", 400).train(LINES),
    "bpe": lambda _: Config("", "bpe", 400).train(LINES),
    "bpe-lowercase": lambda _: Config("", "bpe", 400, lowercase=True).train(LINES),
    "gpt2": gpt2,
    "metaspace": lambda folder: saved(metaspace(), folder),
    "unigram": lambda _: Config("", "unigram", 50).train(LINES),
    "unigram-bytes": lambda _: Config("", "unigram", 310, byte_fallback=True).train(LINES),
    "sentencepiece-bpe": lambda _: Config("", "sentencepiece_bpe", 60, lowercase=True).train(LINES),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Tokenizer]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in MAKERS.items()}


@pytest.fixture(params=MAKERS)
def tokenizer(request, made) -> Tokenizer:
    return made[request.param]


def test_ids_are_those_of_encode_batch(tokenizer):
    aligned = tokenizer.encode_aligned(TEXTS)
    for (ids, spans), expected in zip(aligned, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids.tolist() == expected.tolist()
        assert ids.dtype == expected.dtype
        assert spans.shape == (len(ids), 2)
        assert spans.dtype == np.int64
    assert tokenizer.encode_aligned([]) == []


def test_spans_ascend_within_the_text_and_have_no_white_space_around_them(tokenizer):
    for text, (_, spans) in zip(TEXTS, tokenizer.encode_aligned(TEXTS), strict=True):
        assert (np.diff(spans, axis=0) >= 0).all()
        for begin, end in spans.tolist():
            assert 0 <= begin <= end <= len(text)
            assert text[begin:end] == text[begin:end].strip()


def test_every_word_begins_with_a_token_and_ends_with_one(tokenizer):
    text = "The quick  brown fox.\nZürich, Übergrößen; naïve cafés — ÉCOLE 日本語 😀 ﬁve½ …owners… \uff26\uff2f İzmir ß"  # noqa: E501
    ((_, spans),) = tokenizer.encode_aligned([text])
    found = [(begin, end) for begin, end in spans.tolist() if begin < end]
    at = 0
    for word in text.split():
        begin = text.index(word, at)
        at = begin + len(word)
        assert begin in {first for first, _ in found}, word
        assert at in {end for _, end in found}, word
        inside = [(max(a, begin), min(b, at)) for a, b in found if a < at and b > begin]
        assert inside == [
            (a, b) for a, b in found if a < at and b > begin
        ]  # none belongs to two words


def test_tokens_stand_for_the_characters_that_they_spell(made):
    """Of byte-level BPE, those of one span together; of WordPiece each by itself."""
    for text in TEXTS:
        ((ids, spans),) = made["bpe"].encode_aligned([text])
        groups = itertools.groupby(zip(ids, spans.tolist(), strict=True), key=lambda each: each[1])
        for (begin, end), group in groups:
            spelt = made["bpe"].decode([token for token, _ in group])
            assert spelt.strip() == text[begin:end] or begin == end
        ((ids, spans),) = made["wordpiece"].encode_aligned([text])
        for token, (begin, end) in zip(ids, spans.tolist(), strict=True):
            spelt = made["wordpiece"].token(token).removeprefix("##")
            assert spelt in (text[begin:end], "[UNK]")


@pytest.mark.parametrize("name", ["metaspace", "unigram", "unigram-bytes"])
def test_pieces_of_what_a_character_is_normalised_to_share_it(made, name):
    text = "a ﬁ b½"
    ((ids, spans),) = made[name].encode_aligned([text])
    assert len(ids) > 5
    shown = [text[begin:end] for begin, end in spans.tolist() if begin < end]
    assert set(shown) == {"a", "ﬁ", "b", "½"}
    assert shown.count("ﬁ") == 2
    assert shown.count("½") >= 3 or name == "metaspace"


def test_bytes_of_white_space_do_not_take_the_character_behind_them():
    model = Config("", "unigram", 310, byte_fallback=True).train(LINES)._backend
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.files()["spiece.model"])
    proto.normalizer_spec.name, proto.normalizer_spec.precompiled_charsmap = "identity", b""
    text = "the\nfox"
    backend = type(model)(proto.SerializeToString(), {})
    ((ids, spans),) = backend.encode_aligned([text])
    kept = [
        (backend.token(token), text[begin:end])
        for token, (begin, end) in zip(ids, spans.tolist(), strict=True)
    ]
    assert ("<0x0A>", "") in kept
    assert "".join(part for _, part in kept) == "thefox"


def test_trimming_leaves_what_is_within():
    spans = np.array([(0, 3), (1, 2), (3, 3), (3, 5), (5, 6), (0, 6)])
    assert trim(" a b  ", spans).tolist() == [[1, 2], [1, 2], [3, 3], [3, 4], [6, 6], [1, 4]]
    assert trim("", np.zeros((0, 2), dtype=np.int64)).shape == (0, 2)


def template(pair: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single="<s> $A </s>", pair=pair, special_tokens=[("<s>", 0), ("</s>", 2)]
    )


@pytest.mark.parametrize(
    ("processor", "between"),
    [
        (processors.RobertaProcessing(("</s>", 2), ("<s>", 0)), 2),
        (processors.BertProcessing(("</s>", 2), ("<s>", 0)), 1),
        (template("<s> $A </s> </s> $B </s>"), 2),
        (template("<s> $A </s> $B </s>"), 1),
        (template("<s> $A $B </s>"), 1),
        (processors.Sequence([processors.ByteLevel(), template("<s> $A </s> </s> $B </s>")]), 2),
        (processors.ByteLevel(), 1),
        (None, 1),
    ],
)
def test_how_many_tokens_part_two_texts_is_what_the_tokenizer_s_template_says(
    made, tmp_path, processor, between
):
    made["bpe"].save(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if processor is None:
        tree = json.loads(backend.to_str())
        backend = tokenizers.Tokenizer.from_str(json.dumps({**tree, "post_processor": None}))
    else:
        backend.post_processor = processor
    tokenizer = saved(backend, tmp_path)
    assert tokenizer.vocabulary.between == between
    assert tokenizer.fingerprint == made["bpe"].fingerprint
    tokenizer.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").vocabulary == tokenizer.vocabulary


def test_two_texts_are_parted_as_transformers_parts_them(made, tmp_path):
    for name in ("bpe", "wordpiece"):
        made[name].save(tmp_path / name)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        v = made[name].vocabulary
        (a,), (b,) = (
            [tokens.tolist() for tokens in made[name].encode_batch([text])]
            for text in ("the fox", "dog")
        )
        assert theirs("the fox", "dog")["input_ids"] == [v.cls, *a, *[v.sep] * v.between, *b, v.sep]
    assert made["bpe"].vocabulary.between == 2
    assert made["unigram"].vocabulary.between == 1
