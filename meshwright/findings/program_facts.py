"""What the checks know of a traced function."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.advice.subject import UPDATES, find_owners, pair_results
from meshwright.calls.held import HeldArray, named_role
from meshwright.causes.row_axes import is_meant_for_rows
from meshwright.findings.forward_layouts import ForwardLayouts
from meshwright.jax_private import TracedCall
from meshwright.jaxpr.linked_dimensions import LinkedDimensions
from meshwright.jaxpr.naming import name_values
from meshwright.jaxpr.values import TO_GLOBAL, TO_LOCAL, Axes, Block, Step, steps_in, ties
from meshwright.jaxpr.writing_out import spec_axes, write_out
from partitioning.rules import MeshLike, axis_sizes

_USES = ('dot_general', 'ragged_dot_general', 'conv_general_dilated', 'gather')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramFacts:
    """A traced function, read once.

    Attributes:
      traced: the function.
      held: the arrays of its arguments.
      mesh: the mesh.
      results: the sharding of each result, as stated or as compiled; None where it is not known.
    """

    traced: TracedCall
    held: Sequence[HeldArray]
    mesh: MeshLike
    results: Sequence[Any]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The size of each mesh axis that has several devices."""
        return {axis: n for axis, n in axis_sizes(self.mesh).items() if n > 1}

    @functools.cached_property
    def block(self) -> Block:
        """The steps of the function, whose arrays have names and are laid out forward."""
        return self._laid_out[0]

    @functools.cached_property
    def layouts(self) -> ForwardLayouts:
        """How the arrays are laid out if layouts travel forward only."""
        return self._laid_out[1]

    def write_out(self) -> Block:
        """The steps of the function, whose arguments are laid out, and nothing else."""
        block = write_out(self.traced.jaxpr, axis_sizes(self.mesh))
        for value, sharding in zip(block.inputs, self.traced.arguments, strict=True):
            if isinstance(sharding, NamedSharding):
                value.fix(spec_axes(sharding.spec, len(value.shape), axis_sizes(self.mesh)))
        return block

    @functools.cached_property
    def _laid_out(self) -> tuple[Block, ForwardLayouts, LinkedDimensions]:
        block = self.write_out()
        links = name_values(block, [array.row for array in self.held], {}).links
        return block, ForwardLayouts(block, axis_sizes(self.mesh)), links

    @functools.cached_property
    def steps(self) -> tuple[Step, ...]:
        """All steps, with the steps in the bodies of loops and branches."""
        return tuple(steps_in(self.block))

    @functools.cached_property
    def axes(self) -> tuple[tuple[Axes, ...], ...]:
        """The mesh axes of each dimension of each argument."""
        return tuple(tuple(axes or () for axes in value.axes) for value in self.block.inputs)

    @functools.cached_property
    def pairs(self) -> dict[int, int]:
        """The number of the argument of each result that the next call takes."""
        pairs = pair_results(self.traced, self.block, [array.row.path for array in self.held])
        return {number: i for number, i in pairs.items() if self._is_state(i)}

    def _is_state(self, i: int) -> bool:
        """Whether an argument that a result is computed from may be a state, and not a batch.

        A function without a backward pass that takes and returns a single array of one shape, such
        as a residual network, has an input there. Only what it replaces in part is a cache.
        """
        if self._named_role(i) == 'batch':
            return False
        if '/' in self.path(i) or any(step.place.is_backward for step in self.steps):
            return True
        shape = self.block.inputs[i].shape
        return any(s.name in UPDATES and s.inputs[0].shape[-1:] == shape[-1:] for s in self.steps)

    @functools.cached_property
    def uses(self) -> dict[str, list[Step]]:
        """The products and lookups that take each argument, by its path."""
        found: dict[str, list[Step]] = collections.defaultdict(list)
        for step in self.steps:
            if step.name in _USES and not step.place.is_backward:
                for value in step.inputs[:2]:
                    if value.argument:
                        found[value.argument].append(step)
        return found

    @functools.cached_property
    def weights(self) -> tuple[int, ...]:
        """The numbers of the arguments that are parameters: by name, or by what is done to them."""
        state = set(self.pairs.values())
        found = []
        for i, array in enumerate(self.held):
            is_float = jax.numpy.issubdtype(self.traced.jaxpr.in_avals[i].dtype, jax.numpy.inexact)
            named = self._named_role(i) == 'parameters'
            # By what is done with it, a single array of the arguments may be an input as well.
            kept = array.role == 'parameters' and ('/' in array.row.path or i in state)
            used = array.role == 'other' and i in state and bool(self.uses.get(array.row.path))
            if is_float and (named or kept or used) and not self._has_rows(i):
                found.append(i)
        return tuple(found)

    def _has_rows(self, i: int) -> bool:
        """Whether an array has a row for each row of the batch, such as the state of a network."""
        links = self._laid_out[2]
        return any(
            links.are_linked((self.path(i), 0), (self.path(j), 0))
            for j, array in enumerate(self.held)
            if self._named_role(j) == 'batch' and array.row.shape and i != j
        )

    def are_paired(self, one: tuple[int, int], other: tuple[int, int]) -> bool:
        """Whether products pair dimensions of two arguments, each given by two numbers."""
        (i, d), (j, e) = one, other
        return self._laid_out[2].are_linked((self.path(i), d), (self.path(j), e))

    @functools.cached_property
    def owners(self) -> dict[int, int]:
        """The number of the parameter that each array of the optimizer belongs to."""
        numbers = {array.row.path: i for i, array in enumerate(self.held)}
        values = [value for step in self.steps for value in step.outputs]
        owners = find_owners({array.row.path: array.row for array in self.held}, values)
        return {numbers[moment]: numbers[owner] for moment, owner in owners.items()}

    @functools.cached_property
    def batch(self) -> tuple[int, ...]:
        """The numbers of the arguments that have a row for each example."""
        state = {*self.pairs.values(), *self.weights}
        found = [i for i in range(len(self.held)) if i not in state and self._is_data(i)]
        named = [i for i in found if self._named_role(i) == 'batch']
        if not named and not self.pairs:
            return ()  # what a function of unknown names takes may be weights as well
        others = [i for i in found if self.held[i].role in ('batch', 'other')]
        found = sorted({*named, *self._linked(others, named)}) if named else others
        rows = collections.Counter[int]()
        for i in found:
            rows[self.block.inputs[i].shape[0]] += self.block.inputs[i].nbytes
        if not rows:
            return ()
        most = rows.most_common(1)[0][0]
        return tuple(i for i in found if self.block.inputs[i].shape[0] == most)

    def _linked(self, others: Sequence[int], named: Sequence[int]) -> Iterator[int]:
        """The arrays whose rows are paired with rows of the batch, such as a mask for each row."""
        links, rows = self._laid_out[2], [(self.path(i), 0) for i in named]
        for i in (i for i in others if self.held[i].role == 'batch'):
            if any(links.are_linked((self.path(i), 0), row) for row in rows):
                yield i

    def _named_role(self, i: int) -> str:
        return named_role(tuple(self.path(i).split('/')), self.traced.jaxpr.in_avals[i])

    def _is_data(self, i: int) -> bool:
        aval = self.traced.jaxpr.in_avals[i]
        is_key = jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)
        is_old_key = aval.dtype == 'uint32' and aval.shape[-1:] in ((2,), (4,))
        return bool(aval.shape) and not is_key and not is_old_key

    @functools.cached_property
    def row_axes(self) -> frozenset[str]:
        """The mesh axes that shard the batch, or activations at a border of a shard_map."""
        return frozenset(a for i in self.batch for axes in self.axes[i] for a in axes)

    @functools.cached_property
    def data_axes(self) -> frozenset[str]:
        """The mesh axes of all data, whatever its rows are, such as the edges of a graph."""
        state = {*self.pairs.values(), *self.weights}
        data = (i for i in range(len(self.held)) if i not in state and self._is_data(i))
        found = (i for i in data if self.held[i].role in ('batch', 'other'))
        return frozenset(a for i in found for axes in self.axes[i] for a in axes)

    @functools.cached_property
    def borders(self) -> dict[int, Step]:
        """The ends of the shard_maps, by the identities of the arrays that they return."""
        ends = (step for step in self.steps if step.name == TO_GLOBAL)
        return {id(value): step for step in ends for value in step.outputs}

    @functools.cached_property
    def first_axes(self) -> frozenset[str]:
        """The mesh axes of the first sharded dimension of the batch: its rows, not its sequence."""
        first = (next((own for own in self.axes[i] if own), ()) for i in self.batch)
        return frozenset(a for own in first for a in own)

    @functools.cached_property
    def activation_axes(self) -> frozenset[str]:
        """The mesh axes of the batch, and those that the function gives to activations."""
        found = set(self.row_axes)
        for step in self.steps:
            if step.name == 'sharding_constraint' or step.name == TO_LOCAL:
                value = step.inputs[0]
                is_state = value.argument and value.argument not in self._batch_paths
                if not is_state and not value.gradient_of and not value.update_of:
                    axes = step.outputs[0].axes if step.name != TO_LOCAL else value.axes
                    found.update(a for own in axes for a in own or ())
        return frozenset(found)

    @functools.cached_property
    def _batch_paths(self) -> frozenset[str]:
        return frozenset(self.held[i].row.path for i in self.batch)

    def nbytes(self, i: int) -> int:
        """The size of a whole argument in bytes."""
        return self.block.inputs[i].nbytes

    @functools.cached_property
    def _layers(self) -> dict[str, int]:
        """The number of layers in each argument that a loop takes apart, by its path."""
        found = dict[str, int]()
        for step in self.steps:
            for tie in ties(step) if step.bodies else ():
                if tie.stacked and not tie.output and tie.outer.argument:
                    found[tie.outer.argument] = tie.outer.shape[0]
        return found

    def layer_bytes(self, i: int) -> float:
        """The size of a whole argument in bytes, or of a layer of it if a loop goes over layers."""
        return self.nbytes(i) / self._layers.get(self.path(i), 1)

    def shards(self, axes: Sequence[Axes]) -> int:
        """The number of parts into which a layout divides an array."""
        return math.prod(self.sizes.get(a, 1) for own in axes for a in own)

    def shard_bytes(self, i: int) -> int:
        """The bytes of an argument on each device."""
        return -(-self.nbytes(i) // self.shards(self.axes[i]))

    def path(self, i: int) -> str:
        """The path of an argument."""
        return self.held[i].row.path

    def argument(self, i: int) -> str:
        """The name of the parameter of the function that has an array."""
        return self.path(i).partition('/')[0]

    def is_meant_for_rows(self, axis: str) -> bool:
        """Whether a mesh axis that divides parameters should divide the rows of the batch, too."""
        made = (value for step in self.steps for value in step.outputs)
        return is_meant_for_rows(axis, made, {self.path(i) for i in self.weights})

    @property
    def line(self) -> str:
        """The 'file:line' of the function."""
        about = str(self.traced.jaxpr.jaxpr.debug_info.func_src_info)
        return about.rpartition(' at ')[2]


def axes_lost(constraint: Step) -> set[str]:
    """The mesh axes that divide the operand of a constraint, and not its result."""
    before, after = (
        {a for own in value.axes for a in own or ()}
        for value in (constraint.inputs[0], constraint.outputs[0])
    )
    return before - after


def free_dimension(
    shape: Sequence[int], axes: Sequence[Axes], axis: str, sizes: Mapping[str, int]
) -> int | None:
    """The largest dimension that a mesh axis could shard in addition, or None."""
    fitting = []
    for d, (n, own) in enumerate(zip(shape, axes, strict=True)):
        shards = math.prod(sizes.get(a, 1) for a in own)
        if n % (shards * sizes[axis]) == 0:
            fitting.append((n // shards, -d))
    return -max(fitting)[1] if fitting else None
