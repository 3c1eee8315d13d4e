"""Parses gin files into statements with their places, without running or importing anything."""

from __future__ import annotations

import dataclasses
import io
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gin import config_parser

from train.errors import ConfigError, first_line


@dataclasses.dataclass(frozen=True)
class Reference:
    """A name inside a value: `@selector`, `@selector()` or `%MACRO`.

    Attributes:
      name: the name, with its scopes.
      is_macro: whether it is a macro.
    """

    name: str
    is_macro: bool

    @property
    def selector(self) -> str:
        """The name without its scopes."""
        return self.name.rsplit('/', 1)[-1]


@dataclasses.dataclass(frozen=True)
class Statement:
    """One statement of a gin file or of a `--gin.` flag.

    Attributes:
      place: its place, for messages: `configs/run.gin:12` or `--gin.NAME=...`.
      file: the file that contains it, or the flag.
      parsed: gin's own statement: a binding, an import, or the head of a block.
      references: the names in its value.
    """

    place: str
    file: str
    parsed: Any
    references: tuple[Reference, ...] = ()

    @property
    def from_flag(self) -> bool:
        return self.file.startswith('--')


@dataclasses.dataclass
class Sources:
    """The gin files of a command, each of which is read once.

    Attributes:
      statements: every statement of the files and of the files that they include, in gin's order.
      texts: the text of each file, by the name that the command or an include uses for it.
    """

    statements: list[Statement] = dataclasses.field(default_factory=list)
    texts: dict[str, str] = dataclasses.field(default_factory=dict)


def read_files(files: Sequence[str], search_paths: Sequence[str]) -> Sources:
    """Reads gin files and the files that they include.

    Raises:
      ConfigError: if a file is not found, is not text, has a syntax error, or includes itself.
    """
    sources = Sources()
    for file in files:
        _read_file(file, search_paths, sources, (), '--gin_file')
    return sources


def read_bindings(bindings: Sequence[str]) -> list[Statement]:
    """The statements of `--gin.NAME=value` flags.

    Raises:
      ConfigError: if gin cannot parse a value.
    """
    statements: list[Statement] = []
    for binding in bindings:
        flag = f'--gin.{binding}'
        name, _, value = binding.partition('=')
        try:
            statements += _parse(io.StringIO(binding), flag)
        except ConfigError as error:
            quoted = f'--gin.{name.strip()}="\'{value.strip()}\'"'
            raise ConfigError(
                f'{flag}: {value.strip() or "an empty string"} is not a gin value. Text needs its '
                f"own quotes inside the shell's quotes: {quoted}"
            ) from error
    return statements


def find_file(file: str, search_paths: Sequence[str]) -> Path | None:
    """The path of the file: as given, or in the first search path that contains it."""
    places = [Path(file), *(Path(p) / file for p in search_paths)]
    return next((p for p in places if p.is_file()), None)


def _read_file(
    file: str,
    search_paths: Sequence[str],
    sources: Sources,
    includers: tuple[Path, ...],
    place: str,
) -> None:
    path = find_file(file, search_paths)
    if path is None:
        places = ', '.join(dict.fromkeys(str(Path(p).resolve()) for p in ('.', *search_paths)))
        raise ConfigError(
            f'{place}: no such gin file: {file}. Searched {places}; add another directory with '
            '--gin_search_paths'
        )
    if path in includers:
        raise ConfigError(f'{place}: {file} includes itself')
    try:
        sources.texts[file] = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'{place}: cannot read {path} as text: {error}') from error
    for statement in _parse(io.StringIO(sources.texts[file]), str(path)):
        if isinstance(statement.parsed, config_parser.IncludeStatement):
            included = statement.parsed.filename
            _read_file(included, search_paths, sources, (*includers, path), statement.place)
        else:
            sources.statements.append(statement)


class _Collector(config_parser.ParserDelegate):
    """Collects references instead of resolving them."""

    def __init__(self) -> None:
        self.found: list[Reference] = []

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Reference:
        return self._note(Reference(scoped_configurable_name, is_macro=False))

    def macro(self, macro_name: str) -> Reference:
        return self._note(Reference(macro_name, is_macro=True))

    def _note(self, reference: Reference) -> Reference:
        self.found.append(reference)
        return reference


def _parse(text: io.StringIO, file: str) -> list[Statement]:
    collector = _Collector()
    statements = []
    try:
        # The constructor reads the first token, so it can already raise a SyntaxError.
        parser = config_parser.ConfigParser(text, collector)
        for parsed in parser:
            flag = file.startswith('--')
            place = file if flag else f'{file}:{parsed.location.line_num}'
            statements.append(Statement(place, file, parsed, tuple(collector.found)))
            # gin parses a whole block at once, so its head carries all references of the block.
            collector.found.clear()
    except SyntaxError as error:
        message = str(error.msg).split('\n')[0].strip()
        if message.startswith('malformed node'):  # what Python's ast reports for a bare name
            message = 'write text in quotes, a configurable with @, or a macro with %'
        line = (error.text or '').strip()
        where = f'{file}:{error.lineno}' if error.lineno else file
        raise ConfigError(
            f'{where}: syntax error: {message}{f" In: {line}" if line else ""}'
        ) from error
    except tokenize.TokenError as error:
        message, (line_number, _) = error.args
        raise ConfigError(
            f'{file}:{line_number}: syntax error: {message}: close the open bracket or quote'
        ) from error
    except ValueError as error:
        raise ConfigError(f'{file}: {first_line(error)}') from error
    return statements
