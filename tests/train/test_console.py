"""What a run prints about its parameters."""

import io

import jax
import numpy as np
import pytest
from rich.console import Console

from partitioning import PjitPartitioner
from train.console import RunConsole, format_bytes

pytestmark = pytest.mark.core

PARAMS = {'w': jax.ShapeDtypeStruct((8, 6), np.float32), 'b': jax.ShapeDtypeStruct((6,), 'float32')}
RULES = [('embed', ('data', 'model')), ('kv', None), ('batch', 'data')]


def printed_axes(partitioner):
    """Returns the logical and mesh axes that the table shows for each parameter."""
    out = io.StringIO()
    console = RunConsole(Console(file=out, width=200))
    console.parameters(partitioner.resolve(PARAMS).rows)
    _heading, _columns, *lines = out.getvalue().splitlines()
    # Two spaces separate cells; one space separates the words of a cell.
    cells = [[cell.strip() for cell in line.split('  ') if cell.strip()] for line in lines]
    return {name: axes for name, _shape, axes, *_ in cells}


def test_a_long_line_is_wrapped_only_by_a_terminal():
    out = io.StringIO()
    RunConsole(Console(file=out, width=20)).say('word ' * 100)
    assert out.getvalue() == 'word ' * 100 + '\n'


def test_the_table_shows_logical_axes_with_their_mesh_axes():
    names = [('w', ('embed', 'kv')), ('b', ('kv',))]
    named = PjitPartitioner(
        num_partitions=2, logical_axis_rules=RULES, params_axes_names_override=names
    )
    assert printed_axes(named) == {'w': 'embed:data+model kv', 'b': 'kv'}
    plan = named.resolve(PARAMS)
    planned = PjitPartitioner(mesh=named.mesh, logical_axis_rules=RULES, plan=plan)
    assert all('None' not in axes and '(' not in axes for axes in printed_axes(planned).values())
    assert 'data+model' in printed_axes(planned)['w']


@pytest.mark.parametrize(
    'count, text',
    [
        (0, '0 bytes'),
        (1, '1 byte'),
        (768, '768 bytes'),
        (98_304, '98.3 kB'),
        (3_609_088, '3.6 MB'),
        (2**30 - 1, '1,073.7 MB'),
        (2.3 * 2**30, '2.30 GiB'),
        (2**42, '4,096.00 GiB'),
    ],
)
def test_bytes_for_people(count, text):
    assert format_bytes(count) == text
