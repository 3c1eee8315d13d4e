"""2 and 4 real JAX processes with 8 devices in total see the same meshes and batches."""

import functools
import json
import math
import shutil
from pathlib import Path

import job_batches
import job_restoring
import job_training
import numpy as np
import pytest
from etils import epath
from processes import run_worker
from small import records

from train import train
from train.checkpoints import CheckpointConfig, complete_steps, open_checkpoints


@pytest.fixture(scope='module')
def reports_of(tmp_path_factory):
    """A function from N to the reports of N processes, which are started only once."""

    @functools.cache
    def run(count):
        folder = tmp_path_factory.mktemp(f'processes{count}')
        if count == 4:
            job_restoring.save_alone(folder)
        return run_worker(count, folder)

    return run


@pytest.fixture(params=[2, 4])
def reports(request, reports_of):
    return reports_of(request.param)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('tokens')


# Meshes.


def test_all_processes_see_the_same_meshes(reports):
    count, meshes = len(reports), reports[0]['meshes']
    assert all(report['meshes'] == meshes for report in reports)
    assert len(meshes) == 6
    for name, mesh in meshes.items():
        owners = np.array([process for process, _ in mesh['ids']]).reshape(mesh['shape'])
        assert len({device for _, device in mesh['ids']}) == 8
        if name == 'hybrid':  # This mesh asks for 'model' over the processes.
            assert owners.tolist() == [list(range(count))] * (8 // count)
            continue
        # A model group stays within a process if it fits, and otherwise takes whole processes.
        model, local = mesh['shape'][-1], 8 // count
        groups = owners.reshape(-1, model).tolist()
        assert all(len(set(group)) == max(1, model // local) for group in groups), name
        network = '-' if model == 1 else 'memory' if model <= local else None
        assert network is None or mesh['networks'][-1] == network, name


def test_a_sum_over_all_devices_is_right(reports):
    assert [report['sum'] for report in reports] == [28.0] * len(reports)


# Rows.


def test_every_row_is_read_and_each_shard_has_exactly_one_first_host(reports):
    """Each worker checks its own rows; this test checks that all workers report the same."""
    rows_of_meshes = [report['rows']['meshes'] for report in reports]
    assert len(rows_of_meshes[0]) == 6
    assert all(rows == rows_of_meshes[0] for rows in rows_of_meshes)
    for name, layouts in rows_of_meshes[0].items():
        assert len(layouts) == len(reports)
        assert {row for _, _, *rows in layouts.values() for row in rows} == set(range(16)), name
        shards = {shard_id: rows for shard_id, _, *rows in layouts.values()}
        assert [shards[i] for i in range(len(shards))] == sorted(shards.values())
        firsts = [shard_id for shard_id, is_first, *_ in layouts.values() if is_first]
        assert sorted(firsts) == sorted(shards), name


def test_the_device_orders_include_strided_and_shared_rows(reports):
    """Without such orders, the checks of the rows would cover only contiguous rows."""
    count, layouts = len(reports), reports[0]['rows']['meshes']
    rows = {name: [rows for _, _, *rows in of.values()] for name, of in layouts.items()}
    strided = {name for name, of in rows.items() if any(r[-1] - r[0] >= len(r) for r in of)}
    assert not any(name.startswith('default') for name in strided)
    assert 'strided 8x1' in strided
    assert sum(len(r) for r in {tuple(r) for r in rows['rolled 4x2']}) > 16, 'some are shared'
    # 'data' has size 2 and 'model' size 4: half of the processes read the same rows.
    assert all(rows['default 2x4'].count(r) == count // 2 for r in rows['default 2x4'])
    # 'data' has size 4: each process reads its part of the rows, in order.
    assert [shard_id for shard_id, *_ in layouts['default 4x2'].values()] == list(range(count))


def test_a_process_without_devices_of_a_mesh_gets_an_error(reports):
    assert not reports[0]['rows']['errors']
    for index, report in enumerate(reports[1:], start=1):
        errors = report['rows']['errors']
        assert [kind for kind, _ in errors] == ['ValueError'] * 2
        for _, message in errors:
            assert (
                f'process {index} holds no device of the mesh data {8 // len(reports)}' in message
            )


# Batches.


@pytest.fixture(scope='module')
def alone(folder):
    """The rows of every batch that this process, which has all 8 devices, holds alone."""
    return job_batches.run(folder)


@pytest.fixture(scope='module')
def expected(folder):
    """The hash of each row of each batch, read one by one without a mesh or a feed."""
    batch, steps = job_batches.BATCH, {int(s) for f, n in job_batches.RUNS for s in range(f, f + n)}
    hashes = {}
    for name, task in job_batches.tasks(folder).items():
        rows = task.open(job_batches.LENGTH).training(job_batches.SEED)
        for step in steps:
            numbers = range(step * batch, (step + 1) * batch)
            hashes[name, step] = [job_batches.hash_row(rows[number]) for number in numbers]
    return hashes


def assert_batches_are(expected, batches_of_processes):
    keys = [key for key, *_ in batches_of_processes[0]]
    num_steps = sum(steps for _, steps in job_batches.RUNS)
    assert len(keys) == len(set(keys)) == 2 * len(job_batches.MODEL_SIZES) * num_steps
    for batches in zip(*batches_of_processes, strict=True):
        [key] = {key for key, *_ in batches}
        name, model, _, step = key.split()
        copies = [tuple(row) for _, rows, _ in batches for row in rows]
        # Each of the devices along 'model' has its own copy of a row, and the copies are equal.
        assert len(copies) == job_batches.BATCH * int(model), key
        assert [row for _, row in sorted(set(copies))] == expected[name, int(step)], key


def test_one_process_holds_the_rows_of_the_task(alone, expected):
    assert_batches_are(expected, [alone])
    sums = {key: total for key, _, total in alone}
    assert len(set(sums.values())) >= len(expected), 'sums tell batches apart'
    rows = {row for hashes in expected.values() for row in hashes}
    # Far from its start, the run is in another epoch, which may repeat a row.
    assert len(rows) > 0.9 * sum(map(len, expected.values())), 'batches differ from step to step'


def test_several_processes_hold_the_same_rows_and_sums_as_one(reports, alone, expected):
    assert_batches_are(expected, [report['batches'] for report in reports])
    sums = {key: total for key, _, total in alone}
    for report in reports:
        assert {key: total for key, _, total in report['batches']} == sums


# Failures.


def test_if_one_process_fails_the_other_names_it(reports_of):
    first, second = (report['failures'] for report in reports_of(2))
    for name in ('nobody fails', 'same data'):
        assert first[name] is None and second[name] is None
    assert second['second fails'] == 'ConfigError: no file matches'
    assert first['second fails'] == 'ConfigError: process 1 failed: no file matches'
    assert second['second fails with an OSError'] == 'OSError: no such thing'
    assert first['second fails with an OSError'] == 'ConfigError: process 1 failed: no such thing'


def test_a_difference_between_processes_is_a_table_on_all_of_them(reports_of):
    first, second = (report['failures'] for report in reports_of(2))
    tables = {
        'different data': ['training data Records', '0', '1'],
        'different steps': ['newest checkpoint', 'none', 'step 1'],
        'other learning rate in a closure': ['program of the train step', '0', '1'],
        'other steps': ['TrainConfig.total_steps', '4', '5'],
        'folder': ['MODEL_DIR', 'contains what process 0 writes', 'another folder'],
    }
    for name, words in tables.items():
        assert first[name] == second[name]
        message, header, *table = first[name].splitlines()
        assert message.startswith('Disagreement: the processes differ in ')
        assert header.split() == ['item', 'value', 'processes']
        processes = [line.split()[-1] for line in table]
        assert processes == ['0', '1'] * (len(processes) // 2) != [], 'of each value'
        assert all(word in '\n'.join(table) for word in words), first[name]


def test_if_one_process_cannot_start_a_run_the_other_stops(reports_of):
    first, second = (report['failures'] for report in reports_of(2))
    kind = 'ConfigError: '
    assert 'a run is a file' in first['a file']
    assert second['a file'] == f'{kind}process 0 failed: {first["a file"].removeprefix(kind)}'
    for name in ('restore', 'evaluation'):
        assert second[name].startswith(kind) and 'restored does not exist' in second[name]
        assert first[name] == f'{kind}process 1 failed: {second[name].removeprefix(kind)}'


def test_all_processes_are_told_that_another_run_holds_the_folder(reports_of):
    first, second = (report['failures']['in use'] for report in reports_of(2))
    assert first.startswith('FolderInUse: MODEL_DIR ') and '(this process)' in first
    kind = 'FolderInUse: '
    assert second == f'{kind}process 0 failed: {first.removeprefix(kind)}'


# Training.


def test_each_process_keeps_its_programs(reports_of):
    """On CPUs, none of them would find the programs of another."""
    folder = reports_of(2)[0]['training']['folder']
    assert len(list(Path(folder, 'programs').glob('jit_train_step-*-cache'))) == 2


@pytest.mark.long
def test_two_processes_train_like_one_and_one_process_resumes_their_run(
    reports_of, tmp_path, capsys
):
    first, second = (report['training'] for report in reports_of(2))
    assert 'step 4/4' in first['output'] and 'eval: held-out bits per byte' in first['output']
    assert second['output'] == '', 'only the first process prints'

    # Each process has recorded some of the files, and the manifest has all of them.
    step = Path(first['folder'], 'checkpoints/4')
    files = {str(p.relative_to(step)) for p in step.rglob('*') if p.is_file()}
    recorded = json.loads((step / 'manifest.json').read_text())['files']
    assert recorded.keys() == files - {'manifest.json'}
    assert complete_steps(step.parent) == [2, 4]

    # One process resumes the checkpoint of two: the shardings differ, and the state is the same.
    together = tmp_path / 'together'
    shutil.copytree(first['folder'], together)
    train(job_training.config(together, 5))
    assert 'resumed from step 4' in capsys.readouterr().out
    train(job_training.config(tmp_path / 'alone', 5))
    one, two = records(tmp_path / 'alone'), records(together)
    assert [r['step'] for r in one] == [r['step'] for r in two] == [1, 2, 2, 3, 4, 4, 5, 5]
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=1e-5, abs=1e-8)


# Restoring.


def test_four_processes_read_each_byte_of_one_process_once_and_one_restores_theirs(reports_of):
    """The workers compare the bits of all shards."""
    reports = [report['restoring'] for report in reports_of(4)]
    [size] = {report['size'] for report in reports}
    assert (
        size
        == sum(
            math.prod(shape) * np.dtype(dtype).itemsize
            for shape, dtype, _ in job_restoring.ARRAYS.values()
        )
        + np.dtype('int32').itemsize
    )
    # Two processes need parts of each chunk of the array of 2 MiB that the other mesh has sharded.
    # Each process reads the step and the small array, with 404 bytes, itself.
    expected = size + 2**21 + 3 * 404
    assert reports[0]['amplification'] == pytest.approx(expected / size)
    for report, process_bytes in zip(reports, reports[0]['expected'], strict=True):
        # Each file is read once, for its checksum. Its values are then mapped.
        assert report['read'] == pytest.approx(process_bytes, rel=0.05)
        assert report['read'] < expected / 2, 'no process reads half of the bytes'
    assert sum(reports[0]['expected']) == expected

    abstract = job_restoring.abstract_state(8)
    folder = epath.Path(reports[0]['folder'])
    again = open_checkpoints(CheckpointConfig(), folder).restore(job_restoring.STEP, abstract)
    job_restoring.assert_has_values(again, abstract)


def test_if_one_process_reads_damage_all_raise_it(reports_of):
    errors = [report['restoring']['error'] for report in reports_of(4)]
    assert all(error.startswith('DamagedCheckpoint: ') for error in errors)
    file = 'state/params.not divisible/0.0 does not have the content'
    [reader] = [i for i, error in enumerate(errors) if ' failed: ' not in error]
    for i, error in enumerate(errors):
        assert file in error
        assert i == reader or f'process {reader} failed: ' in error
