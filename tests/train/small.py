"""Small language models with their data, settings and train step, for tests of training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

from partitioning import PjitPartitioner, TrainState
from partitioning.mesh import MeshConfig
from train import HeldOut, NextToken, Optimizer, TrainConfig
from train.checkpoints import CheckpointConfig
from train.data import CausalLM, TextFiles
from train.models.transformer import Transformer, TransformerConfig
from train.objectives import Objective
from train.reporting.writers import JsonWriter
from train.running.steps import make_train_step

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


def partitioner(data: int, model_axis: int, **settings: Any) -> PjitPartitioner:
    devices = jax.devices()[: data * model_axis]
    mesh = MeshConfig(axes={'data': data, 'model': model_axis}, devices=devices)
    return PjitPartitioner(**{'mesh': mesh, 'logical_axis_rules': RULES} | settings)


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


class Steps:
    """A partitioned train step and its state."""

    def __init__(
        self,
        data: int = 4,
        model_axis: int = 2,
        *,
        net: Any = None,
        objective: Objective | None = None,
        batch: Any = batch,
        layout: str | None = None,
        tx: optax.GradientTransformation | None = None,
        microbatches: int = 1,
        seed: int = 0,
        partitioning: dict[str, Any] | None = None,
        **settings: Any,
    ):
        partitioning = partitioning or {}
        if layout is not None:
            partitioning = {'layout': layout, 'logical_axis_rules': None}
        self.partitioner, self.batch = partitioner(data, model_axis, **partitioning), batch
        self.objective = objective or NextToken(model=net or model())
        adamw = Optimizer(transform=optax.adamw, learning_rate=3e-3)
        tx = tx or adamw.build()

        def init(key: jax.Array) -> TrainState:
            return TrainState.create(self.objective.init(key, batch(0)), tx)

        key = jax.random.key(seed)
        plan = self.partitioner.plan(init, key)
        self.specs, self.state = plan.specs, plan.init(key)
        data_spec = self.partitioner.data_partition_spec
        self.traces = 0
        step = make_train_step(
            self.objective,
            tx,
            key=jax.random.key(seed),
            num_microbatches=microbatches,
            data_spec=data_spec,
            **settings,
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
            self.state, metrics = self.step(self.state, self.batch(i))
            losses.append(float(metrics['loss']))
        return np.array(losses)


# Whole runs.


class Bigram(nn.Module):
    """Predicts each token from the one before it. It has batch statistics and dropout."""

    width: int = 16

    @nn.compact
    def __call__(self, tokens_BL: jax.Array, train: bool = False, **packed: jax.Array) -> jax.Array:
        def named(init: Any, *names: str) -> Any:
            return nn.with_partitioning(init, names)

        normal = nn.initializers.normal(0.1)
        x = nn.Embed(264, self.width, embedding_init=named(normal, 'vocab', 'embed'))(tokens_BL)
        ones, zeros = named(nn.initializers.ones, 'embed'), named(nn.initializers.zeros, 'embed')
        x = nn.BatchNorm(not train, scale_init=ones, bias_init=zeros)(x)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(264, use_bias=False, kernel_init=named(normal, 'embed', 'vocab'))(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced(NextToken):
    """An objective that notes what is traced: 'init', 'train' or 'evaluate'."""

    model: Any = dataclasses.field(default_factory=Bigram)
    traces: list[str] = dataclasses.field(default_factory=list, compare=False)

    def init(self, *args: Any) -> Any:
        self.traces.append('init')
        return super().init(*args)

    def loss(self, params: Any, batch: Any, rng: Any, variables: Any) -> Any:
        self.traces.append('evaluate' if rng is None else 'train')
        return super().loss(params, batch, rng, variables)


def text_task(texts: Path, **settings: Any) -> CausalLM:
    source = TextFiles(pattern='*.txt', root=str(texts), holdout_percent=20.0)
    return CausalLM(**{'source': source} | settings)


def small_config(model_dir: Path, texts: Path, **changes: Any) -> TrainConfig:
    """The settings of a run that takes a second; 6 steps, with checkpoints at 2, 4 and 6."""
    settings: dict[str, Any] = {
        'model_dir': model_dir,
        'objective': Traced(),
        'partitioner': partitioner(4, 2),
        'optimizer': Optimizer(transform=optax.adamw, learning_rate=3e-3),
        'task': text_task(texts),
        'total_steps': 6,
        'batch_size': 8,
        'sequence_length': 16,
        'evaluators': {'eval': HeldOut(every=2)},
        'checkpoints': CheckpointConfig(period=2, when_busy='wait'),
        'writers': (JsonWriter,),
        'log_every': 1,
    }
    return TrainConfig(**settings | changes)


def records(model_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without measured times."""
    lines = (model_dir / 'metrics.jsonl').read_text().splitlines()
    return [without_times(json.loads(line)) for line in lines]


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if 'second' not in k and 'wait' not in k}
