"""With which options a run is compiled, and what it says and records about them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from jax.sharding import AbstractMesh, Mesh

from partitioning.hardware import (
    FLAG_VARIABLES,
    CompilerOption,
    OptionValue,
    change_options,
    default_options,
)
from train.errors import ConfigError


def choose_options(
    setting: Literal['auto'] | Mapping[str, OptionValue | None], mesh: Mesh | AbstractMesh
) -> tuple[CompilerOption, ...]:
    """Returns the options with which the programs of a run are compiled.

    Args:
      setting: `TrainConfig.compiler_options`.
      mesh: the mesh, whose chips decide the default options.

    Raises:
      ConfigError: if a default option is to be removed that the chips do not have.
    """
    options = () if isinstance(mesh, AbstractMesh) else default_options(mesh.devices.flat)
    if setting == 'auto':
        return options
    if not setting:
        return ()
    try:
        return change_options(options, setting, 'set by TrainConfig.compiler_options')
    except ValueError as error:
        raise ConfigError(f'TrainConfig.compiler_options: {error}') from None


def describe_options(options: Sequence[CompilerOption]) -> Iterator[str]:
    """Yields a line for each compiler option, and for each variable from which more are read."""
    for option in options:
        yield f'compiler option {option}'
    for name in FLAG_VARIABLES:
        if value := os.environ.get(name, '').strip():
            yield f'compiler options of the environment: {name}={value}'
