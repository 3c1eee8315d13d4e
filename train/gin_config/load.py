"""Loads a gin configuration from files and flags."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import gin
from gin import config as gin_internals

from train.errors import ConfigError, first_line
from train.gin_config import check, parse


def find_config_root() -> Path:
    """Returns the folder that contains `configs/`: this package in a wheel, or the repository."""
    package = Path(__file__).resolve().parents[1]
    return package if (package / 'configs').is_dir() else package.parent


def load_config(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    allow: Sequence[str] = (),
) -> None:
    """Reads gin files and flags, checks them, and configures gin with them.

    Args:
      files: gin files. Later files override earlier ones.
      bindings: `NAME=value` or `configurable.parameter=value`. They override the files.
      search_paths: directories in which files and their includes are searched, after the current
        directory and before the directory that contains `configs/`.
      allow: packages that gin files may use in addition to the listed names.

    Raises:
      ConfigError: if a file, a statement or a flag is invalid. gin has not run anything then.
    """
    if not files:
        raise ConfigError('no gin file: add --gin_file=configs/runs/quickstart.gin')
    sources = parse.Sources([*search_paths, str(find_config_root())])
    for file in files:
        sources.read(file)
    flags = parse.read_bindings(bindings)
    statements = [*sources.statements, *flags]
    import train.configurables  # noqa: F401  # registers the names that gin files may use

    check.check_imports(statements, allow)
    check.import_modules(statements)
    check.check_names(statements, allow)
    try:
        with _gin_reads_only(sources.texts):
            gin.parse_config_files_and_bindings(
                list(files), None, finalize_config=False, print_includes_and_imports=False
            )
            for binding in bindings:
                own = [flag for flag in flags if flag.place == f'--gin.{binding}']
                gin.parse_config(_with_imports(binding, own, sources.statements))
            gin.finalize()
    except Exception as error:  # the checks above missed it, so the message is gin's own
        raise ConfigError(f'gin: {first_line(error)}') from error


def _with_imports(
    binding: str, flags: Sequence[parse.Statement], statements: Sequence[parse.Statement]
) -> str:
    """Returns a binding, preceded by the imports of the files if it uses their names."""
    imports = check.dynamic_imports(statements)
    names = [r.selector for flag in flags for r in flag.references if not r.is_macro]
    names += [flag.parsed.selector for flag in flags if getattr(flag.parsed, 'arg_name', None)]
    registered = gin_internals._REGISTRY.matching_selectors
    if all(registered(name) or name.split('.')[0] not in imports for name in names):
        return binding
    lines = [statement.parsed.format() for statement in imports.values()]
    return '\n'.join(['from __gin__ import dynamic_registration', *lines, binding])


@contextlib.contextmanager
def _gin_reads_only(texts: Mapping[str, str]) -> Iterator[None]:
    """Lets gin read only the texts that were checked.

    Otherwise, gin searches the current directory and every package on the Python path.
    """
    readers, prefixes = gin_internals._FILE_READERS, gin_internals._LOCATION_PREFIXES
    gin_internals._FILE_READERS = [(lambda file: io.StringIO(texts[file]), texts.__contains__)]
    gin_internals._LOCATION_PREFIXES = ['']
    try:
        yield
    finally:
        gin_internals._FILE_READERS, gin_internals._LOCATION_PREFIXES = readers, prefixes
