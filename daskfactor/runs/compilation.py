"""Compile the kernels before the run, so that the wait has a name."""

from dataclasses import replace

import numpy as np

from daskfactor.engine.progress import OnEvent, RunEvent
from daskfactor.engine.serial import SerialExecutor
from daskfactor.io.sources import as_blocks
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.runs.chain import Setting
from daskfactor.runs.chains import make_chain
from daskfactor.runs.options import RunOptions

_compiled: set[tuple[object, ...]] = set()


def compile_kernels(setting: Setting, on_event: OnEvent) -> None:
    """Run a 3 x 3 matrix through the same kernels, once per kind of run and process."""
    dtype = setting.options.dtype
    kind = (setting.model.beta, dtype, setting.sampler.majorizer, len(setting.sampler.tracks))
    if kind in _compiled:
        return
    on_event(RunEvent("compile", 0, 1, message="once per process"))
    options = RunOptions(2, 2, 1, 1, 0, "draws", 1, dtype)
    data = as_blocks(
        np.array([[1.0, 2.0, np.nan], [3.0, 1.0, 2.0], [2.0, 2.0, 1.0]]), 1, dtype=dtype
    )
    model = TweedieNMF(2, beta=setting.model.beta, dispersion=1.0, rate_w=1.0, rate_h=1.0)
    cells = (np.zeros(1, np.int64), np.full(1, 2, np.int64))
    sampler = replace(setting.sampler, warm_start=2)
    chain = make_chain(Setting(data, model, sampler, options, SerialExecutor(), cells), 0)
    chain.warm_start()
    for end in (2, 4):
        chain.advance(end)
    _compiled.add(kind)
    on_event(RunEvent("compile", 1, 1))
