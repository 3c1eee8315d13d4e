"""The parameters of models without names, as other libraries call them, from their shapes only."""

import itertools

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tree(shapes):
    """A tree of abstract arrays from shapes by path; `|` stands for a `/` inside of a key."""
    flat = {
        tuple(key.replace('|', '/') for key in path.split('/')): array(*shape)
        for path, shape in shapes.items()
    }
    return unflatten_dict(flat)


def dense(path, a, b, bias=None):
    """A kernel of shape (a, b), and a bias of the output's size, `b` unless given."""
    return {f'{path}/kernel': (a, b), f'{path}/bias': (b if bias is None else bias,)}


def norm(path, width):
    return {f'{path}/scale': (width,), f'{path}/bias': (width,)}


def layers(number, layer):
    """The arrays of several layers, each with the number of its layer in the path."""
    return {path.format(i): shape for i in range(number) for path, shape in layer.items()}


def gpt2(vocab=50257, width=768, number=4):
    layer = norm('h/{}/ln_1', width) | norm('h/{}/ln_2', width)
    for path, n, m in (  # Hugging Face's Conv1D keeps (outputs, inputs)
        ('attn/c_attn', 3 * width, width),
        ('attn/c_proj', width, width),
        ('mlp/c_fc', 4 * width, width),
        ('mlp/c_proj', width, 4 * width),
    ):
        layer |= dense('h/{}/' + path, n, m, bias=n)
    tables = {'wte/embedding': (vocab, width), 'wpe/embedding': (1024, width)}
    model = tables | layers(number, layer) | norm('ln_f', width)
    return tree({f'transformer/{path}': shape for path, shape in model.items()})


def bert(vocab=30522, width=768):
    layer = dense('{}/intermediate/dense', width, 4 * width)
    layer |= dense('{}/output/dense', 4 * width, width) | norm('{}/output/LayerNorm', width)
    for path in ('self/query', 'self/key', 'self/value', 'output/dense'):
        layer |= dense('{}/attention/' + path, width, width)
    layer |= norm('{}/attention/output/LayerNorm', width)
    rest = {
        'bert/embeddings/word_embeddings/embedding': (vocab, width),
        'bert/embeddings/position_embeddings/embedding': (512, width),
        'bert/embeddings/token_type_embeddings/embedding': (2, width),
        'cls/predictions/bias': (vocab,),
    }
    rest |= dense('bert/pooler/dense', width, width)
    rest |= dense('cls/seq_relationship', width, 2)
    rest |= norm('bert/embeddings/LayerNorm', width)
    stack = layers(4, layer).items()
    return tree(rest | {f'bert/encoder/layer/{path}': shape for path, shape in stack})


def llama(vocab=32000, width=1024, mlp=2816):
    layer = {
        'model/layers/{}/input_layernorm/weight': (width,),
        'model/layers/{}/post_attention_layernorm/weight': (width,),
    }
    shapes = {'gate_proj': (width, mlp), 'up_proj': (width, mlp), 'down_proj': (mlp, width)}
    layer |= {f'model/layers/{{}}/mlp/{k}/kernel': shape for k, shape in shapes.items()}
    shapes = {f'{k}_proj': (width, width) for k in 'qkvo'}
    layer |= {f'model/layers/{{}}/self_attn/{k}/kernel': shape for k, shape in shapes.items()}
    rest = {'model/embed_tokens/embedding': (vocab, width), 'model/norm/weight': (width,)}
    return tree(rest | layers(4, layer) | {'lm_head/kernel': (width, vocab)})


