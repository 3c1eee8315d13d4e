"""What `fuzz.py` damages: files that our own writers have written, and how each kind is read.

A checksum would hide everything behind it, so files that have one are read twice: as they are, and
sealed again.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import re
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
import numpy as np
import sentencepiece
import zstandard
from array_record.python import array_record_module
from etils import epath
from tensorboardX.record_writer import masked_crc32c

from benchmarks.damage import save_two_steps
from benchmarks.hostile_input import write_parquet
from meshwright.checking import settings as checked
from meshwright.dumps.drawing import dump_table
from meshwright.dumps.reading import read_dump
from meshwright.records.files import read_golden
from partitioning import PjitPartitioner, Plan
from partitioning.compat.autodist import AllReduce, Strategy
from train import data
from train.checkpoints.formats.opening import choose_place, find_place, open_checkpoint
from train.checkpoints.formats.t5x_writer import LegacyWriter
from train.checkpoints.huggingface.config_json import read_config
from train.checkpoints.huggingface.folders import load_huggingface_tokenizer
from train.checkpoints.offline.converting import plan_conversion, write
from train.checkpoints.steps import manifest, record as step_record
from train.data import record as data_record
from train.data.text.token_index import _checksum as checksum
from train.evaluators.files import PartFiles
from train.exporting import export_program, load_program
from train.gin.load import find_config, find_entry, load_config
from train.planning.huggingface import counted, models
from train.processes import claims, door, wire
from train.reporting.writers import JsonWriter
from train.running.changes import describe_changes, read_settings
from train.t5x.modules import ALIASES

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = (
    64 << 20
)  # Arrays beyond are not read: a run compares their shapes with its plan first.
ENDINGS = {
    '.jsonl': data.JsonLines,
    '.tsv': data.TsvFiles,
    '.array_record': data.ArrayRecords,
    '.parquet': data.ParquetFiles,
    '.tfrecord': data.TfRecords,
}
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    'gz': gzip.compress,
    'bz2': bz2.compress,
    'xz': lzma.compress,
    'zst': zstandard.compress,
}
TEXTS = [f'A text with number {i}, which is not long.\n' for i in range(8)]


class Reader(NamedTuple):
    """A kind of files: what writes good ones into a folder, and reads the folder with a bad one."""

    write: Callable[[Path], Any]
    read: Callable[[Path, Path], Any]


def copy_files(*patterns: str) -> Callable[[Path], None]:
    """Returns what copies files of this repository, which our writers have written."""

    def copy(folder: Path) -> None:
        for pattern in patterns:
            for file in sorted(ROOT.glob(pattern)):
                shutil.copy(file, folder / f'{file.parent.name}-{file.name}')

    return copy


def read_gin(folder: Path, changed: Path) -> None:
    gin.clear_config()
    load_config([str(changed)], aliases=ALIASES)
    find_entry()


def write_settings(folder: Path) -> None:
    """A whole run in one file, so that any of its settings may change."""
    text = with_includes(ROOT / 'configs/runs/quickstart.gin')
    (folder / 'run.gin').write_text(f"MODEL_DIR = 'm'\n{text}")


def with_includes(path: Path) -> str:
    """A gin file with the files that it includes in their places, and without comments."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith('#')]
    return '\n'.join(
        with_includes(ROOT / line.split("'")[1]) if line.startswith('include') else line
        for line in lines
    )


def read_run_settings(folder: Path, changed: Path) -> None:
    """Makes all settings of a run, without starting it."""
    gin.clear_config()
    load_config([str(changed)], aliases=ALIASES)
    find_config()


# Plans, records and declarations.


def write_plans(folder: Path) -> None:
    copy_files('benchmarks/goldens/*.json', 'pyproject.toml')(folder)
    state = {'layer': {'kernel': jnp.zeros((8, 16)), 'bias': jnp.zeros(16)}}
    partitioner = PjitPartitioner(mesh=jax.make_mesh((2,), ('data',)), layout='fsdp')
    partitioner.plan(state).save(folder / 'plan.json')
    AllReduce().build(state, ['a', 'b']).serialize(folder / 'strategy.json')


