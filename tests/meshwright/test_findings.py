"""Findings of plain programs: one for each seeded fault, and none for well-written programs."""

import functools
import linecache
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import meshwright as mw
from tests.code_blocks import ROOT, read_blocks
from tests.meshwright.plain_steps import line_of

ROWS, LENGTH, WIDTH, HEADS, HIDDEN, VOCAB = 16, 16, 64, 8, 256, 512
SHAPES = {
    'table': (VOCAB, WIDTH),
    'scale': (WIDTH,),
    'query': (WIDTH, HEADS, WIDTH // HEADS),
    'key': (WIDTH, HEADS, WIDTH // HEADS),
    'value': (WIDTH, HEADS, WIDTH // HEADS),
    'out': (HEADS, WIDTH // HEADS, WIDTH),
    'up': (WIDTH, HIDDEN),
    'down': (HIDDEN, WIDTH),
    'head': (WIDTH, VOCAB),
}
FSDP = {name: P('fsdp') for name in SHAPES} | {'scale': P()}
ROW_SPEC, HEADS_OVER = P('data'), P(None, 'model')
TENSOR = {
    'table': P('model'),
    **dict.fromkeys(('query', 'key', 'value', 'up', 'head'), HEADS_OVER),
    **dict.fromkeys(('out', 'down'), P('model')),
}
BOTH = {
    'table': P('model', 'fsdp'),
    **dict.fromkeys(('query', 'key', 'value', 'up', 'head'), P('fsdp', 'model')),
    'out': P('model', None, 'fsdp'),
    'down': P('model', 'fsdp'),
}


def mesh_of(**axes):
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def make_forward(constrain):
    def forward(params, tokens):
        x = constrain(params['table'].astype('bfloat16')[tokens], 'between')
        h = constrain(x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1) * params['scale'], 'in')
        q, k, v = (jnp.einsum('bsd,dhk->bshk', h, params[n]) for n in ('query', 'key', 'value'))
        weights = jax.nn.softmax(jnp.einsum('bqhk,bshk->bhqs', q, k))
        mixed = jnp.einsum('bhqs,bshk->bqhk', weights, v)
        x = constrain(x + jnp.einsum('bshk,hkd->bsd', mixed, params['out']), 'between')
        hidden = jax.nn.gelu(constrain(x, 'in') @ params['up'])
        return constrain(x + hidden @ params['down'], 'between') @ params['head']

    return forward


def make_program(mesh, layout, batch=ROW_SPEC, between=None, within=None, **changes):
    """A step of AdamW on a transformer layer, with its arguments.

    Args:
      layout: the spec of each parameter.
      batch: the spec of the batch.
      between, within: the constraints on activations between blocks, and at their begin.
      changes: `moments`, specs of the optimizer's state; `donate=False`; `step`, the first value of
        a counter.
    """
    specs = {'between': between, 'in': within}
    tx = optax.adamw(1e-3)

    def constrain(x, place):
        spec = specs[place]
        if spec is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    forward = make_forward(constrain)

    def train_step(state, batch):
        def loss(params):
            logits = forward(params, batch['tokens'])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch['labels']).mean()

        value, gradients = jax.value_and_grad(loss)(state['params'])
        updates, opt = tx.update(gradients, state['opt'], state['params'])
        params = optax.apply_updates(state['params'], updates)
        return {'params': params, 'opt': opt, 'step': state['step'] + 1}, value

    def struct(path, x):
        name = getattr(path[-1], 'key', None)
        own = changes.get('moments', layout) if path[0].key == 'opt' else layout
        sharding = NamedSharding(mesh, own.get(name, P()))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = {k: jax.ShapeDtypeStruct(shape, 'float32') for k, shape in SHAPES.items()}
    step = jax.ShapeDtypeStruct((), 'int32')
    state = {'params': params, 'opt': jax.eval_shape(tx.init, params), 'step': step}
    state = jax.tree_util.tree_map_with_path(struct, state)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    state['step'] = changes.get('step', state['step'])
    rows = {'tokens': batch, 'labels': batch}
    rows = {
        k: jax.ShapeDtypeStruct((ROWS, LENGTH), 'int32', sharding=NamedSharding(mesh, spec))
        for k, spec in rows.items()
    }
    donated = 0 if changes.get('donate', True) else ()
    jitted = jax.jit(train_step, donate_argnums=donated, out_shardings=(shardings, None))
    return jitted, state, rows


WELL_WRITTEN = {
    'data': lambda: make_program(mesh_of(data=8), {}),
    'fsdp': lambda: make_program(mesh_of(fsdp=8), FSDP, P('fsdp'), P('fsdp')),
    'replicas of fsdp': lambda: make_program(mesh_of(data=2, fsdp=4), FSDP, P(('data', 'fsdp'))),
    'zero': lambda: make_program(mesh_of(data=8), {}, moments={k: P('data') for k in SHAPES}),
    'tensor': lambda: make_program(mesh_of(data=2, model=4), TENSOR, between=P('data')),
    'tensor only': lambda: make_program(mesh_of(model=4), TENSOR, P()),
    'fsdp and tensor': lambda: make_program(mesh_of(fsdp=2, model=4), BOTH, P('fsdp')),
    'sequence of tensor': lambda: make_program(
        mesh_of(data=2, model=4), TENSOR, between=P('data', 'model'), within=P('data')
    ),
    'sequence': lambda: make_program(mesh_of(data=2, seq=4), {}, P('data', 'seq')),
}


@pytest.mark.parametrize('name', WELL_WRITTEN)
def test_a_well_written_program_has_no_findings(name):
    assert str(mw.lint(*WELL_WRITTEN[name](), compile=name in ('fsdp', 'tensor'))) == 'no findings'


def test_experts_have_no_findings():
    mesh = mesh_of(data=2, expert=4)
    parts = NamedSharding(mesh, P('expert', 'data'))

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(params, tokens):
        def loss(params):
            x = params['table'][tokens]
            gates = jax.nn.softmax(x @ params['router'])
            sent = jnp.einsum('bse,bsd->ebsd', gates, x)
            sent = jax.lax.with_sharding_constraint(sent, parts)
            hidden = jax.nn.gelu(jnp.einsum('ebsd,edf->ebsf', sent, params['up']))
            y = jnp.einsum('ebsf,efd,bse->bsd', hidden, params['down'], gates)
            return ((x + y @ params['dense']) @ params['table'].T).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    shapes = {
        'table': (256, 64),
        'dense': (64, 64),
        'router': (64, 8),
        'up': (8, 64, 256),
        'down': (8, 256, 64),
    }
    params = {
        k: jax.ShapeDtypeStruct(
            shape, 'float32', sharding=NamedSharding(mesh, P('expert' if len(shape) == 3 else None))
        )
        for k, shape in shapes.items()
    }
    rows = NamedSharding(mesh, P(('data', 'expert')))
    tokens = jax.ShapeDtypeStruct((16, 16), 'int32', sharding=rows)
    assert not mw.lint(train_step, params, tokens, compile=False)


def test_an_output_layer_that_is_whole_next_to_stacks_of_layers():
    """A layer of the stack is smaller than the output layer, all 32 layers are larger."""
    mesh = mesh_of(fsdp=8)

    def train_step(params, tokens):
        def loss(params):
            x = params['head'][tokens]
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params['layers'])
            return ((x @ params['head'].T) ** 2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    def struct(shape, *spec, dtype='float32'):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def lint(head):
        params = {'layers': struct((32, 64, 64), None, 'fsdp'), 'head': struct((512, 64), *head)}
        tokens = struct((16, 16), 'fsdp', dtype='int32')
        return mw.lint(jax.jit(train_step, donate_argnums=0), params, tokens, compile=False)

    (finding,) = lint(())
    assert (finding.kind, finding.where) == ('whole array', 'params/head')
    assert not lint(('fsdp',))


KEY_CUT = dict.fromkeys(('query', 'key', 'value'), P('model'))
FAULTS = {
    'rows whole along an axis': (
        lambda: make_program(mesh_of(data=2, fsdp=4), FSDP),
        'whole batch',
        'batch/labels',
        r"its 16 rows are not divided along 'fsdp': the 4 .*; write P\(\('data', 'fsdp'\), None\)",
    ),
    'a large array whole': (
        lambda: make_program(mesh_of(fsdp=8), FSDP | {'head': P()}, P('fsdp')),
        'whole array',
        'state/params/head',
        # 4 * 64 * 512 bytes, and an eighth of it
        r"131.1 kB on each device .* whole along 'fsdp', .*write P\(None, 'fsdp'\), .*16.4 kB; it",
    ),
    'the contracted dimension of kernels': (
        lambda: make_program(mesh_of(data=2, model=4), TENSOR | KEY_CUT),
        'cut product',
        line_of(make_forward, "'bsd,dhk->bshk'"),
        r'3 products sum over dimension 0 of state/params/query \(and 2 more like it\), which has '
        r"64 elements .* the 4 devices along 'model' .*; write P\(None, 'model', None\)",
    ),
    'one kernel over the axis of the rows': (
        lambda: make_program(mesh_of(data=2, model=4), TENSOR | {'value': P(None, 'data')}),
        'other axis',
        'state/params/value',
        r"^it is sharded over 'data', which shards no other parameters, and not over 'model', "
        r"which shards \d of \d.*: write P\(None, 'model', None\) for it",
    ),
    'moments whole': (
        lambda: make_program(mesh_of(fsdp=8), FSDP, P('fsdp'), moments={}),
        'optimizer layout',
        'state/opt/0/mu/down',
        r"laid out by P\(None, None\), and its parameter state/params/down by P\('fsdp', None\)",
    ),
    'rows gathered by a constraint': (
        lambda: make_program(mesh_of(data=2, model=4), TENSOR, between=P()),
        'gathered rows',
        line_of(make_program, 'with_sharding_constraint(x'),
        # 2 * 16 * 16 * 64 bytes of bfloat16
        r"whole along 'data', .* 32.8 kB in place of 16.4 kB, .* write P\('data', None, None\)",
    ),
    'not donated': (
        lambda: make_program(mesh_of(data=8), {}, donate=False),
        'not donated',
        line_of(make_program, 'def train_step'),
        r"train_step returns a new state .* donate_argnames=\['state'\]",
    ),
    'a counter of Python': (
        lambda: make_program(mesh_of(data=8), {}, step=0),
        'changed layout',
        'state/step',
        r'not laid out when .*, and laid out by P\(\) .* compiles again; put it on the mesh before',
    ),
}


@pytest.mark.parametrize('name', FAULTS)
def test_a_fault_is_found_with_its_place_and_figures(name):
    make, kind, where, message = FAULTS[name]
    found = mw.lint(*make(), compile=False)
    assert [f.kind for f in found[:1]] == [kind] and {f.kind for f in found} == {kind}
    assert found[0].where.endswith(where)
    assert re.search(message, found[0].message), found[0].message
    assert '\n' not in str(found[0]) and kind in found._repr_html_()


@pytest.mark.parametrize(
    ('fault', 'mended'),
    [
        ('the contracted dimension of kernels', 'tensor'),
        ('rows gathered by a constraint', 'tensor'),
    ],
)
def test_what_a_finding_says_to_write_saves_bytes(fault, mended):
    """The mended program is the well-written one."""

    def sent(make):
        made = mw.forecast(*make(), explain=False)
        return sum(c.total_bytes for c, _ in made.collectives)

    assert sent(FAULTS[fault][0]) > 1.05 * sent(WELL_WRITTEN[mended])


def first_states(mesh):
    """States of one counter, and whether jax compiles the second call of a step again."""
    on_mesh = NamedSharding(mesh, P())
    put = functools.partial(jax.device_put, device=on_mesh)
    return {
        'on the mesh': put(jnp.zeros((), 'int32')),
        'a Python number': 0,
        'on one device': jnp.zeros((), 'int32'),
        'of numpy': np.zeros((), 'int32'),
        'weakly typed': put(jnp.add(0, 0)),
        'whole': put(jnp.zeros((8,), 'int32')),
    }


@pytest.mark.parametrize('name', first_states(mesh_of(data=8)))
def test_a_state_that_compiles_again_is_what_jax_compiles_again(name):
    mesh = mesh_of(data=8)
    state = {'w': jax.device_put(jnp.zeros((8,)), NamedSharding(mesh, P('data')))}
    state['n'] = first_states(mesh)[name]
    out = NamedSharding(mesh, P('data') if name == 'whole' else P())

    @jax.jit
    def count(state):
        n = jnp.asarray(state['n'] + 1, 'int32')
        return {'w': state['w'] * 2, 'n': jax.lax.with_sharding_constraint(n, out)}

    found = [f.kind for f in mw.lint(count, state)]
    watched = mw.watch(count, report=lambda line: None)
    for _ in range(3):
        state = watched(state)
    assert bool(found) == bool(watched.recompilations) == (name != 'on the mesh')
    assert {*found} <= {'changed layout', 'weak type'}


@pytest.mark.parametrize('is_laid_out', [True, False])
def test_a_donated_cache_that_comes_back_sharded_is_in_memory_twice(is_laid_out):
    """Without a layout, the compiler chooses the layout of the result for it."""
    mesh = mesh_of(data=8)
    rows, whole = NamedSharding(mesh, P('data')), NamedSharding(mesh, P())

    @functools.partial(jax.jit, donate_argnames='cache')
    def prefill(w, cache, x):
        k = jax.lax.dynamic_update_slice(cache['k'], (x @ w)[:, None], (0, 0, 0))
        return {'k': jax.lax.with_sharding_constraint(k, rows)}, x.sum()

    w, x, k = ((256, 256), whole), ((8, 256), rows), ((8, 64, 256), whole)
    w, x, k = (jax.ShapeDtypeStruct(shape, 'float32', sharding=s) for shape, s in (w, x, k))
    k = k if is_laid_out else jnp.zeros(k.shape)
    (found,) = mw.lint(prefill, w, {'k': k}, x)
    assert (found.kind, found.where) == ('changed layout', 'cache/k')
    # 8 * 64 * 256 * 4 bytes, and an eighth of them
    held = 'each device holds 524.3 kB and then 65.5 kB: the memory of donated'
    assert (held in found.message) == is_laid_out
    compiled = prefill.lower(w, {'k': k}, x).compile()
    assert bool(compiled.memory_analysis().alias_size_in_bytes) != is_laid_out


def test_a_constraint_before_a_shard_map_is_of_the_whole_array():
    """Each device has 2 of 8 columns, which 4 devices do not divide once more."""
    mesh, spec = mesh_of(data=2, model=4), P('data', 'model')

    @jax.jit
    def step(x):
        y = jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, spec))
        return jax.shard_map(jnp.tanh, mesh=mesh, in_specs=spec, out_specs=spec)(y)

    x = jax.ShapeDtypeStruct((4, 8), 'float32', sharding=NamedSharding(mesh, P('data')))
    assert not mw.lint(step, x, compile=False)