def t5(vocab=32128, width=512, heads=384, mlp=1024):
    def attention(name):
        path = f'block/{{}}/layer/0/{name}'
        shapes = {f'{path}/{k}/kernel': (width, heads) for k in 'qkv'}
        return shapes | {f'{path}/o/kernel': (heads, width)}

    mlps = {f'wi_{i}': (width, mlp) for i in range(2)} | {'wo': (mlp, width)}
    layer = attention('SelfAttention') | {'block/{}/layer/0/layer_norm/weight': (width,)}
    layer |= {f'block/{{}}/layer/1/DenseReluDense/{k}/kernel': s for k, s in mlps.items()}
    stacks = {'encoder': layer, 'decoder': layer | attention('EncDecAttention')}
    model = {
        f'{name}/{path}': shape
        for name, one in stacks.items()
        for path, shape in layers(3, one).items()
    }
    model |= {
        f'{name}/block/0/layer/0/SelfAttention/relative_attention_bias/embedding': (32, 6)
        for name in stacks
    }
    return tree(model | {'shared/embedding': (vocab, width), 'lm_head/kernel': (width, vocab)})


def big_vision(width=768, heads=12, number=4, scan=False):
    size, block = width // heads, 'Transformer/encoderblock/' if scan else 'Transformer/{}/'
    attention = 'MultiHeadDotProductAttention_0'
    layer = norm('LayerNorm_0', width) | norm('LayerNorm_1', width)
    layer |= dense('MlpBlock_0/Dense_0', width, 4 * width)
    layer |= dense('MlpBlock_0/Dense_1', 4 * width, width)
    for key in ('query', 'key', 'value'):
        layer[f'{attention}/{key}/kernel'] = (width, heads, size)
        layer[f'{attention}/{key}/bias'] = (heads, size)
    layer |= {f'{attention}/out/kernel': (heads, size, width), f'{attention}/out/bias': (width,)}
    layer = {block + path: (number, *shape) if scan else shape for path, shape in layer.items()}
    model = {
        'embedding/kernel': (16, 16, 3, width),
        'embedding/bias': (width,),
        'pos_embedding': (1, 196, width),
        'cls': (1, 1, width),
    }
    model |= norm('Transformer/encoder_norm', width) | dense('head', width, 1000)
    if scan:
        return tree(model | layer)
    named = {p.replace('{}', 'encoderblock_{}'): shape for p, shape in layer.items()}
    return tree(model | layers(number, named))


def haiku(width=256, vocab=1000):
    def linear(path, a, b):
        return {f'{path}/w': (a, b), f'{path}/b': (b,)}

    layer = {}
    for key in ('query', 'key', 'value', 'linear'):
        layer |= linear(f'transformer|~|h{{}}_attn|{key}', width, width)
    layer |= linear('transformer|~|h{}_mlp|~|linear', width, 4 * width)
    layer |= linear('transformer|~|h{}_mlp|~|linear_1', 4 * width, width)
    for key in ('scale', 'offset'):
        layer[f'transformer|~|h{{}}_ln|{key}'] = (width,)
    rest = {'transformer|~|embed/embeddings': (vocab, width)}
    return tree(rest | layers(3, layer) | linear('lm|head', width, vocab))


def gemma(width=512, mlp=2048):
    """Kernels of einsum, with one head for keys and values."""
    layer = {
        'layers/{}/attn/q_einsum/w': (8, width, 64),
        'layers/{}/attn/kv_einsum/w': (2, 1, width, 64),
        'layers/{}/attn/attn_vec_einsum/w': (8, 64, width),
        'layers/{}/mlp/gate_proj/kernel': (width, mlp),
        'layers/{}/mlp/up_proj/kernel': (width, mlp),
        'layers/{}/mlp/down_proj/kernel': (mlp, width),
        'layers/{}/pre_attention_norm/scale': (width,),
    }
    rest = {'embedder/input_embedding': (256128, width), 'final_norm/scale': (width,)}
    return tree(rest | layers(3, layer))


def resnet():
    model = {'conv_init/kernel': (7, 7, 3, 64), **norm('bn_init', 64), **dense('Dense_0', 2048, 10)}
    width, block = 64, 0
    for stage in range(4):
        for number in range(2):
            inner = 64 * 2**stage
            path = f'BottleneckResNetBlock_{block}'
            model[f'{path}/Conv_0/kernel'] = (1, 1, width, inner)
            model[f'{path}/Conv_1/kernel'] = (3, 3, inner, inner)
            model[f'{path}/Conv_2/kernel'] = (1, 1, inner, 4 * inner)
            model |= norm(f'{path}/BatchNorm_0', inner) | norm(f'{path}/BatchNorm_1', inner)
            model |= norm(f'{path}/BatchNorm_2', 4 * inner)
            if number == 0:
                model[f'{path}/conv_proj/kernel'] = (1, 1, width, 4 * inner)
            width, block = 4 * inner, block + 1
    return tree(model)


