"""Save one model folder with its own answers beside it, or load folders and compare: `run.py` does both, per version.

python tests/compat/folder.py save FOLDER
python tests/compat/folder.py load [--without-package] FOLDER...
"""

import json
import sys
from pathlib import Path


REMOTE = "--without-package" in sys.argv
if REMOTE:
    sys.modules["modeling_vanilla"] = None  # importing it now fails, even where it is installed
else:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import modeling_vanilla  # noqa: F401  registers the classes

import torch  # noqa: E402
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer  # noqa: E402


TEXTS = [
    "A dog runs over the snow.",
    "Two men\tplay  guitar : \u201cvery loudly\u201d !",
    "",
    "\u4e00 \u00e9 \U0001f600 </s> x",
]


def save(folder):
    from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, sharing, tokenization

    torch.manual_seed(0)
    tokenizer = tokenization.train(TEXTS * 3, 300)
    model = VanillaForConditionalGeneration(VanillaConfig.preset("tiny", d_model=32, vocab_size=len(tokenizer)))
    model.generation_config.update(num_beams=3, max_length=24)
    sharing.save_model(model, tokenizer, folder)
    logits, answers = answer(model.eval(), tokenizer)
    torch.save(logits, f"{folder}.logits")
    Path(f"{folder}.json").write_text(json.dumps(answers))


def answer(model, tokenizer):
    """Logits of a padded batch, and everything that a user would read: ids, texts, translations."""
    batch = tokenizer(TEXTS, text_target=TEXTS[::-1], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")}).logits
    # The limit is named as transformers 5.0 adds a token to one that comes from the folder.
    generated = model.generate(**tokenizer(TEXTS[0], return_tensors="pt"), max_length=24)
    return logits, {
        "ids": batch["input_ids"].tolist(),
        "round trip": tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True),
        "translate": model.translate(TEXTS, tokenizer, max_new_tokens=20),
        "generate": tokenizer.batch_decode(generated, skip_special_tokens=True),
    }


def differences(folder):
    """What this version answers differently from the version that saved the folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=REMOTE)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=REMOTE).eval()
    logits, answers = answer(model, tokenizer)
    expected = json.loads(Path(f"{folder}.json").read_text())
    found = [name for name in expected if answers[name] != expected[name]]
    return found + ["logits"] * (not torch.equal(logits, torch.load(f"{folder}.logits")))


def main():
    action, *folders = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if action == "save":
        return save(*folders)
    print(json.dumps({Path(folder).name: differences(folder) for folder in folders}))


if __name__ == "__main__":
    main()
