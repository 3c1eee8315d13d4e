"""What training and the evaluation of a checkpoint have in common: data, layout and evaluators."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from etils import epath

from partitioning import Plan, TrainState
from partitioning.hardware import OptionValue, option_values
from partitioning.plan import Audit
from partitioning.state import path_str
from train.config import TrainConfig
from train.data import OpenTask, Task, record
from train.data.feed import abstract_batch
from train.data.rows.packing import Row
from train.errors import ConfigError
from train.evaluators.held_out import HeldOut
from train.machine.compiling import choose_options, describe_options, use_compilation_cache
from train.machine.host_memory import check_batch_fits
from train.objectives import Objective, TokenLoss
from train.optimizers import AveragedState, as_transformation, with_average
from train.paths import as_folder
from train.processes.activity import calling_compiler
from train.processes.together import agree_on, secret_of_programs
from train.reporting.console import RunConsole
from train.reporting.memory import device_memory
from train.reporting.reports import (
    describe_audit,
    describe_data,
    describe_devices,
    describe_epochs,
    describe_parameters,
    mesh_table,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A configuration with the layout of its state and of its batches: all that its steps need.

    `batch` has the ShapeDtypeStructs of a training batch, each [batch, ...]. `remat` says what
    'auto' chose to keep for the backward pass; '' if the settings say it.
    """

    config: TrainConfig
    batch: Mapping[str, jax.ShapeDtypeStruct]
    tx: optax.GradientTransformation
    plan: Plan
    key: jax.Array
    step_key: jax.Array
    remat: str = ''

    @property
    def compiler_options(self) -> dict[str, OptionValue]:
        """The options with which its programs are compiled, as `partition` takes them."""
        return option_values(self.plan.compiler_options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(PlannedRun):
    """A planned run with its data.

    Attributes:
      evaluators: what is evaluated, by name: `TrainConfig.evaluators` or its default.
      evaluated: the data of each evaluator that reads any, by the name of the evaluator.
      rows: the training rows, endless and with random access.
    """

    console: RunConsole
    directory: epath.Path
    data: OpenTask
    evaluators: Mapping[str, Any]
    evaluated: Mapping[str, OpenTask]
    rows: Any

    @functools.cached_property
    def audit(self) -> Audit:
        """The bytes of the state per device, and what is replicated."""
        return self.plan.audit()

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        """The record of the data, for `train.data.record`."""
        c = self.config
        return record.data_record(
            self.data,
            self.evaluated,
            batch_size=c.batch_size,
            sequence_length=c.sequence_length,
            seed=data_seed(c),
            random_seed=c.seed,
            prng_impl=c.prng_impl,
        )

    def to_evaluate(self, state: TrainState) -> TrainState:
        """The state that evaluators get: with the averages of its parameters, if it keeps any."""
        return with_average(state) if self.config.evaluate_ema else state

    def from_step(self, step: int) -> Run:
        """Returns the run with the last step that follows from its first one."""
        config = self.config
        if not config.relative_steps:
            return self
        total_steps = step + config.total_steps
        changes: dict[str, Any] = {'total_steps': total_steps, 'relative_steps': False}
        return dataclasses.replace(self, config=dataclasses.replace(config, **changes))


def prepare(config: TrainConfig, console: RunConsole | None = None) -> Run:
    """Opens the data of a run, and decides the layout of its state. No array is created.

    `console` prints its progress, by default on standard output. Raises a ConfigError or ValueError
    if the data cannot be read, or a setting cannot be honoured.
    """
    console, partitioner = console or RunConsole(), config.partitioner
    console.heading(describe_devices(partitioner.mesh))
    console.show(mesh_table(partitioner.mesh))

    with console.tokenizing() as progress, console.phase('opening the data'):
        directory = as_folder('MODEL_DIR', config.model_dir)
        lengths = config.sequence_length
        each = lengths.values() if isinstance(lengths, Mapping) else [lengths]
        tokens = sum(one for one in each if one) or 1
        check_batch_fits(config.batch_size, tokens, jax.process_count())
        kept = config.compilation_cache
        secret = None if kept is None else secret_of_programs(console.say)
        use_compilation_cache(kept, directory, secret, console.say)
        evaluators = choose_evaluators(config)
        data, evaluated = open_tasks(config, evaluators, progress)
        if config.seed is None:
            # A run that resumes has the seed that its record contains.
            seed = record.recorded_setting(directory, 'random_seed')
            how = f'of the earlier run in {directory}'
            if seed is None:
                seed, how = agree_on(int(time.time()) % 2**31), 'chosen by the time'
            console.say(f'seed {seed}, {how}')
            config = dataclasses.replace(config, seed=seed)
        rows = data.training(data_seed(config))
    with console.phase('planning the layout'):
        planned = plan_run(config, rows[0])
    run = Run(
        **vars(planned),
        console=console,
        directory=directory,
        data=data,
        evaluators=evaluators,
        evaluated=evaluated,
        rows=rows,
    )
    record.check_same_everywhere(run.record)
    if isinstance(config.objective, TokenLoss) and config.objective.vocab_size is None:
        num_logits = config.objective.count_logits(run.plan.abstract_state, run.batch)
        check_vocabulary(config.objective, config.task.num_tokens, num_logits)
    return run


def plan_run(config: TrainConfig, row: Row) -> PlannedRun:
    """Decides the layout of the state and of the batches of a run. No array is created.

    `row` is a row of its training data, or any row with the same arrays. Raises a ConfigError or
    ValueError if the objective is malformed, or the rules do not fit the state.
    """
    partitioner = config.partitioner
    batch = abstract_batch(row, config.batch_size, partitioner)
    made: list[optax.GradientTransformation] = []

    def init(key: jax.Array) -> TrainState:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dict(batch))
        variables = config.objective.init(key, zeros)
        if not isinstance(variables, Mapping) or 'params' not in variables:
            found = list(variables) if isinstance(variables, Mapping) else type(variables).__name__
            raise ConfigError(
                f'{type(config.objective).__name__}.init returns {found}: it must return a dict '
                "with the key 'params'"
            )
        # Only here do the parameters carry their names, which masks of the optimizer need.
        names = getattr(partitioner.logical_axis_rules, 'names', ())
        made.append(as_transformation(config.optimizer, variables, names))
        kind = TrainState if config.ema_decay is None else AveragedState
        return kind.create(variables, made[-1])

    # Jitted, it is one program. Otherwise, each of its operations is compiled.
    make_key = functools.partial(jax.random.key, config.seed or 0, impl=config.prng_impl)
    key = step_key = jax.jit(make_key)()
    if config.split_key:
        key, step_key = jax.random.split(key)
    plan = dataclasses.replace(
        partitioner.plan(init, key),
        compiler_options=choose_options(config.compiler_options, partitioner.mesh),
    )
    config, remat = _choose_remat(config, plan)
    return PlannedRun(
        config=config,
        batch=batch,
        tx=made[-1],
        plan=plan,
        key=key,
        step_key=step_key,
        remat=remat,
    )


