"""torch_xla's words held in every way, right and wrong; see tests/seeds for their own tables."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mock_devices import mesh_of_processes

from partitioning.compat import torch_xla as spmd
from partitioning.compat.torch_xla import (
    ManualShards,
    PaddedArray,
    ShardingSpec,
    apply_backward_optimization_barrier,
    clear_sharding,
    disable_manual_sharding,
    enable_manual_sharding,
    global_from_shards,
    local_shards,
    mark_sharding,
    mark_sharding_with_gradients,
    mesh_from_device_ids,
    shard_batch,
)

pytestmark = pytest.mark.core

TYPES = {
    'auto': (AxisType.Auto, AxisType.Auto),
    'explicit': (AxisType.Explicit, AxisType.Explicit),
    'mixed': (AxisType.Explicit, AxisType.Auto),
}


def mesh_of(types='auto', ids=range(8)):
    mesh = mesh_from_device_ids(ids, (4, 2), ('x', 'y'))
    return Mesh(mesh.devices, mesh.axis_names, axis_types=TYPES[types])


def test_import_loads_nothing_heavy():
    code = (
        'import sys, partitioning; assert "partitioning.compat.torch_xla" not in sys.modules;'
        'import partitioning.compat.torch_xla;'
        'assert not {"flax", "optax", "gin"} & set(sys.modules)'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


# Meshes.


@pytest.mark.parametrize(
    'ids, shape, message',
    [
        (np.arange(8.0), (4, 2), 'device id 0.0 must be a whole number'),
        ([True, *range(1, 8)], (4, 2), 'device id True must be a whole number'),
        (set(range(8)), (4, 2), 'have no order'),
        (8, (4, 2), 'device_ids=8 must be a sequence'),
        (range(8), 8, 'mesh_shape=8 must be a sequence'),
        (range(8), (), r'mesh_shape=\(\) must be a sequence of sizes'),
        (range(8), (8, 0), 'the size 0 must be'),
        (range(8), (-1, -1), '2 sizes of -1'),
    ],
)
def test_meshes_that_cannot_be(ids, shape, message):
    with pytest.raises(ValueError, match=message):
        mesh_from_device_ids(ids, shape)


def test_a_part_of_the_machine():
    some = jax.devices()[4:]
    mesh = mesh_from_device_ids([7, 6, 5, 4], (2, -1), ('x', 'y'), devices=some)
    assert spmd.get_logical_mesh(mesh).tolist() == [[7, 6], [5, 4]]
    assert spmd.hlo_sharding(mesh, (0, None)) == (
        '{devices=[2,1,2]2,3,0,1 last_tile_dim_replicate}'
    )
    assert spmd.get_logical_mesh(spmd.get_1d_mesh(devices=some[::-1])).tolist() == [4, 5, 6, 7]
    with pytest.raises(ValueError, match='device id 3 is of none of the 4 devices'):
        mesh_from_device_ids([3, 4, 5, 6], (4,), devices=some)


def test_a_mesh_in_the_place_of_a_spec():
    with pytest.raises(ValueError, match='comes before the partition spec'):
        mark_sharding(np.ones(8), ('x',), mesh_of())
    with pytest.raises(ValueError, match=r'must be a jax\.sharding\.Mesh'):
        spmd.set_global_mesh({'x': 8})


# Marks.


@pytest.mark.parametrize('types', TYPES)
@pytest.mark.parametrize('ids', [range(8), range(7, -1, -1), (3, 1, 4, 0, 5, 2, 6, 7)])
def test_marks_in_and_out_of_programs(types, ids):
    mesh, x = mesh_of(types, ids), np.arange(64.0).reshape(8, 8)
    placed = mark_sharding(x, mesh, (None, None))
    for spec in (('x', None), (None, 'y'), ('y', 'x'), (('x', 'y'), None), (None, None)):
        expected = NamedSharding(mesh, P(*spec))
        assert mark_sharding(x, mesh, spec).sharding == expected
        with jax.set_mesh(mesh):
            inside = jax.jit(lambda t, spec=spec: mark_sharding(t * 2, mesh, spec))(placed)
            constant = jax.jit(lambda spec=spec: mark_sharding(x, mesh, spec))()
        for made, values in ((inside, 2 * x), (constant, x)):
            assert made.sharding.is_equivalent_to(expected, 2)
            np.testing.assert_array_equal(made, values)


@pytest.mark.parametrize('types', ['auto', 'explicit'])
def test_marks_in_programs_without_a_context(types):
    mesh = mesh_of(types)
    x = mark_sharding(np.ones((8, 8)), mesh, (None, None))
    made = jax.jit(lambda t: mark_sharding(t * 2, mesh, (None, 'y')))(x)
    assert made.sharding.is_equivalent_to(NamedSharding(mesh, P(None, 'y')), 2)


def test_axes_of_several_types_need_a_context():
    mesh = mesh_of('mixed')
    mark = jax.jit(lambda t: mark_sharding(t, mesh, ('x', None)))
    with pytest.raises(ValueError, match=r'is none, not x 4 x y 2 .*Explicit, Auto.*set_mesh'):
        mark(np.ones((8, 8)))
    other = mesh_from_device_ids(range(8), (8,))
    with jax.set_mesh(other), pytest.raises(ValueError, match='is 0 8, not x 4 x y 2'):
        mark(np.ones((8, 8)))


def test_marks_within_manual_sharding():
    mesh = mesh_of()
    shards = enable_manual_sharding(np.ones((32, 8)), mesh, ('x', 'y'))
    with pytest.raises(ValueError, match="'x' is Manual here"):
        shards.apply(lambda block: mark_sharding(block, mesh, ('x', 'y')))
    with pytest.raises(ValueError, match='inside a shard_map'):
        shards.apply(clear_sharding)


@pytest.mark.parametrize(
    't, message',
    [
        ([1, 2, 3, 4], 'list is no array'),
        (jax.ShapeDtypeStruct((8,), jnp.float32), 'ShapeDtypeStruct is no array'),
        ('abcd', 'str is no array'),
        (None, 'NoneType is no array'),
    ],
)
def test_what_is_no_array(t, message):
    with pytest.raises(ValueError, match=message):
        mark_sharding(t, mesh_of(), ('x',))


def test_policies_are_known():
    with pytest.raises(ValueError, match="must be 'error', 'pad' or 'replicate', not 'drop'"):
        mark_sharding(np.ones(8), mesh_of(), ('x',), on_indivisible='drop')


def test_only_what_does_not_divide_is_replicated_or_padded():
    mesh, x = mesh_of(), np.ones((9, 8))
    assert mark_sharding(x, mesh, ('x', 'y'), on_indivisible='replicate').sharding.spec == P(
        None, 'y'
    )
    padded = mark_sharding(x, mesh, ('x', 'y'), on_indivisible='pad')
    assert padded.array.shape == (12, 8) and padded.shape == (9, 8)
    assert isinstance(mark_sharding(x, mesh, (None, 'y'), on_indivisible='pad'), jax.Array)
    for dims, fits in (((9, 8), '8 or 12'), ((3, 8), '4')):
        with pytest.raises(ValueError, match=f"4, the size of mesh axis 'x'. Use {fits}, or"):
            mark_sharding(np.ones(dims), mesh, ('x', 'y'))
    with pytest.raises(ValueError, match=r"axes \('x', 'y'\). Use 8 or 16, or"):
        mark_sharding(np.ones(9), mesh, (('x', 'y'),))


def test_xla_returns_what_it_pads_whole():
    """So padding in sight is the only one that leaves a program in shards."""
    mesh = mesh_of()
    whole = jax.jit(lambda t: jax.lax.with_sharding_constraint(t, NamedSharding(mesh, P('x'))))
    assert whole(np.arange(9)).sharding.is_fully_replicated
    ours = jax.jit(lambda t: mark_sharding(t, mesh, ('x',), on_indivisible='pad'))
    assert ours(np.arange(9)).array.sharding.spec == P('x')


@pytest.mark.parametrize('types', TYPES)
@pytest.mark.parametrize('dtype', [np.int32, ml_dtypes.bfloat16, np.bool_, np.complex64])
def test_padding_comes_and_goes(types, dtype):
    mesh, x = mesh_of(types), (np.arange(7 * 5).reshape(7, 5) % 2).astype(dtype)
    for t in (x, jnp.asarray(x), mark_sharding(x[:6], mesh, ('y', None))):
        padded = mark_sharding(t, mesh, ('x', 'y'), on_indivisible='pad')
        assert isinstance(padded, PaddedArray) and padded.array.dtype == dtype
        assert padded.array.shape == (8, 6)
        again = mark_sharding(padded, mesh, (('x', 'y'), None), on_indivisible='pad')
        for array in (padded.unpadded(), again.unpadded(), clear_sharding(padded)):
            np.testing.assert_array_equal(array, np.asarray(t))
        inside = jax.jit(lambda p: p.unpadded())(padded)
        np.testing.assert_array_equal(inside, np.asarray(t))
        on_host = jax.device_get(padded)
        assert not on_host.array[np.shape(t)[0] :].any() and not on_host.array[:, 5:].any()


def test_padding_that_is_none():
    with pytest.raises(ValueError, match=r'shape \(8,\) cannot be \(9,\)'):
        PaddedArray(array=jnp.ones(8), shape=(9,)).unpadded()


def test_empty_arrays_and_keys():
    mesh = mesh_of()
    assert mark_sharding(np.ones((0, 2)), mesh, ('x', 'y')).shape == (0, 2)
    keys = mark_sharding(jax.random.split(jax.random.key(0), 8), mesh, ('x',))
    assert keys.sharding == NamedSharding(mesh, P('x'))


def test_what_has_no_sharding_to_clear():
    with pytest.raises(ValueError, match='ndarray has no sharding to clear'):
        clear_sharding(np.ones(8))


def test_clear_sharding_over_explicit_axes():
    mesh = mesh_of('explicit')
    x = mark_sharding(np.ones((8, 8)), mesh, ('x', 'y'))
    assert jax.jit(clear_sharding)(x).sharding.is_fully_replicated


# Shards.


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_shards_there_and_back(data):
    ids = data.draw(st.permutations(range(8)))
    mesh = mesh_from_device_ids(ids, data.draw(st.sampled_from([(4, 2), (2, 2, 2), (1, 8)])))
    rank = data.draw(st.integers(1, 3))
    axes = data.draw(st.permutations([*mesh.axis_names, None, None]))
    shape = tuple(data.draw(st.integers(1, 17)) for _ in range(rank))
    values = np.arange(np.prod(shape)).reshape(shape)
    x = mark_sharding(values, mesh, axes[:rank], on_indivisible='pad')
    shards = local_shards(x)
    seen = np.zeros(shape, int)
    for shard in shards:
        np.testing.assert_array_equal(shard.unpadded_data, values[shard.index])
        seen[shard.index] += shard.replica_id == 0
    assert (seen == 1).all()
    for given_shards in (data.draw(st.permutations(shards)), [s.data for s in shards]):
        back = global_from_shards(given_shards, mesh, axes[:rank], shape)
        assert type(back) is type(x) and back.shape == shape
        whole = back.unpadded() if isinstance(back, PaddedArray) else back
        np.testing.assert_array_equal(whole, values)


def test_shards_of_no_array_on_devices():
    with pytest.raises(ValueError, match='ndarray has no shards'):
        local_shards(np.ones(8))
    with pytest.raises(ValueError, match='on no device yet'):
        jax.jit(lambda t: local_shards(t)[0].data)(np.ones(8))


def test_shards_that_make_no_array():
    mesh = mesh_of()
    shards = local_shards(mark_sharding(np.arange(8), mesh, (('x', 'y'),)))
    spec = (('x', 'y'),)
    for given_shards, message in [
        (np.ones((8, 1)), 'not ndarray'),
        ([*shards[:7], shards[0]], r'shards of devices \[0, 0, 1, 2, 3, 4, 5, 6\]'),
        ([*shards[:7], np.array([7])], '7 of 8 shards are LocalShards'),
    ]:
        with pytest.raises(ValueError, match=message):
            global_from_shards(given_shards, mesh, spec)
    data = [shard.data for shard in shards]
    for shape, message in [
        (8, 'global_shape=8 must be a sequence'),
        ((8.0,), 'can be 1 to 8, not 8.0'),
        ((0,), 'can be 1 to 8, not 0'),
        ((-1,), 'can be 1 to 8, not -1'),
    ]:
        with pytest.raises(ValueError, match=message):
            global_from_shards(data, mesh, spec, shape)
    with pytest.raises(ValueError, match='holds no device of the mesh'):
        global_from_shards(data, mesh_of_processes([[1, 1]], ('x', 'y')), spec)


# Manual sharding.


@pytest.mark.parametrize('types', ['auto', 'explicit'])
def test_blocks_of_several_arrays(types):
    """A product of matrices whose contracted dimension is in parts."""
    mesh = mesh_of(types)
    a, b = np.arange(32.0).reshape(4, 8), np.arange(48.0).reshape(8, 6)

    def product(a, b):
        rows = enable_manual_sharding(a, mesh, ('y', 'x'))
        columns = enable_manual_sharding(b, mesh, ('x', None))
        assert rows.shape == (2, 2) and columns.shape == (2, 6)
        return rows.apply(
            lambda left, right: jax.lax.psum(left @ right, 'x'),
            columns,
            partition_spec=('y', None),
        )

    with jax.set_mesh(mesh):
        for made in (product(a, b), jax.jit(product)(a, b)):
            assert isinstance(made, ManualShards) and made.shape == (2, 6)
            np.testing.assert_allclose(disable_manual_sharding(made, (4, 6)), a @ b)
        through = jax.jit(lambda shards: shards.apply(functools.partial(jnp.multiply, 2.0)))(made)
    np.testing.assert_allclose(disable_manual_sharding(through), 2 * (a @ b))


def test_gradients_pass_manual_sharding():
    def loss(t):
        shards = enable_manual_sharding(t, mesh_of(), ('x', None))
        return disable_manual_sharding(shards.apply(jnp.sin)).sum()

    x = jnp.arange(8.0).reshape(4, 2)
    np.testing.assert_allclose(jax.grad(loss)(x), np.cos(x), rtol=1e-6)


def test_blocks_that_cannot_be():
    mesh = mesh_of()
    shards = enable_manual_sharding(np.ones((8, 8)), mesh, ('x', 'y'))
    elsewhere = enable_manual_sharding(np.ones((8, 8)), mesh_of(ids=range(7, -1, -1)), ('x', 'y'))
    padded = mark_sharding(np.ones(9), mesh, ('x',), on_indivisible='pad')
    for refuse, message in [
        (lambda: shards.apply(jnp.add, np.ones(3)), 'operand 1 is ndarray, not ManualShards'),
        (lambda: shards.apply(jnp.add, elsewhere), 'operand 1 is on another mesh'),
        (lambda: shards.apply(jnp.sum), r'blocks of shape \(\), but .* for 2 dimensions'),
        (lambda: shards.apply(lambda b: (b, b)), 'must return one array, not tuple'),
        (lambda: shards.apply(jnp.add, partition_spec=('z', None)), "axis name 'z'"),
        (lambda: shards.apply(lambda b: b, partition_spec=('x', None)), 'leaves out axes'),
        (lambda: enable_manual_sharding(np.ones((9, 8)), mesh, ('x', 'y')), 'does not divide'),
        (lambda: enable_manual_sharding(shards, mesh, ('x', 'y')), 'ManualShards already'),
        (lambda: enable_manual_sharding(padded, mesh, ('x',)), 'PaddedArray cannot be'),
        (lambda: disable_manual_sharding(np.ones(8)), 'ndarray is no ManualShards'),
        (lambda: disable_manual_sharding(shards, 8), 'full_shape=8 must be a sequence'),
    ]:
        with pytest.raises(ValueError, match=message):
            refuse()


def test_errors_of_the_function_are_its_own():
    shards = enable_manual_sharding(np.ones((8, 8)), mesh_of(), ('x', 'y'))

    def fails(block):
        raise ValueError('of the function')

    with pytest.raises(ValueError, match='of the function'):
        shards.apply(fails)


# Gradients.


def layer(params, x, *, scale=2.0, name='layer'):
    return jnp.tanh(x @ params['w']).sum(-1) * params['steps'] * scale


def barriers(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'optimization_barrier']


def test_a_barrier_on_the_way_back():
    params = {'w': jnp.ones((3, 4)), 'steps': 3}
    x = jnp.arange(15.0).reshape(5, 3)
    barred = apply_backward_optimization_barrier(layer)
    assert barred.__name__ == 'layer'
    np.testing.assert_array_equal(
        barred(params, x, scale=3.0, name='a'), layer(params, x, scale=3.0)
    )

    def gradients(fn):
        return jax.grad(lambda w, x: fn({**params, 'w': w}, x).sum(), argnums=(0, 1))

    for mine, theirs in zip(
        gradients(barred)(params['w'], x), gradients(layer)(params['w'], x), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert not barriers(jax.make_jaxpr(gradients(layer))(params['w'], x).jaxpr)
    [barrier] = barriers(jax.make_jaxpr(gradients(barred))(params['w'], x).jaxpr)
    assert sorted(v.aval.shape for v in barrier.invars) == [(3, 4), (5, 3)]
    text = jax.jit(gradients(barred)).lower(params['w'], x).as_text()
    assert text.count('optimization_barrier') == 1
    assert not barriers(jax.make_jaxpr(lambda x: barred(params, x))(x).jaxpr)


def test_a_barrier_for_nothing():
    assert apply_backward_optimization_barrier(lambda n=3: n)() == 3
    assert jax.jacrev(jax.grad(apply_backward_optimization_barrier(jnp.sin)))(0.5) == (
        pytest.approx(-np.sin(0.5))
    )
    with pytest.raises(ValueError, match='must be a function'):
        apply_backward_optimization_barrier(np.ones(3))


def test_gradients_of_a_layer_in_a_program():
    """Marked between two layers, the gradient is laid out there too."""
    mesh, w = mesh_of(), jnp.ones((8, 8))

    def loss(t):
        h = mark_sharding_with_gradients(jnp.sin(t), mesh, ('x', 'y'))
        return (h @ w).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((8, 8))).jaxpr
    constraints = [e for e in jaxpr.eqns if e.primitive.name == 'sharding_constraint']
    assert [e.params['sharding'].spec for e in constraints] == [P('x', 'y')] * 2


# Batches.


def test_specs_that_cannot_be():
    mesh, other = mesh_of(), mesh_of(ids=range(7, -1, -1))
    for refuse, message in [
        (lambda: ShardingSpec(mesh, ('z',)), "axis name 'z'"),
        (lambda: ShardingSpec(mesh, ('x',), minibatch=1), 'minibatch=1 must be True or False'),
        (lambda: ShardingSpec(mesh, (None, 'x'), minibatch=True), 'must be over a mesh axis'),
        (lambda: ShardingSpec(mesh, (), minibatch=True), 'must be over a mesh axis'),
        (lambda: ShardingSpec(mesh, ('x',)).apply(np.ones((8, 8))), 'is of rank 2'),
        (lambda: ShardingSpec(mesh, ('x',)).can_apply([1]), 'is no array'),
        (
            lambda: shard_batch(np.ones(8), ShardingSpec(mesh, ('x',)), other),
            'the ShardingSpec is of another mesh',
        ),
        (lambda: shard_batch({'a': [np.ones(9)]}, ('x',), mesh), r"\['a'\]\[0\]: dimension 0"),
        (
            lambda: jax.jit(ShardingSpec(mesh, ('x',), minibatch=True).apply)(np.ones(8)),
            'no traced function can',
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            refuse()


def test_specs_are_values():
    mesh = mesh_of()
    spec = ShardingSpec(mesh, (0, (1,)))
    assert spec == ShardingSpec(mesh, ('x', 'y')) and spec.partition_spec == P('x', 'y')
    assert len({spec, ShardingSpec(mesh, ('x', 'y')), ShardingSpec(mesh, ('x', 'y'), True)}) == 2
    with pytest.raises(AttributeError):
        spec.mesh = None


def test_specs_in_programs():
    mesh = mesh_of()
    made = jax.jit(lambda b: shard_batch(b, {'x': ('x', None)}, mesh))({'x': np.ones((8, 8))})
    assert made['x'].sharding.is_equivalent_to(NamedSharding(mesh, P('x')), 2)


# What is said of padding, and of what cannot be.


def test_padding_is_known_from_the_shards():
    mesh, x = mesh_of(), np.arange(18.0).reshape(9, 2)
    padded = mark_sharding(x, mesh, ('x', None), on_indivisible='pad')
    shards = local_shards(padded)
    assert {shard.global_shape for shard in shards} == {(9, 2)}
    for shape in (None, (9, 2)):
        back = global_from_shards(shards[::-1], mesh, ('x', None), shape)
        assert isinstance(back, PaddedArray)
        np.testing.assert_array_equal(back.unpadded(), x)
    even = local_shards(padded.array)
    assert global_from_shards(even, mesh, ('x', None)).shape == (12, 2)
    with pytest.raises(ValueError, match=r'of shape \(9, 2\), \(12, 2\): give those of one array'):
        global_from_shards((*shards[:4], *even[4:]), mesh, ('x', None))
    with pytest.raises(ValueError, match=r'\(9, 2\), and global_shape is \(10, 2\)'):
        global_from_shards(shards, mesh, ('x', None), (10, 2))


def test_padded_arrays_say_what_they_are():
    padded = mark_sharding(np.ones((9, 2), 'int8'), mesh_of(), ('x', None), on_indivisible='pad')
    assert (padded.shape, padded.ndim, padded.dtype) == ((9, 2), 2, np.dtype('int8'))


@pytest.mark.parametrize(
    'fn',
    [
        lambda block: jax.lax.psum(block, 'z'),
        lambda block: jax.lax.ppermute(block, 'z', [(0, 1)]),
        lambda block: jax.lax.all_gather(block, 'z'),
    ],
)
def test_collectives_over_axes_that_are_none(fn):
    shards = enable_manual_sharding(np.ones((8, 8)), mesh_of(), ('x', None))
    with pytest.raises(ValueError, match='x 4 x y 2'):
        shards.apply(fn)


def test_errors_of_the_function_stay_what_they_are():
    shards = enable_manual_sharding(np.ones((8, 8)), mesh_of(), ('x', None))

    def fails(block):
        raise AssertionError('of my own')

    with pytest.raises(AssertionError, match='of my own'):
        shards.apply(fails)
    with pytest.raises(NameError, match='unknown'):
        shards.apply(lambda block: unknown)  # noqa: F821


def test_the_way_out_of_an_all_gather():
    mesh, x = mesh_of(), np.arange(64.0).reshape(8, 8)
    shards = enable_manual_sharding(x, mesh, ('x', None))
    gather = functools.partial(jax.lax.all_gather, axis_name='x', tiled=True)
    with pytest.raises(ValueError, match='disable_manual_sharding and mark_sharding with None'):
        shards.apply(gather, partition_spec=(None, None))
    whole = mark_sharding(disable_manual_sharding(shards), mesh, (None, None))
    np.testing.assert_array_equal(local_shards(whole)[0].data, x)


def test_sizes_that_do_not_divide_where_nothing_pads():
    mesh = mesh_of()
    with pytest.raises(ValueError, match=r'9 does not divide by 4.* or give it mark_sharding\('):
        enable_manual_sharding(np.ones(9), mesh, ('x',))
    array = mark_sharding(np.ones(9), mesh, ('x',), on_indivisible='pad').array
    assert enable_manual_sharding(array, mesh, ('x',)).shape == (3,)
    with pytest.raises(ValueError, match=r'9 does not divide by 4.*drop or fill up') as error:
        shard_batch({'rows': np.ones(9)}, {'rows': ('x',)}, mesh)
    assert 'on_indivisible' not in str(error.value)
