"""The feed: batches in order, read ahead by threads, that end when they should."""

import subprocess
import sys
import threading
import time
from contextlib import closing

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning import PjitPartitioner
from train.data import Feed, FiniteBatches, LocalBatches, Prefetch
from train.errors import ConfigError

WORKERS = [0, 1, 3]


class Rows:
    """Rows that tell their number; reading one may take a while, or fail."""

    def __init__(self, seconds=0.0, broken=None, error=None):
        self.seconds, self.broken, self.error = seconds, broken, error
        self.read = []

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.read.append(index)
        if index == self.broken:
            raise self.error
        time.sleep(self.seconds)
        return {
            'tokens': np.arange(4, dtype=np.int32) + 10 * index,
            'weights': np.full(4, index % 3, np.float32),
        }


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


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


# What comes.


@pytest.mark.parametrize('workers', WORKERS)
@pytest.mark.parametrize('shape', [(8, 1), (4, 2), (1, 8)])
def test_batches_are_the_local_ones_in_order_and_sharded(workers, shape):
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
def test_it_begins_with_any_step_and_reads_none_before(partitioner, workers, first_step):
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


def test_a_step_before_the_first_is_no_step(partitioner):
    """Counted from the end, as lists do, it would be a batch that no run has come to."""
    with pytest.raises(ValueError, match='first_step'):
        feed_of(partitioner, Rows(), 0, first_step=-1).close()


@pytest.mark.parametrize('workers', [1, 3])
def test_it_reads_ahead_so_far_and_no_further(partitioner, workers):
    rows = Rows()
    before = threading.enumerate()
    with closing(feed_of(partitioner, rows, workers)):
        # 4 local batches, 2 on the devices, and those that are just passed on.
        assert wait_until(lambda: len(rows.read) >= 8 * 6), 'nothing has been asked for yet'
        time.sleep(0.3)
        assert len(rows.read) <= 8 * (4 + 2 + 2)
        assert new_threads(before)


def test_without_workers_nothing_is_read_ahead(partitioner):
    rows, before = Rows(), threading.enumerate()
    with closing(feed_of(partitioner, rows, 0)) as feed:
        assert rows.read == []
        next(feed)
        assert rows.read == list(range(8))
        assert not new_threads(before)


# How long steps wait.


@pytest.mark.parametrize('workers', [0, 1])
def test_waiting_for_a_slow_source_is_counted(partitioner, workers):
    with closing(feed_of(partitioner, Rows(seconds=0.01), workers)) as feed:
        assert feed.waited == 0
        started, waited = time.perf_counter(), [0.0]
        for _ in range(5):
            next(feed)
            waited.append(feed.waited)
        took = time.perf_counter() - started
    assert waited == sorted(waited)
    # 5 batches of 8 rows take 0.4 s, of which a first moment may have gone before the clock began.
    assert 0.25 < feed.waited <= took


def test_more_workers_wait_less_for_a_slow_source(partitioner):
    def waited(workers):
        with closing(feed_of(partitioner, Rows(seconds=0.02), workers)) as feed:
            for _ in range(8):
                next(feed)
            return feed.waited

    assert waited(3) < 0.75 * waited(1)


def test_a_slow_consumer_does_not_wait(partitioner):
    """4 ms for each batch of the source, 50 ms for each step."""
    with closing(feed_of(partitioner, Rows(seconds=0.0005), 2)) as feed:
        next(feed)
        first = feed.waited
        for _ in range(10):
            time.sleep(0.05)
            next(feed)
        assert feed.waited - first < 0.1


# What goes wrong.


class OwnError(Exception):
    pass


@pytest.mark.parametrize('workers', WORKERS)
@pytest.mark.parametrize('error', [OwnError('row 19 is rotten'), ConfigError('damaged: line 3')])
def test_an_error_in_a_row_reaches_the_consumer_as_itself(partitioner, workers, error):
    with closing(feed_of(partitioner, Rows(broken=19, error=error), workers)) as feed:
        assert [first_row(next(feed)) for _ in range(2)] == [0, 8], 'batches before it are good'
        with pytest.raises(type(error)) as caught:
            next(feed)
        assert type(caught.value) is type(error)
        assert str(caught.value) == str(error)


@pytest.mark.parametrize('workers', WORKERS)
def test_after_an_error_no_step_is_skipped(partitioner, workers):
    """Who catches it and goes on is not given the batch of the next step for this one."""
    rows = Rows(broken=19, error=OwnError('rotten'))
    with closing(feed_of(partitioner, rows, workers)) as feed:
        next(feed), next(feed)
        for _ in range(2):
            with pytest.raises((OwnError, StopIteration)):
                next(feed)


# The end of the threads.


@pytest.mark.parametrize('workers', WORKERS)
@pytest.mark.parametrize('taken', [0, 3])
def test_close_stops_the_threads(partitioner, workers, taken):
    before, rows = threading.enumerate(), Rows(seconds=0.001)
    feed = feed_of(partitioner, rows, workers)
    for _ in range(taken):
        next(feed)
    assert bool(new_threads(before)) == bool(workers)
    feed.close()
    assert wait_until(lambda: not new_threads(before)), new_threads(before)
    count = len(rows.read)
    time.sleep(0.1)
    assert len(rows.read) == count, 'nothing is read any more'
    with pytest.raises(StopIteration):
        next(feed)


@pytest.mark.parametrize('workers', WORKERS)
def test_close_twice(partitioner, workers):
    feed = feed_of(partitioner, Rows(), workers)
    next(feed)
    feed.close()
    feed.close()
    assert list(feed) == []


@pytest.mark.parametrize('workers', [1, 3])
def test_close_after_an_error_and_after_the_end(partitioner, workers):
    before = threading.enumerate()
    failed = feed_of(partitioner, Rows(broken=3, error=OwnError()), workers)
    with pytest.raises(OwnError):
        next(failed)
    failed.close()
    ended = feed_of(partitioner, Rows(), workers, FiniteBatches)
    assert len(list(ended)) == 3
    ended.close()
    assert wait_until(lambda: not new_threads(before)), new_threads(before)


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
feed = Feed(LocalBatches(Rows(), 8, range(8)), partitioner, prefetch=Prefetch(workers=2))
for _ in range(3):
    batch = next(feed)
if sys.argv[1] == 'closed':
    feed.close()
elif sys.argv[1] == 'dropped':
    del feed
elif sys.argv[1] == 'failed':
    raise SystemExit(3)
print(float(batch['x'][0, 0, 0]), flush=True)
"""


@pytest.mark.parametrize(
    ('how', 'code', 'said'),
    [('closed', 0, '16.0'), ('open', 0, '16.0'), ('dropped', 0, '16.0'), ('failed', 3, '')],
)
def test_the_end_of_the_program_is_quiet(how, code, said):
    ended = subprocess.run(
        [sys.executable, '-c', PROGRAM, how], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (code, said, '')


# Settings.


@pytest.mark.parametrize(
    ('wrong', 'message'),
    [
        ({'workers': -1}, r'Prefetch\.workers is -1.*>= 0'),
        ({'workers': 1.5}, r'Prefetch\.workers is 1\.5'),
        ({'workers': True}, r'Prefetch\.workers is True'),
        ({'workers': '2'}, r"Prefetch\.workers is '2'"),
        ({'batches': 0}, r'Prefetch\.batches is 0.*at least 1'),
        ({'device_batches': 0}, r'Prefetch\.device_batches is 0.*at least 1'),
        ({'device_batches': None}, r'Prefetch\.device_batches is None'),
    ],
)
def test_settings_that_mean_nothing(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Prefetch(**wrong)
