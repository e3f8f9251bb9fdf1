"""The contract of ``sample``, ``resume`` and ``optimize``, over samplers and executors."""

import inspect
import json
import re
import threading
from functools import partial

import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr
from scipy import sparse

import daskfactor as dfac
from daskfactor.errors import DataError, DataWarning, EngineError, OptionError, SamplingWarning
from daskfactor.executors import threads
from daskfactor.executors.base import StateLost
from daskfactor.inference import sampling, setting
from daskfactor.kernels import sparse as sparse_kernels
from daskfactor.options import Reading
from daskfactor.runs.files import Checkpoints
from daskfactor.runs.store import RunStore
from tests.refusals import refused

TWO = dfac.TweedieNMF(2)
QUIET = {"random_seed": 0, "progressbar": False}
QUICK = {"draws": 6, "tune": 10, "random_seed": 3, "progressbar": False}


def counts(rows=23, cols=17, missing=0.15, seed=0):
    rng = np.random.default_rng(seed)
    V = rng.poisson(rng.gamma(1, 1, (rows, 3)) @ rng.gamma(1, 3, (3, cols))).astype(np.float32)
    V[rng.random(V.shape) < missing] = np.nan
    V[:, 0] = 1.0
    V[0] = 2.0
    V[-1, -1] = np.nan
    return V


def assert_same(one, other, but=()):
    """The same groups and, bit for bit, the same values."""
    assert set(one.children) - set(but) == set(other.children) - set(but)
    for group in set(one.children) - set(but):
        both = (own[group].to_dataset().compute().drop_attrs() for own in (one, other))
        xr.testing.assert_identical(*both)


MIXED = dfac.PSGLD(step=dfac.PolynomialStep(0.1, 0.6), schedule=dfac.Proportional())
NESTED = dfac.PSGLD(schedule=dfac.NestedReshuffled(2))
SAMPLERS = {"plain": dfac.PSGLD(step=1e-4, preconditioner="identity"), "mixed": MIXED}
"""Those that no case of tests/inference/test_conformance.py has."""


GRIDS = [(MIXED, (23, 17), 4), (NESTED, (23, 17), 4)]
GRIDS += [(SAMPLERS["plain"], (7, 31), 1), (dfac.PSGRRLD(), (5, 5), 5)]


@pytest.mark.parametrize(("sampler", "shape", "blocks"), GRIDS)
def test_every_executor_draws_the_same_bits(sampler, shape, blocks):
    options = QUICK | {"blocks": blocks, "monitor": "missing"}
    V, model = counts(*shape), dfac.TweedieNMF(3)
    one = dfac.sample(V, model, sampler, executor="serial", **options)
    for executor in ("lanes", "tasks", dfac.LanesExecutor(3)):
        assert_same(one, dfac.sample(V, model, sampler, executor=executor, **options))


LAWS = [(beta, "float32") for beta in (2.0, 1.0, 0.5, 0.0, -1.0, 0.3)]


@pytest.mark.quick("2.0-float32", "0.0-float32", "1.0-float64", "0.3-float64")
@pytest.mark.parametrize(("beta", "dtype"), [*LAWS, (1.0, "float64"), (0.3, "float64")])
def test_every_law_and_precision_runs_and_stays_positive(beta, dtype):
    V = dfac.as_blocks(counts() + 1, dtype=dtype)
    sampler = dfac.BlockHMC() if dtype == "float32" else dfac.PSGLD()
    tree = dfac.sample(V, dfac.TweedieNMF(3, beta=beta), sampler, **QUICK)
    for name in ("W", "H"):
        assert tree["posterior"][name].dtype == dtype
        assert np.all(np.isfinite(tree["posterior"][name]))
        assert np.all(tree["posterior"][name] >= 0)
    assert np.all(np.isfinite(tree["sample_stats"]["lp"]))


def test_an_unseeded_run_can_be_repeated_from_its_attributes():
    # Two components are one too few, which a run says where it finds the counts to vary too much.
    model = dfac.TweedieNMF(2, dispersion=1.0)
    tree = dfac.sample(counts(), model, **QUICK | {"random_seed": None})
    seed = int(tree.attrs["random_seed"])
    assert_same(tree, dfac.sample(counts(), model, **QUICK | {"random_seed": seed}))


