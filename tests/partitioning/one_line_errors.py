"""Calls that must fail with one line."""

import pytest


def error_of(call, *args):
    """The message of the ValueError that a call raises, and the cause of the error."""
    with pytest.raises(ValueError) as caught:
        call(*args)
    message = str(caught.value)
    assert '\n' not in message
    return message, caught.value.__cause__
