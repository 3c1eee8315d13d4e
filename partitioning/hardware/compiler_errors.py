"""Errors of the compiler in our own words, and whether a program fits into its devices' memory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from partitioning.amounts import bytes_str
from partitioning.hardware.chips import chip_of
from partitioning.rules import MeshLike

_UNKNOWN_OPTION = re.compile(r"No such compile option: '([^']*)'")
_BAD_VALUE = re.compile(r"While setting option (\S+), '(.*)' is not a valid (\w+) value")
_UNREADABLE = re.compile(r"Failed to parse '(.*)' into flag (\S+?):")  # of libtpu
_WRITTEN = {'bool': 'True or False', 'int32': 'an integer', 'int64': 'an integer'}
# libtpu 0.0.52: 'Ran out of memory on HBM, the total memory required for HLO temporaries (40.25G)
# exceeds available HBM (15.75G)'. The units are powers of 1024.
_EXCEEDS = re.compile(r'required.*?\(([\d.]+)([KMGT]?)\) exceeds available.*?\(([\d.]+)([KMGT]?)\)')
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


class OutOfMemoryError(ValueError):
    """A program needs more memory than a device has.

    Attributes:
      needed: the bytes that it needs on each device.
      available: the bytes that a device has for programs.
    """

    def __init__(self, function: str, needed: int, available: int):
        super().__init__(
            f'{function} needs {bytes_str(needed)} on each device, which has '
            f'{bytes_str(available)}: use more devices, a layout that shards more, a smaller '
            'batch, or recompute more in the backward pass'
        )
        self.needed, self.available = needed, available


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
    if (memory := _find_out_of_memory(text, function)) is not None:
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


def _find_out_of_memory(text: str, function: str) -> OutOfMemoryError | None:
    """Returns the error to raise in place of one of the compiler, if it is about memory.

    Args:
      text: the message of the compiler.
      function: the name of the compiled function.
    """
    if (found := _EXCEEDS.search(text)) is None:
        return None
    needed, available = (
        int(float(found[i]) * _UNITS[found[i + 1]])
        for i in (1, 3)  # a number and its unit
    )
    return OutOfMemoryError(function, needed, available)


def needed_memory(compiled: Any, mesh: MeshLike) -> int:
    """Returns the memory that a compiled program needs on each device of a mesh, in bytes.

    The compiler for TPUs states the peak, which can be less than the sum of the parts. For other
    devices the peak may leave out temporary arrays.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return 0
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    parts = stats.argument_size_in_bytes + results + stats.temp_size_in_bytes
    if getattr(_first_device(mesh), 'platform', None) == 'tpu':
        return min(stats.peak_memory_in_bytes, parts)  # the peak has what is kept on the host, too
    return parts


def check_memory(compiled: Any, function: str, mesh: MeshLike) -> None:
    """Checks a program for GPUs, whose compiler does not know how much memory they have.

    Raises:
      OutOfMemoryError: if the program needs more than the whole memory of the chip.
    """
    chip = chip_of(getattr(_first_device(mesh), 'device_kind', ''))
    if chip is None or chip.platform != 'gpu':
        return
    if (needed := needed_memory(compiled, mesh)) > chip.hbm_bytes_per_device:
        raise OutOfMemoryError(function, needed, chip.hbm_bytes_per_device)


def _first_device(mesh: MeshLike) -> Any:
    """The first device of a mesh, or None if it has only the sizes of its axes."""
    return mesh.devices.flat[0] if isinstance(mesh, Mesh) else None


def _describe_devices(mesh: Any) -> str:
    """The kind of the devices of a mesh: 'TPU v5 lite devices'."""
    device = _first_device(mesh)
    return 'these devices' if device is None else f'{device.device_kind} devices'
