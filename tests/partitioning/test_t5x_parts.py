"""T5X's own names, signatures, attributes, states, subclasses and mixture of experts."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from t5x_like_states import (
    KERNEL,
    RULES,
    InferenceState,
    Statistics,
    metadata,
    optimized_state,
)

import partitioning
from partitioning import (
    AxisNames,
    LocalChunker,
    MeshConfig,
    MoePjitPartitioner,
    PjitPartitioner,
    TrainState,
    standard_logical_axis_rules,
)
from partitioning.partitioner import moe
from partitioning.partitioner.t5x_settings import T5xSettings

pytestmark = pytest.mark.core


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    return PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)


# The names and signatures.

NAMES = """
    AxisNames BasePartitioner BasePjitPartitioner CompiledPartitionedCallable DataLayout
    HardwareMesh JaxDevice LocalChunkInfo LocalChunker LogicalAxisRules Mesh MoePjitPartitioner
    OtherMesh PartitionSpec PartitionedCallable PjitPartitioner PjittedFnWithContext PyTreeDef
    TpuMesh TrainState bounds_from_last_device compute_num_model_partitions default_mesh
    default_moe_mesh get_coords get_cpu_mesh get_gpu_mesh get_mesh global_mesh_defined
    host_local_array_to_global_array override_partition_specs standard_logical_axis_rules
    with_sharding_constraint
