"""The machine: its chips, the links between them, and what each axis of the mesh spans."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np

from meshwright.report.forecasts import Forecast
from meshwright.report.page.markup import Html, tag
from partitioning.mesh import AxisRing, Placement
from partitioning.pictures.mesh_drawing import arrange
from partitioning.plan.tables import count


def show_machine(forecast: Forecast, name: str) -> Html:
    """Returns the pictures of the mesh, one for each axis of more than one device.

    Args:
      forecast: the forecast.
      name: the beginning of the ids of the pictures' parts within the page.
    """
    used = [axis for axis, size in forecast.mesh.items() if size > 1] or [*forecast.mesh][-1:]
    rings = {ring.axis: ring for ring in forecast.rings}
    panels = []
    for axis in used:
        drawn = None
        if forecast.placement is not None:
            drawn = _picture_axis(forecast.placement, forecast.mesh, axis, f'{name}-{axis}')
        title = tag(
            'figcaption', tag('b', f'{axis} {forecast.mesh[axis]}'), _describe_ring(rings.get(axis))
        )
        panels.append(tag('figure', title, drawn))
    slices = f'{forecast.num_slices} slices of ' if forecast.num_slices > 1 else ''
    unused = [axis for axis, size in forecast.mesh.items() if size == 1]
    words = f'{slices}{forecast.topology}, {count(forecast.num_devices, "device")}'
    if unused and len(unused) < len(forecast.mesh):
        words += f'; {", ".join(unused)} {"has" if len(unused) == 1 else "have"} size 1'
    return tag(
        'section',
        tag('h3', 'Machine'),
        tag('p', f'{words}.', class_='words'),
        tag('div', *panels, class_='panels'),
        _key(forecast.placement),
        class_='machine',
    )


def _describe_ring(ring: AxisRing | None) -> Html | None:
    if ring is None or ring.size == 1:
        return None
    words = f' {ring.network}'
    if ring.worst_hops == 1 and ring.network == 'ICI':
        words += ', each step is one link, and so is the way back to the first device'
    elif ring.mean_hops is not None and ring.worst_hops is not None:
        words += f', {ring.mean_hops:.2f} links per step of the ring, {ring.worst_hops} at most'
    return tag('small', words)


def _key(placement: Placement | None) -> Html | None:
    if placement is None:
        return None
    words = (
        'Colors and numbers show the position of a device along the axis. The thick line, where '
        'there is one, is the ring of the axis through the first device. '
    )
    if placement.bounds:
        rings = [axis for axis, closed in zip('xyz', placement.wrap, strict=True) if closed]
        closed = ', '.join(rings)
        if rings:
            words += f'Links join both ends of the machine along {closed}: '
            words += 'they are drawn as ends outside a plane. '
        else:
            words += 'No links join the ends of the machine. '
        if placement.bounds[2] > 1:
            words += 'Diagonal ends lead to the same place in the planes before and behind.'
    else:
        words += 'Each row is a host, whose devices the fast network joins.'
    if len(placement.places) > _MOST_LINKED:
        words += f' Links between more than {_MOST_LINKED:,} devices are not drawn.'
    return tag('p', words.strip(), class_='key')


_SHADES = 16  # p0 to p15 in page.css
_DARK_SHADES = 9  # white numbers up to here
_NUMBERED = 256  # the most devices that have numbers, and a text for the mouse
_MOST_LINKED = 2048  # the most devices between which links are drawn
_LONGEST_RING = 16  # longer rings would cover the picture
_GAP = 1.1  # the space between planes, in devices
_HALF = 0.34  # half the side of a device; neighbours are 1 apart
_END = 0.58  # the length of the end of a link that closes a ring
_ASIDE = 0.46  # the length of the end of a link to another plane, along x and y


def _picture_axis(placement: Placement, mesh: Mapping[str, int], axis: str, name: str) -> Html:
    """Draws the devices of a mesh, colored by their position along an axis; `name` is its id."""
    places, ratio, captions = arrange(placement, _planes_across(placement), _GAP)
    positions = np.indices(tuple(mesh.values())).reshape(len(mesh), -1)
    width = ratio * _HALF
    (left, top), (right, bottom) = places.min(axis=0) - 1, places.max(axis=0) + 1
    large = max(0.42, (right - left) / 48)  # so that captions of large machines can be read
    parts: list[Html | None] = [
        _links(placement, places) if len(places) <= _MOST_LINKED else None,
        _ring(places, mesh, axis) if len(places) <= _NUMBERED else None,
        *_devices(placement, places, width, positions, [*mesh], axis),
        _ring(places, mesh, axis) if len(places) > _NUMBERED else None,
        *(
            tag('text', text, x=x, y=y - 0.2, font_size=large, class_='caption')
            for x, y, text in captions
            if text
        ),
    ]
    top -= large - 0.42
    return tag(
        'svg',
        *parts,
        id=name,
        viewbox=' '.join(f'{n:.6g}' for n in (left, top, right - left, bottom - top)),
        width=f'{min(46 * (right - left), 900):.0f}',
        role='img',
        aria_label=f'{len(places)} devices, colored by their position along {axis}',
    )


def _planes_across(placement: Placement) -> int | None:
    """How many planes are next to each other, for a picture that is a little wider than high."""
    if not placement.bounds:
        return None
    x, y, planes = placement.bounds
    slices = 1 + max(place[0] for place in placement.places)

    def distance(across: int) -> float:
        wide, high = across * (x + 1), -(-planes // across) * (y + 1) * slices
        return abs(math.log(wide / (1.4 * high)))

    return min((n for n in range(1, planes + 1) if planes % n == 0), key=distance)


def _devices(
    placement: Placement,
    places: np.ndarray,
    width: float,
    positions: np.ndarray,
    axes: list[str],
    axis: str,
) -> Iterable[Html]:
    along = positions[axes.index(axis)]
    others = np.delete(positions, axes.index(axis), axis=0)
    ring = np.flatnonzero(~others.any(axis=0)).tolist() if 0 < along.max() < _LONGEST_RING else []
    shades = along * (_SHADES - 1) // max(int(along.max()), 1)
    if len(places) > _NUMBERED:
        for shade in np.unique(shades).tolist():
            squares = ''.join(
                f'M{x - width:.5g} {y - _HALF:.5g}h{2 * width:.5g}v{2 * _HALF}h{-2 * width:.5g}z'
                for x, y in places[shades == shade].tolist()
            )
            yield tag('path', d=squares, class_=f'chip p{shade}')
        return
    size = 0.38 if width == _HALF and along.max() < 100 else 0.26
    for number, ((x, y), shade) in enumerate(zip(places.tolist(), shades.tolist(), strict=True)):
        where = ', '.join(f'{a} {p}' for a, p in zip(axes, positions[:, number], strict=True))
        title = tag('title', f'{where}: {_place_str(placement, placement.places[number])}')
        square = tag(
            'rect',
            x=x - width,
            y=y - _HALF,
            width=2 * width,
            height=2 * _HALF,
            rx=0.1 * (width / _HALF),
        )
        label = tag('text', f'{along[number]}', x=x, y=y, font_size=size)
        ink = 'light' if shade < _DARK_SHADES else 'dark'
        on = ' on' if number in ring else ''
        yield tag('g', title, square, label, class_=f'chip p{shade} {ink}{on}')


def _place_str(placement: Placement, place: tuple[int, ...]) -> str:
    if not placement.bounds:
        return f'host {place[1]}, device {place[2]}'
    several = len({p[0] for p in placement.places}) > 1
    chip = ', '.join(f'{a} {n}' for a, n in zip('xyz', place[1:4], strict=True))
    return f'slice {place[0]}, {chip}' if several else chip


def _ring(places: np.ndarray, mesh: Mapping[str, int], axis: str) -> Html | None:
    """The ring of an axis through the first device. Its long steps are bent and thin."""
    size = mesh[axis]
    if size == 1 or size > _LONGEST_RING:
        return None
    first = [slice(None) if name == axis else 0 for name in mesh]
    line = places.reshape(*mesh.values(), 2)[tuple(first)].tolist()
    short, long = [], []
    for (x, y), (u, v) in itertools.pairwise([*line, line[0]] if size > 2 else line):
        if math.hypot(u - x, v - y) < 1.3:
            short.append(f'M{x:.5g} {y:.5g}L{u:.5g} {v:.5g}')
        else:
            bent = (x + u) / 2 + 0.12 * (v - y), (y + v) / 2 - 0.12 * (u - x)
            long.append(f'M{x:.5g} {y:.5g}Q{bent[0]:.5g} {bent[1]:.5g} {u:.5g} {v:.5g}')
    return tag(
        'g',
        tag('path', d=''.join(short), class_='ring') if short else None,
        tag('path', d=''.join(long), class_='ring long') if long else None,
    )


def _links(placement: Placement, places: np.ndarray) -> Html:
    """The links between chips, or the networks of a machine of hosts."""
    if not placement.bounds:
        return _networks(placement, places)
    chips: dict[tuple[int, ...], tuple[float, float]] = {}
    for (*chip, core), (x, y) in zip(placement.places, places.tolist(), strict=True):
        before, _ = chips.get(tuple(chip), (x, y))
        chips[tuple(chip)] = ((before + x) / 2 if core else x, y)
    links, ends = [], []
    for (s, *chip), (x, y) in chips.items():
        for d, (right, down) in enumerate(((1, 0), (0, 1))):
            bound, closes = placement.bounds[d], placement.wrap[d]
            if chip[d] + 1 < bound:
                neighbour = chips.get((s, *(c + (i == d) for i, c in enumerate(chip))))
                if neighbour is not None:
                    links.append(f'M{x:.5g} {y:.5g}L{neighbour[0]:.5g} {neighbour[1]:.5g}')
            elif closes and bound > 1:
                ends.append(f'M{x:.5g} {y:.5g}l{_END * right:.3g} {_END * down:.3g}')
            if chip[d] == 0 and closes and bound > 1:
                ends.append(f'M{x:.5g} {y:.5g}l{-_END * right:.3g} {-_END * down:.3g}')
        if placement.bounds[2] > 1:
            if placement.wrap[2] or chip[2] > 0:
                ends.append(f'M{x:.5g} {y:.5g}l-{_ASIDE} {_ASIDE}')
            if placement.wrap[2] or chip[2] + 1 < placement.bounds[2]:
                ends.append(f'M{x:.5g} {y:.5g}l{_ASIDE} -{_ASIDE}')
    drawn = [tag('path', d=''.join(d), class_=c) for d, c in ((links, 'link'), (ends, 'end')) if d]
    return tag('g', *drawn, _between_slices([p[0] for p in placement.places], places))


def _networks(placement: Placement, places: np.ndarray) -> Html:
    rows: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for place, (x, y) in zip(placement.places, places.tolist(), strict=True):
        rows.setdefault(place[:2], []).append((x, y))
    fast, left = [], float(places[:, 0].min()) - 0.75
    slow = []
    for row in rows.values():
        (first, y), (last, _) = min(row), max(row)
        fast.append(f'M{first:.5g} {y:.5g}H{last:.5g}')
        slow.append(f'M{first:.5g} {y:.5g}H{left:.5g}')
    ys = [row[0][1] for row in rows.values()]
    slow.append(f'M{left:.5g} {min(ys):.5g}V{max(ys):.5g}')
    parts = [tag('path', d=''.join(fast), class_='link fast')]
    if len(rows) > 1:
        parts.append(tag('path', d=''.join(slow), class_='slow'))
    return tag('g', *parts)


def _between_slices(slices: list[int], places: np.ndarray) -> Html | None:
    """The data centre network, along the left of the slices."""
    numbers = np.array(slices)
    if not numbers.any():
        return None
    left = float(places[:, 0].min()) - 0.75
    path, middles = '', []
    for number in np.unique(numbers):
        ys = places[numbers == number][:, 1]
        path += f'M{left:.5g} {ys.min() - _HALF:.5g}V{ys.max() + _HALF:.5g}'
        middles.append(float(ys.mean()))
    path += f'M{left:.5g} {middles[0]:.5g}V{middles[-1]:.5g}'
    return tag('path', tag('title', 'data centre network'), d=path, class_='slow')
