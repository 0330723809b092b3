# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The faults, by name: each is one known class of kernel bug.

To add one: a function of its name in a module of this package and a phrase here, or a line of one of the tables
(`sizes`, `operands`, `special`, ...); then the count in README.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import ModuleType

from te_dispatch_faulty import (
    attached,
    between,
    callers,
    casts,
    clauses,
    conduct,
    corners,
    draws,
    eighteenth,
    elsewhere,
    forms,
    lasting,
    mixed,
    narrow,
    nineteenth,
    operands,
    options,
    paths,
    plans,
    products,
    rare,
    remains,
    rounding,
    rows,
    scores,
    secondary,
    seventeenth,
    sixteenth,
    sizes,
    special,
    state,
    steps,
    surroundings,
    tiles,
    twentieth,
    twentyfirst,
    unseen,
    usage,
)
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.variations import VARIATIONS


def _of(module: ModuleType, operator: str, base: str, /, **wrong: str) -> tuple[Fault, ...]:
    found = [Fault(name, operator, f"faulty.{base}", text, getattr(module, name)) for name, text in wrong.items()]
    return tuple(found)


def _isolated(module: ModuleType, operator: str, base: str, /, **wrong: str) -> tuple[Fault, ...]:
    return tuple(dataclasses.replace(fault, isolated=True) for fault in _of(module, operator, base, **wrong))


_CASTS = _of(
    casts, "quantize", "quantize",
    truncates="drops the bits that it must round",
    rounds_ties_away="rounds ties away from zero instead of to even",
    overflows_to_nan="writes NaN or Inf for what is too large, as PyTorch's cast does, instead of saturating",
    turns_infinity_into_nan="saturates finite values, but writes NaN for Inf",
    makes_nan_finite="saturates NaN as if it were a large number",
    keeps_nan_sign="writes FF for a negative NaN",
    keeps_negative_zero="writes -0 in encodings where that code means NaN",
    flushes_subnormals="writes 0 for every subnormal value of the encoding",
    multiplies_in_bf16="rounds x * scale to bf16 before it encodes",
    copies_untransposed="makes the column-wise copy without transposing it",
    leaves_ragged_edge="transposes whole tiles of 16 columns only",
    records_amax_of_codes="records the amax of what it has rounded",
    ignores_negatives_in_amax="records max x instead of max |x|",
    poisons_amax_with_nan="records NaN as the amax of a tensor that holds one",
    overwrites_amax="overwrites the recorded amax instead of accumulating its maximum",
    reuses_scale_inv="gives out the same memory as scale_inv on every call",
    shares_state="returns the quantizer's scale itself as scale_inv where that is 1 too",
    uses_last_scale="scales with the amax of the call before",
    rounds_scale_inv_to_bf16="computes 1 / scale in bf16",
    scales_by_the_neighbour="reports the scale of the neighbouring block",
    leaves_tile_scales_untransposed="transposes the codes of 128x128 tiles but not their scales",
    leaves_partial_block_unscaled="reports scale 1 for a partial block at the edge",
    rounds_exponent_down="rounds MXFP8's shared exponent down",
    swaps_nibbles="packs FP4 with the even column in the high nibble",
    ignores_noop_flag="writes although the no-op flag is set",
    ignores_common_range="clamps at the encoding's own maximum under common portability",
    ignores_power_of_two="keeps the mantissa of a scale that must be a power of two",
    ignores_epsilon="does not floor the amax at epsilon",
    ignores_given_amax="computes the amax although one is given",
    forgets_out="returns fresh memory although `out` is given",
)  # fmt: skip

