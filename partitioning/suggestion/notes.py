"""Notes on suggested rules: which arrays stay whole, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from partitioning.amounts import bytes_str
from partitioning.plan.by_rules import Shape
from partitioning.plan.rows import SMALL
from partitioning.plan.tables import count
from partitioning.rules import (
    STANDARD_MESH_AXES,
    AxisRules,
    MeshLike,
    as_tuple,
    axis_sizes,
    describe_axes,
    fsdp_logical_axis_rules,
    standard_logical_axis_rules,
    try_resolve,
)
from partitioning.suggestion.dimension_names import Named, Names, Shards

_PAIRS = ('table', 'logits', 'attention')  # uses whose arrays should have two dimensions to shard


def rules_of(mesh: MeshLike) -> AxisRules:
    """The standard rules for the axes of a mesh, or none; whatever they cannot shard is whole."""
    used = [axis for axis, size in axis_sizes(mesh).items() if size > 1] or ['data']
    known = {*used} <= {*STANDARD_MESH_AXES}
    rules = standard_logical_axis_rules(mesh_axes=used) if known else ()
    return AxisRules(rules, on_unmatched='replicate', on_indivisible='replicate')


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of the bytes that stays on every device, under the standard rules.

    Attributes:
      total: the bytes of all arrays that need a rule.
      replicated: the bytes of the arrays that are whole on every device.
      per_device: the bytes that one device holds; None without a mesh.
      by_fsdp: the bytes that one device holds if 'embed' is sharded over the data axes too.
      mesh: the axes of the mesh in words; empty without a mesh.
      even: the share of a device if all bytes were divided evenly; 1 without a mesh.
    """

    total: int
    replicated: int
    per_device: int | None = None
    by_fsdp: int | None = None
    mesh: str = ''
    even: float = 1.0

    def __str__(self) -> str:
        whole = f'{self.replicated / self.total:.1%} of {bytes_str(self.total)}'
        if self.per_device is None:
            return (
                f'Whole on every device: {whole}, in arrays to which no rule gives a name or a '
                'mesh axis.'
            )
        text = (
            f'Whole on every device of {self.mesh}: {whole}. Each device holds '
            f'{self.per_device / self.total:.1%}; an even share is {self.even:.1%}.'
        )
        if self.by_fsdp is not None and self.by_fsdp < self.per_device:
            text += (
                ' With AxisRules(fsdp_logical_axis_rules(standard_logical_axis_rules()), '
                f'names=rules) it holds {self.by_fsdp / self.total:.1%}.'
            )
        return text


def share_of(
    names: Mapping[str, Names],
    shapes: Mapping[str, Shape],
    sizes: Mapping[str, int],
    mesh: MeshLike | None,
) -> Share:
    """What stays on every device of a mesh, or of any mesh if that is None, under these names."""
    total = max(sum(sizes.values()), 1)
    if mesh is None:
        whole = {p for p, n in names.items() if all(name in (None, 'layers') for name in n)}
        return Share(total, sum(sizes[path] for path in whole))
    rules, axes = rules_of(mesh), axis_sizes(mesh)
    held, replicated = _bytes_held(names, shapes, sizes, rules, mesh)
    by_fsdp = None
    if axes.get('data', 1) > 1 and any(name == 'embed' for n in names.values() for name in n):
        sharded = rules.with_rules(fsdp_logical_axis_rules(rules))
        by_fsdp, _ = _bytes_held(names, shapes, sizes, sharded, mesh)
    even = 1 / math.prod(axes.values())
    return Share(total, replicated, held, by_fsdp, describe_axes(mesh), even)


def _bytes_held(
    names: Mapping[str, Names],
    shapes: Mapping[str, Shape],
    sizes: Mapping[str, int],
    rules: AxisRules,
    mesh: MeshLike,
) -> tuple[int, int]:
    """The bytes of all arrays on each device, and of the arrays that are whole there."""
    held = replicated = 0
    axes = axis_sizes(mesh)
    for path, of_array in names.items():
        resolved, _ = try_resolve(of_array, rules, mesh=mesh, shape=shapes[path])
        shards = math.prod(axes[axis] for d in resolved for axis in as_tuple(d.mesh_axes))
        held += sizes[path] // shards
        replicated += sizes[path] * (shards == 1)
    return held, replicated


def notes_on(
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
    if shards.model_axes or shards.embed != 'embed':
        notes.append(_mesh_axes_note(shards))
    return notes


def _mesh_axes_note(shards: Shards) -> str:
    """Why mesh axes stand in place of names."""
    if shards.is_standard:
        return (
            'The standard rules shard parameters over no axis of this mesh that has several '
            f"devices, so the mesh axes {shards.embed} stand in place of 'embed' (FSDP)."
        )
    return 'The standard rules do not know this mesh, so its axes stand in place of names.'


def _example(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f'{paths[0]} and {count(len(paths) - 1, "other")}'
