"""Two and three processes make the updates, scores and files that one makes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.utils import DistributedType
from launched import TINY, Run, free_port, write_pairs
from safetensors.torch import load_file

from modeling_vanilla import fsdp, training
from modeling_vanilla.errors import InputError
from modeling_vanilla.recipe import Recipe


ROOT = Path(__file__).parents[1]
# Other micro-batches sum a gradient in another order. Adam would blow up the rounding of one that is close to zero, as
# that of the keys' biases, which shift all scores of a query alike; with this epsilon it does not.
EXACT = ["--dropout", "0", "--seed", "3", "--num_beams", "2", "--adam_epsilon", "1e-3"]
SHARDS = pytest.mark.skipif(not fsdp.KNOWS_CPUS, reason="this PyTorch shards on GPUs only")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return {
        "--train_file": write_pairs(folder, 60),
        "--validation_file": write_pairs(folder, 5, "validation.tsv", first=60),
        "--test_file": write_pairs(folder, 7, "test.tsv", first=70),
    }


def flags(corpus, output_dir, **more):
    """Twenty updates of five a pass over the data."""
    chosen = {**corpus, "--output_dir": output_dir, "--tokens_per_update": 330, "--max_steps": 20}
    chosen |= {"--logging_steps": 1, "--eval_steps": 10} | {f"--{name}": value for name, value in more.items()}
    return [*TINY, *EXACT, *(each for item in chosen.items() for each in item)]


def lines(folder, name):
    log = (folder / "training_log.jsonl").read_text().splitlines()
    return [line[name] for line in map(json.loads, log) if name in line]


def largest_difference(folder, other):
    ours, theirs = (load_file(each / "model.safetensors") for each in (folder, other))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def assert_equal_runs(folder, other):
    assert largest_difference(folder, other) < 1e-5
    assert lines(folder, "learning_rate") == lines(other, "learning_rate")
    assert lines(folder, "loss") == pytest.approx(lines(other, "loss"), abs=1e-5)
    for name in ("eval_loss", "eval_bleu", "eval_chrf"):
        assert lines(folder, name) == pytest.approx(lines(other, name), abs=1e-5)
    predictions = [(each / "generated_predictions.txt").read_bytes() for each in (folder, other)]
    assert predictions[0] == predictions[1] and predictions[0].count(b"\n") == 7


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """What one process makes of it."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    Run(*flags(corpus, folder)).finish()
    return folder


@pytest.mark.parametrize("processes, max_tokens_per_device", [(1, 90), (2, 4096), (3, 90)])
def test_devices_and_accumulation_only_split_an_update(corpus, alone, tmp_path, processes, max_tokens_per_device):
    folder = tmp_path / "out"
    Run(*flags(corpus, folder, max_tokens_per_device=max_tokens_per_device), processes=processes).finish()
    assert_equal_runs(folder, alone)


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=SHARDS)])
def test_noise_does_not_depend_on_the_processes_nor_on_an_interruption(corpus, tmp_path, sharded):
    noise = {"bpe_dropout": 0.2, "source_word_dropout": 0.1, "target_word_dropout": 0.1, "save_steps": 7}
    one, two = tmp_path / "one", tmp_path / "two"
    Run(*flags(corpus, one, **noise)).finish()
    Run(*flags(corpus, two, **noise | {"max_steps": 7})).finish()
    Run(*flags(corpus, two, **noise, dataloader_num_workers=2, fsdp=sharded), processes=2).finish()
    assert largest_difference(one, two) < 1e-5
    assert lines(two, "update") == lines(one, "update")
    assert lines(two, "loss") == pytest.approx(lines(one, "loss"), abs=1e-5)


def test_a_stream_gives_two_processes_the_updates_of_one(corpus, alone, tmp_path):
    stream = {"streaming": True, "tokenizer_name": alone, "bpe_dropout": 0.2, "save_steps": 7}
    one, two = tmp_path / "one", tmp_path / "two"
    Run(*flags(corpus, one, **stream)).finish()
    Run(*flags(corpus, two, **stream | {"max_steps": 8}), processes=2).finish()
    said = Run(*flags(corpus, two, **stream), processes=2).finish()
    assert "a stream of training pairs" in said and "going on from" in said
    assert lines(two, "loss") == pytest.approx(lines(one, "loss"), abs=1e-5)
    assert largest_difference(one, two) < 1e-5


