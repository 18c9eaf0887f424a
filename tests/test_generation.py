"""The search against brute force, stock generate() and itself; what translate() promises; all modes of generate()."""

import copy
import itertools
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.streamers import BaseStreamer

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, corpus, tokenization
from modeling_vanilla.generation_vanilla import AbsorbedAttention, Beams, Hypothesis, SearchOptions, top
from modeling_vanilla.kernels_vanilla import ONEDNN, PackedProduct
from modeling_vanilla.modeling_vanilla import VanillaDecoderLayer


PAD, START, EOS, UNK = 0, 1, 2, 3


def half_trained(steps=150, seed=0, vocab_size=40, **fields):
    """A model that has begun to learn to copy, so that sources matter, lengths vary and nothing is certain."""
    torch.manual_seed(seed)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4}
    sizes |= {
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
    }
    model = VanillaForConditionalGeneration(VanillaConfig(vocab_size=vocab_size, dropout=0.0, **{**sizes, **fields}))
    optimizer = torch.optim.Adam(model.train().parameters(), lr=3e-3, betas=(0.9, 0.98))
    for step in range(steps):
        ids = torch.randint(3, vocab_size, (32, 3 + step % 8))
        ids[:, -1] = EOS
        noise = (torch.rand(ids.shape) < 0.1) & (ids != EOS)
        model(ids, labels=torch.where(noise, torch.randint_like(ids, 3, vocab_size), ids)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def batch(sizes, vocab_size=40, seed=0, left=False, multiple=1):
    """Random sources of these lengths, </s> included: ids and mask, padded at one side."""
    generator = torch.Generator().manual_seed(seed)
    width = -(-max(sizes) // multiple) * multiple
    ids, mask = torch.full((len(sizes), width), PAD), torch.zeros(len(sizes), width, dtype=torch.long)
    for row, size in enumerate(sizes):
        tokens = torch.randint(4, vocab_size, (size,), generator=generator)
        tokens[-1] = EOS
        place = slice(width - size, width) if left else slice(0, size)
        ids[row, place], mask[row, place] = tokens, 1
    return ids, mask


def stock(model, ids, mask, prompt=None, **options):
    """What generate() returns, as lists without start and padding."""
    options = {"do_sample": False, "suppress_tokens": [PAD, START], **options}
    rows = model.generate(ids, attention_mask=mask, decoder_input_ids=prompt, **options)[:, 1:].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def tokens(found):
    return [hypotheses[0].tokens for hypotheses in found]


def teacher_forced(model, ids, mask, *targets):
    """log P of each target (token ids) of one source, by one forward pass."""
    labels = pad_sequence([torch.tensor(target) for target in targets], True, -100)
    read = model.prepare_decoder_input_ids_from_labels(labels)
    rows = len(targets)
    with torch.no_grad():
        log_p = model(ids.expand(rows, -1), mask.expand(rows, -1), decoder_input_ids=read).logits.log_softmax(-1)
    return log_p.gather(2, labels.clamp_min(0)[..., None])[..., 0].masked_fill(labels < 0, 0).sum(1).tolist()


@pytest.fixture(scope="module")
def model():
    return half_trained()


@pytest.fixture(scope="module")
def sources():
    return batch([3, 9, 5, 12, 1, 7, 7, 2])


@pytest.fixture(scope="module")
def tokenizer():
    words = "a dog cat the sea walks to runs in and under house".split()
    return tokenization.train((" ".join(pair) for pair in itertools.permutations(words, 3)), 320)


@pytest.fixture(scope="module")
def translator(tokenizer):
    return half_trained(300, vocab_size=len(tokenizer))


# -- The search is right ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0, 0.6, 1])
def test_wide_beam_equals_brute_force(alpha):
    model, limit = half_trained(20, vocab_size=5), 6
    ids, mask = batch([4], vocab_size=5)
    every = [(*text, EOS) for n in range(limit) for text in itertools.product((3, 4), repeat=n)]
    log_prob = dict(zip(every, teacher_forced(model, ids, mask, *every), strict=True))
    score = {target: log_prob[target] / ((5 + len(target)) / 6) ** alpha for target in every}
    best = sorted(every, key=score.get, reverse=True)[:10]
    found = model.search(ids, mask, num_beams=64, n_best=10, length_penalty=alpha, max_new_tokens=limit)[0]
    assert [tuple(hypothesis.tokens) for hypothesis in found] == best
    assert [hypothesis.score for hypothesis in found] == pytest.approx([score[target] for target in best], abs=1e-4)


@pytest.mark.parametrize("alpha", [-0.5, 0, 0.6, 1.5])
def test_stopping_early_misses_nothing(alpha, model, monkeypatch):
    ids, mask = batch([5] * 40, seed=3)
    options = {"num_beams": 3, "n_best": 2, "length_penalty": alpha, "max_new_tokens": 30}
    steps = []
    advance = Beams.advance
    monkeypatch.setattr(Beams, "advance", lambda self, *args: steps.append(len(self.sentence)) or advance(self, *args))
    early, early_steps = model.search(ids, mask, **options), sum(steps)
    monkeypatch.setattr(Beams, "done", lambda self: self.tokens.shape[2] > self.limit)
    late = model.search(ids, mask, **options)
    assert [[h.tokens for h in found] for found in early] == [[h.tokens for h in found] for found in late]
    assert early_steps < (sum(steps) - early_steps) / 2


ARCHITECTURES = [
    {},
    {"norm_position": "pre", "position_layout": "concatenated"},
    {"share_encoder_decoder_embeddings": False, "decoder_layers": 3, "activation_function": "gelu"},
    {"tie_word_embeddings": False, "decoder_attention_heads": 2, "decoder_ffn_dim": 16},
]


@pytest.mark.parametrize("fields", ARCHITECTURES)
def test_greedy_and_huggingface_beams_equal_stock_generate(fields, sources):
    model = half_trained(100, **fields)
    assert tokens(model.search(*sources, num_beams=1, max_new_tokens=30)) == stock(model, *sources, max_new_tokens=30)
    for penalty in (0.6, 1.0):
        options = {"num_beams": 4, "length_penalty": penalty, "max_new_tokens": 30}
        found = model.search(*sources, length_normalization="huggingface", **options)
        assert tokens(found) == stock(model, *sources, **options)
    assert len({len(hypotheses[0].tokens) for hypotheses in found}) > 2


@pytest.mark.slow
def test_huggingface_beams_equal_stock_generate_on_500_real_sentences():
    data = Path(__file__).parents[2] / "shared/data/multi30k"
    if not data.exists():
        pytest.skip(f"{data} is not there")
    pairs = corpus.load(str(data / "train"), "en", "de").select(range(3000))
    tokenizer = tokenization.train((text for pair in pairs for text in pair.values()), 1000)
    torch.manual_seed(0)
    model = VanillaForConditionalGeneration(VanillaConfig.preset("tiny", vocab_size=len(tokenizer))).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    for i in range(0, 3000, 20):
        source = tokenizer(pairs["source"][i : i + 20], text_target=pairs["target"][i : i + 20], padding=True)
        inputs = {name: torch.tensor(rows) for name, rows in source.items()}
        labels = inputs["labels"].masked_fill(inputs["labels"] == PAD, -100)
        model(inputs["input_ids"], inputs["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    texts = sorted(corpus.load(str(data / "test_2016_flickr"), "en", "de")["source"][:500], key=len)
    for i in range(0, 500, 50):
        ids, mask = tokenizer(texts[i : i + 50], return_tensors="pt", padding=True).values()
        options = {"num_beams": 4, "length_penalty": 0.6, "max_new_tokens": 60}
        found = model.eval().search(ids, mask, length_normalization="huggingface", **options)
        assert tokens(found) == stock(model, ids, mask, **options)


def test_long_targets_forget_dead_slots_and_stay_right():
    model = half_trained(100, max_position_embeddings=16)
    ids, mask = batch([9, 4, 6])
    options = {"num_beams": 4, "length_penalty": 1.0, "min_new_tokens": 70, "max_new_tokens": 90}
    found = model.search(ids, mask, length_normalization="huggingface", **options)
    assert tokens(found) == stock(model, ids, mask, **options)


@pytest.mark.parametrize("beams", [1, 4])
def test_a_sentence_is_translated_alone_as_in_any_batch(beams, model):
    sizes = [1 + n * 7 % 40 for n in range(32)]
    ids, mask = batch(sizes)
    found = model.search(ids, mask, num_beams=beams)
    for size in (1, 2):
        parts = [model.search(i, m, num_beams=beams) for i, m in zip(ids.split(size), mask.split(size), strict=True)]
        assert tokens(found) == tokens(itertools.chain(*parts))
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    shuffled = model.search(ids[order], mask[order], num_beams=beams)
    assert tokens(shuffled) == [tokens(found)[i] for i in order]
    assert [h[0].score for h in shuffled] == pytest.approx([found[i][0].score for i in order], abs=1e-4)
    for padding in ({"multiple": 8}, {"left": True}):
        assert tokens(model.search(*batch(sizes, **padding), num_beams=beams)) == tokens(found)


def test_scores_are_those_of_a_teacher_forced_pass(model, sources):
    for row, found in enumerate(model.search(*sources, n_best=4, max_new_tokens=12)):
        source = (part[row : row + 1] for part in sources)
        exact = teacher_forced(model, *source, *(hypothesis.tokens for hypothesis in found))
        for hypothesis, log_prob in zip(found, exact, strict=True):
            assert hypothesis.log_prob == pytest.approx(log_prob, abs=1e-4)
            assert hypothesis.score == pytest.approx(log_prob / ((5 + len(hypothesis.tokens)) / 6) ** 0.6, abs=1e-4)
            assert hypothesis.finished == (hypothesis.tokens[-1] == EOS)


def test_n_best_lists_are_sorted_distinct_and_reproducible(model, sources):
    first, second = (model.search(*sources, num_beams=6, n_best=6) for _ in range(2))
    assert first == second
    for found in first:
        assert len({tuple(hypothesis.tokens) for hypothesis in found}) == 6
        assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)


def test_limits_and_flags(model):
    ids, mask = batch([9, 4])
    endless = model.search(ids, mask, min_new_tokens=1000)
    assert [len(found[0].tokens) for found in endless] == [9 + 50, 4 + 50]
    assert not any(found[0].finished for found in endless)
    short = model.search(ids, mask, max_new_tokens=2, min_new_tokens=1)
    assert all(len(found[0].tokens) == 2 for found in short)
    assert all(len(found[0].tokens) > 7 for found in model.search(ids, mask, min_new_tokens=7))
    finished_first = model.search(ids, mask, num_beams=4, n_best=4, max_new_tokens=3)
    assert all(
        [h.finished for h in found] == sorted((h.finished for h in found), reverse=True) for found in finished_first
    )


def test_forced_prefix(model, sources):
    ids, mask = sources
    prompt = torch.tensor([[START, 7, 8, UNK]]).expand(len(ids), -1)
    greedy = model.search(ids, mask, prefix=[7, 8, UNK], num_beams=1, max_new_tokens=20)
    assert tokens(greedy) == stock(model, ids, mask, max_new_tokens=17, prompt=prompt)
    prefixes = [[9] * (n % 3) for n in range(len(ids))]
    for prefix, found in zip(prefixes, model.search(ids, mask, prefix=prefixes, n_best=3), strict=True):
        assert all(hypothesis.tokens[: len(prefix)] == prefix for hypothesis in found)
    free = [n for n, prefix in enumerate(prefixes) if not prefix]
    assert [tokens(model.search(ids, mask, prefix=prefixes))[n] for n in free] == [
        tokens(model.search(ids, mask))[n] for n in free
    ]
    with pytest.raises(ValueError, match=r"prefix=\[5, 2\]"):
        model.search(ids, mask, prefix=[5, EOS])


@pytest.mark.parametrize(
    "options", [{"num_beams": 1}, {"num_beams": 4, "n_best": 4}, {"do_sample": True, "n_best": 20}]
)
def test_special_and_suppressed_tokens_are_never_produced(options):
    model, (ids, mask) = half_trained(40, vocab_size=8), batch([5] * 10, vocab_size=8)
    plain = {token for found in model.search(ids, mask, **options) for h in found for token in h.tokens}
    assert plain <= {EOS, 3, 4, 5, 6, 7} and 5 in plain
    fewer = {
        token
        for found in model.search(ids, mask, suppress_tokens=(UNK, 5), **options)
        for h in found
        for token in h.tokens
    }
    assert fewer <= {EOS, 4, 6, 7}
    texts = [h.tokens for found in model.search(ids, mask, **options) for h in found]
    assert not any(EOS in text[:-1] for text in texts)


def test_samples_follow_the_distribution(model):
    ids, mask = batch([6])
    logits = model(ids, mask, decoder_input_ids=torch.tensor([[START]])).logits[0, 0].detach()
    logits[[PAD, START]] = -torch.inf
    expected = (logits / 0.7).softmax(-1)
    drawn = model.search(ids, mask, do_sample=True, temperature=0.7, n_best=4000, max_new_tokens=1)[0]
    share = torch.bincount(torch.tensor([h.tokens[0] for h in drawn]), minlength=40) / 4000
    assert (share - expected).abs().max() < 0.03
    assert drawn[0].log_prob == pytest.approx(teacher_forced(model, ids, mask, drawn[0].tokens)[0], abs=1e-4)
    order = expected.argsort(descending=True)
    nucleus = {*order[: int((expected[order].cumsum(0) < 0.5).sum()) + 1].tolist()}
    assert {
        h.tokens[0]
        for h in model.search(ids, mask, do_sample=True, temperature=0.7, top_p=0.5, n_best=300, max_new_tokens=1)[0]
    } == nucleus
    assert {
        h.tokens[0] for h in model.search(ids, mask, do_sample=True, top_k=3, n_best=300, max_new_tokens=1)[0]
    } == {*order[:3].tolist()}


def test_samples_depend_on_seed_and_sentence_only(model, sources):
    options = {"do_sample": True, "n_best": 3, "max_new_tokens": 15}
    together = model.search(*sources, seed=5, **options)
    alone = [model.search(i[None], m[None], seed=5, **options)[0] for i, m in zip(*sources, strict=True)]
    assert [[h.tokens for h in found] for found in together] == [[h.tokens for h in found] for found in alone]
    assert tokens(together) != tokens(model.search(*sources, seed=6, **options))
    assert tokens(model.search(*sources, do_sample=True, top_k=1)) == tokens(model.search(*sources, num_beams=1))


def test_samples_at_almost_no_temperature_are_greedy(model, sources):
    cold = model.search(*sources, do_sample=True, temperature=1e-4, max_new_tokens=12)
    assert tokens(cold) == tokens(model.search(*sources, num_beams=1, max_new_tokens=12))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_repeated_ngrams(size, model, sources):
    options = {"num_beams": 1, "max_new_tokens": 25, "min_new_tokens": 20, "no_repeat_ngram_size": size}
    found = tokens(model.search(*sources, **options))
    assert found == stock(model, *sources, **options)
    for text in tokens(model.search(*sources, **{**options, "num_beams": 4})):
        ngrams = list(zip(*(text[n:] for n in range(size)), strict=False))
        assert len(ngrams) == len(set(ngrams))


def test_sources_and_targets_beyond_the_position_table(model):
    ids, mask = batch([5000])
    found = model.search(
        ids, mask, num_beams=2, length_normalization="huggingface", length_penalty=1.0, max_new_tokens=4
    )
    assert tokens(found) == stock(model, ids, mask, num_beams=2, max_new_tokens=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams=0"),
        ({"n_best": 5}, "n_best=5"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"length_normalization": "marian"}, "'marian'"),
        ({"do_sample": True, "temperature": 0}, "temperature=0"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_impossible_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        SearchOptions(**options)
    with pytest.raises(TypeError, match="beam_size"):
        SearchOptions(beam_size=5)


# -- Fast ways that must not change the result ------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [7, 64, 1009, 10_000])
def test_top_equals_topk(vocab_size):
    x = torch.randn(2**17 // vocab_size + 1, 2, vocab_size, generator=torch.Generator().manual_seed(0))
    value, index = top(x, 5)
    assert torch.equal(value, x.topk(5).values) and torch.equal(index, x.topk(5).indices)


class Adapted(nn.Linear):
    """A projection that does more than its weight says, as an adapter does."""

    def forward(self, x):
        return super().forward(x) + 0.5 * x.flip(-1)


@pytest.mark.parametrize("rows", [slice(1, 2), slice(None)])
def test_projections_that_are_not_plain_are_called(rows, model, sources):
    model, sources = copy.deepcopy(model), [part[rows] for part in sources]
    before = tokens(model.search(*sources, num_beams=1))
    for layer in model.model.decoder.layers:
        for attention, name in itertools.product(
            (layer.self_attn, layer.encoder_attn), ("q_proj", "v_proj", "out_proj")
        ):
            adapted = Adapted(32, 32)
            adapted.load_state_dict(getattr(attention, name).state_dict())
            setattr(attention, name, adapted)
    assert tokens(model.search(*sources, num_beams=1)) != before
    limits = {"max_new_tokens": 30}
    assert tokens(model.search(*sources, num_beams=1, **limits)) == stock(model, *sources, **limits)


LAYER, HOOKED = (
    "model.decoder.layers.1.{}",
    ["encoder_attn.q_proj", "encoder_attn.out_proj", "fc1", "final_layer_norm"],
)


@pytest.mark.parametrize("rows", [slice(1, 2), slice(None)])
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
@pytest.mark.parametrize("name", ["lm_head", *map(LAYER.format, HOOKED)])
def test_hooks_are_heeded(name, kind, rows, model, sources):
    model, sources, seen = copy.deepcopy(model), [part[rows] for part in sources], []

    def hook(module, inputs, *output):
        seen.append(module)
        return (-0.5 * inputs[0],) if kind == "forward_pre_hook" else -0.5 * output[0]

    getattr(model.get_submodule(name), f"register_{kind}")(hook)
    found = tokens(model.search(*sources, num_beams=1, max_new_tokens=10))
    assert seen and found == stock(model, *sources, max_new_tokens=10)


@pytest.mark.skipif(not ONEDNN, reason="this PyTorch has no oneDNN")
@pytest.mark.parametrize("size", [1, 12])
def test_attention_with_absorbed_projections_equals_the_module(size):
    torch.manual_seed(0)
    attn = VanillaDecoderLayer(VanillaConfig.preset("tiny", vocab_size=8), 0).encoder_attn
    for projection in (attn.q_proj, attn.out_proj):
        nn.init.normal_(projection.bias)
    x, memory = torch.randn(4, attn.config.d_model), torch.randn(1, size, attn.config.d_model)
    with torch.inference_mode():
        assert AbsorbedAttention.fits(attn, memory) and not AbsorbedAttention.fits(attn, memory.expand(2, -1, -1))
        absorbed = AbsorbedAttention(attn, *(part[0] for part in attn.keys_values(memory)))
        torch.testing.assert_close(absorbed(x), attn(x[None], memory)[0], atol=1e-5, rtol=1e-5)


def test_search_without_dropout_in_training_mode(model, sources):
    training, weight = copy.deepcopy(model).train(), torch.ones(2)
    PackedProduct.kept[weight] = None
    assert tokens(training.search(*sources)) == tokens(model.search(*sources))
    assert training.training and training.model.decoder.layers[0].training
    assert weight not in PackedProduct.kept  # layouts of weights that are about to change


def test_projections_of_which_only_some_have_a_bias(model, sources):
    model = copy.deepcopy(model)
    for layer in model.model.decoder.layers:
        layer.self_attn.q_proj.bias = None
        nn.init.normal_(layer.self_attn.v_proj.bias)
    assert tokens(model.search(*sources, num_beams=1, max_new_tokens=9)) == stock(model, *sources, max_new_tokens=9)


def test_a_penalty_may_be_a_negative_integer(model, sources):
    options = {"length_normalization": "huggingface", "num_beams": 4}
    found = [tokens(model.search(*sources, length_penalty=penalty, **options)) for penalty in (-1, -1.0)]
    assert found[0] == found[1]


def test_bfloat16(model, sources):
    half = copy.deepcopy(model).bfloat16()
    for exact, rounded in zip(model.search(*sources), half.search(*sources), strict=True):
        assert rounded[0].finished
        assert rounded[0].score == pytest.approx(exact[0].score, rel=0.1, abs=0.2)


# -- translate() ------------------------------------------------------------------------------------------------------

TEXTS = [
    "a dog runs",
    "the cat walks to the sea",
    "",
    "a house",
    " \t",
    "-",
    "a",
    "😀 مرحبا",
    "สวัสดี 你好",
    "…!?",
    "🙂👩‍👩‍👧",
]


def test_translate_keeps_kind_and_order(translator, tokenizer):
    options = {"max_new_tokens": 12}
    one_by_one = [translator.translate(text, tokenizer, **options) for text in TEXTS]
    assert all(isinstance(text, str) for text in one_by_one)
    assert translator.translate(TEXTS, tokenizer, **options) == one_by_one
    assert translator.translate(TEXTS, tokenizer, batch_tokens=1, **options) == one_by_one
    assert list(translator.translate(iter(TEXTS), tokenizer, **options)) == one_by_one
    assert [text == "" for text in one_by_one[:5]] == [False, False, True, False, True]


def test_translate_is_lazy_for_iterators(translator, tokenizer, monkeypatch):
    monkeypatch.setattr("modeling_vanilla.generation_vanilla.TranslationJob.WINDOW", 4)
    read = []
    stream = translator.translate((read.append(n) or "a dog" for n in itertools.count()), tokenizer, max_new_tokens=5)
    assert read == []
    assert [next(stream) for _ in range(5)] == [translator.translate("a dog", tokenizer, max_new_tokens=5)] * 5
    assert len(read) == 8


def test_blank_texts_do_not_reach_the_model(translator, tokenizer, monkeypatch):
    monkeypatch.setattr(translator, "search", None)
    assert translator.translate(["", " ", "\n\u3000"], tokenizer) == ["", "", ""]
    assert translator.translate("", tokenizer, n_best=2) == [""]
    assert translator.translate("", tokenizer, return_dict=True) == Hypothesis([], text="")


def test_translate_returns_objects_and_lists_on_request(translator, tokenizer):
    best = translator.translate("a dog runs", tokenizer)
    result = translator.translate("a dog runs", tokenizer, return_dict=True, alignment=True)
    assert result.text == best == tokenizer.decode(result.tokens[:-1]) and result.finished
    assert len(result.alignment) == len(result.tokens)
    assert all(0 <= place < len(tokenizer("a dog runs").input_ids) - 1 for place in result.alignment)
    lists = translator.translate(["a dog runs", ""], tokenizer, n_best=3)
    assert lists[0][0] == best and len(lists[0]) == 3 and lists[1] == [""]
    assert translator.translate("a dog", tokenizer, prefix="the house").startswith("the house")
    assert [t[:3] for t in translator.translate(["a dog", "a cat"], tokenizer, prefix=["sea", "cat"])] == [
        "sea",
        "cat",
    ]


def test_one_warning_names_the_sources_that_were_cut(translator, tokenizer):
    texts = ["a dog", "ha " * 300, "a cat", "the sea " * 40]
    with pytest.warns(UserWarning, match="sources cut at 20 tokens: 1, 3$") as caught:
        found = translator.translate(texts, tokenizer, max_source_length=20)
    assert len([warning for warning in caught if "sources" in str(warning.message)]) == 1
    ids = [*tokenizer(texts[1]).input_ids[:19], EOS]
    specials = (PAD, START, UNK)
    assert found[1] == tokenizer.decode(
        translator.search(torch.tensor([ids]), suppress_tokens=specials)[0][0].tokens, skip_special_tokens=True
    )
    with pytest.warns(UserWarning, match="translations cut at the length limit: 0"):
        translator.translate("a dog", tokenizer, max_new_tokens=2, min_new_tokens=2)


def test_repeated_words_and_long_lines_end_in_bounded_length(translator, tokenizer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        long = translator.translate(["ha " * 300, "sea" * 2000], tokenizer, return_dict=True, num_beams=1)
    assert all(len(hypothesis.tokens) <= 64 + 50 for hypothesis in long)


# -- attention_map() --------------------------------------------------------------------------------------------------


def test_attention_map_labels_every_row_and_column(translator, tokenizer):
    given = translator.attention_map("a dog runs", "the cat", tokenizer=tokenizer)
    assert given.source_tokens == ["a", "▁dog", "▁runs", "</s>"]
    assert given.target_tokens == ["<s>", "the", "▁cat"] and given.predicted_tokens == ["the", "▁cat", "</s>"]
    shapes = [tuple(weights.shape) for weights in (given.encoder, given.decoder, given.cross)]
    assert shapes == [(1, 4, 4, 4), (2, 4, 3, 3), (2, 4, 3, 4)]
    torch.testing.assert_close(given.cross.sum(-1), torch.ones(2, 4, 3))
    made = translator.attention_map("a dog runs", tokenizer=tokenizer)
    text = translator.translate("a dog runs", tokenizer, return_dict=True)
    assert made.cross.shape[2] == len(made.predicted_tokens) == len(text.tokens)


# -- Every mode of stock generate() -----------------------------------------------------------------------------------

MODES = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "sampling": {"do_sample": True, "top_k": 5},
    "sampling beams": {"do_sample": True, "num_beams": 3},
    "several": {"num_beams": 4, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "static cache": {"cache_implementation": "static"},
    "static cache, beams": {"cache_implementation": "static", "num_beams": 3},
}


@pytest.mark.parametrize("mode", MODES)
def test_generate_with_a_cache_equals_without(mode, model):
    ids, mask = batch([7]) if mode == "prompt lookup" else batch([7, 4, 9])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12, **MODES[mode]}
    torch.manual_seed(0)
    cached = model.generate(ids, **options)
    for name in ("cache_implementation", "prompt_lookup_num_tokens"):
        options.pop(name, None)
    torch.manual_seed(0)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))


def test_static_cache_twice_in_a_row(model):
    for seed in (1, 2):
        ids, mask = batch([6, 6], seed=seed)
        options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 10}
        assert torch.equal(
            model.generate(ids, cache_implementation="static", **options), model.generate(ids, **options)
        )


def test_assisted_generation_equals_greedy(model):
    ids, mask = batch([7])
    plain = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12)
    assistant = half_trained(10, seed=9)
    assert torch.equal(
        plain, model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12, assistant_model=assistant)
    )


