"""The training loop in one process: what is learnt from what, what stops it, and what is seen of it."""

import json
import math
import multiprocessing
import os
import re
import time

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from datasets import Dataset
from hub_server import HubServer
from safetensors.torch import load_file
from torch.nn import functional as F

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, demo_corpus, optimization, tokenization
from modeling_vanilla import training as module
from modeling_vanilla.batching import collate
from modeling_vanilla.data import Splits
from modeling_vanilla.errors import InputError
from modeling_vanilla.recipe import Recipe
from modeling_vanilla.training import Training, evaluate, oddities, optimizer_tensors, r_drop_loss


PAIRS = demo_corpus.generate("test")[:60]
SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}


@pytest.fixture(autouse=True)
def forget_the_accelerator():
    yield
    AcceleratorState._reset_state()
    PartialState._reset_state()


@pytest.fixture(scope="module")
def tokenizer():
    return tokenization.train((text for pair in PAIRS for text in pair), 300)


def dataset(pairs):
    return Dataset.from_dict(dict(zip(("source", "target"), zip(*pairs, strict=True), strict=True)))


@pytest.fixture
def start(tokenizer, tmp_path):
    """A function that makes a Training of a tiny model from flags; dropout is off unless asked for."""

    def start(folder="out", dropout=0.0, model=None, **flags):
        AcceleratorState._reset_state()
        PartialState._reset_state()
        defaults = {
            "tokens_per_update": 250,
            "max_steps": 10,
            "logging_steps": 1,
            "warmup_steps": 10,
            "lr_factor": 0.2,
        }
        recipe = Recipe(output_dir=str(tmp_path / folder), **defaults | flags)
        (tmp_path / folder).mkdir(exist_ok=True)
        torch.manual_seed(1)
        config = VanillaConfig.preset("tiny", vocab_size=len(tokenizer), dropout=dropout, **SIZES)
        model = model or VanillaForConditionalGeneration(config)
        train = dataset(PAIRS[:50])
        train = train.to_iterable_dataset() if recipe.streaming else train
        splits = Splits(train=train, validation=dataset(PAIRS[50:54]))
        return Training(recipe, module.accelerator(recipe), model, tokenizer, splits)

    return start


def weights(run):
    return {name: parameter.detach().clone() for name, parameter in run.plain.named_parameters()}


def saved(run, update):
    return load_file(run.output_dir / f"checkpoint-{update}" / "model.safetensors")


def logged(run, name):
    return [line[name] for line in run.log.lines() if name in line]


def same(ours, theirs):
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def first_batch(run):
    return run.reader[0][0]


# -- updates ----------------------------------------------------------------------------------------------------------


def test_the_learning_rate_of_every_update_is_the_schedule_s(start):
    paper, linear = start("paper"), start("linear", lr_scheduler_type="linear")
    for run, schedule in (
        (paper, lambda n: optimization.paper_schedule(n, 16, 10, 0.2)),
        (linear, lambda n: optimization.fitted_schedule(n, 10, 16, 10, 0.2)),
    ):
        run.run()
        assert logged(run, "learning_rate") == [schedule(n) for n in range(1, 11)]


def test_a_loaded_model_is_trained_with_dropout_and_smoothing(start):
    """from_pretrained and our load_model return models in evaluation mode."""
    config = VanillaConfig.preset("tiny", vocab_size=300, dropout=0.5, **SIZES)
    torch.manual_seed(1)
    loaded = VanillaForConditionalGeneration(config).eval()
    runs = start("loaded", model=loaded, max_steps=3), start("new", dropout=0.5, max_steps=3)
    for run in runs:
        run.run()
    assert logged(runs[0], "loss") == logged(runs[1], "loss")


def test_bfloat16_keeps_the_loss_in_float32_and_the_gradient_close(start):
    found = {}
    for precision in "no", "bf16":
        run = start(precision, mixed_precision=precision)
        loss = run.model(**first_batch(run), num_items_in_batch=100).loss
        loss.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in run.plain.parameters()])
        found[precision] = loss, gradient
    (exact, gradient), (rounded, close) = found["no"], found["bf16"]
    assert rounded.dtype == close.dtype == torch.float32
    assert rounded.item() != exact.item() and rounded.item() == pytest.approx(exact.item(), rel=2e-3)
    assert float((close - gradient).norm() / gradient.norm()) < 0.03


