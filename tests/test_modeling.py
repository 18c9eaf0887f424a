"""The model against the paper's formulas, torch.nn, MarianMT, and itself by another route."""

import copy
import inspect
import math
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, EncoderDecoderCache, MarianConfig, MarianMTModel, StaticCache

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, VanillaModel
from modeling_vanilla.kernels_vanilla import SmoothedCrossEntropy
from modeling_vanilla.modeling_vanilla import (
    CACHE,
    VanillaEncoderLayer,
    attention,
    sinusoids,
)


SIZE = {
    "vocab_size": 61,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
SHARING = [(True, True), (True, False), (False, False)]  # tie_word_embeddings, share_encoder_decoder_embeddings
START, PAD, B, S, T = 1, 0, 3, 7, 5


def build(cls=VanillaForConditionalGeneration, **fields):
    """A small model in evaluation mode whose biases and LayerNorms are random too, so that none can be forgotten."""
    torch.manual_seed(0)
    model = cls(VanillaConfig(**{**SIZE, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def tokens(*shape, seed=1):
    return torch.randint(4, SIZE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def batch():
    """Sources (B, S) and labels (B, T), both padded on the right by 0, 1 and 2."""
    source, labels = tokens(B, S), tokens(B, T, seed=2)
    mask = torch.arange(S) < torch.tensor([[S], [S - 1], [S - 2]])
    labels = labels.masked_fill(torch.arange(T) >= torch.tensor([[T], [T - 1], [T - 2]]), -100)
    return {"input_ids": source.masked_fill(~mask, PAD), "attention_mask": mask.long(), "labels": labels}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def module_of(model):
    """The file that defines the model; `monkeypatch` and constants belong there."""
    return sys.modules[type(model).__module__]


# -- 3.5 Positional Encoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1, 511, 1023])
def test_positions_are_the_formula(position):
    table = sinusoids(1024, 512)
    for i in (0, 1, 100, 255):
        angle = position / 10000 ** (2 * i / 512)
        assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-7)
        assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-7)


def test_concatenated_positions_hold_the_same_numbers_sines_first():
    interleaved, concatenated = sinusoids(50, 32), sinusoids(50, 32, "concatenated")
    assert torch.equal(torch.cat([interleaved[:, 0::2], interleaved[:, 1::2]], -1), concatenated)


def test_positions_beyond_the_table_continue_the_formula():
    long, short = build(), build(max_position_embeddings=4)
    source, target = tokens(2, 20), tokens(2, 30)
    assert_same(short(source, decoder_input_ids=target).logits, long(source, decoder_input_ids=target).logits, 0)
    settings = {"max_length": 12, "min_length": 12, "do_sample": False}
    assert torch.equal(short.generate(source, **settings), long.generate(source, **settings))


def test_the_embedding_is_scaled_and_the_positions_added():
    encoder = build().model.encoder
    states = encoder(tokens(1, 3), output_hidden_states=True).hidden_states
    expected = encoder.embed_tokens.weight[tokens(1, 3)] * math.sqrt(32) + sinusoids(3, 32)
    assert_same(states[0], expected)


def test_only_positions_tell_the_encoder_the_order():
    encoder, order = build().model.encoder, torch.tensor([3, 0, 2, 1])
    source = tokens(1, 4)
    assert not torch.allclose(encoder(source[:, order])[0], encoder(source)[0][:, order], atol=1e-2)
    encoder.embed_positions.table.zero_()
    assert_same(encoder(source[:, order])[0], encoder(source)[0][:, order])


# -- 3.2 Attention ----------------------------------------------------------------------------------------------------


def test_attention_worked_example_of_two_tokens():
    draw = np.random.RandomState(42).randn
    x, w_q, w_k, w_v = (torch.tensor(draw(*shape).round(4)) for shape in ((2, 4), (4, 3), (4, 3), (4, 3)))
    y, weights = attention(x @ w_q, x @ w_k, x @ w_v)
    assert_same(weights, torch.tensor([[0.0402, 0.9598], [0.0225, 0.9775]]).double(), 1e-4)
    assert_same(y, torch.tensor([[-1.6272, 0.3799, 1.1811], [-1.6491, 0.3980, 1.1900]]).double(), 1e-4)


def test_attention_divides_by_the_root_of_the_head_size():
    query, keys = torch.tensor([[1.0, 0, 0, 0]]), torch.tensor([[3.0, 0, 0, 0], [1, 0, 0, 0]])
    y, weights = attention(query, keys, torch.eye(2))
    assert_same(weights, torch.tensor([[0.7311, 0.2689]]), 1e-4)
    assert torch.equal(y, weights)


def test_attention_is_what_torch_computes():
    q, k, v = (torch.randn(2, 4, n, 8) for n in (5, 7, 7))
    mask = torch.zeros(2, 1, 5, 7).masked_fill_(torch.rand(2, 1, 5, 7) < 0.3, torch.finfo(torch.float32).min)
    assert_same(attention(q, k, v, mask)[0], F.scaled_dot_product_attention(q, k, v, mask))


def copy_attention(ours, theirs):
    for part in ("weight", "bias"):
        stacked = torch.cat([getattr(getattr(ours, f"{name}_proj"), part) for name in "qkv"])
        getattr(theirs, f"in_proj_{part}").data.copy_(stacked)
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())


def copy_layer(ours, theirs):
    """Weights of our layer into torch's, which numbers its LayerNorms in the order of the sub-layers."""
    copy_attention(ours.self_attn, theirs.self_attn)
    norms = [ours.self_attn_layer_norm, ours.final_layer_norm]
    if hasattr(ours, "encoder_attn"):
        copy_attention(ours.encoder_attn, theirs.multihead_attn)
        norms.insert(1, ours.encoder_attn_layer_norm)
    for number, norm in enumerate(norms, 1):
        getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())
    theirs.linear1.load_state_dict(ours.fc1.state_dict())
    theirs.linear2.load_state_dict(ours.fc2.state_dict())


def torch_layer(cls, config, heads, ffn_dim):
    first = config.norm_position == "pre"
    return cls(
        config.d_model, heads, ffn_dim, config.dropout, config.activation_function, batch_first=True, norm_first=first
    )


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_the_encoder_is_torchs_with_the_same_weights(norm_position):
    ours = build(norm_position=norm_position).model.encoder
    layer = torch_layer(nn.TransformerEncoderLayer, ours.config, 4, 48)
    norm = ours.layer_norm if norm_position == "pre" else None
    theirs = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
    for pair in zip(ours.layers, theirs.layers, strict=True):
        copy_layer(*pair)
    source = batch()
    padding = source["attention_mask"] == 0
    states = ours(source["input_ids"], source["attention_mask"], output_hidden_states=True)
    expected = theirs(states.hidden_states[0], src_key_padding_mask=padding)
    assert_same(states.last_hidden_state[~padding], expected[~padding])


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_the_decoder_is_torchs_with_the_same_weights(norm_position):
    ours = build(norm_position=norm_position).model.decoder
    layer = torch_layer(nn.TransformerDecoderLayer, ours.config, 8, 40)
    theirs = nn.TransformerDecoder(layer, 3, ours.layer_norm if norm_position == "pre" else None)
    for pair in zip(ours.layers, theirs.layers, strict=True):
        copy_layer(*pair)
    memory, mask = torch.randn(B, S, 32), batch()["attention_mask"]
    states = ours(tokens(B, T), None, memory, mask, output_hidden_states=True, use_cache=False)
    future = torch.ones(T, T).triu(1).bool()
    expected = theirs(states.hidden_states[0], memory, future, memory_key_padding_mask=mask == 0)
    assert_same(states.last_hidden_state, expected)


def test_each_layer_has_torchs_gradients():
    for norm_position in ("post", "pre"):
        config = VanillaConfig(**SIZE, norm_position=norm_position)
        config._attn_implementation = "sdpa"
        ours, theirs = VanillaEncoderLayer(config), torch_layer(nn.TransformerEncoderLayer, config, 4, 48)
        copy_layer(ours, theirs)
        x = [torch.randn(2, 5, 32).requires_grad_()]
        x.append(x[0].detach().clone().requires_grad_())
        (ours(x[0]).square().sum() + theirs(x[1]).square().sum()).backward()
        assert_same(x[0].grad, x[1].grad, 1e-4)
        assert_same(ours.fc1.weight.grad, theirs.linear1.weight.grad, 1e-4)


# -- 3 The whole model ------------------------------------------------------------------------------------------------


def test_the_whole_model_is_marian_with_the_same_weights():
    ours = build(position_layout="concatenated", label_smoothing=0.0).train()
    fields = {**SIZE, "decoder_vocab_size": 61, "scale_embedding": True, "activation_function": "relu"}
    theirs = MarianMTModel(MarianConfig(**fields, pad_token_id=PAD, decoder_start_token_id=START)).train()
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected and all("positions" in name or "final_logits_bias" in name for name in missing)
    pairs = batch()
    inputs = {**pairs, "decoder_input_ids": ours.prepare_decoder_input_ids_from_labels(pairs["labels"])}
    mine, his = ours(**inputs, skip_logits=False), theirs(**inputs)
    assert_same(mine.logits, his.logits)
    assert_same(mine.loss, his.loss)
    mine, his = gradients(ours, mine.loss), gradients(theirs, his.loss)
    assert set(mine) <= set(his)
    for name in mine:
        assert_same(mine[name], his[name])


@pytest.mark.parametrize("size, millions", [("base", 63.1), ("big", 214.2)])
def test_parameters_are_as_many_as_the_paper_says(size, millions):
    with torch.device("meta"):
        model = VanillaForConditionalGeneration(VanillaConfig.preset(size))
    model.tie_weights()  # transformers 5.0 leaves that out on the meta device
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions


def test_fresh_weights_are_glorot_uniform_and_embeddings_normal():
    torch.manual_seed(0)
    config = VanillaConfig.preset("tiny", vocab_size=3000, tie_word_embeddings=False)
    model = VanillaForConditionalGeneration(config).model
    for layer in (*model.encoder.layers, *model.decoder.layers):
        limit = math.sqrt(6 / (128 + 3 * 128))  # W^Q, W^K and W^V side by side are the matrix that Glorot means
        assert 0.98 * limit < layer.self_attn.k_proj.weight.abs().max() <= limit
        limit = math.sqrt(6 / (128 + 256))
        assert 0.99 * limit < layer.fc1.weight.abs().max() <= limit
        assert layer.fc1.weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.02)
        assert not layer.fc1.bias.any() and (layer.final_layer_norm.weight == 1).all()
    for stack in (model.encoder, model.decoder):
        assert not stack.embed_tokens.weight[PAD].any()
        assert stack.embed_tokens.weight[1:].std().item() == pytest.approx(128**-0.5, rel=0.02)


