"""The trainer's own transformer, in a step that needs none of the trainer's other packages."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from benchmarks.blame_programs.our_transformer import CONFIG, RULES, build
from partitioning import TrainState
from train.objectives.objective import compute_loss

SIZES = {'vocab_size': 1024, 'num_layers': 2, 'embed_dim': 256, 'head_dim': 32, 'mlp_dim': 512}


def transformer() -> Any:
    """A train step of two layers with AdamW, and its arguments."""
    config = dataclasses.replace(CONFIG, **SIZES)
    _, partitioned, args = build(RULES, config, (16, 128), make_step)
    return partitioned, args


def make_step(objective: Any, optimizer: optax.GradientTransformation) -> Any:
    """A step as a reader of optax's pages writes it."""

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

    return step
