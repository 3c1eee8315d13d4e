"""T5X's `train`, translated to `train.train`.

For an example, see configs/t5x/pretrain.gin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax

from partitioning import BasePartitioner, TrainState
from train.config import TrainConfig
from train.data import Task
from train.errors import ConfigError, check_counts
from train.evaluators import HeldOut
from train.runtime.console import RunConsole
from train.runtime.machine import raise_on_all_processes
from train.t5x.configs import CheckpointConfig, DatasetConfig
from train.t5x.gin_utils import check_summarize
from train.t5x.models import DecoderOnlyModel
from train.t5x.network import with_kv_heads
from train.t5x.refusals import check_off, check_one_of, expect, expect_class, refusal
from train.t5x.seqio import check_evaluator
from train.t5x.trainer import Trainer, check_actions
from train.train import train as train_here

KEY = 'train_script.train'
_ROWS = 'tasks of train.data make the rows'
_ARRAYS = 'arrays are jax.Arrays and Orbax saves them'
# Settings that must be off, with the reason.
OFF = {
    'relative_steps': 'each time a run resumes, it would train more steps; set total_steps instead',
    'use_hardware_rng': 'random numbers of the hardware differ between meshes',
    'get_dataset_fn': _ROWS,
    'train_eval_get_dataset_fn': _ROWS,
    'prepare_train_iter_fn': _ROWS,
    'run_eval_before_training': 'use eval_script.evaluate to evaluate a checkpoint',
    'train_state_initializer_cls': 'parameters are created or restored on their own devices',
    'verify_matching_vocabs_fn': 'every run compares the vocabularies of model and task',
    'gc_period': 'Python collects garbage by itself',
}
# Settings that must be on, with the reason.
ON = {'use_orbax': _ARRAYS, 'use_gda': _ARRAYS, 'use_jax_array': _ARRAYS}

OBJECTS = (
    ('model', DecoderOnlyModel, '@models.DecoderOnlyModel()'),
    ('checkpoint_cfg', CheckpointConfig, '@utils.CheckpointConfig()'),
    ('train_dataset_cfg', DatasetConfig, '@utils.DatasetConfig()'),
    ('train_eval_dataset_cfg', DatasetConfig, '@utils.DatasetConfig()'),
    ('infer_eval_dataset_cfg', DatasetConfig, '@utils.DatasetConfig()'),
)
MAY_BE_NONE = ('train_eval_dataset_cfg', 'infer_eval_dataset_cfg')


def train(
    *,
    model: DecoderOnlyModel,
    train_dataset_cfg: DatasetConfig,
    train_eval_dataset_cfg: DatasetConfig | None,
    checkpoint_cfg: CheckpointConfig,
    partitioner: BasePartitioner,
    trainer_cls: type[Trainer],
    model_dir: str,
    total_steps: int,
    eval_steps: int | None,
    eval_period: int,
    infer_eval_dataset_cfg: DatasetConfig | None = None,
    relative_steps: int | None = None,
    stats_period: int | None = None,
    random_seed: int | None = None,
    use_hardware_rng: bool = False,
    summarize_config_fn: Any = None,
    inference_evaluator_cls: Any = None,
    get_dataset_fn: Any = None,
    concurrent_metrics: bool = True,
    actions: Mapping[str, Any] | None = None,
    train_eval_get_dataset_fn: Any = None,
    prepare_train_iter_fn: Any = None,
    run_eval_before_training: bool = False,
    train_state_initializer_cls: Any = None,
    use_orbax: bool = True,
    use_gda: bool = True,
    use_jax_array: bool = True,
    verify_matching_vocabs_fn: Any = None,
    gc_period: int = 0,
) -> TrainState:
    """Trains with T5X's settings, or resumes the earlier run in `model_dir`.

    A run starts from the newest checkpoint in `model_dir`. Without one, it starts from the
    checkpoint of `checkpoint_cfg.restore`, or else from scratch.

    Args:
      model: network, vocabulary, optimizer and loss.
      train_dataset_cfg: the rows to train on.
      train_eval_dataset_cfg: the rows to evaluate. None evaluates the training task once, at the
        end.
      checkpoint_cfg: which checkpoints are saved, and which one the run starts from.
      partitioner: lays out data, state and steps over the mesh.
      trainer_cls: the class `trainer.Trainer`.
      model_dir: the directory for checkpoints, metrics and the configuration.
      total_steps: the step at which the run ends. The steps of a restored checkpoint count.
      eval_steps: the number of batches in an evaluation. None evaluates all rows.
      eval_period: the number of steps between evaluations. 0 evaluates only at the end.
      infer_eval_dataset_cfg: has no effect, because tasks have no metrics of decoded text.
      relative_steps: must be off.
      stats_period: the number of steps between records of metrics. By default, the shortest of the
        other periods.
      random_seed: the seed of parameters, rows and dropout. None means 0.
      use_hardware_rng: must be off.
      summarize_config_fn: `gin_utils.summarize_gin_config`, or None.
      inference_evaluator_cls: the class `seqio.Evaluator`, or None.
      get_dataset_fn: must be off.
      concurrent_metrics: has no effect on the metrics.
      actions: only `trainer.TerminateOnNanAction`, which is always on.
      train_eval_get_dataset_fn: must be off.
      prepare_train_iter_fn: must be off.
      run_eval_before_training: must be off.
      train_state_initializer_cls: must be off.
      use_orbax: must be True.
      use_gda: must be True.
      use_jax_array: must be True.
      verify_matching_vocabs_fn: must be off.
      gc_period: must be 0.

    Returns:
      The state after the last step.

    Raises:
      ConfigError: if a setting cannot be honoured.
    """
    return train_here(translate(locals()))


def translate(settings: Mapping[str, Any]) -> TrainConfig:
    """Returns the settings of a run, given all arguments of `train` by name.

    Raises:
      ConfigError: if a setting cannot be honoured.
    """
    _check(settings)
    model, trainer = settings['model'], settings['trainer_cls']()  # gin provides its arguments
    training, evaluated = settings['train_dataset_cfg'], settings['train_eval_dataset_cfg']
    total_steps, eval_steps = settings['total_steps'], settings['eval_steps']
    length = _sequence_length(training, evaluated)
    task, evaluated_task, name = _tasks(training, evaluated)
    with raise_on_all_processes():
        for one in (task, evaluated_task):
            model.check_vocabulary(one)
    limit = None
    if evaluated is not None and eval_steps is not None:
        limit = eval_steps * evaluated.batch_size * length
    every = 0 if evaluated is None else settings['eval_period']
    checkpoints, restore = settings['checkpoint_cfg'].translated()
    periods = [period for period in (settings['eval_period'], checkpoints.period) if period]
    seed = _seed(settings['random_seed'], training.seed)
    _report_differences(settings, seed)
    return TrainConfig(
        model_dir=settings['model_dir'],
        objective=model.objective(),
        partitioner=with_kv_heads(settings['partitioner']),
        optimizer=trainer.optimizer(model),
        task=task,
        total_steps=total_steps,
        batch_size=training.batch_size,
        sequence_length=length,
        evaluators={name: HeldOut(task=evaluated_task, every=every, limit=limit)},
        checkpoints=checkpoints,
        restore=restore,
        num_microbatches=1 if trainer.num_microbatches is None else trainer.num_microbatches,
        weight_metrics=trainer.weight_metrics_computer is not None,
        log_every=settings['stats_period'] or min(periods, default=total_steps),
        seed=seed,
    )


def _check(settings: Mapping[str, Any]) -> None:
    """Checks that every setting can be honoured.

    Raises:
      ConfigError: if a setting cannot be honoured.
    """
    for name, why in OFF.items():
        check_off(f'{KEY}.{name}', settings[name], why)
    for name, why in ON.items():
        check_one_of(f'{KEY}.{name}', settings[name], (True,), why)
    concurrent = settings['concurrent_metrics']
    check_one_of(f'{KEY}.concurrent_metrics', concurrent, (True, False), 'it must be True or False')
    check_summarize(f'{KEY}.summarize_config_fn', settings['summarize_config_fn'])
    check_actions(f'{KEY}.actions', settings['actions'])
    check_evaluator(f'{KEY}.inference_evaluator_cls', settings['inference_evaluator_cls'])
    expect_class(f'{KEY}.trainer_cls', settings['trainer_cls'], Trainer, '@trainer.Trainer')
    for name, kind, written in OBJECTS:
        if settings[name] is not None or name not in MAY_BE_NONE:
            expect(f'{KEY}.{name}', settings[name], kind, written)
    check_counts(minimum=0, **{f'{KEY}.eval_period': settings['eval_period']})
    for name in ('eval_steps', 'stats_period'):
        if settings[name] is not None:
            check_counts(**{f'{KEY}.{name}': settings[name]})


def _sequence_length(training: DatasetConfig, evaluated: DatasetConfig | None) -> int:
    """The number of tokens in a row, which is the same in training and evaluation."""
    key, length = 'utils.DatasetConfig.task_feature_lengths', training.sequence_length
    if length is None:
        raise refusal(f'train/{key}', None, "write {'targets': number of tokens in a row}")
    if evaluated is not None and evaluated.sequence_length not in (None, length):
        lengths = evaluated.task_feature_lengths
        why = f"it must be the length of the training rows; write {{'targets': {length}}}"
        raise refusal(f'train_eval/{key}', lengths, why)
    return length


def _tasks(training: DatasetConfig, evaluated: DatasetConfig | None) -> tuple[Task, Task, str]:
    """The task to train on, the task whose held-out part is evaluated, and the evaluator's name."""
    training.check_trains('train/')
    if evaluated is None:
        return training.task, training.task, 'eval'
    evaluated.check_evaluates('train_eval/')
    task, held_out, name = training.task, evaluated.task, evaluated.mixture_or_task_name
    if held_out == task:
        return task, task, 'eval'
    return task, held_out, f'eval/{name if isinstance(name, str) else "train_eval"}'


