"""gin files -> statements with their places, without running or importing anything."""

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
    """A value that names something: `@selector`, `@selector()` or `%MACRO`."""

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
      place: where it stands, `configs/run.gin:12` or `--gin.NAME=...`.
      file: the file it stands in, or the flag.
      parsed: gin's own statement: a binding, an import, or the head of a block.
      references: what its value names.
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
    """Files as they were read, once.

    Attributes:
      statements: every statement of the files and of those that they include, in gin's order.
      texts: the text of each file, by the name that asks for it.
    """

    statements: list[Statement] = dataclasses.field(default_factory=list)
    texts: dict[str, str] = dataclasses.field(default_factory=dict)


def read_files(files: Sequence[str], search_paths: Sequence[str]) -> Sources:
    """Reads files and what they include.

    Raises:
      ConfigError: a file that is not found, with the places searched, or is no text; a syntax
        error, with file and line; a file that includes itself.
    """
    sources = Sources()
    for file in files:
        _read_file(file, search_paths, sources, (), '--gin_file')
    return sources


def read_bindings(bindings: Sequence[str]) -> list[Statement]:
    """The statements of `--gin.NAME=value` flags.

    Raises:
      ConfigError: a value that gin cannot read.
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
                f'{flag}: {value.strip() or "nothing"} is no gin value. Text needs quotes of its '
                f'own inside those of the shell: {quoted}'
            ) from error
    return statements


def find_file(file: str, search_paths: Sequence[str]) -> Path | None:
    """The file, as it is or below the first search path that has it."""
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
        looked = ', '.join(dict.fromkeys(str(Path(p).resolve()) for p in ('.', *search_paths)))
        raise ConfigError(
            f'{place}: no such gin file: {file}. Looked in {looked}; add a folder with '
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
    """Notes references instead of resolving them."""

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
        # The first token is read when the parser is made, and a bad one fails there.
        parser = config_parser.ConfigParser(text, collector)
        for parsed in parser:
            flag = file.startswith('--')
            place = file if flag else f'{file}:{parsed.location.line_num}'
            statements.append(Statement(place, file, parsed, tuple(collector.found)))
            # A block is parsed whole: its head comes first and carries the references of all.
            collector.found.clear()
    except SyntaxError as error:
        message = str(error.msg).split('\n')[0].strip()
        if message.startswith('malformed node'):  # ast's word for a bare name
            message = 'text needs quotes, a configurable needs @ before it, a macro %'
        line = (error.text or '').strip()
        where = f'{file}:{error.lineno}' if error.lineno else file
        raise ConfigError(
            f'{where}: syntax error: {message}{f" In: {line}" if line else ""}'
        ) from error
    except tokenize.TokenError as error:
        message, (line_number, _) = error.args
        raise ConfigError(
            f'{file}:{line_number}: syntax error: {message}; is a bracket or a quote open?'
        ) from error
    except ValueError as error:
        raise ConfigError(f'{file}: {first_line(error)}') from error
    return statements
