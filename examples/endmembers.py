"""Materials of a hyperspectral image, with the uncertainty of their spectra and maps.

Every pixel of an image with many bands is a mixture: V (band, pixel) ≈ W H, where a column of W is
the spectrum of one material (an endmember), and a row of H is its amount of light in each pixel.
Many pairs W, H fit almost equally well. A posterior of particles shows what these have in common:
spectra with their spread, maps of the particle with the largest weight with the standard deviation
over particles, and angles to known endmembers, if there are any.

    python examples/endmembers.py [--cube FILE.npz] [--components 4] [--picture maps.png]

Without a file, the image is synthetic: noise, and smooth spectra that are mixed by spatially
smooth Dirichlet abundances, so that few pixels are pure. A file has an array ``cube`` (bands,
height, width) and, if they are known, ``endmembers`` (bands, materials), ``abundance`` (materials,
height, width) and ``endmember_names``.
"""

import argparse
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from scipy.optimize import linear_sum_assignment
from scipy.stats import spearmanr

import daskfactor as dfac

Array = NDArray[np.floating]

COLORS = ("#20639b", "#d1682b", "#3b8f5c", "#8e5aa8", "#a88a12", "#5b6770")


class Scene(NamedTuple):
    """An image, and what is known of its materials."""

    cube: Array
    """(band, height, width), largest value 1."""
    names: list[str]
    endmembers: Array | None
    """(band, material)."""
    abundance: Array | None
    """(material, height, width)."""


class Unmixed(NamedTuple):
    """Particles with their materials in one order."""

    spectra: Array
    """(particle, band, material), adding up to 1 over bands."""
    shares: Array
    """(particle, material, pixel): of the light of the pixel."""
    weight: Array
    objective: Array


def synthetic(side: int, bands: int = 80, noise: float = 0.05, seed: int = 0) -> Scene:
    """Four materials that mix in all pixels."""
    rng = np.random.default_rng(seed)
    at = np.linspace(0.0, 1.0, bands)[:, None]
    endmembers = np.full((bands, 4), 0.15)
    for _ in range(4):
        centre, width = rng.random(4), 0.06 + 0.2 * rng.random(4)
        endmembers += rng.random(4) * np.exp(-0.5 * ((at - centre) / width) ** 2)
    endmembers *= np.array([1.0, 0.5, 0.9, 0.7])
    fields = np.stack(
        [gaussian_filter(rng.standard_normal((side, side)), side / 8) for _ in "abcd"]
    )
    likely = np.exp(2.0 * fields / fields.std(axis=(1, 2), keepdims=True))
    amounts = rng.gamma(12.0 * likely / likely.sum(axis=0))  # Dirichlet when normalized
    abundance = amounts / amounts.sum(axis=0)
    cube = np.einsum("bk,kij->bij", endmembers, abundance)
    cube = np.maximum(cube + noise * cube.mean() * rng.standard_normal(cube.shape), 0.0)
    return Scene(cube / cube.max(), ["A", "B", "C", "D"], endmembers, abundance)


def scene_of_file(path: str) -> Scene:
    """Read an image from a file."""
    with np.load(path) as file:
        cube = file["cube"].astype(np.float64)
        endmembers = file["endmembers"].astype(np.float64) if "endmembers" in file else None
        known = endmembers is not None and "abundance" in file
        abundance = file["abundance"].astype(np.float64) if known else None
        count = 0 if endmembers is None else endmembers.shape[1]
        names = [str(number + 1) for number in range(count)]
        if "endmember_names" in file:
            names = [str(name) for name in file["endmember_names"]]
    return Scene(cube / cube.max(), names, endmembers, abundance)


def angles(left: Array, right: Array) -> Array:
    """Angles in degrees between all columns of two matrices."""
    a, b = (one / np.linalg.norm(one, axis=0) for one in (left, right))
    return np.degrees(np.arccos(np.clip(a.T @ b, -1.0, 1.0)))


def in_order(spectra: Array, endmembers: Array) -> NDArray[np.integer]:
    """Columns of spectra in the order of the endmembers they are nearest to, others behind."""
    rows, columns = linear_sum_assignment(angles(spectra, endmembers))
    found = rows[np.argsort(columns)]
    return np.concatenate([found, np.setdiff1d(np.arange(spectra.shape[1]), found)])


def unmix(scene: Scene, components: int, settings: argparse.Namespace) -> Unmixed:
    """Particles of the image; materials in the order of the endmembers, if these are known."""
    V = scene.cube.reshape(len(scene.cube), -1).astype(np.float32)
    trace = dfac.stein_posterior(
        V,
        dfac.SILFNMF(components),
        dfac.Ensemble(start=settings.start),
        particles=settings.particles,
        pilot=settings.pilot,
        random_seed=settings.seed,
        progressbar=False,
    )
    return ordered(dfac.align(trace, by="w"), scene)


