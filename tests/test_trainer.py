"""A saved folder in the hands of transformers' Trainer, of PEFT, Accelerate, torch.compile and torch.export."""

import importlib.util
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from packaging.version import Version
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, sharing, tokenization


ENGLISH = "zero one two three four five six seven eight nine".split()
GERMAN = "null eins zwei drei vier fünf sechs sieben acht neun".split()
EXAMPLE = Path(__file__).parents[1] / "examples" / "finetune_seq2seq_trainer.py"


def numbers(count, seed):
    """Digits spelt in English and German, one to eight a line, so that lengths differ."""
    draw = random.Random(seed)
    rows = [[draw.randrange(10) for _ in range(draw.randint(1, 8))] for _ in range(count)]
    return [(" ".join(ENGLISH[d] for d in row), " ".join(GERMAN[d] for d in row)) for row in rows]


@pytest.fixture(autouse=True)
def single_precision(monkeypatch):
    """transformers 4 leaves --bf16 in the environment, where all later runs of the process find it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What run_translation.py would leave, untrained."""
    folder = tmp_path_factory.mktemp("trainer") / "folder"
    tokenizer = tokenization.train(numbers(200, 0), 320)
    torch.manual_seed(0)
    config = VanillaConfig.preset("tiny", d_model=32, encoder_layers=1, decoder_layers=2, vocab_size=len(tokenizer))
    model = VanillaForConditionalGeneration(config)
    model.generation_config.update(num_beams=2, max_length=30)
    sharing.save_model(model, tokenizer, folder)
    return folder


def load(folder, **fields):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    for field, value in fields.items():
        setattr(model.config, field, value)
    return model, AutoTokenizer.from_pretrained(folder)


def encoded(tokenizer, pairs):
    sources, targets = zip(*pairs, strict=True)
    return datasets.Dataset.from_dict(dict(tokenizer(list(sources), text_target=list(targets))))


def trainer_of(folder, output, model=None, optimizer=None, pairs=None, metrics=None, **arguments):
    """A Seq2SeqTrainer on 16 pairs; without `model`, the folder's with dropout off."""
    loaded, tokenizer = load(folder, dropout=0.0)
    model = model or loaded
    pairs = encoded(tokenizer, pairs or numbers(16, 1))
    defaults = {"num_train_epochs": 1, "save_strategy": "no", "use_cpu": True, "report_to": "none", "seed": 3}
    return Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(output, **{**defaults, "disable_tqdm": True, **arguments}),
        train_dataset=pairs,
        eval_dataset=pairs,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        optimizers=(optimizer and optimizer(model.parameters()), None),
        compute_metrics=metrics,
    )


def weights_after_one_step(folder, output, batch_size, model=None, **arguments):
    """Plain SGD without clipping, so that the step is the gradient."""
    trainer = trainer_of(
        folder,
        output,
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=16 // batch_size,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        **arguments,
    )
    trainer.train()
    assert trainer.state.global_step == 1
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_equal_weights(first, second, tolerance):
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=tolerance, rtol=0)


@pytest.mark.parametrize("batch_size", [4, 1])
def test_accumulated_gradients_are_those_of_the_unsplit_batch(folder, tmp_path, batch_size):
    whole = weights_after_one_step(folder, tmp_path, 16)
    assert_equal_weights(weights_after_one_step(folder, tmp_path, batch_size), whole, 1e-6)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.15"),
    reason="the Trainer's smoother ignored accumulation until 5.15",
)
def test_accumulated_gradients_are_right_with_the_trainers_smoothing_too(folder, tmp_path):
    whole = weights_after_one_step(folder, tmp_path, 16, label_smoothing_factor=0.1)
    assert_equal_weights(weights_after_one_step(folder, tmp_path, 4, label_smoothing_factor=0.1), whole, 1e-6)


