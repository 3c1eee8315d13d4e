"""Matrix products in 8 bits, for models of linen and nnx. Arrays are rounded by qwix."""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from partitioning.hardware import CHIPS, chip_of
from partitioning.products import Rounded, multiply
from train.errors import ConfigError, check_fields, import_optional

ModelType = TypeVar('ModelType')
# Embeddings and output layers, by their usual names.
_OUTER = (r'(.*[/_])?(embed\w*|shared|logits\w*|lm_head|unembed\w*|output|head|classifier)',)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedProducts:
    """Products of activations and weights in 8 bits, and so the products of their gradients.

    Each row of activations and each column of weights has its own scale, its largest absolute value
    in this step, so there is nothing to calibrate or to save. Weights stay in their own dtype. They
    are rounded before devices gather them. Products of two activations, as in attention, and
    convolutions are not changed.

    Usage:
      TransformerConfig(products=QuantizedProducts(dtype='int8'), ...)
      NextToken(model=quantize(MyModel(), QuantizedProducts(dtype='float8')))

    Attributes:
      dtype: 'int8' (v5e, v5p and v6e, and GPUs), or 'float8' (tpu7x, and GPUs from h100): e4m3, and
        e5m2 for gradients. CPUs compute both, slowly.
      except_for: regular expressions. The modules whose whole path matches one of them keep their
        products, by default embeddings and output layers. In the built-in transformer, whose
        embedding and output layer always do, they match paths such as 'attention/query'.
    """

    dtype: Literal['int8', 'float8']
    except_for: Sequence[str] = _OUTER

    def __post_init__(self) -> None:
        check_fields(QuantizedProducts, self, 'QuantizedProducts.')
        patterns = self.except_for
        if not isinstance(patterns, list | tuple):
            raise ConfigError(f'QuantizedProducts.except_for is {patterns!r}: write [{patterns!r}]')
        for pattern in patterns:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ConfigError(
                    f'QuantizedProducts.except_for has {pattern!r}, which is not a regular '
                    f'expression: {error}'
                ) from None
        object.__setattr__(self, 'except_for', tuple(patterns))  # models are hashed
        import_optional('qwix', 'quantization', 'QuantizedProducts')

    def covers(self, path: str) -> bool:
        """Whether the products of the module with this path, such as 'mlp/up', have 8 bits."""
        return not any(re.fullmatch(pattern, path) for pattern in self.except_for)

    def round(self, x: jax.Array, summed: tuple[int, ...], *, gradient: bool) -> Rounded:
        """Rounds an array that a product sums over the dimensions `summed`.

        Raises a ConfigError if the chip of the mesh is not faster in these 8 bits.
        """
        import qwix

        self._check_chip()
        of_float = 'float8_e5m2' if gradient else 'float8_e4m3fn'
        kind = of_float if self.dtype == 'float8' else 'int8'
        kept = [d for d in range(x.ndim) if d not in summed]
        found = qwix.quantize(x.astype(jnp.float32), kind, channelwise_axes=kept)
        return Rounded(found.qvalue, found.scale)

    def _check_chip(self) -> None:
        device = jax.sharding.get_abstract_mesh().abstract_device
        chip = None if device is None else chip_of(device.device_kind)
        if chip is None or chip.speed_of(self.dtype) > 1:
            return
        others = [name for name in ('int8', 'float8') if chip.speed_of(name) > 1]
        chips = ', '.join(name for name, each in CHIPS.items() if each.speed_of(self.dtype) > 1)
        instead = f"write dtype = '{others[0]}'" if others else 'remove it'
        raise ConfigError(
            f'QuantizedProducts.dtype is {self.dtype!r}, but {chip.name} does not multiply it '
            f'faster than bfloat16 ({chips} do): {instead}'
        )


