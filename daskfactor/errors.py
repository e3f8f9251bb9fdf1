"""Errors and warnings of the package.

Each error also inherits from the matching builtin, so that ``except ValueError`` works. Each
message names the argument, the value that was passed, the allowed values, and a remedy.
"""


class DaskfactorError(Exception):
    """Base class of the errors that this package raises on purpose."""


class DataError(DaskfactorError, ValueError):
    """Data that cannot be used."""


class ModelError(DaskfactorError, ValueError):
    """A model that does not exist, or that does not fit the data."""


class GridError(DaskfactorError, ValueError):
    """An impossible block grid, part or schedule."""


class OptionError(DaskfactorError, ValueError):
    """An argument of a public function that is not allowed."""


class DivergenceError(DaskfactorError, FloatingPointError):
    """A chain that kept diverging although its step was reduced several times."""


class StoreError(DaskfactorError, OSError):
    """A store that cannot be read or written."""


class StoreFormatError(StoreError, ValueError):
    """A store that is damaged, of a newer version, or not a store of this package."""


class EngineError(DaskfactorError, RuntimeError):
    """A block update that failed inside an executor; the message names the block."""


class DaskfactorWarning(UserWarning):
    """Base class of the warnings that this package issues."""


class DataWarning(DaskfactorWarning):
    """A choice that was made about usable data, which the user should know."""


class SamplingWarning(DaskfactorWarning):
    """A property of a successful run that the user should know."""
