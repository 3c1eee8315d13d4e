"""Ten train steps with Adafactor on T5X's reference models, compared with what T5X itself computed.

  python benchmarks/t5x_training.py --data DIR

DIR has a folder for each model, with `model.json`, `data.npz` and `legacy/checkpoint_0`. For each
run in `train` of model.json, the greatest relative differences of the losses, and of the sums of
squares of the parameters and of the optimizer's state, are printed. Rates are compared exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from t5x_models import Reference, list_models, parameters, read_data_flag

from partitioning import TrainState
from partitioning.state import path_str
from train.optimizers import as_transformation
from train.running.steps import make_train_step
from train.t5x.adafactor import Adafactor, standard_logical_factor_rules
from train.t5x.schedules import create_learning_rate_scheduler

# The factor of the z-loss in all runs.
Z_LOSS = 1e-4
# The greatest relative differences allowed.
LIMITS = {'losses': 3e-5, 'parameters': 2e-5, 'state': 2e-5}


def compare_model(folder: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """Trains a model with each of its runs' settings; yields the greatest relative differences."""
    reference = Reference(folder)
    batch, objective = reference.batch('padded'), reference.objective(z_loss=Z_LOSS)
    boxed = jax.eval_shape(lambda: objective.init(jax.random.key(0), batch))
    params = parameters(folder / 'legacy/checkpoint_0')
    for name, run in reference.facts['train'].items():
        assert (
            run['z_loss'] == Z_LOSS and run['loss_normalizing_factor'] == 'NUM_REAL_TARGET_TOKENS'
        )
        settings = run['adafactor'] | {'logical_factor_rules': standard_logical_factor_rules()}
        optimizer = Adafactor(**settings).optimizer(optax.constant_schedule(run['learning_rate']))
        tx = as_transformation(optimizer, boxed)
        spec = jax.sharding.PartitionSpec()
        step = make_train_step(
            objective, tx, key=jax.random.key(0), num_microbatches=1, data_spec=spec
        )
        state, losses, train_step = TrainState.create(params, tx), [], jax.jit(step)
        for _ in range(run['steps']):
            state, metrics = train_step(state, batch)
            losses.append(float(metrics['loss'] + metrics['z_loss']))
        kinds = list(state.opt_state._asdict().items())[1:]  # without the count
        arrays = {f'{path}/{k}': x for k, statistics in kinds for path, x in _flat(statistics)}
        expected = run['loss_before_step']
        yield (
            name,
            {
                'losses': max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)),
                'parameters': _greatest(dict(_flat(state.params)), run['params_after']),
                'state': _greatest(arrays, run['state_after']),
            },
        )


def _flat(tree: Any) -> list[tuple[str, np.ndarray]]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return [(path_str(path), np.asarray(x)) for path, x in flat]


def _greatest(found: dict[str, np.ndarray], expected: dict[str, Any]) -> float:
    """The greatest relative difference of sums of squares; the arrays must be the same."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    differences = []
    for path, (shape, dtype, _, squares) in expected.items():
        x = found[path]
        assert (list(x.shape), str(x.dtype)) == (shape, dtype), path
        mine = np.square(x.astype(np.float64)).sum()
        differences.append(abs(mine / squares - 1) if squares else float(mine))
    return max(differences)


def compare_rates(path: Path) -> tuple[int, int]:
    """Returns how many learning rates are compared, and how many differ in any digit."""
    different = []
    for case in json.loads(path.read_text()):
        rate = create_learning_rate_scheduler(**case['settings'])
        pairs = zip(case['steps'], case['values'], strict=True)
        different += [float(rate(step)) != value for step, value in pairs]
    return len(different), sum(different)


def main() -> int:
    """Prints the differences; the exit status is 1 if one is too large."""
    data, failed = read_data_flag(__doc__), False
    for folder in list_models(data):
        for run, differences in compare_model(folder):
            wrong = any(differences[k] > limit for k, limit in LIMITS.items())
            failed |= wrong
            figures = ', '.join(f'{k} {v:.1e}' for k, v in differences.items())
            print(f'{folder.name} {run}: {figures}{" FAILED" if wrong else ""}')
    count, differing = compare_rates(data / 'learning_rates.json')
    print(f'learning rates: {differing} of {count} differ')
    return int(failed or differing > 0)


if __name__ == '__main__':
    raise SystemExit(main())
