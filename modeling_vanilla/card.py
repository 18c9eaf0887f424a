"""The model card: model_card.md filled with what a run knows, as README.md of its folder.

A line of the template that asks for an unknown fact is left out, and so is a heading with nothing under it.
"""

import json
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from sacrebleu.metrics import CHRF
from transformers import PreTrainedTokenizerBase


TEMPLATE = Path(__file__).with_name("model_card.md")
METRICS = {  # our name -> type and name in the model index
    "bleu": ("bleu", "BLEU"),
    "bleu_lc": ("bleu", "BLEU, lower-cased"),
    "chrf": ("chrf", "chrF"),
    "ter": ("ter", "TER"),
}
FACT = re.compile(r"\$(\w+)")
REWRITTEN = ("Scores", "Samples, from typical to worst")  # the sections that a new evaluation rewrites


class File(TypedDict):  # as told by corpus.describe
    file: str  # its name, without the folder
    lines: int
    sha256: str


class Data(TypedDict, total=False):
    split: str  # "train", "validation" or "test"
    name: str  # "demo", "Multi30k"
    pairs: int  # as used, after filters
    files: list[File]
    hub_id: str  # when it is a data set on the Hub


class Score(TypedDict, total=False):
    dataset: str  # as `Data.name`
    split: str
    hub_id: str
    sentences: int
    metrics: dict[str, float]  # any of METRICS; other keys are ignored
    intervals: dict[str, tuple[float, float]]  # by the same names: low and high end at 95 %
    signatures: dict[str, str]  # by the same names, of sacreBLEU
    decoding: str  # "beam 4, length penalty 0.6"


class Sample(TypedDict):
    source: str
    translation: str
    reference: str
    chrf: float


class Training(TypedDict, total=False):
    command: str  # see `command`
    updates: int
    tokens_per_update: int
    epochs: float
    precision: str
    seconds: float
    hardware: str  # see `hardware`
    versions: dict[str, str]  # see `versions`


class Facts(TypedDict, total=False):
    """What a card can tell, all of it JSON. `fill` needs the first five; the others are told when known."""

    name: str  # the title: "demo-en-de"
    address: str  # what from_pretrained takes: a folder or you/name
    example: str  # a source sentence for the snippets
    source_lang: str
    target_lang: str
    license: str  # of the weights, as the Hub spells it ("cc-by-4.0"); only if the user states it
    base_model: str  # you/name of the model whose training was continued
    data: list[Data]
    data_licence: str
    left_out: dict[str, int]  # reason -> training pairs
    overlap: int  # training pairs that also occur in the validation or test data
    config: dict[str, Any]  # VanillaConfig.to_dict()
    parameters: int
    tokenizer: str  # see `tokenizer_in_words`
    training: Training
    scores: list[Score]
    samples: list[Sample]  # see `samples`
    limits: str  # what the user has to add


# -- Filling ----------------------------------------------------------------------------------------------------------


def write(folder: str | Path, facts: Facts) -> Path:
    """Write the filled card as README.md of the folder and return its path."""
    path = Path(folder) / "README.md"
    path.write_text(fill(facts), encoding="utf-8")
    return path


def fill(facts: Facts) -> str:
    """The whole card, beginning with the metadata that the Hub reads."""
    missing = [name for name in ("name", "address", "example", "source_lang", "target_lang") if not facts.get(name)]
    if missing:
        raise ValueError(f"a card needs the facts {', '.join(missing)}")
    results = eval_results(facts)
    hub_ids = {data["hub_id"] for data in facts.get("data", []) if data.get("hub_id")}
    metadata = ModelCardData(
        language=_languages(facts["source_lang"], facts["target_lang"]),
        license=facts.get("license"),
        library_name="transformers",
        pipeline_tag="translation",
        tags=["translation", "vanilla-transformer"],
        base_model=facts.get("base_model"),
        datasets=sorted(hub_ids) or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        model_name=facts["name"] if results else None,
        eval_results=results or None,
    )
    return f"---\n{metadata.to_yaml()}\n---\n\n{_body(facts, results)}"


def update_scores(folder: str | Path, facts: Facts) -> Path:
    """Put new `scores` and `samples` into the folder's card; everything else in it stays as it is.

    A score replaces the older one of the same data and split. The sections that show scores and samples are written
    anew, at the end when somebody has removed them.
    """
    path = Path(folder) / "README.md"
    card = ModelCard.load(path)
    fresh = eval_results(facts)
    scored = {(result.dataset_name, result.dataset_split) for result in fresh}
    kept = [r for r in card.data.eval_results or [] if (r.dataset_name, r.dataset_split) not in scored]
    card.data.eval_results = kept + fresh
    card.data.model_name = card.data.model_name or facts.get("name") or path.resolve().parent.name
    sections = _sections(card.text)
    for section in _sections(_body(facts, card.data.eval_results)):
        if _title(section) in REWRITTEN:
            _put(section, sections)
    card.text = "".join(sections)
    card.save(path)
    return path


