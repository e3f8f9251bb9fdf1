"""What is refused, in a line."""

import pytest


def refused(error, match, call, /, *given, **options):
    """Assert that a call raises an error whose message matches."""
    with pytest.raises(error, match=match):
        call(*given, **options)
