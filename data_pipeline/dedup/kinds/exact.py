"""Documents with equal texts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_pipeline import dedup


@dataclass(frozen=True)
class Config(dedup.Config):
    """Leaves out a document with the text of an earlier one."""

    def signature(self, text: str) -> npt.NDArray[np.uint64]:
        # 128 bits: of 10^12 documents, two share a signature by chance with probability 10^-15.
        return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), np.uint64)

    def earlier(self, signatures: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        _, first, group = np.unique(signatures, axis=0, return_index=True, return_inverse=True)
        found = first[group.reshape(-1)]
        return np.where(found < np.arange(len(signatures)), found, -1)
