"""Checks of shard_maps: those that do the same on all devices along a mesh axis."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.advice import of_shard_maps
from meshwright.advice.of_shard_maps import WholeShardMap, divide_shard_map
from meshwright.findings.product_checks import LEAST, border_before, is_meant, split_sums
from meshwright.findings.program_facts import ProgramFacts
from meshwright.findings.wording import axes_str, type_str
from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.mapped_dimensions import MappedFunction, find_mapped_functions
from meshwright.jaxpr.values import Step
from partitioning.plan.findings import Finding


def find_whole_shard_maps(facts: ProgramFacts) -> Iterator[Finding]:
    """Shard_maps whose specs lack an axis that could divide their work.

    Either an argument is gathered along it, or the product after the shard_map uses a part of its
    result on each device.
    """
    weights = frozenset(map(facts.path, facts.weights))
    lines = set[str]()
    found = list(of_shard_maps.find_whole_shard_maps(facts.block, facts.sizes, weights))
    for one in found:
        if one.line not in lines and one.whole[0].nbytes >= LEAST:
            lines.add(one.line)
            value = one.whole[0]
            others = f', and {len(one.whole) - 1} more' if len(one.whole) > 1 else ''
            why = f'gathers {type_str(value)}, laid out as {axes_str(value.axes)}{others}'
            yield _finding(facts, one, why)
    for mapped in find_mapped_functions(facts.block):
        for product, axis, border, e in _products_after(facts, mapped):
            divided = divide_shard_map(mapped, axis, border.inputs[0], e, facts.sizes)
            if divided is not None and divided.line not in lines:
                lines.add(divided.line)
                why = f'has a result of which the product at {product.line} uses a part on each'
                yield _finding(facts, divided, why)


def _finding(facts: ProgramFacts, one: WholeShardMap, why: str) -> Finding:
    mapped, size = one.mapped, facts.sizes[one.axis]
    made = mapped.made[0].outputs[0]
    called = f' (called at {mapped.called_at})' if mapped.called_at != one.line else ''
    return Finding(
        'warning',
        'whole shard_map',
        one.line,
        f'{one.which_spec(f"this shard_map{called}")} has {one.axis!r}, so it {why}, and the '
        f'{size} devices along {one.axis!r} compute the same {type_str(made)}: write '
        f'{one.what_to_write()}',
    )


def _products_after(
    facts: ProgramFacts, mapped: MappedFunction
) -> Iterator[tuple[Step, str, Step, int]]:
    """The products of a result of a shard_map that sum over a sharded dimension of a parameter.

    Yields:
      The product, the mesh axis, the end of the shard_map, and the number of the dimension of its
      result that the product sums over.
    """
    ends = {id(border) for border in mapped.made}
    for step, number, d, axis in split_sums(facts) if ends else ():
        other = step.inputs[1 - number]
        border = border_before(facts, other, axis)
        if border is None or id(border) not in ends or border.outputs[0].shape != other.shape:
            continue
        if mapped.uses(axis) or is_meant(facts, other, axis):
            continue
        factors = find_factors(step)
        summed = {*factors.inputs[number][d]} & factors.summed
        array = factors.inputs[1 - number]
        yield step, axis, border, next(e for e, dim in enumerate(array) if {*dim} & summed)