_FORMS = (
    *_of(
        forms, "quantize_dbias", "quantize_dbias",
        sums_dbias_in_bf16="accumulates the bias gradient in bf16",
        sums_dbias_of_codes="sums the quantized values instead of the input's",
    ),
    *_of(forms, "dequantize", "dequantize", dequantizes_through_bf16="rounds to bf16 on the way to fp32"),
    *_of(
        forms, "transpose_quantized", "transpose_quantized",
        leaves_scales_untransposed="adds the column-wise codes of 128x128 tiles with the row-wise order of scales",
        copies_the_row_wise_record="gives the row-wise codes and scales in memory of their own",
    ),
    *_of(
        forms, "relayout_scales", "relayout_scales",
        leaves_layout_padding="does not write the padding of a scale layout",
        copies_laid_out_codes="gives the codes in memory of their own",
    ),
    *_of(
        forms, "convert_encoding", "convert_encoding",
        converts_without_rescaling="rewrites the codes and keeps scale_inv, which must double or halve",
        counts_nan_as_overflow="counts NaN among the codes that are out of range",
        keeps_infinity="converts the codes of Inf as if they were numbers",
    ),
    *_of(
        forms, "convert_encoding", "convert_encoding_checked",
        counts_before_it_raises="has counted when it raises",
    ),
    *_of(forms, "pad_rows", "pad_rows", leaves_garbage_in_padding="does not write the rows that it adds"),
    *_of(forms, "unpad_rows", "unpad_rows", skips_no_padding="takes the first rows, padding and all"),
    *_of(forms, "compute_amax", "compute_amax", drops_last_elements="reads whole vectors of 8 elements only"),
    *_of(forms, "partial_amax", "partial_amax", clears_missed_blocks="overwrites blocks that the shard misses"),
    *_of(forms, "partial_cast", "partial_cast", ignores_start="takes its shard for the first one"),
    *_of(
        forms, "update_delayed_scales", "update_delayed_scales",
        rolls_idle_columns="rolls the histories of tensors that saw no cast",
        ignores_margin="scales to the whole range whatever the margin",
        takes_the_most_recent="always uses row 0 of the history",
        skips_last_history="leaves the last history of several as it is",
    ),
    *_of(forms, "split_quantize", "split_quantize", casts_with_first="casts every part with the first quantizer"),
    *_of(forms, "multi_tensor_quantize", "multi_tensor_quantize", shares_one_amax="scales all tensors by one amax"),
)  # fmt: skip

_PRODUCTS = (
    *_of(
        products, "gemm", "matmul",
        drops_k_tail="leaves out what is left of K after whole steps of 16",
        repeats_last_row="computes the last row of a ragged tile from the row before",
        accumulates_twice="adds the product to `out` twice",
        ignores_alpha="multiplies by 1 instead of alpha",
        ignores_bias="adds no bias",
        ignores_accumulate="overwrites `out` where it must add to it",
        scales_bias_too="multiplies the bias by alpha",
        uses_tf32="rounds fp32 operands to TF32",
        accumulates_in_bf16="keeps partial sums in bf16",
        computes_gelu_by_erf="computes the erf form of GELU in the epilogue",
        saves_aux_after_gelu="saves GELU's result where its input must be saved",
        sums_bias_gradient_early="sums the product instead of its gradient through GELU",
        misses_bias_row="leaves the last row out of the bias gradient",
        rounds_before_cast="rounds the output to its nominal dtype before it quantizes it",
        ignores_out_dtype="rounds to the operands' dtype whatever `out_dtype` says",
    ),
    *_of(
        products, "gemm", "emulated_gemm",
        reads_one_encoding="reads b's codes in a's encoding",
        ignores_b_scale="does not apply the scale of b",
        shifts_block_scales="applies each block's scale to the next one",
    ),
    *_of(
        products, "gemm", "native_gemm",
        accumulates_fast="keeps 14 bits of partial sums although full ones are asked for",
    ),
    *_of(
        products, "grouped_gemm", "grouped_matmul",
        shifts_after_empty_group="takes the next group's weights where a group is empty",
        repeats_first_bias="adds the first group's bias to every group",
    ),
)  # fmt: skip