def test_continuing_from_a_cache_and_from_a_prompt(model):
    ids, mask = batch([7])
    options = {"attention_mask": mask, "do_sample": False, "min_new_tokens": 4}
    whole = model.generate(ids, max_new_tokens=12, **options)
    first = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True, **options)
    assert torch.equal(
        whole,
        model.generate(ids, decoder_input_ids=first.sequences, max_new_tokens=8, **{**options, "min_new_tokens": 0}),
    )
    seen = torch.ones_like(first.sequences)
    rest = model.generate(
        ids, decoder_input_ids=first.sequences, decoder_attention_mask=seen, past_key_values=first.past_key_values,
        attention_mask=mask, do_sample=False, max_new_tokens=8,
    )  # fmt: skip
    assert torch.equal(whole, rest)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_returns_attentions_and_scores(beams, model):
    ids, mask = batch([7, 4])
    output = model.generate(
        ids, attention_mask=mask, num_beams=beams, do_sample=False, max_new_tokens=5, min_new_tokens=5,
        return_dict_in_generate=True, output_attentions=True, output_scores=True,
    )  # fmt: skip
    assert len(output.scores) == len(output.cross_attentions) == 5
    for step, layers in enumerate(output.decoder_attentions):
        assert layers[0].shape == (2 * beams, 4, 1, step + 1)
    for layers in output.cross_attentions:
        assert layers[0].shape == (2 * beams, 4, 1, 7)
        torch.testing.assert_close(layers[0].sum(-1), torch.ones(2 * beams, 4, 1))


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


def test_streamer_sees_every_token(model):
    ids, mask = batch([7])
    streamer = Collector()
    output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8, streamer=streamer)
    assert streamer.tokens == [*output[0].tolist(), "end"]
