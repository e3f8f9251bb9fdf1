"""Bayesian non-negative matrix factorization for data that does not fit in memory.

The public names are listed in ``__init__.pyi`` and loaded on first use, so that
``import daskfactor`` is fast.
"""

import gc
from typing import Any

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.2.0.dev0"
REMOVED = {
    "HMC": "use BlockHMC(), which is also exact, and faster; 0.1.0 is the last version with HMC"
}
"""Public names of earlier versions, and their replacements."""


def __getattr__(name: str) -> Any:
    if name in REMOVED:
        raise AttributeError(f"daskfactor no longer has {name}: {REMOVED[name]}")
    # Objects made while modules load are permanent: collecting garbage among them takes a third
    # of the time of a first call.
    collects = gc.isenabled()
    gc.disable()
    try:
        value = globals()[name] = _load(name)
        return value
    finally:
        if collects and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # all objects move to the oldest generation, which is collected rarely
        if collects:
            gc.enable()


del lazy_loader
