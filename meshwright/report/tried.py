"""What is known of a change: compiled, estimated by formula, or not tried."""

from __future__ import annotations

from meshwright.causes import Cause
from partitioning.amounts import bytes_strs, seconds_str, share_str

_SMALL = 0.005  # figures that differ by less are left out


def tried_text(cause: Cause, beside: float = 0.0) -> str:
    """Whether the change of a cause was tried, and what it does.

    Args:
      cause: the cause, which has a change.
      beside: the largest number of bytes in its report, which decides the unit.

    Returns:
      'confirmed by compiling: sends 20.4 MB in place of 80.1 MB', 'not tried; by formula, it saves
      40.1% of what a device sends', 'not tried', or 'compiling with it did not help'.
    """
    effect = cause.effect
    if cause.confirmed is False and not cause.traded:
        return 'compiling with it did not help'
    if cause.confirmed is None and not cause.traded:
        if effect is None:
            return 'not tried'
        (sent, sends), (held, holds) = effect.sent, effect.peak
        saved = (sent - sends) / sent if sent else 0.0
        if saved > _SMALL:
            return f'not tried; by formula, it saves {share_str(saved)} of what a device sends'
        less = (held - holds) / held if held else 0.0
        what = f'{share_str(less)} of the peak' if less > _SMALL else 'little'
        return f'not tried; by formula, it saves {what}'
    if effect is None:
        return 'confirmed by compiling'
    seconds = effect.seconds or (0.0, 0.0)
    figures = [
        f'{word} {shown[1]} in place of {shown[0]}'
        for word, shown, (before, after) in (
            ('sends', bytes_strs(*effect.sent, beside=beside), effect.sent),
            ('peak', bytes_strs(*effect.peak, beside=beside), effect.peak),
            ('time', [*map(seconds_str, seconds)], seconds),
        )
        if abs(after - before) > _SMALL * before
    ]
    return f'{"compiled" if cause.traded else "confirmed by compiling"}: {", ".join(figures)}'
