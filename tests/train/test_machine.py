"""The devices and processes that a run uses."""

import os
import subprocess
import sys

import jax
import pytest
from absl.testing import flagsaver

from train.cli import main
from train.errors import ConfigError
from train.machine import devices as machine
from train.processes import joining
from train.processes.joining import find_address
from train.processes.wire import Limits

COUNTS = ('XLA_FLAGS', 'JAX_NUM_CPU_DEVICES')
PROGRAM = """
import sys, jax
from train.machine import devices as machine
machine.use_virtual_devices(eval(sys.argv[1]))
print(jax.device_count())
"""


@pytest.mark.long
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
    clean = {k: v for k, v in os.environ.items() if k not in COUNTS}
    run = subprocess.run(
        [sys.executable, '-c', PROGRAM, argument],
        capture_output=True,
        text=True,
        env={**clean, 'JAX_PLATFORMS': 'cpu', **environment},
    )
    assert run.stdout.split() == [str(devices)], run.stderr[-2000:]


def test_two_device_counts_conflict(monkeypatch):
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '3')
    with pytest.raises(ConfigError, match=r'--cpu_devices=2 .* JAX_NUM_CPU_DEVICES'):
        machine.use_virtual_devices(2)


def fail_to_initialize(address, *others, **limits):
    assert address.startswith('127.0.0.1:')  # the relay of this process
    assert others == (2, 1) and limits['initialization_timeout'] == 20
    raise RuntimeError('no route')


def test_the_flags_of_a_process_reach_jax(monkeypatch, capsys):
    given = []
    monkeypatch.setattr(machine, 'use_virtual_devices', given.append)
    monkeypatch.setattr(joining, 'open_channel', lambda *args: given.extend(args) or (None, 1))
    monkeypatch.setattr(jax.distributed, 'initialize', fail_to_initialize)
    flags = ['--coordinator_address=host:1', '--process_count=2', '--process_index=1']
    with flagsaver.flagsaver():
        assert main(['train', '--cpu_devices=4', *flags, '--init_seconds=5']) == 75
    assert 'cannot connect process 1 of 2 at host:1 (no route)' in capsys.readouterr().err
    assert given == [4, 'host:1', 2, 1, Limits(init_seconds=5), ()]


@pytest.mark.parametrize('given', [('host:1', None, None), (None, 2, 0), ('host:1', 2, None)])
def test_the_three_flags_of_a_process_must_be_given_together(given):
    flags = r'--coordinator_address.*--process_count.*--process_index'
    with pytest.raises(ConfigError, match=flags):
        find_address(*given)


@pytest.mark.parametrize('index', [2, 5, -1])
def test_a_process_index_out_of_range(index):
    with pytest.raises(ConfigError, match=rf'--process_index={index} .*0 to 1.*count=2'):
        find_address('127.0.0.1:1', 2, index)


@pytest.mark.parametrize('maximum, size', [(1, 1), (2, 2), (16, 8), (6, 2)])
def test_num_partitions_that_fit(maximum, size):
    assert jax.device_count() == 8
    assert machine.num_partitions_that_fit(maximum) == size


@pytest.mark.parametrize('joined', [False, True])
def test_programs_on_cpus_wait_for_each_other_where_processes_have_joined(monkeypatch, joined):
    # Also if there is only one process: the collectives are the same.
    monkeypatch.setattr(jax.distributed, 'is_initialized', lambda: joined)
    assert jax.process_count() == 1
    assert machine.must_wait_for_steps() == joined