@pytest.mark.parametrize("tie, share", SHARING)
def test_tied_matrices_are_one_tensor_before_and_after_saving(tie, share, tmp_path):
    def matrices(model):
        return [m.weight for m in (model.model.encoder.embed_tokens, model.model.decoder.embed_tokens, model.lm_head)]

    model = build(tie_word_embeddings=tie, share_encoder_decoder_embeddings=share)
    model.save_pretrained(tmp_path)
    loaded = VanillaForConditionalGeneration.from_pretrained(tmp_path)
    for source, target, output in (matrices(model), matrices(loaded), matrices(copy.deepcopy(model))):
        assert (target is output) == tie
        assert (source is target) == (tie and share)
    assert_same(
        loaded(tokens(1, 4), decoder_input_ids=tokens(1, 3)).logits,
        model(tokens(1, 4), decoder_input_ids=tokens(1, 3)).logits,
        0,
    )


@pytest.mark.parametrize("tie, share", SHARING)
@pytest.mark.parametrize("size", [64, 58])
def test_resizing_changes_every_matrix_and_keeps_the_old_rows(tie, share, size, tmp_path):
    model = build(tie_word_embeddings=tie, share_encoder_decoder_embeddings=share, lm_head_bias=not share)
    kept, source, target = min(size, 61), tokens(2, 6) % 50 + 4, tokens(2, 5) % 50 + 4
    before = model(source, decoder_input_ids=target).logits
    model.resize_token_embeddings(size)
    model.save_pretrained(tmp_path)
    for resized in (model, VanillaForConditionalGeneration.from_pretrained(tmp_path)):
        after = resized(source, decoder_input_ids=target).logits
        assert after.shape[-1] == resized.config.vocab_size == len(resized.model.decoder.embed_tokens.weight) == size
        assert_same(after[..., :kept], before[..., :kept], 1e-6)
        assert (resized.lm_head.weight is resized.model.decoder.embed_tokens.weight) == tie
        assert resized(source, labels=target).loss.isfinite()


