"""Which characters of a text its tokens stand for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_SPACES = np.array(
    [code for code in range(0x3001) if chr(code).isspace()], dtype=np.uint32
)  # there are none above


def trim(text: str, spans: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Leaves out the white space at both ends of spans of a text.

    Of white space alone, nothing is left.

    Args:
        text: the text.
        spans: int64 [T, 2], (begin, end) of characters.

    Returns:
        int64 [T, 2].
    """
    characters = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    solid = np.flatnonzero(~np.isin(characters, _SPACES))
    begin, end = spans.T
    following = np.append(solid, len(text))[np.searchsorted(solid, begin)]
    begin = np.minimum(following, end)
    preceding = np.append(0, solid + 1)[np.searchsorted(solid, end)]
    return np.stack((begin, np.maximum(begin, preceding)), axis=1)
