"""What the verbs that run something share: checks, contexts, and the results' first page."""

import json
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from os import PathLike, fspath
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import daskfactor
from daskfactor.data.blocks import BlockedData
from daskfactor.data.schedules import diagonal_sizes
from daskfactor.errors import DataWarning, OptionError, SamplingWarning
from daskfactor.executors import Executor
from daskfactor.executors.machine import machine_attrs
from daskfactor.inference.base import Sampler
from daskfactor.inference.chain import Setting
from daskfactor.inference.compilation import compile_kernels
from daskfactor.inference.monitor import Cells
from daskfactor.inference.options import RunOptions
from daskfactor.inference.psgld import PSGLD
from daskfactor.inference.run import Driver, RunState, hyper_attrs
from daskfactor.inference.samplers import samplers
from daskfactor.inference.sghmc import SGHMC
from daskfactor.inference.sinks import MemorySink
from daskfactor.models.fixed import FixedComponents
from daskfactor.models.gaussian import GaussianMF
from daskfactor.models.tweedie import FIXED, TweedieNMF
from daskfactor.progress import OnEvent, ignore
from daskfactor.results.schema import FORMAT_VERSION
from daskfactor.results.spec import RunSpec
from daskfactor.results.store import RunStore
from daskfactor.results.trace import open_run

PathText = str | PathLike[str]

SMALL_DATA = 2**28
"""Bytes of data that a trace in memory holds a copy of; a store always does."""

NOT_STARTED: dict[str, Any] = {
    "cycle": 0,
    "draws": 0,
    "warmup_draws": 0,
    "chains": [],
    "seconds": 0.0,
}
"""The checkpoint of a run whose warm start has not ended: resuming begins it again."""


def check_model(model: object) -> None:
    """Refuse anything that is not a model."""
    if not isinstance(model, TweedieNMF | GaussianMF):
        raise OptionError(
            "model must be a model such as TweedieNMF(n_components=20) or "
            f"GaussianMF(n_components=20), got {model!r}"
        )


def default_sampler(model: TweedieNMF | GaussianMF) -> Sampler:
    """The sampler for a model when the caller names none."""
    return SGHMC() if isinstance(model, GaussianMF) else PSGLD()


def check_kinds(model: object, sampler: object) -> None:
    """Refuse what is not a model or not a sampler, and a pair that does not go together."""
    check_model(model)
    if not isinstance(sampler, Sampler):
        known = ", ".join(f"{kind}(...)" for kind in samplers())
        raise OptionError(f"sampler must be one of {known}, got {sampler!r}")
    kind = type(model).__name__
    if model.nonnegative != sampler.nonnegative:  # type: ignore[attr-defined]  # checked above
        right = [name for name, own in samplers().items() if own.nonnegative != sampler.nonnegative]
        raise OptionError(
            f"{kind} cannot be sampled by {sampler.name}: it takes "
            f"{' or '.join(f'{name}()' for name in right)}; leave sampler out for the right one"
        )
    sampler.check_model(model)


def check_schedule(sampler: Sampler, data: BlockedData) -> None:
    """Refuse a schedule that this grid cannot have, before anything is written."""
    blocks = data.grid.blocks
    sampler.schedule.cycle(blocks, diagonal_sizes(data.n_observed), np.random.default_rng(0))


def report_trouble(state: RunState) -> None:
    """Warn of roll-backs and of counts that are no Poisson counts; once per run."""
    rolled_back = sum(len(chain.divergences) for chain in state.chains)
    if rolled_back:
        smallest = min(chain.shrink for chain in state.chains)
        warnings.warn(
            f"{rolled_back} segments diverged and were run again with a smaller step (down to "
            f"{smallest:.2g} of the one asked for); draws after that are marked in "
            "sample_stats/diverging; choose a smaller step to avoid this",
            SamplingWarning,
            stacklevel=4,
        )
    of_model = state.chains[0].model_warning()
    if of_model is not None:
        warnings.warn(of_model, DataWarning, stacklevel=4)
    of_sampler = next(filter(None, (chain.sampler_warning() for chain in state.chains)), None)
    if of_sampler is not None and not rolled_back:
        warnings.warn(of_sampler, SamplingWarning, stacklevel=4)


