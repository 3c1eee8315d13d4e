"""`meshwright dry`: starts `meshwright.dry` in place of this process.

There, nothing of the trainer is imported, whose package has the name of many a script: `train`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from meshwright.dry import command


def run_dry(arguments: Sequence[str], prog: str) -> int:
    """Checks the arguments, and replaces this process by `python -m meshwright.dry`."""
    try:
        command.check(arguments, prog)  # it prints the help, too
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, '-m', 'meshwright.dry', *arguments])
