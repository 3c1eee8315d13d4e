"""Lists the commits of a repository and their changes, and writes their files to a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshwright.report.answers import COMPILERS

# Packages whose versions decide what a program becomes.
_PACKAGES = ('jax', 'jaxlib', *COMPILERS['tpu'], *COMPILERS['gpu'], 'flax', 'optax')
_PIN = re.compile(
    rf'^(?P<sign>[-+])\s*[\'"]?(?P<package>{"|".join(_PACKAGES)})(?:\[[\w,-]*\])?[\'"]?'
    r'\s*(?:[=<>~!]=?|:)=?\s*[\'"]?(?P<version>\d[\w.+]*)'
)
# The files that say so.
_REQUIRING = (
    *('*require*', '*constraint*', '*override*', '*environment*'),
    *('*.toml', '*.lock', '*.cfg'),
)
_FIELDS = '%H%x00%P%x00%cs%x00%s'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit:
    """A commit.

    Attributes:
      sha: its name.
      parent: the name of its first parent; '' if it has none.
      date: its date: '2026-05-14'.
      subject: the first line of its message.
    """

    sha: str
    parent: str
    date: str
    subject: str

    @property
    def short(self) -> str:
        """The beginning of its name."""
        return self.sha[:9]


def list_commits(root: Path, span: str) -> list[Commit]:
    """The commits of a range, the oldest first, along the first parents.

    Args:
      root: a folder of the repository.
      span: the range: 'v1.0..main', or 'v1.0..' up to the present commit.

    Raises:
      ValueError: if git does not know it, or if it is empty.
    """
    if span.startswith('-') or '..' not in span or span.startswith('..'):
        raise ValueError(f'--history={span!r}: write a range of commits, such as v1.0..')
    # A ref may have the name of a file.
    options = ['log', '--first-parent', '--reverse', f'--format={_FIELDS}', span, '--']
    lines = run_git(root, *options).splitlines()
    if not lines:
        raise ValueError(f'--history={span}: the range has no commits')
    found = []
    for line in lines:
        sha, parents, date, subject = line.split('\0', 3)
        parent = parents.partition(' ')[0]
        found.append(Commit(sha=sha, parent=parent, date=date, subject=subject))
    return found


def changed_files(root: Path, before: str, after: str) -> frozenset[str]:
    """The files that differ between two commits, from the root of the repository."""
    held = run_git(root, 'diff', '--name-only', '--no-renames', '-z', before, after)
    return frozenset(filter(None, held.split('\0')))


def pinned_versions(root: Path, before: str, after: str) -> dict[str, tuple[str, str]]:
    """The packages whose required version differs between two commits: before and after.

    They are read from the lines of any file that begin with the name of a package, as lists of
    requirements, pyproject.toml and lock files have them.
    """
    pattern = rf'^\s*[\'"]?({"|".join(_PACKAGES)})\b'
    files = [f':(glob,icase)**/{name}' for name in _REQUIRING]
    held = run_git(root, 'diff', '-U0', '--no-color', '-G', pattern, before, after, '--', *files)
    versions: Mapping[str, dict[str, str]] = {'-': {}, '+': {}}
    for line in held.splitlines():
        if pin := _PIN.match(line):
            versions[pin['sign']].setdefault(pin['package'], pin['version'])
    return {
        package: (old, versions['+'][package])
        for package, old in versions['-'].items()
        if versions['+'].get(package, old) != old
    }


@contextlib.contextmanager
def work_tree(root: Path, commit: str) -> Iterator[Path]:
    """A folder with the files of a commit, which `check_out` changes; it is removed at the end.

    Yields:
      The folder that stands for `root` there.
    """
    top = Path(run_git(root, 'rev-parse', '--show-toplevel').strip())
    with tempfile.TemporaryDirectory(prefix='meshwright-history-') as name:
        folder = Path(name).resolve() / top.name
        run_git(root, 'worktree', 'add', '--quiet', '--detach', str(folder), commit)
        try:
            yield folder / root.resolve().relative_to(top.resolve())
        finally:
            run_git(root, 'worktree', 'remove', '--force', str(folder))


def check_out(folder: Path, commit: str) -> None:
    """Replaces the files in the folder of `work_tree` by the files of another commit."""
    run_git(folder, 'checkout', '--quiet', '--force', '--detach', commit)


def run_git(folder: Path, *arguments: str) -> str:
    """What git prints.

    Raises:
      ValueError: if it fails; with the last line that it says.
    """
    command = ['git', '-C', str(folder), *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors='replace'
        )
    except FileNotFoundError as error:
        raise ValueError('git is not installed, and --history asks it for the commits') from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f'it ended with {done.returncode}']
        raise ValueError(f'git {arguments[0]}: {said[0]}')
    return done.stdout