"""


def test_every_name_exists():
    assert [name for name in NAMES.split() if not hasattr(partitioning, name)] == []


@pytest.mark.parametrize(
    'function, positional',
    [
        (
            MoePjitPartitioner,
            'num_expert_partitions num_partitions model_parallel_submesh params_on_devices '
            'logical_axis_rules state_filter_fn',
        ),
        (
            standard_logical_axis_rules,
            'activation_partitioning_dims parameter_partitioning_dims additional_rules',
        ),
        (moe.compute_num_model_partitions, 'num_model_partitions model_parallel_submesh'),
        (moe.override_partition_specs, 'resources'),
        (TrainState.replace_flax_mutables, 'self flax_mutables'),
    ],
)
def test_positional_parameters(function, positional):
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    found = [n for n, p in inspect.signature(function).parameters.items() if p.kind in kinds]
    assert found == positional.split()


def test_keyword_parameters_of_the_partitioner():
    given = {
        'num_partitions': 2,
        'model_parallel_submesh': None,
        'params_on_devices': False,
        'backend': 'cpu',
        'ici_mesh_shape': None,
        'dcn_mesh_shape': None,
        'logical_axis_rules': RULES,
        'use_shardy_partitioner': None,
    }
    partitioner = PjitPartitioner(**given)
    assert T5xSettings.__annotations__.keys() >= given.keys()
    assert dict(partitioner.mesh.shape) == {'data': 4, 'model': 2}
    assert (partitioner._backend, partitioner.params_on_devices) == ('cpu', False)
    assert partitioner.logical_axis_rules == tuple(RULES)


def test_settings_are_attributes_that_can_be_read(monkeypatch):
    given = PjitPartitioner(num_partitions=4, backend='cpu')
    assert (given._num_partitions, given._model_parallel_submesh) == (4, None)
    assert (given._backend, given._ici_mesh_shape, given._dcn_mesh_shape) == ('cpu', None, None)
    assert given._data_axis == 'data' and given._local_chunker.global_mesh is given.mesh
    shapes = PjitPartitioner(ici_mesh_shape=(1, 4, 2), dcn_mesh_shape=(1, 1, 1))
    assert shapes._ici_mesh_shape == (1, 4, 2) and shapes._data_axis == ('replica', 'data')
    assert PjitPartitioner(mesh=given.mesh)._num_partitions == 4
    described = MeshConfig(axes={'data': 2, 'model': 2}, dcn={'model': 2})
    assert PjitPartitioner(mesh=described)._num_partitions == 4
    experts = MoePjitPartitioner(2, 2, backend='cpu')
    assert (experts._num_expert_partitions, experts._num_partitions) == (2, 2)
    assert experts._backend == 'cpu'
    with pytest.raises(AttributeError, match=r'_num_partitions=2.*PjitPartitioner\(num_part'):
        given._num_partitions = 2


def test_shardy_is_always_used():
    assert PjitPartitioner(1, use_shardy_partitioner=True).use_shardy_partitioner is True
    with pytest.raises(ValueError, match=r'use_shardy_partitioner=False.*remove'):
        PjitPartitioner(1, use_shardy_partitioner=False)


# T5X itself: states whose logical axes leave fields empty.

SHAPES = {'logits': (16, 8), 'mlp': {'wo': {'kernel': (8, 4)}}}
OF_PARAMETERS = {'logits': ('vocab', 'embed'), 'mlp': {'wo': {'kernel': ('embed', 'mlp')}}}


@pytest.mark.parametrize('factored', [True, False])
@pytest.mark.parametrize('momentum', [True, False])
def test_the_states_of_t5x(partitioner, factored, momentum):
    state = optimized_state(SHAPES, OF_PARAMETERS, factored=factored, momentum=momentum)
    specs = partitioner.get_mesh_axes(state)
    for spec, place in (
        (P('model', None), ['logits']),
        (P(None, 'model'), ['mlp', 'wo', 'kernel']),
    ):
        target, held = specs._optimizer.target, specs._optimizer.state.param_states
        for key in place:
            target, held = target[key], held[key]
        assert target == spec
        assert held == Statistics(m=spec if momentum else None, v=None if factored else spec)
    assert specs.params_axes is specs.flax_mutables_axes is specs._optimizer.state.step is None
    assert specs.flax_mutables == {}
    plan = partitioner.plan(state)
    # The arrays without names are listed, replicated: the step and the statistics.
    rows = {row.path: row for row in plan.rows}
    assert len(rows) == len(jax.tree.leaves(state)) == 1 + 2 * 5
    assert rows['_optimizer/state/param_states/logits/v_row'].spec == P(None)
    assert rows['_optimizer/state/param_states/logits/v_row'].role == 'optimizer'
    assert rows['_optimizer/target/logits'].role == 'parameters'
    identity = partitioner.partition(lambda s: s, (specs,), specs)
    abstract = identity.eval_shape(state)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)


class Wrong(InferenceState):
    """A state whose logical axes have another tree than the state."""

    def as_logical_axes(self):
        return InferenceState(step=None, params=freeze(self.params_axes))


@pytest.mark.parametrize(
    'said, path',
    [
        ({'kernel': AxisNames('embed', 'mlp'), 'bias': AxisNames('mlp')}, 'params/bias'),
        ({}, 'params/kernel'),
        ({'kernel': {'deeper': AxisNames('mlp')}}, 'params/kernel'),
    ],
)
def test_axes_of_arrays_that_a_state_lacks_are_still_errors(partitioner, said, path):
    state = Wrong(jnp.array(0), freeze({'kernel': KERNEL}), said)
    with pytest.raises(ValueError, match=f'{path}.*(remove it|add its names)'):
        partitioner.get_mesh_axes(state)


# T5X's mixture of experts.


def test_functions_of_experts():
    assert moe.compute_num_model_partitions(2, None) == 2
    assert moe.compute_num_model_partitions(None, (1, 2, 1, 2)) == 4
    assert moe.compute_num_model_partitions(4, (1, 2, 1, 2)) == 4
    with pytest.raises(ValueError, match=r'3.*\(1, 2, 1, 2\).* 4 .*inconsistent'):
        moe.compute_num_model_partitions(3, (1, 2, 1, 2))
    with pytest.raises(ValueError, match='At least one'):
        moe.compute_num_model_partitions(None, None)
    both = P(('data', 'expert'))
    assert moe.override_partition_specs(P('data')) == both
    assert moe.override_partition_specs(None) is None
    given = (P('data'), P('model'), P('expert'), None, {'x': P('data')})
    assert moe.override_partition_specs(given) == (both, *given[1:])
    rules = moe.standard_logical_axis_rules(additional_rules=[('mine', 'expert')])
    assert rules[-1] == ('mine', 'expert') and ('embed', 'model') in rules
    assert ('expert_mlp', 'model') in rules and ('embed', 'data') not in rules


EXPERTS = {'expert': {'wi': {'kernel': ('expert', 'embed', 'expert_mlp')}}, 'wo': ('embed', 'mlp')}


def statistics_of_experts(chosen=None, **settings):
    """The specs of the statistics, on 1 x 4 x 2 devices, and their logical axes."""
    partitioner = MoePjitPartitioner(4, 2, None, True, None, chosen)
    shapes = {'expert': {'wi': {'kernel': (4, 8, 6)}}, 'wo': (8, 4)}
    state = optimized_state(shapes, EXPERTS, **settings)
    specs = partitioner.get_mesh_axes(state)
    kernel = specs._optimizer.target['expert']['wi']['kernel']
    assert kernel == P('expert', None, 'model')
    logical = partitioner.get_logical_axes(state)
    return specs._optimizer.state.param_states, logical._optimizer.state.param_states


def test_factored_statistics_of_experts_are_sharded():
    specs, logical = statistics_of_experts()
    both = P('expert', None)  # v_row is [4, 8], and v_col [4, 6]
    assert specs['expert']['wi']['kernel'] == Statistics(v_row=both, v_col=both)
    assert logical['expert']['wi']['kernel'].v_row == AxisNames('expert', None)
    assert specs['wo'] == Statistics()


def test_statistics_that_are_not_factored_follow_their_parameters():
    specs, _ = statistics_of_experts(factored=False)
    assert specs['expert']['wi']['kernel'] == Statistics(v=P('expert', None, 'model'))


def test_the_statistics_of_experts_can_be_chosen():
    specs, _ = statistics_of_experts(lambda path: path == 'wo/v_row')
    assert specs['expert']['wi']['kernel'] == Statistics()
    assert specs['wo'] == Statistics(v_row=P('expert'))  # v_row is [8]


def test_the_batch_of_experts():
    partitioner = MoePjitPartitioner(2, 2)
    rows = np.arange(16, dtype=np.float32).reshape(8, 2)
    double = partitioner.partition(lambda x: 2 * x, (P('data'),), P('data'))
    found = double(partitioner.to_global(rows))
    np.testing.assert_array_equal(found, 2 * rows)
    assert found.sharding == NamedSharding(partitioner.mesh, P(('data', 'expert')))


# Subclasses that replace the parts that T5X's subclasses replace.


class Mirrored(PjitPartitioner):
    """Another mesh, another axis for the batch, another chunker, and other logical axes."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._data_axis = ('data', 'mirror')

    @functools.cached_property
    def mesh(self):
        devices = np.array(jax.devices()).reshape(2, 2, self._num_partitions)
        return Mesh(devices, ('data', 'mirror', 'model'))

    @functools.cached_property
    def _local_chunker(self):
        return LocalChunker(self.mesh, process_index=0)

    def get_logical_axes(self, train_state):
        axes = super().get_logical_axes(train_state)
        return axes.replace(params=freeze({'kernel': AxisNames('mirrored', 'mlp')}))


