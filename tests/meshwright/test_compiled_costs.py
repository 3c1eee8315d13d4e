"""What compiled programs cost: collectives counted by hand, and what is hard about their texts."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright import MeshAxes, costs_of_text, mesh_axes, read_costs
from meshwright.program.collectives import axes_of_groups, parse_groups
from meshwright.program.costs import read_text
from partitioning.hardware import CHIPS

# Short programs as the compiler writes them for TPUs.
TEXTS = {path.stem: path.read_text() for path in Path(__file__).parent.glob('compiled_programs/*')}
AXES = MeshAxes(sizes={'data': 4, 'model': 2})


@pytest.fixture(scope='module')
def mesh():
    return Mesh(np.reshape(jax.devices(), (4, 2)), ('data', 'model'))


def moved(costs):
    """Each collective as (kind, axes, bytes per execution, executions)."""
    return [(c.kind, c.axes, c.wire_bytes, c.count) for c in costs.collectives]


def test_products_between_the_start_and_the_end_of_a_permute():
    """A loop of 3 iterations, in which a product of 64 x 32 x 16 runs while its part is sent."""
    (before, after) = costs_of_text(TEXTS['windowed_product'], mesh=AXES).collectives
    assert (before.kind, before.count, before.asynchronous) == ('collective-permute', 3, True)
    assert before.flops_meanwhile == pytest.approx(2 * 64 * 32 * 16)
    assert after.flops_meanwhile == 0, 'it ends before the next product'


def test_permutes_in_opposite_directions_are_pairs_while_both_run():
    """A ring of 4: two parts go both ways, and a third one starts when both have arrived."""
    costs = costs_of_text(TEXTS['both_ways'], mesh=MeshAxes(sizes={'model': 4}))
    assert [(c.wire_bytes, c.opposite_bytes) for c in costs.collectives] == [
        (64 * 32 * 2, 32 * 32 * 2),
        (32 * 32 * 2, 64 * 32 * 2),
        (64 * 32 * 2, 0),
    ]
    assert [c.share_of_pair for c in costs.collectives] == pytest.approx([2 / 3, 1 / 3, 1])


def test_collectives_of_a_shard_map(mesh):
    """All of them have channel 1. A device holds 16 x 32 floats, 2,048 bytes, of 64 x 64."""

    def exchange(x):
        shard = jax.lax.psum_scatter(x, 'data', tiled=True)  # 4 x 32
        rows = jax.lax.all_gather(shard, 'model', tiled=True)  # 8 x 32
        turned = jax.lax.all_to_all(rows, 'data', 0, 1, tiled=True)  # 2 x 128
        passed = jax.lax.ppermute(turned, 'model', [(0, 1), (1, 0)])
        return jax.lax.psum(passed, ('data', 'model'))

    spec = PartitionSpec('data', 'model')
    step = jax.shard_map(
        exchange, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
    )
    costs = read_costs(jax.jit(step).lower(jnp.zeros((64, 64))).compile(), mesh)
    assert moved(costs) == [
        ('reduce-scatter', ('data',), 2048 * 3 / 4, 1),
        ('all-gather', ('model',), 4 * 32 * 4, 1),
        ('all-to-all', ('data',), 8 * 32 * 4 * 3 / 4, 1),
        ('collective-permute', ('model',), 2 * 128 * 4, 1),
        ('all-reduce', ('data', 'model'), 2 * 2 * 128 * 4 * 7 / 8, 1),
    ]
    assert costs.collectives[0].arrays == ('f32[16,32]',)
    assert costs.collectives[-1].op_name.endswith('psum')
    assert 'test_compiled_costs.py:' in costs.collectives[-1].source
    assert costs.wire_bytes() == 1536 + 512 + 768 + 1024 + 1792
    assert costs.wire_table()['ici', ('model',), 'all-gather'] == 512
    assert costs.cycles == 0 and costs.compute_seconds is None, 'the compiler of CPUs has none'
    assert costs.memory.arguments == 2048


def test_gradients_of_a_loop_over_layers(mesh):
    """6 layers: weights over data are gathered, and the gradient of the bias is reduced once."""
    rows, whole = PartitionSpec('data'), PartitionSpec()
    lay_out = functools.partial(NamedSharding, mesh)

    def loss(weights, bias, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
        return jnp.sum(x * bias)

    shapes = ((6, 32, 32), PartitionSpec(None, 'data')), ((32,), whole), ((16, 32), rows)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=lay_out(spec)) for shape, spec in shapes
    ]
    gradient = jax.jit(jax.grad(loss, 1), out_shardings=lay_out(whole))
    costs = read_costs(gradient.lower(*arguments).compile(), mesh)
    gathers = [c for c in costs.collectives if c.kind == 'all-gather']
    assert sum(c.total_bytes for c in gathers) == 6 * 32 * 32 * 4 * 3 / 4
    assert {(c.axes, c.count) for c in gathers} == {(('data',), 6)}
    assert [(c.axes, c.total_bytes) for c in costs.collectives if c.kind == 'all-reduce'] == [
        (('data',), 2 * 32 * 4 * 3 / 4)
    ]


def test_arrays_at_the_peak(mesh):
    """The sizes equal jax's memory analysis."""

    def step(weights, x):
        def layer(x, w):
            return jnp.sin(x @ w), x  # the inputs of the 6 layers are kept

        x, kept = jax.lax.scan(layer, x, weights)
        return jnp.sum(kept) + jnp.sum(x)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, 64, 64), (32, 64))]
    compiled = jax.jit(step).lower(*shapes).compile()
    costs = read_costs(compiled, mesh)
    sizes = compiled.memory_analysis()
    assert costs.at_peak.arguments == sizes.argument_size_in_bytes == (6 * 64 + 32) * 64 * 4
    largest = costs.at_peak.arrays[0]
    assert (largest.array, largest.nbytes) == ('f32[6,32,64]', 6 * 32 * 64 * 4)
    assert 'test_compiled_costs.py:' in largest.source
    assert costs.at_peak.nbytes == pytest.approx(costs.memory.peak, rel=0.1)


