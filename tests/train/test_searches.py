"""Sampling and beam search on small models whose best sequences can be enumerated."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.decoding import beam_search, find_row_axes, sample
from train.decoding.sampling import keep_top_k, keep_top_p
from train.errors import ConfigError

pytestmark = pytest.mark.core

VOCAB, LENGTH, END = 6, 5, 1
TABLE = np.random.default_rng(0).normal(size=(LENGTH + 1, 3 * VOCAB, VOCAB)).astype(np.float32)


def make_cache(rows):
    """A count of tokens, shared by all rows; their sum in two layouts; and the place of a row."""
    sums = jnp.zeros(rows.shape[0], jnp.int32)
    return {'shared': jnp.zeros((1, 7)), 'sum': sums, 'layers': jnp.stack([sums, sums]), 'at': sums}


def model(state):
    """Logits that depend on the place and on all tokens so far, through the cache."""
    cache = dict(state.cache)
    total = cache['sum'] + state.cur_token[:, 0]
    layers = cache['layers'] + state.cur_token[:, 0] * jnp.array([[1], [-1]])
    at_place = cache['at'] == state.cur_index  # False for rows that wait at their end
    logits = jnp.where(
        at_place[:, None], jnp.asarray(TABLE)[state.cur_index, total % (3 * VOCAB)], jnp.nan
    )
    logits = jnp.where(layers[1][:, None] == -total[:, None], logits, jnp.nan)
    return logits, cache | {'sum': total, 'layers': layers, 'at': cache['at'] + 1}


def log_probs(sequence, start=0):
    """The log-probability of each token of a sequence, computed from its beginning."""
    found, total = [], start
    for place, token in enumerate(sequence):
        logits = TABLE[place, total % (3 * VOCAB)].astype(np.float64)
        found.append(logits[token] - np.log(np.exp(logits).sum()))
        total += token
    return found


def decode(search, prompts, **settings):
    prompts = np.asarray(prompts, np.int32)
    axes = find_row_axes(make_cache, jax.ShapeDtypeStruct(prompts.shape, prompts.dtype))
    assert axes == {'shared': -1, 'sum': 0, 'layers': 1, 'at': 0}
    run = jax.jit(
        lambda p: search(model, make_cache(p), p, cache_axes=axes, end_token=END, **settings)
    )
    return jax.tree.map(np.asarray, run(prompts))


def all_sequences(allowed=range(VOCAB)):
    """Every sequence that ends with the end token or at the length."""
    for length in range(1, LENGTH + 1):
        for body in itertools.product([t for t in allowed if t != END], repeat=length - 1):
            yield [*body, END]
    yield from ([*body] for body in itertools.product([t for t in allowed if t != END], repeat=5))


@pytest.mark.parametrize('alpha', [0.0, 0.6, 2.0])
def test_beam_search_finds_the_best_of_all_sequences(alpha):
    found = decode(beam_search, np.zeros((2, LENGTH)), num_decodes=700, alpha=alpha)
    expected = [
        (sum(log_probs(s)) / ((5 + len(s)) / 6) ** alpha, s + [0] * (LENGTH - len(s)))
        for s in all_sequences()
        if s[-1] == END
    ]
    expected = sorted(expected)[-100:]
    for tokens, scores in zip(found.tokens, found.scores, strict=True):
        np.testing.assert_allclose(scores[-100:], [s for s, _ in expected], rtol=2e-5)
        np.testing.assert_array_equal(tokens[-100:], [t for _, t in expected])


def test_few_beams_keep_the_best_continuations_of_each_step():
    found = decode(beam_search, np.zeros((1, LENGTH)), num_decodes=2, alpha=0.6)
    live, finished = [(0.0, [])], []
    for _ in range(LENGTH):
        options = sorted(
            ((sum(log_probs([*s, t])), [*s, t]) for _, s in live for t in range(VOCAB)),
            reverse=True,
        )[:4]
        finished += [(p / ((5 + len(s)) / 6) ** 0.6, s) for p, s in options if s[-1] == END]
        finished = sorted(finished)[-2:]
        live = [(p, s) for p, s in options if s[-1] != END][:2]
    assert len(finished) == 2
    np.testing.assert_allclose(found.scores[0], [score for score, _ in finished], rtol=2e-5)
    for tokens, (_, sequence) in zip(found.tokens[0], finished, strict=True):
        np.testing.assert_array_equal(tokens, sequence + [0] * (LENGTH - len(sequence)))


def test_beams_without_an_end_are_live_ones():
    def endless(state):
        logits, cache = model(state)
        return logits.at[:, END].set(-1e9), cache

    run = jax.jit(
        lambda p: beam_search(
            endless,
            make_cache(p),
            p,
            cache_axes={'shared': -1, 'sum': 0, 'layers': 1, 'at': 0},
            end_token=END,
            num_decodes=700,
        )
    )
    tokens, scores = run(jnp.zeros((1, LENGTH), jnp.int32))
    best = tokens[0, -1].tolist()
    assert END not in best
    # The probabilities of the other tokens, which sum to 1 without the end token.
    total, expected, places = 0, 0.0, range(LENGTH)
    for place, token in zip(places, best, strict=True):
        logits = np.delete(TABLE[place, total % (3 * VOCAB)].astype(np.float64), END)
        expected += TABLE[place, total % (3 * VOCAB), token] - np.log(np.exp(logits).sum())
        total += token
    np.testing.assert_allclose(scores[0, -1], expected, rtol=2e-5)


def greedy(prompt):
    """The greedy continuation of a prompt whose zeros are to be chosen, and its log-probability."""
    sequence, total = [], 0.0
    for place in range(LENGTH):
        given = prompt[place + 1] if place + 1 < LENGTH else 0
        totals = sum(sequence)
        token = given or int(np.argmax(TABLE[place, totals % (3 * VOCAB)]))
        sequence.append(token)
        if not given:
            total += log_probs(sequence)[-1]
            if token == END:
                break
    return sequence + [0] * (LENGTH - len(sequence)), total


def test_greedy_decoding_forces_prompts_and_scores_the_rest():
    # The first place is not read, and a given end token ends nothing.
    prompts = np.array([[9, 0, 0, 0, 0], [0, 4, END, 0, 0], [0, 2, 3, 5, 4], [0, 5, 0, 0, 0]])
    expected = [greedy(prompt) for prompt in prompts]
    assert any(tokens[-1] == 0 for tokens, _ in expected), 'no row ends early'
    found = decode(sample, prompts, temperature=0.0, rescale_log_probs=False)
    np.testing.assert_array_equal(found.tokens[:, 0], [tokens for tokens, _ in expected])
    np.testing.assert_allclose(found.scores[:, 0], [s for _, s in expected], rtol=2e-5, atol=1e-6)
    scaled = decode(sample, prompts, temperature=1e-5)
    np.testing.assert_array_equal(scaled.tokens, found.tokens)
    np.testing.assert_array_equal(scaled.scores, 0)
    one = decode(sample, prompts, temperature=3.0, top_k=1, num_decodes=2)
    np.testing.assert_array_equal(one.tokens[:, 1], found.tokens[:, 0])
    cut = decode(sample, prompts, temperature=0.0, max_new_tokens=1)
    rows = zip(cut.tokens[:, 0], found.tokens[:, 0], [1, 3, 5, 2], strict=True)
    for tokens, full, length in rows:
        np.testing.assert_array_equal(tokens, [*full[:length], *[0] * (LENGTH - length)])


def test_samples_follow_the_distribution_and_are_sorted():
    found = decode(sample, np.zeros((1, LENGTH)), num_decodes=4000, key=jax.random.key(1))
    assert (np.diff(found.scores[0]) >= 0).all()
    first = np.bincount(found.tokens[0, :, 0], minlength=VOCAB) / 4000
    np.testing.assert_allclose(first, np.exp([log_probs([t])[0] for t in range(VOCAB)]), atol=0.03)
    for tokens, score in zip(found.tokens[0, ::400], found.scores[0, ::400], strict=True):
        sequence = tokens.tolist()
        if END in sequence:
            sequence = sequence[: sequence.index(END) + 1]
        np.testing.assert_allclose(score, sum(log_probs(sequence)), rtol=2e-5)


def test_rows_may_have_their_own_temperature():
    prompts = np.zeros((2, LENGTH))
    found = decode(sample, prompts, num_decodes=50, temperature=jnp.array([0.0, 5.0]))
    assert len(np.unique(found.tokens[0], axis=0)) == 1
    assert len(np.unique(found.tokens[1], axis=0)) > 30


def test_prefilled_rows_start_at_their_own_places():
    def forward(state):
        """The sum of the tokens stands for the cache."""
        is_past = jnp.arange(state.sequences.shape[1]) <= state.cur_index[:, None]
        total = jnp.sum(state.sequences * is_past, axis=1)
        return jnp.asarray(TABLE)[state.cur_index, total % (3 * VOCAB)], state.cache

    prompts = np.array([[0, 4, 5, 0, 0], [0, 2, 0, 0, 0], [0, 0, 0, 0, 0]], np.int32)
    start = np.array([2, 1, 0], np.int32)
    expected = decode(sample, prompts, temperature=0.0, rescale_log_probs=False)
    for search, settings in [(sample, {'temperature': 0.0}), (beam_search, {'alpha': 0.0})]:
        settings |= {'cache_axes': {}, 'end_token': END, 'num_decodes': 1, 'start_index_B': start}
        found = search(forward, {}, jnp.asarray(prompts), **settings)
        if search is sample:
            np.testing.assert_array_equal(found.tokens, expected.tokens)
        else:
            forced = decode(beam_search, prompts, num_decodes=1, alpha=0.0)
            np.testing.assert_array_equal(found.tokens, forced.tokens)
            np.testing.assert_allclose(found.scores, forced.scores, rtol=1e-6)


def test_masks_keep_the_most_likely_tokens():
    probabilities = np.array([[0.05, 0.4, 0.3, 0.2, 0.05]])
    logits = jnp.log(probabilities)
    for top_p, kept in [(0.0, 5), (0.39, 1), (0.41, 2), (0.69, 2), (0.75, 3), (0.93, 5), (1.0, 5)]:
        masked = keep_top_p(logits, top_p)
        assert np.sum(masked > -1e6) == kept, top_p
        assert set(np.argsort(probabilities[0])[-kept:]) == set(np.flatnonzero(masked[0] > -1e6))
    for top_k, kept in [(0, 5), (1, 1), (3, 3), (9, 5)]:
        assert np.sum(keep_top_k(logits, top_k) > -1e6) == kept


@pytest.mark.parametrize(
    'search, settings, message',
    [
        (sample, {'temperature': -1.0}, r'temperature is -1\.0.*>= 0'),
        (sample, {'top_k': -1}, 'top_k is -1'),
        (sample, {'top_p': 1.5}, r'top_p is 1\.5.*>= 0 and <= 1'),
        (sample, {'num_decodes': 0}, 'num_decodes is 0'),
        (beam_search, {'alpha': -1}, 'alpha is -1'),
        (beam_search, {'num_decodes': 2.0}, r'num_decodes is 2\.0'),
    ],
)
def test_impossible_searches_are_errors(search, settings, message):
    with pytest.raises(ConfigError, match=message):
        decode(search, np.zeros((1, 2)), **settings)
