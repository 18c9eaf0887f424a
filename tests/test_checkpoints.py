"""Checkpoints are whole or passed over, complete model folders, and deleted only when nothing needs them."""

import multiprocessing
import os
import resource

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, checkpoints, sharing, tokenization
from modeling_vanilla.errors import InputError


LINES = ["a dog runs", "ein Hund rennt", "two cats sleep", "zwei Katzen schlafen"]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenization.train(LINES, 300)


def build(seed=0):
    torch.manual_seed(seed)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    return VanillaForConditionalGeneration(VanillaConfig.preset("tiny", vocab_size=300, **sizes)).eval()


@pytest.fixture
def save(tokenizer, tmp_path):
    def save(update, seed=0):
        folder = tmp_path / f"checkpoint-{update}"
        tensors = {"optimizer": {"x|exp_avg": torch.full((3,), float(update)), "x|step": torch.tensor(2.0)}}
        checkpoints.save(folder, build(seed), tokenizer, tensors, {"update": update, "best": -0.5})
        return folder

    return save


def left(folder):
    return [checkpoints.number(each) for each in checkpoints.all_in(folder)]


def test_a_checkpoint_gives_everything_back(save):
    weights, tensors, progress = checkpoints.load(save(7, seed=3))
    model = build()
    checkpoints.load_weights(model, weights)
    for (name, ours), theirs in zip(model.named_parameters(), build(seed=3).parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert tensors["optimizer"]["x|exp_avg"].tolist() == [7, 7, 7] and tensors["optimizer"]["x|step"] == 2
    assert progress == {"update": 7, "best": -0.5}


def test_a_checkpoint_is_a_complete_model_folder(save, tokenizer, tmp_path):
    folder = save(7, seed=3)
    sharing.save_model(build(), tokenizer, tmp_path / "final")
    assert {path.name for path in (tmp_path / "final").iterdir()} == {path.name for path in folder.iterdir()} - {
        checkpoints.STATE
    }
    model, _ = sharing.load_model(folder)
    assert model.translate("a dog", tokenizer) == build(seed=3).translate("a dog", tokenizer)
    assert AutoModelForSeq2SeqLM.from_pretrained(folder).config.vocab_size == 300


def test_weights_of_another_model_are_refused(save):
    weights, _, _ = checkpoints.load(save(1))
    name = "model.encoder.layers.0.fc1.weight"
    with pytest.raises(InputError, match=name):
        checkpoints.load_weights(build(), {key: tensor for key, tensor in weights.items() if key != name})


def delete_half(folder):
    for path in sorted(folder.rglob("*.json")):
        path.unlink()


def empty(folder):
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


HARM = {
    "weights cut short": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    "weights empty": lambda folder: os.truncate(folder / "model.safetensors", 0),
    "moments missing": lambda folder: (folder / checkpoints.STATE / "optimizer.safetensors").unlink(),
    "header overwritten": lambda folder: (folder / "model.safetensors").write_bytes(
        b"\xff" * (folder / "model.safetensors").stat().st_size
    ),
    "progress cut short": lambda folder: os.truncate(folder / checkpoints.STATE / "progress.json", 5),
    "manifest cut short": lambda folder: os.truncate(folder / checkpoints.STATE / checkpoints.MANIFEST, 9),
    "tokenizer missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "half deleted": delete_half,
    "empty": empty,
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_harmed_checkpoint_is_passed_over_with_a_message(save, tmp_path, harm):
    good, bad, said = save(900), save(1000), []
    assert checkpoints.newest(tmp_path, said.append) == bad and not said
    harm(bad)
    assert checkpoints.newest(tmp_path, said.append) == good
    assert len(said) == 1 and said[0].startswith(f"{bad} is passed over: ")


def test_there_may_be_no_checkpoint(tmp_path):
    assert checkpoints.newest(tmp_path) is None and checkpoints.newest(tmp_path / "none") is None


def test_rotation_goes_by_number_and_keeps_the_best(save, tmp_path):
    for update in 100, 900, 1000, 1100:
        save(update)
    checkpoints.rotate(tmp_path, keep=2, best=100)
    assert left(tmp_path) == [100, 1000, 1100]


def test_checkpoints_off_schedule_neither_displace_nor_join_those_to_be_averaged(save, tmp_path):
    for update in 10, 17, 20, 23, 30, 36:  # 17 the best, 23 and 36 on a signal
        save(update)
        checkpoints.rotate(tmp_path, keep=3, every=10, best=17)
    assert left(tmp_path) == [17, 20, 30, 36]
    save(40)
    checkpoints.rotate(tmp_path, keep=3, every=10, best=17)
    assert left(tmp_path) == [17, 20, 30, 40]
    assert [path.name for path in checkpoints.scheduled(tmp_path, 10)] == [f"checkpoint-{n}" for n in (20, 30, 40)]


def test_rotation_never_counts_a_harmed_checkpoint_as_kept(save, tmp_path):
    for update in 10, 20, 30:
        save(update)
    HARM["weights empty"](tmp_path / "checkpoint-30")
    checkpoints.rotate(tmp_path, keep=1, every=10)
    assert left(tmp_path) == [20]


def test_what_a_killed_run_left_half_written_is_removed(save, tmp_path):
    (tmp_path / ".checkpoint-5.partial" / "training_state").mkdir(parents=True)
    (tmp_path / "..checkpoint-5.partial.partial").mkdir()
    checkpoints.rotate(tmp_path, keep=1)
    assert not list(tmp_path.glob(".*"))


def save_with_a_limit(folder, tokenizer, limit, results):
    torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        checkpoints.save(folder, build(), tokenizer, {"optimizer": {"x": torch.zeros(20_000)}}, {})
    except InputError as error:
        results.put(str(error))


@pytest.mark.parametrize("limit", [1_000, 45_000, 70_000])  # bytes: smaller than code, weights, moments
def test_a_full_disk_leaves_earlier_checkpoints_alone(save, tokenizer, tmp_path, limit):
    good = save(1)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=save_with_a_limit, args=(tmp_path / "checkpoint-2", tokenizer, limit, results))
    process.start()
    assert "checkpoint-2 could not be written (" in results.get(timeout=300)
    process.join()
    assert list(tmp_path.iterdir()) == [good] and checkpoints.newest(tmp_path) == good
