"""Suggests path rules for a state whose arrays have no axis names."""

from __future__ import annotations

import functools
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from partitioning.mesh import MeshConfig
from partitioning.plan.by_rules import Shape, stacked_dimensions
from partitioning.plan.rows import SMALL
from partitioning.plan.tables import count
from partitioning.programs.contexts import in_context
from partitioning.programs.trace_log import check_init
from partitioning.rules import AxisRules, MeshLike, is_count
from partitioning.state import nbytes, shape_of
from partitioning.suggestion.dimension_names import DimensionNames, Named, Shards, replicated
from partitioning.suggestion.notes import Share, notes_on, rules_of, share_of
from partitioning.suggestion.path_patterns import Names, make_path_rules
from partitioning.suggestion.rule_matches import (
    RuleMatches,
    explain_rules,
    list_targets,
    needs_rule,
)

_WHOLE = 0.01  # small arrays are replicated if they are at most this share of all bytes
_INNER = 0.25  # arrays are sharded over the model axis only if they are at most this share
_COLUMNS = 100


class SuggestedRules(tuple):
    """Path rules, to be passed to a partitioner as they are or printed, edited and pasted.

    Usage:
      rules = suggest_rules(state, mesh)
      print(rules)  # Python code with comments
      PjitPartitioner({'data': -1, 'model': 2}, rules)

    Args:
      rules: (regular expression, names) pairs.
      matches: the arrays that each rule takes, as `explain_rules` returns them.
      notes: what a reader should know about the choices.
      share: the part of the bytes that stays on every device; None if no array needs a rule.
      batch: the mesh axes of the batch, if the standard rules do not know the axes of the mesh.
    """

    matches: RuleMatches
    notes: tuple[str, ...]
    share: Share | None
    batch: tuple[str, ...]

    def __new__(
        cls,
        rules: Iterable[tuple[str, Names]],
        matches: RuleMatches,
        notes: Iterable[str] = (),
        share: Share | None = None,
        batch: tuple[str, ...] = (),
    ) -> SuggestedRules:
        made = tuple.__new__(cls, rules)
        made.matches, made.notes, made.share, made.batch = matches, tuple(notes), share, batch
        return made

    def __getnewargs__(self) -> tuple:
        return tuple(self), self.matches, self.notes, self.share, self.batch

    def as_layout(self) -> AxisRules:
        """The layout by these names, with the standard rules if they know the mesh."""
        return (
            AxisRules([('batch', self.batch)], names=self) if self.batch else AxisRules(names=self)
        )

    def __str__(self) -> str:
        lines = ['rules = [']
        for rule in self.matches.rules:
            path, shape = next(iter(rule.arrays.items()))
            number = len(rule.arrays)
            example = f'{path} {shape}' if number == 1 else f'{number:,} arrays: {path} {shape}'
            lines += _comment(example, '    ')
            lines.append(f'    ({_raw(rule.pattern)}, {rule.names!r}),')
        lines.append(']')
        notes = [*([] if self.share is None else [str(self.share)]), *self.notes]
        if self:
            batch = f"[('batch', {self.batch})], " if self.batch else ''
            notes.insert(0, f'PjitPartitioner(mesh, AxisRules({batch}names=rules))')
        return '\n'.join([*lines, *(line for note in notes for line in _comment(note))])


def suggest_rules(
    state: Any, mesh: MeshLike | MeshConfig | None = None, *args: Any
) -> SuggestedRules:
    """Suggests path rules that name all parameters of a state that have no names.

    The names are names of `standard_logical_axis_rules`, so the rules serve tensor parallelism and,
    with `fsdp_logical_axis_rules`, fully sharded data parallelism. They come from the shapes and
    from what each matrix stands next to: the width of the model, which norms scale, tables look up
    and projections read and write, is 'embed' in every layer. The words of the paths decide between
    'heads', 'mlp' and 'vocab'. Arrays with a single dimension that can be sharded get the mesh axes
    themselves, and so do all arrays if the model axis has one device, because the standard rules
    would replicate them. Small vectors are replicated.

    Usage:
      rules = suggest_rules(init, mesh, key)
      print(rules)  # code to paste and edit, and the share that stays on every device
      print(explain_rules(state, rules))  # which rule takes which array

    Args:
      state: an init function, which is traced inside the mesh; or a pytree of parameters or a train
        state, abstract or not, of any library. Layers may be stacked along a dimension, as under
        scan. Arrays of an optimizer follow their parameters.
      mesh: the mesh, a MeshConfig, or the sizes of its axes, which must divide each dimension that
        is sharded. By default sizes that are divisible by 8 are sharded, over the mesh axes 'data'
        and 'model'.
      *args: the arguments of the init function, abstract or not.

    Raises:
      ValueError: if `mesh` is not a mesh, or if `args` are not the arguments of the init function.
    """
    mesh = as_mesh(mesh)
    if is_init(state):
        state = trace_state(state, mesh, args)
    elif args:
        raise ValueError(
            f'suggest_rules got a state, a {type(state).__name__}, and {len(args)} arguments: only '
            'an init function takes arguments; write suggest_rules(state, mesh)'
        )
    targets = list_targets(state)
    wanted = {path: t.array for path, t in targets.items() if needs_rule(t)}
    shapes = {path: shape_of(array) for path, array in wanted.items()}
    sizes = {path: nbytes(array) for path, array in wanted.items()}
    shards = Shards() if mesh is None else Shards.of_mesh(mesh)
    named, general = _named(shapes, sizes, shards)
    names = {path: named[path].names if path in named else None for path in targets}
    rules = make_path_rules(names, general)
    matches = explain_rules(state, rules)
    if not named:
        carry = sum(target.has_names for target in targets.values())
        others = '' if carry == len(targets) else ', and the others are small'
        have = f'{count(carry, "array")} {"has" if carry == 1 else "have"} names'
        why = f': {have}{others}' if carry else ''
        return SuggestedRules(rules, matches, [f'No array needs a rule{why}.'])
    notes = notes_on(named, shapes, sizes, shards)
    if mesh is None:
        notes.append(
            f'No mesh was given: sizes that {shards.total} divides are sharded, over the mesh axes '
            f'{shards.axes}. For other meshes, write suggest_rules(state, mesh).'
        )
    given = {path: n.names for path, n in named.items()}
    share = share_of(given, shapes, sizes, mesh)
    return SuggestedRules(rules, matches, notes, share, shards.batch)