def read_plans(folder: Path, changed: Path) -> None:
    if changed.suffix == '.toml':
        shutil.copy(changed, folder / 'pyproject.toml')
        checked.read_settings(folder)
    elif changed.name == 'plan.json':
        str(Plan.load(changed))
    elif changed.name == 'strategy.json':
        Strategy.deserialize(changed).report()
    else:
        read_golden(changed, 'run it again')


# Checkpoints.


def write_others(folder: Path) -> None:
    """The step of a run as checkpoints of T5X and Orbax."""
    source = open_checkpoint(choose_place(epath.Path(save_two_steps(folder, (4, 8)).newest))[0])
    for format in ('t5x', 'orbax'):
        write(plan_conversion(source, epath.Path(folder / format), format), lambda size: None)
    shutil.rmtree(folder / 'run')


def write_legacy(folder: Path) -> None:
    writer = LegacyWriter(epath.Path(folder), 'checkpoint_')
    kernel = jnp.arange(32.0).reshape(4, 8)
    arrays = {'target': {'kernel': kernel, 'scale': jnp.ones((1,), jnp.bfloat16)}}
    moments = {'kernel': {'v_row': jnp.ones(4), 'v_col': jnp.ones(8)}}
    state = {'step': jnp.int32(2), 'param_states': moments}
    writer.start(2, arrays | {'state': state}, {}, lambda name, array: None)
    writer.wait()
    writer.close()


def write_safetensors(folder: Path) -> None:
    shutil.copytree(ROOT / 'tests/train/reference_models/gpt2', folder, dirs_exist_ok=True)
    (folder / 'logits.npz').unlink()


def read_checkpoint(folder: Path, changed: Path) -> None:
    """Opens the checkpoint that a file belongs to, and reads its small arrays."""
    path = next(p for p in changed.parents if p == folder or find_place(epath.Path(p)) is not None)
    opened = open_checkpoint(choose_place(epath.Path(path))[0])
    opened.step()
    for array in opened.arrays.values():
        if array.size * array.dtype.itemsize <= MOST_BYTES:
            array.read()


def write_run(folder: Path) -> None:
    """A run of two steps, with all files that the next start reads."""
    saved = save_two_steps(folder, shape=(4, 8))
    run = saved.newest.parents[1]
    JsonWriter(epath.Path(run), 0).write(1, {'loss': 1.0})
    owner, kept = claims.this_process(), claims.ClaimedFolder(epath.Path(run))
    kept.write(claims.Claim(token='a', owner=owner, since=1.0, holds=True, place=kept.place))
    (run / 'settings.json').write_text(json.dumps({'TrainConfig.batch_size': '2'}))
    (run / 'config.gin').write_text('TrainConfig.batch_size = 2\n')
    PartFiles(epath.Path(run / 'all'), epath.Path(run / 'parts')).begin({'a': 1})


def read_run(folder: Path, changed: Path) -> None:
    run, kept = epath.Path(folder / 'run'), claims.ClaimedFolder(epath.Path(folder / 'run'))
    with sealed_again(changed, manifest._with_checksum):
        if changed.name.startswith('in-use'):
            for claim in kept.read():
                claims.refusal('MODEL_DIR', claim, kept, 'alive')
        describe_changes({'a': '1'}, read_settings(run, run / 'config.gin'))
        data_record.recorded_setting(run, 'batch_size')
        data_record.recorded_start(run)
        PartFiles(run / 'all', run / 'parts').begin({'a': 1})
        JsonWriter(run, 1).close()
        step = next((p for p in changed.parents if p.name in ('1', '2')), None)
        if step is not None:
            manifest.read_manifest(epath.Path(step))
            step_record.read_record(epath.Path(step))
            read_checkpoint(folder, changed)