@pytest.mark.libraries
def test_data_come_in_many_coats_with_the_same_draws(tmp_path):
    V = counts(24, 16)
    chunks = (6, 4)
    array = zarr.create_array(str(tmp_path / "v.zarr"), data=V, chunks=chunks)
    labelled = xr.DataArray(V, dims=("cell", "gene")).chunk(cell=6, gene=4)
    coats = [
        V,
        np.ma.masked_invalid(V),
        da.from_array(V, chunks=chunks),
        array,
        str(tmp_path / "v.zarr"),
        labelled.rename(cell="row", gene="column"),
        dfac.as_blocks(V, 4),
    ]
    trees = [dfac.sample(coat, TWO, blocks=4, **QUICK) for coat in coats]
    for tree in trees[1:]:
        assert_same(trees[0], tree, but=("observed_data",))


@pytest.mark.libraries
def test_labels_come_back_on_the_factors():
    genes = [10, 20, 30, 40, 50]
    labels = {"patient": list("abcdef"), "gene": genes, "age": ("patient", range(6))}
    V = xr.DataArray(counts(6, 5), labels, ("patient", "gene"), "expression")
    tree = dfac.sample(V, TWO, **QUICK)
    assert tree["posterior"]["W"].dims == ("chain", "draw", "patient", "component")
    assert tree["posterior"]["H"].dims == ("chain", "draw", "component", "gene")
    assert list(tree["posterior"]["W"]["patient"].values) == list("abcdef")
    assert list(tree["posterior"]["age"].values) == list(range(6))
    assert dfac.predict(tree, rows="b", columns=[20, 40])["mean"].sizes == {"gene": 2}


def test_draws_are_one_a_cycle_after_tuning_and_thinned():
    tree = dfac.sample(counts(), TWO, **QUICK | {"draws": 4}, thin=3)
    assert list(tree["posterior"]["draw"].values) == [12, 15, 18, 21]
    every = dfac.sample(counts(), TWO, **QUICK | {"draws": 12})
    np.testing.assert_array_equal(every["posterior"]["W"][:, 2::3], tree["posterior"]["W"])


@pytest.mark.parametrize(("keep", "draws"), [("draws", 20), ("moments", None), ("auto", 5)])
def test_what_is_kept(keep, draws, monkeypatch):
    """``auto`` under a small budget keeps evenly spaced draws, and moments of all."""
    monkeypatch.setattr("daskfactor.inference.setting.DRAWS_BUDGET", 5 * (23 + 17) * 2 * 4)
    settings = {**QUICK, "draws": 20}
    tree = dfac.sample(counts(), TWO, **settings, keep=keep)
    full = dfac.sample(counts(), TWO, **settings, keep="draws")
    assert tree["posterior_moments"]["count"].values.tolist() == [20]
    np.testing.assert_array_equal(*(own["posterior_moments"]["W_mean"] for own in (tree, full)))
    if draws is None:
        assert "posterior" not in tree.children
    else:
        kept = tree["posterior"]["W"]
        np.testing.assert_array_equal(kept, full["posterior"]["W"].sel(draw=kept["draw"]))
        assert kept.sizes["draw"] == draws


@pytest.mark.parametrize(
    ("sampler", "chains", "affordable"),
    [
        (dfac.PSGLD(), 1, 0.5),
        (dfac.PSGRRLD(), 3, 0.5),
        (dfac.PSGRRLD(), 1, 1),
        (dfac.PSGLD(), 3, 1),
        (dfac.PSGRRLD(), 1, 4),
        (dfac.PSGLD(), 3, 7),
        (dfac.PSGRRLD(), 1, 100),
    ],
)
def test_auto_keeps_within_the_budget_and_statistics(sampler, chains, affordable, monkeypatch):
    one = (23 + 17) * 2 * 4 * chains * sum(1 / track.stride for track in sampler.tracks)
    monkeypatch.setattr("daskfactor.inference.setting.DRAWS_BUDGET", affordable * one)
    tree = dfac.sample(counts(), TWO, sampler, chains=chains, **QUICK | {"draws": 20})
    groups = [group for group in ("posterior", "posterior_coarse") if group in tree.children]
    kept = sum(tree[g][name].nbytes for g in groups for name in ("W", "H"))
    assert kept <= affordable * one
    assert len(groups) in (0, len(sampler.tracks))
    assert all(tree[group].sizes["draw"] > 0 for group in groups)
    assert np.all(np.isfinite(tree["sample_stats"]["lp"]))
    assert tree["sample_stats"].sizes["draw"] >= 1