def test_fp16_may_search_its_loss_scale_for_longer_than_the_patience(start, monkeypatch):
    """On a CPU, where a scale above 256 is made to overflow."""
    run = start(max_steps=20)
    scaler, usual = torch.amp.GradScaler("cpu", init_scale=2.0**16), run.loss
    run.accelerator.scaler = scaler
    monkeypatch.setattr(run.accelerator, "unscale_gradients", lambda: scaler.unscale_(run.optimizer.optimizer))
    monkeypatch.setattr(run.optimizer, "step", lambda: (scaler.step(run.optimizer.optimizer), scaler.update()))
    monkeypatch.setattr(run, "loss", lambda *args: usual(*args) * (math.inf if scaler.get_scale() > 256 else 1.0))
    run.run()
    assert (run.progress.skipped, run.progress.skipped_in_a_row) == (8, 0) and module.PATIENCE < 8
    assert logged(run, "loss")[-1] < logged(run, "loss")[0]
    assert run.progress.scaler["scale"] == 256


def test_an_update_that_is_not_finite_is_skipped_and_counted(start, monkeypatch):
    run = start(ema_decay=0.9)
    usual, before = run.loss, {}

    def loss(batch, tokens):
        if run.progress.update == 3:
            before.update(weights(run), updates=run.ema.updates)
        factor = math.nan if run.progress.update == 3 else 1.0
        return usual(batch, tokens) * factor

    monkeypatch.setattr(run, "loss", loss)
    monkeypatch.setattr(run, "after_update", lambda bar: run.progress.update == 4 and check())

    def check():
        assert run.ema.updates == before.pop("updates") == 3
        assert same(before, weights(run))
        assert (run.progress.skipped, run.progress.skipped_in_a_row) == (1, 1)

    run.run()
    assert before and (run.progress.skipped, run.progress.skipped_in_a_row) == (1, 0)
    assert run.ema.updates == 9 and run.results()["train_skipped_updates"] == 1


def test_five_updates_in_a_row_that_are_not_finite_end_the_run(start, monkeypatch):
    run = start(save_steps=2)
    usual = run.loss
    monkeypatch.setattr(run, "loss", lambda *args: usual(*args) * (1.0 if run.progress.update < 3 else math.inf))
    with pytest.raises(InputError, match="5 updates in a row without a finite gradient.*checkpoint-6"):
        run.run()
    assert len(run.log.lines()) == 7 and logged(run, "loss") == logged(run, "loss")[:3]
    assert all(tensor.isfinite().all() for tensor in weights(run).values())


def test_memory_that_ran_out_names_the_batch_and_the_flag(start, monkeypatch):
    run = start()

    def loss(batch, tokens):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(run, "loss", loss)
    with pytest.raises(InputError, match=r"out of memory on \d+ pairs .* lower --max_tokens_per_device \(now 4096\)"):
        run.run()


def test_r_drop_adds_the_divergence_between_two_passes(start):
    run = start(dropout=0.3)
    run.model.train()
    batch = first_batch(run)
    tokens = int((batch["labels"] != -100).sum())
    torch.manual_seed(5)
    loss = r_drop_loss(run.model, batch, tokens, alpha=3.0)
    torch.manual_seed(5)
    twice = {name: tensor.repeat(2, 1) for name, tensor in batch.items()}
    output = run.model(**twice, skip_logits=False)
    p, q = (logits[batch["labels"] != -100].log_softmax(-1) for logits in output.logits.chunk(2))
    divergence = [F.kl_div(ours, theirs, reduction="sum", log_target=True) for ours, theirs in ((p, q), (q, p))]
    assert float(loss) == pytest.approx(float(output.loss + 3.0 / 4 * sum(divergence) / tokens), rel=1e-5)
    assert float(sum(divergence)) > 0.1