def _seed(random_seed: int | None, data_seed: int | None) -> int:
    """The one seed of a run, or 0 if no seed is set."""
    given = {seed for seed in (random_seed, data_seed) if seed is not None}
    if len(given) > 1:
        raise ConfigError(
            f'{KEY}.random_seed is {random_seed}, but train/utils.DatasetConfig.seed is '
            f'{data_seed}: a run has one seed; set both to the same value, or one of them to None'
        )
    return given.pop() if given else 0


def _report_differences(settings: Mapping[str, Any], seed: int) -> None:
    """Reports settings that behave differently from T5X."""
    console, optimizer = RunConsole(), settings['model'].optimizer_def
    if settings['random_seed'] is None:
        console.say(f'{KEY}.random_seed is None: using seed {seed}')
    if settings['train_eval_dataset_cfg'] is None:
        console.say(f'{KEY}.train_eval_dataset_cfg is None: evaluating the task once, at the end')
    if settings['infer_eval_dataset_cfg'] is not None:
        settings['infer_eval_dataset_cfg'].check_evaluates('infer_eval/')
        _ = settings['infer_eval_dataset_cfg'].task  # raises an error if the name is wrong
        console.say(f'{KEY}.infer_eval_dataset_cfg is skipped: no task scores decoded text')
    if isinstance(optimizer, optax.GradientTransformation):
        console.say(
            'trainer.Trainer.learning_rate_fn is not used: the optax transformation of the model '
            'has its own learning rate, as in T5X'
        )
