"""The settings that gin has used in this process, if it has used any."""

from __future__ import annotations

import sys
from typing import Any

from etils import epath

from train.paths import replacing

CONFIG_FILE = 'config.gin'


def write_gin_text(directory: epath.Path, name: str = CONFIG_FILE) -> None:
    """Writes `<directory>/config.gin`, unless nothing in this process was configured by gin."""
    if 'gin' in sys.modules and (text := operative_text().strip()):
        with replacing(directory / name) as unfinished:
            unfinished.write_text(text + '\n')


def beside(name: str) -> str:
    """The name of a file of this trainer in a folder where T5X has written a file `name`."""
    stem, ending = name.rsplit('.', 1)
    return f'{stem}.meshwright.{ending}'


def file_of_run(directory: epath.Path, name: str) -> epath.Path:
    """The file that this trainer calls `name` in the folder of a run. It may not exist."""
    path = directory / beside(name)
    return path if path.exists() else directory / name


def operative_text() -> str:
    """Returns the settings of all calls so far, as the text of a gin file.

    gin lists the calls in the value of a macro under a scope with the name of the macro. In a gin
    file, such settings would win over a later `PjitPartitioner.layout = 'fsdp'` without a scope, so
    this function leaves out the scopes in which nothing is set.
    """
    from gin import config as gin_internals

    macro = 'gin.macro'
    used = {scope for scope, selector in gin_internals._CONFIG if selector != macro}
    settings: dict[tuple[str, str], dict[str, Any]] = {}
    for (scope, selector), values in gin_internals._OPERATIVE_CONFIG.items():
        unused = (scope, macro) in gin_internals._CONFIG and scope not in used
        key = ('' if unused and selector != macro else scope, selector)
        settings.setdefault(key, {}).update(values)
    return gin_internals._config_str(settings)
