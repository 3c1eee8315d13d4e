"""Pictures of shards and memory agree with jax's arrays and with the audit."""

import io
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from rich.console import Console

from partitioning import (
    PjitPartitioner,
    ShardingPicture,
    TrainState,
    draw_audit,
    visualize_sharding,
)
from partitioning.compat.torch_xla import mark_sharding
from partitioning.pictures.shards import compact_ids

pytestmark = pytest.mark.core

PNG = b'\x89PNG'


def mesh_of(**sizes):
    """Devices in another order than their numbers."""
    devices = np.array(jax.devices()[:: -1 if len(sizes) > 1 else 1])
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


FLAT, SQUARE, CUBE = mesh_of(data=8), mesh_of(data=4, model=2), mesh_of(a=2, b=2, c=2)


def blocks_on_devices(shape, sharding):
    """The devices of each block, from the shards of a real array."""
    held = {}
    for shard in jax.device_put(jnp.zeros(shape), sharding).addressable_shards:
        starts = [s.start or 0 for s in shard.index]
        block = tuple((a, a + n) for a, n in zip(starts, shard.data.shape, strict=True))
        held.setdefault(block, []).append(shard.device.id)
    return {block: tuple(sorted(ids)) for block, ids in held.items()}


LAYOUTS = [
    (FLAT, (16,), P('data')),
    (SQUARE, (), P()),
    (SQUARE, (16,), P()),
    (SQUARE, (16,), P(('model', 'data'))),
    (SQUARE, (8, 4), P('data', 'model')),
    (SQUARE, (8, 4), P('model', 'data')),
    (SQUARE, (8, 4), P(None, 'model')),
    (SQUARE, (8, 16), P(None, ('data', 'model'))),
    (SQUARE, (4, 8, 12), P('data', None, 'model')),
    (CUBE, (4, 8, 12), P('a', 'b', 'c')),
    (CUBE, (4, 8, 12, 2), P(('b', 'a'), None, 'c')),
]


@pytest.mark.parametrize('mesh, shape, spec', LAYOUTS)
def test_blocks_are_those_of_the_array(mesh, shape, spec):
    sharding = NamedSharding(mesh, spec)
    picture = visualize_sharding(shape, sharding)
    held = blocks_on_devices(shape, sharding)
    assert picture.devices == held
    drawn = [block for panel in picture.panels for row in panel.rows for block in row]
    assert sorted(drawn) == sorted(held)  # each block is in one panel
    for number, other in enumerate(drawn):
        assert picture.color(other) not in map(picture.color, drawn[:number])


@pytest.mark.parametrize('mesh, shape, spec', LAYOUTS)
def test_figures_number_and_color_every_block(mesh, shape, spec):
    picture = visualize_sharding(shape, NamedSharding(mesh, spec))
    figure = picture.figure()
    assert len(figure.axes) == len(picture.panels)
    for plot, panel in zip(figure.axes, picture.panels, strict=True):
        written = {(t.get_position()[1] - 0.5, t.get_position()[0] - 0.5): t for t in plot.texts}
        colors = plot.collections[0].get_array()
        assert len(written) == sum(map(len, panel.rows))
        for (y, x), text in written.items():
            block = panel.rows[int(y)][int(x)]
            assert text.get_text() == picture.label(block)
            assert tuple(colors[int(y), int(x)]) == picture.color(block)
        assert plot.yaxis_inverted()  # the first row is at the top


def test_text():
    picture = visualize_sharding((8, 4), NamedSharding(mesh_of(data=8), P('data')))
    assert str(picture).splitlines() == [
        "(8, 4), P('data') over data 8",
        '      0:4',
        *(f'{i}:{i + 1}    {i}' for i in range(8)),
    ]
    crossed = visualize_sharding((8, 4), NamedSharding(SQUARE, P(None, 'model')), title='mine')
    assert str(crossed).splitlines() == [
        'mine',
        '       0:2      2:4',
        '0:8   1,3..7   0,2..6',
    ]


def test_the_two_dimensions_with_most_blocks_are_drawn():
    stacked = visualize_sharding((4, 8, 12), NamedSharding(SQUARE, P('data', None, 'model')))
    assert stacked.drawn == (0, 2) and len(stacked.panels) == 1
    layers = visualize_sharding((4, 8, 12), NamedSharding(SQUARE, P(None, 'data', None)))
    assert layers.drawn == (1, 2)
    cube = visualize_sharding((4, 8, 12), NamedSharding(CUBE, P('a', 'b', 'c')))
    assert cube.drawn == (1, 2)
    assert [panel.place for panel in cube.panels] == [{0: (0, 2)}, {0: (2, 4)}]
    assert 'dimension 0 at 2:4' in str(cube)
    turned = visualize_sharding((4, 8, 12), NamedSharding(CUBE, P('a', 'b', 'c')), dims=(-1, 0))
    assert turned.drawn == (2, 0) and turned.devices == cube.devices
    assert turned.panels[1].rows[0][1] == ((2, 4), (4, 8), (0, 6))


