"""Two runs in one folder: the second one is refused, or takes over from a run that is dead.

The clock is one that only the test moves, and nothing waits.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from etils import epath
from s3_server import Bucket, needs_s3, s3_server
from small import small_config

from train import train
from train.checkpoints import CheckpointConfig
from train.errors import ConfigError
from train.processes import claims as claims_module, holding
from train.processes.claims import ClaimedFolder, Owner, this_process
from train.processes.holding import FolderInUse, FolderLost, Timing, hold_folder

ELSEWHERE = Owner(host='elsewhere', machine='another', pid=7, born=1.0, command='meshwright train')


class Clock:
    """Time that passes only when a run waits; `at_second` is called after each wait."""

    def __init__(self, at_second=lambda second: None):
        self.now, self.at_second = 1000.0, at_second

    @property
    def timing(self):
        return Timing(now=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds):
        self.now += seconds
        self.at_second(self.now - 1000.0)


def hold(folder, clock=None, owner=None, said=None):
    say = (said if said is not None else []).append
    return hold_folder('MODEL_DIR', folder, say, owner=owner, timing=(clock or Clock()).timing)


def claims(folder):
    return sorted(path.name for path in Path(folder).glob('in-use-*'))


@contextlib.contextmanager
def another_run(folder, owner):
    """A run that holds a folder and gives it back only at the end of the test."""
    with hold(folder, owner=owner):
        yield


@contextlib.contextmanager
def child():
    """A process that does nothing until it is killed."""
    process = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def owner_of(process):
    born = claims_module._look_at(process.pid)[1]
    return dataclasses.replace(this_process(), pid=process.pid, born=born)


# On this machine.


def test_a_second_run_is_told_who_holds_the_folder_and_how_to_take_over(tmp_path):
    folder = tmp_path / 'my runs' / 'ünï'
    with child() as process, another_run(folder, owner_of(process)):
        (name,) = claims(folder)
        since = json.loads((folder / name).read_text())['since']
        with pytest.raises(FolderInUse) as caught, hold(folder):
            pytest.fail('two runs hold the folder')
        text = str(caught.value)
        assert f'MODEL_DIR {folder} is in use by process {process.pid} on host ' in text
        assert 'last sign of life 0 s ago' in text and '\n' not in text and since > 0
        command = text.rpartition('take over with: ')[2]
        assert claims(folder) == [name], 'the second run leaves nothing'
        subprocess.run(command, shell=True, check=True)  # as it is printed, spaces and all
        with hold(folder):
            assert len(claims(folder)) == 1
    assert not folder.exists(), 'a folder that stays empty is removed'


def test_a_killed_run_is_succeeded_at_once(tmp_path):
    (tmp_path / 'kept').write_text('')
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(child())
        stack.enter_context(another_run(tmp_path, owner_of(process)))
        before = claims(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        said = []
        with hold(tmp_path, said=said):
            assert len(claims(tmp_path)) == 1 and claims(tmp_path) != before
        (line,) = said
        assert f'taking over MODEL_DIR {tmp_path} from process {process.pid}' in line
        assert claims(tmp_path) == []


def test_a_process_that_nobody_has_waited_for_is_dead(tmp_path):
    with child() as process, another_run(tmp_path, owner_of(process)):
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        with hold(tmp_path):
            pass


def test_the_number_of_a_dead_process_may_be_in_use_again(tmp_path):
    with child() as process:
        earlier = dataclasses.replace(owner_of(process), born=owner_of(process).born - 100)
        with another_run(tmp_path, earlier), hold(tmp_path):
            pass


def test_a_suspended_run_keeps_its_folder_however_long(tmp_path):
    with child() as process, another_run(tmp_path, owner_of(process)):
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        (name,) = claims(tmp_path)
        os.utime(tmp_path / name, (1e9, 1e9))  # its last sign of life
        with pytest.raises(FolderInUse, match=rf' days ago, suspended \(kill -CONT {process.pid} '):
            hold(tmp_path).__enter__()


def test_a_copy_of_a_running_folder_is_free(tmp_path):
    (tmp_path / 'a').mkdir()
    with child() as process, another_run(tmp_path / 'a', owner_of(process)):
        shutil.copytree(tmp_path / 'a', tmp_path / 'b')
        with hold(tmp_path / 'b'):
            pass


# On another machine, with a shared file system or a store.


@pytest.fixture(scope='module')
def client():
    with s3_server():
        import boto3

        yield boto3.client('s3')


@pytest.fixture(params=['shared file system', pytest.param('store', marks=needs_s3)])
def shared(request, tmp_path):
    """A folder that hosts share."""
    if request.param == 'shared file system':
        return tmp_path
    client = request.getfixturevalue('client')
    name = request.node.name.replace('_', '-').replace('[', '-').replace(' ', '')[:60].strip('-]')
    return f'{Bucket(client, name).url}/runs/one'


def test_a_run_on_another_host_is_alive_while_it_gives_signs(shared, monkeypatch):
    files = ClaimedFolder(epath.Path(shared))
    with another_run(shared, ELSEWHERE):
        (other,) = files.read()
        at = {'sign': files.last_sign(other.token)}
        last_sign = ClaimedFolder.last_sign
        monkeypatch.setattr(
            ClaimedFolder,
            'last_sign',
            lambda self, token: at['sign'] if token == other.token else last_sign(self, token),
        )

        def give_sign(second):
            if second == 9:
                at['sign'] += 9

        said = []
        with pytest.raises(FolderInUse, match=r'process 7 on host elsewhere .*meshwright train'):
            hold(shared, Clock(give_sign), said=said).__enter__()
        (line,) = said
        assert 'claimed by process 7 on host elsewhere' in line and 'at most ' in line
        assert [one.token for one in files.read()] == [other.token]


def test_a_run_on_another_host_without_signs_is_dead(shared, monkeypatch):
    files, clock, said = ClaimedFolder(epath.Path(shared)), Clock(), []
    # The test may take longer than the time between two signs.
    monkeypatch.setattr(holding.Holding, '_sign', lambda self: None)
    with another_run(shared, ELSEWHERE):
        (other,) = files.read()
        with hold(shared, clock, said=said):
            assert other.token not in [one.token for one in files.read()]
            waited = clock.now - 1000
            assert holding.SECONDS_UNTIL_DEAD - 2 <= waited <= holding.SECONDS_UNTIL_DEAD + 1
        assert len(said) == 2 and 'taking over' in said[1]
        assert files.read() == []


def test_a_sign_of_life_from_the_future_delays_a_run_no_longer_than_others(tmp_path, monkeypatch):
    """As after a wrong clock, or in a copy of a folder that keeps the times."""
    monkeypatch.setattr(holding.Holding, '_sign', lambda self: None)
    with another_run(tmp_path, ELSEWHERE):
        (name,) = claims(tmp_path)
        os.utime(tmp_path / name, (4e9, 4e9))
        clock = Clock()
        with hold(tmp_path, clock):
            assert clock.now - 1000 <= holding.SECONDS_UNTIL_DEAD + 1


def test_the_clocks_of_hosts_need_not_agree(tmp_path):
    """A claim from a host whose clock is a day behind, on a file system with the right time."""
    with another_run(tmp_path, ELSEWHERE):
        (name,) = claims(tmp_path)
        found = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps(found | {'since': found['since'] - 86400}))
        clock = Clock(lambda second: os.utime(tmp_path / name))
        with pytest.raises(FolderInUse):
            hold(tmp_path, clock).__enter__()
        assert clock.now - 1000 <= 2, 'the first sign of life is seen'


@pytest.mark.parametrize(
    'changes',
    [
        None,
        'a pipe',
        {'since': 1e300},
        {'since': None},
        {'owner': {'host': 'a', 'machine': 'b', 'pid': 2**40, 'born': None}},
        {'owner': {'host': 'a', 'machine': [], 'pid': 1, 'born': None}},
    ],
)
def test_a_claim_that_cannot_be_read_counts_by_its_signs_of_life(tmp_path, changes):
    owner = {'host': 'a', 'machine': 'b', 'pid': 1, 'born': None, 'command': ''}
    claim = {'owner': owner, 'since': 1.0, 'holds': True, 'place': '1'}
    if changes == 'a pipe':
        os.mkfifo(tmp_path / 'in-use-0.json')
    else:
        text = '{"owner": ' if changes is None else json.dumps(claim | changes)
        (tmp_path / 'in-use-0.json').write_text(text)
    os.utime(tmp_path / 'in-use-0.json', (1e9, 1e9))
    with hold(tmp_path):
        assert len(claims(tmp_path)) == 1


# What a run does that has lost its folder.


def test_a_run_that_wakes_up_without_its_folder_writes_nothing_more(shared):
    clock, files = Clock(), ClaimedFolder(epath.Path(shared))
    with hold(shared, clock) as held:
        held.check()
        (own,) = files.read()
        files.remove(own.token)  # as another run does that takes over
        held.check()  # It has just looked.
        with hold(shared, owner=ELSEWHERE):
            clock.now += 3600  # It was suspended.
            lost = r'was taken over by process 7 on host elsewhere .*ends without writing'
            with pytest.raises(FolderLost, match=lost):
                held.check()
            assert own.token not in [one.token for one in files.read()], 'no sign of life'
    assert files.read() == []


def test_train_stops_without_writing_when_its_folder_is_lost(texts, tmp_path, monkeypatch):
    clock, folder, kept = Clock(), tmp_path / 'run', {}
    monkeypatch.setattr(holding, 'Timing', lambda: clock.timing)

    def suspend(state, step, metrics):
        if step == 3:
            for name in claims(folder):
                (folder / name).unlink()
            clock.now += 3600
            kept.update(contents(folder))

    with pytest.raises(FolderLost):
        train(small_config(folder, texts, hooks=[suspend], checkpoints=saves()))
    assert contents(folder) == kept


def saves():
    return CheckpointConfig(period=2, asynchronous=False)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def test_a_run_resumes_in_its_process_and_readers_need_no_claim(texts, tmp_path, monkeypatch):
    seen, folder = [], tmp_path / 'run'

    def look(state, step, metrics):
        seen.append(claims(folder))
        if step == 4:
            from train import evaluate

            assert 'eval/loss' in evaluate(config)
            with pytest.raises(FolderInUse, match=r'\(this process\)'):
                train(config)

    config = small_config(folder, texts, checkpoints=saves())
    train(dataclasses.replace(config, total_steps=2))
    assert int(train(dataclasses.replace(config, hooks=[look])).step) == 6
    assert [len(names) for names in seen] == [1] * 4 and claims(folder) == []


# Mistakes, and several at once.


def test_of_runs_that_begin_at_once_one_holds_the_folder(tmp_path):
    """Twenty threads stand for runs; each says after a moment that it was alone."""
    inside, most, refused = [], [], []
    begin = threading.Barrier(20)

    def run(number):
        begin.wait()
        try:
            with hold_folder('MODEL_DIR', tmp_path, lambda line: None):
                inside.append(number)
                most.append(len(inside))
                done.wait(0.3)
                inside.remove(number)
        except FolderInUse:
            refused.append(number)

    done = threading.Event()
    threads = [threading.Thread(target=run, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1} and len(most) + len(refused) == 20


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match=r'MODEL_DIR .*file/run: .*file is a file, not a folder'):
        hold(tmp_path / 'file/run').__enter__()
    if os.getuid():
        (tmp_path / 'closed').mkdir(mode=0o500)
        with pytest.raises(ConfigError, match=r'MODEL_DIR .* cannot be written: Permission denied'):
            hold(tmp_path / 'closed/run').__enter__()
