"""Functions compiled over a mesh, and the contexts in which they are traced."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from partitioning.partitioner.explicit_axes import auto_where_needed
from partitioning.partitioner.inner_layouts import inner_spec
from partitioning.partitioner.same_paths import (
    has_structure_of,
    like,
    with_static_fields,
)
from partitioning.partitioner.trace_errors import own_errors
from partitioning.rules import (
    AxisRules,
    LogicalAxisRules,
    PaddedSpec,
    boundary_spec,
    check_definite,
    check_spec,
)
from partitioning.state import path_str

CompiledPartitionedCallable = Callable[..., Any]


class PartitionedCallable(Protocol):
    """A function over a mesh, with the methods of PjittedFnWithContext."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered: ...
    def lower_and_compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled: ...
    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced: ...
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any: ...
    def clear_cache(self) -> None: ...


class _CountsPartitionedFunctions(type):
    """`partition` returns plain functions, which count as instances of PjittedFnWithContext."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return hasattr(instance, '_partitioned') or super().__instancecheck__(instance)


class PjittedFnWithContext(metaclass=_CountsPartitionedFunctions):
    """Calls a jitted function inside a mesh and logical axis rules, entered at every call.

    `partition_function` makes functions that pay for the contexts only while they are traced.

    Args:
      pjitted_fn: the result of `jax.jit`.
      partition_mesh: the mesh.
      logical_axis_rules: rules for the linen models and `constrain` calls inside.
    """

    def __init__(
        self,
        pjitted_fn: Callable[..., Any],
        partition_mesh: Mesh,
        logical_axis_rules: LogicalAxisRules = (),
    ):
        self._pjitted_fn: Any = pjitted_fn
        self._mesh = partition_mesh
        self._logical_axis_rules = AxisRules(logical_axis_rules)
        functools.update_wrapper(self, pjitted_fn)

    def _apply(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        with jax.set_mesh(self._mesh), _axis_rules(self._logical_axis_rules):
            return getattr(self._pjitted_fn, method)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._apply('__call__', args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers for arrays or ShapeDtypeStructs; see `jax.jit`."""
        return self._apply('lower', args, kwargs)

    def lower_and_compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        """Lowers and compiles for arrays or ShapeDtypeStructs."""
        return self.lower(*args, **kwargs).compile()

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces for arrays or ShapeDtypeStructs; see `jax.jit`."""
        return self._apply('trace', args, kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The abstract result for arrays or ShapeDtypeStructs; see `jax.jit`."""
        return self._apply('eval_shape', args, kwargs)

    def clear_cache(self) -> None:
        """Forgets every trace and compilation of the function."""
        self._pjitted_fn.clear_cache()