def test_tiles_are_padded():
    text = TEXTS['scatter'].replace('S(1)', '')  # in the device's main memory
    (kernel,) = [a for a in costs_of_text(text).at_peak.arrays if a.array == 'bf16[60,128]']
    assert kernel.nbytes == 64 * 128 * 2
    assert not [a for a in costs_of_text(TEXTS['scatter']).at_peak.arrays if '60' in a.array]


def test_an_asynchronous_gather_counts_once_per_iteration():
    """Two gathers in a loop of 16, both with the channel of shard_map, 1.

    Each stands in the fusion that starts it, in those that overlap with it, or in the one that ends
    it.
    """
    costs = costs_of_text(TEXTS['gathers'], mesh=AXES, chip='v5p')
    assert moved(costs) == [
        ('all-gather', ('data',), 128 * 16 * 2 * 3, 16),
        ('all-gather', ('model',), 32 * 4, 16),
    ]
    assert all(c.asynchronous for c in costs.collectives)
    assert costs.collectives[0].source == 'source/model.py:24'
    assert costs.cycles == 16 * 1000 + 500
    assert costs.compute_seconds == pytest.approx(16_500 / 1.75e9)
    matmul, add = costs.operations
    assert (matmul.kind, matmul.cycles, matmul.count) == ('matmul', 16_000, 16)
    assert matmul.source == 'source/model.py:24'
    assert (add.kind, add.op_name) == ('elementwise', 'jit(step)/add')


def test_computations_of_other_cores_have_their_own_end():
    """Programs for v5p and tpu7x have computations that their SparseCores run."""
    text = TEXTS['gathers']
    others = text.replace('\n}\n', '\n}, execution_thread="sparsecore"\n', 2)
    assert others != text
    assert costs_of_text(others, mesh=AXES, chip='v5p') == costs_of_text(
        text, mesh=AXES, chip='v5p'
    )


