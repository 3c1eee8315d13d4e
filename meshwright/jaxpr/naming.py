"""Names the dimensions of the values of a traced function, and finds gradients and updates.

Names travel from the arguments along the factors of each step, so that an activation has logical
axes, too. With x ('batch', 'embed'), w ('embed', 'mlp') and v ('mlp', 'embed'),

    h = jnp.tanh(x @ w)             has the names ('batch', 'mlp'), and sums over 'embed'
    y = (h @ v).reshape(4, 8, -1)   has the names ('batch', None, 'embed')

and the product of the backward pass that has the call stack of `x @ w` and the sizes of w is the
gradient of w. The update of w is computed from that gradient and w, element by element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.factors import Dimension, Factors
from meshwright.jaxpr.implied_exchanges import ADDED
from meshwright.jaxpr.linked_dimensions import LinkedDimensions
from meshwright.jaxpr.primitives import ARITHMETIC, CONSTRAINTS, MOVES, SCATTERS
from meshwright.jaxpr.values import Axes, Block, Dim, Step, Value, carries, ties
from meshwright.jaxpr.writing_out import write_out
from meshwright.user_lines import find_helpers
from partitioning.plan.rows import PlanRow
from partitioning.products.flops import PRODUCTS
from partitioning.rules import sharding_axes

# Operations that pair the dimensions of their operands.
_PAIRING = PRODUCTS | {'add', 'sub', 'mul', 'div', 'max', 'select_n'}


class TracedValues(NamedTuple):
    """All values of a function.

    Attributes:
      arguments: its arguments.
      values: what its operations make, in their order.
      links: which dimensions of arguments belong together.
      results: its results.
      helpers: lines of functions that only lay out what they are given.
    """

    arguments: tuple[Value, ...]
    values: tuple[Value, ...]
    links: LinkedDimensions
    results: tuple[Value, ...] = ()
    helpers: frozenset[str] = frozenset()


def trace_values(
    jaxpr: Any, rows: Sequence[PlanRow | None], names_of: Mapping[Axes, str]
) -> TracedValues:
    """Finds the values of a traced function and what they are.

    Args:
      jaxpr: its ClosedJaxpr.
      rows: the layout of each argument, or None where it is not known.
      names_of: the logical axis of dimensions that have mesh axes and no name, by these axes.
    """
    # A compiler may still name an array after a step that nothing uses.
    return name_values(write_out(jaxpr, with_unused=True), rows, names_of)


def name_values(
    block: Block, rows: Sequence[PlanRow | None], names_of: Mapping[Axes, str]
) -> TracedValues:
    """Names the values of a block, with or without the exchanges between its steps.

    Args:
      block: the steps of the whole function.
      rows, names_of: as for `trace_values`.
    """
    for value, row in zip(block.inputs, rows, strict=False):
        if row is not None:
            _describe_argument(value, row, names_of)
    inputs = frozenset(row.path for row in rows if row is not None and row.role == 'other')
    naming = _Naming(names_of, inputs)
    naming.run(block)
    made = tuple(naming.values)
    constraints = [v for v in made if v.primitive in CONSTRAINTS and v.layout is not None]
    helpers = find_helpers([(v.stack, v.layout) for v in constraints])
    for value in made:
        value.helpers = helpers
    return TracedValues(tuple(block.inputs), made, naming.links, tuple(block.outputs), helpers)


def _describe_argument(value: Value, row: PlanRow, names_of: Mapping[Axes, str]) -> None:
    value.argument = row.path
    if len(row.dimensions) != len(value.shape):
        return
    dims = []
    for number, d in enumerate(row.dimensions):
        axes = sharding_axes(d.mesh_axes)
        name = d.name if isinstance(d.name, str) else None
        if name is None and row.role == 'other':  # a dimension of a batch has mesh axes only
            name = names_of.get(axes)
        dims.append(Dim(name, axes, row.path, number))
    value.dims = tuple(dims)


class _Naming:
    """Goes through the steps in their order.

    Args:
      names_of: as for `trace_values`.
      inputs: the paths of the arguments that are not a part of the state.
    """

    def __init__(self, names_of: Mapping[Axes, str], inputs: frozenset[str]):
        self.values: list[Value] = []
        self.links = LinkedDimensions()
        self._names_of, self._inputs = names_of, inputs
        # The parameters that forward steps take, by call stack and by sizes of the dimensions.
        self._taken: dict[tuple[Any, ...], list[Value]] = {}
        self._summed: dict[tuple[int, Any], tuple[int, ...] | None] = {}

    def run(self, block: Block) -> None:
        for step in block.steps:
            if step.bodies:
                self._run_bodies(step)
            elif step.is_border or step.name in ADDED:
                _copy(step.inputs[0], step.outputs[0])
            else:
                self._name_results(step)

    def _run_bodies(self, step: Step) -> None:
        """Names what is in a loop or in branches, and what they return."""
        for tie in ties(step):
            if not tie.output:
                _copy(tie.outer, tie.inner, first=int(tie.stacked))
        kept, given = len(self.values), [first.copied_from for first, _ in carries(step)]
        for is_last in (False, True) if given else (True,):
            del self.values[kept:]
            for body in step.bodies:
                self.run(body)
            # What the body learns about its carry holds for its next iteration.
            for (first, last), before in zip(carries(step), given, strict=True):
                if not is_last:
                    first.dims = tuple(a or b for a, b in zip(first.dims, last.dims, strict=True))
                    first.argument = first.argument if first.argument == last.argument else ''
                    first.gradient_of = last.gradient_of or first.gradient_of
                first.copied_from = (*before, last)
        scanned = (tie.outer.dims for tie in ties(step) if tie.stacked and not tie.output)
        leading = next((dims[0] for dims in scanned if dims), None)
        for tie in ties(step):
            if tie.output and tie.stacked:
                inner, outer = tie.inner, tie.outer
                _copy(inner, outer)
                outer.maker, outer.operands, outer.copied_from = step, (inner,), ()
                outer.place = inner.place if inner.stack else step.place
                outer.dims = (leading, *inner.dims)
                outer.layout = None if inner.layout is None else ((), *inner.layout)
                self.values.append(outer)
            elif tie.output:
                _copy(tie.inner, tie.outer)

    def _name_results(self, step: Step) -> None:
        factors = find_factors(step)
        carriers = _carriers(factors, step.inputs)
        contracted = tuple(_name_of((f,), carriers) for f in sorted(factors.summed))
        if step.name in _PAIRING and not step.place.is_backward:
            for paired in carriers:
                for dim, _ in paired[:-1]:
                    self.links.link(dim, paired[-1][0])
        if step.name in SCATTERS:  # the result is the first operand, with a part changed
            carriers = _carriers(factors, step.inputs[:1])
        for value, dims in zip(step.outputs, factors.outputs, strict=True):
            value.maker, value.place, value.operands = step, step.place, tuple(step.inputs)
            value.contracted = contracted
            value.dims = tuple(_name_of(dim, carriers) for dim in dims)
            if set(value.shape) <= {1}:
                value.dims = (None,) * len(value.shape)
            self._identify(value, step)
            if step.name in CONSTRAINTS:
                self._constrain(value, step)
        self.values += step.outputs

    def _identify(self, value: Value, step: Step) -> None:
        """Records which argument, gradient or update a value is, from its operands."""
        value.argument = value.gradient_of = value.update_of = ''
        is_backward = step.place.is_backward
        if step.inputs and step.name in MOVES:
            first = step.inputs[0]
            value.argument, value.gradient_of = first.argument, first.gradient_of
            value.update_of = first.update_of
        elif step.name in ARITHMETIC:
            equal = [x for x in step.inputs if x.size == value.size]
            kept = [x.gradient_of or x.update_of or x.argument for x in equal]
            changed = next((x.gradient_of or x.update_of for x in equal), '')
            if kept and not changed and not is_backward and value.shape and all(kept):
                changed = kept[0] if kept[0] not in self._inputs else ''
            if step.name == 'add_any' and is_backward:
                value.gradient_of = changed
            else:
                value.update_of = changed
        if not is_backward:
            for operand in step.inputs:
                if operand.argument and operand.argument not in self._inputs:
                    key = value.stack, tuple(sorted(operand.shape))
                    self._taken.setdefault(key, []).append(operand)
                    self._summed[id(operand), value.stack] = _summed_sizes(step, operand)
        elif not value.gradient_of and step.name not in (*MOVES, 'broadcast_in_dim', 'select_n'):
            self._adopt(value, step)

    def _adopt(self, value: Value, step: Step) -> None:
        """Records which parameter a value is the gradient of, if it is a gradient.

        The backward operation of a line has the call stack of the forward one, and the gradient of
        a parameter has its shape, up to the order of dimensions.
        """
        found = self._taken.get((value.stack, tuple(sorted(value.shape))), ())
        near = [x for x in found if value.place.words >= x.place.words] or found
        kept = _kept_sizes(step) if len(near) > 1 else None
        if kept is not None:
            near = [x for x in near if self._summed.get((id(x), value.stack)) == kept] or near
        if not near:
            return
        parameter = near[0]
        value.gradient_of = parameter.argument
        # Where two dimensions have the same size, their order is not known.
        if len(set(value.shape)) == len(value.shape):
            theirs = [parameter.dims[parameter.shape.index(n)] for n in value.shape]
            pairs = zip(value.dims, theirs, strict=True)
            value.dims = tuple(better(mine, other) for mine, other in pairs)

    def _constrain(self, value: Value, step: Step) -> None:
        """Records the layout of a constraint, and names dimensions that it shards by their axes."""
        sharding = step.params.get('sharding', step.params.get('dst_sharding'))
        spec = getattr(sharding, 'spec', None)
        if spec is None:
            return
        entries = [*spec, *[None] * (len(value.shape) - len(spec))]
        value.layout = tuple(sharding_axes(entry) for entry in entries)
        if not value.backward:
            self.links.constrain(value.dims, value.layout)
        used = {d.name for d in value.dims if d}
        named = []
        for dim, axes in zip(value.dims, value.layout, strict=True):
            name = self._names_of.get(axes)
            if axes and (dim is None or dim.name is None) and name not in used:
                dim = Dim(name, axes, dim.argument if dim else '', dim.number if dim else 0)
            named.append(dim)
        value.dims = tuple(named)


def _summed_sizes(step: Step, operand: Value) -> tuple[int, ...] | None:
    """The sizes over which a product sums, sorted; None for other operations."""
    if step.name != 'dot_general':
        return None
    factors, number = find_factors(step), step.inputs.index(operand)
    dims = zip(operand.shape, factors.inputs[number], strict=True)
    return tuple(sorted(n for n, dim in dims if {*dim} & factors.summed))


def _kept_sizes(step: Step) -> tuple[int, ...] | None:
    """The sizes that a product of the backward pass keeps of an activation of the forward pass.

    For the gradient of w in x @ w, it is the size of the dimension of x over which x @ w sums.
    """
    forward = [value for value in step.inputs if not value.backward]
    if step.name != 'dot_general' or len(forward) != 1:
        return None
    factors, number = find_factors(step), step.inputs.index(forward[0])
    dims = zip(forward[0].shape, factors.inputs[number], strict=True)
    return tuple(sorted(n for n, dim in dims if not {*dim} & factors.summed))


def better(one: Dim | None, other: Dim | None) -> Dim | None:
    """The one of two descriptions of a dimension that says more."""
    if one is None or (one.name is None and other is not None):
        return other
    return one


def _carriers(factors: Factors, inputs: Sequence[Value]) -> list[list[tuple[Dim | None, bool]]]:
    """For each factor, the dimensions of operands that have it, and whether it is the major one."""
    found: list[list[tuple[Dim | None, bool]]] = [[] for _ in factors.sizes]
    for value, array in zip(inputs, factors.inputs, strict=False):
        for dim, own in zip(value.dims, array, strict=True):
            for factor in own:
                found[factor].append((dim, factor == own[0]))
    return found


def _name_of(
    dimension: Dimension, carriers: Sequence[Sequence[tuple[Dim | None, bool]]]
) -> Dim | None:
    """What the operands know of a dimension of a result.

    Of several dimensions that are merged, the first one with a name counts. Of a dimension that is
    split, the major part keeps the name.
    """
    merged: list[Dim] = []
    for number, factor in enumerate(dimension):
        found: Dim | None = None
        for dim, is_major in carriers[factor]:
            if is_major:
                found = better(found, dim)
            elif number == 0:
                return None
        merged += [] if found is None else [found]
    if len(merged) < 2:
        return merged[0] if merged else None
    return next((dim for dim in merged if dim.name), merged[0])


def _copy(source: Value, target: Value, first: int = 0) -> None:
    """Describes a value inside or outside of a body by the value that it is a copy of.

    Args:
      source: what is known.
      target: the copy.
      first: 1 if the copy is one element along the first dimension.
    """
    for name in ('maker', 'place', 'operands', 'argument', 'gradient_of', 'update_of'):
        setattr(target, name, getattr(source, name))
    target.dims, target.contracted = source.dims[first:], source.contracted
    target.layout = None if source.layout is None else source.layout[first:]
    target.copied_from = (source,)


def shared_end(one: Sequence[str], other: Sequence[str]) -> int:
    """The number of the last parts of two paths that are the same."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
