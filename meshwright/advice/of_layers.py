"""Parameters that a loop gathers anew in each iteration, or all of whose layers it gathers at once.

    def chunk(total, rows):                       # 8 iterations
        logits = rows @ params['head']            # 'head' is sharded over 'fsdp': gathered 8 times

A constraint before the loop, `head = with_sharding_constraint(params['head'], whole)`, gathers it
once. It then stays in memory while the loop runs, so the change is told only for arrays that are
small next to what the function needs in any case: not for all layers of a model.

    params = (16, 1024, 4096) as PartitionSpec('fsdp', None, None)     # 16 layers
    jax.lax.scan(layer, x, params)

No device has all of a layer, or a part of each, so all layers are gathered at once. Sharded along
another dimension, a device has a part of each layer, and one layer is gathered at a time.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.advice.candidates import GATHERS, Match, Told
from meshwright.advice.function_view import LEAST, FunctionView
from meshwright.advice.rewriting import Edit, Rewriting, rewrite
from meshwright.advice.subject import Layout, with_change
from meshwright.causes.cause import CodeChange, Effect, StateChange, over
from meshwright.causes.evidence import Evidence
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.wording import spec_text
from meshwright.jax_private import TracedCall
from meshwright.jaxpr.implied_exchanges import KINDS
from meshwright.jaxpr.naming import name_values
from meshwright.jaxpr.primitives import CONSTRAINTS, ELEMENTWISE, names_in
from meshwright.jaxpr.values import Axes, Block, Step, Value, carries, ties
from meshwright.jaxpr.writing_out import write_out
from meshwright.program.collectives import Collective
from partitioning.amounts import bytes_str
from partitioning.plan.rows import PlanRow
from partitioning.rules import from_tuple, sharding_axes

_SHARE = 0.25  # of the peak, which the gathered arrays may hold more
_MUCH = 0.05  # the share of what a device sends that it has to save
# What cuts a layer, or gives it another shape.
_CUTS = names_in('slice reshape squeeze expand_dims optimization_barrier device_put')
_NAMED = 3  # stacks that a message names

Group = Sequence[tuple[Collective, Evidence]]


def find_loop_gathers(view: FunctionView) -> Iterator[Told]:
    """Finds the parameters that loops gather in each iteration, and that may be gathered before."""
    found: dict[tuple[str, Axes], list[tuple[Collective, Evidence]]] = collections.defaultdict(list)
    for collective, evidence in view.exchanges:
        row = view.rows.get(_gathered_in_loop(collective, evidence))
        if row is None or evidence is None or row.role != 'parameters':
            continue
        if {*collective.axes} <= {*view.possible.layouts.batch_axes}:
            found[row.path, collective.axes].append((collective, evidence))
    loops = _constants_of_loops(view) if found else {}
    found = {key: group for key, group in found.items() if key[0] in loops}
    held = {key: _held(view, *key) for key in found}
    needs = sum(held.values())
    if needs > _SHARE * view.base.peak or not view.can_hold(needs):
        return
    for (path, axes), group in found.items():
        saved = sum(c.total_bytes for c, _ in group)
        if not _is_gathered_once(view, path, axes):
            saved -= max(c.total_bytes / c.count for c, _ in group)
        if saved >= _MUCH * view.sends:
            yield _gather_before(view, path, group, loops[path], held[path, axes], saved)


def _gathered_in_loop(collective: Collective, evidence: Evidence | None) -> str:
    """The argument that an exchange in a loop gathers; '' for other exchanges."""
    value = None if evidence is None else evidence.value
    if collective.kind != 'all-gather' or collective.count < 2 or value is None:
        return ''
    return value.argument


def _is_gathered_once(view: FunctionView, path: str, axes: Axes) -> bool:
    """Whether the program gathers an argument outside of loops, too."""
    match = Match(axes=axes, kinds=GATHERS, paths=frozenset([path]))
    return any(c.count == 1 and match.fits(c, evidence) for c, evidence in view.exchanges)


def _held(view: FunctionView, path: str, axes: Axes) -> int:
    """The bytes that a device holds more of a parameter once it is gathered."""
    n = view.num_devices(axes)
    return view.rows[path].bytes_per_device * (n - 1)


def _gather_before(
    view: FunctionView, path: str, group: Group, loop: tuple[str, int], held: int, saved: float
) -> Told:
    (around, times), (collective, evidence), row = loop, group[0], view.rows[path]
    axes, line = collective.axes, evidence.used_at or evidence.made_at
    where = f'the loop at {around}' if around != line else 'its loop'
    whole = tuple(tuple(a for a in own if a not in axes) for own in axes_of_row(row))
    peak = view.base.peak
    return Told(
        match=Match(axes=axes, kinds=GATHERS, paths=frozenset([path]), count=2),
        is_held_longer=True,
        line=line,
        array=path,
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
        effect=Effect(sent=(view.sends, view.sends - saved), peak=(peak, peak + held)),
    )


def _constants_of_loops(view: FunctionView) -> dict[str, tuple[str, int]]:
    """The arguments that loops use and do not change: the line and the iterations of the loop."""
    block = write_out(view.subject.call.jaxpr)
    name_values(block, view.subject.rows, {})
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
            line = step.line
            for tie in ties(step):
                if not tie.output and not tie.stacked:
                    yield tie.outer, line, step.times, id(tie.inner) in changed
        for body in step.bodies:
            yield from _given_to_loops(body)


def find_scanned_stacks(view: FunctionView) -> Iterator[Told]:
    """Finds the arguments that scans go over and that are sharded along the scanned dimension."""
    for step in view.steps:
        if step.name != 'scan' or step.times < 2 or step.place.is_backward:
            continue
        found: dict[str, tuple[PlanRow, Layout]] = {}
        for tie in ties(step):
            if not tie.stacked or tie.output or tie.outer.manual:
                continue
            row, _ = view.argument_of(tie.outer, _copied, into_loops=False)
            layout = None if row is None else _moved(row, view.sizes)
            if row is not None and layout is not None and row.bytes_per_device >= LEAST:
                found[row.path] = row, layout
        if found:
            yield _shard_layers(view, step, found)


def _copied(step: Step, value: Value) -> Value | None:
    """What a value is a copy of, with the same layers: cast, scaled, moved or cut within layers."""
    given = [one for one in step.inputs if one.shape]
    if len(given) != 1 or given[0].shape[:1] != value.shape[:1]:
        return None
    if step.name in ELEMENTWISE | KINDS.keys():
        return given[0]
    if step.name == 'transpose':
        return given[0] if step.params['permutation'][0] == 0 else None
    return given[0] if step.name in _CUTS else None


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


def _shard_layers(
    view: FunctionView, step: Step, found: Mapping[str, tuple[PlanRow, Layout]]
) -> Told:
    ordered = sorted(found.values(), key=lambda pair: -pair[0].bytes_per_device)
    (row, layout), rest = ordered[0], len(ordered) - 1
    axes, line = axes_of_row(row)[0], step.line
    n, peak = view.num_devices(axes), view.base.peak
    held = sum((n - 1) * r.bytes_per_device for r, _ in ordered)
    held -= sum(n * r.bytes_per_device // r.shape[0] for r, _ in ordered)
    more = f' and {rest} more' if rest else ''
    names = ', '.join(one.path for one, _ in ordered[1:_NAMED])
    others = f', and so for the {rest} more ({names}{", ..." if rest >= _NAMED else ""})'
    layouts = {r.path: one for r, one in ordered}
    for moment, owner in view.subject.parameter_of.items():
        same = moment in view.rows and owner in layouts
        if same and axes_of_row(view.rows[moment]) == axes_of_row(found[owner][0]):
            layouts[moment] = layouts[owner]
    change = StateChange(layouts=tuple(layouts.items()), results=(), text='')
    return Told(
        match=Match(axes=axes, kinds=GATHERS, paths=frozenset(layouts)),
        is_avoidable=False,  # another layout gathers as many bytes, layer by layer
        array=row.path,
        why=(
            f'the scan at {line} goes over dimension 0 of {row.path}{more}, {row.shape} as '
            f'{spec_text(axes_of_row(row))}, which is sharded over {over(axes)}, so that all '
            f'{row.shape[0]:,} layers are gathered and held at once, '
            f'{bytes_str(n * sum(r.bytes_per_device for r, _ in ordered))} in all'
        ),
        change=CodeChange(
            source='',
            text=(
                f'shard another dimension than the one that the scan at {line} goes over: lay out '
                f'{row.path} as {spec_text(layout)}{others if rest else ""}'
            ),
        ),
        effect=Effect(sent=(view.sends, view.sends), peak=(peak + max(held, 0), peak)),
        trial=functools.partial(
            _lay_out,
            view,
            change,
            moved={(tuple(r.shape), axes_of_row(r)): one for r, one in ordered},
        ),
    )


def _lay_out(
    view: FunctionView,
    change: StateChange,
    *,
    moved: Mapping[tuple[tuple[int, ...], Layout], Layout],
) -> TracedCall | None:
    """The function with the layouts, also where it lays out arrays of the same kind."""
    changed, mesh = with_change(view.subject, change), view.subject.mesh
    edits: dict[int, Edit] = {}
    for equation in view.subject.call.jaxpr.eqns:
        held = equation.params.get('sharding')
        if equation.primitive.name not in CONSTRAINTS or not isinstance(held, NamedSharding):
            continue
        shape = tuple(equation.outvars[0].aval.shape)
        spec = [*held.spec, *[None] * (len(shape) - len(held.spec))]
        new = moved.get((shape, tuple(map(sharding_axes, spec))))
        if new is not None:
            edits[id(equation)] = functools.partial(_constrain, mesh=mesh, layout=new)
    return rewrite(changed, edits) if changed is not None and edits else changed


def _constrain(
    rewriting: Rewriting, equation: Any, args: list[Any], *, mesh: Any, layout: Sequence[Axes]
) -> list[Any]:
    spec = PartitionSpec(*map(from_tuple, layout))
    return [jax.lax.with_sharding_constraint(args[0], NamedSharding(mesh, spec))]
