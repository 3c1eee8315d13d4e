"""Arrays that are gathered for a shard_map whose specs do not use the mesh axis of their rows.

    shard_map(f, mesh=mesh, in_specs=(P(), P(None, 'model')), out_specs=P())(x, w)

If the rows of x are sharded over 'data', they are gathered, and all devices along 'data' compute
the same. Only the author can write the spec, because the trace has the shapes of the parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from meshwright.advice.estimates import shape_of
from meshwright.advice.told import Told
from meshwright.causes.cause import CodeChange, over
from meshwright.causes.evidence import Evidence
from meshwright.causes.wording import spec_text
from meshwright.jaxpr import TracedProgram
from meshwright.jaxpr.exchange_list import walk_exchanges
from meshwright.jaxpr.values import Axes, Step
from meshwright.jaxpr.writing_out import spec_axes
from meshwright.program.collectives import Collective
from meshwright.user_lines import user_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class MissingSpec(Told):
    """A gather at the border of a shard_map that a spec would avoid.

    Attributes:
      axes: the mesh axes, sorted.
      shape: the sizes of the array above 1, sorted.
    """

    axes: Axes
    shape: tuple[int, ...]

    def is_of(self, collective: Collective, evidence: Evidence | None) -> bool:
        if evidence is None or evidence.value is None or evidence.kind != 'all-gather':
            return False
        return {*evidence.axes} <= {*self.axes} and shape_of(evidence.value) == self.shape


def find_missing_specs(laid_out: TracedProgram) -> tuple[MissingSpec, ...]:
    """Finds the gathers for shard_maps whose specs do not use the mesh axes of the gather."""
    found = (_missing(step, axes, laid_out) for step, axes, _ in walk_exchanges(laid_out))
    return tuple(one for one in found if one is not None)


def _missing(step: Step, axes: Axes, laid_out: TracedProgram) -> MissingSpec | None:
    equation = step.place.equation
    is_border = getattr(getattr(equation, 'primitive', None), 'name', '') == 'shard_map'
    if step.name != 'all-gather' or not is_border or {*axes} & {*_used(equation.params)}:
        return None
    given, line = step.inputs[0], user_line(step.place.lines)
    spec = spec_text([held or () for held in given.axes])
    return MissingSpec(
        line=line,
        axes=tuple(sorted(axes)),
        shape=shape_of(given),
        change=CodeChange(
            source=line,
            text=(
                f'write {spec} in the specs of the shard_map at {line} for the array of shape '
                f'{given.shape}, and {over(axes)} in the specs of all arrays with its rows'
            ),
        ),
        why=(
            f'no spec of the shard_map at {line} uses {over(axes)}, so the array of shape '
            f'{given.shape} is gathered and all devices along {over(axes)} compute the same'
        ),
    )


def _used(params: Any) -> Iterator[str]:
    """The mesh axes in the specs of a shard_map."""
    for spec in (*params['in_specs'], *params['out_specs']):
        sizes = dict(params['mesh'].shape)
        for axes in spec_axes(spec, len(spec), sizes):
            yield from axes or ()
