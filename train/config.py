"""The settings of a run, checked one by one and together when they are created."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import optax
from jax.sharding import AxisType

from partitioning import BasePartitioner
from partitioning.hardware import OptionValue, check_option
from train.checkpoints import CheckpointConfig, RestoreConfig
from train.data import Lengths, Prefetch, Task
from train.data.rows.packing import check_lengths
from train.errors import ConfigError, FailurePolicy, check_counts, check_number, first_line
from train.machine.compiling import CacheSetting
from train.objectives import Objective
from train.optimizers import Optimizer
from train.paths import as_path, is_remote
from train.processes.watchdog import WatchdogConfig
from train.reporting.writers import JsonWriter, MetricWriter, TensorBoardWriter

PrngImpl = Literal['threefry2x32', 'rbg', 'unsafe_rbg']
GradientDType = Literal['float32', 'bfloat16']
NotFinitePolicy = Literal['stop', 'skip', 'roll_back', 'ignore']
Check = Callable[[str, Any], None]


class StopCondition(Protocol):
    """Decides after each record of a metric whether the run ends.

    `metric` is the metric, such as 'train/loss' or the score 'eval/loss'.
    """

    @property
    def metric(self) -> str: ...

    def reason(self, values: Sequence[float]) -> str | None:
        """Returns why the run ends, or None.

        `values` are the values of the metric since the run started or resumed, the newest last.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a run.

    Usage:
      train(TrainConfig(
        model_dir='runs/digits',
        objective=Supervised(model=Cnn(), inputs='image', row_loss=...),
        partitioner=PjitPartitioner(layout='fsdp'),
        optimizer=optax.adamw(1e-3),
        task=Examples(training={'image': images, 'label': labels}),
        total_steps=1000,
        batch_size=64,
      ))

    Attributes:
      model_dir: the folder for checkpoints, metrics and the configuration. It may be in a store,
        such as gs:// or s3://.
      objective: the model and what it learns, such as `NextToken` or `Supervised`.
      partitioner: lays out data, state and steps over the mesh.
      optimizer: an optax transformation, or an `Optimizer` with its learning rate.
      task: the training data, and how it becomes rows.
      total_steps: the step at which the run ends. 0 trains nothing: the run only evaluates the
        state that it starts from.
      relative_steps: whether `total_steps` counts from the step that the run starts from, which is
        the step of its checkpoint, and not from 0. Each time the run resumes, it counts anew.
      batch_size: the number of rows in the global batch.
      sequence_length: the number of tokens in a row, for tasks on text. Tasks with inputs and
        targets take both numbers, such as {'inputs': 512, 'targets': 114}.
      evaluators: what is evaluated, by name. Each has an attribute `every`, the number of steps
        between evaluations (0: only at the end), and a method `run(state, step) -> scores`. The
        score x of the evaluator y is reported as 'y/x'. By default, 'eval' is `HeldOut()`, if the
        task holds out anything.
      checkpoints: when to save checkpoints, and which to keep.
      evaluate_first: whether everything is evaluated before the first step as well.
      stop_when: conditions that end the run early, such as `EarlyStopping`. The last state is saved
        and evaluated.
      not_finite: what happens if the loss, the gradients, the new parameters, the optimizer state
        or other variables of a step are NaN or infinite. Only 'ignore' evaluates or saves such a
        state. 'stop' ends the run with an error. 'skip' keeps the state as it was before the step,
        which needs memory for a second copy of the state. 'roll_back' restores the newest
        checkpoint and continues with the next batch. 'ignore' does not look.
      max_skips: the number of steps in a row after which 'skip' ends the run.
      max_roll_backs: how often 'roll_back' returns to the same checkpoint before it ends the run.
      restore: the checkpoint of another run to start from, including its step, if `model_dir` has
        no checkpoint. By default, a run starts from new parameters.
      hooks: functions (state, step, metrics) that run after each step. The state is valid until
        they return. Metrics are jax.Arrays; reading them waits for the step.
      writers: where metrics go; see `train.reporting.writers`.
      metrics_on_failure: what happens if metrics cannot be written, for example because the disk is
        full. 'continue' says so once, and the records are written when that works again. 'stop'
        ends the run with an error.
      num_microbatches: the number of parts of a batch that are computed one after another. Each has
        its own dropout masks.
      gradient_dtype: the dtype of the gradients that the optimizer gets, 'float32' or 'bfloat16'.
      accumulation_dtype: the dtype in which the gradients of microbatches are summed, 'float32' or
        'bfloat16'.
      ema_decay: the decay of an exponential moving average of the parameters, such as 0.999, which
        the state keeps in the layout of the parameters; see `train.optimizers.averaging`. By
        default, no average is kept. A run that resumes from a checkpoint without averages starts
        them from the parameters of the checkpoint.
      ema_debias: whether the average forgets the parameters from which it starts, as Adam corrects
        its bias. Otherwise they have the weight ema_decay ** n after n updates.
      evaluate_ema: whether evaluations use the average in place of the parameters, if the run keeps
        one; during training, and of a checkpoint.
      weight_metrics: whether to add the metrics of every parameter to the training metrics.
      log_every: the number of steps between records of training metrics.
      profile_steps: the first and the last step of a trace for TensorBoard or Perfetto, which is
        written to `<model_dir>/profile`. By default, nothing is traced.
      compiler_options: the options with which the steps of the run are compiled. 'auto' takes
        `partitioning.hardware.DEFAULT_OPTIONS` for the chips of the mesh. A dict adds to them,
        replaces them, and with the value None removes them; the empty dict removes all. The plan of
        the run records them.
      compilation_cache: the folder in which compiled programs are kept, so that the next start need
        not compile them: 'auto', a path, or None. 'auto' is the folder that the user has given to
        jax, such as JAX_COMPILATION_CACHE_DIR, or else `meshwright/programs` in the user's cache
        directory; with several processes, `<model_dir>/programs`. Only people whom you trust may
        be able to write to it.
      prefetch: how far ahead of the steps batches are read.
      collect_garbage_every: the number of steps between collections of Python's garbage, which
        then happen at no other time. 0 leaves them to Python.
      seed: the seed of the initial parameters and dropout. None chooses one by the time, and keeps
        it when the run resumes.
      data_seed: the seed of the order of the data, by default `seed`.
      watchdog: how long the run may make no progress before it is ended with exit code 75 and the
        stacks of all threads. None lets it wait forever.
      prng_impl: jax's implementation of random numbers: 'threefry2x32', 'rbg' or 'unsafe_rbg', by
        default the one that jax's configuration names. The last two are faster on TPUs, and their
        numbers depend on the mesh.
      split_key: whether the key of the seed is split into one for the initial parameters and one
        for the steps, as T5X does. Otherwise, both use the key of the seed.

    Raises:
      ConfigError, ValueError: if a setting is malformed, or if settings conflict.
    """

    model_dir: str | os.PathLike[str]
    objective: Objective
    partitioner: BasePartitioner
    optimizer: Optimizer | optax.GradientTransformation
    task: Task
    total_steps: int
    batch_size: int
    relative_steps: bool = False
    sequence_length: Lengths = None
    evaluators: Mapping[str, Any] = dataclasses.field(default=None)  # type: ignore[arg-type]
    checkpoints: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    evaluate_first: bool = False
    stop_when: Sequence[StopCondition] = ()
    not_finite: NotFinitePolicy = 'stop'
    max_skips: int = 10
    max_roll_backs: int = 3
    restore: RestoreConfig | None = None
    hooks: Sequence[Callable[..., None]] = ()
    writers: Sequence[Callable[..., MetricWriter]] = (JsonWriter, TensorBoardWriter)
    metrics_on_failure: FailurePolicy = 'continue'
    num_microbatches: int = 1
    gradient_dtype: GradientDType = 'float32'
    accumulation_dtype: GradientDType = 'float32'
    ema_decay: float | None = None
    ema_debias: bool = True
    evaluate_ema: bool = True
    weight_metrics: bool = False
    log_every: int = 10
    profile_steps: Sequence[int] | None = None
    compiler_options: Literal['auto'] | Mapping[str, OptionValue | None] = 'auto'
    compilation_cache: CacheSetting = 'auto'
    prefetch: Prefetch = dataclasses.field(default_factory=Prefetch)
    collect_garbage_every: int = 0
    seed: int | None = 0
    data_seed: int | None = None
    prng_impl: PrngImpl | None = None
    split_key: bool = False
    watchdog: WatchdogConfig | None = dataclasses.field(default_factory=WatchdogConfig)

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            check(name, getattr(self, name))
        if self.accumulation_dtype != 'float32' and self.num_microbatches == 1:
            raise ConfigError(
                f'TrainConfig.accumulation_dtype is {self.accumulation_dtype!r}, but '
                'num_microbatches is 1, so nothing is summed: remove it'
            )
        if self.ema_decay is None and not (self.ema_debias and self.evaluate_ema):
            name = 'evaluate_ema' if self.ema_debias else 'ema_debias'
            raise ConfigError(
                f'TrainConfig.{name} is False, but ema_decay is not set, so no average is kept: '
                f'set ema_decay, such as 0.999, or remove {name}'
            )
        last_step = math.inf if self.relative_steps else self.total_steps
        _check_profile(self.profile_steps, last_step, self.model_dir)
        check_partitioner(self.partitioner)
        check_batch(self.partitioner, self.batch_size, self.num_microbatches)


def _count(minimum: int = 1, *, optional: bool = False) -> Check:
    """A check for an integer of at least `minimum`, or None if the setting is optional."""

    def check(name: str, value: Any) -> None:
        if value is not None or not optional:
            check_counts(minimum, **{name: value})

    return check


def _one_of(kind: Any, *, optional: bool = False) -> Check:
    """A check for one of the words of a Literal."""

    def check(name: str, value: Any) -> None:
        if value not in get_args(kind) and not (optional and value is None):
            raise ConfigError(f'TrainConfig.{name} is {value!r}: use one of {get_args(kind)}')

    return check


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f'TrainConfig.{name} is {value!r}: use True or False')


def _check_decay(name: str, value: Any) -> None:
    check_number(f'TrainConfig.{name}', value, '[0, 1) or None')


def _instance(*kinds: type, written: str, optional: bool = False) -> Check:
    """A check for an object of one of these types (`@Name` in gin is the class).

    `written` is what to write, for the message.
    """

    def check(name: str, value: Any) -> None:
        if isinstance(value, kinds) or (optional and value is None):
            return
        shown, names, advice = repr(value), ' or '.join(k.__name__ for k in kinds), written
        if isinstance(value, type):
            shown = f'the class {value.__name__}'
            advice = f'{value.__name__}(), or @{value.__name__}() in a gin file, with parentheses'
        elif '\n' in shown or len(shown) > 60:
            shown = f'of type {type(value).__name__}'
        raise ConfigError(
            f'TrainConfig.{name} is {shown}, but it must be an instance of {names}: write {advice}'
        )

    return check


def _check_path(name: str, value: Any) -> None:
    as_path(f'TrainConfig.{name}', value)


def _check_compiler_options(name: str, options: Any) -> None:
    if not isinstance(options, Mapping):
        if options == 'auto':
            return
        raise ConfigError(
            f"TrainConfig.{name} is {options!r}: write 'auto', or a dict such as "
            "{'xla_tpu_scoped_vmem_limit_kib': 65536}"
        )
    for option, value in options.items():
        try:
            check_option(option, False if value is None else value)
        except ValueError as error:
            raise ConfigError(f'TrainConfig.{name}: {error}') from None


def _check_cache(name: str, setting: Any) -> None:
    if setting is not None and setting != 'auto':
        _check_path(name, setting)


def _check_evaluators(name: str, evaluators: Any) -> None:
    """Checks that evaluators have the attribute `every` and the method `run` or `prepare`."""
    if evaluators is None:
        return
    if not isinstance(evaluators, Mapping):
        raise ConfigError(
            f"TrainConfig.{name} is {evaluators!r}: write {{'eval': HeldOut(), ...}}, or {{}}"
        )
    for key, evaluator in evaluators.items():
        setting = f'TrainConfig.{name}[{key!r}]'
        called = getattr(evaluator, 'prepare', None) or getattr(evaluator, 'run', None)
        if isinstance(evaluator, type) or not callable(called):
            raise ConfigError(
                f'{setting} is {evaluator!r}: it must be an object with the attribute every and '
                'the method run(state, step)'
            )
        every: Any = getattr(evaluator, 'every', None)
        check_counts(minimum=0, **{f'{setting}.every': every})


def _functions(written: str, home: str = '') -> Check:
    """A check for a list of functions or classes. `written` says what to write.

    Gin files may name others of these packages, and only `home` has some for this setting.
    """
    packages = ('jax', 'flax', 'optax', 'partitioning', 'train')

    def check(name: str, functions: Any) -> None:
        if not isinstance(functions, list | tuple) or not all(map(callable, functions)):
            raise ConfigError(
                f'TrainConfig.{name} is {functions!r}: it must be a list of functions or classes'
            )
        for i, function in enumerate(functions):
            module = getattr(function, '__module__', None) or ''
            if module.partition('.')[0] in packages and module != home:
                shown = f'{module}.{getattr(function, "__name__", type(function).__name__)}'
                raise ConfigError(f'TrainConfig.{name}[{i}] is {shown}: write {written}')

    return check


def _check_conditions(name: str, conditions: Any) -> None:
    written = "write [EarlyStopping(metric='eval/loss')]"
    if not isinstance(conditions, list | tuple):
        raise ConfigError(f'TrainConfig.{name} is {conditions!r}: {written}')
    for i, condition in enumerate(conditions):
        has_metric = isinstance(getattr(condition, 'metric', None), str)
        if isinstance(condition, type) or not has_metric or not hasattr(condition, 'reason'):
            raise ConfigError(
                f'TrainConfig.{name}[{i}] is {condition!r}: it must have a metric and '
                f'reason(values); {written}'
            )


# What each setting must be by itself. `TrainConfig` checks how settings fit together.
CHECKS: dict[str, Check] = {
    'model_dir': _check_path,
    'objective': _instance(Objective, written='NextToken(model=...)'),
    'partitioner': _instance(BasePartitioner, written="PjitPartitioner(layout='fsdp')"),
    'optimizer': _instance(Optimizer, optax.GradientTransformation, written='optax.adamw(1e-3)'),
    'task': _instance(Task, written='CausalLM(source=...)'),
    'total_steps': _count(0),
    'batch_size': _count(),
    'relative_steps': _check_switch,
    'sequence_length': check_lengths,
    'evaluators': _check_evaluators,
    'checkpoints': _instance(CheckpointConfig, written='CheckpointConfig()'),
    'evaluate_first': _check_switch,
    'stop_when': _check_conditions,
    'not_finite': _one_of(NotFinitePolicy),
    'max_skips': _count(),
    'max_roll_backs': _count(),
    'restore': _instance(RestoreConfig, written='RestoreConfig(path=...)', optional=True),
    'hooks': _functions('your own function (state, step, metrics)'),
    'writers': _functions(
        '@JsonWriter, @TensorBoardWriter, @WeightsAndBiasesWriter, or your own class',
        JsonWriter.__module__,
    ),
    'metrics_on_failure': _one_of(FailurePolicy),
    'num_microbatches': _count(),
    'gradient_dtype': _one_of(GradientDType),
    'accumulation_dtype': _one_of(GradientDType),
    'ema_decay': _check_decay,
    'ema_debias': _check_switch,
    'evaluate_ema': _check_switch,
    'weight_metrics': _check_switch,
    'log_every': _count(),
    'compiler_options': _check_compiler_options,
    'compilation_cache': _check_cache,
    'prefetch': _instance(Prefetch, written='Prefetch()'),
    'collect_garbage_every': _count(0),
    'seed': _count(0, optional=True),
    'data_seed': _count(0, optional=True),
    'prng_impl': _one_of(PrngImpl, optional=True),
    'split_key': _check_switch,
    'watchdog': _instance(WatchdogConfig, written='WatchdogConfig()', optional=True),
}


def _check_profile(steps: Any, total_steps: float, model_dir: Any) -> None:
    if steps is None:
        return
    if is_remote(model_dir):
        raise ConfigError(
            f'TrainConfig.profile_steps is {steps!r}, but jax writes traces to local folders only, '
            f'not to {model_dir}: use a local model_dir for a short run with a trace'
        )
    valid = isinstance(steps, list | tuple) and len(steps) == 2
    if not valid or not all(isinstance(s, int) for s in steps) or not 1 <= steps[0] <= steps[1]:
        raise ConfigError(
            f'TrainConfig.profile_steps is {steps!r}: write the first and the last step, such as '
            '(10, 12)'
        )
    if steps[1] > total_steps:
        raise ConfigError(
            f'TrainConfig.profile_steps is {steps!r}, but the run ends at step {total_steps}'
        )


def check_partitioner(partitioner: BasePartitioner) -> None:
    """Checks that the partitioner has a mesh, and settings that this trainer supports."""
    try:
        axis_types = partitioner.mesh.axis_types
    except RuntimeError as error:  # jax raises it for a backend that does not exist.
        raise ConfigError(f'the partitioner has no mesh: {first_line(error)}') from error
    if any(axis_type is not AxisType.Auto for axis_type in axis_types):
        raise ConfigError(
            f'the mesh has the axis types {axis_types}, but this trainer needs Auto axes: remove '
            'axis_types'
        )
    if not partitioner.params_on_devices:
        raise ConfigError(
            'PjitPartitioner.params_on_devices is False, but this trainer always creates and '
            'restores parameters on devices: remove the setting'
        )


def check_batch(partitioner: BasePartitioner, batch_size: int, num_microbatches: int) -> None:
    """Checks that the data axis divides the batch and each microbatch."""
    partitioner.get_data_layout(batch_size)
    parts = partitioner.data_mesh_size * num_microbatches
    if batch_size % parts:
        raise ConfigError(
            f'batch_size {batch_size} cannot be split into {num_microbatches} microbatches over a '
            f'data axis of size {partitioner.data_mesh_size}: use a multiple of {parts}'
        )
