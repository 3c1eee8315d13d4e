"""Plans in files: read as they were written, edited, and refused if something is wrong."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P
from plans_by_hand import FILE, MESH, NAMES, RULES, TREE, planned, plans, read

from partitioning import AxisRules, PjitPartitioner, Plan, TrainState, plan_diff
from partitioning.plan.plan_file import to_json

pytestmark = [pytest.mark.core, pytest.mark.smoke]

PLAN = planned()
BY_PATH = {
    'mesh': MESH,
    'layout': AxisRules(RULES, names=[*NAMES.items(), ('.*/bias', (None,))]),
}


def written(plan):
    return to_json(plan.rows, plan.mesh)


def test_the_format():
    """Files with this format exist: a change needs another format."""
    assert written(PLAN) == FILE
    assert read(FILE) == PLAN


def test_save_and_load(tmp_path):
    PLAN.save(tmp_path / 'plan.json')
    assert (tmp_path / 'plan.json').read_text() == FILE
    assert Plan.load(str(tmp_path / 'plan.json')) == PLAN


def of_train_state():
    return PjitPartitioner(**BY_PATH).plan(TrainState.create(TREE, optax.adafactor(1.0)))


MADE = {
    'padded': lambda: planned(
        {'w': np.zeros(29)}, {'w': ('a',)}, [('a', 'data')], on_indivisible='pad'
    ),
    'dropped axes': lambda: planned(
        {'w': np.zeros(6)}, {'w': ('a',)}, [('a', ('data', 'model'))], on_indivisible='drop_axis'
    ),
    'a name without a rule': lambda: planned(
        {'w': np.zeros(6)}, {'w': ('a',)}, on_unmatched='replicate'
    ),
    'a scalar': lambda: planned({'s': jnp.ones(()), 'w': np.zeros(4)}),
    'one array': lambda: planned(np.zeros(4)),
    'no arrays': lambda: Plan({'data': 4}, ()),
    'no elements': lambda: planned({'w': np.zeros((0, 4))}, {'w': ('embed', 'mlp')}),
    'bfloat16': lambda: planned({'w': jnp.zeros(4, 'bfloat16'), 'm': np.zeros(4, bool)}),
    'random keys': lambda: planned({'k': jax.random.key(0), 'w': jnp.zeros(4)}),
    'random keys of another kind': lambda: planned(
        {'k': jax.random.split(jax.random.key(0, impl='rbg'), 2)}
    ),
    'Python numbers': lambda: planned({'n': 3, 'x': 0.5, 'yes': True, 'w': jnp.zeros(4)}),
    'paths with quotes': lambda: planned({'a "b"\n': {'é/ü': np.zeros(4)}, 'a.b': np.zeros(4)}),
    'mesh axes as names': lambda: planned(names={'fc1/kernel': (('data',), ('model',))}),
    'a train state': of_train_state,
}


@pytest.mark.parametrize('name', MADE)
def test_a_plan_is_read_as_written(name):
    plan = MADE[name]()
    held = read(written(plan))
    assert held == plan and not plan_diff(plan, held)
    assert written(held) == written(plan)
    assert [*held.mesh.items()] == [*dict(getattr(plan.mesh, 'shape', plan.mesh)).items()]


@settings(max_examples=75)
@given(plans())
def test_any_plan_is_read_as_written(plan):
    held = read(written(plan))
    assert held == plan and hash(held) == hash(plan)
    assert written(held) == written(plan)
    assert len(written(plan).splitlines()) == 4 + max(len(plan.rows), 1)  # one line per array


# Files that a person has edited.


def edited(change):
    held = copy.deepcopy(json.loads(FILE))
    change(held)
    return json.dumps(held)


def with_fields(**fields):
    return edited(lambda held: held.update(fields))


def with_row(**fields):
    """The file with other values in the row of fc1/kernel."""
    return edited(lambda held: held['rows'][1].update(fields))


def with_dimension(**fields):
    """The file with other values in the last dimension of fc1/kernel, which is over 'model'."""
    return edited(lambda held: held['rows'][1]['dimensions'][1].update(fields))


def test_edited_axes_drive_the_state():
    """fc1/kernel of 16 x 64 moves from model to data, by hand from 2 to 4 shards."""
    text = edited(
        lambda held: (
            held['rows'][1]['dimensions'][1].update(axes='data'),
            held['rows'][1].update(shard_shape=[16, 16], bytes_per_device=1024),
        )
    )
    partitioner = PjitPartitioner(MESH, read(text))
    plan = partitioner.plan(lambda: TrainState.create(jax.tree.map(jnp.ones_like, TREE), ADAM))
    state = plan.init()
    kernels = [state.params['fc1']['kernel'], state.opt_state[0].mu['fc1']['kernel']]
    assert [x.sharding.spec for x in kernels] == [P(None, 'data')] * 2
    assert [x.addressable_shards[0].data.shape for x in kernels] == [(16, 16)] * 2
    assert state.params['fc2']['kernel'].sharding.spec == P(('model', 'data'), None)
    plan.check(state)


ADAM = optax.adam(1e-3)


@pytest.mark.parametrize(
    'axes, figures',
    [
        ('data', r'shard_shape \[16, 32\].*\[16, 16\]'),
        (None, r'shard_shape \[16, 32\].*\[16, 64\]'),
        (['model', 'data'], r'shard_shape \[16, 32\].*\[16, 8\]'),
    ],
)
def test_edited_axes_need_the_right_figures(axes, figures):
    with pytest.raises(ValueError, match=rf'^fc1/kernel: .*{figures}'):
        read(with_dimension(axes=axes))


ROW, DIMENSION = json.loads(FILE)['rows'][1], json.loads(FILE)['rows'][1]['dimensions'][1]


def without(field, of=lambda held: held):
    return edited(lambda held: of(held).pop(field))


REFUSED = {
    'half a file': (FILE[:300], 'JSON'),
    'deeper than the stack': ('[' * 100_000, 'nested more than 64 deep'),
    'very deep': (with_fields(mesh=json.loads('[' * 64 + ']' * 64)), 'nested more than 64 deep'),
    'another format': (
        with_fields(format='sharding plan 1'),
        'meshwright plan 2.*sharding plan 1',
    ),
    'without a mesh': (without('mesh'), 'mesh'),
    'an axis of size 0': (with_fields(mesh={'data': 0, 'model': 2}), '"mesh".*0'),
    'an axis of size true': (with_fields(mesh={'data': True, 'model': 2}), '"mesh".*True'),
    'a mesh without an axis': (with_fields(mesh={'data': 4}), "fc1/kernel.*'model'.*data 4"),
    'a mesh of another size': (
        with_fields(mesh={'data': 4, 'model': 4}),
        r'fc1/kernel.*shard_shape.*\[16, 16\]',
    ),
    'an unknown field': (with_fields(author='me'), 'author'),
    'rows by path': (with_fields(rows={'fc1/kernel': ROW}), '"rows" must be a list'),
    'a row twice': (with_fields(rows=[ROW, ROW]), 'two arrays.*fc1/kernel'),
    'an unknown field in a row': (with_row(device=3), "fc1/kernel.*'device'"),
    'a misspelled field': (with_dimension(reson='x'), "'reson'.*Did you mean 'reason'"),
    'a key twice': (
        FILE.replace('"axes": "model"', '"axes": null, "axes": "model"'),
        'axes.*twice',
    ),
    **{f'a row without {x}': (without(x, lambda held: held['rows'][1]), x) for x in ROW},
    **{
        f'a dimension without {x}': (
            without(x, lambda held: held['rows'][1]['dimensions'][1]),
            f'fc1/kernel, dimension 1.*{x}',
        )
        for x in ('name', 'axes', 'reason')
    },
}
WRONG_VALUES = {
    'path': [3, None, ['fc1']],
    'shape': [[16], [16, 63], [16, 32], [16, -1], [16.0, 64], [True, 64], '16', None, [16, 64, 1]],
    'dtype': ['flot32', 'float16', 'key<xx>', None, 3, 'int7', ''],
    'dimensions': [None, [], {}, [DIMENSION], [DIMENSION] * 2, [DIMENSION] * 3, [3, 4], 'ab'],
    'shard_shape': [[16, 64], [16], None, '16', [16, 32, 1]],
    'bytes_total': [4095, None, '4096', [4096], -4096],
    'bytes_per_device': [2049, None, '2048', 4096],
    'role': ['parameter', None, 3, '', ['other']],
}
WRONG_IN_DIMENSION = {
    'name': [3, [3], {}, True],
    'axes': ['modle', ['model', 'model'], 3, [3], {'model': 2}, True, '', ['']],
    'reason': [None, 3, ['a rule shards it']],
    'rule': ['mlp', ['mlp'], ['mlp', 3], 3, {}],
    'lost': ['mlp', 3, [3], [['mlp', 'model']], [[['mlp', 3], 'why']], {}],
    'policy': ['pads', 3, ['pad'], True],
    'wanted': [3, [3], {}, True],
    'fits': [3, '32', ['32'], [-1], {}],
}


@pytest.mark.parametrize('name', REFUSED)
def test_files_that_are_not_plans(name):
    text, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        read(text)


@pytest.mark.parametrize(
    ('field', 'value'), [(field, value) for field in WRONG_VALUES for value in WRONG_VALUES[field]]
)
def test_wrong_values_in_rows(field, value):
    assert {*WRONG_VALUES} == {*ROW}
    with pytest.raises(ValueError) as error:
        read(with_row(**{field: value}))
    assert 'fc1/kernel' in str(error.value) or field == 'path', str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ('field', 'value'),
    [(field, value) for field in WRONG_IN_DIMENSION for value in WRONG_IN_DIMENSION[field]],
)
def test_wrong_values_in_dimensions(field, value):
    with pytest.raises(ValueError, match='fc1/kernel') as error:
        read(with_dimension(**{field: value}))
    said = str(error.value)
    assert f'dimension 1: "{field}"' in said or "mesh axis 'mod" in said, said


def test_padding_where_nothing_is_padded():
    """Only a dimension that does not divide can be padded."""
    for wanted in ('model', ['data', 'model']):
        with pytest.raises(ValueError, match=r'^fc1/kernel: '):
            read(with_dimension(policy='pad', axes=None, wanted=wanted))


def test_the_file_is_in_the_message(tmp_path):
    path = tmp_path / 'plan.json'
    path.write_text(with_dimension(axes='modle'))
    with pytest.raises(ValueError, match=r"plan.json: fc1/kernel: .*'modle'.*Did you mean 'model'"):
        Plan.load(path)
    with pytest.raises(OSError, match=r'none.json'):
        Plan.load(tmp_path / 'none.json')


@pytest.mark.parametrize(
    'held, said',
    [
        (b'{"format"', 'is not JSON.*Make the file again with plan.save'),
        (b'[1]', r'not \[1\]\. Make the file again'),
        (bytes([0xFF, 0xFE, 0x80]), 'is not a text. Make it again with plan.save'),
    ],
)
def test_damaged_files(tmp_path, held, said):
    (tmp_path / 'plan.json').write_bytes(held)
    with pytest.raises(ValueError, match=said) as caught:
        Plan.load(tmp_path / 'plan.json')
    assert caught.value.__cause__ is None and '\n' not in str(caught.value)
