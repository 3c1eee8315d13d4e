"""What the step-time model is given for measured rows. Expected values are counted by hand."""

import pytest

from benchmarks.measured_steps.cases import (
    family_of,
    network_bandwidth_of,
    software_of,
    work_of,
)
from benchmarks.measured_steps.records import TRACED, read_records, record_work
from benchmarks.measured_steps.rows import load_rows
from meshwright import Collective
from meshwright.time import Work

ROWS = {row.name: row for row in load_rows()}
RECORD = {
    'chip': 'v5e',
    'cycles': {'matmul': 3_000_000_000, 'copy': 600_000_000, 'reduce': 150_000_000},
    'matmul_flops': 1e15,
    'device_bytes': 7e9,
    'host_bytes': 0.0,
    'kernels': [{'name': 'flash', 'flops': 1e12, 'nbytes': 1e9, 'count': 4}],
    'collectives': [
        {
            'kind': 'all-reduce',
            'network': 'dcn',
            'axes': ['data'],
            'group_size': 2,
            'asynchronous': True,
            'arrays': [],
            'wire_bytes': 1e8,
            'count': 3,
        }
    ],
}


@pytest.mark.parametrize(
    ('name', 'bandwidth'),
    [
        ('h100-64-llama2-7b-maxtext', 800e9 / 8 / 8),  # 800 Gbit/s for a host of 8
        ('h100-256-llama2-7b-a3mega', 1600e9 / 8 / 8),
        ('h100-256-fuji7b-v1', 400e9 / 8),  # 400 GB/s for a host of 8
        ('h100-128-llama3.1-8b-titan-eager', 400e9 / 8),  # 400 Gbit/s for a GPU
        ('v5e-512-maxtext-16b', None),
    ],
)
def test_the_network_of_hosts(name, bandwidth):
    assert network_bandwidth_of(ROWS[name]) == bandwidth


def test_compiled_steps_have_the_estimates_of_the_compiler():
    work = work_of(RECORD, copies=2, from_copies=2, origin='compiler')
    assert work.matmul_seconds == pytest.approx(2.0), '1.5 GHz'
    assert work.other_seconds == pytest.approx(0.5)
    assert (work.matmul_flops, work.other_bytes) == (1e15, 7e9)
    assert work.kernels[0].count == 4


def test_traced_steps_have_none():
    work = work_of(RECORD | {'cycles': {}}, copies=2, from_copies=2, origin='jaxpr')
    assert work.matmul_seconds is None and work.other_seconds is None


def test_more_copies_of_the_model_reduce_more():
    """A ring of 2 sends half of the array twice, one of 8 seven eighths."""
    work = work_of(RECORD, copies=8, from_copies=2, origin='compiler')
    (reduction,) = work.collectives
    assert (reduction.group_size, reduction.count) == (8, 3)
    assert reduction.wire_bytes == pytest.approx(1e8 * (7 / 8) / (1 / 2))


def test_families_are_models_on_a_chip():
    assert family_of(ROWS['v5e-256-maxtext-16b']) == family_of(ROWS['v5e-4096-maxtext-16b'])
    assert family_of(ROWS['v5e-256-maxtext-16b']) != family_of(ROWS['v5e-256-maxtext-32b'])
    assert family_of(ROWS['v6e-8-mistral-7b']) != family_of(ROWS['v6e-8-llama3.1-8b'])
    long = 'tpu7x-256-llama3.1-70b-128k-bf16'
    assert family_of(ROWS[long]) != family_of(ROWS['tpu7x-256-llama3.1-70b-8k-bf16'])


def test_other_frameworks_have_factors_on_gpus_only():
    assert software_of(ROWS['h100-8-llama2-7b-maxtext']) == ''
    assert software_of(ROWS['h100-256-fuji7b-v1']) == 'axlearn'
    assert software_of(ROWS['h100-8-llama3.1-8b-titan-compile']) == 'torchtitan'
    assert software_of(ROWS['h100-8-llama3.1-8b-titan-eager']) == 'torchtitan without compiler'
    assert software_of(ROWS['v5p-256-fuji7b-v1']) == ''


def test_exchanges_of_one_kind_are_recorded_together():
    gathers = [
        Collective(
            kind='all-gather',
            network='ici',
            axes=('fsdp',),
            group_size=8,
            arrays=('bf16[4]',),
            wire_bytes=size,
            count=count,
            op_name='',
            source='',
        )
        for size, count in ((100.0, 3), (500.0, 1))
    ]
    work = Work(
        origin='jaxpr',
        chip='v5e',
        matmul_flops=1.0,
        matmul_seconds=None,
        other_seconds=None,
        other_bytes=2.0,
        kernels=(),
        collectives=tuple(gathers),
        host_bytes=3.0,
    )
    (entry,) = record_work(work)['collectives']
    assert (entry['count'], entry['wire_bytes']) == (4, 200.0)


def test_traced_steps_have_the_work_of_their_rows():
    """8 FLOPs per parameter and token, except for the last product of the 32 layers.

    Nothing in the backward pass needs the result of that product, so it is not recomputed.
    """
    record = read_records(TRACED)['v5e-256-maxtext-32b']
    row = ROWS['v5e-256-maxtext-32b']
    tokens = row['global_batch'] * row['seq_len'] / 256
    flops = (8 * row.params_total - 2 * 32 * 10_240 * 32_768) * tokens
    assert record['matmul_flops'] == pytest.approx(flops, rel=0.01)
    gathered = sum(
        c['wire_bytes'] * c['count'] for c in record['collectives'] if c['kind'] == 'all-gather'
    )
    # Weights of two bytes are gathered forward and backward.
    assert gathered == pytest.approx(2 * 2 * row.params_total * 255 / 256, rel=0.05)
