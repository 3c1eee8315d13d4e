"""Damages the files of a saved step, and counts how often a run notices.

  python benchmarks/damage.py [--bits 64] [--folder DIR]
  python benchmarks/damage.py --random 1000 [--folder DIR]

A run saves step 1 and step 2. Then each file of step 2 is truncated, emptied and removed, and
random bits of it are flipped, one at a time. With `--random`, each trial is a random change of one
of the `KINDS`, such as a file of another step, of another run, or a link. After each damage, the
start of a run looks for its newest checkpoint and restores it, as `train` does. It should name what
is wrong and restore step 1, bit for bit, or restore step 2 if its arrays are right. The results are
written to DIR as they come, and the command continues where it stopped.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.campaigns import run_trials
from partitioning import PjitPartitioner
from partitioning.mesh import MeshConfig
from train import TrainConfig, train
from train.checkpoints import CheckpointConfig, open_checkpoints
from train.checkpoints.steps.manifest import _with_checksum
from train.data import CausalLM, Records
from train.objectives import Loss, Objective
from train.reporting.console import RunConsole
from train.running.run import Run, prepare
from train.running.start import find_start, restore_state

SHAPE = (512, 1024)
OUTCOMES = {
    'previous step': 'the file is named, and the step before is restored',
    'not named': 'the step before is restored, but no message names the file',
    'error': 'the run ends with an error',
    'unnoticed': 'the damaged step is restored, and its arrays are right',
    'silently wrong': 'the damaged step is restored, and its arrays are wrong',
}


class Tables(Objective):
    """Two arrays, with normal numbers in float32 and in bfloat16."""

    def __init__(self, shape: tuple[int, ...] = SHAPE):
        self.shape = shape

    def init(self, key: jax.Array, batch: Any) -> Any:
        keys, dtypes = jax.random.split(key), {'single': jnp.float32, 'half': jnp.bfloat16}
        return {
            'params': {
                name: jax.random.normal(one, self.shape, dtype)
                for one, (name, dtype) in zip(keys, dtypes.items(), strict=True)
            }
        }

    def loss(self, params: Any, batch: Any, rng: Any, variables: Any) -> Loss:
        return Loss(sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(params)))


class Lines(RunConsole):
    """A console that keeps what a run says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = list[str]()

    def say(self, message: str, style: str | None = None) -> None:
        self.lines.append(message)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A run with two saved steps, and its arrays after each of them."""

    run: Run
    states: Mapping[int, list[np.ndarray]]

    @property
    def newest(self) -> Path:
        """The folder of step 2."""
        return Path(self.run.directory) / 'checkpoints/2'


def save_two_steps(folder: Path, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Saved:
    """Trains a run of two steps on two devices, and saves both."""
    states = dict[int, list[np.ndarray]]()

    def keep(state: Any, step: int, metrics: Any) -> None:
        states[step] = [np.array(x) for x in jax.tree.leaves(state)]

    config = TrainConfig(
        model_dir=str(folder / 'run'),
        objective=Tables(shape),
        partitioner=PjitPartitioner(
            mesh=MeshConfig(axes={'data': 2}, devices=jax.devices()[:2]), layout='fsdp'
        ),
        optimizer=optax.adam(1e-2),
        task=CausalLM(source=Records(records=['some text'] * 40, holdout_percent=20.0)),
        total_steps=2,
        batch_size=2,
        sequence_length=8,
        checkpoints=CheckpointConfig(period=1, when_busy='wait'),
        hooks=[keep],
        writers=(),
        seed=seed,
    )
    with contextlib.redirect_stdout(sys.stderr):
        train(config)
        return Saved(prepare(config), states)


def damages_of(
    content: bytes, bits: int, rng: np.random.Generator
) -> Iterator[tuple[str, bytes | None]]:
    """Every kind of damage of a file, with what is left of it: None if it is removed."""
    if content:
        yield 'truncated', content[: len(content) // 2]
        yield 'emptied', b''
        for bit in rng.choice(8 * len(content), min(bits, 8 * len(content)), replace=False):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << int(bit) % 8
            yield 'a bit flipped', bytes(changed)
    yield 'removed', None


@contextlib.contextmanager
def damaged(path: Path, left: bytes | None) -> Iterator[None]:
    """Leaves only this of a file while the context is open."""
    content = path.read_bytes()
    try:
        path.unlink() if left is None else path.write_bytes(left)
        yield
    finally:
        path.write_bytes(content)


def outcome(saved: Saved, file: str) -> str:
    """Starts a run again, of whose step 2 a file is damaged, and returns one of `OUTCOMES`."""
    console = Lines()
    run = dataclasses.replace(saved.run, console=console)
    try:
        checkpoints = open_checkpoints(run.config.checkpoints, run.directory)
        state, start = restore_state(run, checkpoints, find_start(run, checkpoints))
    except Exception as error:
        return 'error' if isinstance(error, ValueError) else f'error: {type(error).__name__}'
    restored = start.restored or 0
    expected, found = saved.states.get(restored, []), jax.tree.leaves(state)
    same = len(expected) == len(found) and all(
        np.asarray(x).tobytes() == y.tobytes() for x, y in zip(found, expected, strict=True)
    )
    if not same:
        return 'silently wrong'
    if restored == 2:
        return 'unnoticed'
    # Without its manifest, a step is not finished, so there is no file to name.
    what = 'was not saved completely' if file == 'manifest.json' else file
    named = any(
        str(saved.newest) in line and (what in line or file in line) for line in console.lines
    )
    return 'previous step' if named else 'not named'


# Random changes. Each changes step 2 of the first run, and returns the path of what it changed.


def choose(saved: Saved, rng: np.random.Generator, pattern: str = '*') -> Path:
    """A random file of step 2."""
    files = sorted(p for p in saved.newest.rglob(pattern) if p.is_file())
    return files[rng.integers(len(files))]


def flip(saved: Saved, other: Saved, rng: np.random.Generator) -> Path:
    """A few bits of a file change."""
    path = choose(saved, rng)
    content = bytearray(path.read_bytes() or b'0')
    for bit in rng.integers(8 * len(content), size=rng.integers(1, 5)):
        content[bit // 8] ^= 1 << int(bit) % 8
    path.write_bytes(content)
    return path


def resize(saved: Saved, other: Saved, rng: np.random.Generator) -> Path:
    """A file is cut off, repeated, or filled with zeros."""
    path = choose(saved, rng)
    content = path.read_bytes()
    cut = content[: rng.integers(max(1, len(content)))]
    made = (cut, content + content, cut + bytes(len(content) - len(cut)))
    path.write_bytes(made[rng.integers(3)])
    return path


def of_other_step(saved: Saved, other: Saved, rng: np.random.Generator) -> Path:
    """A file, or the folder of an array, is the one of step 1."""
    return take(choose(saved, rng), saved.newest, saved.newest.with_name('1'), rng)


def of_other_run(saved: Saved, other: Saved, rng: np.random.Generator) -> Path:
    """A file, or the folder of an array, is the one of a run with another seed."""
    return take(choose(saved, rng), saved.newest, other.newest, rng)


def take(path: Path, here: Path, there: Path, rng: np.random.Generator) -> Path:
    """Replaces a file, or the folder that it is in, with the same one of another step."""
    path = path.parent if path.parent != here and rng.random() < 0.5 else path
    source = there / path.relative_to(here)
    if path.is_dir() and source.is_dir():
        shutil.rmtree(path)
        shutil.copytree(source, path)
    elif path.is_file() and source.is_file():
        shutil.copy(source, path)
    else:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return path


def exchange(saved: Saved, other: Saved, rng: np.random.Generator) -> Path:
    """Two files of the step have each other's names."""
    one, two = choose(saved, rng), choose(saved, rng)
    contents = one.read_bytes(), two.read_bytes()
    one.write_bytes(contents[1])
    two.write_bytes(contents[0])
    return one


