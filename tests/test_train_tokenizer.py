"""The script from its flags to the folder it writes, the report it prints and the input it refuses."""

import gzip
import json
import re
import runpy
import shlex

import pytest
from transformers import AutoTokenizer

import train_tokenizer
from modeling_vanilla.errors import InputError


SOURCES = ["The old dog sleeps.", "A woman sees the dog.", "</s> is not the end.", "The child plays."] * 3
TARGETS = ["Der alte Hund schläft.", "Eine Frau sieht den Hund.", "</s> ist nicht das Ende.", "Das Kind spielt."] * 3


@pytest.fixture
def corpus(tmp_path):
    """The prefix of corpus.en and corpus.de."""
    for lang, lines in (("en", SOURCES), ("de", TARGETS)):
        (tmp_path / f"corpus.{lang}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path / "corpus"


def run(*arguments):
    train_tokenizer.main([str(argument) for argument in arguments])


def test_commands_of_the_docstring_are_valid_and_the_demo_runs(tmp_path, capsys):
    commands = re.findall(r"python train_tokenizer.py (.*)", train_tokenizer.__doc__)
    assert len(commands) == 4
    for command in commands:
        train_tokenizer.parse(shlex.split(command))
    assert commands[0] == "--train_file demo --output_dir tokenizer"
    run("--train_file", "demo", "--max_train_samples", 300, "--vocab_size", 400, "--output_dir", tmp_path / "out")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 400
    assert "of 600 lines\n           0 did not come back" in capsys.readouterr().out


def test_report_shows_pieces_rates_and_special_cases(corpus, tmp_path, capsys):
    flags = ("--train_file", corpus, "--source_lang", "en", "--target_lang", "de", "--vocab_size", 400)
    run(*flags, "--output_dir", tmp_path / "out")
    report = capsys.readouterr().out
    assert "en: The ▁old ▁dog ▁sleeps . </s>\nde: Der ▁alte ▁Hund ▁schläft . </s>\n" in report
    assert re.search(r"en: 1\.\d\d tokens per word\nde: 1\.\d\d tokens per word\nof 24 lines", report)
    assert "6 hold </s> or another special token as text" in report


def test_two_files_of_any_name_are_a_corpus(corpus, tmp_path, monkeypatch):
    flags = ("--vocab_size", 300, "--output_dir")
    run("--train_file", corpus, "--source_lang", "en", "--target_lang", "de", *flags, tmp_path / "expected")
    (tmp_path / "other").mkdir()
    english, german = tmp_path / "english", tmp_path / "other" / "german.txt.gz"
    english.write_bytes((tmp_path / "corpus.en").read_bytes())
    german.write_bytes(gzip.compress((tmp_path / "corpus.de").read_bytes()))
    pairs = [
        (f"{corpus}.en", f"{corpus}.de"),
        (english, german),
        ("english", "other/german.txt.gz"),
        (english, english),
    ]
    monkeypatch.chdir(tmp_path)
    for number, (source, target) in enumerate(pairs):
        run("--source_file", source, "--target_file", target, *flags, f"out{number}")
    expected, *found = [
        json.loads((tmp_path / name / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        for name in ("expected", *(f"out{number}" for number in range(4)))
    ]
    assert found[:3] == [expected] * 3
    assert found[3] != expected


def test_of_a_data_set_only_the_pairs_asked_for_are_read(tmp_path, capsys):
    folder = tmp_path / "corpus"
    folder.mkdir()
    pairs = [json.dumps({"en": source, "de": target}) for source, target in zip(SOURCES, TARGETS, strict=True)]
    (folder / "train-0.jsonl").write_text("\n".join(pairs * 100), encoding="utf-8")  # `datasets` reads 1000 ahead
    (folder / "train-1.jsonl").write_text("broken\n")
    flags = ("--dataset_name", folder, "--source_lang", "en", "--target_lang", "de", "--vocab_size", 300)
    with pytest.raises(InputError, match="corpus, split 'train'"):
        run(*flags, "--output_dir", tmp_path / "all")
    run(*flags, "--max_train_samples", 12, "--output_dir", tmp_path / "out")
    assert "of 24 lines" in capsys.readouterr().out


def test_normal_form_and_lower_casing_are_in_the_folder(corpus, tmp_path):
    flags = ("--train_file", corpus, "--source_lang", "en", "--target_lang", "de", "--vocab_size", 300)
    run(*flags, "--normalization", "NFKC", "--lowercase", "--output_dir", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("ﬁne DOG").input_ids, skip_special_tokens=True) == "fine dog"


def test_only_a_tokenizer_folder_is_overwritten(corpus, tmp_path):
    flags = ("--train_file", corpus, "--source_lang", "en", "--target_lang", "de", "--vocab_size", 300)
    for _ in range(2):
        run(*flags, "--output_dir", tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").touch()
    with pytest.raises(InputError, match=r"out holds model.safetensors; name a new"):
        run(*flags, "--output_dir", tmp_path / "out")
    with pytest.raises(InputError, match=r"corpus.en is a file"):
        run(*flags, "--output_dir", f"{corpus}.en")


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--train_file a --dataset_name b/c",
        "--source_file a",
        "--train_file a --source_file b",
        "--train_file a --normalization NFX",
    ],
)
def test_flags_that_do_not_fit_together_are_refused(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_tokenizer.parse([*flags.split(), "--output_dir", "out"])
    assert "error: " in capsys.readouterr().err


def test_bad_input_ends_with_one_line_and_exit_code_2(corpus, tmp_path, monkeypatch, capsys):
    (tmp_path / "short.de").write_text("Eine Zeile\n", encoding="utf-8")
    good = ["--source_file", f"{corpus}.en", "--target_file", f"{corpus}.de", "--output_dir", str(tmp_path / "out")]
    for flags, message in (
        (["--target_file", str(tmp_path / "short.de")], r"short\.de.* 1\b.*line 2"),
        (["--target_file", str(tmp_path / "absent.de")], r"absent\.de: no such file"),
        (["--vocab_size", "10"], r"vocab_size 10 .* 260"),
    ):
        monkeypatch.setattr("sys.argv", ["train_tokenizer.py", *good, *flags])
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(train_tokenizer.__file__, run_name="__main__")
        assert re.fullmatch(rf"error: .*{message}.*\n", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
