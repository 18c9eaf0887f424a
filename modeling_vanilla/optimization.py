"""The paper's optimiser and schedule (sections 5.3 and 6.1), and two averages of the weights."""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from . import fsdp
from .errors import InputError


# A fitted run warms up for at most this share of its updates; short runs gain most from the cooldown that follows.
MAX_WARMUP_SHARE = 0.25
# Peaks that published recipes use lie well inside: 5e-3 at d_model 128, 7e-4 at 512, 2e-5 for fine-tuning.
SANE_PEAKS = 1e-5, 1e-2


def optimizer(
    model: nn.Module, lr: float, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-9
) -> torch.optim.Adam:
    """Return Adam as in section 5.3, without weight decay, in one fused kernel where the device has one."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = all(p.device.type in ("cpu", "cuda") for p in parameters)
    return torch.optim.Adam(parameters, lr=lr, betas=betas, eps=eps, fused=fused)


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """Return the norm over all gradients; it is finite only if every one of them is."""
    return fsdp.whole(nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None))


def paper_schedule(update: int, d_model: int, warmup_steps: int = 4000, lr_factor: float = 1.0) -> float:
    """Return the learning rate of `update` (from 1) after equation 3: linear warm-up, then the inverse square root."""
    _check_schedule(update, warmup_steps)
    return lr_factor * d_model**-0.5 * min(update**-0.5, update * warmup_steps**-1.5)


def fitted_schedule(
    update: int, total_updates: int, d_model: int, warmup_steps: int = 4000, lr_factor: float = 1.0
) -> float:
    """Return the learning rate of `update` (from 1) in a run of known length: warm-up, then linear to zero.

    The peak is the paper's for `warmup_steps`, also where the warm-up is shortened to a quarter of the run. Zero is
    reached after the last update, so that this one still counts.
    """
    _check_schedule(update, warmup_steps)
    warmup = _fitted_warmup(total_updates, warmup_steps)
    rising, falling = update / warmup, (total_updates + 1 - update) / (total_updates + 1 - warmup)
    return paper_schedule(warmup_steps, d_model, warmup_steps, lr_factor) * max(0.0, min(rising, falling))


def schedule_warnings(
    total_updates: int, d_model: int, warmup_steps: int = 4000, lr_factor: float = 1.0, fitted: bool = False
) -> list[str]:
    """Return what looks wrong with a schedule, one message a finding; none if nothing does."""
    messages = []
    highest = warmup_steps if fitted else min(warmup_steps, total_updates)
    peak = paper_schedule(highest, d_model, warmup_steps, lr_factor)
    if fitted and (warmup := _fitted_warmup(total_updates, warmup_steps)) < warmup_steps:
        messages.append(f"--warmup_steps {warmup_steps} is shortened to {warmup}: the run has {total_updates} updates")
    if not fitted and warmup_steps >= total_updates:
        messages.append(
            f"--warmup_steps {warmup_steps} is not shorter than the run of {total_updates} updates: the learning rate "
            f"only rises, to {peak:.2e}; lower --warmup_steps or train longer"
        )
    if not SANE_PEAKS[0] <= peak <= SANE_PEAKS[1]:
        messages.append(
            f"the learning rate peaks at {peak:.2e}, outside {SANE_PEAKS[0]:.0e} to {SANE_PEAKS[1]:.0e}: "
            f"check --lr_factor {lr_factor:g} and --warmup_steps {warmup_steps}"
        )
    return messages


def _fitted_warmup(total_updates, warmup_steps):
    return min(warmup_steps, max(1, int(total_updates * MAX_WARMUP_SHARE)))


def _check_schedule(update, warmup_steps):
    if update < 1 or warmup_steps < 1:
        raise ValueError(f"update {update} and warmup_steps {warmup_steps} count from 1")


class ExponentialMovingAverage:
    """A running average of a model's parameters in fp32, each tied parameter once.

    average <- d * average + (1 - d) * weights with d = min(decay, (1 + n) / (10 + n)) at update n, as TensorFlow's
    `tf.train.ExponentialMovingAverage(num_updates=n)`: it starts from the weights, so there is no bias to correct, and
    soon forgets them. Marian's Transformer presets use decay 0.9999 (`--exponential-smoothing`). Make it from the bare
    model, not from a wrapper, once that is on its device.
    """

    def __init__(self, model: nn.Module, decay: float):
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), not {decay}")
        self.decay, self.updates = decay, 0
        self.average = {name: p.detach().float().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after one more update."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        average, weights = map(fsdp.part, self.average.values()), map(fsdp.part, self._parameters(model))
        torch._foreach_lerp_(list(average), [p.float() for p in weights], 1 - decay)

    @contextmanager
    def applied_to(self, model: nn.Module):
        """Lend the average to `model`; the weights come back bit for bit, also after an exception."""
        parameters = self._parameters(model)
        weights = [p.detach().clone() for p in parameters]
        fsdp.overwrite(parameters, self.average.values())
        try:
            yield model
        finally:
            fsdp.overwrite(parameters, weights)

    def state_dict(self) -> dict:
        """Return the number of updates and the average, by parameter name."""
        return {"updates": self.updates, "average": {name: fsdp.whole(x) for name, x in self.average.items()}}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a `state_dict`; ValueError if it belongs to another model."""
        if difference := sorted(state["average"].keys() ^ self.average.keys()):
            raise ValueError(f"the saved average belongs to another model: {difference[0]} is in one of them only")
        self.updates = state["updates"]
        fsdp.overwrite(self.average.values(), (state["average"][name] for name in self.average))

    def _parameters(self, model):
        parameters = dict(model.named_parameters())
        return [parameters[name] for name in self.average]


