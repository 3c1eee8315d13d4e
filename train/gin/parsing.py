"""Parses gin files into statements with their places, without running anything; finds places."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import shlex
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath
from gin import config_parser

from partitioning.untrusted_text import printable
from train.errors import ConfigError, first_line
from train.gin import limits
from train.paths import as_path, is_remote


def find_config_root() -> Path:
    """Returns the folder that contains `configs/`: this package in a wheel, or the repository."""
    package = Path(__file__).resolve().parents[1]
    return package if (package / 'configs').is_dir() else package.parent


def is_within(name: str, packages: Iterable[str]) -> bool:
    """Whether a module or a name belongs to one of the packages."""
    return any(name == p or name.startswith(f'{p}.') for p in packages)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A name inside a value: `@selector`, `@selector()` or `%MACRO`.

    Attributes:
      name: the name, with its scopes.
      evaluate: whether the value is the result of a call.
    """

    name: str
    is_macro: bool
    evaluate: bool = False

    @property
    def selector(self) -> str:
        """The name without its scopes."""
        return self.name.rsplit('/', 1)[-1]


def references_in(value: Any) -> list[Reference]:
    """Returns the references in a value, which may be a list, tuple or dictionary."""
    if isinstance(value, Reference):
        return [value]
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    parts = value if isinstance(value, list | tuple) else ()
    return [reference for part in parts for reference in references_in(part)]


@dataclasses.dataclass(frozen=True)
class Statement:
    """One statement of a gin file or of a `--gin.` flag.

    Attributes:
      place: its place, for messages: `configs/run.gin:12` or `--gin.NAME=...`.
      file: the file that contains it, or the flag.
      parsed: gin's own statement: a binding, an import, or the head of a block. The value of a
        binding contains instances of `Reference`.
      parsed_references: all references that gin's parser has seen, also those that a later entry
        of the same dictionary replaces. The head of a block has the references of the whole block.
    """

    place: str
    file: str
    parsed: Any
    parsed_references: tuple[Reference, ...] = ()

    @property
    def references(self) -> list[Reference]:
        """The names in its value."""
        return references_in(getattr(self.parsed, 'value', None))

    @property
    def macro(self) -> str | None:
        """The macro that it gives a value to: `NAME = 1`, or `NAME/macro.value = 1`."""
        parsed = self.parsed
        if not isinstance(parsed, config_parser.BindingStatement):
            return None
        if parsed.selector in ('macro', 'gin.macro'):
            return parsed.scope
        if parsed.arg_name:
            return None
        return f'{parsed.scope}/{parsed.selector}' if parsed.scope else parsed.selector

    @property
    def is_binding(self) -> bool:
        """Whether it sets a parameter of a configurable."""
        return isinstance(self.parsed, config_parser.BindingStatement) and self.macro is None

    @property
    def from_flag(self) -> bool:
        return self.file.startswith('--')

    @property
    def is_dynamic(self) -> bool:
        """Whether it is `from __gin__ import dynamic_registration`."""
        module = getattr(self.parsed, 'module', None)
        return module == '__gin__.dynamic_registration' and self.parsed.is_from


def follow_macros(statement: Statement, macros: Mapping[str, Statement]) -> Statement:
    """The statement with the value of a setting that macros stand for, `%BATCH_SIZE`.

    It is the last one whose macro is known, also if macros refer to each other in a circle.
    """
    for _ in range(len(macros) + 1):
        value = statement.parsed.value
        if not (isinstance(value, Reference) and value.is_macro and value.name in macros):
            break
        statement = macros[value.name]
    return statement


def read_statements(
    files: Sequence[str], bindings: Sequence[str] = (), search_paths: Sequence[str] = ()
) -> list[Statement]:
    """Returns the statements of files and flags in the order in which they take effect.

    Raises:
      ConfigError: if a file is not found, cannot be parsed, or is beyond the limits of `limits.py`.
    """
    folders = [*search_paths, str(find_config_root())]
    reader = _Reader(folders, [*map(_folder_of, files), *folders, '.'])
    statements = [statement for file in files for statement in reader.read(file)]
    statements += read_bindings(bindings)
    _check_macros(statements)
    return statements


def _folder_of(file: str) -> str:
    return file.rpartition('/')[0] if is_remote(file) else os.path.dirname(os.path.abspath(file))


