"""What a run takes beside its data, as NumPy's allocations tell (exact, on any machine)."""

import math
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from daskfactor import PSGLD, TweedieNMF, as_blocks, sample
from daskfactor.inference import chain, setting
from daskfactor.runs.schema import CHUNK_BYTES

ROWS, COLUMNS, K, DRAWS = 32, 8_000, 8, 260
DRAW = (ROWS + COLUMNS) * K * 4
# All draws once; the state and what it goes back to; a chunk of draws on its way, with copies.
MOST = (
    DRAWS * DRAW
    + 2 * DRAW * (1 + len(PSGLD().kernel(TweedieNMF(2)).arrays))
    + 3 * DRAW
    + 5 * CHUNK_BYTES
)


def peak_of(folder, at_once):
    """Most bytes of a run with a store, whose draws all wait for one segment's end; how many."""
    setting.SEGMENT_BYTES = 2 * DRAWS * DRAW
    chain.DRAWS_AT_ONCE = at_once
    V = np.random.default_rng(0).random((ROWS, COLUMNS), dtype=np.float32) + 0.5
    with as_blocks(V, blocks=4) as data:

        def run(draws):
            options = {"tune": 1, "random_seed": 0, "progressbar": False, "executor": "serial"}
            options |= {"draws": draws, "store": Path(folder) / f"{draws}.zarr"}
            return sample(data, TweedieNMF(K, dispersion=1.0), PSGLD(warm_start=1), **options)

        run(2)  # compiles and imports
        tracemalloc.start()
        trace = run(DRAWS)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak, trace["posterior"].sizes["draw"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("at_once", "least", "most"),
    [
        pytest.param(DRAW, DRAWS * DRAW, MOST, id="a few"),
        # What would show: bands hold all draws, and so does the copy.
        pytest.param(2**40, max(MOST, 2 * DRAWS * DRAW), math.inf, id="all"),
    ],
)
def test_draws_on_their_way_to_a_store_are_copied_a_few_at_a_time(tmp_path, at_once, least, most):
    # In a process of its own: what other tests left behind makes a run take less.
    command = [sys.executable, __file__, str(tmp_path), str(at_once)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak, draws = map(int, told.split())
    assert draws == DRAWS
    assert least < peak < most, f"{peak / DRAW:.1f} draws"


@pytest.mark.parametrize("at_once", [1, 2**30])
def test_draws_are_the_same_however_many_are_copied_at_a_time(tmp_path, monkeypatch, at_once):
    V = np.random.default_rng(0).random((12, 10), dtype=np.float32) + 0.5
    options = {"draws": 7, "tune": 3, "random_seed": 0, "progressbar": False}

    def drawn(store):
        trace = sample(V, TweedieNMF(2), PSGLD(warm_start=2), store=store, **options)
        return trace["posterior"]["H"].values

    usual = drawn(tmp_path / "usual.zarr")
    monkeypatch.setattr(chain, "DRAWS_AT_ONCE", at_once)
    np.testing.assert_array_equal(drawn(tmp_path / "other.zarr"), usual)


if __name__ == "__main__":
    print(*peak_of(sys.argv[1], int(sys.argv[2])))
