"""Names of special tokens in the texts of a dataset, which are read as ordinary text."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from data_pipeline.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
_SHOWN = 5


class SpecialNames:
    """Counts the texts that hold the name of a special token.

    Args:
        tokenizer: with the special tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Hundreds of names such as <extra_id_7> are searched for only in a text with "<extra_id_".
        self._names: dict[str, list[str]] = {}
        for token_id in tokenizer.vocabulary.special:
            name = tokenizer.token(token_id)
            self._names.setdefault(re.split(r"\d", name)[0], []).append(name)

    def count(self, texts: Iterable[str]) -> dict[str, int]:
        """Returns name -> number of texts that hold it, without names that no text holds."""
        found: Counter[str] = Counter()
        for text in texts:
            for stem, names in self._names.items():
                if stem in text:
                    found.update(name for name in names if name in text)
        return dict(found)


def warn(found: Mapping[str, int], tokenizer: Tokenizer) -> None:
    """Says which names the texts hold, and how each is read."""
    # A unigram model of tokenizer.json has the names in its vocabulary, as in `transformers`.
    as_token = {
        name: name in map(tokenizer.token, tokenizer.encode_batch([name])[0]) for name in found
    }
    for is_token, reading in (
        (False, "as ordinary text; content_tokens reads those without a role as one token"),
        (True, "as that token"),
    ):
        names = sorted(
            (name for name in found if as_token[name] is is_token), key=found.__getitem__
        )
        if names:
            most = sorted(names, key=found.__getitem__, reverse=True)[:_SHOWN]
            shown = ", ".join(f"{name} ({found[name]:,})" for name in most)
            logger.warning(
                "documents hold the names of %d special tokens, read %s: %s",
                len(names),
                reading,
                shown,
            )