def _named(
    shapes: Mapping[str, Shape], sizes: Mapping[str, int], shards: Shards
) -> tuple[dict[str, Named], set[Names]]:
    """The names of each array by path, and the names that any vector may get."""
    stacked = stacked_dimensions(shapes)
    names_of = DimensionNames(shapes, stacked, shards)
    named = {path: names_of.named(path) for path in shapes}
    # Biases, and arrays that have at most one dimension apart from layers.
    vectors = {
        path
        for path, n in named.items()
        if n.use == 'bias'
        or sum(size > 1 for d, size in enumerate(shapes[path]) if d != stacked.get(path)) <= 1
    }
    total = sum(sizes.values())
    # What joins an inner size to a rank or to tokens is named if that leaves few bytes uneven.
    inner = {path: n.inner for path, n in named.items() if n.inner is not None}
    if sum(sizes[path] for path in inner) <= _INNER * total:
        named |= {path: named[path]._replace(names=n, how='pair') for path, n in inner.items()}
    # Small arrays are replicated if these are a small share of all bytes.
    small = {path for path in shapes if sizes[path] <= SMALL}
    for group in ({p for p in small if p in vectors or named[p].how != 'pair'}, small & vectors):
        if sum(sizes[path] for path in group) <= _WHOLE * total:
            named |= {path: replicated(shapes[path], stacked.get(path)) for path in group}
            break
    return named, {named[path].names for path in vectors}


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


def as_mesh(mesh: Any) -> MeshLike | None:
    """The mesh of a setting: a mesh, the sizes of its axes, or what builds a mesh.

    Raises:
      ValueError: if it is none of these.
    """
    if mesh is None:
        return None
    if isinstance(mesh, MeshConfig):
        return mesh.build()
    if isinstance(mesh, Mapping) and -1 in mesh.values():
        return MeshConfig(axes=mesh).build()
    is_sizes = isinstance(mesh, Mapping) and all(map(is_count, mesh.values()))
    if not (isinstance(mesh, Mesh | AbstractMesh) or is_sizes):
        raise ValueError(
            f'mesh={_short(mesh)} must be a mesh or the size of each axis, such as '
            "{'data': 4, 'model': 2}; the arguments of an init function follow it: "
            'suggest_rules(init, mesh, key)'
        )
    return mesh


def is_init(x: Any) -> bool:
    """Whether `x` is a function and not a state; modules of Equinox and nnx are both callable."""
    nnx = sys.modules.get('flax.nnx')
    if nnx is not None and isinstance(x, nnx.Module):
        return False
    return callable(x) and jax.tree_util.all_leaves([x])


def trace_state(init: Callable[..., Any], mesh: MeshLike | None, args: tuple[Any, ...]) -> Any:
    """The state that `init(*args)` makes, with ShapeDtypeStructs for arrays and no other leaves.

    Raises:
      ValueError: if `init` takes other arguments.
    """
    name = getattr(init, '__name__', 'init')
    check_init(init, args, 'suggest_rules({}, mesh, {})')

    @functools.wraps(init)
    def arrays(*args: Any) -> Any:
        return jax.tree.map(lambda x: x if _is_array(x) else None, init(*args))

    if mesh is None:
        try:
            return jax.eval_shape(arrays, *args)
        except Exception as error:
            error.add_note(f'suggest_rules({name}, None) traced it without a mesh: pass the mesh')
            raise
    if not isinstance(mesh, Mesh | AbstractMesh):
        mesh = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    auto: Any = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return jax.eval_shape(in_context(arrays, auto, rules_of(mesh)), *args)


def _is_array(x: Any) -> bool:
    return hasattr(x, 'dtype') or isinstance(x, bool | int | float | complex)


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 60 and '\n' not in text else f'a {type(x).__name__}'