def test_lines_of_the_function():
    """A constraint that does not divide, a constant, a callback and a type that changes.

    Another constant is sharded, so that it is not whole on every device.
    """
    mesh = mesh_of(data=4, model=2)
    rows, columns = (NamedSharding(mesh, P(*spec)) for spec in (('data',), ('data', 'model')))
    table = np.ones((512, 512), 'float32')
    shared = jax.device_put(table, rows)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x):
        y = x @ table  # line 0
        y += x @ shared
        y = jax.lax.with_sharding_constraint(y[:, :301], columns)  # line 1
        jax.debug.print('{}', y.sum())  # line 2
        return {'w': (w['w'] + y.sum()).astype('bfloat16')}

    w = {'w': jax.ShapeDtypeStruct((8, 8), 'float32', sharding=NamedSharding(mesh, P()))}
    x = jax.ShapeDtypeStruct((64, 512), 'float32', sharding=rows)
    found = {f.kind: f for f in mw.lint(step, w, x, compile=False)}
    assert found.keys() == {'indivisible', 'constant', 'callback', 'changed type'}
    here = test_lines_of_the_function
    assert found['indivisible'].where.endswith(line_of(here, '# line' + ' 1'))
    assert '301 elements, which 2 devices (model 2) do not divide' in found['indivisible'].message
    assert '1 of 2 devices have 151, one has 150' in found['indivisible'].message
    assert found['constant'].where.endswith(line_of(here, '# line' + ' 0'))
    assert '1.0 MB' in found['constant'].message
    assert found['callback'].where.endswith(line_of(here, '# line' + ' 2'))
    assert found['changed type'].where == 'w/w'


