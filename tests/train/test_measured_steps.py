"""Measured steps of others, rebuilt as train steps of ours, and the fit of the step-time model.

Nothing is compiled here. Expected values are counted by hand or published, and the forecasts of all
rows are the committed ones.
"""

import collections
import copy
import dataclasses
import importlib.util
import math
import statistics
from pathlib import Path

import pytest
from forecasts_by_hand import NOTHING

from benchmarks import forecast_truth
from benchmarks.measured_steps import records
from benchmarks.measured_steps.cases import family_of, list_cases, work_of
from benchmarks.measured_steps.fitting import (
    USUAL,
    Bias,
    Case,
    Free,
    fit_constants,
)
from benchmarks.measured_steps.own_records import read_own
from benchmarks.measured_steps.rebuilding import (
    count_parameters,
    list_programs,
    rebuild,
)
from benchmarks.measured_steps.rows import MeasuredRow, load_rows
from benchmarks.measured_steps.scoring import (
    Forecasted,
    forecast_families,
    naive_forecast,
    range_of,
    rank_correlation,
    score,
)
from meshwright import Collective
from meshwright.time.constants import constants_of
from meshwright.time.loads import ExchangeLoad, Loads
from meshwright.time.step_model import busy_parts
from partitioning.hardware import CHIPS
from partitioning.hardware.chips import torus_wrap
from train.planning.forecasts import least_seconds

ROWS = {row.name: row for row in load_rows()}
REBUILT = {name: p for name, row in ROWS.items() if not isinstance(p := rebuild(row), str)}


# The rows.


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ('libtpu', 'jax_plugins')),
    reason='describing the machines needs libtpu and the CUDA plugin of JAX',
)
def test_forecasts_of_all_rows_are_the_committed_ones(capsys, monkeypatch):
    monkeypatch.delenv('XLA_FLAGS', raising=False)  # other compilers do not know conftest's flags
    recorded = records.read_records(records.TRACED), records.read_records()
    cases, reasons = list_cases(*recorded, read_own())
    forecast_truth.print_forecasts(cases, reasons)
    committed = Path(records.__file__).with_name('forecast_truth.txt').read_text()
    assert committed == capsys.readouterr().out


def test_no_compiled_program_is_below_the_bound_of_its_formulas():
    """36 programs of four chips, of which the compiler's forecast and the formulas are kept."""
    pairs = collections.defaultdict(dict)
    recorded = records.read_records(records.TRACED), records.read_records()
    for case in list_cases(*recorded, own={})[0]:
        if case.dense:
            pairs[case.name][case.origin] = busy_parts(case.loads, constants_of(CHIPS[case.chip]))
    found = {}
    for name, by_origin in pairs.items():
        if len(by_origin) == 2:
            least = least_seconds(by_origin['jaxpr'])
            found[name] = least / math.fsum(part.exposed for part in by_origin['compiler'])
    assert len(found) > 30
    assert 0.95 < max(found.values()) < 1, found
    assert statistics.median(found.values()) > 0.85


def test_all_models_have_the_parameters_of_their_rows():
    """Except the norms that the published totals leave out: of q and k, and of the outputs."""
    left_out = {
        'v6e-256-gemma3-12b-32k': 48 * (2 * 256 + 2 * 3840),
        'v5p-512-honeycrisp3b': 26 * 2 * 128,
        'v5e-32-honeycrisp85m': 12 * 2 * 64,
        'tpu7x-256-qwen3-235b-a22b-4k-bf16-r2511a': 94 * 2 * 128,
    }
    models = {ROWS[name].params_total: (name, p.model) for name, p in reversed(REBUILT.items())}
    assert len(models) == 19
    for total, (name, model) in models.items():
        assert count_parameters(model) == total + left_out.get(name, 0), name


def test_meshes_have_the_devices_and_the_links_of_the_rows_and_divide_their_batches():
    for name, program in REBUILT.items():
        row, hardware = ROWS[name], ROWS[name]['hardware']
        assert program.num_devices == row.num_devices, name
        assert program.batch_size == row['global_batch'], name
        if hardware['wrap'] is not None:
            kind, _, bounds = program.topology.partition(':')
            sizes = [int(n) for n in bounds.split('x')]
            sizes += [1] * (3 - len(sizes))
            chips = math.prod(sizes) * program.num_slices
            assert chips * CHIPS[kind].devices == row.num_devices, name
            assert list(torus_wrap(CHIPS[kind].device_kind, sizes)) == hardware['wrap'], name
        axes = dict(program.rules)['batch']
        axes = [axes] if isinstance(axes, str) else axes or ()
        parts = math.prod(program.mesh_sizes[axis] for axis in axes)
        assert program.batch_size % (parts * program.num_microbatches) == 0, name