def test_a_reduce_scatter_is_a_fusion_and_its_padding_does_not_count():
    """60 rows are padded to 64 for 8 devices. The attributes of a kernel span several lines."""
    costs = costs_of_text(TEXTS['scatter'], mesh=AXES, chip='v5p')
    assert moved(costs) == [('reduce-scatter', ('data', 'model'), 60 * 128 * 2 * 7 / 8, 1)]
    assert costs.collectives[0].source == 'model.py:3'
    assert not costs.collectives[0].asynchronous
    assert [(k.name, k.count) for k in costs.kernels] == [('splash_mha', 1)]
    assert costs.compute_seconds is None


def test_the_network_between_slices_is_counted_apart():
    """2 slices of 4 chips; the program numbers the devices of its slice."""
    axes = MeshAxes(sizes={'data': 4, 'model': 2}, slices={'data': 2})
    costs = costs_of_text(TEXTS['slices'], mesh=axes)
    dcn, ici = costs.collectives
    assert dcn.asynchronous and not ici.asynchronous
    assert (dcn.kind, dcn.network, dcn.axes, dcn.group_size) == ('all-reduce', 'dcn', ('data',), 2)
    assert costs.wire_bytes('dcn') == 2 * 64 * 128 * 2 / 2
    assert (ici.axes, costs.wire_bytes()) == (('data',), 64 * 128 * 2)


@pytest.mark.parametrize(
    ('attributes', 'groups', 'axes'),
    [
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}, x=1", ((0, 2, 4, 6), (1, 3, 5, 7)), 'a'),
        ("replica_groups=mesh['a'=4,'b'=2] {'a','b'}", (tuple(range(8)),), 'ab'),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7)), 'a'),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7)), 'a'),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0)), 'b'),
        (
            "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
            'a',
        ),
        ('replica_groups=[4,2]<=[8], x=1', ((0, 1), (2, 3), (4, 5), (6, 7)), 'b'),
        ('replica_groups=[2,4]<=[4,2]T(1,0)', ((0, 2, 4, 6), (1, 3, 5, 7)), 'a'),
        ('replica_groups={{0,1,4,5},{2,3,6,7}}, x=1', ((0, 1, 4, 5), (2, 3, 6, 7)), 'ab'),
        ('source_target_pairs={{0,2},{2,4},{4,6},{6,0}}', ((0, 2), (2, 4), (4, 6), (6, 0)), 'a'),
        ('replica_groups={}, x=1', (tuple(range(8)),), 'ab'),
    ],
)
def test_groups_in_every_format(attributes, groups, axes):
    found = parse_groups(attributes, 8)
    assert found == groups
    assert ''.join(axes_of_groups(found, {'a': 4, 'b': 2})) == axes


def test_axes_over_slices(mesh):
    assert mesh_axes(mesh) == AXES, 'no slices on CPUs'


def test_clocks_make_up_the_published_peaks():
    """Whole matrix units of 128 x 128 or 256 x 256 multiply-adds per cycle."""
    for chip in CHIPS.values():
        if chip.platform == 'tpu':
            side = 256 if chip.name in ('v6e', 'tpu7x') else 128
            units = chip.peak_flops / (2 * side**2 * chip.clock_hz)
            assert units == pytest.approx(round(units), rel=0.01) and round(units) >= 2
        else:
            assert chip.clock_hz is None


def test_other_texts_are_refused():
    with pytest.raises(ValueError, match=r'ENTRY.*compiled\.as_text'):
        costs_of_text('module @jit_f { }')


def test_a_program_that_jaxlib_cannot_read_is_an_error_in_one_line():
    """As a newer libtpu writes it. jaxlib 0.10.2 with libtpu 0.0.52 wrote the text."""

    class Compiled:
        def as_text(self):
            raise jax.errors.JaxRuntimeError(
                'INTERNAL: RET_CHECK failure (hlo_instruction.cc:390) async-update instruction '
                'should have 1 operands but sees 3\n*** Begin stack trace ***'
            )

    with pytest.raises(ValueError, match=r'newer jax and jaxlib.* but sees 3\)$'):
        read_text(Compiled())
