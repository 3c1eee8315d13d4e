"""The compilers of chips: their options and flags, and their errors in our own words.

Every default option has a reason and the figure behind it. Flags are checked in a separate process,
because a compiler ends the process whose flags it refuses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from partitioning.amounts import bytes_str
from partitioning.hardware.chips import CHIPS, chip_of
from partitioning.rules import MeshLike

OptionValue = bool | int | float | str

_KINDS = (bool, int, float, str)


def check_options(options: Mapping[str, Any] | None) -> dict[str, OptionValue] | None:
    """Returns the options as jax takes them; raises ValueError if one of them is malformed."""
    for name, value in (options or {}).items():
        check_option(name, value)
    return dict(options) if options else None


def check_option(name: Any, value: Any) -> None:
    """Raises ValueError unless these are the name and the value of a compiler option."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"a compiler option has a name such as 'xla_...', not {name!r}")
    if type(value) not in _KINDS:
        raise ValueError(
            f'compiler option {name!r} is {value!r}: write True or False, a number or a text'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerOption:
    """One option of a compiler, as `jax.jit(..., compiler_options={name: value})` takes it.

    Attributes:
      name: the name of the option.
      value: its value: True or False, a number or a text.
      reason: why it has this value.
      figure: what the value was seen to change, with the source; '' if the user chose it.
      chips: the names of the chips that have the option by default.

    Raises:
      ValueError: if the name is not a text, or the value cannot be the value of an option.
    """

    name: str
    value: OptionValue
    reason: str
    figure: str = ''
    chips: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_option(self.name, self.value)

    def __str__(self) -> str:
        why = f'{self.reason} ({self.figure})' if self.figure else self.reason
        return f'{self.name}={self.value}: {why}'


_TPUS = tuple(chip.name for chip in CHIPS.values() if chip.platform == 'tpu')
_LARGER_TILES = (
    'matrix products read larger tiles: by default, they use {} of the 128 MiB of vector memory, '
    'so that some tiles of wide layers are read several times'
)

DEFAULT_OPTIONS: tuple[CompilerOption, ...] = (
    CompilerOption(
        name='xla_jf_spmd_threshold_for_windowed_einsum_mib',
        value=1_000_000,
        chips=_TPUS,
        reason=(
            'matrix products with gathered weights stay whole: the compiler would otherwise cut '
            'them into one small product per device, which compute slower than they overlap'
        ),
        figure=(
            'estimated compute of a train step by libtpu 0.0.51: 267 ms in place of 651 for 1B on '
            'v5e:4x4, 711 in place of 1,281 for 8B on v5p:4x4x4 as 8 x 8; no estimate shows the '
            'overlap that is given up'
        ),
    ),
    CompilerOption(
        name='xla_tpu_scoped_vmem_limit_kib',
        value=32 * 1024,
        chips=('v5e', 'v5p'),
        reason=_LARGER_TILES.format(16),
        figure=(
            'estimated compute of a train step by libtpu 0.0.52: 626 ms in place of 714 for 8B on '
            'v5p:4x4x4 as 8 x 8, and 575 in place of 624 as 64; 64 MiB gives 621 and 563, but '
            'compiles twice as long'
        ),
    ),
    CompilerOption(
        name='xla_tpu_scoped_vmem_limit_kib',
        value=96 * 1024,
        chips=('v6e',),
        reason=_LARGER_TILES.format(32),
        figure=(
            'estimated cycles of a bfloat16 product of 8,192 x 8,192 x 8,192 by libtpu 0.0.52: '
            '2.34 million in place of 2.98, where its peak rate takes 2.10; 64 MiB gives 2.57'
        ),
    ),
)
# GPUs have no default options. The compiler of jaxlib 0.12 hides the latency of collectives without
# one: on h100:1x8, compute lies between the start and the end of all 37 asynchronous operations of
# a fully sharded step, and of 14 of 34 with xla_gpu_enable_latency_hiding_scheduler off. Without
# xla_gpu_enable_triton_gemm, the step needs a fifth more memory.


def default_options(devices: Iterable[Any]) -> tuple[CompilerOption, ...]:
    """Returns the options with which programs for these devices are compiled by default.

    The devices are JAX devices, present or described, all of one kind.
    """
    device = next(iter(devices), None)
    chip = chip_of(getattr(device, 'device_kind', ''))
    return tuple(o for o in DEFAULT_OPTIONS if chip is not None and chip.name in o.chips)


def change_options(
    options: Iterable[CompilerOption], changes: Mapping[str, OptionValue | None], reason: str
) -> tuple[CompilerOption, ...]:
    """Returns options of which some are added or replaced, for this reason, or removed by None.

    Raises:
      ValueError: if a value cannot be the value of an option, or if None is to remove an option
        that `options` does not contain.
    """
    options = tuple(options)
    names = [option.name for option in options]
    for name, value in changes.items():
        if value is None and name not in names:
            raise ValueError(
                f'compiler option {name!r} is None, which removes a default option, but the '
                f'defaults of these devices are {", ".join(names) or "none"}: remove the entry'
            )
    kept = [o for o in options if o.name not in changes]
    added = [
        CompilerOption(name=name, value=value, reason=reason)
        for name, value in changes.items()
        if value is not None
    ]
    return (*kept, *added)


def option_values(options: Iterable[CompilerOption]) -> dict[str, OptionValue]:
    """Returns the values by name, as jax takes them."""
    return {option.name: option.value for option in options}


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

    It takes seconds, once, and nothing if the environment sets no flags. CPUs are not checked.

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

    `written` is what the process of the compiler wrote to its standard error, and `values` has the
    value of each of `FLAG_VARIABLES`.
    """
    lines = written.splitlines()
    end = next((i for i, line in enumerate(lines) if _LAST_WORDS.match(line)), None)
    if end is None:
        return None
    # A list of all flags may follow after two lines.
    words = set(re.findall(r'\w+', ' '.join(lines[end : end + 2])))
    named = [
        f'{flag} in {variable}'
        for variable, value in zip(FLAG_VARIABLES, values, strict=True)
        for flag in value.split()
        if re.split(r'\W', flag.lstrip('-'))[0] in words
    ]
    if not named:
        return None
    flags = ' and '.join(named)
    return (
        f'the compiler for {platform.upper()}s does not accept {flags}: remove it from the '
        'variable, or correct its name or its value'
    )


_UNKNOWN_OPTION = re.compile(r"No such compile option: '([^']*)'")
_BAD_VALUE = re.compile(
    r"While setting option (?P<name>\S+), '(?P<value>.*)' is not a valid (?P<kind>\w+) value"
)
_UNREADABLE = re.compile(r"Failed to parse '(?P<value>.*)' into flag (?P<name>\S+?):")  # of libtpu
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
    if memory := _EXCEEDS.search(text):
        needed, available = (int(float(memory[i]) * _UNITS[memory[i + 1]]) for i in (1, 3))
        return OutOfMemoryError(function, needed, available)
    if unknown := _UNKNOWN_OPTION.search(text):
        device = _first_device(mesh)
        devices = 'these devices' if device is None else f'{device.device_kind} devices'
        return ValueError(
            f'{function}: the compiler for {devices} has no option {unknown[1]!r}: remove it from '
            'the compiler options, or correct its name'
        )
    if bad := _BAD_VALUE.search(text) or _UNREADABLE.search(text):
        kind = bad.groupdict().get('kind')
        written = _WRITTEN.get(kind, f'a value of type {kind}') if kind else 'another value'
        return ValueError(
            f'{function}: the compiler option {bad["name"]!r} cannot be {bad["value"]!r}: write '
            f'{written}'
        )
    return None


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
    """Raises OutOfMemoryError if a program needs more than the whole memory of a GPU.

    The compilers of other chips know how much memory they have.
    """
    chip = chip_of(getattr(_first_device(mesh), 'device_kind', ''))
    if chip is None or chip.platform != 'gpu':
        return
    if (needed := needed_memory(compiled, mesh)) > chip.hbm_bytes_per_device:
        raise OutOfMemoryError(function, needed, chip.hbm_bytes_per_device)


def _first_device(mesh: MeshLike) -> Any:
    """The first device of a mesh, or None if it has only the sizes of its axes."""
    return mesh.devices.flat[0] if isinstance(mesh, Mesh) else None
