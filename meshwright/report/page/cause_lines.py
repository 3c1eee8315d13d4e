"""Where an exchange or a buffer comes from, as a few short lines."""

from __future__ import annotations

from meshwright.causes import Cause
from meshwright.report.page.markup import Html, join, tag
from meshwright.report.tried import tried_text


def cause_markup(cause: Cause | None, source: str, op_name: str) -> Html:
    """Returns a cause; without one, the line and the operation that the program names.

    Args:
      cause: the cause, or None if it is not known.
      source: the 'file:line' of the program, or ''.
      op_name: the path of the jax operation, or ''.
    """
    if cause is None:
        operation = tag('small', op_name, class_='code') if op_name else None
        return join([_code(source), operation])
    axes = ', '.join('None' if name is None else name for name in cause.logical_axes)
    array = f'{cause.array} ({axes})' if axes else cause.array
    line, separator = cause.source or source, ' · '
    tried = tag('span', tried_text(cause), class_='tried')
    avoidable = tag('small', 'avoidable', class_='tried') if cause.avoidable else None
    change = tag('small', 'change: ', _code(cause.change), ' ', tried, class_='change')
    return join(
        [
            cause.why,
            tag('small', _code(line), separator if line and array else None, _code(array)),
            tag('small', 'rule ', _code(cause.rule)) if cause.rule else None,
            avoidable,
            change if cause.change else None,
        ]
    )


def _code(text: str) -> Html | None:
    return tag('code', text) if text else None
