"""Tokenizers without a file, with T5's special tokens: ByT5's bytes, and tokens as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from train.data.text.tokenizers import Tokenizer, as_texts
from train.errors import ConfigError, check_counts

# Padding, the end of a text, and unknown tokens.
NUM_SPECIAL = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByT5Tokenizer(Tokenizer):
    """Bytes as in ByT5: 0 is padding, 1 the end of a text, 2 unknown, and byte b is token b + 3.

    Source: Xue et al., "ByT5: Towards a Token-Free Future with Pre-trained Byte-to-Byte Models"
    (2022), and the numbers of seqio's ByteVocabulary.

    Attributes:
      extra_ids: the number of tokens that are added at the end, such as sentinels. They decode to
        nothing.
    """

    extra_ids: int = 0

    separator = 1

    def __post_init__(self) -> None:
        check_counts(minimum=0, **{'ByT5Tokenizer.extra_ids': self.extra_ids})

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return NUM_SPECIAL + 256 + self.extra_ids

    @property
    def identity(self) -> str:  # type: ignore[override]
        return f'ByT5 bytes +{self.extra_ids}'

    def encode(self, places: Sequence[str], contents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(content, np.uint8).astype(np.uint16) + 3 for content in contents]

    def decode(self, tokens: np.ndarray) -> bytes:
        tokens = np.asarray(tokens)
        is_byte = (tokens >= NUM_SPECIAL) & (tokens < NUM_SPECIAL + 256)
        return (tokens[is_byte] - NUM_SPECIAL).astype(np.uint8).tobytes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenIds(Tokenizer):
    """Data that is tokens already: lists of integers, or text such as '23 128 81'.

    Attributes:
      num_tokens: the size of the vocabulary.
      end: the token at the end of a text. It also separates documents.
    """

    num_tokens: int
    end: int = 1

    def __post_init__(self) -> None:
        check_counts(minimum=2, **{'TokenIds.num_tokens': self.num_tokens})
        check_counts(minimum=0, **{'TokenIds.end': self.end})

    @property
    def separator(self) -> int:  # type: ignore[override]
        return self.end

    @property
    def identity(self) -> str:  # type: ignore[override]
        return f'tokens below {self.num_tokens}, end {self.end}'

    def encode(self, places: Sequence[str], contents: Sequence[bytes]) -> list[np.ndarray]:
        encoded = []
        for place, text in zip(places, as_texts(places, contents), strict=True):
            try:
                encoded.append(np.array([int(word) for word in text.split()], np.int64))
            except ValueError as error:
                raise ConfigError(
                    f'{place} is {text[:40]!r}, not the numbers of tokens: use another tokenizer'
                ) from error
        return encoded

    def decode(self, tokens: np.ndarray) -> bytes:
        return ' '.join(str(t) for t in np.asarray(tokens).tolist() if t != self.end).encode()
