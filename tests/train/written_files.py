"""Files of text, and the documents in the token index of a source."""

import itertools

from train.data import ByteTokenizer, open_index


def write(root, contents):
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def numbered(count):
    return {f'part{i % 3}/file{i}.txt': f'<file {i}>'.encode() for i in range(count)}


def index_of(source, cache):
    return open_index(source, ByteTokenizer(), str(cache), lambda *progress: None)


def documents(stream):
    """The documents of a stream of bytes, cut at the separators."""
    tokens = stream.tokens.tolist()
    assert tokens[0] == tokens[-1] == 256
    cuts = [i for i, token in enumerate(tokens) if token == 256]
    return [bytes(tokens[a + 1 : b]) for a, b in itertools.pairwise(cuts)]


def documents_of_both_parts(source, cache):
    index = index_of(source, cache)
    return documents(index.training), documents(index.held_out)
