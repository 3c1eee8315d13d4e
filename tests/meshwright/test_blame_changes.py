"""Changes are tried by compiling, and warnings of the compiler lead to lines."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from plain_steps import compile_plain, compile_under, make_mesh

from meshwright.causes import compile_partitioned, find_change, try_change
from meshwright.causes.cause import ConstraintRemoval
from partitioning import PjitPartitioner, constrain

# What XLA writes for a gradient that it cannot move from one layout to another.
WARNING = (
    'W1123 03:00:52.706828   14814 spmd_partitioner.cc:666] [SPMD] Involuntary full '
    "rematerialization. The compiler cannot go from sharding {mesh['data'=4,'model'=2], "
    "[{'data'}, {}, {}]} to {devices=[1,1,4,2]<=[8] last_tile_dim_replicate} efficiently for HLO "
    'operation %sharding_constraint.9 = f32[16,128]{1,0} copy(%get-tuple-element), '
    "sharding={mesh['data'=4,'model'=2], [{'data'}, {}, {}]}, metadata={op_name=\"jit(step)/"
    'transpose(jvp(Model))/sharding_constraint"}. As the last resort, SPMD will '
    'replicate the tensor and then partition it to obtain the target sharding.'
)


@pytest.fixture(scope='module')
def mesh():
    return make_mesh()


def make_step(hidden_spec):
    """A gradient step of two matrices, whose hidden layer is laid out by a spec."""

    def step(params, x):
        def loss(params):
            hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ params['up']), hidden_spec)
            hidden = jax.lax.with_sharding_constraint(hidden, PartitionSpec('data', 'model'))
            return jnp.mean((hidden @ params['down']) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    return step


def test_a_wrong_constraint_is_replaced_and_the_gathers_are_gone(mesh):
    """The hidden layer of 64 x 256 floats is gathered over 4 devices, forward and backward."""
    parameters = {
        'up': ((128, 256), PartitionSpec(None, 'model')),
        'down': ((256, 128), PartitionSpec('model', None)),
    }
    step = make_step(PartitionSpec(None, 'model'))
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    function = compile_plain(step, mesh, parameters, x)
    gathers = [(c, cause) for c, cause in function.explain().collectives if c.kind == 'all-gather']
    shard = 16 * 128 * 4
    assert gathers and {c.wire_bytes for c, _ in gathers} == {3 * shard}
    cause = find_change(function, [(1, gathers[0][1])]).cause
    assert cause.confirmed and "PartitionSpec('data', 'model')" in cause.change
    gathered = sum(c.total_bytes for c, _ in gathers)
    found = try_change(function, gathers[0][1].all_changes[0])
    assert found.exchanged[0] - found.exchanged[1] == gathered
    # The next line has the right constraint, so that the program does not need this one.
    line = inspect.getsourcelines(make_step)[1] + 5
    (removal,) = {c for c in gathers[0][1].all_changes if isinstance(c, ConstraintRemoval)}
    assert str(removal).startswith('leave out the constraint at /')
    assert str(removal).endswith(f'test_blame_changes.py:{line}')
    found = try_change(function, removal)
    assert found.exchanged[0] - found.exchanged[1] == gathered
    assert try_change(function, ConstraintRemoval(source='train.py:1')) is None


def test_a_constraint_is_left_out_on_a_line_that_also_prints(mesh):
    """A print is an operation without a result. Without the constraint, nothing is gathered."""

    def step(params, x):
        whole, _ = jax.lax.with_sharding_constraint(x, PartitionSpec()), jax.debug.print('a line')
        return {'up': params['up'] + whole}

    parameters = {'up': ((64, 128), PartitionSpec('data'))}
    function = compile_plain(step, mesh, parameters, jax.ShapeDtypeStruct((64, 128), jnp.float32))
    removal = ConstraintRemoval(source=f'{__file__}:{inspect.getsourcelines(step)[1] + 1}')
    found = try_change(function, removal)
    assert found.exchanged == (3 * 16 * 128 * 4, 0)


def test_a_fault_of_a_partitioner_is_not_taken_for_an_argument_without_names():
    class Faulty(PjitPartitioner):
        def plan(self, init_or_state, *args):
            raise RuntimeError('a fault')

    faulty = Faulty(num_partitions=1)
    partitioned = faulty.partition(jnp.sin, (None,), None)
    with pytest.raises(RuntimeError, match='a fault'):
        compile_partitioned(faulty, partitioned, jax.ShapeDtypeStruct((8,), jnp.float32))


def test_a_parameter_that_is_whole_gets_the_layout_of_its_uses(mesh):
    """'down' is multiplied with a hidden layer whose columns are sharded over 'model'."""
    parameters = {
        'up': ((128, 256), PartitionSpec(None, 'model')),
        'down': ((256, 128), PartitionSpec()),
    }
    step = make_step(PartitionSpec('data', 'model'))
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    function = compile_plain(step, mesh, parameters, x)
    causes = {row.path: cause for row, cause in function.explain().replicated}
    cause = causes['params/down']
    assert cause.change == "lay out the argument params/down as PartitionSpec('model', None)"
    found = try_change(function, cause.all_changes[0])
    # Half of the parameter is left.
    assert found.peak[0] - found.peak[1] >= 256 * 128 * 4 // 2
    assert find_change(function, [(1, cause)]).cause.confirmed


def test_a_warning_of_full_rematerialization_leads_to_the_constraint_of_its_array(mesh):
    """A device has (16, 128) of the hidden layer of 64 x 256, which two lines constrain."""
    parameters = {
        'up': ((128, 256), PartitionSpec(None, 'model')),
        'down': ((256, 128), PartitionSpec('model', None)),
    }
    step = make_step(PartitionSpec('data', 'model'))
    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    function = compile_plain(step, mesh, parameters, x)
    log = f'{WARNING}\nI1123 other\n{WARNING}\nInvoluntary full rematerialization. Unknown.'
    (message, cause), (_, unknown) = function.explain(log).rematerialized
    assert message.startswith('Involuntary') and unknown is None
    line = inspect.getsourcelines(make_step)[1] + 5
    assert cause.source.endswith(f'test_blame_changes.py:{line}')
    assert cause.array == 'an activation' and '<=[8] last_tile_dim_replicate' in cause.why
    assert not function.explain('W1123 nothing of the kind').rematerialized


def test_rules_of_a_partitioner_are_swapped_and_confirmed():
    """The hidden layer is sharded over the axis of the batch, and 'embed' over the other one."""
    right = [('batch', 'data'), ('embed', 'data'), ('mlp', 'model')]
    wrong = [('batch', 'data'), ('embed', 'model'), ('mlp', 'data')]
    batch = jax.ShapeDtypeStruct((64, 128), jnp.float32)

    def init():
        kernel = functools.partial(nn.LogicallyPartitioned, jnp.zeros((128, 256)))
        return {
            'params': {
                'down': nn.LogicallyPartitioned(jnp.zeros((256, 128)), ('mlp', 'embed')),
                'up': kernel(('embed', 'mlp')),
            }
        }

    def step(state, x):
        def loss(params):
            hidden = constrain(jnp.tanh(x @ params['up']), ('batch', 'mlp'))
            return jnp.mean(constrain(hidden @ params['down'], ('batch', 'embed')) ** 2)

        gradient = jax.grad(loss)(state['params'])
        return {'params': jax.tree.map(lambda p, g: p - g, state['params'], gradient)}

    healthy, swapped = (compile_under(rules, init, step, batch) for rules in (right, wrong))
    cause = swapped.explain().suspects[0]
    assert "('embed', 'data') and ('mlp', 'model')" in cause.change
    found = try_change(swapped, cause.all_changes[0])
    assert found.helps
    # With the rules swapped back, it is the program that was never wrong.
    assert found.exchanged[1] == sum(c.total_bytes for c in healthy.costs.collectives)
    assert found.peak[1] == healthy.costs.memory.peak
