"""jraph: graph convolutions with linen layers on a batch of padded graphs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax
from client_runs import BATCH, STEPS, functional
from flax.training.train_state import TrainState

NODES, EDGES, FEATURES, CLASSES = 8, 16, 8, 8


class GraphNet(nn.Module):
    """Classifies one graph."""

    @nn.compact
    def __call__(self, graph):
        for features in (16, 32):
            convolution = jraph.GraphConvolution(nn.Dense(features), add_self_edges=True)
            graph = convolution(graph)
            graph = graph._replace(nodes=nn.relu(graph.nodes))
        mask = jraph.get_node_padding_mask(graph)
        return nn.Dense(CLASSES)((graph.nodes * mask[:, None]).sum(0))


def make_graph(rng):
    """A random graph of 3 to 7 nodes, padded to the sizes of all graphs."""
    nodes, edges = rng.integers(3, NODES), rng.integers(2, EDGES)
    graph = jraph.GraphsTuple(
        nodes=rng.normal(size=(nodes, FEATURES)).astype(np.float32),
        edges=np.ones((edges, 1), np.float32),
        senders=rng.integers(0, nodes, edges),
        receivers=rng.integers(0, nodes, edges),
        globals=rng.integers(0, CLASSES, (1,)),
        n_node=np.array([nodes]),
        n_edge=np.array([edges]),
    )
    return jraph.pad_with_graphs(graph, NODES, EDGES)


def graph_batches():
    rng = np.random.default_rng(0)
    graphs = [[make_graph(rng) for _ in range(BATCH)] for _ in range(STEPS)]
    return [jax.tree.map(lambda *x: np.stack(x), *batch) for batch in graphs]


EXAMPLE = jax.tree.map(jnp.asarray, make_graph(np.random.default_rng(0)))


def graph_init(key):
    model = GraphNet()
    params = model.init(key, EXAMPLE)['params']
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


def graph_step(state, graphs):
    def loss_fn(params):
        logits = jax.vmap(lambda graph: state.apply_fn({'params': params}, graph))(graphs)
        labels = graphs.globals[:, 0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


JRAPH_CONVOLUTION = functional(graph_init, graph_step, graph_batches)
