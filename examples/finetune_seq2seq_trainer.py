"""Fine-tune a vanilla model with transformers' own Seq2SeqTrainer. The folder is enough; this package is not imported.

    python examples/finetune_seq2seq_trainer.py --model_name_or_path out --output_dir tuned \
        --train_file train.jsonl --validation_file dev.jsonl --source_lang en --target_lang de \
        --num_train_epochs 3 --learning_rate 1e-4 --per_device_train_batch_size 32 --gradient_accumulation_steps 4

The files are those of transformers' own examples, a pair a line: {"translation": {"en": "A dog.", "de": "Ein Hund."}}.
Every Seq2SeqTrainingArguments flag works. Leave --label_smoothing_factor at 0: the model smooths its own loss, and
before transformers 5.15 the Trainer's smoother scales it wrongly when gradients are accumulated.
"""

from dataclasses import dataclass
from pathlib import Path

import sacrebleu
from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)


@dataclass
class Arguments:
    model_name_or_path: str
    train_file: str
    validation_file: str
    source_lang: str = "en"
    target_lang: str = "de"
    max_length: int = 256


def load_pairs(arguments, tokenizer):
    """Both files as token ids: `</s>` comes from the tokenizer, `<s>` from the collator; long training pairs go."""

    def encode(rows):
        pairs = rows["translation"]
        sources, targets = ([pair[lang] for pair in pairs] for lang in (arguments.source_lang, arguments.target_lang))
        return tokenizer(sources, text_target=targets)

    def short(pair):
        return max(len(pair["input_ids"]), len(pair["labels"])) <= arguments.max_length

    files = {"train": arguments.train_file, "validation": arguments.validation_file}
    pairs = load_dataset("json", data_files=files).map(encode, batched=True, remove_columns=["translation"])
    return pairs["train"].filter(short), pairs["validation"]


def scorer(tokenizer):
    """BLEU and chrF of a `Seq2SeqTrainer` evaluation, both sides of which are padded with -100."""

    def texts(ids):
        ids = [[token for token in row if token >= 0] for row in ids.tolist()]
        return tokenizer.batch_decode(ids, skip_special_tokens=True)

    def score(evaluation):
        hypotheses, references = texts(evaluation.predictions), [texts(evaluation.label_ids)]
        return {
            "bleu": sacrebleu.corpus_bleu(hypotheses, references).score,
            "chrf": sacrebleu.corpus_chrf(hypotheses, references).score,
        }

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
        compute_metrics=scorer(tokenizer),
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("all", trainer.evaluate())
    # transformers 5 writes a class name that transformers 4 does not know; all versions know this one.
    settings = Path(training.output_dir, "tokenizer_config.json")
    settings.write_text(settings.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))


if __name__ == "__main__":
    main()
