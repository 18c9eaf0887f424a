"""Model folders that load without this package, written whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerFast

from . import tokenization
from .errors import InputError


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Write weights, settings, tokenizer and code to a folder that needs nothing but transformers, or none of it."""
    with written_aside(folder) as aside:
        write_model(model, tokenizer, aside)


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Write what `save_model` writes, file by file."""
    model.save_pretrained(folder)
    tokenization.save(tokenizer, folder)


@contextmanager
def saving(folder: str | Path) -> Iterator[None]:
    """One line with the remedy, as InputError, when what is written to the folder does not get onto the disk."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = f"{folder} could not be written ({error})"
        raise InputError(f"{reason}: free some space, then the same command goes on") from error


@contextmanager
def written_aside(folder: str | Path) -> Iterator[Path]:
    """A folder to write to, whose files are in `folder` once all of them are on the disk; after an error none is.

    A new `folder` appears in one step; in one that exists, files of the same name are replaced one after the other.
    InputError when the disk is full.
    """
    with saving(folder), _written_aside(folder) as aside:
        yield aside


@contextmanager
def _written_aside(folder):
    folder = Path(os.path.realpath(folder))
    exists = folder.exists()
    # Inside if possible: `folder` may be a mounted disk, and nothing can be renamed from one disk to another.
    aside = folder / ".partial" if exists else folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed
    aside.mkdir(parents=True)
    try:
        yield aside
        for path in aside.rglob("*"):
            _flush(path)
        if exists:
            _move_files(aside, folder)
        else:
            aside.rename(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _move_files(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        if path.is_file():
            moved = target / path.relative_to(source)
            moved.parent.mkdir(parents=True, exist_ok=True)
            path.replace(moved)
            _flush(moved.parent)


def _flush(path: Path) -> None:
    """Wait until a file, or on POSIX a folder's list of names, has reached the disk."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_model(
    name: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str = torch.float32,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model, ready to translate, and the tokenizer of a folder or a Hub repository.

    The classes are those of this package; code from the folder runs only with `trust_remote_code`.
    InputError when the folder holds no complete vanilla model or a tokenizer that does not fit it.
    """
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise InputError(f"{name} holds no model (no config.json); give a folder written by run_translation.py")
    try:
        model, report = AutoModelForSeq2SeqLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        what = "holds no whole model" if Path(name).is_dir() else "is neither a folder nor a model found on the Hub"
        raise InputError(f"{name} {what}: {str(error).strip().splitlines()[0]}") from error
    if model.config.model_type != "vanilla":
        raise InputError(f"{name} holds a {model.config.model_type} model; only vanilla models translate here")
    if report["missing_keys"]:
        raise InputError(f"{name} lacks {len(report['missing_keys'])} of the model's weights; copy the folder again")
    tokenizer = tokenization.load(name)
    if len(tokenizer) > model.config.vocab_size:
        raise InputError(
            f"the tokenizer of {name} has {len(tokenizer)} pieces, its model only {model.config.vocab_size}; "
            "use the tokenizer that the model was trained with"
        )
    try:
        return model.to(device).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:  # an unknown device, or one that this torch was built without
        raise InputError(f"device {device} cannot be used: {str(error).splitlines()[0]}") from error
