"""Alignment of tokens with the characters of a text."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from data_pipeline.format.shards import Tokens

Int64: TypeAlias = npt.NDArray[np.int64]
Aligned: TypeAlias = tuple[Tokens, Int64]
"""T ids, and int64 [T, 2], the (begin, end) of each token in the text."""

# Unicode has no white space above U+3000.
_SPACES = [code for code in range(0x3001) if chr(code).isspace()]


def trim(text: str, spans: Int64) -> Int64:
    """Removes the white space at both ends of spans; a span of white space alone becomes empty.

    In "a  bc", (1, 4) is trimmed to (3, 4), and (1, 3) to (3, 3).

    Args:
        spans: [T, 2], (begin, end) of characters of the text.

    Returns:
        int64 [T, 2].
    """
    # An array of code points: Python's strings have no vectorized look-up.
    characters = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    solid = np.flatnonzero(~np.isin(characters, _SPACES))
    begin, end = spans.T
    # The first visible character at or after `begin`, and the end of the last one before `end`.
    following = np.append(solid, len(text))[np.searchsorted(solid, begin)]
    begin = np.minimum(following, end)
    preceding = np.append(0, solid + 1)[np.searchsorted(solid, end)]
    return np.stack((begin, np.maximum(begin, preceding)), axis=1)
