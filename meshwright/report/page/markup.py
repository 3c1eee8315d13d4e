"""Builds markup from text that others wrote, and escapes every piece of this text."""

from __future__ import annotations

import html
from collections.abc import Iterable

from partitioning.untrusted_text import printable

# Elements without an end.
_VOID = ('meta', 'input', 'br', 'rect', 'line', 'path', 'circle', 'polygon', 'polyline')


class Html(str):
    """Text that is markup. Any other text is escaped before it gets into a page."""


Child = str | None | Iterable['Child']


def tag(element: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """Returns an element.

    Args:
      element: its name, such as 'td'.
      children: its content: `Html` as it is, other text escaped; None is left out.
      attributes: its attributes. `class_` becomes class and `data_value` data-value. True gives an
        attribute without a value; None and False leave it out.
    """
    given = ''.join(_attribute(key, value) for key, value in attributes.items())
    if element in _VOID and not children:
        return Html(f'<{element}{given}>' if element in _VOID[:3] else f'<{element}{given}/>')
    return Html(f'<{element}{given}>{join(children)}</{element}>')


def join(children: Iterable[Child]) -> Html:
    """Joins markup and text, which is escaped."""
    return Html(''.join(map(_render, children)))


def escape(text: str) -> Html:
    """Escapes text for content and for attributes, and replaces control characters."""
    return Html(html.escape(printable(text), quote=True))


def _render(child: Child) -> str:
    if child is None:
        return ''
    if isinstance(child, Html):
        return child
    return escape(child) if isinstance(child, str) else join(child)


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ''
    name = key.rstrip('_').replace('_', '-')
    if name == 'viewbox':
        name = 'viewBox'  # SVG is the only part of a page that distinguishes case
    elif name == 'preserveaspectratio':
        name = 'preserveAspectRatio'
    if value is True:
        return f' {name}'
    text = f'{value:.6g}' if isinstance(value, float) else str(value)
    return f' {name}="{escape(text)}"'
