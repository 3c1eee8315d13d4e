"""Input: rows of tokens made from text, with random access. Each process reads only its own rows.

source --(tokenizer)--> token index --(task)--> rows --(layout)--> local batches --> feed
"""

from train.data.feed import Batch, Feed, FiniteBatches, LocalBatches, Prefetch
from train.data.rows.examples import Examples, RandomTokens
from train.data.rows.inputs_to_targets import InputsToTargets
from train.data.rows.open_task import EvaluationSet, OpenTask, OpenText
from train.data.rows.packing import Lengths
from train.data.rows.pair_tasks import PairTask
from train.data.rows.subset import Subset
from train.data.rows.tasks import CausalLM, Mixture, Task, TextTask
from train.data.rows.text_pairs import PrefixLM, SpanCorruption
from train.data.text.byt5 import ByT5Tokenizer, TokenIds
from train.data.text.record_files import ArrayRecords, ParquetFiles, TsvFiles
from train.data.text.sources import (
    Document,
    FileSource,
    JsonLines,
    Records,
    Source,
    TextFiles,
    python_library,
)
from train.data.text.tf_records import TfRecords
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
    'ByT5Tokenizer',
    'ByteTokenizer',
    'CausalLM',
    'Document',
    'EvaluationSet',
    'Examples',
    'Feed',
    'FileSource',
    'FiniteBatches',
    'HuggingFaceTokenizer',
    'InputsToTargets',
    'JsonLines',
    'Lengths',
    'LocalBatches',
    'Mixture',
    'OpenTask',
    'OpenText',
    'PairTask',
    'ParquetFiles',
    'Prefetch',
    'PrefixLM',
    'RandomTokens',
    'Records',
    'SentencePieceTokenizer',
    'Source',
    'SpanCorruption',
    'Subset',
    'Task',
    'TextFiles',
    'TextTask',
    'TfRecords',
    'TokenIds',
    'TokenIndex',
    'Tokenizer',
    'TsvFiles',
    'open_index',
    'python_library',
]
