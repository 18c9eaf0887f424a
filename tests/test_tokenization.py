"""Nothing is lost, text is never taken for a special token, and the folder loads by AutoTokenizer alone."""

import gzip
import json
import os
import pickle
import random
import subprocess
import sys
import unicodedata
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from modeling_vanilla.errors import InputError
from modeling_vanilla.tokenization import (
    NORMAL_FORMS,
    SPECIAL_TOKENS,
    DropoutSegmenter,
    audit,
    load,
    normalise,
    pieces,
    save,
    train,
)


ROOT = Path(__file__).resolve().parent.parent
FLORES = ROOT.parent / "shared" / "data" / "flores200"
PAIRS = [
    ("The old dog sleeps in the garden.", "Der alte Hund schläft im Garten."),
    ("The old woman sees the small dog.", "Die alte Frau sieht den kleinen Hund."),
    ("A small child plays in the garden </s> today.", "Ein kleines Kind spielt heute </s> im Garten."),
    ("The woman doesn't see the child.", "Die Frau sieht das Kind nicht."),
] * 5
LINES = [
    "",
    " ",
    "  leading, trailing and  double   spaces ",
    "tab\there\nnew line\r\n",
    "don't, can't, l'homme, п'ять, 'quoted'",
    "https://example.org/a?b=c&d=%20e#f",
    "1,234.56 and 10^6 and 3½",
    "( a ) [ b ] { c } ...!?",
    "-",
    "。、！？",
    "👩‍👩‍👧‍👦 ❤️ 🏳️‍🌈 1️⃣",
    "การแปลภาษาด้วยเครื่อง",
    "मशीन अनुवाद की गुणवत्ता",
    "جودة الترجمة الآلية",
    "می‌خواهم بنویسم",
    "机器翻译的质量很好。",
    "機械翻訳の品質。ｶﾀｶﾅ ＡＢＣ１２３",
    "चक्की က္က ខ្មែរ བོད་ ߒߞߏ ⵜⵉⴼⵉⵏⴰⵖ",
    "Où est-il ? « Là » ! 10 %",
    "\x00 \x01 \ufffd \ufeff \u2028 \u0085",
    "Ġ Ċ Â â€œ",
    "\U0010ffff \ue000 \u0378",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train(PAIRS, 340)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save(tokenizer, folder)
    return folder


def back(tokenizer, text):
    return tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", LINES)
def test_text_comes_back_in_its_normal_form(tokenizer, text):
    assert back(tokenizer, text) == normalise(tokenizer, text) == unicodedata.normalize("NFC", text)


def test_any_string_comes_back(tokenizer):
    draw = random.Random(0)
    blocks = [(0, 0x80), (0, 0x800), (0, 0xD800), (0xE000, 0x110000)]
    for _ in range(1000):
        text = "".join(chr(draw.randrange(*draw.choice(blocks))) for _ in range(draw.randrange(30)))
        assert back(tokenizer, text) == normalise(tokenizer, text)


def test_every_line_of_flores_comes_back():
    if not FLORES.is_dir():
        pytest.skip("../shared/data/flores200 is absent")
    lines = []
    for file in sorted(FLORES.glob("*.gz")):
        with gzip.open(file, "rt", encoding="utf-8", newline="\n") as stream:
            lines += stream.read().removesuffix("\n").split("\n")
    report = audit(train(lines[::40], 2000), zip_longest(lines[::2], lines[1::2], fillvalue=""))
    assert report["lines"] >= len(lines) > 46_000
    assert report["round_trip_failures"] == 0


@pytest.mark.parametrize("form", [form for form in NORMAL_FORMS if form != "none"])
def test_normal_forms_are_unicodes_and_make_equal_what_looks_equal(form, tmp_path):
    save(train(PAIRS, 300, normalization=form), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("é ﬁ ½ ① １２ ︰ 가", "e\u0301 각 각", "می‌خواهم"):
        assert back(tokenizer, text) == unicodedata.normalize(form, text)
    assert tokenizer("é 각").input_ids == tokenizer("e\u0301 각").input_ids


def test_default_form_keeps_compatibility_characters_and_joiners(tokenizer):
    assert back(tokenizer, "ﬁ ½ １２ ︰ می‌خواهم") == "ﬁ ½ １２ ︰ می‌خواهم"
    assert back(train(PAIRS, 300, normalization="none"), "e\u0301") == "e\u0301"


def test_lower_casing_is_part_of_the_folder(tmp_path):
    save(train(PAIRS, 300, lowercase=True, normalization="NFKC"), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("THE OLD DOG").input_ids == tokenizer("the old dog").input_ids
    assert back(tokenizer, "Der ÄRGER ℋ") == "der ärger h"
    assert back(tokenizer, "J\u030c") == "\u01f0", "the composed small letter, though no capital one exists"


def test_special_tokens_have_the_ids_the_model_expects(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == [0, 1, 2, 3]
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert ids == [0, 1, 2, 3]
    assert tokenizer("dog").input_ids[-1] == 2
    assert not {0, 1, 3} & set(tokenizer("dog").input_ids)


def test_special_tokens_typed_by_a_user_are_text(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "write </s> here, <pad><s> there</s> <unk>"
    for ids in (tokenizer(text).input_ids, tokenizer([text, text], padding=True).input_ids[0]):
        assert ids.count(2) == 1 and ids[-1] == 2 and not {0, 1, 3} & set(ids)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert set(tokenizer.get_vocab()) & {"</s>", "▁</s>", " </s>", "Ġ</s>"} == {"</s>"}
    made = [1, *tokenizer("a dog", add_special_tokens=False).input_ids, 2, 0, 0]
    assert tokenizer.decode(made, skip_special_tokens=True) == "a dog"


def test_files_are_the_same_after_loading_use_and_saving_again(folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer(["a", "a longer line"], padding=True, truncation=True, max_length=3)
    save(tokenizer, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_saved_files_hold_what_every_version_understands(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["clean_up_tokenization_spaces"] is False
    assert config["model_input_names"] == ["input_ids", "attention_mask"]
    assert config["padding_side"] == "right"
    assert config["model_max_length"] == 1024
    assert not {"extra_special_tokens", "additional_special_tokens", "add_eos_token"} & set(config)
    saved = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert saved["truncation"] is saved["padding"] is saved["model"]["dropout"] is None


def test_truncation_keeps_the_end_token(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for options, length in (({}, 1024), ({"max_length": 7}, 7)):
        ids = tokenizer("dog " * 3000, truncation=True, **options).input_ids
        assert len(ids) == length and ids[-1] == 2


def test_batches_are_padded_on_the_right_and_hold_model_inputs_only(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["dog", "the old dog sleeps"], text_target=["Hund", "der alte Hund"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch.input_ids[0][-1] == 0 and batch.input_ids[1][-1] == 2
    assert tokenizer(text_target="Hund").input_ids == tokenizer("Hund").input_ids


def test_training_is_reproducible_across_processes_and_threads():
    code = """
import hashlib, random
from modeling_vanilla.tokenization import DropoutSegmenter, train
draw = random.Random(0)
words = ["".join(draw.choices("abcdeéж", k=draw.randint(1, 8))) for _ in range(2000)]
tokenizer = train((" ".join(draw.choices(words, k=9)) for _ in range(3000)), 2000)
segmenter = DropoutSegmenter(tokenizer, 0.1)
ids = [segmenter.encode(" ".join(words[:50]), seed) for seed in range(5)]
print(hashlib.sha256((tokenizer.backend_tokenizer.to_str() + repr(ids)).encode()).hexdigest())
"""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            stdout=subprocess.PIPE,
            text=True,
        )
        for threads in ("1", "8")
    ]
    hashes = [run.communicate(timeout=300)[0] for run in runs]
    assert len(hashes[0].strip()) == 64 and hashes[0] == hashes[1]


def test_pairs_and_single_lines_train_the_same():
    assert train(iter(PAIRS), 320).get_vocab() == train([text for pair in PAIRS for text in pair], 320).get_vocab()


def test_vocabulary_larger_than_the_corpus_supports_is_reported(caplog):
    tokenizer = train(PAIRS, 5000)
    assert 260 < len(tokenizer) < 5000
    assert str(len(tokenizer)) in caplog.text and "5000" in caplog.text
    assert len(train(PAIRS, 300)) == 300


def test_impossible_requests_name_the_value():
    with pytest.raises(InputError, match="259.*260"):
        train(PAIRS, 259)
    with pytest.raises(InputError, match="'NFX'.*NFC"):
        train(PAIRS, 300, normalization="NFX")


def test_an_error_in_the_stream_of_lines_comes_through():
    def lines():
        yield "a line"
        raise InputError("train.en, line 2: not UTF-8")

    with pytest.raises(InputError, match="line 2"):
        train(lines(), 300)


def test_a_giant_word_is_cut_with_a_warning_that_names_its_line(caplog):
    lines = [("a b", "c d"), ("e", "x" * 20_000_000), *((f"line number {i}", "is short") for i in range(10_000))]
    tokenizer = train(lines, 300)
    assert len(caplog.records) == 1 and "line 2 " in caplog.text and "xxx" in caplog.text
    assert "Ġline" in tokenizer.get_vocab() or "line" in tokenizer.get_vocab()
    assert back(tokenizer, "x" * 30_000 + " y") == "x" * 30_000 + " y"


@pytest.mark.slow
def test_a_line_of_ten_million_letters_without_a_space_is_encoded(tokenizer):
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab" * 5_000_000)
    assert len(words) == 20_000


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_lines():
    code = """
import random, resource
from modeling_vanilla.tokenization import train
draw = random.Random(0)
words = ["".join(draw.choices("abcdefghij", k=6)) for _ in range(20000)]
train((" ".join(draw.choices(words, k=12)) for _ in range(20000)), 2000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
train((" ".join(draw.choices(words, k=12)) for _ in range(800000)), 2000)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(run.stdout) < 30, "megabytes, for 67 MB of text"


def test_loading_what_is_no_tokenizer_says_what_to_do(tmp_path):
    for missing in (tmp_path, tmp_path / "absent", "absent"):
        with pytest.raises(InputError, match=r"holds no tokenizer.json; train one"):
            load(missing)
    backend = train(PAIRS, 300).backend_tokenizer
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="no bos_token and no eos_token and no pad_token"):
        load(tmp_path)


def test_load_gives_what_autotokenizer_gives(folder):
    text = "The old </s> dog"
    assert load(folder)(text).input_ids == AutoTokenizer.from_pretrained(folder)(text).input_ids


def test_pieces_are_readable(tokenizer):
    assert pieces(tokenizer, "The dog. é")[:4] == ["The", "▁dog", ".", "▁"]
    assert pieces(tokenizer, "é <pad>") == ["\\xc3", "\\xa9", "▁", "<", "p", "a", "d", ">", "</s>"]


def test_audit_counts_what_is_out_of_the_ordinary():
    tokenizer = train([("dog dog", "dog dog")] * 5, 262, model_max_length=10)
    assert tokenizer.tokenize("dog dog") == ["dog", "Ġ", "dog"]
    pairs = [("dog dog", "机器翻译的质量"), ("", "e\u0301"), ("</s> dog", "dog"), ("dog " * 20, " ")]
    assert audit(tokenizer, pairs) == {
        "lines": 8,
        "round_trip_failures": 0,
        "normalised": 1,
        "blank": 2,
        "special_token_text": 1,
        "spelled_in_bytes": 2,
        "too_long": 2,
        "source_tokens_per_word": round((3 + 0 + 6 + 40) / (2 + 0 + 2 + 20), 3),
        "target_tokens_per_character": round((21 + 2 + 1 + 1) / (7 + 2 + 3 + 0), 3),
    }


def test_audit_notices_a_failing_round_trip(tokenizer):
    broken = train(PAIRS, 340)
    broken.backend_tokenizer.decoder = None
    assert audit(broken, [("The old dog", "ä"), ("", "")])["round_trip_failures"] == 2


# --- BPE-dropout -----------------------------------------------------------------------------------------------------


def test_dropout_that_drops_nothing_is_the_plain_segmentation(tokenizer):
    segmenter = DropoutSegmenter(tokenizer, 1e-15)
    for text in [*LINES, *(text for pair in PAIRS for text in pair)]:
        assert segmenter.encode(text, seed=1) == tokenizer(text).input_ids


def test_dropout_is_a_function_of_text_and_seed(tokenizer):
    text = "The old woman sees the small dog in the garden."
    segmenter, again = DropoutSegmenter(tokenizer, 0.1), pickle.loads(pickle.dumps(DropoutSegmenter(tokenizer, 0.1)))
    first = [segmenter.encode(text, seed) for seed in range(20)]
    assert [again.encode(text, seed) for seed in reversed(range(20))] == first[::-1]
    assert len({tuple(ids) for ids in first}) > 5
    for ids in first:
        assert ids[-1] == 2 and tokenizer.decode(ids, skip_special_tokens=True) == text


def test_dropout_drops_a_single_merge_with_probability_p():
    segmenter = DropoutSegmenter(train(["ab ab"] * 3, 261), 0.3)
    whole = sum(len(segmenter.encode("ab", seed)) == 2 for seed in range(4000)) / 4000
    assert whole == pytest.approx(0.7, abs=0.03)


def test_dropout_has_the_distribution_of_the_papers_algorithm(tokenizer):
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    ranks = {tuple(merge): rank for rank, merge in enumerate(model["merges"])}
    draw = random.Random(1).random

    def algorithm_1(word, p):
        """Provilkov et al. (2020): at each step every possible merge is dropped with probability p."""
        pieces = list(word)
        while kept := [
            (ranks[merge], place)
            for place, merge in enumerate(zip(pieces, pieces[1:], strict=False))
            if merge in ranks and draw() >= p
        ]:
            place = min(kept)[1]
            pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
        return tuple(pieces)

    segmenter = DropoutSegmenter(tokenizer, 0.2)
    ours = Counter(tuple(tokenizer.convert_ids_to_tokens(segmenter.encode("garden", s)[:-1])) for s in range(10_000))
    theirs = Counter(algorithm_1("garden", 0.2) for _ in range(10_000))
    assert len(theirs) > 5
    for segmentation in ours | theirs:
        assert ours[segmentation] == pytest.approx(theirs[segmentation], abs=250)


def test_dropout_leaves_the_tokenizer_and_its_folder_alone(tokenizer, tmp_path):
    text = "The old woman sees the small dog."
    before = tokenizer(text).input_ids
    DropoutSegmenter(tokenizer, 0.5).encode(text, seed=0)
    save(tokenizer, tmp_path)
    loaded = load(tmp_path)
    assert all(loaded(text).input_ids == before for _ in range(20))
    assert tokenizer(text).input_ids == before


@pytest.mark.parametrize("p", [0, 1, -0.1, 1.5])
def test_dropout_refuses_a_p_that_is_no_probability_between_0_and_1(tokenizer, p):
    with pytest.raises(ValueError, match=str(p)):
        DropoutSegmenter(tokenizer, p)
