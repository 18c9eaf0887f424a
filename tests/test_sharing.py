import json
import os
import shutil
import subprocess
import sys
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MarianConfig, MarianMTModel

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, sharing, tokenization
from modeling_vanilla.errors import InputError


TEXTS = ["A dog runs.", "", "Two men sit on a bench in the park."]
# Run with names of models; prints their translations by model.translate and by the pipeline.
WITHOUT_THE_PACKAGE = f"""
import json, socket, sys

def refuse(*args, **kwargs):
    raise RuntimeError("this process must not use the network")

socket.socket.connect = socket.getaddrinfo = refuse
sys.modules["modeling_vanilla"] = None  # from here on "import modeling_vanilla" fails
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

for name in sys.argv[1:]:
    model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    print(json.dumps(model.translate({TEXTS}, tokenizer, max_new_tokens=8)))
    translator = pipeline("translation", model=name, trust_remote_code=True, device="cpu", max_new_tokens=8)
    print(json.dumps([result["translation_text"] for result in translator({TEXTS})]))
"""


pytestmark = pytest.mark.filterwarnings("ignore:translations that hit the length limit")


def make(vocab_size=None):
    tokenizer = tokenization.train(TEXTS, vocab_size=300)
    torch.manual_seed(0)
    config = VanillaConfig.preset("tiny", vocab_size=vocab_size or len(tokenizer), encoder_layers=1, decoder_layers=1)
    model = VanillaForConditionalGeneration(config).eval()
    with torch.no_grad():  # an untrained model says the same whatever the source, if it hears it softly
        for parameter in model.model.decoder.layers[0].encoder_attn.parameters():
            parameter.mul_(8)
    return model, tokenizer


@pytest.fixture
def folder(tmp_path):
    sharing.save_model(*make(), tmp_path / "out")
    return tmp_path / "out"


def lay_out_as_on_the_hub(folder, cache):
    """you/name in a cache of the Hub: content in blobs, and links to it in the snapshot of a commit."""
    repository = cache / "hub" / "models--you--name"
    commit = "0123456789" * 4
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / part).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for file in folder.iterdir():
        content = file.read_bytes()
        blob = repository / "blobs" / sha256(content).hexdigest()
        blob.write_bytes(content)
        (repository / "snapshots" / commit / file.name).symlink_to(os.path.join("..", "..", "blobs", blob.name))


def test_a_copied_folder_and_a_hub_cache_translate_alike_offline_without_this_package(folder, tmp_path):
    model, tokenizer = sharing.load_model(folder)
    expected = model.translate(TEXTS, tokenizer, max_new_tokens=8)
    assert len(set(expected)) == len(TEXTS)
    copied = tmp_path / "elsewhere" / "copied"
    shutil.copytree(folder, copied)
    shutil.rmtree(folder)
    lay_out_as_on_the_hub(copied, tmp_path / "cache")
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE, str(copied), "you/name"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert [json.loads(line) for line in result.stdout.splitlines()] == [expected] * 4


def test_loading_runs_no_code_of_the_folder(folder):
    for file in folder.glob("*_vanilla.py"):
        file.write_text("raise RuntimeError('this code must not run')")
    assert type(sharing.load_model(folder)[0]) is VanillaForConditionalGeneration


def test_saving_what_was_loaded_gives_the_same_files(folder, tmp_path):
    sharing.save_model(*sharing.load_model(folder), tmp_path / "again")
    contents = [{file.name: file.read_bytes() for file in path.iterdir()} for path in (folder, tmp_path / "again")]
    for content in contents:  # transformers 4 writes this file too, the second time in more words
        content.pop("special_tokens_map.json", None)
    assert contents[0] == contents[1]


def test_saving_over_a_model_replaces_it_and_leaves_other_files_alone(folder):
    (folder / "notes.txt").write_text("mine")
    before = {file.name for file in folder.iterdir()}
    model, tokenizer = make()
    with torch.no_grad():
        model.lm_head.weight.fill_(0.5)
    sharing.save_model(model, tokenizer, folder)
    assert (sharing.load_model(folder)[0].lm_head.weight == 0.5).all()
    assert {file.name for file in folder.iterdir()} == before


def test_an_error_while_writing_leaves_no_folder_and_no_change(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a").write_text("old")
    for name in ("old", "new"):
        full = pytest.raises(InputError, match="disk full.*free some space")
        with full, sharing.written_aside(tmp_path / name) as aside:
            (aside / "a").write_text("half")
            raise OSError("disk full")
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "a"]
    assert (tmp_path / "old" / "a").read_text() == "old"


def test_what_a_killed_run_left_does_not_get_into_the_next_folder(tmp_path):
    (tmp_path / ".new.partial").mkdir()
    (tmp_path / ".new.partial" / "stale").write_text("")
    with sharing.written_aside(tmp_path / "new") as aside:
        (aside / "sub").mkdir()
        (aside / "sub" / "a").write_text("")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "sub", "a"]


def test_refuses_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        sharing.load_model(tmp_path)
    with pytest.raises(InputError, match="neither a folder nor a model found on the Hub"):
        sharing.load_model(tmp_path / "missing")


def test_refuses_weights_that_are_cut_short(folder):
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:1000])
    with pytest.raises(InputError, match="holds no whole model"):
        sharing.load_model(folder)


def test_refuses_weights_that_are_incomplete(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.encoder.layers.0.fc1.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="lacks 1 of the model's weights"):
        sharing.load_model(folder)


def test_refuses_a_tokenizer_larger_than_the_model(tmp_path):
    sharing.save_model(*make(vocab_size=100), tmp_path / "out")
    with pytest.raises(InputError, match=r"has \d+ pieces, its model only 100"):
        sharing.load_model(tmp_path / "out")


def test_refuses_another_kind_of_model(tmp_path):
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    MarianMTModel(MarianConfig(vocab_size=50, pad_token_id=49, **sizes, **heads)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="holds a marian model"):
        sharing.load_model(tmp_path)


def test_refuses_a_device_that_does_not_exist(folder):
    with pytest.raises(InputError, match="device gpu cannot be used"):
        sharing.load_model(folder, device="gpu")