def ordered(trace: xr.DataTree, scene: Scene) -> Unmixed:
    """Arrays of a posterior whose components are aligned."""
    W = trace["posterior"]["W"].values[0].astype(np.float64)
    H = trace["posterior"]["H"].values[0].astype(np.float64)
    if scene.endmembers is not None:
        order = np.stack([in_order(one, scene.endmembers) for one in W])
        W = np.take_along_axis(W, order[:, None], axis=2)
        H = np.take_along_axis(H, order[:, :, None], axis=1)
    stats = trace["sample_stats"]
    light = H * W.sum(axis=1)[:, :, None]
    shares = light / np.maximum(light.sum(axis=1, keepdims=True), 1e-300)
    spectra = W / W.sum(axis=1, keepdims=True)
    return Unmixed(spectra, shares, stats["weight"].values[0], stats["objective"].values[0])


def mean_and_sd(values: Array, weight: Array) -> tuple[Array, Array]:
    """Over particles, by their masses."""
    mean = np.tensordot(weight, values, 1)
    return mean, np.sqrt(np.tensordot(weight, (values - mean) ** 2, 1))


def known_shares(scene: Scene) -> Array | None:
    """Shares of the light (material, pixel) by what is known of the image."""
    if scene.endmembers is None or scene.abundance is None:
        return None
    light = scene.endmembers.sum(axis=0)[:, None] * scene.abundance.reshape(
        len(scene.abundance), -1
    )
    return light / np.maximum(light.sum(axis=0), 1e-300)


def titles(scene: Scene, components: int) -> list[str]:
    """Names of the materials, numbers for those that nobody knows."""
    return scene.names[:components] + [
        f"unknown {number + 1}" for number in range(components - len(scene.names))
    ]


def tell(scene: Scene, found: Unmixed) -> None:
    """Print a line for every material, and the limits of the fit."""
    weight, count = found.weight, len(found.weight)
    names = titles(scene, found.spectra.shape[2])
    mean, _ = mean_and_sd(found.spectra, weight)
    spread = np.array([np.diag(angles(one, mean)) for one in found.spectra])
    light, light_sd = mean_and_sd(found.shares.mean(axis=2), weight)
    map_sd = mean_and_sd(found.shares, weight)[1].mean(axis=1)
    truth = known_shares(scene)
    apart = None
    if scene.endmembers is not None:
        apart = np.array([np.diag(angles(one, scene.endmembers)) for one in found.spectra])
    print(
        f"{count} particles, {int((weight > 0).sum())} with weight; their objectives differ by up "
        f"to {found.objective.max() / found.objective.min() - 1:.1%}\n"
    )
    head = f"{'material':12}{'angle to mean':>18}{'share of light':>19}{'sd of map':>15}"
    if apart is not None:
        head += f"{'angle to known':>21}{'range':>15}" + (
            "error of map" if truth is not None else ""
        ).rjust(14)
    print(head)
    for k, name in enumerate(names):
        own, own_sd = mean_and_sd(spread[:, k], weight)
        line = f"{name:12}{own:9.1f}° ± {own_sd:4.1f}°"
        line += f"{light[k]:11.1%} ± {light_sd[k]:5.1%}{map_sd[k]:14.1%}"
        if apart is not None and k < apart.shape[1]:
            far, far_sd = mean_and_sd(apart[:, k], weight)
            line += (
                f"{far:13.1f}° ± {far_sd:4.1f}°{apart[:, k].min():8.1f} -{apart[:, k].max():5.1f}"
            )
            if truth is not None:
                line += f"{weight @ np.abs(found.shares[:, k] - truth[k]).mean(axis=1):13.1%}"
        print(line)
    print("angles in degrees: weighted mean ± sd over particles")
    if apart is not None:
        tell_of_fit(found, apart.mean(axis=1))


def tell_of_fit(found: Unmixed, far: Array) -> None:
    """Print whether particles with a better fit are closer to the known endmembers."""
    mean, sd = mean_and_sd(far, found.weight)
    best, nearest = int(found.objective.argmin()), int(far.argmin())
    print(
        f"\nMean angle to the known endmembers: {mean:.1f}° ± {sd:.1f}°. The particle with the "
        f"best fit is at {far[best]:.1f}°, the closest one at {far[nearest]:.1f}°; its objective "
        f"is {found.objective[nearest] / found.objective[best] - 1:.2%} higher."
    )
    if np.ptp(far) > 0 and np.ptp(found.objective) > 0 and len(far) > 2:
        rank = float(spearmanr(found.objective, far).statistic)
        text = "a better fit is closer" if rank > 0.5 else "the fit does not predict the angle"
        print(f"Rank correlation of objective and angle: {rank:.2f}; {text}.")


