"""One virtual environment per transformers version: the tests in each, and each version's folder loaded by all others.

    python tests/compat/run.py                     # all supported versions
    python tests/compat/run.py 4.57.6 5.24.0       # the oldest and the newest, as CI does
    python tests/compat/run.py --venvs ~/venvs ... # where environments are kept for the next time

Prints a table in Markdown; the exit code is 1 when a test failed or a folder gave other logits or other text.
"""

import argparse
import configparser
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from pathlib import Path


ROOT = Path(__file__).parents[2]
VERSIONS = ["4.57.6", "5.0.0", "5.8.0", "5.16.1", "5.24.0"]
TORCH = "2.13.0"
# What depends on transformers; the rest of the suite runs once, in CI's own environment.
TESTS = "configuration modeling save_load generation tokenization sharing pipeline translate convert trainer".split()


def environment(version, folder):
    """The Python of a virtual environment with this transformers and what it pins; made if it does not exist yet."""
    python = folder / version / "bin" / "python"
    if (folder / version / "complete").exists():
        return python
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = setup["options"]["install_requires"] + setup["options.extras_require"]["test"]
    wanted = [line for line in wanted.split() if not re.match("torch|transformers", line)]
    venv.create(folder / version, clear=True, with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet"]
    # torch by itself first, so that a CPU build that is at hand is taken.
    subprocess.run([*install, f"torch=={TORCH}"], check=True)
    subprocess.run([*install, f"torch=={TORCH}", f"transformers=={version}", *wanted], check=True)
    (folder / version / "complete").touch()
    return python


def run_tests(python):
    """Counts such as {"passed": 300, "skipped": 2}; failures are shown as they are.

    One process a file: transformers 4 keeps the place of remote code that the first test of a process used.
    """
    counts = Counter()
    for name in TESTS:
        command = [python, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", f"tests/test_{name}.py"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quiet())
        if result.returncode:
            print(result.stdout[-20_000:], result.stderr[-2_000:], file=sys.stderr)
        found = re.findall(r"(\d+) (passed|skipped|failed|error)", result.stdout.rstrip().rpartition("\n")[2])
        counts.update({word: int(number) for number, word in found} or {"error": 1})
    return counts


def quiet():
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def folder_script(python, home, *arguments):
    """Run folder.py with an empty cache of its own, outside the repository."""
    variables = {**quiet(), "HF_HOME": str(home)}
    command = [python, ROOT / "tests" / "compat" / "folder.py", *arguments]
    result = subprocess.run(command, cwd=home.parent, env=variables, capture_output=True, text=True)
    if result.returncode:
        print(result.stderr[-5_000:], file=sys.stderr)
    return result


def cross(pythons, place):
    """{loading version: {"with": {saving version: differences}, "without": ...}}; None where a process failed."""
    for version, python in pythons.items():
        if folder_script(python, place / "home" / version, "save", place / version).returncode:
            raise SystemExit(f"{version} cannot save a folder")
    results = {}
    for version, python in pythons.items():
        results[version] = {}
        for mode, flags in {"with": [], "without": ["--without-package"]}.items():
            home = place / "home" / f"{version}-{mode}"
            result = folder_script(python, home, "load", *flags, *(place / saved for saved in pythons))
            results[version][mode] = None if result.returncode else json.loads(result.stdout.splitlines()[-1])
    return results


def describe(differences):
    """ "equal", or which folders differ in what."""
    if differences is None:
        return "cannot load"
    found = [f"{version}: {', '.join(names)}" for version, names in differences.items() if names]
    return "; ".join(found) or "equal"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--venvs", type=Path, default=Path(tempfile.gettempdir()) / "vanilla-compat")
    arguments = parser.parse_args()
    pythons = {version: environment(version, arguments.venvs) for version in arguments.versions}
    counts = {version: run_tests(python) for version, python in pythons.items()}
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "home").mkdir()
        loads = cross(pythons, Path(place))
    print("| transformers | tests passed | skipped | failed | folders of all versions, package there | not there |")
    print("|---|---|---|---|---|---|")
    for version, count in counts.items():
        numbers = [count["passed"], count["skipped"], count["failed"] + count["error"]]
        print(f"| {' | '.join(map(str, [version, *numbers, *map(describe, loads[version].values())]))} |")
    failed = any(count["failed"] + count["error"] for count in counts.values())
    sys.exit(int(failed or any(describe(d) != "equal" for modes in loads.values() for d in modes.values())))


if __name__ == "__main__":
    main()
