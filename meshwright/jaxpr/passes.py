"""Computes the size of a traced function's gradients, and of the activations that they need."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from meshwright.jaxpr.fusion import VIEWS, Fusion
from meshwright.jaxpr.values import Block, Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """What one pass hands to the next, in bytes on a device.

    Attributes:
      gradients: what the backward pass hands to the steps after it.
      activations: what the forward pass keeps for the backward pass, and depends on more than the
        donated arguments: copies of parameters in another type are not activations.
    """

    gradients: int
    activations: int


def find_kept(block: Block, donated: Sequence[bool], size_of: Callable[[Value], int]) -> Kept:
    """Finds what the passes of a function keep for each other.

    Args:
      block: the steps. jax marks the steps of a backward pass.
      donated: for each input, whether it belongs to the state that the function replaces.
      size_of: the size of an array on a device in bytes.
    """
    fusion, gradients, activations = Fusion(block), dict[int, Value](), dict[int, Value]()
    data = {id(v) for v, is_state in zip(block.inputs, donated, strict=True) if not is_state}
    inside = Kept(gradients=0, activations=0)
    for step in block.steps:
        if any(id(value) in data for value in step.inputs):
            data.update(id(value) for value in step.outputs)
        if step.name in VIEWS or not any(map(fusion.in_memory, step.outputs)):
            continue
        for value in fusion.roots(step.inputs):
            maker = fusion.maker(value)
            if maker is None or maker.place.is_backward == step.place.is_backward:
                continue
            if step.place.is_backward and id(value) in data:
                activations[id(value)] = value
            elif maker.place.is_backward:
                gradients[id(value)] = value
        if not step.place.is_backward:
            for body in step.bodies:  # of microbatches
                state = [id(value) not in data for value in _given(step.inputs, body)]
                found = find_kept(body, state, size_of)
                inside = max(inside, found, key=lambda k: k.activations)
    for value in fusion.roots(block.outputs):
        maker = fusion.maker(value)
        if maker is not None and maker.place.is_backward:
            gradients[id(value)] = value
    return Kept(
        gradients=sum(map(size_of, gradients.values())) or inside.gradients,
        activations=sum(map(size_of, activations.values())) + inside.activations,
    )


def _given(inputs: Sequence[Value], body: Block) -> Sequence[Value]:
    """The arrays that a body is given; the first input of a `cond` is its index."""
    return inputs[len(inputs) - len(body.inputs) :]
