"""T5X's reference models here: the greatest differences from what T5X itself computed.

  python benchmarks/t5x_parity.py --data DIR [--parts=training,decoding]

DIR has a folder for each model, with `model.json`, `data.npz` and checkpoints; and folders
`<model>_variants` with the same checkpoints stored otherwise. The parts are:

- network: all batches of `data.npz` are computed from the checkpoints of both formats: logits,
  encoder outputs, scores, losses with every divisor, and gradients. Rows are made from the raw
  examples.
- training: ten steps with Adafactor, see t5x_training.py.
- decoding: tokens and scores, see t5x_decoding.py.
- checkpoints: every array, read, restored onto meshes and written, see t5x_checkpoints.py.

Differences are absolute, relative for losses, scores and sums, and shares for arrays and rows. The
command fails if one is above its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault('JAX_NUM_CPU_DEVICES', '8')

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict
from t5x_checkpoints import compare_checkpoints
from t5x_decoding import compare_decoding
from t5x_models import Difference, Reference, difference, parameters
from t5x_training import compare_training

from benchmarks.campaigns import parse_names
from train.data import InputsToTargets, TokenIds
from train.objectives import compute_loss

# The greatest difference allowed, by the beginning of the name of a figure.
LIMITS = {
    'names and axes': 0.0,
    'rows': 0.0,
    'arrays': 0.0,
    'decoded rows': 0.0,
    'decoding scores': 1e-4,
    'sums of arrays': 1e-6,
    'ten steps:': 1.0,  # of what rounding explains, see t5x_training.py
    'initial': 1e-6,
    'logits_bfloat16': 0.05,
    'loss': 1e-6,
    'score': 1e-6,
    'sum of weights': 1e-6,
    '': 1e-5,
}
DIVISORS = {
    None: 1.0,
    'NUM_REAL_TARGET_TOKENS': 'weights',
    'NUM_TOTAL_TARGET_TOKENS': 'targets',
    'AVERAGE_PER_SEQUENCE': 'sequences',
}

Arrays = Mapping[str, Any]


class Given(nn.Module):
    """Returns logits that were computed before, given as a parameter."""

    def __call__(self, **inputs: jax.Array) -> Any:
        return self.get_variable('params', 'logits')


def compare_initial(reference: Reference) -> Iterator[Difference]:
    """Compares the names, axes and initial values of parameters."""
    key = jax.random.PRNGKey(reference.facts['model']['init_prng_seed'])
    variables = jax.jit(reference.init)(key)
    specs = flatten_dict(nn.get_partition_spec(variables['params']), sep='/')
    ours = {k: (list(spec), None) for k, spec in specs.items()}
    theirs = {k: (fact['axes'], None) for k, fact in reference.facts['params'].items()}
    yield Difference('names and axes', float(ours != theirs), 'init')
    if (stored := reference.folder / 'legacy/checkpoint_0').exists():
        expected = flatten_dict(parameters(stored), sep='/')
        for name, value in flatten_dict(nn.unbox(variables['params']), sep='/').items():
            yield Difference('initial parameters', difference(value, expected[name]), name)


def compare_rows(reference: Reference) -> Iterator[Difference]:
    """Compares rows of the raw examples with the batches that seqio's converters made of them."""
    raw = reference.facts['raw_examples']
    config = reference.facts['model']['config']
    for name in reference.batches:
        examples = raw['long' if name == 'long' else 'padded_and_packed']
        expected = {k: np.asarray(v) for k, v in reference.batch(name).items()}
        length = {'targets': expected['decoder_target_tokens'].shape[1]}
        task = InputsToTargets(
            source=[(example['inputs'], example['targets']) for example in examples],
            inputs=None if name.startswith('targets_only') else 'inputs',
            tokenizer=TokenIds(num_tokens=config['vocab_size']),
            add_end=(),  # the examples have theirs
            architecture='decoder_only' if reference.is_decoder_only else 'encoder_decoder',
            pack=name.endswith('packed'),
        )
        [rows] = task.open(raw['lengths'].get(name, length)).training_rows
        made = [rows.in_order()[i] for i in range(len(expected['decoder_target_tokens']))]
        different = float(made[0].keys() != expected.keys())
        for key in made[0].keys() & expected.keys():
            found = difference(np.stack([row[key] for row in made]), expected[key])
            yield Difference('rows', max(found, different), f'{name}, {key}')


