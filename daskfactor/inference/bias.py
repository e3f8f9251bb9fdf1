r"""The bias of a finite step: the verb ``discretization_bias``.

A run goes on from its last draws, either as two coupled chains, one with the step and one with
half of it, or by an exact sampler. To first order in the step ε the bias of a mean is

.. math:: 2 (\bar f_\epsilon - \bar f_{\epsilon/2})

whose error is small, because coupled chains stray together; to second order that is one and a
half times the bias. Draws of a run of two such chains are those with half the step: half of this.
Where chains cannot be coupled, the draws of the run are compared with exact
ones, at several times the price for the same error.
"""

import math
from types import SimpleNamespace
from typing import Any, Final, Unpack

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import warn, whole_number
from daskfactor.errors import ModelError, OptionError, SamplingWarning
from daskfactor.inference.bands import pieces_of, take_values
from daskfactor.inference.base import Sampler, checked_sampler, longest_stride, reference_sampler
from daskfactor.inference.langevin import coupled
from daskfactor.inference.registry import algorithm_from_dict
from daskfactor.inference.sampling import NOT_STARTED, ChainsRun, run_spec
from daskfactor.inference.session import session_again
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.inference.starts import factors_on_grid
from daskfactor.models import model_from_dict
from daskfactor.options import Running, verb
from daskfactor.progress import OnEvent
from daskfactor.random import resolve_seed
from daskfactor.results.diagnose import MIN_DRAWS, all_series, effective_size
from daskfactor.results.series import Series
from daskfactor.results.summary import is_biased
from daskfactor.results.verdict_dataset import VerdictDataset
from daskfactor.runs.run_writer import Sink
from daskfactor.runs.schema import COARSE
from daskfactor.runs.trace import Run, Trace, factors_of

Array = NDArray[np.float64]

LARGEST: Final = 0.2
"""Bias in posterior standard deviations above which there is a warning."""
CERTAIN: Final = 4.0
"""Standard errors by which it is then known to be there."""
KINDS: Final = ("density", "product", "scale")


class Bias(VerdictDataset):  # type: ignore[no-untyped-call]
    """Estimated errors of posterior means, and advice; :func:`discretization_bias` returns it."""

    __slots__ = ()

    def _table(self) -> str | None:
        if not {"bias", "error"} <= set(self.data_vars):
            return None
        return str(self.to_dataframe().round(3).to_string())


