"""Tokenizers: bytes, SentencePiece models, Hugging Face tokenizers, ByT5's bytes, and token ids."""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from train.errors import ConfigError, check_counts, first_line, import_optional
from train.paths import as_path

# Common names of the token between two documents in Hugging Face tokenizers, most likely first.
SEPARATORS = ('<|endoftext|>', '<|end_of_text|>', '</s>', '<eos>', '[SEP]')


class Tokenizer(abc.ABC):
    """Converts text to tokens and back.

    Attributes:
      num_tokens: the size of the vocabulary. Every token is smaller.
      separator: the token that stands before and after every document.
      identity: a string that differs between tokenizers that encode differently.
      pads_with_0: whether token 0 never stands for text, so that it can be used for padding.
    """

    num_tokens: int
    separator: int
    identity: str
    pads_with_0: bool = True

    @abc.abstractmethod
    def encode(self, places: Sequence[str], contents: Sequence[bytes]) -> list[np.ndarray]:
        """The tokens of each document, without separators.

        Args:
          places: where each document is, for messages.
          contents: the bytes of each document.

        Raises:
          ConfigError: if the tokenizer needs text and a document is not UTF-8.
        """

    @abc.abstractmethod
    def decode(self, tokens: np.ndarray) -> bytes:
        """The bytes of the documents, one after another. Text is encoded as UTF-8.

        Separators decode to nothing.
        """


