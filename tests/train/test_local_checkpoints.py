"""Local checkpoints of four processes, which are threads here and talk through real sockets."""

import contextlib
import dataclasses
import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from small import records

from train.checkpoints import CheckpointConfig, DamagedCheckpoint
from train.checkpoints.local import exchange, held, parts, tier
from train.checkpoints.local.tier import LocalTier, partners_of, slots_of
from train.checkpoints.steps.finding import examine
from train.checkpoints.steps.verifying import verify
from train.errors import ConfigError
from train.processes import peers

HOSTS = ('a', 'b', 'c', 'd')


class Together:
    """Processes that are threads: what they gather, and which of them a thread is."""

    current = None  # those that run

    def __init__(self, hosts):
        self.hosts, self._own = hosts, threading.local()
        self._barrier, self._values = threading.Barrier(len(hosts), timeout=30), {}

    index = property(lambda self: self._own.index)

    def gather(self, title, value):
        self._values[self.index] = value
        self._barrier.wait()
        values = [self._values[i] for i in range(len(self.hosts))]
        self._barrier.wait()
        return values

    def addresses(self):
        return ('127.0.0.1', '127.0.0.1') if self.index else ('', '')

    def secret_for(self, purpose):
        return b'the secret of the test' + purpose

    def each(self, work):
        """Returns what the function returns in each process, given its index."""

        Together.current = self

        def run(index):
            self._own.index = index
            try:
                return work(index)
            except BaseException as error:
                if not isinstance(error, ConfigError):  # which all of them raise
                    self._barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.hosts)) as pool:
            return list(pool.map(run, range(len(self.hosts))))