@pytest.mark.parametrize("more", [5, 100])
def test_an_interrupted_run_goes_on_with_more_draws(tmp_path, more, monkeypatch):
    def press(event):
        if event.phase == "draw" and event.done > 25:
            raise KeyboardInterrupt

    monkeypatch.setattr("daskfactor.inference.setting.LONGEST_SEGMENT", 10)
    options = QUICK | {"draws": 60, "store": tmp_path / "run.zarr", "callback": press}
    refused(KeyboardInterrupt, None, dfac.sample, counts(), TWO, **options)
    begun = dfac.open_run(tmp_path / "run.zarr")
    done = begun["posterior"].sizes["draw"]
    assert 0 < done < 60
    assert dfac.predict(begun, rows=[0], columns=[0])["mean"].values.shape == (1, 1)
    total = max(60, done + more)
    tree = dfac.resume(tmp_path / "run.zarr", draws=more, progressbar=False)
    assert_same(tree, dfac.sample(counts(), TWO, **QUICK | {"draws": total}))


def test_a_run_of_two_coupled_chains_that_stopped_while_it_tuned_goes_on(tmp_path, monkeypatch):
    """The coarse chain leaves the fine one in the middle of tuning: there is none before."""

    def press(event):
        if event.phase == "tune" and event.done > 14:
            raise KeyboardInterrupt

    monkeypatch.setattr("daskfactor.inference.setting.LONGEST_SEGMENT", 4)
    path, options = tmp_path / "run.zarr", QUICK | {"draws": 8, "tune": 60}
    run = counts(), TWO, dfac.PSGRRLD()
    refused(KeyboardInterrupt, None, dfac.sample, *run, store=path, callback=press, **options)
    assert_same(dfac.resume(path, progressbar=False), dfac.sample(*run, **options))


def test_predictions_of_draws_and_of_streamed_cells_agree():
    tree = dfac.sample(counts(), TWO, monitor="missing", **QUICK | {"draws": 20})
    streamed = dfac.monitored(tree)
    at = (streamed[name].values for name in ("row_index", "column_index"))
    drawn = dfac.predict(tree, *(xr.DataArray(own, dims="cell") for own in at))
    for name in ("mean", "sd", "lower", "upper"):
        np.testing.assert_allclose(streamed[name], drawn[name], rtol=2e-2, atol=1.01)
    np.testing.assert_allclose(streamed["mean"], drawn["mean"], rtol=1e-4)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_store_holds_what_memory_would_and_goes_on_as_a_longer_run(tmp_path, name):
    given, path = (counts(), TWO, SAMPLERS[name]), tmp_path / "run.zarr"
    settings = QUICK | {"monitor": "missing", "chains": 2}
    stored, whole = dfac.sample(*given, store=path, **settings), dfac.sample(*given, **settings)
    for tree in (stored, dfac.open_run(path), dfac.resume(path, progressbar=False)):
        assert_same(tree, whole)
    more = dfac.resume(path, draws=8, progressbar=False, executor="serial")
    assert_same(more, dfac.sample(*given, **settings | {"draws": 14}))
    assert more.attrs["draws"] == 14


