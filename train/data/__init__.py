"""Input: rows of tokens made from text, with random access. Each process reads only its own rows.

source --(tokenizer)--> token index --(task)--> rows --(layout)--> local batches --> feed
"""

from train.data.batches import Batch, FiniteBatches, LocalBatches
from train.data.feed import Feed, Prefetch
from train.data.rows.examples import Examples
from train.data.rows.open_task import EvaluationSet, OpenTask, OpenText
from train.data.rows.tasks import CausalLM, Mixture, SpanCorruption, Task, TextTask
from train.data.text.record_files import ArrayRecords, ParquetFiles
from train.data.text.sources import (
    Document,
    FileSource,
    JsonLines,
    Records,
    Source,
    TextFiles,
    python_library,
)
from train.data.text.token_index import TokenIndex, open_index
from train.data.text.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)

__all__ = [
    'ArrayRecords',
    'Batch',
    'ByteTokenizer',
    'CausalLM',
    'Document',
    'EvaluationSet',
    'Examples',
    'Feed',
    'FileSource',
    'FiniteBatches',
    'HuggingFaceTokenizer',
    'JsonLines',
    'LocalBatches',
    'Mixture',
    'OpenTask',
    'OpenText',
    'ParquetFiles',
    'Prefetch',
    'Records',
    'SentencePieceTokenizer',
    'Source',
    'SpanCorruption',
    'Task',
    'TextFiles',
    'TextTask',
    'TokenIndex',
    'Tokenizer',
    'open_index',
    'python_library',
]
