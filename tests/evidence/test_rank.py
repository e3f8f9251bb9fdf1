"""The table of ranks, from a method that makes evidences up."""

from dataclasses import dataclass

import dask.array as da
import numpy as np
import pytest
import sparse
import xarray as xr
from numpy.testing import assert_allclose

import daskfactor as dfac
from daskfactor.errors import DaskfactorError, ModelError, OptionError, SamplingWarning
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


def select(V, ranks, method=None, beta=1.0, held_out=0.2, **options):
    """The table of ranks of a Tweedie model."""
    method = MadeUp([]) if method is None else method
    options = {"held_out": held_out, "progressbar": False} | options
    return dfac.select_rank(V, dfac.TweedieNMF(1, beta=beta), ranks, method, **options)


def counts(seed=0, rank=3):
    rng = np.random.default_rng(seed)
    return rng.poisson(rng.exponential(2, (20, rank)) @ rng.exponential(2, (rank, 15))) * 1.0


def test_table_without_cells_left_out():
    method = MadeUp([])
    table = select(counts(), [4, 2, 3], method, held_out=0)
    assert table["rank"].values.tolist() == [2, 3, 4]
    assert table["log_evidence"].values.tolist() == [-2, 0, -2]
    assert "held_out_log_score" not in table
    said = {"best": 3, "not_distinguishable": []}
    said |= {"verdict": "The evidence is largest at rank 3."}
    assert said.items() <= table.attrs.items()
    assert [k for k, _, _ in method.asked] == [2, 3, 4]
    rates = [rate**2 / k for k, _, rate in method.asked]
    assert_allclose(rates, rates[0])  # K / mean
    for ranks in ([], [0, 1], [2, 2], [1.5]):
        refused(OptionError, "rank", select, counts(), ranks)


def test_one_dispersion_for_all_ranks():
    method, V = MadeUp([]), np.random.default_rng(0).gamma(3.0, 1.0, (20, 15))
    select(V, [1, 4], method, beta=2.0, held_out=None)
    (_, low, _), (_, high, _) = method.asked
    assert 0 < low == high < V.var()


def test_cells_left_out_are_scored_on_the_same_cells(monkeypatch):
    monkeypatch.setattr(selection, "DRAWS", 20)
    monkeypatch.setattr(selection, "TUNE", 40)
    table = select(counts(), [1, 3])
    best = table.attrs["best_held_out"]
    assert float(table["held_out_difference_error"].sel(rank=best)) == 0
    assert (table["held_out_log_score"] < 0).all()
    assert float(table["held_out_log_score"].diff("rank")[0]) > 0.1  # rank 1 is far off
    assert best == 3
    assert "at the same rank" in table.attrs["verdict"]


def fit(value, error=0.1, discretization=0.0, scores=None):
    found = Evidence(value, error, discretization, xr.Dataset())
    return selection.RankFit(found, 1.0, None if scores is None else np.array(scores))


def by_score(monkeypatch, best, near):
    """A table of ranks 1 to 6 at the default method: made-up scores, evidences that peak at 3."""
    method, noise = MadeUp([]), np.random.default_rng(0).normal(size=40)

    def scores(model, *rest):
        rank = model.n_components
        return -0.01 * abs(rank - best) - (rank not in near) + noise + 0.1 * rank * noise[::-1]

    monkeypatch.setattr(selection, "checked_method", lambda asked, model: method)
    monkeypatch.setattr(selection, "_scores", scores)
    options = {"held_out": 0.2, "progressbar": False, "random_seed": 0}
    table = dfac.select_rank(counts(), dfac.TweedieNMF(1), range(1, 7), None, **options)
    return table, [rank for rank, _, _ in method.asked]


def test_the_evidence_is_computed_from_the_smallest_rank_in_question_until_it_falls(monkeypatch):
    table, asked = by_score(monkeypatch, 5, {3, 4, 5, 6})
    assert asked == table.attrs["evidence_at"] == [3, 4]
    known = np.isfinite(table["log_evidence"])
    assert table["rank"][known].values.tolist() == [3, 4]
    assert np.isfinite(table["held_out_log_score"]).all()
    assert (table["seconds"] > 0).all()
    assert table.attrs["best"] == 3
    assert "it was computed at 3, 4 only: scores rule" in table.attrs["verdict"]
    assert len(dfac.plots.plot_ranks(table).axes) == 2


def test_no_evidence_where_cells_left_out_decide(monkeypatch):
    table, asked = by_score(monkeypatch, 4, {4})
    assert asked == table.attrs["evidence_at"] == []
    assert table.attrs["best"] == table.attrs["best_held_out"] == 4
    assert "no evidence was computed" in table.attrs["verdict"]
    assert len(dfac.plots.plot_ranks(table).axes) == 1
    assert "so no evidence was computed" in " ".join(str(table).split())


def test_a_single_rank_has_its_evidence_and_so_have_all_where_scores_are_not_finite(monkeypatch):
    method = MadeUp([])
    monkeypatch.setattr(selection, "checked_method", lambda asked, model: method)
    options = {"held_out": 0.2, "progressbar": False, "random_seed": 0}
    monkeypatch.setattr(selection, "_scores", lambda model, *rest: np.array([-1.0, -np.inf]))
    heard = []
    for ranks in ([2], [1, 2, 3]):
        method.asked.clear()
        with np.errstate(invalid="ignore"):
            dfac.select_rank(counts(), dfac.TweedieNMF(1), ranks, callback=heard.append, **options)
        assert [rank for rank, _, _ in method.asked] == ranks
        steps = [event for event in heard if event.phase == "ranks"]
        assert steps[-1].done == steps[-1].total > 0


