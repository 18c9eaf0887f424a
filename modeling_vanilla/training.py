"""The training loop: the same updates on one CPU and on many GPUs, interrupted or not.

    python run_translation.py recipe.yaml                                     one process
    accelerate launch run_translation.py recipe.yaml                          all GPUs, or mixed precision
    torchrun --nproc_per_node 2 run_translation.py recipe.yaml                two processes, also on CPUs
    torchrun --nproc_per_node 2 run_translation.py recipe.yaml --fsdp true    which share one model's memory

What an update holds is planned ahead (`batching.UpdatePlan`); devices only share its micro-batches. Its gradient is
that of the summed loss divided by the target tokens of the whole update, its learning rate and its random numbers
depend on its number alone. So nothing but that number, the weights and Adam's moments is needed to go on.
"""

import contextlib
import json
import math
import os
import re
import signal
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DistributedType, gather_object
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from . import checkpoints, data, fsdp, hub, metrics, optimization, sharing
from .batching import collate, idle, token_batches
from .errors import InputError, Stopped


PATIENCE = 5  # non-finite updates in a row that end the run
UNLIMITED = 10**9  # updates of a run that only the clock or an evaluation ends
REPETITION = re.compile(r"(.{1,20}?)\1{4}", re.DOTALL)  # five times the same


@dataclass
class Progress:
    """What a checkpoint remembers besides tensors."""

    update: int = 0
    total_updates: int = 0
    seconds: float = 0.0
    target_tokens: int = 0
    skipped: int = 0  # updates whose gradient was not finite
    skipped_in_a_row: int = 0
    best: float | None = None
    best_update: int | None = None
    worse_in_a_row: int = 0  # evaluations since the best one
    scaler: dict | None = None  # of fp16
    data: str = ""  # hash of the training pairs' lengths


def accelerator(recipe):
    """Accelerate, set up for gradients that we normalise ourselves and for models without changing buffers.

    Raises:
        InputError: the machine has no fp16, the tracker is not installed, the launcher is not one of those above, or
            an old PyTorch cannot shard on CPUs.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    # From `accelerate launch --use_fsdp`: Accelerate's own way to shard needs GPUs.
    if os.environ.pop("ACCELERATE_USE_FSDP", "false").lower() == "true":
        recipe.fsdp = True
    try:
        accelerator = Accelerator(
            # Accelerate sees the other processes on CPUs only when told that CPUs are meant.
            cpu=world > 1 and not torch.cuda.is_available(),
            mixed_precision=None if recipe.mixed_precision == "no" else recipe.mixed_precision,
            log_with=None if recipe.report_to == "none" else recipe.report_to,
            project_dir=recipe.output_dir,
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
        )
    except ValueError as error:
        raise InputError(
            f"--mixed_precision {recipe.mixed_precision} --report_to {recipe.report_to}: {error}"
        ) from None
    if recipe.report_to != "none" and not accelerator.log_with:
        raise InputError(f"--report_to {recipe.report_to}: pip install {recipe.report_to}")
    foreign = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
    if accelerator.distributed_type in foreign or accelerator.num_processes < world:
        raise InputError(
            f"{world} processes of the kind {accelerator.distributed_type.value} do not train together here: use "
            "torchrun or accelerate launch --multi_gpu, with --fsdp true if gradients and moments do not fit a device"
        )
    if recipe.fsdp and world > 1 and accelerator.device.type == "cpu" and not fsdp.KNOWS_CPUS:
        raise InputError(f"--fsdp true: PyTorch {torch.__version__} shards on GPUs only; leave it out or update")
    return accelerator


@contextlib.contextmanager
def main_process_first(accelerator):
    """The others follow it, also into an error, where Accelerate's would wait for ever."""
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
    try:
        yield
    finally:
        if accelerator.is_main_process:
            accelerator.wait_for_everyone()


