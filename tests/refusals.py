"""A call that is refused, in one line."""

import pytest


def refused(error, match, call, /, *args, **options):
    """Check that a call raises an error with these words, any if they are None; return its text."""
    with pytest.raises(error, match=match) as found:
        call(*args, **options)
    text = str(found.value)
    del found  # whose traceback would keep what the call had open
    return text
