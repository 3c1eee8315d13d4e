"""The moving average of the parameters: its values, its layout, and where runs use it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import records, small_config

from partitioning import (
    AxisRules,
    PjitPartitioner,
    fsdp_logical_axis_rules,
    standard_logical_axis_rules,
)
from train import HeldOut, evaluate
from train.checkpoints import RestoreConfig
from train.errors import ConfigError
from train.optimizers.averaging import AveragedState, update_average, with_average
from train.running.run import plan_run

pytestmark = pytest.mark.core


def numpy_of(tree):
    return jax.tree.map(np.asarray, tree)


def assert_close(ours, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7), ours, expected
    )


def average_of(parameters, decay):
    """The debiased average of parameters, the newest last, by its sum."""
    weights = [decay ** (len(parameters) - i) for i in range(1, len(parameters) + 1)]
    return jax.tree.map(
        lambda *xs: sum(w * np.float64(x) for w, x in zip(weights, xs, strict=True)) / sum(weights),
        *parameters,
    )


# By hand: the parameters are 0, 1, 2 and 4, and the decay is 1/2.


@pytest.mark.parametrize(
    'debias, expected',
    [
        (False, [0.5, 1.25, 2.625]),  # half of the last average and half of the new value
        (True, [1, (1 / 2 + 2) / (3 / 2), (1 / 4 + 2 / 2 + 4) / (7 / 4)]),
    ],
)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_averages_by_hand(debias, expected, dtype):
    state = AveragedState.create({'params': {'x': jnp.zeros(2, dtype)}}, optax.sgd(1.0))
    assert state.ema.average['x'] is not state.params['x']
    for value, average in zip([1, 2, 4], expected, strict=True):
        state = state.replace(params={'x': jnp.full(2, value, dtype)})
        state = update_average(state, 0.5, debias)
        assert state.ema.average['x'].dtype == jnp.float32
        np.testing.assert_allclose(state.ema.average['x'], average, rtol=1e-6)
        seen = with_average(state).params['x']
        np.testing.assert_allclose(
            np.float32(seen), average, rtol=1e-6 if dtype == 'float32' else 4e-3
        )
        assert seen.dtype == dtype
    assert int(state.ema.updates) == 3


# Runs.


def column(found, name):
    return [record[name] for record in found if name in record]


@dataclasses.dataclass(frozen=True)
class Seen:
    """An evaluator that keeps the parameters that it gets, and a hook that keeps the others."""

    every: int = 2
    evaluated: dict = dataclasses.field(default_factory=dict)
    trained: list = dataclasses.field(default_factory=list)
    first: list = dataclasses.field(default_factory=list)

    def run(self, state, step):
        self.evaluated[step] = numpy_of(state.params)
        self.first.append(self.evaluated[step])
        return {'seen': 1.0}

    def hook(self, state, step, metrics):
        self.trained.append(numpy_of(state.params))


@pytest.fixture
def averaged(run):
    """Returns a function that runs with averages: the state, and what was seen."""

    def of(model_dir, **changes):
        seen = Seen()
        settings = {
            'ema_decay': 0.5,
            'hooks': [seen.hook],
            'evaluators': {'eval': HeldOut(every=2), 'seen': seen},
        }
        return run(model_dir, **settings | changes), seen

    return of


def test_a_run_averages_evaluates_saves_and_resumes(averaged, finished, texts, tmp_path, capsys):
    state, seen = averaged(tmp_path / 'one')
    assert 'is kept, with decay 0.5; evaluations use it' in ' '.join(
        capsys.readouterr().out.split()
    )
    assert_close(state.ema.average, average_of(seen.trained, 0.5))
    for step, params in seen.evaluated.items():
        assert_close(params, average_of(seen.trained[:step], 0.5))
    # The training is the same as without averages, and the scores are not.
    ours, plain = records(tmp_path / 'one'), records(finished.directory)
    assert column(ours, 'train/loss') == column(plain, 'train/loss')
    scores, of_plain = column(ours, 'eval/bits_per_byte'), column(plain, 'eval/bits_per_byte')
    assert len(scores) == 3 and scores[-1] != of_plain[-1]
    shardings = jax.tree.map(lambda x: x.sharding, (state.params, state.ema.average))
    assert shardings[0] == shardings[1]

    # A checkpoint has the averages: the same run in two parts, and the scores of a checkpoint.
    averaged(tmp_path / 'two', total_steps=3)
    resumed, _ = averaged(tmp_path / 'two')
    jax.tree.map(np.testing.assert_array_equal, resumed.ema, state.ema)
    config = small_config(tmp_path / 'one', texts, ema_decay=0.5)
    assert evaluate(config)['eval/bits_per_byte'] == pytest.approx(scores[-1])
    config = dataclasses.replace(config, evaluate_ema=False)
    assert evaluate(config)['eval/bits_per_byte'] == pytest.approx(of_plain[-1])

    # Without the setting, the averages would be lost.
    with pytest.raises(
        ConfigError, match=r'averages of the parameters, \d arrays.*set TrainConfig'
    ):
        averaged(tmp_path / 'two', ema_decay=None, total_steps=8)


def test_averages_start_when_a_run_without_them_resumes(averaged, finished, tmp_path, capsys):
    state, seen = averaged(finished.copy(tmp_path / 'model', last_step=4))
    assert 'absent, starts from the parameters' in ' '.join(capsys.readouterr().out.split())
    assert int(state.ema.updates) == 2 and len(seen.trained) == 2
    assert_close(state.ema.average, average_of(seen.trained, 0.5))


def test_another_run_starts_from_the_average(averaged, run, tmp_path, meshwright):
    """From the checkpoint itself, and from weights that are converted from it."""
    state, _ = averaged(tmp_path / 'one', total_steps=2)
    renames, weights = [('params/(.*)', r'ema/average/\1')], tmp_path / 'weights'
    status, printed, _ = meshwright('checkpoint', 'inspect', tmp_path / 'one/checkpoints/2')
    parameters = sum(x.nbytes for x in jax.tree.leaves(state.params))
    assert status == 0 and f'parameters {parameters / 1000:.1f} kB' in printed
    convert = ('checkpoint', 'convert', tmp_path / 'one', weights, '--to=safetensors')
    gone = [f'--renames={pattern}=' for pattern in ('params/.*', 'opt_state/.*', 'ema/updates')]
    assert meshwright(*convert, *gone, r'--renames=ema/average/(.*)=params/\1')[0] == 0
    common = {'strict': False, 'parameters_only': True}
    for restore in (
        RestoreConfig(path=str(tmp_path / 'one'), renames=renames, **common),
        RestoreConfig(path=str(weights)),
    ):
        seen = Seen(every=0)
        changes = {'restore': restore, 'evaluate_first': True, 'total_steps': 3}
        run(tmp_path / f'from {len(restore.path)}', evaluators={'seen': seen}, **changes)
        jax.tree.map(np.testing.assert_array_equal, seen.first[0], numpy_of(state.ema.average))


@pytest.mark.parametrize('parameters_only', [False, True])
def test_averages_without_debias_start_from_what_is_restored(
    averaged, finished, tmp_path, parameters_only
):
    restore = RestoreConfig(path=str(finished.directory), parameters_only=parameters_only)
    state, seen = averaged(
        tmp_path / 'model', restore=restore, total_steps=7, ema_debias=False, evaluate_ema=False
    )
    before, after = numpy_of(finished.state.params), seen.trained[0]
    assert_close(state.ema.average, jax.tree.map(lambda x, y: 0.5 * x + 0.5 * y, before, after))
    assert_close(seen.evaluated[7], after)


def test_the_plan_of_a_run_counts_the_averages(texts, tmp_path):
    """Also where the optimizer has rules of its own, whose layout the averages follow."""
    standard = standard_logical_axis_rules()
    rules = AxisRules(standard, optimizer=fsdp_logical_axis_rules(standard))
    partitioner = PjitPartitioner(2, rules)
    sizes = []
    for decay in (None, 0.999):
        config = small_config(tmp_path, texts, partitioner=partitioner, ema_decay=decay)
        row = config.task.open(16).training(0)[0]
        plan = plan_run(config, row).plan
        sizes.append(sum(4 * math.prod(row.shard_shape) for row in plan.rows))
    rows = {row.path: row for row in plan.rows}
    followed = {path: row for path, row in rows.items() if path.startswith('ema/average/')}
    assert {row.role for row in followed.values()} == {'optimizer'}
    for path, row in followed.items():
        moment = next(r for p, r in rows.items() if p.endswith(path.replace('ema/average', 'mu')))
        assert row.shard_shape == moment.shard_shape
    added = sum(4 * math.prod(row.shard_shape) for row in followed.values())
    assert sizes[1] - sizes[0] == added + 4  # and the number of updates


def test_averages_are_evaluated_in_the_layout_of_the_parameters(averaged, tmp_path):
    standard = standard_logical_axis_rules()
    rules = AxisRules(standard, optimizer=fsdp_logical_axis_rules(standard))
    partitioner = PjitPartitioner(2, rules)
    state, seen = averaged(tmp_path, partitioner=partitioner, total_steps=2)
    assert_close(seen.evaluated[2], average_of(seen.trained, 0.5))
    kernel, average = state.params['Dense_0']['kernel'], state.ema.average['Dense_0']['kernel']
    assert kernel.sharding != average.sharding
    assert with_average(state).params['Dense_0']['kernel'].sharding == kernel.sharding


@pytest.mark.parametrize(
    'settings, words',
    [
        ({'ema_decay': 1.0}, ['ema_decay is 1.0', '>= 0 and < 1', 'None']),
        ({'ema_decay': True}, ['ema_decay is True']),
        ({'ema_decay': '0.999'}, ["ema_decay is '0.999'"]),
        ({'evaluate_ema': False}, ['evaluate_ema is False', 'ema_decay is not set', '0.999']),
        ({'ema_debias': False}, ['ema_debias is False', 'ema_decay is not set']),
        ({'ema_decay': 0.9, 'evaluate_ema': 'no'}, ["evaluate_ema is 'no'", 'True or False']),
    ],
)
def test_misuse(settings, words, texts, tmp_path):
    with pytest.raises(ConfigError) as error:
        small_config(tmp_path, texts, **settings)
    assert all(word in str(error.value) for word in words) and '\n' not in str(error.value)
