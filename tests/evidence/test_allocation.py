"""Evidences of allocation models as users meet them; what methods compute is tested elsewhere."""

from dataclasses import replace

import numpy as np
import pytest
import sparse
import xarray as xr
from numpy.testing import assert_allclose
from scipy import sparse as scipy_sparse

import daskfactor as dfac
from daskfactor.allocation import smc
from daskfactor.allocation.counts import as_counts
from daskfactor.errors import DataError, ModelError, OptionError, SamplingWarning
from daskfactor.plots import plot_ranks
from tests.allocation.cases import TOY
from tests.allocation.cases import TOY_EVIDENCE as EXACT
from tests.refusals import refused

NMF = dfac.AllocationModel.nmf(2)
FEW, SUM = dfac.SequentialMonteCarlo(particles=64, islands=4), dfac.Enumeration()
VB, TWO = dfac.VariationalBayes(), dfac.VariationalBayes(starts=2)
BLOCKS = np.kron(np.eye(2, dtype=int), np.full((2, 2), 12))


def evidence(X=TOY, model=NMF, method=None, **options):
    settings = {"random_seed": 1, "progressbar": False, "executor": "serial"} | options
    return dfac.log_evidence(X, model, method, **settings)


@pytest.mark.parametrize("rank", EXACT)
def test_three_methods_on_the_toy(rank):
    model = dfac.AllocationModel.nmf(rank)
    exact, estimate, bound = (evidence(TOY, model, method) for method in (SUM, None, VB))
    assert (exact.value, exact.total_error) == (pytest.approx(EXACT[rank], abs=1e-9), 0)
    assert isinstance(estimate, dfac.Evidence)
    assert abs(estimate.value - exact.value) <= 4 * estimate.standard_error + 1e-9
    assert estimate.standard_error <= dfac.SequentialMonteCarlo().target == 0.1
    assert (exact.bound, estimate.bound, bound.bound) == (False, False, True)
    assert bound.value <= exact.value + 1e-9
    assert (bound.value > exact.value - 1e-9) == (rank == 1)
    if rank == 2:
        assert str(exact) == "log evidence -23.49 nats (exact)"
        assert str(bound).startswith("log evidence at least -25.09 nats")
        assert "(Monte Carlo) nats" in str(estimate)


@pytest.mark.parametrize("method", [FEW, dfac.VariationalBayes(starts=4)])
def test_same_bits_on_every_executor(method):
    first = evidence(method=method)
    for executor in ("lanes", "tasks", dfac.LanesExecutor(3)):
        other = evidence(method=method, executor=executor)
        assert (other.value, other.standard_error) == (first.value, first.standard_error)
        xr.testing.assert_identical(other.trace, first.trace)
    assert not evidence(method=method, random_seed=2).trace.identical(first.trace)


def test_traces(tmp_path):
    found, three = evidence(method=FEW), evidence(method=dfac.VariationalBayes(starts=3))
    smc, vb = found.trace, three.trace
    assert (smc.sizes["island"], smc.sizes["particle"]) == (4, 64)
    assert smc["ess"].dims == ("island", "token")
    assert int(smc["token"][-1]) == TOY.sum()
    top = smc["log_weight"].max()
    mean = float(np.log(np.exp(smc["log_weight"] - top).mean()) + top)
    assert mean == pytest.approx(found.value, abs=1e-9)
    assert vb["elbo"].dims == ("start", "iteration")
    assert (float(vb["elbo"].max()), vb.attrs["starts"]) == (three.value, 3)
    for trace in (smc, vb, evidence(method=SUM).trace):
        assert trace["table_i"].dims == ("r", "i")
        assert_allclose(trace["table_i"].sum("i"), 1)
        assert_allclose(trace["table_r"].sum(), 1)
        trace.to_netcdf(tmp_path / "trace.nc", engine="h5netcdf")
        with xr.open_dataset(tmp_path / "trace.nc", engine="h5netcdf") as again:
            assert set(again.data_vars) == set(trace.data_vars)


@pytest.mark.parametrize("method", [FEW, VB])
def test_tables_find_the_blocks(method):
    table = evidence(BLOCKS, method=method).trace["table_i"]
    first, blocks = int(table.isel(r=0).argmax("i") >= 2), [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]
    assert_allclose(table.isel(r=[first, 1 - first]), blocks, atol=0.05)


def test_without_room_for_particles(monkeypatch):
    """The mean of the best island, as it is."""
    kept = evidence(method=FEW).trace
    monkeypatch.setattr(smc, "ROOM", 0)
    plain = evidence(method=FEW).trace
    xr.testing.assert_identical(plain["ess"], kept["ess"])
    assert_allclose(plain["table_i"].sum("i"), 1)
    assert not plain["table_i"].equals(kept["table_i"])


def test_names_and_labels_of_the_data():
    X = xr.DataArray(TOY, dims=("gene", "cell type"), coords={"gene": ["a", "b", "c"]})
    table = evidence(X, method=TWO).trace["table_i"]
    assert table.dims == ("r", "gene")
    assert table["gene"].values.tolist() == ["a", "b", "c"]
    turned = xr.DataArray(TOY.T, dims=("j", "i"))
    assert evidence(turned, dfac.AllocationModel.nmf(1)).value == pytest.approx(EXACT[1])


def test_sparse_tensors_of_any_order():
    X, model = np.zeros((2, 2, 3), int), dfac.AllocationModel.cp(2)
    X[0, 1, 2], X[1, 0, 0] = 3, 2
    dense, exact = evidence(X, model, FEW), evidence(X, model, SUM)
    assert evidence(sparse.COO.from_numpy(X), model, FEW).value == dense.value
    assert abs(dense.value - exact.value) <= 5 * dense.standard_error
    matrix = evidence(scipy_sparse.csr_array(TOY), method=FEW, unstored="zero")
    assert matrix.value == evidence(method=FEW).value


