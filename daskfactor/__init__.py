"""Bayesian non-negative matrix factorization for data that does not fit in memory.

Public names stand in ``__init__.pyi`` beside this file, and are loaded when they are first
used, so that ``import daskfactor`` is immediate.
"""

import gc
from typing import Any

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.2.0.dev0"
REMOVED = {
    "HMC": "use BlockHMC(), which is exact, too, and faster; 0.1.0 is the last version that has it"
}
"""Public names of earlier versions, and what to do without them."""


def __getattr__(name: str) -> Any:
    if name in REMOVED:
        raise AttributeError(f"daskfactor has no {name} any more: {REMOVED[name]}")
    # What modules make while they are loaded stays: looking through it again and again for
    # garbage is a third of the time that a first call takes.
    collects = gc.isenabled()
    gc.disable()
    try:
        found = globals()[name] = _load(name)
        return found
    finally:
        if collects and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # all that there is counts as old: looked through now and then
        if collects:
            gc.enable()


del lazy_loader
