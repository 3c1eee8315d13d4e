"""What `make docs` adds to the pages of docs/: notebooks, documents of other folders, help texts.

Links in these files point to files of the repository, so that they also work where the repository
is shown. Here they become links to the pages of the site.
"""

import json
import os
import posixpath
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Pages of the site that are files elsewhere in the repository.
PAGES = {'changelog.md': 'CHANGELOG.md'} | {
    f'notebooks/{path.stem}.md': f'notebooks/{path.name}' for path in ROOT.glob('notebooks/*.ipynb')
}
PAGES |= {
    f'measurements/{path.name}': f'benchmarks/results/{path.name}'
    for path in ROOT.glob('benchmarks/results/*.md')
}
PICTURES = {uri: uri for uri in ['notebooks/mesh_v5e_16x16.png']}
# The pages that show a file of the repository, including those that show its sections.
SITE = {path: uri for uri, path in (PAGES | PICTURES).items()} | {
    'README.md': 'index.md',
    'CONTRIBUTING.md': 'contributing.md',
}
# Pages that search puts before and after the others.
BOOSTS = {'troubleshooting.md': 1.3, 'reference': 0.6, 'notebooks': 0.5, 'measurements': 0.2}
BOOSTS |= {'changelog.md': 0.1, 'contributing.md': 0.3}
LINK = re.compile(r'(\]\()(?!\w+:|#)([^)\s#]+)')
SECTIONS = re.compile(r'^<!-- sections of (\S+): (.+) -->$', re.M)
HELP = re.compile(r'^<!-- help of: (.*?) ?-->$', re.M)
ALL_COMMANDS = '\nflags of all commands:'  # shown once, with `meshwright train`


def on_config(config):
    """Links to the repository, if the metadata of the package name one."""
    urls = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project'].get('urls', {})
    config.repo_url = urls.get('Repository') or urls.get('Source')
    return config


def on_files(files, config):
    """Adds the pages and pictures that are outside of docs/, and the measurements to the menu."""
    for entry in config.nav[0]['Start']:
        if isinstance(entry, dict) and 'Measurements' in entry:
            entry['Measurements'] = sorted(uri for uri in PAGES if uri.startswith('measurements/'))
    for uri, path in (PAGES | PICTURES).items():
        source = ROOT / path
        if path.endswith('.ipynb'):
            files.append(File.generated(config, uri, content=_notebook(source)))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown, page, **_):
    """Includes sections of other documents, and turns links to files into links to pages."""
    uri = page.file.src_uri
    boost = BOOSTS.get(uri) or BOOSTS.get(posixpath.dirname(uri))
    if boost is not None:
        page.meta['search'] = {'boost': boost}
    markdown = _relink(markdown, PAGES.get(uri, f'docs/{uri}'), uri)
    markdown = HELP.sub(lambda found: _help(found[1].split()), markdown)
    return SECTIONS.sub(lambda found: _sections(found, uri), markdown)


def _help(words):
    """A heading with the name of a command, which search finds, and its help text."""
    command = [sys.executable, '-m', 'train.cli', *words, '--help']
    settings = {'COLUMNS': '100', 'NO_COLOR': '1', 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, check=True
    )
    text, _, shared = done.stdout.partition(ALL_COMMANDS)
    if words == ['train']:
        text += ALL_COMMANDS + shared
    elif shared:
        text += '\nThe flags of all commands are those below `meshwright train`.\n'
    heading = f'### meshwright {" ".join(words)}\n\n' if words else ''
    return heading + _fenced('text', text)


def _sections(found, uri):
    """The text of an inclusion: sections of a document, in this order."""
    path, titles = found[1], found[2].split(', ')
    parts = re.split(r'^(?=## )', (ROOT / path).read_text(), flags=re.M)
    by_title = {part.split('\n')[0].removeprefix('## '): part for part in parts}
    missing = set(titles) - set(by_title)
    if missing:
        raise ValueError(f'{uri}: {path} has no section {missing}; it has {list(by_title)}')
    return _relink(''.join(by_title[title] for title in titles), path, uri)


def _relink(markdown, path, uri):
    """Turns the links of the file `path` into links of the page `uri`."""

    def replace(found):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))
        page = SITE.get(target, target.removeprefix('docs/'))
        return found[1] + posixpath.relpath(page, posixpath.dirname(uri) or '.')

    return LINK.sub(replace, markdown)


def _notebook(path):
    """Returns a notebook as Markdown: texts, code, and what the code has printed and drawn."""
    parts = []
    for cell in json.loads(path.read_text())['cells']:
        source = ''.join(cell['source'])
        parts.append(source if cell['cell_type'] == 'markdown' else _fenced('python', source))
        for output in cell.get('outputs', ()):
            data = output.get('data', {})
            if 'image/png' in data:
                parts.append(f'![](data:image/png;base64,{data["image/png"].strip()})')
            elif shown := ''.join(output.get('text', data.get('text/plain', ''))):
                parts.append(_fenced('text', shown))
    return '\n\n'.join(parts)


def _fenced(language, text):
    return f'```{language}\n{text.rstrip()}\n```'