# -- 3.2.3 Where a query may look -------------------------------------------------------------------------------------


@pytest.fixture(params=["eager", "sdpa"])
def model(request):
    return build(attn_implementation=request.param)


def test_both_attention_implementations_agree(model):
    model.train()
    other = copy.deepcopy(model)
    other.set_attn_implementation({"eager": "sdpa", "sdpa": "eager"}[model.config._attn_implementation])
    first, second = model(**batch(), skip_logits=False), other(**batch(), skip_logits=False)
    assert_same(first.logits, second.logits)
    first, second = gradients(model, first.loss), gradients(other, second.loss)
    for name in first:
        assert_same(first[name], second[name])


def test_future_tokens_do_not_change_earlier_logits(model):
    target = tokens(2, 6)
    changed = torch.cat([target[:, :3], tokens(2, 3, seed=9)], dim=1)
    logits = [model(tokens(2, 4), decoder_input_ids=ids).logits for ids in (target, changed)]
    assert torch.equal(logits[0][:, :3], logits[1][:, :3])
    assert not torch.equal(logits[0][:, 3:], logits[1][:, 3:])


def test_earlier_tokens_do_change_later_logits(model):
    target = tokens(1, 6)
    changed = torch.cat([tokens(1, 1, seed=9), target[:, 1:]], dim=1)
    logits = [model(tokens(1, 4), decoder_input_ids=ids).logits for ids in (target, changed)]
    assert ((logits[0] - logits[1]).abs().amax(-1) > 1e-3).all()


