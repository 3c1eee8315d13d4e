"""The transformer of plain_transformer.py in PyTorch, compiled: a peer of train_step.py on a GPU.

It has the same sizes, norms, rotary positions and gated MLP, float32 parameters with products in
bfloat16, fused AdamW, and `torch.compile`. Layers are modules in a list, as PyTorch's are.

Suffixes of array names: B batch, L length, D embed, H heads, N head_dim, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from plain_transformer import Sizes
from torch import nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    """Attention and a gated MLP, each with its norm."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        d, f = sizes.embed_dim, sizes.mlp_dim
        self.heads = (sizes.num_heads, sizes.head_dim)
        width = sizes.num_heads * sizes.head_dim
        self.attention_norm = nn.RMSNorm(d, eps=1e-6)
        self.mlp_norm = nn.RMSNorm(d, eps=1e-6)
        self.query = nn.Linear(d, width, bias=False)
        self.key = nn.Linear(d, width, bias=False)
        self.value = nn.Linear(d, width, bias=False)
        self.out = nn.Linear(width, d, bias=False)
        self.gate = nn.Linear(d, f, bias=False)
        self.up = nn.Linear(d, f, bias=False)
        self.down = nn.Linear(f, d, bias=False)

    def forward(self, x_BLD: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x_BLD)
        q, k, v = (
            product(normed).unflatten(-1, self.heads).transpose(1, 2)
            for product in (self.query, self.key, self.value)
        )
        attended_BHLN = F.scaled_dot_product_attention(
            rotate(q, sin, cos), rotate(k, sin, cos), v, is_causal=True
        )
        x_BLD = x_BLD + self.out(attended_BHLN.transpose(1, 2).flatten(-2))
        normed = self.mlp_norm(x_BLD)
        return x_BLD + self.down(F.silu(self.gate(normed)) * self.up(normed))


class PlainTransformer(nn.Module):
    """A decoder; `forward` returns logits, [batch, length, vocab]."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.embed_dim)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_layers))
        self.final_norm = nn.RMSNorm(sizes.embed_dim, eps=1e-6)
        self.output = nn.Linear(sizes.embed_dim, sizes.vocab_size, bias=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=sizes.embed_dim**-0.5)

    def forward(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        half = self.sizes.head_dim // 2
        frequency_N = 10_000.0 ** (-torch.arange(half, device=tokens_BL.device) / half)
        angle_LN = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)[:, None] * frequency_N
        sin, cos = torch.sin(angle_LN), torch.cos(angle_LN)
        x_BLD = self.embedding(tokens_BL).bfloat16() * self.sizes.embed_dim**0.5
        for layer in self.layers:
            if self.sizes.remat == 'full':
                x_BLD = checkpoint(layer, x_BLD, sin, cos, use_reentrant=False)
            else:
                x_BLD = layer(x_BLD, sin, cos)
        return self.output(self.final_norm(x_BLD))


def rotate(x_BHLN: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Turns pairs of halves by the angles of their positions."""
    first, second = x_BHLN.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x_BHLN.dtype)


def make_torch_step(sizes: Sizes, device: str) -> Callable[[dict[str, Any]], torch.Tensor]:
    """Returns a function of a batch of numpy arrays that trains a step, and returns the loss."""
    model = PlainTransformer(sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)

    @torch.compile
    def loss_of(inputs_BL: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits_BLV = model(inputs_BL)
        return F.cross_entropy(logits_BLV.float().flatten(0, 1), targets_BL.flatten())

    def step(batch: dict[str, Any]) -> torch.Tensor:
        inputs, targets = (
            torch.from_numpy(batch[name]).to(device, torch.long, non_blocking=True)
            for name in ('decoder_input_tokens', 'decoder_target_tokens')
        )
        loss = loss_of(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
