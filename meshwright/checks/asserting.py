"""Assertions about what a function sends and needs, for tests.

    assert_exchanges(step, (state, batch), {('all-gather', 'fsdp'): 24, 'all-reduce': '1.5 MB'})
    assert_peak_below(step, (state, batch), '12 GiB', topology='v5e:4x4')
    assert_no_implicit_reshard(step, (state, batch))

Each traces and compiles the function. To ask several questions about one program, make its forecast
once, and pass the forecast with no arguments: `assert_peak_below(forecast(step, state, batch), (),
'12 GiB')`.
"""

from __future__ import annotations

import collections
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from meshwright.causes import Cause
from meshwright.causes.cause import source_of
from meshwright.checks.expected import Expected, Key, read_expected
from meshwright.forecasting import forecast
from meshwright.program.collectives import Collective
from meshwright.report.figures import machine_name
from meshwright.report.forecasts import Forecast
from partitioning.amounts import bytes_str, parse_bytes
from partitioning.tracebacks import hide_own_frames

_LISTED = 5
_SUMS = ('all-reduce', 'reduce-scatter')  # their arrays are not whole on any device before


@hide_own_frames
def assert_exchanges(
    fn: Any,
    args: Sequence[Any],
    expected: Expected,
    *,
    tolerance: float = 0.01,
    topology: str | None = None,
    **settings: Any,
) -> None:
    """Asserts which data the devices exchange in a call of a function, and nothing else.

    Usage:
      def test_layers_are_gathered_once():
          assert_exchanges(step, (state, batch), {
              ('all-gather', 'fsdp'): 24,                        # executions
              ('reduce-scatter', 'fsdp'): '1.5 MB',              # bytes that a device sends
              ('all-reduce', ('data', 'fsdp')): (1, '4 bytes'),  # both
          })

    Compilers join exchanges of small arrays, and other versions join others. Bytes are more stable
    than counts.

    Args:
      fn: the function, as for `forecast`, or a forecast.
      args: the arguments of a call, abstract or not; none for a forecast.
      expected: for each kind and mesh axis, or several axes in any order, how often such exchanges
        are executed, loops included, or the bytes that a device sends, or both. A kind without an
        axis counts its exchanges over all axes. What is not listed must not be there.
      tolerance: the share by which bytes may differ, in addition to the last digit as written.
      topology: the machine; by default, the machine of the arguments.
      **settings: more arguments of `forecast`, such as on_cpu=True.

    Raises:
      AssertionError: if the exchanges differ, with the lines of those that are there.
      ValueError: if `expected` is malformed, or names an unknown kind or axis, or as in `forecast`.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    made = _forecast(fn, args, topology, {'explain': False, **settings})
    wanted = read_expected(expected, made.mesh)
    found: dict[Key, list[Collective]] = collections.defaultdict(list)
    for collective, _ in made.collectives:
        whole = Key(collective.kind, None)
        key = whole if whole in wanted else Key(collective.kind, frozenset(collective.axes))
        found[key].append(collective)
    lines: list[str] = []
    for key in {**wanted, **found}:
        group = found.get(key, [])
        sent = sum(c.total_bytes for c in group)
        count = sum(c.count for c in group)
        amount = wanted.get(key)
        if amount is None:
            lines.append(f'+ {key.text(made.mesh)}: {bytes_str(sent)} in {count:,}, not expected')
        elif problem := amount.problem(sent, count, tolerance):
            sign = '~' if group else '-'
            lines.append(f'{sign} {key.text(made.mesh)}: {problem}')
        else:
            continue
        lines += list(_lines_of((c, None) for c in group))
    if lines:
        keys = {key: sum(c.count for c in group) for key, group in found.items()}
        written = ', '.join(f'{k.written(made.mesh)}: {n}' for k, n in keys.items())
        raise AssertionError(
            f'{_title(made)} exchanges other data than the test expects:\n'
            + '\n'.join(f'  {line}' for line in lines)
            + f'\nas it is now: {{{written}}}'
        )


@hide_own_frames
def assert_peak_below(
    fn: Any,
    args: Sequence[Any],
    limit: int | str,
    *,
    topology: str | None = None,
    **settings: Any,
) -> None:
    """Asserts that a call of a function never needs more memory on a device than a limit.

    Args:
      fn, args, topology, settings: as in `assert_exchanges`.
      limit: the limit, in bytes or as a text such as '2 GiB'.

    Raises:
      AssertionError: if the peak is larger, with the largest buffers and their lines.
      ValueError: if `limit` is malformed, or as in `forecast`.
    """
    __tracebackhide__ = True
    most = _read_limit(limit)
    made = _forecast(fn, args, topology, {'explain': False, **settings})
    memory = made.memory
    if memory.peak <= most:
        return
    shown = limit if isinstance(limit, str) else bytes_str(limit)
    lines = [f'{bytes_str(memory.arguments):>10}  arguments']
    for array, _ in memory.buffers[:_LISTED]:
        several = f'{array.count} x ' if array.count > 1 else ''
        operation = array.op_name.rpartition('/')[2]
        parts = (f'{several}{array.array} {operation}'.strip(), array.source)
        lines.append(f'{bytes_str(array.nbytes):>10}  {", ".join(p for p in parts if p)}')
    raise AssertionError(
        f'{_title(made)} needs {bytes_str(memory.peak)}, more than {shown}; at the peak it has:\n'
        + '\n'.join(f'  {line}' for line in lines)
    )


@hide_own_frames
def assert_no_implicit_reshard(
    fn: Any,
    args: Sequence[Any],
    *,
    allow: Iterable[str | tuple[str, str | tuple[str, ...]]] = (),
    topology: str | None = None,
    **settings: Any,
) -> None:
    """Asserts that a function exchanges no data that nothing in it asks for.

    The gathers of sharded parameters, the sums of products over a sharded dimension, the sums of
    gradients over the batch, and what `shard_map` does follow from the program and the layouts of
    its arguments. What is left are activations that are laid out anew, because two layouts do not
    fit each other: exchanges whose `Cause.avoidable` is true, exchanges of values that are neither
    arguments nor sums whose `Cause.suspect` is true, and copies that XLA warns about.

    Args:
      fn, args, topology, settings: as in `assert_exchanges`.
      allow: kinds and mesh axes of exchanges that may be there, such as ('all-gather', 'model').

    Raises:
      AssertionError: if there is such an exchange, with its line, its cause and what to write.
      ValueError: if `allow` names an unknown kind or axis, or as in `forecast`.
    """
    __tracebackhide__ = True
    if settings.get('explain') is False:
        raise ValueError('explain=False leaves out the causes that this check reads: leave it out')
    made = _forecast(fn, args, topology, settings)
    allowed = {*read_expected(dict.fromkeys(allow, 0), made.mesh)}
    arguments = {row.path for row in made.arrays}
    implicit = [
        (collective, cause)
        for collective, cause in made.collectives
        if cause is not None
        and (cause.avoidable or _is_suspect(collective, cause, arguments))
        and not {Key(collective.kind, frozenset(collective.axes)), Key(collective.kind, None)}
        & allowed
    ]
    copies = [text for text in made.warnings if 'rematerialization' in text]
    if not implicit and not copies:
        return
    lines = [*_lines_of(implicit), *(f'the compiler: {text[:300]}' for text in copies)]
    raise AssertionError(
        f'{_title(made)} lays out arrays anew, which neither its code nor the layouts of its '
        'arguments ask for:\n' + '\n'.join(f'  {line}' for line in lines)
    )


def _is_suspect(collective: Collective, cause: Cause, arguments: Container[str]) -> bool:
    """Whether an exchange lays out a value anew that is neither an argument nor a sum."""
    return cause.suspect and cause.array not in arguments and collective.kind not in _SUMS


def _forecast(
    fn: Any, args: Sequence[Any], topology: str | None, settings: dict[str, Any]
) -> Forecast:
    if isinstance(fn, Forecast):
        if args or topology is not None:
            raise ValueError(
                'a forecast has its arguments and its machine already: pass () and no topology'
            )
        return fn
    if not isinstance(args, list | tuple):
        raise ValueError(f'args is a {type(args).__name__}: write the arguments as a tuple, (x, y)')
    return forecast(fn, *args, topology=topology, **{'confirm': False, **settings})


def _title(made: Forecast) -> str:
    return f'{made.function} on {machine_name(made)}'


def _lines_of(exchanges: Iterable[tuple[Collective, Cause | None]]) -> Iterator[str]:
    """A line for all exchanges of the same arrays at the same place, the largest sum first."""
    groups: dict[str, list[Collective]] = collections.defaultdict(list)
    for one, cause in exchanges:
        source = source_of(cause, one.source)
        others = f' and {len(one.arrays) - 1} more' if len(one.arrays) > 1 else ''
        array = cause.array if cause is not None else one.arrays[0] if one.arrays else 'nothing'
        text = f'{one.kind} over {", ".join(one.axes)} of {array}{others}'
        parts = [text, source]
        if cause is not None:
            parts[-1] += f': {cause.why}' + (f'; {cause.change}' if cause.change else '')
        groups[', '.join(part for part in parts if part)].append(one)
    ordered = sorted(groups.items(), key=lambda item: -sum(c.total_bytes for c in item[1]))
    for text, group in ordered[:_LISTED]:
        count = sum(c.count for c in group)
        yield f'    {bytes_str(sum(c.total_bytes for c in group)):>10}  {count:,} x {text}'
    if len(ordered) > _LISTED:
        yield f'    and {len(ordered) - _LISTED} more'


def _read_limit(limit: int | str) -> float:
    if isinstance(limit, str):
        return parse_bytes(limit)[0]
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ValueError(f"the limit is {limit!r}: write bytes, or a text such as '2 GiB'")
    return limit
