"""Forecasts for described machines, by the compilers of TPUs and GPUs."""

import jax
import jax.numpy as jnp
import pytest
from described_machines import needs_cuda_plugin, needs_libtpu
from forecast_programs import BATCH, HIDDEN, PRODUCT, ROWS, WIDTH, partitioned
from jax.sharding import NamedSharding, PartitionSpec as P

from meshwright import forecast, forecast_table
from partitioning import MeshConfig, PjitPartitioner


@pytest.fixture(scope='module')
def program():
    return partitioned({'data': 4, 'model': 2})


@pytest.fixture(
    scope='module',
    params=[
        pytest.param('v5litepod-8', marks=needs_libtpu),
        pytest.param('a3-highgpu-8g', marks=needs_cuda_plugin),
    ],
)
def described(request, program):
    _, step, state = program
    with pytest.MonkeyPatch.context() as patch:  # the fixture of each test comes later
        patch.delenv('XLA_FLAGS', raising=False)
        return forecast(step, state, BATCH, 3, topology=request.param)


def test_a_step_on_a_described_machine(described):
    memory, on_tpu = described.memory, described.back_end == 'tpu'
    assert described.topology == ('v5e:2x4' if on_tpu else 'h100:1x8')
    assert described.back_end_version.startswith('libtpu 0' if on_tpu else 'jax-cuda')
    assert memory.parameters == 2 * 4 * WIDTH * HIDDEN // 8 + 4 * WIDTH
    assert memory.arguments == 2 * memory.parameters + 4 * ROWS * WIDTH // 4 + 4
    assert memory.peak >= memory.arguments and described.fits
    assert described.model_flops == 6 * PRODUCT / 8
    assert described.time.low < described.time.seconds < described.time.high
    assert 0 < described.mfu < 1
    assert {ring.network for ring in described.rings} == {'ICI' if on_tpu else 'NVLink'}
    sent = {(c.kind, c.axes) for c, _ in described.collectives}
    assert {axes for _, axes in sent} >= {('data',), ('model',)}
    assert ('NVLink)' in forecast_table([described])) is not on_tpu


@pytest.mark.parametrize(
    'topology',
    [
        pytest.param('v5e:2x4', marks=needs_libtpu),
        pytest.param('h100:1x8', marks=needs_cuda_plugin),
    ],
)
def test_out_of_memory_is_an_answer(program, topology):
    """Each device has a quarter of the rows, and their hidden layer is as large as they are."""
    _, step, state = program
    rows = 2**26 if topology.startswith('v5e') else 2**28
    batch = {'x': jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)}
    made = forecast(step, state, batch, 3, topology=topology)
    memory = made.memory
    assert made.fits is False
    assert memory.peak > memory.limit > 0 and memory.peak > 2 * (4 * rows * WIDTH // 4)
    assert memory.buffers_from == ('jaxpr' if made.back_end == 'tpu' else 'compiler')
    assert memory.buffers[0][0].nbytes >= 4 * rows * WIDTH // 4
    assert [change.fits for change in made.changes] == [True] * len(made.changes) != []
    assert 'NO, lacks' in forecast_table([made])


@needs_libtpu
def test_the_time_of_products_of_groups_of_rows():
    """The compiler's estimate of one is hundreds of times what it takes."""
    rows, width, groups = 8192, 1024, 4
    mesh = MeshConfig(axes={'data': 4, 'model': 1}, devices=jax.devices()[:4])
    partitioner = PjitPartitioner(mesh=mesh)
    step = partitioner.partition(jax.lax.ragged_dot, None, None)
    shapes = (rows, width), (groups, width, width)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    made = forecast(step, *arrays, sizes, topology='v5e:2x2', explain=False)
    (products,) = (part for part in made.time.parts if part.name == 'matrix products')
    computing = 2 * rows * width**2 / 4 / 197e12  # the FLOPs of a device at the peak
    moving = 2 * (2 * rows * width / 4 + groups * width**2) / 819e9  # operands and result, bfloat16
    assert computing <= products.seconds <= computing + moving


@pytest.mark.long
@needs_libtpu
def test_changes_are_compiled_with_the_options_of_the_forecast(program, monkeypatch):
    """What does not fit and the change that is confirmed have the same compiler options."""
    _, step, state = program
    given, compile_lowered = [], jax.stages.Lowered.compile

    def record(lowered, compiler_options=None, **settings):
        given.append(compiler_options)
        return compile_lowered(lowered, compiler_options=compiler_options, **settings)

    monkeypatch.setattr(jax.stages.Lowered, 'compile', record)
    options = {'xla_tpu_scoped_vmem_limit_kib': '16384'}
    batch = {'x': jax.ShapeDtypeStruct((2**26, WIDTH), jnp.float32)}
    there = {'topology': 'v5e:2x4', 'confirm': True, 'compiler_options': options}
    made = forecast(step, state, batch, 3, **there)
    assert any(change.fits and change.peak_from == 'compiler' for change in made.changes)
    assert len(given) > 1 and all(one == options for one in given)


@pytest.mark.core
@needs_libtpu
def test_a_step_within_shard_map():
    """Its parts have products, constants, branches and a loop.

    A sum over 8 devices reduces 7/8 of an array in the one direction, and gathers 7/8 of it.
    """
    mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, x):
        def layer(h, shift):
            return jax.nn.gelu(h @ w) / 3 + shift * (jax.lax.axis_index('data') == 0), None

        h = jax.lax.scan(layer, x, jnp.arange(2.0))[0] @ w
        first = jax.lax.axis_index('data') == 0
        return jnp.mean(jax.lax.cond(first, lambda h: h * 2.0, jnp.tanh, h) ** 2)

    def part(w, x):
        return jax.lax.pmean(jax.grad(loss)(w, x), 'data')

    specs = {'in_specs': (P(), P('data')), 'out_specs': P(), 'check_vma': False}
    step = jax.jit(jax.shard_map(part, mesh=mesh, **specs))
    w = jax.ShapeDtypeStruct((256, 256), 'float32', sharding=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((64, 256), 'float32', sharding=NamedSharding(mesh, P('data')))
    made = forecast(step, w, x, topology='v5e:2x4')
    assert made.memory.arguments == 4 * (256 * 256 + 8 * 256)
    assert [(c.kind, c.axes, c.wire_bytes) for c, _ in made.collectives] == [
        ('all-reduce', ('data',), 2 * 7 / 8 * 4 * 256 * 256)
    ]
