# Copyright 2026 The vanilla-transformer authors. Licensed under the Apache License, Version 2.0.
"""What PyTorch computes too, but slower or with more memory: linear maps, dropout (§5.4), label smoothing (§5.4).

Importing it also changes what glibc does with freed memory. benchmarks/ measures what they are worth.
Shapes: N tokens, D = d_model, V = vocab_size.
"""

import math
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary


# -- Memory -----------------------------------------------------------------------------------------------------------

# glibc maps blocks beyond a limit afresh each time, and gives free memory beyond twice that limit back to the system.
# Fresh pages take time. The limit rises to the largest block given back, if that is, with its header, at most 32 MB
# (mallopt(3), M_MMAP_THRESHOLD). Here is one, of which no page is touched.
torch.empty(2**25 - 2**16, dtype=torch.uint8, device="cpu")


# -- Linear maps ------------------------------------------------------------------------------------------------------

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
WORTHWHILE = 2**18  # multiplications, below which calling oneDNN costs more than it saves


def onednn_multiplies(x):
    """Whether oneDNN can take products of x: float32 on a CPU.

    PyTorch leaves these to MKL, which uses AVX-512 on Intel's processors only; oneDNN uses it on AMD's too.
    """
    return (
        ONEDNN
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def product(x, weight, bias=None):
    """x W^T + b: (..., D), (V, D), (V,) -> (..., V), without gradients."""
    if x.numel() * weight.shape[0] < WORTHWHILE or x.dim() == 1 or not onednn_multiplies(x):
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # as torch.compile calls it


def side_by_side(parts, heads, dim=-1):
    """Join tensors along a dimension that is divided among heads: all parts of the first head, then the second, ..."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([x.unflatten(dim, (heads, -1)) for x in parts], dim).flatten(dim - 1, dim)


class PackedProduct:
    """`product` with weights (W_i, D) side by side for many x (..., D), in the layout that oneDNN multiplies fastest.

    The layout, a second copy of the weights, is kept for the next call with them. As nothing tells when they were
    changed, say through `.data`, their products with a fixed vector are compared, which is a fraction of the work.
    What is too little to change a rounded sum is missed.
    """

    kept = WeakTensorKeyDictionary()  # first weight -> (heads and shapes, products with the vector, layout)

    def __init__(self, weights, bias, heads=1):
        self.weights, self.bias, self.heads = weights, bias, heads
        width, D = sum(map(len, weights)), weights[0].shape[1]
        # A single row gains nothing.
        self.least = max(WORTHWHILE // width, 1 + D) if onednn_multiplies(weights[0]) else math.inf

    def __call__(self, x):
        if x.numel() < self.least:
            return product(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    @cached_property
    def weight(self):
        return side_by_side(self.weights, self.heads, dim=-2)

    @cached_property
    def packed(self):
        """The weights in oneDNN's layout: what was kept, if it is still right."""
        vector = torch.arange(1.0, 1 + self.weights[0].shape[1])[None].sin()
        vector += vector.sign()  # away from 0, so that every column counts
        form = self.heads, *(weight.shape for weight in self.weights)
        products = [product(vector, weight) for weight in self.weights]
        before, earlier, packed = self.kept.get(self.weights[0], (None, [], None))
        if before != form or not all(map(torch.equal, earlier, products)):
            packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, 2)  # for 2 rows as for any number but one
            self.kept[self.weights[0]] = form, products, packed
        return packed


class Product(torch.autograd.Function):
    """`product` with gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, weight), wanted, dy = ctx.saved_tensors, ctx.needs_input_grad, dy.contiguous()
        rows = dy.flatten(0, -2)
        dx = product(dy, weight.t()) if wanted[0] else None
        dweight = product(rows.t(), x.flatten(0, -2).t()) if wanted[1] else None
        return dx, dweight, rows.sum(0) if wanted[2] else None


class Linear(nn.Linear):
    """nn.Linear, faster on CPUs. Weights that are no plain parameters (sharded, quantised) are left to torch."""

    def forward(self, x):
        small = x.numel() * self.out_features < WORTHWHILE or x.dim() == 1
        if small or type(x) is not torch.Tensor or type(self.weight) is not nn.Parameter or not onednn_multiplies(x):
            return super().forward(x)
        multiply = Product.apply if torch.is_grad_enabled() else product
        return multiply(x, self.weight, self.bias)


# -- 5.4 Residual Dropout ---------------------------------------------------------------------------------------------


class IntegerDropout(torch.autograd.Function):
    """Dropout that compares 16 random bits an element, four to a draw: on CPUs PyTorch draws one number for each."""

    @staticmethod
    def forward(ctx, x, p):
        n = x.numel()
        bits = torch.empty((n + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        keep = torch.ge(bits[:n].view(x.shape), round(p * 2**16) - 2**15, out=torch.empty_like(x)).mul_(1 / (1 - p))
        ctx.save_for_backward(keep)
        return x * keep

    @staticmethod
    def backward(ctx, dy):
        (keep,) = ctx.saved_tensors
        return dy * keep, None


def dropout(x, p, training):
    """Zero each element with probability p in training and scale the others by 1 / (1 - p)."""
    if not training or p == 0:
        return x
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        return IntegerDropout.apply(x, p)
    return F.dropout(x, p)


# -- 5.4 Label Smoothing ----------------------------------------------------------------------------------------------


class SmoothedCrossEntropy(torch.autograd.Function):
    """Sum over tokens of (1 - eps) * -log p(y) + eps / V * sum_v -log p(v), with the logits of a few rows at a time.

    The gradient is taken while these are at hand, so neither logits nor probabilities of all tokens (N x V) ever exist
    and no product is computed twice. On CPUs each step overwrites its input: fresh pages cost as much as their use.
    """

    ROWS = 512  # enough that adding up (D, V) gradients costs little beside the products

    @staticmethod
    def forward(ctx, x, weight, labels, eps):
        """x (N, D), weight (V, D), labels (N,) -> scalar float32."""
        (V, D), rows, wanted = weight.shape, SmoothedCrossEntropy.ROWS, ctx.needs_input_grad[:2]
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        dx = torch.empty_like(x) if wanted[0] else None
        dweight = torch.zeros(D, V, dtype=torch.float32, device=x.device) if wanted[1] else None
        x, weight = as_autocast(x), as_autocast(weight)
        for i in range(0, len(x), rows):
            x_i, y_i = x[i : i + rows], labels[i : i + rows, None]
            logits = product(x_i, weight).float()
            top = logits.amax(-1)
            loss -= (1 - eps) * logits.gather(1, y_i).sum() + eps / V * logits.sum()
            p = torch.softmax(logits, -1, out=logits if logits.device.type == "cpu" else None)
            loss += (top - p.amax(-1).log()).sum()  # log sum_v exp(logit): the largest p is exp(top) / sum
            if not any(wanted):
                continue
            dlogits = p.sub_(eps / V).scatter_add_(1, y_i, p.new_full(y_i.shape, eps - 1)).to(x.dtype)
            if wanted[0]:
                dx[i : i + rows] = product(dlogits, weight.t())
            if wanted[1]:
                dweight += product(x_i.t(), dlogits.t())
        ctx.save_for_backward(dx, dweight if dweight is None else dweight.t().contiguous())
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return *(d if d is None else d * gradient for d in ctx.saved_tensors), None, None


def as_autocast(x):
    """x in the type in which autocast multiplies matrices, if that is on."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