@contextlib.contextmanager
def raise_after_all(title):
    try:
        yield
    finally:
        Together.current.gather(title, None)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that opens the tiers of a start of the run, on hosts with a folder each."""
    opened = []

    def open_tiers(hosts=HOSTS, run='run', shared=False):
        together, current = Together(hosts), lambda: Together.current
        monkeypatch.setattr(peers, 'connected_member', current)
        monkeypatch.setattr(peers.socket, 'gethostname', lambda: hosts[current().index])
        monkeypatch.setattr(tier, 'gather', lambda *of: current().gather(*of))
        monkeypatch.setattr(tier, 'agree_on', lambda value: current().gather('', value)[0])
        monkeypatch.setattr(tier, 'raise_on_all_processes', raise_after_all)
        monkeypatch.setattr(jax, 'process_index', lambda: current().index)
        monkeypatch.setattr(jax, 'process_count', lambda: len(hosts))
        said = []

        def open_one(index):
            disk = tmp_path / ('shared' if shared else hosts[index])
            config = CheckpointConfig(local_dir=str(disk), local_every=5)
            return LocalTier(config, epath.Path(tmp_path / run), said.append)

        (tmp_path / run).mkdir(exist_ok=True)
        found = Run(together, together.each(open_one), said)
        opened.append(found)
        return found

    yield open_tiers
    monkeypatch.undo()
    for run in opened:
        for one in run.tiers:
            one.close()


@dataclasses.dataclass
class Run:
    together: Together
    tiers: list
    said: list

    def begin(self, step=0):
        local = [one.steps.newest_step(print) for one in self.tiers]
        self.together.each(lambda i: self.tiers[i].begin(step, is_local=local[i] == step))

    def save(self, step, state=None):
        state = make_state(step) if state is None else state

        if not all(self.together.each(lambda i: self.tiers[i].is_due(step))):
            return
        with placed(len(self.tiers)):
            for one in self.tiers:
                one.save(step, state)
        for one in self.tiers:
            one.wait()

    def restore(self, index=0, axes=(2, 4)):
        """What a process restores, and from where."""
        steps = self.tiers[index].steps
        struct = jax.eval_shape(lambda: make_state(0))
        mesh = Mesh(np.array(jax.devices()).reshape(axes), ('data', 'model'))
        wanted = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, SPECS[name]))
            for name, x in struct.items()
        }
        stored = steps.arrays(steps.chosen_step, wanted)
        return {name: stored[name].read() for name in wanted}, steps.describe()


SPECS = {'step': P(), 'wide': P('data', 'model'), 'tall': P(('data', 'model')), 'same': P(None)}


def make_state(step, axes=(4, 2)):
    mesh = Mesh(np.array(jax.devices()).reshape(axes), ('data', 'model'))
    values = {
        'step': jnp.int32(step),
        'wide': jnp.arange(64, dtype=jnp.float32).reshape(8, 8) / 7 + step,
        'tall': (jnp.arange(80) + step).reshape(16, 5).astype(jnp.bfloat16),
        'same': jnp.arange(6, dtype=jnp.float32) * step,
    }
    return {n: jax.device_put(x, NamedSharding(mesh, SPECS[n])) for n, x in values.items()}


@contextlib.contextmanager
def placed(count):
    """Divides the devices of this process among several."""

    def holders_of(sharding, shape):
        found = {}
        for device, index in sharding.devices_indices_map(shape).items():
            bounds = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
            found.setdefault(bounds, set()).add(device.id * count // 8)
        return [(bounds, tuple(sorted(of))) for bounds, of in sorted(found.items())]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, 'holders_of', holders_of)
        yield


def assert_is(state, step):
    for name, expected in make_state(step).items():
        assert state[name].dtype == expected.dtype
        assert state[name].tobytes() == np.asarray(expected).tobytes(), name


def saved_run(start, steps=(5, 10), **settings):
    run = start(**settings)
    run.begin()
    for step in steps:
        run.save(step)
    return run


def test_parts_that_another_user_has_made_are_not_read(start, tmp_path, monkeypatch):
    saved_run(start)
    assert start().tiers[0].steps.newest_step(print) == 10
    monkeypatch.setattr(held.os, 'geteuid', lambda: os.stat(tmp_path).st_uid + 1)
    assert start().tiers[0].steps.newest_step(print) is None
    monkeypatch.undo()
    for name in tmp_path.glob('?/*'):
        assert name.stat().st_mode & 0o077 == 0, 'others may not read the state'
        moved = name.rename(tmp_path / f'{name.parent.name}-moved')
        name.symlink_to(moved)
    assert start().tiers[0].steps.newest_step(print) is None


def test_after_the_loss_of_a_host_its_part_comes_from_its_partner(start, tmp_path):
    saved_run(start, range(1, 11))
    folders = sorted(tmp_path.glob('?/*/0/*/*'))
    assert [str(f.relative_to(f.parents[1])) for f in folders if f.parts[-5] == 'c'] == [
        '1-of-4/10', '1-of-4/5', '2-of-4/10', '2-of-4/5'
    ]  # fmt: skip
    for folder in folders:
        found = verify(examine(epath.Path(folder), int(folder.name)))
        assert (found.status, found.num_files) == ('good', 3)
    shutil.rmtree(tmp_path / 'c')
    again = start(('a', 'b', 'e', 'd'))
    assert [one.steps.newest_step(print) for one in again.tiers] == [10] * 4
    for index in range(4):
        state, told = again.restore(index)
        assert_is(state, 10)
        assert told == '4 parts, part 2 from process 3, 3 from their own'


@pytest.mark.parametrize('hosts', [('b', 'd'), ('d', 'a', 'b'), ('a', 'b', 'c', 'd', 'e', 'f')])
def test_another_number_of_processes_finds_all_parts_and_saves_its_own(start, hosts):
    saved_run(start)
    again = start(hosts)
    for one in again.tiers:
        assert one.steps.newest_step(print) == 10
    state, told = again.restore()
    assert_is(state, 10)
    assert told.startswith('4 parts, part') and 'own' not in told
    again.begin(10)
    again.save(15)
    again.save(20)
    third = start(hosts[::-1])
    assert [one.steps.newest_step(print) for one in third.tiers] == [20] * len(hosts)
    assert_is(third.restore(axes=(8, 1))[0], 20)


def test_a_damaged_part_is_replaced_by_its_copy_or_by_an_older_step(start, tmp_path, capfd):
    saved_run(start)

    def damage(host, step):
        [path] = tmp_path.glob(f'{host}/*/0/1-of-4/{step}/state/shards/data')
        path.write_bytes(bytes(reversed(path.read_bytes())))

    damage('b', 10)
    run = start()
    assert run.tiers[1].steps.newest_step(print) == 10
    assert_is(run.restore(1)[0], 10)
    problem = 'state/shards/data does not have the content that was written'
    assert (
        f'part 1 of local step 10 cannot be read on process 1: {problem}' in capfd.readouterr().err
    )
    damage('c', 10)
    run = start()
    steps = run.tiers[1].steps
    assert steps.newest_step(print) == 10
    with pytest.raises(DamagedCheckpoint, match=r'part 1 of local step 10 is damaged \(proc'):
        run.restore(1)
    assert steps.newest_step(print, below=10) == 5
    assert_is(run.restore(1)[0], 5)
    assert steps.newest_step(print, below=5) is None
    # What sizes and the index show is told when parts are looked for.
    [path] = tmp_path.glob('d/*/0/3-of-4/10/state/index.json')
    path.write_text(path.read_text()[:-1])
    capfd.readouterr()
    start()
    assert 'the other copy of this part is looked for' in capfd.readouterr().err


def test_parts_of_other_runs_and_of_a_past_that_was_given_up_are_never_mixed(start, tmp_path):
    saved_run(start)
    others = saved_run(start, (5,), run='other run')
    assert len({path.name for path in (tmp_path / 'a').iterdir()}) == 2
    assert start().tiers[0].steps.newest_step(print) == 10
    assert start(run='other run').tiers[0].steps.newest_step(print) == 5
    shutil.move(tmp_path / 'c', tmp_path / 'away')
    shutil.move(tmp_path / 'd', tmp_path / 'off')
    run = start()
    assert run.tiers[0].steps.newest_step(print) is None
    run.begin(3)  # from MODEL_DIR
    run.save(5)
    for host, away in (('c', 'away'), ('d', 'off')):
        for start_folder in (tmp_path / away).iterdir():
            shutil.move(start_folder, tmp_path / host / start_folder.name)
    # The hosts are back, with step 10 of the first start. The run has begun again at step 3.
    assert start().tiers[0].steps.newest_step(print) == 5
    others.together.each(lambda i: others.tiers[i].finish(5))
    assert len({path.name for path in (tmp_path / 'a').iterdir()}) == 1


def test_a_full_disk_is_one_line_and_the_step_before_stays(start, monkeypatch, capfd):
    run = saved_run(start, (5,))
    write = tier.write_part

    def full(folder, key, index, data):
        write(folder, key, index, data)
        if key.part == 2:
            raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(tier, 'write_part', full)
    for step in (10, 15, 20):
        run.save(step)
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith('the local checkpoint of step 10 cannot be kept in ')
    assert line.endswith('/c (No space left on device): training continues')
    again = start()
    assert again.tiers[3].steps.newest_step(print) == 5
    assert_is(again.restore(3)[0], 5)


def test_a_copy_that_changes_on_the_way_is_not_kept(start, monkeypatch, capfd):
    receive = exchange._blocks

    def changed(*request):
        for block in receive(*request):
            block[-1] ^= 1
            yield block

    run = start()
    run.begin()
    monkeypatch.setattr(exchange, '_blocks', changed)
    run.save(5)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 4 and all('training continues' in line for line in lines)
    assert [len(one._held.all()) for one in run.tiers] == [1] * 4


def test_a_run_resumes_from_its_newest_step_local_or_not(run, finished, tmp_path, capsys):
    folder, local, before = tmp_path / 'model', tmp_path / 'local', tmp_path / 'before'
    finished.copy(folder)
    shutil.rmtree(folder / 'checkpoints/6')

    def save(state, step, metrics):
        for part in range(2) if step == 5 else ():
            key = parts.Key('abcd', step, part, 2)
            with placed(2):
                index = parts.plan_part(state, part)
            data = np.empty(parts.part_bytes(index), np.uint8)
            parts.copy_shards(state, index, data)
            place = epath.Path(local / 'abcd/0' / key.folder)
            parts.write_part(place, key, index, data)

    run(folder, hooks=[save])
    shutil.copytree(local, before)
    (folder / tier.FILE).write_text('{"starts": [["abcd", 0]]}')
    saving = CheckpointConfig(period=2, when_busy='wait', local_dir=str(local), local_every=1)
    capsys.readouterr()
    run(folder, checkpoints=saving)
    assert 'resumed from step 6 of ' in capsys.readouterr().out
    assert list(local.iterdir()) == [], 'MODEL_DIR has a newer one'
    before.rename(tmp_path / 'local')
    (folder / tier.FILE).write_text('{"starts": [["abcd", 0]]}')
    shutil.rmtree(folder / 'checkpoints/6')
    run(folder, checkpoints=saving)
    told = f'step 5 of the local checkpoints in {local}: 2 parts, parts 0 and 1 from process 0'
    assert f'resumed from {told}\n' in capsys.readouterr().out
    assert records(folder) == records(finished.directory)


def test_partners_are_on_other_hosts():
    assert partners_of(['a', 'b', 'c']) == [1, 2, 0]
    assert partners_of(['a', 'a', 'b', 'b']) == [2, 3, 0, 1]
    assert partners_of(['a', 'b', 'a', 'a']) == [1, 0, 1, 1]
    assert partners_of(['a', 'a', 'a']) == [1, 2, 0]
    assert slots_of(['a', 'b', 'a', 'a']) == [0, 0, 1, 2]


def test_what_cannot_be_honoured_is_an_error(start, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match='set both, such as local_dir'):
        CheckpointConfig(local_every=5)
    with pytest.raises(ConfigError, match='is in a store: use a folder on a disk of each host'):
        CheckpointConfig(local_every=5, local_dir='gs://bucket/local')
    with pytest.raises(ConfigError, match='is the same folder on a and b: use a disk of each host'):
        start(('a', 'b'), shared=True)
    monkeypatch.undo()
    config = CheckpointConfig(local_dir=str(tmp_path / 'run/local'), local_every=5)
    with pytest.raises(ConfigError, match='which all hosts share'):
        LocalTier(config, epath.Path(tmp_path / 'run'), print)
    config = CheckpointConfig(local_dir=str(tmp_path / 'a'), local_every=5)
    with pytest.raises(ConfigError, match='this run has one process: start several'):
        LocalTier(config, epath.Path(tmp_path / 'run'), print)
