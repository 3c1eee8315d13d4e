"""torch_xla's marks: specs, layouts in and out of programs, padding, and gradients."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from xla_meshes import (
    IN_ORDER,
    SHUFFLED,
    TYPES,
    bounds_by_device as bounds,
    explicit,
    mesh_of,
    refuses,
    xy_mesh,
)

from partitioning import constrain, create_mesh, with_sharding_constraint
from partitioning.compat.torch_xla import (
    PaddedArray,
    clear_sharding,
    local_shards,
    mark_sharding,
    mesh_from_device_ids,
    resolve_partition_spec,
)

pytestmark = pytest.mark.core


@pytest.fixture
def xy():
    return xy_mesh()


@pytest.mark.parametrize(
    'spec, message',
    [
        (('z', None), r"\('z', None\).* 'z' .* x 4 x y 2"),
        ((1.0, None), r'1.0 \(float\) is not supported'),
        (([0, 1], None), r'\[0, 1\] \(list\) is not supported'),
        (((0, (1,)), None), r'\(1,\) \(tuple\) is not supported'),
        (((0, None), None), r'None \(NoneType\) is not supported'),
        ((5, None), 'mesh dimension 5 is out of bounds.* 0 to 1'),
        ((-1, None), 'mesh dimension -1 is out of bounds'),
        ((True, None), r'True \(bool\) is not supported'),
        ((0, 0), "mesh axis 'x' appears twice"),
        (((0, 'x'), None), "mesh axis 'x' appears twice"),
        ((0,), r'\(0,\) has 1 entry, but the array has 2 dimensions, \(8, 8\)'),
        (P('x'), 'has 1 entry, but the array has 2 dimensions'),
        ((0, 1, None), 'has 3 entries, but the array has 2 dimensions'),
        ('xy', "'xy' must have an entry per dimension"),
        (None, 'None must have an entry per dimension'),
        (0, '0 must have an entry per dimension'),
        (P('x', None, unreduced={'y'}), 'cannot have unreduced'),
    ],
)
def test_D7_invalid_specs(xy, spec, message):
    refuses(lambda: mark_sharding(np.ones((8, 8)), xy, spec), message)
    refuses(lambda: resolve_partition_spec(xy, spec, shape=(8, 8)), message)


def test_D7_nearest_name():
    mesh = mesh_of((4, 2), ('data', 'model'))
    refuses(lambda: resolve_partition_spec(mesh, (None, 'modle')), "Did you mean 'model'")


def test_D7_meshes_of_some_devices():
    """torch_xla only maps meshes of all devices, so its function refuses others."""
    refuses(
        lambda: mesh_from_device_ids(IN_ORDER[:4], (4,), ('x',)),
        r'4 device ids \[0, 1, 2, 3\] for 8 devices',
    )
    refuses(lambda: mesh_of((4, 4), ('x', 'y')), r'\(4, 4\) .* 16.* device ids is 8')
    some = create_mesh((4,), ('x',), devices=jax.devices()[4:])
    assert bounds(local_shards(mark_sharding(np.arange(8), some, ('x',)))) == {
        4 + i: ([(2 * i, 2 * i + 2)], 0) for i in range(4)
    }


def test_D7_specs(xy):
    for spec in ((None, (1, 0)), (None, ('y', 'x')), [None, ('y', 0)], P(None, ('y', 'x'))):
        assert resolve_partition_spec(xy, spec, shape=(8, 8)) == P(None, ('y', 'x'))
    assert resolve_partition_spec(xy, (np.int64(1), ('x',))) == P('y', 'x')


@pytest.mark.parametrize('types', ['auto', 'explicit'])
@pytest.mark.parametrize('within', [False, True])
def test_D9_uneven_sizes_are_padded(types, within):
    mesh = mesh_of((8,))
    mesh = explicit(mesh) if types == 'explicit' else mesh

    def mark(t):
        return mark_sharding(t, mesh, (0,), on_indivisible='pad')

    with jax.set_mesh(mesh):
        x = jax.jit(mark)(jnp.arange(9)) if within else mark(np.arange(9))
    assert x.shape == (9,)
    assert x.array.sharding == NamedSharding(mesh, P('0'))
    shards = local_shards(x)
    data = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 0], [0, 0], [0, 0], [0, 0]]
    assert [shard.data.tolist() for shard in shards] == data
    unpadded = [[0, 1], [2, 3], [4, 5], [6, 7], [8], [], [], []]
    assert [shard.unpadded_data.tolist() for shard in shards] == unpadded
    assert [s.index[0].stop - s.index[0].start for s in shards] == [*map(len, unpadded)]
    assert x.unpadded().tolist() == list(range(9))


def test_D9_uneven_sizes_are_an_error_by_default():
    mesh = mesh_of((8,))
    message = r"dimension 0 of shape \(9,\): size 9 is not .* 8, .*8 or 16.*'pad' or 'replicate'"
    refuses(lambda: mark_sharding(np.arange(9), mesh, (0,)), message)
    refuses(lambda: jax.jit(lambda t: mark_sharding(t, mesh, (0,)))(np.arange(9)), message)
    refuses(
        lambda: mark_sharding(np.arange(9), mesh, (0,), on_indivisible='drop'),
        "one of 'error', 'pad', 'replicate', not 'drop'",
    )


@pytest.mark.parametrize('types', ['auto', 'explicit'])
def test_D9_constraints_of_uneven_sizes_are_an_error_too(types):
    """Over Auto axes, jax silently replicates such an array."""
    mesh = mesh_of((8,), ('x',))
    mesh = explicit(mesh) if types == 'explicit' else mesh
    with jax.set_mesh(mesh):
        for constrained in (
            lambda t: with_sharding_constraint(t, P('x')),
            jax.jit(lambda t: with_sharding_constraint(t, P('x'))),
            jax.jit(lambda t: constrain(t, ('rows',), [('rows', 'x')])),
        ):
            refuses(
                lambda fn=constrained: fn(jnp.arange(9)),
                r'dimension 0 .*of shape \(9,\): size 9 .* by 8, .*8 or 16',
            )
        if types == 'auto':
            silent = jax.jit(lambda t: jax.lax.with_sharding_constraint(t, P('x')))
            assert silent(jnp.arange(9)).sharding.is_fully_replicated


def test_D9_only_uneven_dimensions_are_replicated_or_padded(xy):
    x = np.ones((9, 8))
    replicated = mark_sharding(x, xy, ('x', 'y'), on_indivisible='replicate')
    assert replicated.sharding.spec == P(None, 'y')
    padded = mark_sharding(x, xy, ('x', 'y'), on_indivisible='pad')
    assert padded.array.shape == (12, 8) and padded.shape == (9, 8)
    assert isinstance(mark_sharding(x, xy, (None, 'y'), on_indivisible='pad'), jax.Array)


@pytest.mark.parametrize('types', TYPES)
@pytest.mark.parametrize('dtype', [ml_dtypes.bfloat16, np.bool_])
def test_D9_padding_and_unpadding(types, dtype):
    mesh, x = xy_mesh(types), (np.arange(7 * 5).reshape(7, 5) % 2).astype(dtype)
    for t in (x, mark_sharding(x[:6], mesh, ('y', None))):
        padded = mark_sharding(t, mesh, ('x', 'y'), on_indivisible='pad')
        assert isinstance(padded, PaddedArray) and padded.array.shape == (8, 6)
        assert (padded.dtype, padded.ndim, padded.shape) == (dtype, 2, np.shape(t))
        again = mark_sharding(padded, mesh, (('x', 'y'), None), on_indivisible='pad')
        for array in (padded.unpadded(), again.unpadded(), clear_sharding(padded)):
            np.testing.assert_array_equal(array, np.asarray(t))
        inside = jax.jit(lambda p: p.unpadded())(padded)
        np.testing.assert_array_equal(inside, np.asarray(t))
        on_host = jax.device_get(padded)
        assert not on_host.array[np.shape(t)[0] :].any() and not on_host.array[:, 5:].any()


def test_padding_larger_than_the_array():
    padded = PaddedArray(array=jnp.ones(8), shape=(9,))
    refuses(padded.unpadded, r'shape \(8,\) cannot be \(9,\)')


# Marks in and out of programs.


@pytest.mark.parametrize(
    'types, ids',
    [('auto', IN_ORDER), ('auto', SHUFFLED), ('explicit', SHUFFLED), ('mixed', SHUFFLED)],
)
def test_D13_marks_in_and_out_of_programs(types, ids):
    mesh, x = xy_mesh(types, ids), np.arange(64.0).reshape(8, 8)
    specs = [('x', None), (None, 'y'), ('y', 'x'), (('x', 'y'), None), (None, None)]
    placed = mark_sharding(x, mesh, (None, None))

    @jax.jit
    def program(t):
        return [(mark_sharding(t * 2, mesh, s), mark_sharding(x, mesh, s)) for s in specs]

    with jax.set_mesh(mesh):
        made = program(placed)
    for spec, (doubled, constant) in zip(specs, made, strict=True):
        expected = NamedSharding(mesh, P(*spec))
        placed = mark_sharding(placed, mesh, spec)  # what is marked may be marked again
        assert placed.sharding == expected
        for array, values in ((doubled, 2 * x), (constant, x), (placed, x)):
            assert array.sharding.is_equivalent_to(expected, 2)
            np.testing.assert_array_equal(array, values)


@pytest.mark.parametrize('types', ['auto', 'explicit'])
def test_marks_in_programs_without_a_context(types):
    mesh = xy_mesh(types)
    x = mark_sharding(np.ones((8, 8)), mesh, (None, None))
    made = jax.jit(lambda t: mark_sharding(t * 2, mesh, (None, 'y')))(x)
    assert made.sharding.is_equivalent_to(NamedSharding(mesh, P(None, 'y')), 2)


def test_axes_of_several_types_need_a_context():
    mesh, x = xy_mesh('mixed'), np.ones((8, 8))
    mark = jax.jit(lambda t: mark_sharding(t, mesh, ('x', None)))
    refuses(lambda: mark(x), r'x 4 x y 2 .*Explicit, Auto.*empty.*set_mesh')
    with jax.set_mesh(mesh_of((8,))):
        refuses(lambda: mark(x), 'x 4 x y 2 .* 0 8')


@pytest.mark.parametrize('t', [[1, 2], jax.ShapeDtypeStruct((8,), jnp.float32), 'abcd', None])
def test_values_that_are_not_arrays(xy, t):
    refuses(lambda: mark_sharding(t, xy, ('x',)), f'{type(t).__name__} is not an array')


def test_empty_arrays_and_keys(xy):
    assert mark_sharding(np.ones((0, 2)), xy, ('x', 'y')).shape == (0, 2)
    keys = mark_sharding(jax.random.split(jax.random.key(0), 8), xy, ('x',))
    assert keys.sharding == NamedSharding(xy, P('x'))


def test_D13_clear_sharding(xy):
    x = mark_sharding(np.arange(16).reshape(8, 2), xy, ('x', 'y'))
    cleared = clear_sharding(x)
    assert {d.id for d in cleared.sharding.device_set} == {0}
    assert cleared.tolist() == x.tolist()
    assert x.sharding == NamedSharding(xy, P('x', 'y'))
    refuses(lambda: clear_sharding(np.ones(8)), 'ndarray has no sharding to clear')


def test_D13_clear_sharding_within_a_program(xy):
    def program(t):
        return clear_sharding(mark_sharding(t, xy, ('x', None)))

    marked, cleared = jax.make_jaxpr(program)(jnp.ones((8, 2))).eqns
    assert not marked.params['unconstrained_dims']
    assert cleared.params['unconstrained_dims'] == {0, 1}


def test_D13_clear_sharding_over_explicit_axes():
    """Over Explicit axes an array always has a layout, so the result is replicated."""
    mesh = xy_mesh('explicit')
    x = mark_sharding(np.arange(16).reshape(8, 2), mesh, ('x', 'y'))
    assert {d.id for d in clear_sharding(x).sharding.device_set} == {0}
    for context in (mesh, None):
        if context is None:
            cleared = jax.jit(clear_sharding)(x)
        else:
            with jax.set_mesh(mesh):
                cleared = jax.jit(clear_sharding)(x)
        assert cleared.sharding == NamedSharding(mesh, P(None, None))
        assert cleared.tolist() == np.arange(16).reshape(8, 2).tolist()
