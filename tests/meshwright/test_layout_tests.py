"""What tests assert of exchanges, memory and layouts, with counts and bytes made by hand."""

import re

import jax
import jax.numpy as jnp
import pytest
from dumped_programs import EXCHANGED, exchange, make_mesh, struct, train
from jax.sharding import NamedSharding, PartitionSpec as P

from meshwright import (
    assert_exchanges,
    assert_forecast_unchanged,
    assert_layout_unchanged,
    assert_no_implicit_reshard,
    assert_peak_below,
    forecast,
)
from partitioning.amounts import parse_bytes

COUNTS = {key: count for key, (_, count) in EXCHANGED.items()}


@pytest.fixture(scope='module')
def mesh():
    return make_mesh(jax.devices())


@pytest.fixture(scope='module')
def exchanged(mesh):
    """The forecast of exchanges that are counted by hand."""
    function, arguments = exchange(mesh)
    return forecast(function, *arguments, explain=False)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('CI', raising=False)
    monkeypatch.delenv('MESHWRIGHT_UPDATE_FORECASTS', raising=False)


def failure(check, *arguments, **settings):
    with pytest.raises(AssertionError) as raised:
        check(*arguments, **settings)
    return str(raised.value)


def test_exchanges_in_counts_in_bytes_and_in_both(exchanged, mesh):
    function, arguments = exchange(mesh)
    assert_exchanges(function, arguments, COUNTS)
    assert_exchanges(exchanged, (), {k: f'{size:.0f} bytes' for k, (size, _) in EXCHANGED.items()})
    assert_exchanges(exchanged, (), {k: (n, f'{b} bytes') for k, (b, n) in EXCHANGED.items()})
    turned = {(k, axes[::-1]): n for (k, axes), n in COUNTS.items()}
    assert_exchanges(exchanged, (), turned)


def test_a_kind_without_axes_counts_all_of_them(exchanged):
    kinds = {'all-gather': 1, 'reduce-scatter': 1, 'all-to-all': 1, 'collective-permute': 3}
    assert_exchanges(exchanged, (), {**kinds, 'all-reduce': (2, '1.5 kB')})
    lines = failure(assert_exchanges, exchanged, (), {**kinds, 'all-reduce': 3})
    assert '~ all-reduce over all axes: executed 2 times, expected 3' in lines


def test_a_difference_lists_what_is_there_with_its_line(exchanged):
    expected = {
        **COUNTS,
        ('all-gather', ('model',)): (2, '1.5 MB'),
        ('collective-broadcast', 'data'): 1,
    }
    del expected['all-to-all', ('data',)]
    lines = failure(assert_exchanges, exchanged, (), expected).splitlines()
    assert lines[0] == 'exchanges on cpu:8 exchanges other data than the test expects:'
    assert (
        '  ~ all-gather over model: executed 1 times, expected 2; 1.0 kB, expected 1.5 MB' in lines
    )
    assert '  - collective-broadcast over data: executed 0 times, expected 1' in lines
    at = lines.index('  + all-to-all over data: 768 bytes in 1, not expected')
    assert re.search(
        r'768 bytes +1 x all-to-all over data of .*dumped_programs\.py:\d+$', lines[at + 1]
    )
    # The last line is what to write.
    written = lines[-1].removeprefix('as it is now: ')
    assert_exchanges(exchanged, (), eval(written))


def test_bytes_may_differ_by_the_last_digit_and_the_tolerance(exchanged):
    others = {k: n for k, n in COUNTS.items() if k != ('all-reduce', ('data',))}

    def check(text, **settings):
        assert_exchanges(exchanged, (), {**others, ('all-reduce', 'data'): text}, **settings)

    for text in ('1,536 bytes', '1.5 kB', '1.50 KiB', '2 kB', '1550 bytes'):
        check(text)
    for text in ('1.4 kB', '1560 bytes', '1 MB'):
        failure(check, text)
    failure(check, '1550 bytes', tolerance=0)


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('2 GiB', (2 * 2**30, 2**29)),
        ('1.5 MB', (1.5e6, 0.05e6)),
        ('768 bytes', (768, 0.5)),
        ('1,024kB', (1.024e6, 500)),
    ],
)
def test_amounts_of_memory(text, expected):
    assert parse_bytes(text) == pytest.approx(expected)


