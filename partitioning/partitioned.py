"""Functions compiled over a mesh, and the contexts they are traced in."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from partitioning.rules import LogicalAxisRules

PartitionedCallable = Callable[..., Any]
CompiledPartitionedCallable = Callable[..., Any]


class PjittedFnWithContext:
    """Calls a jitted function inside a mesh and logical axis rules.

    The contexts are entered at every call. `PartitionedFn`, which `partition` returns, enters them
    only while jax traces the function.
    """

    def __init__(
        self,
        pjitted_fn: Callable[..., Any],
        partition_mesh: Mesh,
        logical_axis_rules: LogicalAxisRules = (),
    ):
        """Args:
        pjitted_fn: the result of `jax.jit`.
        partition_mesh: the mesh.
        logical_axis_rules: rules for the linen models and `constrain` calls inside.
        """
        self._pjitted_fn: Any = pjitted_fn
        self._mesh = partition_mesh
        self._logical_axis_rules = tuple(logical_axis_rules)
        functools.update_wrapper(self, pjitted_fn)

    def _contexts(self) -> contextlib.AbstractContextManager:
        stack = contextlib.ExitStack()
        stack.enter_context(jax.set_mesh(self._mesh))
        stack.enter_context(_axis_rules(self._logical_axis_rules))
        return stack

    def _select(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
        """The jitted function for such a call, and the arguments to give it."""
        return self._pjitted_fn, args, kwargs

    def _apply(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        jitted, args, kwargs = self._select(args, kwargs)
        with self._contexts():
            return getattr(jitted, method)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._apply('__call__', args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers for arrays or ShapeDtypeStructs; see `jax.jit`."""
        return self._apply('lower', args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces for arrays or ShapeDtypeStructs; see `jax.jit`."""
        return self._apply('trace', args, kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The abstract result for arrays or ShapeDtypeStructs; see `jax.jit`."""
        return self._apply('eval_shape', args, kwargs)

    def lower_and_compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        """Lowers and compiles for arrays or ShapeDtypeStructs."""
        return self.lower(*args, **kwargs).compile()

    def clear_cache(self) -> None:
        """Forgets every trace and compilation of the function."""
        self._pjitted_fn.clear_cache()


class PartitionedFn(PjittedFnWithContext):
    """A function jitted over a mesh that enters its contexts only while it is traced.

    A call costs what a call of the plain `jax.jit` of the function costs, on a mesh of any size.
    Keyword arguments reach the function: those that name a parameter with an entry in
    `in_shardings` are laid out by it, others arrive as they are.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        partition_mesh: Mesh,
        logical_axis_rules: LogicalAxisRules = (),
        *,
        in_shardings: Any,
        out_shardings: Any,
        static_argnums: tuple[int, ...] = (),
        donate_argnums: tuple[int, ...] = (),
    ):
        self._fn = fn
        self._in_shardings = in_shardings
        self._static_argnums = static_argnums
        self._jit = functools.partial(
            jax.jit,
            out_shardings=out_shardings,
            static_argnums=static_argnums,
            donate_argnums=donate_argnums,
        )
        self._with_keywords: dict[int, Any] = {}
        in_context = _traced_in_context(fn, partition_mesh, tuple(logical_axis_rules))
        jitted = self._jit(in_context, in_shardings=in_shardings)
        super().__init__(jitted, partition_mesh, logical_axis_rules)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            return self._apply('__call__', args, kwargs)
        return self._pjitted_fn(*args)

    def _contexts(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def clear_cache(self) -> None:
        self._pjitted_fn.clear_cache()
        self._with_keywords.clear()

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self._fn)

    def _select(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
        if not kwargs:
            return self._pjitted_fn, args, kwargs
        # jax.jit takes no keywords beside in_shardings: make them positional where they can be,
        # and pass the rest as one last dict.
        bound = self._signature.bind(*args, **kwargs)
        positional, keywords = bound.args, bound.kwargs
        if isinstance(self._in_shardings, tuple):
            covered = max(len(self._in_shardings) + len(self._static_argnums), len(args))
            names = list(bound.arguments)[covered : len(positional)]
            keywords = {**dict(zip(names, positional[covered:], strict=False)), **keywords}
            positional = positional[:covered]
        if not keywords:
            return self._pjitted_fn, positional, {}
        return self._keyword_variant(len(positional)), (*positional, keywords), {}

    def _keyword_variant(self, num_positional: int) -> Any:
        if num_positional not in self._with_keywords:
            fn = self._fn

            @functools.wraps(fn)
            def call(*args: Any) -> Any:
                return fn(*args[:-1], **args[-1])

            dynamic = num_positional - sum(i < num_positional for i in self._static_argnums)
            shardings = self._in_shardings
            if not isinstance(shardings, tuple):
                shardings = (shardings,) * dynamic
            in_context = _traced_in_context(call, self._mesh, self._logical_axis_rules)
            self._with_keywords[num_positional] = self._jit(
                in_context, in_shardings=(*shardings, None)
            )
        return self._with_keywords[num_positional]


def to_shardings(resources: Any, mesh: Mesh) -> Any:
    """Resource specifications -> shardings on `mesh`.

    Args:
      resources: pytree whose leaves are None (replicated), PartitionSpecs or Shardings.
      mesh: the mesh.

    Raises:
      ValueError: another kind of leaf.
    """

    def convert(leaf: Any) -> Sharding:
        if leaf is None:
            return NamedSharding(mesh, PartitionSpec())
        if isinstance(leaf, PartitionSpec):
            return NamedSharding(mesh, leaf)
        if isinstance(leaf, Sharding):
            return leaf
        raise ValueError(
            f'a resource is a PartitionSpec, a Sharding or None (replicated), not {leaf!r}; logical '
            'axes become PartitionSpecs through get_mesh_axes'
        )

    is_leaf = lambda x: x is None or isinstance(x, PartitionSpec | Sharding)  # noqa: E731
    return jax.tree.map(convert, resources, is_leaf=is_leaf)


@contextlib.contextmanager
def _axis_rules(rules: LogicalAxisRules) -> Iterator[None]:
    from flax.core import spmd  # heavy, and only tracing needs it

    with spmd.logical_axis_rules(rules):
        yield


def _traced_in_context(
    fn: Callable[..., Any], mesh: Mesh, rules: LogicalAxisRules
) -> Callable[..., Any]:
    """`fn`, entering the mesh and the rules by itself: jax runs this body only to trace it."""

    @functools.wraps(fn)
    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), _axis_rules(rules):
            return fn(*args)

    return traced
