"""Checks the compiler flags in the environment, in a separate process."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Variables of the environment from which compilers read options.
FLAG_VARIABLES = ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')

# A small machine of each platform.
_MACHINES = {'tpu': 'v5e:2x2', 'gpu': 'h100:1x1'}
_PROGRAM = """
import sys
import jax
from partitioning.hardware import describe_topology
device = jax.sharding.SingleDeviceSharding(describe_topology(sys.argv[1]).devices[0])
x = jax.ShapeDtypeStruct((), 'float32', sharding=device)
jax.jit(lambda x: x + 1).lower(x).compile()
"""
# The last words of a compiler that ends its process: 'F0823 12:34:56.789012 1 flags.cc:9] ...'.
_LAST_WORDS = re.compile(r'^(F\d{4} |ERROR: )')


def check_flags(platform: str) -> None:
    """Checks the flags of the environment for a compiler, which would end this process.

    It takes seconds, once, and nothing if the environment sets no flags.

    Args:
      platform: the platform of the devices to compile for. CPUs are not checked.

    Raises:
      ValueError: if the compiler does not accept a flag.
    """
    values = tuple(os.environ.get(variable, '') for variable in FLAG_VARIABLES)
    if platform in _MACHINES and any(value.strip() for value in values):
        problem = _try_flags(platform, values)
        if problem is not None:
            raise ValueError(problem)


@functools.cache
def _try_flags(platform: str, values: tuple[str, ...]) -> str | None:
    """What is wrong with the values of the variables, or None."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get('PYTHONPATH')])]
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': os.pathsep.join(paths)}
    command = [sys.executable, '-P', '-c', _PROGRAM, _MACHINES[platform]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return explain_refusal(platform, done.stderr, values) if done.returncode else None


def explain_refusal(platform: str, written: str, values: tuple[str, ...]) -> str | None:
    """Which flags a compiler refuses, and what to write; None if it ended for another reason.

    Args:
      platform: the platform of the compiler.
      written: what its process wrote to its standard error.
      values: the value of each of `FLAG_VARIABLES`.
    """
    lines = written.splitlines()
    end = next((i for i, line in enumerate(lines) if _LAST_WORDS.match(line)), None)
    if end is None:
        return None
    # A list of all flags may follow after two lines.
    words = set(re.findall(r'\w+', ' '.join(lines[end : end + 2])))
    named = [pair for pair in _flags(values) if re.split(r'\W', pair[1].lstrip('-'))[0] in words]
    if not named:
        return None
    flags = ' and '.join(f'{flag} in {variable}' for variable, flag in named)
    return (
        f'the compiler for {platform.upper()}s does not accept {flags}: remove it from the '
        'variable, or correct its name or its value'
    )


def _flags(values: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The flags in the values of the variables, each with its variable."""
    for variable, value in zip(FLAG_VARIABLES, values, strict=True):
        for flag in value.split():
            yield variable, flag
