"""The trainer's own transformer, objective and train step, under rules for 'data' and 'model'."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.blame_programs.building import build_step
from partitioning import TrainState
from train.models.config import TransformerConfig
from train.models.transformer import Transformer
from train.objectives.token_loss import NextToken

MESH = {'data': 4, 'model': 2}
RULES = [
    ('batch', 'data'),
    ('vocab', 'model'),
    ('mlp', 'model'),
    ('heads', 'model'),
    ('kv', None),
    ('embed', 'data'),
    ('length', None),
    ('layers', None),
]
CONFIG = TransformerConfig(
    vocab_size=8192,
    num_layers=4,
    embed_dim=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    mlp_dim=2048,
    remat='full',
    gated_mlp=True,
)
BATCH, LENGTH = 32, 256


def build(rules, config=CONFIG, shape=(BATCH, LENGTH), make_step=None):
    """The partitioner, the partitioned step, and its arguments.

    `make_step` makes a step of an objective and an optimizer, by default the trainer's own.
    """
    objective, tx = NextToken(model=Transformer(config)), optax.adamw(1e-3)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32)
    batch = {f'decoder_{name}_tokens': tokens for name in ('input', 'target')}
    batch['decoder_loss_weights'] = weights

    def init(key):
        zeros = {name: jnp.zeros(array.shape, array.dtype) for name, array in batch.items()}
        return TrainState.create(objective.init(key, zeros)['params'], tx)

    step = (make_step or _own_step)(objective, tx)
    return build_step(MESH, rules, init, step, batch)


def _own_step(objective, tx):
    from train.running.steps import make_train_step  # needs all packages of the trainer

    spec = jax.sharding.PartitionSpec('data')
    return make_train_step(objective, tx, key=jax.random.key(0), num_microbatches=1, data_spec=spec)