def test_lazy_data_are_found_again_or_asked_for(tmp_path):
    V = counts(24, 16)
    zarr.create_array(str(tmp_path / "v.zarr"), data=V, chunks=(6, 4))
    run, model = tmp_path / "run.zarr", TWO
    dfac.sample(str(tmp_path / "v.zarr"), model, store=run, **QUICK)
    assert "observed_data" not in dfac.open_run(run).children
    more = dfac.resume(run, draws=4, progressbar=False)
    lazy = da.from_array(V, chunks=(6, 4))
    assert_same(more, dfac.sample(lazy, model, **QUICK | {"draws": 10}), but=("observed_data",))
    dfac.sample(lazy, model, store=tmp_path / "other.zarr", **QUICK)
    go_on = partial(dfac.resume, tmp_path / "other.zarr", draws=4, progressbar=False)
    refused(DataError, r"pass the data again: resume\(path, V=...\)", go_on)
    refused(DataError, r"not those that the run .* began with", go_on, V=V + 1)
    assert_same(go_on(V=lazy), more)


def test_what_counts_are_told_that_are_not_poisson_under_their_components():
    rng, settings = np.random.default_rng(0), QUICK | {"draws": 4, "tune": 60}
    mu = rng.gamma(2, 1, (80, 2)) @ rng.gamma(2, 4, (2, 60))
    plain = dfac.sample(rng.poisson(mu).astype(float), TWO, **settings)
    assert plain.attrs["dispersion"] == 1.0
    with pytest.warns(DataWarning, match=r"vary [45]\.?\d* times as much as Poisson counts"):
        wild = dfac.sample(5.0 * rng.poisson(mu / 5), TWO, **settings)
    assert wild.attrs["dispersion"] == pytest.approx(5, rel=0.15)
    with pytest.warns(DataWarning, match="compare with a smaller n_components") as told:
        dfac.sample(np.round(mu), TWO, **settings)
    assert "more components" not in str(told[0].message)
    rng = np.random.default_rng(0)  # of six components, of which the model has one
    V = rng.poisson(rng.gamma(0.5, 2, (80, 6)) @ rng.gamma(0.5, 6, (6, 60))).astype(float)
    with pytest.warns(DataWarning, match="they need more components, or are no Poisson") as told:
        dfac.sample(V, dfac.TweedieNMF(1), **settings)
    assert "that 1 component gives them" in str(told[0].message)


@pytest.mark.parametrize(("beta", "phi"), [(2.0, 0.3), (0.0, 0.2), (0.5, 0.4), (1.0, 2.5)])
def test_the_dispersion_is_found_from_the_data(beta, phi):
    from tests.models.laws import sample as simulate

    rng = np.random.default_rng(1)
    mu = rng.gamma(2, 1, (90, 2)) @ rng.gamma(2, 1, (2, 80))
    V = simulate(rng, mu, phi, beta)
    tree = dfac.sample(V, dfac.TweedieNMF(2, beta=beta), draws=2, tune=100, **QUIET)
    assert tree.attrs["dispersion"] == pytest.approx(phi, rel=0.1)


@pytest.mark.parametrize("sampler", [dfac.BlockHMC(), dfac.PSGRRLD(), dfac.Gibbs()])
def test_chains_of_one_block_run_side_by_side_with_the_same_bits(sampler):
    model, options = dfac.TweedieNMF(2, dispersion=1.0), QUICK | {"chains": 3, "blocks": 1}
    names, told = set(), []

    def note(event):
        names.add(threading.current_thread().name)
        told.append((event.phase, event.done))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setting, "WORTH_A_THREAD", 0)
        run_in_order = threads.run_in_order

        def seen(*given):
            names.add(threading.current_thread().name.rpartition("_")[0])
            return run_in_order(*given)

        patch.setattr(threads, "run_in_order", seen)
        executor = dfac.ThreadsExecutor(lanes=2)
        found = dfac.sample(counts(), model, sampler, executor=executor, callback=note, **options)
    assert names == {"", "MainThread", "daskfactor-chain"}  # the warm start's, callbacks', chains'
    for phase in ("tune", "draw"):
        done = [own for name, own in told if name == phase]
        assert done == sorted(done)
    assert_same(found, dfac.sample(counts(), model, sampler, executor="serial", **options))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_callback_ends_chains_that_run_side_by_side(error, tmp_path, monkeypatch):
    monkeypatch.setattr(setting, "WORTH_A_THREAD", 0)

    def stop(event):
        if event.phase == "draw":
            raise error("enough")

    store, options = tmp_path / "run.zarr", QUICK | {"chains": 4, "blocks": 1, "tune": 100}
    refused(error, "enough", dfac.sample, counts(), TWO, store=store, callback=stop, **options)
    assert not any(own.name.startswith("daskfactor-chain") for own in threading.enumerate())
    found = dfac.resume(store, progressbar=False)
    assert_same(found, dfac.sample(counts(), TWO, **options))


