"""Every test sees 8 virtual CPU devices, on any machine."""

import os

import gin
import jax
import pytest

os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # for the programs that tests start
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)


@pytest.fixture(autouse=True, scope='session')
def _own_cache(tmp_path_factory):
    """Token indices are not kept among the user's."""
    before = os.environ.get('XDG_CACHE_HOME')
    os.environ['XDG_CACHE_HOME'] = str(tmp_path_factory.mktemp('cache'))
    yield
    if before is None:
        del os.environ['XDG_CACHE_HOME']
    else:
        os.environ['XDG_CACHE_HOME'] = before


@pytest.fixture(autouse=True)
def _own_gin_configuration():
    """No test sees the gin bindings of another."""
    yield
    gin.clear_config()
