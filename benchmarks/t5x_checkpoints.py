"""T5X's checkpoints here: every array of the references, read, restored onto meshes and written.

Arrays of both formats are compared with each other and with the sums that T5X computed. Each
checkpoint is then restored onto meshes of 8 CPU devices with the state of Adafactor, written in
T5X's format, and read again.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from t5x_models import Difference, Reference

from partitioning import PjitPartitioner, TrainState, standard_logical_axis_rules
from partitioning.mesh import MeshConfig
from train.checkpoints import CheckpointConfig, find_checkpoint, open_restored
from train.checkpoints.formats.t5x_files import read_arrays
from train.optimizers import as_transformation
from train.t5x.adafactor import Adafactor, standard_logical_factor_rules
from train.t5x.checkpoint_configs import RestoreCheckpointConfig
from train.t5x.checkpoints import T5XCheckpoints, names_of

MESHES = ((1, 1), (4, 2), (2, 4))


def read_all(path: Path) -> dict[str, np.ndarray]:
    """All values of a checkpoint, by name."""
    return {name: array.read() for name, array in read_arrays(path).items()}


def compare_checkpoints(reference: Reference, variants: Path) -> Iterator[Difference]:
    """Compares all arrays of the checkpoints of a model."""
    yield from _compare_formats(reference.folder)
    yield from _compare_variants(reference.folder, variants)
    yield from _compare_states(reference.folder)


def _compare_formats(folder: Path) -> Iterator[Difference]:
    """Compares the two formats, bit by bit, and their sums with T5X's."""
    facts = json.loads((folder / 'model.json').read_text())
    run = facts['train'][facts['checkpoint_step10_run']]
    after = {f'target/{k}': v[2:] for k, v in run['params_after'].items()}
    after |= {f'state/param_states/{k}': v[2:] for k, v in run['state_after'].items()}
    before = {f'target/{k}': [v['sum'], v['sumsq']] for k, v in facts['params'].items()}
    for step, sums in ((0, before), (10, after)):
        found = {}
        for kind in ('legacy', 'orbax'):
            found[kind] = read_all(folder / kind / f'checkpoint_{step}')
            worst = max(_difference_of_sums(found[kind][k], v) for k, v in sums.items())
            yield Difference('sums of arrays', worst, f'{kind} step {step}')
        yield _compare('formats', found['legacy'], found['orbax'], f'step {step}')


def _compare_variants(folder: Path, variants: Path) -> Iterator[Difference]:
    """Compares checkpoints that are stored otherwise with the plain one."""
    plain = read_all(folder / 'legacy/checkpoint_10')
    for path in sorted(variants.glob('*/checkpoint_10')):
        found = read_all(path)
        expected = {k: x.astype(found[k].dtype) for k, x in plain.items()}
        yield _compare('variants', found, expected, path.parent.name)


def _compare_states(folder: Path) -> Iterator[Difference]:
    """Restores checkpoints onto meshes, writes them, and reads them again."""
    for path in sorted(folder.glob('*/checkpoint_*')):
        name, expected = f'{path.parent.name} {path.name}', read_all(path)
        for mesh in MESHES:
            plan = _plan(folder, mesh, path.name == 'checkpoint_0')
            config = RestoreCheckpointConfig(path=str(path), mode='specific').translated()
            assert config is not None
            at, step = find_checkpoint(config)
            state = open_restored(config, at).restore(step, plan.abstract_state)
            plan.check(state)
            arrays = dict(zip(names_of(state), jax.tree.leaves(state), strict=True))
            shown = f'{name} on {mesh[0]}x{mesh[1]}'
            yield _compare('restored', arrays, expected, shown)
            with tempfile.TemporaryDirectory() as temporary:
                saved = T5XCheckpoints(epath.Path(temporary), CheckpointConfig())
                saved.save(step, state)
                saved.close()
                again = read_all(Path(temporary) / f'checkpoint_{step}')
                yield _compare('written', again, expected, shown)


@functools.cache
def _plan(folder: Path, mesh: tuple[int, int], is_first: bool) -> Any:
    """The layout of the state of a reference model, with the Adafactor of its checkpoint."""
    reference = Reference(folder)
    facts = reference.facts
    run = facts['train']['default' if is_first else facts['checkpoint_step10_run']]
    settings = dict(run['adafactor'])
    if settings.get('logical_factor_rules') == 'standard':
        settings['logical_factor_rules'] = standard_logical_factor_rules()

    def init(key: jax.Array) -> TrainState:
        variables = reference.init(key)
        optimizer = Adafactor(**settings).optimizer(lambda step: 0.01)
        return TrainState.create(variables, as_transformation(optimizer, variables))

    devices = jax.devices()[: mesh[0] * mesh[1]]
    axes = MeshConfig(axes={'data': mesh[0], 'model': mesh[1]}, devices=devices)
    rules = standard_logical_axis_rules()
    return PjitPartitioner(mesh=axes, logical_axis_rules=rules).plan(init, jax.random.key(0))


def _compare(
    figure: str, found: Mapping[str, Any], expected: Mapping[str, Any], where: str
) -> Difference:
    """The share of arrays that differ in any bit, dtype or name."""
    wrong = len(found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        ours, theirs = np.asarray(found[name]), np.asarray(expected[name])
        wrong += ours.dtype != theirs.dtype or ours.tobytes() != theirs.tobytes()
    return Difference(f'arrays, {figure}', wrong / len(expected), where)


def _difference_of_sums(array: np.ndarray, expected: list[float]) -> float:
    """The difference of the sum and of the sum of squares, relative to the size of the values."""
    values = array.astype(np.float64)
    scale = max(np.sum(np.abs(values)), np.sum(values**2), 1e-30)
    found = np.sum(values), np.sum(values**2)
    return float(np.max(np.abs(np.subtract(found, expected))) / scale)
