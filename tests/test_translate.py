import gzip
import io
import json
import os
import signal
import subprocess
import sys
from itertools import islice

import pytest
import torch

from modeling_vanilla import VanillaConfig, VanillaForConditionalGeneration, sharing, tokenization, translate


LINES = [
    "A dog runs.",
    "",
    "Two men sit on a bench in the park, one of them reads.",
    "   ",
    "-",
    "Ein Hund läuft. \u2028 大象",  # U+2028 ends no line
    "a\rb",  # and neither does this
    *(f"{n} dogs and {n * n} cats" for n in range(30)),
]
BLANK = [1, 3]


pytestmark = pytest.mark.filterwarnings("ignore:translations that hit the length limit")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = tokenization.train(LINES, vocab_size=320)
    torch.manual_seed(0)
    config = VanillaConfig.preset(
        "tiny", vocab_size=len(tokenizer), encoder_layers=1, decoder_layers=1, max_position_embeddings=64
    )
    model = VanillaForConditionalGeneration(config).eval()
    with torch.no_grad():  # an untrained model says the same whatever the source, if it hears it softly
        for parameter in model.model.decoder.layers[0].encoder_attn.parameters():
            parameter.mul_(8)
    path = tmp_path_factory.mktemp("model") / "out"
    sharing.save_model(model, tokenizer, path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return sharing.load_model(folder)


@pytest.fixture(scope="module")
def expected(model):
    """What the file has to hold: the texts of model.translate, a line each."""
    lines = [translate.one_line(text) for text in model[0].translate(LINES, model[1], max_new_tokens=8)]
    assert len(set(lines)) > 30  # or a wrong order might pass
    return lines


@pytest.fixture
def run(folder, tmp_path):
    """Call the command in this process with some bytes, and return its exit code and what it wrote to a file."""

    def call(content, *options, name="in.txt", output="out.txt"):
        (tmp_path / name).write_bytes(content)
        files = ["--input", str(tmp_path / name), "--output", str(tmp_path / output)]
        code = translate.main(["--model", str(folder), "--max_new_tokens", "8", "--device", "cpu", *files, *options])
        written = tmp_path / output
        if not written.exists():
            return code, None
        content = gzip.decompress(written.read_bytes()) if output.endswith(".gz") else written.read_bytes()
        return code, content.decode().split("\n")[:-1]

    return call


def test_a_file_gives_the_translations_of_the_model_line_by_line(run, expected):
    code, lines = run("\n".join(LINES).encode())  # no line end after the last one
    assert (code, lines) == (0, expected)
    assert [lines[n] for n in BLANK] == ["", ""]


def test_the_size_of_chunks_and_batches_changes_nothing(run, expected):
    assert run("\n".join([*LINES, ""]).encode(), "--batch_tokens", "1") == (0, expected)


def test_standard_input_and_output_give_the_same(folder, tmp_path, monkeypatch, capsysbinary, expected):
    (tmp_path / "in.txt").write_text("\n".join(LINES), encoding="utf-8", newline="")
    with (tmp_path / "in.txt").open() as source:
        monkeypatch.setattr(sys, "stdin", source)
        assert translate.main(["--model", str(folder), "--max_new_tokens", "8", "--device", "cpu"]) == 0
    assert capsysbinary.readouterr().out.decode().split("\n") == [*expected, ""]


def test_gz_is_unpacked_and_packed_and_repeatable(run, tmp_path, expected):
    for output in ("a.gz", "b.gz"):
        assert run(gzip.compress("\n".join(LINES).encode()), name="in.gz", output=output) == (0, expected)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()


def test_an_empty_file_gives_an_empty_file(run):
    assert run(b"") == (0, [])


def test_greedy_and_other_options_are_those_of_the_model(run, model):
    texts = model[0].translate(LINES, model[1], num_beams=1, max_new_tokens=3)
    options = ("--num_beams", "1", "--max_new_tokens", "3")
    assert run("\n".join(LINES).encode(), *options) == (0, [translate.one_line(text) for text in texts])


def test_scores_and_n_best_are_columns_and_keep_the_lines(run, model):
    _, lines = run("\n".join(LINES).encode(), "--n_best", "2", "--scores")
    best = model[0].translate(LINES, model[1], max_new_tokens=8, n_best=2, return_dict=True)
    assert len(lines) == len(LINES)
    assert [lines[n] for n in BLANK] == ["", ""]
    columns = lines[0].split("\t")
    assert [float(score) for score in columns[::2]] == pytest.approx([found.score for found in best[0]], abs=1e-3)
    assert columns[1::2] == [translate.one_line(found.text) for found in best[0]]


def test_jsonl_has_an_object_for_every_line(run, expected):
    _, lines = run("\n".join(LINES).encode(), "--output_format", "jsonl", "--n_best", "2")
    objects = [json.loads(line) for line in lines]
    assert [entry["text"] for entry in objects] == expected
    assert objects[0].keys() == {"text", "score", "finished", "n_best"}
    assert objects[0]["n_best"][0] == {name: objects[0][name] for name in ("text", "score", "finished")}
    assert len(objects[0]["n_best"]) == 2


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_end_in_newlines_only_wherever_chunks_end(size):
    text = "\ufeffone\r\ntwo\u2028\u0085x\n\nthr\ree\n\r\n\x0b\x0clast\r"
    stream = io.BufferedReader(io.BytesIO(text.encode()))
    chunks = list(translate.read_chunks(stream, "in.txt", size))
    assert [line for lines, _ in chunks for line in lines] == [
        "one",
        "two\u2028\u0085x",
        "",
        "thr\ree",
        "",
        "\x0b\x0clast\r",
    ]
    assert sum(consumed for _, consumed in chunks) == len(text.encode())


def test_an_endless_input_is_read_chunk_by_chunk():
    class Endless(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            buffer[:] = (b"line\n" * len(buffer))[: len(buffer)]
            return len(buffer)

    chunks = translate.read_chunks(io.BufferedReader(Endless()), "in.txt", 1000)
    assert [len(lines) for lines, _ in islice(chunks, 5)] == [200] * 5


def test_a_line_end_inside_a_translation_becomes_a_space():
    assert translate.one_line("a\r\nb\n\nc\u2028d") == "a b c\u2028d"


def test_warnings_name_the_lines(run, capsys):
    long = "dog " * 70  # more than the 64 positions of the model
    run("\n".join(["a", "", long, "b", long]).encode(), "--batch_tokens", "1")
    errors = capsys.readouterr().err
    cut = [line for line in errors.splitlines() if "cut at 64 tokens" in line]
    assert ["line 3:" in cut[0], "line 5:" in cut[1]] == [True, True]


def test_bytes_that_are_not_utf8_are_named_and_the_file_is_not_finished(run, capsys, tmp_path):
    code, lines = run(b"good\nb\xe4d\n" + b"more\n" * 10)
    message = capsys.readouterr().err
    assert (code, lines) == (2, None)
    assert message.startswith(f"error: {tmp_path / 'in.txt'}, line 2: byte 0xe4 is not UTF-8")
    assert message.count("\n") == 1


def test_a_broken_gz_file_is_named(run, capsys):
    assert run(gzip.compress(b"line\n" * 1000)[:-10], name="in.gz")[0] == 2
    assert "in.gz: cannot be read" in capsys.readouterr().err


def test_an_old_output_stays_until_the_new_one_is_complete(run, tmp_path):
    (tmp_path / "out.txt").write_text("old\n")
    assert run(b"\xff") == (2, ["old"])
    assert (tmp_path / "out.txt.partial").exists()
    assert run(b"\n") == (0, [""])
    assert not (tmp_path / "out.txt.partial").exists()


@pytest.mark.skipif(os.name != "posix", reason="the device is called so on POSIX")
def test_a_device_is_written_to_and_not_replaced(folder, tmp_path):
    (tmp_path / "in.txt").write_text("\n")
    files = ["--input", str(tmp_path / "in.txt"), "--output", "/dev/null"]
    assert translate.main(["--model", str(folder), "--device", "cpu", *files]) == 0
    assert not os.path.isfile("/dev/null")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "{tmp}"], "error: {tmp} holds no model"),
        (["--model", "{folder}", "--input", "{tmp}/none"], "error: {tmp}/none: No such file or directory"),
        (["--model", "{folder}", "--output", "{tmp}/none/out"], "error: {tmp}/none/out.partial: No such file"),
    ],
)
def test_wrong_paths_are_one_line_and_exit_code_2(folder, tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.setattr(sys, "stdin", (tmp_path / "empty").open("w+"))
    names = {"tmp": str(tmp_path), "folder": str(folder)}
    assert translate.main(["--device", "cpu", *(option.format(**names) for option in options)]) == 2
    assert capsys.readouterr().err.startswith(message.format(**names))


@pytest.mark.parametrize("options", [["--n_best", "5"], ["--num_beams", "0"], ["--batch_tokens", "many"]])
def test_wrong_options_are_refused(folder, capsys, options):
    with pytest.raises(SystemExit) as stop:
        translate.main(["--model", str(folder), *options])
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_ends_quietly_when_nobody_reads_the_output(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "in.txt").write_text("\n")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert translate.main(["--model", str(folder), "--device", "cpu", "--input", str(tmp_path / "in.txt")]) == 141
    assert capsys.readouterr().err == ""


def command(folder, *options):
    return [
        sys.executable,
        "-m",
        "modeling_vanilla.translate",
        "--model",
        str(folder),
        "--max_new_tokens",
        "8",
        *options,
    ]


def test_a_pipe_is_answered_line_by_line_in_utf8_and_ctrl_c_is_quiet(folder, expected):
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell starts what runs in the background deaf to Ctrl-C.
    hears = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command(folder, "--device", "cpu"), env=environment, **pipes, **hears) as process:
        for n in (5, 0):
            process.stdin.write(f"{LINES[n]}\n".encode())
            process.stdin.flush()
            assert process.stdout.readline().decode() == expected[n] + "\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in errors


@pytest.mark.slow
def test_two_processes_write_the_file_of_one(folder, tmp_path, expected):
    (tmp_path / "in.txt").write_text("\n".join([*LINES, ""]), encoding="utf-8", newline="")
    arguments = command(folder, "--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.txt"))
    launch = [arguments[0], "-m", "torch.distributed.run", "--nproc_per_node", "2", *arguments[1:]]
    result = subprocess.run(launch, check=True, capture_output=True)
    assert result.stderr.count(b"stopped by the length limit") == 1  # they work on one job, not each on its own
    assert (tmp_path / "out.txt").read_bytes().decode().split("\n") == [*expected, ""]
