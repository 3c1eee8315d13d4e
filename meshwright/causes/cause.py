"""Where an exchange of data or a buffer comes from, and what would remove it."""

from __future__ import annotations

import dataclasses

from meshwright.causes.changes import Change


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """Where an exchange of data or a buffer comes from.

    Attributes:
      source: the 'file:line' of the user's Python code, or '' if the program does not say.
      array: the array, such as 'params/layers/mlp/up', 'its gradient' or 'an activation'.
      logical_axes: the logical axes of the array, None for dimensions without a name; empty if they
        are not known.
      rule: the rule that decides its layout, as it is written: "('embed', 'fsdp')"; '' if none.
      reason: one sentence that says why the exchange or the buffer is there.
      change: the change of one line that removes it or makes it smaller; '' if none is known.
      confirmed: whether compiling with the change showed that it does; None if nobody compiled it.
      avoidable: whether it is not what the layout needs, such as the gathering of an activation.
      candidates: the changes that may help, the most promising first; `change` is the first.
    """

    source: str
    array: str
    logical_axes: tuple[str | None, ...]
    rule: str
    reason: str
    change: str = ''
    confirmed: bool | None = None
    avoidable: bool = False
    candidates: tuple[Change, ...] = ()