def _check_macros(statements: Sequence[Statement]) -> None:
    """Checks what becomes of macros; `checks.py` does it with the calls in values as well."""
    expansion = limits.Expansion()
    for macro, one in {s.macro: s for s in statements if s.macro}.items():
        needs = [f'%{r.name}' for r in one.references if r.is_macro]
        expansion.add(f'%{macro}', limits.count_values(one.parsed.value), needs, one.place)
    expansion.check()


class _Reader:
    """Reads gin files and the files that they include.

    Args:
      search_paths: the folders in which files and their includes are searched.
      folders: the folders below which included files must be.
    """

    def __init__(self, search_paths: Sequence[str], folders: Sequence[str]):
        self._search_paths, self._folders = search_paths, folders
        self._files = 0

    def read(
        self, file: str, place: str = '--gin_file', includers: tuple[epath.Path, ...] = ()
    ) -> Iterator[Statement]:
        """Yields the statements of a file and of the files that it includes, in gin's order.

        Raises a ConfigError if a file is not found, is not text, has a syntax error, includes
        itself, or is beyond the limits of `limits.py`.
        """
        path = self._find(file, place)
        if path in includers:
            raise ConfigError(f'{place}: {file} includes itself')
        if includers:
            limits.check_inside(path, place, self._folders)
        self._files += 1
        if self._files > limits.MOST_FILES:
            raise ConfigError(f'{place}: more than {limits.MOST_FILES} gin files are included')
        for statement in parse(limits.read_text(path, place), str(path)):
            if isinstance(statement.parsed, config_parser.IncludeStatement):
                included = statement.parsed.filename
                yield from self.read(included, statement.place, (*includers, path))
            else:
                yield statement

    def _find(self, file: str, place: str) -> epath.Path:
        folders = [as_path('--gin_search_paths', path) for path in self._search_paths]
        places = [as_path('--gin_file', file), *(folder / file for folder in folders)]
        path = next((p for p in places if _exists(p)), None)
        if path is None:
            searched = dict.fromkeys(str(Path(p).resolve()) for p in ('.', *self._search_paths))
            raise ConfigError(
                f'{place}: no such gin file: {limits.shortened(file)}. Searched '
                f'{", ".join(searched)}; add another directory with --gin_search_paths'
            )
        return path


def _exists(path: epath.Path) -> bool:
    """Whether something other than a folder is there; what it is, is seen when it is read."""
    with contextlib.suppress(OSError, ValueError):  # such as a name that is too long
        return path.exists() and not path.is_dir()
    return False


def read_bindings(bindings: Sequence[str]) -> list[Statement]:
    """The statements of `--gin.NAME=value` flags.

    Raises a ConfigError if gin cannot parse a value, and it does not look like plain text.
    """
    statements: list[Statement] = []
    for binding in map(quote_text, bindings):
        flag = limits.shortened(f'--gin.{binding}')
        name, _, value = binding.partition('=')
        try:
            statements += parse(binding, flag)
        except limits.BeyondLimitsError:
            raise
        except ConfigError as error:
            name, value = limits.shortened(name.strip()), limits.shortened(value.strip())
            quoted = f'--gin.{name}="{value!r}"'
            if set(value) & set('"$`!\\'):  # which mean something to a shell
                quoted = shlex.quote(f'--gin.{name}={value!r}')
            raise ConfigError(
                f'{flag}: {value or "an empty string"} is not a gin value; if it is text, '
                f'write {quoted}'
            ) from error
    return statements


# What a text begins with that is written like a value of gin, so that a mistake in it is told.
_NOT_TEXT = ('"', "'", '[', '(', '{', '@', '%', '=')


def quote_text(binding: str) -> str:
    """Returns a `NAME=value` in gin's notation: a value that is plain text gets its quotes.

    So `MODEL_DIR=runs/two` is the same as `MODEL_DIR='runs/two'`. A number, True, False and None,
    lists, references and texts in quotes stay as they are.
    """
    name, equals, value = binding.partition('=')
    text = value.strip()
    if not equals or not text or text.startswith(_NOT_TEXT):
        return binding
    try:
        parse(f'x = {text}', '--gin')
    except limits.BeyondLimitsError:
        return binding
    except ConfigError:
        return f'{name}={text!r}'
    return binding


