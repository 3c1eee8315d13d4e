"""Golden forecasts: what differs, what is tolerated, and when files are written."""

import dataclasses
import json
import re

import jax
import pytest
from forecasts_by_hand import ARRAYS, EMBED, GIB, MESH, collective, make_forecast, rows
from jax.sharding import PartitionSpec as P

from meshwright.checks.goldens import assert_forecast_unchanged, check_golden, golden_path
from meshwright.records.difference import Tolerances
from partitioning import MeshConfig, PjitPartitioner


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    monkeypatch.delenv('CI', raising=False)
    monkeypatch.delenv('MESHWRIGHT_UPDATE_FORECASTS', raising=False)


@pytest.fixture
def folder(tmp_path):
    """A folder with the golden file of the forecast that is written by hand."""
    [file] = check_golden([make_forecast()], tmp_path)
    assert file.name == 'train_step.v5p-4x4x4.json'
    return tmp_path


def with_peak(peak):
    return make_forecast(memory=dataclasses.replace(make_forecast().memory, peak=peak))


def difference(forecast, folder, **settings):
    """The lines of the difference, without the advice and the heading."""
    with pytest.raises(AssertionError) as raised:
        check_golden([forecast], folder, **settings)
    advice, _, file, heading, *lines = str(raised.value).splitlines()
    assert 'MESHWRIGHT_UPDATE_FORECASTS=1' in advice and '1 of 1 golden file changed' in advice
    assert file.startswith(str(folder)) and heading.startswith('train_step on v5p:4x4x4: ')
    return [line.strip() for line in lines if not line.endswith(':')]


def test_a_file_has_one_line_for_each_exchange_and_array(folder):
    text = (folder / 'train_step.v5p-4x4x4.json').read_text()
    held = json.loads(text)
    assert held['peak'] == 7.5 * GIB and held['mesh'] == {'fsdp': 16, 'tensor': 4}
    assert held['versions'] == {'libtpu': '0.0.52'}
    assert [(c['kind'], c['axes'], c['bytes'], c['count']) for c in held['exchanges']] == [
        ('all-gather', ['fsdp'], 48_000_000_000, 96),
        ('all-gather', ['tensor'], 3_600_000_000, 1),
        ('all-reduce', ['tensor'], 6_400_000_000, 64),
    ]
    assert len(re.findall('^  {"path"', text, re.M)) == len(ARRAYS) == len(held['arguments'])


def test_small_differences_are_tolerated(folder):
    assert check_golden([with_peak(int(7.5 * 1.0099 * GIB))], folder) == ()
    assert difference(with_peak(int(7.5 * 1.02 * GIB)), folder) == [
        'peak memory of a device: 7.50 GiB -> 7.65 GiB (+2.0%)',
        'train/models/output.py:63',  # the largest buffer
    ]
    wide = Tolerances(peak=0.05)
    assert check_golden([with_peak(int(7.5 * 1.02 * GIB))], folder, tolerances=wide) == ()


def test_what_no_longer_fits_says_so(folder):
    assert difference(with_peak(100 * GIB), folder) == [
        'the machine: fits -> does not fit',
        'peak memory of a device: 7.50 GiB -> 100.00 GiB (13 times)',
        'train/models/output.py:63',
    ]


def test_exchanges_are_compared_by_kind_and_axes(folder):
    (gather, cause), (reduce, _), _ = make_forecast().collectives
    small = collective('all-to-all', ('fsdp',), 16, ('bf16[8]',), 2.0, 3, 'model.py:1')
    twice = dataclasses.replace(gather, wire_bytes=1e9)
    fewer = dataclasses.replace(reduce, wire_bytes=2e8, count=32)  # as many bytes in all
    changed = make_forecast(collectives=((twice, cause), (fewer, None), (small, None)))
    lines = difference(changed, folder)
    assert lines[0] == 'all-gather over fsdp of bf16 (ICI): 44.70 GiB -> 89.41 GiB (+100%)'
    assert lines[1].startswith(
        "train/models/transformer.py:88; rule ('embed', 'fsdp'); for params/"
    )
    assert lines[3] == 'exchange is gone: all-gather over tensor of f32 (ICI): 3.35 GiB'
    assert not any('all-reduce' in line or 'all-to-all' in line for line in lines)


