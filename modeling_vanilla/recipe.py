"""A recipe: every flag of `run_translation.py`, its default and its help; YAML files hold the same keys.

python run_translation.py configs/demo.yaml --seed 2      flags after the file override it
"""

import dataclasses
import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from transformers import HfArgumentParser

from .configuration_vanilla import PRESETS, VanillaConfig
from .errors import InputError


def flag(default, text, **more):
    return field(default=default, metadata={"help": text, **more})


@dataclass
class Recipe:
    """What to train on, for how long, and how to score it; the defaults are the paper's (§5)."""

    # Data
    train_file: str | None = flag(
        None, "'demo', a path prefix (train -> train.en, train.de), or a tsv/csv/jsonl/parquet/tmx/po file"
    )
    validation_file: str | None = flag(None, "as train_file; without it some training pairs are held out")
    test_file: str | None = flag(None, "as train_file; scored at the end")
    dataset_name: str | None = flag(None, "a data set on the Hugging Face Hub, instead of files")
    dataset_config_name: str | None = flag(None, "its configuration, such as de-en")
    streaming: bool = flag(
        False,
        "read the training data while training, for ever, instead of looking at all of it first; needs --max_steps or "
        "--max_minutes, and --tokenizer_name; holds no validation pairs out. Every device reads the whole stream, and "
        "a run that goes on reads it again up to where it was",
    )
    source_lang: str | None = flag(None, "language code of the source: file suffix, column or key")
    target_lang: str | None = flag(None, "language code of the target")
    max_train_samples: int | None = flag(None, "use only the first N training pairs")
    max_eval_samples: int | None = flag(None, "use only the first N validation pairs")
    max_predict_samples: int | None = flag(None, "use only the first N test pairs")
    max_source_length: int = flag(256, "training pairs with more source tokens are skipped and counted")
    max_target_length: int = flag(256, "training pairs with more target tokens are skipped and counted")
    max_length_ratio: float | None = flag(
        None, "skip training pairs whose character lengths differ by more than this factor"
    )
    deduplicate: bool = flag(False, "keep each training pair once")
    remove_overlap: bool = flag(False, "drop training pairs that occur in the validation or test data")
    preprocessing_num_workers: int | None = flag(None, "processes that tokenise")
    dataloader_num_workers: int = flag(1, "processes that prepare batches; --bpe_dropout can occupy several")

    # Tokenizer and model
    tokenizer_name: str | None = flag(None, "tokenizer folder; without it one is trained on the training data")
    vocab_size: int = flag(37000, "of the tokenizer to train (§5.1)")
    lowercase: bool = flag(False, "lower-case text inside the tokenizer to train")
    model_name_or_path: str | None = flag(None, "go on from this model folder instead of random weights")
    preset: str = flag("base", f"size of a new model: {', '.join(PRESETS)}; single fields by their own flags")

    # Updates
    tokens_per_update: int = flag(25000, "target tokens whose gradients make one update (§5.1)")
    max_tokens_per_device: int = flag(
        4096, "padded tokens that one device processes at a time; lower it when memory runs out"
    )
    warmup_steps: int = flag(4000, "updates of growing learning rate (§5.3)")
    lr_factor: float = flag(1.0, "multiplies the paper's learning rate")
    lr_scheduler_type: str | None = flag(
        None,
        "inverse_sqrt (§5.3), or linear to zero at the end; default: linear with --max_minutes, else inverse_sqrt",
    )
    adam_beta1: float = flag(0.9, "of Adam (§5.3)")
    adam_beta2: float = flag(0.98, "of Adam (§5.3); 0.997 in tensor2tensor's later default")
    adam_epsilon: float = flag(1e-9, "of Adam (§5.3)")
    bpe_dropout: float = flag(
        0.0, "probability of skipping a merge; words are segmented anew each epoch (Provilkov et al. 2020)"
    )
    source_word_dropout: float = flag(0.0, "probability of replacing a source token by <unk> (Sennrich & Zhang 2019)")
    target_word_dropout: float = flag(0.0, "the same for the decoder's input")
    r_drop: float = flag(
        0.0, "weight of the divergence between two passes with dropout (Liang et al. 2021); doubles the cost"
    )

    # How long
    max_steps: int | None = flag(None, "stop after this many updates; default: 100000 as the paper's base model")
    num_train_epochs: float | None = flag(None, "stop after this many passes over the data")
    max_minutes: float | None = flag(None, "stop after this time, and fit the schedule to it")
    early_stopping_patience: int | None = flag(None, "stop after this many evaluations without improvement")
    metric_for_best_model: str = flag("loss", "loss, bleu or chrf on the validation data")

    # Seeing and keeping
    output_dir: str | None = flag(None, "folder of the trained model")
    seed: int = flag(42, "of initialisation, order, dropout")
    logging_steps: int = flag(50, "updates between lines of training_log.jsonl")
    eval_steps: int = flag(1000, "updates between evaluations")
    save_steps: int = flag(1000, "updates between checkpoints")
    save_total_limit: int = flag(2, "checkpoints to keep, besides the best and those to be averaged")
    average_checkpoints: int = flag(
        1, "average the weights of the last N checkpoints at the end (§6.1: 5 for base, 20 for big)"
    )
    ema_decay: float = flag(
        0.0, "keep an exponential moving average of the weights with this decay and use it in the end"
    )
    resume_from_checkpoint: str | None = flag(None, "a checkpoint folder; default: the newest good one in output_dir")
    report_to: str = flag("none", "tensorboard, trackio, wandb or none")
    mixed_precision: str = flag("no", "no, bf16 or fp16")
    fsdp: bool = flag(
        False,
        "share weights, gradients and moments out to the devices (FSDP2, layer by layer) instead of a copy on each; "
        "`accelerate launch --use_fsdp` asks for it too, its other settings do not count",
    )
    torch_compile: bool = flag(False, "compile the model")

    # Scoring
    do_train: bool = flag(False, "train; without any --do_* all three are done")
    do_eval: bool = flag(False, "score the validation data")
    do_predict: bool = flag(False, "translate the test data, and score it when it has references")
    num_beams: int = flag(4, "beam size of the final evaluation (§6.1)")
    eval_num_beams: int = flag(1, "beam size of evaluations during training")
    length_penalty: float = flag(0.6, "alpha of the paper's length penalty (§6.1)")

    # Sharing
    push_to_hub: bool = flag(False, "upload the trained folder")
    hub_strategy: str = flag(
        "end", "when to upload: end, or every_save for each checkpoint too, while training goes on"
    )
    hub_model_id: str | None = flag(None, "you/name")
    hub_private_repo: bool = flag(False, "make the repository private")
    license: str | None = flag(None, "licence of the trained model, for its card")

    def __post_init__(self):
        if not (self.do_train or self.do_eval or self.do_predict):
            self.do_train, self.do_eval, self.do_predict = True, True, True
        positive = ("tokens_per_update", "max_tokens_per_device", "logging_steps", "eval_steps", "save_steps")
        limits = ("max_steps", "num_train_epochs", "max_minutes", "early_stopping_patience", "average_checkpoints")
        for name in (*positive, *limits, "warmup_steps", "dataloader_num_workers"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise InputError(f"--{name} {getattr(self, name)}: give a positive number")
        for name in ("bpe_dropout", "source_word_dropout", "target_word_dropout", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)}: give a number from 0 to below 1")
        if self.r_drop < 0:
            raise InputError(f"--r_drop {self.r_drop}: give 0 or a positive number")
        for name, known in {
            "metric_for_best_model": ("loss", "bleu", "chrf"),
            "lr_scheduler_type": (None, "inverse_sqrt", "linear"),
            "mixed_precision": ("no", "bf16", "fp16"),
            "hub_strategy": ("end", "every_save"),
        }.items():
            if getattr(self, name) not in known:
                raise InputError(f"--{name} {getattr(self, name)}: choose one of {', '.join(filter(None, known))}")
        if self.push_to_hub and not self.hub_model_id:
            raise InputError("--push_to_hub needs --hub_model_id, such as you/my-translator")
        if self.streaming and self.do_train:
            self.check_streaming()
        if self.lr_scheduler_type is None:
            self.lr_scheduler_type = "linear" if self.max_minutes else "inverse_sqrt"
        if self.max_steps is None and self.num_train_epochs is None and self.max_minutes is None:
            self.max_steps = 100000
        if self.save_total_limit < 1:
            raise InputError(
                f"--save_total_limit {self.save_total_limit}: at least one checkpoint must stay to resume from"
            )

    def check_streaming(self):
        if self.max_steps is None and self.max_minutes is None:
            raise InputError("--streaming has no end: say when to stop with --max_steps or --max_minutes")
        if not (self.tokenizer_name or self.model_name_or_path):
            raise InputError("--streaming needs --tokenizer_name: make a tokenizer with train_tokenizer.py first")
        for name in ("num_train_epochs", "deduplicate", "remove_overlap"):
            if getattr(self, name):
                raise InputError(f"--{name} has to see all pairs before training, --streaming does not: leave one out")
        if self.dataloader_num_workers > 1:
            raise InputError(
                f"--dataloader_num_workers {self.dataloader_num_workers}: only one process reads a stream"
            )
        longest = max(self.max_source_length, self.max_target_length)
        if longest > self.max_tokens_per_device:
            raise InputError(
                f"--max_tokens_per_device {self.max_tokens_per_device}: a stream may hold pairs of {longest} tokens, "
                "see --max_source_length and --max_target_length"
            )


