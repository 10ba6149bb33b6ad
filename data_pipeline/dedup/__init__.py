"""Documents that repeat an earlier one. Each module finds them in one way, a `kind` of `dedup`.

A document is compared by its signature, which workers compute, one unit of a build after another;
one process then compares all signatures. The first of several equal documents is kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from samestep.config import Tree, to_tree


class Config(ABC):
    """The section `dedup` of a dataset's recipe: base class of the `Config` of each module."""

    @abstractmethod
    def signature(self, text: str) -> npt.NDArray[np.uint64]:
        """Returns the signature of a document: uint64 [K]."""

    @abstractmethod
    def earlier(self, signatures: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Finds the documents that repeat an earlier one.

        Args:
            signatures: uint64 [N, K], of all documents in order.

        Returns:
            int64 [N], the number of the earlier document; -1: there is none.
        """

    def settings(self) -> Tree:
        """What the result depends on, for the manifest."""
        # Not `kind_name`: stored manifests have this name, also of a user's own module.
        kind = type(self).__module__.rpartition(".")[2]
        return {"kind": kind, **to_tree(self)}
