"""What the names of T5X's modules, and of their functions and classes, stand for here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import gin
from gin import config as gin_internals

from train.gin.configurables import BY_MODULE
from train.gin.parsing import Statement, print_note
from train.gin.selectors import Aliases, is_import

# T5X's modules -> the modules here that have the same names.
MODULES = {
    'seqio': 'train.t5x.seqio',
    't5x.adafactor': 'train.t5x.adafactor',
    't5x.checkpoints': 'train.t5x.checkpoints',
    't5x.contrib.moe.adafactor_utils': 'train.t5x.adafactor',
    't5x.contrib.moe.checkpoints': 'train.t5x.checkpoints',
    't5x.contrib.moe.models': 'train.t5x.models',
    't5x.contrib.moe.partitioning': 'partitioning.partitioner.moe',
    't5x.contrib.moe.trainer': 'train.t5x.trainer',
    't5x.decoding': 'train.t5x.decoding',
    't5x.eval': 'train.t5x.eval_script',
    't5x.examples.decoder_only.network': 'train.t5x.network',
    't5x.examples.t5.network': 'train.t5x.network',
    't5x.export_lib': 'train.t5x.export_lib',
    't5x.gin_utils': 'train.t5x.gin_utils',
    't5x.infer': 'train.t5x.infer_script',
    't5x.models': 'train.t5x.models',
    't5x.optimizers': 'train.t5x.optimizers',
    't5x.partitioning': 'partitioning',
    't5x.precompile': 'train.t5x.train_script',
    't5x.state_utils': 'train.t5x.state_utils',
    't5x.train': 'train.t5x.train_script',
    't5x.trainer': 'train.t5x.trainer',
}
# T5X's names whose modules have no counterpart, or other names in it -> ours.
NAMES = {
    't5x.contrib.gpu.t5.network.T5Config': 'train.t5x.network.GpuT5Config',
    't5x.contrib.gpu.t5.network.Transformer': 'train.t5x.network.GpuTransformer',
    't5x.examples.scalable_t5.network.T5Config': 'train.t5x.network.ScalableT5Config',
    't5x.examples.scalable_t5.network.Transformer': 'train.t5x.network.ScalableTransformer',
}
# The names of `t5x.utils` come from four modules here.
UTILS = ('checkpoint_configs', 'datasets', 'run_functions', 'schedules')
for _home in (f'train.t5x.{module}' for module in UTILS):
    NAMES |= {f't5x.utils.{name}': f'{_home}.{name}' for name in BY_MODULE[_home]}

SUBMESH = 'model_parallel_submesh'
PARTITIONING = ('t5x.partitioning', 't5x.contrib.moe.partitioning')
# `__main__` is the script that T5X runs, so the name decides which of them a file means.
SCRIPTS = {
    'train': 'train.t5x.train_script',
    'precompile': 'train.t5x.train_script',
    'evaluate': 'train.t5x.eval_script',
    'infer': 'train.t5x.infer_script',
    'create_task_from_tfexample_file': 'train.t5x.infer_script',
}
# Packages whose modules T5X's files import only to register seqio tasks, and T5X's own packages.
# Nothing is imported from them, so files may import modules that have no equivalent and name
# nothing of them.
PACKAGES = ('__main__', 'dummy_wikipedia_seqio', 'seqio', 't5', 't5x')

# Parameters that the files bind although T5X no longer has them. The reason says why the setting
# changes nothing.
_ARRAYS = 'all arrays are jax.Arrays'
_LAYERS = 'this network has no scanned layers; t5x.examples.scalable_t5.network has them'
GONE: Mapping[str, Mapping[str, str]] = {
    'train.t5x.checkpoint_configs.RestoreCheckpointConfig': {'use_gda': _ARRAYS},
    'train.t5x.checkpoint_configs.SaveCheckpointConfig': {'use_gda': _ARRAYS},
    'train.t5x.train_script.train': {'use_gda': _ARRAYS, 'use_jax_array': _ARRAYS},
    'train.t5x.network.T5Config': {'scan_layers': _LAYERS, 'remat_policy': _LAYERS},
}

# The scopes of T5X's files. A run may leave some of them unused.
SCOPES = ('train', 'train_eval', 'infer_eval', 'inputs', 'outputs')


def let_the_submesh_decide(statements: Sequence[Statement]) -> None:
    """Lets a submesh decide where a file sets num_partitions too, which T5X only logs.

    Only files that import T5X's partitioner are changed. A submesh is a tile of a TPU torus. On
    another machine, its size is the number of partitions.
    """
    if not any(is_import(s) and s.parsed.module in PARTITIONING for s in statements):
        return
    for (scope, name), settings in gin_internals._CONFIG.items():
        if name.endswith('PjitPartitioner') and 'num_partitions' in settings:
            submesh, count = map(_macro_value, (settings.get(SUBMESH), settings['num_partitions']))
            if submesh and count is not None:
                import jax  # late, because names are checked before jax is imported

                on_tpu = jax.default_backend() == 'tpu'
                dropped = 'num_partitions' if on_tpu else SUBMESH
                gin.bind_parameter((scope, name, dropped), None)
                if not on_tpu:
                    gin.bind_parameter((scope, name, 'num_partitions'), math.prod(submesh))
                print_note(
                    f'num_partitions={count} has no effect, because {SUBMESH}={submesh} is set, too'
                )


def _macro_value(value: Any) -> Any:
    """The value of a macro, and any other value as it is."""
    while isinstance(value, gin_internals.ConfigurableReference):
        scope, name = value.config_key
        if name != 'gin.macro':
            break
        value = gin_internals._CONFIG.get((scope, name), {}).get('value')
    return value


ALIASES = Aliases(
    packages=PACKAGES,
    names=MODULES | NAMES,
    scripts=SCRIPTS,
    gone=GONE,
    scopes=SCOPES,
    adjust=let_the_submesh_decide,
)
