"""Train the original Transformer on parallel text and leave a folder that anyone can load.

    python run_translation.py configs/demo.yaml
    python run_translation.py configs/multi30k_en_de.yaml --train_file data/train --validation_file data/val \\
        --test_file data/test --max_minutes 20 --output_dir out
    torchrun --nproc_per_node 2 run_translation.py ...                       the same updates on two devices, or CPUs
    python run_translation.py --dataset_name you/corpus --streaming --max_steps 99999 --tokenizer_name tokenizer ...
    python run_translation.py --model_name_or_path out --do_predict --test_file news

The same command goes on after an interruption. python run_translation.py --help lists the flags.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import datasets
import transformers
from accelerate.utils import set_seed

from modeling_vanilla import (
    VanillaConfig,
    VanillaForConditionalGeneration,
    card,
    corpus,
    data,
    errors,
    fsdp,
    hub,
    optimization,
    sharing,
    tokenization,
    training,
    viz,
)
from modeling_vanilla.errors import InputError
from modeling_vanilla.recipe import parse


# What may differ when a run is continued: how long and how it is seen, not what is learnt from what.
MAY_CHANGE = (
    *("max_steps", "num_train_epochs", "max_minutes", "early_stopping_patience", "max_tokens_per_device"),
    *(
        "logging_steps",
        "eval_steps",
        "save_steps",
        "save_total_limit",
        "average_checkpoints",
        "resume_from_checkpoint",
    ),
    *(
        "report_to",
        "mixed_precision",
        "fsdp",
        "torch_compile",
        "preprocessing_num_workers",
        "dataloader_num_workers",
        "metric_for_best_model",
    ),
    *("do_train", "do_eval", "do_predict", "test_file", "max_eval_samples", "max_predict_samples"),
    *("num_beams", "eval_num_beams", "length_penalty"),
    *("push_to_hub", "hub_strategy", "hub_model_id", "hub_private_repo", "license"),
)
USE = """
The model is in {folder}. Translate a file, or from Python:

  vanilla-translate --model {folder} < in.txt > out.txt

  from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
  tokenizer = AutoTokenizer.from_pretrained("{folder}", trust_remote_code=True)
  model = AutoModelForSeq2SeqLM.from_pretrained("{folder}", trust_remote_code=True)
  model.translate(["..."], tokenizer)
