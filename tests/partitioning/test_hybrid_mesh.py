"""create_hybrid_mesh: each axis has a size within slices (or hosts) and a size over them."""

import random

import numpy as np
import pytest
from mock_devices import cpus, gpus, ids, tpus, two_slices_of_v4

from partitioning import create_hybrid_mesh

pytestmark = pytest.mark.core


def hybrid(ici, dcn, devices, **options):
    return create_hybrid_mesh(
        ici, dcn, [f'axis{i}' for i in range(len(ici))], devices=devices, **options
    )


@pytest.mark.parametrize(
    'ici, dcn, expected',
    [
        ((2, 2), (2, 1), [[2, 1], [0, 3], [4, 7], [6, 5]]),
        ((2, 2), (1, 2), [[2, 1, 4, 7], [0, 3, 6, 5]]),
        ((1, 4), (2, 1), [[2, 0, 1, 3], [4, 6, 7, 5]]),
    ],
)
def test_orders_of_two_slices(ici, dcn, expected):
    devices = two_slices_of_v4()
    assert ids(hybrid(ici, dcn, devices)) == expected
    assert ids(hybrid(ici, dcn, devices[::-1])) == expected
    assert ids(hybrid(ici, dcn, devices[4:] + devices[:4])) == expected
    assert ids(hybrid(ici, dcn, random.Random(0).sample(devices, 8))) == expected
    # -1 for whatever remains, in either shape.
    for axis in (0, 1):
        rest = tuple(-1 if i == axis else n for i, n in enumerate(ici))
        assert ids(hybrid(rest, dcn, devices)) == expected
        over = tuple(-1 if i == axis else n for i, n in enumerate(dcn))
        assert ids(hybrid(ici, over, devices)) == expected
        assert ids(hybrid(rest, over, devices)) == expected


# Processes and other granules.


@pytest.mark.parametrize('machine', [cpus, gpus])
def test_processes_are_granules_off_the_torus(machine):
    devices = machine(4, 4)
    mesh = hybrid((2, 2), (2, 2), devices[::-1])
    assert ids(mesh) == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert ids(hybrid((1, 4), (4, 1), devices)) == np.arange(16).reshape(4, 4).tolist()


def test_processes_of_a_slice_as_granules():
    """The slice has two hosts, and each host is a plane of four chips."""
    devices = tpus((2, 2, 2), 'TPU v4')
    mesh = hybrid((1, 4), (2, 1), devices, process_is_granule=True)
    assert [{d.process_index for d in row} for row in mesh.devices] == [{0}, {1}]
    assert ids(mesh) == [[0, 2, 1, 3], [4, 6, 5, 7]]
    with pytest.raises(ValueError, match='number of slices is 1'):
        hybrid((1, 4), (2, 1), devices)


# Errors.


@pytest.mark.parametrize(
    'ici, dcn, devices, options, parts',
    [
        ((2, 2), (2, 1, 1), two_slices_of_v4(), {}, ['(2, 2) has 2', '(2, 1, 1) has 3']),
        (
            *((2, 2), (1, 1), two_slices_of_v4(), {}),
            ['dcn_mesh_shape (1, 1)', 'product 1', 'number of slices is 2', 'fits: (2, 1)'],
        ),
        (
            *((2, 2), (2, 1), two_slices_of_v4()[:4], {}),
            ['dcn_mesh_shape (2, 1)', 'product 2', 'number of slices is 1', 'fits: (1, 1)'],
        ),
        (
            *((2, 2), (4, 1), two_slices_of_v4(), {}),
            ['dcn_mesh_shape (4, 1)', 'product 4', 'number of slices is 2', 'fits: (2, 1)'],
        ),
        (
            *((4, 2), (2, 1), two_slices_of_v4(), {}),
            ['ici_mesh_shape (4, 2)', 'product 8', '2 slices is 4', 'fits: (2, 2)'],
        ),
        ((2, 2), (-1, -1), two_slices_of_v4(), {}, ['dcn_mesh_shape (-1, -1)', '2 sizes of -1']),
        ((-1, -1), (2, 1), two_slices_of_v4(), {}, ['ici_mesh_shape (-1, -1)', '2 sizes of -1']),
        ((3, -1), (2, 1), two_slices_of_v4(), {}, ['(3, -1)', 'multiple of 3', 'is 4']),
        ((2, 2), (3, -1), two_slices_of_v4(), {}, ['(3, -1)', 'multiple of 3', 'is 2']),
        ((2, 2), (0, 2), two_slices_of_v4(), {}, ['dcn_mesh_shape (0, 2)', 'the size 0 ']),
        ((2.0, 2), (2, 1), two_slices_of_v4(), {}, ['ici_mesh_shape (2.0, 2)', 'the size 2.0 ']),
        ((2, 2), (2, True), two_slices_of_v4(), {}, ['(2, True)', 'the size True ']),
        ((2, 2), (2, 1), two_slices_of_v4()[:7], {}, ['unequal', '[4, 3]']),
        ((2, 2), (2, 1), [], {}, ['devices is empty']),
        ((2, 2), (2, 1), two_slices_of_v4() * 2, {}, ['8 of the 8']),
        ((8, 4), (2, 1), gpus(8, 2), {}, ['(8, 4)', '32', '2 processes is 8', 'fits: (2, 4)']),
        ((2, 4), (4, 1), gpus(8, 2), {}, ['(4, 1)', 'number of processes is 2', 'fits: (2, 1)']),
        (
            *((2, 4), (4, 1), gpus(8, 2), {'granule_size': 4}),
            ['ici_mesh_shape (2, 4)', '4 granules is 4', 'fits: (1, 4)'],
        ),
        (
            *((2, 2), (2, 2), gpus(8, 2), {'granule_size': 4, 'process_is_granule': True}),
            ['granule_size=4', 'process_is_granule=True'],
        ),
        ((2, 8), (1, 1), gpus(8, 2), {'granule_size': 8}, ['number of granules is 2']),
        *(
            ((2, 8), (1, 1), gpus(8, 2), {'process_is_granule': x}, [f'process_is_granule={x!r}'])
            for x in ('no', 2)
        ),
        ((2, 2), (2, 2), gpus(8, 2), {'granule_size': 5}, ['granule_size=5', '16 devices']),
        ((2, 2), (2, 1), two_slices_of_v4(), {'granule_size': 4}, ['granule_size=4', 'TPUs']),
        ((2, 2), (2, 1), two_slices_of_v4(), {'axis_types': 'autos'}, ["axis_types='autos'"]),
    ],
)
def test_shapes_that_do_not_fit(ici, dcn, devices, options, parts):
    with pytest.raises(ValueError) as error:
        hybrid(ici, dcn, devices, **options)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize('names', [('a',), ('a', 'b', 'c'), ('a', 'a'), ('a', None)])
def test_names_that_do_not_fit(names):
    with pytest.raises(ValueError, match='axis name'):
        create_hybrid_mesh((2, 2), (2, 1), names, devices=two_slices_of_v4())