def test_a_constraint_before_a_shard_map_divides_the_whole_array():
    mesh = mesh_of(data=8)
    rows = NamedSharding(mesh, P('data'))

    @jax.jit
    def step(x):
        x = jax.lax.with_sharding_constraint(2 * x, rows)
        return jax.shard_map(
            lambda row: row + 1, mesh=mesh, in_specs=P('data'), out_specs=P('data')
        )(x)

    x = jax.ShapeDtypeStruct((8, 512), 'float32', sharding=rows)
    assert not mw.lint(step, x, compile=False)


def test_what_a_function_returns_of_its_input_is_no_state():
    mesh = mesh_of(data=8)
    rows, whole = (NamedSharding(mesh, spec) for spec in (P('data'), P()))
    weights = {'w': jax.ShapeDtypeStruct((256, 256), 'float32', sharding=whole)}
    inputs = jax.ShapeDtypeStruct((64, 256), 'float32', sharding=rows)
    forward = jax.jit(lambda weights, h: h + h @ weights['w'], out_shardings=whole)
    assert not mw.lint(forward, weights, inputs)
    # A cache is one: a part of it is replaced.
    write = jax.jit(lambda cache, row: jax.lax.dynamic_update_slice(cache, row, (0, 0)))
    row = jax.ShapeDtypeStruct((1, 256), 'float32', sharding=whole)
    cache = jax.ShapeDtypeStruct((4096, 256), 'float32', sharding=rows)
    [found] = mw.lint(write, cache, row, compile=False)
    assert found.kind == 'not donated' and '524.3 kB' in found.message  # 4 * 4096 * 256 / 8


