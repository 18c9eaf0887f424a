"""The search: against brute force, against stock generate(), and whatever its neighbours in the batch are."""

import itertools

import pytest
import torch

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, tokenization


TEXTS = [
    "a small dog sleeps",
    "the cat sees a dog",
    "dogs",
    "the small cat",
    "a cat and a dog sleep in the small house",
]


def lively(model):
    """Weights large enough that the model has opinions, unlike a fresh one."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(1.7)
    return model.eval()


@pytest.fixture(scope="module")
def toy():
    """Three symbols besides the four special tokens: all sequences can be listed."""
    torch.manual_seed(3)
    size = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = VanillaConfig(vocab_size=7, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, **size)
    return lively(VanillaForConditionalGeneration(config))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return lively(VanillaForConditionalGeneration(VanillaConfig.preset("tiny", vocab_size=300)))


@pytest.fixture(scope="module")
def tokenizer():
    return tokenization.train(TEXTS, vocab_size=300)


def sources(count, longest=12, vocab=300):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, vocab, (1 + i % longest,), generator=generator).tolist() + [2] for i in range(count)]


def batch(rows, pad_left=0, pad_right=0):
    width = max(map(len, rows)) + pad_left + pad_right
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, pad_left : pad_left + len(row)] = torch.tensor(row)
        mask[i, pad_left : pad_left + len(row)] = 1
    return ids, mask


def log_prob(model, source, tokens):
    """The sum that a teacher-forced forward gives."""
    labels = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(torch.tensor([source]), labels=labels).logits
    return float(logits.log_softmax(-1).gather(2, labels[..., None]).sum())


def found(hypotheses):
    return [hypothesis.tokens for hypothesis in hypotheses]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_wide_beam_finds_what_brute_force_finds(toy, alpha):
    longest = 4
    for source in ([4, 5, 2], [6, 6, 4, 2], [5, 2]):
        scores = {}
        for n in range(longest):
            for words in itertools.product([3, 4, 5, 6], repeat=n):
                tokens = [*words, 2]
                scores[tuple(tokens)] = log_prob(toy, source, tokens) / ((5 + len(tokens)) / 6) ** alpha
        best = sorted(scores, key=scores.get, reverse=True)[:3]
        hypotheses = toy.search(
            torch.tensor([source]), num_beams=300, n_best=3, length_penalty=alpha, max_new_tokens=longest
        )[0]
        assert [tuple(tokens) for tokens in found(hypotheses)] == best
        assert [h.score for h in hypotheses] == pytest.approx([scores[tokens] for tokens in best], abs=1e-4)


def test_stopping_rule_misses_nothing_that_a_longer_search_would_find(toy):
    """The paper's score can favour long hypotheses: stop only when none that is open can still win."""
    for source in sources(12, 5, 7):
        ids = torch.tensor([source])
        stopped = toy.search(ids, num_beams=4, length_penalty=1.0, max_new_tokens=12)[0][0]
        exhaustive = toy.search(ids, num_beams=4, n_best=4, length_penalty=1.0, max_new_tokens=12)[0][0]
        assert stopped.score == pytest.approx(exhaustive.score, abs=1e-5)


def test_beam_of_one_is_greedy_and_equals_stock_generate(model):
    ids, mask = batch(sources(8))
    stock = model.generate(
        input_ids=ids, attention_mask=mask, num_beams=1, do_sample=False, max_length=21, suppress_tokens=[0, 1]
    )
    for row, hypotheses in zip(stock, model.search(ids, mask, num_beams=1, max_new_tokens=20), strict=True):
        tokens = hypotheses[0].tokens
        assert row[1 : 1 + len(tokens)].tolist() == tokens