def mixer(tokens=196, width=512):
    layer = norm('MixerBlock_{}/LayerNorm_0', width) | norm('MixerBlock_{}/LayerNorm_1', width)
    for path, n, m in (('token_mixing', tokens, 256), ('channel_mixing', width, 2048)):
        layer |= dense(f'MixerBlock_{{}}/{path}/Dense_0', n, m)
        layer |= dense(f'MixerBlock_{{}}/{path}/Dense_1', m, n)
    rest = {'stem/kernel': (16, 16, 3, width), 'stem/bias': (width,), **dense('head', width, 1000)}
    return tree(rest | layers(3, layer))


def mlp(sizes=(784, 128, 64, 10)):
    """A plain list of layers."""
    return [{'w': array(n, m), 'b': array(m)} for n, m in itertools.pairwise(sizes)]


def t5x(width=512, number=6):
    """Layers are stacked along dimension 1."""
    layer = {f'self_attention/{k}/kernel': (width, number, width) for k in ('query', 'key')}
    layer |= {f'self_attention/{k}/kernel': (width, number, width) for k in ('value', 'out')}
    layer |= {f'mlp/wi_{i}/kernel': (width, number, 2048) for i in range(2)}
    layer |= {'mlp/wo/kernel': (2048, number, width), 'pre_mlp_norm/scale': (width, number)}
    model = {f'decoder/layers/{path}': shape for path, shape in layer.items()}
    return tree(model | {'token_embedder/embedding': (32000, width), 'norm/scale': (width,)})


def unknown():
    """No word of a path says anything."""
    shapes = {f's{i}/aleph': (640, 160) for i in range(3)}
    shapes |= {f's{i}/beth': (160, 7, 320) for i in range(3)} | {
        f's{i}/x': (160,) for i in range(3)
    }
    return tree({'zayin': (97, 89, 3), 'he': (10007, 160), **shapes})


class Module:
    """An object with attributes as Equinox's modules are; each subclass is a pytree."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_with_keys(
            cls,
            lambda m: (
                [(jax.tree_util.GetAttrKey(k), v) for k, v in vars(m).items()],
                tuple(vars(m)),
            ),
            lambda names, values: cls(**dict(zip(names, values, strict=True))),
        )


class Linear(Module):
    pass


class Block(Module):
    pass


def linear(inputs, outputs, stack=()):
    """Weights are (outputs, inputs), as in PyTorch."""
    return Linear(weight=array(*stack, outputs, inputs), bias=array(*stack, outputs))


def equinox(width=256, number=3, stack=()):
    def block():
        return Block(
            norm1=Linear(weight=array(*stack, width)),
            attention=Block(
                **{f'{k}_proj': linear(width, width, stack) for k in ('query', 'key', 'value')},
                output_proj=linear(width, width, stack),
            ),
            mlp=Block(
                layers=[linear(width, 4 * width, stack), linear(4 * width, width, stack)],
                activation=jax.nn.gelu,
            ),
        )

    return Block(
        embedding=Linear(weight=array(1003, width)),
        blocks=block() if stack else [block() for _ in range(number)],
        head=linear(width, 1003),
    )


MODELS = {
    'gpt2': gpt2,
    'gpt2, tiny': lambda: gpt2(257, 64, 2),
    'bert': bert,
    'llama': llama,
    't5': t5,
    'big_vision': big_vision,
    'big_vision, scan': lambda: big_vision(scan=True),
    'big_vision, 16 heads': lambda: big_vision(1024, 16),
    'haiku': haiku,
    'equinox': equinox,
    'equinox, stacked': lambda: equinox(stack=(6,)),
    'gemma': gemma,
    'resnet': resnet,
    'mixer': mixer,
    'mlp': mlp,
    't5x, scan': t5x,
    'unknown': unknown,
}