def test_the_trainers_label_smoothing_is_ours(folder, tmp_path):
    ours = weights_after_one_step(folder, tmp_path, 16, load(folder, dropout=0.0, label_smoothing=0.1)[0])
    plain = load(folder, dropout=0.0, label_smoothing=0.0)[0]
    assert_equal_weights(weights_after_one_step(folder, tmp_path, 16, plain, label_smoothing_factor=0.1), ours, 1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_takes_the_same_step(folder, tmp_path, use_reentrant):
    arguments = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    whole = weights_after_one_step(folder, tmp_path, 16)
    assert_equal_weights(weights_after_one_step(folder, tmp_path, 16, **arguments), whole, 1e-6)


def test_bfloat16_takes_nearly_the_same_step(folder, tmp_path):
    whole = weights_after_one_step(folder, tmp_path, 16)
    assert_equal_weights(weights_after_one_step(folder, tmp_path, 16, bf16=True), whole, 5e-3)


def test_evaluation_in_bfloat16_gives_nearly_the_same_loss(folder, tmp_path):
    losses = [trainer_of(folder, tmp_path, bf16_full_eval=half).evaluate()["eval_loss"] for half in (False, True)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_a_resumed_run_ends_where_an_unbroken_one_does(folder, tmp_path):
    results = []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        trainer = trainer_of(folder, tmp_path, load(folder)[0], max_steps=6, save_strategy="steps", save_steps=3)
        trainer.train(resume_from_checkpoint=resume)
        results.append(trainer.model.state_dict())
    assert_equal_weights(*results, 0)


def test_the_best_model_is_loaded_at_the_end(folder, tmp_path):
    scores = iter([1.0, 3.0, 2.0])
    trainer = trainer_of(
        folder,
        tmp_path,
        metrics=lambda evaluation: {"score": next(scores)},
        max_steps=3,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
    )
    trainer.train()
    best, last = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / f"checkpoint-{n}").state_dict() for n in (2, 3))
    assert_equal_weights(trainer.model.state_dict(), best, 0)
    assert not torch.equal(best["model.shared.weight"], last["model.shared.weight"])


def test_evaluation_generates_with_the_beams_and_the_limit_asked_for(folder, tmp_path):
    seen = []
    trainer = trainer_of(
        folder,
        tmp_path,
        pairs=numbers(5, 2),
        metrics=lambda evaluation: seen.append(evaluation) or {},
        per_device_eval_batch_size=2,
        predict_with_generate=True,
        generation_max_length=7,
        generation_num_beams=3,
    )
    loss = trainer.evaluate()["eval_loss"]
    predictions, labels = seen[0].predictions, seen[0].label_ids
    assert len(predictions) == len(labels) == 5 and (labels == -100).any()
    assert (predictions > 0).sum(axis=1).max() == 7  # the Trainer pads to the model's own limit
    row = {name: torch.tensor(trainer.eval_dataset[:1][name]) for name in ("input_ids", "attention_mask")}
    expected = trainer.model.generate(**row, num_beams=3, max_length=7)[0]
    assert predictions[0, : len(expected)].tolist() == expected.tolist()
    assert loss > 0


