"""The rows that stand for a full product."""

from itertools import combinations, product

import pytest

from tests.pairwise import covering


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3, 4), (3, 2, 2, 2, 3), (4, 4, 4, 4)])
def test_every_two_values_share_a_row_and_rows_are_few(sizes):
    axes = [range(10 * n, 10 * n + size) for n, size in enumerate(sizes)]
    rows = covering(*axes)
    for i, j in combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(axes[i], axes[j]))
    first, second = sorted(sizes)[-2:]
    assert first * second <= len(rows) <= 1.6 * first * second
    assert covering(*axes) == rows
