"""T5X's `train` and `precompile`: translates their settings to a `TrainConfig`, and runs it.

For an example, see configs/t5x/pretrain.gin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax

from partitioning import BasePartitioner, TrainState
from train.config import TrainConfig
from train.data import Task
from train.errors import check_counts
from train.processes.together import raise_on_all_processes
from train.reporting.console import RunConsole
from train.running.training import train as train_here
from train.t5x import seqio
from train.t5x.checkpoint_configs import CheckpointConfig
from train.t5x.datasets import (
    DECODED,
    DatasetConfig,
    decoded_evaluators,
    held_out_evaluators,
    tasks_of,
)
from train.t5x.gin_utils import writers_with
from train.t5x.models import BaseTransformerModel
from train.t5x.optimizers import with_learning_rate
from train.t5x.refusals import check_bools, check_off, expect, expect_class, refusal
from train.t5x.run_functions import (
    TrainStateInitializer,
    check_standard,
    get_dataset,
    get_training_eval_datasets,
    prepare_train_iter,
    verify_matching_vocabs,
)
from train.t5x.trainer import Trainer, translate_actions

KEY = 'train_script.train'
DATASETS = ('train_dataset_cfg', 'train_eval_dataset_cfg', 'infer_eval_dataset_cfg')


def train(
    *,
    model: BaseTransformerModel,
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
    inference_evaluator_cls: Any = seqio.Evaluator,
    get_dataset_fn: Any = get_dataset,
    concurrent_metrics: bool = True,
    actions: Mapping[str, Any] | None = None,
    train_eval_get_dataset_fn: Any = get_training_eval_datasets,
    prepare_train_iter_fn: Any = prepare_train_iter,
    run_eval_before_training: bool = False,
    train_state_initializer_cls: Any = TrainStateInitializer,
    use_orbax: bool = True,
    verify_matching_vocabs_fn: Any = verify_matching_vocabs,
    gc_period: int = 0,
) -> TrainState:
    """Trains with T5X's settings, or resumes the earlier run in `model_dir`.

    A run starts from the newest checkpoint in `model_dir`. Without one, it starts from the
    checkpoint of `checkpoint_cfg.restore`, or else from scratch.

    Args:
      model: network, vocabulary, optimizer and loss.
      train_dataset_cfg: the rows to train on.
      train_eval_dataset_cfg: the rows on which the loss is evaluated, from the same task or another
        task. If it is None, the loss is not evaluated.
      checkpoint_cfg: which checkpoints are saved, and which one the run starts from.
      partitioner: lays out data, state and steps over the mesh.
      trainer_cls: the class `trainer.Trainer`.
      model_dir: the directory for checkpoints, metrics and the configuration.
      total_steps: the step at which the run ends, including the steps of a restored checkpoint. It
        has no effect if `relative_steps` is set.
      eval_steps: the number of batches in an evaluation. None evaluates all rows.
      eval_period: the number of steps between evaluations. 0 evaluates only at the end.
      infer_eval_dataset_cfg: the rows whose targets are predicted, decoded and scored by the
        metrics of their task. If it is None, or no task has metrics, nothing is decoded.
      relative_steps: the number of steps to train after the step that the run starts or resumes
        from. None trains to `total_steps`.
      stats_period: the number of steps between records of metrics. By default, it is the shorter
        of `eval_period` and the period of checkpoints.
      random_seed: the seed of parameters and dropout. None derives a seed from the time, which a
        resumed run keeps, and implies `use_hardware_rng`.
      use_hardware_rng: whether random numbers come from jax's 'unsafe_rbg', which is fast on TPUs
        but gives different numbers on different meshes.
      summarize_config_fn: a function (directory, writer, step) that is called once, such as
        `gin_utils.summarize_gin_config`; or None.
      inference_evaluator_cls: the class `seqio.Evaluator`, or None.
      get_dataset_fn: `utils.get_dataset`, or None.
      concurrent_metrics: has no effect. Metrics are read while training continues, and actions run
        in either case.
      actions: what may end the run early: for 'TRAIN', 'TRAIN_EVAL' and 'INFER_EVAL', a list of
        `trainer.EarlyStoppingAction` and `trainer.TerminateOnNanAction`. Every run also ends after
        a step that is not finite, unless its optimizer has `skip_nan_updates`.
      train_eval_get_dataset_fn: `utils.get_training_eval_datasets`, or None.
      prepare_train_iter_fn: `utils.prepare_train_iter`, or None.
      run_eval_before_training: whether all evaluations also run before the first step.
      train_state_initializer_cls: `utils.TrainStateInitializer`, or None.
      use_orbax: whether checkpoints are written through Orbax. Otherwise, they have T5X's older
        format, which one process can write to a folder of this machine. Both are read.
      verify_matching_vocabs_fn: a function of a `DatasetConfig` and the model, which raises an
        error if the task and the model have different vocabularies. None checks only their sizes.
      gc_period: the number of steps between collections of Python's garbage. 0 leaves them to
        Python.

    Returns:
      The state after the last step.

    Raises:
      ConfigError: if a setting cannot be honoured.
    """
    return train_here(translate(locals()))


def translate(settings: Mapping[str, Any]) -> TrainConfig:
    """Translates all arguments of `train`, by name, to the settings of a run.

    Raises a ConfigError if a setting cannot be honoured.
    """
    _check(settings)
    model, trainer = settings['model'], settings['trainer_cls']()  # gin provides its arguments
    training = settings['train_dataset_cfg']
    with raise_on_all_processes():
        task = training.training_task(model)
        length = training.lengths(task)
        evaluators = _evaluators(settings, task)
    if (verify := settings['verify_matching_vocabs_fn']) is not None:
        with raise_on_all_processes():
            for name in DATASETS:
                if settings[name] is not None:
                    verify(settings[name], model)
    checkpoints, restore = settings['checkpoint_cfg'].translated()
    checkpoints = dataclasses.replace(checkpoints, use_orbax=settings['use_orbax'])
    periods = [period for period in (settings['eval_period'], checkpoints.period) if period]
    relative, total_steps = settings['relative_steps'], settings['total_steps']
    last_step = total_steps if relative is None else relative
    seed, skips_nan = settings['random_seed'], getattr(model.optimizer_def, 'skip_nan_updates', 0)
    tasks = tasks_of(evaluators, settings['train_eval_dataset_cfg'])
    conditions, stops_on_nan = translate_actions(f'{KEY}.actions', settings['actions'], tasks)
    _report_differences(settings, DECODED in evaluators)
    return TrainConfig(
        model_dir=settings['model_dir'],
        objective=model.objective(),
        partitioner=settings['partitioner'],
        optimizer=trainer.optimizer(model),
        task=task,
        total_steps=last_step,
        relative_steps=relative is not None,
        batch_size=training.batch_size,
        sequence_length=length,
        evaluators=evaluators,
        evaluate_first=settings['run_eval_before_training'],
        stop_when=conditions,
        not_finite='stop' if stops_on_nan or not skips_nan else 'ignore',
        checkpoints=checkpoints,
        restore=restore,
        writers=writers_with(f'{KEY}.summarize_config_fn', settings['summarize_config_fn']),
        num_microbatches=1 if not trainer.num_microbatches else trainer.num_microbatches,
        weight_metrics=trainer.weight_metrics_computer is not None,
        log_every=settings['stats_period'] or min(periods, default=max(last_step, 1)),
        collect_garbage_every=settings['gc_period'],
        seed=seed,
        data_seed=training.seed,
        prng_impl='unsafe_rbg' if settings['use_hardware_rng'] or seed is None else None,
        split_key=True,
    )


def _check(settings: Mapping[str, Any]) -> None:
    """Checks that every setting can be honoured."""
    check_standard(KEY, settings)
    bools = ('use_orbax', 'concurrent_metrics', 'run_eval_before_training', 'use_hardware_rng')
    check_bools(KEY, **{name: settings[name] for name in bools})
    verify = settings['verify_matching_vocabs_fn']
    if verify is not None and not callable(verify):
        raise refusal(f'{KEY}.verify_matching_vocabs_fn', verify, 'it must be a function or None')
    expect_class(f'{KEY}.trainer_cls', settings['trainer_cls'], Trainer, '@trainer.Trainer')
    written = '@models.EncoderDecoderModel()'
    expect(f'{KEY}.model', settings['model'], BaseTransformerModel, written)
    written = '@utils.CheckpointConfig()'
    expect(f'{KEY}.checkpoint_cfg', settings['checkpoint_cfg'], CheckpointConfig, written)
    for name in DATASETS:
        if settings[name] is not None or name == 'train_dataset_cfg':
            expect(f'{KEY}.{name}', settings[name], DatasetConfig, '@utils.DatasetConfig()')
    for name in ('eval_period', 'gc_period'):
        check_counts(minimum=0, **{f'{KEY}.{name}': settings[name]})
    if settings['relative_steps'] is None:
        check_counts(minimum=0, **{f'{KEY}.total_steps': settings['total_steps']})
    for name in ('eval_steps', 'stats_period', 'relative_steps'):
        if settings[name] is not None:
            check_counts(**{f'{KEY}.{name}': settings[name]})


def _evaluators(settings: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """The evaluators of the losses and of the decoded text, by name."""
    model, every = settings['model'], settings['eval_period']
    num_batches, config = settings['eval_steps'], settings['train_eval_dataset_cfg']
    evaluators: dict[str, Any] = {}
    if config is not None:
        evaluators = held_out_evaluators(model, config, task, every=every, num_batches=num_batches)
    key = f'{KEY}.inference_evaluator_cls'
    evaluator = seqio.open_evaluator(key, settings['inference_evaluator_cls'])
    decoding = decoded_evaluators(model, settings['infer_eval_dataset_cfg'], evaluator, every=every)
    return {**evaluators, **decoding}


def _report_differences(settings: Mapping[str, Any], decodes: bool) -> None:
    """Reports settings that behave differently from T5X."""
    console, optimizer = RunConsole(), settings['model'].optimizer_def
    if settings['relative_steps'] is not None and settings['total_steps']:
        console.say(f'{KEY}.total_steps is not used, because relative_steps is set')
    if settings['infer_eval_dataset_cfg'] is not None and not decodes:
        console.say(f'{KEY}.infer_eval_dataset_cfg is skipped: no task has metrics of decoded text')
    if isinstance(optimizer, optax.GradientTransformation):
        console.say(
            'trainer.Trainer.learning_rate_fn is not used: the optax transformation of the model '
            'has its own learning rate, as in T5X'
        )


# T5X precompiles its step with this learning rate, which changes neither layout nor memory.
PRECOMPILED_RATE = 1e-3


def precompile(
    *,
    model: Any,
    train_dataset_cfg: DatasetConfig,
    partitioner: BasePartitioner,
    model_dir: str,
    random_seed: int | None = None,
    get_dataset_fn: Any = None,
) -> dict[str, Any]:
    """Compiles the train step, and writes its programs and the memory it needs. It trains nothing.

    Args:
      model: network, vocabulary, optimizer and loss.
      train_dataset_cfg: the rows, of which only the shapes matter.
      partitioner: lays out data, state and step over the mesh.
      model_dir: the folder of the files; see `train.planning.precompiling.precompile`.
      random_seed: the seed of the random numbers in the step. None or 0 means 42, as in T5X.
      get_dataset_fn: must be None.

    Returns:
      The sizes in memory, in bytes per device.

    Raises:
      ConfigError: if a setting cannot be honoured.
    """
    from train.planning.precompiling import precompile as precompile_here  # slow to import

    check_off(
        'train_script.precompile.get_dataset_fn',
        get_dataset_fn,
        'tasks of train.data make the rows',
    )
    expect(
        'train_script.precompile.train_dataset_cfg',
        train_dataset_cfg,
        DatasetConfig,
        '@utils.DatasetConfig()',
    )
    task = train_dataset_cfg.training_task(model)
    model.check_vocabulary(task)
    return precompile_here(
        TrainConfig(
            model_dir=model_dir,
            objective=model.objective(),
            partitioner=partitioner,
            optimizer=with_learning_rate(
                model.optimizer_def, optax.constant_schedule(PRECOMPILED_RATE)
            ),
            task=task,
            total_steps=1,
            batch_size=train_dataset_cfg.batch_size,
            sequence_length=train_dataset_cfg.lengths(task),
            evaluators={},
            seed=random_seed or 42,
        )
    )
