"""create_mesh: sizes and names, the order of the devices, and errors."""

import ast
import itertools
import math
import random

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType
from mock_devices import cpus, gpus, ids, sorted_ids, tpu_slices, tpus, v3_4x4

from partitioning import create_mesh

pytestmark = pytest.mark.core

# Sizes, names and types.


@pytest.mark.parametrize(
    'sizes, shape',
    [
        ((-1,), (8,)),
        ((2, -1), (2, 4)),
        ((-1, 8), (1, 8)),
        ((2, -1, 2), (2, 2, 2)),
        ((4, 2, -1), (4, 2, 1)),
        ((1, 2, 1, 2, 1, 2), (1, 2, 1, 2, 1, 2)),
        ((np.int64(2), -1), (2, 4)),
        ([4, 2], (4, 2)),
    ],
)
def test_sizes(sizes, shape):
    mesh = create_mesh(sizes, [f'axis{i}' for i in range(len(sizes))])
    assert mesh.devices.shape == shape
    assert ids(mesh) == np.arange(8).reshape(shape).tolist()


def test_a_string_is_one_name():
    """It is not split into letters."""
    assert create_mesh((8,), 'data').axis_names == ('data',)


def test_axis_types():
    auto, explicit, manual = AxisType.Auto, AxisType.Explicit, AxisType.Manual
    assert create_mesh((4, 2), ('x', 'y')).axis_types == (auto, auto)
    for given_types, expected in (
        (explicit, (explicit, explicit)),
        ((auto, explicit), (auto, explicit)),
        ([manual, auto], (manual, auto)),
        # Names, as configuration files write them.
        ('explicit', (explicit, explicit)),
        (['Auto', 'EXPLICIT'], (auto, explicit)),
        (['explicit'], (explicit, explicit)),
    ):
        assert create_mesh((4, 2), ('x', 'y'), axis_types=given_types).axis_types == expected


# Order.

MACHINES = [
    (jax.devices, (4, 2)),
    (lambda: cpus(4, 2), (2, 2, 2)),
    (lambda: gpus(6, 3), (3, 6)),
    (lambda: gpus(2, 3, domains=2), (4, 3)),
    (v3_4x4, (8, 4)),
    (v3_4x4, (4, 8)),
    (lambda: tpus((2, 2, 4), 'TPU v4'), (2, 2, 4)),
    (lambda: tpus((4, 4, 1), 'TPU v5 lite'), (2, 8)),
    (lambda: tpus((4, 4, 4), 'TPU v5'), (4, 16)),
    (lambda: tpus((2, 2, 2), 'TPU7x', 2), (2, 8)),
    (lambda: tpu_slices(2, (4, 4, 1), 'TPU v6 lite'), (2, 4, 4)),
    (lambda: tpus((4, 4, 1), 'TPU v5 lite')[3:], (13,)),
]


@pytest.mark.parametrize('machine, sizes', MACHINES)
def test_the_order_of_the_devices_argument_does_not_matter(machine, sizes):
    devices = machine()
    names = [f'axis{i}' for i in range(len(sizes))]
    mesh = create_mesh(sizes, names, devices=devices)
    assert mesh.devices.shape == sizes
    assert sorted_ids(mesh) == sorted(d.id for d in devices)
    shuffled = random.Random(0).sample(devices, len(devices))
    assert ids(create_mesh(sizes, names, devices=shuffled)) == ids(mesh)


@settings(max_examples=100)
@given(local=st.integers(1, 8), processes=st.integers(1, 8), data=st.data())
def test_the_last_axis_spans_few_hosts(local, processes, data):
    total = local * processes
    last = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    mesh = create_mesh((-1, last), ('data', 'model'), devices=gpus(local, processes))
    assert sorted_ids(mesh) == list(range(total))
    for row in mesh.devices:
        hosts = [d.process_index for d in row]
        # As many GPUs of each of its hosts as divide both the axis and the host.
        assert {hosts.count(h) for h in hosts} == {math.gcd(last, local)}


# Granules of other sizes.


# Errors, each a ValueError with the numbers.

