"""PjitPartitioner(mesh, layout): everything that each of the two arguments may be."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from partitioning import (
    AxisRules,
    LogicallyPartitioned,
    MeshConfig,
    PjitPartitioner,
    Plan,
    TrainState,
    describe_topology,
    suggest_rules,
)
from partitioning.compat.pytorch import ShardingPlan

pytestmark = pytest.mark.core

KEY = jax.random.key(0)
SIZES = {'data': 4, 'model': 2}
SQUARE = Mesh(np.array(jax.devices()).reshape(4, 2), ('data', 'model'))
RULES = [('batch', 'data'), ('embed', None), ('mlp', 'model')]


def init(key):
    return {'w': jax.random.normal(key, (64, 32)), 'b': jnp.zeros(32)}


def named_init(key):
    return {'w': LogicallyPartitioned(init(key)['w'], ('embed', 'mlp'))}


# The mesh.


@pytest.mark.parametrize(
    'mesh',
    [SQUARE, SQUARE.abstract_mesh, SIZES, {'data': -1, 'model': 2}, MeshConfig(axes=SIZES), 2],
)
def test_what_a_mesh_may_be(mesh):
    partitioner = PjitPartitioner(mesh, RULES)
    assert dict(partitioner.mesh.shape) == SIZES
    assert partitioner.plan(named_init, KEY).specs == {'w': P(None, 'model')}
    assert dict(partitioner.with_mesh({'data': 8}).mesh.shape) == {'data': 8}


def test_axis_sizes_with_a_backend():
    assert PjitPartitioner(SIZES, RULES, backend='cpu').mesh == SQUARE


def test_a_described_machine():
    pytest.importorskip('libtpu')
    machines = 'v5e:2x4', describe_topology('v5e:2x4')
    for partitioner in (PjitPartitioner(machine, 'fsdp') for machine in machines):
        assert dict(partitioner.mesh.shape) == {'data': 8, 'model': 1}
        assert {device.platform for device in partitioner.mesh.devices.flat} == {'tpu'}
        assert partitioner.plan(init, KEY)['w'].spec == P('data', None)


@pytest.mark.parametrize(
    'mesh, said',
    [
        ('fsdp', "^'fsdp' is a layout, not a mesh: write layout='fsdp'"),
        (RULES, 'is a layout, not a mesh: write layout='),
        (Plan(SIZES, ()), 'is a layout, not a mesh: write layout='),
        ('v9:2x2', 'unknown topology'),
        ([4, 2], '^mesh=.*axis sizes such as'),
        ({'data': 3}, 'number of devices is 8'),
        (jax.devices(), 'mesh= is 8 devices without axes: write mesh=MeshConfig'),
    ],
)
def test_values_that_are_not_meshes(mesh, said):
    with pytest.raises(ValueError, match=said):
        PjitPartitioner(mesh).mesh  # noqa: B018


@pytest.mark.parametrize(
    'mesh, settings, said',
    [
        (2, {'num_partitions': 2}, r'^2 and num_partitions=2 are given: keep one'),
        (SIZES, {'num_partitions': 2}, '^mesh= already determines num_partitions; remove'),
        ('v5e:2x4', {'backend': 'cpu'}, '^mesh= already determines backend; remove'),
        (None, {}, r"At least one of num_partitions.*\{'data': -1, 'model': 2\}"),
    ],
)
def test_meshes_that_are_decided_twice_or_never(mesh, settings, said):
    with pytest.raises(ValueError, match=said):
        PjitPartitioner(mesh, RULES, **settings)


# The layout.

PARTITION_RULES = [('w', P(None, 'model')), ('.*', P())]
PLAN = PjitPartitioner(SIZES, PARTITION_RULES).plan(init, KEY)


@pytest.mark.parametrize(
    'layout, w',
    [
        ('fsdp', P(('data', 'model'), None)),
        ('data_parallel', P(None, None)),
        (AxisRules(RULES, names=[('w', ('embed', 'mlp')), ('b', (None,))]), P(None, 'model')),
        (AxisRules(names=[('w', ('embed', 'mlp')), ('b', (None,))]), P(None, 'model')),
        (PARTITION_RULES, P(None, 'model')),
        ([list(rule) for rule in PARTITION_RULES], P(None, 'model')),
        (PLAN, P(None, 'model')),
        (ShardingPlan({'w': P('model')}), P('model', None)),
        (ShardingPlan({'w': ('mlp', None)}), P('model', None)),
    ],
)
def test_what_a_layout_may_be(layout, w):
    def with_adam(key):
        return TrainState.create(init(key), optax.adam(1e-3))

    partitioner = PjitPartitioner(SIZES, layout)
    over = partitioner.data_partition_spec
    assert over == P(('data', 'model')) if layout in ('fsdp', 'data_parallel') else P('data')
    plan = partitioner.plan(with_adam, KEY)
    assert [row.spec for row in plan.rows if row.path.endswith('/w')] == [w] * 3
    assert partitioner.plan(plan.init(KEY)).specs == plan.specs


def test_suggested_rules_are_a_layout():
    rules = suggest_rules(jax.eval_shape(init, KEY), SQUARE)
    by_names = PjitPartitioner(SQUARE, AxisRules(names=rules)).plan(init, KEY)
    assert PjitPartitioner(SQUARE, rules).plan(init, KEY) == by_names


def test_the_default_mesh_of_a_layout(tmp_path):
    assert dict(PjitPartitioner(layout='fsdp').mesh.shape) == {'data': 8, 'model': 1}
    PLAN.save(tmp_path / 'plan.json')
    for plan in (PLAN, Plan.load(tmp_path / 'plan.json')):
        partitioner = PjitPartitioner(layout=plan)
        assert dict(partitioner.mesh.shape) == SIZES
        assert partitioner.plan(init, KEY) == PLAN


def test_zero_and_policies_are_part_of_the_rules():
    state = {'params': {'w': jax.ShapeDtypeStruct((7, 8), 'float32')}}
    state['opt_state'] = {'mu': dict(state['params'])}
    names, whole = [('w', ('embed', 'mlp'))], [('embed', None), ('mlp', None)]
    rules = AxisRules(
        whole, on_indivisible='replicate', names=names, optimizer=[('embed', 'data'), *RULES]
    )
    plan = PjitPartitioner(SIZES, rules).plan(state)
    assert plan['params/w'].spec == P(None, None)
    assert plan['opt_state/mu/w'].spec == P(None, 'model')  # 4 does not divide 7
    assert 'optimizer=' in repr(rules) and "on_indivisible='replicate'" in repr(rules)
    added = rules + RULES
    assert (added.names, added.optimizer) == (rules.names, rules.optimizer)


@pytest.mark.parametrize(
    'layout, settings, said',
    [
        ('fspd', {}, "^layout='fspd' must be 'fsdp'.*Did you mean 'fsdp'"),
        (pathlib.Path('p.json'), {}, r"Write Plan.load\('p.json'\)$"),
        ({'data': 4}, {}, 'Axis sizes are a mesh: write mesh=$'),
        ({'embed': 'data'}, {}, r'list\(layout.items\(\)\)$'),
        (init, {}, r'Write init\(\.\.\.\), which calls the function$'),
        (
            [('*/w', P())],
            {},
            r"'\*/w', P\(\)\) is not a valid regular expression: .*'\.\*', as in '\.\*/w'$",
        ),
        ('plan.json', {}, r"Plan.load\('plan.json'\)"),
        ({'embed': 'data'}, {}, '^layout=.* must be .*logical axis rules such as'),
        (SQUARE, {}, 'is a mesh: write mesh='),
        (MeshConfig(axes=SIZES), {}, 'is a mesh: write mesh='),
        (
            [('.*/w', ('embed', 'mlp'))],
            {},
            r"'\.\*/w' is not a logical axis.*AxisRules\(names=.*Par",
        ),
        ((2, 2, 1, 1), {}, r'write model_parallel_submesh=\(2, 2, 1, 1\)'),
        ([('w', 3)], {}, r"rule \('w', 3\) is malformed"),
        ([('w', (None, 'mlp'))], {}, r'malformed.*names of an array .* AxisRules\(names='),
        ([('w', P('data')), ('b', 3)], {}, 'a partition rule must be'),
        ([('w', P('data')), ('(', P())], {}, 'not a valid regular expression'),
        (RULES, {'logical_axis_rules': RULES}, 'remove logical_axis_rules or layout'),
        ('fsdp', {'logical_axis_rules': RULES}, 'remove logical_axis_rules or layout'),
        (PLAN, {'logical_axis_rules': AxisRules(names=[('w', (None,))])}, 'remove names or layout'),
        (PARTITION_RULES, {'logical_axis_rules': AxisRules(optimizer=[])}, 'remove optimizer'),
    ],
)
def test_layouts_that_are_malformed_or_decided_twice(layout, settings, said):
    with pytest.raises(ValueError, match=said) as error:
        PjitPartitioner(SIZES, layout, **settings)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('use', ['plan', 'to_global'])
def test_rules_with_the_mesh_axis_first(use):
    rules = [('data', 'batch'), ('embed', None)]
    with pytest.raises(ValueError, match=r"no axis 'batch'.*write \('batch', 'data'\)"):
        getattr(PjitPartitioner(SIZES, rules), use)({'up': jnp.ones((8, 8))})


@pytest.mark.parametrize(
    'method, write',
    [
        ('audit', r'plan\(init, key\)\.audit\(\)'),
        ('lint', r'lint\(partitioner\.eval_shape\(init, key\)\)'),
        ('get_mesh_axes', r'plan\(init, key\)\.specs'),
        ('get_logical_axes', r'plan\(init, key\)\.logical_axes'),
    ],
)
def test_a_function_in_place_of_its_state(method, write):
    with pytest.raises(ValueError, match=f'{method} takes a state, not .*init.*: write .*{write}'):
        getattr(PjitPartitioner(SIZES, RULES), method)(init)


@pytest.mark.parametrize('mesh', [SIZES, SQUARE, MeshConfig(axes=SIZES)])
@pytest.mark.parametrize('use', ['plan', 'to_global', 'with_rules'])
def test_names_by_path_that_are_given_as_rules(mesh, use):
    names = [('up', ('embed', 'mlp')), ('bias', ('mlp',))]
    partitioner = PjitPartitioner(mesh, None if use == 'with_rules' else AxisRules(names))
    with pytest.raises(ValueError, match=r"no axis 'embed'.*'up' is the path.*names=\[\('up'"):
        getattr(partitioner, use)(names if use == 'with_rules' else {'up': jnp.ones((8, 8))})


@pytest.mark.parametrize(
    'name, said',
    [('num_partition', "Did you mean 'num_partitions'"), ('rules', '$')],
)
def test_arguments_that_do_not_exist(name, said):
    with pytest.raises(TypeError, match=f'^PjitPartitioner has no argument {name!r}.*{said}'):
        PjitPartitioner(SIZES, **{name: None})


def test_arguments_of_t5x_by_position():
    said = r'takes 2 arguments by position, mesh and layout, but got 4: .*num_partitions=2'
    with pytest.raises(TypeError, match=said):
        PjitPartitioner(2, None, True, 'cpu')


def test_a_mesh_axis_that_does_not_exist_is_answered_with_those_that_do():
    said = "'tp' does not exist; the mesh is data 4 x model 2. Write 'data', 'model' or None in its"
    names = [('w', ('embed', 'mlp')), ('b', ('mlp',))]
    for layout in ([('w', P('tp')), ('.*', P())], AxisRules([('mlp', 'tp')], names=names)):
        with pytest.raises(ValueError, match=said):
            PjitPartitioner(SIZES, layout).plan(init, KEY)


NAMES = [('.*kernel', ('embed', 'mlp'))]


@pytest.mark.parametrize(
    'settings, layout',
    [
        ({'params_axes_names_override': NAMES}, AxisRules(names=NAMES)),
        ({'optimizer_axis_rules': RULES}, AxisRules(optimizer=RULES)),
        (
            {'logical_axis_rules': RULES, 'on_unmatched': 'replicate', 'on_indivisible': 'pad'},
            AxisRules(RULES, 'replicate', 'pad'),
        ),
        ({'layout': RULES, 'params_axes_names_override': NAMES}, AxisRules(RULES, names=NAMES)),
        ({'plan': PLAN}, PLAN),
    ],
)
def test_parts_of_a_layout_may_be_arguments(settings, layout):
    mesh = None if layout is PLAN else SIZES
    assert repr(PjitPartitioner(mesh, **settings)) == repr(PjitPartitioner(mesh, layout))


@pytest.mark.parametrize(
    'settings, said',
    [
        ({'plan': PLAN, 'layout': 'fsdp'}, 'plan= already determines'),
        ({'plan': PLAN, 'optimizer_axis_rules': RULES}, 'remove optimizer_axis_rules'),
        ({'plan': 'plan.json'}, r'write Plan.load\(path\)'),
        ({'layout': 'fsdp', 'on_unmatched': 'replicate'}, 'remove on_unmatched or layout'),
        ({'layout': PARTITION_RULES, 'params_axes_names_override': NAMES}, 'remove params_axes'),
        (
            {'layout': AxisRules(names=NAMES), 'params_axes_names_override': NAMES},
            'params_axes_names_override and names= of the rules are both given',
        ),
        ({'on_unmatched': 'ignore'}, "on_unmatched must be .*, not 'ignore'"),
    ],
)
def test_parts_of_a_layout_that_are_given_twice(settings, said):
    with pytest.raises(ValueError, match=said) as error:
        PjitPartitioner(SIZES, **settings)
    assert '\n' not in str(error.value)


# The names of T5X.


def test_the_arguments_of_partition_have_the_names_of_jax_and_of_t5x():
    partitioner = PjitPartitioner(SIZES, RULES)
    double, x = lambda x: x * 2, np.arange(8.0, dtype='float32')
    for names in (('in_shardings', 'out_shardings'), ('in_axis_resources', 'out_axis_resources')):
        found = partitioner.partition(double, **dict(zip(names, (P('data'), P()), strict=True)))(x)
        np.testing.assert_array_equal(found, x * 2)
        assert found.sharding.is_fully_replicated
    with pytest.raises(ValueError, match=r'both given: remove in_axis_resources'):
        partitioner.partition(double, P(), P(), in_axis_resources=P())
    with pytest.raises(TypeError, match='needs out_shardings'):
        partitioner.partition(double, P())


def test_an_abstract_mesh_first():
    mesh = AbstractMesh((4, 2), ('data', 'model'))
    assert PjitPartitioner(mesh, 'fsdp').plan(init, KEY)['w'].spec == P(('data', 'model'), None)
