"""The card: metadata that the Hub's own parser reads back, text without blanks, scores that can be renewed."""

import re

import pytest
from huggingface_hub import ModelCard

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, card, sharing, tokenization


SIGNATURE = "nrefs:1|bs:1000|seed:12345|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"


def facts(**changes):
    """Those of a small run."""
    return {
        "name": "demo-en-de",
        "address": "runs/demo",
        "example": 'The "old" dog sleeps.',
        "source_lang": "en",
        "target_lang": "de_DE",
        "license": "cc-by-4.0",
        "data": [
            {
                "split": "train",
                "name": "Multi30k",
                "pairs": 28997,
                "files": [{"file": f"train.{lang}", "lines": 29000, "sha256": lang * 32} for lang in ("en", "de")],
            },
            {"split": "test", "name": "Multi30k", "pairs": 1000, "hub_id": "you/multi30k"},
        ],
        "data_licence": "CC BY-NC-SA 4.0",
        "left_out": {"empty": 0, "duplicate": 3},
        "overlap": 0,
        "config": VanillaConfig.preset("tiny", vocab_size=8000).to_dict(),
        "parameters": 2_345_678,
        "tokenizer": "BPE of 8,000 pieces for both languages, text in NFC",
        "training": {
            "command": "python run_translation.py configs/demo.yaml",
            "updates": 4000,
            "tokens_per_update": 25000,
            "epochs": 31.25,
            "seconds": 1200.0,
            "hardware": "2 threads of a CPU",
            "versions": {"Python": "3.11.9", "torch": "2.13.0"},
        },
        "scores": [score("test", bleu=34.271, chrf=58.9)],
        "samples": [
            {"source": "A dog | runs.", "translation": "Ein Hund_1.", "reference": "Ein Hund.", "chrf": 71.23}
        ],
    } | changes


def score(split, **metrics):
    return {
        "dataset": "Multi30k",
        "split": split,
        "metrics": metrics,
        "intervals": {name: (value - 1, value + 1) for name, value in metrics.items()},
        "signatures": dict.fromkeys(metrics, SIGNATURE),
        "decoding": "beam 4, length penalty 0.6",
    }


def section(text, title):
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_hubs_own_parser_reads_the_scores_back(tmp_path):
    metadata = ModelCard.load(card.write(tmp_path, facts())).data
    assert [
        (r.task_type, r.dataset_name, r.dataset_split, r.metric_type, r.metric_value) for r in metadata.eval_results
    ] == [
        ("translation", "Multi30k", "test", "bleu", 34.27),
        ("translation", "Multi30k", "test", "chrf", 58.9),
    ]
    assert metadata.eval_results[0].metric_args["signature"] == SIGNATURE
    assert metadata.eval_results[0].metric_args["interval"] == [33.27, 35.27]
    assert metadata.language == ["en", "de"]
    assert (metadata.license, metadata.library_name, metadata.pipeline_tag) == (
        "cc-by-4.0",
        "transformers",
        "translation",
    )
    assert metadata.datasets == ["you/multi30k"]


def test_every_fact_is_told():
    text = card.fill(facts())
    for fact in (
        *("`en` to `de_DE`", "2,345,678 parameters", "28,997 sentence pairs", "CC BY-NC-SA 4.0", "duplicate 3"),
        *("`train.de` | 29,000 | `" + "de" * 32, "[you/multi30k](https://huggingface.co/datasets/you/multi30k)"),
        *("0 training pairs also occur", "4 in the encoder, 4 in the decoder", "text in NFC", "after each sub-layer"),
        *("4,000 updates of about 25,000", "20 minutes", "2 threads of a CPU", "Python 3.11.9, torch 2.13.0"),
        *("34.27 (33.27 to 35.27)", f"BLEU: `{SIGNATURE}`; chrF: `", "beam 4, length penalty 0.6"),
        *("| 71.2 | A dog \\| runs. | Ein Hund\\_1. | Ein Hund. |", "\npython run_translation.py configs/demo.yaml\n"),
    ):
        assert fact in text
    assert "$" not in text