AXIS_XY = {'axis_sizes': (4, 2), 'axis_names': ('x', 'y')}
ERRORS = {
    'product': ({'axis_sizes': (2, 3)}, ['(2, 3)', '6', '8', 'nearest that fits: (2, 4)']),
    'two of -1': ({'axis_sizes': (-1, -1)}, ['(-1, -1)', '2 sizes of -1']),
    '-1 beside 16': ({'axis_sizes': (16, -1)}, ['(16, -1)', 'multiple of 16', '8', 'fits: (8, 1)']),
    'zero': ({'axis_sizes': (0, 8)}, ['(0, 8)', 'the size 0 ', '>= 1']),
    'bool': ({'axis_sizes': (True, 8)}, ['(True, 8)', 'the size True ', 'integer']),
    'same name': ({'axis_names': ('x', 'x')}, ["('x', 'x')", "'x' appears twice"]),
    'few names': ({'axis_names': ('x',)}, ['2 sizes', "1 axis names ('x',)"]),
    'name of number': ({'axis_names': ('x', 3)}, ["('x', 3)", 'strings']),
    'empty name': ({'axis_names': ('x', '')}, ["('x', '')", 'non-empty']),
    'no devices': ({'devices': []}, ['devices is empty']),
    'twice': ({'devices': cpus(4, 1) * 2}, ['4 of the 4', 'device 0 2 times']),
    'many types': ({'axis_types': (AxisType.Auto,) * 3}, ['(Auto, Auto, Auto)', "('x', 'y')"]),
    'type of 1': ({'axis_types': 1}, ['axis_types=1']),
    'names of None': ({'axis_names': None}, ['axis names=None']),
    'no list of devices': ({'devices': 8}, ['must be JAX devices', 'not 8']),
    'two kinds': (
        {'devices': [*tpus((2, 2, 1), 'TPU v4'), *gpus(4, 2)[4:]]},
        ['NVIDIA H100 (gpu) and TPU v4 (tpu)'],
    ),
    'one wrong type': ({'axis_types': (AxisType.Auto, None)}, ['axis_types=(Auto, None)']),
    'granules of 3': ({'granule_size': 3}, ['granule_size=3', '8 devices']),
    'granules of 16': ({'granule_size': 16}, ['granule_size=16', '8 devices']),
    'granules of 0': ({'granule_size': 0}, ['granule_size=0', '>= 1']),
    'no axes': ({'axis_sizes': (), 'axis_names': ()}, ['axis_sizes=()']),
    'slices of 2 and 6': (
        {'devices': [*tpu_slices(2, (4, 2, 1), 'TPU v5 lite')][6:14]},
        ['unequal sizes, [2, 6]'],
    ),
    'hosts of 4 in 6': (
        {'axis_sizes': (4, 3), 'devices': gpus(4, 3), 'granule_size': 6},
        ['granule_size=6', '12 devices', 'processes of 4'],
    ),
    'granules of TPUs': (
        {'devices': tpus((2, 2, 2), 'TPU v4'), 'granule_size': 4},
        ['granule_size=4', 'TPUs know their slices'],
    ),
}


@pytest.mark.parametrize('case', ERRORS)
def test_errors(case):
    wrong, parts = ERRORS[case]
    with pytest.raises(ValueError) as error:
        create_mesh(**(AXIS_XY | wrong))
    for part in parts:
        assert part in str(error.value)


@settings(max_examples=100)
@given(
    number=st.integers(1, 48), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4).map(tuple)
)
def test_the_nearest_shape_fits(number, sizes):
    """Its product is the number of devices, and no other such shape has sizes of nearer ratios."""
    devices = cpus(number, 1)
    names = [f'axis{i}' for i in range(len(sizes))]
    if math.prod(sizes) == number:
        assert create_mesh(sizes, names, devices=devices).devices.shape == sizes
        return
    with pytest.raises(ValueError) as error:
        create_mesh(sizes, names, devices=devices)
    message = str(error.value)
    assert f'product {math.prod(sizes)}' in message and f'is {number};' in message
    nearest = ast.literal_eval(message.split('fits: ')[1])
    assert create_mesh(nearest, names, devices=devices).devices.shape == nearest

    def ratios(shape):
        return sum(abs(math.log(a / b)) for a, b in zip(shape, sizes, strict=True))

    divisors = [n for n in range(1, number + 1) if number % n == 0]
    for other in itertools.product(divisors, repeat=len(sizes)):
        if math.prod(other) == number:
            assert ratios(nearest) <= ratios(other) + 1e-5


def test_many_axes_get_no_suggestion():
    """There are too many shapes to try, but the message has the numbers."""
    with pytest.raises(ValueError, match='product 64, but the number of devices is 8'):
        create_mesh((2,) * 6, list('abcdef'))
