"""Effective draws per second of held-out cells' means: counts of several means, and faces.

Counts are drawn from the model itself; a tenth of them is held out, and the bulk effective
sample size (ArviZ) of μ = WH at 100 held-out cells is taken over draws after tuning. Those of a
mean below a tenth are a sparse matrix whose zeros count, and the cells any. Samplers
run one after the other on one core, in float32, with their defaults; seconds are CPU
seconds of the drawing cycles alone. A biased sampler's draws are counted as if they were right:
the shift of its means beside BlockHMC's, in posterior standard deviations, stands beside them.

    python benchmarks/exact_draws.py [--sizes 150x100 1000x1000] [--means 0.3 5 50]
        [--components 5] [--seconds 10] [--steps 4] [--samplers PSGLD Gibbs BlockHMC]
        [--tune 300] [--least 100]
    python benchmarks/exact_draws.py --faces      faces with 30 % of the pixels missing
    python benchmarks/exact_draws.py --nuts       a block of rows, and NUTS (numpyro) beside

Whether acceptance falls with the size: ``--sizes 100x100 1000x1000 10000x10000 --means 0.05
--samplers BlockHMC --tune 100 --least 60``.
"""

import argparse
import time
from typing import Any

import arviz
import numpy as np
from numpy.typing import NDArray
from scipy import sparse

import daskfactor as dfac

Array = NDArray[Any]
CELLS = 100
GRADIENTS = 100
"""Gradients that their time is taken from."""
SPARSE = 0.1
"""Mean below which counts are a sparse matrix."""
SLAB = 1000
"""Rows that are made up together."""


def made_up(rows: int, cols: int, mean: float, components: int) -> tuple[Any, Any]:
    """Poisson counts, dense with a tenth of them missing or sparse, and cells to look at."""
    rng = np.random.default_rng(rows)
    size = (mean / components) ** 0.5
    W = rng.exponential(size, (rows, components))
    H = rng.exponential(size, (components, cols))
    if mean < SPARSE:
        slabs = (rng.poisson(W[row : row + SLAB] @ H) for row in range(0, rows, SLAB))
        V = sparse.vstack([sparse.csr_array(one.astype(np.float32)) for one in slabs])
        return V.tocsr(), (rng.integers(rows, size=CELLS), rng.integers(cols, size=CELLS))
    V = rng.poisson(W @ H).astype(np.float32)
    gone = rng.random(V.shape) < 0.1
    return V, erased(V, gone)


