"""Regular expressions for paths: few and readable rules that give each array its names.

Each expression describes the end of the paths that it takes, as in '.*/(q_proj|k_proj)/kernel',
with just enough keys to tell its arrays from all others. So one rule takes the arrays of all
layers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Names = tuple[Any, ...]
Piece = tuple[str, ...]  # regular expressions for one key; one of them must match
Pieces = tuple[Piece, ...]
_LONGEST = 48  # characters of the alternatives of one pattern; if there are more, it is divided
_FEW = 4  # up to this number, alternatives are listed instead of a pattern for everything else


class _Item(NamedTuple):
    """One array. Its names are None if no pattern may match it."""

    place: int
    keys: tuple[str, ...]
    names: Names | None


class _Found(NamedTuple):
    """A path rule. If it is general, earlier rules must take the arrays with other names."""

    place: int
    prefix: Literal['', '.*/', '(.*/)?']
    pieces: Pieces
    names: Names
    is_general: bool = False

    def pattern(self, separator: str) -> str:
        keys = (p[0] if len(p) == 1 else f'({"|".join(p)})' for p in self.pieces)
        text = self.prefix + '/'.join(keys)
        return text if separator == '/' else text.replace('/', f'\\{separator}')


def make_path_rules(
    names: Mapping[str, Names | None], general: Collection[Names] = ()
) -> list[tuple[str, Names]]:
    """Path rules that give each path its names, and match no path whose names are None.

    Names that are `general` may be given to everything that earlier rules leave, such as all arrays
    that are called 'bias'.

    Returns:
      (regular expression, names) pairs for `re.fullmatch`; the first that matches wins, in
      the order of the paths. General rules come last.
    """
    # PyTorch's names of parameters are single keys with dots.
    separator = '/' if any('/' in path for path in names) else '.'
    items = [_Item(i, tuple(path.split(separator)), n) for i, (path, n) in enumerate(names.items())]
    found = list(_Search(general).rules(items, ()))
    ordered = sorted(_merge([f for f in found if not f.is_general]), key=lambda f: f.place)
    # A general rule with more keys is an exception to one with fewer; it is found before that one.
    ordered += [f for f in found if f.is_general]
    return [(f.pattern(separator), f.names) for f in ordered]


class _Search:
    """The search for rules, from the last key of the paths to the first."""

    def __init__(self, general: Collection[Names]):
        self._general = general

    def rules(
        self, items: Sequence[_Item], suffix: Pieces, covered: Names | None = None
    ) -> Iterator[_Found]:
        """Rules for all arrays whose last keys match the pieces of `suffix`.

        Arrays with the names `covered` get no rule, because a general rule will take them.
        """
        kinds = {item.names for item in items}
        if kinds <= {covered, None}:
            return
        ended = [item for item in items if len(item.keys) == len(suffix)]
        inner = [item for item in items if len(item.keys) > len(suffix)]
        if inner and len(kinds) == 1 and suffix and _has_letter(suffix[0]):
            yield _found(items, '(.*/)?' if ended else '.*/', suffix)
            return
        if ended and ended[0].names not in (None, covered):
            yield _found(ended, '', suffix)
        general = self._general_names(inner, suffix) if covered is None else None
        below: dict[str, list[_Item]] = {}  # the arrays by the key in front of the suffix
        for item in inner:
            below.setdefault(item.keys[-1 - len(suffix)], []).append(item)
        for piece, members in _branches(below):
            yield from self.rules(members, (piece, *suffix), general or covered)
        if general is not None:
            taken = [item for item in inner if item.names == general]
            yield _found(taken, '.*/', suffix)._replace(is_general=True)

    def _general_names(self, items: Sequence[_Item], suffix: Pieces) -> Names | None:
        """The names for everything else that ends with a suffix, if many different paths do."""
        if not suffix or not _has_letter(suffix[0]) or any(item.names is None for item in items):
            return None
        many = {}
        for names in self._general:
            keys = {item.keys[-1 - len(suffix)] for item in items if item.names == names}
            many[names] = len({re.sub(r'\d+', '', key) for key in keys})
        best = max(many, key=lambda names: many[names], default=None)
        return best if best is not None and many[best] > _FEW else None


def _found(items: Sequence[_Item], prefix: Any, pieces: Pieces) -> _Found:
    names = items[0].names
    assert names is not None
    return _Found(min(item.place for item in items), prefix, pieces, names)


def _merge(found: Sequence[_Found]) -> list[_Found]:
    """The same rules, where one rule replaces two that differ in a single piece."""
    merged: list[_Found] = []
    for one in found:
        both = ((i, _union(other, one)) for i, other in enumerate(merged))
        place, union = next(((i, u) for i, u in both if u is not None), (len(merged), one))
        merged[place : place + 1] = [union]
    return merged if len(merged) == len(found) else _merge(merged)


def _union(one: _Found, other: _Found) -> _Found | None:
    """One rule for the arrays of both, if they differ in a single piece."""
    if one[1:] == other[1:] or one[3:] != other[3:] or one.prefix != other.prefix:
        return None
    if len(one.pieces) != len(other.pieces):
        return None
    differ = [i for i, (a, b) in enumerate(zip(one.pieces, other.pieces, strict=True)) if a != b]
    if len(differ) != 1:
        return None
    piece = (*one.pieces[differ[0]], *other.pieces[differ[0]])
    if len('|'.join(piece)) > _LONGEST:
        return None
    pieces = (*one.pieces[: differ[0]], piece, *one.pieces[differ[0] + 1 :])
    return one._replace(place=min(one.place, other.place), pieces=pieces)


def _branches(below: Mapping[str, list[_Item]]) -> Iterator[tuple[Piece, list[_Item]]]:
    """Pieces for one key and the arrays that they match.

    Keys whose arrays all have the same names share pieces; any other key is a piece itself.
    """
    alike: dict[Names | None, list[str]] = {}
    for key, members in below.items():
        if len({item.names for item in members}) == 1:
            alike.setdefault(members[0].names, []).append(key)
        else:
            yield (_escape(key),), members
    for keys in alike.values():
        for piece, matched in _alternatives(keys, below.keys() - {*keys}):
            yield piece, [item for key in matched for item in below[key]]


def _alternatives(
    keys: Sequence[str], others: Collection[str]
) -> Iterator[tuple[Piece, list[str]]]:
    """Pieces that match the keys and none of the others, each with the keys it matches."""
    templates: dict[str, list[str]] = {}
    left = list(keys)
    while left:
        template, matched = _template(left[0], left, others)
        templates[template] = matched
        left = [key for key in left if key not in matched]
    groups: list[list[str]] = []
    for template in templates:
        if groups and len('|'.join([*groups[-1], template])) <= _LONGEST:
            groups[-1].append(template)
        else:
            groups.append([template])
    for group in groups:
        yield tuple(group), [key for template in group for key in templates[template]]


def _template(key: str, keys: Sequence[str], others: Collection[str]) -> tuple[str, list[str]]:
    r"""A key with \d+ for its numbers that differ, and the keys that it matches."""
    parts = re.split(r'(\d+)', key)
    numbers = range(1, len(parts), 2)
    best = _escape(key), [key]
    for size in range(1, len(numbers) + 1):
        for chosen in itertools.combinations(numbers, size):
            pattern = ''.join(
                r'\d+' if place in chosen else _escape(part) for place, part in enumerate(parts)
            )
            match = re.compile(pattern).fullmatch
            matched = [one for one in keys if match(one)]
            if len(matched) > len(best[1]) and not any(map(match, others)):
                best = pattern, matched
    return best


def _has_letter(piece: Piece) -> bool:
    return any(re.search('[a-zA-Z]', template.replace(r'\d', '')) for template in piece)


def _escape(key: str) -> str:
    """The key as a regular expression; unlike re.escape it leaves '-' and '~' as they are."""
    return re.sub(r'([.^$*+?{}\[\]\\|()])', r'\\\1', key)
