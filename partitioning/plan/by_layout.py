"""A train state laid out without logical axis rules, by one word or by partition rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from partitioning.plan.building import PlanBuilder, is_array
from partitioning.plan.layouts import Layout, RuleSet, Subject, whole
from partitioning.plan.partition_rules import unmatched_problem
from partitioning.plan.plan import Plan
from partitioning.plan.rows import SMALL, Decision, PlanRow
from partitioning.rules import MeshLike, Problem, Report, ResolvedDimension, raise_problem
from partitioning.state import Leaf, Path, key_names, nbytes, walk
from partitioning.state.boxes import (
    Entry,
    FlatState,
    carried_names,
    flatten_state,
    is_carrier,
)
from partitioning.state.naming import parameter_roots
from partitioning.state.traversal import StateTree

Shape = tuple[int, ...]
_STACKS = ('layers', 'stack', 'stage')  # logical axes that count layers
_MOST_LAYERS = 512


def lay_out_state(
    state: Any, layout: Layout, rules: RuleSet, mesh: MeshLike, report: Report = raise_problem
) -> Plan:
    """Lays out a train state by the paths and sizes of its arrays.

    The parameters are laid out first; the state of the optimizer follows them, and every other
    array is laid out like a parameter.

    Args:
      state: a pytree, abstract or not, with or without names.
      layout: decides the dimensions of one array.
      rules: the rules of the partitioner, for the plan.
      mesh: the mesh, or the sizes of its axes.
      report: receives every problem; by default it raises.

    Raises:
      ValueError: with the path of the first array that cannot have its layout.
    """
    flat = flatten_state(state)
    builder = _LayoutBuilder(layout, mesh, _plain if report is raise_problem else report)
    exact = {path: builder.decide(subject) for path, subject in _parameters(flat).items()}
    tree = walk(flat, exact=exact, report=lambda path, problem: None)
    leaves = tuple(x._replace(parameter=None) if _is_preconditioner(x) else x for x in tree.leaves)
    plan = builder.plan(StateTree(leaves, tree.treedef), rules)
    if builder.unmatched:
        builder.report(builder.unmatched[0], unmatched_problem(builder.unmatched))
    return plan


def _plain(path: str, problem: Problem) -> None:
    """Raises a problem of an array, without the words of T5X for logical axes."""
    raise ValueError(problem.message if problem.kind == 'unmatched' else f'{path}: {problem[1]}')


class _LayoutBuilder(PlanBuilder):
    """Lays out every array by a layout, and collects the arrays that no rule matches."""

    def __init__(self, layout: Layout, mesh: MeshLike, report: Report):
        super().__init__(mesh, report)
        self._layout = layout
        self.unmatched: list[str] = []

    def decide(self, subject: Subject) -> tuple[ResolvedDimension, ...]:
        """The dimensions of an array; its problems are reported."""
        return self._reported(subject, self._layout.decide(subject, self.mesh))

    def _reported(self, subject: Subject, decision: Decision) -> tuple[ResolvedDimension, ...]:
        for problem in decision[1]:
            if problem.kind == 'unmatched':
                self.unmatched.append('/'.join(subject.path))
            else:
                self.report('/'.join(subject.path), problem)
        return tuple(decision[0])

    def nameless(self, leaf: Leaf) -> PlanRow:
        subject = Subject(leaf.path, leaf.array)
        decision = self._layout.decide(subject, self.mesh)
        if nbytes(leaf.array) <= SMALL and any(p.kind == 'unmatched' for p in decision[1]):
            dimensions = whole(subject, 'no partition rule matches this small array')
        else:
            dimensions = self._reported(subject, decision)
        return self.row(leaf.path, leaf.array, leaf.role, dimensions)


def _is_preconditioner(leaf: Leaf | Any) -> bool:
    """Whether a statistic has dimensions that its parameter lacks, and would be whole therefore."""
    if not isinstance(leaf, Leaf) or leaf.parameter is None or not is_array(leaf.array):
        return False
    if None not in leaf.dims or nbytes(leaf.array) <= SMALL:
        return False
    return not any(d.mesh_axes for d in leaf.pick(leaf.parameter.names) if d is not None)


def _parameters(flat: FlatState) -> Mapping[Path, Subject]:
    """The parameters of a state, or all of its arrays if nothing distinguishes them."""
    entries = [entry for entry in flat.entries if entry.carrier != 'metadata']
    outside = _outside_optimizers(flat.state, entries)
    roots = parameter_roots([e for e in outside if not _is_bookkeeping(e)] or entries)
    held = {entry.path: entry for entry in entries}
    stacked = stacked_dimensions({'/'.join(path): held[path].shape for path in roots})
    subjects = {}
    for path, root in roots.items():
        _, leaf, array, _, carrier = held[path]
        carried = carried_names(leaf, path) if carrier else None
        names = () if carried is None else carried.names
        named = next((dim for dim, name in enumerate(names) if name in _STACKS), None)
        layers = stacked.get('/'.join(path), named)
        subjects[path] = Subject(path, array, len(root), names, layers)
    return subjects


def _is_bookkeeping(entry: Entry) -> bool:
    """Whether a leaf is a step number or a random key, next to the trees of the state."""
    dtype = getattr(entry.array, 'dtype', None)
    floating = dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.inexact)
    return len(entry.path) == 1 and not floating


def _outside_optimizers(state: Any, entries: Sequence[Entry]) -> list[Entry]:
    """The leaves that are not in a NamedTuple like those that hold the state of optax."""

    def is_optimizer(x: Any) -> bool:
        named = isinstance(x, tuple) and hasattr(x, '_fields')
        return named and x is not state and type(x).__name__.endswith('State')

    flat = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda x: is_carrier(x) or is_optimizer(x)
    )
    inside = {key_names(path) for path, x in flat if is_optimizer(x)}
    return [e for e in entries if not any(e.path[:n] in inside for n in range(len(e.path) + 1))]


def stacked_dimensions(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The dimension that counts layers, for each array that has one.

    All arrays of a scanned subtree have this dimension, those that have only one dimension in a
    single layer too. It is the first dimension, or the second as T5X and MaxText stack layers.

    Args:
      shapes: the shape of each array, by path.
    """
    subtrees: dict[str, list[str]] = {}
    for path in shapes:
        keys = path.split('/')
        for n in range(len(keys)):
            subtrees.setdefault('/'.join(keys[:n]), []).append(path)
    found: dict[str, int] = {}
    for _, paths in sorted(subtrees.items(), key=lambda subtree: len(subtree[1]), reverse=True):
        if any(path in found for path in paths):
            continue
        inside = {path: shapes[path] for path in paths}
        dim = next((dim for dim in (0, 1) if _are_stacked(inside, dim)), None)
        if dim is not None:
            found |= dict.fromkeys(paths, dim)
    return found


def _are_stacked(shapes: Mapping[str, Shape], dim: int) -> bool:
    ranks = {len(shape) for shape in shapes.values()}
    if min(ranks) < 2 or max(ranks) < 3 or (dim == 1 and len(shapes) < 4):
        return False
    if len({shape[dim] for shape in shapes.values()}) > 1:
        return False
    single = {path: (*shape[:dim], *shape[dim + 1 :]) for path, shape in shapes.items()}
    # Every layer has vectors, such as biases, whose sizes are sizes of its matrices too. This is
    # what distinguishes layers from, say, attention heads.
    vectors = {path: shape[0] for path, shape in single.items() if len(shape) == 1}
    others = {size for path, shape in single.items() if path not in vectors for size in shape}
    return (
        bool(vectors)
        and {*vectors.values()} <= others
        and not any(path.endswith('kernel') for path in vectors)
        and next(iter(shapes.values()))[dim] <= _MOST_LAYERS
    )
