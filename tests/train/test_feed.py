"""The feed: batches in order, read ahead by threads, that end when they should.

Nothing here measures time: threads are held back and released by events, and clocks are fake.
"""

import subprocess
import sys
import threading
import types
from contextlib import closing

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning import PjitPartitioner
from train.data import Feed, FiniteBatches, LocalBatches, Prefetch, feed
from train.errors import ConfigError

WORKERS = [0, 1, 3]
TIMEOUT = 60  # seconds to wait for a thread before a test fails


class Rows:
    """Rows that contain their number.

    Args:
      before_read: called with the number of a row before it is read.
    """

    def __init__(self, before_read=lambda index: None):
        self._before_read = before_read
        self._changed = threading.Condition()
        self.read = []

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self._before_read(index)
        with self._changed:
            self.read.append(index)
            self._changed.notify_all()
        return {
            'tokens': np.arange(4, dtype=np.int32) + 10 * index,
            'weights': np.full(4, index % 3, np.float32),
        }

    def wait_until(self, condition):
        """Waits until the rows that have been read satisfy a condition."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.read), TIMEOUT), self.read


def failing(index, error):
    """Makes reading one row fail."""

    def before_read(read):
        if read == index:
            raise error

    return before_read


@pytest.fixture(scope='module')
def partitioner():
    return PjitPartitioner(num_partitions=2)


def batches_of(rows, kind=LocalBatches):
    return kind(rows, 8, range(8))


def feed_of(partitioner, rows, workers, kind=LocalBatches, **settings):
    prefetch = Prefetch(workers=workers, batches=4, device_batches=2)
    return Feed(batches_of(rows, kind), partitioner, prefetch=prefetch, **settings)


def first_row(batch):
    """The number of a batch's first row, from its tokens."""
    return int(batch['tokens'][0, 0]) // 10


def new_threads(before):
    return [thread for thread in threading.enumerate() if thread not in before]


def assert_ended(threads):
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive(), thread


# The batches.


@pytest.mark.parametrize('workers', WORKERS)
@pytest.mark.parametrize('shape', [(8, 1), (4, 2), (1, 8)])
def test_batches_come_in_order_and_sharded(workers, shape):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ('data', 'model'))
    partitioner = PjitPartitioner(mesh=mesh)
    expected = batches_of(Rows())
    with closing(feed_of(partitioner, Rows(), workers)) as feed:
        for step in range(12):
            batch = next(feed)
            assert set(batch) == {'tokens', 'weights'}
            for name, array in batch.items():
                np.testing.assert_array_equal(np.asarray(array), expected[step][name])
                assert array.dtype == expected[step][name].dtype
                sharding = NamedSharding(mesh, PartitionSpec('data'))
                assert array.sharding.is_equivalent_to(sharding, array.ndim)
                rows = 8 // shape[0]
                assert {s.data.shape for s in array.addressable_shards} == {(rows, 4)}


@pytest.mark.parametrize('workers', WORKERS)
@pytest.mark.parametrize('first_step', [0, 1, 7, 10**6])
def test_a_feed_starts_at_any_step_and_reads_nothing_before(partitioner, workers, first_step):
    rows = Rows()
    with closing(feed_of(partitioner, rows, workers, first_step=first_step)) as feed:
        found = [first_row(next(feed)) for _ in range(5)]
    assert found == [8 * (first_step + i) for i in range(5)]
    assert min(rows.read) == 8 * first_step


@pytest.mark.parametrize('workers', WORKERS)
@pytest.mark.parametrize('first_step', [0, 2, 3])
def test_a_finite_feed_ends_and_stays_at_its_end(partitioner, workers, first_step):
    feed = feed_of(partitioner, Rows(), workers, FiniteBatches, first_step=first_step)
    with closing(feed):
        assert [first_row(batch) for batch in feed] == [0, 8, 16][first_step:]
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(feed)


def test_a_negative_first_step_is_an_error(partitioner):
    with pytest.raises(ValueError, match='first_step'):
        feed_of(partitioner, Rows(), 0, first_step=-1).close()


@pytest.mark.parametrize('workers', [1, 3])
def test_workers_read_ahead_up_to_the_limit(partitioner, workers):
    rows = Rows()
    with closing(feed_of(partitioner, rows, workers)) as batches:
        for taken in range(6):
            # 4 local batches, 2 batches on the devices, and 1 batch that is being moved there.
            limit = 8 * (taken + 4 + 2 + 1)
            rows.wait_until(lambda read, limit=limit: len(read) >= limit)
            assert len(rows.read) == limit
            next(batches)


def test_without_workers_nothing_is_read_ahead(partitioner):
    rows, before = Rows(), threading.enumerate()
    with closing(feed_of(partitioner, rows, 0)) as feed:
        assert rows.read == []
        next(feed)
        assert rows.read == list(range(8))
        assert not new_threads(before)


@pytest.mark.parametrize('workers', [1, 3])
def test_batches_that_were_read_ahead_need_no_reading(partitioner, workers):
    """A consumer that is slower than the source never waits for it."""
    gate = threading.Event()
    gate.set()
    rows = Rows(lambda index: gate.wait(TIMEOUT))
    with closing(feed_of(partitioner, rows, workers)) as batches:
        next(batches)
        rows.wait_until(lambda read: set(range(8 * 5)) <= set(read))
        gate.clear()  # from here on, no row can be read
        assert [first_row(next(batches)) for _ in range(4)] == [8, 16, 24, 32]
        gate.set()


