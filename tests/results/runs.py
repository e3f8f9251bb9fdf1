"""Small runs with known draws, for the tests of the results."""

import json
from dataclasses import replace

import numpy as np
from numpy.testing import assert_array_equal

from daskfactor.inference.block_hmc import BlockHMCKernel
from daskfactor.runs import schema
from daskfactor.runs.opening import check_weights
from daskfactor.runs.run_writer import Sink
from daskfactor.runs.schema import COLUMN, MOMENTS, MONITOR, ROW, RunSpec, factor_dims
from daskfactor.runs.store import RunStore, reserve

I, J, K = 7, 5, 3  # noqa: E741, the papers' own letters
CHAINS, DRAWS, WARMUP = 2, 10, 4

MODEL = {"type": "TweedieNMF", "n_components": K, "beta": 1.0}
ATTRS = {"model": json.dumps(MODEL), "sampler": json.dumps({"type": "PSGLD"}), "random_seed": 0}
ATTRS |= {"dispersion": 1.0, "rate_w": 2.0, "rate_h": 3.0}


def make_spec(**changes):
    days = np.datetime64("2024-01-01", "ns") + np.arange(J) * np.timedelta64(1, "D")
    genes = [f"g{i}" for i in range(I - 1)] + ["Ångström"]
    options = {"shape": (I, J, K), "chains": CHAINS, "draws": DRAWS, "warmup_draws": WARMUP}
    weights = ("gene", np.linspace(0.5, 2.5, I))
    options |= {"dims": ("gene", "day"), "attrs": ATTRS}
    options |= {"coords": {"gene": genes, "day": days, "weight": weights}}
    options |= {"monitor_rows": np.array([0, 3, 3]), "monitor_columns": np.array([1, 1, 4])}
    return replace(RunSpec(**options, draw_index=np.arange(DRAWS) * 2 + 1), **changes)


def factors(chain, start, n, *, salt=0):
    """Draws (n, I, K) and (n, J, K) that depend on nothing but their address."""
    W, Ht = np.empty((n, I, K), "f4"), np.empty((n, J, K), "f4")
    for at in range(n):
        rng = np.random.default_rng([salt, chain, start + at])
        W[at], Ht[at] = rng.gamma(2.0, size=(I, K)), rng.gamma(2.0, size=(J, K))
    return W, Ht


def stats(chain, start, n):
    index = np.arange(start, start + n)
    lp = -100.0 * (chain + 1) + np.sin(7.0 * index)
    return {"lp": lp, "step_size": 0.1 / (1.0 + index), "diverging": index % 5 == 4}


def moments(chain):
    W, Ht = factors(chain, 0, DRAWS)
    H = Ht.swapaxes(1, 2)
    return {"W_mean": W.mean(0), "W_var": W.var(0), "H_mean": H.mean(0), "H_var": H.var(0)}


def put_moments(sink, group, chain, values, count=DRAWS):
    for name, value in (values | {"count": count}).items():
        sink.write(f"{group}/{name}", chain, value)


def monitor(chain, spec):
    W, Ht = factors(chain, 0, DRAWS)
    mu = np.einsum("dpk,dpk->dp", W[:, spec.monitor_rows], Ht[:, spec.monitor_columns])
    return {"mean": mu.mean(0).astype("f8"), "var": mu.var(0).astype("f8")}


def fill(store, spec, *, draws=None):
    """Write draws of all chains, moments and the warm-up, and commit them."""
    n = spec.draws if draws is None else draws
    for chain in range(spec.chains):
        warm = stats(chain, 0, spec.warmup_draws)
        del warm["diverging"]
        store.write_stats(chain, 0, warm, group="warmup_sample_stats")
        if spec.keep == "draws":
            store.write_draws(chain, 0, *factors(chain, 0, n))
        if spec.has_coarse:
            coarse = factors(chain, 0, n // 2, salt=1)
            store.write_draws(chain, 0, *coarse, group="posterior_coarse")
        store.write_stats(chain, 0, stats(chain, 0, n))
        put_moments(store, MOMENTS, chain, moments(chain))
        if spec.n_monitor:
            put_moments(store, MONITOR, chain, monitor(chain, spec))
    store.checkpoint({"state": np.arange(5)}, {"draws": n})


def create_store(path, spec, *, overwrite=False, state=None):
    """Make an empty run store and open it for writing."""
    reservation = reserve(path, overwrite)
    try:
        return RunStore.begin(reservation, spec, state)
    except BaseException:
        reservation.close()
        raise


def store_run(path, spec=None, **options):
    """Write the run of a specification to a store."""
    spec = make_spec() if spec is None else spec
    with create_store(path, spec) as store:
        fill(store, spec, **options)
    return path


def assert_same_tree(found, expected):
    """The same groups, variables, dimensions and values."""
    assert set(found.children) == set(expected.children)
    for group in expected.children:
        for name, variable in expected[group].to_dataset().variables.items():
            own = found[group].to_dataset().variables[name]
            assert own.dims == variable.dims
            assert_array_equal(own.values, variable.values, err_msg=f"{group}/{name}")


def memory_tree(spec):
    """The tree that `fill` makes, without a store."""
    sink = Sink(spec)
    fill(sink, spec)
    return sink.tree()


def tree_of(spec, arrays):
    """The tree of a run in memory from arrays by group and variable; H as (chain, draw, J, K)."""
    sink = Sink(spec)
    for group, members in arrays.items():
        for chain in range(spec.chains):
            own = {name: np.asarray(values)[chain] for name, values in members.items()}
            if group == "monitor":
                put_moments(sink, group, chain, own, int(own.pop("count")))
            elif "H" in own:
                sink.write_draws(chain, 0, own["W"], own["H"], group)
            else:
                sink.write_stats(chain, 0, own, group)
    if "posterior" in arrays:
        sink.checkpoint({}, {"draws": np.shape(arrays["posterior"]["W"])[1]})
    return sink.tree()


REGISTRY = (
    *(*schema.DRAWS, *schema.COARSE_DRAWS, *schema.STREAMED, *schema.MONITORED),
    *(
        schema.DENSITY,
        schema.OBJECTIVE,
        *schema.STEPS,
        *schema.PARTICLES,
        *BlockHMCKernel.statistics,
    ),
    *(*schema.TUNING, *schema.DISCREPANCIES, *schema.OBSERVED, *schema.WEIGHED),
    *(*schema.RATES, *schema.THRESHOLD),
)
_KINDS = {"factor": "f", "real": "f", "count": "iu", "flag": "b", "data": "biuf"}


def validate(tree):
    """Check a tree against the registry: names, dimensions, kinds of values, weights."""
    names = dict(zip((ROW, COLUMN), factor_dims(tree), strict=True))
    known = {(variable.group, variable.name): variable for variable in REGISTRY}
    for group, node in tree.children.items():
        for name, array in node.data_vars.items():
            variable = known[group, str(name)]
            assert array.dims == tuple(names.get(dim, dim) for dim in variable.dims), name
            assert array.dtype.kind in _KINDS[variable.kind], name
    if "sample_stats" in tree.children and "weight" in tree["sample_stats"].data_vars:
        check_weights(tree["sample_stats"].to_dataset()["weight"].values)