@pytest.mark.parametrize(
    'changes, reason',
    [
        ({'model': {'mlp_activations': ['sigmoid', 'linear']}}, "no activation 'sigmoid'"),
        ({'remat': {'policy': None}}, 'not published'),
        ({'remat': {'policy': 'save_all', 'saved_on_device': None}}, "what 'save_all' keeps"),
        ({'remat': {'saved_on_device': ['kv_lora']}}, "keep 'kv_lora'"),
        ({'parallelism': {'ici': {'stage': 8}}}, "axis 'stage'"),
        ({'parallelism': {'ici': {'fsdp': 4}}}, 'do not multiply'),
        ({'hardware': {'chip': 'v9'}}, 'the chip v9'),
        ({'model': {'params_total': 7}}, 'the measured one 7'),
    ],
)
def test_rows_of_other_kinds_say_why_they_cannot_be_rebuilt(changes, reason):
    settings = copy.deepcopy(dict(ROWS['v6e-8-llama3.1-8b'].settings))
    for name, values in changes.items():
        settings[name] |= values
    rebuilt = rebuild(MeasuredRow(settings))
    assert isinstance(rebuilt, str) and reason in rebuilt


def test_programs_of_two_copies_stand_for_more_slices():
    two = list_programs()['v5e-512-maxtext-32b']
    assert (two.num_copies, two.num_devices, two.batch_size) == (2, 512, 2048)
    assert two.with_slices(32) == REBUILT['v5e-8192-maxtext-32b']
    gpus = list_programs()['h100-16-llama2-7b-maxtext']
    assert gpus.topology == 'h100:2x8'
    assert gpus.with_slices(32) == REBUILT['h100-256-llama2-7b-a3mega']


# The records.


def exchange(kind, network, wire_bytes, count):
    return Collective(
        kind=kind,
        network=network,
        axes=('data',),
        group_size=2,
        arrays=('bf16[4]',),
        wire_bytes=wire_bytes,
        count=count,
        op_name='',
        source='',
    )


def test_records_have_the_work_of_programs_on_more_copies_of_the_model():
    """Exchanges of a kind are one of their mean size: 3 of 100 and 1 of 500 are 4 of 200 bytes.

    A ring of 2 sends half of an array twice, and a ring of 8 sends seven eighths of it.
    """
    exchanges = (
        exchange('all-gather', 'ici', 100.0, 3),
        exchange('all-reduce', 'dcn', 1e8, 3),
        exchange('all-gather', 'ici', 500.0, 1),
    )
    work = dataclasses.replace(
        NOTHING, matmul_flops=1e15, other_bytes=7e9, host_bytes=3.0, collectives=exchanges
    )
    record = records.record_work(work)
    cycles = {'matmul': 3_000_000_000, 'copy': 600_000_000, 'reduce': 150_000_000}
    found = work_of(record | {'cycles': cycles}, copies=8, from_copies=2, origin='compiler')
    assert found.matmul_seconds == pytest.approx(2.0), '1.5 GHz'
    assert found.other_seconds == pytest.approx(0.5)
    assert (found.matmul_flops, found.other_bytes, found.host_bytes) == (1e15, 7e9, 3.0)
    gather, reduction = found.collectives
    assert (gather.count, gather.wire_bytes, gather.group_size) == (4, 200.0, 2)
    assert (reduction.count, reduction.group_size) == (3, 8)
    assert reduction.wire_bytes == pytest.approx(1e8 * (7 / 8) / (1 / 2))
    # Hosts of GPUs: their exchanges along 'data' are of one network, and have 8 copies per host.
    (inside,) = work_of(
        record | {'chip': 'h100', 'collectives': record['collectives'][:1]}, 8, 2, 'jaxpr'
    ).collectives
    assert (inside.group_size, inside.wire_bytes) == (8, pytest.approx(200.0 * (7 / 8) / (1 / 2)))
    traced = work_of(record, copies=2, from_copies=2, origin='jaxpr')
    assert traced.matmul_seconds is None and traced.other_seconds is None


def test_traced_steps_have_the_work_of_their_rows():
    """8 FLOPs per parameter and token, except for the last product of the 32 layers.

    Nothing in the backward pass needs the result of that product, so it is not recomputed.
    """
    record = records.read_records(records.TRACED)['v5e-256-maxtext-32b']
    row = ROWS['v5e-256-maxtext-32b']
    tokens = row['global_batch'] * row['seq_len'] / 256
    flops = (8 * row.params_total - 2 * 32 * 10_240 * 32_768) * tokens
    assert record['matmul_flops'] == pytest.approx(flops, rel=0.01)
    gathered = sum(
        c['wire_bytes'] * c['count'] for c in record['collectives'] if c['kind'] == 'all-gather'
    )
    # Weights of two bytes are gathered forward and backward.
    assert gathered == pytest.approx(2 * 2 * row.params_total * 255 / 256, rel=0.05)


