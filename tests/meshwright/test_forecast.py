"""Forecasts of partitioned functions, with figures that are counted by hand."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forecast_programs import BATCH, HIDDEN, PRODUCT, ROWS, WIDTH, partitioned
from forecasts_by_hand import collective, make_forecast, step_time
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright import Forecast, forecast, forecast_table, render_page
from meshwright.calls.compiling import read_compiler_log
from meshwright.calls.partitioned_call import PartitionedCall
from meshwright.changes import SettingChange
from meshwright.report.forecasts import Compilation
from meshwright.report.time_words import (
    bounds_of,
    cost_per_million,
    count_tokens,
    range_sentence,
    tokens_per_second,
)
from partitioning import CHIPS, MeshConfig, PjitPartitioner

pytestmark = pytest.mark.core


@pytest.fixture(scope='module')
def program():
    return partitioned({'data': 4, 'model': 2})


@pytest.fixture(scope='module')
def on_cpus(program):
    """The forecast for the devices of the mesh."""
    _, step, state = program
    said = []
    made = forecast(step, state, BATCH, 3, progress=said.append, confirm=False)
    assert [text.split()[0] for text in said] == ['tracing', 'compiling']
    return made


@pytest.fixture(scope='module')
def elsewhere(program):
    """The forecast for 64 chips, for which CPU devices stand in."""
    _, step, state = program
    there = {'topology': 'v5p-128', 'on_cpu': True, 'axes': {'data': 8, 'model': 8}}
    return forecast(step, state, BATCH, 3, **there)


def test_the_bytes_of_arguments(on_cpus, elsewhere):
    matrices = 2 * 4 * WIDTH * HIDDEN
    for made, devices, rows in ((on_cpus, 8, ROWS // 4), (elsewhere, 64, ROWS // 8)):
        memory = made.memory
        assert memory.parameters == memory.optimizer == matrices // devices + 4 * WIDTH
        assert memory.batch == 4 * rows * WIDTH
        assert memory.other == 4
        assert memory.arguments == 2 * memory.parameters + memory.batch + 4
        assert memory.peak >= memory.arguments + memory.temporaries
        assert abs(memory.live / memory.peak - 1) < 0.1


def test_the_machine_that_a_function_is_moved_to(on_cpus, elsewhere):
    assert (on_cpus.topology, on_cpus.chip, on_cpus.fits) == ('cpu:8', None, None)
    assert on_cpus.mesh == {'data': 4, 'model': 2}
    assert (elsewhere.topology, elsewhere.num_devices) == ('v5p:4x4x4', 64)
    assert elsewhere.mesh == {'data': 8, 'model': 8}
    assert elsewhere.memory.limit == CHIPS['v5p'].hbm_bytes and elsewhere.fits
    assert elsewhere.back_end == 'cpu' and elsewhere.time is None
    assert any('virtual CPU devices' in note for note in elsewhere.notes)


def test_the_flops_with_and_without_recomputation(on_cpus):
    """Two products forward, three backward (x has no gradient), and one is computed again."""
    assert on_cpus.model_flops == (2 + 4 - 1 + 1) * PRODUCT / 8
    assert on_cpus.program_flops == on_cpus.model_flops + PRODUCT / 8


def test_what_is_replicated_and_why(on_cpus):
    found = {array.path: array for array in on_cpus.replicated}
    assert list(found)[-1] == 'batch/x' or set(found) == {
        'params/scale',
        'opt_state/mu/scale',
        'batch/x',
    }
    scale = found['params/scale']
    assert (scale.nbytes, scale.axes) == (4 * WIDTH, ('data', 'model'))
    assert 'a rule replicates it' in scale.reason
    assert found['batch/x'].axes == ('model',)


def test_the_exchanges_of_a_step(on_cpus):
    """The gradients of both matrices are summed over the rows of 4 devices."""
    kinds = {(c.kind, c.axes) for c, _ in on_cpus.collectives}
    assert ('all-gather', ('data',)) in kinds
    summed = [cause.array for c, cause in on_cpus.collectives if c.kind == 'all-reduce' and cause]
    assert 'the gradient of params/up' in summed


def test_json_is_stable_and_can_be_read(program, on_cpus):
    _, step, state = program
    again = forecast(step, state, BATCH, 3, confirm=False)
    first, second = on_cpus.as_dict(), again.as_dict()
    assert first.pop('compilation') != second.pop('compilation')
    assert json.dumps(first) == json.dumps(second)
    text = on_cpus.to_json()
    assert json.loads(text)['fits'] is None and text.count('"params/up"') >= 1
    read = Forecast.from_json(text)
    assert read.to_json() == text
    assert read.memory.peak == on_cpus.memory.peak and read.arrays == on_cpus.arrays
    assert len(read.placement.places) == 8  # the page draws the mesh from it
    assert render_page([read]) == render_page([on_cpus])
    with pytest.raises(ValueError, match=r'"format".*not None'):
        Forecast.from_json('{}')
    with pytest.raises(ValueError, match=r"forecast\.memory lacks 'limit'"):
        held = json.loads(text)
        del held['memory']['limit']
        Forecast.from_json(json.dumps(held))


def test_without_a_compiler(program):
    _, step, state = program
    there = {'topology': 'v5p:4x4x4', 'on_cpu': True, 'axes': {'data': 8, 'model': 8}}
    made = forecast(step, state, BATCH, 3, **there, compile=False)
    memory = made.memory
    assert made.back_end == 'none' and memory.temporaries is None and memory.live is None
    assert memory.peak == memory.analytic_peak > memory.arguments
    assert memory.buffers_from == 'jaxpr'
    assert memory.gradients >= 2 * 4 * WIDTH * HIDDEN // 64
    text = forecast_table([made])  # whether an exchange is asynchronous is left to compilers
    assert re.search('^sent by a device per call +by formula$', text, re.MULTILINE)
    assert '  all' in text and 'next to other' not in text + render_page([made])


def test_a_step_that_does_not_fit_has_changes_that_help(program):
    """2**26 rows of float32 over 8 devices: 8 GiB each, and more for the hidden layer."""
    _, step, state = program
    batch = {'x': jax.ShapeDtypeStruct((2**26, WIDTH), jnp.float32)}
    there = {'topology': 'v5e:2x4', 'on_cpu': True}

    def build():
        smaller = {'x': jax.ShapeDtypeStruct((2**20, WIDTH), jnp.float32)}
        return PartitionedCall(step, (state, smaller, 3))

    tried = SettingChange('Trainer.rows = 2**20', build)
    impossible = SettingChange('Trainer.rows = 3', _raise_value_error)
    made = forecast(step, state, batch, 3, **there, changes=[impossible, tried])
    memory = made.memory
    assert made.fits is False and memory.batch == 2**26 * WIDTH * 4 // 4
    assert memory.peak > memory.limit == CHIPS['v5e'].hbm_bytes
    settings = {change.setting: change for change in made.changes}
    assert settings['Trainer.rows = 2**20'].fits
    assert 'Trainer.rows = 3' not in settings
    rows = [
        int(re.match(r'a batch of ([\d,]+) rows', s)[1].replace(',', ''))
        for s in settings
        if s.startswith('a batch')
    ]
    assert rows and 2**26 % rows[0] == 0
    assert 4 * rows[0] * WIDTH // 4 < memory.limit
    assert any('devices in place of 8' in setting for setting in settings)
    largest, cause = memory.buffers[0]
    assert largest.nbytes >= 2**30 and len(cause.logical_axes) == 2
    assert 'what would make it fit' in forecast_table([made])


def _raise_value_error():
    raise ValueError('not possible')


def test_the_table_fits_into_a_terminal(on_cpus, elsewhere):
    text = forecast_table([on_cpus, elsewhere, elsewhere, elsewhere, elsewhere])
    assert max(map(len, text.splitlines())) <= 100
    alone = forecast_table([elsewhere])
    for label, shown in (
        ('train_step', 'v5p:4x4x4'),
        ('  limit', '95.73 GiB'),
        ('memory of a device', 'jaxlib .* \\(CPU\\)'),
        ('estimated without the compiler', 'jaxpr and layouts'),
        ('computation of a device', 'jaxpr'),
    ):
        assert re.search(f'^{label} +{shown}$', alone, re.MULTILINE), label
    assert 'on cpu:8' in text  # whose notes differ
    same = forecast_table([elsewhere, elsewhere])
    assert 'notes on all machines' in same and 'on v5p:4x4x4' not in same
    replicated = '2.0 KiB  params/scale and 1 more over data, model: norm: a rule replicates it'
    assert replicated in text


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'topology': 'v9:4x4'}, "unknown topology 'v9:4x4': the known chips are v2, v3"),
        ({'topology': 'v5p-100'}, "'v5p-100' is offered.*'v5p-64'|'v5p-128'"),
        (
            {'topology': 'v5e:4x4'},
            "devices is 16; the nearest that fits: {'data': 8, 'model': 2}; give .*axes=",
        ),
        (
            {'topology': 'v5e:4x4', 'axes': {'data': 16}},
            "mesh axis 'model' does not exist; the mesh is data 16",
        ),
        ({'topology': 'v5e:2x4', 'axes': {'data': 3, 'model': -1}}, '8'),
        (
            {'topology': 'v5e:16x32', 'axes': {'data': 512, 'model': 1}},
            'size 256 is not divisible by 512',
        ),
    ],
)
def test_one_line_says_why_there_is_no_forecast(program, settings, message):
    _, step, state = program
    with pytest.raises(ValueError, match=message) as caught:
        forecast(step, state, BATCH, 3, on_cpu=True, **settings)
    assert '\n' not in str(caught.value)


def test_meshes_without_devices_are_refused(program):
    partitioner, _, _ = program
    abstract = partitioner.with_mesh(AbstractMesh((4, 2), ('data', 'model')))
    with pytest.raises(ValueError, match=r"no devices to compile for: .*'v5p:4x4x4'"):
        forecast(abstract.partition(lambda x: x, None, None), BATCH['x'])


def test_layouts_given_as_shardings_of_another_mesh_are_moved(program):
    """A custom trainer, whose state has no names: its roles are known by what contains it."""
    mesh = Mesh(np.array(jax.devices()[:4]), ('data',))
    sharded = NamedSharding(mesh, PartitionSpec('data'))
    whole = NamedSharding(mesh, PartitionSpec())

    def step(params, opt_state, batch):
        return params + opt_state.sum() + batch.sum(), opt_state

    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=[('batch', 'data')])
    fn = partitioner.partition(step, (whole, sharded, sharded), (whole, sharded))
    args = [jax.ShapeDtypeStruct((64, n), jnp.float32) for n in (2, 3, 5)]
    made = forecast(fn, *args, topology='v5litepod-8', on_cpu=True, axes={'data': 8})
    memory = made.memory
    assert (made.topology, made.mesh) == ('v5e:2x4', {'data': 8})
    held = (memory.parameters, memory.optimizer, memory.batch)
    assert held == (4 * 64 * 2, 4 * 64 * 3 // 8, 4 * 64 * 5 // 8)
    assert made.replicated[0].path == 'params' and 'None' in made.replicated[0].reason


def test_warnings_of_the_compiler_are_collected_and_other_lines_pass(capfd):
    with read_compiler_log() as warnings:
        os.write(
            2, b'W0823 12:34:56.789012   123 spmd_partitioner.cc:652] [SPMD] Involuntary full\n'
        )
        os.write(2, b'I0823 12:34:56.789012   123 service.cc:1] nothing\n')
        os.write(2, b'a line of the user\n')
        os.write(2, b'and a progress bar')
    assert warnings == ['[SPMD] Involuntary full']
    assert capfd.readouterr().err == 'a line of the user\nand a progress bar'


def test_small_parts_of_the_time_and_equal_exchanges_are_added_up(elsewhere):
    """Parts below a thousandth of 2 s are one line; two equal exchanges of 3 KiB are one."""
    parts = (('products', 1.9), ('copies', 0.0985), ('sums', 0.001), ('gathers', 0.0005))
    time = step_time(1.8, 2.0, 2.2, [(name, s, s) for name, s in parts])
    arrays = ('bf16[64,3]', 'f32[5]')
    gather = collective('all-gather', ('data',), 8, arrays, 3072.0, 1, '/project/run.py:7')
    made = dataclasses.replace(elsewhere, time=time, collectives=((gather, None), (gather, None)))
    text = forecast_table([made])
    assert re.search(r'^    everything smaller +1.5 ms$', text, re.MULTILINE)
    assert 'sums' not in text and 'gathers' not in text
    assert '6.0 KiB  2 x all-gather over data of bf16[64,3] and 1 more, dot_general, ' in text
    assert '/project/run.py:7' in text


def test_a_compiler_that_ends_the_process_says_why_in_one_line():
    """As libtpu does for an unknown flag."""
    program = (
        'import os, time\n'
        'from meshwright.calls.compiling import read_compiler_log\n'
        'with read_compiler_log():\n'
        "    os.write(2, b'F0823 12:34:56.789012 1 a.cc:9] Unknown flag in XLA_FLAGS: --x\\n')\n"
        '    time.sleep(60)\n'
    )
    ended = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith('error: ') and ended.stderr.count('\n') == 1
    assert 'Unknown flag in XLA_FLAGS: --x' in ended.stderr


MODEL = """
import jax

