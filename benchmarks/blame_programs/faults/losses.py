"""Faults of a loss: operations that need all outputs of a token, or of all tokens, on one device.

The forms have `{logits}`, `{targets}` and `{found}` where a program has its own names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks.blame_programs.faults.fault import FILES, Fault, edit


class _Loss(NamedTuple):
    """How a program writes its loss: its names, and the texts that faults replace."""

    logits: str
    targets: str
    found: str  # the output of the target
    log_z: str  # the logarithm of the sum over all outputs


_LOSSES = {
    'linen_trainer': _Loss(
        'logits_BLV',
        'targets_BL',
        '    hot_BLV = jax.nn.one_hot(targets_BL, logits_BLV.shape[-1])\n'
        '    found_BL = jnp.sum(logits_BLV * hot_BLV, axis=-1)\n',
        '    log_z_BL = jax.nn.logsumexp(logits_BLV, axis=-1)\n',
    ),
    'plain_trainer': _Loss(
        'logits',
        "batch['targets']",
        "    hot = jax.nn.one_hot(batch['targets'], VOCAB)\n"
        '    found = jnp.sum(logits * hot, axis=-1)\n',
        '    log_z = jax.nn.logsumexp(logits, axis=-1)\n',
    ),
    'vision_trainer': _Loss(
        'logits_BC',
        "batch['labels']",
        'jnp.sum(logits_BC * hot_BC, axis=-1)',
        'jax.nn.logsumexp(logits_BC, axis=-1)',
    ),
    'translation_trainer': _Loss(
        'logits_BLV',
        "jnp.roll(batch['targets'], -1, axis=1)",
        'jnp.sum(logits_BLV * hot_BLV, axis=-1)',
        'jax.nn.logsumexp(logits_BLV, axis=-1)',
    ),
    'experts_trainer': _Loss(
        'logits',
        "batch['targets']",
        'jnp.sum(logits * hot, axis=-1)',
        'jax.nn.logsumexp(logits, axis=-1)',
    ),
}
_ALONG = 'jnp.take_along_axis({logits}, {targets}[..., None], axis=-1)[..., 0]'
_FOUND = {
    'flat index': 'jnp.take({logits}.reshape(-1), jnp.arange({targets}.size) * {logits}.shape[-1] '
    '+ {targets}.reshape(-1)).reshape({targets}.shape)',
    'index': '{logits}[jnp.arange(BATCH)[:, None], jnp.arange(LENGTH)[None], {targets}]',
    'vmap': 'jax.vmap(lambda row, n: row[n])({logits}.reshape(-1, VOCAB), '
    '{targets}.reshape(-1)).reshape({targets}.shape)',
    'take_along_axis': _ALONG,
}
_LOG_Z = {
    1: {
        'sort': 'jnp.log(jnp.sum(jnp.exp(jnp.sort({logits}, axis=-1)), axis=-1))',
        'top_k': 'jax.nn.logsumexp(jax.lax.top_k({logits}, 64)[0], axis=-1)',
        'cumsum': 'jnp.log(jnp.cumsum(jnp.exp({logits}), axis=-1)[..., -1])',
        'roll': 'jax.nn.logsumexp(jnp.roll({logits}, 1, axis=-1), axis=-1)',
        'flip': 'jax.nn.logsumexp({logits}[..., ::-1], axis=-1)',
    },
    2: {
        'argsort': 'jnp.take_along_axis({logits}, jnp.argsort({logits}), -1).sum(-1)',
        'pad': 'jax.nn.logsumexp(jnp.pad({logits}, ((0, 0), (0, 0), (1, 0))), axis=-1)',
        'cumlogsumexp': 'jax.lax.cumlogsumexp({logits}, axis=2)[..., -1]',
        'reshape': 'jax.nn.logsumexp({logits}.reshape({logits}.shape[0], -1), -1)[:, None]',
    },
    3: {
        'median': 'jax.nn.logsumexp({logits}, axis=-1) + 0 * jnp.median({logits}, axis=-1)',
        'diff': 'jax.nn.logsumexp(jnp.diff({logits}, axis=-1), axis=-1)',
        'joined': 'jax.nn.logsumexp(jnp.concatenate([{logits}, -{logits}], -1), axis=-1)',
        'over rows': 'jax.nn.logsumexp(jnp.sort({logits}, axis=0), axis=-1)',
    },
}
# In programs of set 5, a part of a line is replaced and not the whole line.
_FOUND_IN_LINE = {
    'take_along_axis': _ALONG,
    'flat index': '{logits}.reshape(-1)[jnp.arange({targets}.size) * {logits}.shape[-1] + '
    '{targets}.reshape(-1)].reshape({targets}.shape)',
}
_LOG_Z_IN_LINE = {
    'sort': 'jax.nn.logsumexp(jnp.sort({logits}, axis=-1), axis=-1)',
    'flip': 'jax.nn.logsumexp(jnp.flip({logits}, axis=-1), axis=-1)',
    'top_k': 'jax.nn.logsumexp(jax.lax.top_k({logits}, 128)[0], axis=-1)',
}


def loss_faults(number: int) -> Iterator[Fault]:
    """Yields the faults of losses in one of the sets 1 to 3."""
    whole = 'other operation in the loss' if number == 3 else 'whole vocabulary in the loss'
    programs = ('linen_trainer', 'plain_trainer')
    if number == 1:
        for program in programs:
            yield from _others(program, 'gather in the loss', _LOSSES[program].found, _FOUND)
    for program in programs:
        yield from _others(program, whole, _LOSSES[program].log_z, _LOG_Z[number])


def other_program_losses(program: str) -> Iterator[Fault]:
    """Yields the faults of the loss of one of the programs of set 5."""
    loss = _LOSSES[program]
    yield from _others(program, 'gather in the loss', loss.found, _FOUND_IN_LINE)
    yield from _others(program, 'all outputs in the loss', loss.log_z, _LOG_Z_IN_LINE)


def _others(program: str, kind: str, old: str, forms: Mapping[str, str]) -> Iterator[Fault]:
    """Other texts for a part of a line, or for the last of several lines; the others get blank."""
    loss = _LOSSES[program]
    for place, form in forms.items():
        new = form.format(logits=loss.logits, targets=loss.targets)
        if old.endswith('\n'):
            *before, last, _ = old.split('\n')
            new = '\n' * len(before) + f'{last.partition(" = ")[0]} = {new}\n'
        yield edit(program, FILES[program], kind, place, old, new, suggested=True)