def test_names_that_say_nothing():
    """What the arguments are for follows from what is done with them."""
    mesh = mesh_of(data=4, model=2)

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3))
    def f(a, b, c, d, e):
        g, h = jax.grad(lambda a, b: ((e @ a) @ b).mean(), (0, 1))(a, b)
        c, d = 0.9 * c + g, 0.9 * d + h
        return a - c, b - d, c, d

    up, down = struct((64, 256), None, 'model'), struct((256, 64), 'model')
    rows = struct((16, 64), 'data')

    def kinds(*args):
        return [(found.kind, found.where) for found in mw.lint(f, *args, compile=False)]

    assert kinds(up, down, up, down, rows) == []
    assert kinds(up, down, up, down, struct((16, 64))) == [('whole batch', 'e')]
    assert kinds(up, down, struct(up.shape), down, rows) == [('optimizer layout', 'c')]
    cut = struct(up.shape, 'model')
    assert [kind for kind, _ in kinds(cut, down, cut, down, rows)] == ['cut product']
    # Without a state, it is not known which of the operands are weights.
    assert not mw.lint(jax.jit(lambda a, b: b @ a), struct((64, 64)), rows, compile=False)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def test_modules_of_nnx():
    mesh = mesh_of(fsdp=8)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def train_step(model, optimizer, x):
        gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, gradients)

    def place(tree, spec):
        def put(x):
            return jax.device_put(x, NamedSharding(mesh, spec if x.ndim == 2 else P()))

        nnx.update(tree, jax.tree.map(put, nnx.state(tree)))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    place(model, P('fsdp'))
    place(optimizer, P('fsdp'))
    x = jax.device_put(np.ones((64, 64), 'f'), NamedSharding(mesh, P('fsdp')))
    assert not mw.lint(train_step, model, optimizer, x)
    place(optimizer, P())
    found = mw.lint(train_step, model, optimizer, x, compile=False)
    assert [(f.kind, f.where) for f in found] == [
        ('optimizer layout', 'optimizer/opt_state/0/mu/down/kernel')
    ]
    # With whole parameters and divided moments (ZeRO-1), all moments are divided.
    place(model, P())
    place(optimizer, P('fsdp'))
    assert not mw.lint(train_step, model, optimizer, x, compile=False)
    nu = optimizer.opt_state[0].nu
    nu['down']['kernel'] = nu['down']['kernel'].copy(
        jax.device_put(nu['down']['kernel'][...], NamedSharding(mesh, P()))
    )
    [found] = mw.lint(train_step, model, optimizer, x, compile=False)
    assert (found.kind, found.where) == (
        'optimizer layout',
        'optimizer/opt_state/0/nu/down/kernel',
    )
    assert 'another state of its parameter optimizer/opt_state/0/mu/down/kernel' in found.message
    assert "write P('fsdp', None) for it, too" in found.message