class _Partitioned(PjittedFnWithContext):
    """The methods of a partitioned function, which also takes keyword arguments.

    jax.jit accepts no keyword arguments together with in_shardings. Those that name a parameter
    with an entry in in_shardings become positional. The others are passed as one last dict, in the
    layout that they already have.
    """

    def __init__(self, fn: Callable[..., Any], mesh: Mesh, rules: LogicalAxisRules, **jit: Any):
        self._fn = fn
        in_shardings = jit.pop('in_shardings')
        self._in_shardings = tuple(in_shardings) if isinstance(in_shardings, list) else in_shardings
        self._jit = functools.partial(jax.jit, **jit)
        self._with_keywords: dict[int, Any] = {}
        self._num_traces = 0
        self._returned: Any = None  # the last result, abstract
        super().__init__(fn, mesh, rules)
        self._pjitted_fn = self._jit(self._counted(fn), in_shardings=self._in_shardings)

    def _apply(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        positional, keywords = self._bind(args, kwargs) if kwargs else (args, {})
        given = (*positional, keywords) if keywords else positional

        def apply() -> Any:
            variant = self._keyword_variant(len(positional)) if keywords else self._pjitted_fn
            return getattr(variant, method)(*given)

        try:
            return apply()
        except ValueError:
            if not self.adopt_static_fields(positional):
                raise
        return apply()

    def clear_cache(self) -> None:
        super().clear_cache()
        self._with_keywords.clear()
        self._num_traces = 0

    def num_traces(self) -> int:
        """The number of times the function was traced: once per kind of arguments.

        It was compiled as often, because the layout of the arguments is always the same.
        """
        return self._num_traces

    def _counted(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` in the contexts, counting its traces."""
        settings = self._jit.keywords
        typed = auto_where_needed(
            fn, self._mesh, settings['out_shardings'], settings['static_argnums']
        )
        inside = in_context(typed, self._mesh, self._logical_axis_rules)

        @functools.wraps(fn)
        def traced(*args: Any) -> Any:
            result = inside(*args)
            self._num_traces += 1
            self._returned = jax.tree.map(lambda _: 0, result)
            return result

        return traced

    def adopt_static_fields(self, args: tuple) -> bool:
        """Gives the shardings the static fields of the arguments, if it is these that differ.

        An optimizer or a bound method that init creates is new in every trace, so a state can have
        other ones than the specs that were made for it.

        Args:
          args: the positional arguments of a call that failed.

        Returns:
          Whether another call with these arguments may succeed.
        """
        settings, fn, in_shardings = self._jit.keywords, self._counted(self._fn), self._in_shardings
        positions, out_shardings = settings['static_argnums'], settings['out_shardings']
        static = {i % len(args) for i in positions} if args else ()
        dynamic = [arg for i, arg in enumerate(args) if i not in static]
        adapted = with_static_fields(in_shardings, out_shardings, dynamic)
        if adapted is None:
            if self._returned is None or has_structure_of(out_shardings, self._returned):
                return False
            # The result differs, and does so in every trace. An inner jit keeps one of them.
            self._num_traces -= 1  # nothing was compiled
            fn = jax.jit(fn, static_argnums=positions)
            if (out_shardings := like(out_shardings, fn.eval_shape(*args))) is None:
                return False
            adapted = in_shardings, out_shardings
        self._in_shardings, out_shardings = adapted
        self._jit = functools.partial(jax.jit, **{**settings, 'out_shardings': out_shardings})
        self._pjitted_fn = self._jit(fn, in_shardings=self._in_shardings)
        self._with_keywords.clear()
        return True

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self._fn)

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Splits a call into arguments with an entry in in_shardings, and other keywords."""
        names = [
            p.name
            for p in self._signature.parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if isinstance(self._in_shardings, tuple):
            laid_out = len(self._in_shardings) + len(self._jit.keywords['static_argnums'])
        else:  # one entry for all arguments, up to the first one that is missing
            named = itertools.takewhile(kwargs.__contains__, names[len(args) :])
            laid_out = len(args) + len(list(named))
        laid_out = max(laid_out, len(args))
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()  # for arguments before one that is given
        keywords = {k: v for k, v in kwargs.items() if k not in names[:laid_out]}
        return bound.args[:laid_out], keywords

    def _keyword_variant(self, num_positional: int) -> Any:
        if num_positional not in self._with_keywords:
            fn, shardings = self._fn, self._in_shardings
            if not isinstance(shardings, tuple):
                static = self._jit.keywords['static_argnums']
                shardings = (shardings,) * (
                    num_positional - sum(i < num_positional for i in static)
                )

            @functools.wraps(fn)
            def call(*args: Any) -> Any:
                return fn(*args[:-1], **args[-1])

            self._with_keywords[num_positional] = self._jit(
                self._counted(call), in_shardings=(*shardings, None)
            )
        return self._with_keywords[num_positional]


def partition_function(
    fn: Callable[..., Any],
    mesh: Mesh,
    logical_axis_rules: LogicalAxisRules = (),
    *,
    in_shardings: Any,
    out_shardings: Any,
    static_argnums: tuple[int, ...] = (),
    donate_argnums: tuple[int, ...] = (),
) -> PartitionedCallable:
    """A function jitted over a mesh that enters its contexts only while it is traced.

    A call costs what a call of the plain `jax.jit` of the function costs, on a mesh of any size.
    To achieve that, the result is a function with attributes: an object with `__call__` would be
    3% slower at dispatching to 8 devices.

    Args:
      fn: the function.
      mesh: the mesh.
      logical_axis_rules: rules for the linen models and `constrain` calls inside.
      in_shardings, out_shardings, static_argnums, donate_argnums: see `jax.jit`.

    Returns:
      The function, with the methods of PjittedFnWithContext: `lower`, `lower_and_compile`,
      `trace`, `eval_shape`, `clear_cache` and `num_traces`.
    """
    partitioned = _Partitioned(
        fn,
        mesh,
        logical_axis_rules,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static_argnums,
        donate_argnums=donate_argnums,
    )
    jitted = partitioned._pjitted_fn

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal jitted
        if kwargs:
            return partitioned(*args, **kwargs)
        try:
            return jitted(*args)
        except ValueError:
            if jitted is partitioned._pjitted_fn and not partitioned.adopt_static_fields(args):
                raise
        jitted = partitioned._pjitted_fn
        return jitted(*args)

    functools.update_wrapper(call, fn)
    methods = ['lower', 'lower_and_compile', 'trace', 'eval_shape']
    methods += ['clear_cache', 'num_traces']
    call.__dict__.update({name: getattr(partitioned, name) for name in methods})
    call.__dict__['_partitioned'] = partitioned
    return cast(PartitionedCallable, call)


def in_context(fn: Callable[..., Any], mesh: Mesh, rules: LogicalAxisRules) -> Callable[..., Any]:
    """`fn` inside the mesh and the rules; jax runs its body only to trace it."""

    @functools.wraps(fn)
    def inside(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), _axis_rules(rules):
            return fn(*args)

    return inside


def check_compiled_once(partitioned: Callable[..., Any]) -> None:
    """Checks that a partitioned function was traced, and therefore compiled, exactly once.

    Raises:
      ValueError: if it was never called, or was compiled again for other shapes or dtypes.
    """
    if not hasattr(partitioned, 'num_traces'):
        raise ValueError(
            f'{partitioned!r} must be a function that PjitPartitioner.partition returned'
        )
    count = partitioned.num_traces()
    if count != 1:
        name = getattr(partitioned, '__name__', 'the function')
        why = 'its arguments change in shape or dtype between calls' if count else 'call it first'
        raise ValueError(f'{name} was compiled {count} times instead of once: {why}')


def to_shardings(resources: Any, mesh: Mesh, *, allow_unconstrained: bool = False) -> Any:
    """The shardings on `mesh` of a pytree of PartitionSpecs, Shardings or None, which replicates.

    Args:
      resources: the pytree.
      mesh: the mesh.
      allow_unconstrained: whether a spec may have UNCONSTRAINED dimensions. It becomes None, with
        which jax.jit keeps or chooses the layout; `lay_out_inside` applies the rest of the spec.

    Raises:
      ValueError: if a leaf is anything else, or if the mesh cannot have a spec.
    """

    def convert(path: Any, leaf: Any) -> Sharding | None:
        if isinstance(leaf, Sharding) and inner_spec(leaf) is None:
            return leaf
        spec = leaf.spec if isinstance(leaf, NamedSharding) else boundary_spec(leaf)
        spec = PartitionSpec() if leaf is None else spec
        where = path_str(path) or 'axis resource'
        if not isinstance(spec, PartitionSpec):
            raise ValueError(
                f'{where}: a resource must be a PartitionSpec, a Sharding or None, not {leaf!r}; '
                'plan.specs has the PartitionSpecs of a state with logical axes'
            )
        check_spec(spec, mesh, where)
        if not allow_unconstrained:
            check_definite(spec, where)
        elif isinstance(inner_spec(leaf), PartitionSpec):
            return None
        if isinstance(leaf, PaddedSpec):
            check_spec(leaf.inside, mesh, where)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(
        convert, resources, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec | Sharding)
    )


@contextlib.contextmanager
def _axis_rules(rules: LogicalAxisRules) -> Iterator[None]:
    from flax.core import spmd  # heavy, and only tracing needs it

    from partitioning.state.traced_boxes import boxes_like_ours

    with (
        own_errors(rules),
        spmd.logical_axis_rules(rules),
        boxes_like_ours(),
        contextlib.ExitStack() as stack,
    ):
        # nnx would lay out variables where they are created. It fails if the rank of a statistic
        # is not the rank of its parameter. Here the shardings decide.
        if 'flax.nnx' in sys.modules:
            stack.enter_context(sys.modules['flax.nnx'].use_eager_sharding(False))
        yield
