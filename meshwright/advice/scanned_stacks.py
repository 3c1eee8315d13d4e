"""Stacks of parameters that a scan goes over, and that are sharded along the scanned dimension.

    params = (16, 1024, 4096) as PartitionSpec('fsdp', None, None)     # 16 layers
    jax.lax.scan(layer, x, params)

No device has all of a layer, or a part of each, so all layers are gathered at once. Sharded along
another dimension, a device has a part of each layer, and one layer is gathered at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.advice.advised import Told
from meshwright.advice.origins import Origins
from meshwright.advice.rewriting import Edit, Rewriting, rewrite
from meshwright.advice.variants import Layout, Subject, with_change
from meshwright.causes.cause import CodeChange, Effect, StateChange, over
from meshwright.causes.evidence import Evidence
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.wording import spec_text
from meshwright.jax_private import TracedCall
from meshwright.jaxpr.primitives import CONSTRAINTS, ELEMENTWISE
from meshwright.jaxpr.values import Axes, Step, Value, ties
from meshwright.program.collectives import Collective
from meshwright.user_lines import user_line
from partitioning.amounts import bytes_str
from partitioning.plan.rows import PlanRow
from partitioning.rules import from_tuple, sharding_axes

_LEAST = 4096  # bytes of a stack on a device
_NAMED = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScannedStack(Told):
    """Arguments that a scan goes over and that are sharded along the scanned dimension.

    Attributes:
      paths: their paths.
    """

    paths: frozenset[str]

    @property
    def is_avoidable(self) -> bool:
        return False  # another layout gathers as many bytes, layer by layer

    def is_of(self, collective: Collective, evidence: Evidence | None) -> bool:
        value = None if evidence is None else evidence.value
        if value is None or not {*collective.axes} <= {*self.axes}:
            return False
        return collective.kind == 'all-gather' and value.argument in self.paths


def find_scanned_stacks(
    origins: Origins, subject: Subject, sends: float, peak: int
) -> Iterator[ScannedStack]:
    """Finds the arguments that scans go over and that are sharded along the scanned dimension.

    Args:
      origins: the steps of the function, and its arguments.
      subject: the function, and what is known of its arguments.
      sends: the bytes that a device sends in the compiled program.
      peak: the peak of its memory by formula, in bytes.
    """
    for step in origins.steps:
        if step.name != 'scan' or step.times < 2 or step.place.is_backward:
            continue
        found: dict[str, tuple[PlanRow, Layout]] = {}
        for tie in ties(step):
            if not tie.stacked or tie.output or tie.outer.manual:
                continue
            row, _ = origins.argument_of(tie.outer, _cast, into_loops=False)
            layout = None if row is None else _moved(row, origins.sizes)
            if row is not None and layout is not None and row.bytes_per_device >= _LEAST:
                found[row.path] = row, layout
        if found:
            yield _describe(step, found, subject, origins.sizes, sends, peak)


def _cast(step: Step, value: Value) -> Value | None:
    """What a value is cast from."""
    return step.inputs[0] if step.name in ELEMENTWISE and len(step.inputs) == 1 else None


def _moved(row: PlanRow, sizes: Mapping[str, int]) -> Layout | None:
    """The layout of a stack with the mesh axes of its first dimension at another one, or None."""
    now = axes_of_row(row)
    if not now or math.prod(sizes.get(axis, 1) for axis in now[0]) < 2:
        return None
    n = math.prod(sizes.get(axis, 1) for axis in now[0])
    fits = [d for d in range(1, len(now)) if not now[d] and row.shape[d] % n == 0]
    if not fits:
        return None
    best = max(fits, key=lambda d: row.shape[d])
    return tuple(now[0] if d == best else () if d == 0 else axes for d, axes in enumerate(now))


def _describe(
    step: Step,
    found: Mapping[str, tuple[PlanRow, Layout]],
    subject: Subject,
    sizes: Mapping[str, int],
    sends: float,
    peak: int,
) -> ScannedStack:
    ordered = sorted(found.values(), key=lambda pair: -pair[0].bytes_per_device)
    (row, layout), rest = ordered[0], len(ordered) - 1
    axes, line = axes_of_row(row)[0], user_line(step.place.lines)
    n = math.prod(sizes.get(axis, 1) for axis in axes)
    held = sum((n - 1) * r.bytes_per_device for r, _ in ordered)
    held -= sum(n * r.bytes_per_device // r.shape[0] for r, _ in ordered)
    more = f' and {rest} more' if rest else ''
    names = ', '.join(one.path for one, _ in ordered[1:_NAMED])
    others = f', and so for the {rest} more ({names}{", ..." if rest >= _NAMED else ""})'
    layouts = {r.path: one for r, one in ordered}
    for moment, owner in subject.parameter_of.items():
        same = moment in subject.by_path and owner in layouts
        if same and axes_of_row(subject.by_path[moment]) == axes_of_row(found[owner][0]):
            layouts[moment] = layouts[owner]
    change = StateChange(layouts=tuple(layouts.items()), results=(), text='')
    return ScannedStack(
        line=line,
        axes=axes,
        array=row.path,
        paths=frozenset(layouts),
        why=(
            f'the scan at {line} goes over dimension 0 of {row.path}{more}, {row.shape} as '
            f'{spec_text(axes_of_row(row))}, which is sharded over {over(axes)}, so that all '
            f'{row.shape[0]:,} layers are gathered and held at once, '
            f'{bytes_str(n * sum(r.bytes_per_device for r, _ in ordered))} in all'
        ),
        change=CodeChange(
            source=line,
            text=(
                f'shard another dimension than the one that the scan at {line} goes over: lay out '
                f'{row.path} as {spec_text(layout)}{others if rest else ""}'
            ),
        ),
        effect=Effect(sent=(sends, sends), peak=(peak + max(held, 0), peak)),
        trial=functools.partial(
            _try,
            subject=subject,
            change=change,
            moved={(tuple(r.shape), axes_of_row(r)): one for r, one in ordered},
        ),
    )


def _try(
    call: TracedCall,
    *,
    subject: Subject,
    change: StateChange,
    moved: Mapping[tuple[tuple[int, ...], Layout], Layout],
) -> TracedCall:
    """The function with the layouts, also where it lays out arrays of the same kind."""
    changed = with_change(dataclasses.replace(subject, call=call), change)
    if changed is None:
        raise ValueError('the arguments cannot be laid out')
    edits: dict[int, Edit] = {}
    for equation in call.jaxpr.eqns:
        held = equation.params.get('sharding')
        if equation.primitive.name not in CONSTRAINTS or not isinstance(held, NamedSharding):
            continue
        shape = tuple(equation.outvars[0].aval.shape)
        spec = [*held.spec, *[None] * (len(shape) - len(held.spec))]
        new = moved.get((shape, tuple(map(sharding_axes, spec))))
        if new is not None:
            edits[id(equation)] = functools.partial(_constrain, mesh=subject.mesh, layout=new)
    return rewrite(changed, edits) if edits else changed


def _constrain(
    rewriting: Rewriting, equation: Any, args: list[Any], *, mesh: Any, layout: Sequence[Axes]
) -> list[Any]:
    spec = PartitionSpec(*map(from_tuple, layout))
    return [jax.lax.with_sharding_constraint(args[0], NamedSharding(mesh, spec))]
