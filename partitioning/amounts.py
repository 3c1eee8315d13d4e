"""Amounts as people read them: bytes, times, FLOPs and shares."""

from __future__ import annotations

import re

_UNITS = {'bytes': 1, 'byte': 1, 'B': 1}
_UNITS |= {f'{p}B': 10 ** (3 * i) for i, p in enumerate('kMGTP', 1)}
_UNITS |= {f'{p}iB': 2 ** (10 * i) for i, p in enumerate('KMGTP', 1)}
_PREFIXES = ((1e18, 'E'), (1e15, 'P'), (1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k'))


def bytes_str(count: float, beside: float = 0) -> str:
    """A number of bytes: '768 bytes', '98.3 kB', '3.6 MB' or '2.30 GiB'.

    `beside` is the largest number of its table. If that is in GiB, smaller ones are of the same
    kind: '96.0 KiB' or '3.4 MiB'.
    """
    if count < 1000:
        return f'{count:.0f} byte{"" if round(count) == 1 else "s"}'
    if count >= 1e9:
        return f'{count / 2**30:,.2f} GiB'
    if beside >= 1e9:
        return (
            f'{count / 2**20:,.1f} MiB' if count >= 0.99995 * 2**20 else f'{count / 2**10:,.1f} KiB'
        )
    return f'{count / 1e6:,.1f} MB' if count >= 0.99995e6 else f'{count / 1e3:,.1f} kB'


def bytes_strs(*counts: float, beside: float = 0) -> list[str]:
    """Numbers of bytes that are compared: '0.31 GiB' and '1.67 GiB', not '335.7 MB' for one.

    `beside` is as for `bytes_str`.
    """
    made = [bytes_str(count, beside) for count in counts]
    if len({text.endswith('GiB') for text in made}) == 1:
        return made
    if min(counts) >= 0.01 * 2**30:
        return [f'{count / 2**30:,.2f} GiB' for count in counts]
    divisor, unit = (2**20, 'MiB') if beside >= 1e9 else (1e6, 'MB')
    return [
        f'{count / divisor:,.1f} {unit}' if text.endswith('GiB') else text
        for count, text in zip(counts, made, strict=True)
    ]


def parse_bytes(text: str) -> tuple[float, float]:
    """Reads a number of bytes as people write it: '1.5 MB', '2 GiB' or '768 bytes'.

    Returns:
      The number of bytes, and half of its last digit: '1.5 MB' may stand for 50 kB more or less.

    Raises:
      ValueError: if the text is not a number with a unit.
    """
    found = re.fullmatch(r'([\d,]+(?:\.(\d+))?)\s*([A-Za-z]+)', text.strip())
    if found is None or found[3] not in _UNITS:
        raise ValueError(
            f"{text!r} is not an amount of memory: write '1.5 MB', '2 GiB' or '64 bytes'"
        )
    unit = _UNITS[found[3]]
    digits = len(found[2] or '')
    return float(found[1].replace(',', '')) * unit, 0.5 * 10**-digits * unit


def seconds_str(seconds: float) -> str:
    """A time: '12 µs', '640 ms' or '1.23 s'."""
    # From 0.9995 of a unit on, three digits would be '1e+03' of the smaller one.
    if seconds >= 0.9995:
        return f'{seconds:,.2f} s'
    if seconds >= 0.9995e-3:
        return f'{seconds * 1e3:.3g} ms'
    return f'{seconds * 1e6:.3g} µs'


def flops_str(flops: float) -> str:
    """A number of floating-point operations: '1.25 PFLOP'."""
    for size, prefix in _PREFIXES:
        if flops >= 0.9995 * size:
            return f'{flops / size:.3g} {prefix}FLOP'
    return f'{flops:.0f} FLOP'


def share_str(share: float) -> str:
    """A share as a percentage: '54%', '7.6%' or '<0.1%'."""
    if 0 < share < 0.001:
        return '<0.1%'
    return f'{share:.0%}' if share >= 0.1 or share == 0 else f'{share:.1%}'


def value_str(value: float, unit: str) -> str:
    """The value of a constant with its unit: '1.75 GHz', '50 GB/s', '0.82'."""
    base = {'Hz': 'Hz', 'bytes/s': 'B/s', 'B/s': 'B/s', 'FLOP/s': 'FLOP/s'}.get(unit)
    if base is None:
        return f'{value:,.4g} {unit}'.strip()
    for size, prefix in _PREFIXES:
        if value >= size:
            return f'{value / size:.4g} {prefix}{base}'
    return f'{value:.4g} {base}'
