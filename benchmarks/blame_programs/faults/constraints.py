"""Faults of constraints: they are missing, forget dimensions, or lay out another dimension."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.blame_programs.faults.fault import (
    FILES,
    ROOT,
    Fault,
    constraints_of,
    edit,
    find_line,
)

_ROWS = ("'batch'", "'data'", "'dp'")
_OF_MODEL = ("'mlp'", "'heads'", "'vocab'", "'model'")
# The last dimension of an array, and the last dimension of another array of the same rank.
_OF_OTHERS = {"'embed'": "'mlp'", "'kv'": "'heads'", "'heads'": "'kv'", "'vocab'": "'embed'"}
_USERS = ('linen_trainer', 'plain_trainer')


def constraint_faults(number: int) -> Iterator[Fault]:
    """Yields the faults of constraints in a set."""
    for program in _USERS:
        yield from (_missing_or_wrong, _forgotten_axes, _other_axes, _other_arrays)[number - 1](
            program
        )
    if number == 1:
        yield from _own_missing_or_wrong()
    if number == 4:
        yield from _own_other_arrays()


def _missing_or_wrong(program: str) -> Iterator[Fault]:
    """Constraints that are missing, or that forget one or all dimensions."""
    for found in constraints_of(program):
        yield found.replaced('missing constraint', found.call, found.value, 60)
        whole = ['None'] * len(found.entries)
        forgotten = [e if e not in _ROWS else 'None' for e in found.entries]
        for entries in (whole, forgotten):
            if entries is whole or forgotten not in (whole, found.entries):
                text = f'{found.function}({found.value}, {found.write(entries)})'
                yield found.replaced('wrong constraint', found.call, text, 60)


def _forgotten_axes(program: str) -> Iterator[Fault]:
    """Constraints that forget the axis of a model, or shard another dimension as the rows."""
    for found in constraints_of(program):
        entries = found.entries
        rows = next((n for n, entry in enumerate(entries) if entry in _ROWS), 0)
        swapped = list(entries)
        swapped[rows : rows + 2] = swapped[rows : rows + 2][::-1]
        for kind, new in (
            ('forgotten axis of a model', [e if e not in _OF_MODEL else 'None' for e in entries]),
            ('rows on another dimension', swapped),
        ):
            if new != entries:
                yield found.relaid(kind, new)


def _other_axes(program: str) -> Iterator[Fault]:
    """Constraints that also shard the length, or whose two mesh axes have changed places."""
    for found in constraints_of(program):
        new = list(found.entries)
        used = [n for n, entry in enumerate(new) if entry in _OF_MODEL]
        rows = next(n for n, entry in enumerate(new) if entry in _ROWS)
        if used:
            kind = "two axes of a constraint in each other's place"
            new[rows], new[used[0]] = new[used[0]], new[rows]
        else:
            kind = 'constraint that also shards the length'
            new[rows + 1] = "'mlp'" if program == 'linen_trainer' else "'model'"
        yield found.relaid(kind, new)


def _other_arrays(program: str) -> Iterator[Fault]:
    """Constraints whose last dimensions have the names of another array of the same rank."""
    for found in constraints_of(program):
        if program == 'linen_trainer':
            new = [*found.entries[:2], *(_OF_OTHERS.get(e, e) for e in found.entries[2:])]
        elif len(found.entries) == 3 and found.entries[2] == 'None':
            new = [*found.entries[:2], "'model'"]
        else:
            continue
        if new != found.entries:
            yield found.relaid('constraint of another array', new)


def _own_other_arrays() -> Iterator[Fault]:
    for old, part, new in (
        ("(q_BLHN, ('batch', 'length', 'heads', 'kv'))", "'heads', 'kv'", "'kv', 'heads'"),
        ("(attended_BLHN, ('batch', 'length', 'heads', 'kv'))", "'heads', 'kv'", "'kv', 'heads'"),
        ("(hidden_BLF, ('batch', 'length', 'mlp'))", "'mlp'", "'embed'"),
    ):
        file, _ = find_line('our_transformer', old)
        place, text = f'{old} -> {new}', old.replace(part, new)
        yield edit('our_transformer', file, 'constraint of another array', place, old, text)


def _own_missing_or_wrong() -> Iterator[Fault]:
    """Constraints of the trainer's own model that are missing or wrong."""
    texts = [line.strip() for line in _OWN.splitlines()]
    for old, missing, wrong in zip(texts[::3], texts[1::3], texts[2::3], strict=True):
        file, line = find_line('our_transformer', old)
        for kind, new in (('missing constraint', missing), ('wrong constraint', wrong)):
            new = '' if new == '-' else new
            place = f'{Path(file).name} {old[:50]} -> {new[:50]}'
            # The number of lines stays, so that lines keep their numbers.
            text = line.replace(old, new) if new else '\n'
            yield edit('our_transformer', file, kind, place, line, text)


def other_program_faults(program: str) -> Iterator[Fault]:
    """Yields the faults of constraints in one of the programs of set 5."""
    text = (ROOT / FILES[program]).read_text()
    for found in constraints_of(program):
        if text.count(f'{found.line}\n') > 1:
            continue
        yield found.replaced('missing constraint', found.call, found.value, 40)
        for rows in _ROWS:
            if rows in found.entries:
                forgotten = ['None' if e == rows else e for e in found.entries]
                yield found.relaid('wrong constraint', forgotten)
        if set(found.entries) - {*_ROWS, "'length'", 'None'}:
            yield found.relaid('constraint of nothing', ['None'] * len(found.entries))


# A constraint; the text without it, where '-' is a blank line; and the text with a wrong one.
_OWN = """\
constrain(hidden_BLF, ('batch', 'length', 'mlp'))
  hidden_BLF
  constrain(hidden_BLF, (None, None, None))
branch_BLD = named(lay_out_residual(branch_BLD), out)
  branch_BLD = named(branch_BLD, out)
  branch_BLD = named(constrain(branch_BLD, (None, None, None)), out)
return lay_out_residual(x_BLD + branch_BLD)
  return x_BLD + branch_BLD
  return constrain(x_BLD + branch_BLD, (None, None, None))
x_BLD = named(lay_out_residual(x_BLD), 'residual')
  x_BLD = named(x_BLD, 'residual')
  x_BLD = named(constrain(x_BLD, (None, None, None)), 'residual')
normed_BLD = constrain(normed_BLD, ('batch', length_name('projection'), 'embed'))
  -
  normed_BLD = constrain(normed_BLD, (None, None, None))
q_BLHN = named(constrain(q_BLHN, ('batch', 'length', 'heads', 'kv')), 'query')
  q_BLHN = named(q_BLHN, 'query')
  q_BLHN = named(constrain(q_BLHN, (None, None, None, None)), 'query')
v_BSKN = named(constrain(v_BSKN, ('batch', 'length', c.kv_heads_axis, 'kv')), 'value')
  v_BSKN = named(v_BSKN, 'value')
  v_BSKN = named(constrain(v_BSKN, ('batch', 'length', None, 'kv')), 'value')
attended_BLHN = constrain(attended_BLHN, ('batch', 'length', 'heads', 'kv'))
  -
  attended_BLHN = constrain(attended_BLHN, (None, 'length', 'heads', 'kv'))
return constrain(rows_BLD, ('batch', 'length', 'embed'))
  return rows_BLD
  return constrain(rows_BLD, (None, None, None))
rows_BLD = constrain(rows_BLD, (batch, length, columns))
  rows_BLD = rows_BLD + 0
  rows_BLD = constrain(rows_BLD, (None, None, None))
"""
