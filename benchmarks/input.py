"""Measures how many tokens per second one process reads, and compares a plain grain.DataLoader.

  python benchmarks/input.py

The text is the source code of Python's standard library, about 12 MB. Batches of 32 rows of 1,024
tokens are read on the host, without devices. The tokenizers are bytes and a SentencePiece model of
8,000 tokens trained on the same text. The rows are cut from the stream, packed from documents, or
made by span corruption. Two peers are measured in alternation, and all figures are medians:

  rows     a grain.DataLoader with a shuffling IndexSampler over the same rows of our token index
  text     a grain.DataLoader over the files, which tokenizes each file when it reads it, and cuts
           or pads it to one row

Tokens per second count only tokens with weight. The last column is their share of all tokens; the
rest is padding.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import grain
import jax

jax.config.update('jax_num_cpu_devices', 8)
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import sentencepiece

from benchmarks.timing import medians
from train.data import (
    ByT5Tokenizer,
    ByteTokenizer,
    CausalLM,
    LocalBatches,
    SentencePieceTokenizer,
    SpanCorruption,
    Tokenizer,
    open_index,
    python_library,
)

LENGTH, BATCH, STEPS, ROUNDS = 1024, 32, 60, 5
SOURCE = python_library()


class Documents:
    """Rows made while reading: each file is tokenized, and cut or padded to one row."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._paths = [Path(SOURCE.root) / name for name, *_ in SOURCE.listing().signature['files']]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        [tokens] = self._tokenizer.encode([''], [self._paths[index].read_bytes()])
        row = np.full(LENGTH + 1, self._tokenizer.separator, np.int32)
        row[: len(tokens)] = tokens[: LENGTH + 1]
        weights = (np.arange(LENGTH) < len(tokens)).astype(np.float32)
        return {
            'decoder_input_tokens': row[:-1],
            'decoder_target_tokens': row[1:],
            'decoder_loss_weights': weights,
        }


def train_sentencepiece(folder: Path) -> SentencePieceTokenizer:
    """Trains a SentencePiece model of 8,000 tokens on the same text."""
    lines = (
        line
        for name, *_ in SOURCE.listing().signature['files']
        for line in (Path(SOURCE.root) / name).read_text(errors='replace').splitlines()[::4]
        if line.strip()
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_prefix=str(folder / 'library'),
        vocab_size=8000,
        model_type='bpe',
        byte_fallback=True,
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return SentencePieceTokenizer(path=str(folder / 'library.model'))


def ours(task: Any) -> Callable[[], Iterator[dict[str, np.ndarray]]]:
    """Returns a function that iterates over local batches of a task, with the threads of a Feed."""
    rows = task.training(seed=0)
    batches = LocalBatches(rows, BATCH, tuple(range(BATCH)))
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return lambda: iter(grain.MapDataset.source(batches).to_iter_dataset(options))


def data_loader(source: Any) -> Callable[[], Iterator[dict[str, np.ndarray]]]:
    """Returns a function that iterates over batches of a plain DataLoader."""

    def batches() -> Iterator[dict[str, np.ndarray]]:
        sampler = grain.samplers.IndexSampler(len(source), shuffle=True, seed=0, num_epochs=None)
        return iter(
            grain.DataLoader(
                data_source=source,
                sampler=sampler,
                operations=[grain.transforms.Batch(BATCH, drop_remainder=True)],
                read_options=grain.ReadOptions(num_threads=2, prefetch_buffer_size=8 * BATCH),
            )
        )

    return batches


def rate(make: Callable[[], Iterator[dict[str, np.ndarray]]], steps: int) -> tuple[float, float]:
    """Returns the tokens with weight per second, and their share of all tokens."""
    batches = make()
    next(batches)
    started, counted, places = time.perf_counter(), 0.0, 0
    for _ in range(steps):
        batch = next(batches)
        for name in ('encoder_input_tokens', 'decoder_loss_weights'):  # padding is 0 in both
            if name in batch:
                counted += batch[name].astype(bool).sum()
                places += batch[name].size
    return counted / (time.perf_counter() - started), counted / places


def padded(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a tokenizer of the same kind whose token 0 is padding."""
    return tokenizer if tokenizer.pads_with_0 else ByT5Tokenizer()


def throughput(cache: str, tokenizers: dict[str, Tokenizer]) -> None:
    """Prints the table of tokens per second, with the ratios to both peers."""
    header = ('tokens/s', '/ rows', '/ text', 'not padding')
    print(f'{"":32}' + ''.join(f'{h:>14}' for h in header))
    for name, tokenizer in tokenizers.items():
        common: dict[str, Any] = {'source': SOURCE, 'tokenizer': tokenizer, 'cache_dir': cache}
        tasks = {
            'cut from the stream': CausalLM(**common),
            'packed documents': CausalLM(**common, packing='pack'),
            'span corruption': SpanCorruption(**common | {'tokenizer': padded(tokenizer)}),
        }
        opened = {kind: task.open(LENGTH) for kind, task in tasks.items()}
        rows = opened['cut from the stream'].training_rows[0].examples
        runs = {kind: functools.partial(rate, ours(task), STEPS) for kind, task in opened.items()}
        plain, text = data_loader(rows), data_loader(Documents(tokenizer))
        runs['DataLoader over rows'] = functools.partial(rate, plain, STEPS)
        runs['DataLoader over text'] = functools.partial(rate, text, STEPS // 10)
        found = medians(runs, ROUNDS)
        for kind, (tokens, share) in found.items():
            peers = [tokens / found[f'DataLoader over {p}'][0] for p in ('rows', 'text')]
            ratios = ''.join(f'{ratio:14.2f}' for ratio in peers)
            print(f'{name + ", " + kind:32}{tokens:14,.0f}{ratios}{share:14.4f}')


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tokenizers = {'bytes': ByteTokenizer(), 'SentencePiece': train_sentencepiece(Path(folder))}
        cache = f'{folder}/cache'
        for name, tokenizer in tokenizers.items():
            started = time.perf_counter()
            index = open_index(SOURCE, tokenizer, cache, lambda *progress: None)
            seconds = time.perf_counter() - started
            size = index.training.num_bytes + index.held_out.num_bytes
            print(f'index of {name}: {size / 1e6:.1f} MB in {seconds:.2f} s')
        print()
        throughput(cache, tokenizers)


if __name__ == '__main__':
    main()
