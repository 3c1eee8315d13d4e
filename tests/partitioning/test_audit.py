"""The audit of a state: bytes by role, what is replicated and why, budgets, misplaced arrays."""

import io
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import AxisNames, AxisRules, PjitPartitioner, unbox

pytestmark = [pytest.mark.core, pytest.mark.smoke]

# Over data 4 x model 2. 'mlp' loses 'model' to 'vocab' where an array has both.
RULES = [('vocab', 'model'), ('embed', 'data'), ('mlp', 'model'), ('heads', None)]
# Name: shape, dtype, names, bytes that a device holds, and how many of them exceed an even share.
PARAMETERS = {
    'table': ((32, 16), jnp.float32, ('vocab', 'embed'), 4 * 512 // 8, 0),
    'out': ((16, 6), jnp.bfloat16, ('embed', 'heads'), 2 * 96 // 4, 2 * 96 // 4 - 2 * 96 // 8),
    'gate': ((8, 8), jnp.float32, ('vocab', 'mlp'), 4 * 64 // 2, 4 * 64 // 2 - 4 * 64 // 8),
    'scale': ((24,), jnp.bfloat16, (None,), 2 * 24, 2 * 24 - 2 * 24 // 8),
}
OF_PARAMETERS = 256 + 48 + 128 + 48
OF_OPTIMIZER = 2 * OF_PARAMETERS + 4  # Adam keeps two statistics per parameter, and a count
OF_OTHERS = 4 * 64 + 4  # 'noise' and 'step'
PER_DEVICE = 480 + 964 + 260
TOTAL = 3 * (4 * 512 + 2 * 96 + 4 * 64 + 2 * 24) + 4 + 260
# The axes over which arrays are replicated, and why.
REASONS = {
    'out': ('over model', 'heads: a rule replicates it'),
    'gate': ('over data', "mlp: mesh axis 'model' is taken by 'vocab'"),
    'scale': ('over data, model', 'no logical name'),
    'noise': ('over data, model', 'no names'),
}


def boxed(shape, names, dtype=jnp.float32):
    return nn.LogicallyPartitioned(jnp.zeros(shape, dtype), names)


def init(key):
    params = {k: boxed(shape, names, dtype) for k, (shape, dtype, names, *_) in PARAMETERS.items()}
    opt_state = optax.adam(1e-3).init(unbox(params))
    noise = jax.random.normal(key, (64,))
    return {'params': params, 'opt_state': opt_state, 'noise': noise, 'step': jnp.int32(0)}


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    return PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)


@pytest.fixture(name='named', scope='module')
def _named():
    return jax.eval_shape(init, jax.random.key(0))


@pytest.fixture(name='plan', scope='module')
def _plan(partitioner):
    return partitioner.plan(init, jax.random.key(0))


@pytest.fixture(name='audit', scope='module')
def _audit(plan):
    return plan.audit()


@pytest.fixture(name='state', scope='module')
def _state(plan):
    return plan.init(jax.random.key(0))


def held_by_device(state):
    """What the devices hold according to jax."""
    held = {}
    for array in jax.tree.leaves(state):
        for shard in array.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return held


# Sums.


def test_roles_by_hand(audit):
    expected = {'parameters': OF_PARAMETERS, 'optimizer': OF_OPTIMIZER, 'other': OF_OTHERS}
    assert audit.by_role == expected == {'parameters': 480, 'optimizer': 964, 'other': 260}
    assert (audit.bytes_per_device, audit.bytes_total) == (PER_DEVICE, TOTAL)
    assert audit.bytes_by_device == dict.fromkeys(range(8), PER_DEVICE)
    assert audit.balance == 1.0


def test_every_array_by_hand(audit):
    rows = {row.path: row for row in audit.rows}
    assert len(rows) == len(audit.rows) == 3 * len(PARAMETERS) + 3
    for tree, role in [
        ('params', 'parameters'),
        ('opt_state/0/mu', 'optimizer'),
        ('opt_state/0/nu', 'optimizer'),
    ]:
        for name, (shape, dtype, names, held, _) in PARAMETERS.items():
            row = rows[f'{tree}/{name}']
            assert (row.shape, row.dtype, row.role) == (shape, np.dtype(dtype).name, role)
            assert row.logical_axes == AxisNames(*names)
            assert row.bytes_per_device == held
    assert (rows['opt_state/0/count'].role, rows['step'].role) == ('optimizer', 'other')
    assert rows['params/table'].spec == P('model', 'data')
    assert rows['params/gate'].spec == P('model', None)


# Replicated arrays.


def test_replicated_arrays_by_hand(audit):
    copies = ('params', 'opt_state/0/mu', 'opt_state/0/nu')
    expected = {f'{c}/{k}': row[4] for c in copies for k, row in PARAMETERS.items() if row[4]}
    expected['noise'] = 256 - 256 // 8
    found = {cost.row.path: cost.bytes_per_device for cost in audit.replicated}
    assert found == expected
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert audit.replicated_bytes_per_device == 3 * (24 + 96 + 42) + 224
    for cost in audit.replicated:
        over, why = REASONS[cost.row.path.split('/')[-1]]
        assert cost.reason.startswith(f'{over}: ') and why in cost.reason, cost.row.path


# Budgets.


def test_a_budget_one_byte_too_small(plan):
    assert plan.audit(budget=PER_DEVICE).bytes_per_device == PER_DEVICE
    with pytest.raises(ValueError) as error:
        plan.audit(budget=PER_DEVICE - 1)
    message = str(error.value)
    for part in (
        '1,704 bytes, 1 more than the budget of 1,703',
        'parameters 480, optimizer 964, other 260',
        'opt_state/0/mu/table 256',
        '710 of the bytes are replicated',
        'more devices',
    ):
        assert part in message


def test_the_advice_if_most_bytes_are_replicated(partitioner):
    state = {'params': {'big': boxed((8, 64), (None, 'heads')), 'w': boxed((8, 8), (None, 'mlp'))}}
    with pytest.raises(ValueError) as error:
        partitioner.audit(jax.eval_shape(lambda: state), budget=2000)
    message = str(error.value)
    assert '2,176 bytes, 176 more than the budget of 2,000' in message
    assert 'array is params/big' in message and 'heads: a rule replicates it' in message


# Arrays on devices.


def test_rows_are_what_devices_hold(plan, state):
    audit = plan.audit(state)
    arrays = dict(zip((row.path for row in audit.rows), jax.tree.leaves(state), strict=True))
    for row in audit.rows:
        array = arrays[row.path]
        shard = array.addressable_shards[0].data
        assert (row.shape, row.shard_shape) == (array.shape, shard.shape)
        assert np.dtype(row.dtype) == array.dtype
        assert (row.bytes_total, row.bytes_per_device) == (array.nbytes, shard.nbytes)
        assert array.sharding.is_equivalent_to(NamedSharding(audit.mesh, row.spec), array.ndim)
    assert audit.bytes_by_device == held_by_device(state)
    assert audit.misplaced == ()


def test_a_state_after_init_is_audited_as_it_was_planned(partitioner, named, plan, audit, state):
    assert plan.audit(state) == audit
    assert partitioner.audit(named) == partitioner.audit(state, named=named) == audit


def moved(state, name, where):
    return {**state, 'params': {**state['params'], name: jax.device_put(*where)}}


def test_an_array_on_one_device(plan, state):
    table = state['params']['table']
    now = moved(state, 'table', (table, jax.devices()[3]))
    audit = plan.audit(now)
    rest = PER_DEVICE - 256
    expected = {**dict.fromkeys(range(8), rest), 3: rest + 2048}
    assert audit.bytes_by_device == expected == held_by_device(now)
    assert audit.bytes_per_device == 3496
    assert audit.balance == pytest.approx((8 * 1448 + 2048) / (8 * 3496))
    (cost,) = audit.misplaced
    assert (cost.row.path, cost.row.bytes_per_device) == ('params/table', 2048)
    assert (cost.row.shard_shape, cost.bytes_per_device) == ((32, 16), 2048 - 256)
    is_now, _, should_be = cost.reason.partition(' but the plan ')
    assert 'SingleDeviceSharding' in is_now and "P('model', 'data')" in should_be
    assert 'plan' in str(audit) and cost.reason in str(audit)


def test_roles_over_budget_are_those_of_the_fullest_device(plan, state):
    """Two arrays are each on one device, and neither device holds both."""
    now = moved(state, 'table', (state['params']['table'], jax.devices()[3]))
    now = moved(now, 'gate', (state['params']['gate'], jax.devices()[4]))
    fullest = PER_DEVICE - 256 - 128 + 2048
    assert max(held_by_device(now).values()) == fullest
    with pytest.raises(ValueError) as error:
        plan.audit(now, budget=1)
    of_parameters = fullest - OF_OPTIMIZER - OF_OTHERS
    assert f'would hold {fullest:,} bytes' in str(error.value)
    assert f'parameters {of_parameters:,}, optimizer 964, other 260' in str(error.value)


def without(state, name):
    return {k: v for k, v in state.items() if k != name}


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda s: {**s, 'ema': jnp.zeros(3)}, 'ema'),
        (lambda s: {**s, 'noise': jnp.zeros((8, 8))}, r'noise.*\(8, 8\).*\(64,\)'),
        (lambda s: s['params'], 'gate'),
        (lambda s: without(s, 'noise'), 'noise'),
        (lambda s: without(s, 'opt_state'), 'opt_state'),
    ],
    ids=['one more', 'another shape', 'only a part', 'one less', 'no optimizer'],
)
def test_a_state_that_is_not_the_planned_one(plan, state, change, message):
    """The bytes of a part must not pass for the bytes of the whole."""
    with pytest.raises(ValueError, match=message):
        plan.audit(change(state))


