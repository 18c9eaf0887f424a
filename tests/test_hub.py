"""A model goes to the Hub in one process and comes back in another that has never heard of this package."""

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from hub_server import HubServer

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, hub, sharing, tokenization
from modeling_vanilla.errors import InputError


TOKEN, WRONG_TOKEN = "hf_KeepThisToYourself", "hf_NotTheRightOne"
TEXTS = ["a small dog sleeps", "the cat"]
PUSH = f"""
import sys
from modeling_vanilla import hub, sharing
from modeling_vanilla.errors import InputError
folder = sys.argv[1]
try:
    hub.push_to_hub(folder, "you/name", token="{WRONG_TOKEN}")
except InputError as error:
    print(error)
print(hub.push_to_hub(folder, "name"))
model, tokenizer = sharing.load_model(folder)
print(model.translate({TEXTS}, tokenizer))
"""
LOAD = f"""
import sys
sys.modules["modeling_vanilla"] = None  # from here on "import modeling_vanilla" fails
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("you/name", trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained("you/name", trust_remote_code=True)
print(model.translate({TEXTS}, tokenizer))
"""


@pytest.fixture
def folder(tmp_path):
    """A trained folder as a run leaves it: the model amid things that are nobody else's."""
    tokenizer = tokenization.train(TEXTS, vocab_size=270)
    config = VanillaConfig.preset("tiny", vocab_size=len(tokenizer), max_position_embeddings=64)
    sharing.save_model(VanillaForConditionalGeneration(config), tokenizer, tmp_path / "run")
    for name in (
        "optimizer.pt",
        "optimizer.safetensors",
        "training_args.bin",
        "random.pkl",
        "all_results.json",
        ".env",
    ):
        (tmp_path / "run" / name).write_bytes(b"private")
    (tmp_path / "run" / "checkpoint-10").mkdir()
    card = '---\nlicense: mit\n---\n\nA card.\n\n## Use\n\n    AutoModelForSeq2SeqLM.from_pretrained("run")\n'
    (tmp_path / "run" / "README.md").write_text(card, encoding="utf-8")
    return tmp_path / "run"


def python(script, *arguments, home, **environment):
    """Run a script in a fresh interpreter outside the repository; its output lines."""
    settings = {"HF_HOME": home, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_") and name != "PYTHONPATH"
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=inherited | {name: str(value) for name, value in settings.items()},
        cwd=home.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for token in (TOKEN, WRONG_TOKEN):
        assert token not in done.stderr + done.stdout
    return done.stdout.splitlines()


def test_only_what_a_model_needs_travels(folder):
    names = [path.name for path in hub.travelling_files(folder)]
    assert [name for name in names if name != "special_tokens_map.json"] == [  # which transformers 5 does not write
        "README.md",
        "config.json",
        "configuration_vanilla.py",
        "generation_config.json",
        "generation_vanilla.py",
        "kernels_vanilla.py",
        "model.safetensors",
        "modeling_vanilla.py",
        "pipeline_vanilla.py",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no trained model"):
        hub.travelling_files(folder)


def test_the_test_server_serves_parts_of_files():
    with HubServer(TOKEN) as server:
        server.private["you/name"], server.commits["you/name"] = False, []
        server.commit("you/name", "a file", {"README.md": b"0123456789"})
        request = urllib.request.Request(
            f"{server.url}/you/name/resolve/main/README.md", headers={"Range": "bytes=2-4"}
        )
        with urllib.request.urlopen(request) as answer:
            assert (answer.status, answer.read(), answer.headers["Content-Range"]) == (206, b"234", "bytes 2-4/10")


@pytest.mark.slow
def test_a_pushed_model_translates_elsewhere_and_then_offline(folder, tmp_path):
    repository = Path(__file__).parents[1]
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    with HubServer(TOKEN) as server:
        refusal, address, *here = python(
            PUSH, folder, home=home, PYTHONPATH=repository, HF_ENDPOINT=server.url, HF_TOKEN=TOKEN
        )
        there = python(LOAD, home=elsewhere, HF_ENDPOINT=server.url)
        uploaded = server.files("you/name")
    offline = python(LOAD, home=elsewhere, HF_HUB_OFFLINE="1")

    assert here == there == offline != []
    assert address == f"{server.url}/you/name"
    assert "401" in refusal and "hf auth login" in refusal
    assert sorted(uploaded) == [path.name for path in hub.travelling_files(folder)]
    assert uploaded["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert b'from_pretrained("you/name")' in uploaded["README.md"]
    assert ("GET", "/you/name/resolve/main/modeling_vanilla.py", 200) in [
        (method, path.replace(server.commits["you/name"][-1][0], "main"), status)
        for method, path, status in server.requests
    ]
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path