def test_the_peak(exchanged, mesh):
    function, arguments = train(mesh)
    sizes = function.lower(*arguments).compile().memory_analysis()
    peak = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    peak += sizes.temp_size_in_bytes - sizes.alias_size_in_bytes
    made = forecast(function, *arguments, explain=False)
    assert_peak_below(made, (), peak)
    assert_peak_below(function, arguments, '1 GiB', topology='v5e:2x4', on_cpu=True)
    lines = failure(assert_peak_below, made, (), peak - 1).splitlines()
    assert lines[0].startswith('train_step on cpu:8 needs ') and 'kB, more than ' in lines[0]
    assert re.match(r' +106\.5 kB  arguments$', lines[1])
    assert re.search(r'f32\[6,32,128\] .*, dumped_programs\.py:\d+$|f32\[', lines[2])
    assert 'more than 1 kB' in failure(assert_peak_below, made, (), '1 kB')


def test_what_a_program_asks_for_is_no_implicit_reshard(mesh):
    """Parameters are gathered for their layer, gradients and products over model are summed."""
    function, arguments = train(mesh)
    made = forecast(function, *arguments)
    assert {(c.kind, c.axes) for c, _ in made.collectives} == {
        ('all-gather', ('data',)),
        ('all-reduce', ('data',)),
        ('all-reduce', ('model',)),
    }
    assert_no_implicit_reshard(made, ())
    assert_no_implicit_reshard(*exchange(mesh))

    @jax.jit
    def layer(up, batch):
        return jax.nn.relu(batch @ up)

    assert_no_implicit_reshard(
        layer, (struct(mesh, (64, 256), 'data'), struct(mesh, (128, 64), 'data'))
    )


@pytest.mark.parametrize('axes', [(None, 'data'), (None, None)])
def test_an_array_that_is_laid_out_anew_is_an_implicit_reshard(mesh, axes):
    """Rows over data become columns over data, or whole, inside of a step."""

    @jax.jit
    def step(weights, batch):
        other = NamedSharding(mesh, P(*axes))
        hidden = jax.lax.with_sharding_constraint(jax.nn.relu(batch @ weights), other)
        return jnp.mean((hidden @ weights.T) ** 2)

    made = forecast(step, struct(mesh, (64, 64)), struct(mesh, (128, 64), 'data'))
    text = failure(assert_no_implicit_reshard, made, ())
    assert 'lays out arrays anew' in text and 'all-gather over data of ' in text
    assert re.search(r'test_layout_tests\.py:\d+: ', text)
    assert_no_implicit_reshard(made, (), allow=['all-gather', 'all-to-all', ('all-reduce', 'data')])


def test_golden_layouts(mesh, tmp_path):
    function, arguments = train(mesh)
    assert_layout_unchanged(function, arguments)
    file = tmp_path / 'layouts/train_step.cpu-8.json'
    text = file.read_text()
    up = '"path": "params/up", "shape": [6, 64, 256], "dtype": "float32", "spec": "P(None, \'data\''
    assert up in text and '"path": "result/up"' in text
    assert_layout_unchanged(function, arguments)
    params, batch = arguments
    changed = {**params, 'up': struct(mesh, (6, 64, 256), None, None, 'model')}
    lines = failure(assert_layout_unchanged, function, (changed, batch)).splitlines()
    assert 'pytest --update-forecasts' in lines[0] and 'MESHWRIGHT_UPDATE_FORECASTS=1' in lines[0]
    assert lines[2:6] == [
        f'{file.relative_to(tmp_path)}:',
        'train_step on cpu:8: 1 change',
        '  what the code says:',
        "    params/up: P(None, 'data', 'model'), 49.2 kB per device -> P(None, None, 'model'), "
        '196.6 kB per',
    ]
    assert_layout_unchanged(function, (changed, batch), update=True)
    assert file.read_text() != text


def test_golden_layouts_and_forecasts_of_a_machine(mesh, tmp_path):
    function, arguments = exchange(mesh)
    assert_layout_unchanged(function, arguments, topology='v5e:2x4', on_cpu=True, name='ring')
    assert (tmp_path / 'layouts/ring.v5e-2x4.json').exists()
    for _ in range(2):
        assert_forecast_unchanged(function, arguments, topology='v5e:2x4', on_cpu=True)
    assert (tmp_path / 'forecasts/exchanges.v5e-2x4.json').exists()
    text = (tmp_path / 'forecasts/exchanges.v5e-2x4.json').read_text()
    (tmp_path / 'forecasts/exchanges.v5e-2x4.json').write_text(text.replace('3072', '9999'))
    found = failure(assert_forecast_unchanged, function, arguments, topology='v5e:2x4', on_cpu=True)
    assert 'collective-permute over data of f32 (ICI): 10.0 kB -> 3.1 kB' in found