def test_length_penalty_of_huggingface_equals_stock_beam_search(model):
    ids, mask = batch(sources(12))
    options = {"num_beams": 4, "length_penalty": 0.8}
    stock = model.generate(
        input_ids=ids, attention_mask=mask, max_length=21, early_stopping=False, suppress_tokens=[0, 1], **options
    )
    ours = model.search(ids, mask, max_new_tokens=20, length_normalization="huggingface", **options)
    for row, hypotheses in zip(stock, ours, strict=True):
        tokens = hypotheses[0].tokens
        assert row[1 : 1 + len(tokens)].tolist() == tokens


@pytest.mark.parametrize("num_beams", [1, 4])
def test_translation_does_not_depend_on_batch_order_or_padding(model, num_beams):
    rows = sources(12)
    alone = [model.search(torch.tensor([row]), num_beams=num_beams, max_new_tokens=20)[0] for row in rows]
    together = model.search(*batch(rows), num_beams=num_beams, max_new_tokens=20)
    reversed_ = model.search(*batch(rows[::-1]), num_beams=num_beams, max_new_tokens=20)[::-1]
    padded = model.search(*batch(rows, pad_right=8), num_beams=num_beams, max_new_tokens=20)
    left = model.search(*batch(rows, pad_left=5), num_beams=num_beams, max_new_tokens=20)
    for other in (together, reversed_, padded, left):
        assert [found(each) for each in other] == [found(each) for each in alone]


def test_scores_are_those_of_a_teacher_forced_forward(model):
    rows = sources(6)
    for row, hypotheses in zip(rows, model.search(*batch(rows), n_best=4, max_new_tokens=20), strict=True):
        for hypothesis in hypotheses:
            total = log_prob(model, row, hypothesis.tokens)
            assert hypothesis.log_prob == pytest.approx(total, abs=1e-4 * max(1, len(hypothesis.tokens)))
            assert hypothesis.score == pytest.approx(total / ((5 + len(hypothesis.tokens)) / 6) ** 0.6, abs=1e-3)


def test_n_best_are_sorted_distinct_and_reproducible(model):
    ids, mask = batch(sources(6))
    first, second = (model.search(ids, mask, n_best=4, max_new_tokens=20) for _ in range(2))
    assert first == second
    for hypotheses in first:
        finished = [hypothesis for hypothesis in hypotheses if hypothesis.finished]
        assert [h.score for h in finished] == sorted((h.score for h in finished), reverse=True)
        assert len({tuple(tokens) for tokens in found(hypotheses)}) == len(hypotheses)


def test_limits_hold_and_a_cut_hypothesis_says_so(model):
    for hypotheses in model.search(*batch(sources(6)), max_new_tokens=3, min_new_tokens=2):
        assert 2 < len(hypotheses[0].tokens) + (not hypotheses[0].finished) <= 4
        assert hypotheses[0].finished == (hypotheses[0].tokens[-1] == 2)


def test_default_limit_is_source_plus_fifty(model):
    with torch.no_grad():
        model.lm_head.weight[2].mul_(-1)  # </s> becomes unlikely
    try:
        hypotheses = model.search(torch.tensor([[5, 6, 7, 2]]), num_beams=1)[0]
    finally:
        with torch.no_grad():
            model.lm_head.weight[2].mul_(-1)
    assert len(hypotheses[0].tokens) <= 54


def test_forced_prefix_begins_every_hypothesis(model):
    rows = sources(3)
    prefixes = [[9, 8], [7], []]
    for prefix, hypotheses in zip(
        prefixes, model.search(*batch(rows), prefix=prefixes, max_new_tokens=9), strict=True
    ):
        assert hypotheses[0].tokens[: len(prefix)] == prefix


def test_special_tokens_are_never_inside_a_translation(model):
    for num_beams in (1, 4):
        for hypotheses in model.search(*batch(sources(20)), num_beams=num_beams, max_new_tokens=20):
            assert not {0, 1, 2} & set(hypotheses[0].tokens[:-1])


