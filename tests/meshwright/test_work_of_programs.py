"""What a device has to do in a compiled program: bytes in memories, kernels, and estimates."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.sharding import Mesh, PartitionSpec as P

from meshwright import costs_of_text
from meshwright.time import find_kernel_work, read_work
from partitioning.products.flops import count_jaxpr_flops

# The layers of a loop of 3 store their inputs in the memory of the host, space 5.
PROGRAM = """HloModule jit_step, is_scheduled=true

%square (p.1: f32[8,128]) -> f32[8,128] {
  %p.1 = f32[8,128]{1,0} parameter(0)
  ROOT %multiply.1 = f32[8,128]{1,0} multiply(%p.1, %p.1)
}

%slice_of_one (p.2: f32[16,128], p.3: s32[]) -> f32[1,128] {
  %p.2 = f32[16,128]{1,0} parameter(0)
  %p.3 = s32[] parameter(1)
  ROOT %dynamic-slice.1 = f32[1,128]{1,0} dynamic-slice(%p.2, %p.3, %p.3), dynamic_slice_sizes={1,128}
}

%change_of_one (p.4: f32[16,128], p.5: f32[1,128], p.6: s32[]) -> f32[16,128] {
  %p.4 = f32[16,128]{1,0} parameter(0)
  %p.5 = f32[1,128]{1,0} parameter(1)
  %p.6 = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = f32[16,128]{1,0} dynamic-update-slice(%p.4, %p.5, %p.6, %p.6)
}

