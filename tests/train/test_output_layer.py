"""Scores of targets from hidden states: equal to the scores from whole logits, on every mesh."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import RULES, Bigram, Steps, batch, model

from partitioning import constrain
from partitioning.mesh import MeshConfig
from partitioning.products.flops import count_jaxpr_flops
from partitioning.rules import AxisRules
from train import NextToken
from train.errors import ConfigError
from train.models.nnx_form import CreateNnxTransformer
from train.models.t5 import DecoderOnly, DecoderOnlyConfig
from train.objectives import PrefixLanguageModel, compute_loss
from train.output_layer import DeferredLogits, OutputSettings, score_targets
from train.output_layer.chunks import choose_chunks

pytestmark = pytest.mark.core

ROWS, LENGTH, WIDTH = 8, 8, 16
CHUNKS = OutputSettings(num_chunks=2)
SEQUENCE = [('length', 'model'), *RULES]
WHOLE = [('batch', 'data'), ('vocab', 'model'), ('embed', None), ('length', None)]
# The order of the axes differs from the order in the mesh.
ONE_AXIS_FOR_ALL = [
    ('batch', ('model', 'data')),
    ('embed', ('data', 'model')),
    ('vocab', None),
    ('length', None),
]
CONTEXT = [('batch', None), ('length', ('model', 'data')), ('vocab', 'model'), ('embed', 'data')]


def arrays(vocab):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(ROWS, LENGTH, WIDTH)), rng.normal(size=(WIDTH, vocab))
    targets = rng.integers(0, vocab, (ROWS, LENGTH)).astype(np.int32)
    return x.astype(np.float32), w.astype(np.float32), targets


def loss(scores):
    """A loss of all scores, with another weight for each target."""
    log_z, logit, total, _ = scores
    each = log_z - logit + 0.1 * log_z**2 + 0.01 * total
    return jnp.sum(each * jnp.arange(each.size).reshape(each.shape))


def fused(x, w, targets, settings, cap=None, divisor=1.0, dtype='float32'):
    """Scores and gradients through the output layer."""

    def scored(x, w):
        outputs = DeferredLogits(x_BLD=x, w_DV=w, dtype=dtype, divisor=divisor, soft_cap=cap)
        scores = score_targets(outputs, targets, settings)
        return loss(scores), scores

    return jax.grad(scored, argnums=(0, 1), has_aux=True)(x, w)


@functools.partial(jax.jit, static_argnums=(3, 4))
def plain(x, w, targets, cap=None, divisor=1.0):
    """Scores and gradients through whole logits, by functions of jax and optax."""

    def scored(x, w):
        logits = x @ w / divisor
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        logit = log_z - optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        scores = log_z, logit, logits.sum(-1), logits.argmax(-1)
        return loss(scores), scores

    return jax.grad(scored, argnums=(0, 1), has_aux=True)(x, w)


def check_equal(ours, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize('num_chunks, executed', [(1, 3), (2, 4)])
def test_logits_that_are_computed_again_are_not_work_of_the_model(num_chunks, executed):
    """One product forward and two backward; with chunks, the logits are computed a second time."""
    settings = OutputSettings(num_chunks=num_chunks)
    traced = jax.make_jaxpr(lambda *a: fused(*a, settings))(*arrays(24)).jaxpr
    product = 2 * ROWS * LENGTH * WIDTH * 24
    assert count_jaxpr_flops(traced) == executed * product
    assert count_jaxpr_flops(traced, recomputed=False) == 3 * product


@pytest.mark.parametrize(
    'vocab, chunks, cap', [(24, 1, None), (25, 3, 2.0), (25, 24, None), (200, 1, None)]
)
def test_chunks_on_one_device(vocab, chunks, cap):
    settings = OutputSettings(num_chunks=chunks)
    ours = jax.jit(lambda *a: fused(*a, settings, cap, 2.0))(*arrays(vocab))
    check_equal(ours, plain(*arrays(vocab), cap, 2.0))


@pytest.mark.parametrize(
    'data, model_axis, rules, vocab, chunks',
    [
        (8, 1, RULES, 24, 2),
        (4, 2, RULES, 24, 1),
        (4, 2, AxisRules(WHOLE, on_indivisible='pad'), 25, 2),
        (2, 4, SEQUENCE, 24, 2),
        (2, 4, ONE_AXIS_FOR_ALL, 24, 2),
        (2, 4, CONTEXT, 24, 1),
        (1, 8, AxisRules(SEQUENCE, on_indivisible='pad'), 9, 2),
    ],
    ids=['8x1', '4x2', '4x2-pad', '2x4-sequence', '2x4-one', '2x4-context', '1x8-pad'],
)
def test_meshes(data, model_axis, rules, vocab, chunks):
    settings = OutputSettings(num_chunks=chunks)
    mesh = MeshConfig(axes={'data': data, 'model': model_axis}).build()
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        ours = jax.jit(lambda *a: fused(*a, settings, 3.0))(*arrays(vocab))
    check_equal(ours, plain(*arrays(vocab), 3.0))


def test_explicit_axes():
    names = ('batch', 'length', 'embed'), ('embed', 'vocab'), ('batch', 'length')

    def laid_out(*arrays):
        x, w, targets = map(constrain, arrays, names)
        outputs = DeferredLogits(x_BLD=x, w_DV=w, dtype='float32')
        return score_targets(outputs, targets, CHUNKS)

    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ('data', 'model'), axis_types=types)
    with jax.set_mesh(mesh), nn.logical_axis_rules(SEQUENCE):
        scores = jax.jit(laid_out)(*arrays(24))
    check_equal(tuple(scores), plain(*arrays(24))[1])


def test_inside_a_shard_map_over_another_axis():
    mesh = MeshConfig(axes={'stage': 2, 'data': 2, 'model': 2}).build()
    whole = jax.sharding.PartitionSpec()
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        per_stage = jax.shard_map(
            lambda *a: fused(*a, CHUNKS),
            in_specs=whole,
            out_specs=whole,
            axis_names={'stage'},
            check_vma=False,
        )
        ours = jax.jit(per_stage)(*arrays(24))
    check_equal(ours, plain(*arrays(24)))


@pytest.mark.parametrize(
    'settings',
    [CHUNKS, OutputSettings(logits_dtype='bfloat16', gradient_dtype='float32')],
    ids=['float32', 'bfloat16'],
)
def test_bfloat16(settings):
    x, w, targets = arrays(24)
    x = x.astype(jnp.bfloat16)
    mesh = MeshConfig(axes={'data': 4, 'model': 2}).build()
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        ours = jax.jit(lambda *a: fused(*a, settings, dtype='bfloat16'))(x, w, targets)
    (dx, dw), scores = ours
    assert (dx.dtype, dw.dtype, scores.log_z_BL.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    grads, expected = plain(x.astype(np.float32), w, targets)
    check_equal(((dx.astype(np.float32), dw), scores[:3]), (grads, expected[:3]), 0.02)


def test_of_equal_logits_the_first_token_counts():
    x, _, targets = arrays(24)
    w = np.ones((WIDTH, 24), np.float32)
    w[:, :5] = 0
    mesh = MeshConfig(axes={'data': 2, 'model': 4}).build()
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        _, scores = jax.jit(lambda *a: fused(*a, OutputSettings(num_chunks=3)))(x, w, targets)
    np.testing.assert_array_equal(scores.argmax_BL, np.where(x.sum(-1) > 0, 5, 0))


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if hasattr(inner := getattr(inner, 'jaxpr', inner), 'eqns'):
                    yield from equations(inner)


def test_what_exists_and_what_devices_exchange():
    mesh = MeshConfig(axes={'data': 4, 'model': 2}).build()
    with jax.set_mesh(mesh), nn.logical_axis_rules(SEQUENCE):
        settings = OutputSettings(num_chunks=3)
        jaxpr = jax.make_jaxpr(lambda *a: fused(*a, settings))(*arrays(48)).jaxpr
    found = [(e.primitive.name, e.outvars[0].aval.shape) for e in equations(jaxpr)]
    # A chunk has 8 of the 24 columns of a device, and the rows are sharded.
    assert ('dot_general', (2, LENGTH, 8)) in found
    assert not [shape for _, shape in found if len(shape) == 3 and shape[2] in (24, 48)]
    moved = [one for one in found if one[0] in ('all_gather', 'reduce_scatter')]
    hidden, tokens, columns = (2, LENGTH, WIDTH), (2, LENGTH), (WIDTH, 24)
    # The hidden states, the weights and the targets; and the cotangents of three scores.
    gathered = [hidden, columns, tokens, *[tokens] * 3]
    assert sorted(moved) == sorted(
        [('all_gather', shape) for shape in gathered]
        + [('reduce_scatter', (WIDTH // 4, 8)), ('reduce_scatter', (2, LENGTH // 2, WIDTH))]
    )


def test_the_number_of_chunks():
    # The logits of 4,096 tokens take 256 MiB for 16,384 columns.
    assert choose_chunks(4096, 16_384, None) == (1, 16_384)
    chunks, size = choose_chunks(4096, 128_256, None)
    assert (chunks, size % 128) == (8, 0) and size <= 16_384 and chunks * size >= 128_256
    assert choose_chunks(2**30, 200, None) == (2, 128)
    with pytest.raises(ConfigError, match=r'num_chunks is 9, .* 8 columns .*at most 8'):
        choose_chunks(4096, 8, 9)


class Whole(nn.Module):
    """A model that returns its logits."""

    net: nn.Module

    def __call__(self, tokens, **packed):
        return self.net(tokens, **packed)


@pytest.mark.long
def test_a_train_step_with_all_terms_of_the_loss():
    sizes = {'vocab_size': 260, 'num_layers': 1, 'tie_embeddings': True, 'logit_soft_cap': 4.0}
    terms = {'z_loss': 0.01, 'label_smoothing': 0.1}
    objective = NextToken(model=model(**sizes), output=OutputSettings(num_chunks=3), **terms)
    steps = Steps(2, 4, objective=objective, tx=optax.sgd(1.0), microbatches=2)
    before = jax.device_get(steps.state.params)
    after, metrics = steps.step(steps.state, batch(0))

    whole = NextToken(model=Whole(model(**sizes)), **terms)

    def loss(params):
        result = compute_loss(whole, {'net': params}, batch(0), None, {})
        return result.total / result.sums['weight'], result.sums

    grads, sums = jax.jit(jax.grad(loss, has_aux=True))(before)
    check_equal(after.params, jax.tree.map(jnp.subtract, before, grads))
    for name in ('loss', 'accuracy', 'z_loss'):
        assert float(metrics[name]) == pytest.approx(float(sums[name] / sums['weight']), rel=1e-5)


T5_SIZES = {'vocab_size': 512, 'emb_dim': 16, 'mlp_dim': 16, 'num_heads': 2, 'head_dim': 8}


@pytest.mark.parametrize(
    'objective',
    [
        NextToken(
            model=CreateNnxTransformer(model(num_layers=1, vocab_size=512).config), output=CHUNKS
        ),
        PrefixLanguageModel(
            model=DecoderOnly(DecoderOnlyConfig(**T5_SIZES, num_layers=1)), output=CHUNKS
        ),
    ],
    ids=['nnx', 't5'],
)
def test_models_that_defer_their_logits(objective):
    variables = jax.eval_shape(lambda: objective.init(jax.random.key(0), batch(0)))
    jaxpr = jax.make_jaxpr(lambda v: objective.score(v['params'], batch(0)))(variables).jaxpr
    shapes = {e.outvars[0].aval.shape for e in equations(jaxpr)}
    assert (8, 16, 256) in shapes and (8, 16, 512) not in shapes  # half of the vocabulary


def test_a_setting_needs_a_model_that_defers_its_logits():
    objective = NextToken(model=Bigram(), output=CHUNKS)
    variables = jax.eval_shape(lambda: objective.init(jax.random.key(0), batch(0)))
    with pytest.raises(ConfigError, match=r'num_chunks=2.* defer_logits'):
        jax.eval_shape(
            lambda v: objective.loss(v.pop('params'), batch(0), None, v).total, variables
        )


@pytest.mark.parametrize(
    'settings',
    [{'num_chunks': 0}, {'logits_dtype': 'float16'}, {'gradient_dtype': 'bf16'}],
    ids=str,
)
def test_invalid_settings(settings):
    with pytest.raises(ConfigError, match=f'OutputSettings.{next(iter(settings))} is '):
        OutputSettings(**settings)
    with pytest.raises(ConfigError, match=r'NextToken\.output is '):
        NextToken(model=Bigram(), output=settings)