def test_workers_read_at_the_same_time(partitioner):
    together = threading.Barrier(3)

    def before_read(index):
        if index in (0, 8, 16):  # the first rows of three batches
            together.wait(TIMEOUT)

    with closing(feed_of(partitioner, Rows(before_read), 3)) as batches:
        assert [first_row(next(batches)) for _ in range(3)] == [0, 8, 16]


@pytest.mark.parametrize('workers', [0, 1])
def test_waiting_for_the_source_is_counted(partitioner, workers, monkeypatch):
    """On the fake clock, reading a row takes one second and everything else takes no time."""
    now, requested = [0.0], threading.Event()

    def perf_counter():
        requested.set()
        return now[0]

    def before_read(index):
        requested.wait(TIMEOUT)  # the clock runs only after the first batch was requested
        now[0] += 1.0

    monkeypatch.setattr(feed, 'time', types.SimpleNamespace(perf_counter=perf_counter))
    waited = [0.0]
    with closing(feed_of(partitioner, Rows(before_read), workers)) as batches:
        assert batches.waited == 0
        for _ in range(5):
            next(batches)
            waited.append(batches.waited)
    assert waited == sorted(waited)
    assert waited[1] >= 8
    assert waited[-1] <= now[0]
    if not workers:
        assert waited == [0, 8, 16, 24, 32, 40]


# Errors.


class OwnError(Exception):
    pass


@pytest.mark.parametrize('workers', WORKERS)
@pytest.mark.parametrize('error', [OwnError('row 19 is damaged'), ConfigError('damaged: line 3')])
def test_an_error_in_a_row_reaches_the_consumer_unchanged(partitioner, workers, error):
    with closing(feed_of(partitioner, Rows(failing(19, error)), workers)) as feed:
        assert [first_row(next(feed)) for _ in range(2)] == [0, 8], 'the batches before the error'
        with pytest.raises(type(error)) as caught:
            next(feed)
        assert type(caught.value) is type(error)
        assert str(caught.value) == str(error)


@pytest.mark.parametrize('workers', WORKERS)
def test_after_an_error_no_step_is_skipped(partitioner, workers):
    """A consumer that catches the error must not get the batch of a later step instead."""
    rows = Rows(failing(19, OwnError('damaged')))
    with closing(feed_of(partitioner, rows, workers)) as feed:
        next(feed), next(feed)
        for _ in range(2):
            with pytest.raises((OwnError, StopIteration)):
                next(feed)


# The end of the threads.


@pytest.mark.parametrize('workers', WORKERS)
@pytest.mark.parametrize('taken', [0, 3])
def test_close_ends_the_threads(partitioner, workers, taken):
    before = threading.enumerate()
    batches = feed_of(partitioner, Rows(), workers)
    for _ in range(taken):
        next(batches)
    threads = new_threads(before)
    assert bool(threads) == bool(workers)
    for _ in range(2):
        batches.close()
        assert_ended(threads)
        assert list(batches) == []


@pytest.mark.parametrize('workers', [1, 3])
def test_close_after_an_error_and_after_the_end(partitioner, workers):
    before = threading.enumerate()
    failed = feed_of(partitioner, Rows(failing(3, OwnError())), workers)
    with pytest.raises(OwnError):
        next(failed)
    failed.close()
    ended = feed_of(partitioner, Rows(), workers, FiniteBatches)
    assert len(list(ended)) == 3
    ended.close()
    assert_ended(new_threads(before))


PROGRAM = """
import sys
import jax
import numpy as np
jax.config.update('jax_platforms', 'cpu')
from partitioning import PjitPartitioner
from train.data import Feed, LocalBatches, Prefetch

class Rows:
    def __getitem__(self, index):
        return {'x': np.full((64, 64), index, np.float32)}

partitioner = PjitPartitioner(num_partitions=1)

def start():
    feed = Feed(LocalBatches(Rows(), 8, range(8)), partitioner, prefetch=Prefetch(workers=2))
    for _ in range(3):
        batch = next(feed)
    return feed, float(batch['x'][0, 0, 0])

closed, dropped, still_open = start(), start(), start()
if sys.argv[1] == 'fails':
    raise SystemExit(3)
closed[0].close()
print(closed[1], dropped[1], still_open[1], flush=True)
del dropped
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ('how', 'code', 'printed'), [('ends', 0, '16.0 16.0 16.0'), ('fails', 3, '')]
)
def test_a_program_with_open_feeds_exits_without_errors(how, code, printed):
    ended = subprocess.run(
        [sys.executable, '-c', PROGRAM, how], capture_output=True, text=True, timeout=600
    )
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (code, printed, '')


# Settings.


@pytest.mark.parametrize(
    ('wrong', 'message'),
    [
        ({'workers': -1}, r'Prefetch\.workers is -1.*>= 0'),
        ({'workers': 1.5}, r'Prefetch\.workers is 1\.5'),
        ({'workers': True}, r'Prefetch\.workers is True'),
        ({'workers': '2'}, r"Prefetch\.workers is '2'"),
        ({'batches': 0}, r'Prefetch\.batches is 0.*>= 1'),
        ({'device_batches': 0}, r'Prefetch\.device_batches is 0.*>= 1'),
        ({'device_batches': None}, r'Prefetch\.device_batches is None'),
    ],
)
def test_invalid_settings(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Prefetch(**wrong)
