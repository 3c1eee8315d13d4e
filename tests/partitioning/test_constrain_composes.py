"""Constraints under the transformations of jax. The expected programs are jax's own constraints'.

Each transformation is lowered twice: around `constrain` or `with_sharding_constraint`, and around
jax's own functions with a spec that is written by hand. The two programs must be the same text.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from partitioning import PjitPartitioner, constrain, with_sharding_constraint

pytestmark = pytest.mark.core

UNC = P.UNCONSTRAINED
RULES = [('batch', 'data'), ('embed', 'model'), ('both', ('data', 'model')), ('no', None)]
X = np.arange(64.0, dtype=np.float32).reshape(8, 8) / 64
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
TYPES = {
    'auto': (AUTO, AUTO),
    'explicit': (EXPLICIT, EXPLICIT),
    'auto and explicit': (AUTO, EXPLICIT),
    'explicit and auto': (EXPLICIT, AUTO),
}
MESHES = pytest.mark.parametrize('types', TYPES)


@functools.cache
def mesh_of(types):
    return jax.make_mesh((4, 2), ('data', 'model'), axis_types=TYPES[types])


def by_jax(x, spec, types, manual=()):
    """jax's own constraints, by a spec without Manual axes and with one axis per dimension."""
    kinds = dict(zip(('data', 'model'), TYPES[types], strict=True))
    explicit = tuple(a for a, kind in kinds.items() if kind == EXPLICIT and a not in manual)
    typed = P(*(axis if axis in explicit else None for axis in spec))
    place = lambda x: jax.lax.with_sharding_constraint(x, P(*spec))  # noqa: E731
    if len(explicit) + len(manual) == 2 and explicit:
        return jax.sharding.reshard(x, typed)
    return (
        jax.sharding.auto_axes(place, axes=explicit, out_sharding=typed)(x)
        if explicit
        else place(x)
    )


def text(fn, *args):
    """The program of a function; equal programs have equal texts."""

    def program(*args):
        return fn(*args)

    return jax.jit(program).lower(*args).as_text()


def in_checkpoint(place, x):
    layer = jax.checkpoint(lambda x: jnp.sin(place(jnp.sin(x))))
    return jax.grad(lambda x: layer(x).sum())(x)


def in_custom_vjp(place, x):
    @jax.custom_vjp
    def layer(x):
        return place(jnp.sin(x))

    layer.defvjp(lambda x: (layer(x), x), lambda x, ct: (place(ct * jnp.cos(x)),))
    return jax.value_and_grad(lambda x: layer(x).sum())(x)


def layers_of_experts(place, x):
    """Experts by vmap, layers by scan, each layer rematerialized."""

    def one(x):
        layer = jax.checkpoint(lambda c, _: (place(jnp.sin(c)), None))
        return jax.lax.scan(layer, place(x), None, length=2)[0]

    return jax.grad(lambda x: jax.vmap(one)(x).sum())(jnp.stack([x, x]))


TRANSFORMED = {
    'jit': lambda place, x: jax.jit(lambda x: place(x * 2))(x),
    'vmap': lambda place, x: jax.vmap(lambda x: place(x * 2))(jnp.stack([x, x])),
    'vmap of the last dimension': lambda place, x: jax.vmap(place, -1, -1)(
        jnp.stack([x, x], axis=-1)
    ),
    'checkpoint': in_checkpoint,
    'custom_vjp': in_custom_vjp,
    'vmap of scan of checkpoint': layers_of_experts,
}


@pytest.mark.parametrize('types', ['auto', 'explicit'])
@pytest.mark.parametrize('transformed', TRANSFORMED.values(), ids=TRANSFORMED)
def test_constraints_under_transformations(types, transformed):
    with jax.set_mesh(mesh_of(types)):
        expected = text(lambda x: transformed(lambda x: by_jax(x, ('data', 'model'), types), x), X)
        place = lambda x: constrain(x, ('batch', 'embed'), RULES)  # noqa: E731
        assert text(lambda x: transformed(place, x), X) == expected
        assert 'sharding_constraint' in expected


