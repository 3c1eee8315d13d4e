"""Forecasts a function on every mesh of a machine, and ranks them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from meshwright.calls.compiling import Progress
from meshwright.calls.target import Target, target_of_topology
from meshwright.examining import examine
from meshwright.forecasting import forecast_examined
from meshwright.report.forecasts import Forecast
from meshwright.report.mesh_ranking import MeshRanking
from partitioning.hardware import OptionValue, parse_topology
from partitioning.mesh import MeshConfig
from partitioning.rules import describe_axes
from partitioning.tracebacks import hide_own_frames

# Makes a jitted function and the arguments of a call for a mesh.
Make = Callable[[Mesh], tuple[Any, Sequence[Any]]]
# The names of the axes, or the sizes that each may have: one, several, or -1 for all.
Axes = Sequence[str] | Mapping[str, int | Sequence[int]]


@hide_own_frames
def search(
    make: Make,
    *,
    topology: str,
    num_slices: int = 1,
    axes: Axes,
    compile: bool = False,
    compiler_options: Mapping[str, OptionValue] | None = None,
    on_cpu: bool = False,
    progress: Progress | None = None,
) -> MeshRanking:
    """Forecasts a function on every mesh that a machine can have with some axes.

    Usage:
      def make(mesh):
          return jax.jit(train_step), (make_state(mesh), make_batch(mesh))  # with shardings

      found = mw.search(make, topology='v5p:4x4x4', axes=['data', 'model'])
      print(found)
      best = found.best.mesh

    Meshes on which the function fits come first, then those with the shortest time. Where no time
    is known, as for CPUs, those that send the fewest bytes come first.

    Args:
      make: makes the jitted function and the arguments of a call for a mesh. It may raise
        ValueError for meshes that it cannot use, which are listed with the reason.
      topology, num_slices, compiler_options, on_cpu, progress: as for `forecast`.
      axes: the names of the axes, whose sizes are all factors of the number of devices; or the
        sizes that each axis may have, such as {'data': -1, 'model': [1, 2, 4]}.
      compile: whether to compile each. By default, the forecasts are by formula, within seconds.

    Raises:
      ValueError: if the machine is not known, if its devices do not have such axes, or if no mesh
        can be used.
    """
    chip, shape = parse_topology(topology)
    count = chip.devices * num_slices * math.prod(shape)
    candidates = list(list_meshes(count, axes))
    if not candidates:
        raise ValueError(
            f'{topology} has {count:,} devices, of which no mesh has the axes {axes!r}: give an '
            'axis the size -1'
        )
    made, failed = list[Forecast](), dict[str, str]()
    for sizes in candidates:
        name = describe_axes(sizes)
        if progress is not None:
            progress(f'{name} ({len(made) + len(failed) + 1} of {len(candidates)})')
        try:
            target = _target(topology, sizes, num_slices, on_cpu)
            fn, args = call_of(make, target.mesh)
            examined = examine(
                fn, args, target=target, compile=compile, compiler_options=compiler_options
            )
            made.append(forecast_examined(examined, changes=None, explain=False))
        except ValueError as error:
            failed[name] = str(error).strip().splitlines()[0]
    if not made:
        name, why = next(iter(failed.items()))
        raise ValueError(f'none of {len(failed)} meshes can be used; {name}: {why}')
    return MeshRanking(forecasts=tuple(sorted(made, key=_rank)), failed=failed)


@hide_own_frames
def place(
    make: Make,
    *,
    topology: str,
    axes: Mapping[str, int],
    num_slices: int = 1,
    on_cpu: bool = False,
) -> tuple[Any, ...]:
    """Returns a function and its arguments, made for a mesh of a machine.

    Usage:
      made = mw.place(make, topology='v5p:4x4x4', axes={'data': 16, 'model': 4})
      mw.forecast(*made)
      mw.golden(*made)

    Args:
      make: makes the jitted function and the arguments of a call for a mesh.
      topology, num_slices, on_cpu: as for `forecast`.
      axes: the sizes of the axes; one may be -1.

    Raises:
      ValueError: if the machine is not known or does not have these axes, or if `make` does not
        return a function with its arguments.
    """
    fn, args = call_of(make, _target(topology, axes, num_slices, on_cpu).mesh)
    return (fn, *args)


def list_meshes(count: int, axes: Axes) -> Iterator[dict[str, int]]:
    """Yields the sizes of the axes of each mesh with a number of devices.

    Args:
      count: the number of devices.
      axes: as for `search`.

    Raises:
      ValueError: if there are no axes, or if a size is no number above 0.
    """
    if isinstance(axes, str) or not axes:
        raise ValueError(f"axes={axes!r} must be names, such as ['data', 'model']")
    given = dict(axes) if isinstance(axes, Mapping) else dict.fromkeys(axes, -1)
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    sizes = [list(_sizes(axis, one, divisors)) for axis, one in given.items()]
    *first, last = sizes
    for chosen in itertools.product(*first):
        rest, remainder = divmod(count, math.prod(chosen))
        if not remainder and rest in last:
            yield dict(zip(given, (*chosen, rest), strict=True))


def _sizes(axis: str, given: int | Sequence[int], divisors: Sequence[int]) -> Iterable[int]:
    if given == -1:
        return divisors
    sizes: list[Any] = list(given) if isinstance(given, list | tuple | range) else [given]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise ValueError(f'the axis {axis!r} has sizes {given!r}: write -1, a size, or a list')
    return sizes


def call_of(make: Make, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """What `make` returns for a mesh.

    Raises:
      ValueError: if that is no function with its arguments.
    """
    found = make(mesh)
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], tuple | list):
        raise ValueError(
            f'{getattr(make, "__name__", "make")} returned {type(found).__name__}: return the '
            'jitted function and a tuple of its arguments, as in `return step, (state, batch)`'
        )
    return found[0], tuple(found[1])


def _target(topology: str, axes: Mapping[str, int], num_slices: int, on_cpu: bool) -> Target:
    config = MeshConfig(axes=dict(axes))
    return target_of_topology(topology, config, num_slices=num_slices, on_cpu=on_cpu)


def _rank(forecast: Forecast) -> tuple[Any, ...]:
    sent = sum(c.total_bytes for c, _ in forecast.collectives)
    seconds = forecast.time.seconds if forecast.time else 0.0
    return forecast.fits is False, seconds, sent, forecast.memory.peak
