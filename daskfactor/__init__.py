"""Bayesian non-negative matrix factorization for data that does not fit in memory.

Public names stand in ``__init__.pyi`` beside this file, and are loaded when they are first
used, so that ``import daskfactor`` is immediate.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.2.0.dev0"

del lazy_loader