def test_modules_of_equinox():
    eqx = pytest.importorskip(
        'equinox', reason='equinox is not installed; the extra clients has it'
    )
    mesh = mesh_of(data=2, model=4)
    model = eqx.nn.MLP(64, 64, 256, 1, use_bias=False, use_final_bias=False, key=jax.random.key(0))

    def place(x, *, first=('model',)):
        spec = P()
        if eqx.is_array(x):
            spec = P(*first) if x.shape == (256, 64) else P(None, 'model')
        return jax.device_put(x, NamedSharding(mesh, spec)) if eqx.is_array(x) else x

    @eqx.filter_jit
    def step(model, x):
        gradients = eqx.filter_grad(lambda model: (jax.vmap(model)(x) ** 2).mean())(model)
        return jax.tree.map(lambda p, g: p - g if eqx.is_array(p) else p, model, gradients)

    x = jax.device_put(np.ones((64, 64), 'f'), NamedSharding(mesh, P('data')))
    found = mw.lint(step, jax.tree.map(place, model), x)
    assert [(f.kind, f.where) for f in found] == [('not donated', 'model')]
    cut = jax.tree.map(functools.partial(place, first=(None, 'model')), model)
    found = mw.lint(step, cut, x, compile=False)
    assert [f.kind for f in found] == ['cut product', 'not donated']
    assert 'model/layers/0/weight' in found[0].message


