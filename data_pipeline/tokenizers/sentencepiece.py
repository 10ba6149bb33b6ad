"""SentencePiece (Kudo and Richardson 2018): T5's tokenizers, trained and run by Google's library.

A "piece" is the library's name for a token of its model. Sentinels are tokens, but not pieces.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property
from types import ModuleType

import numpy as np
import numpy.typing as npt
import sentencepiece
from google.protobuf.message import DecodeError, Message
from sentencepiece import sentencepiece_model_pb2, sentencepiece_pb2

from data_pipeline.format.manifest import token_dtype
from data_pipeline.format.shards import Tokens
from data_pipeline.tokenizers import SPACE, full_stops, sentinels_in
from data_pipeline.tokenizers.alignment import Aligned, trim
from data_pipeline.tokenizers.limits import MOST_SENTINELS, check_charsmap
from data_pipeline.tokenizers.settings import SPIECE
from samestep.config import Tree
from samestep.errors import ConfigError, DataError
from samestep.examples import Vocabulary

# The classes of these modules are created on import, so type checkers do not know them.
_protocol: ModuleType = sentencepiece_model_pb2
_encoded: ModuleType = sentencepiece_pb2
_SENTINELS_OF_T5 = 100
# Tokenizer classes of transformers that use the ids of a model as they are. Others shift the ids,
# or change the text first.
T5_CLASSES = ("T5Tokenizer", "T5TokenizerFast")
_OF_ANY = "PreTrainedTokenizerFast"
_LONGEST_LINE = 2**30  # bytes; SentencePiece skips longer lines, and its default is 4,192


def train_sentencepiece(
    texts: Iterable[str],
    model: str,
    vocab_size: int,
    lowercase: bool,
    character_coverage: float,
    byte_fallback: bool,
    sample_bytes: int,
) -> bytes:
    """Trains a model with T5's special tokens and normalization (NFKC, white space to one space).

    The same texts, in any order, give the same model.

    Args:
        texts: documents.
        model: "unigram" or "bpe".
        vocab_size: number of pieces, of which 0 is <pad>, 1 </s> and 2 <unk>.
        lowercase: fold the case of the text, here and whenever the model is used.
        character_coverage: fraction of the text's characters that get a piece, the most frequent
            ones.
        byte_fallback: spell other characters as bytes, for which there are 256 pieces, instead of
            <unk>.
        sample_bytes: maximum size of the text that is used; all of it is in memory.

    Raises:
        ConfigError: the text has too few different pieces, or too many different characters, for
            such a vocabulary.
        DataError: there is no text.
    """
    # Lines are the usual input of SentencePiece. In whole documents, a word that a space follows
    # everywhere would get no piece of its own.
    documents = sample(texts, sample_bytes)
    lines = (line for text in documents for line in text.splitlines() if line.strip())
    if not any(map(str.strip, documents)):
        raise DataError(
            "the source holds no text to train a tokenizer on. Correct source, or raise sample."
        )
    content = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=content,
            model_type=model,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            byte_fallback=byte_fallback,
            normalization_rule_name="nmt_nfkc_cf" if lowercase else "nmt_nfkc",
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            max_sentence_length=_LONGEST_LINE,
            minloglevel=2,
        )
    except RuntimeError as error:
        # "INTERNAL: FILE(LINE) [CONDITION] What is wrong and which value would do."
        raise ConfigError(
            f"cannot train a vocabulary of {vocab_size}: {str(error).rpartition('] ')[2]} Or use "
            "other text (sample, sample_size, limit)."
        ) from error
    return content.getvalue()


def sample(texts: Iterable[str], size: int) -> list[str]:
    """Returns the texts with the lowest hashes, up to `size` bytes together, but at least one.

    They are in the order of their hashes, so the order of `texts` does not matter.
    """
    # A heap of negated hashes: its first entry is the highest hash, the next one to drop.
    chosen, total, bound = list[tuple[int, str]](), 0, -(2**64)
    for text in texts:
        content = text.encode()
        rank = -int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
        if rank < bound:  # a lower hash was dropped already
            continue
        heapq.heappush(chosen, (rank, text))
        total += len(content)
        while total > size and len(chosen) > 1:
            bound, last = heapq.heappop(chosen)
            total -= len(last.encode())
    return [text for _, text in sorted(chosen, reverse=True)]


class SentencePiece:
    """A SentencePiece model with sentinels; methods as in `tokenizer.Tokenizer`.

    As in T5, sentinels have the ids above the pieces, in descending order: <extra_id_0> has the
    highest one. Their number is `extra_ids` in the settings. Models such as mT5's have them among
    their pieces instead.

    Attributes:
        vocabulary: its size and special tokens.
        names: its special tokens by role, as transformers names roles, such as pad_token.
        settings: tokenizer_config.json, as transformers reads it.

    Args:
        content: bytes of the model file.
        settings: the tokenizer_config.json beside it.

    Raises:
        DataError: the file is damaged, or transformers changes the ids of such a model.
    """

    def __init__(self, content: bytes, settings: Tree) -> None:
        model = parse(content)
        for spec in (model.normalizer_spec, model.denormalizer_spec):
            check_charsmap(spec.precompiled_charsmap)
        kind = settings.get("tokenizer_class")
        if kind not in (None, _OF_ANY, *T5_CLASSES):
            raise DataError(
                f"{kind} of transformers changes the ids of its {SPIECE}. Convert it to "
                "tokenizer.json with AutoTokenizer.from_pretrained(...).save_pretrained(DIR), and "
                "name that folder."
            )
        self._content = content
        pieces = [piece.piece for piece in model.pieces]
        inside = sentinels_in({piece: i for i, piece in enumerate(pieces)})
        usual = _SENTINELS_OF_T5 if kind in T5_CLASSES and not inside else 0
        added = settings.get("extra_ids", usual)
        if type(added) is not int or not 0 <= added <= MOST_SENTINELS:
            raise DataError(
                f"extra_ids is {added!r} in tokenizer_config.json. Write the number of sentinels, "
                f"such as 100; at most {MOST_SENTINELS}."
            )
        self._doubled = len(inside) if added else 0
        if inside and not added:
            for i in inside:  # a control piece is one that no text produces
                model.pieces[i].type = model.SentencePiece.CONTROL
            content = model.SerializeToString()
        self._processor = processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        size = len(pieces) + added
        # With 5 pieces and 2 added sentinels, <extra_id_0> is 6 and <extra_id_1> is 5.
        sentinels = tuple(range(size - 1, len(pieces) - 1, -1)) or inside
        self._special = {
            i: piece
            for i, piece in enumerate(pieces)
            if processor.is_control(i) or processor.is_unknown(i)
        }
        self._special |= {i: f"<extra_id_{n}>" for n, i in enumerate(sentinels)}
        roles = {
            "pad": processor.pad_id(),
            "unk": processor.unk_id(),
            "cls": processor.bos_id(),
            "sep": processor.eos_id(),
            "eos": processor.eos_id(),
        }
        ids = {role: i for role, i in roles.items() if i >= 0}  # -1 for a token that is missing
        self.vocabulary = Vocabulary(
            size=size,
            **{role: ids.get(role) for role in ("pad", "cls", "sep", "mask", "eos")},
            special=tuple(sorted(self._special)),
            continuing=tuple(i for i, piece in enumerate(pieces) if not piece.startswith(SPACE)),
            sentinels=sentinels,
            between=1,
            full_stops=full_stops({piece: i for i, piece in enumerate(pieces)}),
        )
        named = ids.keys() & {"pad", "unk", "eos"}
        self.names = {f"{role}_token": pieces[ids[role]] for role in named}
        kind = T5_CLASSES[0] if is_of_t5(model) else _OF_ANY
        default = {"tokenizer_class": kind, "extra_ids": added}
        self.settings = {**default, **self.names, **settings}
        self._dtype = token_dtype(size)

    def check_sentinels(self) -> None:
        """Rejects settings that add sentinels to a model that has some.

        Datasets and runs of earlier versions may have such a tokenizer, and keep it.

        Raises:
            DataError: they do.
        """
        if self._doubled:
            raise DataError(
                f"{SPIECE} has {self._doubled} sentinels (<extra_id_0>, ...) among its pieces, and "
                f"extra_ids is {self.settings['extra_ids']}, which makes two of each. Set "
                "extra_ids to 0 in tokenizer_config.json."
            )

    def fingerprint(self) -> str:
        """Hex SHA-256 of the model file and the number of sentinels added to it."""
        added = str(self.vocabulary.size - self._processor.get_piece_size())
        return hashlib.sha256(self._content + added.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        # Remembering words, as `words` does, would be half as fast: the library itself is faster
        # than a look-up of each word.
        encoded = self._processor.encode(list(texts), num_threads=1)
        return [np.array(ids, self._dtype) for ids in encoded]

    def encode_aligned(self, texts: Sequence[str]) -> list[Aligned]:
        encoded = self._processor.encode(list(texts), out_type="serialized_proto", num_threads=1)
        return [self._align(text, content) for text, content in zip(texts, encoded, strict=True)]

    @cached_property
    def _kinds(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Masks over all pieces: of those that are only spaces, and of those that are bytes."""
        pieces = range(self._processor.get_piece_size())
        spaces = [not self._processor.id_to_piece(i).strip(SPACE) for i in pieces]
        return np.array(spaces), np.array([self._processor.is_byte(i) for i in pieces])

    def _align(self, text: str, content: bytes) -> Aligned:
        pieces = _encoded.SentencePieceText.FromString(content).pieces
        rows = [(piece.id, piece.begin, piece.end) for piece in pieces]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        ids = table[:, 0]
        # The library counts bytes of UTF-8. Bytes that continue a character begin with the bits 10:
        # "é!" is C3 A9 21, so byte offsets 0, 2 and 3 are characters 0, 1 and 2.
        is_first = np.frombuffer(text.encode(), dtype=np.uint8) & 0xC0 != 0x80
        whole = np.concatenate(([0], np.cumsum(is_first)))[table[:, 1:]]
        spans = trim(text, whole)
        # Several pieces can spell one character: bytes, or what it is normalized to. The library
        # gives the character to the last of them; here all of them share it.
        spaces, of_bytes = self._kinds
        is_space = spaces[ids] | (of_bytes[ids] & (whole[:, 0] < whole[:, 1]))
        shares = (spans[:, 0] == spans[:, 1]) & ~is_space
        own = np.flatnonzero(~shares)
        following = np.searchsorted(own, np.flatnonzero(shares))
        spans[shares] = np.append(spans[own], [[len(text)] * 2], axis=0)[following]
        return ids.astype(self._dtype), spans

    def decode(self, ids: list[int]) -> str:
        text = ""
        pieces = self._processor.get_piece_size()
        for is_text, run in itertools.groupby(ids, lambda i: i < pieces and i not in self._special):
            part = list(run)
            if not is_text:
                text += "".join(self._special.get(i, "") for i in part)
                continue
            # The library drops the space before the first word.
            if text and self._processor.id_to_piece(part[0]).startswith(SPACE):
                text += " "
            text += self._processor.decode(part)
        return text

    def token(self, token_id: int) -> str | None:
        if token_id not in self._special and token_id < self._processor.get_piece_size():
            return self._processor.id_to_piece(token_id)
        return self._special.get(token_id)

    def with_tokens(self, tokens: Sequence[str], whole_words: bool) -> SentencePiece:
        raise ConfigError(
            f"a {SPIECE} cannot be extended. Convert it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(DIR) of transformers, remove "
            f"DIR/{SPIECE}, and extend DIR."
        )

    def with_content(self, tokens: Sequence[str]) -> SentencePiece:
        raise ConfigError(
            f"content_tokens is set, and a {SPIECE} cannot say which tokens are content. Convert "
            "it with AutoTokenizer.from_pretrained(...).save_pretrained(DIR) of transformers, "
            f"remove DIR/{SPIECE}, and name DIR."
        )

    def normalized(self, text: str) -> str:
        return text  # as it is: the library does not expose its normalizer

    def has(self, token: str) -> bool:
        is_piece = self._processor.piece_to_id(token) != self._processor.unk_id()
        return is_piece or token in self._special.values()

    def files(self) -> dict[str, bytes]:
        """The model's files, by name."""
        return {SPIECE: self._content}


def is_of_t5(model: Message) -> bool:
    """Whether T5's classes of `transformers` run a model: unigram, without byte fallback."""
    spec = model.trainer_spec
    is_unigram: bool = spec.model_type == _protocol.TrainerSpec.UNIGRAM
    return is_unigram and not spec.byte_fallback


def parse(content: bytes) -> Message:
    """Reads the bytes of a model file.

    Raises:
        DataError: the file is damaged.
    """
    try:
        model = _protocol.ModelProto.FromString(content)
    except DecodeError:
        model = _protocol.ModelProto()
    # The normalizer comes last in the file, so a truncated file has none.
    if not model.pieces or not model.HasField("normalizer_spec"):
        raise DataError("it is damaged, or is no SentencePiece model. Copy or download it again.")
    return model
