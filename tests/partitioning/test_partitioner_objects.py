"""Partitioners and states as objects: repr, copies, pickles, bytes, and meshes without devices."""

import copy
import dataclasses
import pickle
import pydoc
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training import train_state
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
from train_states import each_way, made

from partitioning import (
    AxisNames,
    AxisRules,
    LogicallyPartitioned,
    MeshConfig,
    MoePjitPartitioner,
    PaddedSpec,
    PjitPartitioner,
    Plan,
    TrainState,
    constrain,
)
from partitioning.partitioner.objects import NamesOfOthers

pytestmark = pytest.mark.core

RULES = [('batch', 'data'), ('mlp', 'model'), ('heads', 'model'), ('embed', None)]
SQUARE = Mesh(np.array(jax.devices()).reshape(4, 2), ('data', 'model'))
CONFIG = MeshConfig(axes={'data': 4, 'model': 2})
ABSTRACT = AbstractMesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)
KEY = jax.random.key(0)


def init(key):
    return {'kernel': LogicallyPartitioned(jax.random.normal(key, (8, 4)), ('embed', 'mlp'))}


def again(x):
    return pickle.loads(pickle.dumps(x))


# repr.


def test_the_repr_shows_what_decides_layouts():
    partitioner = PjitPartitioner(
        SQUARE,
        AxisRules(
            RULES,
            on_unmatched='replicate',
            names=[('.*/bias', ('mlp',))],
            optimizer=[('mlp', ('data', 'model'))],
        ),
        params_on_devices=False,
    )
    lines = [line.split(maxsplit=1) for line in repr(partitioner).splitlines()]
    assert lines[0] == ['PjitPartitioner']
    assert ['mesh', 'data 4 x model 2, 8 CPU devices, 1 process'] in lines
    assert ['rules', 'batch -> data; mlp, heads -> model; embed -> replicated'] in lines
    assert ['optimizer', 'rules  mlp -> data x model'] in lines
    assert ['policies', "on_unmatched='replicate', on_indivisible='error'"] in lines
    assert ['names', ".*/bias -> ('mlp',)"] in lines
    assert 'host memory' in repr(partitioner)
    assert max(map(len, repr(partitioner).splitlines())) <= 100
    assert str(partitioner) == repr(partitioner)


