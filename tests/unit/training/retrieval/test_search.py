"""Exact search: the highest products, the earlier of equal ones first, however it is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.training.retrieval.search import top


@pytest.mark.parametrize("block", [1, 3, 7, 50])
@pytest.mark.parametrize("k", [1, 5, 60])
def test_equal_products_keep_the_order_of_the_rows(block: int, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    # Whole numbers: products are exact, and many of them are equal.
    queries = torch.randint(-2, 3, (6, 4), generator=generator).float()
    vectors = torch.randint(-2, 3, (50, 4), generator=generator).float()
    blocks = ((first, vectors[first : first + block]) for first in range(0, 50, block))
    values, rows = top(queries, blocks, k)
    products = (queries @ vectors.T).numpy()
    expected = np.argsort(-products, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(products, expected, 1))