@pytest.mark.parametrize('types', ['auto', 'explicit and auto'])
def test_values_under_transformations(types):
    """One program with all transformations, compared with the same one without a mesh."""

    def program(x):
        place = lambda x: constrain(x, ('batch', 'embed'), RULES)  # noqa: E731
        return {name: fn(place, x) for name, fn in TRANSFORMED.items()}

    with jax.set_mesh(mesh_of(types)):
        found = jax.jit(program)(X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, jax.jit(program)(X)
    )


# Inside a shard_map.


def sharded(fn, manual, *, spec=None):
    """`fn` in a shard_map over these axes, which cut the first dimension."""
    spec = P(manual) if spec is None else spec
    return jax.shard_map(fn, in_specs=spec, out_specs=spec, axis_names={*manual})


# Manual axes, spec, names, and what is left of the spec.
INSIDE = {
    'the axis of a dimension': (('data',), P('data', 'model'), ('batch', 'embed'), (None, 'model')),
    'the other axis': (('model',), P('data', 'model'), ('batch', 'embed'), ('data', None)),
    'one of two axes': (('data',), P(('data', 'model'), None), ('both', 'no'), ('model', None)),
    'the second of two': (('model',), P(('data', 'model'), None), ('both', 'no'), ('data', None)),
    'nothing is left': (('data',), P(None, 'data'), ('no', 'batch'), (None, None)),
}


@MESHES
@pytest.mark.parametrize('manual, spec, names, left', INSIDE.values(), ids=INSIDE)
def test_manual_axes_are_dropped(types, manual, spec, names, left):
    with jax.set_mesh(mesh_of(types)):
        x = jax.device_put(X, P(manual))  # over Explicit axes, jax 0.12 compares it with in_specs
        expected = text(sharded(lambda x: by_jax(x, left, types, manual), manual), x)
        assert text(sharded(lambda x: with_sharding_constraint(x, spec), manual), x) == expected
        assert text(sharded(lambda x: constrain(x, names, RULES), manual), x) == expected


@MESHES
def test_a_fully_manual_mesh_leaves_arrays_unchanged(types):
    """Nested shard_maps add up: the inner body has no axis left."""
    mesh, same = mesh_of(types), []

    def inner(x):
        same.append(constrain(x, ('batch', 'embed'), RULES) is x)
        same.append(constrain(x, ('batch', 'embed')) is x)  # no rules are needed
        same.append(with_sharding_constraint(x, P('data', 'model')) is x)
        return x * 2

    def outer(x):
        x = constrain(x, ('batch', 'embed'), RULES)
        return sharded(inner, ('model',), spec=P(None, 'model'))(x)

    x = jax.device_put(X, NamedSharding(mesh, P('data', 'model')))
    with jax.set_mesh(mesh):
        for fn in (
            sharded(inner, ('data', 'model'), spec=P('data', 'model')),
            jax.jit(sharded(outer, ('data',))),
        ):
            np.testing.assert_array_equal(fn(x), X * 2)
    assert same == [True] * len(same) and len(same) >= 6


def test_sizes_inside_a_shard_map_are_those_of_one_shard():
    """Only the axes that are left must divide them."""
    columns = sharded(lambda x: constrain(x, ('batch', 'embed'), RULES), ('model',))
    rows = sharded(lambda x: with_sharding_constraint(x, P(('data', 'model'))), ('data',))
    with jax.set_mesh(mesh_of('auto')):
        for fn, sizes in ((columns, (8, 7)), (columns, (16, 1)), (rows, (8, 7))):
            text(fn, jnp.ones(sizes))  # 'embed' is 'model', which is Manual in `columns`
        for fn, sizes, message in (
            (columns, (4, 8), r"constrain.*\(2, 8\).*size 2 .*by 4.*'data'.*on_indivisible"),
            (rows, (12, 8), r"shard along 'data', of shape \(3, 8\).* 3 .*by 2.*'model'.*2 or 4"),
        ):
            with pytest.raises(ValueError, match=message):
                text(fn, jnp.ones(sizes))
        dropped = text(
            sharded(
                lambda x: constrain(x, ('both', None), RULES, on_indivisible='drop_axis'), ('data',)
            ),
            jnp.ones((12, 8)),
        )
        whole = sharded(lambda x: by_jax(x, (None, None), 'auto', ('data',)), ('data',))
        assert dropped == text(whole, jnp.ones((12, 8)))


