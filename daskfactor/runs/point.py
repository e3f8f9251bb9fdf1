"""Point estimates: which method fits which model, and the result as a Dataset."""

import json
from typing import Any

import numpy as np
import xarray as xr

from daskfactor.engine import Executor
from daskfactor.errors import OptionError
from daskfactor.io.blocks import BlockedData
from daskfactor.models.gaussian import GaussianMF
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.optimizers import DSGD, MultiplicativeUpdates
from daskfactor.optimizers.dsgd import run_dsgd
from daskfactor.optimizers.multiplicative import (
    DispersionRule,
    OnIteration,
    PointFit,
    initial_state,
    run_updates,
)
from daskfactor.runs.launch import component_names
from daskfactor.runs.order import in_callers_order

Method = MultiplicativeUpdates | DSGD


def check_method(method: object, model: TweedieNMF | GaussianMF) -> Method:
    """The method itself, or the model's own where none is named."""
    if method is None:
        return DSGD() if isinstance(model, GaussianMF) else MultiplicativeUpdates()
    if not isinstance(method, Method):
        raise OptionError(f"method must be MultiplicativeUpdates(...) or DSGD(...), got {method!r}")
    if isinstance(model, GaussianMF) and isinstance(method, MultiplicativeUpdates):
        raise OptionError(
            "MultiplicativeUpdates keep factors non-negative, those of GaussianMF are not; use "
            "DSGD(), or leave method out"
        )
    return method


def fit_point(
    data: BlockedData,
    model: TweedieNMF | GaussianMF,
    method: Method,
    executor: Executor,
    seed: int,
    on_iteration: OnIteration,
) -> PointFit:
    """Run the method from a random start."""
    if isinstance(method, DSGD):
        return run_dsgd(data, model, method, executor, seed, on_iteration)
    assert isinstance(model, TweedieNMF)  # see check_method
    return run_updates(
        data,
        model,
        initial_state(data, model.n_components, seed, 0),
        executor,
        DispersionRule(model, data),
        method.max_iter,
        method.tol,
        on_iteration,
    )


def point_dataset(
    data: BlockedData,
    model: TweedieNMF | GaussianMF,
    method: Method,
    point: PointFit,
    attrs: dict[str, Any],
) -> xr.Dataset:
    """Factors under the data's own names, the objective, and what they were made with."""
    W = in_callers_order(data, "rows", point.state.gather("rows"))
    Ht = in_callers_order(data, "columns", point.state.gather("columns"))
    row, col = data.labels.row_dim, data.labels.col_dim
    iterations, objective = zip(*point.objective, strict=True)
    hyper = {name: value for name, value in point.hyper._asdict().items() if np.isscalar(value)}
    return xr.Dataset(
        {
            "W": ((row, "component"), W),
            "H": (("component", col), np.ascontiguousarray(Ht.T)),
            "objective": ("iteration", np.array(objective)),
        },
        coords={
            "component": list(component_names(model) or range(model.width)),
            "iteration": list(iterations),
            **{name: (row, values) for name, values in data.labels.row_coords.items()},
            **{name: (col, values) for name, values in data.labels.col_coords.items()},
        },
        attrs={
            "method": method.name,
            "model": json.dumps(model.to_dict()),
            **hyper,
            "dispersion": point.hyper.dispersion,
            "n_iter": int(iterations[-1]),
            **attrs,
        },
    )
