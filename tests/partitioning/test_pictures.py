"""Pictures of layouts say what jax's arrays and the audit say."""

import io
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from partitioning import (
    PjitPartitioner,
    ShardingPicture,
    TrainState,
    draw_audit,
    unbox,
    visualize_sharding,
)
from partitioning.compat.torch_xla import mark_sharding
from partitioning.pictures.shard_grid import compact_ids

pytestmark = pytest.mark.core

PNG = b'\x89PNG'


def mesh_of(**sizes):
    """Devices in an order that is not that of their numbers."""
    devices = np.array(jax.devices()[:: -1 if len(sizes) > 1 else 1])
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


FLAT, SQUARE, CUBE = mesh_of(data=8), mesh_of(data=4, model=2), mesh_of(a=2, b=2, c=2)


def held_by_hand(shape, sharding):
    """Who holds which block, of the shards of an array that is really there."""
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
    held = held_by_hand(shape, sharding)
    assert picture.devices == held
    drawn = [block for panel in picture.panels for row in panel.rows for block in row]
    assert sorted(drawn) == sorted(held)  # each block once, whatever the panels
    for number, other in enumerate(drawn):
        assert picture.color(other) not in map(picture.color, drawn[:number])


@pytest.mark.parametrize('mesh, shape, spec', LAYOUTS)
def test_figures_number_and_colour_every_block(mesh, shape, spec):
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
        assert plot.yaxis_inverted()  # the first row is above


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


def test_of_more_dimensions_the_two_in_most_blocks_are_drawn():
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


def test_rich_prints_the_text_in_colour():
    picture = visualize_sharding((8, 4), NamedSharding(SQUARE, P('data', 'model')))
    plain = [line.rstrip() for line in printed(picture, 100).splitlines()]
    assert plain == str(picture).splitlines()
    coloured = printed(picture, 100, force_terminal=True, color_system='truecolor')
    for block in picture.devices:
        assert '48;2;{};{};{}m'.format(*picture.color(block)) in coloured


def test_a_narrow_terminal_gets_the_columns_one_below_the_other():
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
def test_device_numbers_in_few_characters(ids, expected):
    assert compact_ids(ids) == expected


def test_what_has_a_sharding():
    sharding = NamedSharding(SQUARE, P('data', 'model'))
    array = jax.device_put(jnp.zeros((8, 4)), sharding)
    expected = held_by_hand((8, 4), sharding)
    for x in (
        array,
        jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding),
        nn.Partitioned(array, ('data', 'model')),
    ):
        assert visualize_sharding(x).devices == expected
    alone = visualize_sharding((8, 4), SingleDeviceSharding(jax.devices()[3]))
    assert alone.devices == {((0, 8), (0, 4)): (3,)}


@pytest.mark.parametrize(
    'x, sharding, settings, message',
    [
        (np.zeros((8, 4)), None, {}, r'ndarray of shape \(8, 4\) has no sharding.*sharding='),
        ((8, 4), None, {}, 'has no sharding'),
        ((8, 4), P('data'), {}, 'has no sharding.*NamedSharding'),
        ((8,), NamedSharding(SQUARE, P('data', 'model')), {}, 'for 2 dimensions.*has 1'),
        ((6, 4), NamedSharding(SQUARE, P('data')), {}, '6'),
        ((8,), NamedSharding(AbstractMesh((8,), ('data',)), P('data')), {}, 'abstract mesh'),
        ((8, 4), NamedSharding(SQUARE, P()), {'dims': (0, 2)}, r'dims=\(0, 2\).*2, of \(8, 4\)'),
        ((8, 4), NamedSharding(SQUARE, P()), {'dims': (1, -1)}, 'two different dimensions'),
        ((8, 4), NamedSharding(SQUARE, P()), {'dims': (0,)}, 'two different dimensions'),
    ],
)
def test_what_cannot_be_shown(x, sharding, settings, message):
    with pytest.raises(ValueError, match=message):
        visualize_sharding(x, sharding, **settings)


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


def audit_of(given=None, **settings):
    partitioner = PjitPartitioner(2, **settings)
    named = partitioner.eval_shape(state, jax.random.key(0))
    return partitioner.audit(named if given is None else given, named)


def bars(figure):
    """What every bar says: by its label the bottom and top of each device's."""
    found = {}
    for collection in figure.axes[0].collections:
        corners = [path.vertices[:, 1] for path in collection.get_paths()]
        found[collection.get_label().split(',')[0]] = [(c.min(), c.max()) for c in corners]
    return found


