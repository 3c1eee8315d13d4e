"""Suggests path rules for a state whose arrays have no axis names."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from partitioning.plan.by_rules import Shape, stacked_dimensions
from partitioning.plan.rows import SMALL
from partitioning.plan.tables import count
from partitioning.rules import MeshLike
from partitioning.state import nbytes, shape_of
from partitioning.suggestion.dimension_names import DimensionNames, Named, Shards, replicated
from partitioning.suggestion.path_patterns import Names, make_path_rules
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