def readdress(text: str, address: str) -> str:
    """The card with another address in its snippets, for the day when the folder becomes you/name on the Hub."""
    sections = _sections(text)
    for i, section in enumerate(sections):
        if _title(section) == "Use":
            sections[i] = re.sub(
                r'(?<=from_pretrained\()"(?:[^"\\\n]|\\.)*"',
                lambda _: json.dumps(address, ensure_ascii=False),
                section,
            )
    return "".join(sections)


def _put(section: str, sections: list[str]) -> None:
    titles = [_title(old) for old in sections]
    if _title(section) in titles:
        sections[titles.index(_title(section))] = section
    else:
        sections[-1] = sections[-1].rstrip() + "\n\n"
        sections.append(section)


def _sections(text: str) -> list[str]:
    return re.split(r"^(?=## )", text, flags=re.M)


def _title(section: str) -> str:
    return section.partition("\n")[0].removeprefix("## ").strip()


def _body(facts: Facts, results: list[EvalResult]) -> str:
    known = {name: text for name, text in _texts(facts, results).items() if text}
    kept = [""]
    for line in reversed(TEMPLATE.read_text(encoding="utf-8").splitlines()):
        below = next(filter(None, reversed(kept)), "## ")
        empty = line.startswith("## ") and below.startswith("## ")
        double = not line and not kept[-1]
        if not empty and not double and known.keys() >= set(FACT.findall(line)):
            kept.append(FACT.sub(lambda match: known[match[1]], line))
    return "\n".join(reversed(kept))


# -- Facts in words ---------------------------------------------------------------------------------------------------


def _texts(facts: Facts, results: list[EvalResult]) -> dict[str, str]:
    """What the names in the template stand for; empty when unknown."""
    training, config, data = facts.get("training", {}), facts.get("config", {}), facts.get("data", [])
    return {name: _plain(value) for name, value in {**config, **training, **facts}.items()} | {
        "address": json.dumps(facts.get("address"), ensure_ascii=False),
        "example": json.dumps(facts.get("example"), ensure_ascii=False),
        "train_pairs": _plain(sum(part["pairs"] for part in data if part["split"] == "train") or None),
        "files": _table("Split", "Data", "Lines", "SHA-256", rows=[row for part in data for row in _file_rows(part)]),
        "left_out": ", ".join(f"{reason} {count:,}" for reason, count in facts.get("left_out", {}).items() if count),
        "embeddings": _embeddings(config),
        "norm_position": {"post": "after each sub-layer", "pre": "before each sub-layer"}.get(
            config.get("norm_position"), ""
        ),
        "command": f"```\n{training['command']}\n```" if "command" in training else "",
        "time": _duration(training["seconds"]) if "seconds" in training else "",
        "software": ", ".join(f"{name} {number}" for name, number in training.get("versions", {}).items()),
        "scores": _score_table(results),
        "intervals": "95 %" if any(_details(result, "interval") for result in results) else "",
        "signatures": _signatures(results),
        "samples": _table(
            *("chrF", "Source", "Translation", "Reference"),
            rows=[
                [f"{sample['chrf']:.1f}", *(_cell(sample[side]) for side in ("source", "translation", "reference"))]
                for sample in facts.get("samples", [])
            ],
        ),
    }


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.3g} minutes" if seconds < 7200 else f"{seconds / 3600:.3g} hours"


def _embeddings(config: dict[str, Any]) -> str:
    if not config:
        return ""
    if not config["tie_word_embeddings"]:
        return "three matrices, for source, target and output"
    if not config["share_encoder_decoder_embeddings"]:
        return "one matrix for target and output, one for the source"
    return "one matrix for source, target and output"


def _table(*titles: str, rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows] if rows else []
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """The text as it is, whatever Markdown would make of it."""
    return re.sub(r"([\\`*_{}\[\]<>|~$#])", r"\\\1", " ".join(text.split()))


def _file_rows(data: Data) -> list[list[str]]:
    name = (
        f"[{data['hub_id']}](https://huggingface.co/datasets/{data['hub_id']})" if data.get("hub_id") else data["name"]
    )
    return [
        [data["split"], f"`{file['file']}`", f"{file['lines']:,}", f"`{file['sha256']}`"]
        for file in data.get("files", [])
    ] or [[data["split"], name, f"{data['pairs']:,}", ""]]


# -- Scores, whose one home is the model index of the metadata --------------------------------------------------------