def test_small_data_have_four_short_chains_unless_a_length_is_given():
    V = counts(8, 6)
    sizes = {
        name: dict(dfac.sample(V, TWO, **QUIET | given)["posterior"].sizes)
        for name, given in {"usual": {}, "tune": {"tune": 20}, "blocks": {"blocks": 2}}.items()
    }
    assert {name: (own["chain"], own["draw"]) for name, own in sizes.items()} == {
        "usual": (4, 125),
        "tune": (1, 500),
        "blocks": (1, 500),
    }
    cost = dfac.estimate_cost(V, TWO)
    assert (cost.cycles, dfac.estimate_cost(V, TWO, blocks=2).cycles) == (375, 1000)
    pair = dfac.sample(V, TWO, dfac.PSGRRLD(), **QUIET)
    assert (pair["posterior"].sizes["chain"], pair["posterior"].sizes["draw"]) == (4, 126)


def test_a_divergence_is_rolled_back_and_reported():
    """A plain step far too large for this data runs away; smaller ones do not."""
    model = dfac.TweedieNMF(2, beta=2.0, dispersion=1.0)
    given = counts() * 50, model, dfac.PSGLD(step=1e7, preconditioner="identity")
    with np.errstate(all="ignore"), pytest.warns(SamplingWarning, match=r"diverged and were run"):
        tree = dfac.sample(*given, draws=20, tune=20, **QUIET)
    assert tree.attrs["divergences"] > 0
    steps = tree["sample_stats"]["step_size"].values[0]
    marked = np.flatnonzero(tree["sample_stats"]["diverging"].values[0])
    assert list(marked) == [i for i in range(1, 20) if steps[i] < steps[i - 1]] or marked[0] == 0
    assert np.all(np.isfinite(tree["posterior"]["W"]))
    assert tree["sample_stats"]["step_size"].values[0, -1] < 1e7


def test_a_hopeless_step_ends_in_one_clear_error():
    sampler = dfac.PSGLD(step=1e30, preconditioner="identity")
    with np.errstate(all="ignore"):
        match = "diverged between cycles"
        refused(dfac.errors.DivergenceError, match, dfac.sample, counts(), TWO, sampler, **QUICK)


def test_events_and_attributes_tell_of_the_run():
    seen = []
    tree = dfac.sample(counts(), TWO, **QUICK, monitor="missing", callback=seen.append)
    phases = list(dict.fromkeys(event.phase for event in seen))
    assert [p for p in phases if p != "compile"] == ["load", "warm start", "tune", "draw"]
    last = seen[-1]
    assert last.done == last.total == 6
    assert np.isfinite(last.log_likelihood)
    assert tree.attrs["inference_library"] == "daskfactor"
    assert json.loads(tree.attrs["model"])["n_components"] == 2
    assert json.loads(tree.attrs["sampler"])["type"] == "BlockHMC"
    assert json.loads(tree.attrs["data"])["shape"] == [23, 17]
    assert {"cpu", "blas", "random_seed", "sampling_time"} <= set(tree.attrs)
    missing = np.argwhere(np.isnan(counts()))
    np.testing.assert_array_equal(tree["monitor"]["row_index"], missing[:, 0])


