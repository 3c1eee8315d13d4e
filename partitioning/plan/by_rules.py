"""A train state laid out by logical axis rules, or without them by a word or by partition rules."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from partitioning.plan.building import PlanBuilder, is_array
from partitioning.plan.findings import Finding, row_findings, rule_findings
from partitioning.plan.layouts import Layout, RuleLayout, RuleSet, Subject, WordLayout, whole
from partitioning.plan.plan import Plan, Unplanned
from partitioning.plan.rows import (
    NO_NAMES,
    NOT_COVERED,
    OF_LAYERS,
    SAID_NONE,
    SMALL,
    Decision,
    PlanRow,
    without_name,
)
from partitioning.rules import (
    AxisNames,
    MeshLike,
    Problem,
    Report,
    ResolvedDimension,
    axis_sizes,
    describe_axes,
    raise_problem,
    try_resolve,
)
from partitioning.state import Leaf, Parameter, Path, Role, nbytes, shape_of, walk
from partitioning.state.boxes import FlatState, carried_names, flatten_state, is_inexact
from partitioning.state.naming import NoNamesError, parameter_roots
from partitioning.state.path_names import replicating_rules
from partitioning.state.traversal import StateTree

Shape = tuple[int, ...]
_LOGGER = logging.getLogger(__name__)
_STACKS = ('layers', 'stack', 'stage')  # logical axes that count layers
_MOST_LAYERS = 512


def lay_out_state(
    state: Any, layout: Layout, rules: RuleSet, mesh: MeshLike, report: Report = raise_problem
) -> Plan:
    """Lays out a train state by the paths and sizes of its arrays.

    The parameters are laid out first; the state of the optimizer follows them, and every other
    array is laid out like a parameter. The plan gets the rules of the partitioner.
    """
    flat = flatten_state(state)
    report = _plain if report is raise_problem else report
    builder = _LayoutBuilder(layout=layout, mesh=mesh, report=report)
    exact = {path: builder.decide(subject) for path, subject in _parameters(flat).items()}
    tree = walk(flat, exact=exact, report=lambda path, problem: None)
    leaves = tuple(x._replace(parameter=None) if _is_preconditioner(x) else x for x in tree.leaves)
    plan = builder.plan(StateTree(leaves, tree.treedef), rules)
    if isinstance(layout, WordLayout):
        _warn_of_whole_arrays(plan)
    if paths := builder.unmatched:
        more = f' and {len(paths) - 3} more' if len(paths) > 3 else ''
        message = (
            f'no partition rule matches {", ".join(paths[:3])}{more}. Add '
            f"('{re.escape(paths[0])}', PartitionSpec(...)), or a last ('.*', PartitionSpec()), "
            'which replicates them'
        )
        builder.report(paths[0], Problem('unmatched', message))
    return plan


def _warn_of_whole_arrays(plan: Plan) -> None:
    """Logs the arrays that stay whole under 'fsdp', as the devices do not divide their sizes."""
    whole = [
        row
        for row in plan.rows
        if any(d.policy == 'replicate' for d in row.dimensions)
        and row.bytes_per_device == row.bytes_total
    ]
    if whole:
        largest = max(whole, key=lambda row: row.bytes_total)
        reason = next(d.reason for d in largest.dimensions if d.policy == 'replicate')
        others = f', like {len(whole) - 1} more' if len(whole) > 1 else ''
        total = sum(row.bytes_total for row in whole)
        _warn_once(
            f'{largest.path}, shape {largest.shape}, {largest.bytes_total:,} bytes, is whole on '
            f'each device{others}, {total:,} bytes in all: {reason}. Change the size, or name the '
            'array in other rules'
        )


@functools.lru_cache(maxsize=64)  # setup, plan and audit lay out the same state again
def _warn_once(text: str) -> None:
    _LOGGER.warning('%s', text)


def _plain(path: str, problem: Problem) -> None:
    """Raises a problem of an array, without the words of T5X for logical axes."""
    raise ValueError(problem.message if problem.kind == 'unmatched' else f'{path}: {problem[1]}')


@dataclasses.dataclass(kw_only=True)
class _LayoutBuilder(PlanBuilder):
    """Lays out every array by a layout, and collects the arrays that no rule matches."""

    layout: Layout
    unmatched: list[str] = dataclasses.field(default_factory=list)

    def decide(self, subject: Subject) -> tuple[ResolvedDimension, ...]:
        """The dimensions of an array; its problems are reported."""
        return self._reported(subject, self.layout.decide(subject, self.mesh))

    def _reported(self, subject: Subject, decision: Decision) -> tuple[ResolvedDimension, ...]:
        for problem in decision[1]:
            if problem.kind == 'unmatched':
                self.unmatched.append('/'.join(subject.path))
            else:
                self.report('/'.join(subject.path), problem)
        return tuple(decision[0])

    def nameless(self, leaf: Leaf) -> PlanRow:
        subject = Subject(leaf.path, leaf.array)
        decision = self.layout.decide(subject, self.mesh)
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
    outside = [entry for entry in entries if not entry.in_optimizer]
    # A step number or a random key next to the trees of the state is not a parameter.
    others = [e for e in outside if len(e.path) != 1 or is_inexact(e.array)]
    roots = parameter_roots(others or entries)
    held = {entry.path: entry for entry in entries}
    stacked = stacked_dimensions({'/'.join(path): held[path].shape for path in roots})
    subjects = {}
    for path, root in roots.items():
        _, leaf, array, _, carrier, _ = held[path]
        carried = carried_names(leaf, path) if carrier else None
        names = () if carried is None else carried.names
        named = next((dim for dim, name in enumerate(names) if name in _STACKS), None)
        layers = stacked.get('/'.join(path), named)
        subjects[path] = Subject(path, array, len(root), names, layers)
    return subjects


def stacked_dimensions(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The dimension that counts layers, for each array that has one, from the shapes by path.

    All arrays of a scanned subtree have this dimension, those that have only one dimension in a
    single layer too. It is the first dimension, or the second as T5X and MaxText stack layers.
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


def build_plan(
    state: Any, rules: RuleSet, mesh: MeshLike, report: Report = raise_problem, said: Any = None
) -> Plan:
    """Applies rules to a train state, in one walk over it.

    The state itself determines its logical axes, unless they are `said`.

    Raises:
      ValueError: with the path of the first array whose layout the rules do not decide.
    """
    if rules.layout is not None:
        return lay_out_state(state, rules.layout, rules, mesh, report)
    replicate = rules.rules.on_unmatched == 'replicate'
    try:
        # Under 'replicate', arrays may lack names.
        of_walk = (lambda path, problem: None) if replicate else report
        tree = walk(state, rules.rules.names, of_walk, said=said)
    except NoNamesError:
        if not replicate:
            raise
        return lay_out_state(state, RuleLayout((), rules.rules), rules, mesh, report)
    if rules.rules.optimizer is not None:
        _check_has_optimizer(tree)
    return _RuleBuilder(rules=rules, tree=tree, mesh=mesh, report=report).plan(tree, rules)


def _check_has_optimizer(tree: StateTree[Leaf]) -> None:
    """Raises ValueError if rules for the optimizer are given, but its state looks like parameters.

    A state without an optimizer may be laid out by such rules; then there are no two trees alike.
    """
    leaves = [x for x in tree.leaves if isinstance(x, Leaf)]
    if any(x.role == 'optimizer' or 'params' in x.path for x in leaves):
        return
    trees: dict[str, set[tuple[Path, Shape]]] = {}
    for x in leaves:
        if x.role == 'parameters' and len(x.path) > 1:
            trees.setdefault(x.path[0], set()).add((x.path[1:], shape_of(x.array)))
    alike = [(a, b) for a, b in itertools.combinations(trees, 2) if trees[a] == trees[b]]
    if alike:
        one, other = alike[0]
        raise ValueError(
            f'AxisRules(optimizer=...) applies to no array: the state has no state of optax, and '
            f'{one} and {other} have the same {len(trees[one])} arrays. Keep the parameters under '
            "the key 'params', as in {'params': ..., 'momentum': ...}, so that the arrays next to "
            'them follow, or remove optimizer='
        )


def lint(rules: RuleSet, mesh: MeshLike, state: Any = None) -> tuple[Finding, ...]:
    """Everything that is wrong or suspicious, errors first, even if there is no valid plan.

    Without a state, only the rules are examined.
    """
    findings: list[Finding] = []

    def report(path: str, problem: Problem) -> None:
        findings.append(Finding('error', problem.kind, path, problem.message))

    rows: tuple[PlanRow, ...] = ()
    if state is not None:
        try:
            rows = build_plan(state, rules, mesh, report).rows
        except ValueError as error:  # the state as a whole has no names, or a rule has no effect
            findings.append(Finding('error', 'names', 'the state', str(error)))
    wrong = {finding.where for finding in findings}
    findings += [f for f in row_findings(rows, rules) if f.where not in wrong]
    findings += rule_findings(rules, mesh, rows)
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: finding.severity))


def _with_note(problems: Sequence[Problem], note: str) -> tuple[Problem, ...]:
    return tuple(problem._replace(message=problem.message + note) for problem in problems)


@dataclasses.dataclass(kw_only=True)
class _RuleBuilder(PlanBuilder):
    """Lays out parameters by logical axis rules, and reports large arrays without names."""

    rules: RuleSet
    tree: StateTree[Leaf]

    @functools.cached_property
    def _large(self) -> dict[Path, tuple[int, ...]]:
        """The arrays that nobody names and that are too large to be replicated silently."""
        if self.rules.rules.on_unmatched == 'replicate':
            return {}
        return {
            x.path: shape_of(x.array)
            for x in self.tree.leaves
            if isinstance(x, Leaf) and x.parameter is None and not (x.said_none or x.problematic)
            if is_array(x.array) and nbytes(x.array) > SMALL
        }

    def resolve(self, role: Role, parameter: Parameter) -> Decision:
        separate = role == 'optimizer' and self.rules.rules.optimizer is not None
        rules = self.rules.rules.optimizer if separate else self.rules.rules
        assert rules is not None
        if parameter.rules:
            rules = rules.with_rules((*parameter.rules, *rules))
        resolved, problems = try_resolve(
            parameter.names,
            rules,
            mesh=self.mesh,
            shape=parameter.shape,
            axes_as_names=parameter.axes_as_names,
        )
        if (covered := parameter.num_carried) is not None:
            rank = len(resolved)
            names = f'the names {parameter.carried} cover {covered} of {rank} dimensions'
            nothing = without_name(f'{NOT_COVERED}: {names}')
            resolved = (*resolved[:covered], *[nothing] * (rank - covered))
            note = f'. The names cover the first {covered} of {rank} dimensions: {OF_LAYERS}'
            problems = _with_note(problems, note)
        own = parameter.mesh
        if own is not None and dict(own.shape) != dict(axis_sizes(self.mesh)):
            message = (
                f'the names are for the mesh {describe_axes(own.shape)}, but the mesh is '
                f'{describe_axes(self.mesh)}'
            )
            problems = (*problems, Problem('conflict', message))
        return resolved, _with_note(
            problems, ' (by the rules for the optimizer)' if separate else ''
        )

    def nameless(self, leaf: Leaf) -> PlanRow | Unplanned:
        if leaf.said_none:
            alone = () if leaf.array is None else ((leaf.path, leaf.array),)
            for path, array in (*alone, *leaf.covered):
                self.covered.append(self.replicated(path, array, leaf.role, SAID_NONE))
            return Unplanned(AxisNames(*[None] * len(leaf.dims)), None)
        if leaf.path in self._large:
            others = len(self._large) - 1
            alike = f' So would the bytes of {others} more arrays.' if others else ''
            texts = {path: ['/'.join(path)] for path in self._large}
            message = (
                f'Missing axis names: an array of shape {shape_of(leaf.array)} has no names and '
                f'follows no parameter, so all of its {nbytes(leaf.array):,} bytes would be on '
                f'each of the {math.prod(axis_sizes(self.mesh).values())} devices '
                f'({describe_axes(self.mesh)}).{alike} To replicate on purpose, add to '
                f'AxisRules(names=...) {replicating_rules(self._large, texts)[1:-1]}, with '
                "names in place of None to shard; or write only layout='fsdp'"
            )
            self.report('/'.join(leaf.path), Problem('names', message))
        return self.replicated(leaf.path, leaf.array, leaf.role, NO_NAMES)