def padded(ids, left, right):
    """The same tokens with padding around them, and the mask that says so."""
    return F.pad(ids, (left, right), value=PAD), F.pad(torch.ones_like(ids), (left, right))


@pytest.mark.parametrize("left, right", [(7, 0), (0, 7), (3, 4)])
def test_padding_the_source_changes_nothing(model, left, right):
    source, target = tokens(2, 5), tokens(2, 4)
    ids, mask = padded(source, left, right)
    alone = model(source, decoder_input_ids=target)
    beside = model(ids, mask, target)
    assert_same(beside.logits, alone.logits)
    assert_same(beside.encoder_last_hidden_state[:, left : left + 5], alone.encoder_last_hidden_state)


@pytest.mark.parametrize("left, right", [(7, 0), (0, 7), (3, 4)])
def test_padding_the_target_changes_nothing(model, left, right):
    source, target = tokens(2, 5), tokens(2, 4)
    ids, mask = padded(target, left, right)
    alone = model(source, decoder_input_ids=target).logits
    assert_same(model(source, None, ids, mask).logits[:, left : left + 4], alone)


def test_batch_mates_change_nothing(model):
    pairs = batch()
    together = model(**pairs).logits
    for row in range(B):
        length, wanted = pairs["attention_mask"][row].sum(), (pairs["labels"][row] != -100).sum()
        alone = model(pairs["input_ids"][row : row + 1, :length], labels=pairs["labels"][row : row + 1, :wanted])
        assert_same(together[row, :wanted], alone.logits[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_with_nothing_to_look_at_stay_finite(model, dtype):
    model = model.to(dtype).train()
    pairs = batch()
    pairs["attention_mask"][1] = 0
    target_mask = torch.ones(B, T).tril(1)[[0, 1, 2]].flip(1)
    output = model(**pairs, decoder_attention_mask=target_mask, skip_logits=False)
    assert output.logits.isfinite().all() and output.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(model, output.loss).values())


def test_rows_with_nothing_to_look_at_stay_finite_under_autocast(model):
    pairs = batch()
    pairs["attention_mask"][1] = 0
    with torch.autocast("cpu", torch.bfloat16):
        output = model.train()(**pairs, decoder_attention_mask=torch.ones(B, T).tril(1).flip(1), skip_logits=False)
    assert output.logits.isfinite().all() and output.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(model, output.loss).values())


