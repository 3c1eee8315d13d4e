"""The layouts that spread over traced functions, against those that XLA chooses."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from meshwright.jaxpr import trace_function
from meshwright.jaxpr.implied_exchanges import plan_moves
from meshwright.jaxpr.primitives import ELEMENTWISE

pytestmark = pytest.mark.core

# x [16, 8, 32] is sharded along 'data' and 'model', w [32, 64] along 'model', ids [16, 8] and
# table [128, 32] along one axis each.
FUNCTIONS = {
    'elementwise': lambda x, w, ids, table: jnp.tanh(x) + 1,
    'transpose': lambda x, w, ids, table: x.transpose(2, 0, 1),
    'split a dimension': lambda x, w, ids, table: x.reshape(16, 8, 4, 8),
    'merge dimensions': lambda x, w, ids, table: x.reshape(16 * 8, 32),
    'split and merge': lambda x, w, ids, table: (
        jax.lax.with_sharding_constraint(table[:, 0], P(('data', 'model')))
        .reshape(4, 32)
        .reshape(128)
    ),
    'sum': lambda x, w, ids, table: x.sum(1),
    'maximum, kept': lambda x, w, ids, table: x.max(1, keepdims=True),
    'broadcast': lambda x, w, ids, table: jnp.broadcast_to(x[:, :, None], (16, 8, 3, 32)),
    'concatenate': lambda x, w, ids, table: jnp.concatenate([x, x], 1),
    'pad': lambda x, w, ids, table: jnp.pad(x, ((0, 0), (1, 1), (0, 0))),
    'slice': lambda x, w, ids, table: x[:, 2:6],
    'cumulative sum': lambda x, w, ids, table: jnp.cumsum(x, 1),
    'sort': lambda x, w, ids, table: jnp.sort(x, 1),
    'columns of a product': lambda x, w, ids, table: ids.astype(jnp.float32) @ w[:8],
    'batched product': lambda x, w, ids, table: jnp.einsum(
        'bij,bkj->bik', x[:, :, :4], x[:, :, :4]
    ),
    'lookup': lambda x, w, ids, table: table[ids],
    'where': lambda x, w, ids, table: jnp.where(ids[..., None] > 2, x, 0.0),
    'convert': lambda x, w, ids, table: x.astype(jnp.bfloat16),
    'scan': lambda x, w, ids, table: jax.lax.scan(
        lambda c, y: (c, c * y), x[:, 0], x.swapaxes(0, 1)
    )[1],
    'checkpoint': lambda x, w, ids, table: jax.checkpoint(lambda y: jnp.sin(y) * 2)(x),
    'branches': lambda x, w, ids, table: jax.lax.cond(ids[0, 0] > 0, jnp.sin, jnp.cos, x),
    'shard_map': lambda x, w, ids, table: jax.shard_map(
        lambda y: jax.lax.psum(y.sum(0), 'data'), in_specs=P('data', None, None), out_specs=P()
    )(x),
}
LAYOUTS = {
    'x': P('data', None, 'model'),
    'w': P(None, 'model'),
    'ids': P('data'),
    'table': P(None, 'model'),
}


@pytest.fixture(scope='module')
def both():
    """The layout of the result of each function: ours, and XLA's."""
    mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
    shapes = {'x': (16, 8, 32), 'w': (32, 64), 'ids': (16, 8), 'table': (128, 32)}
    args = [
        jax.ShapeDtypeStruct(shape, jnp.int32 if name == 'ids' else jnp.float32)
        for name, shape in shapes.items()
    ]

    def everything(*args):
        return [function(*args) for function in FUNCTIONS.values()]

    with jax.set_mesh(mesh):
        jitted = jax.jit(
            everything, in_shardings=tuple(NamedSharding(mesh, s) for s in LAYOUTS.values())
        )
        traced = trace_function(jitted, *args)
        compiled = jitted.lower(*args).compile()
    found = {}
    for name, value, sharding in zip(
        FUNCTIONS, traced.block.outputs, compiled.output_shardings, strict=True
    ):
        ours = NamedSharding(mesh, P(*(axes or None for axes in value.axes)))
        found[name] = ours, sharding, len(value.shape)
    assert not traced.unknown
    return found


@pytest.mark.parametrize('name', FUNCTIONS)
def test_results_are_laid_out_as_by_xla(both, name):
    ours, xla, rank = both[name]
    assert ours.is_equivalent_to(xla, rank), (ours.spec, xla)


AXES = ('a', 'b', 'c')
LAYOUT = st.permutations(AXES).flatmap(
    lambda axes: st.lists(st.integers(0, 3), min_size=3, max_size=3).map(
        lambda dims: [tuple(a for a, d in zip(axes, dims, strict=True) if d == i) for i in range(3)]
    )
)


@given(source=LAYOUT, target=LAYOUT)
@settings(max_examples=100)
def test_moves_lead_from_one_layout_to_the_other(source, target):
    partial = tuple(set(AXES) - set(itertools.chain(*source)))[:1]
    moves = plan_moves(source, target, partial)
    reached = moves[-1][2] if moves else source
    assert [set(axes) for axes in reached] == [set(axes) for axes in target]
    reduced = [axis for kind, axes, _ in moves for axis in axes if 'reduce' in kind]
    assert tuple(reduced) == partial
    for _, _, layout in moves:  # an axis shards one dimension at a time
        used = list(itertools.chain(*layout))
        assert len(used) == len(set(used))


def test_what_gradients_are_made_of_keeps_the_layout_of_its_operands():
    """Also the operations that only some versions of jax have, such as one_minus_square."""
    functions = (jnp.tanh, jnp.arcsin, jnp.arctanh, jnp.log2, jax.nn.gelu, jax.nn.silu, jnp.sqrt)
    functions += (jnp.exp2, jnp.arctan, jnp.cosh, jax.nn.softplus, jax.lax.erf, jnp.reciprocal)
    for function in functions:
        traced = jax.make_jaxpr(jax.grad(lambda x, f=function: f(x).sum()))(jnp.ones((4, 4)))
        waiting = [traced.jaxpr]
        while waiting:
            for equation in waiting.pop().eqns:
                inner = [v for v in equation.params.values() if hasattr(v, 'jaxpr')]
                waiting += [v.jaxpr for v in inner]
                given = {v.aval.shape for v in equation.invars} - {()}
                if not inner and given == {(4, 4)} == {v.aval.shape for v in equation.outvars}:
                    assert equation.primitive.name in ELEMENTWISE
