"""The settings of the output layer."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from train.errors import ConfigError, check_counts

DType = Literal['float32', 'bfloat16']


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """How the output layer and the loss of a model are computed.

    They apply to models that hand over their hidden states, such as the built-in transformer and
    T5's networks.

    Attributes:
      num_chunks: the number of parts into which each device divides its vocabulary. Only the
        logits of one part exist at a time. By default, it is the smallest number whose float32
        logits take at most 256 MiB per device. If it is 1, the logits are kept for the backward
        pass; otherwise they are computed again.
      logits_dtype: the dtype in which the matrix product stores the logits. The softmax is always
        computed in float32.
      gradient_dtype: the dtype in which devices exchange the gradients of the output layer. By
        default, it is the dtype of the matrix product.
    """

    num_chunks: int | None = None
    logits_dtype: DType = 'float32'
    gradient_dtype: DType | None = None

    def __post_init__(self) -> None:
        if self.num_chunks is not None:
            check_counts(**{'OutputSettings.num_chunks': self.num_chunks})
        dtypes: dict[str, Any] = {'logits_dtype': self.logits_dtype}
        if self.gradient_dtype is not None:
            dtypes['gradient_dtype'] = self.gradient_dtype
        for name, value in dtypes.items():
            if value not in get_args(DType):
                allowed = ' or '.join(map(repr, get_args(DType)))
                raise ConfigError(f'OutputSettings.{name} is {value!r}: use {allowed}')
