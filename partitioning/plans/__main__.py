"""`python -m partitioning.plans`: shows a plan, or what changes from one to another.

python -m partitioning.plans plan.json
python -m partitioning.plans before.json after.json    # exit status 1 where they differ, as diff
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from partitioning.plans import diff, load_plan


def main(paths: Sequence[str]) -> int:
    """Prints the plan of one file, or the difference of two; 0: shown or the same, 1: they differ.

    A file that is no plan is one line on stderr, and 2.
    """
    if len(paths) not in (1, 2) or any(path.startswith('-') for path in paths):
        print(__doc__, file=sys.stderr if not {'-h', '--help'} & {*paths} else sys.stdout)
        return 0 if {'-h', '--help'} & {*paths} else 2
    try:
        plans = [load_plan(path) for path in paths]
    except (OSError, ValueError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    if len(plans) == 1:
        print(plans[0])
        return 0
    changes = diff(*plans)
    print(changes)
    return int(bool(changes))


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
