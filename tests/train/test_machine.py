"""Which devices a run takes."""

import os
import subprocess
import sys

import jax
import pytest

from train import machine
from train.errors import ConfigError


@pytest.mark.parametrize(
    'argument, environment, devices',
    [
        ('None', {}, 8),
        ('2', {}, 2),
        ('None', {'XLA_FLAGS': '--xla_force_host_platform_device_count=4'}, 4),
        ('None', {'JAX_NUM_CPU_DEVICES': '3'}, 3),
    ],
)
def test_virtual_devices(argument, environment, devices):
    code = (
        'from train import machine; import jax; '
        f'machine.use_virtual_devices({argument}); print(jax.device_count())'
    )
    clean = {k: v for k, v in os.environ.items() if k not in ('XLA_FLAGS', 'JAX_NUM_CPU_DEVICES')}
    run = subprocess.run(
        [sys.executable, '-c', code],
        capture_output=True,
        text=True,
        env={**clean, 'JAX_PLATFORMS': 'cpu', **environment},
    )
    assert run.stdout.split() == [str(devices)], run.stderr[-2000:]


def test_two_counts_of_devices_are_one_too_many(monkeypatch):
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '3')
    with pytest.raises(ConfigError, match='--cpu_devices=2 and a count in JAX_NUM_CPU_DEVICES'):
        machine.use_virtual_devices(2)


@pytest.mark.parametrize('given', [('host:1', None, None), (None, 2, 0), ('host:1', 2, None)])
def test_processes_need_all_three_flags(given):
    with pytest.raises(ConfigError, match='go together'):
        machine.join_processes(*given, False)


def test_a_process_index_beyond_the_count():
    with pytest.raises(ConfigError, match='--process_index=5 is not below 2'):
        machine.join_processes('127.0.0.1:1', 2, 5, False)


@pytest.mark.parametrize('most, fits', [(1, 1), (2, 2), (16, 8), (6, 2)])
def test_a_model_axis_that_fits(most, fits):
    assert jax.device_count() == 8
    assert machine.num_partitions_that_fit(most) == fits