def test_optimize_brings_the_objective_down_and_fits():
    V, method = counts(40, 30), dfac.MultiplicativeUpdates(200, 0)
    seen = ~np.isnan(V)
    for beta in (2.0, 1.0, 0.5, 0.0):
        model = dfac.TweedieNMF(3, beta=beta, dispersion=0.5)
        point = dfac.optimize(V + 1, model, method, **QUIET)
        assert np.all(np.diff(point["objective"]) <= 1e-6 * abs(point["objective"].values[0]))
        mu = (point["W"] @ point["H"]).values
        assert np.mean((V + 1 - mu)[seen] ** 2) < 0.7 * np.var((V + 1)[seen])


V0 = counts(6, 5)


def changed(value):
    V = V0.copy()
    V[2, 3] = value
    return V


POSITIVE = {"model": dfac.TweedieNMF(2, beta=0.0)}
BAD_DATA = [
    (changed(-1), {}, r"no negative data, got .* -1"),
    (changed(np.inf), {}, r"inf"),
    (changed(0), POSITIVE, r"positive data only"),
    (np.empty((0, 4)), {}, r"empty|no entries|0 x 4"),
    (np.ones(4), {}, r"dimension"),
    (np.array([["a", "b"]]), {}, r"dtype|number"),
    (np.ones((3, 3), complex), {}, r"complex"),
    (np.where(np.arange(6)[:, None] == 3, np.nan, V0), {}, r"row 3"),
    (np.where(np.arange(5) == 2, np.nan, V0), {}, r"column 2"),
    (np.zeros((6, 5)), {}, r"mean 0: it must be positive"),
    (V0 * 1e-25, POSITIVE, r'dtype="float64"'),
    (V0 * 1e25, {}, r"rescale the data"),
]
BAD_OPTIONS = [
    ({"executor": 3}, r"got 3"),
    ({"draws": 0}, r"draws must be a whole number of at least 1, got 0"),
    ({"tune": -1}, r"tune must be a whole number of at least 0"),
    ({"chains": 1.5}, r"chains must be a whole number"),
    ({"thin": 0}, r"thin must be a whole number"),
    ({"keep": "all"}, r'"auto", "draws" or "moments", got \'all\''),
    ({"random_seed": -4}, r"random_seed must be between 0 and"),
    ({"random_seed": 0.5}, r"random_seed must be a whole number"),
    ({"blocks": 6}, r"1 to 5"),
    (
        {"memory_limit": 7, "balance": True},
        r"^balance= and memory_limit= .*\(as_blocks\(V, balance=True, memory_limit=7\), \.\.\.",
    ),
    ({"executor": "gpu"}, r"got 'gpu'"),
    ({"client": object()}, r"client must be a dask.distributed Client"),
    ({"monitor": "everything"}, r'"missing"'),
    ({"monitor": ([9], [0])}, r"; positions of rows must lie between 0 and 5, got 9"),
    ({"monitor": ([0, 1], [0])}, r"; rows and columns must have equal lengths, got 2 and 1"),
    ({"monitor": np.ones((2, 2), bool)}, r"V has shape \(6, 5\)"),
    ({"sampler": dfac.PSGRRLD(), "draws": 3}, r"even draws; got 3, pass 4"),
    (
        {"model": dfac.TweedieNMF(10**12)},
        r"n_components=1000000000000 take .* GiB, .* free; take fewer components",
    ),
    ({"model": "nmf"}, r"model must be a model"),
    ({"sampler": "psgld"}, r'sampler must be "auto" or one of .*, PSGLD\(\), .* got .psgld.'),
]
UNEVEN = {"sampler": NESTED, "blocks": 3}
BAD = [
    *((V, settings, DataError, message) for V, settings, message in BAD_DATA),
    *((V0, settings, OptionError, message) for settings, message in BAD_OPTIONS),
    (V0, UNEVEN, dfac.errors.GridError, r"3 bands cannot be grouped into 2"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("V", "settings", "error", "message"), BAD)
def test_bad_input_leaves_one_sentence_and_nothing_else(V, settings, error, message, tmp_path):
    arguments = {"model": TWO, **QUICK, **settings, "store": tmp_path / "run.zarr"}
    assert "\n" not in refused(error, message, dfac.sample, V, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_impossible_samplers_are_refused():
    for make, message in (
        (lambda: dfac.PSGLD(step=-1.0), r"positive finite number, got -1"),
        (lambda: dfac.PSGLD(step="fast"), r"got 'fast'"),
        (lambda: dfac.PSGLD(preconditioner="adam"), r"got 'adam'"),
        (lambda: dfac.PSGLD(preconditioner="identity"), r"plain step has no automatic size"),
        (lambda: dfac.PSGLD(warm_start=-1), r"warm_start"),
        (lambda: dfac.PSGLD(schedule="cyclic"), r"schedule must be one of Cyclic\(\)"),
        (lambda: dfac.PSGLD(schedule=dfac.Cyclic), r"schedule must be one of"),
        (lambda: dfac.PSGLD(step=lambda t: 0.1), r"ConstantStep or PolynomialStep"),
        (lambda: dfac.NestedReshuffled(1.5), r"groups must be a whole number"),
        (lambda: dfac.TasksExecutor("processes"), r'"threads" or "synchronous"'),
        (lambda: dfac.PolynomialStep(1.0, 0.2), r"in \(0.5, 1\]"),
        (lambda: dfac.MultiplicativeUpdates(0), r"max_iter"),
        (lambda: dfac.MultiplicativeUpdates(5, float("nan")), r"tol"),
    ):
        refused(OptionError, message, make)


def test_only_a_path_goes_on(tmp_path):
    trace = dfac.sample(V0, TWO, **QUICK)
    for other in (trace, trace["posterior"].to_dataset(), None, 3):
        match = r"must be the path .* got a \w+; .* store="
        assert "\n" not in refused(OptionError, match, dfac.resume, other)


def test_a_checkpoint_with_whole_factors_is_refused(tmp_path):
    path = tmp_path / "run.zarr"
    dfac.sample(V0, TWO, store=path, blocks=1, **QUICK)
    with RunStore.open(path) as held:
        arrays, meta = held.load_checkpoint()
        whole = {re.sub(r"(rows|columns)/0", r"\1", name): own for name, own in arrays.items()}
        for chain in meta["chains"]:
            for track in chain["tracks"]:
                track["arrays"] = sorted({*track["arrays"][0], *track["arrays"][1]})
        held.checkpoint(whole, meta)
    match = r"begun by .*/rows/0/values.* can be read; .* anew$"
    refused(dfac.errors.StoreFormatError, match, dfac.resume, path, draws=2, progressbar=False)
    assert dfac.open_run(path)["posterior"].sizes["draw"] == QUICK["draws"]


def test_losses_in_a_row_count_until_something_is_saved(monkeypatch):
    calls = []

    def lost(self):
        calls.append(self.cycle)
        assert len(calls) < 9
        raise StateLost("as staged")

    monkeypatch.setattr(sampling.ChainsRun, "_segment", lost)
    executor = dfac.SerialExecutor()
    executor.max_losses = 2
    with pytest.raises(EngineError, match=r"lost 3 times in a row.* as staged"):
        dfac.sample(V0, TWO, executor=executor, **QUICK)
    assert calls == [0, 0, 0]


def test_warnings_point_at_the_line_that_asked():
    with pytest.warns(DataWarning, match="nothing is monitored") as seen:
        dfac.sample(np.nan_to_num(V0, nan=1), TWO, monitor="missing", **QUICK)
    with pytest.warns(DataWarning, match="no maximum") as also:
        dfac.optimize(V0, dfac.TweedieNMF(2, shape_w=0.5), progressbar=False)
    assert {one.filename for one in [*seen, *also]} == {__file__}


PAIR = np.ones((1, 6, 2)), np.ones((1, 2, 5))
VERBS = {
    name: partial(getattr(dfac, name), V0, TWO)
    for name in ("sample", "optimize", "stein_posterior", "log_evidence", "select_rank")
} | {"stein_discrepancy": partial(dfac.stein_discrepancy, PAIR, V0, TWO)}


def test_verbs_have_the_same_options_in_the_same_order():
    order = list(inspect.signature(dfac.sample).parameters)
    common = order[order.index("random_seed") :]
    common.remove("weights")  # those of stein_discrepancy are of particles
    for verb in (getattr(dfac, name) for name in (*VERBS, "estimate_cost")):
        own = [name for name in inspect.signature(verb).parameters if name in common]
        assert own == [name for name in common if name in own]
        assert {"progressbar", "client", "blocks", "unstored", "executor", "callback"} <= set(own)
        refused(TypeError, "unexpected keyword argument 'colour'", verb, V0, TWO, colour="red")
    for wrong, near in (("seed", "random_seed"), ("chain", "chains"), ("progress", "progressbar")):
        match = f"'{wrong}'; did you mean '{near}'\\?"
        refused(TypeError, match, dfac.sample, V0, TWO, **{wrong: 1})
    assert list(inspect.signature(dfac.estimate_cost).parameters)[: len(order)] == order


def test_verbs_read_what_as_blocks_reads_in_the_same_words(monkeypatch):
    class Read(Exception):
        pass

    seen = {}

    def read(V, *args, **options):
        seen.update(options)
        raise Read

    for function in ("inference.session.blocks_of", "data.holdout.as_blocks"):
        monkeypatch.setattr(f"daskfactor.{function}", read)
    words = {"unstored": "zero", "header": True, "table": True, "storage_options": {"anon": True}}
    words |= dict(zip(("rows", "columns", "values", "layer", "mask_var"), "abcde", strict=True))
    assert set(words) == set(Reading.__annotations__)
    with_blocks = [partial(verb, blocks=3) for verb in VERBS.values()]
    for call in (*with_blocks, partial(dfac.hold_out, V0)):
        seen.clear()
        refused(Read, None, call, **words)
        assert seen.items() >= words.items()
        assert seen.get("blocks", 3) == 3


def test_any_verb_takes_an_array_of_several_dimensions():
    cube = xr.DataArray(np.arange(1.0, 25.0).reshape(4, 3, 2), dims=("time", "lat", "lon"))
    held = dfac.hold_out(cube, 0.2, rows="time", random_seed=0)
    assert held.train.dims == ("time", "lat_lon")
    point = dfac.optimize(cube, dfac.TweedieNMF(1), rows="time", progressbar=False)
    new = dfac.transform(point, cube[:2], draws=3, rows="time", progressbar=False)
    assert dict(new.sizes) == {"chain": 1, "draw": 3, "time": 2, "component": 1}


@pytest.mark.parametrize("name", ["balance", "allow_empty", "dtype", "memory_limit"])
def test_verbs_say_where_their_former_options_are(name):
    for verb, call in VERBS.items():
        wanted = rf"^{name}= can be passed to as_blocks only; use {verb}\(as_blocks\(V, {name}=1\)"
        refused(OptionError, wanted, call, **{name: 1})


def test_a_run_killed_as_its_store_appears_begins_again(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    publish = Checkpoints.publish

    def killed(*arguments):
        publish(*arguments)
        raise Killed

    model, path = dfac.TweedieNMF(2, fixed_w=np.ones((6, 1))), tmp_path / "run.zarr"
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "publish", killed)
        refused(Killed, None, dfac.sample, V0, model, store=path, **QUICK)
    found = dfac.resume(path, progressbar=False)
    assert_same(found, dfac.sample(V0, model, **QUICK), but=("observed_data", "constant_data"))


def test_kernels_are_compiled_for_the_components_of_the_model_and_no_others(monkeypatch):
    """Those of sparse blocks are made for a number of columns: half a second for each kernel."""
    widths, made = set(), sparse_kernels.accumulation

    def spy(likelihood, zeros, N, K, *rest, **more):
        widths.add(K)
        return made(likelihood, zeros, N, K, *rest, **more)

    monkeypatch.setattr(sparse_kernels, "accumulation", spy)
    V = sparse.csr_array(np.random.default_rng(0).poisson(1.0, (9, 8)).astype("f4"))
    options = {"unstored": "zero", "draws": 2, "tune": 2, "random_seed": 0, "progressbar": False}
    dfac.sample(V, dfac.TweedieNMF(3), dfac.PSGLD(), **options)
    assert widths == {3}
