"""How the repositories that import T5X's partitioner use it; each test imitates one of them."""

import functools

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze
from flax.linen import partitioning as flax_partitioning
from jax._src import xla_bridge
from jax.sharding import NamedSharding, PartitionSpec as P
from mock_devices import tpus, v3_4x4
from t5x_like_states import (
    KERNEL,
    RULES,
    InferenceState,
    metadata,
    optimized_state,
)

import partitioning
from partitioning import (
    AxisRules,
    LocalChunker,
    LogicalAxisRules,
    MeshConfig,
    PjitPartitioner,
    TrainState,
    standard_logical_axis_rules,
)
from partitioning.layout.ownership import shard_ownership

pytestmark = pytest.mark.core


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    return PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)


# whisper-jax: an InferenceState of the names alone, and functions over its specs.


def test_whisper_jax(partitioner):
    axes = freeze(metadata({'decoder': {'kernel': ('embed', 'mlp')}}))
    state = InferenceState(
        step=jnp.array(0),
        params=freeze({'decoder': {'kernel': KERNEL}}),
        params_axes=axes,
        flax_mutables=None,
        flax_mutables_axes=axes,
    )
    mesh_axes = partitioner.get_mesh_axes(state)
    specs = mesh_axes.params
    assert specs['decoder']['kernel'] == P(None, 'model') and mesh_axes.step is None
    to_bf16 = partitioner.partition(
        lambda params: jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), (specs,), specs
    )
    params = to_bf16(state.params)
    expected = NamedSharding(partitioner.mesh, P(None, 'model'))
    assert params['decoder']['kernel'].sharding == expected
    generate = partitioner.partition(
        lambda params, x, scale: scale * (x @ params['decoder']['kernel'].astype(x.dtype)),
        in_axis_resources=(specs, P('data')),
        out_axis_resources=P('data'),
        static_argnums=(2,),
    )
    rows = np.ones((4, 8), np.float32)
    np.testing.assert_allclose(generate(params, rows, 2.0), 2 * rows @ KERNEL, rtol=1e-2)


# distil-whisper: its layers are scanned and rematerialized with flax's functions of T5X.


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        kernel = flax_partitioning.param_with_axes(
            'kernel', nn.initializers.normal(0.1), (8, 8), axes=('embed', 'mlp')
        )
        return x + flax_partitioning.with_sharding_constraint(x @ kernel, ('batch', 'embed')), None


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = flax_partitioning.scan_with_axes(
            flax_partitioning.remat(Layer),
            variable_axes={'params': 0},
            variable_broadcast=False,
            in_axes=nn.broadcast,
            split_rngs={'params': True},
            length=2,
            axis_name='layers',
            axes_collections=('params',),
        )
        return layers(name='layers')(x, None)[0]


def test_distil_whisper():
    rules = (*RULES, ('layers', None))
    partitioner = PjitPartitioner(num_partitions=2, logical_axis_rules=rules)
    tx, rows = optax.sgd(0.1), np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    variables = Layers().init(jax.random.key(0), rows)
    assert variables['params_axes']['layers']['kernel_axes'].names == ('layers', 'embed', 'mlp')
    state = TrainState.create(variables, tx)
    axes = partitioner.get_mesh_axes(state)
    assert axes.params['layers']['kernel'] == P(None, None, 'model')

    def step(state, rows):
        def loss(params):
            return (Layers().apply({'params': params}, rows) ** 2).sum()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads, tx), value

    partitioned = partitioner.partition(step, (axes, P('data')), (axes, None))
    (trained, value), (expected, expected_value) = (
        partitioned(state, rows),
        jax.jit(step)(state, rows),
    )
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), trained, expected)


# protoscribe: everything is bound in gin.

GIN = """
from __gin__ import dynamic_registration
import partitioning
partitioning.PjitPartitioner:
  num_partitions = 2
  logical_axis_rules = @partitioning.standard_logical_axis_rules()
partitioning.standard_logical_axis_rules.additional_rules = [('glyph', 'model'), ('stroke', None)]
"""


def test_protoscribe():
    gin.parse_config(GIN)
    partitioner = gin.get_configurable(PjitPartitioner)()
    assert dict(partitioner.mesh.shape) == {'data': 4, 'model': 2}
    assert partitioner.logical_axis_rules[-2:] == (('glyph', 'model'), ('stroke', None))


# prompt-tuning and t5x_retrieval: rules of their own after, and chained through, T5X's.


def prompt_rules() -> LogicalAxisRules:
    return [('prompt', None), ('prompt+embed', 'model')]


def test_prompt_tuning():
    rules = standard_logical_axis_rules(additional_rules=prompt_rules())
    partitioner = PjitPartitioner(2, logical_axis_rules=rules)
    prompt = nn.LogicallyPartitioned(np.ones((5, 8)), ('prompt', 'prompt+embed'))
    assert partitioner.get_mesh_axes({'prompt': prompt}) == {'prompt': P(None, 'model')}
    assert partitioning.PartitionSpec is P


