"""Changes of settings with which a function needs less memory, by formula or by the compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from meshwright.calls.call import Call
from meshwright.calls.compiling import Progress
from meshwright.calls.held import HeldArray
from meshwright.jaxpr import estimate_memory, lay_out_trace
from meshwright.report.forecasts import MemoryChange
from partitioning.hardware import Chip
from partitioning.rules import boundary_spec, num_shards, sharding_axes

_MOST_DOUBLINGS = 6  # of the devices, and halvings of the batch


@dataclasses.dataclass(frozen=True)
class SettingChange:
    """A change of a setting, and the function with it.

    Attributes:
      setting: what to write, such as "TransformerConfig.remat = 'full'".
      build: makes the call with this change, on the machine of the forecast. It is called only if
        the function does not fit, and may raise ValueError if the change is impossible.
    """

    setting: str
    build: Callable[[], Call]


def rank_changes(
    changes: Iterable[SettingChange],
    chip: Chip,
    limit: int,
    *,
    compile_peak: Callable[[Call], int] | None = None,
    progress: Progress | None = None,
) -> tuple[MemoryChange, ...]:
    """Returns how much memory a function needs with each change; changes that fit come first.

    Args:
      changes: the changes to try, in this order.
      chip: the chip.
      limit: what a program can use on a device, in bytes.
      compile_peak: compiles a call and returns its peak in bytes. Changes that fit by formula are
        compiled until one of them fits by the compiler, too. By default, nothing is compiled.
      progress: receives a text when a change is tried.
    """
    found, confirmed = [], False
    for change in changes:
        with contextlib.suppress(ValueError):  # the change is not possible here
            if progress is not None:
                progress(f'trying {change.setting}')
            call = change.build()
            peak = analytic_peak(call, chip)
            compiled = (
                compile_peak is not None
                and not confirmed
                and peak <= limit
                and isinstance(call.mesh, Mesh)
            )
            if compile_peak is not None and compiled:
                peak = compile_peak(call)
                confirmed = peak <= limit
            found.append(
                MemoryChange(
                    setting=change.setting,
                    peak=peak,
                    fits=peak <= limit,
                    peak_from='compiler' if compiled else 'jaxpr',
                )
            )
    return tuple(sorted(found, key=lambda one: not one.fits))


def analytic_peak(call: Call, chip: Chip | None) -> int:
    """The most memory that a call has in use on a device, by formula, in bytes."""
    return estimate_memory(lay_out_trace(call.trace(), call.mesh), chip).peak


def list_general_changes(
    call: Call, held: Sequence[HeldArray], gradients: int, chip: Chip, limit: int
) -> Iterator[SettingChange]:
    """Yields the largest batch and the smallest number of devices with which a function fits.

    These changes need no knowledge of the function: its batch becomes shorter, or the axes of the
    batch longer. Nothing is yielded if the state and its gradients are too large in either case.

    Args:
      call: a call that does not fit.
      held: the arrays of its arguments.
      gradients: the gradients of the parameters on a device, in bytes.
      chip: the chip.
      limit: what a program can use on a device, in bytes.
    """
    state = sum(array.nbytes for array in held if array.role != 'batch')
    if state + gradients <= limit:
        yield from _first_that_fits(_smaller_batches(call, held), chip, limit)
    axes = call.batch_axes[:1]
    specs = [boundary_spec(array.row.spec) for array in held if array.role != 'batch']
    becomes_smaller = any(a in sharding_axes(entry) for a in axes for s in specs for entry in s)
    if state + gradients <= limit or becomes_smaller:
        yield from _first_that_fits(_more_devices(call), chip, limit)


def _first_that_fits(
    changes: Iterable[SettingChange], chip: Chip, limit: int
) -> Iterator[SettingChange]:
    """The first of increasingly drastic changes with which a function fits by formula."""
    least = None
    for change in changes:
        try:
            call = change.build()
            peak = analytic_peak(call, chip)
        except Exception:  # the function does not take such a batch, or the sizes do not divide
            return
        if peak <= limit:
            yield SettingChange(change.setting, functools.partial(_same, call))
            return
        if least is not None and peak > 0.98 * least:
            return  # it does not help
        least = peak


def _same(call: Call) -> Call:
    return call


def _smaller_batches(call: Call, held: Sequence[HeldArray]) -> Iterator[SettingChange]:
    """Halved batches, as long as the devices divide them."""
    rows = {array.row.shape[0] for array in held if array.role == 'batch' and array.row.shape}
    if len(rows) != 1:
        return
    (count,) = rows
    names = {array.row.path.split('/')[0] for array in held if array.role == 'batch'}
    shards = num_shards(call.batch_axes, call.mesh)
    for halvings in range(1, _MOST_DOUBLINGS + 1):
        smaller, rest = divmod(count, 2**halvings)
        if rest or smaller < shards or smaller % shards:
            return
        yield SettingChange(
            f'a batch of {smaller:,} rows in place of {count:,}',
            functools.partial(_with_rows, call, names, count, smaller),
        )


def _with_rows(call: Call, names: set[str], count: int, smaller: int) -> Call:
    """A call with fewer rows in the arguments with these names."""

    def cut(x: Any) -> Any:
        if getattr(x, 'shape', ())[:1] != (count,):
            return x
        shape = (smaller, *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=getattr(x, 'sharding', None))

    named = [(call.argument_name(i), x) for i, x in enumerate(call.args)]
    return call.with_args(tuple(jax.tree.map(cut, x) if name in names else x for name, x in named))


def _more_devices(call: Call) -> Iterator[SettingChange]:
    """Meshes with twice as many devices along the first axis of the batch, and so on."""
    mesh, axes = call.mesh, call.batch_axes
    if not axes:
        return
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        sizes = dict(mesh.shape)
        sizes[axes[0]] *= 2**doublings
        larger = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=mesh.axis_types)
        shown = ' x '.join(f'{axis} {n}' for axis, n in sizes.items() if n > 1)
        yield SettingChange(
            f'{mesh.size * 2**doublings:,} devices in place of {mesh.size:,}: {shown}',
            functools.partial(_on, call, larger),
        )


def _on(call: Call, larger: AbstractMesh) -> Call:
    return call.on(larger, with_options=False)  # type: ignore[arg-type]
