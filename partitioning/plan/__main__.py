"""Shows a plan, or what changes from one plan to another.

python -m partitioning.plan plan.json
python -m partitioning.plan before.json after.json
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from partitioning.command_line import OneLineParser
from partitioning.plan import Plan, plan_diff
from partitioning.plan.tables import folded_table
from partitioning.untrusted_text import printable

_WIDTH = 160  # in a file or a pipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if two plans differ and 2 if a file is not a plan."""
    parser = OneLineParser('python -m partitioning.plan', description=__doc__.partition('\n')[0])
    parser.add_argument('plan', help='a file that Plan.save wrote')
    parser.add_argument('after', nargs='?', help='another file, to compare the first with')
    parser.add_argument('--all', action='store_true', help='a row for every array, with reasons')
    flags = parser.parse_args(arguments)
    try:
        plan = Plan.load(flags.plan)
        after = None if flags.after is None else Plan.load(flags.after)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError):
            error = ValueError(
                f'there is no file {error.filename or error}: write the path of a saved plan'
            )
        print(f'error: {printable(str(error))}', file=sys.stderr)
        return 2
    if after is None:
        width = shutil.get_terminal_size((_WIDTH, 24)).columns
        print(printable(str(plan) if flags.all else folded_table(plan.rows, plan.mesh, width)))
        return 0
    changes = plan_diff(plan, after)
    print(printable(str(changes)))
    return int(bool(changes))


if __name__ == '__main__':
    sys.exit(main())
