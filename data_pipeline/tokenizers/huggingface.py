"""Tokenizers run by Hugging Face's package `tokenizers`: WordPiece, byte-level BPE and others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
from tokenizers import models

from data_pipeline.format.manifest import token_dtype
from data_pipeline.format.shards import Tokens
from data_pipeline.tokenizers import full_stops, sentinels_in
from data_pipeline.tokenizers.limits import check_ids, check_limits
from data_pipeline.tokenizers.settings import MODEL, by_name, stated
from samestep.config import Tree
from samestep.errors import ConfigError
from samestep.examples import Vocabulary

if TYPE_CHECKING:
    from data_pipeline.tokenizers.alignment import Aligned
    from data_pipeline.tokenizers.words import WordEncoder

# Names of special tokens that the tokenizer's settings do not give.
USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>", "<|endoftext|>"),
    "sep": ("[SEP]", "</s>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
    "eos": ("</s>", "<|endoftext|>"),
}


class HuggingFace:
    """A tokenizer of the package `tokenizers`; methods as in `tokenizer.Tokenizer`.

    Attributes:
        vocabulary: its size and special tokens.
        names: its special tokens by role, as transformers names roles, such as pad_token.
        settings: tokenizer_config.json, as transformers reads it.

    Args:
        backend: the tokenizer. It is changed: it no longer finds special tokens in text, truncates
            or pads.
        settings: its tokenizer_config.json.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Tree,
    ) -> None:
        check_limits(backend)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        vocab = backend.get_vocab()
        check_ids(vocab)
        names = {role: _special_token(vocab, settings, role) for role in USUAL_NAMES}
        self.names = {f"{role}_token": name for role, name in names.items() if name}
        self.settings = {
            # First, so that a class in the settings replaces it.
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.names,
            **by_name(settings),
            **stated(backend),
        }
        ids = {role: vocab[name] for role, name in names.items() if name}
        added = backend.get_added_tokens_decoder().items()
        special = {*ids.values(), *(i for i, token in added if token.special)}
        self.vocabulary = Vocabulary(
            # Not the number of tokens: ids may have gaps, and embeddings need a row for each.
            size=max(vocab.values(), default=-1) + 1,
            **{role: ids.get(role) for role in ("pad", "cls", "sep", "mask", "eos")},
            special=tuple(sorted(special)),
            continuing=_continuing(backend, vocab),
            sentinels=sentinels_in(vocab),
            between=_between(backend),
            full_stops=full_stops(vocab),
        )
        self._dtype = token_dtype(self.vocabulary.size)

    @cached_property
    def _words(self) -> WordEncoder | None:
        """The faster way to encode, for tokenizers known to give the same ids by it."""
        from data_pipeline.tokenizers.words import WordEncoder, ends_tokens_with_words

        is_known = ends_tokens_with_words(self._backend)
        return WordEncoder(self._backend, self._dtype) if is_known else None

    def fingerprint(self) -> str:
        """Hex SHA-256 of everything that determines the ids of a text.

        It is the same for every version of `tokenizers`.
        """
        # Sections that decide ids; those about truncation, padding and decoding do not.
        content = json.loads(self._backend.to_str())
        sections = ("model", "normalizer", "pre_tokenizer", "added_tokens")
        parts = [_explicit(content[section]) for section in sections]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def with_tokens(self, tokens: Sequence[str], whole_words: bool) -> HuggingFace:
        """Returns this tokenizer with further tokens, which get the ids after its own."""
        added = [tokenizers.AddedToken(token, single_word=whole_words) for token in tokens]
        # A copy: this tokenizer stays as it is.
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_tokens(added)
        return HuggingFace(backend, self.settings)

    def with_content(self, tokens: Sequence[str]) -> HuggingFace:
        """Returns this tokenizer with tokens that texts hold by their names."""
        state = json.loads(self._backend.to_str())
        added = {token["content"]: token for token in state["added_tokens"]}
        vocab = self._backend.get_vocab()
        roles = {name: role for role, name in self.names.items()}
        for name in tokens:
            if name not in vocab:
                raise ConfigError(
                    f"content_tokens has {name!r}, which the tokenizer lacks. Correct it, or add "
                    "it with samestep data extend."
                )
            if name in roles:
                raise ConfigError(
                    f"content_tokens has {name!r}, which is the tokenizer's {roles[name]}. Use "
                    "another token."
                )
            ordinary = self._backend.encode(name, add_special_tokens=False).ids == [vocab[name]]
            if name not in added and (ordinary or name.startswith("##")):
                raise ConfigError(
                    f"content_tokens has {name!r}, which ordinary text produces already. Name a "
                    "special token, or an unused one."
                )
            new = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            entry = added.setdefault(name, {"id": vocab[name], "content": name, **new})
            entry["special"] = False
        state["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
        return HuggingFace(tokenizers.Tokenizer.from_str(json.dumps(state)), self.settings)

    def keeps_ids(self, other: HuggingFace) -> bool:
        """Whether this is `other`, but for further tokens and for those that are content."""
        ours, theirs = json.loads(self._backend.to_str()), json.loads(other._backend.to_str())
        for section in ("model", "normalizer", "pre_tokenizer"):
            if _explicit(ours[section]) != _explicit(theirs[section]):
                return False
        kept = [{**token, "special": False} for token in ours["added_tokens"]]
        before = ({**token, "special": False} for token in theirs["added_tokens"])
        return self.vocabulary.size >= other.vocabulary.size and all(
            token in kept for token in before
        )

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        if self._words is not None:
            return self._words.encode_batch(texts)
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self._dtype) for encoding in encodings]

    def encode_aligned(self, texts: Sequence[str]) -> list[Aligned]:
        from data_pipeline.tokenizers.alignment import trim

        # The fast encoding above has no offsets, and neither have remembered words.
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        aligned = []
        for text, encoding in zip(texts, encodings, strict=True):
            spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            aligned.append((np.array(encoding.ids, self._dtype), trim(text, spans)))
        return aligned

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def normalized(self, text: str) -> str:
        normalizer = self._backend.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def has(self, token: str) -> bool:
        form = self.normalized(token)
        in_vocabulary = (self._backend.token_to_id(each) is not None for each in (token, form))
        return form in self._added_forms or any(in_vocabulary)

    @cached_property
    def _added_forms(self) -> set[str]:
        """What a text has where an added token is found; the vocabulary has its spelling."""
        added = self._backend.get_added_tokens_decoder().values()
        return {self.normalized(token.content) for token in added if token.normalized}

    def files(self) -> dict[str, bytes]:
        """The model's files, by name."""
        return {MODEL: self._backend.to_str(pretty=True).encode()}


