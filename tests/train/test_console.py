"""What a run says of its parameters."""

import io

import jax
import numpy as np
import pytest
from rich.console import Console

from partitioning import PjitPartitioner
from partitioning.plan import ResolvedPlan
from partitioning.plan.audit import audit_state
from train.console import RunConsole

pytestmark = pytest.mark.core

PARAMS = {'w': jax.ShapeDtypeStruct((8, 6), np.float32), 'b': jax.ShapeDtypeStruct((6,), 'float32')}
RULES = [('embed', ('data', 'model')), ('kv', None), ('batch', 'data')]


def said(partitioner):
    """The third column of each parameter's line."""
    out = io.StringIO()
    console = RunConsole(Console(file=out, width=200))
    console.layouts(audit_state(PARAMS, partitioner.resolve(PARAMS)).arrays)
    _heading, _columns, *lines = out.getvalue().splitlines()
    # cells are apart by two spaces, what stands in one by a single space
    cells = [[cell.strip() for cell in line.split('  ') if cell.strip()] for line in lines]
    return {name: axes for name, _shape, axes, *_ in cells}


def test_logical_axes_stand_beside_those_of_the_mesh():
    names = [('w', ('embed', 'kv')), ('b', ('kv',))]
    named = PjitPartitioner(
        num_partitions=2, logical_axis_rules=RULES, params_axes_names_override=names
    )
    assert said(named) == {'w': 'embed:data+model kv', 'b': 'kv'}
    plan = ResolvedPlan.of(named.resolve(PARAMS))
    planned = PjitPartitioner(mesh=named.mesh, logical_axis_rules=RULES, plan=plan)
    assert all('None' not in axes and '(' not in axes for axes in said(planned).values())
    assert 'data+model' in said(planned)['w']
