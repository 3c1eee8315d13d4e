"""Compiles the shipped models under every preset, for test_shipped_configs.py.

The compiler writes its warnings to the standard error of the process, between headings. Models are
small here and equal ones are compiled once. `compile_shipped.py full` takes 20 minutes: it keeps
the sizes of two layers, and compiles the whole step of training.
"""

import sys

import gin
import jax
import jax.numpy as jnp
import numpy as np
from gin_fixtures import load_config
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_shipped_configs import MODELS, PRESETS, pretrain

from partitioning import TrainState
from train.running.steps import make_train_step

# Each axis of a mesh has at least two devices.
PARTITIONS = {'tensor': 8, 'data_parallel': 1, 'fsdp_any_model': 1}
# Presets whose gradients are compiled like another preset's: tensor.gin with another optimizer
# state, or, for models with tied embeddings, the same layout of these with other layers.
LIKE_TENSOR, UNTIED = {'zero'}, {'data_parallel', 'tensor_sequence', 'few_kv_heads'}
UNTIED |= {'fsdp_any_model', 'pipeline', 'tensor', 'three_d'}
SHAPE = (16, 32)  # of a batch
FULL = sys.argv[1:] == ['full']


def write(heading):
    print(f'# {heading}', file=sys.stderr, flush=True)


def small_sizes(config):
    """Bindings that keep what matters for layouts: tied embeddings, and fewer heads of keys."""
    sizes = {'embed_dim': 64, 'head_dim': 16, 'mlp_dim': 128, 'num_kv_heads': 8}
    sizes['num_heads'] = 16 if config.num_heads > config.num_kv_heads else 8
    others = ["TransformerConfig.remat='full'", "TransformerConfig.dtype='float32'"]
    return ['VOCAB_SIZE=512', *(f'TransformerConfig.{k}={v}' for k, v in sizes.items()), *others]


def abstract_batch():
    tokens = jax.ShapeDtypeStruct(SHAPE, jnp.int32)
    weights = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    named = {f'decoder_{name}_tokens': tokens for name in ('input', 'target')}
    return named | {'decoder_loss_weights': weights}


def compile_step(settings):
    """Compiles the train step."""
    objective, partitioner = settings['objective'], settings['partitioner']
    tx, spec = settings['optimizer'].build(), partitioner.data_partition_spec

    def init(key, batch):
        return TrainState.create(objective.init(key, batch)['params'], tx)

    plan = partitioner.plan(init, jax.random.key(0), abstract_batch())
    step = make_train_step(objective, tx, key=jax.random.key(0), num_microbatches=1, data_spec=spec)
    step = partitioner.partition(step, (plan.specs, spec), (plan.specs, None), donate_argnums=0)
    partitioner.compile(step, plan.abstract_state, abstract_batch())


def compile_gradient(settings):
    """Compiles the gradient of the loss, in less time than the step."""
    objective, partitioner = settings['objective'], settings['partitioner']

    def gradient(params, batch):
        return jax.grad(lambda params: objective.loss(params, batch, None, {}).total)(params)

    batch, spec = abstract_batch(), partitioner.data_partition_spec
    init = lambda key, batch: objective.init(key, batch)['params']  # noqa: E731
    plan = partitioner.plan(init, jax.random.key(0), batch)
    compiled = partitioner.partition(gradient, (plan.specs, spec), plan.specs)
    compiled.lower_and_compile(plan.abstract_state, batch)


def compile_gathered_lookup():
    """Compiles a lookup in a gathered table, about which newer compilers do warn."""
    mesh = Mesh(np.reshape(jax.devices(), (4, 2)), ('data', 'model'))

    def lay_out(x, *axes):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    def loss(table, tokens):
        rows = jnp.take(lay_out(table, 'model', None), lay_out(tokens, 'data'), axis=0)
        return jnp.sum(jnp.sin(lay_out(rows, 'data', None, 'model')))

    gradient = jax.jit(lambda *x: lay_out(jax.grad(loss)(*x), 'model', 'data'))
    gradient.lower(jnp.zeros((512, 64)), jnp.zeros(SHAPE, jnp.int32)).compile()


def main():
    done = {}
    for model in MODELS:
        path = f'configs/models/{model}.gin'
        config = pretrain(path)['model'].config
        sizes = [] if FULL else small_sizes(config)
        for preset in PRESETS:
            partitions = PARTITIONS.get(preset, 2)
            if FULL and preset == 'tensor':
                partitions = int(np.gcd(8, config.num_kv_heads))
            bindings = [f'NUM_PARTITIONS={partitions}', 'TransformerConfig.num_layers=2', *sizes]
            gin.clear_config()
            settings = pretrain(path, f'configs/partitioning/{preset}.gin', bindings=bindings)
            same = done.setdefault((settings['model'].config, preset), model)
            skipped = LIKE_TENSOR | (UNTIED if config.tie_embeddings else set())
            if same == model and not FULL and preset in skipped:
                same = 'another'
            write(f'{model} {preset}' + ('' if same == model else f', like {same}'))
            if same == model:
                (compile_step if FULL else compile_gradient)(settings)
        gin.clear_config()
    load_config(['configs/runs/quickstart.gin'], ["MODEL_DIR='nowhere'"])
    write('quickstart')
    compile_step(gin.get_bindings('TrainConfig'))
    write('gathered')
    compile_gathered_lookup()
    write('end')


if __name__ == '__main__':
    main()