# Policies.


@pytest.mark.parametrize(
    'policy, shape, axes, text, held, cost',
    [
        ('replicate', (30, 16), 'data', 'size 30 is not divisible by 4', 4 * 30 * 8, 960 - 240),
        ('pad', (30, 16), 'data', 'padded to 32', 4 * 30 * 8, 960 - 240),
        ('drop_axis', (6, 2), ('data', 'model'), 'not sharded over data', 4 * 6, 24 - 48 // 8),
    ],
)
def test_costs_of_policies(policy, shape, axes, text, held, cost):
    rules = [('embed', axes), ('mlp', 'model')]
    partitioner = PjitPartitioner(2, AxisRules(rules, on_indivisible=policy))
    state = {'w': boxed(shape, ('embed', 'mlp')), 'even': boxed((8, 2), ('embed', 'mlp'))}
    audit = partitioner.audit(jax.eval_shape(lambda: state))
    (found,) = audit.policies
    assert (found.row.path, found.row.bytes_per_device) == ('w', held)
    assert found.bytes_per_device == cost
    assert found.reason.startswith(f'embed: {policy}, ') and text in found.reason
    section = str(audit).partition('policy')[2]
    assert found.reason in section and f' {cost:,} ' in section


# As text, as tables, as JSON.


def test_text_has_the_sums(audit):
    """The trainer writes this text into model-info.txt."""
    lines = [' '.join(line.split()) for line in str(audit).splitlines()]
    for line in ('parameters 480 28.2%', 'optimizer 964 56.6%', 'other 260 15.3%'):
        assert line in lines
    assert f'15 arrays, {TOTAL:,} bytes; {PER_DEVICE:,} bytes per device' in str(audit)
    assert 'data 4 x model 2' in str(audit)


@pytest.mark.parametrize('width', [120, 60])
def test_drawn_by_rich(audit, width):
    console = pytest.importorskip('rich.console', reason='tables for a terminal need rich')
    drawn = console.Console(record=True, width=width, file=io.StringIO())
    drawn.print(audit)
    text = drawn.export_text()
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    for number in ('480', '28.2%', '964', '260', '224', '96', '42', '1,704', '710'):
        assert number in words


def test_json(audit):
    """Read back, it has the values of the attributes."""
    read = json.loads(json.dumps(audit.as_dict()))
    assert read == audit.as_dict()
    assert read['mesh'] == {'data': 4, 'model': 2}
    assert read['by_role'] == {'parameters': 480, 'optimizer': 964, 'other': 260}
    assert (read['bytes_total'], read['bytes_per_device']) == (TOTAL, PER_DEVICE)
    assert read['bytes_by_device'] == {str(i): PER_DEVICE for i in range(8)}
    assert read['replicated_bytes_per_device'] == audit.replicated_bytes_per_device
    assert read['balance'] == 1.0
    assert len(read['rows']) == len(audit.rows)
    costs = {cost.row.path: cost for cost in audit.replicated}
    for held, row in zip(read['rows'], audit.rows, strict=True):
        cost = costs.get(row.path)
        assert eval(held['spec'], {'P': P}) == row.spec
        assert held['replicated_bytes_per_device'] == (cost.bytes_per_device if cost else 0)
        assert held['reason'] == (cost.reason if cost else '')
        assert [d['name'] for d in held['dimensions']] == [*row.logical_axes]
        for key in ('path', 'dtype', 'role', 'bytes_total', 'bytes_per_device'):
            assert held[key] == getattr(row, key), key
        for key in ('shape', 'shard_shape'):
            assert held[key] == [*getattr(row, key)], key