def erased(V: Array, gone: Array) -> Any:
    """Erase cells, and say which of them to look at."""
    V[gone] = np.nan
    return tuple(axis[:: max(1, gone.sum() // CELLS)][:CELLS] for axis in np.nonzero(gone))


def race(V: Any, cells: Any, model: Any, sampler: Any, args: Any, **reading: Any) -> dict[str, Any]:
    """Draw for about so many seconds, and say what that was worth."""
    began: list[float] = []

    def note(event: dfac.RunEvent) -> None:
        if event.phase == "draw":
            began.append(time.process_time())

    def run(draws: int, tune: int) -> tuple[Any, float]:
        began.clear()
        data = dfac.as_blocks(V, **reading)
        options: dict[str, Any] = {"executor": "serial", "random_seed": 0, "progressbar": False}
        tree = dfac.sample(data, model, sampler, draws, tune, callback=note, **options)
        return tree, began[-1] - began[0]

    run(2, 2)
    _, brief = run(10, 0)
    draws = int(np.clip(args.seconds / max(brief / 10, 1e-5), args.least, 5000))
    tree, spent = run(draws, args.tune)
    posterior = tree["posterior"].to_dataset()
    W, H = posterior["W"].values[:, :, cells[0]], posterior["H"].values[..., cells[1]]
    rate = tree["sample_stats"].get("acceptance_rate")
    mu = np.einsum("cdik,cdki->cdi", W.astype(float), H.astype(float))
    return worth(mu, spent) | {"acceptance": float("nan") if rate is None else float(rate.mean())}


def worth(mu: Array, spent: float) -> dict[str, Any]:
    """Of draws of means at cells, (chain, draw, cell), that took so many seconds."""
    draws = mu.shape[1]
    ess = np.array([arviz.ess(mu[..., i]) for i in range(mu.shape[-1])])
    return {
        "ms": 1e3 * spent / draws,
        "draws": draws,
        "per draw": float(np.median(ess)) / draws,
        "per second": float(np.median(ess)) / spent,
        "least per second": float(np.quantile(ess, 0.05)) / spent,
        "acceptance": float("nan"),
        "mean": mu.mean(axis=(0, 1)),
        "sd": mu.std(axis=(0, 1)),
    }


COLUMNS = ("ms", "draws", "per draw", "per second", "least per second", "acceptance")


def compare(args: argparse.Namespace) -> None:
    """Print the table of made-up counts."""
    for size in args.sizes:
        rows, cols = map(int, size.split("x"))
        for mean in args.means:
            V, cells = made_up(rows, cols, mean, args.components)
            show(f"{size:11}{mean:6g}", run_all(V, cells, args.components, args))


def faces(args: argparse.Namespace) -> None:
    """Print the table of faces with 30 % of the pixels missing."""
    from daskfactor.demos import load_faces

    V = np.ascontiguousarray(load_faces().truth, dtype=np.float32)
    cells = erased(V, np.random.default_rng(0).random(V.shape) < 0.3)
    show("faces            ", run_all(V, cells, args.components, args))


def run_all(V: Any, cells: Any, components: int, args: argparse.Namespace) -> dict[str, Any]:
    """What every sampler gives."""
    found, model = {}, dfac.TweedieNMF(components, dispersion=1.0)
    reading = {"blocks": 2, "unstored": "zero" if sparse.issparse(V) else None}
    for name in args.samplers:
        own = {"steps": args.steps} if name == "BlockHMC" else {}
        found[name] = race(V, cells, model, getattr(dfac, name)(**own), args, **reading)
    return found


def show(label: str, found: dict[str, Any]) -> None:
    """Print what samplers gave, with shifts from `BlockHMC`."""
    right = found.get("BlockHMC")
    for name, one in found.items():
        numbers = "".join(f"{one[column]:18.4g}" for column in COLUMNS)
        shift = float("nan")
        if right is not None:
            shift = float(np.sqrt(np.mean(((one["mean"] - right["mean"]) / right["sd"]) ** 2)))
        print(f"{label} {name:9}{numbers}{shift:18.3f}", flush=True)


def nuts(V: Any, cells: Any, components: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """Draw by numpyro's NUTS in double precision, of the same posterior, from a point near it.

    Every run of it compiles: its seconds are those of its gradients alone, which is kind to it.
    """
    try:
        import jax
        import jax.numpy as jnp
        import numpyro
        from numpyro.infer import MCMC, NUTS
    except ImportError as reason:
        print(f"NUTS is left out, because numpyro is not installed: {reason}")
        return None
    numpyro.enable_x64()
    model = dfac.TweedieNMF(components, dispersion=1.0)
    rate = model.auto_rate(float(np.nanmean(V)))
    seen = ~np.isnan(V)
    counts = np.where(seen, V, 0.0)

    def potential(place: Any) -> Any:
        """-log p(V, W, H) of the logarithms of W and H, with their Jacobian."""
        x, y = place["x"], place["y"]
        W, H = jnp.exp(x), jnp.exp(y)
        mu = W @ H
        prior = rate * (W.sum() + H.sum()) - x.sum() - y.sum()
        return jnp.where(seen, mu - counts * jnp.log(mu), 0.0).sum() + prior

    quiet: dict[str, Any] = {"executor": "serial", "random_seed": 0, "progressbar": False}
    point = dfac.sample(V, model, dfac.PSGLD(), 1, 200, **quiet)["posterior"].to_dataset()
    begin = {
        name: np.log(point[own].values[0, 0].astype(float))
        for name, own in zip("xy", "WH", strict=True)
    }
    kernel = MCMC(
        NUTS(potential_fn=potential),
        num_warmup=args.tune,
        num_samples=args.nuts_draws,
        progress_bar=False,
    )
    fields = ("num_steps", "accept_prob")
    kernel.warmup(jax.random.key(0), init_params=begin, extra_fields=fields)
    kernel.run(jax.random.key(1), extra_fields=fields)
    draws = kernel.get_samples(group_by_chain=True)
    W, H = np.exp(np.asarray(draws["x"])), np.exp(np.asarray(draws["y"]))
    mu = np.einsum("cdik,cdki->cdi", W[:, :, cells[0]], H[..., cells[1]])
    extra = kernel.get_extra_fields()
    gradient, place = jax.jit(jax.value_and_grad(potential)), kernel.last_state.z
    jax.block_until_ready(gradient(place))
    began = time.process_time()
    for _ in range(GRADIENTS):
        jax.block_until_ready(gradient(place))
    spent = float(np.sum(extra["num_steps"])) * (time.process_time() - began) / GRADIENTS
    print(f"NUTS took {float(np.mean(extra['num_steps'])):.0f} leapfrog steps a draw")
    return worth(mu, spent) | {"acceptance": float(np.mean(extra["accept_prob"]))}


def beside_nuts(args: argparse.Namespace) -> None:
    """Print the table of a block of rows, with NUTS."""
    for size in args.sizes:
        rows, cols = map(int, size.split("x"))
        for mean in args.means:
            V, cells = made_up(rows, cols, mean, args.components)
            found = run_all(V, cells, args.components, args)
            yardstick = nuts(V, cells, args.components, args)
            show(f"{size:11}{mean:6g}", found | ({"NUTS": yardstick} if yardstick else {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["150x100", "1000x1000"])
    parser.add_argument("--means", nargs="+", type=float, default=[0.3, 5.0, 50.0])
    parser.add_argument("--components", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--samplers", nargs="+", default=["PSGLD", "Gibbs", "BlockHMC"])
    parser.add_argument("--tune", type=int, default=300)
    parser.add_argument("--least", type=int, default=100, help="draws, at least")
    parser.add_argument("--faces", action="store_true")
    parser.add_argument("--nuts", action="store_true")
    parser.add_argument("--nuts-draws", type=int, default=200)
    args = parser.parse_args()
    print(f"{'':27}" + "".join(f"{name:>18}" for name in (*COLUMNS, "shift, sd")))
    (faces if args.faces else beside_nuts if args.nuts else compare)(args)


if __name__ == "__main__":
    main()
