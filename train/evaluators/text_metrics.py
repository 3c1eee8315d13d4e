"""Metrics of decoded text: functions (targets, predictions) -> scores by name, in percent.

Targets and predictions are lists of the same length. A target is a text, or a list of texts if
several are correct. The functions of seqio's and T5's tasks have the same form.
"""

from __future__ import annotations

import collections
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from train.errors import ConfigError, import_optional

Metric = Callable[[Sequence[Any], Sequence[Any]], Any]
EXTRA = 'metrics'


def exact_match(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """The percentage of predictions that equal their target, or one of their targets."""
    pairs = _paired(targets, predictions)
    return {'exact_match': _percent(p in _as_list(t) for t, p in pairs)}


def sequence_accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """The percentage of predictions whose tokens all equal the tokens of their target."""
    pairs = _paired(targets, predictions)
    return {'sequence_accuracy': _percent(np.array_equal(t, p) for t, p in pairs)}


def token_accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """The percentage of the tokens of all targets that the prediction has at the same place."""
    equal = [
        bool(place < len(p) and p[place] == token)
        for t, p in _paired(targets, predictions)
        for place, token in enumerate(t)
    ]
    return {'token_accuracy': _percent(equal)}


# These two compare tokens instead of text.
sequence_accuracy.reads_tokens = True  # type: ignore[attr-defined]
token_accuracy.reads_tokens = True  # type: ignore[attr-defined]


def bleu(targets: Sequence[Any], predictions: Sequence[str]) -> dict[str, float]:
    """BLEU of the corpus, by sacrebleu with T5's settings: exponential smoothing, tokens of 'intl'.

    If one target is a list of texts, all must be lists of the same length.
    """
    sacrebleu = import_optional('sacrebleu', EXTRA, 'the metric bleu')
    references = [_as_list(t) for t, _ in _paired(targets, predictions)]
    if len(set(map(len, references))) != 1:
        raise ConfigError('the metric bleu needs the same number of targets for each example')
    score = sacrebleu.corpus_bleu(
        list(predictions),
        [list(column) for column in zip(*references, strict=True)],
        smooth_method='exp',
        tokenize='intl',
    )
    return {'bleu': float(score.score)}


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """The mean F1 of ROUGE-1, ROUGE-2 and ROUGE-Lsum with stems, by rouge-score.

    ROUGE-Lsum compares sentence by sentence; as in T5, a sentence ends at ' . ' or at a line's end.
    """
    scorers = import_optional('rouge_score.rouge_scorer', EXTRA, 'the metric rouge')
    kinds = ('rouge1', 'rouge2', 'rougeLsum')
    scorer = scorers.RougeScorer(rouge_types=kinds, use_stemmer=True)
    scores = [
        scorer.score(*(text.replace(' . ', ' .\n') for text in pair))
        for pair in _paired(targets, predictions)
    ]
    return {kind: float(100 * np.mean([s[kind].fmeasure for s in scores])) for kind in kinds}


def squad(targets: Sequence[Any], predictions: Sequence[str]) -> dict[str, float]:
    """SQuAD's exact match and F1 of words, each with the best target of an example.

    Case, punctuation, articles and the amount of space do not count. Source: Rajpurkar et al.,
    "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (2016).
    """
    exact, f1 = [], []
    for target, prediction in _paired(targets, predictions):
        words = _words(prediction)
        answers = [_words(answer) for answer in _as_list(target)]
        exact.append(max(float(words == answer) for answer in answers))
        f1.append(max(_f1(answer, words) for answer in answers))
    return {'em': _percent(exact), 'f1': _percent(f1)}


def _words(text: str) -> list[str]:
    kept = ''.join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r'\b(a|an|the)\b', ' ', kept).split()


def _f1(target: Sequence[str], prediction: Sequence[str]) -> float:
    common = sum((collections.Counter(target) & collections.Counter(prediction)).values())
    if not common:
        return float(list(target) == list(prediction))
    return 2 * common / (len(target) + len(prediction))


def _paired(targets: Sequence[Any], predictions: Sequence[Any]) -> list[tuple[Any, Any]]:
    if not len(targets) or len(targets) != len(predictions):
        raise ConfigError(
            f'a metric needs as many predictions as targets, and at least one: there are '
            f'{len(targets)} targets and {len(predictions)} predictions'
        )
    return list(zip(targets, predictions, strict=True))


def _as_list(target: Any) -> list[Any]:
    return list(target) if isinstance(target, list | tuple) else [target]


def _percent(values: Any) -> float:
    return float(100 * np.mean(list(values)))
