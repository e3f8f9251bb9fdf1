"""Draw factors of new rows, or columns, of a matrix that was sampled: the verb ``transform``."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Unpack, cast

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.checks import label_at, match_labels, one_of, refuse_repeated, truth, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.data.labels import DEFAULT_DIMS
from daskfactor.data.opening import ANYTHING, open_source
from daskfactor.data.tables import ReadOptions
from daskfactor.errors import DataError, ModelError, OptionError
from daskfactor.inference.base import reference_sampler
from daskfactor.inference.block_hmc import ROW_STEPS, BlockHMC
from daskfactor.inference.fold_in import NewRows
from daskfactor.inference.parameters import SIDES
from daskfactor.inference.posterior_draws import PosteriorDraws, read_posterior
from daskfactor.inference.program import COLUMNS, Kernel
from daskfactor.inference.session import Session, check_data, device_attrs, session
from daskfactor.inference.setting import DRAWS_BUDGET, in_callers_order
from daskfactor.machine import require_memory
from daskfactor.models.covariates import Covariates, checked_covariates
from daskfactor.models.settings import FixedComponents
from daskfactor.options import OnSampled, verb
from daskfactor.progress import RunEvent, counted
from daskfactor.results.align import aligned_run
from daskfactor.results.views import UNSETTLED
from daskfactor.runs.trace import Run

Array = NDArray[Any]
Axis = Literal["row", "column"]
AXES = "row", "column"
STEPS = 2
"""Measured on faces, 25 components, against 10: means of mu are off by .05 posterior sd, and sds
by 1 %, whether draws of H follow each other or are shuffled."""
BANDS = 8
"""Bands of new rows, where data are not small."""
SMALL = 2**18
"""Cells times components up to which a pass over them takes no longer than what is around it."""
POINT_DRAWS = 100
"""Draws over all chains that a mean is taken over, if nobody says how many."""


@verb
def transform(
    trace: Any,
    V: Any,
    axis: Axis = "row",
    draws: int | None = None,
    *,
    point: bool = False,
    steps: int = STEPS,
    covariates: Any = None,
    fixed: Any = None,
    first: int = 0,
    random_seed: int | None = None,
    **options: Unpack[OnSampled],
) -> xr.DataArray:
    r"""Draw the factors of new rows given what a run has learnt (fold-in, projection).

    .. math:: w_i^{(d)} \sim p(w \mid v_i, H^{(d)}, \theta^{(d)})

    for every draw d of H and of the hyperparameters, or of new columns given W. The run does
    not learn from the new rows, and needs none of its own data. Weights p(V_new | H^(d), θ^(d))
    of the draws would make them those of a fit with the new rows in it, whose means differ by
    about √(new rows / known rows) of what H adds to a posterior standard deviation: by the
    variance that the new rows take away from H. Under a
    :class:`GaussianMF` these are independent draws from the normal conditional. Under other models
    every draw is ``steps`` steps of :class:`BlockHMC` on from the one before, with masses and step
    sizes learnt for each new row: what is left of the draw before falls geometrically with
    ``steps``.

    Parameters
    ----------
    trace
        Result of a run that kept draws, aligned or not, of :func:`stein_posterior`, or the path
        of its store; or the point of :func:`optimize`, whose uncertainty is then left out.
    V
        New rows: anything that :func:`sample` takes, of any number of rows. Columns are those
        of the run: matched by label where both have labels, in any order, else by position. A row
        may be empty among others: it is drawn from the prior. Rows that are all empty are refused.
    axis : {"row", "column"}
        Axis of the new entries: rows or columns. Rows of new columns are those of the run.
    draws
        Number of draws per chain, evenly spaced; by default all, or as many as fit in 1 GiB.
        Memory holds these and the rows in work, not V. Of a point, how many draws of the new rows
        (100 by default). Particles that have weight are all taken.
    point
        Whether to return the posterior mean of each new row in place of draws: the mean over
        100 draws (or ``draws``; where there are fewer, over more steps under each) of the aligned
        trace, in double precision, with the same random numbers for every row, so that other rows
        do not move it. Under a :class:`GaussianMF` it is exact given these draws. Under other
        models it is a mean along paths: the order of the columns, or sparse data in place of
        dense, moves it by a fraction of a posterior standard deviation.
    steps
        Paths under each draw. One is as good for long chains whose draws follow each other, 4
        better for few draws that have little in common.
    covariates
        Of the new rows, if the model has ``covariates_w`` (``covariates_h`` for columns), as
        there; an empty row is drawn from what they say.
    fixed
        Frozen components of the new rows, (rows, F), if the model has ``fixed_w`` (of columns,
        (F, columns)).
    first
        Number of the first of these rows, so that pieces of a long table have the random numbers
        of the whole.
    random_seed
        As for :func:`sample`; for ``point=True`` one that is always the same, if none is given.
    options
        Where it runs, and how V is read, as for :func:`sample`; ``unstored`` by default as in
        the run. On a GPU that is under models without covariates other than a
        :class:`GaussianMF`. ``uncertainty`` or ``weights`` of the new cells are needed if the
        run had them.

    Returns
    -------
    xarray.DataArray
        ``W`` (chain, draw, row, component) or ``H`` (chain, draw, component, column), under the
        labels of the new rows, with the columns that ``posterior`` has, biases of a
        :class:`GaussianMF` among them; of particles with the coordinate ``weight``. With
        ``point``, without chain and draw. :func:`predict` takes draws as ``rows`` or ``columns``.

    Raises
    ------
    DataError, ModelError, OptionError
        If the new rows do not go with the run.

    Notes
    -----
    Rows that are independent given the other factor: Şimşekli et al. 2017, section 2.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V[:15], dfac.TweedieNMF(2), **run)
    >>> new = dfac.transform(trace, V[15:], random_seed=0, progressbar=False)
    >>> new.shape
    (1, 20, 5, 2)
    """
    one_of("axis", axis, AXES)
    point = truth("point", point)
    factor, steps = AXES.index(axis), whole_number("steps", steps, 1)
    result = Run.of(trace, point=True)
    result.require_matrix("transform")
    result.require_draws("a new row")
    if point and not result.is_point:
        result = aligned_run(result.tree, "a mean of new rows")
    posterior = read_posterior(result, factor, draws, POINT_DRAWS if point else None)
    if getattr(V, "dims", None) == posterior.dims[::-1] and V.ndim == len(set(V.dims)) == 2:
        V = V.transpose()
    if UNSETTLED in result.attrs:
        raise OptionError(
            "this view is of a run that learnt rates or shapes of priors together with other "
            "matrices, so that rows of one matrix alone cannot be drawn; give them numbers, or "
            "sample with the new rows among the others"
        )
    model = _model_of_rows(posterior.model, factor, covariates, fixed)
    # Bands go side by side, each through all draws: several are worth it where one pass is not.
    dtype = "float64" if point else posterior.other.dtype
    reading = {"allow_empty": True, "dtype": dtype, "workers": BANDS // 2}

    def check(data: BlockedData) -> None:
        check_data(model.sized(data.shape, data.labels.keys), data)
        _ = _entries(posterior, data)
        kind, side = posterior.weighting, SIDES[factor]
        if kind is not None and data.weighting != kind:  # 1 is no default
            what = {"uncertainty": "uncertainties", "weights": "weights"}[kind]
            raise OptionError(
                f"the run was given {what} of its cells, and new {side} need theirs: pass "
                f"{kind}=, of the shape of V"
            )

    V, options = _opened(V, posterior, options)
    shape = None if isinstance(V, BlockedData) else getattr(V, "shape", None)
    if options.get("blocks") is None and shape and math.prod(shape) * model.width <= SMALL:
        options["blocks"] = 1
    seed = 0 if point and random_seed is None else random_seed
    with session(
        V, model, reading=reading, check=check, weighed=True, random_seed=seed, **options
    ) as run:
        data, kernel = run.data, _row_kernel(posterior.model, run.on_device)
        if draws is None and not point:
            posterior = posterior.within(DRAWS_BUDGET, data.shape[factor])
        more = -(-POINT_DRAWS // math.prod(posterior.shape)) if point else 1
        plan = NewRows(
            data,
            model.sized(data.shape, data.labels.keys).of_rows(data.order(factor)),
            posterior.with_entries(_entries(posterior, data)),
            kernel,
            run.seed,
            whole_number("first", first, 0),
            steps * more if posterior.model.nonnegative else 1,
            point,
            run.device,
        )
        rows = _draw(plan, run)
        attrs = {"axis": axis, "random_seed": str(run.seed), **posterior.attrs}
        attrs |= device_attrs(run.executor)
        return _labelled(rows, posterior, data, attrs)


def _row_kernel(model: Any, on_device: bool) -> Kernel:
    """Return what draws rows of one factor given the other one; refuse what no GPU draws."""
    if model.nonnegative:
        # Zeros without a closed form are written out as entries, so that no data are told.
        return BlockHMC(steps=ROW_STEPS).kernel(model, None, on_device)
    sampler = reference_sampler(model)
    if on_device:
        raise OptionError(
            f"new rows of a {type(model).__name__} are drawn by {sampler.name}, which does not run "
            "on a GPU; leave device out"
        )
    return sampler.kernel(model)


def _draw(plan: NewRows, run: Session[BlockedData]) -> Array:
    """Draw all rows, or their means, in the order in which the caller numbers them.

    Draws that memory has no room for are refused before any is made.
    """
    data, blocks, factor = plan.data, plan.data.grid.blocks, plan.posterior.factor
    count, length, side = math.prod(plan.posterior.shape), data.shape[factor], SIDES[factor]
    if not plan.point:
        size = count * length * plan.model.width * data.dtype.itemsize
        advice = (
            f"take fewer (draws=), their means (point=True), or some of the {side} at a time "
            "(first= says where a part begins)"
        )
        require_memory(size, f"{count} draws of {length} new {side} take", advice)
    run.on_event(RunEvent("draw", 0, blocks))
    if run.executor.in_process:
        rows = plan.room(length)
        work = counted(replace(plan, out=rows), blocks, run.on_event)
        _ = run.executor.map(work, range(blocks), "new-rows")
    else:  # from elsewhere nobody could hear of bands
        rows = np.concatenate(run.executor.map(plan, range(blocks), "new-rows"), -2)
    return in_callers_order(data, side, rows, axis=rows.ndim - 2)


def _opened(V: Any, posterior: PosteriorDraws, options: OnSampled) -> tuple[Any, OnSampled]:
    """Open new data, of which what they do not store means what it meant in the run."""
    has_meaning = options.get("unstored") is not None or posterior.unstored is None
    if has_meaning or isinstance(V, BlockedData):
        return V, options
    source = open_source(V, ReadOptions.of(options))
    rest = {name: value for name, value in options.items() if not hasattr(ANYTHING, name)}
    if source.is_sparse and source.unstored is None:
        rest["unstored"] = posterior.unstored
    return source, cast("OnSampled", rest)


def _model_of_rows(model: Any, factor: int, covariates: Any, fixed: Any) -> Any:
    """Return the model of the new rows alone, with their covariates and frozen components."""
    side, letter, settings = SIDES[factor], "wh"[factor], dict[str, Any]()
    for kind, value in (("covariates", covariates), ("fixed", fixed)):
        settings |= {name: None for name in (f"{kind}_w", f"{kind}_h") if hasattr(model, name)}
        name = f"{kind}_{letter}"
        old, new = getattr(model, name, None), None
        if old is None and value is not None:
            raise ModelError(f"the model of this run has no {name}; leave {kind} out")
        if old is None:
            continue
        if value is not None:
            new = (_new_covariates if kind == "covariates" else _new_fixed)(name, old, value)
        if new is None:
            what = "covariates" if kind == "covariates" else "frozen components"
            shape = f"({old.width}, {side})" if name == "fixed_h" else f"({side}, {old.width})"
            raise ModelError(
                f"the run has {old.width} {name}, and new {side} need theirs: pass {kind}= with "
                f"the {what} of the new {side}, {shape}"
                + ("" if value is None else f", got shape {np.shape(value)}")
            )
        settings[name] = new
    return replace(model, **settings)


def _new_covariates(name: str, old: Covariates, value: Any) -> Covariates | None:
    """Check covariates of new rows; None: they are not as many as those of the run."""
    new = checked_covariates(name, value)
    return None if new is None or new.width != old.width else new


def _new_fixed(name: str, old: FixedComponents, value: Any) -> FixedComponents | None:
    """Check frozen components of new rows; None: they are not as many as those of the run."""
    values = np.atleast_2d(np.asarray(value, np.float64))
    if name == "fixed_w" or len(values) != old.width:
        values = values.T
    if values.ndim != 2 or len(values) != old.width:
        return None
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ModelError("fixed must hold finite numbers of at least 0; it has others")
    return replace(old, values=values)


def _entries(posterior: PosteriorDraws, data: BlockedData) -> Array:
    """Return the entries of the other factor that the data have, in the grid's order."""
    other, count = 1 - posterior.factor, posterior.other.shape[2]
    side, labels = SIDES[other], data.labels.keys[other]
    stack = data.labels.stacks.get((data.labels.row_dim, data.labels.col_dim)[other])
    at, fitted = np.arange(count), posterior.labels
    if fitted is None and data.source.table is not None and labels is not None:
        fitted = at  # keys of a table are positions where the run has no labels
    if labels is not None and fitted is not None:
        lacks = data.unstored == "missing" or (stack is not None and stack.maps)
        at = _matched(labels, fitted, side, count, may_lack=lacks)
    elif data.shape[other] != count:
        raise DataError(
            f"the run has {count} {side}, and the new {SIDES[posterior.factor]} have "
            f"{data.shape[other]}; pass data with the same {side}, in the same order"
        )
    return at[data.order(other)]


