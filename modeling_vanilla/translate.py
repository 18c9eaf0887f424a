"""Translate line by line: `vanilla-translate --model out < in.txt > out.txt`.

Line n of the output belongs to line n of the input; a blank line stays blank. Lines end in "\\n" or "\\r\\n", text is
UTF-8 whatever the locale, and memory does not grow with the input. Of a pipe or terminal whatever has arrived is
translated and written before more is read, so `tail -f log | vanilla-translate --model out` answers at once. A file
given as --output is written as OUTPUT.partial and gets its name when it is complete.

    vanilla-translate --model out --input in.txt.gz --output out.txt.gz --num_beams 5
    vanilla-translate --model out --n_best 4 --scores < in.txt
    accelerate launch -m modeling_vanilla.translate --model out --input in.txt --output out.txt
"""

import argparse
import gzip
import io
import json
import os
import re
import stat
import sys
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from tqdm import tqdm
from transformers.utils import logging

from . import tokenization
from .errors import InputError
from .generation_vanilla import Hypothesis
from .sharing import load_model


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 2 after an error that the user can mend."""
    arguments = parse_arguments(argv)
    try:
        translate_lines(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads the output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
        return 141
    except torch.cuda.OutOfMemoryError:
        return fail(f"out of memory; lower --batch_tokens (now {arguments.batch_tokens})")
    except InputError as error:
        return fail(error)
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}" if error.filename else error)
    return 0


def fail(error: Exception | str) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "vanilla-translate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="a folder written by run_translation.py, or the name of one on the Hub")
    add("--input", type=Path, help="text to translate, one sentence a line; .gz is unpacked (default: standard input)")
    add("--output", type=Path, help="where to write; .gz is packed (default: standard output)")
    add(
        "--output_format",
        choices=["text", "jsonl"],
        default="text",
        help="jsonl: an object a line, with score and `finished`",
    )
    add("--num_beams", type=positive, default=4, help="hypotheses kept at each step; 1 is greedy (default: 4)")
    add(
        "--length_penalty",
        type=float,
        default=0.6,
        help="alpha of the paper's ((5 + length) / 6)^alpha (default: 0.6)",
    )
    add("--max_new_tokens", type=positive, help="longest translation in tokens (default: those of the source + 50)")
    add("--n_best", type=positive, default=1, help="translations of each line, best first, separated by tabs")
    add("--scores", action="store_true", help="write the score and a tab before each translation")
    add("--batch_tokens", type=positive, default=2048, help="source tokens in a batch (default: 2048)")
    add("--device", help="such as cpu, cuda or cuda:1 (default: the fastest there is)")
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="precision (default: float32)")
    add("--trust_remote_code", action="store_true", help="run the code in the model's folder, not this package's")
    arguments = parser.parse_args(argv)
    if arguments.n_best > arguments.num_beams:
        parser.error(f"--n_best {arguments.n_best} needs at least as many --num_beams, not {arguments.num_beams}")
    return arguments


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def translate_lines(arguments: argparse.Namespace) -> None:
    """Read, translate and write chunk after chunk; with several processes the first one reads and writes."""
    # Accelerate sees the other processes on CPUs only when told that CPUs are meant.
    cpu = arguments.device == "cpu" or (int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.cuda.is_available())
    state = PartialState(cpu=cpu, timeout=timedelta(days=365))  # the others wait for as long as the input does
    logging.disable_progress_bar()
    name = str(arguments.input or "standard input")
    with opened_input(arguments.input) as (source, total):
        model, tokenizer = load_model(
            arguments.model, arguments.device or state.device, arguments.dtype, arguments.trust_remote_code
        )
        # About eight batches for each process, so that lines of like length can share one.
        chunks = read_chunks(source, name, 32 * arguments.batch_tokens * state.num_processes)
        number, quiet = 1, None if state.is_main_process else True  # None: quiet unless on a terminal
        with (
            opened_output(arguments.output, state) as output,
            tqdm(total=total, unit="B", unit_scale=True, disable=quiet) as bar,
        ):
            for lines, consumed in everywhere(chunks, state):
                found = translate_chunk(model, tokenizer, lines, arguments, state)
                output.write("".join(f"{written(best, arguments)}\n" for best in found).encode())
                output.flush()
                bar.update(consumed)
                if state.is_main_process:
                    warn(name, number, lines, found, model.config.max_position_embeddings, tokenizer)
                number += len(lines)


# -- Input ------------------------------------------------------------------------------------------------------------


@contextmanager
def opened_input(path: Path | None) -> Iterator[tuple[BinaryIO, int | None]]:
    """The input and, for an ordinary file, its size."""
    if path is None:
        yield sys.stdin.buffer, ordinary_size(sys.stdin.buffer)
    elif path.suffix == ".gz":
        with gzip.open(path) as stream:
            yield stream, None
    else:
        with path.open("rb") as stream:
            yield stream, ordinary_size(stream)


def ordinary_size(stream: BinaryIO) -> int | None:
    status = os.fstat(stream.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def read_chunks(stream: BinaryIO, name: str, size: int) -> Iterator[tuple[list[str], int]]:
    """Some lines and their length in bytes: about `size`, or of a pipe as much as one read finds there."""
    read = stream.read if isinstance(stream, gzip.GzipFile) else stream.read1
    rest, number, more = b"", 1, True
    while more:
        try:
            more = read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{name}: cannot be read ({error}); is it whole?") from error
        block, newline, rest = (rest + more).rpartition(b"\n") if more else (rest, b"", b"")
        block += newline
        if block:
            lines = decode(block, name, number)
            number += len(lines)
            yield lines, len(block)


def decode(block: bytes, name: str, first: int) -> list[str]:
    """The lines of a block without their ends; `first` is the number of its first line."""
    lines = []
    for number, line in enumerate(io.BytesIO(block), first):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            remedy = "convert the text, for example with iconv -f ISO-8859-1 -t UTF-8"
            found = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
            raise InputError(f"{name}, line {number}: {found}; {remedy}") from None
        lines.append(text[:-2] if text.endswith("\r\n") else text.removesuffix("\n"))
    return lines


# -- Several processes ------------------------------------------------------------------------------------------------


def everywhere(chunks: Iterator[tuple[list[str], int]], state: PartialState) -> Iterator[tuple[list[str], int]]:
    """The chunks that the main process reads, in all processes."""
    while True:
        chunk = broadcast_object_list([next(chunks, None) if state.is_main_process else None])[0]
        if chunk is None:
            return
        yield chunk


def translate_chunk(model, tokenizer, lines, arguments, state) -> list[list[Hypothesis]]:
    """The `n_best` translations of each line; every process translates its share and gets all."""
    by_length = sorted(range(len(lines)), key=lambda i: len(lines[i]), reverse=True)
    share = by_length[state.process_index :: state.num_processes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # they number the texts of the share, and `warn` the lines
        found = model.translate(
            [lines[i] for i in share],
            tokenizer,
            arguments.num_beams,
            arguments.length_penalty,
            n_best=arguments.n_best,
            max_new_tokens=arguments.max_new_tokens,
            batch_tokens=arguments.batch_tokens,
            return_dict=True,
        )
    gathered = dict(gather_object(list(zip(share, found, strict=True))))
    return [gathered[i] for i in range(len(lines))]


# -- Output -----------------------------------------------------------------------------------------------------------


@contextmanager
def opened_output(path: Path | None, state: PartialState) -> Iterator[BinaryIO]:
    """Where to write: aside, and renamed at the end, unless it is a pipe or a device; nowhere in other processes."""
    if not state.is_main_process:
        path = Path(os.devnull)
    if path is None:
        yield sys.stdout.buffer
    elif path.exists() and not path.is_file():
        with path.open("wb") as stream:
            yield stream
    else:
        path = Path(os.path.realpath(path))
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as stream:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", compresslevel=6, fileobj=stream, mtime=0) as packed:
                    yield packed
            else:
                yield stream
        partial.replace(path)


def written(best: list[Hypothesis], arguments: argparse.Namespace) -> str:
    """The translations of one line as one line; nothing for a blank one."""
    if arguments.output_format == "jsonl":
        entries = [
            {"text": one_line(found.text), "score": round(found.score, 4), "finished": found.finished}
            for found in best
        ]
        more = {"n_best": entries} if arguments.n_best > 1 else {}
        return json.dumps(entries[0] | more, ensure_ascii=False)
    if not best[0].tokens:
        return ""
    texts = [one_line(found.text) for found in best]
    if arguments.scores or arguments.n_best > 1:
        texts = [text.replace("\t", " ") for text in texts]
    if arguments.scores:
        texts = [f"{found.score:.4f}\t{text}" for found, text in zip(best, texts, strict=True)]
    return "\t".join(texts)


def one_line(text: str) -> str:
    """A byte-level model can write line ends; line n of the output must stay line n."""
    return re.sub("[\r\n]+", " ", text)


def warn(name, first, lines, found, limit, tokenizer) -> None:
    """Name the lines of a chunk that were cut, and those whose translation was."""
    numbered = list(enumerate(zip(lines, found, strict=True), first))
    cut = [number for number, (line, _) in numbered if is_longer(line, limit, tokenizer)]
    unfinished = [number for number, (_, best) in numbered if not best[0].finished]
    for numbers, trouble in (cut, f"cut at {limit} tokens"), (unfinished, "translation stopped by the length limit"):
        if numbers:
            more = f" and {len(numbers) - 10} more" if len(numbers) > 10 else ""
            listed = ", ".join(map(str, numbers[:10])) + more
            tqdm.write(f"warning: {name}, line {listed}: {trouble}", file=sys.stderr)


def is_longer(line: str, limit: int, tokenizer) -> bool:
    """Whether a line has more tokens than `limit`; most are told by their bytes, since no token is less than one."""
    if tokenizer.is_fast and len(tokenization.normalise(tokenizer, line).encode()) < limit:
        return False
    return len(tokenizer(line, verbose=False).input_ids) > limit


if __name__ == "__main__":
    sys.exit(main())
