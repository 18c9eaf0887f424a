"""Scores equal sacreBLEU's own, and the usual ways to get a meaningless number are closed."""

import socket
import sys

import datasets
import evaluate
import pytest
import sacrebleu

from modeling_vanilla.metrics import BLEU, TER, ChrF, bleu_tokenizer, score


PREDICTIONS = ["The dog runs home today .", "A cat sits on the red mat", "Two men are eating pizza now"]
REFERENCES = ["The dog runs home today.", "a cat sat on a red mat", "Two men eat some pizza"]


@pytest.mark.parametrize(
    ("metric", "reference", "options"),
    [
        (BLEU, sacrebleu.BLEU, {}),
        (BLEU, sacrebleu.BLEU, {"lowercase": True}),
        (ChrF, sacrebleu.CHRF, {}),
        (ChrF, sacrebleu.CHRF, {"word_order": 2}),
        (TER, sacrebleu.TER, {}),
    ],
)
def test_scores_and_signature_equal_sacrebleu(metric, reference, options):
    ours = metric().compute(predictions=PREDICTIONS, references=REFERENCES, **options)
    theirs = reference(**options)
    assert ours["score"] == theirs.corpus_score(PREDICTIONS, [REFERENCES]).score
    assert ours["signature"] == str(theirs.get_signature())


def test_score_is_flat_and_names_its_settings():
    report = score(PREDICTIONS, REFERENCES, target_lang="en")
    assert set(report) == {f"{name}{end}" for name in ("bleu", "bleu_lc", "chrf") for end in ("", "_signature")}
    assert report["bleu_lc"] > report["bleu"]
    assert "case:mixed" in report["bleu_signature"] and "tok:13a" in report["bleu_signature"]
    assert "case:lc" in report["bleu_lc_signature"]


def test_every_line_counts():
    references = [PREDICTIONS[0], "nothing in common", "with these words at all"]
    assert 0 < score(PREDICTIONS, references)["bleu"] < 100
    assert score(PREDICTIONS, PREDICTIONS)["bleu"] == pytest.approx(100)


@pytest.mark.parametrize("references", [REFERENCES[:2], [REFERENCES]])
def test_unequal_lengths_and_the_turned_reference_list_are_refused(references):
    with pytest.raises(ValueError, match=r"predictions \(3\) and references"):
        score(PREDICTIONS, references)


def test_no_predictions_are_refused():
    with pytest.raises(ValueError, match="no predictions"):
        score([], [])


def test_two_references_a_line():
    both = [[reference, prediction] for reference, prediction in zip(REFERENCES, PREDICTIONS, strict=True)]
    report = score(PREDICTIONS, both)
    assert report["bleu"] == pytest.approx(100)
    assert "nrefs:2" in report["bleu_signature"]


def test_a_varying_number_of_references():
    references = [[REFERENCES[0]], [REFERENCES[1], PREDICTIONS[1]], [REFERENCES[2]]]
    report = score(PREDICTIONS, references)
    assert "nrefs:var" in report["bleu_signature"]
    assert score(PREDICTIONS, REFERENCES)["bleu"] < report["bleu"] < 100


def test_a_column_of_a_dataset_is_a_reference_list():
    pairs = datasets.Dataset.from_dict({"target": REFERENCES})
    assert score(PREDICTIONS, pairs["target"]) == score(PREDICTIONS, REFERENCES)


def test_bootstrap_interval_is_sacrebleus_and_repeats():
    first, second = (score(PREDICTIONS, REFERENCES, confidence=True) for _ in range(2))
    assert first == second
    theirs = sacrebleu.BLEU().corpus_score(PREDICTIONS, [REFERENCES], n_bootstrap=1000)
    assert f"± {first['bleu_confidence']:.4f}" in theirs.format(width=4)
    assert "bs:1000|seed:12345" in first["bleu_signature"]
    assert score(["x"], ["y z"], confidence=True)["bleu_confidence"] == 0


@pytest.mark.parametrize(
    ("language", "tokenizer"),
    [
        ("de", "13a"),
        (None, "13a"),
        ("zh", "zh"),
        ("zh-CN", "zh"),
        ("zho_Hans", "zh"),
        ("th", "char"),
        ("khm_Khmr", "char"),
    ],
)
def test_bleu_tokenizer_follows_the_target_language(language, tokenizer):
    assert bleu_tokenizer(language) == tokenizer
    assert f"tok:{tokenizer}|" in score(["一 只 狗", "x"], ["一只 狗", "x"], target_lang=language)["bleu_signature"]


@pytest.mark.parametrize(("language", "package"), [("ja", "MeCab"), ("kor_Hang", "mecab_ko")])
def test_japanese_and_korean_without_mecab_count_characters_and_say_so(language, package, monkeypatch, caplog):
    module = f"sacrebleu.tokenizers.tokenizer_{language[:2]}_mecab"
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    report = score(["今日は雨です。"], ["今日は晴れです。"], target_lang=language)
    assert "tok:char" in report["bleu_signature"]
    assert f"sacrebleu[{language[:2]}]" in caplog.text


def test_scoring_uses_no_network_and_leaves_no_files(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert score(["a b c d"], ["a b c d"], target_lang="th")["bleu"] == pytest.approx(100)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_confidence_is_known_where_most_lines_score_nothing():
    scores = score(["x"] * 9 + ["ein Hund"], ["der Hund"] * 10, "de", confidence=True)
    assert 0 < scores["chrf_confidence"] < 100
