"""A call that is refused, in one line."""

import pytest


def refused(error, match, call, /, *args, **options):
    """Check that a call raises an error with these words; with any words if they are None."""
    with pytest.raises(error, match=match):
        call(*args, **options)
