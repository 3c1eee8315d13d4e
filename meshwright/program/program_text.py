"""Reads the text of a compiled program, or says why jaxlib cannot read it."""

from __future__ import annotations

from importlib import metadata

import jax


def read_text(compiled: jax.stages.Compiled) -> str:
    """Returns the text of a compiled program, or '' if its back end has none.

    Args:
      compiled: the result of `jitted.lower(...).compile()`.

    Raises:
      ValueError: if the compiler, such as libtpu, is newer than jaxlib and has used an
        instruction in a form that jaxlib does not know.
    """
    try:
        return compiled.as_text() or ''
    except jax.errors.JaxRuntimeError as error:
        version, reason = metadata.version('jaxlib'), str(error).splitlines()[0]
        raise ValueError(
            f'the program is compiled, but jaxlib {version} cannot read it: install a newer jax '
            f'and jaxlib, or an older compiler, such as libtpu ({reason})'
        ) from error