class Training:
    """One run: `run()` goes from the newest checkpoint to the end and leaves the final weights in `model`."""

    def __init__(self, recipe, accelerator, model, tokenizer, splits):
        self.recipe, self.accelerator, self.tokenizer, self.splits = recipe, accelerator, tokenizer, splits
        self.output_dir = Path(recipe.output_dir)
        self.plain = model
        place = accelerator.process_index, accelerator.num_processes
        with main_process_first(accelerator):
            self.reader = data.reader(recipe, splits, tokenizer, model.config, *place)
        self.sharded = recipe.fsdp and accelerator.num_processes > 1
        if self.sharded:
            self.trained = fsdp.shard(model.cpu(), accelerator.device.type, accelerator.num_processes)
        else:
            self.trained = model
        if recipe.torch_compile:
            self.trained.compile(dynamic=True)
        betas = recipe.adam_beta1, recipe.adam_beta2
        optimizer = optimization.optimizer(self.trained, 0.0, betas, recipe.adam_epsilon)
        self.optimizer = accelerator.prepare(optimizer)
        # "Evaluation" is Accelerate's word for mixed precision alone: what is sharded is not replicated (DDP) too.
        self.model = accelerator.prepare_model(self.trained, device_placement=False, evaluation_mode=self.sharded)
        self.ema = optimization.ExponentialMovingAverage(self.trained, recipe.ema_decay) if recipe.ema_decay else None
        self.progress = Progress(total_updates=planned_updates(recipe, self.reader), data=self.reader.fingerprint)
        self.seconds = Counter()  # phase -> seconds of this process
        self.log = Log(self.output_dir / "training_log.jsonl", accelerator)
        self.since_log = Counter()
        self.asked = self.agreed = 0  # number of the signal that asks to stop: this process, all of them
        self.saved = None  # update of the last checkpoint
        self.upload = None  # of a checkpoint, in the background

    def run(self):
        """Train to the end.

        Raises:
            Stopped: SIGTERM or Ctrl-C came; a checkpoint was written first.
            InputError: memory ran out, the disk is full, or the loss is not finite; says what to change.
        """
        self.resume()
        self.resumed_seconds = self.progress.seconds
        self.started = time.perf_counter() - self.progress.seconds
        self.model.train()
        with (
            sharing.saving(self.output_dir),
            self.signals(),
            self.bar() as bar,
            contextlib.closing(self.batches()) as batches,
            ThreadPoolExecutor(1) as self.uploads,
        ):
            while not self.done():
                self.update(next(batches))
                self.after_update(bar)
            self.log_training(bar)
            self.checkpoint()
        self.finish()
        self.progress.seconds = time.perf_counter() - self.started

    def done(self):
        patience = self.recipe.early_stopping_patience
        if patience is not None and self.progress.worse_in_a_row >= patience:
            self.say(f"stopped early: {patience} evaluations without a better {self.recipe.metric_for_best_model}")
            return True
        return self.progress.update >= self.progress.total_updates

    # -- one update ---------------------------------------------------------------------------------------------------

    def batches(self):
        """This device's micro-batches, update by update, prepared by processes in the background."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # or `tokenizers` warns of the fork
        loader = DataLoader(
            self.reader,
            batch_size=None,
            sampler=range(self.progress.update, UNLIMITED),
            num_workers=self.recipe.dataloader_num_workers,
            multiprocessing_context="fork" if sys.platform == "linux" else None,  # not to import everything again
            worker_init_fn=ignore_signals,
            pin_memory=self.accelerator.device.type == "cuda",
        )
        updates = iter(loader)
        try:
            while True:
                with self.phase("waiting for data"):
                    batches = self.read(updates)
                yield batches
        finally:
            updates._shutdown_workers()  # DataLoader's own way waits until no traceback holds the iterator

    def read(self, updates):
        """The next update; what went wrong in another process, and arrives with its traceback, in one line."""
        try:
            return next(updates)
        except (InputError, *hub.FAILURES) as error:
            reason = str(error).strip().splitlines()[-1].rpartition("InputError: ")[2]
            raise InputError(f"{reason} (the same command goes on from {self.good()})") from error

    def update(self, batches):
        """One step of Adam on the mean loss over all target tokens of the update, on however many devices."""
        n, accelerator, loss = self.progress.update, self.accelerator, 0.0
        tokens, rounds = self.agree(batches)
        self.learning_rate = self.schedule(n + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        # Seeded by update and device: nothing to store, nothing to restore.
        torch.manual_seed(((self.recipe.seed * 1_000_003 + n) * 4096 + accelerator.process_index) % 2**63)
        with self.phase("forward and backward") as watch:
            for i, batch in enumerate(batches + [idle(batches[0])] * (rounds - len(batches)), start=1):
                # Sharded gradients are added up at once: to keep whole ones until the last batch takes their memory.
                with contextlib.nullcontext() if i == rounds else accelerator.no_sync(self.model):
                    loss += self.backward(batch, tokens / accelerator.num_processes)
            stepped = self.step()
        self.count(batches, tokens, loss if stepped else 0.0, stepped, watch())

    def agree(self, batches):
        """The target tokens of the update, on all devices together, and how many batches this one has to compute.

        The devices also tell each other of signals, and look at one clock.
        """
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        seconds = time.perf_counter() - self.started
        mine = [tokens, self.asked, round(1000 * seconds), len(batches)]
        everyone = self.accelerator.gather(torch.tensor([mine], device=self.accelerator.device))
        self.agreed = int(everyone[:, 1].max())
        self.fit_to_clock(int(everyone[0, 2]) / 1000)
        # Sharded layers are gathered for every batch, and for that all devices are needed.
        return int(everyone[:, 0].sum()), int(everyone[:, 3].max()) if self.sharded else len(batches)

    def backward(self, batch, tokens):
        """Add a micro-batch to the gradient; devices average theirs, so `tokens` are those of the mean device."""
        device = self.accelerator.device
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        try:
            loss = self.loss(batch, tokens)
            self.accelerator.backward(loss)
        except torch.cuda.OutOfMemoryError as error:
            raise InputError(
                f"out of memory on {batch['input_ids'].shape[0]} pairs of up to {batch['input_ids'].shape[1]} source "
                f"and {batch['labels'].shape[1]} target tokens: lower --max_tokens_per_device "
                f"(now {self.recipe.max_tokens_per_device}); it changes speed, not results"
            ) from error
        return loss.detach()

    def loss(self, batch, tokens):
        if self.recipe.r_drop:
            return r_drop_loss(self.model, batch, tokens, self.recipe.r_drop)
        return self.model(**batch, num_items_in_batch=tokens).loss

    def step(self):
        """Adam, unless the gradient is not finite: then the update is skipped and counted. Whether a step was made."""
        self.accelerator.unscale_gradients()
        finite = bool(torch.isfinite(optimization.gradient_norm(self.trained)))
        if finite or self.accelerator.scaler is not None:  # which skips too, and has to learn of it
            self.optimizer.step()
        self.optimizer.zero_grad()
        if not finite:
            self.skip()
            return False
        self.progress.skipped_in_a_row = 0
        if self.ema is not None:
            self.ema.update(self.trained)
        return True

    def skip(self):
        """Count an update without a step; too many in a row end the run.

        fp16 begins with a loss scale that overflows and halves it until it does not: no fault above a scale of 1.
        """
        scaler, progress = self.accelerator.scaler, self.progress
        progress.skipped += 1
        self.say(f"update {progress.update + 1}: the gradient is not finite; skipped")
        if scaler is None or scaler.get_scale() < 1:
            progress.skipped_in_a_row += 1
        if progress.skipped_in_a_row >= PATIENCE:
            raise InputError(
                f"{PATIENCE} updates in a row without a finite gradient: lower --lr_factor or use "
                f"--mixed_precision no; last good checkpoint: {self.good()}"
            )

    def count(self, batches, tokens, loss, stepped, seconds):
        self.progress.update += 1
        self.progress.target_tokens += tokens
        self.since_log.update(
            loss=loss,
            steps=int(stepped),
            tokens=tokens,
            seconds=seconds,
            padded=sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in batches),
            real=sum(int(batch["attention_mask"].sum()) + int((batch["labels"] != -100).sum()) for batch in batches),
        )

    def schedule(self, n):
        """The learning rate of update n, counted from 1."""
        recipe, d_model = self.recipe, self.plain.config.d_model
        if recipe.lr_scheduler_type == "linear":
            return optimization.fitted_schedule(
                n, self.progress.total_updates, d_model, recipe.warmup_steps, recipe.lr_factor
            )
        return optimization.paper_schedule(n, d_model, recipe.warmup_steps, recipe.lr_factor)

    # -- between updates ----------------------------------------------------------------------------------------------

    def after_update(self, bar):
        """Log, evaluate and save when it is time to, and stop when asked to."""
        n, recipe = self.progress.update, self.recipe
        if n % recipe.logging_steps == 0:
            self.log_training(bar)
        if n % recipe.eval_steps == 0 and self.splits.validation is not None:
            self.evaluate_and_compare()
        if n % recipe.save_steps == 0:
            self.checkpoint()
        bar.total = self.bar_total()
        bar.update(n - bar.n)
        # A lone process need not wait for the next update to agree with itself.
        if number := self.asked if self.accelerator.num_processes == 1 else self.agreed:
            folder, name = self.checkpoint(), signal.Signals(number).name
            raise Stopped(number, f"stopped by {name}; the same command goes on from {folder}")

    def fit_to_clock(self, seconds):
        """With --max_minutes: as many updates as the time left allows at the speed so far."""
        if self.recipe.max_minutes and self.progress.update:
            left = max(0.0, 60 * self.recipe.max_minutes - seconds)
            total = self.progress.update + round(left * self.progress.update / seconds)
            self.progress.total_updates = min(total, planned_updates(self.recipe, self.reader))

    def evaluate_and_compare(self):
        """Score the validation data and remember whether this is the best model so far."""
        recipe, progress = self.recipe, self.progress
        with self.phase("evaluation"), self.result_so_far() as model, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they name lines that were cut or never ended: of use in the end only
            scores, translations = evaluate(
                model, self.tokenizer, self.splits.validation, self.accelerator, recipe, recipe.eval_num_beams
            )
        self.log.write({"update": progress.update, **{f"eval_{name}": value for name, value in scores.items()}})
        self.say(summary(progress.update, scores, recipe.eval_num_beams))
        for line in oddities(self.splits.validation["source"], translations):
            self.say(line)
        sign = -1 if recipe.metric_for_best_model == "loss" else 1
        value = sign * scores[recipe.metric_for_best_model]
        if not math.isnan(value) and (progress.best is None or value > progress.best):
            progress.best, progress.best_update, progress.worse_in_a_row = value, progress.update, 0
            if recipe.early_stopping_patience is not None:
                self.checkpoint()
        else:
            progress.worse_in_a_row += 1

    @contextlib.contextmanager
    def result_so_far(self):
        """The whole model on this device, with the moving average if there is one."""
        self.collect()
        with contextlib.nullcontext() if self.ema is None else self.ema.applied_to(self.plain):
            yield self.plain.to(self.accelerator.device)
        if self.sharded:
            self.plain.cpu()

    def collect(self):
        """Let `plain` have the weights that are trained: of a sharded model it is a copy, mostly on the CPU."""
        if self.sharded:
            fsdp.overwrite(self.plain.parameters(), self.trained.parameters())

    # -- what is seen -------------------------------------------------------------------------------------------------

    def log_training(self, bar):
        """One line of training_log.jsonl: the mean loss since the last one, speed, padding."""
        seen, self.since_log = self.since_log, Counter()
        if not seen:
            return
        sums = [float(seen["loss"]) / self.accelerator.num_processes, seen["padded"], seen["real"]]
        loss, padded, real = self.accelerator.reduce(torch.tensor(sums, device=self.accelerator.device)).tolist()
        line = {
            "update": self.progress.update,
            "epoch": self.epochs(),
            "loss": loss / seen["steps"] if seen["steps"] else math.nan,
            "learning_rate": self.learning_rate,
            "tokens_per_second": round(seen["tokens"] / seen["seconds"], 1),
            "padding": round(1 - real / padded, 4),
            "skipped": self.progress.skipped,
            "seconds": round(time.perf_counter() - self.started, 2),
            "total_updates": self.progress.total_updates,
        }
        self.log.write(line)
        shown = {"loss": f"{line['loss']:.3f}", "lr": f"{line['learning_rate']:.1e}"}
        bar.set_postfix({**shown, "tok/s": int(line["tokens_per_second"]), "pad": f"{line['padding']:.1%}"})

    def bar(self):
        return tqdm(
            total=self.bar_total(),
            initial=self.progress.update,
            unit="update",
            disable=not self.accelerator.is_main_process,
            dynamic_ncols=True,
        )

    def bar_total(self):
        return None if self.progress.total_updates == UNLIMITED else self.progress.total_updates

    def say(self, text):
        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stderr)

    @contextlib.contextmanager
    def phase(self, name):
        """Add the time spent inside to the table; gives a function that tells the seconds so far."""
        start = time.perf_counter()
        yield lambda: time.perf_counter() - start
        self.seconds[name] += time.perf_counter() - start

    @contextlib.contextmanager
    def signals(self):
        """SIGTERM and Ctrl-C end the run after the current update and a checkpoint.

        A second one ends it at once, but not with several processes: they get each from the terminal and the launcher.
        """

        def ask(number, frame):
            self.asked = number
            if self.accelerator.num_processes == 1:
                signal.signal(number, signal.SIG_DFL)

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def checkpoint(self):
        """The folder `checkpoint-<update>`, written unless it has been; those no longer needed are deleted."""
        recipe, progress = self.recipe, self.progress
        folder = self.output_dir / f"checkpoint-{progress.update}"
        if self.saved == progress.update:
            return folder
        with self.phase("checkpoints"):
            progress.seconds = time.perf_counter() - self.started
            if self.accelerator.scaler is not None:
                progress.scaler = self.accelerator.scaler.state_dict()
            self.collect()
            tensors = {"optimizer": optimizer_tensors(self.trained, self.optimizer)}
            if self.ema is not None:
                tensors["ema"] = self.ema.state_dict()["average"]
            if self.accelerator.is_main_process:
                checkpoints.save(folder, self.plain, self.tokenizer, tensors, asdict(progress))
                if self.upload is None or self.upload.done():  # or its folder has to stay
                    keep = max(recipe.save_total_limit, recipe.average_checkpoints)
                    checkpoints.rotate(self.output_dir, keep, recipe.save_steps, progress.best_update)
                    if recipe.push_to_hub and recipe.hub_strategy == "every_save":
                        self.upload = self.uploads.submit(self.push, folder)
            self.accelerator.wait_for_everyone()
        self.saved = progress.update
        return folder

    def push(self, folder):
        """Upload a checkpoint while training goes on, which it does whatever happens here."""
        message = f"Training in progress, update {checkpoints.number(folder)}"
        try:
            hub.push_to_hub(folder, self.recipe.hub_model_id, private=self.recipe.hub_private_repo, message=message)
        except Exception as error:
            self.say(f"{folder.name} is not on the Hub, training goes on: {error}")

    def good(self):
        return checkpoints.newest(self.output_dir, self.say) or "the beginning: there is no whole checkpoint"

    def resume(self):
        """Go on from the newest whole checkpoint, or else from the one that the recipe names."""
        folder = checkpoints.newest(self.output_dir, self.say)
        named = self.recipe.resume_from_checkpoint
        if folder is None and named is not None:
            folder = named
            if reason := checkpoints.fault(folder):
                raise InputError(f"--resume_from_checkpoint {folder} is no whole checkpoint: {reason}")
        elif named is not None and Path(named).resolve() != folder.resolve():
            self.say(f"--resume_from_checkpoint {named} is not used: the run has gone on to {folder}")
        update = 0 if folder is None else checkpoints.progress(folder)["update"]
        everyone = self.accelerator.gather(torch.tensor([update], device=self.accelerator.device))
        if everyone.unique().numel() > 1:
            raise InputError(f"{self.output_dir} is not the same folder for all processes: share it between machines")
        if folder is not None:
            self.load(folder)
            self.say(f"going on from {folder}")
        self.log.cut(self.progress.update)

    def load(self, folder):
        """Weights, moments, average and progress of a checkpoint."""
        weights, tensors, progress = checkpoints.load(folder)
        if progress["data"] != self.progress.data:
            raise InputError(f"{folder} was trained on other pairs: use the same data or another --output_dir")
        checkpoints.load_weights(self.plain, weights)
        if self.sharded:
            fsdp.overwrite(self.trained.parameters(), self.plain.parameters())
        load_optimizer_tensors(self.trained, self.optimizer, tensors["optimizer"])
        if self.ema is not None:
            steps = progress["update"] - progress["skipped"]
            self.ema.load_state_dict({"updates": steps, "average": tensors["ema"]})
        if self.accelerator.scaler is not None and progress["scaler"]:
            self.accelerator.scaler.load_state_dict(progress["scaler"])
        progress["total_updates"] = self.progress.total_updates  # another --max_steps is allowed
        self.progress = Progress(**progress)
        self.fit_to_clock(self.progress.seconds)
        if Path(folder).resolve().parent == self.output_dir.resolve():
            self.saved = self.progress.update

    def finish(self):
        """The final weights: averaged over checkpoints, those of the best evaluation, or the moving average."""
        recipe, best = self.recipe, self.progress.best_update
        if recipe.average_checkpoints > 1:
            folders = checkpoints.scheduled(self.output_dir, recipe.save_steps)[-recipe.average_checkpoints :]
            checkpoints.load_weights(self.plain, optimization.average(folders))
            self.say(f"averaged the weights of {', '.join(folder.name for folder in folders)}")
        elif recipe.early_stopping_patience is not None and best is not None:
            weights, tensors, _ = checkpoints.load(self.output_dir / f"checkpoint-{best}")
            checkpoints.load_weights(self.plain, tensors.get("ema", weights))
            self.say(f"took the weights of checkpoint-{best}")
        elif self.ema is not None:
            checkpoints.load_weights(self.plain, self.ema.state_dict()["average"])
        else:
            self.collect()
        self.plain.to(self.accelerator.device)

    def epochs(self):
        """Passes over the data so far; None on a stream, whose length nobody knows."""
        updates = self.reader.updates_per_epoch
        return updates and round(self.progress.update / updates, 3)

    def results(self):
        """Flat keys for all_results.json."""
        seconds = self.progress.seconds
        return {
            "train_loss": self.log.last("loss"),
            "train_runtime": round(seconds, 1),
            "train_updates": self.progress.update,
            "train_epochs": self.epochs(),
            "train_target_tokens": self.progress.target_tokens,
            "train_tokens_per_second": round(self.progress.target_tokens / seconds, 1),
            "train_skipped_updates": self.progress.skipped,
            "train_samples": self.reader.pairs_per_epoch,
        }

    def time_table(self):
        """Where this process spent its time."""
        whole = self.progress.seconds - self.resumed_seconds
        rows = [*self.seconds.most_common(), ("other", whole - sum(self.seconds.values()))]
        return "\n".join(f"  {name:22}{seconds:9.1f} s {seconds / whole:7.1%}" for name, seconds in rows)


def planned_updates(recipe, reader):
    """Updates that --max_steps and --num_train_epochs allow."""
    limits = [recipe.max_steps]
    if recipe.num_train_epochs is not None:
        limits.append(max(1, round(recipe.num_train_epochs * reader.updates_per_epoch)))
    return min((limit for limit in limits if limit is not None), default=UNLIMITED)


def ignore_signals(worker):
    """For processes that prepare data: the training process, which gets the same signals, ends them in the end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def r_drop_loss(model, batch, tokens, alpha):
    """Two passes with different dropout that are to agree (R-Drop, Liang et al. 2021, arXiv 2106.14448).

    The paper's L = NLL_1 + NLL_2 + alpha (KL(p || q) + KL(q || p)) / 2, halved, so that alpha = 0 is the usual loss.
    """
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    output = model(**twice, num_items_in_batch=2 * tokens, skip_logits=False)
    log_p, log_q = output.logits.float().log_softmax(-1).chunk(2)
    kept = batch["labels"] != -100
    log_p, log_q = log_p[kept], log_q[kept]
    divergence = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum()  # KL(p || q) + KL(q || p)
    return output.loss + alpha * divergence / 4 / tokens