def test_layouts_are_compared_exactly(folder):
    [table] = rows(
        MESH,
        ('params/embedding', (128_256, 4096), 'float32', 'parameters', [('vocab', None), EMBED]),
    )
    changed = make_forecast(arrays=(table, *ARRAYS[1:-1]))
    assert difference(changed, folder) == [
        "params/embedding: P('tensor', 'fsdp'), 32.8 MB per device -> P(None, 'fsdp'), 131.3 MB "
        'per',
        'device',
        "argument is gone: batch/tokens: int32 64 x 2048, P('fsdp', None), 32.8 kB per device",
    ]


def test_another_compiler_is_named_next_to_a_difference(folder):
    other = {'back_end_version': 'libtpu 0.0.60'}
    assert check_golden([make_forecast(**other)], folder) == ()
    lines = difference(dataclasses.replace(with_peak(8 * GIB), **other), folder)
    assert 'the versions are probably the reason' in lines[0]
    assert 'versions: libtpu 0.0.52 -> 0.0.60' in lines
    assert 'peak memory of a device: 7.50 GiB -> 8.00 GiB (+6.7%)' in lines


def test_files_are_replaced_when_asked(folder, monkeypatch):
    changed = with_peak(8 * GIB)
    assert difference(changed, folder)
    monkeypatch.setenv('MESHWRIGHT_UPDATE_FORECASTS', '1')
    assert len(check_golden([changed], folder)) == 1
    monkeypatch.delenv('MESHWRIGHT_UPDATE_FORECASTS')
    assert check_golden([changed], folder) == ()
    assert len(check_golden([make_forecast()], folder, update=True)) == 1
    assert check_golden([make_forecast()], folder) == ()


def test_a_missing_file_is_an_error_in_continuous_integration(tmp_path, monkeypatch):
    monkeypatch.setenv('CI', 'true')
    assert difference(make_forecast(), tmp_path) == ['there is no golden file: commit one']
    assert not list(tmp_path.iterdir())
    assert len(check_golden([make_forecast()], tmp_path, on_missing='write')) == 1
    monkeypatch.delenv('CI')
    assert difference(make_forecast(), tmp_path / 'new', on_missing='error')


def test_slices_and_names_have_their_own_files(tmp_path):
    two = make_forecast(topology='v5e:16x16', num_slices=2)
    assert golden_path(two, 'f').name == 'train_step.v5e-16x16.2-slices.json'
    assert golden_path(two, 'f', '../8b run').name == '..-8b-run.v5e-16x16.2-slices.json'
    with pytest.raises(ValueError, match=r'two forecasts of train_step .* own name'):
        check_golden([make_forecast(), make_forecast()], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda text: text[:-4], 'Expecting|delimiter'),
        (lambda text: '[' * 100_000, 'nested'),
        (lambda text: text.replace('record 1', 'record 9'), 'format'),
        (lambda text: text.replace('"count"', '"times"'), r"\[0\] has an unknown entry 'times'"),
        (lambda text: text.replace('"count": 96', '"count": "x"'), r"\[0\].count .* int, not 'x'"),
        (lambda text: text.replace('"peak"', '"top"'), "the file has an unknown entry 'top'"),
    ],
    ids=['cut', 'deep', 'format', 'exchange', 'number', 'key'],
)
def test_a_malformed_file_is_named(folder, change, message):
    file = folder / 'train_step.v5p-4x4x4.json'
    file.write_text(change(file.read_text()))
    with pytest.raises(ValueError, match=message) as raised:
        check_golden([make_forecast()], folder)
    assert str(file) in str(raised.value) and 'MESHWRIGHT_UPDATE_FORECASTS=1' in str(raised.value)


def test_the_forecast_of_a_function_is_compared(tmp_path):
    """A product whose result is whole on every device gathers the other seven rows of 256 bytes."""
    mesh = MeshConfig(axes={'data': 8})

    def layout_of(*results):
        partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=[('batch', 'data')])
        double = partitioner.partition(lambda x: x * 2, (P('data'),), P(*results))
        return double, (jax.ShapeDtypeStruct((8, 64), 'float32'),), partitioner

    def check(fn, args, partitioner):
        assert_forecast_unchanged(
            fn,
            args,
            topologies=['v5e:2x4'],
            golden=tmp_path,
            name='double',
            on_cpu=True,
        )

    check(*layout_of('data'))
    held = json.loads((tmp_path / 'double.v5e-2x4.json').read_text())
    assert held['exchanges'] == [] and held['mesh'] == {'data': 8}
    check(*layout_of('data'))
    with pytest.raises(
        AssertionError, match=r'new exchange: all-gather over data of f32 .*: 1\.8 kB'
    ):
        check(*layout_of())
