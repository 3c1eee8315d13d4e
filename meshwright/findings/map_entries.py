"""The entries of a layout map: regular expressions on the paths of arrays, with mesh axes."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshwright.calls.keras_models import layout_map_in_use
from partitioning.plan.findings import Finding
from partitioning.values import value_str


@dataclasses.dataclass(frozen=True)
class LayoutEntries:
    """The entries of a layout map, and how they are matched.

    Attributes:
      entries: regular expressions, each with the mesh axes of each dimension.
      whole: whether an entry must match the whole path of an array.
      alone: whether only one entry may match an array; otherwise the first one wins.
      exact: whether an entry must name every dimension.
    """

    entries: tuple[tuple[str, tuple[Any, ...]], ...]
    whole: bool = False
    alone: bool = False
    exact: bool = False

    @functools.cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(pattern) for pattern, _ in self.entries)

    def matches(self, path: str) -> list[int]:
        """The numbers of the entries that match a path; one that is the path counts alone."""
        for i, (pattern, _) in enumerate(self.entries):
            if self.alone and pattern == path:
                return [i]
        method = 'fullmatch' if self.whole else 'search'
        return [i for i, one in enumerate(self._patterns) if getattr(one, method)(path)]

    def where(self, i: int) -> str:
        """An entry as findings name it."""
        pattern, axes = self.entries[i]
        return f'entry {pattern!r}: {axes!r}'


def with_map_entries(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Findings that also name the entry of the layout map which Keras uses now, if it uses one.

    Args:
      findings: findings whose arrays have the paths of Keras variables.
    """
    layout_map = layout_map_in_use()
    if layout_map is None or not len(layout_map):
        yield from findings
        return
    entries = read_entries(layout_map)
    for finding in findings:
        yield finding._replace(message=_with_entry(finding, entries))


def _with_entry(finding: Finding, entries: LayoutEntries) -> str:
    """The message of a finding and the entry of the first array that it is about."""
    words = re.findall(r'[\w./-]*/[\w./-]*\w', f'{finding.where} {finding.message}')
    arrays = [word for word in words if not word.endswith('.py')]
    for word in arrays[:1]:
        path = word.partition('/')[2]  # without the argument of the step
        for i in entries.matches(path)[:1]:
            return f'{finding.message}; its layout is {entries.where(i)} of the layout map'
        if finding.kind == 'whole array' and word == finding.where:
            return f'{finding.message}; no entry of the layout map matches it'
    return finding.message


def read_entries(layout_map: Any) -> LayoutEntries:
    """Reads a `LayoutMap` of Keras, or pairs of a regular expression and mesh axes.

    Raises:
      ValueError: if it has no entries, or if one is malformed.
    """
    if hasattr(layout_map, 'device_mesh') and isinstance(layout_map, Mapping):
        entries = tuple((str(pattern), tuple(layout_map[pattern].axes)) for pattern in layout_map)
        made = LayoutEntries(_checked(entries), _matches_whole(layout_map), alone=True, exact=True)
    else:
        pairs = layout_map.items() if isinstance(layout_map, Mapping) else layout_map
        made = LayoutEntries(_checked(pairs))
    if not made.entries:
        raise ValueError("the layout map has no entries: write ('.*/kernel', ('data', 'model'))")
    return made


def _checked(pairs: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    if isinstance(pairs, str) or not isinstance(pairs, Iterable):
        raise ValueError(
            f'layout_map is {value_str(pairs)}, but must be a LayoutMap of Keras or pairs such as '
            "[('.*/kernel', ('data', 'model'))]"
        )
    made = []
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(
                f'{value_str(pair)} is not a pair of a regular expression and mesh axes: write '
                "('.*/kernel', ('data', 'model'))"
            )
        try:
            re.compile(pair[0])
        except re.error as error:
            raise ValueError(f'{pair[0]!r} is not a regular expression: {error}') from None
        axes = () if pair[1] is None else pair[1]
        if isinstance(axes, str) or not isinstance(axes, Iterable):
            raise ValueError(
                f'the axes of {pair[0]!r} are {value_str(axes)}, but must be a tuple with one '
                f'entry for each dimension: write ({axes!r},)'
            )
        made.append((pair[0], tuple(axes)))
    return tuple(made)


def _matches_whole(layout_map: Any) -> bool:
    """Whether this version of Keras matches whole paths; before 3.14 it searched in them."""
    try:
        probe = type(layout_map)()
        probe['b'] = (None,)
        return probe['abc'] is None
    except Exception:  # of a class that only looks like it
        return True