def picture(path: str, scene: Scene, found: Unmixed) -> None:
    """Spectra with their spread, maps, and standard deviations of maps."""
    import matplotlib.pyplot as plt

    names = titles(scene, found.spectra.shape[2])
    count, shape = len(names), scene.cube.shape[1:]
    figure = plt.figure(figsize=(2.7 * count + 1.2, 8.2), layout="constrained")
    grid = figure.subplots(3, count, squeeze=False, height_ratios=(1, 1.1, 1.1))
    mean, sd = mean_and_sd(found.spectra, found.weight)
    top = 1.05 * max(
        float((mean + sd).max()), 0.0 if scene.endmembers is None else known_top(scene)
    )
    for k, (ax, name) in enumerate(zip(grid[0], names, strict=True)):
        draw_spectrum(ax, mean[:, k], sd[:, k], scene, k)
        ax.set_ylim(0, top)
        ax.set_title(name, fontsize=10)
    grid[0, 0].set_ylabel("spectrum (sum 1)", fontsize=9)
    grid[0, 0].legend(fontsize=7, frameon=False, loc="best")
    heaviest = int(found.weight.argmax())
    _, spread = mean_and_sd(found.shares, found.weight)
    maps = ((found.shares[heaviest], "viridis", 1.0), (spread, "magma", float(spread.max()) or 1.0))
    told = (f"share of light,\nparticle {heaviest}", "its sd over\nparticles")
    for axes, (values, color, high), label in zip(grid[1:], maps, told, strict=True):
        for ax, own in zip(axes, values, strict=True):
            shown = ax.imshow(own.reshape(shape), cmap=color, vmin=0.0, vmax=high)
            ax.set(xticks=[], yticks=[])
        axes[0].set_ylabel(label, fontsize=9)
        figure.colorbar(shown, ax=list(axes), shrink=0.85, pad=0.01, aspect=15)
    figure.suptitle(
        f"{len(found.weight)} particles of an image of {shape[0]} x {shape[1]} pixels "
        f"and {len(scene.cube)} bands",
        fontsize=11,
    )
    figure.savefig(path, dpi=120)
    print(f"\nwrote {path}")


def known_top(scene: Scene) -> float:
    """Largest entry of the known endmembers, each adding up to 1."""
    assert scene.endmembers is not None
    return float((scene.endmembers / scene.endmembers.sum(axis=0)).max())


def draw_spectrum(ax: Any, mean: Array, sd: Array, scene: Scene, k: int) -> None:
    """Mean, one standard deviation about it, and the known spectrum."""
    at, color = np.arange(mean.size), COLORS[k % len(COLORS)]
    ax.fill_between(
        at, np.maximum(mean - sd, 0), mean + sd, color=color, alpha=0.3, lw=0, label="± sd"
    )
    ax.plot(at, mean, color=color, lw=1.4, label="mean")
    if scene.endmembers is not None and k < scene.endmembers.shape[1]:
        own = scene.endmembers[:, k] / scene.endmembers[:, k].sum()
        ax.plot(at, own, color="0.1", lw=1.0, ls="--", label="known")
    ax.set_xlabel("band", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Unmix, tell, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cube", help="npz file with an array cube (bands, height, width)")
    parser.add_argument(
        "--side", type=int, default=32, help="side of the synthetic image, in pixels"
    )
    parser.add_argument(
        "--components",
        type=int,
        help="number of materials; by default that of the known endmembers, or 4",
    )
    parser.add_argument("--particles", type=int, default=30, help="number of particles")
    parser.add_argument(
        "--pilot", type=int, default=10, help="number of pilot runs, which set the threshold"
    )
    parser.add_argument(
        "--start", choices=("q_transform", "random", "nndsvdar"), default="q_transform"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", default="endmembers.png", help="image file to write")
    settings = parser.parse_args()
    scene = scene_of_file(settings.cube) if settings.cube else synthetic(settings.side)
    components = settings.components or len(scene.names) or 4
    if scene.endmembers is not None and components < scene.endmembers.shape[1]:
        parser.error(
            f"{scene.endmembers.shape[1]} endmembers are known, --components {components} cannot "
            "be matched with them; take at least as many"
        )
    print("{} bands, {} x {} pixels, {} materials".format(*scene.cube.shape, components))
    found = unmix(scene, components, settings)
    tell(scene, found)
    picture(settings.picture, scene, found)


if __name__ == "__main__":
    main()
