"""Cases in which all pairs of values meet, where the full product would say no more."""

from itertools import combinations, product

import pytest


def covering(*axes):
    """Return rows with a value of each axis; any values of two axes share a row."""
    spots = [range(len(axis)) for axis in axes]
    chosen, missing = [], set()
    for i, j in combinations(range(len(axes)), 2):
        missing |= {(i, a, j, b) for a, b in product(spots[i], spots[j])}

    def new_pairs(row):
        return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)} & missing

    while missing:
        chosen.append(max(product(*spots), key=lambda row: len(new_pairs(row))))
        missing -= new_pairs(chosen[-1])
    return [tuple(axis[at] for axis, at in zip(axes, row, strict=True)) for row in chosen]


def pairwise(**axes):
    """Parametrize a test such that any values of two of its arguments meet."""
    return pytest.mark.parametrize(list(axes), covering(*axes.values()))
