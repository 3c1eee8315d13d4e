"""Plans in files: read as they were written, compared, and refused where something is wrong."""

import copy
import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from partitioning import PaddedSpec, PjitPartitioner, TrainState, create_mesh
from partitioning.compat.pytorch import ShardingPlan, shard_module
from partitioning.plan import (
    PlannedArray,
    ResolvedPlan,
    diff,
    from_json,
    load_plan,
    save_plan,
    to_json,
)
from partitioning.plan.__main__ import main
from partitioning.plan.rows import planned_array

pytestmark = pytest.mark.core

MESH = create_mesh((4, 2), ('data', 'model'))
TREE = {
    'fc1': {'bias': np.zeros(64, 'float32'), 'kernel': np.zeros((16, 64), 'float32')},
    'fc2': {'bias': np.zeros(16, 'float32'), 'kernel': np.zeros((64, 16), 'float32')},
}
ENTRIES = {'fc1/kernel': P(None, 'model'), 'fc2/kernel': P(('model', 'data'))}


def resolve(entries, tree=TREE, mesh=MESH, rules=None, **policies):
    return ShardingPlan(entries).resolve(tree, mesh, rules, **policies)


PLAN = resolve(ENTRIES)
FILE = """{"format": "sharding plan 1",
 "mesh": {"data": 4, "model": 2},
 "arrays": [
  {"path": "fc1/bias", "shape": [64], "dtype": "float32", "logical_axes": null, "spec": [null], \
"padded_spec": null, "shard_shape": [64], "bytes_total": 256, "bytes_per_device": 256, \
"category": "parameters", "reason": "not in the plan, so replicated"},
  {"path": "fc1/kernel", "shape": [16, 64], "dtype": "float32", "logical_axes": null, \
"spec": [null, "model"], "padded_spec": null, "shard_shape": [16, 32], "bytes_total": 4096, \
"bytes_per_device": 2048, "category": "parameters", "reason": "the plan says so"},
  {"path": "fc2/bias", "shape": [16], "dtype": "float32", "logical_axes": null, "spec": [null], \
"padded_spec": null, "shard_shape": [16], "bytes_total": 64, "bytes_per_device": 64, \
"category": "parameters", "reason": "not in the plan, so replicated"},
  {"path": "fc2/kernel", "shape": [64, 16], "dtype": "float32", "logical_axes": null, \
"spec": [["model", "data"], null], "padded_spec": null, "shard_shape": [8, 16], \
"bytes_total": 4096, "bytes_per_device": 512, "category": "parameters", \
"reason": "the plan says so"}
 ]}
"""


def test_the_format():
    """Files in the world have it: a change of it is another format."""
    assert to_json(PLAN) == FILE
    assert from_json(FILE) == PLAN


def test_files(tmp_path):
    save_plan(PLAN, tmp_path / 'plan.json')
    assert (tmp_path / 'plan.json').read_text() == FILE
    assert load_plan(str(tmp_path / 'plan.json')) == PLAN


def test_a_file_drives_the_same_run(tmp_path):
    save_plan(PLAN, tmp_path / 'plan.json')
    placed = shard_module(TREE, load_plan(tmp_path / 'plan.json'), MESH)
    partitioner = PjitPartitioner(mesh=MESH, plan=load_plan(tmp_path / 'plan.json'))
    specs = jax.tree.map(lambda x: x.sharding.spec, placed)
    assert specs['fc2']['kernel'] == P(('model', 'data'), None)
    assert partitioner.get_mesh_axes({'params': TREE})['params'] == specs


# What a file can hold.

