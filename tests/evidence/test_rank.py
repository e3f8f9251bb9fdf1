"""The table of ranks, from a method that makes evidences up."""

from dataclasses import dataclass

import numpy as np
import pytest
import sparse
import xarray as xr
from numpy.testing import assert_allclose

import daskfactor as dfac
from daskfactor.errors import ModelError, OptionError, SamplingWarning
from daskfactor.evidence import rank as selection
from daskfactor.evidence.base import Evidence, EvidenceMethod
from tests.refusals import refused


@dataclass(frozen=True)
class MadeUp(EvidenceMethod):
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
    assert_allclose(rates, rates[0])  # K / mean


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
    return selection.RankFit(Evidence(value, error, 0.0, xr.Dataset()), 1.0, np.array(scores))


def test_disagreement_is_put_into_words():
    method = MadeUp([])
    close = selection._table([2, 5], [fit(0, [-1, -2, -1.0]), fit(-0.2, [-1, -1.9, -1.02])], method)
    assert close.attrs["not_distinguishable"] == [5]
    assert "do not tell 5" in close.attrs["verdict"]
    assert "predicted best at rank 5, though not clearly" in close.attrs["verdict"]
    far = selection._table([2, 5], [fit(0, [-2, -3, -2.0]), fit(-9, [-1, -1.9, -1.0])], method)
    assert far.attrs["held_out_not_distinguishable"] == []
    assert "and clearly better" in far.attrs["verdict"]
    assert_allclose(far["held_out_difference_error"][1], 0)


def plain(value, error=0.1, discretization=0.0):
    return selection.RankFit(Evidence(value, error, discretization, xr.Dataset()), 1.0, None)


@pytest.mark.parametrize(
    ("ranks", "values", "edge", "said"),
    [
        ([1, 2, 3], (-9, -5, 0), "largest", "3 is the largest that was tried; larger ones may"),
        ([2, 3], (0, -5), "smallest", "2 is the smallest that was tried; smaller ones may"),
        ([1, 2], (0, -5), "", "largest at rank 1."),
        ([2, 3, 4], (-5, 0, -5), "", "largest at rank 3."),
    ],
)
def test_edge_of_the_ranks(ranks, values, edge, said):
    table = selection._table(ranks, [plain(value) for value in values], MadeUp([]))
    assert table.attrs["at_edge"] == edge
    assert table.attrs["decides"]
    assert said in table.attrs["verdict"]


UNIFORM = dfac.ThermodynamicIntegration(power=1)


@pytest.mark.parametrize(
    ("method", "fits", "said"),
    [
        (
            dfac.ThermodynamicIntegration(),
            [plain(-9e3, 50.0, 4e4), plain(-3e3, 20.0, 3.6e4), plain(0, 10.0, 2e4)],
            "up to 40,000 nats, and the evidences of all ranks lie within 9,000. To decide, raise",
        ),
        (UNIFORM, [plain(0, 2.0, 80.0), plain(-90, 2.0, 50.0)], "leave power=1 out, or raise temp"),
        (UNIFORM, [plain(0, 80.0, 2.0), plain(-90, 2.0, 50.0)], "To decide, raise draws and tune."),
        (dfac.Chib(), [plain(0, 8.0), plain(-9, 2.0)], "To decide, raise draws."),
        (
            dfac.SequentialMonteCarlo(),
            [plain(0, 0.1), plain(-50, 0.1), plain(-9, 40.0)],
            "all ranks lie within 50; raise max_particles above 16384, or thin the counts.",
        ),
    ],
)
def test_errors_as_large_as_the_differences(method, fits, said, tmp_path):
    ranks = list(range(1, len(fits) + 1))
    with pytest.warns(SamplingWarning, match="nats, and the evidences of all ranks lie within"):
        table = selection._table(ranks, fits, method)
    assert not table.attrs["decides"]
    assert said in table.attrs["verdict"]
    text = [axes.get_title("right") for axes in dfac.plots.plot_ranks(table).axes]
    assert text == ["errors as large as the differences: not decided"]
    table.to_zarr(tmp_path / "ranks.zarr", consolidated=False)  # attributes can be stored