# -- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(model, tokenizer, pairs, accelerator, recipe, num_beams, confidence=False):
    """(scores, translations): loss, BLEU, chrF of the pairs; devices share the work, the result is that of one.

    The loss is the negative log-likelihood of a target token (natural logarithm, no smoothing). Without references
    there are translations only.
    """
    was_training = model.training
    model.eval()
    scores = {}
    if "target" in pairs.column_names:
        scores["loss"] = negative_log_likelihood(model, tokenizer, pairs, accelerator, recipe)
    translations = translate(model, tokenizer, pairs["source"], accelerator, recipe, num_beams)
    if "target" in pairs.column_names:
        scores |= metrics.score(translations, list(pairs["target"]), recipe.target_lang, confidence=confidence)
    model.train(was_training)
    return scores, translations


@torch.no_grad()
def negative_log_likelihood(model, tokenizer, pairs, accelerator, recipe):
    """Mean over target tokens."""
    sources, targets = (data.encode(list(pairs[side]), tokenizer) for side in ("source", "target"))
    lengths = np.array([[len(source), len(target)] for source, target in zip(sources, targets, strict=True)])
    batches = token_batches(lengths, recipe.max_tokens_per_device)
    total = torch.zeros((), dtype=torch.float64)
    for rows in batches[accelerator.process_index :: accelerator.num_processes]:
        chosen = [{"input_ids": sources[i], "labels": targets[i]} for i in rows]
        batch = collate(chosen, model.config.pad_token_id, model.config.decoder_start_token_id)
        batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
        with accelerator.autocast():
            total += model(**batch, num_items_in_batch=1, skip_logits=True).loss.cpu()
    return sum(gather_object([float(total)])) / int(lengths[:, 1].sum())