def _matched(labels: Any, fitted: Any, side: str, count: int, may_lack: bool) -> Array:
    """Find labels among those of the run; where others would be missing, they need not be there."""
    match = match_labels(labels, fitted)
    unknown = np.flatnonzero(match.at < 0)
    lost = match.unmatched[:0] if may_lack else match.unmatched
    if len(unknown):
        advice = f"drop these {side}, or drop the labels to match by position"
        if isinstance(labels, dict):  # of stacked dimensions, where the run may have left it out
            advice = (
                "give them the labels of the run; where the run had no entry at all, the new data "
                "must be NaN, too"
            )
        raise DataError(
            f"{len(unknown)} of the {len(match.at)} {side} of the new data are not among those of "
            f"the run, the first of them {label_at(labels, unknown[0])} (the run's begin with "
            f"{label_at(fitted, 0)}); {advice}"
        )
    if len(lost):
        raise DataError(
            f"the new data lack {len(lost)} of the run's {count} {side}, the first of them "
            f"{label_at(fitted, lost[0])}; add them, with NaN where nothing was observed (such as "
            "reindex of xarray and pandas does) or 0 where that is what was"
        )
    refuse_repeated(match, side, "V")
    return match.at


def _labelled(
    rows: Array, posterior: PosteriorDraws, data: BlockedData, attrs: Mapping[str, Any]
) -> xr.DataArray:
    """Put factors under the labels of the new rows."""
    factor, labels = posterior.factor, data.labels
    dim = (labels.row_dim, labels.col_dim)[factor]
    dim_coords = (labels.row_coords, labels.col_coords)[factor]
    if dim == DEFAULT_DIMS[factor]:
        dim = posterior.dims[factor]
    dims = [dim, "component"]
    if factor == COLUMNS:
        rows, dims = rows.swapaxes(-1, -2), dims[::-1]
    shared = posterior.coords
    if rows.ndim == 4:
        dims = ["chain", "draw", *dims]
    else:
        shared = shared[["component"]]
    coords: dict[str, Any] = {key: (dim, values) for key, values in dim_coords.items()}
    coords |= {str(each): values for each, values in shared.coords.items()}
    return xr.DataArray(rows, coords, dims, "WH"[factor], attrs)