def test_a_transposed_parameter_is_told_with_the_layout_of_its_argument():
    mesh = mesh_of(data=2, model=4)

    def step(params, x):
        grad = jax.grad(lambda p: jnp.mean((x @ p['codes'].T) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grad)

    def sharding(*spec):
        return NamedSharding(mesh, P(*spec))

    codes = jax.ShapeDtypeStruct((512, 64), 'float32', sharding=sharding(None, 'model'))
    x = jax.ShapeDtypeStruct((32, 64), 'float32', sharding=sharding('data'))
    (found,) = mw.lint(jax.jit(step, donate_argnums=0), {'codes': codes}, x, compile=False)
    assert found.kind == 'cut product' and 'dimension 1 of params/codes' in found.message
    assert "by P(None, 'model')" in found.message and "write P('model', None)" in found.message


def sequence_parallel(*, mends):
    """Tensor parallelism whose residuals are split along the sequence: gathered, and scattered."""
    mesh = mesh_of(data=2, model=4)

    def keep(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, x):
        def loss(params):
            y = keep(x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True)), *mends)
            hidden = keep(jax.nn.relu(y @ params['up']), 'data', None, 'model')
            return (keep(hidden @ params['down'], 'data', 'model') ** 2).mean()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))

    params = {'up': struct((64, 256), None, 'model'), 'down': struct((256, 64), 'model')}
    return step, params, struct((16, 64, 64), 'data', 'model')


