"""Tokenizers that Hugging Face's package `tokenizers` runs.

WordPiece and byte-level BPE, or any other of theirs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from data_pipeline.format.manifest import token_dtype
from data_pipeline.format.shards import Tokens
from data_pipeline.tokenizers.alignment import trim
from data_pipeline.tokenizers.words import WordEncoder, ends_tokens_with_words
from trainer.config import Tree
from trainer.examples import Vocabulary

_BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_ROBERTA_SPECIAL = [
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
]  # <mask> is the last id of RoBERTa's vocabulary
_ALPHABET_LIMIT = (
    1000  # distinct characters a WordPiece vocabulary spells words with, as for BERT's own
)

# What a special token is called where the tokenizer's settings do not say.
_USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>", "<|endoftext|>"),
    "sep": ("[SEP]", "</s>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
    "eos": ("</s>", "<|endoftext|>"),
}


def train_wordpiece(
    texts: Iterable[str], vocab_size: int, lowercase: bool, min_frequency: int
) -> tokenizers.Tokenizer:
    """Trains WordPiece as for BERT."""
    backend = _wordpiece({token: i for i, token in enumerate(_BERT_SPECIAL)}, lowercase)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=_BERT_SPECIAL,
        show_progress=False,
        limit_alphabet=_ALPHABET_LIMIT,
    )
    backend.train_from_iterator(texts, trainer)
    _set_template(backend)
    return backend


def train_bpe(
    texts: Iterable[str], vocab_size: int, lowercase: bool, min_frequency: int
) -> tokenizers.Tokenizer:
    """Trains byte-level BPE as for RoBERTa."""
    backend = _byte_level_bpe(models.BPE())
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=min_frequency,
        special_tokens=_ROBERTA_SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([_mask_token("<mask>")])
    _set_template(backend)
    return backend


class HuggingFace:
    """A tokenizer of the package `tokenizers`; see `data_pipeline.tokenizers.tokenizer.Backend`.

    Args:
        backend: the tokenizer; it will find no special tokens in text any more, nor cut or pad.
        settings: its tokenizer_config.json.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: Tree) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        names = {role: _special_token(backend, settings, role) for role in _USUAL_NAMES}
        self.names = {f"{role}_token": name for role, name in names.items() if name is not None}
        self.settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.names, **settings}
        ids = {
            role: None if name is None else backend.token_to_id(name)
            for role, name in names.items()
        }
        special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        special.update(i for i in ids.values() if i is not None)
        vocab = backend.get_vocab()
        sentinels = next(n for n in itertools.count() if f"<extra_id_{n}>" not in vocab)
        self.vocabulary = Vocabulary(
            size=max(vocab.values(), default=-1) + 1,
            **{role: ids[role] for role in ("pad", "cls", "sep", "mask", "eos")},
            special=tuple(sorted(special)),
            continuing=_continuing(backend, vocab),
            sentinels=tuple(vocab[f"<extra_id_{n}>"] for n in range(sentinels)),
            between=_between(backend),
        )
        self._dtype = token_dtype(self.vocabulary.size)

    @cached_property
    def _words(self) -> WordEncoder | None:
        """The quick way to encode, where it is known to give the same ids."""
        return (
            WordEncoder(self._backend, self._dtype)
            if ends_tokens_with_words(self._backend)
            else None
        )

    @cached_property
    def fingerprint(self) -> str:
        """The same for every version of `tokenizers`."""
        content = json.loads(self._backend.to_str())
        parts = [
            _explicit(content[part])
            for part in ("model", "normalizer", "pre_tokenizer", "added_tokens")
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        if self._words is not None:
            return self._words.encode_batch(texts)
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self._dtype) for encoding in encodings]

    def encode_aligned(self, texts: Sequence[str]) -> list[tuple[Tokens, npt.NDArray[np.int64]]]:
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            (
                np.array(encoding.ids, self._dtype),
                trim(text, np.array(encoding.offsets, np.int64).reshape(-1, 2)),
            )
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self._backend.to_str(pretty=True).encode()}


