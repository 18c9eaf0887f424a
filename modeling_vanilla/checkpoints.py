"""Checkpoints: complete model folders plus the state of training, written so that a crash at any moment loses nothing.

A checkpoint is written into a hidden folder, flushed to disk and renamed, so `checkpoint-<update>` is whole or absent.
It holds no pickle: tensors are safetensors, the rest is JSON. Random numbers need no state, as every update seeds its
own (see `training.Training.update`), and the data plan is a function of the update number.
"""

import json
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from .errors import InputError
from .sharing import write_model, written_aside


STATE = "training_state"
MANIFEST = "manifest.json"


def save(folder, model, tokenizer, tensors, progress):
    """Write a checkpoint.

    Args:
        folder: `checkpoint-<update>`, replaced if it is there.
        model: plain model whose weights are saved.
        tensors: file name -> {name: tensor}, the optimizer's moments and the moving average.
        progress: what JSON can hold.

    Raises:
        InputError: the disk is full; what was written is removed, earlier checkpoints are untouched.
    """
    shutil.rmtree(folder, ignore_errors=True)  # a broken one that was passed over
    with written_aside(folder) as aside:
        write_model(model, tokenizer, aside)
        (aside / STATE).mkdir()
        for name, content in tensors.items():
            save_file(content, aside / STATE / f"{name}.safetensors")
        (aside / STATE / "progress.json").write_text(json.dumps(progress, indent=1))
        sizes = {str(path.relative_to(aside)): path.stat().st_size for path in aside.rglob("*") if path.is_file()}
        (aside / STATE / MANIFEST).write_text(json.dumps(sizes, indent=1))


def load(folder):
    """(weights, {file name: tensors}, progress) of a checkpoint."""
    state = Path(folder) / STATE
    tensors = {path.stem: load_file(path) for path in state.glob("*.safetensors")}
    return load_file(Path(folder) / "model.safetensors"), tensors, progress(folder)


def progress(folder):
    """What `save` was given of this name."""
    return json.loads((Path(folder) / STATE / "progress.json").read_text())


def load_weights(model, weights):
    """Overwrite the model's parameters; tied ones are stored once.

    Raises:
        InputError: the weights belong to another model.
    """
    report = model.load_state_dict(weights, strict=False)
    stored = {tensor.data_ptr() for name, tensor in model.state_dict().items() if name in weights}
    missing = [name for name in report.missing_keys if model.get_parameter(name).data_ptr() not in stored]
    if missing or report.unexpected_keys:
        raise InputError(f"the weights belong to another model: {(missing or report.unexpected_keys)[0]}")


def fault(folder):
    """Why the folder is no whole checkpoint, or None."""
    folder = Path(folder)
    try:
        sizes = json.loads((folder / STATE / MANIFEST).read_text())
        for name, size in sizes.items():
            if (folder / name).stat().st_size != size:
                return f"{name} has {(folder / name).stat().st_size} bytes instead of {size}"
            if name.endswith(".safetensors"):
                with safe_open(folder / name, "pt") as file:
                    file.keys()
        progress(folder)
    except (OSError, ValueError, SafetensorError) as error:
        return str(error)
    return None


def all_in(output_dir):
    """Checkpoint folders, oldest first, sorted by number."""
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(folders, key=number)


def number(folder):
    return int(Path(folder).name.rpartition("-")[2])


def newest(output_dir, say=print):
    """The newest whole checkpoint, or None; broken ones are passed over with a message."""
    for folder in reversed(all_in(output_dir)):
        reason = fault(folder)
        if reason is None:
            return folder
        say(f"{folder} is passed over: {reason}")
    return None


def scheduled(output_dir, every):
    """The whole checkpoints at multiples of `every` and the newest, oldest first.

    Others, written on a signal or for a good score, must not change which ones are averaged.
    """
    folders = [folder for folder in all_in(output_dir) if fault(folder) is None]
    return [folder for folder in folders if number(folder) % every == 0 or folder == folders[-1]]


def rotate(output_dir, keep, every=1, best=None):
    """Delete all checkpoints but the newest `keep` of the scheduled ones and the best one (its update number)."""
    kept = scheduled(output_dir, every)[-keep:]
    for folder in all_in(output_dir):
        if folder not in kept and number(folder) != best:
            shutil.rmtree(folder)
    for partial in Path(output_dir).glob(".*checkpoint-*.partial"):  # of runs that were killed
        shutil.rmtree(partial)
