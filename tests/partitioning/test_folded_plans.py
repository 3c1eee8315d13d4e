"""A plan as a table that fits a terminal, with the rows that are alike folded."""

import jax
import optax
import pytest

from partitioning import PjitPartitioner, Plan, TrainState
from partitioning.plan.__main__ import main
from partitioning.plan.tables import fold_rows


def make_plan(num_layers=12):
    """A model whose layers are alike, except that the last one has another width."""

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, 'float32')

    layers = {
        f'layers_{i}': {'up': shape(64, 256), 'down': shape(256, 64)} for i in range(num_layers)
    }
    params = layers | {'embedding': shape(512, 64), 'last': {'up': shape(64, 512)}}
    state = jax.eval_shape(lambda p: TrainState.create({'params': p}, optax.adam(1e-3)), params)
    return PjitPartitioner(layout='fsdp').plan(state)


def test_layers_and_their_optimizer_are_one_row():
    plan = make_plan()
    folded = {one.label: one for one in fold_rows(plan.rows)}
    # The parameters of adam have two moments each.
    assert {label: (len(one.paths), one.followers) for label, one in folded.items()} == {
        'params/layers_{0..11}/up': (12, 24),
        'params/layers_{0..11}/down': (12, 24),
        'params/embedding': (1, 2),
        'params/last/up': (1, 2),
        'step': (1, 0),
        'opt_state/0/count': (1, 0),
    }
    assert folded['params/layers_{0..11}/up'].bytes_per_device == 36 * 64 * 256 * 4 // 8
    assert sum(one.bytes_per_device for one in folded.values()) == plan.bytes_per_device


def test_numbers_that_are_not_a_range_are_listed():
    plan = make_plan(4)
    rows = [row for row in plan.rows if 'layers_1/' not in row.path]
    labels = [one.label for one in fold_rows(rows)]
    assert 'params/layers_{0,2,3}/up' in labels


@pytest.mark.parametrize('columns', [80, 100, 400])
def test_the_table_is_as_wide_as_the_terminal(columns, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('COLUMNS', str(columns))
    plan = make_plan()
    plan.save(tmp_path / 'plan.json')
    assert main([str(tmp_path / 'plan.json')]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns and len(lines) < 20
    assert ('reason' in lines[0]) == (columns == 400)
    assert main([str(tmp_path / 'plan.json'), '--all']) == 0
    assert capsys.readouterr().out == f'{Plan.load(tmp_path / "plan.json")}\n'
