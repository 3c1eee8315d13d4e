"""What changed from each release to the next, and which of its packages changed it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from meshwright.checking.radar.environments import Environment
from meshwright.checking.radar.sweep import Sweep, read_record, record_all
from meshwright.checking.settings import CheckedProgram
from meshwright.records.comparing import compare_records
from meshwright.records.difference import Difference
from meshwright.records.record import Record
from meshwright.records.verdicts import Recorded, moved_versions

Progress = Callable[[str], None]
# Packages whose versions are in a record only if the program has loaded them.
_LIBRARIES = ('flax', 'optax', 'equinox', 'haiku')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """Something that a release changed in a program.

    Attributes:
      difference: what changed.
      cause: the packages that changed it: 'libtpu', or 'jax, libtpu' if both or either did.
    """

    difference: Difference
    cause: str

    @property
    def weight(self) -> float:
        """How much it changed, for the order: the logarithm of the relative change."""
        was, now = self.difference.was, self.difference.now
        if was is None or now is None:
            return 1.0
        return abs(math.log((now + 1e-12) / (was + 1e-12))) if was and now else 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramStep:
    """What became of a program from one release to the next.

    Attributes:
      name: the program.
      machine: its machine.
      before: its record with the last release before with which there is one; None if none has.
      since: that release, if it is not the one right before; ''.
      after: its record; None if there is none.
      error: why there is none, in one line.
      changes: what changed, the code first.
    """

    name: str
    machine: str
    before: Record | None = None
    since: str = ''
    after: Record | None = None
    error: str = ''
    changes: tuple[Change, ...] = ()

    @property
    def broke(self) -> bool:
        """Whether it worked right before, and does not work now."""
        return self.after is None and self.before is not None and not self.since

    @property
    def repaired(self) -> bool:
        """Whether it works again, or for the first time."""
        return self.after is not None and (self.before is None or bool(self.since))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """From one release to the next.

    Attributes:
      before, after: the environments.
      moved: the packages whose version changed and which programs use: before and after.
      programs: what became of each program.
    """

    before: Environment
    after: Environment
    moved: Mapping[str, tuple[str, str]]
    programs: tuple[ProgramStep, ...]

    @property
    def title(self) -> str:
        """Its packages with their versions: 'jax 0.10.0 -> 0.10.2, libtpu 0.0.40 -> 0.0.42.1'."""
        return ', '.join(f'{name} {a} -> {b}' for name, (a, b) in self.moved.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Radar:
    """The answer.

    Attributes:
      programs: the programs.
      environments: the environments, oldest first.
      first: what became of each program with the first release.
      steps: from each release to the next.
    """

    programs: tuple[CheckedProgram, ...]
    environments: tuple[Environment, ...]
    first: tuple[ProgramStep, ...]
    steps: tuple[Step, ...]


def compare_releases(
    sweep: Sweep,
    programs: Sequence[CheckedProgram],
    environments: Sequence[Environment],
    progress: Progress,
) -> Radar:
    """Records all programs with all releases, and compares each release with the one before.

    Args:
      sweep: where everything is.
      programs: the programs.
      environments: the environments, in the order in which they are compared.
      progress: receives a text when something ends.
    """
    columns: list[dict[str, Recorded]] = []
    for i, environment in enumerate(environments):
        last = (environments[i - 1], columns[-1]) if columns else None
        columns.append(_column(sweep, programs, environment, last, progress))
    first = tuple(
        ProgramStep(
            name=p.name,
            machine=p.machine,
            after=columns[0][p.name].record,
            error=columns[0][p.name].error,
        )
        for p in programs
    )
    steps = tuple(
        _step(sweep, programs, environments, columns, i, progress)
        for i in range(1, len(environments))
    )
    return Radar(
        programs=tuple(programs), environments=tuple(environments), first=first, steps=steps
    )


def _column(
    sweep: Sweep,
    programs: Sequence[CheckedProgram],
    environment: Environment,
    last: tuple[Environment, dict[str, Recorded]] | None,
    progress: Progress,
) -> dict[str, Recorded]:
    """The records of all programs in an environment."""
    name = environment.release.name
    if environment.error:
        return {p.name: Recorded(error=f'{name} {environment.error}') for p in programs}
    found: dict[str, Recorded] = {}
    for program in programs:
        held = read_record(sweep, program, environment)
        if held is None and last is not None and not last[0].error:
            held = _untouched(last[0], environment, last[1][program.name].record)
        if held is not None:
            found[program.name] = Recorded(record=held)
    missing = [p for p in programs if p.name not in found]
    for program, made in record_all(sweep, missing, environment):
        found[program.name] = made
        progress(f'{program.name} with {name}{": " + made.error if made.error else ""}')
    return found


def _untouched(before: Environment, after: Environment, record: Record | None) -> Record | None:
    """The record of a program that uses nothing of what another environment has changed."""
    pins, others = dict(before.release.pins), dict(after.release.pins)
    changed = {name for name in {**pins, **others} if pins.get(name) != others.get(name)}
    if record is None or not changed or not changed <= set(_LIBRARIES):
        return None
    return None if changed & set(record.versions) else record


def _step(
    sweep: Sweep,
    programs: Sequence[CheckedProgram],
    environments: Sequence[Environment],
    columns: Sequence[Mapping[str, Recorded]],
    index: int,
    progress: Progress,
) -> Step:
    made = [_program_step(p, environments, columns, index) for p in programs]
    mixed = _mixed(sweep, programs, environments[index - 1], environments[index], made, progress)
    for i, step in enumerate(made):
        if step.name in mixed and step.before is not None and step.after is not None:
            causes = _told_apart(step.before, mixed[step.name], step.after, programs[i])
            changes = tuple(
                dataclasses.replace(c, cause=causes.get(_key(c.difference), c.cause))
                for c in step.changes
            )
            made[i] = dataclasses.replace(step, changes=changes)
    return Step(
        before=environments[index - 1],
        after=environments[index],
        moved=_moved(environments[index - 1], environments[index], made),
        programs=tuple(made),
    )


def _program_step(
    program: CheckedProgram,
    environments: Sequence[Environment],
    columns: Sequence[Mapping[str, Recorded]],
    index: int,
) -> ProgramStep:
    name, now = program.name, columns[index][program.name]
    good = [i for i in range(index) if columns[i][name].record is not None]
    last = good[-1] if good else None
    made = ProgramStep(
        name=name,
        machine=program.machine,
        before=None if last is None else columns[last][name].record,
        since='' if last in (None, index - 1) else environments[last].release.name,
        after=now.record,
        error=now.error,
    )
    if made.before is None or made.after is None:
        return made
    found = compare_records(made.before, made.after, program.tolerances)
    moved = ', '.join(_packages(moved_versions(made.before, made.after, ours=False)))
    by_jax = moved.replace(', libtpu', '')  # no compiler changes what the code says
    return dataclasses.replace(
        made,
        changes=tuple(Change(difference=d, cause=by_jax if d.is_of_code else moved) for d in found),
    )


def _packages(names: Iterable[str]) -> list[str]:
    """The names of packages; jaxlib counts as jax, which is released with it."""
    return list(dict.fromkeys('jax' if name == 'jaxlib' else name for name in names))


def _mixed(
    sweep: Sweep,
    programs: Sequence[CheckedProgram],
    before: Environment,
    after: Environment,
    made: Sequence[ProgramStep],
    progress: Progress,
) -> dict[str, Record]:
    """The programs that changed, with the new packages and the old compiler for TPUs.

    They tell apart what jax and what its compiler changed.
    """
    changed = [
        p
        for p, step in zip(programs, made, strict=True)
        if not step.since and any(c.cause == 'jax, libtpu' for c in step.changes)
    ]
    if not changed or before.tpu_library is None:
        return {}
    for program, found in record_all(sweep, changed, after, before):
        progress(
            f'{program.name} with {after.release.name} and libtpu '
            f'{before.versions.get("libtpu")}{": " + found.error if found.error else ""}'
        )
    held = {p.name: read_record(sweep, p, after, before) for p in changed}
    return {name: record for name, record in held.items() if record is not None}


def _told_apart(
    before: Record, mixed: Record, after: Record, program: CheckedProgram
) -> dict[tuple[str, str], str]:
    """For each difference, the package that makes it: jax, or the compiler for TPUs."""
    by_jax = {_key(d) for d in compare_records(before, mixed, program.tolerances)}
    by_tpu = {_key(d) for d in compare_records(mixed, after, program.tolerances)}
    return {
        **dict.fromkeys(by_jax - by_tpu, 'jax'),
        **dict.fromkeys(by_tpu - by_jax, 'libtpu'),
    }


def _key(one: Difference) -> tuple[str, str]:
    return one.kind, one.subject


def _moved(
    before: Environment, after: Environment, made: Sequence[ProgramStep]
) -> dict[str, tuple[str, str]]:
    """The packages that the releases name, or that a program uses, and that changed."""
    names = {'jax', 'libtpu', *before.release.packages, *after.release.packages}
    for step in made:
        names |= set(step.after.versions if step.after is not None else ())
    order = ('jax', 'libtpu', *_LIBRARIES)
    listed = [*order, *sorted(names - {*order, 'jaxlib', 'meshwright'})]
    pins = [{**dict(e.release.pins), **e.versions} for e in (before, after)]
    return {
        name: (pins[0].get(name, 'none'), pins[1].get(name, 'none'))
        for name in listed
        if name in names and pins[0].get(name) != pins[1].get(name)
    }