def average(sources: Sequence[Mapping[str, torch.Tensor] | str | os.PathLike]) -> dict[str, torch.Tensor]:
    """Return the mean of state dicts, or of the model.safetensors in folders, on the CPU.

    Summed in float64 and in an order that follows from the values, so the result does not depend on the order given
    and equal inputs come back as they are. Half precision comes back as float32; tensors that are not floating point
    are those of the last source; tied ones stay one. Read one tensor at a time. InputError where names or shapes
    differ or a file is missing.
    """
    if not sources:
        raise InputError("nothing to average: no checkpoint was given")
    sources = [_source(source, number) for number, source in enumerate(sources, start=1)]
    first_name = sources[-1].first_name
    for source in sources:
        if difference := sorted(first_name.keys() ^ source.first_name.keys()):
            raise InputError(f"{source.label}: {difference[0]} is not in all checkpoints; average those of one run")
    means = {name: _mean(name, sources) for name in set(first_name.values())}
    return {name: means[first] for name, first in first_name.items()}


def average_checkpoints(folders: Sequence[str | os.PathLike], output: str | os.PathLike) -> None:
    """Write the average of model folders as a model folder; all but the weights is copied from the last one."""
    weights = average(folders)
    output, last = Path(output), Path(folders[-1])
    output.mkdir(parents=True, exist_ok=True)
    for file in sorted(last.iterdir()):
        # Configuration, tokenizer, code and card; neither weights nor the state of the training.
        if file.suffix in (".json", ".py", ".txt", ".md", ".jinja") and not file.name.startswith("train"):
            if file.resolve() != (output / file.name).resolve():
                shutil.copyfile(file, output / file.name)
    save_file(weights, output / "model.safetensors.tmp", metadata={"format": "pt"})
    os.replace(output / "model.safetensors.tmp", output / "model.safetensors")


class _Source(NamedTuple):
    label: str
    first_name: dict[str, str]  # of every tensor; tied ones share the first of their names
    read: Callable[[str], torch.Tensor]


def _source(source, number):
    if isinstance(source, Mapping):
        memory = {}
        first_name = {n: memory.setdefault((t.data_ptr(), t.shape, t.stride()), n) for n, t in source.items()}
        return _Source(f"state dict {number}", first_name, source.__getitem__)
    path = Path(source) / "model.safetensors"
    if not path.is_file():
        raise InputError(f"{path} does not exist: give the folder of a checkpoint")
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise InputError(f"{path} is damaged ({error}): leave this checkpoint out") from error
    return _Source(str(path), {name: name for name in file.keys()}, file.get_tensor)


def _mean(name, sources):
    last = sources[-1].read(name)
    if not last.is_floating_point():
        return last.cpu().clone()
    keyed = []
    for source in sources:
        tensor = source.read(name)
        if tensor.shape != last.shape:
            raise InputError(f"{source.label}: {name} has shape {tuple(tensor.shape)}, not {tuple(last.shape)}")
        keyed.append((_digest(tensor), source))
    total = torch.zeros(last.shape, dtype=torch.float64)
    for _, source in sorted(keyed, key=lambda pair: pair[0]):
        total += source.read(name).detach().cpu()
    return total.div_(len(sources)).to(torch.promote_types(last.dtype, torch.float32))


def _digest(tensor):
    return hashlib.blake2b(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).digest()
