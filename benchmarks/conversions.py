"""The memory and the time of converting and restoring checkpoints, each in a process of its own.

  python benchmarks/conversions.py [--gib 1] [--layers 8] [--folder DIR]

A checkpoint of Orbax is converted from one format to the next, and the last one is compared with
it. One array has half of its bytes. A Llama with random weights in bfloat16 (8 layers are 1.2 GiB)
is restored in float32 onto 8 virtual CPU devices, in three layouts, and converted to a checkpoint
of this package, and back. Peak memory is above what the process needed before, next to the size of
its shards for a restore, and of the largest array for a conversion. The command fails if a
conversion takes 2 GiB more than that.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import flatten_dict

from benchmarks.campaigns import call_in_new_process, peak_memory, reset_peak
from partitioning import PjitPartitioner, TrainState, standard_logical_axis_rules
from train.checkpoints import RestoreConfig, find_checkpoint, open_restored
from train.checkpoints.arrays.stored import StoredArray
from train.checkpoints.formats.opening import choose_place, open_checkpoint
from train.checkpoints.huggingface.architectures import model_config
from train.checkpoints.huggingface.config_json import ConfigJson
from train.checkpoints.huggingface.folders import load_huggingface_model
from train.checkpoints.huggingface.writer import plan_model
from train.checkpoints.offline.converting import plan_conversion, write
from train.cli import main as meshwright
from train.models.parameters import list_parameters
from train.objectives import NextToken

GIB = 2**30
MEMORY_ABOVE_LARGEST = 2 * GIB
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
FORMATS = ('meshwright', 't5x', 'safetensors', 'meshwright', 'orbax')
TO_OURS, TO_THEIRS = 'convert to meshwright', 'convert to huggingface'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument(
        '--gib', type=float, default=1.0, help='the size of the checkpoint of Orbax'
    )
    parser.add_argument('--layers', type=int, default=8, help='the layers of the Llama')
    parser.add_argument('--folder', type=Path, help='a folder on the disk to measure')
    options, failed = parser.parse_args(), False
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        largest = save_large(folder / 'source', options.gib)
        write_random_model(folder / 'model', options.layers)
        print(f'{"":28}  seconds  peak GiB    of what')
        for title, command in list_commands(folder):
            found = call_in_new_process(run_command, *command)
            found |= {'size': largest, 'what': 'the largest array'}
            failed |= print_row(title, found, limit=largest + MEMORY_ABOVE_LARGEST)
        for title in (*LAYOUTS, TO_OURS, TO_THEIRS):
            print_row(title, call_in_new_process(measure, title, name))
    return int(failed)


def print_row(title: str, found: Mapping[str, Any], limit: float = math.inf) -> bool:
    """Prints a measurement; returns whether it needed more memory than the limit."""
    print(
        f'{title:28}  {found["seconds"]:7.2f}  {found["peak"] / GIB:8.2f}  '
        f'{found["peak"] / found["size"]:5.2f} x {found["size"] / GIB:.2f} GiB: {found["what"]}',
        flush=True,
    )
    return found['peak'] > limit


def list_commands(folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The arguments of `meshwright checkpoint` that convert a checkpoint through all formats."""
    source = folder / 'source'
    for format in FORMATS:
        to = folder / f'{source.name}_to_{format}'
        yield f'to {format}', ('convert', str(source), str(to), f'--to={format}')
        source = to
    yield 'diff', ('diff', str(folder / 'source'), str(source))
    yield 'inspect', ('inspect', str(folder / 'source'))


def save_large(path: Path, gib: float) -> int:
    """Saves a checkpoint of Orbax, and returns the size of the array that has half of its bytes."""
    rng, rows = np.random.default_rng(0), int(gib * 2**14)
    tree = {f'layer_{i}': rng.standard_normal((rows // 16, 1024), np.float32) for i in range(64)}
    tree['largest'] = rng.standard_normal((rows // 2, 2**14), np.float32)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {'params': tree, 'step': np.int32(7)})
    return tree['largest'].nbytes


def run_command(*arguments: str) -> dict[str, float]:
    """Runs `meshwright checkpoint`, and measures the whole process."""
    start = time.perf_counter()
    if status := meshwright(['checkpoint', *arguments]):
        sys.exit(status)
    return {'seconds': time.perf_counter() - start, 'peak': peak_memory()}


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
    jax.config.update('jax_platforms', 'cpu')
    sys.exit(main())
