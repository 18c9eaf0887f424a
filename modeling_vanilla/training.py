"""The training loop: the same updates on one CPU and on many GPUs, interrupted or not.

    python run_translation.py recipe.yaml                one process
    accelerate launch run_translation.py recipe.yaml     several, or mixed precision, or FSDP

What an update holds is planned ahead (`batching.UpdatePlan`); devices only share its micro-batches. Its gradient is
that of the summed loss divided by the target tokens of the whole update, its learning rate and its random numbers
depend on its number alone. So nothing but that number, the weights and Adam's moments is needed to go on.
"""

import contextlib
import hashlib
import itertools
import json
import signal
import sys
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import broadcast, gather_object
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from tqdm.auto import tqdm

from . import checkpoints, data, metrics, optimization
from .batching import UpdatePlan, collate, token_batches
from .errors import InputError, Stopped


FIT_EVERY = 10  # updates between two looks at the clock with --max_minutes
AHEAD = 2  # updates prepared in the background
LAUNCH_TOKENS = {"cpu": 128, "cuda": 4096}  # padding worth less than another batch, see UpdatePlan
PATIENCE = 5  # non-finite updates in a row that end the run


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
    data: str = ""  # hash of the training pairs' lengths


def accelerator(recipe):
    """Accelerate, set up for gradients that we normalise ourselves and for models without changing buffers."""
    return Accelerator(
        mixed_precision=None if recipe.mixed_precision == "no" else recipe.mixed_precision,
        log_with=None if recipe.report_to == "none" else recipe.report_to,
        project_dir=recipe.output_dir,
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )


class Training:
    """One run: `run()` goes from the newest checkpoint to the end and leaves the final weights in `model`."""

    def __init__(self, recipe, accelerator, model, tokenizer, splits):
        self.recipe, self.accelerator, self.tokenizer, self.splits = recipe, accelerator, tokenizer, splits
        self.output_dir = Path(recipe.output_dir)
        self.plain = model
        with accelerator.main_process_first():
            self.train, self.plan, self.too_long = plan(recipe, splits, tokenizer)
        if recipe.torch_compile:
            model.compile(dynamic=True)
        optimizer = optimization.optimizer(model, lr=0.0)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.ema = optimization.ExponentialMovingAverage(model, recipe.ema_decay) if recipe.ema_decay else None
        self.reader = data.PairReader(
            self.train,
            splits.train,
            tokenizer,
            model.config,
            recipe,
            self.plan,
            accelerator.process_index,
            accelerator.num_processes,
            pin=accelerator.device.type == "cuda",
        )
        data_hash = hashlib.sha256(self.plan.lengths.tobytes()).hexdigest()
        self.progress = Progress(total_updates=planned_updates(recipe, self.plan), data=data_hash)
        self.seconds = Counter()  # phase -> seconds of this process
        self.log = Log(self.output_dir / "training_log.jsonl", accelerator)
        self.loss_sum, self.since_log = 0.0, Counter()
        self.stop_signal = None

    def run(self):
        """Train to the end.

        Raises:
            Stopped: SIGTERM or Ctrl-C came; a checkpoint was written first.
            InputError: memory ran out, the disk is full, or the loss is not finite; says what to change.
        """
        self.resume()
        self.started, self.updates_here = time.perf_counter() - self.progress.seconds, 0
        self.clear_log()
        with self.signals(), self.bar() as bar, ThreadPoolExecutor(1) as worker:
            for batches in self.batches(worker):
                if self.progress.update >= self.progress.total_updates:
                    break
                self.update(batches)
                self.after_update(bar)
                if self.early_stop():
                    self.say(f"stopped early: no better {self.recipe.metric_for_best_model} for a while")
                    break
        if self.progress.update % self.recipe.save_steps:
            self.checkpoint()
        self.finish()

    # -- one update ---------------------------------------------------------------------------------------------------

    def batches(self, worker):
        """This device's micro-batches, update by update, prepared by a background thread."""
        first = self.progress.update
        ahead = deque(worker.submit(self.reader.update, n) for n in range(first, first + AHEAD))
        for n in itertools.count(first + AHEAD):
            with self.phase("waiting for data"):
                batches = ahead.popleft().result()
            ahead.append(worker.submit(self.reader.update, n))
            yield batches

    def update(self, batches):
        """One step of Adam on the mean loss over all target tokens of the update, on however many devices."""
        n, accelerator = self.progress.update, self.accelerator
        self.learning_rate = self.schedule(n + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        # Seeded by update and device: nothing to store, nothing to restore.
        torch.manual_seed(((self.recipe.seed * 1_000_003 + n) * 4096 + accelerator.process_index) % 2**63)
        tokens = self.agree([sum(int((batch["labels"] != -100).sum()) for batch in batches), self.stop_signal or 0])
        with self.phase("forward and backward"):
            for i, batch in enumerate(batches):
                last = i == len(batches) - 1
                with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                    self.backward(batch, tokens[0] / accelerator.num_processes)
        with self.phase("optimizer"):
            self.step()
        self.count(batches, int(tokens[0]))
        self.stop_signal = int(tokens[1]) or None

    def agree(self, numbers):
        """Sum over devices."""
        if self.accelerator.num_processes == 1:
            return numbers
        return self.accelerator.reduce(torch.tensor(numbers, device=self.accelerator.device)).tolist()

    def backward(self, batch, tokens):
        """Add a micro-batch to the gradient; devices average theirs, so `tokens` are those of the mean device."""
        device = self.accelerator.device
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        try:
            with self.accelerator.autocast():
                loss = self.loss(batch, tokens)
            self.accelerator.backward(loss)
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"out of memory on {batch['input_ids'].shape[0]} pairs of up to {batch['input_ids'].shape[1]} source "
                f"and {batch['labels'].shape[1]} target tokens: lower --max_tokens_per_device "
                f"(now {self.recipe.max_tokens_per_device}); it changes speed, not results"
            ) from error
        self.loss_sum += loss.detach()

    def loss(self, batch, tokens):
        if self.recipe.r_drop:
            return r_drop_loss(self.model, batch, tokens, self.recipe.r_drop)
        return self.model(**batch, num_items_in_batch=tokens).loss

    def step(self):
        """Adam, unless the gradient is not finite: then the update is skipped and counted."""
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), float("inf"))
        if torch.isfinite(norm):
            self.optimizer.step()
            self.progress.skipped_in_a_row = 0
            if self.ema is not None:
                self.ema.update(self.plain)
        else:
            self.progress.skipped += 1
            self.progress.skipped_in_a_row += 1
            self.say(f"update {self.progress.update}: the gradient is not finite; skipped")
        self.optimizer.zero_grad()
        if self.progress.skipped_in_a_row >= PATIENCE:
            good = checkpoints.newest(self.output_dir) or "none"
            raise InputError(
                f"{PATIENCE} updates in a row without a finite gradient: lower --lr_factor or use "
                f"--mixed_precision no; last good checkpoint: {good}"
            )

    def count(self, batches, tokens):
        self.progress.update += 1
        self.progress.target_tokens += tokens
        self.progress.seconds = time.perf_counter() - self.started
        self.updates_here += 1
        self.since_log.update(
            updates=1,
            tokens=tokens,
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
        """Log, evaluate, save and look at the clock when it is time to."""
        n, recipe = self.progress.update, self.recipe
        last = n >= self.progress.total_updates
        if recipe.max_minutes and n % FIT_EVERY == 0:
            self.fit_to_clock()
        if n % recipe.logging_steps == 0 or last:
            self.log_training(bar)
        if n % recipe.eval_steps == 0 and not last:
            self.evaluate_and_compare()
        if n % recipe.save_steps == 0:
            self.checkpoint()
        bar.total = self.progress.total_updates
        bar.update(n - bar.n)
        if self.stop_signal:
            folder = self.checkpoint()
            name = signal.Signals(self.stop_signal).name
            raise Stopped(self.stop_signal, f"stopped by {name}; the same command goes on from {folder}")

    def fit_to_clock(self):
        """With --max_minutes: as many updates as the time left allows at the speed so far, agreed by all devices."""
        here = self.progress.seconds - self.resumed_seconds
        left = self.recipe.max_minutes * 60 - self.progress.seconds
        total = self.progress.update + max(0, int(left * self.updates_here / here))
        total = broadcast(torch.tensor(total, device=self.accelerator.device))
        self.progress.total_updates = min(int(total), planned_updates(self.recipe, self.plan))

    def early_stop(self):
        patience = self.recipe.early_stopping_patience
        return patience is not None and self.progress.worse_in_a_row >= patience

    def evaluate_and_compare(self):
        """Score the validation data, remember whether this is the best model so far, keep it if it may be wanted."""
        if self.splits.validation is None:
            return
        with self.phase("evaluation"), self.averaged():
            scores = self.evaluate(self.splits.validation, self.recipe.eval_num_beams)
        self.log.write({"update": self.progress.update, **{f"eval_{name}": value for name, value in scores.items()}})
        self.say(summary(self.progress.update, scores, self.recipe.eval_num_beams))
        metric = self.recipe.metric_for_best_model
        value = -scores[metric] if metric == "loss" else scores[metric]
        if self.progress.best is None or value > self.progress.best:
            self.progress.best, self.progress.best_update, self.progress.worse_in_a_row = (
                value,
                self.progress.update,
                0,
            )
            if self.recipe.early_stopping_patience is not None:
                self.checkpoint()
        else:
            self.progress.worse_in_a_row += 1

    def evaluate(self, pairs, num_beams):
        """Scores of the current weights; see the function of the same name."""
        return evaluate(self.plain, self.tokenizer, pairs, self.accelerator, self.recipe, num_beams)[0]

    def averaged(self):
        return contextlib.nullcontext() if self.ema is None else self.ema.applied_to(self.plain)

    # -- what is seen -------------------------------------------------------------------------------------------------

    def clear_log(self):
        self.loss_sum, self.since_log, self.log_time = 0.0, Counter(), time.perf_counter()

    def log_training(self, bar):
        """One line of training_log.jsonl: the mean loss since the last one, speed, padding."""
        seen, now = self.since_log, time.perf_counter()
        loss = self.accelerator.reduce(torch.as_tensor(self.loss_sum, device=self.accelerator.device), "mean")
        line = {
            "update": self.progress.update,
            "epoch": round(self.progress.update / self.plan.updates_per_epoch, 3),
            "loss": float(loss) / seen["updates"],
            "learning_rate": self.learning_rate,
            "tokens_per_second": round(seen["tokens"] / (now - self.log_time), 1),
            "padding": round(1 - seen["real"] / seen["padded"], 4),
            "seconds": round(self.progress.seconds, 2),
            "total_updates": self.progress.total_updates,
        }
        self.log.write(line)
        shown = {"loss": f"{line['loss']:.3f}", "lr": f"{line['learning_rate']:.1e}"}
        bar.set_postfix({**shown, "tok/s": int(line["tokens_per_second"]), "pad": f"{line['padding']:.1%}"})
        self.clear_log()

    def bar(self):
        return tqdm(
            total=self.progress.total_updates,
            initial=self.progress.update,
            unit="update",
            disable=not self.accelerator.is_main_process,
            dynamic_ncols=True,
        )

    def say(self, text):
        if self.accelerator.is_main_process:
            tqdm.write(text, file=sys.stderr)

    @contextlib.contextmanager
    def phase(self, name):
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    @contextlib.contextmanager
    def signals(self):
        """SIGTERM and Ctrl-C end the run after the current update and a checkpoint; a second one ends it at once."""

        def ask(number, frame):
            signal.signal(number, signal.SIG_DFL)
            self.stop_signal = number

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def checkpoint(self):
        """Write `checkpoint-<update>` and delete those that are no longer needed."""
        with self.phase("checkpoints"):
            moments = optimizer_tensors(self.model, self.optimizer)
            folder = self.output_dir / f"checkpoint-{self.progress.update}"
            if self.accelerator.is_main_process:
                tensors = {"optimizer": moments} | ({} if self.ema is None else {"ema": self.ema.average})
                try:
                    checkpoints.save(
                        self.output_dir,
                        self.progress.update,
                        self.plain,
                        self.tokenizer,
                        tensors,
                        asdict(self.progress),
                    )
                except OSError as error:
                    good = checkpoints.newest(self.output_dir) or "none"
                    raise InputError(
                        f"{error}: free some space and run again. Last good checkpoint: {good}"
                    ) from error
                keep = max(self.recipe.save_total_limit, self.recipe.average_checkpoints)
                checkpoints.rotate(self.output_dir, keep, self.progress.best_update)
            self.accelerator.wait_for_everyone()
        return folder

    def resume(self):
        """Load the newest whole checkpoint, if there is one."""
        folder = self.recipe.resume_from_checkpoint or checkpoints.newest(self.output_dir, self.say)
        if folder is not None:
            weights, tensors, progress = checkpoints.load(folder)
            checkpoints.load_weights(self.plain, weights)
            load_optimizer_tensors(self.model, self.optimizer, tensors["optimizer"])
            if self.ema is not None:
                self.ema.load_state_dict(
                    {"updates": progress["update"] - progress["skipped"], "average": tensors["ema"]}
                )
            if progress["data"] != self.progress.data:
                raise InputError(f"{folder} was trained on other pairs: use the same data or another --output_dir")
            if not self.recipe.max_minutes:
                progress["total_updates"] = self.progress.total_updates
            self.progress = Progress(**progress)
            self.say(f"going on from {folder}")
        self.resumed_seconds = self.progress.seconds
        self.log.cut(self.progress.update)

    def finish(self):
        """The final weights: averaged over checkpoints, the moving average, or those of the best evaluation."""
        recipe = self.recipe
        self.accelerator.wait_for_everyone()
        if recipe.average_checkpoints > 1:
            folders = checkpoints.all_in(self.output_dir)[-recipe.average_checkpoints :]
            checkpoints.load_weights(self.plain, optimization.average(folders))
            self.say(f"averaged the weights of {', '.join(folder.name for folder in folders)}")
        elif self.ema is not None:
            checkpoints.load_weights(self.plain, self.ema.average)
        elif recipe.early_stopping_patience is not None and self.progress.best_update:
            best = self.output_dir / f"checkpoint-{self.progress.best_update}"
            checkpoints.load_weights(self.plain, checkpoints.load(best)[0])
            self.say(f"took the weights of {best.name}")

    def results(self):
        """Flat keys for all_results.json."""
        seconds = self.progress.seconds
        return {
            "train_loss": self.log.last("loss"),
            "train_runtime": round(seconds, 1),
            "train_updates": self.progress.update,
            "train_epochs": round(self.progress.update / self.plan.updates_per_epoch, 2),
            "train_target_tokens": self.progress.target_tokens,
            "train_tokens_per_second": round(self.progress.target_tokens / seconds, 1) if seconds else 0.0,
            "train_skipped_updates": self.progress.skipped,
            "train_samples": len(self.train),
        }

    def time_table(self):
        """Where this process spent its time."""
        whole = self.progress.seconds - self.resumed_seconds
        rows = [*self.seconds.most_common(), ("other", whole - sum(self.seconds.values()))]
        return "\n".join(f"  {name:22}{seconds:9.1f} s {seconds / whole:7.1%}" for name, seconds in rows if whole)


def plan(recipe, splits, tokenizer):
    """(tokenised pairs, UpdatePlan, number of pairs that were too long)."""
    tokens = data.tokenise(splits.train, tokenizer, recipe.preprocessing_num_workers)
    lengths = data.lengths(tokens)
    fits = (lengths[:, 0] <= recipe.max_source_length) & (lengths[:, 1] <= recipe.max_target_length)
    too_long = int((~fits).sum())
    if too_long == len(fits):
        raise InputError(
            f"all {too_long} training pairs are longer than --max_source_length {recipe.max_source_length} or "
            f"--max_target_length {recipe.max_target_length}"
        )
    if too_long:
        kept = fits.nonzero()[0]
        tokens, splits.train, lengths = tokens.select(kept), splits.train.select(kept), lengths[kept]
    launch_tokens = LAUNCH_TOKENS["cuda" if torch.cuda.is_available() else "cpu"]
    limits = recipe.tokens_per_update, recipe.max_tokens_per_device
    return tokens, UpdatePlan(lengths, *limits, recipe.seed, launch_tokens), too_long


def planned_updates(recipe, plan):
    """Updates that --max_steps and --num_train_epochs allow."""
    limits = [recipe.max_steps]
    if recipe.num_train_epochs is not None:
        limits.append(max(1, round(recipe.num_train_epochs * plan.updates_per_epoch)))
    return min((limit for limit in limits if limit is not None), default=10**9)


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
    with accelerator.main_process_first():
        tokens = data.tokenise(pairs, tokenizer)
    lengths = data.lengths(tokens)
    total, ids = 0.0, model.config
    for rows in token_batches(lengths, recipe.max_tokens_per_device)[
        accelerator.process_index :: accelerator.num_processes
    ]:
        batch = collate([tokens[int(row)] for row in rows], ids.pad_token_id, ids.decoder_start_token_id)
        batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
        with accelerator.autocast():
            total += model(**batch, num_items_in_batch=1, skip_logits=True).loss.double()
    total = accelerator.reduce(torch.as_tensor(total, dtype=torch.float64, device=accelerator.device))
    return float(total) / int(lengths[:, 1].sum())


def translate(model, tokenizer, texts, accelerator, recipe, num_beams):
    """Translations in the order of the texts; every device does its share."""
    texts = list(texts)
    mine = range(accelerator.process_index, len(texts), accelerator.num_processes)
    translations = model.translate(
        [texts[i] for i in mine], tokenizer, num_beams=num_beams, length_penalty=recipe.length_penalty
    )
    if accelerator.num_processes == 1:
        return translations
    return [text for _, text in sorted(gather_object(list(zip(mine, translations, strict=True))))]


def summary(update, scores, num_beams):
    decoding = "greedy" if num_beams == 1 else f"beam {num_beams}"
    shown = "  ".join(f"{name} {scores[name]:.3f}" for name in ("loss", "bleu", "chrf") if name in scores)
    return f"update {update}: validation {shown} ({decoding})"


def optimizer_tensors(model, optimizer):
    """Adam's moments by parameter name, whole and on the CPU whatever the sharding: {"name|moment": tensor}."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer.optimizer, options=options)["state"]
    return {f"{name}|{key}": tensor for name, moments in state.items() for key, tensor in moments.items()}


def load_optimizer_tensors(model, optimizer, tensors):
    """Undo `optimizer_tensors`."""
    state = {}
    for key, tensor in tensors.items():
        name, _, moment = key.rpartition("|")
        state.setdefault(name, {})[moment] = tensor
    groups = get_optimizer_state_dict(model, optimizer.optimizer)["param_groups"]
    set_optimizer_state_dict(model, optimizer.optimizer, {"state": state, "param_groups": groups})


class Log:
    """training_log.jsonl, and the trackers that --report_to names; only the main process writes."""

    def __init__(self, path, accelerator):
        self.path, self.accelerator = path, accelerator

    def write(self, line):
        self.accelerator.log({name: value for name, value in line.items() if name != "update"}, step=line["update"])
        if self.accelerator.is_main_process:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def lines(self):
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").split("\n") if line.endswith("}")]

    def cut(self, update):
        """Forget what came after the checkpoint from which training goes on."""
        if self.accelerator.is_main_process and self.path.exists():
            kept = [line for line in self.lines() if line["update"] <= update]
            self.path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def last(self, name):
        return next((line[name] for line in reversed(self.lines()) if name in line), None)