def test_a_subclass_in_the_style_of_t5x():
    rules = [*RULES, ('mirrored', 'mirror')]
    partitioner = Mirrored(num_partitions=2, logical_axis_rules=rules)
    assert 'made by Mirrored.mesh' in repr(partitioner)
    assert dict(partitioner.mesh.shape) == {'data': 2, 'mirror': 2, 'model': 2}
    assert partitioner.data_partition_spec == P(('data', 'mirror'))
    assert partitioner.data_mesh_size == 4 and partitioner.data_shards == 1
    other = partitioner.with_rules(rules)
    assert other.data_partition_spec == P(('data', 'mirror')) and other.mesh == partitioner.mesh
    state = InferenceState(0, freeze({'kernel': KERNEL}), metadata({'kernel': ('embed', 'mlp')}))
    assert partitioner.get_mesh_axes(state).params['kernel'] == P('mirror', 'model')
    with_optimizer = TrainState.create(
        {'kernel': nn.LogicallyPartitioned(KERNEL, ('embed', 'mlp'))}, optax.sgd(0.1)
    )
    assert partitioner.get_mesh_axes(with_optimizer).params['kernel'] == P('mirror', 'model')
    assert 'mirror 2' in repr(partitioner)


# The methods of T5X's states.


def test_the_methods_of_train_states():
    state = TrainState.create({'kernel': KERNEL}, optax.adam(0.1))
    assert state.param_states is state.opt_state
    changed = state.replace_flax_mutables({'cache': {'seen': jnp.ones(2)}})
    assert changed.state_dict()['flax_mutables']['cache']['seen'].shape == (2,)
    assert int(changed.replace_step(jnp.int32(5)).step) == 5
    assert 'flax_mutables' not in state.replace_flax_mutables({}).state_dict()
    with pytest.raises(NotImplementedError, match=r'apply_gradients\(grads, tx\)'):
        state.apply_gradient({}, learning_rate=0.1)
