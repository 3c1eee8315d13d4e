"""Shows a plan, or what changes from one to another.

python -m partitioning.plan plan.json
python -m partitioning.plan before.json after.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from partitioning.plan import diff, load_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 1 where two plans differ, 2 for files that are none."""
    parser = argparse.ArgumentParser(
        prog='python -m partitioning.plan', description=__doc__.partition('\n')[0]
    )
    parser.add_argument('plan', help='a file that save_plan wrote')
    parser.add_argument('after', nargs='?', help='another one, to compare it with')
    flags = parser.parse_args(arguments)
    try:
        plan = load_plan(flags.plan)
        after = None if flags.after is None else load_plan(flags.after)
    except (OSError, ValueError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    if after is None:
        print(plan)
        return 0
    changes = diff(plan, after)
    print(changes)
    return int(bool(changes))


if __name__ == '__main__':
    sys.exit(main())
