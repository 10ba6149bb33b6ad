"""Converts T5's SentencePiece model to tokenizer.json, which `transformers` reads without packages.

`transformers` would convert spiece.model whenever it is loaded, and needs `sentencepiece` and
`protobuf` for that. This is the file that it would write.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from data_pipeline.tokenizers.sentencepiece import is_of_t5, parse
from data_pipeline.tokenizers.settings import SPIECE
from data_pipeline.tokenizers.tokenizer import CONVERTED_FROM
from samestep.errors import DataError
from samestep.examples import Vocabulary
from samestep.stored_json import damage_of, read_json

_SPACE = "▁"


def convert(folder: Path, vocabulary: Vocabulary) -> bool:
    """Writes a tokenizer.json for a spiece.model that T5's classes of `transformers` run.

    samestep goes on reading spiece.model, so the ids of a text stay the same to the bit.

    Args:
        folder: as `Tokenizer.save` writes it.
        vocabulary: of this tokenizer.

    Returns:
        Whether it was written.
    """
    model = parse((folder / SPIECE).read_bytes())
    if not is_of_t5(model) or vocabulary.pad is None or vocabulary.eos is None:
        return False
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    # With 5 pieces and 2 sentinels, <extra_id_1> is 5 and <extra_id_0> is 6. Of mT5, they are
    # pieces, and `transformers` finds them as such.
    names = [f"<extra_id_{n}>" for n in range(vocabulary.size - len(pieces))]
    inside = {token for token in vocabulary.sentinels if token < len(pieces)}
    unknown = model.trainer_spec.unk_id
    vocab = [*pieces, *((name, 0.0) for name in reversed(names))]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=unknown, byte_fallback=False))
    if model.normalizer_spec.precompiled_charsmap:
        backend.normalizer = normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
    words = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always", split=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    backend.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always", split=True)
    end = pieces[vocabulary.eos][0]
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, vocabulary.eos)]
    )
    special = [vocab[token][0] for token in sorted({*vocabulary.special, unknown} - inside)]
    backend.add_special_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False) for name in special]
    )
    backend.save(str(folder / "tokenizer.json"))
    file = folder / "tokenizer_config.json"
    with damage_of(file, DataError, "Copy the tokenizer again."):
        settings = read_json(file, dict[str, object]) | {CONVERTED_FROM: SPIECE}
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return True
