"""What is published with a release agrees: the version, its date, and the changelog."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']


def test_the_changelog_has_a_date_for_each_release_and_the_newest_on_one_screen():
    text = (ROOT / 'CHANGELOG.md').read_text()
    releases = re.findall(r'^## (\S+) \((\d{4}-\d\d-\d\d)\)$', text, re.M)
    assert len(releases) == len(re.findall(r'^## ', text, re.M)) >= 2
    assert releases[0][0] == PROJECT['version']
    assert releases == sorted(releases, reverse=True)
    newest = text.split('\n## ')[1]
    assert len(newest.splitlines()) <= 45


def test_the_citation_is_of_this_version():
    about = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    changelog = (ROOT / 'CHANGELOG.md').read_text()
    assert about['version'] == PROJECT['version']
    assert f'## {about["version"]} ({about["date-released"]})' in changelog
    assert about['license'] == PROJECT['license']


def test_every_extra_that_a_message_names_exists():
    extras = PROJECT['optional-dependencies']
    named = {
        name
        for package in ('partitioning', 'meshwright', 'train')
        for path in (ROOT / package).rglob('*.py')
        for name in re.findall(r"pip install '?meshwright\[([\w-]+)\]", path.read_text())
    }
    assert named and named <= extras.keys()
    from train.cli.command import _EXTRAS

    assert set(_EXTRAS.values()) <= extras.keys()


@pytest.mark.parametrize('python', ['3.11', '3.12', '3.13'])
def test_a_lock_has_what_the_tests_need_and_a_hash_for_each_file(python):
    """`make lock` writes the locks anew."""
    entries = (ROOT / f'.ci/locks/{python}.txt').read_text().replace(' \\\n', '').splitlines()
    held = dict(one.split()[0].split('==') for one in entries)
    assert all(re.fullmatch(r'\S+( +--hash=sha256:[0-9a-f]{64})+', one) for one in entries)
    extras, machine = PROJECT['optional-dependencies'], {'sys_platform': 'linux'}
    machine |= {'platform_machine': 'x86_64', 'python_version': python}
    waiting = [Requirement(text) for text in (*PROJECT['dependencies'], *extras['dev'])]
    while waiting:
        one = waiting.pop()
        if one.name == PROJECT['name']:
            waiting += [Requirement(text) for extra in one.extras for text in extras[extra]]
        elif one.marker is None or one.marker.evaluate(machine):
            assert held[canonicalize_name(one.name)] in one.specifier, f'{one}: run make lock'


def test_the_actions_of_workflows_are_pinned():
    files = [ROOT / 'action.yml', *(ROOT / '.github/workflows').glob('*.yml')]
    used = [n for file in files for n in re.findall(r'uses: (\S+)', file.read_text())]
    assert {'./'} < {*used}
    assert all(re.search('@[0-9a-f]{40}$', name) for name in used if not name.startswith('./'))
