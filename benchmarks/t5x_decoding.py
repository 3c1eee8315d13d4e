"""Decodes with T5X's reference models: every kind of `decode/<step>/<kind>/tokens` in data.npz."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from t5x_models import Difference, Reference, difference, parameters

from train.decoding import predict
from train.t5x.decoding import as_search, beam_search, temperature_sample


def compare_decoding(reference: Reference) -> Iterator[Difference]:
    """Decodes with each checkpoint of a model in each recorded way, from the batch 'padded'."""
    facts, arrays = reference.facts, reference.arrays
    prefix = facts['model'].get('inputs_bidirectional_attention')
    settings = {'bidirectional_prefix': prefix} if reference.is_decoder_only else {}
    objective = reference.objective(**settings)
    kinds = sorted({tuple(k.split('/')[1:3]) for k in arrays if re.match('decode/step', k)})
    for step, kind in kinds:
        params = parameters(reference.folder / f'orbax/checkpoint_{step.removeprefix("step")}')
        batch = reference.batch('padded')
        if kind == 'greedy_prompted':
            batch['decoder_input_tokens'] = arrays['decode/prompt_decoder_input_tokens']
        run = predictor(objective, kind, facts['decoding'].get(f'{step}/eos2'))
        found = jax.jit(run)(params, batch)
        tokens, scores = (arrays.get(f'decode/{step}/{kind}/{n}') for n in ('tokens', 'scores'))
        wrong = int(np.any(np.asarray(found.tokens) != tokens, axis=(1, 2)).sum())
        yield Difference('decoded rows', wrong, f'{step} {kind}')
        if scores is not None:
            yield Difference('decoding scores', difference(found.scores, scores), f'{step} {kind}')


def predictor(objective: Any, kind: str, eos2: int | None) -> Any:
    """The function (params, batch) -> all decodes of a kind."""
    base = kind.removesuffix('_eos2')
    search: Any = functools.partial(temperature_sample, temperature=0.0)
    num_decodes, key = 1, None
    if base == 'greedy_unscaled_scores':
        search = functools.partial(search, rescale_log_probs=False)
    elif beams := re.fullmatch(r'beam(\d+)', base):
        search, num_decodes = beam_search, int(beams[1])
    elif found := re.fullmatch(r'sample_t([\d.]+)_(topk|topp)([\d.]+)_key(\d+)', base):
        mask = (
            {'topk': int(found[3])} if found[2] == 'topk' else {'topk': 0, 'topp': float(found[3])}
        )
        search = functools.partial(temperature_sample, temperature=float(found[1]), **mask)
        num_decodes, key = 2, jax.random.PRNGKey(int(found[4]))
    return lambda params, batch: predict(
        objective,
        params,
        batch,
        key,
        decode_fn=as_search(search),
        num_decodes=num_decodes,
        return_all_decodes=True,
        prompt_with_targets=base == 'greedy_prompted',
        end_token=eos2 if kind.endswith('_eos2') else 1,
    )
