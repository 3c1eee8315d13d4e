"""What `meshwright check` compares, from [tool.meshwright] in pyproject.toml.

[tool.meshwright]
folder = "goldens"                       # the folder of the files; this is the default
tests = ["tests/test_layouts.py"]        # tests with mw.golden or assert_forecast_unchanged

[tool.meshwright.goldens.train-step]
function = "layouts:train_step"          # returns the jitted function and its arguments
topology = "v5e:4x4"

[tool.meshwright.goldens.script]
script = "train.py --batch_size=64"
topology = "2xv5e:16x16"
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.records.difference import Tolerances
from partitioning.hardware import parse_topology
from partitioning.hardware.topology import split_slices
from partitioning.rules import nearest

_KEYS = ('function', 'script', 'topology', 'axes', 'compile', 'on_cpu', 'tolerances')
_TABLE = ('folder', 'tests', 'goldens', 'radar')
_USES_GOLDENS = re.compile(r'\b(assert_forecast_unchanged|check_golden|mw\.golden)\(')
_VIRTUAL = 8  # devices, if no machine says how many


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedProgram:
    """A program whose record is compared.

    Attributes:
      name: its name in pyproject.toml.
      function: 'module:name' of a function that returns the program and its arguments, or ''.
      script: a script with its arguments, for `meshwright dry`, or ''.
      topology: the machine; '' for the machine of the arguments.
      num_slices: the number of its slices.
      axes: the sizes of the mesh axes there, if they are others.
      compile: whether it is compiled.
      on_cpu: whether virtual CPU devices stand for the machine.
      tolerances: how much its figures may differ.
    """

    name: str
    function: str = ''
    script: str = ''
    topology: str = ''
    num_slices: int = 1
    axes: Mapping[str, int] | None = None
    compile: bool = True
    on_cpu: bool = False
    tolerances: Tolerances = dataclasses.field(default_factory=Tolerances)

    @property
    def num_devices(self) -> int:
        """The number of virtual devices that a mesh of it may be made of."""
        if not self.topology:
            return _VIRTUAL
        chip, shape = parse_topology(self.topology)
        per_chip = chip.devices
        return math.prod(shape) * per_chip * self.num_slices

    @property
    def machine(self) -> str:
        """The machine, as pyproject.toml names it."""
        slices = f'{self.num_slices}x' if self.num_slices > 1 else ''
        return slices + self.topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """What a repository declares.

    Attributes:
      root: the folder of its pyproject.toml.
      folder: the folder of the golden records.
      programs: the programs, by name.
      tests: the files of tests that own golden forecasts.
    """

    root: Path
    folder: Path
    programs: tuple[CheckedProgram, ...]
    tests: tuple[str, ...]

    def golden_of(self, name: str) -> Path:
        """The golden record of a program."""
        return self.folder / f'{name}.json'


def read_settings(root: Path, only: Sequence[str] = ()) -> CheckSettings:
    """Reads what the pyproject.toml of a folder declares.

    Without a declaration, the tests that call an assertion about golden forecasts are found.

    Args:
      root: the folder.
      only: names of programs; by default all, and the tests.

    Raises:
      ValueError: if something is malformed, or if there is nothing to check.
    """
    file, table = root / 'pyproject.toml', {}
    if file.is_file():
        try:
            table = tomllib.loads(file.read_text(encoding='utf-8'))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f'{file.name}: {error}') from error
    held = table.get('tool', {}).get('meshwright', {})
    check_keys(held, _TABLE, '[tool.meshwright]')
    goldens = _of_type(held.get('goldens', {}), dict, 'goldens', 'tables')
    programs = tuple(_program(name, given) for name, given in goldens.items())
    tests = read_texts(held.get('tests', ()), '[tool.meshwright] tests')
    if not programs and not tests:
        tests = _find_tests(root, table)
    for test in tests:
        if not (root / test).exists():
            raise ValueError(
                f'[tool.meshwright] tests: there is no {test}: write the path from {file.name}'
            )
    if not programs and not tests:
        raise ValueError(
            'nothing to check: declare a program in pyproject.toml, such as '
            '[tool.meshwright.goldens.step] with function = "layouts:step" and topology = '
            '"v5e:4x4"'
        )
    if only:
        known = {program.name: program for program in programs}
        for name in only:
            if name not in known:
                raise ValueError(
                    f'no golden {name!r}: pyproject.toml has {", ".join(known) or "none"}.'
                    f'{nearest(name, known)}'
                )
        programs, tests = tuple(known[name] for name in only), ()
    folder = root / _of_type(held.get('folder', 'goldens'), str, 'folder', 'a path')
    return CheckSettings(root=root, folder=folder, programs=programs, tests=tests)


def _program(name: str, given: Any) -> CheckedProgram:
    where = f'[tool.meshwright.goldens.{name}]'
    if not re.fullmatch(r'[\w.-]+', name):
        raise ValueError(f'{where}: the name is the name of a file: use letters, digits, - and _')
    _of_type(given, dict, where, 'a table')
    check_keys(given, _KEYS, where)
    texts = {
        key: _of_type(given.get(key, ''), str, f'{where} {key}', 'a text')
        for key in ('function', 'script', 'topology')
    }
    if bool(texts['function']) == bool(texts['script']):
        raise ValueError(f'{where}: write function = "module:name" or script = "train.py"')
    if texts['function'] and not re.fullmatch(r'[\w.]+:\w+', texts['function']):
        raise ValueError(
            f'{where}: function = {texts["function"]!r}: write "module:name", such as '
            '"layouts:train_step"'
        )
    if texts['script'] and not texts['topology']:
        raise ValueError(f'{where}: a script needs a machine: topology = "v5e:4x4"')
    if texts['script'] and (extra := {'axes', 'compile', 'on_cpu'} & given.keys()):
        raise ValueError(f'{where}: {", ".join(sorted(extra))} is for functions, not for scripts')
    topology, slices = split_slices(texts['topology'])
    if topology:
        try:
            parse_topology(topology)
        except ValueError as error:
            raise ValueError(f'{where}: {error}') from error
    axes = given.get('axes')
    if axes is not None and not topology:
        raise ValueError(f'{where}: axes are sizes on a machine: add topology = "v5e:4x4"')
    return CheckedProgram(
        name=name,
        function=texts['function'],
        script=texts['script'],
        topology=topology,
        num_slices=slices,
        axes=None if axes is None else _of_type(axes, dict, f'{where} axes', 'a table of sizes'),
        compile=_of_type(given.get('compile', True), bool, f'{where} compile', 'true or false'),
        on_cpu=_of_type(given.get('on_cpu', False), bool, f'{where} on_cpu', 'true or false'),
        tolerances=_tolerances(given.get('tolerances', {}), where),
    )


def _tolerances(given: Any, where: str) -> Tolerances:
    known = [field.name for field in dataclasses.fields(Tolerances)]
    _of_type(given, dict, f'{where} tolerances', 'a table, such as {peak = 0.05}')
    check_keys(given, known, f'{where} tolerances')
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(f'{where} tolerances: {name} = {value!r}: write a share, such as 0.05')
    return Tolerances(**given)


def _find_tests(root: Path, table: Mapping[str, Any]) -> tuple[str, ...]:
    """The tests that call an assertion about golden forecasts."""
    pytest = table.get('tool', {}).get('pytest', {}).get('ini_options', {})
    folders = pytest.get('testpaths', ['tests'])
    folders = shlex.split(folders) if isinstance(folders, str) else folders
    files = {file for folder in folders for file in (root / folder).rglob('test_*.py')}
    return tuple(
        str(file.relative_to(root))
        for file in sorted(files)
        if _USES_GOLDENS.search(file.read_text(encoding='utf-8', errors='replace'))
    )


def read_texts(given: Any, where: str) -> tuple[str, ...]:
    """The texts of a list; a ValueError if it is none."""
    if not isinstance(given, list | tuple) or not all(isinstance(x, str) for x in given):
        raise ValueError(f'{where} = {given!r}: write a list of texts')
    return tuple(given)


def _of_type(value: Any, kind: type, where: str, expected: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f'{where} = {value!r}: write {expected}')
    return value


def check_keys(given: Any, known: Sequence[str], where: str) -> None:
    """Raises a ValueError if a table is not one, or has other keys than these."""
    _of_type(given, dict, where, 'a table')
    for key in given:
        if key not in known:
            raise ValueError(
                f'{where} has no {key!r}: it has {", ".join(known)}.{nearest(key, known)}'
            )
