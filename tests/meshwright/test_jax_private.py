"""Each private name of jax that `meshwright` needs, checked alone: the first to fail names it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from meshwright import jax_private
from partitioning.hardware.jax_private import is_pmapped, manual_axes

pytestmark = pytest.mark.smoke


def sharded(axis='x', count=8):
    mesh = Mesh(np.array(jax.devices()[:count]), ('x',))
    return NamedSharding(mesh, PartitionSpec(axis))


def replaced(monkeypatch, *replacements):
    for owner, name, value in replacements:
        monkeypatch.setattr(owner, name, value)


def test_a_second_client_has_the_devices_that_were_asked_for():
    devices = jax_private.make_cpu_devices(20)
    assert len(devices) == 20 and not set(devices) & set(jax.devices())


def test_a_trace_knows_its_arguments_and_results():
    sharding = sharded()
    given = jax.ShapeDtypeStruct((8, 2), 'float32', sharding=sharding)
    step = jax.jit(lambda state, scale: state['w'] * scale, donate_argnums=0)
    call = jax_private.read_trace(step.trace({'w': given}, jax.ShapeDtypeStruct((), 'float32')))
    assert call.name == '<lambda>' and call.mesh is None
    assert call.arguments == (sharding, None) and call.donated == (True, False)
    assert call.argument_names == ("state['w']", 'scale')
    assert [aval.shape for aval in call.jaxpr.in_avals] == [(8, 2), ()]


def test_the_mesh_that_is_set_is_the_mesh_of_a_trace():
    sharding = sharded()
    with jax.set_mesh(sharding.mesh):
        call = jax_private.read_trace(jax.jit(jnp.sin).trace(jax.ShapeDtypeStruct((8,), 'float32')))
    assert call.mesh == sharding.mesh


def test_constraints_inside_are_among_the_shardings():
    sharding = sharded()
    step = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, sharding))
    call = jax_private.read_trace(step.trace(jax.ShapeDtypeStruct((8,), 'float32')))
    assert sharding in call.shardings


def test_a_function_is_traced_again_with_its_settings():
    sharding, other = sharded(), sharded(count=4)
    step = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=sharding)
    given = jax.ShapeDtypeStruct((8,), 'float32', sharding=sharding)
    call = jax_private.read_trace(step.trace(given))
    again = jax_private.trace_again(call, lambda x: [x + 2], lambda s: other)
    assert again.arguments == (other,) and again.results == (other,)
    assert again.donated == (True,) and again.name == call.name
    assert again.lower().compile().input_shardings[0] == (other,)


def test_the_last_function_that_is_lowered_is_seen():
    call = jax_private.trace_while(lambda: jax.jit(jnp.cos).lower(jnp.ones(3)))
    assert call.name == 'cos' and call.jaxpr.in_avals[0].shape == (3,)


def test_compiled_programs_run_in_another_way(monkeypatch):
    """The results of one call are these; jax compiles the function, and does not run it."""
    seen = []

    def runner(program):
        def run(*args):
            seen.append((program.devices, [aval.shape for aval, _ in program.outputs], args))
            return [np.full((3,), 7.0)]

        return run

    replaced(monkeypatch, *jax_private.on_run(runner))
    result = jax.jit(lambda x: x * 3)(jnp.ones(3))
    assert result.tolist() == [7, 7, 7]
    ((devices, shapes, args),) = seen
    assert devices == (jax.devices()[0],) and shapes == [(3,)] and args[0].tolist() == [1, 1, 1]


def test_programs_that_were_compiled_ahead_run_in_another_way(monkeypatch):
    replaced(monkeypatch, *jax_private.on_run(lambda program: lambda *args: [np.zeros(3)]))
    compiled = jax.jit(lambda x: x * 5).lower(jnp.ones(3)).compile()
    assert compiled(jnp.ones(3)).tolist() == [0, 0, 0]


def test_compilations_are_wrapped_and_happen_once(monkeypatch):
    """Also with options of the compiler, with which some versions of jax compile each time."""
    compiled, calls = [], {}

    def compile_with(computation, options, compile_now):
        compiled.append(calls[computation].name)
        return compile_now()

    lower = jax_private.on_lower(calls.__setitem__)
    replaced(monkeypatch, lower, jax_private.on_compile(compile_with))
    runs = jax_private.on_run(lambda program: lambda *args: [np.zeros(3)])
    replaced(monkeypatch, *runs)

    def triple(x):
        return x * 3

    options = {'xla_cpu_enable_fast_math': False}
    for step in (jax.jit(triple), jax.jit(triple, compiler_options=options)):
        step(np.ones(3))
        step(np.ones(3))
    assert compiled == ['triple', 'triple']


def test_lowered_functions_are_equal_if_their_programs_are(monkeypatch):
    """Lines of code do not count, and everything that changes a program does."""
    described = []

    def compile_with(computation, options, compile_now):
        described.append(jax_private.describe_lowered(computation))
        return compile_now()

    replaced(monkeypatch, jax_private.on_compile(compile_with))
    sharding, other = sharded(), sharded(count=4)
    given = jax.ShapeDtypeStruct((8,), 'float32', sharding=sharding)

    def compile_step(step=lambda x: x + 7, given=given, **settings):
        jax.jit(step, **settings).lower(given).compile()
        return described[-1]

    first = compile_step()
    assert compile_step(lambda x: x + 7) == first
    changed = [
        compile_step(lambda x: x + 8),
        compile_step(donate_argnums=0),
        compile_step(out_shardings=sharded(None)),
        compile_step(given=jax.ShapeDtypeStruct((8,), 'float32', sharding=other)),
        compile_step(compiler_options={'xla_cpu_enable_fast_math': False}),
    ]
    assert len({*map(hash, map(str, changed))}) == 5 and first not in changed


def test_calls_have_a_context(monkeypatch):
    contexts = []

    class Context:
        def __init__(self, args, jaxpr, mesh):
            contexts.append((len(args), [aval.shape for aval in jaxpr.out_avals]))

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

    replaced(monkeypatch, jax_private.on_call(Context))
    jax.jit(lambda x, y: x[None] + y)(np.ones(3), np.ones(3))
    assert (2, [(1, 3)]) in contexts


def test_arrays_are_placed_in_another_way(monkeypatch):
    placed = []

    def place(x, aval, device):
        placed.append((aval.shape, device))

    replaced(monkeypatch, jax_private.on_place(place))
    sharding = sharded()
    jax.device_put(np.ones(8), sharding)
    jax.device_put(np.ones(2), jax.devices()[1])
    assert ((8,), sharding) in placed and ((2,), jax.devices()[1]) in placed


def test_the_process_has_the_devices_that_it_is_told(monkeypatch):
    """The first three of eight devices are the process's own."""
    own = jax.devices()[:3]
    properties = jax_private.local_properties(
        lambda x: True, lambda devices: [d for d in devices if d in own]
    )
    replaced(monkeypatch, *properties)
    sharding = sharded()
    assert sharding.addressable_devices == set(own) and sharding.has_addressable_devices
    assert not sharding.is_fully_addressable
    assert list(sharding.addressable_devices_indices_map((8,))) == own
    assert sharding.mesh.local_devices == own and sharding.mesh.is_multi_process
    assert SingleDeviceSharding(own[0]).is_fully_addressable
    assert not SingleDeviceSharding(jax.devices()[5]).is_fully_addressable


