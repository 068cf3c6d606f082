"""Tokens one after the other from the PyTorch decoder: by recomputation, or with keys and values that are kept."""

import torch
from torch import Tensor

from model.torch_attention import Kept
from model.torch_decoder import Decoder


@torch.no_grad()
def generate(
    decoder: Decoder, prompt_BT: Tensor, new: int, *, cached: bool = True, expanded: bool = False
) -> tuple[Tensor, list[Kept]]:
    """The prompt and ``new`` tokens after it, each the likeliest: (B, T + new); and what is kept then.

    What is kept is of all tokens but the last, which no layer has met; without a cache nothing is.
    ``expanded``: of latent attention every head's key and value are kept, not what these are made from.
    ValueError for no token before or after, and for more than the context.
    """
    prompt, context = prompt_BT.shape[1], decoder.spec.context
    if prompt < 1 or not 1 <= new <= context - prompt + 1:
        raise ValueError(f"expected a token, and 1 to {context - prompt + 1} after {prompt}, got {new}")
    kept = decoder.keep(expanded=expanded) if cached else []
    tokens_BT = more_BT = prompt_BT
    for _ in range(new):
        logits_BTV = decoder(more_BT, kept) if cached else decoder(tokens_BT)
        more_BT = logits_BTV[:, -1:].argmax(-1)
        tokens_BT = torch.cat((tokens_BT, more_BT), 1)
    return tokens_BT, kept