def test_the_state_of_compiled_programs_is_that_of_a_hand_count():
    """Parameters and two moments in float32, over the devices that share them."""
    compiled = records.read_records()
    shares = {'v5e-256-maxtext-16b': 256, 'v5p-64-maxtext-32b-s1': 64, 'v6e-8-llama3.1-8b': 8}
    for name, devices in shares.items():
        count = 12 * ROWS[name].params_total / devices
        assert sum(compiled[name]['state_bytes'].values()) == pytest.approx(count, rel=0.005), name
        assert compiled[name]['memory']['arguments'] == pytest.approx(count, rel=0.01), name
    assert set(compiled) <= set(list_programs())


# The fit and the scores, with synthetic steps.

FREE_OF_V5E = [
    Free(name, 1.0, ('v5e',)) for name in ('matmul_efficiency', 'hidden_share', 'network_latency')
]


def a_case(number, products, exchange, *, seconds=None):
    """A step of v5e; by default, its measured time is what the true constants say."""
    gather = ExchangeLoad(name='gather', slow=False, seconds=exchange, phases=1000)
    loads = Loads(
        chip='v5e',
        products=products,
        product_memory=0.0,
        estimated_products=None,
        memory=0.0,
        estimated_others=None,
        kernels=0.0,
        kernel_memory=0.0,
        exchanges=(gather,),
        host_bytes=0.0,
        num_separate=1,
        num_processes=2,
    )
    # The rate of products, what is not hidden of the exchange at 90% of the links, and 1,000 phases
    # of 50 us.
    true = products / 0.8 + exchange / 0.9 * 0.25 + 0.05
    return Case(
        name=f'row {number}',
        chip='v5e',
        platform='tpu',
        group=f'group {number}',
        family=f'family {number % 3}',
        framework='ours',
        software='',
        seconds=true if seconds is None else seconds,
        flops=products * 197e12,
        peak=197e12,
        loads=loads,
        dense=True,
        superseded=False,
        origin='jaxpr',
    )


SIZES = [(1.0, 0.1), (2.0, 1.5), (0.1, 0.05), (4.0, 0.2), (0.5, 1.0), (0.03, 0.01)]
CASES = [a_case(n, *sizes) for n, sizes in enumerate(SIZES)]


def fit(cases, start=None, software=None):
    return fit_constants(cases, {'v5e': USUAL['v5e']}, FREE_OF_V5E, software or {}, start)


def test_the_fit_finds_the_constants_of_synthetic_steps():
    found, _ = fit(CASES)
    constants = found.constants['v5e']
    assert constants.matmul_efficiency == pytest.approx(0.8, rel=0.02)
    assert 1 - constants.hidden_share == pytest.approx(0.25, rel=0.05)
    assert constants.network_latency == pytest.approx(50e-6, rel=0.1)
    assert constants.kernel_efficiency == USUAL['v5e'].kernel_efficiency, 'it is not free'
    for case in CASES:
        assert found.predict(case) == pytest.approx(case.seconds, rel=0.02)


def test_a_wrong_measurement_moves_little_and_frameworks_have_a_bias():
    wrong = dataclasses.replace(CASES[0], name='wrong', seconds=3 * CASES[0].seconds)
    found, _ = fit([*CASES, wrong])
    assert found.constants['v5e'].matmul_efficiency == pytest.approx(0.8, rel=0.1)
    slower = [
        dataclasses.replace(c, software='other', seconds=1.5 * c.seconds + 0.1)
        for c in (a_case(10, size, 0.1) for size in (4.0, 2.0, 1.0, 0.1, 0.05, 0.03))
    ]
    found, _ = fit([*CASES, *slower], software={'other': Bias(1.2, 0.05)})
    assert found.software['other'].factor == pytest.approx(1.5, rel=0.05)
    assert found.software['other'].seconds == pytest.approx(0.1, rel=0.1)
    assert found.predict(slower[0]) == pytest.approx(slower[0].seconds, rel=0.03)
    assert found.unbiased(slower[0]) == pytest.approx((slower[0].seconds - 0.1) / 1.5, rel=0.05)


