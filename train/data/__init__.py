"""Makes rows of examples or of tokens, with random access. Each process reads only its own rows.

source --(tokenizer)--> token index --(task)--> rows --(layout)--> local batches --> feed

A module is imported when one of its names, listed in `__init__.pyi`, is first used.
"""

from partitioning.lazy_names import attach

__getattr__, __dir__ = attach(__name__)
