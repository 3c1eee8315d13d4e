"""Which results of a step are arguments of its next call.

For `train_step(state, batch)` that returns `(state, loss)`, result 0 has the paths of the argument
`state`, and each array of it is computed from the array with the same path, element by element:

    state['w'] -> sub -> result[0]['w']       is the next call's state['w']
    state['w'] -> dot_general -> result[1]    is not: a gradient or a loss
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.calls.plain_call import jax_paths, parts_of_name
from meshwright.jax_private import TracedCall
from meshwright.jaxpr.naming import shared_end
from meshwright.jaxpr.primitives import ELEMENTWISE, MOVES, SCATTERS, names_in
from meshwright.jaxpr.values import Block, Value, carries, ties

# A result of these replaces their first operand, as in a cache.
UPDATES = SCATTERS | names_in('dynamic_update_slice')
_KEEPING = ELEMENTWISE | MOVES | names_in('random_fold_in random_split cond while')
_CHANGED_SHAPE = names_in('slice dynamic_slice squeeze reshape transpose expand_dims gather')

Path = tuple[str, ...]


def pair_results(call: TracedCall, block: Block, paths: Sequence[str]) -> dict[int, int]:
    """Returns the number of the argument of each result that the next call of a function takes.

    Args:
      call: the trace of the function.
      block: its steps, without exchanges.
      paths: the path of each argument, as the user sees it.
    """
    by_user = [tuple(path.split('/')) for path in paths]
    pairs = zip(jax_paths(call), by_user, strict=True)
    known = [[by_jax, path, ('', *path)] for by_jax, path in pairs]
    return pair_state(block, known, [parts_of_name(name) for name in call.result_names])


def pair_state(
    block: Block, argument_paths: Sequence[Sequence[Path]], result_paths: Sequence[Path]
) -> dict[int, int]:
    """Returns the number of the argument of each result that the next call takes.

    Args:
      block: the steps of the function, without exchanges.
      argument_paths: for each argument, its possible paths: by jax's names or by the user's.
      result_paths: the path of each result, which begins with 'result' and positions.
    """
    sources = _Sources(block)
    found: dict[int, list[int]] = {}
    for number, path in enumerate(result_paths):
        made = block.outputs[number]
        near = [i for i in sources.of(made) if block.inputs[i].shape == made.shape]
        named = [i for i in near if any(_fits(path, own) for own in argument_paths[i])]
        if named:
            found[number] = named
    pairs: dict[int, int] = {}
    while found:  # results that can be one argument only come first
        number = min(found, key=lambda n: (len(found[n]), n))
        candidates = found.pop(number)
        longest = max(
            candidates,
            key=lambda i: max(shared_end(result_paths[number], p) for p in argument_paths[i]),
        )
        pairs[number] = longest
        found = {
            n: left for n, given in found.items() if (left := [i for i in given if i != longest])
        }
    return pairs


def _fits(result: Path, argument: Path) -> bool:
    """Whether a result can be an argument: ('result', '0', 'w') and ('state', 'w')."""
    tail = argument[1:]
    before = result[: len(result) - len(tail)]
    return result[len(before) :] == tail and bool(before) and all(p.isdigit() for p in before[1:])


class _Sources:
    """Finds the arguments from which a value is computed element by element."""

    def __init__(self, block: Block):
        self._from: dict[int, list[Value]] = {}
        self._inputs = {id(value): i for i, value in enumerate(block.inputs)}
        self._read(block)

    def of(self, value: Value) -> list[int]:
        """The numbers of these arguments."""
        found, seen, waiting = list[int](), set[int](), [value]
        while waiting:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            if id(one) in self._inputs:
                found.append(self._inputs[id(one)])
            waiting += self._from.get(id(one), [])
        return sorted(found)

    def _read(self, block: Block) -> None:
        for step in block.steps:
            if step.bodies:
                for body in step.bodies:
                    self._read(body)
                for tie in ties(step):
                    if not tie.stacked:
                        source, made = (
                            (tie.inner, tie.outer) if tie.output else (tie.outer, tie.inner)
                        )
                        self._add(made, source)
                for given, returned in carries(step):
                    self._add(given, returned)
            elif step.name in UPDATES:
                self._add(step.outputs[0], step.inputs[0])
            elif step.name in _KEEPING or step.is_border:
                for made, source in _of_equal_shape(step.inputs, step.outputs, step.name):
                    self._add(made, source)

    def _add(self, made: Value, source: Value) -> None:
        self._from.setdefault(id(made), []).append(source)


def _of_equal_shape(
    inputs: Sequence[Value], outputs: Sequence[Value], name: str
) -> Iterator[tuple[Value, Value]]:
    if name in ('optimization_barrier', 'device_put'):
        yield from zip(outputs, inputs, strict=True)
        return
    for made in outputs:
        for source in inputs:
            if source.shape == made.shape or name in _CHANGED_SHAPE:
                yield made, source