def compare_results(
    reference: Reference, checkpoints: Mapping[str, tuple[str, Any]]
) -> Iterator[Difference]:
    """Compares the results of a network, given (step, parameters) by the name of a checkpoint."""
    for batch_name in reference.batches:
        batch = reference.batch(batch_name)
        for kind, (network, settings, dropout) in _kinds(reference).items():
            if not any(k.startswith(batch_name) and k.endswith(kind) for k in reference.arrays):
                continue
            inputs = reference.objective(network, **settings).model_inputs(batch)[1]
            run = jax.jit(_apply, static_argnums=(0, 3))
            for name, (step, params) in checkpoints.items():
                expected = reference.arrays.get(f'{batch_name}/{step}/{kind}')
                if expected is None:
                    continue
                logits = run(network, params, inputs, dropout)
                where = f'{batch_name}, {name}'
                yield Difference(kind, difference(logits, expected), where)
                if kind == 'logits':
                    yield from _compare_losses(reference, batch_name, step, logits, where)
        if f'{batch_name}/step0/encoded' in reference.arrays:
            encode = jax.jit(
                lambda p, *x: reference.network().apply(
                    {'params': p}, *x, deterministic=True, method='encode'
                )
            )
            tokens = batch['encoder_input_tokens'], batch.get('encoder_segment_ids')
            for name, (step, params) in checkpoints.items():
                expected = reference.arrays[f'{batch_name}/{step}/encoded']
                found = difference(encode(params, *tokens), expected)
                yield Difference('encoder outputs', found, f'{batch_name}, {name}')


def _kinds(reference: Reference) -> dict[str, tuple[nn.Module, dict[str, Any], int | None]]:
    """For each kind of logits, the network, the settings of its objective, and a dropout seed."""
    plain = reference.network()
    bfloat16 = reference.network(dtype='bfloat16')
    kinds: dict[str, Any] = {
        'logits': (plain, {}, None),
        'logits_bfloat16': (bfloat16, {}, None),
        'logits_dropout0.1_key7': (reference.network(dropout_rate=0.1), {}, 7),
    }
    if reference.is_decoder_only:
        kinds['logits_causal_only'] = (plain, {'bidirectional_prefix': False}, None)
    if 'float32_attention_logits' in reference.facts['model']['config']:
        off = reference.network(dtype='bfloat16', float32_attention_logits=False)
        kinds['logits_bfloat16_flag_off'] = (off, {}, None)
    return kinds


def _apply(network: nn.Module, params: Any, inputs: Arrays, seed: int | None) -> Any:
    rngs = None if seed is None else {'dropout': jax.random.PRNGKey(seed)}
    return network.apply({'params': params}, **inputs, deterministic=seed is None, rngs=rngs)


def _compare_losses(
    reference: Reference, batch_name: str, step: str, logits: jax.Array, where: str
) -> Iterator[Difference]:
    """Compares losses with every divisor, and scores, given logits."""
    batch, params = reference.batch(batch_name), {'logits': logits}
    expected = reference.arrays[f'{batch_name}/{step}/score']
    score = np.asarray(reference.objective(Given()).score(params, batch))
    yield Difference('score', float(np.max(np.abs(score / expected - 1))), where)
    for name, smoothing, z, loss, z_loss, weights in reference.facts['losses'][
        f'{batch_name}/{step}'
    ]:
        objective = reference.objective(
            Given(), z_loss=z, label_smoothing=smoothing, loss_divisor=DIVISORS.get(name, name)
        )
        found = compute_loss(objective, params, batch, None, {})
        divisor = objective.divisor(found.sums, batch)
        yield Difference(f'loss, {name}', abs(float(found.total / divisor) / loss - 1), where)
        yield Difference('sum of weights', abs(float(found.sums['weight']) / weights - 1), where)
        if z:
            value = float(found.sums['z_loss'] / divisor)
            yield Difference('loss, z term', abs(value / z_loss - 1), where)


