"""The step-time model: exchanges timed by hand on known machines, and how a step adds up."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forecasts_by_hand import NOTHING
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from meshwright import Collective
from meshwright.jaxpr import trace_function
from meshwright.program.collectives import MeshAxes
from meshwright.time import KernelWork, Work, constants_of, describe_machine, estimate_step_time
from meshwright.time.domain import domain_of
from meshwright.time.layers import Layers, Product, describe_layers
from meshwright.time.loads import find_loads, links_of, time_exchange
from partitioning.hardware import CHIPS
from tests.partitioning.mock_devices import cpus, gpus, tpu_slices, tpus

GATHER = Collective(
    kind='all-gather',
    network='ici',
    axes=('data',),
    group_size=16,
    arrays=('bf16[1024]',),
    wire_bytes=15e9,  # 16 GB, of which a device has 1
    count=1,
    op_name='',
    source='',
)


def mesh_of(devices, **axes):
    grid = np.array(devices, dtype=object).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes))


def pod():
    """A whole v5e pod of 16 x 16; mock devices are numbered with x fastest."""
    return describe_machine(mesh_of(tpus((16, 16, 1), 'TPU v5 lite'), model=16, data=16))


def wide_pod():
    """A pod of v6e, whose matrix units have twice the side."""
    return describe_machine(mesh_of(tpus((16, 16, 1), 'TPU v6 lite'), model=16, data=16))


def seconds_of(collective, machine):
    return time_exchange(collective, links_of(collective, machine), machine)


def test_gather_over_a_closed_ring():
    """15 GB arrive over 2 links of 50 GB/s."""
    assert seconds_of(GATHER, pod()) == pytest.approx(15e9 / (2 * 50e9))


def test_gather_over_an_open_line():
    """v5e:8x8 closes no rings: all 7 shards reach the chips at the ends over one link."""
    machine = describe_machine(mesh_of(tpus((8, 8, 1), 'TPU v5 lite'), model=8, data=8))
    gather = dataclasses.replace(GATHER, group_size=8, wire_bytes=7e9)
    assert seconds_of(gather, machine) == pytest.approx(7e9 / 50e9)
    both = dataclasses.replace(GATHER, axes=('model', 'data'), group_size=64, wire_bytes=63e9)
    assert seconds_of(both, machine) == pytest.approx(63e9 / (2 * 50e9))


def test_gather_over_a_whole_cube():
    """v5p:4x4x4 closes three rings: six links of 100 GB/s."""
    machine = describe_machine(mesh_of(tpus((4, 4, 4), 'TPU v5'), data=64))
    gather = dataclasses.replace(GATHER, group_size=64, wire_bytes=63e9)
    assert seconds_of(gather, machine) == pytest.approx(63e9 / 600e9)


def test_part_of_a_dimension_is_an_open_line():
    """8 of the 16 chips along x, and two groups that share the links if they alternate."""
    devices = tpus((16, 16, 1), 'TPU v5 lite')
    gather = dataclasses.replace(GATHER, group_size=8, wire_bytes=7e9)
    near = describe_machine(mesh_of(devices, rest=16, half=2, data=8))
    assert seconds_of(gather, near) == pytest.approx(7e9 / 50e9)
    far = describe_machine(mesh_of(devices, rest=16, data=8, half=2))
    assert seconds_of(gather, far) == pytest.approx(7e9 / 50e9), 'a ring with half of each link'


def test_groups_that_are_a_part_of_an_axis_have_the_links_between_their_devices():
    """64 chips of v5p:4x4x4 in rounds: 16 chips of a plane close two rings, 4 of a line close one.

    Two neighbours on a line have one link, and so has a group whose devices nobody knows. Devices
    are numbered with x fastest: 0, 4, 8, ... have the same x.
    """
    machine = describe_machine(mesh_of(tpus((4, 4, 4), 'TPU v5'), data=64))

    def seconds(places, size):
        part = dataclasses.replace(GATHER, group_size=size, places=tuple(places), wire_bytes=6e9)
        return seconds_of(part, machine)

    assert seconds(range(0, 64, 4), 16) == pytest.approx(6e9 / (4 * 100e9))
    assert seconds(range(4), 4) == pytest.approx(6e9 / (2 * 100e9))
    assert seconds(range(2), 2) == pytest.approx(6e9 / 100e9)
    assert seconds((0, 1, 4, 5), 4) == pytest.approx(6e9 / (2 * 100e9)), 'an open square'
    assert seconds((), 16) == pytest.approx(6e9 / 100e9)


def test_places_of_groups_are_numbers_along_their_axes():
    """Device 2 * f + d is at place f along fsdp. A slice has half of fsdp, and its own numbers."""
    mesh = MeshAxes(sizes={'fsdp': 8, 'data': 2})
    every_second = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    assert mesh.places_of(every_second, ('fsdp',)) == (0, 2, 4, 6)
    assert mesh.places_of(((0, 2, 4, 6, 8, 10, 12, 14),), ('fsdp',)) == ()
    turned = MeshAxes(sizes={'fsdp': 8}, order=(7, 6, 5, 4, 3, 2, 1, 0))
    assert turned.places_of(((0, 1), (2, 3), (4, 5), (6, 7)), ('fsdp',)) == (7, 6)
    sliced = MeshAxes(sizes={'fsdp': 8, 'data': 2}, slices={'fsdp': 2})
    assert sliced.places_of(((0, 4), (1, 5), (2, 6), (3, 7)), ('fsdp',)) == (0, 2)
    assert sliced.places_of(((0, 2, 4, 6), (1, 3, 5, 7)), ('fsdp',)) == ()


def test_all_to_all_crosses_the_middle():
    """Each of 16 chips sends 15 GB: 16 x 16/4 GB cross the middle over 2 links each way."""
    exchange = dataclasses.replace(GATHER, kind='all-to-all')
    assert seconds_of(exchange, pod()) == pytest.approx(15e9 * 16 / (4 * 2 * 50e9))


def test_products_hide_what_is_sent_meanwhile():
    """30 ms over a link, with products of 20 ms at the peak rate, or of 40 ms, meanwhile."""
    permute = dataclasses.replace(GATHER, kind='collective-permute', wire_bytes=1.5e9, count=2)
    given = dataclasses.replace(
        constants_of(CHIPS['v5e']), hidden_share=0.5, exchange_latency=1.0, hop_latency=0.0
    )

    def exposed(milliseconds):
        meanwhile = dataclasses.replace(permute, flops_meanwhile=milliseconds * 197e9)
        work = dataclasses.replace(NOTHING, collectives=(meanwhile,))
        return estimate_step_time(work, pod(), given).seconds

    assert exposed(0) == pytest.approx(2 + 2 * 0.030 / 0.9 * 0.5)
    assert exposed(20) == pytest.approx(2 + 2 * (0.030 / 0.9 - 0.020) * 0.5)
    assert exposed(40) == pytest.approx(2 * (0.030 / 0.9 - 0.030) * 0.5), 'nor do they start late'


def test_permutes_use_one_link():
    permute = dataclasses.replace(GATHER, kind='collective-permute', wire_bytes=1e9)
    assert seconds_of(permute, pod()) == pytest.approx(1e9 / 50e9)


def test_permutes_in_opposite_directions_take_as_long_as_the_larger_one():
    """1.5 GB one way take 30 ms, and 1 GB the other way hide in them; products hide 20 ms."""
    sizes = (1.5e9, 1e9), (1e9, 1.5e9)
    pair = [
        dataclasses.replace(
            GATHER,
            kind='collective-permute',
            wire_bytes=sent,
            opposite_bytes=other,
            flops_meanwhile=0.020 * 197e12,
        )
        for sent, other in sizes
    ]
    work = dataclasses.replace(NOTHING, collectives=tuple(pair))
    (load,) = find_loads(work, pod()).exchanges
    assert load.seconds == pytest.approx(0.030)
    assert load.covered == pytest.approx(0.020)


def test_network_between_slices():
    """Two slices of v5e: 6.4 Tbit/s for 256 chips are 3.125 GB/s per chip."""
    devices = tpu_slices(2, (4, 4, 1), 'TPU v5 lite')
    machine = describe_machine(mesh_of(devices, slices=2, data=16))
    reduction = dataclasses.replace(
        GATHER, kind='all-reduce', network='dcn', axes=('slices',), group_size=2, wire_bytes=1e9
    )
    assert seconds_of(reduction, machine) == pytest.approx(1e9 / 3.125e9)
    assert machine.num_granules == 2


def test_network_between_gpu_hosts():
    """A ring over 2 hosts of 8 uses all 8 adapters of 50 GB/s, one over single GPUs only one."""
    machine = describe_machine(
        mesh_of(
            [dataclasses.replace(d, device_kind='NVIDIA H100 80GB HBM3') for d in gpus(8, 2)],
            hosts=2,
            data=8,
        )
    )
    inside = dataclasses.replace(GATHER, group_size=8, wire_bytes=9e9)
    assert seconds_of(inside, machine) == pytest.approx(9e9 / 450e9)
    over_all = dataclasses.replace(GATHER, axes=('hosts', 'data'), wire_bytes=8e9)
    assert seconds_of(over_all, machine) == pytest.approx(8e9 / 400e9)
    across = dataclasses.replace(GATHER, axes=('hosts',), group_size=2, wire_bytes=8e9)
    assert seconds_of(across, machine) == pytest.approx(8e9 / 50e9)


def work_of_seconds(seconds):
    """Products of a v5e that take so long."""
    efficiency = constants_of(CHIPS['v5e']).matmul_efficiency
    return dataclasses.replace(NOTHING, matmul_flops=197e12 * efficiency * seconds)


def test_steps_without_exchanges_take_their_products():
    """A pod of 256 chips has 64 hosts, and one slice: nobody waits for another slice."""
    assert estimate_step_time(work_of_seconds(1), pod()).seconds == pytest.approx(1)
    assert estimate_step_time(NOTHING, pod()).seconds == 0


def test_narrow_products_are_padded_to_matrix_units():
    """Rows stream in steps of 8; a unit of 128 has 192 columns twice, one of 256 once."""
    narrow = Product(rows=4096, summed=512, columns=192, flops=1.0, nbytes=0.0)
    assert narrow.padding(128) == pytest.approx(192 / 192), 'the columns can stream'
    assert narrow.padding(256) == 1
    tall = Product(rows=100, summed=64, columns=1000, flops=1.0, nbytes=0.0)
    # 104 x 128 x 1024, 128 x 64 x 1024 and 128 x 128 x 1000 of 100 x 64 x 1000.
    assert tall.padding(128) == pytest.approx(128 * 64 * 1024 / (100 * 64 * 1000))
    assert tall.padding(1) == 1


def test_the_time_of_products_has_their_padding_and_their_traffic():
    """197e12 operations on tiles that are three quarters full, and 819 GB of operands."""
    constants = constants_of(CHIPS['v5e'])
    product = Product(rows=96, summed=96, columns=96, flops=197e12, nbytes=819e9)
    layers = Layers(width=96, products=(product,))
    work = dataclasses.replace(NOTHING, matmul_flops=197e12, layers=layers)
    step = estimate_step_time(work, pod())
    padded = (128 * 128 * 96) / 96**3
    expected = padded / constants.matmul_efficiency + constants.product_traffic
    assert step.seconds == pytest.approx(expected)


def test_products_of_vectors_read_the_memory_and_fill_no_matrix_unit():
    """A hundredth of a second of operations, and a second of reading at the full bandwidth."""
    constants = constants_of(CHIPS['v5e'])
    product = Product(rows=4096, summed=1, columns=4096, flops=197e10, nbytes=819e9)
    layers = Layers(width=4096, products=(product,))
    work = dataclasses.replace(NOTHING, matmul_flops=197e10, layers=layers)
    expected = 0.01 / constants.matmul_efficiency + 1 / constants.memory_efficiency
    assert estimate_step_time(work, pod()).seconds == pytest.approx(expected)


def test_products_of_8_bits_run_at_the_rate_of_their_type():
    """v5e multiplies int8 at twice the rate of bfloat16, and has no unit for float8."""

    def seconds(dtype):
        product = Product(rows=1024, summed=1024, columns=1024, flops=197e12, nbytes=0, dtype=dtype)
        layers = Layers(width=1024, products=(product,))
        work = dataclasses.replace(NOTHING, matmul_flops=197e12, layers=layers)
        return estimate_step_time(work, pod()).seconds

    assert seconds('int8') == pytest.approx(seconds('') / 2)
    assert seconds('float8_e4m3fn') == seconds('')

    def multiply(x, y):
        return jax.lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type='int32')

    for lhs, found in ('int8', 'int8'), ('int16', ''):
        args = jax.ShapeDtypeStruct((64, 64), lhs), jax.ShapeDtypeStruct((64, 64), 'int8')
        mesh = jax.make_mesh((1,), ('data',), axis_types=(AxisType.Auto,))
        layers = describe_layers(trace_function(jax.jit(multiply), *args, mesh=mesh))
        (product,) = layers.products
        assert product.dtype == found and ('products of 8 bits' in layers.kinds) == bool(found)


def test_kernels_pad_heads_to_matrix_units():
    """Heads of 64 on v5e, and of 128 on v6e, fill half of a unit: they take twice as long."""
    for machine, width in (pod(), 64), (wide_pod(), 128):
        heads = KernelWork(name='flash', flops=1e14, nbytes=0.0, count=1, width=width)
        whole = dataclasses.replace(heads, flops=2e14, width=2 * width)
        times = [
            estimate_step_time(
                dataclasses.replace(NOTHING, chip=machine.chip.name, kernels=(one,)), machine
            ).seconds
            for one in (heads, whole)
        ]
        assert times[0] == pytest.approx(times[1])


def test_the_range_is_wider_outside_of_measured_steps():
    """Four doublings of the time, one of the width and one of the hosts, and convolutions."""
    domain, error = domain_of(CHIPS['v5e']), constants_of(CHIPS['v5e']).error
    inside = Layers(width=domain.width[0])
    near = estimate_step_time(dataclasses.replace(work_of_seconds(1), layers=inside), pod())
    assert near.high / near.seconds == pytest.approx(1 + error) and near.outside == ()
    narrow = Layers(width=domain.width[0] / 2, kinds=('convolutions',))
    work = dataclasses.replace(work_of_seconds(domain.busy[0] / 16), layers=narrow)
    hosts = int(2 * domain.hosts[1])
    far = estimate_step_time(work, dataclasses.replace(pod(), num_processes=hosts))
    wider = (1 + error) * math.exp((4 + 1 + 1 + 1) * domain.growth)
    assert far.high / far.seconds == pytest.approx(wider)
    assert far.seconds / far.low == pytest.approx(wider)
    assert len(far.outside) == 4
    texts = ' '.join(far.outside)
    for words in ('the step takes', f'{hosts:,} hosts', f'{narrow.width:,.0f}', 'convolutions'):
        assert words in texts


def test_the_domain_of_a_chip_without_rows_is_that_of_its_platform():
    assert domain_of(CHIPS['b200']).chips == ('h100',)
    assert {'v5e', 'v5p', 'v6e'} <= {*domain_of(CHIPS['v4']).chips}


def test_products_are_as_wide_as_their_smallest_size_on_a_device():
    """Products of (512, 256) by (256, 4096) in three layers, and one of (512, 256) by (256, 8)."""
    mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))

    def step(x, w, v):
        wide = jax.lax.scan(lambda c, one: (c + jnp.sum(x @ one), None), 0.0, w)[0]
        return wide + jnp.sum(x @ v)

    def layers(of_x, of_w):
        args = struct((512, 256), *of_x), struct((3, 256, 4096), None, *of_w), struct((256, 8))
        return describe_layers(trace_function(jax.jit(step), *args, mesh=mesh))

    assert layers((), ()) == Layers(width=256)
    assert layers((), ('model', None)).width == 64
    assert layers(('data',), (None, ('data', 'model'))).width == 256
    equal = [struct(shape) for shape in ((512, 256), (256, 4096), (512, 128), (128, 8192))]
    traced = trace_function(jax.jit(lambda x, w, y, v: (x @ w, y @ v)), *equal, mesh=mesh)
    assert describe_layers(traced).width == 256, 'the larger of two with half of the FLOPs each'
    image = jax.ShapeDtypeStruct((8, 32, 32, 16), 'float32')
    kernel = jax.ShapeDtypeStruct((3, 3, 16, 64), 'float32')

    def convolve(image, kernel):
        dims = ('NHWC', 'HWIO', 'NHWC')
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), 'SAME', dimension_numbers=dims)

    traced = trace_function(jax.jit(convolve), image, kernel, mesh=mesh)
    assert describe_layers(traced) == Layers(width=64, kinds=('convolutions',))


def test_every_exchange_has_a_latency_for_its_start_and_its_longest_way():
    """17 starts; the farthest chip of a closed ring of 16 is 8 links away."""
    constants = constants_of(CHIPS['v5e'])
    gathers = dataclasses.replace(GATHER, wire_bytes=0.0, count=17)
    work = dataclasses.replace(work_of_seconds(1), collectives=(gathers,))
    step = estimate_step_time(work, pod())
    latency = 17 * (constants.exchange_latency + 8 * constants.hop_latency)
    assert step.seconds == pytest.approx(1 + latency)


def test_constants_apply_to_the_parts_they_are_for():
    """Half of the peak rate doubles the time of products; a hidden exchange takes none."""
    given = dataclasses.replace(
        constants_of(CHIPS['v5e']), matmul_efficiency=0.5, hidden_share=1.0, exchange_latency=0.25
    )
    work = dataclasses.replace(NOTHING, matmul_flops=197e12, collectives=(GATHER,))
    step = estimate_step_time(work, pod(), given)
    parts = {part.name: part for part in step.parts}
    assert parts['matrix products'].exposed == pytest.approx(2.0)
    gather = parts['all-gather over data (ICI)']
    assert gather.exposed == 0 and gather.seconds > 0.1
    hops = 8 * given.hop_latency
    assert step.seconds == pytest.approx(2.25 + hops)
    sources = {c.name: c.source for c in step.constants}
    assert sources['matmul_efficiency'] == 'given by the caller'
    assert 'measured rows' in sources['kernel_efficiency']


def test_slices_wait_for_the_slowest():
    """The largest of 2, 4 and 8 normal numbers is 0.564, 1.029 and 1.424 above the mean."""
    work = dataclasses.replace(NOTHING, matmul_flops=1e16)
    given = dataclasses.replace(constants_of(CHIPS['v5e']), speed_spread=0.1)
    seconds = [
        estimate_step_time(
            work, mesh_of(tpu_slices(n, (4, 4, 1), 'TPU v5 lite'), data=16 * n), given
        ).seconds
        for n in (1, 2, 4, 8)
    ]
    for number, largest in zip(seconds[1:], (0.564, 1.029, 1.424), strict=True):
        assert number / seconds[0] == pytest.approx(1 + 0.1 * largest)


def test_rings_between_slices_have_a_latency_for_each_phase():
    """An all-reduce over 4 slices goes around twice, in 3 phases each; 5 of them have 30."""
    devices = tpu_slices(4, (4, 4, 1), 'TPU v5 lite')
    given = dataclasses.replace(
        constants_of(CHIPS['v5e']), speed_spread=0.0, exchange_latency=0.0, network_latency=0.01
    )
    reduce = dataclasses.replace(
        GATHER, kind='all-reduce', network='dcn', group_size=4, wire_bytes=0.0, count=5
    )
    work = dataclasses.replace(work_of_seconds(1), collectives=(reduce,))
    step = estimate_step_time(work, mesh_of(devices, data=64), given)
    assert step.seconds == pytest.approx(1 + 30 * 0.01)


def test_copies_to_the_host_hide_behind_computation():
    """A small share of them delays the computation; what takes longer than it is exposed."""
    constants = constants_of(CHIPS['v5e'])
    computing = dataclasses.replace(NOTHING, matmul_flops=197e12 * constants.matmul_efficiency)
    fits = dataclasses.replace(computing, host_bytes=0.9 * constants.host_bandwidth)
    longer = dataclasses.replace(computing, host_bytes=3 * constants.host_bandwidth)
    delay = constants.host_interference
    assert 0 < delay < 0.3
    assert estimate_step_time(computing, pod()).seconds == pytest.approx(1)
    assert estimate_step_time(fits, pod()).seconds == pytest.approx(1 + 0.9 * delay)
    assert estimate_step_time(longer, pod()).seconds == pytest.approx(3 + delay)


def test_unknown_chips_have_no_step_time():
    mesh = mesh_of(cpus(8, 1), data=8)
    assert estimate_step_time(NOTHING, mesh) is None


@pytest.mark.parametrize('chip', list(CHIPS))
def test_every_chip_has_constants_with_sources(chip):
    kind = CHIPS[chip].device_kind
    devices = tpus((4, 4, 1), kind) if CHIPS[chip].platform == 'tpu' else gpus(8, 2)
    devices = [dataclasses.replace(d, device_kind=kind) for d in devices]
    work = dataclasses.replace(NOTHING, chip=chip, matmul_flops=1e15)
    step = estimate_step_time(work, mesh_of(devices, data=16))
    assert step.low < step.seconds < step.high
    assert step.seconds > 1e15 / CHIPS[chip].peak_flops_per_device
    assert step.constants and all(constant.source for constant in step.constants)


works = st.builds(
    Work,
    origin=st.just('compiler'),
    chip=st.just('v5e'),
    matmul_flops=st.floats(0, 1e16),
    matmul_seconds=st.one_of(st.none(), st.floats(0, 10)),
    other_seconds=st.one_of(st.none(), st.floats(0, 10)),
    other_bytes=st.floats(0, 1e12),
    kernels=st.lists(
        st.builds(
            KernelWork,
            name=st.just('flash'),
            flops=st.floats(0, 1e15),
            nbytes=st.floats(0, 1e12),
            count=st.integers(1, 99),
        ),
        max_size=2,
    ).map(tuple),
    collectives=st.lists(
        st.builds(
            lambda kind, size, count: dataclasses.replace(
                GATHER, kind=kind, wire_bytes=size, count=count
            ),
            st.sampled_from(['all-gather', 'all-reduce', 'all-to-all', 'collective-permute']),
            st.floats(0, 1e10),
            st.integers(1, 99),
        ),
        max_size=3,
    ).map(tuple),
    host_bytes=st.floats(0, 1e11),
)


@given(work=works)
def test_parts_add_up(work):
    step = estimate_step_time(work, pod())
    assert sum(part.exposed for part in step.parts) == pytest.approx(step.seconds)
    assert all(0 <= part.exposed <= part.seconds * (1 + 1e-9) for part in step.parts)
    assert step.low < step.seconds < step.high or step.seconds == 0


@settings(max_examples=40)
@given(work=works, factor=st.floats(1, 10))
def test_more_work_is_never_faster(work, factor):
    least = estimate_step_time(work, pod()).seconds * (1 - 1e-9)
    for name in ('matmul_flops', 'other_bytes', 'host_bytes', 'matmul_seconds', 'other_seconds'):
        if (figure := getattr(work, name)) is not None:
            more = dataclasses.replace(work, **{name: figure * factor})
            assert estimate_step_time(more, pod()).seconds >= least
    longer = [dataclasses.replace(c, wire_bytes=c.wire_bytes * factor) for c in work.collectives]
    more = dataclasses.replace(work, collectives=tuple(longer))
    assert estimate_step_time(more, pod()).seconds >= least


@given(size=st.floats(1, 1e12), kind=st.sampled_from(['all-gather', 'all-reduce', 'all-to-all']))
def test_more_links_are_never_slower(size, kind):
    """The same 16 chips as an open square, as an open line, and as a closed ring."""
    collective = dataclasses.replace(GATHER, kind=kind, wire_bytes=size)
    square = mesh_of(tpus((4, 4, 1), 'TPU v5 lite'), data=16)
    line = mesh_of(tpus((16, 1, 1), 'TPU v5 lite'), data=16)
    closed = dataclasses.replace(describe_machine(line), wrap=(True, False, False))
    opened = dataclasses.replace(closed, wrap=(False, False, False))
    assert seconds_of(collective, closed) <= seconds_of(collective, opened)
    assert seconds_of(collective, describe_machine(square)) <= seconds_of(collective, opened)
