"""Documents with nearly equal texts, found by MinHash and locality-sensitive hashing.

Broder 1997, "On the resemblance and containment of documents"; as for language models by Lee et al.
2022, arXiv 2107.06499. The library is `datasketch`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from data_pipeline import dedup
from samestep.config import Tree
from samestep.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from datasketch import MinHash

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Config(dedup.Config):
    """Leaves out a document that is similar to an earlier one.

    The similarity of two documents compares their sets of n-grams: the size of the intersection
    by the size of the union (Jaccard), estimated from the signatures.

    Attributes:
        threshold: least similarity.
        ngram: words of an n-gram; upper case and punctuation do not matter.
        permutations: numbers in a signature. The standard error of an estimate is at most
            0.5 / sqrt(permutations).
    """

    threshold: float = 0.8
    ngram: int = 5
    permutations: int = 128

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(
                f"dedup.threshold is {self.threshold}. Use a similarity above 0, up to 1, such "
                "as 0.8."
            )
        if self.ngram < 1:
            raise ConfigError(f"dedup.ngram is {self.ngram}. Use 1 word or more, such as 5.")
        if self.permutations < 16:
            raise ConfigError(
                f"dedup.permutations is {self.permutations}. Use 16 or more, such as 128."
            )

    def signature(self, text: str) -> npt.NDArray[np.uint64]:
        words = _WORD.findall(text.lower())
        # A text of fewer words is one n-gram, and one without words is its own.
        count = max(1, len(words) - self.ngram + 1)
        ngrams = {" ".join(words[i : i + self.ngram]) or text for i in range(count)}
        minhash = self._minhash()
        minhash.update_batch(ngram.encode() for ngram in sorted(ngrams))
        return np.asarray(minhash.hashvalues, np.uint64)

    def earlier(self, signatures: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        from datasketch import MinHashLSH

        lsh = MinHashLSH(threshold=self.threshold, num_perm=self.permutations)
        found = np.full(len(signatures), -1)
        dtype = self._minhash().hashvalues.dtype
        for number, signature in enumerate(signatures):
            minhash = self._minhash(hashvalues=signature.astype(dtype))
            similar = [
                other
                for other in lsh.query(minhash)
                if np.mean(signatures[other] == signature) >= self.threshold
            ]
            if similar:
                found[number] = min(similar)
            else:
                lsh.insert(number, minhash, check_duplication=False)
        return found

    def settings(self) -> Tree:
        from datasketch import __version__

        return {**super().settings(), "datasketch": __version__}

    def _minhash(self, **values: Any) -> MinHash:
        try:
            from datasketch import MinHash
        except ImportError:
            raise MissingExtra("datasketch", "dedup", "dedup minhash") from None
        return MinHash(self.permutations, seed=1, scheme="affine32", **values)
