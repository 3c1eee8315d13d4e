"""Every test sees 8 virtual CPU devices, on any machine."""

import os

import gin
import jax
import pytest

os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # for the programs that tests start
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)


@pytest.fixture(autouse=True)
def _own_gin_configuration():
    """No test sees the gin bindings of another."""
    yield
    gin.clear_config()
