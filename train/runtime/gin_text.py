"""The settings that gin has used in this process, if it has used any."""

from __future__ import annotations

import sys
from typing import Any

from etils import epath


def write_gin_text(directory: epath.Path) -> None:
    """Writes `<directory>/config.gin`, unless nothing in this process was configured by gin."""
    if 'gin' in sys.modules and (text := operative_text().strip()):
        (directory / 'config.gin').write_text(text + '\n')


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