"""
LENGTH = ("max_steps", "num_train_epochs", "max_minutes")


def main():
    recipe, overrides = parse()
    transformers.utils.logging.disable_progress_bar()
    accelerator = training.accelerator(recipe)
    if recipe.push_to_hub and accelerator.is_main_process:  # a missing login shows now and not hours later
        hub.create_repository(recipe.hub_model_id, private=recipe.hub_private_repo)
    set_seed(recipe.seed)
    with training.main_process_first(accelerator):
        finished = claim_output_dir(recipe, overrides, accelerator.is_main_process) == "finished"
        if not finished:
            splits = data.load(recipe)
            tokenizer = build_tokenizer(recipe, splits.train)
    if finished:
        return accelerator.is_main_process and report_finished(recipe)
    model = build_model(recipe, overrides, tokenizer).to(accelerator.device)
    run = train(recipe, accelerator, model, tokenizer, splits) if recipe.do_train else None
    scored = score(recipe, accelerator, model, tokenizer, splits)
    if accelerator.is_main_process:
        with sharing.saving(recipe.output_dir):
            finish(recipe, accelerator, model, tokenizer, splits, run, scored)
        share(recipe)
    accelerator.end_training()


def claim_output_dir(recipe, overrides, write=True):
    """Make the output folder ours: "new", "begun" or "finished"; refuse one that holds something else.

    Of several processes the first one has done so; the others do not `write`.
    """
    if recipe.output_dir is None:
        if recipe.do_train or not Path(recipe.model_name_or_path or "").is_dir():
            raise InputError("--output_dir is missing: name a folder for the result")
        recipe.output_dir = recipe.model_name_or_path
    folder = Path(recipe.output_dir)
    if not recipe.do_train:
        folder.mkdir(parents=True, exist_ok=True)
        return "begun"
    if not (recipe.source_lang and recipe.target_lang):
        raise InputError("--source_lang and --target_lang are missing: name the languages, such as en and de")
    file, now = folder / "recipe.json", {**asdict(recipe), "model": overrides}
    if not file.exists():
        if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - {"lost+found"}):
            raise InputError(f"{folder} holds something else: name a new or empty folder with --output_dir")
        write_json(file, now)
        return "new"
    before = json.loads(file.read_text())
    was = {**dict.fromkeys(overrides), **before, **before["model"]}
    for name, value in {**asdict(recipe), **dict.fromkeys(before["model"]), **overrides}.items():
        if name not in MAY_CHANGE and was.get(name, value) != value:
            raise InputError(f"{folder} holds a run with --{name} {was[name]}, not {value}: name another --output_dir")
    results = folder / "all_results.json"
    if results.exists() and all(before[name] == now[name] for name in LENGTH):
        return "finished"
    if write:
        results.unlink(missing_ok=True)
        write_json(file, now)
    return "begun"


def write_json(file, content):
    """Write it as a whole: a run that is killed meanwhile can be started again."""
    with sharing.written_aside(file.parent) as aside:
        (aside / file.name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def report_finished(recipe):
    print(f"{recipe.output_dir} holds the finished run of this recipe:")
    print((Path(recipe.output_dir) / "all_results.json").read_text())
    print("Train longer with a larger --max_steps, --num_train_epochs or --max_minutes.")
    share(recipe)


def share(recipe):
    """Upload the folder if asked to; done twice, the Hub sees that nothing has changed."""
    if recipe.push_to_hub:
        address = hub.push_to_hub(recipe.output_dir, recipe.hub_model_id, private=recipe.hub_private_repo)
        print(f"The model is on the Hub: {address}")


def build_tokenizer(recipe, train):
    """The one that is named, that of the model, that of the begun run, or a new one from the training text."""
    # Both files, as a run may have been killed between the two.
    begun = all((Path(recipe.output_dir) / file).exists() for file in ("tokenizer.json", "tokenizer_config.json"))
    name = recipe.tokenizer_name or recipe.model_name_or_path or (recipe.output_dir if begun else None)
    if name is not None:
        return tokenization.load(name)
    if train is None:
        raise InputError("there is no model to score: name one with --model_name_or_path, or add --do_train")
    lines = ((pair["source"], pair["target"]) for pair in train)
    tokenizer = tokenization.train(lines, recipe.vocab_size, lowercase=recipe.lowercase)
    with sharing.written_aside(recipe.output_dir) as aside:
        tokenization.save(tokenizer, aside)
    return tokenizer


def build_model(recipe, overrides, tokenizer):
    """The one that is named, with other dropout if asked for, or a new one of the preset's size."""
    if recipe.model_name_or_path is None:
        try:
            config = VanillaConfig.preset(recipe.preset, **{**overrides, "vocab_size": len(tokenizer)})
        except ValueError as error:
            raise InputError(f"--{error}") from None
        return VanillaForConditionalGeneration(config)
    model, _ = sharing.load_model(recipe.model_name_or_path)
    if len(tokenizer) > model.config.vocab_size:
        raise InputError(
            f"{recipe.tokenizer_name} has {len(tokenizer)} pieces, {recipe.model_name_or_path} only "
            f"{model.config.vocab_size}: use the tokenizer that the model was trained with"
        )
    for name, value in overrides.items():
        if "dropout" not in name and name != "label_smoothing" and getattr(model.config, name) != value:
            raise InputError(f"--{name} {value}: {recipe.model_name_or_path} has {getattr(model.config, name)}")
        setattr(model.config, name, value)
    return model


def train(recipe, accelerator, model, tokenizer, splits):
    """Say what is going to happen, then train."""
    run = training.Training(recipe, accelerator, model, tokenizer, splits)
    datasets.disable_progress_bars()  # the tokenising of evaluation data would interrupt ours
    accelerator.init_trackers(Path(recipe.output_dir).name, config=asdict(recipe))
    lines = [f"{model.num_parameters():,} parameters, {len(tokenizer):,} pieces", str(run.reader)]
    if run.sharded:
        lines.append(f"{sum(fsdp.part(p).numel() for p in run.trained.parameters()):,} parameters on this device")
    if dropped := {reason: count for reason, count in splits.dropped.items() if count}:
        lines.append(f"left out: {dropped}")
    if splits.validation is None:
        lines.append("no validation data: no scores while it trains; name some with --validation_file")
    if splits.overlap:
        lines.append(f"{splits.overlap} training pairs also occur in the held-out data (see --remove_overlap)")
    fitted = recipe.lr_scheduler_type == "linear"
    if not recipe.max_minutes:
        lines += optimization.schedule_warnings(
            run.progress.total_updates, model.config.d_model, recipe.warmup_steps, recipe.lr_factor, fitted
        )
    for line in lines:
        run.say(line)
    first = next(iter(splits.train))
    run.say(f"the first pair: {first['source']!r} => {first['target']!r}")
    run.run()
    run.say(run.time_table())
    return run


def score(recipe, accelerator, model, tokenizer, splits):
    """{"eval" or "test": (data set, scores, translations)} of what the recipe asks for."""
    wanted = {"eval": recipe.do_eval and splits.validation, "test": recipe.do_predict and splits.test}
    return {
        name: (pairs, *training.evaluate(model, tokenizer, pairs, accelerator, recipe, recipe.num_beams, True))
        for name, pairs in wanted.items()
        if pairs
    }


