"""The functions inside of a traced function, and the shapes and paths of its operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar('T')

# Operations that run one jaxpr on their last operands.
_CALLS = frozenset(
    [
        'jit',
        'pjit',
        'closed_call',
        'core_call',
        'call',
        'checkpoint',
        'remat',
        'remat2',
        'custom_jvp_call',
        'custom_vjp_call',
        'custom_vjp_call_jaxpr',
        'custom_lin',
        'named_call',
        'shard_map',
        'eval_jaxpr',
        'hijax_call',
    ]
)


def bodies_run_by(equation: Any, operands: list[T]) -> Iterator[tuple[Any, list[T], bool]]:
    """Yields the jaxprs that an operation runs, their arguments, and whether it returns theirs."""
    name, params = equation.primitive.name, equation.params
    if name == 'while':
        inner = params['body_jaxpr']
        body = getattr(inner, 'jaxpr', inner)
        yield body, operands[len(operands) - len(body.invars) :], True
    elif name == 'cond':
        for number, branch in enumerate(params['branches']):
            body = getattr(branch, 'jaxpr', branch)
            yield body, operands[1:], number == len(params['branches']) - 1
    elif name in _CALLS and (inner := next(bodies_of(params), None)) is not None:
        body = getattr(inner, 'jaxpr', inner)
        given = operands[len(operands) - len(body.invars) :]
        if len(given) == len(body.invars) and len(body.outvars) == len(equation.outvars):
            yield body, given, True


def bodies_of(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the jaxprs among the parameters of an equation."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, 'eqns'):
                yield one


def words_of(path: str) -> frozenset[str]:
    """The words of the path of an operation, without those of transformations."""
    text = path
    for bracket in '()/:':
        text = text.replace(bracket, ' ')
    return frozenset(text.split()) - {'jvp', 'transpose', 'vmap', 'jit'}


def shape_of(variable: Any) -> tuple[int, ...]:
    """The shape of a variable, () for those without."""
    return tuple(getattr(variable.aval, 'shape', ()))


def num_of_other_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """The number of operands or results of a loop that have another rank inside of it."""
    pairs = zip(outside, inside, strict=True)
    return sum(len(shape_of(o)) != len(shape_of(i)) for o, i in pairs)
