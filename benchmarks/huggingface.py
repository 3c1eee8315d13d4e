"""The memory and the time of restoring and converting a model of Hugging Face.

  python benchmarks/huggingface.py [--layers 8] [--folder DIR]

It writes a Llama with random weights in bfloat16 (8 layers are 1.2 GiB, or 2.4 GiB in float32).
Then each of these has its own process: restoring the parameters in float32 onto 8 virtual CPU
devices, in two layouts, and converting the model to a checkpoint of this package, and back. Peak
memory is above what the process needed before; for a restore it is compared with the size of the
process's shards, and for a conversion with the largest array.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
from etils import epath
from flax.traverse_util import flatten_dict

from benchmarks.campaigns import call_command, peak_memory, reset_peak
from partitioning import PjitPartitioner, TrainState, standard_logical_axis_rules
from train.checkpoints import RestoreConfig, find_checkpoint, open_restored
from train.checkpoints.arrays.stored import StoredArray
from train.checkpoints.formats.opening import choose_place, open_checkpoint
from train.checkpoints.huggingface.architectures import model_config
from train.checkpoints.huggingface.config_json import ConfigJson
from train.checkpoints.huggingface.folders import load_huggingface_model
from train.checkpoints.huggingface.writer import plan_model
from train.checkpoints.offline.converting import plan_conversion, write
from train.models.parameters import list_parameters
from train.objectives import NextToken

GIB = 2**30
NUM_DEVICES = 8
CONFIG = {
    'model_type': 'llama',
    'vocab_size': 32_000,
    'hidden_size': 2048,
    'intermediate_size': 8192,
    'num_attention_heads': 16,
    'num_key_value_heads': 8,
    'tie_word_embeddings': False,
}
# The layouts of restores: the size of the model axis, and whether 'embed' is sharded over data.
LAYOUTS = {
    'restore, model 8': (8, False),
    'restore, data 4 x model 2': (2, True),
    'restore, data 8': (1, True),
}
TO_OURS, TO_THEIRS = 'convert to meshwright', 'convert to huggingface'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--layers', type=int, default=8)
    parser.add_argument('--folder', type=Path, help='a folder on the disk to measure')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        write_random_model(Path(folder) / 'model', options.layers)
        print(f'{"":28}  seconds  peak GiB    of what')
        for name in (*LAYOUTS, TO_OURS, TO_THEIRS):
            command = call_command(measure, name, folder)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
            found = json.loads(done.stdout.splitlines()[-1])
            ratio = found['peak'] / found['size']
            print(
                f'{name:28}  {found["seconds"]:7.2f}  {found["peak"] / GIB:8.2f}  '
                f'{ratio:5.2f} x {found["size"] / GIB:.2f} GiB: {found["what"]}'
            )
    return 0


def write_random_model(folder: Path, layers: int) -> None:
    """Writes a model whose arrays are all random, so that nothing can be compressed."""
    config = ConfigJson({**CONFIG, 'num_hidden_layers': layers}, 'config.json')
    model = model_config(config, scan_layers=False)
    random, dtype = np.random.default_rng(0), np.dtype(ml_dtypes.bfloat16)

    def draw(shape: tuple[int, ...]) -> StoredArray:
        def start(index: Any) -> Future[np.ndarray]:
            future: Future[np.ndarray] = Future()
            future.set_result(random.standard_normal(shape, np.float32).astype(dtype))
            return future

        return StoredArray(shape=shape, dtype=dtype, start=start)

    table = flatten_dict(list_parameters(model), sep='/')
    arrays = {f'params/{name}': draw(parameter.shape) for name, parameter in table.items()}
    plan_model(arrays, model=model).write(epath.Path(folder))


def measure(name: str, folder: str) -> dict[str, Any]:
    """Does one thing and measures it, in a process of its own."""
    prepare = prepare_restore if name in LAYOUTS else prepare_conversion
    run, size, what = prepare(name, Path(folder))
    before, start = reset_peak(), time.perf_counter()
    kept = run()
    seconds = time.perf_counter() - start
    found = {'seconds': seconds, 'peak': peak_memory() - before, 'size': size, 'what': what}
    del kept
    return found


def prepare_restore(name: str, folder: Path) -> tuple[Callable[[], Any], int, str]:
    """Returns what restores the parameters, and the size of the shards of this process."""
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', NUM_DEVICES)
    objective = NextToken(model=load_huggingface_model(str(folder / 'model')))
    tokens = jax.numpy.zeros((8, 8), 'int32')
    batch = {'decoder_input_tokens': tokens, 'decoder_target_tokens': tokens}
    batch['decoder_loss_weights'] = tokens.astype('float32')
    size, shards_embed = LAYOUTS[name]
    rules = standard_logical_axis_rules(parameter_partitioning_dims=1 + shards_embed)
    rules = [*rules, ('kv_heads', 'model')]
    partitioner = PjitPartitioner(num_partitions=size, logical_axis_rules=rules)

    def init(key: jax.Array) -> TrainState:
        return TrainState.create(objective.init(key, batch), optax.identity())

    state = partitioner.plan(init, jax.random.key(0)).abstract_state
    source, step = find_checkpoint(RestoreConfig(path=str(folder / 'model')))
    reader = open_restored(RestoreConfig(path=str(source)), source)
    shards = sum(
        NUM_DEVICES * x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(state)
    )
    return lambda: jax.block_until_ready(reader.restore(step, state)), shards, 'shards'


def prepare_conversion(name: str, folder: Path) -> tuple[Callable[[], Any], int, str]:
    """Returns what converts the model or the checkpoint, and the size of the largest array."""
    names = ('model', 'ours') if name == TO_OURS else ('ours', 'theirs')
    source, target = (epath.Path(folder / each) for each in names)
    conversion = plan_conversion(
        open_checkpoint(choose_place(source, None)[0]),
        target,
        'meshwright' if name == TO_OURS else 'huggingface',
        like=None if name == TO_OURS else epath.Path(folder / 'model'),
    )
    largest = max(array.nbytes for array in conversion.arrays.values())
    return lambda: write(conversion, lambda size: None), largest, 'the largest array'


if __name__ == '__main__':
    sys.exit(main())