def finish(recipe, accelerator, model, tokenizer, splits, run, scored):
    """Write the model folder with its card and results, show some translations."""
    folder = Path(recipe.output_dir)
    results = {} if run is None else run.results()
    for name, (_, scores, _) in scored.items():
        results |= {f"{name}_{key}": value for key, value in scores.items()}
    if run is not None:
        set_generation_defaults(model, recipe)
        sharing.save_model(model, tokenizer, folder)
        viz.plot_training(folder)
    if "test" in scored:
        lines = [text.replace("\n", " ") + "\n" for text in scored["test"][2]]
        (folder / "generated_predictions.txt").write_text("".join(lines), encoding="utf-8")
    if (folder / "config.json").exists():
        write_card = card.write if run is not None or not (folder / "README.md").exists() else card.update_scores
        write_card(folder, facts(recipe, accelerator, model, tokenizer, splits, run, scored))
    write_json(folder / "all_results.json", results)
    show(scored)
    if run is not None:
        print(USE.format(folder=folder))


def set_generation_defaults(model, recipe):
    """What stock `generate()` does without arguments: the evaluated beam, and no special token inside the text."""
    config = model.config
    model.generation_config.num_beams = recipe.num_beams
    model.generation_config.max_length = config.max_position_embeddings
    model.generation_config.suppress_tokens = [config.pad_token_id, config.bos_token_id]


def facts(recipe, accelerator, model, tokenizer, splits, run, scored):
    """What the card tells of this run."""
    sizes = {"train": run and run.reader.pairs_per_epoch}
    sizes |= {split: len(pairs) for split in ("validation", "test") if (pairs := getattr(splits, split)) is not None}
    pairs, _, translations = scored.get("test") or scored.get("eval") or (splits.train, None, [])
    known = card.Facts(
        name=Path(recipe.output_dir).resolve().name,
        address=recipe.output_dir,
        example=next(iter(pairs))["source"],
        source_lang=recipe.source_lang,
        target_lang=recipe.target_lang,
        data=[describe(recipe, split, size) for split, size in sizes.items() if size],
        left_out={**splits.dropped, **run.reader.dropped} if run else {},
        overlap=splits.overlap,
        config=model.config.to_dict(),
        parameters=model.num_parameters(),
        tokenizer=card.tokenizer_in_words(tokenizer),
        scores=[card_score(recipe, name, *each[:2]) for name, each in scored.items() if each[1]],
    )
    if recipe.license:
        known["license"] = recipe.license
    if run is not None:
        known["training"] = card.Training(
            command=card.command(accelerator.num_processes),
            updates=run.progress.update,
            tokens_per_update=recipe.tokens_per_update,
            epochs=run.results()["train_epochs"],
            precision=recipe.mixed_precision if recipe.mixed_precision != "no" else "fp32",
            seconds=run.progress.seconds,
            hardware=card.hardware(accelerator.num_processes),
            versions=card.versions(),
        )
    if translations and "target" in pairs.column_names:
        known["samples"] = card.samples(list(pairs["source"]), translations, list(pairs["target"]))
    return known


def describe(recipe, split, size):
    """Name, size, and files with their hashes of one split."""
    file = getattr(recipe, f"{split}_file")
    if recipe.dataset_name:
        return card.Data(split=split, name=recipe.dataset_name, pairs=size, hub_id=recipe.dataset_name)
    files = (
        []
        if file is None
        else corpus.describe(file, recipe.source_lang, recipe.target_lang, references=split != "test")
    )
    name = Path(file or f"held out of {recipe.train_file}").name
    return card.Data(split=split, name=name, pairs=size, files=files)


def card_score(recipe, name, pairs, scores):
    """The scores of one evaluation as the card wants them."""
    split = {"eval": "validation", "test": "test"}[name]
    metrics = [metric for metric in card.METRICS if metric in scores]
    spread = {metric: scores.get(f"{metric}_confidence", 0.0) for metric in metrics}
    return card.Score(
        dataset=recipe.dataset_name or Path(getattr(recipe, f"{split}_file") or recipe.train_file or split).name,
        split=split,
        sentences=len(pairs),
        metrics={metric: scores[metric] for metric in metrics},
        intervals={metric: (scores[metric] - spread[metric], scores[metric] + spread[metric]) for metric in metrics},
        signatures={metric: scores[f"{metric}_signature"] for metric in metrics},
        decoding=f"beam {recipe.num_beams}, length penalty {recipe.length_penalty:g}",
    )


def show(scored):
    """Scores with their signatures, and three translations."""
    for name, (_, scores, _) in scored.items():
        for metric in (metric for metric in card.METRICS if metric in scores):
            value = f"{scores[metric]:.2f} ± {scores[f'{metric}_confidence']:.2f}"
            print(f"{name} {metric:8} {value:15} {scores[f'{metric}_signature']}")
    if scored:
        pairs, _, translations = scored.get("test") or scored["eval"]
        for i in range(min(3, len(translations))):
            print(f"\n  {pairs[i]['source']}\n  => {translations[i]}")


if __name__ == "__main__":
    sys.exit(errors.run(main))
