"""What kernels_vanilla computes is what torch computes."""

import gc
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, kernels_vanilla
from modeling_vanilla.kernels_vanilla import (
    ONEDNN,
    Linear,
    PackedProduct,
    SmoothedCrossEntropy,
    dropout,
    product,
    side_by_side,
)


def assert_same(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


# -- Memory -----------------------------------------------------------------------------------------------------------

FAULTS = """
import resource, torch
import modeling_vanilla.kernels_vanilla
pages = 2**25 // resource.getpagesize()
for round in range(3):
    if round == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**21) for _ in range(4)]
    del blocks
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / (2 * pages))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_freed_memory_is_kept_for_the_next_step():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES", "THP_"))}
    root = Path(__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", FAULTS], cwd=root, env=env, check=True, capture_output=True, text=True)
    assert float(run.stdout) < 0.5  # of the pages that are used twice more


# -- Linear maps ------------------------------------------------------------------------------------------------------


@pytest.fixture
def onednn(monkeypatch):
    """oneDNN for products of any size."""
    if not ONEDNN:
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(kernels_vanilla, "WORTHWHILE", 1)


@pytest.mark.parametrize("shape", [(24,), (7, 24), (3, 5, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_map_has_torchs_value_and_gradients(onednn, shape, bias):
    module, x, results = Linear(24, 40, bias), torch.randn(shape, requires_grad=True), []
    for forward in (module, lambda x: F.linear(x, *module.parameters())):
        y = forward(x)
        # A gradient whose strides are 0, as that of a sum, and one of another layout.
        loss = y.sum() + y.transpose(0, -1).flatten().square().sum()
        results.append((y, *torch.autograd.grad(loss, (x, *module.parameters()))))
    assert ("Product" in type(results[0][0].grad_fn).__name__) == (len(shape) > 1)
    for mine, torchs in zip(*results, strict=True):
        assert_same(mine, torchs, 1e-4)


def test_a_linear_map_of_nothing_is_torchs(onednn):
    assert Linear(24, 40)(torch.empty(0, 24)).shape == (0, 40)


def test_a_product_is_torchs(onednn):
    x, weight, bias = torch.randn(5, 40, 96), torch.randn(512, 96), torch.randn(512)
    assert_same(product(x, weight, bias), F.linear(x, weight, bias), 1e-4)
    x, weight = torch.randn(40, 96).t(), torch.randn(40, 30).t()
    assert_same(product(x, weight), F.linear(x, weight), 1e-4)


@pytest.fixture
def packs(onednn, monkeypatch):
    """The numbers of rows for which weights were packed, one for each time."""
    PackedProduct.kept.clear()
    pack, rows = torch.ops.mkldnn._reorder_linear_weight, []
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda w, n: rows.append(n) or pack(w, n))
    return rows


@pytest.mark.parametrize("shape", [(1, 96), (4, 96), (1, 4, 96), (2, 3, 96)])
def test_a_packed_product_is_torchs(packs, shape):
    x, a, b, bias = torch.randn(shape), torch.randn(512, 96), torch.randn(100, 96), torch.randn(612)
    packed = PackedProduct([a, b], bias)
    for _ in range(2):
        assert_same(packed(x), F.linear(x, torch.cat([a, b]), bias), 1e-4)
    assert packs == ([] if x.numel() == 96 else [2])  # for one row oneDNN would choose another layout


def test_packed_weights_are_kept_until_they_change_by_any_means_or_are_gone(packs):
    x, weights = torch.randn(4, 400), [nn.Parameter(torch.randn(512, 400)) for _ in range(2)]

    def changed(heads=1):
        before, joined = len(packs), side_by_side(weights, heads, -2)
        assert_same(PackedProduct(weights, None, heads)(x), F.linear(x, joined), 1e-3)
        return len(packs) > before

    with torch.no_grad():
        assert changed() and not changed() and len(PackedProduct.kept) == 1
        for column in (0, 354, 399):  # sin(355) is almost 0
            weights[1].data[7, column] += 1e-3
            assert changed() and not changed()
        for weight in weights:
            for dim in (0, 1):
                weight.data.copy_(weight.data.flip(dim))
                assert changed() and not changed()
        weights[0].data.numpy()[:] *= -1
        assert changed() and not changed()
        weights[0].mul_(1 + 1e-6)
        assert changed() and not changed()
        assert changed(heads=4) and not changed(heads=4)
        del weights[:], weight
        gc.collect()
        assert len(PackedProduct.kept) == 0


def test_other_types_autocast_and_small_products_are_left_to_torch():
    x, module = torch.randn(4, 24), Linear(24, 40)
    assert "Product" not in type(module(x).grad_fn).__name__
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(4096, 24)).dtype == torch.bfloat16
    assert module.bfloat16()(torch.randn(4096, 24, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_hooked_or_reparametrised_linear_map_keeps_what_was_added(onednn):
    module, x = Linear(8, 8), torch.randn(2, 3, 8)
    plain = module(x)
    module.register_forward_hook(lambda module, args, y: y + 1)
    assert_same(module(x), plain + 1)
    module = nn.utils.parametrizations.weight_norm(Linear(8, 8))
    assert_same(module(x), F.linear(x, module.weight, module.bias))


def test_a_models_gradients_are_the_same_with_and_without_onednn(onednn):
    config = VanillaConfig(
        vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0,
    )  # fmt: skip
    model, ids, gradients = VanillaForConditionalGeneration(config).train(), torch.randint(4, 61, (3, 7)), []
    for enabled in (True, False):
        with torch.backends.mkldnn.flags(enabled=enabled):
            loss = model(ids, labels=ids).loss
            gradients.append((loss, *torch.autograd.grad(loss, model.parameters())))
    for mine, torchs in zip(*gradients, strict=True):
        assert_same(mine, torchs)


# -- 5.4 Dropout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.3, 0.9])
def test_dropout_has_its_rate_scale_and_expectation(p):
    torch.manual_seed(0)
    y = dropout(torch.ones(1000, 1001), p, True)
    assert (y == 0).float().mean().item() == pytest.approx(p, abs=0.003)
    assert_same(y[y != 0].unique(), torch.tensor([1 / (1 - p)]))
    assert y.mean().item() == pytest.approx(1, abs=0.01)
    assert y.mean(0).std().item() == pytest.approx(math.sqrt(p / (1 - p) / 1000), rel=0.1)


def test_dropout_passes_the_gradient_where_it_passed_the_value():
    x = torch.randn(7, 11, requires_grad=True)
    y = dropout(x, 0.5, True)
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, torch.where(y == 0, 0.0, 2.0))


def test_dropout_repeats_under_the_same_seed_and_only_then():
    def draw(seed):
        torch.manual_seed(seed)
        return dropout(torch.ones(10, 10), 0.5, True), dropout(torch.ones(10, 10), 0.5, True)

    assert torch.equal(draw(1)[0], draw(1)[0]) and torch.equal(draw(1)[1], draw(1)[1])
    assert not torch.equal(draw(1)[0], draw(1)[1]) and not torch.equal(draw(1)[0], draw(2)[0])


def test_dropout_keeps_type_and_shape_and_is_off_in_evaluation():
    for shape in ((), (0,), (3,), (2, 0, 5), (5, 3, 2)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = torch.ones(shape, dtype=dtype)
            y = dropout(x, 0.25, True)
            assert (y.shape, y.dtype) == (x.shape, x.dtype)
            assert dropout(x, 0.25, False) is x and dropout(x, 0.0, True) is x
    assert dropout(torch.ones(6, 8).t(), 0.5, True).shape == (8, 6)


# -- 5.4 Label Smoothing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_the_loss_in_chunks_has_torchs_value_and_gradients(rows, eps, monkeypatch):
    monkeypatch.setattr(SmoothedCrossEntropy, "ROWS", rows)
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        x, weight = torch.randn(10, 8, requires_grad=True), torch.randn(17, 8, requires_grad=True)
        labels = torch.randint(17, (10,))
        if ours:
            loss = SmoothedCrossEntropy.apply(x, weight, labels, eps)
        else:
            loss = F.cross_entropy(x @ weight.t(), labels, label_smoothing=eps, reduction="sum")
        (3 * loss).backward()
        results.append((loss.detach(), x.grad, weight.grad))
    for mine, torchs in zip(*results, strict=True):
        assert_same(mine, torchs)


def test_the_loss_trains_either_argument_alone():
    for wanted in (0, 1):
        arguments = [torch.randn(5, 8), torch.randn(17, 8)]
        arguments[wanted].requires_grad_()
        SmoothedCrossEntropy.apply(*arguments, torch.arange(5), 0.1).backward()
        reference = [a.detach().clone().requires_grad_() for a in arguments]
        F.cross_entropy(
            reference[0] @ reference[1].t(), torch.arange(5), label_smoothing=0.1, reduction="sum"
        ).backward()
        assert_same(arguments[wanted].grad, reference[wanted].grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_taken_in_float32(dtype):
    torch.manual_seed(0)
    x, weight, labels = torch.randn(6, 16), torch.randn(40_000, 16), torch.randint(40_000, (6,))
    x *= 50 / (x @ weight.t()).abs().max()
    x, weight = x.to(dtype).requires_grad_(), weight.to(dtype)
    loss = SmoothedCrossEntropy.apply(x, weight, labels, 0.1)
    expected = F.cross_entropy((x @ weight.t()).float(), labels, label_smoothing=0.1, reduction="sum")
    loss.backward()
    assert loss.dtype == torch.float32 and abs(loss - expected) / 6 < 1e-2
    assert x.grad.dtype == dtype and x.grad.isfinite().all()
