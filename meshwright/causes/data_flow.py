"""Follows the data of an instruction to its sources and its uses, through fusions and loops."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.jaxpr.primitives import names_in
from meshwright.program.collectives import is_exchange
from meshwright.program.hlo_text import Computation, HloProgram, Instruction

# The results of these, and of exchanges, have the elements of their first operand.
_MOVES = names_in(
    'bitcast copy convert transpose reshape dynamic-slice slice optimization-barrier copy-start '
    'copy-done slice-start slice-done async-start async-update async-done pad reduce-precision '
    'bitcast-convert'
)
_MOVED_BY_CALLS = ('ConcatBitcast', 'Sharding', 'SPMDFullToShardShape', 'SPMDShardToFullShape')
# The attribute with the computation that an instruction runs.
_BODIES = {'fusion': 'calls', 'while': 'body', 'call': 'to_apply'}
_CALLING = _BODIES | {'async-start': 'calls'}
_LIMIT = 4000  # places that a search looks at
# In place of an index: the search ends at this instruction.
_COMPUTES = -1


class Place(NamedTuple):
    """An instruction, or one array of the tuple that it results in.

    Attributes:
      instruction: the instruction.
      computation: the computation that it is part of.
      part: the number of the array in a tuple, or None for the whole result.
    """

    instruction: Instruction
    computation: Computation
    part: int | None = None

    @property
    def key(self) -> tuple[str, str, int | None]:
        return self.computation.name, self.instruction.name, self.part


class DataFlow:
    """Follows data through a program.

    Args:
      program: the program.
    """

    def __init__(self, program: HloProgram):
        self._program = program
        self._places: dict[str, Place] = {}
        self._users: dict[tuple[str, str], list[Instruction]] = {}
        self._callers: dict[str, list[Place]] = {}
        for computation in program.computations.values():
            for instruction in computation.instructions.values():
                self._places[instruction.name] = Place(instruction, computation)
                for name in instruction.operands:
                    self._users.setdefault((computation.name, name), []).append(instruction)
                attribute = _CALLING.get(instruction.opcode)
                for called in instruction.called(attribute) if attribute else ():
                    place = self._places[instruction.name]
                    self._callers.setdefault(called, []).append(place)

    def place_of(self, name: str) -> Place | None:
        """The instruction of a name."""
        return self._places.get(name)

    def makers(self, place: Place) -> list[Place]:
        """The operations that compute what a place holds, and the arguments of the program.

        Moves, casts and exchanges are not operations; a loop's carry counts as what is in it at
        first and after an iteration.
        """
        return list(self._search(place, self._sources))

    def takers(self, place: Place) -> list[Place]:
        """The operations that compute with what a place holds, and the root of the program."""
        return [p for p in self._search(place, self._targets) if p.key != place.key]

    def summed_before(self, place: Place) -> Place | None:
        """The sum over devices whose result a place holds, moved but not computed with, or None.

        Compilers write a sum over the devices of one axis in several phases: the first one leaves
        each device a part of the sum over some of them.
        """
        pending, seen = [place], {place.key}
        while pending and len(seen) < _LIMIT:
            current = pending.pop()
            opcode = current.instruction.opcode.removesuffix('-start').removesuffix('-done')
            if opcode in ('all-reduce', 'reduce-scatter'):
                return current
            for one in self._sources(current) or ():
                if one.key not in seen:
                    seen.add(one.key)
                    pending.append(one)
        return None

    def _search(self, start: Place, step: object) -> Iterator[Place]:
        pending, seen = [start], {start.key}
        while pending and len(seen) < _LIMIT:
            place = pending.pop(0)
            found = step(place)  # type: ignore[operator]
            if found is None:
                yield place
                continue
            for one in found:
                if one.key not in seen:
                    seen.add(one.key)
                    pending.append(one)

    def _sources(self, place: Place) -> list[Place] | None:
        """What a place is a copy of, or None if it is computed there or an argument."""
        instruction, computation, index = place
        opcode = instruction.opcode
        operands = [Place(computation.instructions[n], computation) for n in instruction.operands]
        if opcode == 'tuple':
            return operands if index is None else [operands[index]] if index < len(operands) else []
        if opcode == 'get-tuple-element':
            return [operands[0]._replace(part=_index_of(instruction))]
        if opcode in _BODIES:
            body = self._body_of(instruction)
            before = [operands[0]._replace(part=index)] if opcode == 'while' else []
            return [*before, Place(body.root, body, index)]
        if opcode == 'parameter':
            return self._given(instruction, computation, index)
        if _is_move(instruction) and operands:
            combined = index is not None and index < len(operands) and len(operands) > 1
            return [operands[index if combined and index is not None else 0]]
        return None

    def _given(
        self, parameter: Instruction, computation: Computation, index: int | None
    ) -> list[Place] | None:
        if computation.name == self._program.entry.name:
            return None
        found = []
        for caller, outside, _ in self._callers.get(computation.name, ()):
            number = int(parameter.literal)
            if caller.opcode == 'while':
                body = self._body_of(caller)
                found.append(Place(outside.instructions[caller.operands[0]], outside, index))
                found.append(Place(body.root, body, index))
            elif number < len(caller.operands):
                found.append(Place(outside.instructions[caller.operands[number]], outside, index))
        return found or None

    def _targets(self, place: Place) -> list[Place] | None:
        """Where a place is copied to; None for an operation that computes with what it is given."""
        instruction, computation, index = place
        if index == _COMPUTES:
            return None
        found: list[Place] = []
        if instruction.is_root:
            if computation.name == self._program.entry.name:
                return None
            for caller, outside, _ in self._callers.get(computation.name, ()):
                found.append(Place(caller, outside, index))
                if caller.opcode == 'while':  # the next iteration is given it
                    found += self._parameters_of(caller, index)
        for user in self._users.get((computation.name, instruction.name), ()):
            found += self._used(user, computation, instruction.name, index)
        return found

    def _used(
        self, user: Instruction, computation: Computation, name: str, index: int | None
    ) -> list[Place]:
        """Where an instruction that takes an array has it."""
        number = user.operands.index(name)
        if user.opcode == 'get-tuple-element':
            wanted = _index_of(user)
            return [Place(user, computation)] if index in (None, wanted) else []
        if user.opcode == 'tuple':
            return [Place(user, computation, n) for n, o in enumerate(user.operands) if o == name]
        if user.opcode == 'while':
            return [*self._parameters_of(user, index), Place(user, computation, index)]
        if user.opcode in ('fusion', 'call'):
            return [p for p in self._parameters_of(user) if int(p.instruction.literal) == number]
        return [Place(user, computation, None if _is_move(user) else _COMPUTES)]

    def _parameters_of(self, caller: Instruction, index: int | None = None) -> list[Place]:
        """The parameters of the computation that an instruction runs."""
        body = self._body_of(caller)
        parameters = [i for i in body.instructions.values() if i.opcode == 'parameter']
        return [Place(parameter, body, index) for parameter in parameters]

    def _body_of(self, caller: Instruction) -> Computation:
        return self._program.computations[caller.called(_BODIES[caller.opcode])[0]]


def _is_move(instruction: Instruction) -> bool:
    if instruction.opcode == 'custom-call':
        return any(f'"{name}' in instruction.attributes for name in _MOVED_BY_CALLS)
    return instruction.opcode in _MOVES or is_exchange(instruction.opcode.removesuffix('-done'))


def _index_of(instruction: Instruction) -> int:
    found = re.search(r'index=(\d+)', instruction.attributes)
    return int(found[1]) if found else 0