MADE = {
    'logical names': lambda: resolve(
        {'fc1/kernel': ('embed', 'mlp')}, rules=[('embed', None), ('mlp', 'model')]
    ),
    'padded': lambda: resolve({'w': P('data')}, {'w': np.zeros(29)}, on_indivisible='pad'),
    'a scalar': lambda: resolve({'s': P()}, {'s': jnp.ones(())}),
    'one array': lambda: resolve({}, np.zeros(4)),
    'nothing': lambda: ResolvedPlan({'data': 4}, ()),
    'no elements': lambda: resolve({'w': P('data')}, {'w': np.zeros((0, 4))}),
    'bfloat16': lambda: resolve({}, {'w': jnp.zeros(4, 'bfloat16'), 'm': np.zeros(4, bool)}),
    'random keys': lambda: resolve({}, {'k': jax.random.key(0), 'w': jnp.zeros(4)}),
    'random keys of another kind': lambda: resolve({}, {'k': jax.random.key(0, impl='rbg')}),
    'numbers': lambda: resolve({}, {'n': 3, 'x': 0.5, 'yes': True, 'w': jnp.zeros(4)}),
    'odd paths': lambda: resolve({}, {'a "b"\n': {'é/ü': np.zeros(4)}, 'a.b': np.zeros(4)}),
    'a train state': lambda: ResolvedPlan.of(
        PjitPartitioner(mesh=MESH, plan=PLAN).resolve(TrainState.create(TREE, optax.adafactor(1.0)))
    ),
}


@pytest.mark.parametrize('name', MADE)
def test_read_as_written(name):
    plan = MADE[name]()
    held = from_json(to_json(plan))
    assert held == plan
    assert to_json(held) == to_json(plan)
    assert [*held.mesh.items()] == [*plan.mesh.items()]


def test_the_plan_of_a_train_state():
    """All of it is in the file, and drives a partitioner as the parameters' own does."""
    state = TrainState.create(TREE, optax.adafactor(1.0))
    plan = MADE['a train state']()
    assert {row.category for row in plan.arrays} >= {'parameters', 'optimizer'}
    assert plan['params/fc1/kernel'].spec == P(None, 'model')
    again = PjitPartitioner(mesh=MESH, plan=from_json(to_json(plan)))
    first = PjitPartitioner(mesh=MESH, plan=PLAN)
    assert again.get_mesh_axes(state) == first.get_mesh_axes(state)
    other = TrainState.create(TREE, optax.adamw(1e-3))
    with pytest.raises(
        ValueError, match=r'12 arrays of the plan not there, opt_state/0/v/.* alone'
    ):
        again.get_mesh_axes(other)
    assert again.get_mesh_axes(state.params) == first.get_mesh_axes(state.params)


def test_what_the_optimizer_keeps_is_as_the_plan_says():
    """ZeRO's layout comes back from its plan, which has other rows for it than parameters imply."""
    state = TrainState.create(TREE, optax.adamw(1e-3))
    names = [('.*/kernel', ('embed', 'mlp')), ('.*/bias', ('mlp',))]
    rules, sharded = [('embed', None), ('mlp', 'model')], [('embed', 'data'), ('mlp', 'model')]
    zero = PjitPartitioner(
        mesh=MESH,
        logical_axis_rules=rules,
        optimizer_axis_rules=sharded,
        params_axes_names_override=names,
    )
    plan = from_json(to_json(ResolvedPlan.of(zero.resolve(state))))
    driven = PjitPartitioner(mesh=MESH, plan=plan)
    assert driven.get_mesh_axes(state) == zero.get_mesh_axes(state)
    assert plan['opt_state/0/mu/fc1/kernel'].spec == P('data', 'model')
    assert plan['params/fc1/kernel'].spec == P(None, 'model')
    assert not diff(plan, ResolvedPlan.of(driven.resolve(state)))
    with pytest.raises(ValueError, match='plan decides what optimizer_axis_rules would'):
        PjitPartitioner(mesh=MESH, plan=plan, optimizer_axis_rules=sharded)


AXES = ['data', 'model', 'one']
NAMES = st.text('ab/."\\é\n', min_size=1, max_size=4)


