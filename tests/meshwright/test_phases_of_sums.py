"""A sum over devices that a compiler writes in two phases has one cause."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.causes import describe_arguments, explain_program
from meshwright.program.costs import costs_of_text, mesh_axes

ROWS, WIDTH, HIDDEN = 32, 64, 256
HELD = f'f32[{HIDDEN},{WIDTH}]'  # XLA transposes the gradient


def compile_step():
    """Gradients summed over 8 devices of 'data': of 'up', and of 'half', which is half as large."""
    mesh = Mesh(np.array(jax.devices()), ('data',))
    rows = NamedSharding(mesh, PartitionSpec('data'))

    def step(params, x):
        def loss(params):
            up, half = x @ params['up'], x @ params['half']
            return jnp.mean(jnp.tanh(up) ** 2) + jnp.mean(jnp.tanh(half) ** 2)

        gradient = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradient)

    params = {
        name: jax.ShapeDtypeStruct((WIDTH, columns), jnp.float32)
        for name, columns in (('half', HIDDEN // 2), ('up', HIDDEN))
    }
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    whole = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(step, in_shardings=(whole, rows), out_shardings=whole, donate_argnums=0)
    traced = jitted.trace(params, x)
    return mesh, traced, traced.lower().compile()


def in_phases(text):
    """The sum as a reduce-scatter among pairs of devices, an all-reduce, and an all-gather."""
    line = next(one for one in text.splitlines() if ' all-reduce(' in one and HELD in one)
    name = re.search(r'%([\w.\-]+) = ', line)[1]
    types = re.findall(r'f32\[[\d,]+\]', line.partition(' all-reduce(')[0])
    operands = re.search(r'all-reduce\(([^)]*)\)', line)[1].split(', ')
    operand = operands[types.index(HELD)]
    rest = line[line.index('to_apply') :]
    half = f'f32[{HIDDEN // 2},{WIDTH}]{{1,0}}'
    pairs, fours = '{{0,1},{2,3},{4,5},{6,7}}', '{{0,2,4,6},{1,3,5,7}}'
    metadata = rest.partition('metadata')[2]
    lines = [
        f'  %first = {half} reduce-scatter({operand}), replica_groups={pairs}, dimensions={{0}}, '
        + rest,
        f'  %second = {half} all-reduce(%first), replica_groups={fours}, ' + rest,
        f'  %{name} = {HELD}{{1,0}} all-gather(%second), replica_groups={pairs}, '
        f'dimensions={{0}}, metadata{metadata}',
    ]
    return text.replace(line, '\n'.join(lines))


def test_the_second_phase_of_a_sum_has_the_cause_of_the_first():
    mesh, traced, compiled = compile_step()
    text = in_phases(compiled.as_text())
    costs = costs_of_text(text, mesh=mesh_axes(mesh))
    rows = describe_arguments(traced, compiled)
    explained = explain_program(text, traced.jaxpr, costs, mesh=mesh, rows=rows)
    found = {c.instruction: (c, cause) for c, cause in explained.collectives}
    (first, one), (second, other) = found['first'], found['second']
    assert one == other and one.array == 'the gradient of params/up'
    # A device of a pair sends half of its operand; among four, 2 * 3/4 of the rest.
    size = 4 * WIDTH * HIDDEN
    assert first.total_bytes == size / 2 and second.total_bytes == 2 * 3 / 4 * size / 2