def _special_token(backend: tokenizers.Tokenizer, settings: Tree, role: str) -> str | None:
    fallback = {"cls": "bos_token", "sep": "eos_token"}.get(role, "")
    named = [settings.get(f"{role}_token"), *_USUAL_NAMES[role], settings.get(fallback)]
    names = [name["content"] if isinstance(name, dict) else name for name in named]
    return next((name for name in names if name and backend.token_to_id(name) is not None), None)


def _continuing(backend: tokenizers.Tokenizer, vocab: dict[str, int]) -> tuple[int, ...] | None:
    """The ids of the tokens that go on with a word.

    None where neither they nor those that begin one are marked.
    """
    if isinstance(backend.model, models.WordLevel):
        return ()
    if isinstance(backend.model, models.WordPiece):
        mark = backend.model.continuing_subword_prefix
        return tuple(sorted(i for token, i in vocab.items() if token.startswith(mark)))
    kind = str(backend.pre_tokenizer)
    mark = "Ġ" if "ByteLevel" in kind else "▁" if "Metaspace" in kind else ""
    return (
        tuple(sorted(i for token, i in vocab.items() if not token.startswith(mark)))
        if mark
        else None
    )


def read(folder: Path, settings: Tree) -> tokenizers.Tokenizer:
    """Reads tokenizer.json, or else vocab.txt, or else vocab.json and merges.txt.

    Raises:
        FileNotFoundError: none of these is there.
    """
    if (folder / "tokenizer.json").is_file():
        return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if (folder / "vocab.txt").is_file():
        tokens = (folder / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
        cased = any(token != token.lower() for token in tokens if not token.startswith("["))
        backend = _wordpiece(
            {t: i for i, t in enumerate(tokens)}, settings.get("do_lower_case", not cased)
        )
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _byte_level_bpe(
            models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
        )
    else:
        raise FileNotFoundError(folder)
    known = {
        name
        for names in _USUAL_NAMES.values()
        for name in names
        if backend.token_to_id(name) is not None
    }
    backend.add_special_tokens(
        [_mask_token(name) if name == "<mask>" else name for name in sorted(known)]
    )
    _set_template(backend)
    return backend


def _mask_token(name: str) -> tokenizers.AddedToken:
    """RoBERTa's mask takes the place of a word with the space before it, which its vocabulary
    counts as the word's.
    """
    return tokenizers.AddedToken(name, lstrip=True, special=True)


def _wordpiece(vocab: dict[str, int], lowercase: bool) -> tokenizers.Tokenizer:
    """As BERT's own tokenizer (Devlin et al. 2019)."""
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _byte_level_bpe(model: models.BPE) -> tokenizers.Tokenizer:
    """As GPT-2's tokenizer (Radford et al.

    2019): every byte is in the vocabulary, so nothing is unknown.
    """
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _set_template(backend: tokenizers.Tokenizer) -> None:
    """Sets how `transformers` wraps a sequence in special tokens.

    The pipeline leaves that to the objectives.
    """
    for cls, sep, template in (
        ("[CLS]", "[SEP]", processors.BertProcessing),
        ("<s>", "</s>", processors.RobertaProcessing),
    ):
        cls_id, sep_id = backend.token_to_id(cls), backend.token_to_id(sep)
        if cls_id is not None and sep_id is not None:
            backend.post_processor = template((sep, sep_id), (cls, cls_id))
            return


def _between(backend: tokenizers.Tokenizer) -> int:
    """How many special tokens the tokenizer's own template puts between two texts.

    1 where it has none.
    """
    if backend.post_processor is None:
        return 1
    settings = json.loads(backend.post_processor.__getstate__())
    for part in settings.get("processors", [settings]):
        if part["type"] == "RobertaProcessing":
            return 2
        if part["type"] == "TemplateProcessing":
            kinds = [next(iter(piece)) for piece in part["pair"]]  # SpecialToken or Sequence
            first, *others = (i for i, kind in enumerate(kinds) if kind == "Sequence")
            return max(1, others[0] - first - 1) if others else 1
    return 1


def _explicit(settings: object) -> object:
    """Leaves out what is null, false or empty text, at any depth.

    So new versions write settings that old ones lack.
    """
    if isinstance(settings, dict):
        return {
            k: _explicit(v) for k, v in settings.items() if not (v is None or v is False or v == "")
        }
    return [_explicit(entry) for entry in settings] if isinstance(settings, list) else settings