def test_the_snippets_run(tmp_path, capsys):
    tokenizer = tokenization.train([facts()["example"], "Der alte Hund."], vocab_size=300)
    config = VanillaConfig.preset("tiny", vocab_size=len(tokenizer), max_position_embeddings=32)
    sharing.save_model(VanillaForConditionalGeneration(config).eval(), tokenizer, tmp_path)
    text = card.write(tmp_path, facts(address=str(tmp_path))).read_text()
    blocks = re.findall("```python\n(.*?)```", text, flags=re.S)
    exec("\n".join(blocks), {})
    assert [len(eval(line)) for line in capsys.readouterr().out.splitlines()] == [1, 1]


def test_unknown_facts_leave_neither_gaps_nor_headings():
    bare = {key: facts()[key] for key in ("name", "address", "example", "source_lang", "target_lang")}
    text = card.fill(bare)
    assert re.findall("^## .*", text, flags=re.M) == ["## Use", "## Limits"]
    assert "$" not in text and "\n\n\n" not in text and "ore information" not in text
    assert ModelCard(text).data.to_dict().keys() == {"language", "library_name", "pipeline_tag", "tags"}


def test_a_card_without_an_address_is_refused():
    with pytest.raises(ValueError, match="address"):
        card.fill(facts(address=""))


def test_a_new_evaluation_changes_scores_and_samples_and_nothing_else(tmp_path):
    path = card.write(tmp_path, facts(scores=[score("test", bleu=30.0), score("validation", bleu=31.0)]))
    path.write_text(
        path.read_text().replace("tags:\n", "tags:\n- mine\n").replace("## Limits\n", "## Limits\n\nMy words.\n")
    )
    before = path.read_text()
    card.update_scores(tmp_path, facts(scores=[score("test", bleu=33.0, ter=50.0)], samples=[]))
    after = path.read_text()
    metadata = ModelCard(after).data
    assert {(r.dataset_split, r.metric_type): r.metric_value for r in metadata.eval_results} == {
        ("validation", "bleu"): 31.0,
        ("test", "bleu"): 33.0,
        ("test", "ter"): 50.0,
    }
    assert "33.0 (32.0 to 34.0)" in section(after, "Scores") and "30.0 (" not in after
    assert "mine" in metadata.tags
    titles = re.findall("^## (.*)", before, flags=re.M)
    assert re.findall("^## (.*)", after, flags=re.M) == titles
    assert [t for t in titles if section(before, t) != section(after, t)] == ["Scores"]


def test_an_evaluation_of_an_unscored_card_adds_its_sections(tmp_path):
    card.write(tmp_path, facts(scores=[], samples=[]))
    text = card.update_scores(tmp_path, facts()).read_text()
    assert ModelCard(text).data.eval_results[0].metric_value == 34.27
    assert "34.27" in section(text, "Scores") and "71.2" in section(text, "Samples, from typical to worst")


def test_the_address_in_the_snippets_follows_the_folder_to_the_hub():
    text = card.readdress(card.fill(facts(address='runs/"a"')), "you/demo")
    assert text == card.fill(facts(address="you/demo"))


def test_samples_are_the_median_and_the_worst():
    references = [f"word{i} and more of these words" for i in range(9)]
    translations = [reference[: len(reference) - 3 * i] for i, reference in enumerate(references)]
    chosen = card.samples([str(i) for i in range(9)], translations, references, count=2)
    assert [sample["source"] for sample in chosen] == ["3", "4", "7", "8"]
    assert [s["source"] for s in card.samples(["a", " ", "b"], ["x", "", "y"], ["x", "", "z"], count=3)] == ["a", "b"]


def test_a_token_never_reaches_the_card(monkeypatch):
    monkeypatch.setattr("sys.argv", ["run_translation.py", "--name", "my model", "--hub_token=hf_abcDEF123"])
    assert (
        card.command(2)
        == "accelerate launch --num_processes 2 run_translation.py --name 'my model' --hub_token=hf_..."
    )