def translate(model, tokenizer, texts, accelerator, recipe, num_beams):
    """Translations in the order of the texts; every device does its share."""
    rank, world = accelerator.process_index, accelerator.num_processes
    # Blank texts cost nothing, and so the line numbers in warnings are right on every device.
    mine = [text if i % world == rank else "" for i, text in enumerate(texts)]
    translations = model.translate(mine, tokenizer, num_beams=num_beams, length_penalty=recipe.length_penalty)
    everyone = gather_object([translations])
    return [everyone[i % world][i] for i in range(len(translations))]


def summary(update, scores, num_beams):
    decoding = "greedy" if num_beams == 1 else f"beam {num_beams}"
    shown = "  ".join(f"{name} {scores[name]:.3f}" for name in ("loss", "bleu", "chrf") if name in scores)
    return f"update {update}: validation {shown} ({decoding})"


def oddities(sources, translations):
    """What no score shows: lines of text about translations that are all the same, or repeat themselves."""
    found = []
    if len(set(sources)) > 1 and len(set(translations)) == 1:
        found.append(
            f"all {len(translations)} translations are {translations[0][:60]!r}: the model does not yet look at the "
            "source; if this stays, check the learning rate (--warmup_steps, --lr_factor)"
        )
    repeating = sum(
        bool(REPETITION.search(translation)) and not REPETITION.search(source)
        for source, translation in zip(sources, translations, strict=True)
    )
    if repeating:
        found.append(f"{repeating} of {len(translations)} translations repeat something five times")
    return found


