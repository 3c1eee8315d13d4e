"""How long rows are: one number, or the numbers of input and target tokens."""

from __future__ import annotations

from collections.abc import Mapping

from train.errors import ConfigError, check_counts

# The number of tokens in a row, or the numbers of its inputs and targets. Without a number, inputs
# or targets are not cut.
Lengths = int | Mapping[str, int | None] | None
FEATURES = ('inputs', 'targets')


def check_lengths(name: str, lengths: Lengths) -> None:
    """Checks the lengths that a setting of this name has.

    Raises:
      ConfigError: if it is neither a number nor a mapping of numbers.
    """
    if isinstance(lengths, Mapping):
        if not lengths or not set(lengths) <= set(FEATURES):
            raise ConfigError(
                f"{name} is {dict(lengths)!r}: write {{'inputs': 512, 'targets': 114}}, the "
                'numbers of tokens'
            )
        numbers = {f'{name}[{feature!r}]': length for feature, length in lengths.items()}
    else:
        numbers = {name: lengths}
    for label, number in numbers.items():
        if number is not None:
            check_counts(**{label: number})


def target_length(lengths: Lengths) -> int:
    """The number of tokens in a row of a task that has only targets.

    Raises:
      ConfigError: if there is no such number, or if there is one for inputs.
    """
    check_lengths('sequence_length', lengths)
    if isinstance(lengths, Mapping):
        if lengths.get('inputs') is not None:
            raise ConfigError(
                f'sequence_length is {dict(lengths)}, but the rows of this task have only targets: '
                f"write {{'targets': {lengths.get('targets')}}}, or use a task with inputs"
            )
        lengths = lengths.get('targets')
    if lengths is None:
        raise ConfigError('a task on text needs the number of tokens in a row: set sequence_length')
    return lengths


def pair_lengths(lengths: Lengths) -> tuple[int | None, int | None]:
    """The numbers of input tokens and of target tokens in a row; None for those that are not given.

    Raises:
      ConfigError: if `lengths` is one number.
    """
    check_lengths('sequence_length', lengths)
    if isinstance(lengths, int):
        raise ConfigError(
            f'sequence_length is {lengths}, but the rows of this task have inputs and targets: '
            f"write {{'inputs': {lengths}, 'targets': {lengths}}}"
        )
    lengths = lengths or {}
    return lengths.get('inputs'), lengths.get('targets')
