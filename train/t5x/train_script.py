"""T5X's `train`: its settings, translated to those of `train.train.train`.

Usage: configs/t5x/pretrain.gin.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from partitioning import BasePartitioner, TrainState
from train.console import RunConsole
from train.data import Task
from train.errors import ConfigError, check_counts
from train.machine import raise_on_all_processes
from train.t5x.adafactor import Adafactor
from train.t5x.configs import CheckpointConfig, DatasetConfig
from train.t5x.gin_utils import check_summarize
from train.t5x.models import DecoderOnlyModel
from train.t5x.network import with_kv_heads
from train.t5x.refusals import expect, expect_class, off, only, refusal
from train.t5x.seqio import check_evaluator
from train.t5x.trainer import Trainer, check_actions
from train.train import train as train_here

KEY = 'train_script.train'
_ROWS = 'rows are made by tasks of train.data'
_ARRAYS = 'arrays are jax.Arrays, saved by Orbax'
# Settings without an equal, which may be off, and why.
OFF = {
    'relative_steps': 'a run that is resumed would train as many again; total_steps says the end',
    'use_hardware_rng': 'random numbers are the same on every mesh, those of hardware are not',
    'get_dataset_fn': _ROWS,
    'train_eval_get_dataset_fn': _ROWS,
    'prepare_train_iter_fn': _ROWS,
    'run_eval_before_training': 'eval_script.evaluate evaluates a checkpoint',
    'train_state_initializer_cls': 'parameters are born on their devices or restored',
    'verify_matching_vocabs_fn': 'the vocabularies of model and task are compared anyway',
    'gc_period': 'Python collects garbage when it has to',
}
# Settings without an equal, which may be on, and why.
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
    """Trains by T5X's settings, or goes on where an earlier run in `model_dir` stopped.

    A run begins with the newest checkpoint in `model_dir`, else with that of
    `checkpoint_cfg.restore`, else from scratch.

    Args:
      model: network, vocabulary, optimizer and loss.
      train_dataset_cfg: what it learns from.
      train_eval_dataset_cfg: what it is evaluated on; None: once, at the end, on the training task.
      checkpoint_cfg: what is saved, and what the run begins with.
      partitioner: lays out data, state and steps over the mesh.
      trainer_cls: the class `trainer.Trainer`.
      model_dir: where checkpoints, metrics and the configuration go.
      total_steps: the run ends at this step; those of a restored checkpoint count.
      eval_steps: batches of an evaluation; None: all rows.
      eval_period: steps between evaluations; 0: only at the end.
      infer_eval_dataset_cfg: evaluation of decoded text; tasks have no metrics of it, so, as in
        T5X then, there is none.
      stats_period: steps between records of metrics; None: the shortest of the other periods.
      random_seed: of parameters, rows and dropout; None: any, and it is 0.
      summarize_config_fn: `gin_utils.summarize_gin_config`.
      inference_evaluator_cls: the class `seqio.Evaluator`.
      concurrent_metrics: on or off, the metrics are the same.
      actions: `trainer.TerminateOnNanAction`, which is always on.
      relative_steps, use_hardware_rng, get_dataset_fn, train_eval_get_dataset_fn,
        prepare_train_iter_fn, run_eval_before_training, train_state_initializer_cls,
        verify_matching_vocabs_fn, gc_period: off.
      use_orbax, use_gda, use_jax_array: on.

    Returns:
      The state after the last step.

    Raises:
      ConfigError: a setting that cannot be honoured, with what to write instead.
    """
    settings = locals()
    _check(settings)
    trainer: Trainer = trainer_cls()  # type: ignore[call-arg]  # a gin file has its settings
    training, evaluated = train_dataset_cfg, train_eval_dataset_cfg
    length = _sequence_length(training, evaluated)
    task, eval_tasks = _tasks(training, evaluated)
    with raise_on_all_processes():
        for one in (task, *(eval_tasks or {}).values()):
            model.check_vocabulary(one)
    eval_tokens = None
    if evaluated is not None and eval_steps is not None:
        eval_tokens = eval_steps * evaluated.batch_size * length
    checkpoints, restore = checkpoint_cfg.translated()
    periods = [period for period in (eval_period, checkpoints.period) if period]
    seed = _seed(random_seed, training.seed)
    _say_what_differs(settings, seed)
    # Bare and with all that differs given: nothing of it is left to the gin file.
    return inspect.unwrap(train_here)(
        model_dir=model_dir,
        model=model.transformer(),
        partitioner=with_kv_heads(partitioner),
        optimizer=model.optimizer(trainer.learning_rate_fn),
        task=task,
        total_steps=total_steps,
        batch_size=training.batch_size,
        sequence_length=length,
        eval_period=0 if evaluated is None else eval_period,
        checkpoints=checkpoints,
        eval_tasks=eval_tasks,
        eval_tokens=eval_tokens,
        restore=restore,
        loss=model.loss(),
        num_microbatches=1 if trainer.num_microbatches is None else trainer.num_microbatches,
        weight_metrics=trainer.weight_metrics_computer is not None,
        log_period=stats_period or min(periods, default=total_steps),
        seed=seed,
    )


def _check(settings: Mapping[str, Any]) -> None:
    """Each setting has a meaning here.

    Raises:
      ConfigError: naming the first that has none.
    """
    for name, why in OFF.items():
        off(f'{KEY}.{name}', settings[name], why)
    for name, why in ON.items():
        only(f'{KEY}.{name}', settings[name], (True,), why)
    concurrent = settings['concurrent_metrics']
    only(f'{KEY}.concurrent_metrics', concurrent, (True, False), 'it is on or off')
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
    """Tokens of a row, the same in training and evaluation."""
    key, length = 'utils.DatasetConfig.task_feature_lengths', training.sequence_length
    if length is None:
        raise refusal(f'train/{key}', None, "write {'targets': tokens of a row}")
    if evaluated is not None and evaluated.sequence_length not in (None, length):
        lengths = evaluated.task_feature_lengths
        why = f"rows are as long as those of the training; write {{'targets': {length}}}"
        raise refusal(f'train_eval/{key}', lengths, why)
    return length


def _tasks(
    training: DatasetConfig, evaluated: DatasetConfig | None
) -> tuple[Task, dict[str, Task] | None]:
    """The task to train on, and those to evaluate; None: its own held-out part."""
    training.check_trains('train/')
    if evaluated is None:
        return training.task, None
    evaluated.check_evaluates('train_eval/')
    task, held_out, name = training.task, evaluated.task, evaluated.mixture_or_task_name
    if held_out == task:
        return task, None
    return task, {name if isinstance(name, str) else 'train_eval': held_out}


def _seed(random_seed: int | None, data_seed: int | None) -> int:
    """The one seed of a run; 0 where any will do."""
    given = {seed for seed in (random_seed, data_seed) if seed is not None}
    if len(given) > 1:
        raise ConfigError(
            f'{KEY}.random_seed is {random_seed} and train/utils.DatasetConfig.seed {data_seed}: a '
            'run has one seed; write the same, or None for one of them'
        )
    return given.pop() if given else 0


def _say_what_differs(settings: Mapping[str, Any], seed: int) -> None:
    """Settings that are honoured by something else than T5X does."""
    console, optimizer = RunConsole(), settings['model'].optimizer_def
    if settings['random_seed'] is None:
        console.say(f'{KEY}.random_seed is None, so any will do: it is {seed}')
    if settings['train_eval_dataset_cfg'] is None:
        console.say(f'{KEY}.train_eval_dataset_cfg is None: the task is evaluated once, at the end')
    if settings['infer_eval_dataset_cfg'] is not None:
        settings['infer_eval_dataset_cfg'].check_evaluates('infer_eval/')
        _ = settings['infer_eval_dataset_cfg'].task  # a wrong name is an error
        console.say(f'{KEY}.infer_eval_dataset_cfg: tasks have no metrics of decoded text: skipped')
    if isinstance(optimizer, Adafactor) and optimizer.logical_factor_rules is not None:
        console.say('adafactor.Adafactor.logical_factor_rules: optax factors the largest two sizes')