# -- what is stored ---------------------------------------------------------------------------------------------------


def optimizer_tensors(model, optimizer):
    """Adam's moments by parameter name: {"name|moment": tensor}."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    stored = {}
    for i, moments in optimizer.state_dict()["state"].items():
        stored |= {f"{names[i]}|{key}": fsdp.whole(tensor) for key, tensor in moments.items()}
    return stored


def load_optimizer_tensors(model, optimizer, tensors):
    """Undo `optimizer_tensors`."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    numbers, state = {name: i for i, name in enumerate(parameters)}, {}
    for key, tensor in tensors.items():
        name, _, moment = key.rpartition("|")
        shared_out = fsdp.like(tensor, parameters[name]) if tensor.dim() else tensor  # `step` is a single number
        state.setdefault(numbers[name], {})[moment] = shared_out
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


class Log:
    """training_log.jsonl, and the trackers that --report_to names: numbers only; only the main process writes."""

    def __init__(self, path, accelerator):
        self.path, self.accelerator = path, accelerator

    def write(self, line):
        numbers = {name: each for name, each in line.items() if isinstance(each, (int, float)) and math.isfinite(each)}
        if self.accelerator.is_main_process:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(numbers) + "\n")
        update = numbers.pop("update")
        self.accelerator.log(numbers, step=update)

    def lines(self):
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").split("\n") if line.endswith("}")]

    def cut(self, update):
        """Forget what came after the checkpoint from which training goes on."""
        if self.accelerator.is_main_process and self.path.exists():
            kept = [line for line in self.lines() if line["update"] <= update]
            aside = self.path.with_suffix(".partial")
            aside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            aside.replace(self.path)

    def last(self, name):
        return next((line[name] for line in reversed(self.lines()) if name in line), None)
