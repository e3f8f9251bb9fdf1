"""The table of ranks, from a method that makes evidences up."""

from dataclasses import dataclass

import numpy as np
import pytest
import xarray as xr

import daskfactor as dfac
from daskfactor.errors import DataError, OptionError
from daskfactor.evidence import selection
from daskfactor.evidence.base import Evidence, Method


@dataclass(frozen=True)
class MadeUp(Method):
    """Evidences that peak at rank 3; remembers what it was asked."""

    asked: tuple = ()

    def estimate(self, problem):
        model = problem.model
        self.asked.append((model.n_components, model.dispersion, model.rate_w))
        return Evidence(-2.0 * abs(model.n_components - 3), 0.6, 0.3, xr.Dataset())


def counts(seed=0, rank=3):
    rng = np.random.default_rng(seed)
    return rng.poisson(rng.exponential(2, (20, rank)) @ rng.exponential(2, (rank, 15))) * 1.0


def test_table_without_cells_left_out():
    method = MadeUp([])
    table = dfac.select_rank(
        counts(), dfac.TweedieNMF(1), [4, 2, 3], method, held_out=0, progressbar=False
    )
    assert list(table["rank"]) == [2, 3, 4]
    assert list(table["log_evidence"]) == [-2, 0, -2]
    assert "held_out_log_score" not in table
    assert table.attrs["best"] == 3
    assert table.attrs["not_distinguishable"] == []
    assert table.attrs["verdict"] == "The evidence is largest at rank 3."
    assert [k for k, _, _ in method.asked] == [2, 3, 4]
    rates = [rate**2 / k for k, _, rate in method.asked]
    np.testing.assert_allclose(rates, rates[0])  # K / mean


def test_one_dispersion_for_all_ranks():
    method = MadeUp([])
    V = np.random.default_rng(0).gamma(3.0, 1.0, (20, 15))
    dfac.select_rank(
        V, dfac.TweedieNMF(1, beta=2.0), [1, 4], method, held_out=None, progressbar=False
    )
    (_, low, _), (_, high, _) = method.asked
    assert low == high
    assert 0 < low < V.var()


def test_cells_left_out_are_scored_on_the_same_cells(monkeypatch):
    monkeypatch.setattr(selection, "DRAWS", 20)
    monkeypatch.setattr(selection, "TUNE", 40)
    V = counts()
    table = dfac.select_rank(V, dfac.TweedieNMF(1), [1, 3], MadeUp([]), 0.2, progressbar=False)
    best = table.attrs["best_held_out"]
    assert float(table["held_out_difference_error"].sel(rank=best)) == 0
    assert (table["held_out_log_score"] < 0).all()
    assert float(table["held_out_log_score"].diff("rank")[0]) > 0.1  # rank 1 is far off
    assert best == 3
    assert "at the same rank" in table.attrs["verdict"]


def fit(value, scores, error=0.1):
    return selection.Fit(value, error, 0.0, 1.0, np.array(scores))


def test_disagreement_is_put_into_words():
    close = selection._table([2, 5], [fit(0, [-1, -2, -1.0]), fit(-0.2, [-1, -1.9, -1.02])])
    assert close.attrs["not_distinguishable"] == [5]
    assert "do not tell 5" in close.attrs["verdict"]
    assert "predicted best at rank 5, though not clearly" in close.attrs["verdict"]
    far = selection._table([2, 5], [fit(0, [-2, -3, -2.0]), fit(-9, [-1, -1.9, -1.0])])
    assert far.attrs["held_out_not_distinguishable"] == []
    assert "and clearly better" in far.attrs["verdict"]
    np.testing.assert_allclose(far["held_out_difference_error"][1], 0)


def test_additive_model_has_ranks_too():
    model = dfac.GaussianAdditive(2, mean=5, scale=2, noise=2)
    x = model.generate(np.random.default_rng(0), 500)
    method = dfac.ThermodynamicIntegration(draws=1000, tune=200)
    table = dfac.select_rank(x, model, range(1, 4), method)
    exact = [dfac.GaussianAdditive(r, mean=5, scale=2, noise=2).log_evidence(x) for r in (1, 2, 3)]
    assert table.attrs["best"] == 1 + int(np.argmax(exact))


@pytest.mark.parametrize("ranks", [[], [0, 1], [2, 2], [1.5]])
def test_bad_ranks(ranks):
    with pytest.raises(OptionError, match="rank"):
        dfac.select_rank(counts(), dfac.TweedieNMF(1), ranks, progressbar=False)


def test_cells_come_from_arrays_alone():
    import dask.array as da

    with pytest.raises(DataError, match="held out of a NumPy array"):
        dfac.select_rank(
            da.from_array(counts()), dfac.TweedieNMF(1), [1], MadeUp([]), progressbar=False
        )
