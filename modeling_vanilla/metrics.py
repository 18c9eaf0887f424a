"""BLEU, chrF and TER by sacreBLEU as evaluate metrics that need no download, unlike evaluate.load("sacrebleu")."""

import json
import logging
import re
from itertools import zip_longest

import datasets
import evaluate
import sacrebleu


logger = logging.getLogger(__name__)

BOOTSTRAP_SAMPLES = 1000  # as sacreBLEU's command line; its seed is 12345 unless SACREBLEU_SEED says otherwise

# BLEU needs words, and these languages do not write them apart. sacreBLEU's tokenizer for the last group (flores200)
# would have to be downloaded, so characters are counted there; the signature says "tok:char".
BLEU_TOKENIZERS = {
    **dict.fromkeys(["zh", "zho", "cmn", "yue", "wuu", "lzh"], "zh"),
    **dict.fromkeys(["ja", "jpn"], "ja-mecab"),
    **dict.fromkeys(["ko", "kor"], "ko-mecab"),
    **dict.fromkeys(["th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bo", "bod", "dz", "dzo"], "char"),
}


class _SacreBLEU(evaluate.Metric):
    def __init__(self, keep_in_memory: bool = True, **kwargs):
        super().__init__(keep_in_memory=keep_in_memory, **kwargs)

    def _info(self):
        one, several = datasets.Value("string"), datasets.Sequence(datasets.Value("string"))
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="Post (2018), A Call for Clarity in Reporting BLEU Scores, arXiv 1804.08771",
            inputs_description="`references` holds, for each prediction, a string or a list of strings.",
            features=[datasets.Features({"predictions": one, "references": each}) for each in (several, one)],
        )

    def _compute(self, predictions, references, confidence=False, **options):
        """The `options` are those of the sacreBLEU class; `confidence` adds half the 95 % bootstrap interval."""
        rows = [[each] if isinstance(each, str) else each for each in references]
        metric = self.sacrebleu_class(**options)
        # sacreBLEU wants the first references of all lines, then the second ones; None where a line has fewer
        result = metric.corpus_score(predictions, list(zip_longest(*rows)), BOOTSTRAP_SAMPLES if confidence else 1)
        signature = str(metric.get_signature())
        scores = {"score": result.score, "signature": signature}
        if confidence:
            formatted = json.loads(result.format(width=4, signature=signature, is_json=True))
            scores["confidence"] = formatted.get("confidence_var", 0.0)  # absent when every resample scores 0
        return scores


class BLEU(_SacreBLEU):
    """BLEU (Papineni et al., 2002).

    Example: BLEU().compute(predictions=["a b c d e"], references=[["a b c d f"]], lowercase=True)["score"] -> 66.87
    """

    sacrebleu_class = sacrebleu.BLEU


class _CHRF(sacrebleu.CHRF):
    """Its bootstrap fails where some resamples score 0.0 and the others a NumPy float32."""

    def _compute_f_score(self, statistics):
        return float(super()._compute_f_score(statistics))


class ChrF(_SacreBLEU):
    """chrF (Popović, 2015), and chrF++ with word_order=2."""

    sacrebleu_class = _CHRF


class TER(_SacreBLEU):
    """Translation edit rate (Snover et al., 2006), lower is better; it takes a minute for long, badly ordered text."""

    sacrebleu_class = sacrebleu.TER


def bleu_tokenizer(target_lang: str | None) -> str:
    """sacreBLEU's tokenizer for a language code such as "zh", "zh-CN" or "zho_Hans"; "13a" for most."""
    tokenizer = BLEU_TOKENIZERS.get(re.split("[-_]", target_lang or "")[0].lower(), "13a")
    if tokenizer in ("ja-mecab", "ko-mecab"):
        try:
            sacrebleu.BLEU(tokenize=tokenizer)
        except RuntimeError:
            extra = tokenizer[:2]
            logger.warning('BLEU counts characters, not words: pip install "sacrebleu[%s]" adds %s', extra, tokenizer)
            return "char"
    return tokenizer


def score(predictions, references, target_lang: str | None = None, confidence: bool = False) -> dict[str, float | str]:
    """BLEU, lower-cased BLEU and chrF of a corpus, each with its sacreBLEU signature, as one flat dictionary.

    With `confidence`, "bleu_confidence" and so on are the half widths of 95 % bootstrap intervals.
    """
    if not len(predictions):
        raise ValueError("there are no predictions to score")
    tokenizer = bleu_tokenizer(target_lang)
    metrics = {
        "bleu": (BLEU(), {"tokenize": tokenizer}),
        "bleu_lc": (BLEU(), {"tokenize": tokenizer, "lowercase": True}),
        "chrf": (ChrF(), {}),
    }
    report = {}
    for name, (metric, options) in metrics.items():
        scores = metric.compute(predictions=predictions, references=references, confidence=confidence, **options)
        report[name] = scores.pop("score")
        report |= {f"{name}_{key}": value for key, value in scores.items()}
    return report
