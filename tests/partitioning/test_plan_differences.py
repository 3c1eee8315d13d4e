"""What changes from one plan to another, and the command that shows it."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from plans_by_hand import FILE, RULES, TREE, planned, plans

from partitioning import Plan, create_mesh, plan_diff
from partitioning.plan.__main__ import main

pytestmark = pytest.mark.core

PLAN = planned()


def change(row, field):
    """The row with another value in one field."""
    value = getattr(row, field)
    other = {
        'shape': lambda: (*row.shape, 1),
        'dtype': lambda: row.dtype + 'x',
        'role': lambda: 'other' if value != 'other' else 'optimizer',
        'dimensions': lambda: value[1:],
        'spec': lambda: P('x', 'y', 'z', 'w'),
        'shard_shape': lambda: (*row.shard_shape, 1),
        'bytes_total': lambda: 3 * row.bytes_total + 5_000,
    }[field]
    return row._replace(**{field: other()})


def bytes_per_device(row):
    return row.bytes_total * math.prod(row.shard_shape) // max(math.prod(row.shape), 1)


@settings(max_examples=100)
@given(plans(), st.data())
def test_a_difference_is_exactly_what_differs(plan, data):
    after, added, removed, changed = [], set(), set(), {}
    for row in plan.rows:
        what = data.draw(st.sampled_from(['keep', 'remove', 'change', 'rename']))
        if what == 'keep':
            after.append(row)
        elif what == 'change':
            field = data.draw(st.sampled_from([name for name in row._fields if name != 'path']))
            after.append(change(row, field))
            if field != 'dimensions':  # names and reasons do not change the layout
                changed[row.path] = {field}
            if bytes_per_device(after[-1]) != bytes_per_device(row):
                changed[row.path] |= {'bytes_per_device'}
        else:
            removed.add(row.path)
        if what == 'rename':
            after.append(row._replace(path=f'new/{row.path}'))
            added.add(f'new/{row.path}')
    found = plan_diff(plan, Plan(plan.mesh, tuple(after)))
    assert {row.path for row in found.added} == added
    assert {row.path for row in found.removed} == removed
    assert {c.path: {*c.fields} for c in found.changed} == changed
    assert bool(found) == bool(added or removed or changed)
    assert found.bytes_per_device == sum(map(bytes_per_device, after)) - plan.bytes_per_device
    back = plan_diff(found.after, found.before)
    assert (back.added, back.removed) == (found.removed, found.added)
    assert back.bytes_per_device == -found.bytes_per_device


def test_a_difference_to_read():
    tree = {'fc1': TREE['fc1'], 'w': np.zeros(4, 'int8')}
    after = planned(tree, {'fc1/kernel': ('rows', None)}, [('rows', 'data')])
    assert str(plan_diff(PLAN, after)).splitlines() == [
        '- fc2/bias: 16 float32, P(None), 64 bytes per device',
        "- fc2/kernel: 64 x 16 float32, P(('model', 'data'), None), 512 bytes per device",
        '+ w: 4 int8, P(None), 4 bytes per device',
        "~ fc1/kernel: spec P(None, 'model') -> P('data', None); shard shape 16 x 32 -> 4 x 64; "
        'bytes per device 2,048 -> 1,024',
        'bytes per device: 2,880 -> 1,284 (-1,596)',
    ]


def test_a_difference_of_meshes():
    after = planned(mesh=create_mesh((2, 4), ('data', 'model')))
    text = str(plan_diff(PLAN, after))
    assert text.startswith('mesh: data 4 x model 2 -> data 2 x model 4\n')
    assert 'fc1/kernel: shard shape 16 x 32 -> 16 x 16; bytes per device 2,048 -> 1,024' in text
    assert str(plan_diff(PLAN, PLAN)) == 'the plans are the same'


@pytest.mark.parametrize('pair', [(PLAN, TREE), ('plan.json', PLAN)])
def test_values_that_are_not_plans(pair):
    with pytest.raises(TypeError, match=r'not a (dict|str)'):
        plan_diff(*pair)
    assert pair[0] != pair[1]


# The command.


@pytest.fixture
def files(tmp_path):
    PLAN.save(tmp_path / 'a.json')
    names = {'fc1/kernel': ('embed', 'mlp'), 'fc2/kernel': ('rows', None), 'fc1/bias': ('mlp',)}
    planned(names=names, rules=RULES).save(tmp_path / 'b.json')
    (tmp_path / 'broken.json').write_text(FILE[:300])
    (tmp_path / 'bytes.json').write_bytes(b'\xff\xfe\x00')
    return tmp_path


def test_the_command_shows_a_plan(files, capsys):
    """It shows the spec, bytes and reasons of each array."""
    assert main([str(files / 'a.json'), '--all']) == 0
    out, err = capsys.readouterr()
    assert out == f'{PLAN}\n' and not err
    (line,) = (line for line in out.splitlines() if line.startswith('fc2/kernel'))
    for part in ('64 x 16', "P(('model', 'data'), None)", '8 x 16', '512', 'rows: a rule shards'):
        assert part in line
    assert '4 arrays, 8,512 bytes; 2,880 bytes per device' in out and 'data 4 x model 2' in out


def test_the_command_compares_plans(files, capsys):
    assert main([str(files / 'a.json'), str(files / 'b.json')]) == 1
    out, err = capsys.readouterr()
    assert "~ fc1/bias: spec P(None) -> P('model'); shard shape 64 -> 32" in out and not err
    assert main([str(files / 'a.json'), str(files / 'a.json')]) == 0
    assert capsys.readouterr().out == 'the plans are the same\n'


@pytest.mark.parametrize('name', ['none.json', 'broken.json', 'bytes.json', ''])
def test_the_command_says_which_file_is_not_a_plan(files, capsys, name):
    for arguments in [[name], ['a.json', name], [name, 'a.json']]:
        assert main([str(files / argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert err.startswith('error: ') and err.count('\n') == 1 and not out
        assert str(files / name) in err


def test_the_module_is_the_command(files):
    command = [sys.executable, '-m', 'partitioning.plan']
    run = subprocess.run(
        [*command, files / 'a.json', files / 'b.json'], capture_output=True, text=True
    )
    assert run.returncode == 1 and run.stdout.startswith('~ fc1/bias')


def test_the_command_needs_a_file(capsys):
    with pytest.raises(SystemExit, match='2'):
        main([])
    assert 'required: plan; see python -m partitioning.plan --help' in capsys.readouterr().err
