"""Checks of the settings of `TrainConfig`, whose messages say what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from jax.sharding import AxisType

from partitioning import BasePartitioner
from partitioning.hardware import check_option
from train.errors import ConfigError, check_counts, check_number, first_line
from train.paths import as_path, is_remote

Check = Callable[[str, Any], None]


def count(minimum: int = 1, *, optional: bool = False) -> Check:
    """A check for an integer of at least `minimum`, or None if the setting is optional."""

    def check(name: str, value: Any) -> None:
        if value is not None or not optional:
            check_counts(minimum, **{name: value})

    return check


def one_of(kind: Any, *, optional: bool = False) -> Check:
    """A check for one of the words of a Literal."""

    def check(name: str, value: Any) -> None:
        if value not in get_args(kind) and not (optional and value is None):
            raise ConfigError(f'TrainConfig.{name} is {value!r}: use one of {get_args(kind)}')

    return check


def check_switch(name: str, value: Any) -> None:
    """A switch is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f'TrainConfig.{name} is {value!r}: use True or False')


def check_decay(name: str, value: Any) -> None:
    """A decay is at least 0 and below 1, or None."""
    check_number(f'TrainConfig.{name}', value, '[0, 1) or None')


def instance(*kinds: type, written: str, optional: bool = False) -> Check:
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


def check_path(name: str, value: Any) -> None:
    """A path is one that `train.paths.as_path` reads."""
    as_path(f'TrainConfig.{name}', value)


def check_compiler_options(name: str, options: Any) -> None:
    """Options of the compiler are 'auto', or names with values that it takes."""
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


def check_cache(name: str, setting: Any) -> None:
    """A cache is None, 'auto' or a path."""
    if setting is not None and setting != 'auto':
        check_path(name, setting)


def check_evaluators(name: str, evaluators: Any) -> None:
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


def functions(written: str, home: str = '') -> Check:
    """A check for a list of functions or classes. `written` says what to write.

    Gin files may name others of these packages, and only `home` has some for this setting.
    """
    packages = ('jax', 'flax', 'optax', 'partitioning', 'train')

    def check(name: str, given: Any) -> None:
        if not isinstance(given, list | tuple) or not all(map(callable, given)):
            raise ConfigError(
                f'TrainConfig.{name} is {given!r}: it must be a list of functions or classes'
            )
        for i, function in enumerate(given):
            module = getattr(function, '__module__', None) or ''
            if module.partition('.')[0] in packages and module != home:
                shown = f'{module}.{getattr(function, "__name__", type(function).__name__)}'
                raise ConfigError(f'TrainConfig.{name}[{i}] is {shown}: write {written}')

    return check


def check_conditions(name: str, conditions: Any) -> None:
    """Conditions to stop are objects with a metric and the method `reason`."""
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


def check_profile(steps: Any, total_steps: float, model_dir: Any) -> None:
    """The steps of a profile are the first and the last one, within the run."""
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
