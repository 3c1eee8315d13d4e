"""A small language model with its partitioner, data and train step, for tests of training."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from partitioning import PjitPartitioner, TrainState
from partitioning.mesh import MeshConfig
from train.models.transformer import Transformer, TransformerConfig
from train.optimizers import Optimizer
from train.steps import make_train_step

RULES = [
    ('batch', 'data'),
    ('vocab', 'model'),
    ('heads', 'model'),
    ('kv_heads', 'model'),
    ('mlp', 'model'),
    ('embed', 'model'),
    ('embed', 'data'),
    ('kv', None),
    ('length', None),
    ('layers', None),
]


def model(**changes: Any) -> Transformer:
    sizes: dict[str, Any] = {
        'vocab_size': 264,
        'num_layers': 2,
        'embed_dim': 64,
        'num_heads': 8,
        'num_kv_heads': 8,
        'head_dim': 8,
        'mlp_dim': 96,
    }
    return Transformer(TransformerConfig(**(sizes | changes)))


def partitioner(data: int, model_axis: int) -> PjitPartitioner:
    devices = jax.devices()[: data * model_axis]
    mesh = MeshConfig(axes={'data': data, 'model': model_axis}, devices=devices)
    return PjitPartitioner(mesh=mesh, logical_axis_rules=RULES)


def batch(step: int, rows: int = 8, length: int = 16) -> dict[str, np.ndarray]:
    """Returns rows with a pattern to learn: each row counts up, with its own start and stride."""
    rng = np.random.default_rng(step)
    start, stride = rng.integers(0, 256, (rows, 1)), rng.integers(1, 4, (rows, 1))
    tokens = ((start + stride * np.arange(length + 1)) % 256).astype(np.int32)
    weights = np.ones((rows, length), np.float32)
    weights[0, length // 2 :] = 0
    return {
        'decoder_input_tokens': tokens[:, :-1],
        'decoder_target_tokens': tokens[:, 1:],
        'decoder_loss_weights': weights,
    }


class Run:
    """A partitioned train step and its state."""

    def __init__(
        self,
        data: int = 4,
        model_axis: int = 2,
        *,
        net: Transformer | None = None,
        transform: Any = optax.adamw,
        learning_rate: Any = 3e-3,
        microbatches: int = 1,
        clip_norm: float | None = 1.0,
        seed: int = 0,
    ):
        self.partitioner = partitioner(data, model_axis)
        self.model = net or model()
        optimizer = Optimizer(transform=transform, learning_rate=learning_rate, clip_norm=clip_norm)
        tx = optimizer.build()

        def init(key: jax.Array) -> TrainState:
            tokens = batch(0)['decoder_input_tokens']
            return TrainState.create(self.model.init(key, tokens)['params'], tx)

        key = jax.random.key(seed)
        plan = self.partitioner.plan(init, key)
        self.specs, self.state = plan.specs, plan.init(key)
        data_spec = self.partitioner.data_partition_spec
        self.traces = 0
        step = make_train_step(
            self.model,
            optimizer,
            seed=seed,
            num_microbatches=microbatches,
            data_spec=data_spec,
        )

        def counted(state: TrainState, batch: Any) -> Any:
            self.traces += 1
            return step(state, batch)

        self.step = self.partitioner.partition(
            counted, (self.specs, data_spec), (self.specs, None), donate_argnums=0
        )

    def losses(self, steps: int) -> np.ndarray:
        losses = []
        for i in range(steps):
            self.state, metrics = self.step(self.state, batch(i))
            losses.append(float(metrics['loss']))
        return np.array(losses)