@dataclasses.dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """Each byte is one token, and one additional token separates documents."""

    num_tokens = 257
    separator = 256
    identity = 'bytes'
    pads_with_0 = False

    def encode(self, places: Sequence[str], contents: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(content, np.uint8) for content in contents]

    def decode(self, tokens: np.ndarray) -> bytes:
        tokens = np.asarray(tokens)
        return tokens[tokens < 256].astype(np.uint8).tobytes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTokenizer(Tokenizer):
    """A tokenizer in a file.

    Attributes:
      path: the path of the file: local, gs:// or s3://.
    """

    path: str

    @functools.cached_property
    def _content(self) -> bytes:
        try:
            return as_path('tokenizer', self.path).read_bytes()
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise ConfigError(f'tokenizer {self.path} cannot be read: {reason}') from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePieceTokenizer(FileTokenizer):
    """A SentencePiece model. Needs the package sentencepiece.

    Attributes:
      extra_ids: the number of tokens that are added after the tokens of the model, as T5 does for
        its sentinels. Text can contain them: '<extra_id_0>' is the last token of the vocabulary,
        '<extra_id_1>' the one before it, and so on.
    """

    extra_ids: int = 0

    def __post_init__(self) -> None:
        check_counts(minimum=0, **{'SentencePieceTokenizer.extra_ids': self.extra_ids})

    @functools.cached_property
    def _model(self) -> Any:
        module = import_optional('sentencepiece', 'tokenizers', 'SentencePieceTokenizer')
        pieces = (_user_defined_piece(f'▁<extra_id_{i}>') for i in reversed(range(self.extra_ids)))
        try:
            # An empty model would be accepted.
            model = b''.join([self._content or b'empty', *pieces])
            return module.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ConfigError(f'{self.path} is not a SentencePiece model') from error

    @functools.cached_property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self._model.vocab_size()

    @functools.cached_property
    def separator(self) -> int:  # type: ignore[override]
        ids = [i for i in (self._model.eos_id(), self._model.bos_id()) if i >= 0]
        if not ids:
            raise ConfigError(
                f'{self.path} has neither an end-of-text nor a begin-of-text token: one is needed '
                'to separate documents'
            )
        return ids[0]

    @functools.cached_property
    def identity(self) -> str:  # type: ignore[override]
        added = f' +{self.extra_ids}' if self.extra_ids else ''
        return f'sentencepiece {hashlib.sha256(self._content).hexdigest()}{added}'

    def encode(self, places: Sequence[str], contents: Sequence[bytes]) -> list[np.ndarray]:
        texts = as_texts(places, contents)
        # SentencePiece's own threads run in parallel, because they do not hold Python's lock.
        encoded = self._model.encode(texts, num_threads=os.cpu_count() or 1)
        return [np.array(tokens, np.uint32) for tokens in encoded]

    def decode(self, tokens: np.ndarray) -> bytes:
        return ''.join(map(self._model.decode, documents_of(tokens, self.separator))).encode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceTokenizer(FileTokenizer):
    """A Hugging Face tokenizer.json file. Needs the package tokenizers.

    Attributes:
      separator_token: the token between documents, such as '</s>'. By default, the first of
        SEPARATORS that the tokenizer has.
    """

    separator_token: str | None = None

    @functools.cached_property
    def _tokenizer(self) -> Any:
        module = import_optional('tokenizers', 'tokenizers', 'HuggingFaceTokenizer')
        content = self._content
        try:
            tokenizer = module.Tokenizer.from_str(content.decode())
        except Exception as error:  # the package raises plain Exceptions
            raise ConfigError(f'{self.path} is not a tokenizer.json file: {error}') from error
        # Documents are never truncated or padded, and text like '</s>' in them stays text.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer

    @functools.cached_property
    def num_tokens(self) -> int:  # type: ignore[override]
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def separator(self) -> int:  # type: ignore[override]
        # Only special tokens can separate documents: encoding never produces them, and decoding
        # skips them.
        special = {
            token.content: number
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        wanted = SEPARATORS if self.separator_token is None else (self.separator_token,)
        found = [special[token] for token in wanted if token in special]
        if not found:
            hint = 'it declares no special tokens'
            if special:
                hint = f'set separator_token to one of {", ".join(special)}'
            raise ConfigError(
                f'{self.path} has no special token {" or ".join(map(repr, wanted))} to separate '
                f'documents: {hint}'
            )
        return found[0]

    @functools.cached_property
    def pads_with_0(self) -> bool:  # type: ignore[override]
        added = self._tokenizer.get_added_tokens_decoder()
        return 0 in added and added[0].special

    @functools.cached_property
    def identity(self) -> str:  # type: ignore[override]
        return f'tokenizers {hashlib.sha256(self._content).hexdigest()} {self.separator}'

    def encode(self, places: Sequence[str], contents: Sequence[bytes]) -> list[np.ndarray]:
        texts = as_texts(places, contents)
        try:
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        except Exception as error:  # such as an unknown token that is not in the vocabulary
            raise ConfigError(f'{self.path} cannot encode texts: {first_line(error)}') from error
        return [np.array(e.ids, np.uint32) for e in encoded]

    def decode(self, tokens: np.ndarray) -> bytes:
        return ''.join(map(self._tokenizer.decode, documents_of(tokens, self.separator))).encode()


def _user_defined_piece(piece: str) -> bytes:
    """A piece of the type USER_DEFINED, to be appended to a serialized SentencePiece model.

    It is field 1 of the message `ModelProto`; its own fields are the text (1) and the type (3).
    Serialized messages can be concatenated, which appends to repeated fields.
    """
    text = piece.encode()
    message = b'\x0a' + bytes([len(text)]) + text + b'\x18\x04'
    return b'\x0a' + bytes([len(message)]) + message


def documents_of(tokens: np.ndarray, separator: int) -> list[list[int]]:
    """The tokens of each document, without separators, to be decoded one by one."""
    tokens = np.asarray(tokens)
    pieces = np.split(tokens, np.flatnonzero(tokens == separator))
    return [[t for t in piece.tolist() if t != separator] for piece in pieces]


def as_texts(places: Sequence[str], contents: Sequence[bytes]) -> list[str]:
    """Decodes documents from UTF-8. Raises a ConfigError if a document is not UTF-8."""
    texts = []
    for place, content in zip(places, contents, strict=True):
        try:
            texts.append(content.decode())
        except UnicodeDecodeError as error:
            raise ConfigError(
                f'{place} is not UTF-8: {error.reason} at byte {error.start}. Exclude it, or use '
                'ByteTokenizer, which accepts any bytes'
            ) from error
    return texts


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
