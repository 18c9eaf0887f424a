"""Runs of run_translation.py in real processes, one or several, that can be killed.

They are forked from a process that has imported everything, so that a run costs a second and not ten.
"""

import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch

import run_translation
from modeling_vanilla import demo_corpus, errors
from modeling_vanilla.training import Training


TIMEOUT = 300  # seconds, on a busy machine
SIZES = "--d_model 16 --encoder_layers 1 --decoder_layers 1 --encoder_ffn_dim 32 --decoder_ffn_dim 32"
LANGUAGES = "--source_lang en --target_lang de"
TINY = f"{LANGUAGES} --preset tiny {SIZES} --vocab_size 300 --warmup_steps 20 --lr_factor 0.2".split()


def write_pairs(folder, count, name="pairs.tsv", first=0):
    """Made-up English and German sentences of many lengths."""
    pairs = demo_corpus.generate("test")[first : first + count]
    path = Path(folder) / name
    path.write_text("en\tde\n" + "".join(f"{source}\t{target}\n" for source, target in pairs))
    return path


class Run:
    """`python run_translation.py ...`, or what torchrun makes of it with `processes` > 1.

    Processes send signals to themselves, so that none comes too late on a busy machine:
        signals: (rank, update, number) of each, sent when the update has been logged.
        die_at_flush: SIGKILL when about to wait for the disk for the so-manieth time.
        die_after: SIGKILL when about to wait for the disk while this file exists.
    """

    def __init__(self, *flags, processes=1, signals=(), die_at_flush=None, die_after=None, largest_file=None):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["launched"])
        flags = [str(flag) for flag in flags]
        self.output_dir = Path(flags[flags.index("--output_dir") + 1])
        self.log = self.output_dir.with_name(f"{self.output_dir.name}.{time.monotonic_ns()}.log")
        port = free_port()
        self.processes = []
        for rank in range(processes):
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            environment = {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if processes > 1 else {}
            mine = [(update, number) for place, update, number in signals if place == rank]
            arguments = flags, self.log, environment, mine, die_at_flush, die_after, largest_file
            self.processes.append(context.Process(target=main, args=arguments))
        here = Path(__file__).parent
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join([str(here), str(here.parent)])):
            for process in self.processes:
                process.start()

    def wait(self):
        """Exit codes; -9 for a process that was killed."""
        deadline = time.monotonic() + TIMEOUT
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        hanging = [process for process in self.processes if process.exitcode is None]
        for process in hanging:
            process.kill()
        if hanging:
            raise TimeoutError(f"{len(hanging)} of {len(self.processes)} processes hang: {self.text()}")
        return [process.exitcode for process in self.processes]

    def finish(self):
        """Wait for success; what was printed."""
        codes = self.wait()
        if any(codes):
            raise RuntimeError(f"exit codes {codes}: {self.text()}")
        return self.text()

    def text(self):
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""


def main(flags, log, environment, signals, die_at_flush, die_after, largest_file):
    """What the forked process does."""
    os.environ.update({name: str(value) for name, value in environment.items()})
    sys.stdout = sys.stderr = open(log, "a", buffering=1, encoding="utf-8")
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    torch.set_num_threads(1)
    send_after(signals)
    die_at(die_at_flush, die_after)
    if largest_file is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = ["run_translation.py", *flags]
    sys.exit(errors.run(run_translation.main))


def send_after(signals):
    log_training = Training.log_training

    def log_and_send(run, bar):
        log_training(run, bar)
        for update, number in signals:
            if update == run.progress.update:
                os.kill(os.getpid(), number)

    Training.log_training = log_and_send


def die_at(flush, file):
    fsync, count = os.fsync, itertools.count(1)

    def die_or_flush(descriptor):
        if next(count) == flush or file is not None and file.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)

    os.fsync = die_or_flush


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
