"""How near PSIS leave-one-out comes to refits without the cell, by Pareto k.

    python benchmarks/leave_one_out.py

Poisson counts of three sizes; the eight cells of the largest Pareto k and eight others are left out
one at a time, and the exact sampler runs again without them. Differences of log predictive
densities in nats; positive: too good.
"""

import warnings

import numpy as np

import daskfactor as dfac

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces its next version on import
    import arviz as az

PROBLEMS = ((8, 6, 1, 5.0, 0), (40, 20, 3, 3.0, 0), (40, 20, 3, 30.0, 1))
OPTIONS = {"draws": 800, "tune": 150, "chains": 2, "random_seed": 1, "progressbar": False}
EACH = 8


def counts(rows: int, columns: int, rank: int, mean: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mu = rng.gamma(1, 1, (rows, rank)) @ rng.gamma(1, 1, (rank, columns)) * mean / rank
    return rng.poisson(mu).astype(float)


def mean_density(terms: np.ndarray) -> np.ndarray:
    """Log of the mean over chains and draws of densities whose logs these are."""
    flat = terms.reshape(-1, terms.shape[-1])
    return np.logaddexp.reduce(flat, axis=0) - np.log(len(flat))


def loo(tree):
    """Pointwise PSIS leave-one-out, and Pareto k."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large k, which are counted here
        data = az.from_datatree(tree) if hasattr(az, "from_datatree") else tree
        found = az.loo(data, pointwise=True)
    each = found.loo_i if hasattr(found, "loo_i") else found.elpd_i
    return np.asarray(each), np.asarray(found.pareto_k)


def main() -> None:
    for rows, columns, rank, mean, seed in PROBLEMS:
        V, model = counts(rows, columns, rank, mean, seed), dfac.TweedieNMF(rank, dispersion=1.0)
        trace = dfac.sample(V, model, dfac.Gibbs(), **OPTIONS)
        _, every = loo(dfac.log_likelihood(trace, np.ones(V.shape, bool)).load())
        print(f"{rows} x {columns}, K={rank}, mean {mean:g}:", end=" ")
        print(f"k > .7 at {(every > 0.7).sum()}, k > .5 at {(every > 0.5).sum()} of {V.size} cells")
        order = np.argsort(-every)
        others = np.random.default_rng(seed).permutation(order[EACH:])[:EACH]
        chosen = np.concatenate([order[:EACH], others])
        tree = dfac.log_likelihood(trace, np.divmod(chosen, columns)).load()
        psis, k = loo(tree)
        seen = mean_density(tree["log_likelihood"]["V"].values)
        wrapper = dfac.sampling_wrapper(tree, V, model, dfac.Gibbs(), **OPTIONS)
        exact = np.empty(chosen.size)
        for cell in range(chosen.size):
            train, held = wrapper.sel_observations(cell)
            exact[cell] = mean_density(
                wrapper.log_likelihood__i(held, wrapper.sample(train)).values
            )[0]
        for name, part in (("k <= .5", k <= 0.5), ("k > .5", k > 0.5)):
            if part.any():
                off, fit = (psis - exact)[part], (seen - exact)[part]
                print(f"  {name}: {part.sum()} cells, loo - refit mean {off.mean():.3f}", end=", ")
                print(f"largest {np.abs(off).max():.2f}; seen - refit mean {fit.mean():.2f}")


if __name__ == "__main__":
    main()
