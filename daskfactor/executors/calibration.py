"""How long an operation takes where it is run."""

import time
from typing import Any

from daskfactor.executors.base import perform
from daskfactor.executors.serialization import Packed, open_reader
from daskfactor.executors.workspaces import local_workspace
from daskfactor.threads import single_threaded_blas

TIMES = 3


def time_operation(packed: Packed) -> float:
    """The task: seconds of one operation, on copies; the first run compiles and is not counted."""
    program, op, rows, cols, handle = packed.load()
    data: Any = open_reader(handle)
    best = float("inf")
    with single_threaded_blas():
        for number in range(TIMES + 1):
            own = rows.copy(), cols.copy()
            began = time.perf_counter()
            perform(op, program, data, *own, None, local_workspace())
            if number:
                best = min(best, time.perf_counter() - began)
    return best
