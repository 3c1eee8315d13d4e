"""The lines of files with predictions, as T5X's `infer` writes them."""

from __future__ import annotations

import functools
import json
from typing import Any, Literal

import numpy as np

from train.decoding import Predictions
from train.evaluators.references import Reference, decode_text

Mode = Literal['predict', 'predict_with_aux', 'score']


def to_line(mode: Mode, reference: Reference, output: Any) -> str:
    """Returns the line of JSON of one example.

    Args:
      mode: what the line has in addition to the texts of the example.
      reference: the example.
      output: its score; or its predicted tokens, or `Predictions` of one row.
    """
    texts = {'inputs_pretokenized': reference.inputs, 'targets_pretokenized': reference.targets}
    line: dict[str, Any] = {'inputs': texts}
    if mode == 'score':
        return json.dumps(line | {'score': float(output)}, ensure_ascii=False)
    tokens, scores = output if isinstance(output, Predictions) else (output, None)
    decodes = [decode_text(row, reference.tokenizer) for row in np.atleast_2d(tokens)]
    line['prediction'] = decodes if np.ndim(tokens) == 2 else decodes[0]
    if mode == 'predict_with_aux':
        line['aux'] = {} if scores is None else {'scores': np.asarray(scores).tolist()}
    return json.dumps(line, ensure_ascii=False)


def describe_function(function: Any) -> Any:
    """Returns a function and the settings of `functools.partial`, as JSON."""
    if isinstance(function, functools.partial):
        settings = {k: describe_function(v) for k, v in sorted(function.keywords.items())}
        return {'function': describe_function(function.func), **settings}
    return getattr(function, '__qualname__', None) or repr(function)
