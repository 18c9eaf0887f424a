"""A MarianMT model and its vanilla twin compute the same, whichever was first."""

import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, MarianMTModel, MarianTokenizer

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, convert, sharing, tokenization, translate
from modeling_vanilla.errors import InputError


SOURCE = torch.tensor([[5, 9, 17, 30, 8, 0], [11, 12, 0, 39, 39, 39]])
MASK = (SOURCE != 39).long()


def marian(biased=True, **settings):
    """As OPUS-MT models are: </s> is 0, the last id pads and starts, logits have a bias."""
    torch.manual_seed(1)
    defaults = {
        **{"vocab_size": 40, "d_model": 16, "max_position_embeddings": 64, "activation_function": "swish"},
        **{"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 2},
        **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 32, "scale_embedding": True, "init_std": 0.4},
        **{"pad_token_id": 39, "decoder_start_token_id": 39, "eos_token_id": 0, "forced_eos_token_id": 0},
    }
    model = MarianMTModel(MarianConfig(**defaults | settings)).eval()
    if biased:
        model.final_logits_bias.normal_()
    model.generation_config.update(num_beams=3, max_length=20, bad_words_ids=[[39]])
    return model


def vanilla(**settings):
    torch.manual_seed(1)
    defaults = {"vocab_size": 40, "d_model": 16, "position_layout": "concatenated", "max_position_embeddings": 64}
    model = VanillaForConditionalGeneration(VanillaConfig.preset("tiny", **defaults | settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def assert_same(one, other, pad):
    source = SOURCE.masked_fill(MASK == 0, pad)
    with torch.no_grad():
        logits = [model(source, MASK, decoder_input_ids=SOURCE[:, :4]).logits for model in (one, other)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    found = [
        model.generate(source, attention_mask=MASK, num_return_sequences=3, num_beams=3) for model in (one, other)
    ]
    assert torch.equal(*found) and len(found[0].unique(dim=0)) >= 3


@pytest.mark.parametrize("settings", [{}, {"biased": False}, {"share_encoder_decoder_embeddings": False}])
def test_a_marian_folder_becomes_a_vanilla_folder_that_computes_the_same(tmp_path, settings):
    old = marian(**settings)
    old.save_pretrained(tmp_path / "marian")
    convert.convert(tmp_path / "marian", tmp_path / "vanilla")
    new = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "vanilla")
    assert (new.config.model_type, new.config.lm_head_bias) == ("vanilla", settings.get("biased", True))
    assert_same(old, new, pad=39)


@pytest.mark.parametrize("settings", [{}, {"lm_head_bias": True}, {"share_encoder_decoder_embeddings": False}])
def test_a_vanilla_folder_becomes_a_marian_folder_that_computes_the_same(tmp_path, settings):
    old, tokenizer = vanilla(**settings), tokenization.train(["a b", "c d"], vocab_size=260)
    sharing.save_model(old, tokenizer, tmp_path / "vanilla")
    convert.convert(tmp_path / "vanilla", tmp_path / "marian", back=True)
    new = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "marian")
    assert isinstance(new, MarianMTModel)
    assert_same(old, new, pad=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "marian")("a d").input_ids == tokenizer("a d").input_ids


def test_there_and_back_again_is_the_same_model():
    old = marian()
    new = convert.to_marian(convert.from_marian(old))
    assert all(torch.equal(x, new.state_dict()[name]) for name, x in old.state_dict().items())
    assert {field: getattr(new.config, field) for field in convert.COMMON} == {
        field: getattr(old.config, field) for field in convert.COMMON
    }


@pytest.mark.parametrize(
    "model, convert_model, setting",
    [
        (lambda: marian(scale_embedding=False), convert.from_marian, "scale_embedding=False"),
        (
            lambda: marian(share_encoder_decoder_embeddings=False, decoder_vocab_size=50),
            convert.from_marian,
            "decoder_vocab_size=50",
        ),
        (lambda: vanilla(position_layout="interleaved"), convert.to_marian, "position_layout='interleaved'"),
        (lambda: vanilla(norm_position="pre"), convert.to_marian, "norm_position='pre'"),
        (lambda: vanilla(tie_word_embeddings=False), convert.to_marian, "tie_word_embeddings=False"),
    ],
)
def test_a_setting_that_the_other_model_lacks_is_named(model, convert_model, setting):
    with pytest.raises(InputError, match=setting):
        convert_model(model())


ENGLISH = ["a dog runs over the snow", "two men play the guitar", "the dog sleeps", "the men run"]
GERMAN = ["ein Hund rennt über den Schnee", "zwei Männer spielen Gitarre", "der Hund schläft", "die Männer rennen"]


@pytest.fixture
def opus(tmp_path):
    """As those of OPUS-MT, two SentencePiece models and one vocabulary; it knows four sentences by heart."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder, tokens = tmp_path / "opus", ["</s>", "<unk>"]
    folder.mkdir()
    for side, texts in (("source", ENGLISH), ("target", GERMAN)):
        name = str(folder / side)
        settings = {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts * 9), model_prefix=name, **settings)
        (folder / f"{side}.model").rename(folder / f"{side}.spm")
        pieces = sentencepiece.SentencePieceProcessor(model_file=f"{name}.spm")
        tokens += [pieces.id_to_piece(i) for i in range(3, len(pieces))]
    tokens = [*dict.fromkeys(tokens), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    pad = len(tokens) - 1
    model = marian(vocab_size=len(tokens), pad_token_id=pad, decoder_start_token_id=pad, init_std=0.1)
    model.generation_config.bad_words_ids = [[pad]]
    batch = MarianTokenizer.from_pretrained(folder)(ENGLISH, text_target=GERMAN, padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == pad] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def test_a_converted_folder_translates_as_marian_does(opus, tmp_path):
    convert.convert(opus, tmp_path / "vanilla")
    old, old_tokenizer = MarianMTModel.from_pretrained(opus), MarianTokenizer.from_pretrained(opus)
    batch = old_tokenizer(ENGLISH, padding=True, return_tensors="pt")
    search = {"num_beams": 3, "length_penalty": 1.0}
    expected = old_tokenizer.batch_decode(old.generate(**batch, **search, max_length=40), skip_special_tokens=True)
    assert expected == GERMAN

    new, tokenizer = sharing.load_model(tmp_path / "vanilla")
    assert tokenizer(ENGLISH, text_target=GERMAN) == old_tokenizer(ENGLISH, text_target=GERMAN)
    generated = new.generate(**tokenizer(ENGLISH, padding=True, return_tensors="pt"), **search, max_length=40)
    assert tokenizer.batch_decode(generated, skip_special_tokens=True) == expected
    assert new.translate(ENGLISH, tokenizer, length_normalization="huggingface", **search) == expected

    (tmp_path / "in.txt").write_text("\n".join(ENGLISH))
    files = ["--input", f"{tmp_path}/in.txt", "--output", f"{tmp_path}/out.txt"]
    assert translate.main(["--model", f"{tmp_path}/vanilla", "--device", "cpu", *files]) == 0
    assert (tmp_path / "out.txt").read_text().splitlines() == new.translate(ENGLISH, tokenizer)


def test_the_tokenizers_files_are_copied_as_they_are_and_its_class_is_named(tmp_path):
    marian().save_pretrained(tmp_path / "marian")
    files = {"source.spm": b"\0spm", "target.spm": b"\1spm", "vocab.json": b'{"</s>": 0}'}
    for name, content in files.items():
        (tmp_path / "marian" / name).write_bytes(content)
    (tmp_path / "marian" / "tokenizer_config.json").write_text('{"source_lang": "en"}')
    convert.convert(tmp_path / "marian", tmp_path / "vanilla")
    assert {name: (tmp_path / "vanilla" / name).read_bytes() for name in files} == files
    settings = json.loads((tmp_path / "vanilla" / "tokenizer_config.json").read_text())
    assert settings == {"source_lang": "en", "tokenizer_class": "MarianTokenizer"}


def test_the_wrong_kind_of_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no config.json"):
        convert.convert(tmp_path, tmp_path / "out")
    marian().save_pretrained(tmp_path / "marian")
    with pytest.raises(InputError, match="holds a marian model, not a vanilla one"):
        convert.convert(tmp_path / "marian", tmp_path / "out", back=True)


def test_a_bias_on_the_logits_is_in_the_loss_and_learns():
    model = vanilla(lm_head_bias=True)
    labels = torch.tensor([[7, 3, 2], [9, 2, -100]])
    output = model(SOURCE, MASK, labels=labels, skip_logits=False)
    expected = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.loss, expected)
    wanted = torch.autograd.grad(expected, model.lm_head.bias, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(output.loss, model.lm_head.bias)[0], wanted)
