"""Puts the GPU that is none where the package looks for one, for as long as a test lasts."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from daskfactor.kernels.cuda import device
from tests.kernels.cuda import fake

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@contextmanager
def borrowed() -> Iterator[Any]:
    """Give a `Device` that runs kernels on this processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", fake.cupy())
        patch.setattr(device.Device, "lanes", 1)
        patch.setattr(device, "MOST_GROUPS", 4)
        device.current.cache_clear()
        try:
            yield device.current()
        finally:
            device.current.cache_clear()
