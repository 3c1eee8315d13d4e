"""gin files and flags -> a gin configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import gin

from train.config import check, parse
from train.config.errors import ConfigError

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
    statements = [*parse.read_files(files, paths), *parse.read_bindings(bindings)]
    check.check_imports(statements, allow)
    import train.configurables  # noqa: F401  # registers what gin files may name

    check.import_modules(statements)
    check.check_names(statements, allow)
    for path in paths:
        gin.add_config_file_search_path(path)
    try:
        gin.parse_config_files_and_bindings(
            list(files), list(bindings), skip_unknown=False, print_includes_and_imports=False
        )
    except (ValueError, SyntaxError, TypeError) as error:
        raise ConfigError(f'gin: {str(error).splitlines()[0]}') from error


def save_operative_config(path: str | os.PathLike[str]) -> None:
    """Writes the configuration that was used, a gin file that gives the same run again."""
    Path(path).write_text(gin.operative_config_str())
