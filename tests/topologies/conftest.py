"""Real descriptions of machines."""

import pytest


@pytest.fixture(autouse=True)
def _no_xla_flags(monkeypatch):
    """The flags for CPUs in tests/conftest.py are unknown to the compilers of TPUs and GPUs."""
    monkeypatch.delenv('XLA_FLAGS', raising=False)
