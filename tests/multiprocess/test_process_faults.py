"""Two real processes of a run, of which one has a fault; `make test-processes` has all faults."""

import re
import shutil
import signal

import faulty_runs
import hosts
import pytest

STEPS = 6


def start(folder, victim=None, **settings):
    return faulty_runs.run(folder / 'run', 2, victim, steps=STEPS, init=20.0, **settings)


@pytest.mark.long
@pytest.mark.parametrize(
    'victim, fault, code, line',
    [
        (1, 'SIGKILL', 75, 'process 1 died, last seen at '),
        (1, 'exception', 1, 'process 1 failed: Fault'),
        (
            0,
            'jax cannot connect',
            75,
            'process 0 failed: NotTogether: jax cannot connect process 0',
        ),
        (1, 'other optimizer', 2, 'TrainConfig.optimizer.learning_rate'),
        (1, 'SIGTERM', 75, 'stopped by SIGTERM to process 1 after step '),
    ],
)
def test_if_one_process_fails_the_other_ends_and_names_it(tmp_path, victim, fault, code, line):
    ending = start(tmp_path, victim, fault=fault, moment='step 3')
    assert ending.codes[1 - victim] == code, ending.texts
    assert line in ending.texts[1 - victim]
    if fault in ('SIGTERM', 'jax cannot connect'):
        assert ending.codes[victim] == code, ending.texts
    if fault == 'SIGTERM':
        for index, text in enumerate(ending.texts):
            last = text.splitlines()[-1]
            assert last.startswith(f'[{index}] {line}')
            assert f'saved in {tmp_path}/run/checkpoints/' in last
            assert last.endswith('resume with: meshwright train mine')


@pytest.mark.long
def test_a_run_with_one_fault_after_another_ends_and_resumes_as_if_it_had_none(tmp_path):
    """Each kind of fault that is not above, each in another part of a run."""
    for victim, fault, moment, code, line in (
        (0, 'SIGHUP', 'step 2', 75, 'stopped by SIGHUP to process 0'),
        (0, 'SIGKILL', 'the save', 75, 'process 0 died, last seen at '),
        (1, 'SIGSTOP', 'step 4', 75, 'process 1 has given no sign of life for 10 s'),
        (1, 'SIGINT', 'the eval', 130, 'stopped by SIGINT to process 1'),
    ):
        ending = start(tmp_path, victim, fault=fault, moment=moment)
        assert ending.codes[1 - victim] == code, (fault, ending.texts)
        assert line in ending.texts[1 - victim], fault
    resumed, whole = start(tmp_path), tmp_path / 'whole'
    assert resumed.codes == [0, 0], resumed.texts
    # A process that is done does not mind the end of process 0.
    whole.mkdir()
    ending = start(whole, 0, fault='killed when all are done')
    assert (ending.codes, ending.texts[1]) == ([-signal.SIGKILL, 0], '')
    found, expected = (faulty_runs.results(folder / 'run', STEPS) for folder in (tmp_path, whole))
    assert found == expected


@pytest.mark.long
@pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not())
def test_two_hosts_that_cannot_reach_each_other_end_the_run_and_are_named(tmp_path):
    """Process 0 reaches both, and all of them wait in a collective."""

    def cut(processes):
        network.set_cable(2, 3, hosts.CUT)
        network.set_cable(3, 2, hosts.CUT)

    with hosts.Network(4, tmp_path) as network:
        settings = {'network': network, 'from_outside': cut, 'fault': 'from outside'}
        sizes = {'devices': 1, 'steps': STEPS, 'init': 60.0}
        ending = faulty_runs.run(tmp_path / 'run', 4, 2, moment='step 3', **settings, **sizes)
    assert ending.codes == [75] * 4, ending.texts
    for text in ending.texts:
        line = text.splitlines()[-1]
        assert 'has had no answer from process' in line
        assert 'process 2 on host2' in line and 'process 3 on host3' in line


@pytest.mark.long
def test_after_the_loss_of_a_process_and_its_disk_the_run_resumes_from_its_partner(tmp_path):
    local = tmp_path / 'local'
    ending = start(
        tmp_path, 1, fault='SIGKILL', moment='step 5', local=str(local), step_seconds=0.5
    )
    assert ending.codes[0] == 75, ending.texts
    [slot] = local.glob('*/1')
    shutil.rmtree(slot)
    assert start(tmp_path, local=str(local)).codes == [0, 0]
    told = (tmp_path / 'run.out-0').read_text()
    found = re.search(r'resumed from step (\d) of the local checkpoints in .*: (.*)', told)
    assert found and 1 <= int(found[1]) < 5, told
    assert found[2] == '2 parts, part 1 from process 0, 1 from its own'
    assert list(local.iterdir()) == []
    whole = tmp_path / 'whole'
    whole.mkdir()
    assert start(whole, local=str(tmp_path / 'another')).codes == [0, 0]
    found, expected = (faulty_runs.results(folder / 'run', STEPS) for folder in (tmp_path, whole))
    assert found == expected
