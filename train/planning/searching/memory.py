"""What a search has found out before, in files: outcomes of compilations, and predictions."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable

from etils import epath

from train.paths import replacing
from train.planning.searching.candidate import Candidate
from train.planning.searching.search import Outcome, Prediction

_COMPILED, _PREDICTED = 'compiled', 'predicted'


def remember(
    folder: epath.Path,
    text_of: Callable[[Candidate], str],
    compile_text: Callable[[str], Outcome],
) -> Callable[[Candidate], Outcome]:
    """Returns a function that compiles a candidate, unless a file says what came out.

    A file is valid as long as its settings, its machine and the compiler are the same.

    Args:
      folder: the folder of the files.
      text_of: returns what decides the outcome of a candidate, as text.
      compile_text: compiles what the text describes.
    """

    def compile_candidate(candidate: Candidate) -> Outcome:
        text = text_of(candidate)
        file = folder / _COMPILED / f'{file_name(candidate, text)}.json'
        if file.exists():
            stored = json.loads(file.read_text())
            return Outcome(**stored['outcome'])
        outcome = compile_text(text)
        held = {'candidate': str(candidate), 'request': text}
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as unfinished:
            written = held | {'outcome': dataclasses.asdict(outcome)}
            unfinished.write_text(json.dumps(written, indent=1) + '\n')
        return outcome

    return compile_candidate


def file_name(candidate: Candidate, text: str) -> str:
    """A name for the files of a candidate, readable and unique."""
    words = re.sub(r'[^a-z0-9]+', '-', str(candidate).lower()).strip('-')
    return f'{words[:60]}-{hashlib.sha256(text.encode()).hexdigest()[:10]}'


def remember_predictions(
    folder: epath.Path,
    text_of: Callable[[Candidate], str],
    predict: Callable[[Candidate], Prediction],
) -> Callable[[Candidate], Prediction]:
    """Returns a function that predicts a candidate, unless a file has the prediction.

    Args:
      folder: the folder of the files.
      text_of: returns what decides the prediction, as text.
      predict: makes the prediction.
    """
    known: dict[Candidate, Prediction] = {}

    def look_up(candidate: Candidate) -> Prediction:
        if candidate in known:
            return known[candidate]
        file = folder / _PREDICTED / f'{file_name(candidate, text_of(candidate))}.json'
        if file.exists():
            known[candidate] = Prediction(**json.loads(file.read_text()))
            return known[candidate]
        known[candidate] = predict(candidate)
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as unfinished:
            unfinished.write_text(json.dumps(dataclasses.asdict(known[candidate])) + '\n')
        return known[candidate]

    return look_up
