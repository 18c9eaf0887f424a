"""Every block of the README runs: the shell's in order, then Python's, in a copy of the repository, shortened."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hub_server import HubServer

from modeling_vanilla import demo_corpus
from modeling_vanilla.recipe import parse


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOKEN = "hf_OfTheReadme"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def shorten(folder):
    """The demo recipe with a hundredth of its updates; nothing else changes."""
    recipe = folder / "configs" / "demo.yaml"
    text = recipe.read_text(encoding="utf-8")
    recipe.write_text(re.sub(r"max_steps: \d+", "max_steps: 16", text), encoding="utf-8")


def write_user_files(folder):
    (folder / "data").mkdir()
    pairs = demo_corpus.generate("train")[:400]
    for suffix, side in (("en", 0), ("de", 1)):
        text = "".join(pair[side] + "\n" for pair in pairs)
        (folder / "data" / f"train.{suffix}").write_text(text, encoding="utf-8")
        (folder / "data" / f"test.{suffix}").write_text(text[:500] + "\n", encoding="utf-8")
    for name in ("data/new.en", "in.txt"):
        (folder / name).write_text("A dog sees me.\n\nWho sleeps?\n", encoding="utf-8")


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """Run a command in a copy of the repository, where `python` is this one and nothing has to be installed."""
    folder = tmp_path_factory.mktemp("readme") / "vanilla-transformer"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", "out", "__pycache__", "tests"))
    shorten(folder)
    write_user_files(folder)
    programs = folder.parent / "bin"
    programs.mkdir()
    for name, command in {
        "python": sys.executable,
        "vanilla-translate": f"{sys.executable} -m modeling_vanilla.translate",
    }.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    with HubServer(TOKEN) as server:
        environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HF_HOME": str(folder.parent / "hf"),
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }

        def run(*command):
            return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)

        yield run


def in_short(block):
    """The block without what the test has done already, and with minutes instead of half an hour."""
    block = block.replace("pip install . && ", "")
    return re.sub(r"--max_minutes \d+", "--max_minutes 0.05", block)


@pytest.mark.slow
def test_every_block_of_the_readme_runs(shell):
    for block in blocks("bash"):
        if "pytest" in block:
            continue
        ran = shell("bash", "-euc", in_short(block))
        assert ran.returncode == 0, f"{block}\n{ran.stdout}\n{ran.stderr}"
    for block in blocks("python"):
        ran = shell("python", "-c", block)
        assert ran.returncode == 0, f"{block}\n{ran.stdout}\n{ran.stderr}"


def test_ci_runs_the_test_command_of_the_readme():
    command = next(block for block in blocks("bash") if "pytest" in block).strip()
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_files_and_flags_of_the_readme_exist():
    for path in re.findall(r"\]\(([^):]+)\)", README):
        assert (ROOT / path.partition("#")[0]).exists(), path
    for block in blocks("bash"):
        for line in block.splitlines():
            if "run_translation.py" in line:
                arguments = line.split("run_translation.py ")[1].split()
                if not arguments[0].endswith(".yaml"):
                    parse(arguments)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_one(path):
    recipe, overrides = parse([str(path), "--output_dir", "out"])
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert all(getattr(recipe, key, overrides.get(key)) == value for key, value in keys.items() if key != "output_dir")
