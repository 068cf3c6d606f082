"""The minimal decoder in JAX: a tree of arrays and a pure function, the twin of ``torch_decoder``.

``init`` makes a nested dict whose paths, joined by dots, are the canonical parameter names; a tied model has one
leaf for its table and no head, and a router's selection bias is a leaf like any other. ``forward`` is jit-able with
the spec static: ``jax.jit(forward, static_argnums=0)``.

Dimension suffixes: B batch, T tokens, V vocabulary, D width.
"""

import math
from collections.abc import Iterator
from itertools import count

import jax
import jax.numpy as jnp
from jax import Array

from accounting.spec import Block, Experts, ModelSpec
from model.jax_attention import attend, init_attention
from model.jax_experts import Routing, feed_experts, init_experts
from model.jax_layers import INITIAL_STD, Params, feed, init_feed_forward, init_linear, init_norms, linear, normalise


def _init_block(spec: Block, width: int, residual_std: float, keys: Iterator[Array]) -> Params:
    around = ("attention_norm", "attention_post_norm", "feed_forward_norm", "feed_forward_post_norm")
    if isinstance(spec.feed_forward, Experts):
        feed_forward = init_experts(spec.feed_forward, width, residual_std, keys)
    else:
        feed_forward = init_feed_forward(spec.feed_forward, width, residual_std, keys)
    return {
        "attention": init_attention(spec.attention, width, residual_std, keys),
        "feed_forward": feed_forward,
        **init_norms({name: (getattr(spec, name), width) for name in around}),
    }


def init(spec: ModelSpec, key: Array) -> Params:
    """Weights drawn as GPT-2 does, in JAX's default float."""
    keys = (jax.random.fold_in(key, tensor) for tensor in count())
    residual_std = INITIAL_STD / math.sqrt(2 * len(spec.blocks))
    params: Params = {
        "embedding": init_linear(next(keys), spec.vocab, spec.width, bias=False),
        "blocks": {
            str(index): _init_block(block, spec.width, residual_std, keys) for index, block in enumerate(spec.blocks)
        },
        **init_norms({"norm": (spec.final_norm, spec.width)}),
    }
    if spec.learned_positions:
        params["position"] = init_linear(next(keys), spec.context, spec.width, bias=False)
    if not spec.tied:
        params["head"] = init_linear(next(keys), spec.vocab, spec.width, bias=False)
    return params


def finish_block(spec: Block, params: Params, x_BTD: Array, attended_BTD: Array) -> tuple[Array, Routing | None]:
    """What follows attention in a layer: x + post(attended), then the same around the feed-forward: (B, T, D).

    And how it was routed, where it has experts.
    """
    x_BTD = x_BTD + normalise(spec.attention_post_norm, params.get("attention_post_norm"), attended_BTD)
    y_BTD, routing = normalise(spec.feed_forward_norm, params.get("feed_forward_norm"), x_BTD), None
    if isinstance(spec.feed_forward, Experts):
        y_BTD, routing = feed_experts(spec.feed_forward, params["feed_forward"], y_BTD)
    else:
        y_BTD = feed(spec.feed_forward, params["feed_forward"], y_BTD)
    return x_BTD + normalise(spec.feed_forward_post_norm, params.get("feed_forward_post_norm"), y_BTD), routing


def run_block(spec: Block, params: Params, x_BTD: Array) -> tuple[Array, Routing | None]:
    """One layer: (B, T, D); and how it was routed, where it has experts."""
    y_BTD = normalise(spec.attention_norm, params.get("attention_norm"), x_BTD)
    return finish_block(spec, params, x_BTD, attend(spec.attention, params["attention"], y_BTD))


def embed(spec: ModelSpec, params: Params, tokens_BT: Array, position_T: Array) -> Array:
    """What the first layer takes: (B, T, D)."""
    x_BTD: Array = params["embedding"]["weight"][tokens_BT]
    if spec.embedding_scale is not None:
        x_BTD = x_BTD * spec.embedding_scale
    return x_BTD + params["position"]["weight"][position_T] if spec.learned_positions else x_BTD


def unembed(spec: ModelSpec, params: Params, x_BTD: Array) -> Array:
    """Logits (B, T, V) of what the last layer gives."""
    x_BTD = normalise(spec.final_norm, params["norm"], x_BTD)
    logits_BTV = linear(params["embedding" if spec.tied else "head"], x_BTD)
    if (cap := spec.logit_softcap) is not None:
        logits_BTV = cap * jnp.tanh(logits_BTV / cap)
    return logits_BTV


def watch(spec: ModelSpec, params: Params, tokens_BT: Array) -> tuple[Array, list[Routing]]:
    """``forward``, and what each router makes of its tokens, layer by layer: balance losses are functions of these."""
    tokens = tokens_BT.shape[1]
    if tokens > spec.context:
        raise ValueError(f"a sequence of {tokens} tokens is longer than the context of {spec.context}")
    x_BTD, routings = embed(spec, params, tokens_BT, jnp.arange(tokens)), []
    for index, block in enumerate(spec.blocks):
        x_BTD, routing = run_block(block, params["blocks"][str(index)], x_BTD)
        if routing is not None:
            routings.append(routing)
    return unembed(spec, params, x_BTD), routings


def forward(spec: ModelSpec, params: Params, tokens_BT: Array) -> Array:
    """Logits (B, T, V) for token ids (B, T); ValueError for more tokens than the context."""
    return watch(spec, params, tokens_BT)[0]