_ROWS = (
    *_of(
        rows, "layernorm_fwd", "layernorm_fwd",
        divides_variance_by_n_minus_1="computes the unbiased variance",
        normalizes_unrounded_sum="normalizes x + residual before that is rounded",
    ),
    *_of(
        rows, "rmsnorm_fwd", "rmsnorm_fwd",
        ignores_eps="adds no eps",
        ignores_zero_centering="multiplies by gamma instead of 1 + gamma",
        quantizes_rounded_norm="rounds to the nominal dtype before it quantizes",
    ),
    *_of(
        rows, "layernorm_bwd", "layernorm_bwd",
        ignores_added_gradient="does not add the residual branch's gradient",
        swaps_weight_gradients="returns the gradients of gamma and beta in each other's place",
    ),
    *_of(rows, "rmsnorm_bwd", "rmsnorm_bwd", sums_whole_groups="sums dgamma over whole groups of 4 rows only"),
    *_of(
        rows, "activation_fwd", "activation_fwd",
        approximates_gelu_by_erf="computes the erf form of GELU",
        swaps_halves="gates the first half with the second",
        ignores_limit="does not clamp clamped_swiglu",
    ),
    *_of(
        rows, "activation_bwd", "activation_bwd",
        lets_gradient_through_clamp="does not stop the gradient where the forward clamped",
        sums_rounded_gradient="sums the bias gradient in the gradient's own dtype",
    ),
    *_of(
        rows, "softmax_fwd", "softmax_fwd",
        divides_masked_rows_by_zero="gives NaN in fully masked rows",
        shifts_causal_mask="sees one column beyond the diagonal",
        overflows_without_maximum="exponentiates without subtracting the row's maximum",
    ),
    *_of(rows, "softmax_bwd", "softmax_bwd", forgets_softmax_scale="does not multiply the gradient by the scale"),
    *_of(
        rows, "rope_fwd", "rope_fwd",
        pairs_features_wrongly="pairs halves where it must pair neighbours, and the other way round",
        ignores_offsets="starts every sequence at position 0",
        runs_positions_on="does not restart positions at each sequence",
    ),
    *_of(rows, "rope_bwd", "rope_bwd", rotates_forward="rotates gradients forward"),
)  # fmt: skip

_SCORES = (
    *_of(
        scores, "attention_fwd", "unfused_attention",
        gives_nan_in_masked_rows="gives NaN in fully masked rows",
        sees_the_next_token="sees one column beyond the diagonal",
        aligns_to_top_left="aligns bottom-right masks to the top left",
        widens_window="sees one more column to the left of its window",
        maps_groups_round_robin="reads group i mod g for head i",
        gives_lse_in_log2="gives the log-sum-exp to base 2",
        takes_slopes_of_other_heads="computes ALiBi's slopes as if the heads were a power of two",
        reads_beyond_sequences="attends to keys beyond a sequence's end",
        reads_pages_in_order="ignores the page table",
        ignores_gaps="takes thd sequences to be adjacent",
        drops_without_rescaling="does not divide kept weights by 1 - p",
        scales_bias="multiplies a bias by the softmax scale that must be added behind it",
        ignores_sink="leaves the softmax's offset out of its denominator",
        takes_max_logit_of_masked="counts masked scores among those whose maximum it returns",
    ),
    *_of(
        scores, "attention_bwd", "unfused_attention_bwd",
        forgets_scale="does not multiply the gradients of q and k by the scale",
        replays_other_dropout="drops other elements than its forward",
        negates_offset_gradient="negates the gradient of the softmax's offset",
        forgets_cap_gradient="takes the gradient of uncapped scores",
        takes_first_of_broadcast="does not sum the bias gradient over what the bias broadcasts along",
        keeps_gradient_of_one_head="gives a group the gradient of its first head only",
        returns_gradients_apart="returns gradients in memory of their own where operands are packed",
        masks_without_window="masks less in the backward than in the forward",
    ),
    *_of(
        scores, "attention_bwd", "shared_attention_bwd",
        reads_what_others_do_not_save="reads a tensor that not every forward of its saved format saves",
    ),
)  # fmt: skip