def test_a_missing_file_is_an_error_in_continuous_integration(mesh, monkeypatch):
    function, arguments = exchange(mesh)
    monkeypatch.setenv('CI', 'true')
    assert 'there is no golden file' in failure(assert_layout_unchanged, function, arguments)


@pytest.mark.parametrize(
    ('expected', 'message'),
    [
        (
            {('all_gather', 'data'): 1},
            "no kind of exchange 'all_gather'. Did you mean 'all-gather'",
        ),
        ({('all-gather', 'dat'): 1}, "no mesh axis 'dat'. Did you mean 'data'"),
        ({('all-gather', ('data', 'x')): 1}, "no mesh axis 'x'.*data, model"),
        ({('all-gather', 'data'): '3'}, "'3' is not an amount of memory"),
        ({('all-gather', 'data'): '3 Mb'}, "'3 Mb' is not an amount of memory"),
        ({('all-gather', 'data'): 1.5}, 'expected as 1.5: write a number of executions'),
        ({('all-gather', 'data'): True}, 'expected as True'),
        ({('all-gather', 'data'): (1, 2)}, r'expected as \(1, 2\)'),
        ({('all-gather', 'data'): ()}, r'expected as \(\)'),
        ({('all-gather', 'data', 'model'): 1}, 'is not a kind with axes'),
        ({('all-gather', None): 1}, 'is not a kind with axes'),
        ({'all-gather': 1, ('all-gather', 'data'): 1}, 'counts all axes'),
        ({('all-reduce', ('data', 'model')): 1, ('all-reduce', ('model', 'data')): 1}, 'twice'),
    ],
)
def test_a_misuse_of_expected_exchanges(expected, message, exchanged):
    with pytest.raises(ValueError, match=message) as raised:
        assert_exchanges(exchanged, (), expected)
    assert '\n' not in str(raised.value)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda f, a, m: assert_peak_below(m, (), -1), 'the limit is -1'),
        (lambda f, a, m: assert_peak_below(m, (), '2 gigs'), "'2 gigs' is not an amount"),
        (lambda f, a, m: assert_peak_below(m, a, '2 GiB'), 'has its arguments and its machine'),
        (lambda f, a, m: assert_peak_below(m, (), 1, topology='v5e:2x4'), 'no topology'),
        (lambda f, a, m: assert_peak_below(f, a[0], 1), 'is a ShapeDtypeStruct: .* a tuple'),
        (lambda f, a, m: assert_peak_below(len, a, 1), 'len is not jitted'),
        (lambda f, a, m: assert_peak_below(f, a, 1, topology='v5q:2x4'), 'unknown topology'),
        (lambda f, a, m: assert_no_implicit_reshard(f, a, explain=False), 'leaves out the causes'),
        (lambda f, a, m: assert_no_implicit_reshard(m, (), allow=['gather']), 'no kind .*gather'),
        (lambda f, a, m: assert_layout_unchanged(len, a), 'len is not jitted'),
        (lambda f, a, m: assert_forecast_unchanged(f, a, topologies='v5e:2x4'), 'is a text'),
        (
            lambda f, a, m: assert_forecast_unchanged(f, a, topologies=['v5e:2x4'], topology='x'),
            'name the machines twice',
        ),
    ],
)
def test_a_misuse_of_an_assertion(call, message, exchanged, mesh):
    with pytest.raises(ValueError, match=message) as raised:
        call(*exchange(mesh), exchanged)
    assert '\n' not in str(raised.value)


def test_a_damaged_golden_layout(mesh, tmp_path):
    (tmp_path / 'layouts').mkdir()
    (tmp_path / 'layouts/exchanges.cpu-8.json').write_text('{"format": "meshwright forecast 1"}')
    function, arguments = exchange(mesh)
    with pytest.raises(ValueError, match=r'exchanges\.cpu-8\.json: .*record 1.*--update-for'):
        assert_layout_unchanged(function, arguments)