def test_every_process_tells_its_error_in_a_line_and_says_which_it_is(corpus, tmp_path):
    missing = corpus | {"--train_file": tmp_path / "missing"}
    for _ in range(2):
        run = Run(*flags(missing, tmp_path / "out"), processes=2)
        assert run.wait() == [2, 2]
        told = [line.partition("error: ") for line in run.text().splitlines() if "error: " in line]
        assert sorted(who for who, _, _ in told) == ["", "process 1: "]
        assert all("missing" in what for _, _, what in told)


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=SHARDS)])
def test_processes_without_work_take_part(corpus, tmp_path, sharded):
    """One pair for three processes, in training and in every evaluation."""
    single = {name: write_pairs(tmp_path, 1, f"{name}.tsv") for name in corpus}
    folder = tmp_path / "out"
    Run(*flags(single, folder, max_steps=3, eval_steps=2, fsdp=sharded), processes=3).finish()
    assert lines(folder, "update") == [1, 2, 2, 3]
    assert (folder / "generated_predictions.txt").read_text().count("\n") == 1


@pytest.mark.parametrize("number, ranks", [(signal.SIGTERM, [1]), (signal.SIGINT, [0, 1, 0, 1])])
def test_a_signal_to_one_process_or_twice_to_all_stops_them_with_a_checkpoint(corpus, tmp_path, number, ranks):
    """On Ctrl-C the terminal and then the launcher send one to each."""
    folder = tmp_path / "out"
    run = Run(*flags(corpus, folder), processes=2, signals=[(rank, 4, number) for rank in ranks])
    assert run.wait() == [128 + number] * 2
    assert f"stopped by {number.name}; the same command goes on from" in run.text()
    assert lines(folder, "update")[-1] == 5
    assert [each.name for each in folder.glob("checkpoint-*")] == ["checkpoint-5"]


@SHARDS
@pytest.mark.parametrize("processes", [2, 3])
def test_sharded_training_equals_that_of_one_process(corpus, alone, tmp_path, processes):
    folder = tmp_path / "out"
    said = Run(*flags(corpus, folder, fsdp=True, max_tokens_per_device=90), processes=processes).finish()
    assert_equal_runs(folder, alone)
    here, everywhere = (
        int(re.search(rf"([\d,]+) parameters{where}", said)[1].replace(",", "")) for where in (" on this device", ",")
    )
    assert everywhere / processes <= here < 1.1 * everywhere / processes


@SHARDS
def test_a_sharded_run_goes_on_with_a_copy_on_each_device_and_back(corpus, tmp_path):
    """Weights, moments and moving average are stored whole."""
    more = {"ema_decay": 0.9, "save_steps": 5}
    one, many = tmp_path / "one", tmp_path / "many"
    Run(*flags(corpus, one, **more)).finish()
    for steps, processes, sharded in [(5, 1, False), (10, 3, True), (15, 2, False), (20, 2, True)]:
        Run(*flags(corpus, many, **more | {"max_steps": steps, "fsdp": sharded}), processes=processes).finish()
    assert_equal_runs(many, one)
    for name in ("optimizer", "ema"):
        ours, theirs = (load_file(each / f"checkpoint-20/training_state/{name}.safetensors") for each in (many, one))
        assert ours.keys() == theirs.keys()
        assert all((ours[key] - theirs[key]).abs().max() < 1e-5 for key in ours)


def test_other_ways_to_split_a_model_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(training.Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(InputError, match="DEEPSPEED do not train together here: use torchrun"):
        training.accelerator(Recipe(output_dir=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, options",
    [
        ("torch.distributed.run", "--nproc_per_node 2"),
        ("accelerate.commands.launch", "--multi_gpu --num_processes 2 --num_machines 1"),
        pytest.param("accelerate.commands.launch", "--use_fsdp --num_processes 2 --num_machines 1", marks=SHARDS),
    ],
)
def test_the_launchers_of_the_readme_start_processes_that_work_together(corpus, alone, tmp_path, launcher, options):
    port = ["--master_port" if "torch" in launcher else "--main_process_port", str(free_port())]
    command = [sys.executable, "-m", launcher, *options.split(), *port, str(ROOT / "run_translation.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    arguments = map(str, flags(corpus, tmp_path / "out"))
    result = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["fsdp"] == ("fsdp" in options)
    assert largest_difference(tmp_path / "out", alone) < 1e-5
    assert torch.equal(
        torch.tensor(lines(tmp_path / "out", "learning_rate")), torch.tensor(lines(alone, "learning_rate"))
    )