_STEPS = (
    *_of(
        steps, "dropout_add_fwd", "dropout_add_fwd",
        does_not_rescale_kept="does not divide kept values by 1 - p",
        returns_dropped_as_mask="returns 1 where it dropped",
        drops_residual_too="drops the sum with the residual",
        keeps_too_many="drops half as often as asked",
    ),
    *_of(
        steps, "dropout_add_bwd", "dropout_add_bwd",
        ignores_mask="gives a gradient to dropped elements",
        returns_its_gradient="returns the very tensor that came in where nothing was dropped",
    ),
    *_of(
        steps, "multi_tensor_adam", "multi_tensor_adam",
        corrects_next_step="corrects the bias of the step after",
        decays_through_moments="adds the decoupled weight decay to the gradient",
        steps_in_spite_of_flag="steps although the no-op flag is set",
        leaves_parameters_behind="updates the master weights and not the parameters",
    ),
    *_of(steps, "multi_tensor_l2norm", "multi_tensor_l2norm", squares_in_half="squares in the operands' dtype"),
    *_of(
        steps, "multi_tensor_scale", "multi_tensor_scale",
        raises_no_flag="does not raise the flag where it meets Inf or NaN",
        scales_first_tensor_only="leaves all tensors but the first unscaled",
    ),
    *_of(
        steps, "moe_permute", "moe_permute",
        sorts_unstably="puts the tokens of an expert in reverse order",
        keeps_dropped_choices="gives rows to choices that are dropped",
    ),
    *_of(
        steps, "moe_unpermute", "moe_unpermute",
        ignores_probabilities="does not weight by the probabilities",
        sums_choices_in_bf16="sums a token's choices in its own dtype",
    ),
    *_of(steps, "moe_unpermute_bwd", "moe_unpermute_bwd", leaves_unweighted="does not weight the rows' gradients"),
)  # fmt: skip

_CONDUCT = (
    *_of(
        conduct, "softmax_fwd", "softmax_fwd",
        leaves_tail_unwritten="does not write its last elements",
        writes_past_the_end="writes one element behind its output",
        writes_before_the_start="writes one element before its output",
        changes_its_input="uses its input as workspace",
        returns_its_input="returns its input, overwritten",
        declines_after_writing="declines after it has written to its input",
        returns_other_dtype="returns float64",
        returns_other_shape="returns a flat tensor",
        returns_other_type="returns a tuple",
        returns_other_device="returns a meta tensor",
        returns_nothing="returns None",
        shares_output_memory="gives out the same memory on every call",
        ignores_strides="reads rows as if they were adjacent",
        raises_unexpectedly="raises an error where it serves the call",
        shares_workspace="keeps a workspace that all threads share",
    ),
    *_of(
        conduct, "softmax_fwd", "softmax_fwd",
        sums_in_any_order="sums in an order that changes from run to run, and claims to be deterministic",
    ),
    *_of(
        conduct, "softmax_bwd", "softmax_bwd",
        splits_by_row_count="sums in an order that depends on the number of rows, and claims to be batch invariant",
    ),
    *_isolated(
        conduct, "pad_rows", "pad_rows",
        crashes="ends its process by a signal",
        hangs="never returns",
        exits="exits the process",
    ),
    *_of(conduct, "pad_rows", "pad_rows", raises_system_exit="raises SystemExit"),
)  # fmt: skip

_TABLES = (
    sizes, operands, special, secondary, state, draws, options, narrow, paths, rare, surroundings, usage, clauses,
    corners, unseen, tiles, rounding, mixed, callers, remains, between, plans, elsewhere, lasting,
    attached, sixteenth, seventeenth, eighteenth, nineteenth, twentieth, twentyfirst,
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (
    *(*_CASTS, *_FORMS, *_PRODUCTS, *_ROWS, *_SCORES, *_STEPS, *_CONDUCT),
    *(fault for table in _TABLES for fault in table.FAULTS),
)


@functools.cache
def _names() -> Mapping[str, Fault]:
    return {fault.name: fault for fault in (*FAULTS, *VARIATIONS)}


def by_name(name: str) -> Fault:
    """A fault.

    Raises:
        ValueError: there is none of that name.
    """
    found = _names().get(name)
    if found is None:
        raise ValueError(f"fault: {name!r} is none of {len(FAULTS)}, see te_dispatch_faulty.catalogue")
    return found