@st.composite
def plans(draw):
    """A plan of random arrays on a random mesh."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 8]), min_size=1, max_size=3))
    mesh = dict(zip(draw(st.permutations(AXES)), sizes, strict=False))
    rows = []
    for path in draw(st.lists(NAMES, max_size=4, unique=True)):
        free, shape, outside, inside = [*mesh], [], [], []
        for _ in range(draw(st.integers(0, 3))):
            axes = tuple(free.pop() for _ in range(draw(st.integers(0, len(free)))))
            ways = int(np.prod([mesh[a] for a in axes]))
            pad = draw(st.booleans()) and ways > 1
            shape.append(draw(st.integers(0, 3)) * ways + pad)
            inside.append(axes or None)
            outside.append(None if pad else axes or None)
        spec = P(*outside) if inside == outside else PaddedSpec(P(*outside), P(*inside))
        array = jax.ShapeDtypeStruct(
            tuple(shape), draw(st.sampled_from(['float32', 'int8', 'bool']))
        )
        names = draw(st.none() | st.tuples(*[st.none() | NAMES] * len(shape)))
        category = draw(st.sampled_from(['parameters', 'optimizer', 'other']))
        reason = draw(NAMES)
        rows.append(
            planned_array(
                path, array, spec, mesh, logical_axes=names, category=category, reason=reason
            )
        )
    return ResolvedPlan(mesh, tuple(rows))


@settings(max_examples=150, deadline=None)
@given(plans())
def test_any_plan_is_read_as_written(plan):
    held = from_json(to_json(plan))
    assert held == plan and to_json(held) == to_json(plan)
    assert not diff(plan, held)
    assert len(to_json(plan).splitlines()) == 4 + max(len(plan.arrays), 1), 'a line for each array'


def test_equal_plans_are_equal_files():
    """Whatever order their arrays came in; the order of a mesh is a part of it."""
    rows = PLAN.arrays
    assert to_json(ResolvedPlan(PLAN.mesh, rows[::-1])) == FILE
    turned = ResolvedPlan({'model': 2, 'data': 4}, rows)
    assert to_json(turned) != FILE and diff(PLAN, turned)
    assert turned != PLAN


# What changes.


def change(row, draw):
    """The row with one field of another value, and that field."""
    field = draw(
        st.sampled_from([f.name for f in dataclasses.fields(PlannedArray) if f.name != 'path'])
    )
    value = getattr(row, field)
    other = {
        'shape': (*row.shape, 1),
        'dtype': row.dtype + 'x',
        'logical_axes': ('x',) if value is None else None,
        'spec': P(*row.spec, None),
        'padded_spec': P() if value is None else None,
        'shard_shape': (*row.shard_shape, 1),
        'bytes_total': row.bytes_total + 1,
        'bytes_per_device': row.bytes_per_device + 1,
        'category': 'other' if value != 'other' else 'optimizer',
        'reason': row.reason + 'x',
    }[field]
    return dataclasses.replace(row, **{field: other}), field


@settings(max_examples=150, deadline=None)
@given(plans(), st.data())
def test_a_difference_is_exactly_what_differs(plan, data):
    after, added, removed, changed = [], set(), set(), {}
    for row in plan.arrays:
        what = data.draw(st.sampled_from(['keep', 'remove', 'change', 'rename']))
        if what == 'keep':
            after.append(row)
        elif what == 'change':
            new, field = change(row, data.draw)
            after.append(new)
            if field not in ('logical_axes', 'reason'):  # which say nothing of the layout
                changed[row.path] = (field,)
        else:
            removed.add(row.path)
        if what == 'rename':
            after.append(dataclasses.replace(row, path=f'new/{row.path}'))
            added.add(f'new/{row.path}')
    found = diff(plan, ResolvedPlan(plan.mesh, tuple(after)))
    assert {row.path for row in found.added} == added
    assert {row.path for row in found.removed} == removed
    assert {c.path: c.fields for c in found.changed} == changed
    assert bool(found) == bool(added or removed or changed)
    assert found.bytes_per_device == sum(r.bytes_per_device for r in after) - plan.bytes_per_device
    back = diff(found.after, found.before)
    assert (back.added, back.removed) == (found.removed, found.added)
    assert back.bytes_per_device == -found.bytes_per_device


def test_a_difference_to_read():
    after = resolve({'fc1/kernel': P('data')}, {'fc1': TREE['fc1'], 'w': np.zeros(4, 'int8')})
    assert str(diff(PLAN, after)).splitlines() == [
        '- fc2/bias: 16 float32, P(None), 64 bytes per device',
        "- fc2/kernel: 64 x 16 float32, P(('model', 'data'), None), 512 bytes per device",
        '+ w: 4 int8, P(None), 4 bytes per device',
        "~ fc1/kernel: spec P(None, 'model') -> P('data', None); shard shape 16 x 32 -> 4 x 64; "
        'bytes per device 2,048 -> 1,024',
        'bytes per device: 2,880 -> 1,284 (-1,596)',
    ]


def test_a_difference_of_meshes():
    after = resolve(ENTRIES, mesh=create_mesh((2, 4), ('data', 'model')))
    text = str(diff(PLAN, after))
    assert text.startswith('mesh: data 4 x model 2 -> data 2 x model 4\n')
    assert 'fc1/kernel: shard shape 16 x 32 -> 16 x 16; bytes per device 2,048 -> 1,024' in text
    assert str(diff(PLAN, PLAN)) == 'the plans are the same'


# Files that are none.


def corrupt(change):
    held = copy.deepcopy(json.loads(FILE))
    change(held)
    return json.dumps(held)


def of_row(**fields):
    """The file with other values in the row of fc1/kernel."""
    return corrupt(lambda held: held['arrays'][1].update(fields))


def of_plan(**fields):
    return corrupt(lambda held: held.update(fields))


ROW = json.loads(FILE)['arrays'][1]
REFUSED = {
    'no JSON': ('sharding plan 1', 'JSON'),
    'nothing': ('', 'JSON'),
    'half of it': (FILE[:300], 'JSON'),
    'a list': ('[]', 'format'),
    'a number': ('3', 'format'),
    'another format': (of_plan(format='sharding plan 2'), 'sharding plan 1.*sharding plan 2'),
    'no format': (corrupt(lambda held: held.pop('format')), 'format'),
    'no mesh': (corrupt(lambda held: held.pop('mesh')), 'mesh'),
    'a mesh without sizes': (of_plan(mesh=['data', 'model']), '"mesh".*size of each axis'),
    'an axis of no size': (of_plan(mesh={'data': 0, 'model': 2}), '"mesh"'),
    'an axis of half a device': (of_plan(mesh={'data': 4.5, 'model': 2}), '"mesh"'),
    'an axis of truth': (of_plan(mesh={'data': True, 'model': 2}), '"mesh"'),
    'a mesh without an axis of a spec': (of_plan(mesh={'data': 4}), "fc1/kernel.*'model'.*data 4"),
    'a mesh of another size': (of_plan(mesh={'data': 4, 'model': 4}), 'fc1/kernel.*shard_shape'),
    'something else': (of_plan(author='me'), 'author'),
    'no arrays': (corrupt(lambda held: held.pop('arrays')), 'arrays'),
    'arrays by path': (of_plan(arrays={'fc1/kernel': ROW}), '"arrays" must be a list'),
    'a row that is none': (of_plan(arrays=['fc1/kernel']), 'no row'),
    'a row twice': (of_plan(arrays=[ROW, ROW]), 'two arrays of the plan have the path fc1/kernel'),
    'a row with more': (of_row(device=3), "fc1/kernel.*'device'"),
    'a row with a typing error': (of_row(reson='x'), "'reson'.*Did you mean 'reason'"),
    'a key twice': (
        FILE.replace('"spec": [null, "model"]', '"spec": [null], "spec": [null, "model"]'),
        'spec.*twice',
    ),
    **{
        f'a row without {name}': (
            corrupt(lambda held, name=name: held['arrays'][1].pop(name)),
            name,
        )
        for name in ROW
    },
}
WRONG_VALUES = {
    'path': [3, None, ['fc1']],
    'shape': [
        [16],
        [16, 63],
        [16, 32],
        [16, -1],
        [16.0, 64],
        [True, 64],
        '16',
        None,
        1024,
        [16, 64, 1],
    ],
    'dtype': ['flot32', 'float16', 'key<xx>', None, 3, 'int7', ''],
    'logical_axes': [[], ['a'], ['a', 'b', 'c'], 'ab', [3, 4], [['a'], None], {'a': 1, 'b': 2}],
    'spec': [
        None,
        'model',
        ['model'],
        ['model', None],
        [None, 'modle'],
        [None, 'model', None],
        ['model', 'model'],
        [None, ['model', 'model']],
        [3, None],
        [None, [3]],
        [None, None],
        [],
        {'1': 'model'},
    ],
    'padded_spec': [
        'model',
        [None, 'modle'],
        [None, 'model', None],
        [['data', 'data'], 'model'],
        [3, 3],
    ],
    'shard_shape': [[16, 64], [16], None, '16', [16, 32, 1]],
    'bytes_total': [4095, None, '4096', [4096], -4096],
    'bytes_per_device': [2049, None, '2048', 4096],
    'category': ['parameter', None, 3, ''],
    'reason': [None, 3, ['the plan says so']],
}


@pytest.mark.parametrize('name', REFUSED)
def test_files_that_are_none(name):
    text, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        from_json(text)


@pytest.mark.parametrize(
    ('field', 'value'), [(field, value) for field in WRONG_VALUES for value in WRONG_VALUES[field]]
)
def test_rows_that_are_none(field, value):
    """The error says which row."""
    assert {*WRONG_VALUES} == {field.name for field in dataclasses.fields(PlannedArray)}
    with pytest.raises(ValueError) as error:
        from_json(of_row(**{field: value}))
    assert 'fc1/kernel' in str(error.value) or field == 'path', str(error.value)
    assert len(str(error.value)) < 400


def test_a_padded_spec_that_pads_nothing():
    """Whole dimensions may be padded, those that are sharded keep their axes."""
    for padded in [['data', 'model'], [None, 'model'], [None, 'data'], [None, None]]:
        with pytest.raises(ValueError, match=r'fc1/kernel.*padded_spec'):
            from_json(of_row(padded_spec=padded))


def test_a_spec_may_be_written_shorter():
    text = corrupt(lambda held: held['arrays'][0].update(spec=[]))
    assert from_json(text) == PLAN
    assert from_json(of_row(spec=[[], ['model']])) == PLAN
    assert to_json(from_json(text)) == FILE


def test_the_file_is_in_the_message(tmp_path):
    path = tmp_path / 'plan.json'
    path.write_text(of_row(spec=['modle', None]))
    with pytest.raises(ValueError, match=r"plan.json: fc1/kernel: .*'modle'.*Did you mean 'model'"):
        load_plan(path)
    with pytest.raises(OSError, match=r'none.json'):
        load_plan(tmp_path / 'none.json')


# The command.


@pytest.fixture
def files(tmp_path):
    save_plan(PLAN, tmp_path / 'a.json')
    save_plan(resolve(ENTRIES | {'fc1/bias': P('model')}), tmp_path / 'b.json')
    (tmp_path / 'broken.json').write_text(FILE[:300])
    (tmp_path / 'bytes.json').write_bytes(b'\xff\xfe\x00')
    return tmp_path


def test_the_command_shows_a_plan(files, capsys):
    assert main([str(files / 'a.json')]) == 0
    out, err = capsys.readouterr()
    assert out == f'{PLAN}\n' and not err
    assert "P(('model', 'data'), None)" in out


def test_the_command_compares_plans(files, capsys):
    assert main([str(files / 'a.json'), str(files / 'b.json')]) == 1
    out, err = capsys.readouterr()
    assert "~ fc1/bias: spec P(None) -> P('model'); shard shape 64 -> 32" in out and not err
    assert main([str(files / 'a.json'), str(files / 'a.json')]) == 0
    assert capsys.readouterr().out == 'the plans are the same\n'


@pytest.mark.parametrize('name', ['none.json', 'broken.json', 'bytes.json', ''])
def test_the_command_says_which_file_is_none(files, capsys, name):
    for arguments in [[name], ['a.json', name], [name, 'a.json']]:
        assert main([str(files / argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert err.startswith('error: ') and err.count('\n') == 1 and not out
        assert str(files / name) in err


def test_the_command_needs_a_file(capsys):
    with pytest.raises(SystemExit, match='2'):
        main([])
    assert 'usage: python -m partitioning.plan' in capsys.readouterr().err


def test_the_module_is_the_command(files):
    command = [sys.executable, '-m', 'partitioning.plan', files / 'a.json', files / 'b.json']
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout.startswith('~ fc1/bias')