@pytest.mark.parametrize('cls', [PjitPartitioner, Plan, MeshConfig, TrainState, AxisRules])
def test_the_help_fits_on_two_screens(cls):
    text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    if sys.version_info < (3, 13):  # which prints each argument on its own line
        assert sum(max(1, -(-len(line) // 100)) for line in text.splitlines()) <= 2 * 50
    assert '__' not in text.replace('__main__', '') and cls.__doc__.splitlines()[0] in text


def test_the_help_leaves_out_what_only_t5x_needs():
    ours, theirs = map(pydoc.plaintext.document, (PjitPartitioner, NamesOfOthers))
    assert 'setup(self' in ours and 'data_partition_spec' in ours
    for name in ('get_mesh_axes', 'data_shards', 'compile(', 'get_local_chunks'):
        assert name not in ours and name in theirs
        assert name.strip('(') in dir(PjitPartitioner(CONFIG, RULES))


def test_the_source_of_a_mesh_needs_no_devices():
    there = MeshConfig(axes={'data': -1}, topology='v5p:8x8x8')
    assert PjitPartitioner(mesh=there).mesh_source is there
    assert dict(PjitPartitioner(num_partitions=3).mesh_source.axes) == {'data': -1, 'model': 3}
    moved = PjitPartitioner(mesh=there).with_mesh(ABSTRACT)
    assert moved.mesh_source is moved.mesh is ABSTRACT
    moved.mesh = SQUARE  # as subclasses of T5X's partitioners do
    assert moved.mesh_source is SQUARE


def test_the_source_of_a_mesh_that_a_subclass_makes_is_that_mesh():
    class OnSquare(PjitPartitioner):
        @property
        def mesh(self):
            return SQUARE

    assert OnSquare(num_partitions=1).mesh_source is SQUARE


def test_the_repr_builds_no_mesh():
    partitioner = PjitPartitioner(num_partitions=3)
    assert "not built yet: MeshConfig(axes={'data': -1, 'model': 3}" in repr(partitioner)
    assert 'standard_logical_axis_rules' in repr(partitioner)
    with pytest.raises(ValueError, match='3'):  # the repr would have failed, too
        partitioner.mesh  # noqa: B018
    built = PjitPartitioner(mesh=CONFIG)
    built.mesh  # noqa: B018
    assert 'data 4 x model 2, 8 CPU devices, 1 process' in repr(built)
    assert 'vocab, mlp, heads -> model' in repr(built)


@pytest.mark.parametrize('used', [False, True])
def test_the_repr_shows_a_layout_by_one_word(used):
    partitioner = PjitPartitioner(mesh=CONFIG, layout='fsdp')
    if used:
        partitioner.mesh  # noqa: B018
    assert "layout    'fsdp' lays out the state" in repr(partitioner)
    assert 'standard_logical_axis_rules' not in repr(partitioner)


@pytest.mark.parametrize(
    'mesh, shown',
    [
        (ABSTRACT, 'data 4 x model 2, an AbstractMesh without devices'),
        (
            AbstractMesh((2, 4), ('a', 'b'), axis_types=(AxisType.Explicit, AxisType.Auto)),
            'a 2 (Explicit) x b 4,',
        ),
    ],
)
def test_the_repr_of_other_meshes(mesh, shown):
    assert shown in repr(PjitPartitioner(mesh=mesh, logical_axis_rules=[]))
    assert 'rules     none' in repr(PjitPartitioner(mesh=mesh, logical_axis_rules=[]))


def test_the_repr_of_a_plan_is_one_line():
    plan = PjitPartitioner(mesh=SQUARE, logical_axis_rules=RULES).plan(init, KEY)
    # 8 x 4 floats of 4 bytes, half on each device
    assert repr(plan) == '<Plan of 1 array for the mesh data 4 x model 2: 64 bytes per device>'
    assert repr(plan) in repr(PjitPartitioner(SQUARE, plan))


# Pickles and copies.

WITHOUT_DEVICES = {
    'num_partitions': lambda: PjitPartitioner(num_partitions=2, logical_axis_rules=RULES),
    'a MeshConfig': lambda: PjitPartitioner(
        mesh=CONFIG, logical_axis_rules=AxisRules(RULES, 'replicate', 'drop_axis')
    ),
    'an AbstractMesh': lambda: PjitPartitioner(mesh=ABSTRACT, logical_axis_rules=RULES),
    'a topology': lambda: PjitPartitioner(
        mesh=MeshConfig(axes={'data': 4, 'model': 2}, topology='v5e:2x4'), logical_axis_rules=RULES
    ),
    'experts': lambda: MoePjitPartitioner(2, 2, params_on_devices=False),
}


@pytest.mark.parametrize('used', [False, True])
@pytest.mark.parametrize('how', [again, copy.copy, copy.deepcopy])
@pytest.mark.parametrize('kind', sorted(WITHOUT_DEVICES.keys() - {'a topology'}))
def test_a_partitioner_without_devices_is_copied(kind, how, used):
    partitioner = WITHOUT_DEVICES[kind]()
    names = jax.eval_shape(init, KEY)
    if used:  # what it caches holds devices
        partitioner.plan(init, KEY)
        if kind != 'an AbstractMesh':
            partitioner.get_data_layout()
    other = how(partitioner)
    assert type(other) is type(partitioner)
    assert other.mesh == partitioner.mesh
    assert other.logical_axis_rules == partitioner.logical_axis_rules
    assert other.logical_axis_rules.on_unmatched == partitioner.logical_axis_rules.on_unmatched
    assert other.params_on_devices == partitioner.params_on_devices
    assert other.get_mesh_axes(names) == partitioner.get_mesh_axes(names)
    assert repr(other) == repr(partitioner)


def test_a_topology_can_be_pickled_before_it_is_built():
    partitioner = WITHOUT_DEVICES['a topology']()
    assert repr(again(partitioner)) == repr(partitioner)


@pytest.mark.parametrize(
    'mesh, hint',
    [
        (SQUARE, r"MeshConfig\(axes=\{'data': 4, 'model': 2\}\)"),
        (MeshConfig(axes={'data': 8}, devices=jax.devices()), r'without devices='),
    ],
)
def test_devices_cannot_be_pickled(mesh, hint):
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=RULES)
    with pytest.raises(ValueError, match=f'devices.*cannot be pickled.*{hint}'):
        pickle.dumps(partitioner)
    # Within a process there is nothing to pickle.
    assert copy.deepcopy(partitioner).mesh == copy.copy(partitioner).mesh == partitioner.mesh


def test_an_assigned_mesh_is_not_lost_in_a_pickle():
    partitioner = PjitPartitioner(num_partitions=2)
    partitioner.mesh = SQUARE
    with pytest.raises(ValueError, match='cannot be pickled'):
        pickle.dumps(partitioner)
    partitioner.mesh = ABSTRACT
    assert again(partitioner).mesh == ABSTRACT


def test_a_pickled_plan_is_like_its_file(tmp_path):
    partitioner = PjitPartitioner(mesh=SQUARE, logical_axis_rules=RULES)
    plan = partitioner.plan(init, KEY)
    plan.save(tmp_path / 'plan.json')
    pickled = again(plan)
    assert pickled == plan == Plan.load(tmp_path / 'plan.json')
    assert pickled.mesh == {'data': 4, 'model': 2} and pickled.lint() == plan.lint()
    with pytest.raises(ValueError, match=r'PjitPartitioner.mesh, plan.*keeps its layout'):
        pickled.init(KEY)
    planned = again(PjitPartitioner(CONFIG, plan))
    assert planned.plan(init, KEY).shardings == plan.shardings
    assert copy.deepcopy(plan) is copy.copy(plan) is plan


@pytest.mark.parametrize(
    'value',
    [
        AxisNames('embed', None),
        AxisRules(RULES, 'replicate', 'pad'),
        CONFIG,
        MeshConfig.from_t5x(2, topology='v4:2x2x2', axis_types='explicit'),
        PaddedSpec(P(None), P(('data', 'model'))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_can_be_pickled(value):
    assert again(value) == value == copy.deepcopy(value)
    assert repr(again(value)) == repr(value)


def test_a_train_state_can_be_pickled():
    state = TrainState.create(init(KEY), optax.adam(0.1))
    pickled = again(state)
    assert jax.tree.structure(pickled) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, pickled, state)


# Meshes without devices.


@pytest.fixture(name='abstract', scope='module')
def _abstract():
    return PjitPartitioner(mesh=ABSTRACT, logical_axis_rules=RULES)


@pytest.fixture(name='concrete', scope='module')
def _concrete():
    return PjitPartitioner(mesh=SQUARE, logical_axis_rules=RULES)


def test_plans_and_specs_need_no_devices(abstract, concrete):
    plan, expected = abstract.plan(init, KEY), concrete.plan(init, KEY)
    assert plan == expected and plan.specs == expected.specs == {'kernel': P(None, 'model')}
    assert plan.shardings == {'kernel': NamedSharding(ABSTRACT, P(None, 'model'))}
    assert plan.abstract_state['kernel'].sharding.shard_shape((8, 4)) == (8, 2)
    named = abstract.eval_shape(init, KEY)
    assert named['kernel'].names == ('embed', 'mlp')
    assert abstract.get_mesh_axes(named) == plan.specs
    assert abstract.plan(named).shardings == plan.shardings
    assert abstract.audit(named).bytes_per_device == 8 * 4 * 4 / 2
    assert abstract.lint(named) == concrete.lint(named)
    assert abstract.data_partition_spec == P('data') and abstract.data_mesh_size == 4
    imposed = PjitPartitioner(ABSTRACT, plan).plan(init, KEY)
    assert imposed == expected


def apply(params, x):
    return constrain(x @ params['kernel'], ('batch', 'mlp'))


ARGUMENTS = ({'kernel': jax.ShapeDtypeStruct((8, 4), np.float32)}, np.ones((16, 8), np.float32))


@pytest.fixture(name='applied', scope='module')
def _applied(abstract):
    return abstract.partition(apply, ({'kernel': P(None, 'model')}, P('data')), P('data', 'model'))


def test_a_function_is_lowered_without_devices(applied):
    assert applied.__name__ == 'apply'
    assert applied.eval_shape(*ARGUMENTS).shape == (16, 4)
    traced = applied.trace(*ARGUMENTS)
    for lowered in (applied.lower(*ARGUMENTS), traced.lower(lowering_platforms=('tpu',))):
        assert '"data"=4, "model"=2' in lowered.as_text()
        assert 'sdy.sharding_constraint' in lowered.as_text()


NEEDS_DEVICES = {
    'plan.init': lambda p, _: p.plan(init, KEY).init(KEY),
    'init': lambda p, _: p.init(init, KEY),
    'a call': lambda _, f: f({'kernel': np.ones((8, 4))}, ARGUMENTS[1]),
    'lower_and_compile': lambda _, f: f.lower_and_compile(*ARGUMENTS),
    'compile': lambda p, f: p.compile(f, *ARGUMENTS),
    'get_data_layout': lambda p, _: p.get_data_layout(8),
    'data_shards': lambda p, _: p.data_shards,
    'to_global': lambda p, _: p.to_global(np.ones((8, 2))),
    'get_local_chunks': lambda p, _: p.get_local_chunks((8, 2), ('data', None)),
    'move_params_to_devices': lambda p, _: p.move_params_to_devices(jnp.ones(8), P('data')),
}


@pytest.mark.parametrize('what', NEEDS_DEVICES)
def test_what_needs_devices_asks_for_them(abstract, applied, what):
    with pytest.raises(ValueError, match=r'needs devices.*data 4 x model 2.*MeshConfig\(axes='):
        NEEDS_DEVICES[what](abstract, applied)


# flax.serialization.


def filled(state, start=1.0):
    """The same state with other numbers in every array, which no two arrays share."""
    leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, state))
    leaves = [x + jnp.asarray(start + i, x.dtype) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(treedef, leaves)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@each_way
def test_flax_saves_and_restores_a_state(way):
    empty = made(way)
    saved = filled(empty)
    assert_same(serialization.from_state_dict(empty, serialization.to_state_dict(saved)), saved)
    restored = serialization.from_bytes(empty, serialization.to_bytes(saved))
    assert_same(restored, saved)
    assert isinstance(restored, TrainState)
    assert serialization.to_state_dict(saved).keys() == saved.state_dict().keys()
    nested = serialization.from_bytes({'a': [empty]}, serialization.to_bytes({'a': [saved]}))
    assert_same(nested['a'][0], saved)


def test_flax_saves_sharded_states_and_restores_abstract_ones(concrete):
    tx = optax.sgd(0.1, momentum=0.9)
    plan = concrete.plan(lambda key: TrainState.create(init(key), tx), KEY)
    state = plan.init(KEY)
    data = serialization.to_bytes(state)
    restored = serialization.from_bytes(plan.abstract_state, data)
    assert_same(restored, jax.device_get(state))
    moved = concrete.move_params_to_devices(restored, plan.specs)
    plan.check(moved)
    # The names are not saved, so a state in boxes is restored from one without them.
    boxed = serialization.from_bytes(TrainState.create(init(KEY), tx), data)
    assert boxed.params['kernel'].names == ('embed', 'mlp')


def test_states_of_flax_and_subclasses_are_saved_too():
    params = {'w': jnp.arange(3.0)}
    theirs = train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))
    assert_same(
        serialization.from_bytes(theirs, serialization.to_bytes(filled(theirs))), filled(theirs)
    )

    class Mine(TrainState):
        pass

    fields = [field.name for field in dataclasses.fields(Mine)]
    jax.tree_util.register_dataclass(Mine, fields, [])
    mine = Mine.create(params, optax.adam(0.1))
    restored = serialization.from_bytes(mine, serialization.to_bytes(filled(mine)))
    assert type(restored) is Mine
    assert_same(restored, filled(mine))


def test_what_is_missing_or_too_much_is_named_with_its_path():
    state = {'best': made('boxes')}
    held = serialization.to_state_dict(state)
    for change, path in (
        (lambda s: s['params']['dense'].pop('kernel'), 'best/params/dense/kernel'),
        (lambda s: s['params'].update(other=np.ones(3)), 'best/params/other'),
        (lambda s: s['opt_state']['0']['mu'].pop('dense'), 'best/opt_state/0/mu/dense/kernel'),
        (lambda s: s.update(step=np.ones(2)), r'best/step .*\(2,\)'),
    ):
        wrong = jax.tree.map(lambda x: x, held)
        change(wrong['best'])
        with pytest.raises(ValueError, match=f'^{path} .*in the state_dict'):
            serialization.from_state_dict(state, wrong)
    with pytest.raises(ValueError, match=r'^best is of type int'):
        serialization.from_state_dict(state, {'best': 1})


BEFORE_FLAX = """
import pickle, sys
import jax
state = pickle.loads(bytes.fromhex(sys.argv[1]))
from flax import serialization
print(serialization.msgpack_restore(serialization.to_bytes(state))['step'])
"""


def test_a_state_may_be_loaded_before_flax_is_imported():
    pickled = pickle.dumps(TrainState(jnp.int32(3), {'w': jnp.ones(2)}, ())).hex()
    run = [sys.executable, '-c', BEFORE_FLAX, pickled]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == '3\n'