def test_r_drop_without_dropout_is_the_usual_loss(start):
    usual, twice = start("usual"), start("twice", r_drop=5.0)
    for run in usual, twice:
        run.run()
    assert logged(twice, "loss") == pytest.approx(logged(usual, "loss"), abs=1e-5)


# -- the weights in the end -------------------------------------------------------------------------------------------


def test_the_last_checkpoints_are_averaged_and_kept(start):
    run = start(save_steps=2, average_checkpoints=3, save_total_limit=1)
    run.run()
    assert sorted(path.name for path in run.output_dir.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (10, 6, 8)]
    for name in saved(run, 10):
        mean = sum(saved(run, n)[name].double() for n in (6, 8, 10)) / 3
        assert torch.equal(run.plain.state_dict()[name], mean.float())


def test_the_moving_average_is_kept_during_training_and_through_a_resume(start):
    run = start(save_steps=1, save_total_limit=100, ema_decay=0.8)
    average = weights(run)
    run.run()
    for n in range(1, 11):
        decay = min(0.8, (1 + n) / (10 + n))
        average = {name: decay * mean + (1 - decay) * saved(run, n)[name] for name, mean in average.items()}
    for name, tensor in weights(run).items():
        torch.testing.assert_close(tensor, average[name], atol=1e-6, rtol=1e-5)
    assert same(weights(run), run.ema.average)

    start("resumed", ema_decay=0.8, max_steps=4).run()
    resumed = start("resumed", ema_decay=0.8)
    resumed.run()
    assert same(weights(resumed), weights(run)) and resumed.ema.updates == 10