def test_a_sequence_is_gathered_on_purpose_and_rows_are_not():
    assert not mw.lint(*sequence_parallel(mends=['data']), compile=False)
    [found] = mw.lint(*sequence_parallel(mends=[None, None]), compile=False)
    assert found.kind == 'gathered rows'
    assert "whole along 'data'" in found.message


def test_all_rows_are_gathered_on_purpose_where_each_device_uses_them_for_its_own_part():
    mesh = mesh_of(data=8)

    def compare(table, tokens, own):
        """Looks up all rows in the columns of a device, and compares its rows with all of them."""
        whole = NamedSharding(mesh, P())
        rows = table[jax.lax.with_sharding_constraint(tokens, whole)]
        everyone = jax.lax.with_sharding_constraint(own, whole)
        return rows.sum(), jax.nn.logsumexp(own @ (2 * everyone).T, axis=-1).mean()

    def struct(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    arguments = struct((64, 64), 'float32', None, 'data'), struct((4096,), 'int32', 'data')
    own = struct((256, 64), 'float32', 'data')

    def kinds(fn):
        return [f.kind for f in mw.lint(jax.jit(fn), *arguments, own, compile=False)]

    assert 'gathered rows' not in kinds(compare)

    def compute_alike(table, tokens, own):
        own = jax.lax.with_sharding_constraint(own, NamedSharding(mesh, P()))
        return jnp.tanh(own).sum() + table.sum()

    assert 'gathered rows' in kinds(compute_alike)


def test_the_order_of_the_axes_of_rows():
    mesh = mesh_of(replica=2, fsdp=4)

    @jax.jit
    def step(params, x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P('replica')))
        return jax.grad(lambda params: ((x @ params['w']) ** 2).mean())(params)

    def struct(*spec):
        return jax.ShapeDtypeStruct((64, 64), 'float32', sharding=NamedSharding(mesh, P(*spec)))

    found = mw.lint(step, {'w': struct('fsdp')}, struct(('replica', 'fsdp')), compile=False)
    assert (
        "write P(('replica', 'fsdp'), None)" in {f.kind: f.message for f in found}['gathered rows']
    )


