"""The script from end to end: interrupted anywhere it goes on, and what it leaves is whole."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from hub_server import HubServer
from launched import TINY, Run, write_pairs

import run_translation
from modeling_vanilla import sharing, tokenization
from modeling_vanilla.errors import InputError
from modeling_vanilla.recipe import parse


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return ["--train_file", write_pairs(folder, 60), "--test_file", write_pairs(folder, 4, "test.tsv", first=70)]


def flags(corpus, output_dir, **more):
    """Thirty updates of nine a pass over the data, a checkpoint every four of them, and all kinds of noise."""
    chosen = {"output_dir": output_dir, "tokens_per_update": 250, "max_steps": 30, "save_steps": 4, "eval_steps": 9}
    chosen |= {"logging_steps": 1, "max_eval_samples": 3, "num_beams": 1, "bpe_dropout": 0.1, "ema_decay": 0.9}
    chosen |= {"target_word_dropout": 0.1, "average_checkpoints": 3} | more
    return [*TINY, *corpus, *(each for name, value in chosen.items() for each in (f"--{name}", value))]


def log(folder):
    """What an interruption must not change, line by line."""
    names = "update", "loss", "learning_rate", "eval_loss", "eval_bleu"
    written = (folder / "training_log.jsonl").read_text().splitlines()
    return [{name: line[name] for name in names if name in line} for line in map(json.loads, written)]


def result(folder):
    return [(folder / name).read_bytes() for name in ("model.safetensors", "generated_predictions.txt")]


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "out"
    Run(*flags(corpus, folder)).finish()
    return folder


def test_a_killed_run_ends_as_one_that_was_not_and_says_when_it_is_finished(corpus, uninterrupted, tmp_path):
    folder = tmp_path / "out"

    def kill(**when):
        run = Run(*flags(corpus, folder), **when)
        assert run.wait() == [-signal.SIGKILL], run.text()
        return run.text()

    kill(signals=[(0, 2, signal.SIGKILL)])  # before the first checkpoint
    assert not list(folder.glob("checkpoint-*"))
    kill(signals=[(0, 9, signal.SIGKILL)])  # where the second pass over the data begins
    assert "going on from" in kill(die_at_flush=20)  # while it writes a checkpoint
    assert list(folder.glob(".checkpoint-*"))
    kill(die_after=folder / "model.safetensors")  # while it writes the final folder
    assert not (folder / "all_results.json").exists()

    assert "going on from" in Run(*flags(corpus, folder)).finish()
    assert log(folder) == log(uninterrupted) and log(folder)[-1]["update"] == 30
    assert result(folder) == result(uninterrupted)
    assert not list(tmp_path.glob(".*partial")) and not list(folder.glob(".*"))
    assert "holds the finished run" in Run(*flags(corpus, folder)).finish()


@pytest.mark.slow
def test_ten_kills_at_random_updates_and_flushes_change_nothing(corpus, tmp_path):
    folder, whole, draw = tmp_path / "out", tmp_path / "whole", random.Random(1)
    Run(*flags(corpus, whole, max_steps=120)).finish()
    for _ in range(10):
        if draw.random() < 0.5:  # about to wait for the disk, in a checkpoint or elsewhere
            run = Run(*flags(corpus, folder, max_steps=120), die_at_flush=draw.randint(1, 50))
        else:
            reached = log(folder)[-1]["update"] if (folder / "training_log.jsonl").exists() else 0
            kill = (0, reached + draw.randint(1, 8), signal.SIGKILL)
            run = Run(*flags(corpus, folder, max_steps=120), signals=[kill])
        assert run.wait() == [-signal.SIGKILL], run.text()
    Run(*flags(corpus, folder, max_steps=120)).finish()
    assert log(folder) == log(whole) and log(folder)[-1]["update"] == 120
    assert result(folder) == result(whole)


def test_signals_and_a_full_disk_stop_with_a_checkpoint_to_go_on_from(corpus, uninterrupted, tmp_path):
    folder = tmp_path / "out"
    for number, update in (signal.SIGTERM, 5), (signal.SIGINT, 13):
        run = Run(*flags(corpus, folder), signals=[(0, update, number)])
        assert run.wait() == [128 + number], run.text()
        assert f"stopped by {number.name}" in run.text()
        assert sharing.load_model(max(folder.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime))
    before = {path.name for path in folder.glob("checkpoint-*")}
    run = Run(*flags(corpus, folder), largest_file=40_000)  # enough for all files but the weights
    assert run.wait() == [2]
    assert "could not be written" in run.text() and "free some space" in run.text()
    assert {path.name for path in folder.glob("checkpoint-*")} == before

    Run(*flags(corpus, folder)).finish()
    assert log(folder) == log(uninterrupted)
    assert result(folder) == result(uninterrupted)


def test_a_full_disk_at_the_end_is_told_in_a_line_and_mended_by_the_same_command(corpus, uninterrupted, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(uninterrupted, folder)
    (folder / "all_results.json").unlink()
    recipe = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps(recipe | {"output_dir": str(folder)}))
    before = (folder / "model.safetensors").read_bytes()
    run = Run(*flags(corpus, folder), largest_file=40_000)
    assert run.wait() == [2]
    assert f"error: {folder} could not be written (" in run.text() and "free some space" in run.text()
    assert "Traceback" not in run.text() and not (folder / "all_results.json").exists()
    assert (folder / "model.safetensors").read_bytes() == before
    Run(*flags(corpus, folder)).finish()
    assert result(folder) == result(uninterrupted) and (folder / "all_results.json").exists()


FLAGS = [*TINY, "--train_file", "demo", "--max_steps", "9"]


def claim(folder, *more):
    recipe, overrides = parse([*FLAGS, "--output_dir", str(folder), *more])
    return run_translation.claim_output_dir(recipe, overrides)


HUB = ["--push_to_hub", "--hub_model_id", "name"]


@pytest.fixture
def finished(tmp_path):
    """The folder of a run that has ended, without a thought for the training."""
    folder = tmp_path / "out"
    claim(folder, *HUB)
    recipe, overrides = parse([*FLAGS, "--output_dir", str(folder)])
    tokenizer = tokenization.train(["a dog"], 300)
    sharing.save_model(run_translation.build_model(recipe, overrides, tokenizer), tokenizer, folder)
    (folder / "all_results.json").write_text("{}")
    return folder


def main(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["run_translation.py", *map(str, flags)])
    run_translation.main()


def test_a_run_that_was_killed_while_it_uploaded_uploads_on_the_same_command(finished, monkeypatch, capsys):
    with HubServer("right") as server, server.in_use("right"):
        for _ in range(2):
            main(monkeypatch, *FLAGS, "--output_dir", finished, *HUB)
            said = capsys.readouterr().out
            assert "holds the finished run" in said and f"The model is on the Hub: {server.url}/you/name" in said
        assert len(server.commits["you/name"]) == 2
        assert server.files("you/name")["model.safetensors"] == (finished / "model.safetensors").read_bytes()
        assert "all_results.json" not in server.files("you/name")


def test_predictions_that_do_not_fit_on_the_disk_are_told_in_a_line(finished, corpus, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    predict = ["--model_name_or_path", finished, "--do_predict", *corpus[2:], "--num_beams", 1, *TINY[:4]]
    with pytest.raises(InputError, match=r"out could not be written \(.*No space left on device\): free some space"):
        main(monkeypatch, *predict)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount a disk")
def test_the_output_folder_may_be_a_disk_of_its_own(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        (folder / "lost+found").mkdir()  # of a fresh ext4
        assert [claim(folder), claim(folder)] == ["new", "begun"]
        with sharing.written_aside(folder / "checkpoint-1") as aside:
            (aside / "weights").write_bytes(bytes(100_000))
        with sharing.written_aside(folder) as aside:
            (aside / "weights").write_bytes(bytes(100_000))
        with pytest.raises(InputError, match="No space left"), sharing.written_aside(folder) as aside:
            (aside / "weights").write_bytes(bytes(2_000_000))
        assert {path.name for path in folder.iterdir()} == {"lost+found", "recipe.json", "checkpoint-1", "weights"}
        assert (folder / "weights").stat().st_size == 100_000
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_changed_recipe_is_refused_by_the_flag_that_changed(tmp_path):
    folder = tmp_path / "out"
    assert claim(folder, "--dropout", "0.3") == "new"
    assert claim(folder, "--dropout", "0.3", "--logging_steps", "7") == "begun"
    with pytest.raises(InputError, match="--dropout 0.3, not 0.1"):
        claim(folder, "--dropout", "0.1")
    with pytest.raises(InputError, match="--dropout 0.3, not None"):
        claim(folder)
    with pytest.raises(InputError, match="--seed 42, not 43"):
        claim(folder, "--dropout", "0.3", "--seed", "43")
    with pytest.raises(InputError, match="--norm_position None, not pre"):
        claim(folder, "--dropout", "0.3", "--norm_position", "pre")


def test_a_longer_run_goes_on_where_the_finished_one_ended(tmp_path):
    folder = tmp_path / "out"
    claim(folder)
    (folder / "all_results.json").write_text("{}")
    assert claim(folder) == "finished"
    assert claim(folder, "--max_steps", "10") == "begun"
    assert claim(folder, "--max_steps", "10") == "begun"


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(InputError, match="holds something else"):
        claim(tmp_path)


def test_dropout_flags_reach_a_new_and_a_loaded_model(tmp_path):
    rates = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.1, "label_smoothing": 0.05}
    chosen = [text for name, value in rates.items() for text in (f"--{name}", str(value))]
    recipe, overrides = parse([*TINY, "--output_dir", str(tmp_path), *chosen])
    model = run_translation.build_model(recipe, overrides, range(300))
    assert {name: getattr(model.config, name) for name in rates} == rates
    assert asdict(recipe)["preset"] == "tiny"