def test_questions_about_devices_are_answered_in_all_modules(monkeypatch):
    asked = jax_private.device_questions()
    replaced(monkeypatch, *jax_private.replace_everywhere(asked['devices'], lambda *args: ['mine']))
    assert jax.devices() == ['mine']
    with pytest.raises(ValueError, match='1'):
        jax.make_mesh((2,), ('x',))


def test_keys_have_numbers_below_them():
    key = jax.random.key(3)
    numbers = jax_private.numbers_of(key)
    assert numbers.tolist() == jax.random.key_data(key).tolist()
    assert jax_private.numbers_of(numbers) is numbers

    def make(aval, sharding):
        assert aval.shape == (2,) and aval.dtype == jnp.uint32
        return numbers

    again = jax_private.make_array(make, jax.typeof(key), SingleDeviceSharding(jax.devices()[0]))
    assert jax.random.bits(again) == jax.random.bits(key)


def test_equations_are_evaluated_with_other_parameters():
    call = jax_private.read_trace(
        jax.jit(lambda x: jnp.reshape(x, (2, 3))).trace(jax.ShapeDtypeStruct((6,), 'float32'))
    )

    def change(value):
        return (3, 2) if value == (2, 3) else value

    equations = [jax_private.with_params(e, change) for e in call.jaxpr.jaxpr.eqns]
    moved = call.jaxpr.jaxpr.replace(eqns=equations)
    (result,) = jax_private.evaluate(moved, call.jaxpr.consts, [jnp.arange(6.0)])
    assert result.shape == (3, 2)


