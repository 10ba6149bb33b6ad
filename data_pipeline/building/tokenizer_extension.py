"""`samestep data extend`: a tokenizer with further tokens, for a model that is trained further."""

from __future__ import annotations

import logging
from pathlib import Path

from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.errors import ConfigError, DataError
from samestep.storage.urls import is_hub_path

logger = logging.getLogger(__name__)


def extend(path: str, file: str, folder: str, whole_words: bool, force: bool = False) -> Tokenizer:
    """Adds the tokens in a file to a tokenizer, and saves the result to a folder.

    Tokens that the tokenizer has already are left out. The others get the ids after its own, in
    the order of the file.

    Args:
        path: the tokenizer; see `Tokenizer.load`.
        file: one token per line.
        folder: for the larger tokenizer.
        whole_words: see `Tokenizer.with_tokens`.
        force: replace what is in the folder.

    Raises:
        ConfigError: the folder cannot be written, or the tokenizer cannot be extended.
        DataError: the file cannot be read, or has no new token.
    """
    target = Path(folder)
    if is_hub_path(folder):
        raise ConfigError(f"{folder} is on the Hub. Name a folder on this machine.")
    if not is_hub_path(path) and target.exists() and target.samefile(path):
        raise ConfigError(
            f"{folder} is the tokenizer itself, which other datasets may use. Name a new folder."
        )
    if not force and target.exists() and any(target.iterdir()):
        raise DataError(
            f"{folder} exists already, and datasets may have been built with it. Choose another "
            "folder, or replace it with --force."
        )
    tokenizer = Tokenizer.load(path)
    # A text is normalized before tokens are found in it. So of "Covid" and "covid", which are the
    # same token where the tokenizer converts to lower case, the first line counts.
    forms: dict[str, str] = {}
    for token in _tokens(file):
        forms.setdefault(tokenizer.normalized(token), token)
    given = list(forms.values())
    new = [token for token in given if not tokenizer.has(token)]
    if len(new) < len(given):
        logger.info(
            "%d of %d tokens are in the vocabulary already", len(given) - len(new), len(given)
        )
    if not new:
        raise DataError(f"{file} has no token that {path} lacks. Add one on a line of its own.")
    extended = tokenizer.with_tokens(new, whole_words)
    extended.save(target)
    size = extended.vocabulary.size
    logger.info("wrote %s: %d tokens, %d of them new; set model.vocab_size to %d or more",
                folder, size, len(new), size)  # fmt: skip
    return extended


def _tokens(file: str) -> list[str]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the tokens in {file}: {error}. Name a text file.") from error
    return [line.strip() for line in lines if line.strip()]