def quantize(model: ModelType, products: QuantizedProducts) -> ModelType:
    """Returns a model whose products have 8 bits, with the same parameters.

    Args:
      model: a linen module, or a function or class that creates an nnx module from `nnx.Rngs`.
      products: which products. Module paths are as in the parameters, such as 'layers_0/mlp/up'.

    Raises:
      ConfigError: if the model is neither, or has a setting of its own.
    """
    import flax.linen as nn

    settings = getattr(model, 'config', None)
    if hasattr(settings, 'products'):
        kind = type(settings).__name__
        raise ConfigError(f'{type(model).__name__} needs no quantize(): set {kind}.products')
    if type(model).__module__.startswith('train.models.t5'):
        raise ConfigError(f'products of {type(model).__name__} cannot have 8 bits: remove quantize')
    if isinstance(model, nn.Module):
        return _intercepted(model, products)
    if callable(model):
        return _CreateQuantized(model, products)  # type: ignore[return-value]
    raise ConfigError(
        f'quantize gets a model of type {type(model).__name__}: it must be a linen module, or a '
        'function that creates an nnx module, such as lambda rngs: Mlp(rngs=rngs)'
    )


@dataclasses.dataclass(frozen=True)
class _CreateQuantized:
    create: Callable[[Any], Any]
    products: QuantizedProducts

    def __call__(self, rngs: Any) -> Any:
        # The option keeps qwix from calling the module, which has nothing to calibrate.
        return _intercepted(self.create(rngs), self.products, skip_nnx_init=True)


def _intercepted(module: Any, products: QuantizedProducts, **options: Any) -> Any:
    """Returns a module in whose calls products of the functions of jax have 8 bits."""
    import qwix

    class Provider(qwix.QuantizationProvider):
        def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
            own = {'jax.lax.dot_general': self.dot_general, 'jax.numpy.einsum': self.einsum}
            return super().get_intercept_map() | own

        def dot_general(
            self, x: jax.Array, w: jax.Array, dimension_numbers: Any, *args: Any, **kwargs: Any
        ) -> jax.Array:
            _, batch = dimension_numbers
            rule, _ = self._get_current_rule_and_op_id('dot_general', only_rule=True)
            # Products of two activations count products, as attention counts heads. Products that
            # are rounded already come here again: jax traces those of scanned layers later.
            if rule.weight_qtype is None or batch[0] or not _are_wide(x, w):
                return jax.lax.dot_general(x, w, dimension_numbers, *args, **kwargs)
            return _multiply(products, x, w, dimension_numbers)

        def einsum(self, equation: str, *operands: jax.Array, **kwargs: Any) -> jax.Array:
            # Otherwise, jax would keep the trace with the products as they are.
            with jax.disable_jit():
                kwargs['_dot_general'] = self.dot_general
                return jnp.einsum(equation, *operands, **kwargs)

    kept = [qwix.QuantizationRule(module_path=pattern) for pattern in products.except_for]
    rules = [*kept, qwix.QuantizationRule(weight_qtype='int8')]
    return qwix.quantize_model(module, Provider(rules), **options)


def _are_wide(*arrays: jax.Array) -> bool:
    return all(jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1 for x in arrays)


def _multiply(
    products: QuantizedProducts, x: jax.Array, w: jax.Array, dimension_numbers: Any
) -> jax.Array:
    """The same as `jax.lax.dot_general` without dimensions that count products."""
    (of_x, of_w), _ = dimension_numbers
    letters = iter(string.ascii_letters)
    rows = [next(letters) for _ in range(x.ndim)]
    weights = [next(letters) for _ in range(w.ndim)]
    for d, e in zip(of_x, of_w, strict=True):
        weights[e] = rows[d]
    result = [one for one in (*rows, *weights) if (one in rows) != (one in weights)]
    equation = f'{"".join(rows)},{"".join(weights)}->{"".join(result)}'
    names: Any = [None] * x.ndim, [None] * w.ndim
    return multiply(equation, x, w, *names, gradient_dtype=w.dtype, rounding=products)
