"""Suggests path rules for a state whose arrays have no axis names.

The regular expressions are few and readable. Each describes the end of the paths that it takes, as
in '.*/(q_proj|k_proj)/kernel', with just enough keys to tell its arrays from all others. So one
rule takes the arrays of all layers.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from partitioning.plan.by_rules import Shape, stacked_dimensions
from partitioning.plan.rows import SMALL
from partitioning.plan.tables import count
from partitioning.rules import MeshLike
from partitioning.state import nbytes, shape_of
from partitioning.suggestion.dimension_names import DimensionNames, Named, Shards, replicated
from partitioning.suggestion.rule_matches import (
    RuleMatches,
    explain_rules,
    list_targets,
    needs_rule,
)

_WHOLE = 0.01  # small arrays are replicated if they are at most this share of all bytes
_COLUMNS = 100
_PAIRS = ('table', 'logits', 'attention')  # uses whose arrays should have two dimensions to shard


class SuggestedRules(tuple):
    """Path rules, to be passed to a partitioner as they are or printed, edited and pasted.

    Usage:
      rules = suggest_rules(state)
      print(rules)  # Python code with comments
      PjitPartitioner(params_axes_names_override=rules)

    Args:
      rules: (regular expression, names) pairs.
      matches: the arrays that each rule takes, as `explain_rules` returns them.
      notes: what a reader should know about the choices.
    """

    matches: RuleMatches
    notes: tuple[str, ...]

    def __new__(
        cls,
        rules: Iterable[tuple[str, Names]],
        matches: RuleMatches,
        notes: Iterable[str] = (),
    ) -> SuggestedRules:
        made = tuple.__new__(cls, rules)
        made.matches, made.notes = matches, tuple(notes)
        return made

    def __getnewargs__(self) -> tuple:
        return tuple(self), self.matches, self.notes

    def __str__(self) -> str:
        lines = ['rules = [']
        for rule in self.matches.rules:
            path, shape = next(iter(rule.arrays.items()))
            number = len(rule.arrays)
            example = f'{path} {shape}' if number == 1 else f'{number:,} arrays: {path} {shape}'
            lines += _comment(example, '    ')
            lines.append(f'    ({_raw(rule.pattern)}, {rule.names!r}),')
        lines.append(']')
        return '\n'.join([*lines, *(line for note in self.notes for line in _comment(note))])


def suggest_rules(state: Any, mesh: MeshLike | None = None) -> SuggestedRules:
    """Suggests path rules that name all parameters of a state that have no names.

    The names are names of `standard_logical_axis_rules`, so the rules serve tensor parallelism and,
    with `fsdp_logical_axis_rules`, fully sharded data parallelism. They come from the shapes first:
    the size that most arrays share is the width of the model, 'embed'. The words of the paths
    decide between 'heads', 'mlp' and 'vocab'. Arrays with a single dimension that can be sharded
    get the mesh axes themselves, and small vectors are replicated.

    Usage:
      rules = suggest_rules(state)
      print(rules)  # code to paste and edit
      print(explain_rules(state, rules))  # which rule takes which array

    Args:
      state: a pytree of parameters or a train state, abstract or not, of any library. Layers may be
        stacked along a dimension, as under scan. Arrays of an optimizer follow their parameters.
      mesh: the mesh, or the sizes of its axes, which must divide each dimension that is sharded. By
        default sizes that are divisible by 8 are sharded, over the mesh axes 'data' and 'model'.

    Returns:
      (regular expression, names) pairs, with the reasons that `print` shows.
    """
    targets = list_targets(state)
    wanted = {path: t.array for path, t in targets.items() if needs_rule(t)}
    shapes = {path: shape_of(array) for path, array in wanted.items()}
    sizes = {path: nbytes(array) for path, array in wanted.items()}
    stacked = stacked_dimensions(shapes)
    shards = Shards() if mesh is None else Shards.of_mesh(mesh)
    names_of = DimensionNames(shapes, stacked)
    named = {path: names_of.named(path, shards) for path in shapes}
    # Biases, and arrays that have at most one dimension apart from layers.
    vectors = {
        path
        for path, n in named.items()
        if n.use == 'bias'
        or sum(size > 1 for d, size in enumerate(shapes[path]) if d != stacked.get(path)) <= 1
    }
    # Small arrays are replicated if these are a small share of all bytes.
    small = {path for path in shapes if sizes[path] <= SMALL}
    for group in ({p for p in small if p in vectors or named[p].how != 'pair'}, small & vectors):
        if sum(sizes[path] for path in group) <= _WHOLE * sum(sizes.values()):
            named |= {path: replicated(shapes[path], stacked.get(path)) for path in group}
            break
    names = {path: named[path].names if path in named else None for path in targets}
    general = {named[path].names for path in vectors}
    rules = make_path_rules(names, general)
    notes = _notes(named, shapes, sizes, shards) if named else ['No array needs a rule.']
    if named and mesh is None:
        notes.append(
            f'No mesh was given: sizes that {shards.total} divides are sharded, over the mesh axes '
            f'{shards.axes}. For other meshes, write suggest_rules(state, mesh).'
        )
    return SuggestedRules(rules, explain_rules(state, rules), notes)


def _notes(
    named: Mapping[str, Named],
    shapes: Mapping[str, Shape],
    sizes: Mapping[str, int],
    shards: Shards,
) -> list[str]:
    """What a reader should know about the choices, each in one sentence."""
    notes = []
    undivided: dict[int, list[str]] = {}
    for path, n in named.items():
        if n.how == 'one' and n.use in _PAIRS and n.undivided is not None and n.undivided > 1:
            undivided.setdefault(n.undivided, []).append(path)
    for size, paths in undivided.items():
        notes.append(
            f'{_example(paths)}: {size:,} is not divisible by {shards.model}, so another dimension '
            'is sharded over all mesh axes.'
        )
    for path, n in named.items():
        if n.how in ('none', 'part') and sizes[path] > SMALL:
            part = 'is replicated' if n.how == 'none' else 'is sharded over some mesh axes only'
            notes.append(
                f'{path} {shapes[path]} {part}: {shards.total} divides none of its dimensions.'
            )
    if guessed := [path for path, n in named.items() if n.how == 'pair' and n.use is None]:
        notes.append(
            f'{_example(guessed)}: no word of the path is known, so the names come from the sizes '
            'alone.'
        )
    return notes


def _example(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f'{paths[0]} and {count(len(paths) - 1, "other")}'


def _raw(pattern: str) -> str:
    """A pattern as code, with single backslashes."""
    return f"r'{pattern}'" if '\\' in pattern and "'" not in pattern else repr(pattern)


def _comment(text: str, indent: str = '') -> list[str]:
    return textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=f'{indent}# ',
        subsequent_indent=f'{indent}#   ',
        break_long_words=False,
    )


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
