"""Options and flags of compilers, and the private names of jax that they depend on."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler, distributed
from jax._src.cudnn import fused_attention_stablehlo as kernels

from partitioning import PjitPartitioner, Plan, plan_diff
from partitioning.hardware import (
    CompilerOption,
    change_options,
    check_flags,
    compilers,
    default_options,
    option_values,
)
from partitioning.hardware.compilers import explain_compiler_error, explain_refusal
from partitioning.hardware.jax_private import described_cudnn, keep_programs_of_this_process

pytestmark = [pytest.mark.core, pytest.mark.smoke]

OFF = 'xla_jf_spmd_threshold_for_windowed_einsum_mib'
KNOWN = {'xla_cpu_enable_fast_math': False}  # an option of the compiler for CPUs


@pytest.fixture(scope='module')
def partitioner():
    return PjitPartitioner(num_partitions=1)


def double(x, scale=2.0):
    return x * scale


def partition(partitioner, options):
    return partitioner.partition(double, (None,), None, compiler_options=options)


def test_a_function_is_compiled_with_its_options_on_every_way(partitioner):
    x = jnp.arange(8.0)
    assert partition(partitioner, KNOWN)(x).tolist() == (2 * x).tolist()
    wrong = partition(partitioner, {'xla_cpu_fast': True})
    ways = [
        lambda: wrong(x),
        lambda: wrong(x, scale=3.0),
        lambda: wrong.lower_and_compile(x),
        lambda: partitioner.compile(wrong, x),
        lambda: partitioner.compile(
            partition(partitioner, KNOWN), x, compiler_options={'xla_cpu_fast': True}
        ),
    ]
    for way in ways:
        with pytest.raises(ValueError, match=r"^double: .* cpu devices .*'xla_cpu_fast'") as error:
            way()
        assert '\n' not in str(error.value)
    with pytest.raises(jax.errors.JaxRuntimeError, match='xla_cpu_fast'):  # jax's own object
        wrong.lower(x).compile()


def test_a_value_of_the_wrong_kind_is_an_error_that_names_it(partitioner):
    wrong = partition(partitioner, {'xla_cpu_enable_fast_math': 'maybe'})
    with pytest.raises(ValueError, match=r"'xla_cpu_enable_fast_math'.*'maybe'.*True or False"):
        wrong(jnp.ones(2))
    with pytest.raises(ValueError, match=r"'xla_x' is .1, 2.*a number or a text"):
        partition(partitioner, {'xla_x': [1, 2]})
    with pytest.raises(ValueError, match='not 3'):
        partitioner.compile(partition(partitioner, None), 1.0, compiler_options={3: True})


def test_errors_of_the_compiler_for_tpus_are_explained(partitioner):
    text = "INVALID_ARGUMENT: Failed to parse 'maybe' into flag xla_tpu_x: Not a bool"
    error = explain_compiler_error(RuntimeError(text), 'step', partitioner.mesh)
    assert "'xla_tpu_x' cannot be 'maybe'" in str(error)


def test_windowed_einsum_is_off_on_tpus_only():
    values = {
        kind: option_values(default_options([SimpleNamespace(device_kind=kind)]))
        for kind in ('TPU v5 lite', 'TPU v5', 'TPU v6 lite', 'cpu', 'NVIDIA H100 80GB HBM3')
    }
    assert [values[kind].get(OFF, 0) >= 100_000 for kind in values] == [True] * 3 + [False] * 2
    assert values['cpu'] == {} == option_values(default_options([]))


def test_options_are_added_replaced_and_removed():
    before = default_options([SimpleNamespace(device_kind='TPU v5 lite')])
    after = change_options(before, {OFF: 7, 'xla_new': 'text'}, 'wanted')
    assert option_values(after) == option_values(before) | {OFF: 7, 'xla_new': 'text'}
    assert {o.reason for o in after if o.name in (OFF, 'xla_new')} == {'wanted'}
    assert OFF not in option_values(change_options(before, {OFF: None}, ''))
    with pytest.raises(ValueError, match=f"'xla_other'.*{OFF}"):
        change_options(before, {'xla_other': None}, '')


def test_plans_record_options_and_old_files_load(partitioner, tmp_path):
    plan = PjitPartitioner(layout='fsdp').plan(lambda: {'w': jnp.ones((8, 2))})
    option = CompilerOption(name='xla_a', value=3, reason='why', figure='2 ms', chips=('v5e',))
    with_options = dataclasses.replace(plan, compiler_options=(option,))
    with_options.save(tmp_path / 'new.json')
    held = json.loads((tmp_path / 'new.json').read_text())
    assert held['compiler_options'] == [
        {'name': 'xla_a', 'value': 3, 'reason': 'why', 'figure': '2 ms', 'chips': ['v5e']}
    ]
    assert Plan.load(tmp_path / 'new.json') == with_options != plan
    del held['compiler_options']  # as files were before
    (tmp_path / 'old.json').write_text(json.dumps(held))
    assert Plan.load(tmp_path / 'old.json') == plan
    assert 'xla_a=3: why (2 ms)' in str(with_options) and 'xla_a' not in str(plan)
    changes = plan_diff(plan, with_options)
    assert changes and 'xla_a: not set -> 3' in str(changes)
    for wrong in ('no list', [{'name': 'xla_a'}], [{'name': 'xla_a', 'value': [], 'reason': ''}]):
        (tmp_path / 'bad.json').write_text(json.dumps(held | {'compiler_options': wrong}))
        with pytest.raises(ValueError, match=r'bad.json: .*(a list|lacks value|a number)'):
            Plan.load(tmp_path / 'bad.json')


# Flags that a compiler refuses: what jaxlib 0.10 and libtpu 0.0.52 write.
UNKNOWN = 'F1123 06:44:54.075532 8948 flags.cc:234] Unknown flag in XLA_FLAGS: --xla_x=1'
BAD_VALUE = (
    'F1123 06:45:26.188707 9203 flags.cc:220] Check failed: Flag parsing failed.\n'
    'usage: --xla_y=maybe\n'
    'Flags:\n'
    '\t--xla_fast=false\tbool\tEnable fast math.'
)


@pytest.mark.parametrize(
    ('written', 'values', 'words'),
    [
        (UNKNOWN, ('--xla_fast=true --xla_x=1', ''), ['for TPUs', '--xla_x=1 in XLA_FLAGS']),
        (f'W1123 a warning\n{BAD_VALUE}', ('--xla_fast=1 --xla_y=maybe', ''), ['--xla_y=maybe in']),
        (
            "ERROR: Unknown command line flag 'xla_z'",
            ('--xla_fast=true', '--xla_z=1'),
            ['--xla_z=1 in LIBTPU_INIT_ARGS', 'remove it'],
        ),
    ],
)
def test_the_flag_that_a_compiler_refuses_is_named(written, values, words):
    text = explain_refusal('tpu', written, values)
    assert not [word for word in words if word not in text]
    assert 'xla_fast' not in text and '\n' not in text


def test_other_reasons_to_end_are_not_about_flags():
    values = ('--xla_x=1', '')
    assert explain_refusal('tpu', 'RuntimeError: libtpu is not installed', values) is None
    assert explain_refusal('tpu', 'F1123 06:44:54.0 1 a.cc:9] Check failed: x', values) is None


def test_flags_are_tried_once_and_only_where_the_environment_sets_some(monkeypatch):
    started = []

    def run(command, **kwargs):
        started.append(command[-1])
        return type('Done', (), {'returncode': 1, 'stderr': UNKNOWN})

    monkeypatch.setattr(compilers.subprocess, 'run', run)
    compilers._try_flags.cache_clear()
    monkeypatch.setenv('XLA_FLAGS', '')
    check_flags('tpu')
    monkeypatch.setenv('XLA_FLAGS', '--xla_x=1')
    check_flags('cpu')
    assert not started
    for _ in range(2):
        with pytest.raises(ValueError, match='--xla_x=1 in XLA_FLAGS'):
            check_flags('tpu')
    assert started == ['v5e:2x2']
    compilers._try_flags.cache_clear()


# Private names of jax.


def attend(x):
    return jax.nn.dot_product_attention(x, x, x, implementation='cudnn')


def test_a_process_on_cpus_keeps_its_programs_as_process_0_does(monkeypatch):
    monkeypatch.setattr(compiler, 'distributed', compiler.distributed)
    monkeypatch.setattr(distributed.global_state, 'process_id', 3)
    assert compiler.distributed.global_state.process_id == 3
    keep_programs_of_this_process()
    assert compiler.distributed.global_state.process_id == 0
    assert compiler.distributed.global_state.client is distributed.global_state.client
    assert distributed.global_state.process_id == 3, 'elsewhere, nothing changes'


def test_described_gpus_have_cudnn(monkeypatch):
    """jax asks this machine for its cuDNN, and only programs for described GPUs are not asked."""
    asked = []
    monkeypatch.setattr(kernels, 'check_cudnn_version', lambda: asked.append(1) or 91300)
    for kind, rows, expected in (('NVIDIA H100 80GB HBM3', 2, 0), ('cpu', 4, 1)):
        heads = jax.ShapeDtypeStruct((rows, 128, 4, 64), jnp.bfloat16)  # jax keeps what it traced
        mesh = SimpleNamespace(abstract_device=SimpleNamespace(device_kind=kind))
        with described_cudnn(mesh):
            assert 'dot_product_attention' in str(jax.make_jaxpr(attend)(heads))
        assert len(asked) == expected, kind
