"""The trainer's own transformer, in a step that needs none of the trainer's other packages."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.blame_programs.building import build_step
from partitioning import TrainState
from train.models.config import TransformerConfig
from train.models.transformer import Transformer
from train.objectives.objective import compute_loss
from train.objectives.sequences import NextToken

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
    vocab_size=1024,
    num_layers=2,
    embed_dim=256,
    num_heads=8,
    num_kv_heads=8,
    head_dim=32,
    mlp_dim=512,
    remat='full',
    gated_mlp=True,
)
SHAPE = (16, 128)


def transformer() -> Any:
    """A train step of two layers with AdamW, and its arguments."""
    objective, optimizer = NextToken(model=Transformer(CONFIG)), optax.adamw(1e-3)
    tokens = jax.ShapeDtypeStruct(SHAPE, jnp.int32)
    batch = {f'decoder_{name}_tokens': tokens for name in ('input', 'target')}
    batch['decoder_loss_weights'] = jax.ShapeDtypeStruct(SHAPE, jnp.float32)

    def init(key: jax.Array) -> TrainState:
        zeros = {name: jnp.zeros(array.shape, array.dtype) for name, array in batch.items()}
        return TrainState.create(objective.init(key, zeros)['params'], optimizer)

    def step(state: TrainState, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return (
                compute_loss(objective, params, batch, None, {}).total
                / batch['decoder_loss_weights'].sum()
            )

        value, grads = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        changed = {'step': state.step + 1, 'params': params, 'opt_state': opt_state}
        return dataclasses.replace(state, **changed), value

    _, partitioned, args = build_step(MESH, RULES, init, step, batch)
    return partitioned, args
