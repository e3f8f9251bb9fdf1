import dask
import numpy as np
import pytest
import xarray as xr

from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.results.schema import validate
from daskfactor.results.store import RunStore
from daskfactor.results.trace import build_tree, expectation, open_run
from tests.results.runs import CHAINS, DRAWS, I, J, K, factors, fill, make_spec, memory_tree


def count_computes():
    """A scheduler that fails when asked to compute."""

    def scheduler(dsk, keys, **kwargs):
        raise AssertionError("something was computed")

    return dask.config.set(scheduler=scheduler)


def test_an_opened_run_is_lazy(tmp_path):
    spec = make_spec(has_coarse=True)
    with RunStore.create(tmp_path / "run.zarr", spec) as store:
        fill(store, spec)
    with count_computes():
        tree = open_run(tmp_path / "run.zarr")
    for group in ("posterior", "posterior_coarse", "posterior_moments"):
        for array in tree[group].data_vars.values():
            assert dask.is_dask_collection(array.data) or array.name == "count"


def test_a_tree_in_memory_shares_the_arrays():
    W = np.ones((CHAINS, DRAWS, I, K), dtype="f4")
    Ht = np.ones((CHAINS, DRAWS, J, K), dtype="f4")
    tree = build_tree(make_spec(), {"posterior": {"W": W, "H": Ht}})
    validate(tree)
    assert np.shares_memory(tree["posterior"]["W"].values, W)
    assert np.shares_memory(tree["posterior"]["H"].values, Ht)
    assert tree["posterior"]["H"].dims == ("chain", "draw", "component", "day")


def test_a_run_broken_off_in_memory_is_shorter():
    W = np.ones((CHAINS, 4, I, K), dtype="f4")
    Ht = np.ones((CHAINS, 4, J, K), dtype="f4")
    tree = build_tree(make_spec(), {"posterior": {"W": W, "H": Ht}})
    assert tree["posterior"]["draw"].values.tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"posterior": {"W": np.ones((CHAINS, DRAWS, J, K))}}, "must have shape"),
        ({"posterior": {"Z": np.ones(3)}}, "no variable 'Z'"),
        ({"posterior_coarse": {"W": np.ones((CHAINS, DRAWS, I, K))}}, "no variable 'W'"),
        ({"sample_stats": {"lp": np.ones(DRAWS)}}, "must have shape"),
    ],
)
def test_arrays_that_do_not_fit_the_plan_are_refused(arrays, match):
    with pytest.raises(OptionError, match=match):
        build_tree(make_spec(), arrays)


def _naive(spec, function, chains=range(CHAINS)):
    def mean(n, salt):
        values = [
            function(W, Ht.T)
            for chain in chains
            for W, Ht in zip(*factors(chain, 0, n, salt=salt), strict=True)
        ]
        return np.mean(np.array(values, dtype="f8"), axis=0)

    fine = mean(DRAWS, 0)
    return 2 * fine - mean(DRAWS // 2, 1) if spec.has_coarse else fine


FUNCTIONS = {
    "matrix": lambda W, H: W @ H,
    "scalar": lambda W, H: float(np.sum(W) ** 2),
    "vector": lambda W, H: H.max(axis=1),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize("chain", [None, 1])
def test_expectation_is_the_mean_over_draws_extrapolated(
    tmp_path, function, coarse, chain, monkeypatch
):
    spec = make_spec(has_coarse=coarse)
    expected = _naive(spec, function, range(CHAINS) if chain is None else [chain])
    found = expectation(memory_tree(spec), function, chain=chain)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with RunStore.create(tmp_path / "run.zarr", spec) as store:
        fill(store, spec)
    # Three draws at a time, so that the blocks do not divide the run.
    monkeypatch.setattr("daskfactor.results.trace._READ_BYTES", 3 * (I + J) * K * 4)
    streamed = expectation(tmp_path / "run.zarr", function, chain=chain)
    np.testing.assert_allclose(streamed, expected, rtol=1e-5)


def test_richardson_romberg_removes_a_bias_linear_in_the_step():
    spec = make_spec(has_coarse=True)
    step = 0.1
    truth = np.ones((CHAINS, DRAWS, I, K), dtype="f4")
    H = np.ones((CHAINS, DRAWS, J, K), dtype="f4")
    tree = build_tree(
        spec,
        {
            "posterior": {"W": truth + step / 2, "H": H},
            "posterior_coarse": {"W": (truth + step)[:, : DRAWS // 2], "H": H[:, : DRAWS // 2]},
        },
    )
    np.testing.assert_allclose(expectation(tree, lambda W, H: W), np.ones((I, K)), rtol=1e-6)


def test_expectation_says_what_is_missing(tmp_path):
    with pytest.raises(OptionError, match="no chain 5"):
        expectation(memory_tree(make_spec()), lambda W, H: W, chain=5)
    with pytest.raises(OptionError, match="moments only"):
        expectation(memory_tree(make_spec(keep="moments")), lambda W, H: W)
    RunStore.create(tmp_path / "run.zarr", make_spec()).close()
    with pytest.raises(OptionError, match="no draws yet"):
        expectation(tmp_path / "run.zarr", lambda W, H: W)


def test_a_foreign_tree_is_refused():
    with pytest.raises(StoreFormatError, match="no factors"):
        validate(xr.DataTree())