def test_bars_are_the_bytes_of_the_audit():
    audit = audit_of()
    drawn = bars(draw_audit(audit))
    assert {*drawn} == {'parameters', 'optimizer', 'other'}
    for category, held in audit.by_category.items():
        assert [top - bottom for bottom, top in drawn[category]] == pytest.approx([held] * 8)
    tops = [top for _, top in drawn['other']]
    assert tops == pytest.approx(list(audit.bytes_by_device.values()))


def test_what_is_not_as_the_rules_say_has_a_bar_of_its_own():
    elsewhere = SingleDeviceSharding(jax.devices()[5])
    audit = audit_of(jax.device_put(unbox(state(jax.random.key(0))), elsewhere))
    assert audit.misplaced
    drawn = bars(draw_audit(audit))
    heights = [top - bottom for bottom, top in drawn['not as the rules say']]
    assert heights[5] == max(audit.bytes_by_device.values())
    assert not any(heights[:5] + heights[6:])


@pytest.mark.parametrize('budget, line', [(20_000, True), (4_000, True), (10**9, False)])
def test_budget(budget, line):
    """A line where it can be seen beside the bars; a note where it is far above."""
    plot = draw_audit(audit_of(), budget=budget).axes[0]
    assert [float(x.get_ydata()[0]) for x in plot.lines] == ([budget] if line else [])
    assert plot.get_ylim()[1] > budget or not line
    assert len(plot.texts) == (0 if line else 1)
    said = plot.lines[0].get_label() if line else plot.texts[0].get_text()
    assert f'{budget:,} bytes' in said or 'GiB' in said


@pytest.mark.parametrize('budget', [0, -1, True, float('nan'), '16 GiB'])
def test_a_budget_that_is_none(budget):
    with pytest.raises(ValueError, match='number of bytes above 0'):
        draw_audit(audit_of(), budget=budget)


def test_a_file_of_the_memory(tmp_path):
    figure = draw_audit(audit_of(), tmp_path / 'memory.png', title='mine')
    assert (tmp_path / 'memory.png').read_bytes()[:4] == figure._repr_png_()[:4] == PNG
    assert figure.get_suptitle() == 'mine'


@pytest.mark.parametrize(
    'x, dims, message',
    [
        ((24.0, 4), None, r'shape \(24.0, 4\) must be whole numbers'),
        ((-8, 4), None, 'must be whole numbers of 0 or more'),
        ((True, 4), None, 'must be whole numbers'),
        (jax.ShapeDtypeStruct((24.0, 4), 'float32'), None, 'must be whole numbers'),
        (8, None, 'is no array and no shape'),
        ('ab', None, 'is no array and no shape'),
        ((24, 4), 1, 'dims=1 must be the numbers of two'),
        ((24, 4), (0.0, 1), 'must be the numbers of two'),
        ((24, 4), (0, 2), 'two different dimensions'),
    ],
)
def test_shapes_and_dimensions_that_are_none(x, dims, message):
    sharding = NamedSharding(SQUARE, P('data'))
    with pytest.raises(ValueError, match=message):
        visualize_sharding(x, sharding, dims=dims)
    # Nothing of it stays with jax, which takes 24.0 and 24 for one shape.
    bounds = visualize_sharding((np.int64(24), 4), sharding).ranges[0]
    assert bounds[0] == (0, 6) and all(type(bound) is int for bound in bounds[0])


def test_padded_arrays_are_drawn_with_or_without():
    padded = mark_sharding(np.ones((9, 2)), SQUARE, ('data', None), on_indivisible='pad')
    with pytest.raises(ValueError, match=r'draw its .array .*or .unpadded\(\)'):
        visualize_sharding(padded)
    assert visualize_sharding(padded.array).ranges[0] == ((0, 3), (3, 6), (6, 9), (9, 12))


def test_what_budgets_are():
    names = [('w', (None,))]
    partitioner = PjitPartitioner(mesh=FLAT, params_axes_names_override=names)
    audit = partitioner.audit({'w': jax.ShapeDtypeStruct((8,), 'float32')})
    for budget in (np.int64(2**30), np.float32(2**30), 2.0**30):
        audit.check_budget(budget)
        draw_audit(audit, budget=budget)
    with pytest.raises(ValueError, match='more than the budget of 4'):
        audit.check_budget(np.int64(4))
    for budget in (float('inf'), np.inf, float('nan'), 0, True, '1', 1j):
        with pytest.raises(ValueError, match='budget='):
            audit.check_budget(budget)
        with pytest.raises(ValueError, match='budget='):
            draw_audit(audit, budget=budget)


def test_states_are_audited_before_they_are_drawn():
    with pytest.raises(TypeError, match=r'not a dict: give it partitioner.audit\(state\)'):
        draw_audit({'w': jnp.ones(8)})
