"""What `make docs` adds to the pages of docs/: notebooks, and documents of the root folder.

Links in these files point to files of the repository, so that they also work where the repository
is shown. Here they become links to the pages of the site.
"""

import json
import posixpath
import re
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
# The how-to guides that come first in the menu; the others follow by name.
FIRST_GUIDES = ('own_linen_model', 'own_nnx_model', 'image_classifier', 'own_loss')
FIRST_GUIDES += ('auxiliary_loss', 'own_data', 'own_metric', 'choose_a_layout', 'forecast')
LINK = re.compile(r'(\]\()(?!\w+:|#)([^)\s#]+)')
SECTIONS = re.compile(r'^<!-- sections of (\S+): (.+) -->$', re.M)


def on_files(files, config):
    """Adds the pages and pictures that are outside of docs/, and the how-to guides to the menu."""
    guides = sorted(file.src_uri for file in files if file.src_uri.startswith('how-to/'))
    order = [f'how-to/{name}.md' for name in FIRST_GUIDES]
    guides = [*filter(guides.__contains__, order), *(g for g in guides if g not in order)]
    for entry in [entry for entry in config.nav if 'How-to guides' in entry]:
        entry['How-to guides'] = guides
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
    markdown = _relink(markdown, PAGES.get(uri, f'docs/{uri}'), uri)
    return SECTIONS.sub(lambda found: _sections(found, uri), markdown)


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
