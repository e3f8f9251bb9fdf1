"""Every error and warning of the package, in one place.

Each error also inherits the builtin that fits, so ``except ValueError`` keeps
working, and each message says what was got, what is allowed and what to do.
"""


class DaskfactorError(Exception):
    """Base of all errors raised on purpose by this package."""


class DataError(DaskfactorError, ValueError):
    """The data matrix cannot be used as given."""


class ModelError(DaskfactorError, ValueError):
    """A model was asked for that does not exist or does not fit the data."""


class GridError(DaskfactorError, ValueError):
    """A block grid, part or schedule is impossible."""


class OptionError(DaskfactorError, ValueError):
    """An argument of a public function is outside what is allowed."""


class DivergenceError(DaskfactorError, FloatingPointError):
    """A chain kept diverging although its step was reduced again and again."""


class StoreError(DaskfactorError, OSError):
    """A run store could not be read or written."""


class StoreFormatError(StoreError, ValueError):
    """A store exists but is not a run store, is damaged, or is of a newer version."""


class EngineError(DaskfactorError, RuntimeError):
    """A block update failed inside an executor; the message names the block."""


class DaskfactorWarning(UserWarning):
    """Base of all warnings issued by this package."""


class DataWarning(DaskfactorWarning):
    """The data were usable, but a choice was made that the reader should know of."""


class SamplingWarning(DaskfactorWarning):
    """Sampling succeeded, but something about it should be known."""
