"""The fenced code blocks of Markdown documents, and running those in Python."""

import contextlib
import doctest
import io
import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r'^( *)```(\w+)[^\n]*\n(.*?)^\1```$', re.M | re.S)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
      document: the path of the document in the repository.
      line: the line of its first line of code.
      language: what follows the fence, such as 'python', 'sh', 'gin' or 'text'.
      code: its text.
      output: the text of the block that follows, if this block is in Python and that one is 'text'
        with nothing but empty lines in between.
    """

    document: str
    line: int
    language: str
    code: str
    output: str | None


def read_blocks(document: str, language: str | None = None) -> list[Block]:
    """Returns the blocks of a document in this language, by default of every language."""
    text = (ROOT / document).read_text()
    found = list(FENCE.finditer(text))
    blocks = []
    for this, following in itertools.zip_longest(found, found[1:]):
        shown = following and following[2] == 'text' and this[2] == 'python'
        adjacent = shown and not text[this.end() : following.start()].strip()
        code = re.sub(f'^{this[1]}', '', this[3], flags=re.M)
        line = text.count('\n', 0, this.start(3)) + 1
        blocks.append(Block(document, line, this[2], code, following[3] if adjacent else None))
    return [block for block in blocks if language in (None, block.language)]


def run_block(block: Block, namespace: dict[str, Any]) -> str:
    """Runs a block, and compares what it prints with the output that the document shows.

    In a shown output, `...` stands for any text, and spaces are not compared.

    Returns:
      What the block has printed.
    """
    printed = io.StringIO()
    # Empty lines in front, so that a traceback shows the line of the document.
    code = compile('\n' * (block.line - 1) + block.code, str(ROOT / block.document), 'exec')
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    shown, flags = block.output, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if shown is not None and not doctest.OutputChecker().check_output(
        shown, printed.getvalue(), flags
    ):
        raise AssertionError(
            f'{block.document}:{block.line} shows\n{shown}\nbut prints\n{printed.getvalue()}'
        )
    return printed.getvalue()


def run_blocks(document: str) -> dict[str, Any]:
    """Runs the Python blocks of a document in order in one namespace, and returns it."""
    names: dict[str, Any] = {'__name__': Path(document).stem}
    for block in read_blocks(document, 'python'):
        run_block(block, names)
    return names
