"""SentencePiece models of ALBERT, XLNet, DeBERTa v2, CamemBERT and XLM-RoBERTa, as `tokenizers`.

Their classes in `transformers` change the text first, or the ids. So the package `tokenizers` runs
them, as there, and not Google's library.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from data_pipeline.tokenizers import SPACE
from data_pipeline.tokenizers.foreign_settings import CONVERT, flag, setting, with_names
from data_pipeline.tokenizers.settings import CONFIG, SPIECE, role_name
from samestep.config import Tree
from samestep.errors import DataError
from samestep.untrusted import read_regular

if TYPE_CHECKING:
    from google.protobuf.message import Message

_FILES = {
    "AlbertTokenizer": SPIECE,
    "CamembertTokenizer": "sentencepiece.bpe.model",
    "DebertaV2Tokenizer": "spm.model",
    "XLMRobertaTokenizer": "sentencepiece.bpe.model",
    "XLNetTokenizer": SPIECE,
}
_OF_OTHERS = ("sentencepiece.bpe.model", "spm.model", "tokenizer.model", "source.spm")
_CONTROL, _USER_DEFINED = 3, 4  # types of pieces
_TWO_TYPES = ("{cls}:0 $A:0 {sep}:0", "{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1")
_ROBERTA = ("{cls}:0 $A:0 {sep}:0", "{cls}:0 $A:0 {sep}:0 {sep}:0 $B:0 {sep}:0")
_TEMPLATES = {
    "AlbertTokenizer": _TWO_TYPES,
    "CamembertTokenizer": _ROBERTA,
    "DebertaV2Tokenizer": _TWO_TYPES,
    "XLMRobertaTokenizer": _ROBERTA,
    "XLNetTokenizer": ("$A:0 {sep}:0 {cls}:2", "$A:0 {sep}:0 $B:1 {sep}:1 {cls}:2"),
}


_MORE = ("additional_special_tokens", "extra_special_tokens")


def read(folder: Path, kind: str | None, settings: Tree) -> tokenizers.Tokenizer | None:
    """Reads the model of a class; None if the folder has no such file.

    Args:
        folder: with the model.
        kind: see `foreign_settings.class_name`.
        settings: of the folder.

    Raises:
        DataError: it is the model of a class that is not read, or has another algorithm.
    """
    file = folder / _FILES.get(kind or "", "")
    if kind is None or kind not in _FILES or not file.is_file():
        others = [file.name for file in folder.iterdir() if file.name in _OF_OTHERS]
        if others and not (folder / SPIECE).is_file():
            raise DataError(f"{min(others)} of {kind or 'an unknown class'} is not read. {CONVERT}")
        return None
    if settings.get("sp_model_kwargs"):
        raise DataError(
            f"sp_model_kwargs is {settings['sp_model_kwargs']!r} in {CONFIG}. {CONVERT}"
        )
    if kind == "XLNetTokenizer" and settings.get("keep_accents"):
        raise DataError(f"keep_accents of {CONFIG} has no effect in transformers 5. {CONVERT}")
    from data_pipeline.tokenizers.sentencepiece import is_of_t5, parse

    model = parse(read_regular(file))
    if not is_of_t5(model):
        raise DataError(f"{file.name} is no unigram model, or spells bytes. {CONVERT}")
    # `transformers` then leaves out the pieces that a text holds as they are.
    more = next((key for key in _MORE if settings.get(key)), None)
    if more and any(piece.type == _USER_DEFINED for piece in model.pieces):
        raise DataError(f"{more} is set in {CONFIG}, beside pieces of {file.name}. {CONVERT}")
    names = with_names(kind, settings)
    vocabulary, unknown = _vocabulary(model, kind, names)
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, unknown, byte_fallback=False))
    _set_text(backend, kind, settings, model.normalizer_spec.precompiled_charsmap)
    for piece in model.pieces:
        token = AddedToken(piece.piece, normalized=False, special=piece.type == _CONTROL)
        if piece.type == _CONTROL:
            backend.add_special_tokens([token])
        elif piece.type == _USER_DEFINED:  # found in a text before it is normalized
            backend.add_tokens([token])
    # `tokenizers` reads some scores from text with another last bit, and from then on the same. So
    # this tokenizer and its copies have one fingerprint.
    return tokenizers.Tokenizer.from_str(backend.to_str())


def set_template(backend: tokenizers.Tokenizer, kind: str, settings: Tree) -> None:
    """Sets where `transformers` puts special tokens; in samestep, objectives do."""
    own = {role: role_name(settings, role) or "" for role in ("cls", "sep")}
    single, pair = (template.format(**own) for template in _TEMPLATES[kind])
    special = [(name, backend.token_to_id(name)) for name in own.values()]
    backend.post_processor = processors.TemplateProcessing(single, pair, special)


def _vocabulary(model: Message, kind: str, names: Tree) -> tuple[list[tuple[str, float]], int]:
    """Returns tokens with scores, and the id of the one for unknown text."""
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    bos, pad, eos, unknown, mask = (
        (role_name(names, role) or "", 0.0) for role in ("bos", "pad", "eos", "unk", "mask")
    )
    if kind == "XLMRobertaTokenizer":  # fairseq's order, before the pieces of words
        return [bos, pad, eos, unknown, *pieces[3:], mask], 3
    if kind == "CamembertTokenizer":
        first = [("<s>NOTUSED", 0.0), pad, ("</s>NOTUSED", 0.0), unknown, ("<unk>NOTUSED", -100.0)]
        return [*first, *pieces[1:], mask], 3
    if kind == "AlbertTokenizer":
        return pieces, 1
    spelled = [token for token, _ in pieces]
    own = model.trainer_spec.unk_id
    return pieces, spelled.index(unknown[0]) if unknown[0] in spelled else own


def _set_text(backend: tokenizers.Tokenizer, kind: str, settings: Tree, charsmap: bytes) -> None:
    """Sets how a text is normalized and split."""
    lowercase = [normalizers.Lowercase()] if setting(settings, kind, "do_lower_case") else []
    mapped: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    always = bool(flag(settings, "add_prefix_space", True))
    scheme = "always" if always or kind == "XLNetTokenizer" else "never"
    before: pre_tokenizers.PreTokenizer = pre_tokenizers.WhitespaceSplit()
    steps: list[normalizers.Normalizer] = mapped
    if kind in ("AlbertTokenizer", "XLNetTokenizer"):
        quotes = [normalizers.Replace(mark, '"') for mark in ("``", "''")]
        # Newer versions of XLNet's class remove accents whatever the setting says.
        bare = [] if setting(settings, kind, "keep_accents") else _without_accents()
        steps = [*quotes, *bare, *lowercase, *mapped]
    elif kind == "DebertaV2Tokenizer":
        spaces = normalizers.Replace(tokenizers.Regex(r"\s{2,}|[\n\r\t]"), " ")
        ends = normalizers.Strip(left=False, right=True)
        steps = [*lowercase, spaces, normalizers.NFC(), ends]
        scheme = "always" if always else "first"
    space = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    splitters = [before, space]
    if kind == "DebertaV2Tokenizer":
        is_split = setting(settings, kind, "split_by_punct")
        signs = [pre_tokenizers.Punctuation(behavior="isolated")] if is_split else []
        splitters = [*signs, space]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)


def _without_accents() -> list[normalizers.Normalizer]:
    return [normalizers.NFKD(), normalizers.StripAccents()]