def test_t5x_retrieval():
    """T5X's rules, which are the additional rules of the additional rules; the first one wins."""
    chain = standard_logical_axis_rules(
        additional_rules=[('tower', 'data'), *standard_logical_axis_rules(2, 1, prompt_rules())]
    )
    partitioner = PjitPartitioner(2, logical_axis_rules=chain)
    named = nn.LogicallyPartitioned(np.ones((4, 8)), ('tower', 'embed'))
    assert partitioner.get_mesh_axes({'w': named}) == {'w': P('data', None)}
    assert chain[-1] == ('prompt+embed', 'model')


# improved-t5: two-dimensional parameters on a tile of a pod.


def test_improved_t5(monkeypatch):
    monkeypatch.setattr(jax, 'devices', lambda *_: v3_4x4())
    partitioner = PjitPartitioner(
        model_parallel_submesh=(2, 2, 1, 2),
        logical_axis_rules=standard_logical_axis_rules(parameter_partitioning_dims=2),
    )
    tile, size = partitioner._model_parallel_submesh, partitioner._num_partitions
    assert np.prod(tile) == 8 and size is None
    assert dict(partitioner.mesh.shape) == {'data': 4, 'model': 8}
    kernel = nn.LogicallyPartitioned(jax.ShapeDtypeStruct((8, 16), np.float32), ('embed', 'mlp'))
    assert partitioner.get_mesh_axes({'kernel': kernel}) == {'kernel': P('data', 'model')}


# unified-io-2: parameters are read chunk by chunk in host memory, and moved to the devices.


def process_holds(monkeypatch, process):
    """T5X's tests replace this function of jax to see the chunks of other processes."""
    monkeypatch.setattr(xla_bridge, 'process_index', lambda *_: process)


def test_unified_io_2_reads_the_chunk_of_its_process(monkeypatch):
    devices = tpus((4, 4, 1), 'TPU v3', cores=2)
    assert partitioning.bounds_from_last_device(devices[-1]) == (4, 4, 1, 2)
    assert partitioning.get_coords(devices[3]) == (1, 0, 0, 1)
    mesh = MeshConfig.from_t5x(4, devices=devices).build()
    sharding = NamedSharding(mesh, P('data', 'model'))
    for process in range(4):
        process_holds(monkeypatch, process)
        chunker = LocalChunker(mesh)
        info = chunker.get_local_chunk_info((128, 16), ('data', 'model'))
        read = np.zeros((128, 16), bool)
        read[info.slice] = True
        held = np.zeros((128, 16), bool)
        for device, index in sharding.devices_indices_map((128, 16)).items():
            held[index] |= device.process_index == process
        np.testing.assert_array_equal(read, held)
        assert chunker.num_chunks == {'data': 4, 'model': 1} and chunker.chunk_ids['model'] == 0
        whole = chunker.get_local_chunk_info((128, 16), (None, 'model'))
        assert whole.slice[0] == slice(None) and whole.replica_id == chunker.chunk_ids['data']
        layout = PjitPartitioner(mesh=mesh).get_data_layout(16)
        assert layout.shard_id == chunker.chunk_ids['data'] and layout.num_shards == 4
    assert {*shard_ownership(mesh, ()).chunks} == {0, 1, 2, 3}


def test_unified_io_2_moves_parameters(partitioner):
    kept = PjitPartitioner(num_partitions=2, params_on_devices=False, logical_axis_rules=RULES)
    assert not kept.params_on_devices
    state = InferenceState(0, freeze({'kernel': KERNEL}), metadata({'kernel': ('embed', 'mlp')}))
    axes = kept.get_mesh_axes(state)
    moved = kept.move_params_to_devices(state, axes)
    assert moved.params['kernel'].sharding == NamedSharding(kept.mesh, P(None, 'model'))
    np.testing.assert_array_equal(moved.params['kernel'], KERNEL)
    kept.params_on_devices = True
    assert kept.params_on_devices


# flip: rules are appended to the attribute of T5X.