@verb
def discretization_bias(
    trace: Trace,
    V: Any = None,
    *,
    draws: int = 300,
    tune: int = 200,
    cells: int = 16,
    random_seed: int | None = 0,
    **options: Unpack[Running],
) -> Bias:
    """Estimate how far the finite step of a sampler has moved posterior means, in their sd.

    The run goes on from its last draws, which are not touched: of the samplers with Langevin
    steps as two coupled chains with half the step and with the whole one, and of others (and of
    models that learn hyperparameters) by an exact sampler whose draws theirs are compared with.
    It costs about as much as drawing ``3 * draws`` times. Of :class:`PSGRRLD` it is the bias of
    the fine chain, whose draws ``posterior`` holds.

    Parameters
    ----------
    trace
        Result of a run with kept draws, or the path of its store.
    V
        The data again, needed if they are neither in the result nor where they were read from.
    draws, tune
        Draws of the coarse chain, or of the exact one, and cycles before them.
    cells
        How many cells of WH to look at.
    random_seed, options
        As for :func:`sample`.

    Returns
    -------
    Bias
        A Dataset over ``functional``, the largest first: ``bias`` of the mean and its Monte
        Carlo ``error``, in posterior standard deviations, of the log density, of WH at cells,
        its mean, norm and singular values, and of the sums of W and of H. The attribute
        ``method`` is "coupled" or "exact". ``print`` shows it with a verdict.

    Raises
    ------
    OptionError
        If the run kept no draws, or fewer than four, or its sampler has no such bias.
    ModelError
        If the model has covariates.
    DataError
        If ``V`` must be given, or is not what the run was made from.

    Notes
    -----
    Warns if a bias is above 0.2 standard deviations for certain. Şimşekli et al. 2017, equations
    9 to 11. Directions that the chain crosses more slowly than ``draws`` cycles do not show.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 50, "tune": 50, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), dfac.PSGLD(), **run)
    >>> bias = dfac.discretization_bias(trace, V, draws=50, tune=20, progressbar=False)
    >>> sorted(bias)
    ['bias', 'error']
    """
    result = Run.of(trace, "an estimate of its bias")
    tree = result.tree
    if result.is_particles or not is_biased(result):
        raise OptionError(
            "the draws of this run have no bias of a finite step that could be estimated; "
            "discretization_bias takes runs of samplers such as PSGLD()"
        )
    if tree["posterior"].sizes["draw"] < MIN_DRAWS:
        raise OptionError(
            f"a bias is told in posterior standard deviations, which take {MIN_DRAWS} draws of "
            f"each chain or more, got {tree['posterior'].sizes['draw']}; pass the whole trace"
        )
    lengths = whole_number("draws", draws, 50), whole_number("tune", tune, 10)
    seed, described = resolve_seed(random_seed), result.document("run")
    sampler = algorithm_from_dict(Sampler, described["sampler"], "the run was made by a sampler")
    model = model_from_dict(described["model"])
    pair = None if model.learnt else coupled(sampler)
    parent = SimpleNamespace(attrs=tree.attrs, path="this trace", tree=lambda: tree)
    with session_again(parent, V, model, None, seed, **options) as run:
        model = _settled(model.placed(run.data.placed), tree)
        follower = checked_sampler(model, pair or reference_sampler(model))
        kernel, each = follower.kernel(model, run.data), longest_stride(follower)
        planned = described["options"] | {"seed": seed, "thin": 1, "keep": "draws", "keep_every": 1}
        planned |= {"draws": each * lengths[0], "tune": 2 * each * (lengths[1] // 2)}
        planned |= {"chains": tree["posterior"].sizes["chain"]}
        setting = Setting(run.data, model, kernel, RunOptions.from_dict(planned), run.executor)
        on = Continued(setting, sink := Sink(run_spec(setting, False)), run.on_event)
        run.stack.callback(on.close)
        on.restore({}, NOT_STARTED)
        for chain in on.chains:
            _put(chain, tree)
        on.save()
        on.go()
        sink.update_attrs(on.attrs())
    before = _series(tree, cells)
    spread = {name: one.values.std() for name, one in before.items()}
    after = sink.tree()
    if pair is None:
        differences = _of_exact(before, _series(after, cells))
    else:
        fine, coarse = (
            _series(_track(after, track.group, on.densities[track.name]), cells)
            for track in follower.tracks
        )
        differences = _of_pair(fine, coarse, 1.0 if COARSE in tree.children else 2.0)
    return _assess(
        {name: np.array(difference) / spread[name] for name, difference in differences.items()},
        {name: one.kind for name, one in before.items()},
        {"method": "exact" if pair is None else "coupled", "draws": lengths[0], "tune": lengths[1]},
    )


def _settled(model: Any, tree: xr.DataTree) -> Any:
    """Give the model with the dispersion and the frozen components that the run had."""
    if model.covariates != (None, None):
        raise ModelError(
            "a bias under covariates cannot be estimated: compare with Gibbs() or BlockHMC()"
        )
    W, H = (factor[0, -1].values for factor in factors_of(tree["posterior"].to_dataset()))
    return model.with_dispersion_of(tree.attrs).with_frozen_of(W, H.T)


def _put(chain: Any, tree: xr.DataTree) -> None:
    """Let a chain go on from the last draw of the same number."""
    state, data = chain.tracks[0].state, chain.setting.data
    draws = tree["posterior"].to_dataset()
    W, H = (factor[chain.number, -1].values for factor in factors_of(draws))
    for factor, values in enumerate(factors_on_grid(data, W, H.T)):
        state.each(take_values, factor, pieces_of(data.grid, factor, values))


def _series(tree: xr.DataTree, cells: int) -> dict[str, Series]:
    """Return the series of a run by name, all at the same cells whatever the run monitored."""
    groups = {name: tree[name].to_dataset() for name in ("posterior", "sample_stats")}
    plain = xr.DataTree.from_dict({"/": xr.Dataset(attrs=tree.attrs), **groups})
    series, _ = all_series(plain, cells, 0, None)
    return {one.name: one for one in series if one.kind in KINDS}


def _track(tree: xr.DataTree, group: str, densities: list[list[float]]) -> xr.DataTree:
    """Return one of the coupled chains as a run of its own."""
    lp = xr.Dataset({"lp": (("chain", "draw"), np.array(densities))})
    groups = {"posterior": tree[group].to_dataset(), "sample_stats": lp}
    return xr.DataTree.from_dict({"/": xr.Dataset(attrs=tree.attrs), **groups})


class Continued(ChainsRun):
    """A run that keeps the log densities of all tracks at their draws: {track: (chain) -> lp}."""

    def __init__(self, setting: Setting, sink: Sink, on_event: OnEvent) -> None:
        super().__init__(setting, sink, on_event)
        self.densities: dict[str, list[list[float]]] = {}

    def write(self, due: bool) -> None:
        densities = [
            (run.track.name, chain.number, [run.densities[at] for at in sorted(run.densities)
                                            if run.options.place(at) is not None])
            for chain in self.chains
            for run in chain.tracks
        ]  # fmt: skip
        super().write(due)  # which may fail, and is then done again
        for name, number, drawn in densities:
            empty: list[list[float]] = [[] for _ in self.chains]
            self.densities.setdefault(name, empty)[number] += drawn


def _of_pair(
    fine: dict[str, Series], coarse: dict[str, Series], factor: float
) -> dict[str, tuple[float, float]]:
    """Return coarse - fine times a factor, and its error, draw by draw of the coarse chain."""
    differences = {}
    for name, one in fine.items():
        halves = 0.5 * (one.values[:, ::2] + one.values[:, 1::2])
        values = factor * (coarse[name].values - halves)
        error = float(values.std()) / math.sqrt(effective_size(values))
        differences[name] = float(values.mean()), error
    return differences


def _of_exact(
    before: dict[str, Series], after: dict[str, Series]
) -> dict[str, tuple[float, float]]:
    """Return the difference of both means, and its error."""
    differences = {}
    for name, one in before.items():
        both = one.values, after[name].values
        error = math.sqrt(sum(float(values.var()) / effective_size(values) for values in both))
        differences[name] = float(both[0].mean() - both[1].mean()), error
    return differences


def _assess(differences: dict[str, Array], kinds: dict[str, str], attrs: dict[str, Any]) -> Bias:
    """Sort, put into words, and warn."""
    names = sorted(differences, key=lambda name: -abs(differences[name][0]))
    bias, error = np.array([differences[name] for name in names]).T
    sure = np.flatnonzero((np.abs(bias) > LARGEST) & (np.abs(bias) > CERTAIN * error))
    if sure.size:
        at = int(sure[0])
        verdict = (
            f"BIASED: the finite step moves the mean of {names[at]} by {bias[at]:+.2f} posterior "
            f"standard deviations (error {error[at]:.2f}); halve the step, or take an exact sampler"
        )
        warn(verdict, SamplingWarning)
    else:
        verdict = (
            f"No bias above {LARGEST:g} posterior standard deviations is certain: the largest is "
            f"{bias[0]:+.2f}, of {names[0]} (error {error[0]:.2f}); half of the errors are below "
            f"{np.median(error):.2f}, and four times the draws halve them"
        )
    return Bias(
        {"bias": ("functional", bias), "error": ("functional", error)},
        {"functional": names, "kind": ("functional", [kinds[name] for name in names])},
        attrs | {"verdict": f"{verdict}."},
    )
