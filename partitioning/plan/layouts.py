"""Layouts without logical axes: by one word, or by partition rules.

Partition rules are regular expressions on the paths of arrays, with their specs, as in EasyLM and
FJFormer: [('attn/kernel', P('fsdp', 'mp')), ('.*', P())]. The first rule whose expression is found
in the path of an array decides its mesh axes.

'data_parallel' replicates every array. 'fsdp' (fully sharded data parallelism) shards every array
over the mesh axes of the batch, and XLA gathers it where it is used:

- The largest dimension that the number of shards divides is sharded. Of two equal dimensions it is
  the first, because the shards of a first dimension are joined without moving elements.
- A lookup table is sharded along its vocabulary, the first dimension, if the shards divide it. XLA
  then gathers the table. If the other dimension is sharded, XLA gathers the rows of the whole batch
  instead: a GPT on 8 CPU devices then moves 8 times as many bytes and needs twice the temporary
  memory (compiler). This also holds if the output layer is the transpose of the table.
- A stack of layers, which a scan slices, is sharded along the dimension of the layers only if no
  other can be sharded, because XLA would gather the whole stack to take one layer out of it.
- If the shards divide no dimension, the mesh axes are distributed over several dimensions, and some
  are left out.
- An array with fewer than MIN_SHARD_SIZE elements per shard stays whole.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

from partitioning.plan.rows import NO_NAMES, SMALL, Decision, without_name
from partitioning.rules import (
    AxisRules,
    MeshAxes,
    MeshLike,
    Problem,
    ResolvedDimension,
    apply_policies,
    as_tuple,
    axis_sizes,
    check_definite,
    compiled,
    from_tuple,
    largest_divisor,
    num_shards,
    padding_problems,
    rank_problem,
    sharding_axes,
    sizes_that_fit,
)
from partitioning.rules.checks import axis_problems
from partitioning.state import Path, nbytes, shape_of
from partitioning.values import value_str

# The mesh axes of each dimension; a tuple or list can replace the spec.
SpecEntries = PartitionSpec | Sequence[MeshAxes] | str | None
PartitionRules = Sequence[tuple[str, SpecEntries]]
PartitionRule = tuple[str, tuple[MeshAxes, ...]]  # as check_partition_rules returns it


def check_partition_rules(rules: Iterable[Any]) -> tuple[PartitionRule, ...]:
    """Checks partition rules and returns them as (regular expression, mesh axes) pairs.

    A spec is a PartitionSpec or, as gin files write it, a tuple or list with the mesh axes of each
    dimension. Dimensions after its end, and all dimensions of None, are replicated.

    Raises:
      ValueError: if a rule is not such a pair, or if its regular expression is invalid.
    """
    if isinstance(rules, str | Mapping | set) or not isinstance(rules, Iterable):
        raise ValueError(
            "layout must be 'fsdp', 'data_parallel' or partition rules such as "
            "[('attn/kernel', PartitionSpec('data')), ('.*', PartitionSpec())], not "
            f'{value_str(rules)}'
        )
    checked: list[PartitionRule] = []
    for rule in rules:
        match rule:
            case (str(pattern), None):
                checked.append((pattern, ()))
            case (str(pattern), str(axis)):
                checked.append((pattern, (axis,)))
            case (str(pattern), PartitionSpec() | tuple() | list() as entries):
                check_definite(PartitionSpec(*entries), f'partition rule for {pattern!r}')
                checked.append((pattern, tuple(_entry(e, rule) for e in entries)))
            case _:
                raise ValueError(
                    "a partition rule must be ('regular expression', PartitionSpec(...)), not "
                    f'{rule!r}'
                )
        compiled(checked[-1][0], f'partition rule {rule!r}')
    if not checked:
        raise ValueError("there are no partition rules: layout='data_parallel' replicates all")
    return tuple(checked)


def _entry(entry: Any, rule: Any) -> MeshAxes:
    """One entry of a spec: a mesh axis, several, or None."""
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) for axis in entry):
        return from_tuple(entry)
    raise ValueError(
        f'partition rule {rule!r} has the entry {entry!r}: write a mesh axis, a tuple of mesh axes '
        'or None for each dimension'
    )


def rule_str(rule: PartitionRule) -> str:
    """A rule as code: `('attn/kernel', P('fsdp', 'mp'))`."""
    return f'({rule[0]!r}, P({", ".join(map(repr, rule[1]))}))'


LayoutWord = Literal['fsdp', 'data_parallel']

# With fewer elements per shard, it is cheaper to keep an array than to gather it: a float32 shard
# would have less than 64 bytes, one line of a cache. The limit for an array grows with the number
# of devices, as the latency of a gather does: it is 128 elements on 8 devices, and 65,536 on 4,096.
MIN_SHARD_SIZE = 16


class Subject(NamedTuple):
    """An array that a layout decides about.

    Attributes:
      path: its place in the state.
      array: the array or its ShapeDtypeStruct.
      tree: the length of the path of the tree that the array belongs to, 1 for params/fc1/kernel.
      names: the logical axis of each dimension, if the array carries any. They explain a layout
        and never decide it.
      layers: the dimension that counts the layers of a stack, if there is one.
    """

    path: Path
    array: Any
    tree: int = 0
    names: tuple[Any, ...] = ()
    layers: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return shape_of(self.array)


def whole(subject: Subject, reason: str) -> tuple[ResolvedDimension, ...]:
    """The dimensions of an array that every device holds whole."""
    return with_names([without_name(reason)] * len(subject.shape), subject.names)


def with_names(
    dimensions: Sequence[ResolvedDimension], names: Sequence[Any]
) -> tuple[ResolvedDimension, ...]:
    """The dimensions with the logical axes that the array carries, if there is one for each."""
    if len(names) != len(dimensions):
        return tuple(dimensions)
    return tuple(
        dataclasses.replace(d, name=name if isinstance(name, str) else None)
        for d, name in zip(dimensions, names, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class RuleLayout:
    """The layout that partition rules give, with the policies for arrays and sizes that do not fit.

    The rules are in order of priority, as `check_partition_rules` returns them.
    """

    rules: tuple[PartitionRule, ...]
    policies: AxisRules

    def decide(self, subject: Subject, mesh: MeshLike) -> Decision:
        """The dimensions of an array, and what is wrong with the rule that matches it."""
        shape = subject.shape
        if math.prod(shape) == 1:
            return whole(subject, 'an array of one element'), ()
        rule = self.first_match('/'.join(subject.path), '/'.join(subject.path[subject.tree :]))
        if rule is None:
            reason = 'no partition rule matches it' if self.rules else NO_NAMES
            if self.policies.on_unmatched == 'error':
                return whole(subject, reason), (Problem('unmatched', reason),)
            return [dataclasses.replace(d, policy='replicate') for d in whole(subject, reason)], ()
        pattern, axes = rule
        shown = f'partition rule {rule_str(rule)}'
        problems = [
            problem._replace(message=f'{shown}: {problem.message}')
            for problem in axis_problems([a for entry in axes for a in as_tuple(entry)], mesh)
        ]
        if len(axes) > len(shape):
            problem = rank_problem(shown, len(axes), shape)
            message = f'{problem.message}, or a rule for this array before it'
            problems.append(problem._replace(message=message))
        if problems:
            return whole(subject, f'partition rule {pattern!r} does not fit'), problems
        entries = (*axes, *[None] * (len(shape) - len(axes)))
        whose = f'partition rule {pattern!r}'
        dimensions = [
            dataclasses.replace(
                without_name(f'{whose} {"replicates" if entry is None else "shards"} it'),
                mesh_axes=entry,
                wanted=entry,
                rule=(pattern, entry),
            )
            for entry in entries
        ]
        found = (*apply_policies(dimensions, shape, mesh, self.policies.on_indivisible),)
        if any(d.policy == 'pad' for d in dimensions):
            found = (*found, *padding_problems(mesh))
        undone: dict[str, Any] = {'mesh_axes': None, 'policy': None} if found else {}
        dimensions = [
            dataclasses.replace(
                d, reason=f'{whose}: {d.reason}' if d.policy else d.reason, **undone
            )
            for d in dimensions
        ]
        problems = [p._replace(message=f'{whose}: {p.message}') for p in found]
        return with_names(dimensions, subject.names), problems

    def first_match(self, *texts: str) -> PartitionRule | None:
        """The first rule whose regular expression is found in one of the texts."""
        for rule in self.rules:
            if any(re.search(rule[0], text) for text in texts):
                return rule
        return None


@dataclasses.dataclass(frozen=True)
class WordLayout:
    """The layout that a word selects; 'fsdp' shards arrays over these mesh axes."""

    word: LayoutWord
    axes: tuple[str, ...]

    def decide(self, subject: Subject, mesh: MeshLike) -> Decision:
        """The dimensions of an array. Every array has a layout, so there are no problems."""
        shards, size = num_shards(self.axes, mesh), math.prod(subject.shape)
        if self.word == 'data_parallel':
            return whole(subject, "layout 'data_parallel' replicates every array"), ()
        if size <= 1:
            return whole(subject, 'an array of one element'), ()
        if shards == 1:
            return whole(subject, "layout 'fsdp' has only one shard on this mesh"), ()
        if size < (least := MIN_SHARD_SIZE * shards):
            why = f"layout 'fsdp' keeps arrays of fewer than {least:,} elements whole"
            return whole(subject, why), ()
        kind = _Kind(
            shape=subject.shape,
            is_table=_is_table(subject),
            layers=subject.layers,
            is_large=nbytes(subject.array) > SMALL,
        )
        sizes = tuple((axis, axis_sizes(mesh)[axis]) for axis in self.axes)
        return with_names(_shard(kind, sizes), subject.names), ()


class _Kind(NamedTuple):
    """What decides how 'fsdp' shards an array."""

    shape: tuple[int, ...]
    is_table: bool
    layers: int | None
    is_large: bool


def _is_table(subject: Subject) -> bool:
    """Whether an array seems to be a lookup table: [vocabulary, features], by its path or names."""
    if len(subject.shape) != 2:
        return False
    keys = [key.lower() for key in subject.path]
    return subject.names[:1] == ('vocab',) or any(
        'embed' in key or key in ('wte', 'wpe') for key in keys
    )


@functools.lru_cache(maxsize=4096)
def _shard(kind: _Kind, sizes: tuple[tuple[str, int], ...]) -> tuple[ResolvedDimension, ...]:
    """The dimensions of an array, sharded over mesh axes of these sizes as far as they divide."""
    mesh = dict(sizes)
    placed, shards = _place(kind, mesh), math.prod(mesh.values())
    sharded = ' and '.join(f'dimension {dim}' for dim in sorted(placed))
    instead = f"layout 'fsdp' shards {sharded}" if placed else 'no dimension is sharded'
    dimensions = [without_name(instead)] * len(kind.shape)
    for dim, part in placed.items():
        reason = f"layout 'fsdp' shards the largest dimension that {shards} divides"
        if dim == 0 and kind.is_table:
            reason = "layout 'fsdp' shards a lookup table by its vocabulary"
        elif num_shards(part, mesh) < shards:
            reason = f"{shards} divides no dimension, so layout 'fsdp' shards {sharded}"
        kept = from_tuple(part)
        dimensions[dim] = dataclasses.replace(
            dimensions[dim], mesh_axes=kept, wanted=kept, reason=reason
        )
    return tuple(_report_sizes(kind, dimensions, mesh) if kind.is_large else dimensions)


def _report_sizes(
    kind: _Kind, dimensions: list[ResolvedDimension], mesh: dict[str, int]
) -> list[ResolvedDimension]:
    """The dimensions, with a mark on a size that costs bytes because it is not divisible."""
    shape, shards = kind.shape, math.prod(mesh.values())
    sharded = {d: sharding_axes(one.mesh_axes) for d, one in enumerate(dimensions) if one.mesh_axes}
    all_shards = math.prod(num_shards(part, mesh) for part in sharded.values()) == shards
    dim = max(range(len(shape)), key=lambda d: (shape[d], -d))
    if kind.is_table and 0 not in sharded:
        dim = 0
    elif all_shards:
        return dimensions
    over = ' and '.join(f'dimension {d} over {", ".join(part)}' for d, part in sharded.items())
    result = f'shards {over}' if sharded else 'keeps the array whole'
    cost = ', and each lookup moves rows of the whole batch' if dim == 0 and all_shards else ''
    marked = [dataclasses.replace(d, wanted=None) for d in dimensions]
    marked[dim] = dataclasses.replace(
        marked[dim],
        reason=f"size {shape[dim]} is not divisible by {shards}, so layout 'fsdp' {result}{cost}",
        policy='drop_axis' if dim in sharded else 'replicate',
        wanted=from_tuple(tuple(mesh)),
        fits=sizes_that_fit(shape[dim], shards),
    )
    return marked


def _place(kind: _Kind, mesh: dict[str, int]) -> dict[int, tuple[str, ...]]:
    """The mesh axes of each dimension that is sharded."""
    shape, axes = kind.shape, tuple(mesh)
    if kind.is_table and shape[0] % math.prod(mesh.values()) == 0:
        return {0: axes}
    within_layers = [dim for dim in range(len(shape)) if dim != kind.layers]
    for dims in (within_layers, range(len(shape))):
        placed: dict[int, tuple[str, ...]] = {}
        left = axes
        while left:
            fits = {d: largest_divisor(shape[d], left, mesh) for d in dims if d not in placed}
            best = max(fits, key=lambda d: (num_shards(fits[d], mesh), shape[d], -d), default=None)
            if best is None or num_shards(fits[best], mesh) == 1:
                break
            placed[best] = fits[best]
            left = tuple(axis for axis in left if axis not in fits[best])
        if placed:
            return placed
    return {}


Layout = WordLayout | RuleLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleSet:
    """The rules of a partitioner.

    Attributes:
      rules: the logical axis rules, with their policies, names and rules for the optimizer.
      layout: lays out states instead of the rules, which then lay out only activations.
      are_defaults: whether the user chose no rules, so that unused ones are no surprise.
    """

    rules: AxisRules
    layout: Layout | None = None
    are_defaults: bool = False