def run_from_start(
    setting: Setting, store: PathText | None, overwrite: bool, on_event: OnEvent
) -> xr.DataTree:
    """Everything after the checks: compile, warm start, segments, results."""
    spec = _spec(setting, observed_with(setting.data, store is not None))
    if store is not None:
        sink: RunStore | MemorySink = RunStore.create(fspath(store), spec, overwrite=overwrite)
        sink.checkpoint(fixed_arrays(setting.model), NOT_STARTED)
    else:
        sink = MemorySink(spec)
    try:
        compile_kernels(setting, on_event)
        driver = Driver(setting, sink, on_event)
        state = driver.start()
        driver.run(state)
        report_trouble(state)
        closing = closing_attrs(state)
        if isinstance(sink, MemorySink):
            return sink.tree(spec, closing)
        sink.finish(closing)
    except Exception:
        if isinstance(sink, RunStore) and not sink.load_checkpoint()[1]["chains"]:
            sink.close()
            shutil.rmtree(sink.path, ignore_errors=True)  # the run never began
        raise
    finally:
        if isinstance(sink, RunStore):
            sink.close()
    assert store is not None
    return open_run(fspath(store))


def fixed_arrays(model: TweedieNMF | GaussianMF) -> dict[str, NDArray[Any]]:
    """Values of frozen components, for the checkpoint of a run that has no state yet."""
    if not isinstance(model, TweedieNMF):
        return {}
    pairs = zip(FIXED, model.fixed, strict=True)
    return {name: own.values for name, own in pairs if own is not None and own.values is not None}


def with_fixed_values(
    model: TweedieNMF | GaussianMF, arrays: dict[str, NDArray[Any]]
) -> TweedieNMF | GaussianMF:
    """The model of a stored run that has no state yet, its frozen components' values known."""
    if not isinstance(model, TweedieNMF):
        return model
    known: dict[str, Any] = {
        name: FixedComponents(own.frozen, arrays[name])
        for name, own in zip(FIXED, model.fixed, strict=True)
        if own is not None and name in arrays
    }
    return replace(model, **known)


def extended(options: RunOptions, meta: dict[str, Any], more: int) -> RunOptions:
    """The options of a run with ``more`` draws than its checkpoint holds."""
    done = max(0, meta["cycle"] - options.tune) // options.thin
    return replace(options, draws=max(done + more, options.draws))


def cells_of(spec: RunSpec) -> Cells | None:
    """Monitored cells of a run that was stored."""
    if spec.monitor_rows is None or spec.monitor_columns is None:
        return None
    return spec.monitor_rows.astype(np.int64), spec.monitor_columns.astype(np.int64)


def model_from_dict(values: dict[str, Any]) -> TweedieNMF | GaussianMF:
    """The model that ``to_dict`` described."""
    if values.get("type") == "GaussianMF":
        return GaussianMF.from_dict(values)
    return TweedieNMF.from_dict(values)


def component_names(model: TweedieNMF | GaussianMF) -> tuple[str, ...] | None:
    """Names of the columns of factors that hold more than components."""
    if isinstance(model, TweedieNMF):
        return None
    extra = ("row_bias", "column_bias") if model.biases else ("level",)
    return (*map(str, range(model.n_components)), *extra)


def kept_index(options: RunOptions) -> NDArray[np.int64]:
    """Cycle numbers of the draws that the results hold."""
    cycles = options.kept_cycles() if options.keep_every else options.draw_cycles()
    return np.array(cycles, dtype=np.int64)