def eval_results(facts: Facts) -> list[EvalResult]:
    """The scores as the Hub's model index tells them; signature, interval and decoding are arguments of the metric."""
    results = []
    for score in facts.get("scores", []):
        for key in [key for key in METRICS if key in score["metrics"]]:
            details = {
                "signature": score.get("signatures", {}).get(key),
                "interval": [round(end, 2) for end in score.get("intervals", {}).get(key, ())] or None,
                "decoding": score.get("decoding"),
                "sentences": score.get("sentences"),
            }
            results.append(
                EvalResult(
                    task_type="translation",
                    task_name=f"Translation {facts['source_lang']}-{facts['target_lang']}",
                    dataset_type=score.get("hub_id") or re.sub(r"\W+", "-", score["dataset"]).strip("-").lower(),
                    dataset_name=score["dataset"],
                    dataset_split=score["split"],
                    metric_type=METRICS[key][0],
                    metric_name=METRICS[key][1],
                    metric_value=round(score["metrics"][key], 2),
                    metric_args={name: value for name, value in details.items() if value is not None},
                )
            )
    return results


def _details(result: EvalResult, name: str) -> Any:
    return result.metric_args.get(name) if isinstance(result.metric_args, dict) else None


def _score_table(results: list[EvalResult]) -> str:
    metrics = list(dict.fromkeys(result.metric_name or result.metric_type for result in results))
    rows: dict[tuple, dict[str, str]] = {}
    for result in results:
        data = result.dataset_name, result.dataset_split or "", _details(result, "decoding") or ""
        interval = _details(result, "interval")
        text = f"{result.metric_value} ({interval[0]} to {interval[1]})" if interval else f"{result.metric_value}"
        rows.setdefault(data, {})[result.metric_name or result.metric_type] = text
    return _table(
        *("Data", "Split", "Decoding", *metrics),
        rows=[[*map(_cell, data), *(row.get(metric, "") for metric in metrics)] for data, row in rows.items()],
    )


def _signatures(results: list[EvalResult]) -> str:
    pairs = dict.fromkeys((result.metric_name, _details(result, "signature")) for result in results)
    return "; ".join(f"{name}: `{signature}`" for name, signature in pairs if signature)


def _languages(*codes: str) -> list[str] | None:
    """What the Hub accepts of the codes: two or three letters; "de_DE" and "deu_Latn" count as "de" and "deu"."""
    bases = [re.split("[-_]", code)[0].lower() for code in codes]
    return list(dict.fromkeys(base for base in bases if re.fullmatch("[a-z]{2,3}", base))) or None


# -- What a card wants to know and no other module tells --------------------------------------------------------------


def hardware(num_processes: int = 1) -> str:
    """The devices of all processes: "8 x NVIDIA H200 (140 GB)", "2 threads of Intel Xeon"."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        return f"{num_processes} x {gpu.name} ({gpu.total_memory / 2**30:.0f} GB)"
    return f"{num_processes * torch.get_num_threads()} threads of {_processor()}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text(encoding="utf-8")) if info.is_file() else []
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Python and the packages that can change a result."""
    packages = ("torch", "transformers", "tokenizers", "accelerate", "datasets", "sacrebleu")
    return {"Python": platform.python_version(), **{package: version(package) for package in packages}}


def command(num_processes: int = 1) -> str:
    """The command line of this run, anything that looks like a token blotted out."""
    launcher = f"accelerate launch --num_processes {num_processes}" if num_processes > 1 else "python"
    return re.sub(r"\bhf_\w+", "hf_...", f"{launcher} {shlex.join(sys.argv)}")


def tokenizer_in_words(tokenizer: PreTrainedTokenizerBase) -> str:
    """For example "BPE, 8,000 pieces for both languages, text in NFC"."""
    if not tokenizer.is_fast:
        return f"{type(tokenizer).__name__}, {len(tokenizer):,} pieces"
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    form = backend["normalizer"] or {}
    forms = [step["type"] for step in form.get("normalizers", [form]) if step]
    words = [f"{backend['model']['type']} of {len(tokenizer):,} pieces for both languages"]
    return ", ".join(words + ([f"text in {' + '.join(dict.fromkeys(forms))}"] if forms else []))


def samples(
    sources: Sequence[str], translations: Sequence[str], references: Sequence[str], count: int = 3
) -> list[Sample]:
    """`count` translations of median sentence chrF, then the `count` worst: nothing is picked by hand."""
    chrf = CHRF()
    ranked = [
        Sample(source=s, translation=t, reference=r, chrf=chrf.sentence_score(t, [r]).score)
        for s, t, r in zip(sources, translations, references, strict=True)
        if s.strip()
    ]
    ranked.sort(key=lambda sample: -sample["chrf"])
    middle = max(0, len(ranked) // 2 - count // 2)
    worst = max(middle + count, len(ranked) - count)
    return ranked[middle : middle + count] + ranked[worst:]
