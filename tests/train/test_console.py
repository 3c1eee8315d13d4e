"""What a run prints: lines, tables, figures and phases."""

import io

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from rich.console import Console
from rich.table import Table

from partitioning import AxisRules, PjitPartitioner, TrainState
from partitioning.amounts import bytes_str, flops_str, seconds_str
from train.reporting.console import RunConsole, SafeConsole
from train.reporting.meter import format_figures
from train.reporting.reports import describe_parameters, describe_variables, format_seconds

pytestmark = pytest.mark.core

PARAMS = {'w': jax.ShapeDtypeStruct((8, 6), np.float32), 'b': jax.ShapeDtypeStruct((6,), 'float32')}
RULES = [('embed', ('data', 'model')), ('kv', None), ('batch', 'data')]


def printed_axes(partitioner):
    """Returns the logical and mesh axes that the table shows for each parameter."""
    out = io.StringIO()
    title, table = describe_parameters(partitioner.plan(PARAMS).rows)
    assert title.startswith('54 parameters in 2 arrays, 216 bytes (')
    RunConsole(Console(file=out, width=200)).show(table)
    _columns, *lines = out.getvalue().splitlines()
    # Two spaces separate cells; one space separates the words of a cell.
    cells = [[cell.strip() for cell in line.split('  ') if cell.strip()] for line in lines]
    return {name: axes for name, _shape, axes, *_ in cells}


def test_a_long_line_is_wrapped_only_by_a_terminal():
    out = io.StringIO()
    RunConsole(Console(file=out, width=20)).say('word ' * 100)
    assert out.getvalue() == 'word ' * 100 + '\n'


def test_there_may_be_no_files():
    out = io.StringIO()
    RunConsole(Console(file=out)).files({})  # without writers, and on all processes but the first
    assert out.getvalue() == '-- files\n'


# Clears the screen, sets the title of the window, and changes the colour and the direction of text.
HOSTILE = 'a\x1b[2Jb\x1b]0;title\x07c\x9b31m\r\u202e[bold]\udc80'


@pytest.mark.parametrize('terminal', [False, True])
def test_names_and_samples_cannot_control_the_terminal(terminal):
    # An untrained model may emit any byte, and files and parameters may have any name.
    def print_with(text):
        table, out = Table(), io.StringIO()
        table.add_row(text)
        console = RunConsole(
            SafeConsole(file=out, force_terminal=terminal, no_color=True, width=80)
        )
        console.say(text)
        console.heading(text)
        console.show(table)
        console.sample('def ', text)
        console.scores(7, 'eval', text)
        with console.phase(text):
            pass
        with console.counting(text, total=2) as count:
            count(2)
        with console.tokenizing() as progress:
            progress(text, 1, 2)
        with console.training(2, 10):
            console.step(4, 10, text)
        return out.getvalue()

    printed, harmless = print_with(HOSTILE), print_with('harmless')
    controls = {c for c in printed if not c.isprintable()}
    assert controls <= {c for c in harmless if not c.isprintable()}
    assert ('\x1b' in harmless) == terminal
    for sequence in ('\x1b[2J', '\x1b]0', '\x9b', '\u202e'):
        assert sequence not in printed
    # say, heading, sample, scores, tokenizing and step: brackets are text, not styles
    assert printed.count('[bold]') >= 6


def test_the_table_shows_logical_axes_with_their_mesh_axes():
    names = [('w', ('embed', 'kv')), ('b', ('kv',))]
    named = PjitPartitioner(2, AxisRules(RULES, names=names))
    assert printed_axes(named) == {'w': 'embed:data+model kv', 'b': 'kv'}
    plan = named.plan(PARAMS)
    planned = PjitPartitioner(named.mesh, plan, logical_axis_rules=RULES)
    assert all('None' not in axes and '(' not in axes for axes in printed_axes(planned).values())
    assert 'data+model' in printed_axes(planned)['w']


@pytest.mark.parametrize(
    'count, text',
    [
        (0, '0 bytes'),
        (1, '1 byte'),
        (768, '768 bytes'),
        (98_304, '98.3 kB'),
        (3_609_088, '3.6 MB'),
        (999_949_999, '999.9 MB'),
        (2**30 - 1, '1.00 GiB'),
        (2.3 * 2**30, '2.30 GiB'),
        (2**42, '4,096.00 GiB'),
    ],
)
def test_bytes_for_people(count, text):
    assert bytes_str(count) == text


@pytest.mark.parametrize(
    'count, text',
    [(768, '768 bytes'), (98_304, '96.0 KiB'), (1_048_576, '1.0 MiB'), (2**30 - 1, '1.00 GiB')],
)
def test_bytes_in_a_table_with_gibibytes(count, text):
    assert bytes_str(count, beside=2**34) == text