def test_a_rank_whose_error_is_useless():
    fits = [plain(0), plain(-50), plain(-9, 40.0)]
    with pytest.warns(SamplingWarning, match="evidence of rank 3 cannot be used: its error is up"):
        table = selection._table([1, 2, 3], fits, MadeUp([]))
    assert table.attrs["best"] == 1


def test_a_tie_within_small_errors_is_no_doubt():
    table = selection._table([1, 2], [plain(0.2, 0.3), plain(0, 0.3)], MadeUp([]))
    assert table.attrs["decides"]
    assert table.attrs["not_distinguishable"] == [2]


def test_a_ladder_that_is_too_short_decides_nothing():
    rng = np.random.default_rng(0)
    V = rng.poisson(rng.exponential(20, (12, 3)) @ rng.exponential(20, (3, 9))) * 1.0
    method = dfac.ThermodynamicIntegration(temperatures=4, power=1, draws=50, tune=50)
    with pytest.warns(SamplingWarning) as told:
        table = dfac.select_rank(
            V, dfac.TweedieNMF(1), [1, 2], method, held_out=None, progressbar=False
        )
    assert any("does not decide between the ranks" in str(each.message) for each in told)
    assert "does not decide between the ranks" in table.attrs["verdict"]


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


def test_cells_come_from_any_data(monkeypatch):
    import dask.array as da

    monkeypatch.setattr(selection, "DRAWS", 4)
    monkeypatch.setattr(selection, "TUNE", 4)
    tables = [
        dfac.select_rank(
            V, dfac.TweedieNMF(1), [1], MadeUp([]), 0.2, random_seed=0, progressbar=False
        )
        for V in (counts(), da.from_array(counts()), dfac.as_blocks(counts()))
    ]
    for other in tables[1:]:
        assert_allclose(other["held_out_log_score"], tables[0]["held_out_log_score"], rtol=1e-6)


# So few draws are guessed from, and a warning says so.
guessed = pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning")
QUIET = {"progressbar": False, "random_seed": 0}
LADDER = dfac.ThermodynamicIntegration(temperatures=3, draws=120, tune=60)


@pytest.fixture(scope="module")
def tensor():
    rng = np.random.default_rng(0)
    sizes = (rng.gamma(0.5, 1.0, (n, 2)) for n in (9, 7, 5))
    return rng.poisson(3 * np.einsum("ik,jk,lk->ijl", *sizes))


@guessed
def test_sparse_and_dense_counts_have_one_evidence(tensor):
    """Zeros that are not stored are summed, those that are stored are looked at."""
    dense, thin = (
        dfac.log_evidence(V, dfac.CP(2), LADDER, **QUIET)
        for V in (tensor.astype(float), sparse.COO(tensor))
    )
    errors = np.hypot(dense.standard_error, thin.standard_error)
    assert abs(dense.value - thin.value) < 4 * errors
    assert errors < 10.0  # of 225 nats


@guessed
def test_every_executor_gives_the_same_evidence(tensor):
    one, two = (
        dfac.log_evidence(tensor, dfac.CP(2), LADDER, executor=executor, **QUIET).value
        for executor in ("serial", "threads")
    )
    assert one == two


@guessed
def test_ranks_are_compared(tensor):
    ranks = dfac.select_rank(tensor, dfac.CP(1), [1, 2], LADDER, **QUIET)
    assert ranks.attrs["best"] == 2
    assert ranks["log_evidence"].diff("rank").item() > 20
    assert np.isfinite(ranks["held_out_log_score"]).all()


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (dfac.Chib(), "evidence of a matrix"),
        (dfac.ThermodynamicIntegration(sampler="exact"), "leave sampler out for BlockHMC"),
        (dfac.ThermodynamicIntegration(sampler=dfac.Gibbs()), "BlockHMC"),
    ],
)
def test_what_is_of_a_matrix_is_refused(method, sentence, tensor):
    refused(ModelError, sentence, dfac.log_evidence, tensor, dfac.CP(2), method, **QUIET)


def test_a_matrix_is_no_tensor():
    with pytest.raises(dfac.errors.DaskfactorError, match="takes three or more; use TweedieNMF"):
        dfac.log_evidence(np.ones((3, 4)), dfac.CP(2), **QUIET)
