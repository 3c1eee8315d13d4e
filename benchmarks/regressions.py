"""Seeds changes into small programs, and counts which of them `meshwright check` reports.

  python benchmarks/regressions.py [--only NAME,...] [--folder build/regressions] [--show]

A case is an entry of a file in `seeded_changes/cases`: texts of a program that others replace. One
of kind "same" changes nothing that matters, and nothing may be reported. Any other case must be
reported, with a line that it changed, or with one of the texts in "expect", such as the name of an
array or a rule. `seeded_changes/cases/README.md` describes the files, for those who add cases.

Each program is compiled for eight described chips, once as it is and once for each case, in one
process. Results are written as they come, and the command continues where it stopped; a case whose
text changed is run again.
"""

from __future__ import annotations

import argparse
import ast
import collections
import difflib
import hashlib
import importlib.util
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.update({'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '8'} | os.environ)
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax

from benchmarks.campaigns import read_results, write_results
from meshwright.records.comparing import compare_records
from meshwright.records.difference import Difference
from meshwright.records.record import Record
from meshwright.records.recording import record_call

HERE = ROOT / 'benchmarks/seeded_changes'
TOPOLOGY = 'v5e:2x4'


def read_cases() -> dict[str, dict[str, Any]]:
    """The cases of all files by 'program: name'."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted((HERE / 'cases').glob('*.toml')):
        for case in tomllib.loads(file.read_text())['case']:
            name = f'{case["program"]}: {case["name"]}'
            if name in found:
                raise SystemExit(f'{file.name}: there are two cases {name!r}: rename one')
            found[name] = case
    return found


def edit(case: dict[str, Any]) -> str:
    """The text of a program with the edits of a case."""
    text = (HERE / 'programs' / f'{case["program"]}.py').read_text()
    for old, new in case['edits']:
        if text.count(old) != 1:
            raise SystemExit(f'{case["name"]}: {old!r} is there {text.count(old)} times, not once')
        text = text.replace(old, new)
    return text


def record_text(text: str, file: Path) -> Record:
    """The record of a program."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    jax.clear_caches()
    spec = importlib.util.spec_from_file_location('case', file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fn, args = module.build()
    return record_call(fn, args, topology=TOPOLOGY)[0]


def changed_lines(before: str, after: str) -> set[str]:
    """The texts of all lines of the statements that a case changed, before and after."""
    old, new = before.splitlines(), after.splitlines()
    numbers: tuple[set[int], set[int]] = set(), set()
    for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != 'equal':
            numbers[0].update(range(i + 1, j + 1))
            numbers[1].update(range(k + 1, m + 1))
    return {
        lines[n - 1].strip()
        for text, lines, found in ((before, old, numbers[0]), (after, new, numbers[1]))
        for first, last in _statements(text)
        if found & {*range(first, last + 1)}
        for n in range(first, last + 1)
    }


def _statements(text: str) -> Iterator[tuple[int, int]]:
    """The first and last lines of all statements that have no others inside."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            last = node.end_lineno or node.lineno
            body = getattr(node, 'body', None)
            yield node.lineno, body[0].lineno - 1 if body else last


def judge(case: dict[str, Any], found: tuple[Difference, ...], text: str) -> bool:
    """Whether a case is reported as it has to be."""
    if case['kind'] == 'same':
        return not found
    lines = changed_lines((HERE / 'programs' / f'{case["program"]}.py').read_text(), text)
    shown = [f'{one.line} {one.at} {" ".join(one.others)}' for one in found]
    by_line = any(
        one.at.text and any(line.startswith(one.at.text.removesuffix('...')) for line in lines)
        for one in found
    )
    return by_line or any(word in line for word in case.get('expect', ()) for line in shown)


def run(name: str, case: dict[str, Any], folder: Path, base: Record) -> dict[str, Any]:
    """The result of a case."""
    text = edit(case)
    try:
        # Python keeps the lines of files by their paths, so each case has a folder of its own.
        place = folder / 'edited' / re.sub(r'\W+', '-', name)
        now = record_text(text, place / f'{case["program"]}.py')
    except Exception as error:
        return {'kind': case['kind'], 'error': f'{type(error).__name__}: {error}'[:300]}
    found = compare_records(base, now)
    return {
        'kind': case['kind'],
        'reported': len(found),
        'right': judge(case, found, text),
        'shown': [f'{one.kind}: {one.line} [{one.at}]'[:240] for one in found[:8]],
        'now': now.to_json(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--only', help='parts of names, separated by commas')
    parser.add_argument('--folder', type=Path, default=ROOT / 'build/regressions')
    parser.add_argument('--show', action='store_true', help='print what is reported')
    parser.add_argument('--compare', action='store_true', help='compare stored records again')
    options = parser.parse_args()
    folder, cases = options.folder, read_cases()
    folder.mkdir(parents=True, exist_ok=True)
    results, records = (folder / name for name in ('results.json', 'records.json'))
    known, bases = read_results(results), read_results(records)
    for name, case in cases.items():
        if options.only and not any(part in name for part in options.only.split(',')):
            continue
        text = (HERE / 'programs' / f'{case["program"]}.py').read_text()
        digest = hashlib.sha256((text + json.dumps(case)).encode()).hexdigest()[:16]
        base_key = f'{case["program"]} {hashlib.sha256(text.encode()).hexdigest()[:16]}'
        stored = known.get(name, {})
        if stored.get('digest') != digest or (options.compare and 'now' not in stored):
            if base_key not in bases:
                base_file = folder / 'as_it_is' / f'{case["program"]}.py'
                bases[base_key] = record_text(text, base_file).to_json()
                write_results(records, bases)
            stored = run(name, case, folder, Record.from_json(bases[base_key]))
            known[name] = {**stored, 'digest': digest}
            write_results(results, known)
        elif options.compare:
            base, now = (Record.from_json(x) for x in (bases[base_key], stored['now']))
            found = compare_records(base, now)
            stored |= {'reported': len(found), 'right': judge(case, found, edit(case))}
            stored['shown'] = [f'{one.kind}: {one.line} [{one.at}]'[:240] for one in found[:8]]
            write_results(results, known)
        mark = 'error' if 'error' in stored else 'right' if stored['right'] else 'WRONG'
        print(f'{mark:6} {name} ({case["kind"]}): {stored.get("reported", stored.get("error"))}')
        if options.show or mark == 'WRONG':
            print(*(f'         {line}' for line in stored.get('shown', ())), sep='\n')
    print(summary({name: known[name] for name in cases if name in known}))


def summary(known: dict[str, dict[str, Any]]) -> str:
    """How many changes are reported, and how many refactorings are not."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for one in known.values():
        group = 'refactorings' if one['kind'] == 'same' else 'changes'
        counts[group]['all'] += 1
        counts[group]['errors'] += 'error' in one
        counts[group]['reported'] += bool(one.get('reported'))
        counts[group]['right'] += bool(one.get('right'))
    changes, same = counts['changes'], counts['refactorings']
    return (
        f'{changes["reported"]} of {changes["all"]} changes reported, {changes["right"]} with a '
        f'line or rule ({changes["errors"]} do not run); {same["reported"]} of {same["all"]} '
        f'refactorings reported ({same["errors"]} do not run)'
    )


if __name__ == '__main__':
    main()