def _choose_remat(config: TrainConfig, plan: Plan) -> tuple[TrainConfig, str]:
    """Replaces `remat = 'auto'`. A run of another model does not load the built-in ones for it."""
    model = getattr(config.objective, 'model', None)
    if getattr(getattr(model, 'config', None), 'remat', None) != 'auto':
        return config, ''
    from train.running.rematerialization import choose_remat

    return choose_remat(config, plan)


def initialize_some(run: Run, paths: Collection[str]) -> dict[str, jax.Array]:
    """Makes the arrays of a new run at some paths of its state, each in its shards."""

    def select(state: Any) -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return {path: x for p, x in leaves if (path := path_str(p)) in paths}

    run.console.say(f'initializing {len(paths):,} arrays that are not restored')
    shardings = select(run.plan.shardings)
    with calling_compiler():
        return jax.jit(lambda k: select(run.plan.init(k)), out_shardings=shardings)(run.key)


def data_seed(config: TrainConfig) -> int:
    """Returns the seed of the order of the training rows."""
    return (config.seed or 0) if config.data_seed is None else config.data_seed


def report_run(run: Run) -> None:
    """Prints the data, the parameters and the layout of a run."""
    say = run.console.say
    for line in describe_data(run.record['parts']):
        say(line)
    rows = run.config.total_steps * run.config.batch_size
    say(describe_epochs(rows, run.data.rows_per_epoch))
    title, table = describe_parameters([r for r in run.plan.rows if r.role == 'parameters'])
    run.console.heading(title)
    run.console.show(table)
    memory = device_memory(run.config.partitioner.mesh.devices.flat[0])
    for line in describe_audit(run.audit, memory):
        say(line)
    if (decay := run.config.ema_decay) is not None:
        used = 'evaluations use it' if run.config.evaluate_ema else 'evaluations do not use it'
        say(f'an average of the parameters is kept, with decay {decay}; {used}')
    if run.remat:
        say(run.remat)
    for line in describe_options(run.plan.compiler_options):
        say(line)


def choose_evaluators(config: TrainConfig) -> Mapping[str, Any]:
    """Returns the evaluators of a run by name: by default, the loss of what the task holds out."""
    if config.evaluators is None:
        return {'eval': HeldOut()} if config.task.holds_out else {}
    return config.evaluators


def open_tasks(
    config: TrainConfig, evaluators: Mapping[str, Any], progress: Any
) -> tuple[OpenTask, dict[str, OpenTask]]:
    """Opens the training task and the tasks of the evaluators.

    Raises a ConfigError if a task cannot be opened, if the vocabulary of the model is too small, or
    if tasks have different tokenizers.
    """
    tasks: dict[str, Task] = {}
    for name, evaluator in evaluators.items():
        if hasattr(evaluator, 'task'):
            task = config.task if evaluator.task is None else evaluator.task
            changes = hasattr(evaluator, 'change_task')  # it needs the task in another form
            tasks[name] = evaluator.change_task(task) if changes else task
    for task in (config.task, *tasks.values()):
        check_vocabulary(config.objective, task.num_tokens)
    data = config.task.open(config.sequence_length, progress)
    opened = {}
    for name, task in tasks.items():
        lengths = getattr(evaluators[name], 'sequence_length', None)
        lengths = config.sequence_length if lengths is None else lengths
        same = task is config.task and lengths == config.sequence_length
        opened[name] = data if same else task.open(lengths, progress)
    for name, one in opened.items():
        ours, theirs = data.tokenizer_identity, one.tokenizer_identity
        if ours != theirs:
            raise ConfigError(
                f'the evaluator {name!r} uses the tokenizer {str(theirs)[:28]}, but the training '
                f'uses {str(ours)[:28]}: use the same for both'
            )
    return data, opened


def check_vocabulary(
    objective: Objective, num_tokens: int | None, num_logits: int | None = None
) -> None:
    """Checks that the model's vocabulary has every token of the task, if both are known."""
    vocab_size = num_logits or getattr(objective, 'vocab_size', None)
    if vocab_size is not None and num_tokens is not None and vocab_size < num_tokens:
        raise ConfigError(
            f'vocab_size {vocab_size} is smaller than the {num_tokens} tokens of the task: use '
            f'{num_tokens} or more'
        )