%body (b: (s32[], f32[8,128], f32[3,8,128])) -> (s32[], f32[8,128], f32[3,8,128]) {
  %b = (s32[], f32[8,128]{1,0}, f32[3,8,128]{2,1,0:S(5)}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[8,128]{1,0} get-tuple-element(%b), index=1
  %kept = f32[3,8,128]{2,1,0:S(5)} get-tuple-element(%b), index=2
  %row = f32[1,8,128]{2,1,0} bitcast(%x)
  %keep = ((f32[3,8,128]{2,1,0:S(5)}, f32[1,8,128]{2,1,0}, s32[]), f32[3,8,128]{2,1,0:S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%kept, %row, %i, %i, %i)
  %new = f32[8,128]{1,0} fusion(%x), kind=kLoop, calls=%square, backend_config={"window_config":{"estimated_cycles":"100"}}
  %done = f32[3,8,128]{2,1,0:S(5)} dynamic-update-slice-done(%keep)
  ROOT %t = (s32[], f32[8,128]{1,0}, f32[3,8,128]{2,1,0:S(5)}) tuple(%i, %new, %done)
}

%condition (c: (s32[], f32[8,128], f32[3,8,128])) -> pred[] {
  %three = s32[] constant(3)
  %c = (s32[], f32[8,128]{1,0}, f32[3,8,128]{2,1,0:S(5)}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%n, %three), direction=LT
}

ENTRY %main (a: (s32[], f32[8,128], f32[3,8,128]), w: f32[16,128], j: s32[]) -> f32[16,128] {
  %a = (s32[], f32[8,128]{1,0}, f32[3,8,128]{2,1,0:S(5)}) parameter(0)
  %w = f32[16,128]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %loop = (s32[], f32[8,128]{1,0}, f32[3,8,128]{2,1,0:S(5)}) while(%a), condition=%condition, body=%body
  %all = f32[3,8,128]{2,1,0:S(5)} get-tuple-element(%loop), index=2
  %back = (f32[3,8,128]{2,1,0}, f32[3,8,128]{2,1,0:S(5)}, u32[]{:S(2)}) copy-start(%all)
  %here = f32[3,8,128]{2,1,0} copy-done(%back)
  %x.1 = f32[8,128]{1,0} get-tuple-element(%loop), index=1
  %product = f32[8,8]{1,0} dot(%x.1, %x.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}, backend_config={"window_config":{"estimated_cycles":"700"}}
  %one = f32[1,128]{1,0} fusion(%w, %j), kind=kLoop, calls=%slice_of_one
  ROOT %changed = f32[16,128]{1,0} fusion(%w, %one, %j), kind=kLoop, calls=%change_of_one
}
"""  # noqa: E501


def small_jaxpr():
    return jax.make_jaxpr(lambda x: x @ x.T)(jnp.zeros((8, 128)))


def test_bytes_in_memories():
    costs = costs_of_text(PROGRAM, chip='v5p')
    row = 128 * 4
    # 3 times: 8 rows read and 8 written. A slice of a row read and written; a row read and changed.
    # The row numbers of 4 bytes are read as well: once by each fusion.
    assert costs.device_bytes - (3 * 16 * row + 2 * row + 2 * row) == 4 + 4
    # 3 rows of 8 are stored, one by one, and read at once.
    assert costs.host_bytes == 2 * 3 * 8 * row


def test_dumps_write_elements_of_tuples_after_their_names():
    """As in `%loop#1`; a dump has no get-tuple-element, and the same bytes and cycles."""
    elements: dict[str, str] = {}
    lines = []
    for line in PROGRAM.splitlines():
        if found := re.search(r'%(\S+) = .* get-tuple-element\((%\S+)\), index=(\d)', line):
            elements[found[1]] = f'{found[2]}#{found[3]}'
            continue
        names = re.sub(r'%([\w.]+)(?=[,)])', lambda m: elements.get(m[1], m[0]), line)
        lines.append(names)
    text = '\n'.join(lines) + '\n'
    assert 'dot(%loop#1, %loop#1)' in text and 'get-tuple-element' not in text
    dumped, usual = costs_of_text(text, chip='v5p'), costs_of_text(PROGRAM, chip='v5p')
    for name in ('device_bytes', 'host_bytes', 'cycles'):
        assert getattr(dumped, name) == getattr(usual, name) != 0


def test_copies_to_the_host_may_be_computations_of_their_own():
    """A row of 3 is stored by a computation that `async-start` calls: the row counts, once."""
    start = '%keep = ((f32[3,8,128]{2,1,0:S(5)}, f32[1,8,128]{2,1,0}, s32[])'
    inside = """
%store (p.7: f32[3,8,128], p.8: f32[1,8,128], p.9: s32[]) -> f32[3,8,128] {
  %p.7 = f32[3,8,128]{2,1,0:S(5)} parameter(0)
  %p.8 = f32[1,8,128]{2,1,0} parameter(1)
  %p.9 = s32[] parameter(2)
  ROOT %stored = f32[3,8,128]{2,1,0:S(5)} dynamic-update-slice(%p.7, %p.8, %p.9, %p.9, %p.9)
}

%body (b:"""
    text = PROGRAM.replace('\n%body (b:', inside)
    text = text.replace(
        'dynamic-update-slice-start(%kept, %row, %i, %i, %i)',
        'async-start(%kept, %row, %i), calls=%store',
    ).replace('dynamic-update-slice-done(%keep)', 'async-done(%keep), calls=%store')
    assert start in text and text.count('calls=%store') == 2
    usual = costs_of_text(PROGRAM, chip='v5p')
    assert costs_of_text(text, chip='v5p').host_bytes == usual.host_bytes == 2 * 3 * 8 * 128 * 4


def test_work_of_a_program():
    costs = costs_of_text(PROGRAM, chip='v5p')
    work = read_work(costs, small_jaxpr(), num_devices=2)
    assert work.matmul_seconds == pytest.approx(700 / 1.75e9)
    assert work.other_seconds == pytest.approx(300 / 1.75e9)
    assert work.matmul_flops == 2 * 8 * 8 * 128 / 2
    assert (work.host_bytes, work.other_bytes) == (costs.host_bytes, costs.device_bytes)
    assert (work.kernels, work.collectives) == ((), ())


def test_programs_without_estimates():
    text = PROGRAM.replace('estimated_cycles', 'other')
    work = read_work(costs_of_text(text, chip='h100'), small_jaxpr(), num_devices=1)
    assert work.matmul_seconds is None and work.other_seconds is None


def test_programs_for_unknown_chips_are_refused():
    with pytest.raises(ValueError, match=r'without data.*v5e, v5p'):
        read_work(costs_of_text(PROGRAM), small_jaxpr(), num_devices=1)


def test_masked_blocks_of_splash_attention_do_not_count():
    """4 heads, 1,024 positions in blocks of 512: 3 of 4 blocks have a position that is seen."""
    heads, length, size, layers = 4, 1024, 128, 5
    mask = splash_attention_mask.MultiHeadMask(
        [splash_attention_mask.CausalMask((length, length))] * heads
    )
    blocks = splash_attention_kernel.BlockSizes(
        block_q=512,
        block_kv=512,
        block_q_dkv=512,
        block_kv_dkv=512,
        block_q_dq=512,
        block_kv_dq=512,
    )
    kernel = splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=blocks)

    def loss(q, k, v):
        def layer(x, _):
            return kernel(x, k, v), None

        return jnp.sum(jax.lax.scan(layer, q, None, length=layers)[0].astype(jnp.float32))

    array = jax.ShapeDtypeStruct((heads, length, size), jnp.bfloat16)
    works = find_kernel_work(jax.make_jaxpr(jax.grad(loss))(array, array, array))
    product = 2 * heads * length * length * size * layers
    by_name = {work.name: work for work in works}
    forward, dkv, dq = (
        by_name[f'splash_mha_{name}_residuals'] for name in ('fwd', 'dkv_no', 'dq_no')
    )
    assert forward.flops == 2 * product * 3 / 4
    assert dkv.flops == 4 * product * 3 / 4
    assert dq.flops == 3 * product * 3 / 4
    assert forward.count == dkv.count == dq.count == layers


def test_blocks_of_attention_take_one_of_two_paths():
    """The only list has the kinds of 4 blocks of 64 x 64: in part, whole, skipped, in part."""

    def attend(kinds, x_ref, o_ref):
        kind = kinds[pl.program_id(0)]

        def multiply():
            o_ref[...] = x_ref[...] @ x_ref[...]

        pl.when((kind != 1) & (kind != 0))(multiply)
        pl.when((kind == 1) & (kind != 0))(multiply)

    def run(blocks, kinds, x):
        spec = pl.BlockSpec((64, 64), lambda i, kinds: (kinds[i], 0))
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(blocks,), in_specs=[spec], out_specs=spec
        )
        return pl.pallas_call(attend, grid_spec=grid, out_shape=x, name='splash_mha')(kinds, x)

    x = jnp.zeros((256, 64))
    (work,) = find_kernel_work(jax.make_jaxpr(lambda x: run(4, jnp.asarray([1, 2, 0, 1]), x))(x))
    assert work.flops == 3 * 2 * 64**3
    needed = jax.make_jaxpr(run)(jnp.int32(3), jnp.asarray([1, 2, 1]), x)
    assert [work.flops for work in find_kernel_work(needed)] == [3 * 2 * 64**3], 'all in its list'


def test_other_kernels_count_their_whole_grid():
    def multiply(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...])

    def run(x, y):
        return pl.pallas_call(
            multiply,
            grid=(4,),
            in_specs=[
                pl.BlockSpec((64, 128), lambda i: (i, 0)),
                pl.BlockSpec((128, 32), lambda i: (0, 0)),
            ],
            out_specs=pl.BlockSpec((64, 32), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((256, 32), jnp.float32),
        )(x, y)

    jaxpr = jax.make_jaxpr(run)(np.zeros((256, 128), np.float32), np.zeros((128, 32), np.float32))
    (work,) = find_kernel_work(jaxpr)
    assert work.flops == 2 * 256 * 128 * 32
    assert work.nbytes == 4 * (256 * 128 + 128 * 32 + 256 * 32)
    assert count_jaxpr_flops(jaxpr.jaxpr) == work.flops
    assert count_jaxpr_flops(jaxpr.jaxpr, kernels=False) == 0


def test_products_of_groups_of_rows_count_the_blocks_that_they_can_need():
    """1,024 rows of 4 groups in blocks of 128: each of 3 borders can cut a block in two."""
    rows, summed, columns, groups, tile = 1024, 512, 256, 4, 128

    def run(x, y, sizes):
        return gmm(x, y, sizes, jnp.float32, tiling=(tile, tile, tile))

    shapes = (rows, summed), (groups, summed, columns)
    x, y = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    jaxpr = jax.make_jaxpr(run)(x, y, jax.ShapeDtypeStruct((groups,), jnp.int32))
    (work,) = find_kernel_work(jaxpr)
    assert work.flops == 2 * (rows + (groups - 1) * tile) * summed * columns
    assert count_jaxpr_flops(jaxpr.jaxpr) == work.flops


def test_kernels_without_a_grid_do_what_they_state():
    """Such a kernel loops over its blocks by itself, as often as nobody else knows."""

    def run(x, stated):
        return pl.pallas_call(
            lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] @ x_ref[...]),
            out_shape=jax.ShapeDtypeStruct((16, 16), jnp.float32),
            cost_estimate=stated and pl.CostEstimate(stated, bytes_accessed=0, transcendentals=0),
        )(x)

    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    found = [
        find_kernel_work(jax.make_jaxpr(lambda x, n=n: run(x, n))(x)) for n in (10**6, 1, None)
    ]
    assert [work.flops for (work,) in found] == [1e6, 2 * 16**3, 2 * 16**3]


def test_grids_of_a_length_that_the_program_computes():
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] @ x_ref[...]

    def run(count, x):
        return pl.pallas_call(
            double,
            grid=(count, 2),
            in_specs=[pl.BlockSpec((16, 16), lambda i, j: (i, j))],
            out_specs=pl.BlockSpec((16, 16), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((96, 32), jnp.float32),
        )(x)

    x, one = jax.ShapeDtypeStruct((96, 32), jnp.float32), 2 * 16**3
    (unknown,) = find_kernel_work(jax.make_jaxpr(run)(jax.ShapeDtypeStruct((), jnp.int32), x))
    (known,) = find_kernel_work(jax.make_jaxpr(lambda x: run(jnp.asarray([7, 3])[1], x))(x))
    assert unknown.flops == 6 * 2 * one  # as many as the array has
    assert known.flops == 3 * 2 * one


def test_attention_by_cudnn(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo  # it asks for a cuDNN that is installed

    monkeypatch.setattr(fused_attention_stablehlo, 'check_cudnn_version', lambda: 91300)

    def loss(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation='cudnn')
        return jnp.sum(out.astype(jnp.float32))

    grad = jax.grad(loss, (0, 1, 2))
    q, k = (jax.ShapeDtypeStruct((2, 512, n, 64), jnp.bfloat16) for n in (8, 2))
    product = 2 * 2 * 8 * 512 * 512 * 64 / 2  # half of the positions are seen
    whole = find_kernel_work(jax.make_jaxpr(grad)(q, k, k))
    assert [work.flops for work in whole] == [2 * product, 5 * product]
    # jax gives each of 2 devices one of the 2 examples, as a shard_map does.
    shared = find_kernel_work(jax.make_jaxpr(grad)(q, k, k), num_devices=2)
    rows = P('data')
    mesh = Mesh(jax.devices()[:2], ('data',))
    local = jax.shard_map(grad, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    mapped = find_kernel_work(jax.make_jaxpr(local)(q, k, k), num_devices=2)
    assert [(work.flops, work.nbytes) for work in shared] == [
        (work.flops, work.nbytes) for work in mapped
    ]
    assert [work.flops for work in mapped] == [product, 2.5 * product]


def test_layers_that_choose_between_kernels_count_what_they_run():
    """Of 6 layers, every third multiplies 64 rows, and the others 16."""

    def multiply(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...].T)

    def kernel(size):
        rows = pl.BlockSpec((size, size), lambda: (0, 0))
        shape = jax.ShapeDtypeStruct((size, size), jnp.float32)
        return pl.pallas_call(multiply, in_specs=[rows], out_specs=rows, out_shape=shape)

    def run(x):
        def layer(total, index):
            large = (index + 1) % 3 == 0
            wide, narrow = (lambda size=size: kernel(size)(x[:size, :size]) for size in (64, 16))
            return total + jax.lax.cond(large, lambda: wide().sum(), lambda: narrow().sum()), None

        return jax.lax.scan(layer, 0.0, jnp.arange(6))[0]

    (work,) = find_kernel_work(jax.make_jaxpr(run)(np.zeros((64, 64), np.float32)))
    assert work.flops == 2 * (2 * 64**3) + 4 * (2 * 16**3)
    assert work.nbytes == 4 * (2 * (2 * 64**2) + 4 * (2 * 16**2))
    assert work.count == 6