def edit_manifest(saved: Saved, other: Saved, rng: np.random.Generator) -> Path:
    """An entry of the manifest is another; half of the time the manifest is sealed again."""
    path = saved.newest / 'manifest.json'
    held = json.loads(path.read_text())
    names = sorted(held['files'])
    one, two = (names[i] for i in rng.choice(len(names), 2, replace=False))
    way = rng.integers(4)
    if way == 0:
        held['files'][one] = held['files'][two]
    elif way == 1:
        held['files'][f'{one}.old'] = held['files'].pop(one)
    elif way == 2:
        held['step'] += int(rng.integers(-1, 2))
    else:
        held['files'][one][int(rng.integers(2))] = '0'
    sealed = {k: v for k, v in held.items() if k != 'checksum'}
    path.write_text(_with_checksum(sealed) if rng.random() < 0.5 else json.dumps(held))
    return path


def duplicate(saved: Saved, other: Saved, rng: np.random.Generator) -> Path:
    """A file or the whole step is there twice, under another name."""
    if rng.random() < 0.5:
        path = choose(saved, rng)
        shutil.copy(path, path.with_name(f'{path.name}.copy'))
        return path
    name = ('3', '02', '2.copy', '2 (copy)')[rng.integers(4)]
    shutil.copytree(saved.newest, saved.newest.with_name(name))
    return saved.newest