def model_arguments():
    """A dataclass of VanillaConfig's fields, all None: the flags that override single fields of a preset."""
    skipped = ("self", "kwargs", "vocab_size", "use_cache", "is_encoder_decoder")
    parameters = inspect.signature(VanillaConfig.__init__).parameters.items()
    fields = [
        (
            name,
            type(parameter.default) | None,
            flag(None, f"of the model; default {parameter.default!r} or the preset's"),
        )
        for name, parameter in parameters
        if name not in skipped and not name.endswith("_token_id")
    ]
    return dataclasses.make_dataclass("ModelArguments", fields)


def parse(argv=None):
    """(Recipe, overrides of VanillaConfig) from the command line: [recipe.yaml] --flag value ...

    Raises:
        InputError: a flag that is none, or a YAML file that is missing, is no mapping, or has a key that is no flag.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser([Recipe, model_arguments()])
    parser.usage = "run_translation.py [recipe.yaml] [--flag value ...]"
    if argv and argv[0].endswith((".yaml", ".yml")):
        known = {action.dest for action in parser._actions}
        argv = yaml_flags(argv[0], known) + argv[1:]
    recipe, model, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        raise InputError(f"unknown: {' '.join(unknown)}; see python run_translation.py --help")
    return recipe, {name: value for name, value in vars(model).items() if value is not None}


def yaml_flags(path, known):
    """The file's keys as command line flags."""
    try:
        keys = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such recipe; the ones that come with the project are in configs/") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(keys, dict):
        raise InputError(f"{path}: a recipe is a list of 'key: value' lines, whose keys are the flags")
    for key in keys:
        if key not in known:
            raise InputError(f"{path}: unknown key {key!r}; see python run_translation.py --help")
    return [text for key, value in keys.items() if value is not None for text in (f"--{key}", str(value))]
