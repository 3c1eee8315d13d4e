"""What is published with a release agrees: the version, its date, and the changelog."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

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