@pytest.mark.parametrize(
    'written, text',
    [
        (seconds_str(2.5e-4), '250 µs'),
        (seconds_str(9.994e-4), '999 µs'),
        (seconds_str(9.996e-4), '1 ms'),  # and not 1e+03 µs
        (seconds_str(0.9994), '999 ms'),
        (seconds_str(0.9996), '1.00 s'),
        (flops_str(9.996e11), '1 TFLOP'),
        (bytes_str(999_960), '1.0 MB'),
    ],
)
def test_an_amount_that_rounds_up_to_a_thousand_takes_the_larger_unit(written, text):
    assert written == text


@pytest.mark.parametrize(
    'seconds, text',
    [
        (0.04, '0.0 s'),
        (1.25, '1.2 s'),
        (59.94, '59.9 s'),
        (59.96, '1:00'),
        (153, '2:33'),
        (3599.6, '1:00:00'),
        (3753, '1:02:33'),
        (360_000, '100:00:00'),
    ],
)
def test_seconds_for_people(seconds, text):
    assert format_seconds(seconds) == text


def test_the_figures_of_a_step():
    few = {'train/loss': 2.34567, 'train/rows_per_second': 1234.5, 'train/seconds_left': 75.2}
    assert format_figures(few) == 'loss 2.346  1,234 rows/s  1:15 left'
    more = {
        'train/loss': 12.0,
        'train/learning_rate': 0.00059999,
        'train/gradient_norm': 1.2345,
        'train/tokens_per_second': 1e6,
        'train/mfu': 0.4236,
        'train/device_memory_bytes': 3.5 * 2**30,
        'train/seconds_left': 0.0,
    }
    assert format_figures(more) == (
        'loss 12.000  lr 0.0006  grad 1.23  1,000,000 tokens/s  42.4% MFU  3.50 GiB  0.0 s left'
    )


def test_a_phase_measures_its_time_and_shows_a_spinner_on_a_terminal(monkeypatch):
    monkeypatch.setattr('train.reporting.console.WORTH_A_LINE', -1.0)
    for terminal in (True, False):
        out = io.StringIO()
        console = RunConsole(Console(file=out, force_terminal=terminal, width=80))
        with console.phase('compiling'):
            pass
        assert ('compiling ...' in out.getvalue()) == terminal
        assert 'compiling: 0.' in out.getvalue()
        with pytest.raises(OSError, match='disk full'), console.phase('saving'):
            raise OSError('disk full')
        with console.tokenizing() as progress, console.phase('opening'):  # both are shown
            progress('a source', 1, 2)
        assert 'saving: ' not in out.getvalue() and 'tokenized a source in' in out.getvalue()
        assert console.seconds.keys() == {'compiling', 'opening'}


@pytest.mark.parametrize('terminal', [True, False])
def test_steps_are_lines_or_a_progress_bar(terminal):
    out = io.StringIO()
    console = RunConsole(Console(file=out, force_terminal=terminal, no_color=True, width=80))
    with console.training(2, 10):
        console.step(4, 10, 'loss 1.500')
    assert ('step 4/10  loss 1.500\n' in out.getvalue()) != terminal
    assert not terminal or ('4/10' in out.getvalue() and 'loss 1.500' in out.getvalue())
    with console.training(10, 10):  # nothing is left to train
        pass
    assert out.getvalue().count('training from step') == 1


def test_variables_are_listed_as_t5x_lists_them():
    partitioner = PjitPartitioner(
        num_partitions=2, logical_axis_rules=[('embed', 'data'), ('mlp', 'model')]
    )
    params = {
        'w': nn.LogicallyPartitioned(np.zeros((8, 6), np.float32), ('embed', 'mlp')),
        'b': nn.LogicallyPartitioned(np.zeros((4,), np.float32), (None,)),
    }
    state = jax.eval_shape(lambda: TrainState.create(params, optax.sgd(0.1, momentum=0.9)))
    text = describe_variables(partitioner.plan(state).rows)
    lines = [' '.join(line.split()) for line in text.splitlines()]
    w = "w size 48 shape (embed=8, mlp=6) partition spec ('data', 'model')"
    assert lines == [
        'Variable params/b size 4 shape (4) partition spec (None,)',
        f'Variable params/{w}',
        'Total number of parameters: 52',
        '',
        'Variable step size 1 shape () partition spec ()',
        'Variable opt_state/0/trace/b size 4 shape (4) partition spec (None,)',
        f'Variable opt_state/0/trace/{w}',
    ]
