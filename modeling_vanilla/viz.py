"""Pictures of attention weights and of a training run.

Example:
    >>> attention = model.attention_map("It was too tired.", tokenizer=tokenizer)
    >>> plot_attention(attention, "attention.png")
"""

import json
import logging
import sys
import warnings
from pathlib import Path

from .generation_vanilla import AttentionMap


logger = logging.getLogger(__name__)

CELL = 0.3  # inches for a token
LONGEST_SIDE = 60  # inches for all of them: more would exceed the pixels of a PNG


def plot_attention(
    attention_map: AttentionMap, path: str | Path, kind: str = "cross", layer: int = -1, head: int | None = None
) -> None:
    """Draw one head of one layer, or the mean of its heads, to an image file: a row looks at the columns.

    `kind` is "encoder" (source at source), "decoder" (target at the target so far) or "cross" (the token to be
    predicted at the source); layers and heads count from 0, and from the end with negative numbers.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('pictures need matplotlib: pip install "matplotlib>=3.8"') from error
    weights, rows, columns, title = _select(attention_map, kind, layer, head)
    cell = min(CELL, LONGEST_SIDE / max(len(rows), len(columns)))
    margins = [max(map(len, labels)) * cell / 3 + 1 for labels in (rows, columns)]
    size = max(5, cell * len(columns) + margins[0] + 0.5), cell * len(rows) + margins[1]  # 5: room for the title
    figure = Figure(size, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(weights.numpy(), cmap="Blues", vmin=0)
    figure.colorbar(image, shrink=min(1, 2 / (cell * len(rows))))
    # parse_math: two dollar signs in a token are no formula.
    style = {"fontfamily": _fonts({*"".join(rows + columns)}), "fontsize": 36 * cell, "parse_math": False}
    axes.set_yticks(range(len(rows)), rows, **style)
    axes.set_xticks(range(len(columns)), columns, rotation="vertical", **style)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.set_title(title, fontsize=10)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # `_fonts` has said it, once and with the remedy
        figure.savefig(path, dpi=150)


def _select(attention_map, kind, layer, head):
    """The matrix to draw, the labels of its rows and columns, and its title."""
    source, target = attention_map.source_tokens, attention_map.target_tokens
    labels = {
        "encoder": (source, source),
        "decoder": (target, target),
        "cross": (attention_map.predicted_tokens, source),
    }
    if kind not in labels:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(labels)}")
    weights = getattr(attention_map, kind)
    for name, index, size in ("layer", layer, len(weights)), ("head", head, weights.shape[1]):
        if index is not None and not -size <= index < size:
            raise ValueError(f"{name}={index} does not exist: the model has {size}, counted from 0")
    matrix = weights[layer].mean(0) if head is None else weights[layer, head]
    heads = f"mean of {weights.shape[1]} heads" if head is None else f"head {head % weights.shape[1]}"
    name = {"encoder": "encoder self-attention", "decoder": "decoder self-attention", "cross": "cross-attention"}[kind]
    rows, columns = ([_visible(token) for token in tokens] for tokens in labels[kind])
    return matrix, rows, columns, f"{name}, layer {layer % len(weights)}, {heads}"


def _visible(token):
    """Escapes instead of line ends and the like."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)


def _fonts(characters):
    """The default font, and installed ones that have what it lacks; what none has is drawn as a box."""
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties, findfont, fontManager
    from matplotlib.ft2font import FT2Font

    fonts = list(rcParams["font.family"])
    missing = set(map(ord, characters)) - set(FT2Font(findfont(FontProperties(family=fonts))).get_charmap())
    for entry in fontManager.ttflist:
        if missing and not entry.name.startswith("Last Resort"):  # which has a box for everything
            found = missing & set(FT2Font(entry.fname).get_charmap())
            missing -= found
            fonts += [entry.name] if found else []
    if missing:
        text = "".join(map(chr, sorted(missing)))
        logger.warning("no installed font has %s: install the Noto font of the script to see it", text)
    return fonts


def plot_training(folder: str | Path) -> Path | None:
    """Draw `training_log.jsonl` of a run: loss, validation BLEU and learning rate over updates.

    Returns the path of `training_curves.png`, or None when there is nothing to draw or matplotlib is missing.
    On demand: python -m modeling_vanilla.viz FOLDER
    """
    log = Path(folder) / "training_log.jsonl"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning(
            'no training_curves.png: pip install "matplotlib>=3.8", then python -m modeling_vanilla.viz %s', folder
        )
        return None
    if not lines:
        return None
    figure = Figure((12, 3.5), layout="constrained")
    panels = {
        "loss": ("loss", "eval_loss"),
        "BLEU": ("eval_bleu",),
        "learning rate": ("learning_rate",),
    }
    for axes, (title, names) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for name in names:
            points = [(line["update"], line[name]) for line in lines if name in line]
            if points:
                axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else None, label=name)
        axes.set_title(title)
        axes.set_xlabel("update")
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend()
    path = Path(folder) / "training_curves.png"
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    print(plot_training(sys.argv[1]))