def compare_gradients(reference: Reference, params: Any) -> Iterator[Difference]:
    """Compares the gradients of the training loss at step 0."""
    run = next(iter(reference.facts['train'].values()))
    settings: dict[str, Any] = {k: run[k] for k in ('z_loss', 'label_smoothing')}
    divisor = DIVISORS[run['loss_normalizing_factor']]
    objective = reference.objective(loss_divisor=divisor, **settings)
    batch = reference.batch(run['batch'])

    def loss(params: Any) -> jax.Array:
        found = compute_loss(objective, params, batch, None, {})
        return found.total / objective.divisor(found.sums, batch)

    for name, value in flatten_dict(jax.jit(jax.grad(loss))(params), sep='/').items():
        yield Difference('gradients', difference(value, reference.arrays[f'grad0/{name}']), name)


def compare_network(reference: Reference, variants: Path) -> Iterator[Difference]:
    """Compares everything that a network computes, and its rows."""
    yield from compare_rows(reference)
    yield from compare_initial(reference)
    checkpoints: dict[str, tuple[str, Any]] = {}
    for path in sorted(reference.folder.glob('*/checkpoint_*')):
        step = f'step{path.name.removeprefix("checkpoint_")}'
        checkpoints[f'{path.parent.name} {step}'] = step, parameters(path)
    yield from compare_gradients(reference, checkpoints['legacy step0'][1])
    if variants.exists():
        facts = json.loads((variants / 'variants.json').read_text())
        plain = flatten_dict(checkpoints['legacy step10'][1], sep='/')
        for name, rounding in facts['reload_max_abs_diff_to_float32'].items():
            params = parameters(variants / name / 'checkpoint_10')
            flat = flatten_dict(params, sep='/')
            found = max(difference(flat[k], plain[k]) for k in plain)
            yield Difference('parameters of variants', abs(found - rounding), name)
            if not rounding:
                checkpoints[name] = 'step10', params
    yield from compare_results(reference, checkpoints)


PARTS: dict[str, Callable[[Reference, Path], Iterator[Difference]]] = {
    'network': compare_network,
    'training': lambda reference, variants: compare_training(reference),
    'decoding': lambda reference, variants: compare_decoding(reference),
    'checkpoints': compare_checkpoints,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--data', type=Path, required=True, help='the folder of the references')
    parser.add_argument('--parts', help=f'separated by commas: {", ".join(PARTS)} (all)')
    options, failed = parser.parse_args(), False
    parts = [PARTS[name] for name in parse_names(options.parts, PARTS, 'part')]
    print(f'{"model":16}{"figure":34}{"worst":>10}{"limit":>10}  compared, worst at')
    for folder in sorted(path.parent for path in options.data.glob('*/model.json')):
        found: dict[str, list[Difference]] = {}
        variants = options.data / f'{folder.name}_variants'
        for one in (each for part in parts for each in part(Reference(folder), variants)):
            found.setdefault(one.figure, []).append(one)
        for figure, differences in found.items():
            limit = next(limit for name, limit in LIMITS.items() if figure.startswith(name))
            worst = max(differences, key=lambda one: one.value)
            failed |= not worst.value <= limit
            row = f'{folder.name:16}{figure:34}{worst.value:10.1e}{limit:10.0e}'
            print(f'{row}  {len(differences)}, {worst.where}', flush=True)
    sys.exit(failed)


if __name__ == '__main__':
    main()