def test_a_shard_map_whose_specs_lack_an_axis():
    """Its specs decide, and not the layout of the kernel after it; following it sends less."""
    mesh = mesh_of(data=2, model=4)

    def lint_and_forecast(heads):
        def core(x):
            return jnp.einsum('bshk,bthk->bhst', x, x).sum(-1)

        mapped = jax.shard_map(core, mesh=mesh, in_specs=heads, out_specs=P(heads[0], *heads[2:]))

        @jax.jit
        def step(params, x):
            mixed = mapped(jnp.einsum('bsd,dhk->bshk', x, params['query']))
            return jnp.einsum('bhs,hsd->bd', mixed, params['out'])

        def struct(shape, *spec):
            return jax.ShapeDtypeStruct(shape, 'float32', sharding=NamedSharding(mesh, P(*spec)))

        params = {
            'query': struct((64, 8, 16), None, 'model'),
            'out': struct((8, 32, 64), 'model'),
        }
        args = step, params, struct((8, 32, 64), 'data')
        return mw.lint(*args, compile=False), mw.forecast(*args)

    found, made = lint_and_forecast(P('data', None, None))
    assert [f.kind for f in found] == ['whole shard_map']
    wanted = "write P('data', None, 'model', None) in in_specs, and P('data', 'model', None) in out"
    assert wanted in found[0].message
    called = line_of(lint_and_forecast, 'mapped(jnp')
    assert re.search(
        rf"^no spec of this shard_map \(called at .*{called}\) has 'model'", found[0].message
    )
    assert found[0].where.endswith(line_of(lint_and_forecast, 'jax.shard_map(core'))
    # All 8 heads of the 4 rows of a device, in place of 2 of them.
    attention = 2 * 4 * 8 * 32 * 32 * 16
    even = 2 * (8 * 32 * 64 * 128 + 8 * 8 * 32 * 64) / 8
    assert made.program_flops == even + attention
    found, mended = lint_and_forecast(P('data', None, 'model'))
    assert not found
    assert sum(c.total_bytes for c, _ in mended.collectives) < sum(
        c.total_bytes for c, _ in made.collectives
    )


def test_the_program_of_the_readme(monkeypatch):
    """What the readme shows of its program is what is found, and its two changes mend it."""
    blocks = read_blocks('README.md')
    [number] = [n for n, block in enumerate(blocks) if block.language == 'py']
    program, shown = blocks[number].code, blocks[number + 2].code
    assert sum(bool(line) for line in program.splitlines()) <= 16
    # The arrays are abstract, and nothing runs.
    program = program.partition('for _ in range')[0]
    program = program.replace('jax.device_put(jnp.ones(shape), ', 'struct(shape, ')

    def findings(code):
        names = {'struct': lambda shape, s: jax.ShapeDtypeStruct(shape, 'float32', sharding=s)}
        exec(compile(code, 'train.py', 'exec'), names)
        monkeypatch.setitem(linecache.cache, 'train.py', (0, None, code.splitlines(True), ''))
        found = mw.lint(names['train_step'], names['params'], names['batch'], compile=False)
        return [f'train_step: {finding}' for finding in found]

    assert ' '.join(['findings:', *findings(program)]) == ' '.join(shown.split())
    mended = program.replace("8192), 'model')", "8192), None, 'model')")
    mended = mended.replace('@jax.jit\n', "@jax.jit(donate_argnames='params')\n")
    assert mended != program and not findings(mended)
    text = (ROOT / 'README.md').read_text()
    assert "`put((2048, 8192), None, 'model')`, and `@jax.jit(donate_argnames='params')`" in text


def test_states_of_rows_and_factors_of_split_weights_are_whole_on_purpose():
    """A recurrent network that is data parallel, and whose frozen weights have adapters."""
    mesh = mesh_of(data=2, model=4)

    def struct(shape, *spec, dtype='float32'):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def adapted(frozen, adapter, x):
        return x @ (frozen + adapter['a'] @ adapter['b'])

    @functools.partial(jax.jit, donate_argnums=1)
    def step(params, state, tokens):
        x = params['embed'][tokens] + state @ params['recurrent']
        hidden = jax.nn.gelu(adapted(params['up'], params['lora']['up'], x))
        return adapted(params['down'], params['lora']['down'], hidden)

    params = {
        'embed': struct((128, 64)),
        'recurrent': struct((64, 64), None, 'model'),
        'up': struct((64, 256), None, 'model'),
        'down': struct((256, 64), 'model'),
        'lora': {
            'up': {'a': struct((64, 16)), 'b': struct((16, 256), None, 'model')},
            'down': {'a': struct((256, 16), 'model'), 'b': struct((16, 64))},
        },
    }
    args = params, struct((16, 64), 'data'), struct((16,), 'data', dtype='int32')
    assert not mw.lint(step, *args, compile=False)
