"""MarianMT folders, such as the OPUS-MT models, as vanilla folders with equal logits, and back.

    python -m modeling_vanilla.convert opus-mt-en-de vanilla-en-de
    python -m modeling_vanilla.convert runs/demo marian-demo --to_marian

Both are the same Transformer with the same names of weights. Marian's differs in settings that have a field here
(concatenated sinusoids, swish, a bias on the logits); what has none is refused. Layer drop, which acts in training
only, is left behind. The tokenizer stays Marian's, which needs `pip install sentencepiece`.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import MarianConfig, MarianMTModel

from . import errors, sharing
from .configuration_vanilla import VanillaConfig
from .errors import InputError
from .modeling_vanilla import VanillaForConditionalGeneration


# Fields of both configurations that mean the same in both.
COMMON = (
    *("vocab_size", "d_model", "max_position_embeddings", "tie_word_embeddings", "share_encoder_decoder_embeddings"),
    *(f"{side}_{size}" for side in ("encoder", "decoder") for size in ("layers", "attention_heads", "ffn_dim")),
    *("activation_function", "dropout", "attention_dropout", "activation_dropout"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
)
TOKENIZER = (
    *("source.spm", "target.spm", "vocab.json", "target_vocab.json"),  # Marian's
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
)


def from_marian(marian: MarianMTModel) -> VanillaForConditionalGeneration:
    """The vanilla model that computes what a Marian model computes; InputError names a setting that it cannot have."""
    config = marian.config
    need(config, "scale_embedding", True)
    need(config, "decoder_vocab_size", config.vocab_size)
    bias = marian.final_logits_bias[0]
    vanilla = VanillaForConditionalGeneration(
        VanillaConfig(
            **{field: getattr(config, field) for field in COMMON},
            position_layout="concatenated",
            lm_head_bias=bool(bias.any()),
        )
    )
    weights = marian.state_dict() | {"lm_head.bias": bias}
    return copied(marian, weights, vanilla)


def to_marian(vanilla: VanillaForConditionalGeneration) -> MarianMTModel:
    """The Marian model that computes what a vanilla model computes; InputError names a setting that it cannot have."""
    config = vanilla.config
    need(config, "position_layout", "concatenated")
    need(config, "norm_position", "post")
    need(config, "tie_word_embeddings", True)
    marian = MarianMTModel(
        MarianConfig(
            **{field: getattr(config, field) for field in COMMON}, scale_embedding=True, forced_eos_token_id=None
        )
    )
    weights = vanilla.state_dict()
    if config.lm_head_bias:
        weights["final_logits_bias"] = weights["lm_head.bias"][None]
    return copied(vanilla, weights, marian)


def need(config, field: str, value) -> None:
    if getattr(config, field) != value:
        raise InputError(f"{field}={getattr(config, field)!r} cannot be converted; it must be {value!r}")


def copied(old, weights: dict[str, torch.Tensor], new):
    """`new` with all the weights that it has in common, and with the generation settings of `old`."""
    wanted = new.state_dict()
    computed = {name: x for name, x in wanted.items() if "embed_positions" in name or name == "final_logits_bias"}
    new.load_state_dict(computed | {name: x for name, x in weights.items() if name in wanted})
    new.generation_config = old.generation_config
    return new.to(old.dtype).eval()


def convert(source: str | Path, target: str | Path, back: bool = False) -> None:
    """Write the converted model of folder `source` to folder `target`, its tokenizer's files as they are.

    `back`: from vanilla to Marian.
    """
    source = Path(source)
    if not (source / "config.json").is_file():
        raise InputError(
            f"{source}: no model folder, as it holds no config.json; from the Hub get it by `hf download`"
        )
    found, kind = json.loads((source / "config.json").read_text(encoding="utf-8")), "vanilla" if back else "marian"
    if found.get("model_type") != kind:
        raise InputError(f"{source}: holds a {found.get('model_type')} model, not a {kind} one")
    old = (VanillaForConditionalGeneration if back else MarianMTModel).from_pretrained(source, dtype="auto")
    new = to_marian(old) if back else from_marian(old)
    with sharing.written_aside(target) as aside:
        for name in TOKENIZER:
            if (source / name).is_file():
                shutil.copyfile(source / name, aside / name)
        if (aside / "source.spm").is_file():
            name_tokenizer_class(aside / "tokenizer_config.json")
        new.save_pretrained(aside)


def name_tokenizer_class(settings: Path) -> None:
    """Write down which tokenizer reads Marian's files; older folders leave that to the type of the model."""
    found = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    found.setdefault("tokenizer_class", "MarianTokenizer")
    settings.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder of a MarianMT model")
    parser.add_argument("target", help="folder to write")
    parser.add_argument("--to_marian", action="store_true", help="the other way: `source` is a vanilla folder")
    arguments = parser.parse_args()
    convert(arguments.source, arguments.target, arguments.to_marian)


if __name__ == "__main__":
    sys.exit(errors.run(main))
