"""Groups of jax primitives that are treated alike."""

from __future__ import annotations


def names_in(names: str) -> frozenset[str]:
    """Splits a string of primitive names, which are separated by spaces, into a set."""
    return frozenset(names.split())


ELEMENTWISE = names_in(
    'abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e '
    'bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p '
    'cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow '
    'is_finite le lgamma log log1p log2 logistic lt max min mul mulhi name ne neg nextafter '
    'not one_minus_square or polynomial population_count pow real reduce_precision rem round rsqrt '
    'select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical '
    'sign sin sinh sqrt square stop_gradient sub tan tanh xor random_bits random_unwrap '
    'random_wrap random_fold_in threefry2x32 dce_sink'
)
REDUCTIONS = names_in(
    'reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_xor reduce_prod argmax argmin'
)
SCATTERS = names_in(
    'scatter scatter-add scatter_add scatter-mul scatter_mul scatter-min scatter_min scatter-max '
    'scatter_max scatter_sub'
)
# The result with number n depends only on the operand with number n.
PAIRWISE = names_in('optimization_barrier psum psum_invariant pmax pmin device_put copy')
# The result has the elements of the operand, or some of them: reshaped, cast, moved or sliced.
MOVES = names_in(
    'convert_element_type copy copy_p slice dynamic_slice squeeze reshape transpose device_put '
    'sharding_constraint reduce_precision stop_gradient optimization_barrier expand_dims reshard '
    'mesh_cast pvary pbroadcast name'
)
# The updates of optimizers are made of these.
ARITHMETIC = names_in(
    'add add_any sub mul div max min select_n pow square sqrt neg integer_pow abs sign rsqrt clamp'
)
CONSTRAINTS = names_in('sharding_constraint reshard')
# The names of these have changed between versions of jax.
PSUMS = names_in('psum psum2 psum_invariant')
GATHERS = names_in('all_gather all_gather_invariant')
CHECKPOINTS = names_in('checkpoint remat remat2')