@pytest.mark.parametrize('kind', [tuple, list])
def test_flip(kind):
    partitioner = PjitPartitioner(num_partitions=2)
    assert partitioner._num_partitions <= 8
    before = partitioner.data_partition_spec
    partitioner._logical_axis_rules += kind([('classes', 'model')])
    partitioner._logical_axis_rules += kind([('_null0', None)])
    state = InferenceState(
        jnp.array(0), freeze({'head': KERNEL}), freeze(metadata({'head': ('_null0', 'classes')}))
    )
    assert partitioner.logical_axis_rules[-2:] == (('classes', 'model'), ('_null0', None))
    logical = partitioner.get_logical_axes(state)
    assert tuple(logical.params['head']) == ('_null0', 'classes')
    axes = partitioner.get_mesh_axes(state)
    assert axes.params['head'] == P(None, 'model')
    moved = partitioner.move_params_to_devices(state, axes)
    assert moved.params['head'].sharding.spec == P(None, 'model')
    assert partitioner.data_partition_spec == before
    partitioner._logical_axis_rules = [('batch', ('data', 'model')), ('classes', None)]
    assert partitioner.data_partition_spec == P(('data', 'model'))
    with pytest.raises(ValueError, match="'_null0'"):
        partitioner.get_mesh_axes(state)
    with pytest.raises(ValueError, match='malformed'):
        partitioner._logical_axis_rules += [('classes', 'model', 'data')]


def test_appended_rules_keep_the_policies():
    rules = AxisRules(RULES, on_unmatched='replicate', on_indivisible='drop_axis')
    partitioner = PjitPartitioner(num_partitions=2, logical_axis_rules=rules)
    partitioner._logical_axis_rules += (('classes', None),)
    more = [('classes', 'model')]
    first = more + rules
    for longer in (partitioner.logical_axis_rules, rules + more, first):
        assert (longer.on_unmatched, longer.on_indivisible) == ('replicate', 'drop_axis')
        assert len(longer) == len(RULES) + 1
    assert first[0] == ('classes', 'model')


# flaxformer: metadata of mutable variables, and of layers under vmap.


class Head(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = flax_partitioning.param_with_axes(
            'kernel', nn.initializers.normal(0.1), (8, 4), axes=('embed', 'mlp')
        )
        return flax_partitioning.with_sharding_constraint(x @ kernel, ('batch', 'mlp'))


class Counter(nn.Module):
    @nn.compact
    def __call__(self, x):
        seen = flax_partitioning.variable_with_axes(
            'cache', 'seen', jnp.zeros, (8,), axes=('embed',)
        )
        seen.value += x.sum(0)
        return Head(name='head')(x)


class Towers(nn.Module):
    @nn.compact
    def __call__(self, x):
        towers = flax_partitioning.vmap_with_axes(
            Counter,
            variable_axes={'params': 0, 'cache': 0},
            split_rngs={'params': True},
            in_axes=0,
            partitioning_axis_names={'params': 'towers', 'cache': 'towers'},
        )
        return towers(name='towers')(x)


def test_flaxformer():
    partitioner = PjitPartitioner(num_partitions=2, logical_axis_rules=[*RULES, ('towers', 'data')])
    variables = jax.eval_shape(Towers().init, jax.random.key(0), jnp.ones((4, 2, 8)))
    kernel_axes = variables['params_axes']['towers']['head']['kernel_axes']
    assert kernel_axes == flax_partitioning.AxisMetadata(('towers', 'embed', 'mlp'))
    axes = partitioner.get_mesh_axes(TrainState.create(variables, optax.adam(0.1)))
    assert axes.params['towers']['head']['kernel'] == P('data', None, 'model')
    assert axes.opt_state[0].mu['towers']['head']['kernel'] == P('data', None, 'model')
    assert axes.flax_mutables['cache']['towers']['seen'] == P('data', None)
    # T5X's own state has the same names in both of its fields.
    state = optimized_state(
        {'w': (8, 4)},
        {'w': ('embed', 'mlp')},
        flax_mutables=freeze({'cache': {'seen': jax.ShapeDtypeStruct((8,), np.float32)}}),
        flax_mutables_axes=freeze({'cache': metadata({'seen': ('mlp',)})}),
    )
    specs = partitioner.get_mesh_axes(state)
    assert specs.flax_mutables['cache']['seen'] == P('model')
    jax.tree.map(lambda spec, arrays: None, specs.flax_mutables, state.flax_mutables)


# mt3 and music-spectrogram-diffusion: specs of the module, and jit's arguments by T5X's names.


def test_music_spectrogram_diffusion(partitioner):
    predict = partitioner.partition(
        lambda params, batch, rng, steps: batch @ params['kernel'] + steps,
        in_axis_resources=({'kernel': None}, partitioner.data_partition_spec, None),
        out_axis_resources=partitioning.PartitionSpec('data', None),
        static_argnums=(3,),
        donate_argnums=(),
    )
    rows, key = np.ones((4, 8), np.float32), jax.random.key(0)
    compiled = predict.lower({'kernel': KERNEL}, rows, key, 3).compile()
    assert compiled({'kernel': KERNEL}, rows, key).shape == (4, 4)
    found = predict({'kernel': KERNEL}, rows, key, 3)
    np.testing.assert_allclose(found, rows @ KERNEL + 3, rtol=1e-5)
    assert found.sharding == NamedSharding(partitioner.mesh, P('data', None))
    assert isinstance(predict, partitioning.PjittedFnWithContext)