def _special_token(
    vocab: dict[str, int],
    settings: Tree,
    role: str,
) -> str | None:
    """Returns the token for a role, or None: by the settings, its usual name, or a similar role."""
    fallback = {"cls": "bos_token", "sep": "eos_token"}.get(role, "")
    named = [settings.get(f"{role}_token"), *USUAL_NAMES[role], settings.get(fallback)]
    names = [name["content"] if isinstance(name, dict) else name for name in named]
    return next((name for name in names if name and name in vocab), None)


def _continuing(backend: tokenizers.Tokenizer, vocab: dict[str, int]) -> tuple[int, ...] | None:
    """Returns the ids of tokens that continue a word; None if the vocabulary does not mark them."""
    # Each token is a whole word, and none continues one.
    if isinstance(backend.model, models.WordLevel):
        return ()
    if isinstance(backend.model, models.WordPiece):
        # The mark is on the tokens that continue a word: "##ing".
        mark = backend.model.continuing_subword_prefix
        return tuple(sorted(i for token, i in vocab.items() if token.startswith(mark)))
    # Elsewhere it is on the tokens that begin one, and stands for the space before.
    kind = str(backend.pre_tokenizer)
    mark = "Ġ" if "ByteLevel" in kind else "▁" if "Metaspace" in kind else ""
    if not mark:
        return None
    return tuple(sorted(i for token, i in vocab.items() if not token.startswith(mark)))


def read_saved(folder: Path) -> tokenizers.Tokenizer:
    """Reads the tokenizer.json that `HuggingFace.files` wrote: it has every setting.

    Raises:
        FileNotFoundError: there is none.
    """
    if not (folder / MODEL).is_file():
        raise FileNotFoundError(folder)
    return tokenizers.Tokenizer.from_file(str(folder / MODEL))


def _between(backend: tokenizers.Tokenizer) -> int:
    """Number of special tokens between the two texts of a pair in the tokenizer's own template.

    1 if it has no template.
    """
    if backend.post_processor is None:
        return 1
    settings = json.loads(backend.post_processor.__getstate__())
    for part in settings.get("processors", [settings]):
        if part["type"] == "RobertaProcessing":
            return 2
        if part["type"] == "TemplateProcessing":
            # "[CLS] A [SEP] B [SEP]" is SpecialToken, Sequence, SpecialToken, Sequence, ...: the
            # sequences are at 1 and 3, with one token between them.
            kinds = [next(iter(piece)) for piece in part["pair"]]
            first, *others = (i for i, kind in enumerate(kinds) if kind == "Sequence")
            return max(1, others[0] - first - 1) if others else 1
    return 1


def _explicit(settings: object) -> object:
    """Removes values that are null, false or empty text, at any depth.

    New versions of `tokenizers` write settings that old versions lack, with such values.
    """
    if isinstance(settings, list):
        return [_explicit(entry) for entry in settings]
    if not isinstance(settings, dict):
        return settings
    # Not `v in (None, False, "")`: 0 equals False, and is a value.
    kept = (k for k, v in settings.items() if not (v is None or v is False or v == ""))
    return {k: _explicit(settings[k]) for k in kept}
