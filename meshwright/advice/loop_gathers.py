"""Parameters that every iteration of a loop gathers anew, although the loop does not change them.

    def chunk(total, rows):                       # 8 iterations
        logits = rows @ params['head']            # 'head' is sharded over 'fsdp': gathered 8 times

A constraint before the loop, `head = with_sharding_constraint(params['head'], whole)`, gathers it
once. It then stays in memory while the loop runs, so the change is told only for arrays that are
small next to what the function needs in any case: not for all layers of a model.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from meshwright.advice.advised import Told
from meshwright.causes.cause import CodeChange, Effect, over
from meshwright.causes.evidence import Evidence
from meshwright.causes.explaining import Explanation
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.wording import spec_text
from meshwright.jax_private import TracedCall
from meshwright.jaxpr.naming import name_values
from meshwright.jaxpr.values import Axes, Block, Value, carries, ties
from meshwright.jaxpr.writing_out import write_out
from meshwright.program.collectives import Collective
from meshwright.user_lines import user_line
from partitioning.amounts import bytes_str
from partitioning.plan.rows import PlanRow

_SHARE = 0.25  # of the peak, which the gathered arrays may hold more
_MUCH = 0.02  # the share of what a device sends that it has to save


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopGather(Told):
    """A parameter that a loop gathers in each iteration.

    Attributes:
      path: the path of the parameter.
    """

    path: str

    @property
    def is_held_longer(self) -> bool:
        return True

    def is_of(self, collective: Collective, evidence: Evidence | None) -> bool:
        return _path_of(collective, evidence) == self.path and collective.axes == self.axes


def find_loop_gathers(
    call: TracedCall,
    rows: Mapping[str, PlanRow],
    explanation: Explanation,
    peak: int,
    limit: float | None,
) -> tuple[LoopGather, ...]:
    """Finds the parameters that loops gather in each iteration, and that may be gathered before.

    Args:
      call: the trace of the function.
      rows: the layout of each argument, by its path.
      explanation: the causes of its exchanges.
      peak: the peak of its memory, in bytes.
      limit: the memory that a device has for it, in bytes; None if it is not known.
    """
    layouts = explanation.possible.layouts
    sends = sum(c.total_bytes for c, _ in explanation.collectives)
    found: dict[tuple[str, Axes], list[tuple[Collective, Evidence]]] = collections.defaultdict(list)
    for (collective, _), evidence in zip(
        explanation.collectives, explanation.evidence, strict=True
    ):
        row = rows.get(_path_of(collective, evidence))
        if row is None or evidence is None or row.role != 'parameters':
            continue
        if {*collective.axes} <= {*layouts.batch_axes}:
            found[row.path, collective.axes].append((collective, evidence))
    if not found:
        return ()
    loops = _constants_of_loops(call, list(rows.values()))
    held = {key: _held(rows[key[0]], key[1], layouts.sizes) for key in found if key[0] in loops}
    needs = sum(held.values())
    if needs > _SHARE * peak or (limit is not None and peak + needs > limit):
        return ()
    made = []
    for (path, axes), group in found.items():
        if path not in loops:
            continue
        total = sum(c.total_bytes for c, _ in group)
        saved = total - (0.0 if _is_gathered_once(path, axes, explanation) else _one(group))
        if saved < _MUCH * sends:
            continue
        made.append(
            _describe(rows[path], axes, group, loops[path], held[path, axes], saved, sends, peak)
        )
    return tuple(made)


def _path_of(collective: Collective, evidence: Evidence | None) -> str:
    """The argument that an exchange in a loop gathers; '' for other exchanges."""
    value = None if evidence is None else evidence.value
    if collective.kind != 'all-gather' or collective.count < 2 or value is None:
        return ''
    return value.argument


def _is_gathered_once(path: str, axes: Axes, explanation: Explanation) -> bool:
    """Whether the program gathers an argument outside of loops, too."""
    pairs = zip(explanation.collectives, explanation.evidence, strict=True)
    return any(
        c.kind == 'all-gather'
        and c.count == 1
        and c.axes == axes
        and e is not None
        and e.value is not None
        and e.value.argument == path
        for (c, _), e in pairs
    )


def _one(group: Sequence[tuple[Collective, Evidence]]) -> float:
    return max(c.total_bytes / c.count for c, _ in group)


def _held(row: PlanRow, axes: Axes, sizes: Mapping[str, int]) -> int:
    """The bytes that a device holds more of a parameter once it is gathered."""
    n = math.prod(sizes.get(axis, 1) for axis in axes)
    return row.bytes_per_device * (n - 1)


def _describe(
    row: PlanRow,
    axes: Axes,
    group: Sequence[tuple[Collective, Evidence]],
    loop: tuple[str, int],
    held: int,
    saved: float,
    sends: float,
    peak: int,
) -> LoopGather:
    (around, times), evidence = loop, group[0][1]
    line = evidence.used_at or evidence.made_at
    where = f'the loop at {around}' if around != line else 'its loop'
    whole = tuple(tuple(a for a in own if a not in axes) for own in axes_of_row(row))
    return LoopGather(
        line=line,
        array=row.path,
        path=row.path,
        axes=axes,
        why=(
            f'{row.path}, {row.shape} as {spec_text(axes_of_row(row))}, is sharded over '
            f'{over(axes)}, and each of the {times:,} iterations of {where} gathers it anew, '
            'although it does not change there'
        ),
        change=CodeChange(
            source=line,
            text=(
                f'gather {row.path} once, before {where}: write with_sharding_constraint(x, '
                f'{spec_text(whole)}) for it there, which holds {bytes_str(held)} more in the '
                'meantime'
            ),
        ),
        effect=Effect(sent=(sends, sends - saved), peak=(peak, peak + held)),
    )


def _constants_of_loops(
    call: TracedCall, rows: Sequence[PlanRow | None]
) -> dict[str, tuple[str, int]]:
    """The arguments that loops use and do not change: the line and the iterations of the loop."""
    block = write_out(call.jaxpr)
    name_values(block, rows, {})
    found, carried = dict[str, tuple[str, int]](), set[str]()
    for value, line, times, is_carried in _given_to_loops(block):
        if is_carried:
            carried.add(value.argument)
        elif value.argument:
            found.setdefault(value.argument, (line, times))
    return {path: loop for path, loop in found.items() if path not in carried}


def _given_to_loops(block: Block) -> Iterator[tuple[Value, str, int, bool]]:
    """What loops are given: each value, the loop's line and iterations, and whether it changes."""
    for step in block.steps:
        if step.bodies and step.times > 1:
            changed = {id(given) for given, _ in carries(step)}
            line = user_line(step.place.lines) or step.place.source
            for tie in ties(step):
                if not tie.output and not tie.stacked:
                    yield tie.outer, line, step.times, id(tie.inner) in changed
        for body in step.bodies:
            yield from _given_to_loops(body)
