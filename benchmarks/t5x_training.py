"""Ten train steps with Adafactor on T5X's reference models, compared with what T5X itself computed.

For each run in `train` of model.json, these are the greatest differences of the losses, and of the
sums of squares of the parameters and of the optimizer's state, as multiples of the difference that
rounding explains (see tests/tolerances.py). None may be above 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from t5x_models import Difference, Reference, parameters

sys.path.append(str(Path(__file__).resolve().parent.parent / 'tests'))

from tolerances import rounding_limit, rounding_spread

from partitioning import TrainState
from partitioning.state import path_str
from train.optimizers import as_transformation
from train.running.steps import make_train_step
from train.t5x.adafactor import Adafactor, standard_logical_factor_rules

# The factor of the z-loss in all runs.
Z_LOSS = 1e-4


def compare_training(reference: Reference) -> Iterator[Difference]:
    """Trains a model with each of its runs' settings, and compares the results with T5X's."""
    params = parameters(reference.folder / 'legacy/checkpoint_0')
    for run, settings in reference.facts['train'].items():
        for name, value in compare_run(reference, params, settings).items():
            yield Difference(f'ten steps: {name}', value, run)


def compare_run(reference: Reference, params: Any, run: dict[str, Any]) -> dict[str, float]:
    """Trains as a run of T5X did. Differences are multiples of what rounding explains."""
    assert run['z_loss'] == Z_LOSS and run['loss_normalizing_factor'] == 'NUM_REAL_TARGET_TOKENS'
    batch, objective = reference.batch('padded'), reference.objective(z_loss=Z_LOSS)
    boxed = jax.eval_shape(lambda: objective.init(jax.random.key(0), batch))
    settings = run['adafactor'] | {'logical_factor_rules': standard_logical_factor_rules()}
    optimizer = Adafactor(**settings).optimizer(optax.constant_schedule(run['learning_rate']))
    tx, spec = as_transformation(optimizer, boxed), jax.sharding.PartitionSpec()
    step = make_train_step(objective, tx, key=jax.random.key(0), num_microbatches=1, data_spec=spec)
    train_step = jax.jit(step)

    def train(params: Any) -> tuple[list[Any], dict[str, np.ndarray]]:
        """The loss before each step, and the arrays after the last one by their paths."""
        state, losses = TrainState.create(params, tx), []
        for _ in range(run['steps']):
            state, metrics = train_step(state, batch)
            losses.append(metrics['loss'] + metrics['z_loss'])
        trees = {'': state.params}
        trees |= {f'/{k}': getattr(state.opt_state, k) for k in state.opt_state._fields[1:]}
        return losses, {path + end: x for end, tree in trees.items() for path, x in _flat(tree)}

    def summarize(params: Any) -> tuple[list[Any], dict[str, Any]]:
        losses, arrays = train(params)
        return losses, {path: np.square(x.astype(np.float64)).sum() for path, x in arrays.items()}

    arrays, expected = train(params)[1], run['params_after'] | run['state_after']
    assert arrays.keys() == expected.keys(), arrays.keys() ^ expected.keys()
    for path, (shape, dtype, *_) in expected.items():
        assert (list(arrays[path].shape), str(arrays[path].dtype)) == (shape, dtype), path
    losses, squares = summarize(params)
    of_losses, of_squares = rounding_spread(summarize, params, draws=2)

    def compare(found: Any, expected: float, spread: float, operations: int) -> float:
        apart = abs(float(found) - expected)
        limit = rounding_limit(expected, spread, steps=run['steps'], operations=operations)
        return apart and float(apart / limit)

    def compare_squares(paths: Iterable[str]) -> float:
        # Squares double the relative error of their elements.
        return max(compare(squares[p], expected[p][3], of_squares[p], 16) for p in paths)

    pairs = zip(losses, run['loss_before_step'], of_losses, strict=True)
    return {
        'losses': max(compare(*each, 8) for each in pairs),
        'parameters': compare_squares(run['params_after']),
        'state': compare_squares(run['state_after']),
    }


def _flat(tree: Any) -> list[tuple[str, np.ndarray]]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return [(path_str(path), np.asarray(x)) for path, x in flat]