class _Collector(config_parser.ParserDelegate):
    """Collects references instead of resolving them."""

    def __init__(self) -> None:
        self.found: list[Reference] = []

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        return self._note(Reference(scoped_configurable_name, is_macro=False, evaluate=evaluate))

    def macro(self, macro_name: str) -> Reference:
        return self._note(Reference(macro_name, is_macro=True, evaluate=True))

    def _note(self, reference: Reference) -> Reference:
        self.found.append(reference)
        return reference


def parse(text: str, file: str) -> list[Statement]:
    """The statements of a text, with the name of the file or of the flag that contains it."""
    collector = _Collector()
    statements: list[Statement] = []
    try:
        # The constructor reads the first token, so it can already raise a SyntaxError.
        parser = config_parser.ConfigParser(io.StringIO(text), collector)
        for parsed in parser:
            if len(statements) == limits.MOST_STATEMENTS:
                raise ConfigError(f'{file}: more than {limits.MOST_STATEMENTS:,} statements')
            flag = file.startswith('--')
            place = file if flag else f'{file}:{parsed.location.line_num}'
            if isinstance(parsed, config_parser.BindingStatement):
                limits.check_value(parsed.value, place, parsed.arg_name or parsed.selector)
            statements.append(Statement(place, file, parsed, tuple(collector.found)))
            collector.found.clear()
    except SyntaxError as error:
        message = str(error.msg).split('\n')[0].strip()
        if message.startswith('malformed node'):  # what Python's ast reports for a bare name
            message = 'write text in quotes, a configurable with @, or a macro with %'
        # What is no gin file, such as a list of passwords, is not quoted.
        line = limits.shortened(printable((error.text or '').strip())) if _is_gin(file) else ''
        where = f'{file}:{error.lineno}' if error.lineno else file
        raise ConfigError(
            f'{where}: syntax error: {message}{f" In: {line}" if line else ""}'
        ) from error
    except tokenize.TokenError as error:
        message, (line_number, _) = error.args
        raise ConfigError(
            f'{file}:{line_number}: syntax error: {message}: close the open bracket or quote'
        ) from error
    except ConfigError:
        raise
    except (RecursionError, MemoryError) as error:
        raise ConfigError(f'{file}: values are nested too deeply') from error
    except ValueError as error:
        raise ConfigError(f'{file}: {limits.shortened(first_line(error))}') from error
    return statements


def _is_gin(file: str) -> bool:
    return file.endswith('.gin') or file.startswith('--')


# The setting as written, such as `utils.DatasetConfig.pack` -> the statements that set it.
_settings: dict[str, list[Statement]] = {}
_macros: dict[str, Statement] = {}
# The packages of --gin_allow.
_allowed: list[str] = []


def remember(statements: Sequence[Statement]) -> None:
    """Notes the places of the statements of a configuration, and forgets an earlier one."""
    _settings.clear()
    _macros.clear()
    for statement in statements:
        if statement.macro:
            _macros[statement.macro] = statement
        elif statement.is_binding:
            parsed = statement.parsed
            _settings.setdefault(f'{parsed.selector}.{parsed.arg_name}', []).append(statement)


def allow_packages(packages: Sequence[str]) -> None:
    """Notes the packages that the user allows, and forgets an earlier configuration."""
    _allowed[:] = packages


def is_allowed(module: str) -> bool:
    """Whether the user allows a module whose name is the value of a setting."""
    return is_within(module, _allowed)


def find_place(message: str) -> str | None:
    """The file and line, or the flag, of the setting that an error message is about, or None.

    `message` is a message that begins with a setting, such as `utils.DatasetConfig.pack is 3: ...`.
    """
    found = re.match(r'(?:(?P<scope>[\w/]+)/)?(?P<name>[\w.]+)(?: is (?P<value>.*))?', message)
    statements = _settings.get(found['name'], []) if found else []
    if not statements or found is None:
        return None
    for statement in reversed(statements):
        value = _value_of(statement).parsed.value
        in_scope = found['scope'] in (None, statement.parsed.scope)
        shown = None if isinstance(value, Reference) else repr(value)
        if in_scope and shown and (found['value'] or '').startswith(shown[:100]):
            return _value_of(statement).place
    return _value_of(statements[-1]).place


def _value_of(statement: Statement) -> Statement:
    """The statement with the value: if it is a macro, the statement that sets the macro."""
    return follow_macros(statement, _macros)


def print_note(line: str) -> None:
    """Tells the user about a setting that is accepted but has no effect."""
    print(f'note: {printable(line)}')