@contextlib.contextmanager
def sealed_again(path: Path, seal: Callable[[dict[str, Any]], str]) -> Iterator[None]:
    """Gives a manifest the checksum of its content, if it is JSON."""
    if path.name in ('manifest.json', 'index.json'):
        with contextlib.suppress(ValueError, RecursionError, TypeError, AttributeError):
            held = json.loads(path.read_bytes())
            held.pop('checksum', None)
            path.write_text(seal(held))
    yield


# Hugging Face models.


def read_config_json(folder: Path, changed: Path) -> None:
    shutil.copy(changed, folder / 'config.json')
    config = read_config(epath.Path(folder))
    counted.count_model(config)
    models.read_model(config)


def write_tokenizers(folder: Path) -> None:
    copy_files('tests/train/reference_models/llama3_1/tokenizer.json')(folder)
    (folder / 'texts').write_text(''.join(TEXTS))
    sentencepiece.SentencePieceTrainer.train(
        input=folder / 'texts',
        model_prefix=folder / 'spiece',
        vocab_size=33,
        minloglevel=9,
        normalization_rule_name='identity',
    )
    for name in ('texts', 'spiece.vocab'):
        (folder / name).unlink()


def read_tokenizer(folder: Path, changed: Path) -> None:
    place = folder / 'model'
    place.mkdir(exist_ok=True)
    name = 'tokenizer.json' if changed.suffix == '.json' else 'spiece.model'
    shutil.copy(changed, place / name)
    try:
        tokenizer = load_huggingface_tokenizer(str(place))
        assert tokenizer.num_tokens > 0 and tokenizer.separator >= 0
        [tokens] = tokenizer.encode(['a'], [b'A text, and more: 12 \xc3\xa4.'])
        tokenizer.decode(tokens)
    finally:
        (place / name).unlink()


# Data.


def write_texts(folder: Path) -> None:
    (folder / 'plain.txt').write_text(TEXTS[0])
    (folder / 'table.tsv').write_text(''.join(f'{i}\t{text}' for i, text in enumerate(TEXTS)))
    lines = ''.join(json.dumps({'text': text}) + '\n' for text in TEXTS).encode()
    (folder / 'lines.jsonl').write_bytes(lines)
    for name, compress in COMPRESSIONS.items():
        (folder / f'lines.jsonl.{name}').write_bytes(compress(lines))


def write_records(folder: Path) -> None:
    writer = array_record_module.ArrayRecordWriter(str(folder / 'a.array_record'), 'group_size:2')
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    write_parquet(folder / 'a.parquet', TEXTS[0].encode(), 20)
    (folder / 'a.example').write_bytes(example(TEXTS[0].encode()))
    (folder / 'a.tfrecord').write_bytes(framed(example(TEXTS[0].encode())))


def example(text: bytes) -> bytes:
    """A serialized tf.train.Example whose feature 'text' has this text of less than 100 bytes."""
    held = text
    for before in (b'', b'', b'\x0a\x04text', b'', b''):
        tag = b'\x12' if before else b'\x0a'
        held = before + tag + bytes([len(held)]) + held
    return held


def framed(record: bytes) -> bytes:
    """A record of a TFRecord file, with its checksums."""
    size = struct.pack('<Q', len(record))
    sums = [struct.pack('<I', masked_crc32c(part)) for part in (size, record)]
    return size + sums[0] + record + sums[1]


def read_data(folder: Path, changed: Path) -> None:
    """Builds an index of one file, with the source that its name says."""
    path, cache = changed, folder / 'cache'
    if changed.suffix == '.example':
        path = folder / 'again.tfrecord'
        path.write_bytes(framed(changed.read_bytes()))
    ending = next((e for e in ENDINGS if e in path.name), '')
    kind = ENDINGS.get(ending, data.TextFiles)
    try:
        source = kind(pattern=path.name, root=str(path.parent), holdout_percent=0)
        data.open_index(source, data.ByteTokenizer(), str(cache), lambda *x: None)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def open_own_index(folder: Path) -> Any:
    source = data.Records(records=TEXTS, holdout_percent=20.0, cache_key='own')
    return data.open_index(source, data.ByteTokenizer(), str(folder), lambda *x: None)


