"""Causes that lie away from the exchange: across loops, in the batch, in the names of a parameter.

Rows are 32 over 4 devices of 'data', and the hidden layer is 256 over 2 devices of 'model'.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.lax import with_sharding_constraint as lay_out
from jax.sharding import PartitionSpec as P
from plain_steps import compile_plain, line_of, make_mesh

from meshwright.causes.layouts import KnownLayouts
from meshwright.causes.possible_changes import PossibleChanges
from meshwright.causes.value_graph import ValueGraph
from meshwright.causes.value_matching import Matcher
from meshwright.jaxpr.naming import trace_values
from meshwright.program.hlo_text import parse_hlo
from partitioning.plan.rows import make_row
from partitioning.rules import ResolvedDimension

PARAMETERS = {
    'up': ((3, 128, 256), P(None, None, 'model')),
    'down': ((3, 256, 128), P(None, 'model', None)),
}
BATCH = {'x': jax.ShapeDtypeStruct((32, 128), jnp.float32)}
ROWS = P('data', None)


@pytest.fixture(scope='module')
def mesh():
    return make_mesh()


def make_step(carry_spec=ROWS, roll=False):
    """A gradient step of three layers in a loop, whose carry is laid out by a spec."""

    def layer(x, w):
        x = lay_out(x, P('data', None))
        hidden = lay_out(jnp.tanh(x @ w['up']), P('data', 'model'))
        hidden = lay_out(jnp.roll(hidden, 1, axis=-1), P('data', 'model')) if roll else hidden
        return lay_out(x + hidden @ w['down'], carry_spec), None

    def step(params, batch):
        def loss(params):
            x = lay_out(batch['x'], P('data', None))
            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    return step, layer


def test_a_constraint_on_the_carry_of_a_loop_is_found_in_the_next_iteration(mesh):
    step, layer = make_step(carry_spec=P(None, None))
    function = compile_plain(step, mesh, PARAMETERS, BATCH)
    gathers = [(k, c) for k, c in function.explain().collectives if k.kind == 'all-gather']
    # What a device gathers is its 8 of 32 rows.
    assert gathers and {k.wire_bytes for k, _ in gathers} == {3 * 8 * 128 * 4}
    line = line_of(layer, 'carry_spec')
    blamed = [cause for _, cause in gathers if cause.source.endswith(line)]
    assert 2 * len(blamed) >= len(gathers)
    assert all("PartitionSpec('data', None)" in cause.change for cause in blamed)


@pytest.mark.parametrize('rows', [P('model', None), P(None, 'data')])
def test_a_batch_over_the_wrong_axis_is_told_by_the_constraints_on_its_rows(mesh, rows):
    step, _ = make_step()
    function = compile_plain(step, mesh, PARAMETERS, BATCH, rows)
    changes = {cause.change for cause in function.explain().suspects}
    assert "lay out the argument batch/x as PartitionSpec('data', None)" in changes


def test_an_operation_that_cuts_and_joins_a_sharded_dimension_is_found(mesh):
    step, layer = make_step(roll=True)
    causes = compile_plain(step, mesh, PARAMETERS, BATCH).explain().suspects
    line = line_of(layer, 'jnp.roll')
    found = [c for c in causes if 'does not cut or join a sharded dimension' in c.change]
    assert any(c.change.endswith(line) for c in found)


def test_axes_too_much_are_found_in_constraints_and_in_layouts(mesh):
    """'up' has columns over both axes, and a constraint shards the columns of x."""

    def f(up, x):
        return lay_out(jnp.tanh(x), P('data', 'model')) @ up

    rows = []
    up, x = jnp.zeros((64, 32)), jnp.zeros((32, 64))
    for path, array, spec, role in (
        ('params/up', up, (None, ('data', 'model')), 'parameters'),
        ('x', x, ('data', None), 'other'),
    ):
        given = [ResolvedDimension(None, axes, None, (), 'given') for axes in spec]
        rows.append(make_row(path, array, mesh, given, role))
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(f)(up, x)
    traced = trace_values(jaxpr, rows, {})
    layouts = KnownLayouts((), dict(mesh.shape), rows, traced.links)
    possible = PossibleChanges(layouts, ValueGraph(traced), traced.links)
    tanh = next(v for v in traced.values if v.primitive == 'tanh')
    (constraint,) = possible.needless_constraints(tanh, ('model',))
    assert constraint.primitive == 'sharding_constraint'
    assert not possible.needless_constraints(tanh, ('data',))
    changes = {change.layout for change in possible.other_layouts('params/up')}
    assert {((), ('model',)), ((), ('data',))} <= changes


def test_a_dimension_has_the_name_that_one_of_its_operands_gives(mesh):
    x, rows = jnp.zeros((32, 64)), []
    for path, names, role in (
        ('x', (None, None), 'other'),
        ('params/scale', ('embed', 'mlp'), 'parameters'),
    ):
        given = [ResolvedDimension(name, None, None, (), 'given') for name in names]
        rows.append(make_row(path, x, mesh, given, role))
    for order in rows, rows[::-1]:
        (result,) = trace_values(jax.make_jaxpr(jnp.multiply)(x, x), order, {}).results
        assert [dim.name for dim in result.dims] == ['embed', 'mlp']


def multiply(x, w):
    return x @ w


def test_gradients_of_rematerialized_layers_lead_to_their_own_parameters(mesh):
    """Both are made by the same line, with one shape, and all parameters pass one barrier."""

    @jax.checkpoint
    def layer(x, params):
        params = jax.lax.optimization_barrier(params)
        up = multiply(x, params['up'])
        gate = multiply(x, params['gate'])
        return multiply(up * jnp.tanh(gate), params['down']), None

    def loss(params, x):
        return jnp.sum(jax.lax.scan(layer, x, params)[0] ** 2)

    shapes = {'down': (3, 64, 16), 'gate': (3, 16, 64), 'up': (3, 16, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, 'float32') for name, shape in shapes.items()}
    dimensions = [ResolvedDimension(None, None, None, (), 'given')] * 3
    rows = [
        make_row(f'params/{name}', array, mesh, dimensions, 'parameters')
        for name, array in params.items()
    ]
    lowered = jax.jit(jax.grad(loss)).trace(params, jax.ShapeDtypeStruct((32, 16), 'float32'))
    traced = trace_values(lowered.jaxpr, rows, {})
    kept = {v.argument for v in traced.values if v.primitive == 'optimization_barrier'}
    assert kept >= {'params/down', 'params/gate', 'params/up'}
    program = parse_hlo(lowered.lower().compile().as_text())
    matcher = Matcher(program, traced, dict(mesh.shape))
    found = []
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            shape = instruction.outputs[0].shape if instruction.outputs else ()
            is_backward = 'transpose(' in instruction.op_name
            if is_backward and instruction.opcode == 'dot' and sorted(shape) == [16, 64]:
                found += [v.gradient_of for v in matcher.values_of(instruction)]
    assert sorted(found) == ['params/down', 'params/gate', 'params/up']
