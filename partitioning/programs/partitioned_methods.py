"""The methods of a partitioned function: calls with keywords, lowering, and what it compiled."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from partitioning.hardware import OptionValue
from partitioning.hardware.compiler_errors import own_compiler_errors
from partitioning.programs.boundary import Boundary
from partitioning.programs.call_errors import find_cause
from partitioning.programs.explicit_axes import auto_where_needed
from partitioning.programs.partitioned import (
    PjittedFnWithContext,
    in_context,
)
from partitioning.programs.recompilation import TraceLog
from partitioning.programs.tree_matching import have_same_paths
from partitioning.rules import LogicalAxisRules
from partitioning.state.same_paths import has_structure_of, like, with_static_fields


class PartitionedMethods(PjittedFnWithContext):
    """The methods of a partitioned function, which also takes keyword arguments.

    jax.jit accepts no keyword arguments together with in_shardings. Those that name a parameter
    with an entry in in_shardings become positional. The others are passed as one last dict, in the
    layout that they already have.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        rules: LogicalAxisRules,
        boundary: Boundary,
        trace_log: TraceLog,
        compiler_options: dict[str, OptionValue] | None = None,
        gradient_rules: LogicalAxisRules | None = None,
    ):
        super().__init__(fn, boundary.mesh, rules)
        self._gradient_rules = gradient_rules
        self.boundary, self.trace_log = boundary, trace_log
        self._fn = fn
        self._jit = functools.partial(
            jax.jit,
            out_shardings=boundary.out_shardings,
            static_argnums=boundary.static,
            donate_argnums=boundary.donated,
            compiler_options=compiler_options,
        )
        self._in_shardings = boundary.in_shardings
        self._out_shardings = boundary.out_shardings
        self._with_keywords: dict[int, Any] = {}
        self._cache_sizes: dict[int, int] = {}
        self._compiled_ahead = False
        self._pjitted_fn = self._jit(self._inside(fn), in_shardings=self._in_shardings)

    def _apply(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            positional, keywords = self._bind(args, kwargs) if kwargs else (args, {})
            try:
                return self._dispatch(method, positional, keywords)
            except ValueError:
                if not self.adopt_static_fields(positional):
                    raise
            return self._dispatch(method, positional, keywords)
        except Exception as error:
            self.raise_cause(error, args, kwargs, abstract=method != '__call__')
            raise

    def raise_cause(
        self,
        error: Exception,
        args: tuple,
        kwargs: Mapping[str, Any],
        *,
        abstract: bool = False,
    ) -> None:
        """Raises our own error if the arguments of a call explain an exception of jax.

        Args:
          error: the exception.
          args, kwargs: the arguments of the call.
          abstract: whether the call takes ShapeDtypeStructs.
        """
        if kwargs and self.boundary.arguments.call_error(args, kwargs) is None:
            args, kwargs = self._bind(args, dict(kwargs))
        found = find_cause(error, self.boundary, self.trace_log, args, kwargs, abstract=abstract)
        if found is not None:
            raise found from None

    def _dispatch(self, method: str, args: tuple, keywords: dict[str, Any]) -> Any:
        self._compiled_ahead |= method in ('lower', 'trace')
        if not keywords:
            return getattr(self._pjitted_fn, method)(*args)
        variant = self._keyword_variant(len(args))
        log, num_traces = self.trace_log, self.trace_log.count
        if method == '__call__' and log.on_recompile == 'error':
            log.check_layouts(keywords)
        result = getattr(variant, method)(*args, keywords)
        if variant._cache_size() != self._cache_sizes.get(len(args), 0):
            # jax may have compiled again without a trace: keywords have no fixed layout.
            log.record_layouts(keywords, traced=log.count > num_traces)
            self._cache_sizes[len(args)] = variant._cache_size()
        return result

    def lower_and_compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        lowered = self.lower(*args, **kwargs)
        with own_compiler_errors(self.boundary.arguments.function, self._mesh):
            return lowered.compile()

    def clear_cache(self) -> None:
        super().clear_cache()
        self._with_keywords.clear()
        self._cache_sizes.clear()
        self._compiled_ahead = False
        self.trace_log.clear()

    def num_traces(self) -> int:
        """The number of times the function was traced: once per kind of arguments."""
        return self.trace_log.count

    def num_compilations(self) -> int:
        """The number of times the function was compiled.

        The layout of positional arguments is always the same, so each trace is compiled once.
        """
        jitted = (self._pjitted_fn, *self._with_keywords.values())
        compiled = self._compiled_ahead or any(fn._cache_size() for fn in jitted)
        return self.trace_log.num_compilations if compiled else 0

    def _inside(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` in the contexts."""
        boundary = self.boundary
        typed = auto_where_needed(fn, self._mesh, self._out_shardings, boundary.static)
        return in_context(typed, self._mesh, self._logical_axis_rules, self._gradient_rules)

    def adopt_static_fields(self, args: tuple) -> bool:
        """Gives the shardings the static fields of the arguments, if it is these that differ.

        An optimizer or a bound method that init creates is new in every trace, so a state can have
        other ones than the specs that were made for it.

        Args:
          args: the positional arguments of a call that failed.

        Returns:
          Whether another call with these arguments may succeed.
        """
        fn, in_shardings, out_shardings = self._fn, self._in_shardings, self._out_shardings
        returned = self.trace_log.result
        dynamic = [args[i] for i in self.boundary.dynamic_indices(len(args))]
        adapted = with_static_fields(in_shardings, out_shardings, dynamic)
        if adapted is None:
            if returned is None or has_structure_of(out_shardings, returned):
                return False
            if not have_same_paths(out_shardings, returned):
                return False
            # The result differs, and does so in every trace. An inner jit keeps one of them.
            self.trace_log.forget_latest()  # nothing was compiled
            fn = jax.jit(fn, static_argnums=self.boundary.static)
            result = jax.jit(self._inside(fn), static_argnums=self.boundary.static)
            if (out_shardings := like(out_shardings, result.eval_shape(*args))) is None:
                return False
            adapted = in_shardings, out_shardings
        self._in_shardings, self._out_shardings = adapted
        self._jit = functools.partial(self._jit, out_shardings=self._out_shardings)
        self._fn = fn
        self._pjitted_fn = self._jit(self._inside(fn), in_shardings=self._in_shardings)
        self._with_keywords.clear()
        self._cache_sizes.clear()
        return True

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Splits a call into arguments with an entry in in_shardings, and other keywords."""
        names = self.boundary.arguments.positional
        if isinstance(self._in_shardings, tuple):
            laid_out = len(self._in_shardings) + len(self.boundary.static)
        else:  # one entry for all arguments, up to the first one that is missing
            named = itertools.takewhile(kwargs.__contains__, names[len(args) :])
            laid_out = len(args) + len(list(named))
        laid_out = max(laid_out, len(args))
        signature = self.boundary.arguments.signature
        if signature is None:
            return args, kwargs
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()  # for arguments before one that is given
        keywords = {k: v for k, v in kwargs.items() if k not in names[:laid_out]}
        return bound.args[:laid_out], keywords

    def _keyword_variant(self, num_positional: int) -> Any:
        if num_positional not in self._with_keywords:
            fn, shardings = self._fn, self._in_shardings
            if not isinstance(shardings, tuple):
                static = sum(i < num_positional for i in self.boundary.static)
                shardings = (shardings,) * (num_positional - static)

            @functools.wraps(fn)
            def call(*args: Any) -> Any:
                return fn(*args[:-1], **args[-1])

            self._with_keywords[num_positional] = self._jit(
                self._inside(call), in_shardings=(*shardings, None)
            )
        return self._with_keywords[num_positional]
