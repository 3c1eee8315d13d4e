"""What runs show and do not show: replication, points that are not curves, and long work."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from etils import epath

from partitioning import PjitPartitioner
from train.models.decoding import generate
from train.models.transformer import Transformer, TransformerConfig
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


def test_the_host_is_told_how_many_tokens_there_are():
    sizes = {'num_layers': 1, 'embed_dim': 16, 'num_heads': 2, 'num_kv_heads': 2, 'head_dim': 8}
    model = Transformer(TransformerConfig(vocab_size=64, mlp_dim=16, **sizes))
    prompts, lengths, told = jnp.ones((2, 3), jnp.int32), jnp.array([3, 2]), []
    params = model.init(jax.random.key(0), prompts)['params']

    def tokens(**settings):
        key = jax.random.key(1)
        return generate(model, params, prompts, lengths, key, new_tokens=130, **settings)[0]

    shown = jax.jit(lambda: tokens(on_tokens=lambda number: told.append(int(number))))()
    jax.effects_barrier()
    assert told == [0, 64, 128]
    assert (shown == jax.jit(tokens)()).all()
