"""Flags of the environment that a compiler does not accept, for which it ends its process."""

import pytest

from partitioning.hardware import check_flags, compiler_flags
from partitioning.hardware.compiler_flags import explain_refusal

pytestmark = pytest.mark.core

# What jaxlib 0.10 and libtpu 0.0.52 write.
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

    monkeypatch.setattr(compiler_flags.subprocess, 'run', run)
    compiler_flags._try_flags.cache_clear()
    monkeypatch.setenv('XLA_FLAGS', '')
    check_flags('tpu')
    monkeypatch.setenv('XLA_FLAGS', '--xla_x=1')
    check_flags('cpu')
    assert not started
    for _ in range(2):
        with pytest.raises(ValueError, match='--xla_x=1 in XLA_FLAGS'):
            check_flags('tpu')
    assert started == ['v5e:2x2']
    compiler_flags._try_flags.cache_clear()
