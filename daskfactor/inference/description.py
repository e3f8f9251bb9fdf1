"""Describe a run in its results: where it comes from, what it will hold, how it ended."""

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

import daskfactor
from daskfactor.data.blocks import BlockedData
from daskfactor.executors import Executor
from daskfactor.inference.chain import Chain, Setting
from daskfactor.inference.options import RunOptions
from daskfactor.inference.run import Run
from daskfactor.machine import machine_attrs
from daskfactor.results.schema import BIASED, FORMAT_VERSION, STEPS, RunSpec

SMALL_DATA = 2**28
"""Bytes of data that a trace in memory holds a copy of; a store always does."""


def kept_index(options: RunOptions) -> NDArray[np.int64]:
    """List the cycle numbers of the draws that the results hold."""
    cycles = options.kept_cycles() if options.keep_every else options.draw_cycles()
    return np.array(cycles, dtype=np.int64)


def observed_with(data: BlockedData, stored: bool) -> NDArray[Any] | None:
    """Return the data if results keep them: dense, in memory, and small or for a store."""
    size = data.shape[0] * data.shape[1] * data.dtype.itemsize
    kept = (stored or size <= SMALL_DATA) and not (data.is_sparse or data.source.lazy)
    return data.to_numpy() if kept else None


def coords_of(data: BlockedData) -> dict[str, Any]:
    """Give the data's own labels of rows and columns as a `RunSpec` takes them."""
    labels = data.labels
    return {
        **{name: (labels.row_dim, values) for name, values in labels.row_coords.items()},
        **{name: (labels.col_dim, values) for name, values in labels.col_coords.items()},
    }


def run_spec(setting: Setting, stored: bool) -> RunSpec:
    """Write down before the first draw what the results will hold."""
    data, model, options = setting.data, setting.model, setting.options
    index = kept_index(options)
    cells: tuple[Any, Any] = setting.cells or (None, None)
    return RunSpec(
        shape=(*data.shape, model.width),
        chains=options.chains,
        draws=len(index),
        warmup_draws=sum(end <= options.tune for end in setting.ends),
        dims=(data.labels.row_dim, data.labels.col_dim),
        coords=coords_of(data),
        components=model.component_names(),
        dtype=options.dtype,
        keep="draws" if options.keep_every else "moments",
        has_coarse=len(setting.sampler.tracks) > 1,
        statistics=(*STEPS, *setting.sampler.statistics),
        monitor_rows=cells[0],
        monitor_columns=cells[1],
        draw_index=index,
        observed=observed_with(data, stored),
        attrs=_run_attrs(setting),
    )


def _run_attrs(setting: Setting) -> dict[str, Any]:
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
        BIASED: int(setting.sampler.biased),
    }


def first_attrs(
    data: BlockedData,
    model: dict[str, Any],
    sampler: dict[str, Any],
    options: dict[str, Any],
    executor: Executor,
) -> dict[str, Any]:
    """Tell where results come from; ``options`` has ``seed`` and ``dtype``."""
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


def closing_attrs(run: Run[Chain], known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Tell what is known at the end: hyperparameters, seconds, roll-backs.

    ``known``: what a store has already of a run that is complete, so that nothing was run now.
    """
    chains, known = run.members, known or {}
    seconds = run.seconds + (0.0 if known else time.perf_counter() - run.started)
    busy = chains[0].setting.executor.report.utilisation
    return {
        **run.attrs(),
        "sampling_time": max(seconds, known.get("sampling_time", 0.0)),
        "divergences": sum(len(chain.divergences) for chain in chains),
        "utilisation": known.get("utilisation", busy),
    }
