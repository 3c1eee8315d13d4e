"""Writes one comment to a pull request: `python -m meshwright.checking.pull_request FILE`.

The comment begins with a hidden marker, by which the next run finds and updates it. Without
differences, no comment is made; one that is there is updated. The address of the service, the
repository and the pull request come from the environment of GitHub Actions. It needs only Python's
standard library.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MARKER = '<!-- meshwright check -->'
_NEEDED = ('GITHUB_API_URL', 'GITHUB_REPOSITORY', 'GITHUB_TOKEN', 'GITHUB_EVENT_PATH')
_PAGES, _PER_PAGE = 30, 100
_SECONDS = 30


def comment(text: str, environment: Mapping[str, str]) -> str:
    """Makes or updates the comment of a pull request; returns what was done, in one line.

    Args:
      text: the comment, with the marker.
      environment: the variables of the service.

    Raises:
      ValueError: if a variable is missing, or the service refuses.
    """
    for name in _NEEDED:
        if not environment.get(name):
            raise ValueError(f'{name} is not set: this is for GitHub Actions; pass it with env:')
    event = json.loads(Path(environment['GITHUB_EVENT_PATH']).read_text(encoding='utf-8'))
    number = (event.get('pull_request') or {}).get('number')
    if number is None:
        return 'no comment: this run is not for a pull request'
    service = _Service(environment)
    issues = f'/repos/{environment["GITHUB_REPOSITORY"]}/issues'
    found = next((c for c in service.comments(f'{issues}/{number}') if _is_own(c)), None)
    if found is not None and found['body'] == text:
        return 'the comment says so already'
    if found is not None:
        service.ask('PATCH', f'{issues}/comments/{found["id"]}', {'body': text})
        return f'updated comment {found["id"]} of pull request {number}'
    if '<details>' not in text:
        return 'no comment: nothing changed'
    service.ask('POST', f'{issues}/{number}/comments', {'body': text})
    return f'commented on pull request {number}'


def _is_own(found: Mapping[str, Any]) -> bool:
    """Whether a comment is of this check, and not of a person who quotes the marker."""
    is_bot = (found.get('user') or {}).get('type') == 'Bot'
    return is_bot and str(found.get('body') or '').startswith(MARKER)


class _Service:
    """The interface of the service.

    Args:
      environment: its variables.
    """

    def __init__(self, environment: Mapping[str, str]):
        self._url = environment['GITHUB_API_URL'].rstrip('/')
        self._token = environment['GITHUB_TOKEN']

    def comments(self, issue: str) -> Iterator[dict[str, Any]]:
        """The comments of a pull request, page by page."""
        for page in range(1, _PAGES + 1):
            query = f'{issue}/comments?per_page={_PER_PAGE}&page={page}'
            found = self.ask('GET', query)
            yield from found
            if len(found) < _PER_PAGE:
                return

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to a request."""
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                'Authorization': f'Bearer {self._token}',
                'Accept': 'application/vnd.github+json',
                'Content-Type': 'application/json',
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            hint = ''
            if error.code in (401, 403):
                hint = (
                    ': give the job `permissions: pull-requests: write`; runs for forks have no '
                    'such token, and their summary has the same text'
                )
            raise ValueError(f'{method} {path}: the service says {error.code}{hint}') from error
        except OSError as error:
            raise ValueError(f'{method} {path}: {error}') from error


def main(arguments: list[str]) -> int:
    """Comments the text of a file, and returns the exit status: 0, or 2 after an error."""
    if len(arguments) != 1:
        print('error: write the file with the text of the comment', file=sys.stderr)
        return 2
    try:
        print(comment(Path(arguments[0]).read_text(encoding='utf-8'), os.environ))
    except (OSError, ValueError) as error:
        print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    raise SystemExit(main(sys.argv[1:]))
