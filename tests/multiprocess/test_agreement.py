"""What processes tell each other before they begin: that one has failed, or has other data."""

from processes import what_they_say

PROGRAM = """
import sys
import jax
from processes import say

port, count, index = map(int, sys.argv[1:])
jax.config.update('jax_platforms', 'cpu')
jax.distributed.initialize(f'127.0.0.1:{port}', count, index)

from train.data import CausalLM, Records
from train.data.record import check_same_everywhere, data_record
from train.errors import ConfigError
from train.machine import raise_on_all_processes

def said(call):
    try:
        call()
    except ConfigError as error:
        return str(error)

def fail(where):
    with raise_on_all_processes():
        if index == where:
            raise ConfigError('no file matches')

def compare(texts):
    task = CausalLM(source=Records(records=texts, holdout_percent=0)).open(8)
    check_same_everywhere(data_record(task, {'own': task}, seed=0))

say({
    'none': said(lambda: fail(None)),
    'second': said(lambda: fail(1)),
    'same': said(lambda: compare(['a', 'b'])),
    'other': said(lambda: compare(['a', 'b' if index else 'c'])),
})
"""


def test_processes_fail_together_and_compare_their_data():
    first, second = what_they_say(PROGRAM, 2)
    assert first['none'] is None and second['none'] is None
    assert second['second'] == 'no file matches'
    assert first['second'] == 'process 1 failed: no file matches'
    assert first['same'] is None and second['same'] is None
    for one in (first, second):
        assert 'processes [1] read other data' in one['other']
