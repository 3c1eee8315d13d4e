"""The settings that gin has used in this process, as text; nothing if gin was not used.

A run that gin has not configured does not load gin: this module imports it where it is needed.
"""

from __future__ import annotations

import sys
from typing import Any

from etils import epath

from train.paths import replacing

CONFIG_FILE = 'config.gin'


def write_gin_text(directory: epath.Path, name: str = CONFIG_FILE) -> None:
    """Writes `<directory>/config.gin`, unless nothing in this process was configured by gin."""
    if text := operative_text().strip():
        with replacing(directory / name) as unfinished:
            unfinished.write_text(text + '\n')


def operative_text() -> str:
    """Returns the settings of all calls so far as the text of a gin file, or '' without gin.

    gin lists the calls in the value of a macro under a scope with the name of the macro. In a gin
    file, such settings would win over a later `PjitPartitioner.layout = 'fsdp'` without a scope, so
    this function leaves out the scopes in which nothing is set.
    """
    if 'gin' not in sys.modules:
        return ''
    from gin import config as gin_internals

    macro = 'gin.macro'
    used = {scope for scope, selector in gin_internals._CONFIG if selector != macro}
    settings: dict[tuple[str, str], dict[str, Any]] = {}
    for (scope, selector), values in gin_internals._OPERATIVE_CONFIG.items():
        unused = (scope, macro) in gin_internals._CONFIG and scope not in used
        key = ('' if unused and selector != macro else scope, selector)
        settings.setdefault(key, {}).update(values)
    return gin_internals._config_str(settings)
