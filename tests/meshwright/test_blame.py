"""The causes of exchanges and buffers, in programs whose exchanges are known by hand."""

import jax
import jax.numpy as jnp
import pytest
from plain_steps import line_of, make_mesh

from meshwright import read_costs
from meshwright.causes import explain_program
from meshwright.user_lines import user_line
from partitioning import PjitPartitioner, constrain
from partitioning.plan.rows import make_row
from partitioning.rules import ResolvedDimension, resolve_axes

NAMES = {'down': ('mlp', 'embed'), 'up': ('embed', 'mlp')}
SHAPES = {'down': (128, 64), 'up': (64, 128)}
TENSOR = (('batch', 'data'), ('embed', None), ('mlp', 'model'))


@pytest.fixture(scope='module')
def mesh():
    return make_mesh()


def train(params, x):
    """A gradient step of two matrices, in plain jax."""

    def loss(params):
        hidden = jnp.tanh(x @ params['up'])
        out = hidden @ params['down']
        return jnp.mean(out**2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def train_laid_out(params, x):
    """The same step, whose activations have a layout."""

    def loss(params):
        hidden = constrain(jnp.tanh(x @ params['up']), ('batch', 'mlp'))
        out = constrain(hidden @ params['down'], ('batch', 'embed'))
        return jnp.mean(out**2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def explain(function, mesh, rules, names=NAMES):
    """Explains a step of parameters that rules lay out, and of a batch over 'data'."""
    rows = []
    for key, shape in SHAPES.items():
        resolved = resolve_axes(names[key], rules, mesh=mesh, shape=shape)
        rows.append(make_row(f'params/{key}', jnp.zeros(shape), mesh, resolved))
    x = jnp.zeros((32, 64))
    given = [ResolvedDimension(None, axes, None, (), 'given') for axes in ('data', None)]
    rows.append(make_row('x', x, mesh, given, 'other'))
    specs = {row.path.rpartition('/')[2]: row.spec for row in rows}
    batch = specs.pop('x')
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=rules)
    partitioned = partitioner.partition(function, (specs, batch), specs)
    params = {key: jnp.zeros(shape) for key, shape in SHAPES.items()}
    traced = partitioned.trace(params, x)
    compiled = traced.lower().compile()
    costs = read_costs(compiled, mesh)
    return explain_program(
        compiled.as_text(), traced.jaxpr, costs, mesh=mesh, rows=rows, rules=rules
    )


def test_data_parallel_sums_gradients(mesh):
    """Both gradients are summed over all devices, and nothing else is exchanged."""
    rules = (('batch', ('data', 'model')), ('embed', None), ('mlp', None))
    explanation = explain(train, mesh, rules)
    arrays = {cause.array for _, cause in explanation.collectives}
    assert arrays <= {'the gradient of params/up', 'the gradient of params/down'} and arrays
    assert {cause.rule for _, cause in explanation.collectives} == {repr(rules[0])}


def test_fully_sharded_parameters_are_gathered_where_they_are_used(mesh):
    """Each matrix is gathered along its sharded dimension, which is expected."""
    rules = (('batch', 'data'), ('embed', 'data'), ('mlp', None))
    explanation = explain(train_laid_out, mesh, rules)
    gathered = {c.array: c for k, c in explanation.collectives if k.kind == 'all-gather'}
    assert {*gathered} == {'params/up', 'params/down'}
    assert gathered['params/up'].source.endswith(line_of(train_laid_out, "x @ params['up']"))
    assert gathered['params/up'].logical_axes == ('embed', 'mlp')
    assert all(c.why.startswith('expected') for c in gathered.values())
    # Nothing is sharded over 'model', and the standard rules would shard 'mlp'.
    (up,) = [cause for row, cause in explanation.replicated if row.path == 'params/up']
    assert up.change == "write ('mlp', 'model') in place of ('mlp', None) in the rules"
    assert up.suspect


def test_tensor_parallelism_sums_over_the_hidden_dimension(mesh):
    explanation = explain(train, mesh, TENSOR)
    sums = [(k.axes, c) for k, c in explanation.collectives if k.axes == ('model',)]
    assert sums
    for _, cause in sums:
        assert cause.rule == "('mlp', 'model')" and 'tensor parallelism' in cause.why
        assert not cause.suspect
    (forward,) = [c for _, c in sums if c.array == 'an activation']
    assert forward.source.endswith(line_of(train, "hidden @ params['down']"))
    reduced = {c.array for k, c in explanation.collectives if k.axes == ('data',)}
    assert {'the gradient of params/up', 'the gradient of params/down'} & reduced
    assert not explanation.suspects


def test_a_sum_is_not_taken_for_an_array_that_is_sharded_over_its_devices(mesh):
    """Each device has 8 x 64 of the 32 x 128 hidden layer, and 8 x 64 of the sum, [32, 64]."""

    def train_twice(params, x):
        def loss(params):
            up, down = params['up'], params['down']

            @jax.checkpoint
            def block(x):
                hidden = constrain(jnp.tanh(x @ up), ('batch', 'mlp'))
                return x + constrain(hidden @ down, ('batch', 'embed'))

            return jnp.mean(jnp.tanh(block(block(x))) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    explanation = explain(train_twice, mesh, TENSOR)
    sums = [c for k, c in explanation.collectives if k.axes == ('model',)]
    assert len(sums) >= 3
    assert {c.rule for c in sums} == {"('mlp', 'model')"}
    assert not any(c.suspect for c in sums)


def test_a_constraint_that_gathers_an_activation_is_found(mesh):
    def gathering(params, x):
        def loss(params):
            hidden = jnp.tanh(x @ params['up'])
            hidden = constrain(hidden, (None, 'mlp'))  # forgets the batch
            hidden = constrain(hidden, ('batch', 'mlp'))
            return jnp.mean((hidden @ params['down']) ** 2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    explanation = explain(gathering, mesh, TENSOR)
    worst = [cause for k, cause in explanation.collectives if k.kind == 'all-gather']
    assert worst
    for cause in worst:
        assert cause.suspect and cause.source.endswith(line_of(gathering, 'forgets'))
        assert cause.logical_axes == ('batch', 'mlp') and "('batch', 'mlp')" in cause.change


def test_swapped_rules_are_swapped_back(mesh):
    rules = (('batch', 'data'), ('embed', 'model'), ('mlp', 'data'))
    explanation = explain(train, mesh, rules)
    found = {cause.change for _, cause in explanation.collectives if cause.suspect}
    assert any("('mlp', 'model')" in change for change in found)


def test_parameters_without_names_have_a_layout_to_suggest(mesh):
    """A trainer of one's own, without logical axes: its arrays are found by their paths."""
    names = {'down': (None, None), 'up': (None, None)}
    explanation = explain(train, mesh, TENSOR, names)
    causes = {row.path: cause for row, cause in explanation.replicated}
    assert causes['params/up'].change == (
        "lay out the argument params/up as PartitionSpec(None, 'model')"
    )
    gradients = [c for _, c in explanation.collectives if c.array == 'the gradient of params/up']
    assert all(c.logical_axes == ('batch', None) or not any(c.logical_axes) for c in gradients)
    assert {c.source.rpartition('/')[2] for c in gradients} <= {
        line_of(train, "x @ params['up']"),
        line_of(train, "hidden @ params['down']"),
    }


def test_buffers_lead_to_their_lines(mesh):
    explanation = explain(train, mesh, TENSOR)
    causes = {live.array: cause for live, cause in explanation.buffers}
    # 32 rows over 4, 128 columns over 2
    hidden = causes['f32[8,64]']
    assert hidden.logical_axes == ('batch', 'mlp')
    assert hidden.source.rpartition('/')[2] in (
        line_of(train, "x @ params['up']"),
        line_of(train, "hidden @ params['down']"),
    )


def test_lines_of_libraries_are_skipped():
    stack = (
        '/env/lib/site-packages/optax/losses.py:10',
        '/env/lib/site-packages/maxtext/model.py:3',
        '/project/train.py:7',
    )
    assert user_line(stack) == '/env/lib/site-packages/maxtext/model.py:3'
    assert user_line(stack[:1]) == stack[0]
    assert user_line(()) == ''
