"""A saved folder gives the same model back: in a new process, without this package, however transformers loads it."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors import safe_open

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, VanillaModel
from modeling_vanilla.modeling_vanilla import sinusoids


SOURCE, TARGET = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]), torch.tensor([[1, 11, 12], [1, 13, 14]])
SHARING = [(True, True), (True, False), (False, False)]  # tie_word_embeddings, share_encoder_decoder_embeddings


def build(cls=VanillaForConditionalGeneration, **fields):
    torch.manual_seed(0)
    return cls(VanillaConfig.preset("tiny", vocab_size=50, d_model=32, encoder_layers=1, **fields)).eval()


def logits(model):
    with torch.no_grad():
        return model(SOURCE, (SOURCE != 0).long(), TARGET).logits


def in_a_new_process(program, *arguments, cwd):
    """Run the program with nothing cached and no network; it finds this package only by its first argument."""
    environment = {"HF_HOME": str(cwd / "hf_home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result


LOAD_WITH_THE_PACKAGE = """
import sys
package, folder, output = sys.argv[1:]
sys.path.insert(0, package)
import torch
from transformers import AutoModelForSeq2SeqLM
from modeling_vanilla import VanillaForConditionalGeneration as Vanilla

source, target = torch.load(output + "/batch.pt")
results = {}
for attempt in range(5):  # freed memory is sometimes zero, and sometimes right by luck
    for name, cls, arguments in [
        ("class", Vanilla, {}),
        ("auto", AutoModelForSeq2SeqLM, {}),
        ("remote", AutoModelForSeq2SeqLM, {"trust_remote_code": True}),
        ("device_map", Vanilla, {"device_map": "cpu"}),
        ("bfloat16", Vanilla, {"dtype": torch.bfloat16}),
    ]:
        model = cls.from_pretrained(folder, **arguments)
        results[f"{name} {attempt}"] = {
            "table": model.model.encoder.embed_positions.table,
            "logits": model(source, (source != 0).long(), target).logits.detach(),
        }
torch.save(results, output + "/results.pt")
"""


def test_every_way_of_loading_gives_the_same_logits(tmp_path):
    model = build()
    model.save_pretrained(tmp_path / "folder")
    torch.save((SOURCE, TARGET), tmp_path / "batch.pt")
    package = Path(sys.modules["modeling_vanilla"].__file__).parents[1]
    in_a_new_process(LOAD_WITH_THE_PACKAGE, package, tmp_path / "folder", tmp_path, cwd=tmp_path)
    results = torch.load(tmp_path / "results.pt")
    assert len(results) == 25
    for name, result in results.items():
        assert torch.equal(result["table"].float(), sinusoids(1024, 32)), name
        expected = logits(build().bfloat16() if "bfloat16" in name else model)
        assert torch.equal(result["logits"], expected) or "bfloat16" in name, name
        torch.testing.assert_close(result["logits"].float(), expected.float(), atol=0.05, rtol=0.05)


LOAD_WITHOUT_THE_PACKAGE = """
import sys
sys.modules["modeling_vanilla"] = None  # importing it now fails, even where it is installed
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

first, second, output = sys.argv[1:]
source, target = torch.load(output + "/batch.pt")
mask = (source != 0).long()
results = {}
for name in (first, second):
    model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True)
    results[name] = model(source, mask, target).logits.detach()