def printed(picture, width, **settings):
    console = Console(width=width, file=io.StringIO(), **settings)
    console.print(picture)
    return console.file.getvalue()


def test_rich_prints_the_text_in_color():
    picture = visualize_sharding((8, 4), NamedSharding(SQUARE, P('data', 'model')))
    plain = [line.rstrip() for line in printed(picture, 100).splitlines()]
    assert plain == str(picture).splitlines()
    colored = printed(picture, 100, force_terminal=True, color_system='truecolor')
    for block in picture.devices:
        assert '48;2;{};{};{}m'.format(*picture.color(block)) in colored


def test_a_narrow_terminal_gets_bands_of_columns():
    sharding = NamedSharding(SQUARE, P(None, ('data', 'model')))
    text = printed(visualize_sharding((8, 800), sharding, title='t'), 30)
    assert max(map(len, text.splitlines())) <= 30
    bands = [line.split()[1:] for line in text.splitlines() if line.startswith('0:8')]
    assert len(bands) > 1 and list(itertools.chain(*bands)) == list('76543210')


@pytest.mark.parametrize(
    'ids, expected',
    [
        ((3,), '3'),
        ((0, 1), '0,1'),
        ((0, 1, 2), '0-2'),
        ((0, 2), '0,2'),
        ((0, 8, 16, 56), '0,8,16,56'),
        ((0, 8, 16, 24), '0,8..24'),
        ((0, 1, 2, 8, 9, 10), '0-2,8-10'),
        (tuple(range(64)), '0-63'),
        ((0, 1, 16, 17, 32, 33, 48, 49), '0..49 (8)'),
    ],
)
def test_numbers_of_devices_in_few_characters(ids, expected):
    assert compact_ids(ids) == expected


def test_arrays_that_have_a_sharding():
    sharding = NamedSharding(SQUARE, P('data', 'model'))
    array = jax.device_put(jnp.zeros((8, 4)), sharding)
    expected = blocks_on_devices((8, 4), sharding)
    for x in (
        array,
        jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding),
        nn.Partitioned(array, ('data', 'model')),
    ):
        assert visualize_sharding(x).devices == expected
    alone = visualize_sharding((8, 4), SingleDeviceSharding(jax.devices()[3]))
    assert alone.devices == {((0, 8), (0, 4)): (3,)}


OVER_DATA, REPLICATED = NamedSharding(SQUARE, P('data')), NamedSharding(SQUARE, P())


@pytest.mark.parametrize(
    'x, sharding, dims, message',
    [
        (np.zeros((8, 4)), None, None, r'ndarray of shape \(8, 4\) has no sharding.*sharding='),
        ((8, 4), None, None, 'has no sharding'),
        ((8, 4), P('data'), None, 'has no sharding.*NamedSharding'),
        ((8,), NamedSharding(SQUARE, P('data', 'model')), None, r'2 entries.*1 dimension, \(8,\)'),
        ((6, 4), OVER_DATA, None, '6'),
        ((8,), NamedSharding(AbstractMesh((8,), ('data',)), P('data')), None, 'abstract mesh'),
        ((True, 4), OVER_DATA, None, r'shape \(True, 4\).*integers >= 0'),
        (jax.ShapeDtypeStruct((24.0, 4), 'float32'), OVER_DATA, None, 'integers >= 0'),
        (8, OVER_DATA, None, r'^8 must be an array or a shape'),
        ('ab', OVER_DATA, None, "^'ab' must be an array or a shape"),
        ((8, 4), REPLICATED, (0, 2), r'dims=\(0, 2\).*two different dimensions.*\(8, 4\)'),
        ((8, 4), REPLICATED, (1, -1), 'two different dimensions'),
        ((8, 4), REPLICATED, 1, 'dims=1 must be the numbers of two'),
    ],
)
def test_values_that_cannot_be_shown(x, sharding, dims, message):
    with pytest.raises(ValueError, match=message):
        visualize_sharding(x, sharding, dims=dims)
    # jax has not cached 24.0, which it takes for the same size as 24.
    bounds = visualize_sharding((np.int64(24), 4), OVER_DATA).ranges[0]
    assert bounds[0] == (0, 6) and all(type(bound) is int for bound in bounds[0])


