"""Fine-tune a vanilla model with transformers' own Seq2SeqTrainer. The folder is enough; this package is not imported.

    pip install "transformers[torch]" datasets sacrebleu
    python examples/finetune_seq2seq_trainer.py --model_name_or_path out --output_dir tuned \
        --train_file train.jsonl --validation_file dev.jsonl --source_lang en --target_lang de \
        --num_train_epochs 3 --learning_rate 1e-4 --per_device_train_batch_size 32 --gradient_accumulation_steps 4

The files are those of transformers' own examples, a pair a line: {"translation": {"en": "A dog.", "de": "Ein Hund."}}.
Every Seq2SeqTrainingArguments flag works. Leave --label_smoothing_factor at 0: the model smooths its own loss, and
before transformers 5.15 the Trainer's smoother scales it wrongly when gradients are accumulated.
"""

from dataclasses import dataclass
from pathlib import Path

from datasets import load_dataset
from sacrebleu import BLEU, CHRF
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)
from transformers.hf_argparser import HfArg


@dataclass
class Arguments:
    model_name_or_path: str = HfArg(help="folder, or name on the Hub; its code is run")
    train_file: str = HfArg(help="JSON lines")
    validation_file: str = HfArg(help="JSON lines; scored after each epoch")
    source_lang: str = HfArg(help="key of the source in each pair")
    target_lang: str = HfArg(help="key of the target; also decides how BLEU splits words")
    max_length: int = HfArg(default=256, help="training pairs with a side of more tokens are left out")


def load_pairs(arguments, tokenizer):
    """Both files as token ids, with `</s>` from the tokenizer; the collator adds `<s>`."""

    def encode(rows):
        pairs = rows["translation"]
        sources, targets = ([pair[lang] for pair in pairs] for lang in (arguments.source_lang, arguments.target_lang))
        return tokenizer(sources, text_target=targets)

    def short(pair):
        return max(len(pair["input_ids"]), len(pair["labels"])) <= arguments.max_length

    files = {"train": arguments.train_file, "validation": arguments.validation_file}
    pairs = load_dataset("json", data_files=files).map(encode, batched=True, remove_columns=["translation"])
    return pairs["train"].filter(short), pairs["validation"]


def scorer(tokenizer, target_lang):
    """BLEU and chrF of an evaluation, both sides of which come padded with -100."""

    def texts(ids):
        ids = [[token for token in row if token >= 0] for row in ids.tolist()]
        return tokenizer.batch_decode(ids, skip_special_tokens=True)

    def score(evaluation):
        hypotheses, references = texts(evaluation.predictions), [texts(evaluation.label_ids)]
        metrics = {"bleu": BLEU(trg_lang=target_lang), "chrf": CHRF()}
        return {name: metric.corpus_score(hypotheses, references).score for name, metric in metrics.items()}

    return score


def main(argv=None):
    parser = HfArgumentParser((Arguments, Seq2SeqTrainingArguments))
    parser.set_defaults(predict_with_generate=True, eval_strategy="epoch", save_strategy="epoch", save_total_limit=1)
    arguments, training = parser.parse_args_into_dataclasses(argv)
    set_seed(training.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path, trust_remote_code=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(arguments.model_name_or_path, trust_remote_code=True)
    train, validation = load_pairs(arguments, tokenizer)
    trainer = Seq2SeqTrainer(
        model,
        training,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        # With the model, so that decoder inputs exist even where the Trainer takes the labels away.
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        compute_metrics=scorer(tokenizer, arguments.target_lang),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_metrics("all", trainer.evaluate())
    trainer.save_model()
    if trainer.is_world_process_zero():
        # transformers 5 writes a class name that transformers 4 does not know; all versions know this one.
        settings = Path(training.output_dir, "tokenizer_config.json")
        settings.write_text(settings.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))


if __name__ == "__main__":
    main()