def test_a_rule_that_loses_outside_a_shard_map_loses_inside():
    """'embed' cannot have ('data', 'model'), because 'batch' takes 'data', Manual or not."""
    rules = [('batch', 'data'), ('embed', ('data', 'model')), ('embed', None)]
    with jax.set_mesh(mesh_of('auto')):
        found = text(sharded(lambda x: constrain(x, ('batch', 'embed'), rules), ('data',)), X)
        expected = sharded(lambda x: by_jax(x, (None, None), 'auto', ('data',)), ('data',))
        assert found == text(expected, X)


@pytest.mark.parametrize(
    'place, message',
    [
        (lambda x: with_sharding_constraint(x, P('dta')), "'dta'.*Did you mean 'data'"),
        (lambda x: with_sharding_constraint(x, P(None, None, 'data')), '3 entries.*2 dim'),
        (lambda x: with_sharding_constraint(x, P('data', 'data')), "'data' appears twice"),
        (lambda x: constrain(x, ('batch',), RULES), "'batch',.* 1 entry.*2 dim"),
        (lambda x: constrain(x, ('batch', 'embd'), RULES), "'embd'.*'embed'"),
        (lambda x: constrain(x, ('a', None), [('a', 'dta')]), "'dta'.*Did you mean 'data'"),
    ],
)
@pytest.mark.parametrize('manual', [('data',), ('data', 'model')])
def test_mistakes_inside_a_shard_map(place, message, manual):
    with jax.set_mesh(mesh_of('auto')), pytest.raises(ValueError, match=message):
        text(sharded(place, manual), X)


def test_a_program_of_pmap_is_told_what_to_write():
    """jax.pmap makes a mesh of its own, which has none of the axes of the rules."""
    for place in (
        lambda x: with_sharding_constraint(x, P('data')),
        lambda x: constrain(x, ('batch',), RULES),
    ):
        with pytest.raises(ValueError, match=r"'data' does not.*batch 8.*partition instead of"):
            jax.pmap(place, axis_name='batch')(X)
    np.testing.assert_array_equal(jax.pmap(lambda x: constrain(x, ('batch',)))(X), X)


def test_axes_of_three_types():
    mesh = jax.make_mesh((2, 2, 2), ('m', 'a', 'e'), axis_types=(EXPLICIT, AUTO, EXPLICIT))

    def body(x, fn):
        return jax.vmap(lambda x: jnp.sin(fn(x)))(x)

    def by_hand(x):
        place = lambda x: jax.lax.with_sharding_constraint(x, P(('e', 'a'), UNC))  # noqa: E731
        return jax.sharding.auto_axes(place, axes='e', out_sharding=P('e', None))(x)

    with jax.set_mesh(mesh):
        x = jax.device_put(np.stack([X] * 4), P('m'))
        for place in (
            lambda x: with_sharding_constraint(x, P(('m', 'e', 'a'), UNC)),
            lambda x: constrain(x, ('x', UNC), [('x', ('e', 'm', 'a'))]),
        ):
            fn = sharded(functools.partial(body, fn=place), ('m',))
            assert text(fn, x) == text(sharded(functools.partial(body, fn=by_hand), ('m',)), x)
        np.testing.assert_allclose(jax.jit(fn)(x), np.sin(x), rtol=1e-6)


