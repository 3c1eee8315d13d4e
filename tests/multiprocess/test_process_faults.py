"""Two real processes of a run, of which one has a fault; `make test-processes` has all faults."""

import faulty_runs
import pytest
from small import records

STEPS = 6


def start(folder, victim=None, **settings):
    folder.mkdir(exist_ok=True)
    return faulty_runs.run(folder / 'run', 2, victim, steps=STEPS, **settings)


def test_a_run_that_a_signal_has_stopped_on_all_processes_resumes_as_if_it_had_not(tmp_path):
    ending = start(tmp_path, 1, fault='SIGTERM', moment='step 3')
    assert ending.codes == [75, 75], ending.texts
    for index, text in enumerate(ending.texts):
        line = text.splitlines()[-1]
        assert line.startswith(f'[{index}] stopped by SIGTERM to process 1 after step ')
        assert f'saved in {tmp_path}/run/checkpoints/' in line
        assert line.endswith('resume with: meshwright train mine')
    assert start(tmp_path).codes == [0, 0]
    assert (whole := start(tmp_path / 'whole')).codes == [0, 0], whole.texts
    assert records(tmp_path / 'run') == records(tmp_path / 'whole/run')


@pytest.mark.parametrize(
    'victim, fault, code, line',
    [
        (0, 'SIGKILL', 75, 'process 0 died'),
        (1, 'exception', 1, 'process 1 failed: Fault'),
        (1, 'other optimizer', 2, 'TrainConfig.optimizer.learning_rate'),
    ],
)
def test_if_one_process_fails_the_other_ends_and_names_it(tmp_path, victim, fault, code, line):
    ending = start(tmp_path, victim, fault=fault, moment='step 3')
    assert ending.codes[1 - victim] == code, ending.texts
    assert line in ending.texts[1 - victim]