@pytest.mark.parametrize("metric, sign", [("loss", 1), ("bleu", -1)])
def test_early_stopping_takes_the_best_weights_and_stays_stopped(start, monkeypatch, metric, sign):
    scores = iter([3.0, 2.0, 2.5, 2.0, 1.0])
    monkeypatch.setattr(module, "evaluate", lambda *args: ({metric: sign * next(scores)}, ["a", "b", "c", "d"]))
    early = {"metric_for_best_model": metric, "early_stopping_patience": 2, "eval_steps": 2, "save_steps": 3}
    for max_steps in 100, 200:
        run = start(max_steps=max_steps, save_total_limit=1, **early)
        run.run()
        assert (run.progress.update, run.progress.best_update) == (8, 4)
        assert same(saved(run, 4), weights(run))
        assert {path.name for path in run.output_dir.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-8"}


# -- sharing ----------------------------------------------------------------------------------------------------------

EVERY = {"push_to_hub": True, "hub_model_id": "name", "hub_strategy": "every_save", "save_steps": 4}


def test_every_checkpoint_is_uploaded_while_training_goes_on(start, monkeypatch):
    run = start(**EVERY)
    usual, uploads = run.after_update, []

    def after_update(bar):
        usual(bar)
        if run.progress.update == 4:
            uploads.append(run.upload.done())
            run.upload.result()

    monkeypatch.setattr(run, "after_update", after_update)
    with HubServer("right") as server, server.in_use("right"):
        run.run()
        commits = [(message, files) for _, message, files in server.commits["you/name"] if files]
    assert uploads == [False] and [message for message, _ in commits][0] == "Training in progress, update 4"
    checkpoint = run.output_dir / "checkpoint-4"
    travelling = {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()}
    assert commits[0][1] == travelling and "model.safetensors" in travelling


def test_an_upload_that_fails_does_not_end_the_training(start, capsys):
    with HubServer("right") as server, server.in_use("wrong"):
        run = start(**EVERY)
        run.run()
    assert run.progress.update == 10 and not server.commits
    said = capsys.readouterr().err
    assert "checkpoint-4 is not on the Hub, training goes on: name was not written on the Hub: " in said
    assert "wrong" not in said and len(list(run.output_dir.glob("checkpoint-*"))) >= 2


# -- time -------------------------------------------------------------------------------------------------------------


class Clock:
    """A clock on which an update takes a second and an evaluation seven."""

    def __init__(self, monkeypatch):
        self.now, step = 100.0, Training.step
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(Training, "step", lambda run: (self.pass_by(1.0), step(run))[1])
        monkeypatch.setattr(Training, "evaluate_and_compare", lambda run: self.pass_by(7.0))

    def pass_by(self, seconds):
        self.now += seconds


def test_max_minutes_fits_warm_up_and_cooldown_to_the_time(start, monkeypatch):
    Clock(monkeypatch)
    run = start(max_steps=None, max_minutes=3, eval_steps=20, warmup_steps=15)
    run.run()
    rates = logged(run, "learning_rate")
    assert run.progress.seconds == pytest.approx(180, rel=0.04)
    assert rates.index(max(rates)) == 14 and max(rates) == optimization.paper_schedule(15, 16, 15, 0.2)
    assert rates[-1] < 0.05 * max(rates)
    assert all(later < earlier for earlier, later in zip(rates[20:], rates[21:], strict=False))

    longer = start(max_steps=None, max_minutes=4, eval_steps=20, warmup_steps=15)
    longer.run()
    assert longer.progress.seconds == pytest.approx(240, rel=0.04)


def test_the_times_of_the_closing_table_add_up(start):
    run = start(save_steps=4, eval_steps=5)
    run.run()
    rows = {
        name.strip(): float(share) for name, share in re.findall(r"  (\D+?) +[\d.]+ s +([\d.]+)%", run.time_table())
    }
    assert rows.keys() == {"forward and backward", "waiting for data", "evaluation", "checkpoints", "other"}
    assert sum(rows.values()) == pytest.approx(100, abs=0.3) and min(rows.values()) >= 0


# -- going on ---------------------------------------------------------------------------------------------------------


def test_moments_are_stored_by_name_and_come_back(start):
    run = start(max_steps=3)
    run.run()
    stored = optimizer_tensors(run.plain, run.optimizer)
    assert stored["model.shared.weight|exp_avg_sq"].shape == (300, 16) and stored["model.shared.weight|step"] == 3
    again = start(max_steps=3)
    again.resume()
    assert same(stored, optimizer_tensors(again.plain, again.optimizer))


def test_a_streamed_run_goes_on_as_if_never_stopped(start, monkeypatch):
    monkeypatch.setattr(module.data, "SHUFFLED", 16)
    monkeypatch.setattr(module.data, "CHUNK", 16)
    stream = {"streaming": True, "tokenizer_name": "t", "dropout": 0.2, "bpe_dropout": 0.2, "save_steps": 4}
    whole = start("whole", **stream)
    whole.run()
    for max_steps in 7, 10:
        resumed = start("resumed", **stream | {"max_steps": max_steps})
        resumed.run()
    assert same(weights(resumed), weights(whole)) and logged(resumed, "loss") == logged(whole, "loss")
    assert resumed.results()["train_samples"] == 50 and resumed.results()["train_epochs"] is None


def test_a_stream_that_breaks_off_ends_the_run_in_one_line(start, monkeypatch):
    run = start(streaming=True, tokenizer_name="t", max_source_length=1)
    with pytest.raises(InputError) as caught:
        run.run()
    assert str(caught.value).startswith("no pair is left to train on") and "\n" not in str(caught.value)
    assert str(caught.value).endswith("(the same command goes on from the beginning: there is no whole checkpoint)")


def test_a_broken_newest_checkpoint_is_passed_over(start, capsys):
    whole = start("whole", save_steps=3)
    whole.run()
    start("broken", save_steps=3).run()
    broken = start("broken", save_steps=3)
    for update, harm in (10, os.truncate), (9, lambda path, _: path.unlink()):
        harm(broken.output_dir / f"checkpoint-{update}" / "model.safetensors", 100)
    with pytest.raises(InputError, match="no whole checkpoint"):
        start("other", resume_from_checkpoint=str(broken.output_dir / "checkpoint-10")).run()
    broken.output_dir.joinpath("checkpoint-6").mkdir(exist_ok=True)
    broken.run()
    said = capsys.readouterr().err
    assert all(f"checkpoint-{n} is passed over" in said for n in (10, 9, 6))
    assert same(weights(broken), weights(whole))


def test_a_named_checkpoint_begins_a_run_that_goes_on_by_itself(start, tmp_path, capsys):
    start("first", max_steps=4).run()
    named = str(tmp_path / "first" / "checkpoint-4")
    for max_steps in 6, 10:
        second = start("second", resume_from_checkpoint=named, max_steps=max_steps)
        second.run()
    whole = start("whole")
    whole.run()
    assert same(weights(second), weights(whole)) and logged(second, "update") == list(range(5, 11))
    assert "is not used: the run has gone on to" in capsys.readouterr().err


def test_a_run_that_cannot_read_its_data_leaves_no_process_behind(start, monkeypatch):
    """Such a process would keep the program from ending, as it is deaf to SIGTERM."""
    run = start()

    def fail(self, n):
        raise InputError("line 7 is not UTF-8")

    monkeypatch.setattr(type(run.reader), "__getitem__", fail)
    with pytest.raises(InputError, match="^line 7 is not UTF-8") as kept:
        run.run()
    assert kept and not multiprocessing.active_children()


def test_other_pairs_are_refused(start):
    start(max_steps=2).run()
    with pytest.raises(InputError, match="trained on other pairs"):
        start(max_steps=4, max_target_length=12).run()


# -- what is seen -----------------------------------------------------------------------------------------------------


def test_the_log_holds_numbers_only_and_a_tracker_gets_them(start):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = start(eval_steps=5, report_to="tensorboard")
    run.accelerator.init_trackers("run")
    run.run()
    run.accelerator.end_training()
    lines = [json.loads(line) for line in (run.output_dir / "training_log.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10]
    assert all(isinstance(value, (int, float)) for line in lines for value in line.values())
    assert {"loss", "learning_rate", "tokens_per_second", "padding", "seconds"} < lines[0].keys()
    assert {"eval_loss", "eval_bleu", "eval_chrf"} < lines[5].keys()

    reader = events.EventAccumulator(str(run.output_dir / "run"))
    reader.Reload()
    assert [(each.step, each.value) for each in reader.Scalars("loss")] == [
        (line["update"], pytest.approx(line["loss"])) for line in lines if "loss" in line
    ]


def test_a_tracker_that_is_not_installed_is_named(start):
    with pytest.raises(InputError, match="--report_to wandb: pip install wandb"):
        start(report_to="wandb")


def test_validation_loss_is_the_mean_over_all_target_tokens(start, tokenizer):
    run = start(dropout=0.5)
    run.plain.train()
    scores, translations = evaluate(run.plain, tokenizer, run.splits.validation, run.accelerator, run.recipe, 1)
    assert run.plain.training and len(translations) == 4
    run.plain.eval()
    pairs = [{"input_ids": tokenizer(s).input_ids, "labels": tokenizer(t).input_ids} for s, t in PAIRS[50:54]]
    expected = run.plain(**collate(pairs, 0, 1)).loss
    assert scores["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_validation_is_decoded_as_the_recipe_says(start, monkeypatch, capsys):
    run = start(eval_steps=5, eval_num_beams=3, length_penalty=0.9)
    seen = []
    monkeypatch.setattr(run.plain, "translate", lambda texts, _, **options: seen.append(options) or texts)
    run.run()
    assert seen == [{"num_beams": 3, "length_penalty": 0.9}] * 2
    assert "update 5: validation loss" in (said := capsys.readouterr().err) and "(beam 3)" in said


def test_translations_that_are_all_equal_or_repeat_themselves_are_flagged():
    sources = ["One dog.", "Two dogs.", "ha ha ha ha ha ha"]
    assert oddities(sources, ["Ein Hund.", "Zwei Hunde.", "ha ha ha ha ha ha"]) == []
    same, repeating = oddities(sources, ["der der der der der der"] * 3)
    assert "all 3 translations are 'der der" in same and "learning rate" in same
    assert repeating == "2 of 3 translations repeat something five times"