@pytest.mark.parametrize('axes', [{'x'}, {'x', 'y'}])
def test_the_axes_of_a_shard_map(axes):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y'))
    spec = PartitionSpec('x')
    parts = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes)
    jaxpr = jax.make_jaxpr(jax.jit(parts))(jnp.ones(8)).eqns[0].params['jaxpr']
    (params,) = (e.params for e in jaxpr.eqns if e.primitive.name == 'shard_map')
    assert manual_axes(params) == axes


@pytest.mark.filterwarnings('ignore:Some donated buffers')
def test_arguments_that_results_replace(monkeypatch):
    """Not those that are donated in vain, because no result is as large."""
    seen = []
    replaced(monkeypatch, jax_private.on_lower(lambda computation, call: seen.append(computation)))
    step = jax.jit(lambda unused, w, x: (w + 1, x.sum()), donate_argnums=(0, 1, 2))
    step.lower(jnp.ones(2), jnp.ones((8, 2)), jnp.ones(3))
    assert jax_private.consumed_arguments(seen[-1]) == {1}


def test_arrays_that_come_in_parts_are_placed_in_another_way(monkeypatch):
    placed, sharding = [], sharded()
    part = jax_private.on_place_parts(lambda aval, given: placed.append((aval.shape, given)))
    replaced(monkeypatch, part)
    x = jax.make_array_from_callback((8,), sharding, lambda index: np.ones(1))
    assert placed == [((8,), sharding)] and x.sum() == 8


def test_arrays_have_private_attributes():
    assert jax_private.has_attribute_of_arrays('_npy_value')
    assert not jax_private.has_attribute_of_arrays('no_such_name')


def test_processes_talk_through_a_client(monkeypatch):
    from jax._src import distributed

    owner, name, value = jax_private.client_of_processes('client')
    assert owner is distributed.global_state and hasattr(owner, name) and value == 'client'


def test_the_names_and_shardings_of_results_and_what_is_bound_to_no_device():
    mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    placed = jax.device_put(jnp.ones(8), rows)
    step = jax.jit(lambda state, n: ({'w': state['w'] * 2}, n + 1))
    args = {'w': placed}, jnp.ones(())
    call = jax_private.read_trace(step.trace(*args))
    assert call.result_names == ("result[0]['w']", 'result[1]')
    assert call.uncommitted == (False, True)
    compiled = step.lower(*args).compile()
    for made in (compiled, call.lower().compile()):
        first, second = jax_private.result_shardings(made)
        assert first.is_equivalent_to(rows, 1) and second.is_fully_replicated
    assert (compiled.output_shardings[0]['w'], compiled.output_shardings[1]) == (first, second)


def test_pmap_is_recognized():
    assert is_pmapped(jax.pmap(jnp.sin))
    assert not any(map(is_pmapped, (jax.jit(jnp.sin), jax.vmap(jnp.sin), jnp.sin, len)))
