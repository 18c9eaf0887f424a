"""The pipeline in this process; `test_sharing.py` calls `pipeline("translation")` where only the folder is there."""

from itertools import chain, islice, repeat

import pytest
import torch

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, tokenization
from modeling_vanilla.pipeline_vanilla import VanillaTranslationPipeline


TEXTS = ["A dog runs.", "", "Two men sit on a bench in the park.", "-"]


pytestmark = pytest.mark.filterwarnings("ignore:translations cut at the length limit")


@pytest.fixture(scope="module")
def model_and_tokenizer():
    tokenizer = tokenization.train(TEXTS, vocab_size=300)
    torch.manual_seed(0)
    config = VanillaConfig.preset("tiny", vocab_size=len(tokenizer), encoder_layers=1, decoder_layers=1)
    model = VanillaForConditionalGeneration(config).eval()
    with torch.no_grad():  # an untrained model says the same whatever the source, if it hears it softly
        for parameter in model.model.decoder.layers[0].encoder_attn.parameters():
            parameter.mul_(8)
    return model, tokenizer


@pytest.fixture(scope="module")
def translator(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    return VanillaTranslationPipeline(model=model, tokenizer=tokenizer, device="cpu", max_new_tokens=8)


@pytest.fixture(scope="module")
def expected(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    texts = model.translate(TEXTS, tokenizer, max_new_tokens=8)
    assert len(set(texts)) == len(TEXTS)
    return [{"translation_text": text} for text in texts]


def test_translates_one_text_as_the_old_pipeline_did(translator, expected):
    assert translator(TEXTS[0]) == expected[:1]


def test_translates_lists_and_tuples_with_the_text_of_the_model(translator, expected):
    assert translator(TEXTS) == translator(tuple(TEXTS)) == expected
    assert translator([]) == []


def test_a_list_is_translated_in_one_call(translator, monkeypatch):
    calls = []
    monkeypatch.setattr(translator.model, "translate", lambda texts, *_, **__: calls.append(texts) or texts)
    translator(TEXTS, batch_size=1)
    assert calls == [TEXTS]


def test_other_iterables_are_translated_lazily(translator, expected):
    class Column(torch.utils.data.Dataset):
        def __len__(self):
            return len(TEXTS)

        def __getitem__(self, index):
            return TEXTS[index]

    endless = translator(chain(TEXTS, repeat("")))
    assert list(islice(endless, len(TEXTS))) == list(translator(Column())) == expected


def test_options_reach_the_model_and_those_of_a_call_win(model_and_tokenizer, translator):
    model, tokenizer = model_and_tokenizer
    greedy = model.translate(TEXTS, tokenizer, num_beams=1, max_new_tokens=3)
    assert [entry["translation_text"] for entry in translator(TEXTS, num_beams=1, max_new_tokens=3)] == greedy
    with pytest.raises(TypeError, match="beams"):
        translator(TEXTS, beams=3)


def test_n_best_gives_a_list_for_each_text(model_and_tokenizer, translator):
    model, tokenizer = model_and_tokenizer
    two = model.translate(TEXTS, tokenizer, n_best=2, max_new_tokens=8)
    assert translator(TEXTS, n_best=2) == [[{"translation_text": text} for text in best] for best in two]
    assert translator(TEXTS[0], n_best=2) == [{"translation_text": text} for text in two[0]]
