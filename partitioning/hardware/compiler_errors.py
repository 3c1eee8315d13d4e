"""Errors of the compiler, in our own words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh

from partitioning.hardware.memory_limits import find_out_of_memory
from partitioning.rules import MeshLike

_UNKNOWN_OPTION = re.compile(r"No such compile option: '([^']*)'")
_BAD_VALUE = re.compile(r"While setting option (\S+), '(.*)' is not a valid (\w+) value")
_UNREADABLE = re.compile(r"Failed to parse '(.*)' into flag (\S+?):")  # of libtpu
_WRITTEN = {'bool': 'True or False', 'int32': 'an integer', 'int64': 'an integer'}


@contextlib.contextmanager
def own_compiler_errors(function: str, mesh: MeshLike) -> Iterator[None]:
    """Raises ValueErrors that say what to write for errors of the compiler.

    Args:
      function: the name of the compiled function.
      mesh: the mesh for which it is compiled.

    Raises:
      ValueError: if the compiler does not know an option, or cannot read its value.
      OutOfMemoryError: if a device has less memory than the program needs.
      Exception: any other error, unchanged.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (found := explain_compiler_error(error, function, mesh)) is None:
            raise
        raise found from None


def explain_compiler_error(error: Exception, function: str, mesh: MeshLike) -> ValueError | None:
    """Returns the error to raise in place of an error of the compiler, or None if it is unknown."""
    text = str(error)
    if (memory := find_out_of_memory(text, function)) is not None:
        return memory
    if unknown := _UNKNOWN_OPTION.search(text):
        return ValueError(
            f'{function}: the compiler for {_describe_devices(mesh)} has no option '
            f'{unknown[1]!r}: remove it from the compiler options, or correct its name'
        )
    if bad := _BAD_VALUE.search(text):
        name, value, kind = bad.groups()
        written = _WRITTEN.get(kind, f'a value of type {kind}')
        return ValueError(
            f'{function}: the compiler option {name!r} cannot be {value!r}: write {written}'
        )
    if unreadable := _UNREADABLE.search(text):
        value, name = unreadable.groups()
        return ValueError(
            f'{function}: the compiler option {name!r} cannot be {value!r}: write another value'
        )
    return None


def _describe_devices(mesh: Any) -> str:
    """The kind of the devices of a mesh: 'TPU v5 lite devices'."""
    if isinstance(mesh, AbstractMesh) or not hasattr(mesh, 'devices'):
        return 'these devices'
    return f'{mesh.devices.flat[0].device_kind} devices'
