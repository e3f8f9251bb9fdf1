"""Compile the kernels before the run, so that the wait has a name."""

import numpy as np
from scipy import sparse

from daskfactor.data.sources import as_blocks
from daskfactor.executors import SerialExecutor
from daskfactor.inference.chain import Setting
from daskfactor.inference.options import RunOptions
from daskfactor.progress import OnEvent, RunEvent

_compiled: set[tuple[object, ...]] = set()

TINY = np.array([[1.0, 2.0, np.nan], [3.0, 1.0, 2.0], [2.0, 2.0, 1.0]])


def compile_kernels(setting: Setting, on_event: OnEvent) -> None:
    """Run a 3 x 3 matrix through the same kernels, once per kind of run and process."""
    dtype, data = setting.options.dtype, setting.data
    kind = (
        type(setting.model),
        setting.model.likelihood,
        dtype,
        data.is_sparse and data.unstored,
        setting.sampler.for_compilation(),
    )
    if kind in _compiled:
        return
    on_event(RunEvent("compile", 0, 1, message="once per process"))
    options = RunOptions(2, 2, 1, 1, 0, "draws", 1, dtype)
    matrix = sparse.csr_array(TINY) if data.is_sparse else TINY
    with as_blocks(matrix, 1, dtype=dtype, unstored=data.unstored) as tiny:
        cells = (np.zeros(1, np.int64), np.full(1, 2, np.int64))
        small = Setting(
            tiny,
            setting.model.for_compilation(),
            setting.sampler.for_compilation(),
            options,
            SerialExecutor(),
            cells,
        )
        chain = small.chain(0)
        chain.start()
        for end in (2, 4):
            chain.advance(end)
    _compiled.add(kind)
    on_event(RunEvent("compile", 1, 1))
