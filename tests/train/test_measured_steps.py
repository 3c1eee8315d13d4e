"""Measured steps of others, rebuilt as train steps of ours: the settings and the sizes.

Nothing is compiled here. Expected values are counted by hand or published.
"""

import copy
import functools
import math

import jax
import pytest

from benchmarks.measured_steps.models import choose_remat
from benchmarks.measured_steps.rebuilding import (
    NotRebuilt,
    choose_options,
    count_parameters,
    find_stand,
    list_programs,
    rebuild,
)
from benchmarks.measured_steps.records import read_records, with_copies
from benchmarks.measured_steps.rows import MeasuredRow, load_rows
from meshwright.program.collectives import Collective
from partitioning.hardware import CHIPS
from partitioning.hardware.chips import torus_wrap
from train.models.remat import Remat
from train.models.transformer import Transformer

ROWS = {row.name: row for row in load_rows()}
REBUILT = {name: p for name, row in ROWS.items() if not isinstance(p := rebuild(row), NotRebuilt)}
# Llama 3.1 (https://arxiv.org/abs/2407.21783): published sizes, counted by hand from them.
HAND_COUNTS = {
    'v6e-8-llama3.1-8b': 8_030_261_248,
    'v6e-256-llama3.1-70b': 70_553_706_496,
    'v6e-8-mistral-7b': 7_241_732_096,
    # 2 norms of 5,120, 4 matrices of 5,120 x 8,192, 2 of 5,120 x 32,768; 32 layers; a last norm.
    'v5e-256-maxtext-16b': 32 * (2 * 5120 + 4 * 5120 * 8192 + 2 * 5120 * 32_768)
    + 32_768 * 5120
    + 5120,
}


def test_most_rows_are_rebuilt():
    assert len(ROWS) == 116
    assert len(REBUILT) == 78
    dense = [row for row in ROWS.values() if row.workload == 'dense']
    assert sum(row.name in REBUILT for row in dense) == len(dense) - 5  # the rows of Gemma 4


@pytest.mark.parametrize('name', HAND_COUNTS)
def test_models_have_the_published_number_of_parameters(name):
    assert count(REBUILT[name].model) == HAND_COUNTS[name]


def count(model):
    init = functools.partial(Transformer(model).init, method=Transformer.get_parameters)
    made = jax.eval_shape(init, jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(made))


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


def test_meshes_have_the_devices_and_the_links_of_the_rows():
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


def test_batches_are_divided_by_the_axes_of_the_batch():
    for name, program in REBUILT.items():
        axes = dict(program.rules)['batch']
        parts = math.prod(
            program.mesh_sizes[axis] for axis in ([axes] if isinstance(axes, str) else axes or ())
        )
        assert program.batch_size % (parts * program.num_microbatches) == 0, name


@pytest.mark.parametrize(
    'name, remat',
    [
        ('v5e-256-maxtext-16b', Remat()),
        ('v5p-64-maxtext-32b-s1', Remat(save=('dots',))),
        (
            'v6e-8-llama3.1-8b',
            Remat(offload=('residual', 'query', 'key', 'value', 'attention_out')),
        ),
        ('v6e-512-llama3.1-405b-fsdp', Remat(offload=('residual',))),
        ('tpu7x-64-llama3.1-70b-8k-bf16', Remat(save=('attended', 'query', 'key', 'value'))),
        ('h100-8-llama2-7b-maxtext', Remat(save=('dots', 'attended'))),
    ],
)
def test_remat_policies(name, remat):
    assert choose_remat(ROWS[name]) == remat


def test_settings_of_a_row():
    program = REBUILT['v6e-1024-gemma3-12b-32k']
    assert program.axes == (('data', 1), ('fsdp_transpose', 256))
    assert program.dcn == (('data', 4), ('fsdp_transpose', 1))
    assert (program.model.window, program.model.global_every) == (1024, 6)
    assert program.output_chunks == 16
    vector_memory = 'xla_tpu_scoped_vmem_limit_kib'
    assert program.compiler_options == ((vector_memory, 122_880),)
    assert choose_options(ROWS['v6e-8-llama3.1-8b']) == (), '98,304 KiB is our default for v6e'
    assert choose_options(ROWS['v5e-256-maxtext-16b']) == ((vector_memory, None),)
    assert REBUILT['v6e-256-fuji70b-v2'].num_microbatches == 4
    assert REBUILT['tpu7x-64-llama3.1-70b-8k-bf16'].mu_dtype == 'bfloat16'


@pytest.mark.parametrize(
    'name, reason',
    [
        ('v6e-256-gpt3-175b-int8', 'quantized (int8)'),
        ('tpu7x-256-llama3.1-405b-8k-fp8', 'quantized (fp8_full)'),
        ('v6e-256-mixtral-8x7b', 'experts drop tokens'),
        ('v5p-4-deepseek2-16b', 'no layers of the kind of deepseek'),
        ('tpu7x-64-gemma4-2b-8k-bf16', 'gemma4_small'),
    ],
)
def test_rows_that_cannot_be_rebuilt_say_why(name, reason):
    rebuilt = rebuild(ROWS[name])
    assert isinstance(rebuilt, NotRebuilt) and reason in rebuilt.reason


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
    assert isinstance(rebuilt, NotRebuilt) and reason in rebuilt.reason


def test_programs_of_two_copies_stand_for_more_slices():
    assert find_stand(ROWS['v5e-8192-maxtext-32b']).program == 'v5e-512-maxtext-32b'
    two = list_programs()['v5e-512-maxtext-32b']
    assert (two.num_copies, two.num_devices, two.batch_size) == (2, 512, 2048)
    assert two.with_slices(32) == REBUILT['v5e-8192-maxtext-32b']
    gpus = list_programs()['h100-16-llama2-7b-maxtext']
    assert gpus.topology == 'h100:2x8'
    assert gpus.with_slices(32) == REBUILT['h100-256-llama2-7b-a3mega']


def test_superseded_rows_share_programs():
    assert find_stand(ROWS['v6e-8-llama3.1-8b-r2503a']).program == 'v6e-8-llama3.1-8b'
    assert find_stand(ROWS['v6e-256-mixtral-8x7b']) is None
    for name in REBUILT:
        assert find_stand(ROWS[name]).program in list_programs()


def test_the_state_of_compiled_programs_is_that_of_a_hand_count():
    """Parameters and two moments in float32, over the devices that share them."""
    records = read_records()
    shares = {'v5e-256-maxtext-16b': 256, 'v5p-64-maxtext-32b-s1': 64, 'v6e-8-llama3.1-8b': 8}
    for name, devices in shares.items():
        count = 12 * ROWS[name].params_total / devices
        assert sum(records[name]['state_bytes'].values()) == pytest.approx(count, rel=0.005), name
        assert records[name]['memory']['arguments'] == pytest.approx(count, rel=0.01), name
    assert set(records) <= set(list_programs())


def test_more_copies_send_more_between_slices():
    """Of an all-reduce by a ring of n, each of n slices sends 2 (n - 1) / n of its bytes."""
    two = [
        Collective(
            kind='all-reduce',
            network=network,
            axes=('data',),
            group_size=2,
            arrays=('f32[100]',),
            wire_bytes=400.0,
            count=1,
            op_name='',
            source='',
        )
        for network in ('dcn', 'ici')
    ]
    between, within = with_copies(iter(two), from_copies=2, copies=16)
    assert (between.group_size, between.wire_bytes) == (16, 2 * 15 / 16 * 400)
    assert within == two[1]