def test_suppressed_tokens_and_repeated_n_grams_do_not_occur(model):
    ids, mask = batch(sources(6))
    usual = {token for hypotheses in model.search(ids, mask, max_new_tokens=20) for token in hypotheses[0].tokens}
    forbidden = tuple(sorted(usual - {2})[:3])
    for hypotheses in model.search(ids, mask, max_new_tokens=20, suppress_tokens=forbidden, no_repeat_ngram_size=2):
        tokens = hypotheses[0].tokens
        pairs = list(itertools.pairwise(tokens))
        assert not set(forbidden) & set(tokens)
        assert len(pairs) == len(set(pairs))


def test_samples_depend_on_seed_and_sentence_only(model):
    rows = sources(5)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "n_best": 3, "max_new_tokens": 12}
    together = model.search(*batch(rows), seed=1, **options)
    alone = [model.search(torch.tensor([row]), seed=1, **options)[0] for row in rows]
    assert [found(each) for each in together] == [found(each) for each in alone]
    assert together != model.search(*batch(rows), seed=2, **options)


def test_nearly_no_temperature_samples_what_greedy_search_finds(model):
    ids, mask = batch(sources(6))
    cold = model.search(ids, mask, do_sample=True, temperature=1e-4, max_new_tokens=12)
    assert [found(each) for each in cold] == [
        found(each) for each in model.search(ids, mask, num_beams=1, max_new_tokens=12)
    ]


def test_sources_beyond_the_position_table_are_searched(model):
    long = torch.randint(4, 300, (1, 2 * model.config.max_position_embeddings))
    assert len(model.search(long, num_beams=2, max_new_tokens=3)[0][0].tokens) <= 3


def test_translate_keeps_shape_order_and_blank_lines(model, tokenizer):
    options = {"max_new_tokens": 8}
    texts = [TEXTS[0], "", TEXTS[1], "  \t ", TEXTS[2]]
    translations = model.translate(texts, tokenizer, **options)
    assert [translations[1], translations[3]] == ["", ""]
    assert translations[2] == model.translate(TEXTS[1], tokenizer, **options)
    lazy = model.translate(iter(texts), tokenizer, **options)
    assert next(lazy) == translations[0] and list(lazy) == translations[1:]
    for batch_tokens in (1, 1000):
        assert model.translate(texts, tokenizer, batch_tokens=batch_tokens, **options) == translations


def test_a_cut_source_is_warned_about_by_index(model, tokenizer):
    with pytest.warns(UserWarning, match="cut at 5 tokens.* 1"):
        model.translate(["a", "a cat and a dog and a cat"], tokenizer, max_source_length=5, max_new_tokens=3)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "text", ["ha " * 300, "…!?", "🙂👩‍👩‍👧", "مرحبا بالعالم", "สวัสดีชาวโลก", "你好，世界", "word " * 5000]
)
def test_any_text_is_translated_in_bounded_length(model, tokenizer, text):
    translation = model.translate([text, "a cat"], tokenizer, num_beams=2, max_new_tokens=10)
    assert len(translation) == 2 and isinstance(translation[0], str)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 1},
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 3},
        {"num_beams": 1, "cache_implementation": "static"},
        {"num_beams": 1, "prompt_lookup_num_tokens": 2},
    ],
    ids=str,
)
def test_stock_generate_with_a_cache_equals_without(model, options):
    ids, mask = batch(sources(1 if "prompt_lookup_num_tokens" in options else 4))
    cached = model.generate(input_ids=ids, attention_mask=mask, max_length=12, **options)
    plain = {name: value for name, value in options.items() if name in ("num_beams", "num_return_sequences")}
    uncached = model.generate(input_ids=ids, attention_mask=mask, max_length=12, use_cache=False, **plain)
    assert cached.tolist() == uncached.tolist()


def test_attention_map_has_a_row_for_each_token(model, tokenizer):
    attention = model.attention_map("the cat", "a dog", tokenizer=tokenizer)
    S, T = len(attention.source_tokens), len(attention.target_tokens)
    assert attention.cross.shape == (4, 4, T, S)
    assert attention.encoder.shape == (4, 4, S, S)
    torch.testing.assert_close(attention.cross.sum(-1), torch.ones(4, 4, T))