def link(saved: Saved, other: Saved, rng: np.random.Generator) -> Path:
    """A file is a link: to nothing, to itself, to a device, to step 1, or to its own content."""
    path = choose(saved, rng)
    kept = saved.newest.parents[1] / 'kept'
    shutil.copy(path, kept)
    step_1 = saved.newest.with_name('1') / path.relative_to(saved.newest)
    target = (Path('gone'), path, Path('/dev/zero'), step_1, kept)[rng.integers(5)]
    path.unlink()
    path.symlink_to(target)
    return path


def touch(saved: Saved, other: Saved, rng: np.random.Generator) -> Path:
    """A file has another time, other rights, or another owner."""
    path = choose(saved, rng)
    way = rng.integers(3)
    if way == 0:
        os.utime(path, (0, rng.integers(2**33)))
    elif way == 1:
        path.chmod(int(rng.integers(0o1000)))
    elif os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    return path


KINDS = (
    *(flip, resize, of_other_step, of_other_run, exchange),
    *(edit_manifest, duplicate, link, touch),
)


def random_trials(
    saved: Saved, other: Saved, count: int
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Trials of random kinds, the same ones in each call."""
    for number in range(count):
        yield f'random {number}', functools.partial(run_random, saved, other, number)


def run_random(saved: Saved, other: Saved, number: int) -> dict[str, Any]:
    """Makes a random change, and returns what happens. The files are as before afterwards."""
    rng = np.random.default_rng(number)
    kind = KINDS[number % len(KINDS)]
    folder = saved.newest.parent
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(folder, Path(scratch) / 'all')
        try:
            path = kind(saved, other, rng)
            found = outcome(saved, '')
        finally:
            shutil.rmtree(folder)
            shutil.copytree(Path(scratch) / 'all', folder)
    file = path.relative_to(folder).as_posix()
    return {'kind': kind.__name__.replace('_', ' '), 'file': file, 'outcome': found}


# The whole campaign.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--bits', type=int, default=64, help='the bits to flip in each file')
    parser.add_argument('--random', type=int, help='the random changes to try instead')
    parser.add_argument('--folder', type=Path, help='where the results are, to continue them')
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            shape = SHAPE if options.random is None else (16, 32)
            saved = save_two_steps(Path(scratch), shape)
            made = trials(saved, options.bits)
            if options.random is not None:
                other = save_two_steps(Path(scratch) / 'other', shape, seed=1)
                made = random_trials(saved, other, options.random)
            done = run_trials(folder / 'damage.jsonl', made)
    counts = collections.Counter((one['kind'], one['outcome']) for one in done)
    show(counts)
    allowed = ('previous step', 'unnoticed') if options.random is not None else ('previous step',)
    return int(any(outcome not in allowed for _, outcome in counts))


def trials(saved: Saved, bits: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every damage of every file, and what tries it."""
    files = sorted(p.relative_to(saved.newest) for p in saved.newest.rglob('*') if p.is_file())
    for file in files:
        content = (saved.newest / file).read_bytes()
        # The bits depend on the file only, so a continued campaign flips the same ones.
        rng = np.random.default_rng(list(str(file).encode()))
        for number, (kind, left) in enumerate(damages_of(content, bits, rng)):
            yield f'{file} {number}', functools.partial(run_trial, saved, str(file), kind, left)


def run_trial(saved: Saved, file: str, kind: str, left: bytes | None) -> dict[str, Any]:
    """Damages a file, and returns what happens."""
    with damaged(saved.newest / file, left):
        return {'kind': kind, 'outcome': outcome(saved, file)}


def show(counts: Mapping[tuple[str, str], int]) -> None:
    """Prints a table of the counts."""
    outcomes = [*OUTCOMES, *sorted({o for _, o in counts if o not in OUTCOMES})]
    kinds = sorted({kind for kind, _ in counts})
    print('| | cases | ' + ' | '.join(outcomes) + ' |')
    print('|---' * (len(outcomes) + 2) + '|')
    for kind in kinds:
        row = [counts.get((kind, one), 0) for one in outcomes]
        print(f'| {kind} | {sum(row):,} | ' + ' | '.join(f'{n:,}' for n in row) + ' |')


if __name__ == '__main__':
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', 2)
    sys.exit(main())
