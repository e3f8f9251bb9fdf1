"""Functions that compiled functions alone call, for tests to call from Python."""

import numba


def called(function):
    """A compiled function that does no more than to call an inner one."""

    @numba.njit
    def call(*arguments):
        return function(*arguments)

    return call
