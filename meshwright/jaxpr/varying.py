"""Along which mesh axes the devices of a shard_map have different arrays.

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P('data')), out_specs=P())
    def step(w, x):
        g = jax.grad(loss)(w, x)        # differs along 'data', because x does
        g = jax.lax.pmean(g, 'data')    # the same everywhere
        return w - g

A sum over devices that have the same is needless, whoever has written it.
"""

from __future__ import annotations

from meshwright.jaxpr.implied_exchanges import KINDS, exchange_axes
from meshwright.jaxpr.values import TO_GLOBAL, TO_LOCAL, Block, Step, Value, carries, ties

_NONE: frozenset[str] = frozenset()
_MIXING = ('all-reduce', 'all-gather')  # after them, all devices along their axes have the same
_NUMBERS = ('axis_index', 'rng_uniform')


class Varying:
    """Says along which mesh axes devices differ in an array, inside of shard_maps.

    Args:
      block: the steps of a function.
    """

    def __init__(self, block: Block):
        self._found: dict[int, frozenset[str]] = {}
        self._run(block)

    def axes_of(self, value: Value) -> frozenset[str]:
        """The mesh axes along which devices may have different values of an array."""
        return self._found.get(id(value), _NONE)

    def _run(self, block: Block) -> None:
        for step in block.steps:
            if step.bodies:
                self._run_bodies(step)
                continue
            made = self._after(step)
            for value in step.outputs:
                self._found[id(value)] = made

    def _after(self, step: Step) -> frozenset[str]:
        given = _NONE.union(*map(self.axes_of, step.inputs))
        if step.name == TO_LOCAL:
            whole = step.inputs[0]
            return given | {axis for own in whole.axes for axis in own or ()} & step.params['axes']
        if step.name == TO_GLOBAL:
            return given - step.params['axes']
        if step.name in _NUMBERS:
            return given | {str(step.params.get('axis_name', ''))}
        if not step.inputs or not step.inputs[0].manual or step.name not in KINDS:
            return given
        axes = frozenset(exchange_axes(step))
        if KINDS[step.name] in _MIXING and step.params.get('axis_index_groups') is None:
            return given - axes
        return given | axes

    def _run_bodies(self, step: Step) -> None:
        chosen = self.axes_of(step.inputs[0]) if step.name == 'cond' and step.inputs else _NONE
        for tie in ties(step):
            if not tie.output:
                self._add(tie.inner, self.axes_of(tie.outer) | chosen)
        for _ in range(2 if any(True for _ in carries(step)) else 1):
            for body in step.bodies:
                self._run(body)
            for given, returned in carries(step):
                self._add(given, self.axes_of(returned))
        for tie in ties(step):
            if tie.output:
                self._add(tie.outer, self.axes_of(tie.inner) | chosen)

    def _add(self, value: Value, axes: frozenset[str]) -> None:
        self._found[id(value)] = self.axes_of(value) | axes
