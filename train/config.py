"""The settings of a run, checked one by one and together when they are created."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import optax

from partitioning import BasePartitioner
from partitioning.hardware import OptionValue
from train import setting_checks as checks
from train.checkpoints import CheckpointConfig, RestoreConfig
from train.data import Lengths, Prefetch, Task
from train.data.rows.packing import check_lengths
from train.errors import ConfigError, FailurePolicy
from train.machine.compiling import CacheSetting
from train.objectives import Objective
from train.optimizers import Optimizer
from train.processes.watchdog import WatchdogConfig
from train.reporting.writers import JsonWriter, MetricWriter, TensorBoardWriter

PrngImpl = Literal['threefry2x32', 'rbg', 'unsafe_rbg']
GradientDType = Literal['float32', 'bfloat16']
NotFinitePolicy = Literal['stop', 'skip', 'roll_back', 'ignore']


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
        directory; with several processes, `<model_dir>/programs`. Only programs with
        the seal of this user are read.
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
        checks.check_profile(self.profile_steps, last_step, self.model_dir)
        checks.check_partitioner(self.partitioner)
        checks.check_batch(self.partitioner, self.batch_size, self.num_microbatches)


# What each setting must be by itself. `TrainConfig` checks how settings fit together.
CHECKS: dict[str, checks.Check] = {
    'model_dir': checks.check_path,
    'objective': checks.instance(Objective, written='NextToken(model=...)'),
    'partitioner': checks.instance(BasePartitioner, written="PjitPartitioner(layout='fsdp')"),
    'optimizer': checks.instance(
        Optimizer, optax.GradientTransformation, written='optax.adamw(1e-3)'
    ),
    'task': checks.instance(Task, written='CausalLM(source=...)'),
    'total_steps': checks.count(0),
    'batch_size': checks.count(),
    'relative_steps': checks.check_switch,
    'sequence_length': check_lengths,
    'evaluators': checks.check_evaluators,
    'checkpoints': checks.instance(CheckpointConfig, written='CheckpointConfig()'),
    'evaluate_first': checks.check_switch,
    'stop_when': checks.check_conditions,
    'not_finite': checks.one_of(NotFinitePolicy),
    'max_skips': checks.count(),
    'max_roll_backs': checks.count(),
    'restore': checks.instance(RestoreConfig, written='RestoreConfig(path=...)', optional=True),
    'hooks': checks.functions('your own function (state, step, metrics)'),
    'writers': checks.functions(
        '@JsonWriter, @TensorBoardWriter, @WeightsAndBiasesWriter, or your own class',
        JsonWriter.__module__,
    ),
    'metrics_on_failure': checks.one_of(FailurePolicy),
    'num_microbatches': checks.count(),
    'gradient_dtype': checks.one_of(GradientDType),
    'accumulation_dtype': checks.one_of(GradientDType),
    'ema_decay': checks.check_decay,
    'ema_debias': checks.check_switch,
    'evaluate_ema': checks.check_switch,
    'weight_metrics': checks.check_switch,
    'log_every': checks.count(),
    'compiler_options': checks.check_compiler_options,
    'compilation_cache': checks.check_cache,
    'prefetch': checks.instance(Prefetch, written='Prefetch()'),
    'collect_garbage_every': checks.count(0),
    'seed': checks.count(0, optional=True),
    'data_seed': checks.count(0, optional=True),
    'prng_impl': checks.one_of(PrngImpl, optional=True),
    'split_key': checks.check_switch,
    'watchdog': checks.instance(WatchdogConfig, written='WatchdogConfig()', optional=True),
}
