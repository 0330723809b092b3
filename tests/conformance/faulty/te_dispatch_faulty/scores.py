# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of attention. What each does wrong: `te_dispatch_faulty.catalogue`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.ops.results import Saved
from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_torch import scores as parts
from te_dispatch_torch.attention_unfused import _bias_gradient, _by_group
from te_dispatch_torch.sequences import from_pages


def _with_scores(change: Callable[[parts.Setting, parts.Scores], parts.Scores]) -> Any:
    def scores_of(setting: parts.Setting) -> parts.Scores:
        return change(setting, parts.scores_of(setting))

    return swapped(("attention_unfused", "scores_of", scores_of))


def gives_nan_in_masked_rows(call: Call) -> Any:
    with _with_scores(lambda _, s: s._replace(p=torch.where(s.empty, torch.nan, s.p))):
        return call.sound()


def _hiding(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    names = ("spec", "attn_mask", "q", "k", "len_q", "len_kv", "offset")
    right = parts._hidden

    def hidden(*given: Any) -> Any:
        return right(**change(dict(zip(names, given, strict=True))))

    return swapped(("scores", "_hidden", hidden))


def sees_the_next_token(call: Call) -> Any:
    with _hiding(lambda g: {**g, "offset": g["offset"] + 1 if "causal" in g["spec"].mask else g["offset"]}):
        return call.sound()


def aligns_to_top_left(call: Call) -> Any:
    with swapped(("scores", "_offset", lambda *_: 0)):
        return call.sound()


def widens_window(call: Call) -> Any:
    def wider(given: dict[str, Any]) -> dict[str, Any]:
        left, right = given["spec"].band
        return {**given, "spec": given["spec"]._replace(band=(left + 1 if left >= 0 else left, right))}

    with _hiding(wider):
        return call.sound()


def maps_groups_round_robin(call: Call) -> Any:
    q, k, v = call["q"], call["k"], call["v"]
    if not isinstance(k, torch.Tensor):
        return call.sound()
    heads = torch.arange(q.shape[-2], device=q.device) % k.shape[-2]
    return call.sound(k=k.index_select(-2, heads), v=v.index_select(-2, heads), packing=None)


def gives_lse_in_log2(call: Call) -> Any:
    made = call.sound()
    if made.lse is not None:
        made.lse.mul_(math.log2(math.e))
    return made


def takes_slopes_of_other_heads(call: Call) -> Any:
    right = parts._alibi

    def alibi(slopes: Any, q: torch.Tensor, k: torch.Tensor, offset: Any) -> torch.Tensor:
        if slopes is None:
            slopes = torch.exp2(-8.0 * torch.arange(1, q.shape[1] + 1, device=q.device) / q.shape[1])
        return right(slopes, q, k, offset)

    with swapped(("scores", "_alibi", alibi)):
        return call.sound()


def reads_beyond_sequences(call: Call) -> Any:
    with _hiding(lambda g: {**g, "len_kv": None}):
        return call.sound()


def reads_pages_in_order(call: Call) -> Any:
    def in_order(x: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
        count = torch.arange(page_table.numel(), device=x.device).view(page_table.shape)
        return from_pages(x, count % x.shape[0])

    with swapped(("scores", "from_pages", in_order)):
        return call.sound()


def ignores_gaps(call: Call) -> Any:
    return call.sound(cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None)


def drops_without_rescaling(call: Call) -> Any:
    with _with_scores(lambda _, s: s._replace(keep=None if s.keep is None else (s.keep > 0).float())):
        return call.sound()


def scales_bias(call: Call) -> Any:
    return call.sound(bias_type="pre_scale") if call["bias_type"] == "post_scale" else call.sound()


def ignores_sink(call: Call) -> Any:
    return call.sound(softmax_type="vanilla", softmax_offset=None)


def takes_max_logit_of_masked(call: Call) -> Any:
    def unmasked(setting: parts.Setting, scores: parts.Scores) -> parts.Scores:
        return scores._replace(z=parts.scores_of(setting._replace(hidden=None)).z)

    with _with_scores(unmasked):
        return call.sound()


def forgets_scale(call: Call) -> Any:
    made = call.sound()
    if isinstance(made.dq, torch.Tensor):
        scale = call["q"].shape[-1] ** -0.5 if call["softmax_scale"] is None else call["softmax_scale"]
        made.dq.div_(scale)
        made.dk.div_(scale)
    return made


def replays_other_dropout(call: Call) -> Any:
    state = call["rng_state"]
    return call.sound(rng_state=None if state is None else state + 1)


def negates_offset_gradient(call: Call) -> Any:
    made = call.sound()
    if made.dsoftmax_offset is not None:
        made.dsoftmax_offset.neg_()
    return made


def forgets_cap_gradient(call: Call) -> Any:
    with _with_scores(lambda _, s: s._replace(capped=None)):
        return call.sound()


def takes_first_of_broadcast(call: Call) -> Any:
    def first(grad: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        for axis in (0, 1):
            if bias.shape[axis] == 1:
                grad = grad.narrow(axis, 0, 1)
        return _bias_gradient(grad, bias)

    with swapped(("attention_unfused", "_bias_gradient", first)):
        return call.sound()


def keeps_gradient_of_one_head(call: Call) -> Any:
    def shared(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x if x.shape[1] == like.shape[1] else _by_group(x, like.shape[1])[:, :, 0]

    with swapped(("attention_unfused", "_shared", shared)):
        return call.sound()


def returns_gradients_apart(call: Call) -> Any:
    return call.sound(packing=None)


def masks_without_window(call: Call) -> Any:
    return call.sound(window=None)


def saves_probabilities(call: Call) -> Any:
    made = call.sound()
    if made.saved is None:
        return made
    return made._replace(saved=Saved(made.saved.implementation, made.saved.format, (made.lse.clone(),)))


def reads_what_others_do_not_save(call: Call) -> Any:
    return call.sound(lse=call["saved"].tensors[0])