@pytest.mark.parametrize('usual', [0.1, 0.5, 0.9])
def test_no_share_or_efficiency_leaves_its_bounds(usual):
    """Whatever the rows say: forecasts that are 100 times too long or too short."""
    constants = dataclasses.replace(USUAL['v5e'], matmul_efficiency=usual, hidden_share=usual)
    for factor in (0.01, 100.0):
        wrong = [dataclasses.replace(c, seconds=factor * c.seconds) for c in CASES]
        found, _ = fit_constants(wrong, {'v5e': constants}, FREE_OF_V5E, {})
        assert 0 < found.constants['v5e'].matmul_efficiency < 1
        assert 0 < found.constants['v5e'].hidden_share < 1


def test_naive_forecasts_and_ranks():
    """MFU of 0.5, 0.25 and 0.8: the median step takes twice its FLOPs at the peak rate."""
    rows = [a_case(n, 1.0, 0.0, seconds=s) for n, s in enumerate((2.0, 4.0, 1.25))]
    assert naive_forecast(a_case(9, 3.0, 0.0), rows) == pytest.approx(6.0)
    assert rank_correlation([1, 2, 3, 4], [40, 30, 20, 10]) == pytest.approx(-1)
    # Differences of ranks 1, 1, 0, 0: 1 - 6 x 2 / (4 x 15).
    assert rank_correlation([2, 1, 3, 4], [1, 2, 3, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1, 2], [1, 2]) is None


def forecasted(family, error, *, chip='v5e', superseded=False, seconds=1.0):
    case = dataclasses.replace(
        a_case(0, 1.0, 0.0), family=family, chip=chip, seconds=seconds, superseded=superseded
    )
    ahead = seconds * (1 + error)
    return Forecasted(case=case, seconds=ahead, unbiased=ahead, naive=2 * seconds)


def test_scores():
    """Errors of 10%, -20% and 60%, the last of a superseded row."""
    rows = [
        forecasted('a', 0.1),
        forecasted('b', -0.2, seconds=3.0),
        forecasted('b', 0.6, seconds=2.0, superseded=True),
    ]
    found = score(rows, rows)
    assert (found.rows, found.families) == (3, 2)
    assert found.mean == pytest.approx(0.3) and found.median == pytest.approx(0.2)
    assert found.worst == pytest.approx(0.6) and found.bias == pytest.approx(0.5 / 3)
    assert found.naive == pytest.approx(1.0) and found.rank is None, 'two rows are current'
    # The range of a is the largest error of b; the range of b is the error of a.
    assert found.within == pytest.approx(1 / 3)
    assert score([], rows) is None


def test_a_range_has_nine_tenths_of_the_families_and_none_of_its_own():
    """Families of 1 to 10% each; a family with a hundred rows counts as much as any other."""
    rows = [forecasted(f'family {n}', n / 100) for n in range(1, 11)]
    rows += [forecasted('family 1', 0.01)] * 99
    assert range_of('v5e', 'tpu', rows) == pytest.approx(0.09)
    assert range_of('v5e', 'tpu', rows, without='family 10') == pytest.approx(0.09)
    # Rows of the chip count six times: 60 of 63 are at most 10%.
    others = [forecasted(f'other {n}', 0.5, chip='v6e') for n in range(3)]
    assert range_of('v5e', 'tpu', [*rows, *others]) == pytest.approx(0.1)
    assert range_of('v6e', 'tpu', [*rows, *others]) == pytest.approx(0.5), 'three families'
    assert range_of('tpu7x', 'tpu', [*rows, *others]) == pytest.approx(0.5), 'no family'


def test_families_are_forecast_by_others():
    """The rows of family 0 take twice as long as the constants of the others say."""
    rows = [
        dataclasses.replace(case, seconds=2 * case.seconds) if case.family == 'family 0' else case
        for case in CASES
    ]
    experts = dataclasses.replace(a_case(9, 1.0, 0.0), name='experts', dense=False, family='x')
    found = {f.case.name: f for f in forecast_families(rows, fit, [experts])}
    assert len(found) == len(rows) + 1
    assert found['row 0'].error == pytest.approx(-0.5, abs=0.1)
    assert found['experts'].case is experts


def test_rows_of_one_model_and_chip_are_one_family():
    """Whatever their framework, version, batch, machine and length of sequences."""
    families = {}
    for row in ROWS.values():
        families.setdefault((row.chip, row.params_total), set()).add(family_of(row))
    assert all(len(found) == 1 for found in families.values())
    alike = 'v6e-256-fuji70b-v2', 'v6e-256-llama2-70b-b4-full'
    assert len({family_of(ROWS[name]) for name in alike}) == 1, 'the sizes of one model'
    h100 = {family_of(ROWS[name]) for name in ROWS if name.startswith('h100-8-llama2-7b')}
    assert h100 == {'h100 6.74B'}