def observed_with(data: BlockedData, stored: bool) -> NDArray[Any] | None:
    """The data as results keep them: dense ones that are in memory, and small or in a store."""
    size = data.shape[0] * data.shape[1] * data.dtype.itemsize
    kept = (stored or size <= SMALL_DATA) and not (data.is_sparse or data.source.lazy)
    return data.to_numpy() if kept else None


def coords_of(data: BlockedData) -> dict[str, Any]:
    """The data's own labels of rows and columns, as a `RunSpec` takes them."""
    labels = data.labels
    return {
        **{name: (labels.row_dim, values) for name, values in labels.row_coords.items()},
        **{name: (labels.col_dim, values) for name, values in labels.col_coords.items()},
    }


def _spec(setting: Setting, observed: NDArray[Any] | None) -> RunSpec:
    """What the run's results will hold, written down before the first draw."""
    data, model, options = setting.data, setting.model, setting.options
    index = kept_index(options)
    cells: tuple[Any, Any] = setting.cells or (None, None)
    return RunSpec(
        shape=(*data.shape, model.width),
        chains=options.chains,
        draws=len(index),
        warmup_draws=Driver(setting, MemorySink(), ignore).warmup_count(),
        dims=(data.labels.row_dim, data.labels.col_dim),
        coords=coords_of(data),
        components=component_names(model),
        dtype=options.dtype,
        keep="draws" if options.keep_every else "moments",
        has_coarse=len(setting.sampler.tracks) > 1,
        has_acceptance=bool(setting.sampler.statistics),
        monitor_rows=cells[0],
        monitor_columns=cells[1],
        draw_index=index,
        observed=observed,
        attrs=_attrs(setting),
    )


def _attrs(setting: Setting) -> dict[str, Any]:
    options = setting.options
    parts = setting.model.to_dict(), setting.sampler.to_dict(), options.to_dict()
    return {
        **first_attrs(setting.data, *parts, setting.executor),
        "keep": options.keep,
        "keep_every": options.keep_every,
        "draws": options.draws,
        "tune": options.tune,
        "thin": options.thin,
        "chains": options.chains,
    }


def first_attrs(
    data: BlockedData,
    model: dict[str, Any],
    sampler: dict[str, Any],
    options: dict[str, Any],
    executor: Executor,
) -> dict[str, Any]:
    """What results say of where they come from; ``options`` has ``seed`` and ``dtype``."""
    described = {
        "options": options,
        "model": model,
        "sampler": sampler,
        "source": {"kind": data.source.kind, "location": data.source.location},
    }
    return {
        "inference_library": "daskfactor",
        "inference_library_version": daskfactor.__version__,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "format_version": FORMAT_VERSION,
        "random_seed": str(options["seed"]),
        "model": json.dumps(model),
        "sampler": json.dumps(sampler),
        "data": json.dumps(
            {
                "shape": list(data.shape),
                "row_offsets": list(data.grid.rows.offsets),
                "column_offsets": list(data.grid.cols.offsets),
                "n_observed": data.total_observed,
                "mean": data.mean,
                "fingerprint": data.fingerprint,
                "unstored": data.unstored,
                "balance": data.row_order is not None,
                "allow_empty": bool(
                    (data.row_observed == 0).any() or (data.col_observed == 0).any()
                ),
            }
        ),
        "run": json.dumps(described),
        "dtype": options["dtype"],
        "executor": executor.name,
        "executor_reason": getattr(executor, "reason", "as asked for"),
        **machine_attrs(),
    }


def closing_attrs(state: RunState, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Attributes that are known at the end: hyperparameters, seconds, roll-backs.

    ``known``: what a store has already of a run that is complete, so that nothing was run now.
    """
    chains, known = state.chains, known or {}
    seconds = state.seconds + (0.0 if known else time.perf_counter() - state.started)
    busy = chains[0].setting.executor.report.utilisation
    return {
        **hyper_attrs(state),
        "sampling_time": max(seconds, known.get("sampling_time", 0.0)),
        "divergences": sum(len(chain.divergences) for chain in chains),
        "utilisation": known.get("utilisation", busy),
    }