def read_index(folder: Path, changed: Path) -> None:
    with sealed_again(changed, lambda held: json.dumps({'checksum': checksum(held), **held})):
        index = open_own_index(folder)
        for part in (index.training, index.held_out):
            for row in range(min(part.num_documents, 100)):
                part.document(row)


# Programs, and messages of other processes.


def write_program(folder: Path) -> None:
    def affine(params: Any, batch: Any) -> Any:
        return {'y': batch['x'] @ params['kernel']}

    row = {'x': jax.ShapeDtypeStruct((3,), np.float32)}
    export_program(affine, {'kernel': jnp.ones((3, 2))}, row, folder / 'one', platforms=('cpu',))


def write_dumps(folder: Path) -> None:
    copy_files('tests/meshwright/compiled_programs/*.txt')(folder)
    mesh = jax.make_mesh((2,), ('data',))
    rows = jax.NamedSharding(mesh, jax.P('data'))
    step = jax.jit(lambda w, x: jnp.tanh(x @ w).sum(), in_shardings=(rows, rows))
    shapes = (jax.ShapeDtypeStruct((8, 4), np.float32), jax.ShapeDtypeStruct((6, 8), np.float32))
    lowered = step.lower(*shapes)
    (folder / 'lowered.mlir').write_text(lowered.as_text(debug_info=True))
    (folder / 'lowered.txt').write_text(lowered.as_text('hlo'))
    options = {'xla_dump_to': str(folder), 'xla_dump_hlo_as_text': True}
    lowered.compile(compiler_options=options)
    keep = re.compile(r'(after_optimizations|buffer-assignment|live-range|module_\d+.*\.mlir)')
    for file in folder.glob('module_*'):
        if not keep.search(file.name):
            file.unlink()


def read_dumps(folder: Path, changed: Path) -> None:
    path = folder if 'buffer' in changed.name or 'live' in changed.name else changed
    dump_table(read_dump(path))


def write_messages(folder: Path) -> None:
    hello = {'index': 1, 'count': 2, 'host': 'a', 'versions': {}, 'addresses': [], 'ports': [1]}
    for kind in ({'kind': 'hello', **hello}, {'kind': 'beat', 'place': 'a', 'quiet': 1.0}):
        (folder / kind['kind']).write_text(json.dumps(kind) + '\n')
    (folder / 'greeting').write_bytes(wire.greeting(bytes(16)))


def read_messages(folder: Path, changed: Path) -> None:
    """What anyone can send before the secret is checked, and lines behind it."""
    line = changed.read_bytes()
    wire.read_greeting(line.partition(b'\n')[0])
    ours, theirs = socket.socketpair()
    connection = wire.Connection(ours)
    try:
        theirs.sendall(line[:60_000])
        theirs.shutdown(socket.SHUT_WR)
        while (message := connection.receive(1.0)) is not None:
            door._is_whole(message)
    finally:
        connection.close()
        theirs.close()


READERS = {
    'gin': Reader(copy_files('configs/*/*.gin'), read_gin),
    'settings': Reader(write_settings, read_run_settings),
    'config.json': Reader(
        copy_files('tests/train/reference_models/*/config.json'), read_config_json
    ),
    'safetensors': Reader(write_safetensors, read_checkpoint),
    'orbax': Reader(write_others, read_checkpoint),
    't5x': Reader(write_legacy, read_checkpoint),
    'tokenizers': Reader(write_tokenizers, read_tokenizer),
    'texts': Reader(write_texts, read_data),
    'records': Reader(write_records, read_data),
    'plans': Reader(write_plans, read_plans),
    'dumps': Reader(write_dumps, read_dumps),
    'run': Reader(write_run, read_run),
    'index': Reader(open_own_index, read_index),
    'program': Reader(write_program, lambda folder, changed: load_program(folder / 'one')),
    'messages': Reader(write_messages, read_messages),
}