def test_variables_may_be_called_anything_and_every_particle_kept():
    model = dfac.AllocationModel("island -> token, island -> start", {"island": 2})
    for method in (FEW, TWO, SUM):
        trace = evidence(model=model, method=method).trace
        assert trace["table_token"].sizes == {"island": 2, "token": 3}
        assert trace["table_start"].sizes == {"island": 2, "start": 4}
    assert evidence(model=model, method=FEW).trace.sizes["island_"] == 4
    model = dfac.AllocationModel("particle -> island, particle -> j", {"particle": 2})
    kept = dfac.SequentialMonteCarlo(particles=8, islands=2, keep="particles", target=9.0)
    sizes = dict(evidence(model=model, method=kept).trace["particle_island"].sizes)
    assert sizes == {"island_": 2, "particle_": 8, "particle": 2, "island": 3}
    trace = evidence(method=kept).trace
    assert trace["particle_i"].sizes == {"island": 2, "particle": 8, "r": 2, "i": 3}
    assert "table_i" in trace
    assert_allclose(trace["particle_i"].sum("i"), 1)
    best = trace["particle_r"].isel(island=int(trace["island_log_evidence"].argmax("island")))
    assert not np.allclose(best[0], best[1])


def test_thinning_is_said_and_exact():
    method, whole = (replace(FEW, thin=share) for share in (0.5, 1.0))
    kept = as_counts(BLOCKS, NMF).thinned(0.5, 3)
    with pytest.warns(SamplingWarning, match=f"kept {kept.total} of 96 tokens"):
        found = evidence(BLOCKS, NMF, method, random_seed=3)
    assert found.trace.attrs["tokens"] == kept.total
    assert found.value == evidence(kept, NMF.with_thinning(0.5), FEW, random_seed=3).value
    assert evidence(method=whole).value == evidence(method=FEW).value


def test_warnings_of_the_methods():
    with pytest.warns(SamplingWarning, match="still rising after 1 iterations"):
        evidence(method=dfac.VariationalBayes(max_iterations=1))
    small = dfac.SequentialMonteCarlo(particles=2, islands=2, max_particles=4, target=1e-6)
    with pytest.warns(SamplingWarning, match="max_particles"):
        evidence(method=small)


def test_listeners_are_told():
    for method in (FEW, TWO):
        events = []
        evidence(method=method, callback=events.append, executor="lanes")
        assert events[0].phase == "load"
        assert "9 tokens in 7 cells" in events[1].message
        assert events[-1].done == events[-1].total


@pytest.mark.parametrize(
    ("model", "method", "said"),
    [
        (NMF, dfac.ThermodynamicIntegration(), "of AllocationModel; use S"),
        (NMF, dfac.Chib(), "Enumeration"),
        (dfac.TweedieNMF(2), dfac.SequentialMonteCarlo(), "of TweedieNMF; use Thermo"),
        (dfac.GaussianAdditive(2), dfac.VariationalBayes(), "of GaussianAdditive; use Thermo"),
        (dfac.TweedieNMF(2), dfac.Enumeration(), "Enumeration\\(\\) does not give"),
    ],
)
def test_pairs_that_do_not_go_together(model, method, said):
    refused(ModelError, said, evidence, TOY, model, method)
    refused(ModelError, said, dfac.select_rank, TOY, model, [1], method, progressbar=False)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (OptionError, "no missing cells", {"unstored": "missing"}),
        (OptionError, "model must be a TweedieNMF", {"model": dfac.AllocationModel}),
        (OptionError, "method must be", {"method": dfac.SequentialMonteCarlo}),
        (DataError, "whole numbers", {"X": TOY + 0.5}),
        (DataError, "VariationalBayes", {"method": dfac.Enumeration(limit=10)}),
        (ModelError, "dimensions", {"X": np.ones((2, 2, 2), int)}),
    ],
)
def test_what_else_is_refused(error, match, options):
    refused(error, match, evidence, **options)
    refused(OptionError, "limit", dfac.Enumeration, limit=0)


def ranked(method, model=None, **options):
    model = dfac.AllocationModel.nmf(1) if model is None else model
    return dfac.select_rank(TOY, model, [1, 2, 3], method, progressbar=False, **options)


def test_select_rank(tmp_path):
    table, exact = ranked(None), np.array(list(EXACT.values()))
    assert table.attrs["best"] == 2
    assert (np.abs(table["log_evidence"] - exact) <= 5 * table["standard_error"] + 1e-9).all()
    assert table.attrs["verdict"].startswith("The evidence is largest at rank 2")
    assert "held_out_log_score" not in table
    sums = ranked(SUM, held_out=None)
    assert_allclose(sums["log_evidence"], exact, atol=1e-9)
    plot_ranks(sums, tmp_path / "ranks.png")
    bounds, said = ranked(VB), {"best": 1, "bound": "lower"}
    said |= {"verdict": "The lower bound of the evidence is largest at rank 1."}
    assert said.items() <= bounds.attrs.items()
    assert "lower bound" in plot_ranks(bounds).axes[0].get_ylabel()
    tucker = dfac.AllocationModel.tucker((2, 2))
    refused(OptionError, "no cell can be missing", ranked, FEW, held_out=0.2)
    refused(OptionError, "held_out must be", ranked, FEW, held_out="some")
    refused(ModelError, "hidden", ranked, FEW, tucker)