# -- The cache --------------------------------------------------------------------------------------------------------


def new_cache(config, kind):
    if kind == "dynamic":
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    config = config.get_text_config(decoder=True)
    return EncoderDecoderCache(
        StaticCache(config=config, max_cache_len=10), StaticCache(config=config, max_cache_len=S)
    )


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("left", [0, 2])
@pytest.mark.parametrize("steps", [[1] * 8, [3, 1, 4], [8]])
def test_a_cache_changes_nothing(model, kind, left, steps):
    source, source_mask = batch()["input_ids"], batch()["attention_mask"]
    ids, mask = padded(tokens(B, 8 - left), left, 0)
    mask = mask if left else None
    expected = model(source, source_mask, ids, mask, use_cache=False).logits
    memory = model.model.encoder(source, source_mask)
    cache, done, logits = new_cache(model.config, kind), 0, []
    for step in steps:
        seen = mask if mask is None else mask[:, : done + step]
        now = ids[:, done : done + step]
        output = model(None, source_mask, now, seen, memory, past_key_values=cache)
        cache, done = output[CACHE], done + step
        logits.append(output.logits)
    assert_same(torch.cat(logits, dim=1)[:, left:], expected[:, left:])


def test_a_cache_that_was_reset_forgets_its_source(model):
    cache = new_cache(model.config, "static")
    for seed in (1, 2):
        source = tokens(B, S, seed=seed)
        with torch.no_grad():
            output = model(source, decoder_input_ids=tokens(B, T), past_key_values=cache)
        assert_same(output.logits, model(source, decoder_input_ids=tokens(B, T)).logits)
        cache.reset()


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("settings", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_generation_is_the_same_with_any_cache(model, beams, settings):
    for seed in (1, 2):
        inputs = {**batch(), "input_ids": tokens(B, S, seed=seed)}
        inputs.pop("labels")
        common = {
            "num_beams": beams,
            "num_return_sequences": beams,
            "max_length": 10,
            "min_length": 6,
            "do_sample": False,
        }
        assert torch.equal(model.generate(**inputs, **common, **settings), model.generate(**inputs, **common))


def test_generation_continues_a_prefix(model):
    source, prefix = tokens(2, 5), torch.cat([torch.full((2, 1), START), tokens(2, 2)], dim=1)
    settings = {"max_length": 9, "min_length": 9, "do_sample": False}
    cached = model.generate(source, decoder_input_ids=prefix, **settings)
    assert torch.equal(cached, model.generate(source, decoder_input_ids=prefix, **settings, use_cache=False))
    assert torch.equal(cached[:, :3], prefix)


def test_generation_in_training_mode_with_checkpointing_still_reads_its_cache(model):
    settings = {"max_length": 9, "min_length": 9, "do_sample": False}
    expected = model.generate(tokens(2, 5), **settings)
    model.gradient_checkpointing_enable()
    assert torch.equal(model.train().generate(tokens(2, 5), **settings), expected)


# -- What comes out ---------------------------------------------------------------------------------------------------


def test_hidden_states_and_attentions_have_the_documented_shapes(model):
    output = model(**batch(), output_hidden_states=True, output_attentions=True)
    assert [tuple(x.shape) for x in output.encoder_hidden_states] == [(B, S, 32)] * 3
    assert [tuple(x.shape) for x in output.decoder_hidden_states] == [(B, T, 32)] * 4
    assert [tuple(x.shape) for x in output.encoder_attentions] == [(B, 4, S, S)] * 2
    assert [tuple(x.shape) for x in output.decoder_attentions] == [(B, 8, T, T)] * 3
    assert [tuple(x.shape) for x in output.cross_attentions] == [(B, 8, T, S)] * 3
    assert output.encoder_hidden_states[-1] is output.encoder_last_hidden_state
    for weights in (*output.encoder_attentions, *output.decoder_attentions, *output.cross_attentions):
        assert_same(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert not output.encoder_attentions[0][2, :, :, S - 2 :].any()
    assert not output.decoder_attentions[0].triu(1).any()


def test_asking_for_attentions_changes_no_logits(model):
    assert_same(model(**batch(), output_attentions=True).logits, model(**batch()).logits)


def test_generate_returns_attentions_of_every_step(model):
    settings = {"max_length": 5, "min_length": 5, "return_dict_in_generate": True, "output_attentions": True}
    output = model.generate(tokens(2, 6), num_beams=3, do_sample=False, **settings)
    assert [step[0].shape for step in output.cross_attentions] == [(6, 8, 1, 6)] * 4
    assert [step[-1].shape[-1] for step in output.decoder_attentions] == [1, 2, 3, 4]


def test_tuples_hold_what_the_output_object_holds(model):
    for inner in (model, model.model):
        inputs = {**batch(), "decoder_input_ids": tokens(B, T), "output_attentions": True, "use_cache": False}
        if inner is model.model:
            del inputs["labels"]
        expected, got = inner(**inputs), inner(**inputs, return_dict=False)
        assert isinstance(got, tuple) and len(got) == len(expected.to_tuple())
        assert torch.equal(got[1] if inner is model else got[0], expected["logits" if inner is model else 0])


def test_flags_default_to_the_configuration():
    model = build(output_hidden_states=True, return_dict=False)
    assert isinstance(model(**batch()), tuple)
    assert len(model(**batch(), return_dict=True).decoder_hidden_states) == 4


@pytest.mark.parametrize("as_tuple", [False, True])
def test_encoder_outputs_may_be_given(model, as_tuple):
    pairs = batch()
    memory = model.model.encoder(pairs["input_ids"], pairs["attention_mask"], return_dict=not as_tuple)
    assert isinstance(memory, tuple) == as_tuple
    given = model(attention_mask=pairs["attention_mask"], labels=pairs["labels"], encoder_outputs=memory)
    assert torch.equal(given.logits, model(**pairs).logits)


def test_embeddings_may_be_given_instead_of_tokens(model):
    source, target = tokens(2, 6), tokens(2, 5)
    embed = model.get_input_embeddings()
    given = model(inputs_embeds=embed(source), decoder_inputs_embeds=embed(target)).logits
    assert torch.equal(given, model(source, decoder_input_ids=target).logits)


def test_missing_double_and_unknown_arguments_are_refused(model):
    with pytest.raises(TypeError, match="decoder_imput_ids"):
        model(tokens(1, 3), decoder_imput_ids=tokens(1, 3))
    with pytest.raises(ValueError, match="decoder_input_ids"):
        model(tokens(1, 3))
    with pytest.raises(ValueError, match="token ids or embeddings"):
        model(decoder_input_ids=tokens(1, 3))
    with pytest.raises(ValueError, match="token ids or embeddings"):
        model(tokens(1, 3), inputs_embeds=torch.zeros(1, 3, 32), decoder_input_ids=tokens(1, 3))
    with pytest.raises(ValueError, match="2 columns"):
        model(tokens(1, 3), decoder_input_ids=tokens(1, 3), decoder_attention_mask=torch.ones(1, 2))


def test_no_argument_is_named_as_generate_would_fill_it():
    names = set(inspect.signature(VanillaForConditionalGeneration.forward).parameters)
    assert {"past_key_values", "cache"} <= names and not {"cache_position", "decoder_position_ids"} & names


def test_half_precision_goes_all_the_way_through(tmp_path):
    build().save_pretrained(tmp_path)
    model = VanillaForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    output = model(**batch())
    assert output.logits.dtype == torch.bfloat16 and output.loss.dtype == torch.float32
    assert torch.equal(model.model.encoder.embed_positions.table, sinusoids(64, 32))
    assert_same(output.logits.float(), build()(**batch()).logits, 0.3)


# -- 5.4 Dropout ------------------------------------------------------------------------------------------------------


def sites(module, monkeypatch):
    """How often dropout acts in one forward pass, by probability."""
    calls = []
    original = module.dropout

    def count(x, p, training):
        calls.append(p)
        return original(x, p, training)

    monkeypatch.setattr(module, "dropout", count)
    return calls


def test_dropout_acts_on_every_sublayer_and_on_both_embeddings(monkeypatch):
    model = build(dropout=0.25, activation_dropout=0.125).train()
    calls = sites(module_of(model), monkeypatch)
    model(**batch())
    assert (calls.count(0.25), calls.count(0.125)) == (2 + 2 * 2 + 3 * 3, 2 + 3)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(model, use_reentrant):
    model.config.dropout = 0.2  # the same masks must be drawn again
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        torch.manual_seed(3)
        loss = model.train()(**batch(), use_cache=True).loss
        results.append(gradients(model, loss))
    assert set(results[0]) == set(results[1]) == {name for name, _ in model.named_parameters()}
    for name in results[0]:
        assert_same(results[0][name], results[1][name])


def test_checkpointing_over_frozen_weights_reaches_every_layer():
    """Adapters train inside a frozen model: the embeddings must pass gradients on (PEFT asks for that by a hook)."""
    model = build().train()
    model.requires_grad_(False)
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.fc1.bias.requires_grad_()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    assert len(gradients(model, model(**batch()).loss)) == 5


# -- 5.4 Label Smoothing and the loss ---------------------------------------------------------------------------------


def closed_form(logits, labels, eps):
    """(1 - eps) * -log p(y) + eps / V * sum_v -log p(v), one number a token."""
    log_p = logits.double().log_softmax(-1)
    return -(1 - eps) * log_p.gather(1, labels[:, None])[:, 0] - eps * log_p.mean(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("eps", [0.0, 0.1, 0.5])
def test_label_smoothing_is_the_closed_form_and_torchs(eps, bias):
    model = build(label_smoothing=eps, lm_head_bias=bias).train()
    pairs = batch()
    output = model(**pairs, skip_logits=False)
    kept = pairs["labels"] != -100
    assert_same(model(**pairs).loss, output.loss)
    without, beside = gradients(model, model(**pairs).loss), gradients(model, output.loss)
    for name in beside:
        assert_same(without[name], beside[name])
    expected = closed_form(output.logits[kept], pairs["labels"][kept], eps).mean()
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert_same(
        output.loss, F.cross_entropy(output.logits.flatten(0, 1), pairs["labels"].flatten(), label_smoothing=eps)
    )


@pytest.mark.parametrize("width", [12, 60])
def test_padding_labels_changes_no_loss_and_no_gradient(width):
    model = build().train()
    pairs = batch()
    wide = {**pairs, "labels": F.pad(pairs["labels"], (0, width - T), value=-100)}
    first, second = model(**pairs).loss, model(**wide).loss
    assert_same(first, second, 1e-6)
    expected, got = gradients(model, first), gradients(model, second)
    for name in expected:
        assert_same(got[name], expected[name])


def test_a_row_without_labels_adds_nothing():
    model = build().train()
    pairs = batch()
    pairs["labels"][1] = -100
    rest = {name: value[[0, 2]] for name, value in pairs.items()}
    assert_same(model(**pairs).loss, model(**rest).loss)


def test_a_batch_without_labels_has_loss_zero_and_gradient_zero():
    """A mean over nothing would be NaN, and one such micro-batch would end the run."""
    model = build().train()
    pairs = {**batch(), "labels": torch.full((B, T), -100)}
    for extra in ({}, {"num_items_in_batch": 10}):
        loss = model(**pairs, **extra).loss
        assert loss == 0
        assert not any(gradient.any() for gradient in gradients(model, loss).values())


@pytest.mark.parametrize("as_tensor", [False, True])
def test_micro_batches_add_up_to_the_whole_batch(as_tensor):
    model = build().train()
    pairs = batch()
    expected = gradients(model, model(**pairs).loss)
    items = (pairs["labels"] != -100).sum()
    items = items if as_tensor else items.item()
    losses = [model(**{k: v[i : i + 1] for k, v in pairs.items()}, num_items_in_batch=items).loss for i in range(B)]
    assert_same(sum(losses), model(**pairs).loss)
    got = gradients(model, sum(losses))
    for name in expected:
        assert_same(got[name], expected[name])


def test_the_evaluation_loss_is_the_plain_negative_log_likelihood():
    model, pairs = build(label_smoothing=0.3), batch()
    output = model(**pairs)
    assert_same(output.loss, F.cross_entropy(output.logits.flatten(0, 1), pairs["labels"].flatten()))
    assert model.train()(**pairs).loss > output.loss


class LargestLogits(TorchDispatchMode):
    """Remembers the most rows of vocabulary size that any tensor but the transposed weight and its gradient had."""

    def __init__(self, weight):
        super().__init__()
        self.transposed, self.rows = weight.t().shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (61,) and result.shape != self.transposed:
            self.rows = max(self.rows, result.numel() // 61)
        return result


def test_training_computes_no_logits_of_padding_and_only_a_chunk_at_a_time(monkeypatch):
    model, pairs = build().train(), batch()
    assert model(**pairs).logits is None and model.eval()(**pairs).logits.shape == (B, T, 61)
    with LargestLogits(model.lm_head.weight) as seen:
        model.train()(**pairs).loss.backward()
    assert seen.rows == (pairs["labels"] != -100).sum() < B * T
    monkeypatch.setattr(SmoothedCrossEntropy, "ROWS", 4)
    with LargestLogits(model.lm_head.weight) as seen:
        model(**pairs).loss.backward()
    assert seen.rows == 4


def test_labels_shift_right_into_decoder_inputs():
    model = build()
    labels = torch.tensor([[11, 12, 13, 2], [14, 2, -100, -100]])
    expected = torch.tensor([[START, 11, 12, 13], [START, 14, 2, PAD]])
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), expected)
    given = model(tokens(2, 4), labels=labels, decoder_input_ids=expected)
    assert torch.equal(model(tokens(2, 4), labels=labels).loss, given.loss)
    assert model.config.decoder_start_token_id == model.generation_config.decoder_start_token_id == START


def test_five_pairs_are_learnt_by_heart_from_first_word_to_stop():
    torch.manual_seed(0)
    model = VanillaForConditionalGeneration(VanillaConfig(**SIZE, label_smoothing=0.0)).train()
    source, labels = tokens(5, 6), tokens(5, 7, seed=2)
    for row, length in enumerate((7, 6, 5, 4, 3)):
        labels[row, length - 1], labels[row, length:] = 2, -100
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(70):
        adam.zero_grad()
        model(source, labels=labels).loss.backward()
        adam.step()
    assert model.eval()(source, labels=labels).loss < 0.05
    translation = model.generate(source, num_beams=1, do_sample=False)
    expected = torch.cat([torch.full((5, 1), START), labels.masked_fill(labels == -100, PAD)], dim=1)
    assert torch.equal(translation, expected)


def test_the_base_class_is_the_model_without_its_projection(tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    base = VanillaModel.from_pretrained(tmp_path)
    inputs = {**batch(), "decoder_input_ids": tokens(B, T)}
    logits = model(**inputs).logits
    inputs.pop("labels")
    assert torch.equal(model.lm_head(base(**inputs).last_hidden_state), logits)