config = AutoConfig.from_pretrained(first, trust_remote_code=True)
features = AutoModel.from_pretrained(first, trust_remote_code=True)
results["features"] = features(source, mask, target).last_hidden_state.detach()
fresh = AutoModelForSeq2SeqLM.from_config(config, trust_remote_code=True)
results["generated"] = model.generate(source, attention_mask=mask, max_length=9)
model.save_pretrained(output + "/again")
torch.save(results, output + "/results.pt")
"""


def test_the_folder_loads_and_runs_its_own_code_where_the_package_is_missing(tmp_path):
    model = build()
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        model.save_pretrained(folder)
    code = second / "modeling_vanilla.py"
    code.write_text(code.read_text().replace("x * math.sqrt(self.config.d_model)", "x * 0.0"))
    torch.save((SOURCE, TARGET), tmp_path / "batch.pt")
    in_a_new_process(LOAD_WITHOUT_THE_PACKAGE, first, second, tmp_path, cwd=tmp_path)
    results = torch.load(tmp_path / "results.pt")
    assert torch.equal(results[str(first)], logits(model))
    assert not torch.allclose(results[str(second)], logits(model), atol=1e-3)
    assert torch.equal(model.lm_head(results["features"]), logits(model))
    assert {path.name for path in (tmp_path / "again").glob("*.py")} == {path.name for path in first.glob("*.py")}


@pytest.mark.parametrize("cls", [VanillaForConditionalGeneration, VanillaModel])
@pytest.mark.parametrize("tie, share", SHARING)
def test_loading_initialises_nothing_anew(cls, tie, share, tmp_path):
    model = build(cls, tie_word_embeddings=tie, share_encoder_decoder_embeddings=share, norm_position="pre")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.save_pretrained(tmp_path)
    loaded, report = cls.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert all((parameter == 0.5).all() for parameter in loaded.parameters())


def test_half_precision_is_kept_on_disk_and_comes_back_on_request(tmp_path):
    build().bfloat16().save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        model = VanillaForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert torch.equal(model.model.decoder.embed_positions.table, sinusoids(1024, 32))


@pytest.mark.parametrize(
    "tie, share, expected",
    [
        (True, True, {"model.shared.weight"}),
        (True, False, {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}),
        (False, False, {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"}),
    ],
)
def test_each_matrix_is_on_disk_once_and_no_table_is(tie, share, expected, tmp_path):
    model = build(tie_word_embeddings=tie, share_encoder_decoder_embeddings=share)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        keys = set(file.keys())
        assert file.metadata() == {"format": "pt"}
    assert {key for key in keys if "layers" not in key} == expected
    parameters = {id(p): name for name, p in model.named_parameters()}
    assert len(keys) == len(parameters)


def test_the_folder_holds_settings_weights_and_code_but_no_pickle(tmp_path):
    build().save_pretrained(tmp_path)
    code = [f"{name}_vanilla.py" for name in ("configuration", "generation", "kernels", "modeling", "pipeline")]
    settings = ["config.json", "generation_config.json"]
    assert {path.name for path in tmp_path.iterdir()} == {*settings, "model.safetensors", *code}


@pytest.mark.parametrize("cls", [VanillaForConditionalGeneration, VanillaModel])
def test_the_folder_names_its_own_code_for_every_auto_class_and_the_pipeline(cls, tmp_path):
    model = build(cls)
    model.config.auto_map = {"AutoModel": "someone/else--modeling_vanilla.VanillaModel"}
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_vanilla.VanillaConfig",
        "AutoModel": "modeling_vanilla.VanillaModel",
        "AutoModelForSeq2SeqLM": "modeling_vanilla.VanillaForConditionalGeneration",
    }
    assert config["custom_pipelines"]["translation"]["impl"] == "pipeline_vanilla.VanillaTranslationPipeline"


def test_shards_load_as_one_file_does(tmp_path):
    model = build()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert torch.equal(logits(VanillaForConditionalGeneration.from_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize("tie, share", SHARING)
def test_accelerate_resumes_the_exact_weights_without_a_word(tie, share, tmp_path, caplog):
    model = build(tie_word_embeddings=tie, share_encoder_decoder_embeddings=share).train()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    model(SOURCE, labels=TARGET).loss.backward()
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_state(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    with caplog.at_level(logging.WARNING):
        accelerator.load_state(tmp_path)
    assert not [record for record in caplog.records if "key" in record.message]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.lm_head.weight is model.model.decoder.embed_tokens.weight) == tie


def test_decoding_settings_are_saved_with_the_model_and_used_by_generate(tmp_path):
    model = build()
    model.generation_config.update(num_beams=5, length_penalty=0.6, max_length=9, early_stopping=False)
    model.save_pretrained(tmp_path)
    loaded = VanillaForConditionalGeneration.from_pretrained(tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert (settings["num_beams"], settings["length_penalty"], settings["max_length"]) == (5, 0.6, 9)
    assert "num_beams" not in json.loads((tmp_path / "config.json").read_text())
    expected = model.generate(SOURCE, num_beams=5, length_penalty=0.6, max_length=9)
    # transformers 5.0 does not count the first token against a limit that comes from the folder.
    assert torch.equal(loaded.generate(SOURCE)[:, :9], expected)


def test_generation_is_not_cut_at_twenty_tokens(tmp_path):
    model = build(max_position_embeddings=40)
    with torch.no_grad():
        model.lm_head.weight[2] = 0  # </s> never wins
        model.lm_head.weight[:, 0] += torch.arange(50) == 7
    model.save_pretrained(tmp_path)
    assert VanillaForConditionalGeneration.from_pretrained(tmp_path).generate(SOURCE).shape[1] == 40


def test_ids_agree_in_both_configurations(tmp_path):
    build().save_pretrained(tmp_path)
    files = [json.loads((tmp_path / name).read_text()) for name in ("config.json", "generation_config.json")]
    for field, value in {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1}.items():
        assert [file[f"{field}_token_id"] for file in files] == [value, value]
