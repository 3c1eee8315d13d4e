"""Two real processes of a run, of which one has a fault; `make test-processes` has all faults."""

import random
import signal

import faulty_runs
import pytest

STEPS = 6
CHAINS, FAULTS = 4, 5  # how many runs have faults at random, and how many faults each


def start(folder, victim=None, **settings):
    return faulty_runs.run(folder / 'run', 2, victim, steps=STEPS, init=20.0, **settings)


@pytest.mark.parametrize(
    'victim, fault, code, line',
    [
        (0, 'SIGKILL', 75, 'process 0 died, last seen at '),
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


def test_a_process_that_is_done_does_not_mind_the_end_of_process_0(tmp_path):
    ending = start(tmp_path, 0, fault='killed when all are done')
    assert ending.codes == [-signal.SIGKILL, 0], ending.texts
    assert ending.texts[1] == ''


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """The results of a run without a fault."""
    folder = tmp_path_factory.mktemp('undisturbed')
    ending = start(folder)
    assert ending.codes == [0, 0], ending.texts
    return faulty_runs.results(folder / 'run', STEPS)


@pytest.mark.parametrize('seed', range(CHAINS))
def test_a_run_with_faults_at_random_ends_and_resumes_as_if_it_had_none(
    tmp_path, undisturbed, seed
):
    rng = random.Random(seed)
    for _ in range(FAULTS):
        victim, fault = rng.randrange(2), faulty_runs.draw_fault(rng)
        ending = start(tmp_path, victim, **fault)
        code, text = ending.codes[1 - victim], ending.texts[1 - victim]
        # A run that is done before the moment comes has no fault.
        assert code == 0 or f'process {victim}' in text, (fault, code, text)
        assert code in (0, 75, 130, 1, 2), (fault, text)
    ending = start(tmp_path)
    assert ending.codes == [0, 0], ending.texts
    assert faulty_runs.results(tmp_path / 'run', STEPS) == undisturbed