def test_padded_arrays_are_drawn_with_or_without_padding():
    padded = mark_sharding(np.ones((9, 2)), SQUARE, ('data', None), on_indivisible='pad')
    with pytest.raises(ValueError, match=r'\.array .*\.unpadded\(\)'):
        visualize_sharding(padded)
    assert visualize_sharding(padded.array).ranges[0] == ((0, 3), (3, 6), (6, 9), (9, 12))


def test_files_and_notebooks(tmp_path):
    sharding = NamedSharding(SQUARE, P('data', 'model'))
    picture = visualize_sharding((8, 4), sharding, png=tmp_path / 'blocks.png')
    assert (tmp_path / 'blocks.png').read_bytes()[:4] == picture._repr_png_()[:4] == PNG


def test_blocks_too_small_for_numbers_have_none():
    blocks = itertools.product(range(256), range(16))
    devices = {((i, i + 1), (j, j + 1)): (16 * i + j,) for i, j in blocks}
    picture = ShardingPicture(shape=(256, 16), title='4,096', devices=devices, drawn=(0, 1))
    plot = picture.figure().axes[0]
    assert not plot.texts
    assert plot.collections[0].get_array().shape[:2] == (256, 16)
    assert len(plot.get_yticks()) <= 20


# Memory.


def state(key):
    kernel = nn.LogicallyPartitioned(jnp.zeros((64, 32)), ('embed', 'mlp'))
    bias = nn.LogicallyPartitioned(jnp.zeros(64), ('embed',))
    return TrainState.create({'params': {'kernel': kernel, 'bias': bias}}, optax.adam(1e-3))


@pytest.fixture(name='plan', scope='module')
def _plan():
    return PjitPartitioner(2).plan(state, jax.random.key(0))


@pytest.fixture(name='audit', scope='module')
def _audit(plan):
    return plan.audit()


def bars(figure):
    """For each bar by its label, the bottom and top at each device."""
    found = {}
    for collection in figure.axes[0].collections:
        corners = [path.vertices[:, 1] for path in collection.get_paths()]
        found[collection.get_label().split(',')[0]] = [(c.min(), c.max()) for c in corners]
    return found


def test_bars_are_the_bytes_of_the_audit(audit):
    drawn = bars(draw_audit(audit))
    assert {*drawn} == {'parameters', 'optimizer', 'other'}
    for role, held in audit.by_role.items():
        assert [top - bottom for bottom, top in drawn[role]] == pytest.approx([held] * 8)
    tops = [top for _, top in drawn['other']]
    assert tops == pytest.approx(list(audit.bytes_by_device.values()))


def test_misplaced_arrays_have_a_separate_bar(plan):
    elsewhere = SingleDeviceSharding(jax.devices()[5])
    moved = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), elsewhere), plan.abstract_state
    )
    audit = plan.audit(moved)
    assert audit.misplaced
    (label,) = (name for name in bars(draw_audit(audit)) if 'plan' in name)
    heights = [top - bottom for bottom, top in bars(draw_audit(audit))[label]]
    assert heights[5] == max(audit.bytes_by_device.values())
    assert not any(heights[:5] + heights[6:])


@pytest.mark.parametrize('budget, line', [(20_000, True), (4_000, True), (10**9, False)])
def test_budgets(audit, budget, line):
    """A line if it can be seen next to the bars, or a note if it is far above them."""
    plot = draw_audit(audit, budget=budget).axes[0]
    assert [float(x.get_ydata()[0]) for x in plot.lines] == ([budget] if line else [])
    assert plot.get_ylim()[1] > budget or not line
    assert len(plot.texts) == (0 if line else 1)
    said = plot.lines[0].get_label() if line else plot.texts[0].get_text()
    assert f'{budget:,} bytes' in said or 'GiB' in said


@pytest.mark.parametrize('budget', [np.int64(2**30), np.float32(2**30), 2.0**30])
def test_budgets_of_any_type_of_number(audit, budget):
    audit.check_budget(budget)
    draw_audit(audit, budget=budget)


@pytest.mark.parametrize('budget', [0, -1, True, float('nan'), float('inf'), '16 GiB', 1j])
def test_budgets_that_are_not_bytes(audit, budget):
    for use in (audit.check_budget, lambda budget: draw_audit(audit, budget=budget)):
        with pytest.raises(ValueError, match=r'budget=.*number of bytes above 0'):
            use(budget)


def test_a_file_of_the_memory(audit, tmp_path):
    figure = draw_audit(audit, tmp_path / 'memory.png', title='mine')
    assert (tmp_path / 'memory.png').read_bytes()[:4] == figure._repr_png_()[:4] == PNG
    assert figure.get_suptitle() == 'mine'


def test_values_that_are_not_audits():
    with pytest.raises(TypeError, match=r'plan.audit\(\), not a dict'):
        draw_audit({'w': jnp.ones(8)})
