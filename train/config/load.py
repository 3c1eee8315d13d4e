"""gin files and flags -> a gin configuration."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import gin
from gin import config as gin_internals

from train.config import check, parse
from train.errors import ConfigError, first_line

REPOSITORY = Path(__file__).resolve().parents[2]


def load_config(
    files: Sequence[str],
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    allow: Sequence[str] = (),
) -> None:
    """Reads gin files and flags, checks them, and configures gin by them.

    Args:
      files: gin files, later ones over earlier ones.
      bindings: `NAME=value` or `configurable.parameter=value`, over the files.
      search_paths: folders in which files and their includes are looked for, after the current
        one and before the folder that holds `configs/`.
      allow: packages beside those of `check.ALLOWED_PACKAGES` that files may name.

    Raises:
      ConfigError: whatever of this cannot be honoured; gin has then run nothing.
    """
    paths = [*search_paths, str(REPOSITORY)]
    if not files:
        raise ConfigError('no gin file: add --gin_file=configs/runs/quickstart.gin')
    sources = parse.read_files(files, paths)
    flags = parse.read_bindings(bindings)
    statements = [*sources.statements, *flags]
    check.check_imports(statements, allow)
    import train.configurables  # noqa: F401  # registers what gin files may name

    check.import_modules(statements)
    check.check_names(statements, allow)
    try:
        with _gin_reads(sources.texts):
            gin.parse_config_files_and_bindings(
                list(files), None, finalize_config=False, print_includes_and_imports=False
            )
            for binding in bindings:
                own = [flag for flag in flags if flag.place == f'--gin.{binding}']
                gin.parse_config(_with_imports(binding, own, sources.statements))
            gin.finalize()
    except Exception as error:  # whatever the checks above let pass, gin says in its own words
        raise ConfigError(f'gin: {first_line(error)}') from error


def _with_imports(
    binding: str, flags: Sequence[parse.Statement], statements: Sequence[parse.Statement]
) -> str:
    """A binding, with the imports of files with dynamic registration if it has names of theirs."""
    imports = check.dynamic_imports(statements)
    names = [r.selector for flag in flags for r in flag.references if not r.is_macro]
    names += [flag.parsed.selector for flag in flags if getattr(flag.parsed, 'arg_name', None)]
    registered = gin_internals._REGISTRY.matching_selectors
    if all(registered(name) or name.split('.')[0] not in imports for name in names):
        return binding
    lines = [statement.parsed.format() for statement in imports.values()]
    return '\n'.join(['from __gin__ import dynamic_registration', *lines, binding])


@contextlib.contextmanager
def _gin_reads(texts: Mapping[str, str]) -> Iterator[None]:
    """Lets gin read nothing but the texts that were checked.

    By itself it looks for files in the current folder and in every package on the Python path.
    """
    readers, prefixes = gin_internals._FILE_READERS, gin_internals._LOCATION_PREFIXES
    gin_internals._FILE_READERS = [(lambda file: io.StringIO(texts[file]), texts.__contains__)]
    gin_internals._LOCATION_PREFIXES = ['']
    try:
        yield
    finally:
        gin_internals._FILE_READERS, gin_internals._LOCATION_PREFIXES = readers, prefixes
