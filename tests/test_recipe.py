"""Recipes: YAML files whose keys are the flags, and flags that override them."""

from pathlib import Path

import pytest

from modeling_vanilla.errors import InputError
from modeling_vanilla.recipe import Recipe, parse


def write(folder, text):
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_flags_after_the_file_override_it(tmp_path):
    path = write(tmp_path, "source_lang: en\npreset: tiny\ndropout: 0.3\nmax_steps: 7\ndo_train: true\nlicense:\n")
    recipe, overrides = parse([path, "--max_steps", "9", "--d_model", "64"])
    assert (recipe.source_lang, recipe.preset, recipe.max_steps, recipe.do_train) == ("en", "tiny", 9, True)
    assert (recipe.do_eval, recipe.do_predict, recipe.license) == (False, False, None)
    assert overrides == {"dropout": 0.3, "d_model": 64}


def test_defaults_are_the_paper_s():
    recipe, overrides = parse([])
    assert (recipe.preset, recipe.vocab_size, recipe.tokens_per_update, recipe.warmup_steps) == (
        "base",
        37000,
        25000,
        4000,
    )
    assert (recipe.lr_scheduler_type, recipe.lr_factor, recipe.max_steps) == ("inverse_sqrt", 1.0, 100000)
    assert (recipe.num_beams, recipe.length_penalty, overrides) == (4, 0.6, {})
    levers = "bpe_dropout", "source_word_dropout", "target_word_dropout", "r_drop", "ema_decay"
    assert all(getattr(recipe, lever) == 0 for lever in levers)
    assert recipe.do_train and recipe.do_eval and recipe.do_predict


def test_a_time_limit_brings_its_schedule_and_no_other_limit():
    recipe, _ = parse(["--max_minutes", "20"])
    assert (recipe.lr_scheduler_type, recipe.max_steps) == ("linear", None)
    assert parse(["--max_minutes", "20", "--lr_scheduler_type", "inverse_sqrt"])[0].lr_scheduler_type == "inverse_sqrt"
    assert parse(["--num_train_epochs", "3"])[0].max_steps is None


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_recipes_that_come_along_are_valid(path):
    recipe, _ = parse([str(path)])
    assert recipe.source_lang and recipe.target_lang


@pytest.mark.parametrize(
    "text, message",
    [
        ("max_step: 3", "unknown key 'max_step'"),
        ("- a\n- b", "a recipe is a list of 'key: value' lines"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_faulty_file_is_named(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(InputError, match=message) as caught:
        parse([path])
    assert str(caught.value).startswith(path) and "\n" not in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(InputError, match="nowhere.yaml: no such recipe"):
        parse(["nowhere.yaml"])


def test_an_unknown_flag_is_named():
    with pytest.raises(InputError, match="--max_setps"):
        parse(["--max_setps", "3"])


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"tokenizer_name": "t"}, "--streaming has no end"),
        ({"max_steps": 9}, "--streaming needs --tokenizer_name"),
        ({"num_train_epochs": 2.0}, "--num_train_epochs has to see all pairs"),
        ({"deduplicate": True}, "--deduplicate has to see all pairs"),
        ({"remove_overlap": True}, "--remove_overlap has to see all pairs"),
        ({"dataloader_num_workers": 2}, "--dataloader_num_workers 2: only one process"),
        ({"max_tokens_per_device": 200}, "--max_tokens_per_device 200: a stream may hold"),
    ],
)
def test_what_a_stream_cannot_do_is_said_at_once(flags, message):
    usual = {} if len(flags) == 1 and flags.keys() & {"tokenizer_name"} else {"max_steps": 9}
    usual |= {} if flags == {"max_steps": 9} else {"tokenizer_name": "t"}
    with pytest.raises(InputError, match=message):
        Recipe(streaming=True, **usual | flags)
    Recipe(streaming=True, do_predict=True)


@pytest.mark.parametrize(
    "name, value",
    [
        ("tokens_per_update", 0),
        ("logging_steps", 0),
        ("save_total_limit", 0),
        ("average_checkpoints", 0),
        ("metric_for_best_model", "ter"),
        ("lr_scheduler_type", "cosine"),
        ("mixed_precision", "fp8"),
        ("hub_strategy", "checkpoint"),
        ("bpe_dropout", 1.0),
        ("source_word_dropout", -0.1),
        ("target_word_dropout", 1.5),
        ("ema_decay", 1.0),
        ("r_drop", -1.0),
        ("max_steps", 0),
        ("max_minutes", 0.0),
        ("num_train_epochs", -1.0),
        ("early_stopping_patience", 0),
    ],
)
def test_an_impossible_value_is_named_with_its_flag(name, value):
    with pytest.raises(InputError, match=f"--{name} {value}"):
        Recipe(**{name: value})
