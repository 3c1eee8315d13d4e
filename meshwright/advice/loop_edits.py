"""Moves exchanges out of loops, and replaces sums of arrays that are equal on all devices.

A gather of the same array in all iterations of a loop is made before it. Sums that the iterations
add up are made once after it. The sum of equal arrays is a multiple of the array.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from meshwright.advice.rewriting import CALLS, Edit, Rewriting, axes_of, rewrite, scan
from meshwright.jax_private import TracedCall
from partitioning.products.flops import bodies_of, count_scan_arguments, open_jaxpr


@dataclasses.dataclass(frozen=True, eq=False)
class RepeatedStep:
    """An exchange that need not be made each time, and where it is made instead.

    Attributes:
      equation: its equation.
      operand: the number of the operand and the result of the equation.
      loop: the equation of the loop before or after which it can be made once; None for a sum of
        what all devices have already.
      carry: the number of the array in the carry to which the iterations add a sum, which is then
        made after the loop; -1 for what is made before it.
    """

    equation: Any
    operand: int = 0
    loop: Any = None
    carry: int = -1


def try_edits(
    call: TracedCall,
    *,
    edits: Sequence[RepeatedStep],
    sizes: Mapping[str, int],
) -> TracedCall:
    """The function with edits.

    Args:
      call: the function.
      edits: the edits.
      sizes: the size of each mesh axis.

    Raises:
      ValueError: if an edit cannot be made.
    """
    early: dict[int, set[int]] = collections.defaultdict(set)
    later: dict[int, list[RepeatedStep]] = collections.defaultdict(list)
    needless: dict[int, set[int]] = collections.defaultdict(set)
    found: dict[int, Edit] = {}
    for edit in edits:
        if edit.loop is None:
            needless[id(edit.equation)].add(edit.operand)
            _, axes = axes_of(edit.equation)
            names = (axes,) if isinstance(axes, str) else axes
            size = math.prod(sizes.get(axis, 1) for axis in names)
            found[id(edit.equation)] = leave_out_sums(needless[id(edit.equation)], size)
        elif edit.carry < 0:
            early[id(edit.loop)].add(id(edit.equation))
        else:
            later[id(edit.loop)].append(edit)
    for key, targets in early.items():
        found[key] = Hoisted(frozenset(targets))
    for key, sums in later.items():
        if key in found:
            raise ValueError('a loop has both')
        found[key] = SummedLater(tuple(sums))
    return rewrite(call, found)


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """Equations of the body of a loop that do the same in all iterations, to be done before it.

    Attributes:
      targets: the ids of the equations.
    """

    targets: frozenset[int]

    def __call__(self, rewriting: Rewriting, equation: Any, args: list[Any]) -> list[Any]:
        jaxpr, consts = open_jaxpr(equation.params['jaxpr'])
        count, _ = count_scan_arguments(equation.params)
        known: list[Any] = [*args[:count], *[None] * (len(jaxpr.invars) - count)]
        found: dict[int, Edit] = {}
        self._find(rewriting, jaxpr, consts, [_lazy(x) for x in known], found)
        if not self.targets <= found.keys():
            raise ValueError('an operation in a loop does not do the same in all iterations')
        with rewriting.also(found):
            return list(scan(equation, args, rewriting.body(equation.params['jaxpr'])))

    def _find(
        self,
        rewriting: Rewriting,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        found: dict[int, Edit],
    ) -> list[Any]:
        """Does the targets, and finds out how to make the results where all is known."""
        values: dict[Any, Any] = {v: _lazy(c) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        values |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return _lazy(atom.val) if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            made: list[Any] = [None] * len(equation.outvars)
            if equation.primitive.name in CALLS and bodies_of(equation):
                inner, own = open_jaxpr(bodies_of(equation)[0])
                made = self._find(rewriting, inner, own, given, found)
            elif all(x is not None for x in given) and not bodies_of(equation):
                made = _results(rewriting, equation, given)
                if id(equation) in self.targets:
                    done = [one() for one in made]
                    found[id(equation)] = lambda r, e, a, done=done: done  # type: ignore[misc]
            values.update(zip(equation.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def _lazy(x: Any) -> Callable[[], Any] | None:
    return None if x is None else lambda: x


def _results(
    rewriting: Rewriting, equation: Any, given: Sequence[Callable[[], Any]]
) -> list[Callable[[], Any]]:
    """The results of an equation, which is done when the first of them is asked for."""
    done: list[Any] = []

    def result(n: int) -> Any:
        if not done:
            done.extend(rewriting.do(equation, [one() for one in given]))
        return done[n]

    return [lambda n=n: result(n) for n in range(len(equation.outvars))]  # type: ignore[misc]


@dataclasses.dataclass(frozen=True)
class SummedLater:
    """Sums over devices that the iterations of a loop add up, to be made once after it.

    Attributes:
      sums: the sums of one loop.
    """

    sums: tuple[RepeatedStep, ...]

    def __call__(self, rewriting: Rewriting, equation: Any, args: list[Any]) -> list[Any]:
        first, _ = count_scan_arguments(equation.params)
        numbers: dict[int, set[int]] = {}
        given, added = list(args), dict[int, Any]()
        for one in self.sums:
            numbers.setdefault(id(one.equation), set()).add(one.operand)
            added[one.carry] = given[first + one.carry]
            given[first + one.carry] = _zeros(one, given[first + one.carry])
        edits = {key: skip_sums(found) for key, found in numbers.items()}
        with rewriting.also(edits):
            made = list(scan(equation, given, rewriting.body(equation.params['jaxpr'])))
        for one in self.sums:
            total = _alone(one.equation, [one.operand])
            made[one.carry] = added[one.carry] + rewriting.do(total, [made[one.carry]])[0]
        return made


def _alone(equation: Any, numbers: Sequence[int]) -> Any:
    """A sum over devices of some of its operands."""
    return equation.replace(
        invars=[equation.invars[n] for n in numbers], outvars=[equation.outvars[n] for n in numbers]
    )


def _zeros(one: RepeatedStep, before: Any) -> Any:
    """An array to add the operands of a sum to, which differ between its devices."""
    operand = one.equation.invars[one.operand].aval
    same = operand.size == before.size
    zeros = jax.numpy.zeros_like(before)
    if not same:
        zeros = jax.numpy.broadcast_to(zeros.ravel()[:1].reshape([1] * operand.ndim), operand.shape)
    return zeros


def skip_sums(numbers: set[int]) -> Edit:
    """An edit of a sum over devices that leaves some of its operands as they are."""

    def edit(rewriting: Rewriting, equation: Any, args: list[Any]) -> list[Any]:
        made = list(args)
        rest = [n for n in range(len(args)) if n not in numbers]
        if rest:
            some = rewriting.do(_alone(equation, rest), [args[n] for n in rest])
            for n, one in zip(rest, some, strict=True):
                made[n] = one
        return made

    return edit


def leave_out_sums(numbers: set[int], size: int) -> Edit:
    """An edit of a sum of what is the same on all devices: a multiple of it.

    Args:
      numbers: the numbers of its operands for which this is so.
      size: the number of devices.
    """

    def edit(rewriting: Rewriting, equation: Any, args: list[Any]) -> list[Any]:
        made = skip_sums(numbers)(rewriting, equation, args)
        return [one * size if n in numbers else one for n, one in enumerate(made)]

    return edit