# Inside a vmap that shards its batched dimension.


@pytest.mark.parametrize('types', ['auto', 'auto and explicit'])
def test_vmap_with_spmd_axis_name(types):
    """The batched dimension gets 'data'; the names describe one example."""
    run = lambda place: jax.vmap(place, 1, spmd_axis_name='data')  # noqa: E731
    x = jnp.stack([X] * 4, axis=1)
    with jax.set_mesh(mesh_of(types)):
        expected = text(run(lambda x: by_jax(x, ('model', None), types)), x)
        assert text(run(lambda x: constrain(x, ('embed', 'no'), RULES)), x) == expected
        y = jax.jit(run(lambda x: with_sharding_constraint(x * 2, P('model', None))))(x)
    assert y.sharding.spec[:2] == ('data', 'model')
    np.testing.assert_array_equal(y, jnp.stack([X * 2] * 4))


def test_a_batched_dimension_with_the_axis_of_a_rule_is_an_error():
    """The batched dimension has 'data' by spmd_axis_name, or by the type of an Explicit array."""
    x = jnp.stack([X] * 4)
    message = r"constrain\('batch', 'embed'\).*P\('data', 'model'\).*vmap.*remove the axis"
    place = lambda x: constrain(x, ('batch', 'embed'), RULES)  # noqa: E731
    with jax.set_mesh(mesh_of('auto')), pytest.raises(ValueError, match=message):
        jax.vmap(place, spmd_axis_name='data')(x)
    with jax.set_mesh(mesh_of('explicit')), pytest.raises(ValueError, match=message):
        jax.vmap(place)(jax.device_put(x, P('data')))


@pytest.mark.parametrize('types', ['auto', 'explicit'])
def test_such_an_axis_in_a_checkpoint_is_an_error_of_the_partitioned_function(types):
    """jax notices it when it transforms the traced layer, outside of the constraint."""

    def step(x):
        place = lambda x: constrain(x, ('batch', 'embed'))  # noqa: E731
        name = 'data' if types == 'auto' else None
        return jax.vmap(jax.checkpoint(lambda x: place(x * 2)), spmd_axis_name=name)(x)

    partitioner = PjitPartitioner(mesh=mesh_of(types), logical_axis_rules=RULES)
    with pytest.raises(ValueError, match=r'step.*test_constrain_composes.*vmap.*remove the axis'):
        x = jax.device_put(np.stack([X] * 4), NamedSharding(mesh_of(types), P('data')))
        partitioner.partition(step, P('data'), None)(x)


# What XLA does with it.


@pytest.mark.parametrize('types', ['auto', 'explicit'])
def test_jit_and_shard_map_inside_a_partitioned_function(types):
    """The rules of the context reach functions that jit traces inside."""
    mesh = mesh_of(types)

    @jax.jit
    def layer(x):
        return constrain(jnp.sin(x), ('batch', 'embed'))

    def step(x):
        x = jax.shard_map(
            lambda x: constrain(x * 2, ('batch', 'embed')),
            in_specs=P('data'),
            out_specs=P('data'),
            axis_names={'data'},
        )(layer(x))
        return layer(x)

    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=RULES)
    y = partitioner.partition(step, P('data'), P('data', 'model'))(X)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P('data', 'model')), 2)
    np.testing.assert_allclose(y, np.sin(2 * np.sin(X)), rtol=1e-6)


@pytest.mark.parametrize('types', ['auto', 'explicit'])
def test_exported_programs_keep_their_constraints(types):
    mesh = mesh_of(types)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P('data'))
        fn = jax.jit(lambda x: constrain(jnp.sin(x), ('batch', 'embed'), RULES))
        exported = jax.export.export(fn)(x)
        y = jax.jit(exported.call)(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P('data', 'model')), 2)
    np.testing.assert_allclose(y, np.sin(X), rtol=1e-6)
