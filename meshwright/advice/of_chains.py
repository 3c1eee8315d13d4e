"""Matrices that are multiplied with themselves again and again, while each device has a part.

    x = update / jnp.linalg.norm(update)          # sharded over 'fsdp', as its parameter is
    for _ in range(5):                            # the iteration of Newton and Schulz, as in Muon
        gram = x @ x.T
        x = 3.4 * x - (4.8 * gram - 2.0 * gram @ gram) @ x

Each product exchanges what it needs of the others' parts. If a device has whole matrices from the
start, some of a stack or all, one exchange before the products and one after them are enough.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.advice.candidates import Match, Told
from meshwright.advice.figures import shape_of
from meshwright.advice.function_view import LEAST, FunctionView
from meshwright.advice.rewriting import Edit, Rewriting, rewrite
from meshwright.advice.subject import Layout
from meshwright.causes.cause import CodeChange, over
from meshwright.causes.wording import spec_text
from meshwright.jax_private import TracedCall, bind
from meshwright.jaxpr.implied_exchanges import ADDED
from meshwright.jaxpr.primitives import CONSTRAINTS, ELEMENTWISE, MOVES
from meshwright.jaxpr.values import Axes, Step, Value, ties
from partitioning.products.flops import bodies_of
from partitioning.rules import from_tuple

_MAY_HOLD = 3.0  # times the memory, while all devices have whole matrices
_FEWEST = 3  # products that take nothing but the matrix; those of a loop count twice


class _Chain(NamedTuple):
    """Products of a matrix with itself, and with what they make.

    Attributes:
      root: the matrix.
      last: the result that is used otherwise.
      products: the products.
      in_loop: whether a loop repeats some of them.
    """

    root: Value
    last: Value | None
    products: tuple[Step, ...]
    in_loop: bool


def find_chains(view: FunctionView) -> Iterator[Told]:
    """Finds these products of sharded matrices; those that begin at one line are one change."""
    lines: dict[str, list[_Chain]] = {}
    seen = set[int]()
    for step in view.steps:
        if id(step) in seen or step.name != 'dot_general' or step.place.is_backward:
            continue
        root = _origin(view, step.inputs[0])
        if root is not _origin(view, step.inputs[1]) or root.manual or len(root.shape) < 2:
            continue
        chain = _follow(view, root)
        seen |= set(map(id, chain.products))
        line = _line(view, root)
        if (1 + chain.in_loop) * len(chain.products) >= _FEWEST and root.nbytes >= LEAST and line:
            lines.setdefault(line, []).append(chain)
    for line, chains in lines.items():
        yield from _tell(view, line, chains)


def _line(view: FunctionView, value: Value) -> str:
    """The line that makes a value; '' for arguments."""
    step = view.makers.get(id(value))
    return '' if step is None else view.line_of(step)


def _origin(view: FunctionView, value: Value, *, scaled: bool = False) -> Value:
    """The array that a value is a copy of, moved or cast, also before a loop; or scaled."""
    kept = MOVES | ADDED | (ELEMENTWISE if scaled else frozenset())
    while True:
        step = view.makers.get(id(value))
        large = [one for one in view.sources_of(value) if one.size > 1]
        if (step is not None and step.name not in kept) or len(large) != 1:
            return value
        if large[0].size != value.size or (scaled and step is not None and step.bodies):
            return value
        value = large[0]


def _follow(view: FunctionView, root: Value) -> _Chain:
    """The products of a matrix with itself, and with nothing else that is large."""
    own = {id(root)}
    products, last, in_loop = list[Step](), None, False

    def is_own(value: Value) -> bool:
        step = view.makers.get(id(value))
        is_of_loop = step is not None and bool(step.bodies)
        return id(value) in own or (is_of_loop and id(view.sources_of(value)[0]) in own)

    for step in view.steps:
        if not any(map(is_own, step.inputs)) or view.is_for_backward(step):
            continue
        if step.bodies:
            in_loop |= step.times > 1
            own |= {id(t.inner) for t in ties(step) if not t.output and is_own(t.outer)}
            continue
        others = [one for one in step.inputs if one.size > 1 and not is_own(one)]
        if any(not _is_uniform(view, one) for one in others):
            mine = [one for one in step.inputs if is_own(one) and one.size == root.size]
            last = _origin(view, mine[0], scaled=True) if mine else last
            continue
        own |= set(map(id, step.outputs))
        products += [step] if step.name == 'dot_general' else []
    return _Chain(root, last, tuple(products), in_loop)


def _is_uniform(view: FunctionView, value: Value) -> bool:
    """Whether all elements of an array are one number, or it is an identity matrix."""
    step = view.makers.get(id(value))
    while step is not None and step.name in MOVES | ADDED | {'broadcast_in_dim', 'iota', 'eq'}:
        if not step.inputs or all(one.size <= 1 for one in step.inputs):
            return True
        step = view.makers.get(id(step.inputs[0]))
    return False


def _whole(view: FunctionView, root: Value) -> tuple[Layout, Axes]:
    """A layout in which devices have whole matrices, and the mesh axes that shard them now."""
    now = [tuple(a for a in own or () if view.sizes[a] > 1) for own in root.axes]
    axes = tuple(a for own in now[-2:] for a in own)
    layout = [*now[:-2], (), ()]
    n = view.num_devices(axes)
    for d, own in enumerate(now[:-2]):
        if root.shape[d] % (n * view.num_devices(own)) == 0:
            layout[d] = (*own, *axes)
            break
    return tuple(layout), axes


def _given(view: FunctionView, root: Value) -> Value:
    """What a matrix is scaled from, such as by its norm, if its line takes another array."""
    step = view.makers[id(root)]
    large = [one for one in step.inputs if one.size == root.size]
    is_scaled = step.name in ('div', 'mul') and large and _line(view, large[0])
    return large[0] if is_scaled else root


def _try(view: FunctionView, chains: list[_Chain]) -> TracedCall:
    """The function with whole matrices before the products, and after them."""
    layouts: dict[int, dict[int, NamedSharding]] = collections.defaultdict(dict)
    for chain in chains:
        layout, _ = _whole(view, chain.root)
        sharding = NamedSharding(view.subject.mesh, PartitionSpec(*map(from_tuple, layout)))
        for value in (_given(view, chain.root), chain.last):
            step = None if value is None else view.makers.get(id(value))
            if value is not None and step is not None and len(value.shape) == len(layout):
                number = next(n for n, one in enumerate(step.outputs) if one is value)
                layouts[id(step.place.equation)][number] = sharding
    edits: dict[int, Edit] = {
        key: functools.partial(_lay_out, layouts=found) for key, found in layouts.items()
    }
    return rewrite(view.subject.call, edits)


def _lay_out(
    rewriting: Rewriting, equation: Any, args: list[Any], *, layouts: dict[int, NamedSharding]
) -> list[Any]:
    """The results of an equation, some of them laid out in another way."""
    if equation.primitive.name in CONSTRAINTS:
        made = list(args)
    elif bodies_of(equation):
        made = rewriting.again(equation, args)
    else:
        made = list(bind(equation, args))
    for number, sharding in layouts.items():
        made[number] = jax.lax.with_sharding_constraint(made[number], sharding)
    return made


def _tell(view: FunctionView, line: str, chains: list[_Chain]) -> Iterator[Told]:
    layout, _ = _whole(view, chains[0].root)
    axes = tuple(dict.fromkeys(a for one in chains for a in _whole(view, one.root)[1]))
    if not axes:
        return
    products = [step for one in chains for step in one.products]
    ends = dict.fromkeys(_line(view, one.last) for one in chains if one.last is not None)
    last = ' and '.join(end for end in ends if end)
    after = f', and again for the result of {last}' if last else ''
    what = (
        'so that each device has whole matrices, and multiplies each once'
        if any(layout)
        else 'so that they are gathered once, and all devices multiply all of them; or stack '
        'matrices of one shape, and shard the stack'
    )
    lines = {step.line for step in products} | {view.line_of(step) for step in products}
    arrays = (v for step in products for v in (*step.inputs, *step.outputs) if v.size > 1)
    yield Told(
        match=Match(
            axes=tuple(view.sizes), lines=frozenset(lines), shapes=frozenset(map(shape_of, arrays))
        ),
        line=line,
        why=(
            f'{len(products)} products take only {chains[0].root.shape} of {line} and what they '
            f'make of it, and {over(axes)} shards it within its matrices, so that each of them '
            'exchanges data'
        ),
        change=CodeChange(
            source=line,
            text=(
                f'write with_sharding_constraint(x, {spec_text(layout)}) before {line} for the '
                f'matrices that it takes{after}, {what}'
            ),
        ),
        trial=functools.partial(_try, view, chains),
        removes=False,
        may_hold=1.2 if any(layout) else _MAY_HOLD,
    )