def test_disagreement_is_put_into_words():
    def table(*fits):
        return selection._table([2, 5], [fit(own, scores=all_) for own, all_ in fits], MadeUp([]))

    close = table((0, [-1, -2, -1.0]), (-0.2, [-1, -1.9, -1.02]))
    assert close.attrs["not_distinguishable"] == [5]
    assert "do not tell 5" in close.attrs["verdict"]
    assert "predicted best at rank 5, though not clearly" in close.attrs["verdict"]
    far = table((0, [-2, -3, -2.0]), (-9, [-1, -1.9, -1.0]))
    assert far.attrs["held_out_not_distinguishable"] == []
    assert "and clearly better" in far.attrs["verdict"]
    assert_allclose(far["held_out_difference_error"][1], 0)


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
    table = selection._table(ranks, [fit(value) for value in values], MadeUp([]))
    assert (table.attrs["at_edge"], bool(table.attrs["decides"])) == (edge, True)
    assert said in table.attrs["verdict"]


UNIFORM = dfac.ThermodynamicIntegration(power=1)


@pytest.mark.parametrize(
    ("method", "fits", "said"),
    [
        (
            dfac.ThermodynamicIntegration(),
            [fit(-9e3, 50.0, 4e4), fit(-3e3, 20.0, 3.6e4), fit(0, 10.0, 2e4)],
            "up to 40,000 nats, and the evidences of all ranks lie within 9,000. To decide, raise",
        ),
        (UNIFORM, [fit(0, 2.0, 80.0), fit(-90, 2.0, 50.0)], "leave power=1 out, or raise temp"),
        (UNIFORM, [fit(0, 80.0, 2.0), fit(-90, 2.0, 50.0)], "To decide, raise draws and tune."),
        (dfac.Chib(), [fit(0, 8.0), fit(-9, 2.0)], "To decide, raise draws."),
        (
            dfac.SequentialMonteCarlo(),
            [fit(0, 0.1), fit(-50, 0.1), fit(-9, 40.0)],
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
    assert text == ["undecided: errors as large as differences"]
    table.to_zarr(tmp_path / "ranks.zarr", consolidated=False)  # attributes can be stored


def test_an_error_is_useless_or_no_doubt():
    fits = [fit(0), fit(-50), fit(-9, 40.0)]
    with pytest.warns(SamplingWarning, match="evidence of rank 3 cannot be used: its error is up"):
        table = selection._table([1, 2, 3], fits, MadeUp([]))
    assert table.attrs["best"] == 1
    table = selection._table([1, 2], [fit(0.2, 0.3), fit(0, 0.3)], MadeUp([]))
    assert table.attrs["decides"]
    assert table.attrs["not_distinguishable"] == [2]


def test_a_ladder_that_is_too_short_decides_nothing():
    rng = np.random.default_rng(0)
    V = rng.poisson(rng.exponential(20, (12, 3)) @ rng.exponential(20, (3, 9))) * 1.0
    method = dfac.ThermodynamicIntegration(temperatures=4, power=1, draws=50, tune=50)
    with pytest.warns(SamplingWarning) as told:
        table = select(V, [1, 2], method, held_out=None)
    assert any("does not decide between the ranks" in str(each.message) for each in told)
    assert "does not decide between the ranks" in table.attrs["verdict"]


def test_additive_model_has_ranks_too():
    model = dfac.GaussianAdditive(2, mean=5, scale=2, noise=2)
    x = model.generate(np.random.default_rng(0), 500)
    method = dfac.ThermodynamicIntegration(draws=1000, tune=200)
    table = dfac.select_rank(x, model, range(1, 4), method)
    exact = [dfac.GaussianAdditive(r, mean=5, scale=2, noise=2).log_evidence(x) for r in (1, 2, 3)]
    assert table.attrs["best"] == 1 + int(np.argmax(exact))


def test_cells_come_from_any_data(monkeypatch):
    monkeypatch.setattr(selection, "DRAWS", 4)
    monkeypatch.setattr(selection, "TUNE", 4)
    forms = counts(), da.from_array(counts()), dfac.as_blocks(counts())
    one, *others = (select(V, [1], random_seed=0)["held_out_log_score"] for V in forms)
    for other in others:
        assert_allclose(other, one, rtol=1e-6)


# So few draws are guessed from, and a warning says so.
guessed = pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning")
QUIET = {"progressbar": False, "random_seed": 0}
LADDER = dfac.ThermodynamicIntegration(temperatures=3, draws=120, tune=60)


@pytest.fixture(scope="module")
def tensor():
    rng = np.random.default_rng(0)
    sizes = (rng.gamma(0.5, 1.0, (n, 2)) for n in (9, 7, 5))
    return rng.poisson(3 * np.einsum("ik,jk,lk->ijl", *sizes))


@pytest.mark.full
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


@pytest.mark.full
@guessed
def test_ranks_are_compared(tensor):
    ranks = dfac.select_rank(tensor, dfac.CP(1), [1, 2], LADDER, **QUIET)
    assert ranks.attrs["best"] == 2
    assert ranks["log_evidence"].diff("rank").item() > 20
    assert np.isfinite(ranks["held_out_log_score"]).all()


def test_what_is_of_a_matrix_or_a_tensor_is_refused(tensor):
    for method, sentence in (
        (dfac.Chib(), "evidence of a matrix"),
        (dfac.ThermodynamicIntegration(sampler="exact"), "leave sampler out for BlockHMC"),
        (dfac.ThermodynamicIntegration(sampler=dfac.Gibbs()), "BlockHMC"),
    ):
        refused(ModelError, sentence, dfac.log_evidence, tensor, dfac.CP(2), method, **QUIET)
    match = "takes three or more; use TweedieNMF"
    refused(DaskfactorError, match, dfac.log_evidence, np.ones((3, 4)), dfac.CP(2), **QUIET)
