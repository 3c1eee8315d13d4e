"""What a run does not show: replication that does not matter, and points that are not curves."""

from types import SimpleNamespace

import jax
from etils import epath

from partitioning import PjitPartitioner
from train.reporting.reports import describe_audit
from train.reporting.writers import TensorBoardWriter


def test_replication_below_one_percent_of_the_memory_is_not_mentioned():
    state = {'params': {'w': jax.ShapeDtypeStruct((1000,), 'float32')}}
    audit = PjitPartitioner(layout='data_parallel').plan(state).audit()
    # A device holds 4,000 bytes, of which an even split would give it 500.
    for memory, lines in ((350_001, 1), (349_999, 2), (None, 2)):
        found = list(describe_audit(audit, memory))
        assert len(found) == lines
        assert ('above an even split' in found[0]) == (lines == 2)


def test_tensorboard_gets_curves_only(tmp_path):
    writer, written = TensorBoardWriter(epath.Path(tmp_path), 0), []
    writer.__dict__['_events'] = SimpleNamespace(
        write_scalars=lambda step, scalars: written.append((step, dict(scalars)))
    )
    start = {'start/seconds_to_first_step': 3.0, 'train/seconds_left': 9.0}
    writer.write(1, {'train/loss': 2.0, **start})
    writer.write(2, start)
    assert written == [(1, {'train/loss': 2.0})]