def run_example(folder, output, tmp_path, *flags, pairs=40):
    """The example's `main`, as its docstring starts it."""
    for name, count in (("train", pairs), ("dev", 5)):
        lines = [json.dumps({"translation": {"en": en, "de": de}}) for en, de in numbers(count, len(name))]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    specification = importlib.util.spec_from_file_location("finetune", EXAMPLE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    flags = ["--use_cpu", "True", "--report_to", "none", "--disable_tqdm", "True", *flags]
    files = ["--train_file", f"{tmp_path}/train.jsonl", "--validation_file", f"{tmp_path}/dev.jsonl"]
    files += ["--source_lang", "en", "--target_lang", "de"]
    module.main(["--model_name_or_path", str(folder), "--output_dir", str(output), *files, *flags])


TRANSLATE_ALONE = """
import sys
sys.modules["modeling_vanilla"] = None  # importing it now fails, even where it is installed
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(model.translate(["one two three"], tokenizer)[0])
print(tokenizer.decode(model.generate(**tokenizer("one two three", return_tensors="pt"))[0], skip_special_tokens=True))
"""


def test_the_example_leaves_a_complete_folder_that_works_alone(folder, tmp_path):
    output = tmp_path / "tuned"
    run_example(folder, output, tmp_path, "--num_train_epochs", "1")
    scores = json.loads((output / "all_results.json").read_text())
    assert {"eval_bleu", "eval_chrf", "eval_loss"} <= set(scores)
    for place in (output, *output.glob("checkpoint-*")):
        files = {path.name for path in place.iterdir()}
        code = {f"{name}_vanilla.py" for name in ("configuration", "generation", "kernels", "modeling", "pipeline")}
        assert code | {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= files
        assert json.loads((place / "generation_config.json").read_text()).get("use_cache", True)
    assert json.loads((output / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    tokenizer = json.loads((output / "tokenizer.json").read_text())
    assert tokenizer["truncation"] is None and tokenizer["padding"] is None
    alone = shutil.copytree(output, tmp_path / "elsewhere" / "alone", ignore=shutil.ignore_patterns("checkpoint-*"))
    environment = {"HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRANSLATE_ALONE, str(alone)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    model, tokenizer = load(output)
    assert result.stdout.splitlines()[0] == model.translate(["one two three"], tokenizer)[0]


@pytest.mark.slow
def test_the_example_learns_to_translate(folder, tmp_path):
    flags = ["--num_train_epochs", "30", "--learning_rate", "3e-3", "--per_device_train_batch_size", "8"]
    flags += ["--eval_strategy", "no", "--save_strategy", "no"]
    run_example(folder, tmp_path / "tuned", tmp_path, *flags, pairs=300)
    assert json.loads((tmp_path / "tuned" / "all_results.json").read_text())["eval_bleu"] > 60


# -- PEFT -------------------------------------------------------------------------------------------------------------


def adapted(model, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, **options))


def test_lora_trains_saves_loads_and_merges(folder, tmp_path):
    peft = pytest.importorskip("peft")
    model = adapted(load(folder, dropout=0.0)[0], task_type="SEQ_2_SEQ_LM")
    trainer = trainer_of(folder, tmp_path, model, max_steps=3, learning_rate=0.05)
    before = load(folder)[0].state_dict()
    adapted_matrix, kept_matrix = "model.encoder.layers.0.self_attn.q_proj.weight", "model.shared.weight"
    trainer.train()
    trainer.save_model(tmp_path / "adapter")
    base = load(folder)[0]
    restored = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    inputs = {"input_ids": torch.arange(4, 12)[None], "decoder_input_ids": torch.arange(4, 9)[None]}
    expected = model.eval()(**inputs).logits
    assert torch.equal(restored(**inputs).logits, expected)
    merged = restored.merge_and_unload()
    after = merged.state_dict()
    assert not torch.equal(after[adapted_matrix], before[adapted_matrix])
    assert torch.equal(after[kept_matrix], before[kept_matrix])
    merged.save_pretrained(tmp_path / "merged")
    final = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(final(**inputs).logits, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(restored.generate(input_ids=inputs["input_ids"]), final.generate(input_ids=inputs["input_ids"]))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_lora_trains_every_layer_under_gradient_checkpointing(folder, tmp_path, use_reentrant):
    arguments = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    steps = []
    for extra in ({}, arguments):
        model = adapted(load(folder, dropout=0.0)[0], init_lora_weights=False)
        model.enable_input_require_grads()  # which transformers 4 leaves to the user
        steps.append(weights_after_one_step(folder, tmp_path, 16, model, **extra))
    start = adapted(load(folder)[0], init_lora_weights=False).state_dict()
    assert all(not torch.equal(steps[0][name], start[name]) for name in start if "lora" in name)
    assert_equal_weights(*steps, 1e-6)


def test_an_adapter_on_the_output_projection_is_part_of_the_loss(folder):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(load(folder, dropout=0.0)[0], config).train()
    pairs = {**inputs_of(6), "labels": inputs_of(6)["decoder_input_ids"]}
    loss = model(**pairs).loss
    torch.testing.assert_close(loss, model(**pairs, skip_logits=False).loss)
    loss.backward()
    assert all(p.grad.any() for name, p in model.named_parameters() if "lora" in name)


# -- torch.compile and torch.export -----------------------------------------------------------------------------------


def inputs_of(length):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(4, 300, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, : length // 2 + 1].clone()}


@pytest.mark.slow
def test_compiled_forward_gives_the_same_logits_in_one_graph(folder):
    model = load(folder)[0].eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (6, 9):
        torch.testing.assert_close(
            compiled(**inputs_of(length), use_cache=False).logits, model(**inputs_of(length)).logits
        )


@pytest.mark.slow
def test_a_training_step_is_compiled_once_for_all_lengths_and_equals_the_plain_one(folder):
    model = load(folder, dropout=0.0)[0].train()
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=graphs, dynamic=True)
    for length in range(6, 16):
        pairs = inputs_of(length)
        pairs["labels"] = pairs["decoder_input_ids"].masked_fill(pairs["decoder_input_ids"] % 5 == 0, -100)
        losses = [m(**pairs).loss for m in (compiled, model)]
        torch.testing.assert_close(*losses)
        gradients = []
        for loss in losses:
            model.zero_grad()
            loss.backward()
            gradients.append(model.model.encoder.layers[0].fc1.weight.grad.clone())
        torch.testing.assert_close(*gradients)
    assert graphs.frame_count <= 2  # before and after the loss


def test_encoder_and_decoder_step_export_with_any_length(folder):
    model = load(folder)[0].eval()
    batch, source, target = (torch.export.Dim(name, min=2, max=100) for name in ("batch", "source", "target"))

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, decoder_input_ids, memory, attention_mask):
            outputs = (memory,)
            return self.model(None, attention_mask, decoder_input_ids, None, outputs, use_cache=False).logits

    class Encode(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = model.get_encoder()

        def forward(self, input_ids, attention_mask):
            return self.encoder(input_ids, attention_mask).last_hidden_state

    def shapes(first, second):
        return {0: first, 1: second}

    example = inputs_of(9)
    with torch.no_grad():
        arguments = (example["input_ids"], example["attention_mask"])
        encode = torch.export.export(Encode(), arguments, dynamic_shapes=[shapes(batch, source)] * 2, strict=False)
        memory = encode.module()(*arguments)
        arguments = (example["decoder_input_ids"], memory, example["attention_mask"])
        dynamic = [shapes(batch, target), shapes(batch, source), shapes(batch, source)]
        step = torch.export.export(Step(), arguments, dynamic_shapes=dynamic, strict=False)
        for length in (8, 13):
            pairs = inputs_of(length)
            memory = encode.module()(pairs["input_ids"], pairs["attention_mask"])
            logits = step.module()(pairs["decoder_input_ids"], memory, pairs["attention_mask"])
            torch.testing.assert_close(logits, model(**pairs).logits)


# -- Placement and generation -----------------------------------------------------------------------------------------


def test_device_map_auto_places_the_model(folder):
    placed = AutoModelForSeq2SeqLM.from_pretrained(folder, device_map="auto")
    inputs = {name: value.to(placed.device) for name, value in inputs_of(6).items()}
    torch.testing.assert_close(placed(**inputs).logits.cpu(), load(folder)[0](**inputs_of(6)).logits)


def test_layers_without_room_are_read_from_disk_when_they_run(folder, tmp_path):
    room = {"cpu": int(0.8 * (folder / "model.safetensors").stat().st_size)}
    placed = AutoModelForSeq2SeqLM.from_pretrained(folder, device_map="auto", max_memory=room, offload_folder=tmp_path)
    assert placed.model.decoder.layers[1].fc1.weight.is_meta
    model, tokenizer = load(folder)
    torch.testing.assert_close(placed(**inputs_of(6)).logits, model(**inputs_of(6)).logits)
    ids = inputs_of(6)["input_ids"]
    assert torch.equal(placed.generate(ids), model.generate(ids))
    assert placed.translate(ENGLISH, tokenizer) == model.translate(ENGLISH, tokenizer)


def test_generate_takes_embeddings_or_encoder_outputs_for_the_source(folder):
    model, batch = load(folder)[0], inputs_of(8)
    ids, settings = batch["input_ids"], {"attention_mask": batch["attention_mask"], "num_beams": 3, "max_length": 12}
    expected = model.generate(ids, **settings)
    memory, embeddings = model.get_encoder()(ids, batch["attention_mask"]), model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(encoder_outputs=memory, **settings), expected)
    assert torch.equal(model.generate(inputs_embeds=embeddings, **settings), expected)
