"""Make point estimates: the verb ``optimize`` and its result."""

import json
import time
from hashlib import sha256
from typing import Any, Unpack

import numpy as np
import xarray as xr

from daskfactor.data.blocks import BlockedData
from daskfactor.data.loading import UNCERTAINTY
from daskfactor.executors import Executor
from daskfactor.executors.state import ChainState
from daskfactor.inference.base import check_device
from daskfactor.inference.chain import Chain, gather_side
from daskfactor.inference.coordinate_descent import CoordinateDescent, suits
from daskfactor.inference.inits import SHORT, Init, checked_init
from daskfactor.inference.langevin import PSGLD
from daskfactor.inference.multiplicative import Descent, OnStep, Optimizer
from daskfactor.inference.registry import requested_algorithm
from daskfactor.inference.session import Session, device_attrs, session
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.inference.starts import best_of, state_maker
from daskfactor.models import check_model
from daskfactor.models.settings import FactorModel
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.options import OnSampled, verb
from daskfactor.progress import RunEvent
from daskfactor.runs.schema import COMPONENT_NAME
from daskfactor.runs.stacks import with_index


@verb
def optimize(
    V: Any,
    model: FactorModel,
    method: Optimizer | None = None,
    *,
    init: Any = "auto",
    starts: int = 1,
    random_seed: int | None = None,
    **options: Unpack[OnSampled],
) -> xr.Dataset:
    """Find one point estimate of the factors: the fit that the samplers start from.

    Parameters
    ----------
    V
        The data, as for :func:`sample`.
    model
        What the data are taken to be; its priors count as penalties. A dispersion that is left
        to the data is estimated from the fit, but for whole numbers under beta = 1: it is 1.
    method
        :class:`MultiplicativeUpdates`, :class:`CoordinateDescent` or :class:`DSGD`. The default
        is :class:`DSGD` for a :class:`GaussianMF`; for a :class:`TweedieNMF` it is
        :class:`CoordinateDescent` with ``beta=2``, exponential priors and no cell missing or
        weighted (on processors), else :class:`MultiplicativeUpdates`.
    init
        What the method begins with, as for :func:`sample`; ``"auto"`` are random factors.
    starts
        Starts of which, after 40 multiplicative updates of each, the best goes on.
    random_seed
        Seed of the random starts.
    options
        Where it runs, and how V is read, as for :func:`sample`.

    Returns
    -------
    xarray.Dataset
        ``W`` (row, component), ``H`` (component, column), ``objective``
        (iteration): Σ d_β(v|μ) + φ(λ_w ΣW + λ_h ΣH) with -φ(a - 1) Σ log for gamma
        priors of shape a, or φ times the Gaussian penalties.

    Raises
    ------
    DataError, ModelError, OptionError
        If data, model or options cannot be used.

    Notes
    -----
    Févotte and Idier 2011; Gemulla et al. 2011.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> point = dfac.optimize(V, dfac.TweedieNMF(2), random_seed=0, progressbar=False)
    >>> (point["W"].values @ point["H"].values).shape
    (20, 15)
    """
    check_model(model)
    optimizer = requested_algorithm(Optimizer, method, model.default_optimizer, "method")
    model.check_settled(optimizer.name)
    optimizer.check_model(model)
    with session(V, model, weighed=True, random_seed=random_seed, **options) as run:
        started = time.perf_counter()
        model = model.placed(run.data.placed)
        if run.data.weighting == UNCERTAINTY:
            model = model.with_uncertainty()
        if method is None and not run.on_device and suits(model, run.data):
            optimizer = CoordinateDescent()
        if run.on_device:
            check_device(optimizer, model, run.data.unstored)
        start = checked_init(init, starts, model, run.data)

        def on_step(done: int, total: int) -> None:
            run.on_event(RunEvent("warm start", done, total))

        def fitted() -> Any:
            state = _opening(run, model, optimizer, start, on_step)
            return optimizer.fit(run.data, model, run.executor, run.seed, on_step, state)

        point = run.executor.retry_on_loss(fitted)
        made = {"random_seed": str(run.seed), "seconds": time.perf_counter() - started}
        made |= {"init": json.dumps(start.to_dict()), **device_attrs(run.executor)}
        return point_dataset(run.data, model, optimizer, point, made)


def _opening(
    run: Session[BlockedData], model: Any, method: Optimizer, init: Init, on_step: OnStep
) -> ChainState | None:
    """Make the state that a method begins with; None: its usual one."""
    short = init.starts > 1 or (init.kind == "multiplicative" and not method.multiplicative)
    if not short and init.kind in ("auto", model.inits[0]):
        return None
    data, executor = run.data, run.executor
    make = state_maker(data, model, executor, init, run.seed)
    if not short:
        return make(0, 0)
    states = (make(0, attempt) for attempt in range(init.starts))
    descents = (Descent(data, model, executor, state) for state in states)
    return best_of(descents, lambda done: on_step(done, init.starts * SHORT))


def point_dataset(
    data: BlockedData,
    model: FactorModel,
    method: Optimizer,
    point: Descent,
    attrs: dict[str, Any],
) -> xr.Dataset:
    """Label factors as the data are, with the objective, the model and the options."""
    W, Ht = (gather_side(point.state, data, factor) for factor in (0, 1))
    labels, named = data.labels, model.component_names()
    iterations, objective = zip(*point.objective, strict=True)
    hyper = {key: value for key, value in point.hyper._asdict().items() if np.isscalar(value)}
    point_of = xr.Dataset(
        {
            "W": ((labels.row_dim, "component"), W),
            "H": (("component", labels.col_dim), np.ascontiguousarray(Ht.T)),
            "objective": ("iteration", np.array(objective)),
        },
        coords={
            "component": range(model.width),
            **({COMPONENT_NAME: ("component", list(named))} if named else {}),
            "iteration": list(iterations),
            **labels.coords,
        },
        attrs={
            "method": method.name,
            "model": json.dumps(model.to_dict()),
            "run": json.dumps({"source": data.source.to_dict()}),
            **hyper,
            **model.dispersion_attrs(point.hyper.dispersion),
            "n_iter": int(iterations[-1]),
            "mean": data.mean,
            "level": data.level,
            # New rows that are drawn given it say so; the same fit has the same name.
            "trace_id": sha256(W.tobytes() + Ht.tobytes()).hexdigest()[:32],
            **attrs,
        },
    )
    return with_index(point_of, labels.stacks)


def chosen_dispersion(data: BlockedData, model: TweedieNMF, seed: int, executor: Executor) -> float:
    """Give the model's dispersion; of ``"auto"``: 1 for counts, else an estimate at a point fit."""
    if model.dispersion != "auto":
        return float(model.dispersion)
    if model.likelihood.counts and data.is_integer:
        return 1.0
    options = RunOptions(1, 0, 1, 1, seed, "moments", 0, str(data.dtype))
    setting = Setting(data, model, PSGLD().kernel(model, data), options, executor)

    def estimated() -> float:
        chain = Chain(setting, 0)
        chain.start()
        return float(chain.hyper.dispersion)

    return executor.retry_on_loss(estimated)