def double(x):
    return jax.lax.with_sharding_constraint(2 * x, jax.sharding.PartitionSpec(None))
"""


def forecast_in(folder, monkeypatch):
    """The forecast of a function whose file is in a folder, and whose result is gathered."""
    (folder / 'lm').mkdir(parents=True)
    (folder / 'lm/model.py').write_text(MODEL)
    monkeypatch.chdir(folder)
    spec = importlib.util.spec_from_file_location('model', folder / 'lm/model.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    partitioner = PjitPartitioner(mesh=MeshConfig(axes={'data': 8}))
    rows = PartitionSpec('data')
    step = partitioner.partition(module.double, (rows,), PartitionSpec())
    return forecast(step, jax.ShapeDtypeStruct((64, 3), jnp.float32))


def test_two_folders_with_the_same_code_give_the_same_json(tmp_path, monkeypatch):
    made = [forecast_in(tmp_path / name / 'code', monkeypatch) for name in ('here', 'there')]
    same = {'seconds': 0.0, 'peak_rss': 0}
    first, second = (
        dataclasses.replace(one, compilation=Compilation(**same)).to_json() for one in made
    )
    assert first == second
    [(_, cause)] = made[0].collectives
    assert cause.source == 'lm/model.py:5'
    assert str(tmp_path) not in first and str(tmp_path) not in forecast_table([made[0]])


def test_the_time_in_words():
    """64 rows of 2,048 tokens in 0.8 s on 64 chips at 4.5 per hour; products take 0.55 s."""
    made = make_forecast(price=4.5)
    assert count_tokens(made) == 64 * 2048
    assert tokens_per_second(made) == pytest.approx(64 * 2048 / 0.8)
    assert cost_per_million(made) == pytest.approx(64 * 4.5 / 3600 * 0.8 / (64 * 2048) * 1e6)
    shares = bounds_of(made.time)
    assert list(shares)[:2] == ['matrix products', 'exchanges that nothing hides']
    assert shares['matrix products'] == pytest.approx(0.55 / 0.8)
    assert sum(shares.values()) == pytest.approx(1)
    text, page = forecast_table([made]), render_page([made])
    for words in ('163,840', '0.488', 'matrix products 69%', 'published steps'):
        assert words in text, words
    for words in ('163,840 tokens per second', '0.488 at 4.5 per chip', 'matrix products 69%'):
        assert words in page, words
    plain = make_forecast()
    assert cost_per_million(plain) is None and 'million' not in forecast_table([plain])
    assert tokens_per_second(make_forecast(arrays=())) is None
    assert tokens_per_second(make_forecast(time=None)) is None
    unknown = range_sentence(make_forecast(chip=CHIPS['v4']))
    assert 'no step on v4 was measured' in unknown and 'v5p' in unknown


@pytest.mark.parametrize(
    'peak, is_close, words',
    [
        (80, False, 'yes, 20'),
        (95, True, 'close: 5'),
        (105, True, 'close: lacks'),
        (112, False, 'NO'),
    ],
)
def test_a_peak_by_formula_can_be_close_to_the_limit(peak, is_close, words):
    """Its usual error is 10%; a compiler's peak is never close."""
    memory = dataclasses.replace(make_forecast().memory, limit=100 * 2**30, peak=peak * 2**30)
    made = make_forecast(memory=memory, back_end='none')
    assert made.is_close is is_close
    text = forecast_table([made])
    assert words in text and '±10%' in text
    assert ('close to the limit' in render_page([made])) is is_close
    compiled = make_forecast(memory=memory)
    assert not compiled.is_close and '±10%' not in forecast_table([compiled])
