"""Profiles of sources from concentrations with uncertainties, beside ESAT's LS-NMF.

The data are samples x species with a standard deviation each. Compared are the weighted
residuals Q = sum ((v - mu) / sigma)**2 of point estimates from several seeds, Q of the posterior
mean of W H, and how sure each is of its profiles: ESAT's block bootstrap (BS) and displacement
(DISP), and posterior intervals of draws that `align` matched to ESAT's best fit.

    python benchmarks/profiles.py [FOLDER] [--components 6] [--seeds 10] [--draws 1000]
        [--esat PYTHON] [--boots 20] [--features 2]

FOLDER has tables ``Dataset-NAME-con.csv`` and ``Dataset-NAME-unc.csv`` with one column of labels,
as ESAT's own examples are (Baton Rouge, St Louis); without it, one such table is simulated. ESAT
is run by another interpreter, that of an environment which it is installed in; where it is not,
its lines are left out.

- ``LS-NMF``: ESAT at its defaults, to convergence (Q falls by less than .1 in 100 iterations).
- ``optimize``: `MultiplicativeUpdates` under nearly flat priors, until the objective falls by
  less than 1e-6 of itself in 20 iterations: from one random start, and from that of ten which is
  the best after 40 iterations (all of them are counted).
- ``posterior``: `BlockHMC`. With p parameters that the data determine, draws have Q higher than
  the best fit by about p on average, however well they mix, and their mean is in between.
  ``halves`` are Q of the mean of either half of the draws, which differ where chains have not
  mixed; ``ESS`` is that of Q over the draws; ``flat`` has rates 1e-4 of the automatic ones, so
  that what it has less of is the prior's doing.
- Intervals are of the concentration of a species that a factor explains, the mean over samples
  of W_ik H_kj, in the unit of the data: 5 and 95 % of bootstraps and of draws, and the ends of
  DISP at dQ = 4. Factors and draws are those of one mode, so none tells of others.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FLAT = 1e-4
STARTS, SHORT = 10, 40
"""Random starts, and the iterations of each after which the best goes on."""


class Table(NamedTuple):
    name: str
    V: Array
    sigma: Array
    species: list[str]

    def misfit(self, mu: Array) -> float:
        return float((((self.V - mu) / self.sigma) ** 2).sum())


def tables(folder: str | None) -> list[Table]:
    if folder is None:
        return [simulated()]
    found = []
    for path in sorted(Path(folder).glob("Dataset-*-con.csv")):
        V, sigma = read(path), read(path.with_name(path.name.replace("-con", "-unc")))
        species = path.read_text().splitlines()[0].split(",")[1:]
        found.append(Table(path.name.split("-")[1], V, sigma, species))
    if not found:
        sys.exit(f"there is no Dataset-NAME-con.csv in {folder}")
    return found


def read(path: Path) -> Array:
    rows = path.read_text().splitlines()[1:]
    return np.array([[float(cell) for cell in row.split(",")[1:]] for row in rows if row])


def simulated() -> Table:
    """Six sources; species in very unlike units, errors of 10 % and above a detection limit."""
    rng = np.random.default_rng(0)
    unit = 10.0 ** rng.uniform(-2, 2, 20)
    mu = rng.gamma(1.0, 1.0, (300, 6)) @ (rng.gamma(0.5, 2.0, (6, 20)) * unit)
    sigma = 0.1 * mu + 0.1 * unit
    V = np.maximum(mu + sigma * rng.normal(size=mu.shape), 0)
    return Table("simulated", V, sigma, [f"s{j}" for j in range(20)])


def main_species(W: Array, H: Array, count: int) -> Array:
    """The species of which each factor explains the largest share, (K, count)."""
    mean = W.mean(axis=0)[:, None] * H
    return np.argsort(-mean / mean.sum(axis=0), axis=1)[:, :count]


# -- ESAT, in an interpreter of its own ----------------------------------------------------


def run_esat(place: Path) -> None:
    """Read what to do from ``place``, and put there what came out."""
    import logging

    from esat.error.bootstrap import Bootstrap
    from esat.error.displacement import Displacement
    from esat.model.sa import SA

    logging.disable(logging.CRITICAL)
    with np.load(place / "data.npz") as given:
        # ESAT 2025.0.1 reads arrays by columns whatever their order: by rows, Q is 10**6 too large.
        V, U = np.asfortranarray(given["V"]), np.asfortranarray(given["sigma"])
        K, seeds, boots, most = (int(given[name]) for name in ("K", "seeds", "boots", "features"))
    names, fits, began = [str(j) for j in range(V.shape[1])], [], time.perf_counter()
    for seed in range(seeds):
        fit = SA(V=V, U=U, factors=K, method="ls-nmf", seed=seed, verbose=False)
        fit.initialize()
        fit.train(max_iter=20000, converge_delta=0.1, converge_n=100)
        fits.append(fit)
    seconds = time.perf_counter() - began
    best = min(fits, key=lambda fit: fit.Qtrue)
    again = Bootstrap(best, names, bootstrap_n=boots, block_size=10, parallel=False, seed=1)
    again.run()
    found = np.full((boots, *best.H.shape), np.nan)
    for at, one in enumerate(again.bs_results.values()):
        mean = one["model"].W.mean(axis=0)[:, None] * one["model"].H
        for factor, match in one["mapping"].items():
            if match["mapped"]:
                found[at, match["match"]] = mean[factor]
    told = np.unique(main_species(best.W, best.H, most))
    moved = Displacement(best, names, features=told.tolist(), parallel=False)
    moved.run()
    table = moved.compiled_results.query("dQ == 4")
    ends = [table[name].to_numpy().reshape(best.H.shape) for name in ("conc_min", "conc_max")]
    np.savez(
        place / "esat.npz",
        Q=[fit.Qtrue for fit in fits],
        steps=[fit.converge_steps for fit in fits],
        seconds=seconds,
        W=best.W,
        H=best.H,
        boots=found,
        boots_Q=[one["model"].Qtrue for one in again.bs_results.values()],
        ends=np.array(ends) / len(V),
    )


def esat(table: Table, options: Any) -> dict[str, Array] | None:
    """What ESAT gives; None, and a sentence, where it is not installed."""
    installed = [options.esat, "-c", "import esat"]
    if subprocess.run(installed, check=False, capture_output=True).returncode:
        print(
            f"ESAT is not installed for {options.esat}: its lines are left out; name the "
            "interpreter of an environment that has it with --esat"
        )
        return None
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"K": options.components, "seeds": options.seeds}
        sizes |= {"boots": options.boots, "features": options.features}
        np.savez(Path(folder, "data.npz"), V=table.V, sigma=table.sigma, **sizes)
        subprocess.run(
            [options.esat, __file__, "--as-esat", folder],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with np.load(Path(folder, "esat.npz")) as found:
            return dict(found)


# -- this package --------------------------------------------------------------------------


def model(table: Table, K: int, flat: bool) -> Any:
    import daskfactor as dfac

    rates = {}
    if flat:
        rate = FLAT * np.sqrt(K / table.V.mean())
        rates = {"rate_w": rate, "rate_h": rate}
    return dfac.TweedieNMF(K, beta=2, **rates)


def points(table: Table, options: Any, starts: int) -> tuple[list[float], list[int], float]:
    import daskfactor as dfac

    method = dfac.MultiplicativeUpdates(20000, 1e-6)
    found, steps, began = [], [], time.perf_counter()
    for seed in range(options.seeds):
        point = dfac.optimize(
            table.V,
            model(table, options.components, flat=True),
            method,
            starts=starts,
            uncertainty=table.sigma,
            random_seed=seed,
            progressbar=False,
        )
        found.append(table.misfit(point["W"].values @ point["H"].values))
        steps.append(point.attrs["n_iter"] + (SHORT * starts if starts > 1 else 0))
    return found, steps, time.perf_counter() - began


def posterior(table: Table, options: Any, flat: bool) -> Any:
    import daskfactor as dfac

    began = time.perf_counter()
    trace = dfac.sample(
        table.V,
        model(table, options.components, flat),
        dfac.BlockHMC(),
        options.draws,
        options.draws // 2,
        starts=STARTS,
        uncertainty=table.sigma,
        random_seed=0,
        progressbar=False,
    )
    W, H = (trace["posterior"][name].values[0].astype(float) for name in ("W", "H"))
    each = np.array([table.misfit(w @ h) for w, h in zip(W, H, strict=True)])
    half = len(W) // 2
    means = [
        table.misfit(np.einsum("dik,dkj->ij", w, h) / len(w))
        for w, h in ((W, H), (W[:half], H[:half]), (W[half:], H[half:]))
    ]
    return trace, means, each, time.perf_counter() - began


def effective(x: Array) -> float:
    """Effective draws, by Geyer's initial positive sequence."""
    x = x - x.mean()
    spectrum = np.fft.rfft(x, 2 * len(x))
    rho = np.fft.irfft(spectrum * spectrum.conj())[: len(x)]
    pairs = (rho[:-1:2] + rho[1::2])[: len(x) // 2] / rho[0]
    end = int(np.argmax(pairs < 0)) if (pairs < 0).any() else len(pairs)
    return float(len(x) / max(2 * pairs[:end].sum() - 1, 1e-9))


# -- what is printed -----------------------------------------------------------------------


def show_points(name: str, Q: Any, steps: Any, seconds: float) -> None:
    print(
        f"{name:34} best {min(Q):9.0f}  median {np.median(Q):9.0f}  worst {max(Q):9.0f}  "
        f"iterations {np.median(steps):6.0f}  {seconds:6.1f} s"
    )


def show_intervals(table: Table, trace: Any, other: dict[str, Array], features: int) -> None:
    """Of the species that a factor explains most of, side by side."""
    import daskfactor as dfac

    base = other["W"].mean(axis=0)[:, None] * other["H"]
    group = dfac.align(trace, (other["W"], other["H"]))["posterior"]
    W, H = (group[name].values[0].astype(float) for name in ("W", "H"))
    draws = W.mean(axis=1)[:, :, None] * H
    ours = np.quantile(draws, [0.05, 0.5, 0.95], axis=0)
    boots = np.nanquantile(other["boots"], [0.05, 0.95], axis=0)
    low, high = other["ends"]
    share = [own / own.sum(axis=0) for own in (base, ours[1])]
    print(
        "factor r  species             ESAT     BS 5-95 %           DISP dQ=4           posterior"
    )
    for k in range(len(base)):
        r = np.corrcoef(share[0][k], share[1][k])[0, 1]
        for j in main_species(other["W"], other["H"], features)[k]:
            pairs = (boots[:, k, j], (low[k, j], high[k, j]), ours[[0, 2], k, j])
            ends = "  ".join(f"{one:8.3g} {two:8.3g} " for one, two in pairs)
            print(f"{k} {r:6.2f}  {table.species[j][:18]:18} {base[k, j]:8.3g}  {ends}")
    told = (base > 0.05 * base.sum(axis=0)) & (high > low)  # others were not displaced
    widths = [(end[1] - end[0])[told] for end in (boots, (low, high), ours[[0, 2]])]
    inside = ((base >= ours[0]) & (base <= ours[2]))[told].mean()
    print(
        f"widths (median over {told.sum()} shares above 5 %): posterior / BS "
        f"{np.nanmedian(widths[2] / widths[0]):.2f}, posterior / DISP "
        f"{np.nanmedian(widths[2] / widths[1]):.2f}; ESAT's fit lies in {inside:.0%} of posterior "
        f"intervals; {np.isnan(other['boots'][:, :, 0]).mean():.0%} of bootstraps' factors unmapped"
    )


def compare(table: Table, options: Any) -> None:
    print(f"\n{table.name}: {table.V.shape[0]} x {table.V.shape[1]}, K = {options.components}")
    other = esat(table, options)
    if other is not None:
        show_points("LS-NMF", other["Q"], other["steps"], float(other["seconds"]))
    for starts in (1, STARTS):
        show_points(f"optimize, starts={starts}", *points(table, options, starts))
    for flat in (False, True):
        trace, means, Q, seconds = posterior(table, options, flat)
        print(
            f"{'posterior, ' + ('flat' if flat else 'automatic') + ' rates':34} Q of mean "
            f"{means[0]:8.0f} (halves {means[1]:.0f}, {means[2]:.0f})  Q of draws {Q.mean():8.0f}  "
            f"lowest {Q.min():8.0f}  ESS {effective(Q):5.0f}  {seconds:6.1f} s"
        )
        if other is not None and not flat:  # under flat rates chains hardly mix
            show_intervals(table, trace, other, options.features)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--as-esat", type=Path, help=argparse.SUPPRESS)
    for name, value in (("components", 6), ("seeds", 10), ("draws", 1000), ("boots", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--features", type=int, default=2)
    parser.add_argument("--esat", default=sys.executable)
    options = parser.parse_args()
    if options.as_esat is not None:
        run_esat(options.as_esat)
        return
    print(json.dumps({name: str(value) for name, value in vars(options).items()}))
    for table in tables(options.folder):
        compare(table, options)


if __name__ == "__main__":
    main()
