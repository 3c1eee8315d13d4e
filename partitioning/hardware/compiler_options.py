"""Options of the compilers of chips, each with its reason and the figure behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from partitioning.hardware.chips import CHIPS, chip_of

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
        reason=(
            'matrix products read larger tiles: by default, they use 16 of the 128 MiB of vector '
            'memory, so that some tiles of wide layers are read several times'
        ),
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
        reason=(
            'matrix products read larger tiles: by default, they use 32 of the 128 MiB of vector '
            'memory, so that some tiles of wide layers are read several times'
        ),
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

    Args:
      devices: JAX devices, present or described, all of one kind.
    """
    device = next(iter(devices), None)
    chip = chip_of(getattr(device, 'device_kind', ''))
    return tuple(o for o in DEFAULT_OPTIONS if chip is not None and chip.name in o.chips)


def change_options(
    options: Iterable[CompilerOption], changes: Mapping[str, OptionValue | None], reason: str
) -> tuple[CompilerOption, ...]:
    """Returns options with other values, with more options, or without some.

    Args:
      options: the options.
      changes: the value of each option to add or to replace; None removes it.
      reason: why, for the options that are added or replaced.

    Raises:
      ValueError: if a value cannot be the value of an option, or if an option that is not there is
        to be removed.
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
