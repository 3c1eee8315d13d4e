"""The machine: its chips, the links between them, and what each axis of the mesh spans."""

from __future__ import annotations

from meshwright.report.forecasts import Forecast
from meshwright.report.page.axis_picture import MOST_LINKED, picture_axis
from meshwright.report.page.markup import Html, tag
from partitioning.mesh import AxisRing, Placement
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
            drawn = picture_axis(forecast.placement, forecast.mesh, axis, f'{name}-{axis}')
        title = tag('figcaption', tag('b', f'{axis} {forecast.mesh[axis]}'), _ring(rings.get(axis)))
        panels.append(tag('figure', title, drawn))
    return tag(
        'section',
        tag('h3', 'Machine'),
        tag('p', _words(forecast), class_='words'),
        tag('div', *panels, class_='panels'),
        _key(forecast.placement),
        class_='machine',
    )


def _words(forecast: Forecast) -> str:
    slices = f'{forecast.num_slices} slices of ' if forecast.num_slices > 1 else ''
    unused = [axis for axis, size in forecast.mesh.items() if size == 1]
    words = f'{slices}{forecast.topology}, {count(forecast.num_devices, "device")}'
    if unused and len(unused) < len(forecast.mesh):
        words += f'; {", ".join(unused)} {"has" if len(unused) == 1 else "have"} size 1'
    return f'{words}.'


def _ring(ring: AxisRing | None) -> Html | None:
    if ring is None or ring.size == 1:
        return None
    words = f' {ring.network}'
    if ring.worst_hops == 1 and ring.network == 'ICI':
        words += ', each step is one link and the ring closes'
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
        words += f'Links close to rings along {closed}. ' if rings else 'No links close to rings. '
        if rings:
            words += 'Ends outside a plane are such links. '
        if placement.bounds[2] > 1:
            words += 'Diagonal ends lead to the same place in the planes before and behind.'
    else:
        words += 'Each row is a host, whose devices the fast network joins.'
    if len(placement.places) > MOST_LINKED:
        words += f' Links between more than {MOST_LINKED:,} devices are not drawn.'
    return tag('p', words.strip(), class_='key')
