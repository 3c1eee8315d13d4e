"""MaxText, Levanter and T5X on the tiny model: the peers of trainer_steps.py.

Each function runs in a Python that has its trainer. It trains with data parallelism over all
devices, in float32 with AdamW, without recomputation, clipping of gradients, evaluation and
checkpoints, and returns what the clock notes. Rows are handed over as arrays. Other settings are
the defaults of the trainer; what differs from the model of `plain_transformer.py` is told at its
function.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from train_step import CASES, LEARNING_RATE, LOG_EVERY, WARM_UP, Case, Clock, batches


def count_parameters(tree: Any) -> int:
    """The number of elements of all arrays with floating-point numbers."""
    return sum(
        x.size for x in jax.tree.leaves(tree) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)
    )


def run_maxtext(model: str, steps: int, started: float) -> dict[str, float]:
    """Trains with MaxText's `train.main`.

    It logs each step, which waits for the step before, and has no setting for other periods.
    """
    from maxtext.input_pipeline import input_pipeline_interface
    from maxtext.trainers.pre_train import train

    clock, case = Clock(steps, started), CASES[model]

    def rows(config: Any, mesh: Any) -> tuple[Iterator[dict[str, np.ndarray]], None]:
        return (_maxtext_batch(batch) for batch in batches(case, steps)), None

    def iterate(devices: dict[str, Any], variables: dict[str, Any], constants: Any) -> None:
        iteration(devices, variables, constants)
        if variables['step'] == 0:
            clock.results['parameters'] = count_parameters(devices['state'].model)
        clock.tick(variables['step'] + 1, devices['state'])

    iteration, train.training_loop_iteration = train.training_loop_iteration, iterate
    input_pipeline_interface.create_data_iterator = rows
    with tempfile.TemporaryDirectory() as directory:
        settings = _maxtext_settings(case, steps) | {'base_output_directory': directory}
        base = Path(train.__file__).parents[2] / 'configs/base.yml'
        train.main(['train', str(base), *(f'{name}={value}' for name, value in settings.items())])
    return clock.results


def _maxtext_settings(case: Case, steps: int) -> dict[str, Any]:
    sizes, devices = case.sizes, jax.device_count()
    return {
        'run_name': 'benchmark',
        'hardware': 'cpu',
        'skip_jax_distributed_system': True,
        'enable_checkpointing': False,
        'steps': WARM_UP + steps,
        'dataset_type': 'synthetic',  # replaced by the same rows
        'packing': False,
        'per_device_batch_size': case.batch_size / devices,
        'max_target_length': case.length,
        'ici_data_parallelism': devices,
        'ici_fsdp_parallelism': 1,
        'vocab_size': sizes.vocab_size,
        'base_emb_dim': sizes.embed_dim,
        'base_num_query_heads': sizes.num_heads,
        'base_num_kv_heads': sizes.num_heads,
        'head_dim': sizes.head_dim,
        'base_mlp_dim': sizes.mlp_dim,
        'base_num_decoder_layers': sizes.num_layers,
        'dtype': sizes.dtype,
        'attention': 'dot_product',
        'remat_policy': 'none',
        'learning_rate': LEARNING_RATE,
        'gradient_clipping_threshold': 0.0,
        'jax_cache_dir': os.environ.get('JAX_COMPILATION_CACHE_DIR', ''),
    }


def _maxtext_batch(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    inputs, targets = batch['decoder_input_tokens'], batch['decoder_target_tokens']
    positions = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int32), inputs.shape)
    arrays = {'inputs': inputs, 'targets': targets}
    for name in ('inputs', 'targets'):
        arrays[f'{name}_position'], arrays[f'{name}_segmentation'] = positions, np.ones_like(inputs)
    return arrays


def run_levanter(model: str, steps: int, started: float) -> dict[str, float]:
    """Trains a Llama with Levanter's `Trainer`.

    Its loss predicts a row's tokens from those before in the same row, so the last has no target.
    It reads the loss of each step, and logs norms of all arrays every ten steps, by its defaults.
    """
    import haliax as hax
    import jmp
    import levanter.trainer
    from levanter.checkpoint import CheckpointerConfig
    from levanter.data.dataset import ListAsyncDataset
    from levanter.data.text.datasets import CausalLmDataset, NamedLmDataset
    from levanter.optim.config import AdamConfig
    from levanter.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig
    from levanter.utils.mesh import MeshConfig

    clock, case = Clock(steps, started), CASES[model]
    model_config = _levanter_model(case)
    directory = tempfile.mkdtemp()
    config = TrainerConfig(
        id='benchmark',
        log_dir=Path(directory) / 'logs',
        tracker=NoopConfig(),
        mp=jmp.get_policy('f32'),
        mesh=MeshConfig(param_mapping={}),
        train_batch_size=case.batch_size,
        num_train_steps=WARM_UP + steps,
        checkpointer=CheckpointerConfig(str(Path(directory) / 'checkpoints'), save_interval=None),
        require_accelerator=False,
    )
    tx = AdamConfig(
        learning_rate=LEARNING_RATE, lr_schedule='constant', warmup=0, max_grad_norm=None
    ).build(config.num_train_steps)
    levanter.trainer.initialize(config)
    position, vocabulary = model_config.max_Pos, hax.Axis('vocab', case.sizes.vocab_size)
    rows = [
        {'input_ids': row}
        for batch in batches(case, steps)
        for row in batch['decoder_input_tokens']
    ]
    examples = NamedLmDataset(CausalLmDataset(ListAsyncDataset(rows), position), position)

    def loss(model: Any, example: Any, *, key: Any = None) -> Any:
        return model.compute_next_token_loss(example, key=key)

    with Trainer(config, tx, loss) as trainer:
        key = jax.random.PRNGKey(0)  # it cannot save keys with a type
        state = trainer.initial_state(
            key, model_init=lambda: model_config.build(vocabulary, key=key)
        )
        clock.results['parameters'] = count_parameters(state.model)
        trainer.add_hook(lambda info: clock.tick(info.step + 1, info.state.model), every=1)
        trainer.train(state, trainer.data_loader(examples))
    return clock.results


def _levanter_model(case: Case) -> Any:
    from levanter.layers.attention import AttentionBackend
    from levanter.models.llama import LlamaConfig

    sizes = case.sizes
    return LlamaConfig(
        max_seq_len=case.length,
        hidden_dim=sizes.embed_dim,
        intermediate_dim=sizes.mlp_dim,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_heads,
        attn_backend=AttentionBackend.VANILLA,
        gradient_checkpointing=False,
    )


def run_t5x(model: str, steps: int, started: float) -> dict[str, float]:
    """Trains T5X's decoder-only example with its `train`.

    Positions are relative biases, the activation is a gated GELU, and layers are not scanned. On
    CPUs its mesh is always one of the axis 'model', over which the batch is sharded here.
    """
    import seqio
    import tensorflow as tf
    from t5x import models, optimizers, partitioning, train, utils

    clock, case = Clock(steps, started), CASES[model]
    tx = optimizers.adamw(LEARNING_RATE)

    def rows(*_: Any) -> Any:
        arrays = [
            {name: x.astype(np.int32) for name, x in one.items()} for one in batches(case, steps)
        ]
        stacked = {name: np.stack([one[name] for one in arrays]) for name in arrays[0]}
        return tf.data.Dataset.from_tensor_slices(stacked)

    axes = ('embed', 'heads', 'kv', 'joined_kv', 'mlp', 'vocab', 'relpos_buckets', 'length')
    with tempfile.TemporaryDirectory() as directory:
        train.train(
            model=models.DecoderOnlyModel(
                _t5x_network(case), seqio.PassThroughVocabulary(case.sizes.vocab_size), tx
            ),
            train_dataset_cfg=utils.DatasetConfig(
                'rows', {'targets': case.length}, 'train', case.batch_size, False, None
            ),
            train_eval_dataset_cfg=None,
            infer_eval_dataset_cfg=None,
            checkpoint_cfg=utils.CheckpointConfig(save=None, restore=None),
            partitioner=partitioning.PjitPartitioner(
                num_partitions=1,
                logical_axis_rules=[('batch', 'model'), *((axis, None) for axis in axes)],
            ),
            trainer_cls=functools.partial(
                _timed_trainer(clock),
                learning_rate_fn=lambda step: LEARNING_RATE,
                num_microbatches=None,
            ),
            model_dir=directory,
            total_steps=WARM_UP + steps,
            eval_steps=0,
            eval_period=0,
            stats_period=LOG_EVERY,
            random_seed=0,
            summarize_config_fn=lambda *_: None,
            get_dataset_fn=rows,
            verify_matching_vocabs_fn=None,
        )
    return clock.results


def _t5x_network(case: Case) -> Any:
    from t5x.examples.decoder_only.network import DecoderWrapper, TransformerConfig

    sizes = case.sizes
    config = TransformerConfig(
        vocab_size=sizes.vocab_size,
        dtype=sizes.dtype,
        emb_dim=sizes.embed_dim,
        num_heads=sizes.num_heads,
        num_layers=sizes.num_layers,
        head_dim=sizes.head_dim,
        mlp_dim=sizes.mlp_dim,
        mlp_activations=('gelu', 'linear'),
        dropout_rate=0.0,
    )
    return DecoderWrapper(config)


def _timed_trainer(clock: Clock) -> type:
    """Returns T5X's trainer, whose steps tell the clock when they end."""
    from t5x.trainer import Trainer

    class TimedTrainer(Trainer):
        def compile_train(self, batch: Any) -> None:
            super().compile_train(batch)
            step, self._done = self._compiled_train_step, 0
            clock.results['parameters'] = count_parameters(self.train_state.params)

            def timed(state: Any, batch: Any) -> Any:
                state, metrics = step(state, batch)
                self._done += 1
                clock.tick(self._done, metrics)
                return state, metrics

            self._compiled_train_step = timed

    return TimedTrainer
