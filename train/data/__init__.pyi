"""The names of `train.data`, each with the module that has it; `__init__.py` reads this file."""

from train.data.feed import (
    Batch as Batch,
    Feed as Feed,
    FiniteBatches as FiniteBatches,
    LocalBatches as LocalBatches,
    Prefetch as Prefetch,
)
from train.data.rows.examples import Examples as Examples, RandomTokens as RandomTokens
from train.data.rows.inputs_to_targets import InputsToTargets as InputsToTargets
from train.data.rows.open_task import (
    EvaluationSet as EvaluationSet,
    OpenTask as OpenTask,
    OpenText as OpenText,
)
from train.data.rows.packing import Lengths as Lengths
from train.data.rows.pair_tasks import PairTask as PairTask
from train.data.rows.subset import Subset as Subset
from train.data.rows.tasks import (
    CausalLM as CausalLM,
    Mixture as Mixture,
    Task as Task,
    TextTask as TextTask,
)
from train.data.rows.text_pairs import PrefixLM as PrefixLM, SpanCorruption as SpanCorruption
from train.data.text.record_files import (
    ArrayRecords as ArrayRecords,
    ParquetFiles as ParquetFiles,
    TsvFiles as TsvFiles,
)
from train.data.text.sources import (
    Document as Document,
    FileSource as FileSource,
    JsonLines as JsonLines,
    Records as Records,
    Source as Source,
    TextFiles as TextFiles,
    python_library as python_library,
)
from train.data.text.tf_records import TfRecords as TfRecords
from train.data.text.token_index import TokenIndex as TokenIndex, open_index as open_index
from train.data.text.tokenizers import (
    ByT5Tokenizer as ByT5Tokenizer,
    ByteTokenizer as ByteTokenizer,
    HuggingFaceTokenizer as HuggingFaceTokenizer,
    SentencePieceTokenizer as SentencePieceTokenizer,
    TokenIds as TokenIds,
    Tokenizer as Tokenizer,
)
