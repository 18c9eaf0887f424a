"""One environment per transformers version: the tests in each, and each version's folder loaded by all others.

    python tests/compat/run.py                     # all supported versions
    python tests/compat/run.py 4.57.6 5.24.0       # the oldest and the newest
    python3.12 tests/compat/run.py --torch 2.6.0 5.24.0

Prints a table in Markdown; the exit code is 1 when a test failed or a folder gave other logits or other text.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from environments import ROOT, TORCH, VERSIONS, environment


# What depends on transformers or torch; the rest of the suite runs once, in CI's own environment.
TESTS = (
    *("configuration", "modeling", "kernels", "generation", "tokenization", "save_load", "sharing"),
    *("pipeline", "translate", "convert", "trainer"),
)


def run_tests(version, python):
    """Counts such as {"passed": 300, "skipped": 2}; failures are shown as they are."""
    files = [f"tests/test_{name}.py" for name in TESTS]
    command = [python, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quiet())
    if result.returncode:
        print(result.stdout[-20_000:], result.stderr[-2_000:], file=sys.stderr)
    last = result.stdout.rstrip().rpartition("\n")[2]
    print(f"transformers {version}: {last}", file=sys.stderr)
    found = re.findall(r"(\d+) (passed|skipped|failed|error)", last)
    return Counter({word: int(number) for number, word in found} or {"error": 1})


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
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="of transformers")
    parser.add_argument("--torch", default=TORCH, help=f"version of PyTorch (default: {TORCH})")
    arguments = parser.parse_args()
    pythons = {version: environment(version, arguments.torch) for version in arguments.versions}
    counts = {version: run_tests(version, python) for version, python in pythons.items()}
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "home").mkdir()
        loads = cross(pythons, Path(place))
    print("| transformers | Python | torch | passed | skipped | failed | all folders, package there | not there |")
    print("|---|---|---|---|---|---|---|---|")
    for version, count in counts.items():
        numbers = [count["passed"], count["skipped"], count["failed"] + count["error"]]
        row = [version, platform.python_version(), arguments.torch, *numbers, *map(describe, loads[version].values())]
        print(f"| {' | '.join(map(str, row))} |")
    failed = any(count["failed"] + count["error"] for count in counts.values())
    sys.exit(int(failed or any(describe(d) != "equal" for modes in loads.values() for d in modes.values())))


if __name__ == "__main__":
    main()
