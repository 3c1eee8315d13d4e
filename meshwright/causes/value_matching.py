"""Finds the value of a traced function that an instruction of its compiled program holds."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Mapping, Sequence

import jax

from meshwright.causes.data_flow import DataFlow, Place
from meshwright.causes.shard_shapes import shard_counts, shard_dimensions
from meshwright.jaxpr import values
from meshwright.jaxpr.naming import TracedValues
from meshwright.jaxpr.primitives import CHECKPOINTS
from meshwright.jaxpr.values import Value, is_backward, words_of
from meshwright.program.hlo_text import HloProgram, Instruction
from meshwright.user_lines import user_line

# What the compiler calls the operations that keep an array per iteration of a loop.
_STACKING = {'broadcast_in_dim', 'dynamic_update_slice', 'while', 'scan', 'squeeze'}
# The operations of a jax.checkpoint have the line of its caller in compiled programs.
_HAS_LINES_OF_CALLERS = jax.__version_info__ < (0, 10)


class Matcher:
    """Finds the values that instructions hold.

    Args:
      program: the compiled program.
      traced: the values of the function.
      sizes: the size of each mesh axis.
    """

    def __init__(self, program: HloProgram, traced: TracedValues, sizes: Mapping[str, int]):
        self._program, self._traced = program, traced
        self._counts, self._sizes = shard_counts(sizes), dict(sizes)
        self._shards: dict[tuple[tuple[object, ...], ...], bool] = {}
        self._by_line: dict[str, list[Value]] = collections.defaultdict(list)
        for value in traced.values:
            for line in {*value.stack[:1], *value.loop[:1]}:
                self._by_line[line].append(value)
        self._checkpoints: dict[int, tuple[str, ...]] = {}
        self._by_caller: dict[str, list[Value]] = collections.defaultdict(list)
        for value in traced.values if _HAS_LINES_OF_CALLERS else ():
            caller = self._checkpoints[id(value)] = _checkpoint_around(value.place)
            for line in caller[:1]:
                self._by_caller[line].append(value)
        self._arguments = self._match_arguments()
        self.flow = DataFlow(program)

    def source_of(self, instruction: Instruction) -> str:
        """The user's line that an instruction comes from, or ''."""
        return user_line(self._program.stack_of(instruction), self._traced.helpers)

    def argument_of(self, place: Place) -> Value | None:
        """The argument of the function that a parameter of the program is."""
        if place.computation.name != self._program.entry.name:
            return None
        if place.instruction.opcode != 'parameter':
            return None
        return self._arguments.get(int(place.instruction.literal))

    def values_of(
        self,
        instruction: Instruction,
        shape: Sequence[int] | None = None,
        whole_along: Sequence[str] = (),
    ) -> list[Value]:
        """The values that an instruction may hold, those that match best.

        Args:
          instruction: the instruction.
          shape: the shape of a device's part of the value, if it is not the result's.
          whole_along: mesh axes over which the value is not sharded.
        """
        stack, path = self._program.stack_of(instruction), instruction.op_name
        if not stack:
            return []
        if shape is None:
            shape = instruction.outputs[0].shape if instruction.outputs else ()
        # Where XLA has combined operations, the path has several of them at its end.
        last = path.rpartition(')')[0] if path.endswith(')') and ':' in path else path
        names = {part.rpartition('/')[2].strip('()') for part in last.split(':')}
        primitives = {*names, path.rpartition('/')[2]}
        words, backward = words_of(path), is_backward(path)
        best: list[Value] = []
        best_score = 0.0
        near, inner = self._by_line.get(stack[0], []), list[Value]()
        if 'checkpoint' in words and not any(self._checkpoints.get(id(value)) for value in near):
            inner = self._by_caller.get(stack[0], [])
        known: dict[tuple[str, ...], float] = {(): 0.0}
        for value in (*near, *inner):
            score = 0.0
            stacked = value.primitive == 'scan' and bool(primitives & _STACKING)
            caller = self._checkpoints[id(value)] if inner else ()
            lines = value.stack, value.loop, caller
            for one in lines:
                if one not in known:
                    known[one] = _agreement(stack, one)
            score += 6 * max(known[one] for one in lines)
            score += 4 if value.primitive in primitives or stacked else 0
            score += 2 if value.backward == backward else 0
            score += min(len(value.place.words & words), 8) / 2
            score += 5 if self.is_shard(shape, value.shape, whole_along) else 0
            score += self._fit(shape, value)
            if score > best_score:
                best, best_score = [value], score
            elif score == best_score:
                best.append(value)
        return best

    def is_shard(
        self, shape: Sequence[int], whole: Sequence[int], whole_along: Sequence[str] = ()
    ) -> bool:
        """Whether an array of one shape can be a shard of one of another, up to dimensions of 1."""
        key = tuple(shape), tuple(whole), tuple(whole_along)
        if key not in self._shards:
            counts = self._counts
            if whole_along:
                sizes = {a: n for a, n in self._sizes.items() if a not in whole_along}
                counts = shard_counts(sizes)
            self._shards[key] = shard_dimensions(shape, whole, counts) is not None
        return self._shards[key]

    def _fit(self, shape: Sequence[int], value: Value) -> float:
        """Prefers values whose dimensions have the order and the layout of a device's part."""
        if len(shape) != len(value.shape):
            return 0.0
        pairs = zip(shape, value.shape, strict=True)
        in_order = all(n % part == 0 for part, n in pairs if part)
        expected = tuple(
            n // math.prod(self._sizes[a] for a in (d.axes if d else ()) if a in self._sizes)
            for n, d in zip(value.shape, value.dims, strict=True)
        )
        return 0.5 * in_order + 0.5 * (expected == tuple(shape))

    def _match_arguments(self) -> dict[int, Value]:
        """The argument of each parameter of the program, which lacks those that are not used."""
        parameters = sorted(
            (i for i in self._program.entry.instructions.values() if i.opcode == 'parameter'),
            key=lambda i: int(i.literal),
        )
        arguments = list(self._traced.arguments)
        if len(parameters) == len(arguments):
            return {int(p.literal): a for p, a in zip(parameters, arguments, strict=True)}
        found: dict[int, Value] = {}
        position = 0
        for parameter in parameters:
            shape = parameter.outputs[0].shape if parameter.outputs else ()
            for later in range(position, len(arguments)):
                if self.is_shard(shape, arguments[later].shape):
                    found[int(parameter.literal)] = arguments[later]
                    position = later + 1
                    break
        return found


def _checkpoint_around(place: values.Place) -> tuple[str, ...]:
    """The call stack of the jax.checkpoint around an operation; () without one."""
    around = place.around
    while around is not None:
        name = getattr(getattr(around.equation, 'primitive', None), 'name', '')
        if name in CHECKPOINTS:
            return around.lines
        around = around.around
    return ()


def _agreement(stack: Sequence[str], other: Sequence[str]) -> float:
    """The share of two call stacks that agrees, from the innermost line on.

    One of them may end early: the stack of a compiled operation also has the lines from which the
    functions around it are called.
    """
    pairs = list(zip(stack, other, strict=False))
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return alike / len(pairs) if pairs else 0.0
