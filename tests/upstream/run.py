"""Run transformers' own model tests against this package, on the transformers version that this interpreter has.

    python tests/upstream/run.py
    python tests/upstream/run.py 4.57.6 5.24.0   # others, in the environments of tests/compat

The tests come from the source distribution of that version, fetched from the package index into a temporary folder.
It lacks what GenerationTesterMixin and ExportTesterMixin are made of; empty classes stand in for them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "compat"))

from environments import environment, installed  # noqa: E402


STAND_INS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": (
        "config_common_kwargs = {'return_dict': False, 'output_hidden_states': True, 'dtype': 'float16',\n"
        "    'architectures': ['VanillaModel'], 'bos_token_id': 7, 'pad_token_id': 8, 'eos_token_id': 9}\n"
    ),
}


def fetch(version, folder):
    """The `tests` folder of transformers' source distribution, completed by our stand-ins and our suite."""
    requirement = f"transformers=={version}"
    options = ["--no-binary", "transformers", "--no-deps", "--dest", folder, "--quiet", requirement]
    subprocess.run([sys.executable, "-m", "pip", "download", *options], check=True)
    site = ["--target", folder / "site", "--quiet", "parameterized"]
    subprocess.run([sys.executable, "-m", "pip", "install", *site], check=True)
    with tarfile.open(folder / f"transformers-{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    tests = folder / f"transformers-{version}" / "tests"
    for name, text in STAND_INS.items():
        (tests / name).parent.mkdir(exist_ok=True)
        (tests / name).write_text(text)
    (tests / "models" / "vanilla").mkdir(parents=True)
    shutil.copyfile(HERE / "suite.py", tests / "models" / "vanilla" / "test_modeling_vanilla.py")
    for place in (tests, tests / "models", *tests.rglob("*/")):
        (place / "__init__.py").touch()
    return tests


def run(python, tests, folder):
    """The outcome of every test: {(class, test): (outcome, reason)}."""
    shutil.rmtree(tests.parent / "src")  # the installed package is meant
    report = folder / "report.xml"
    path = os.pathsep.join([str(HERE.parents[1]), str(folder / "site"), str(tests.parent)])
    command = [python, "-m", "pytest", "-q", f"--junitxml={report}", "-o", "addopts="]
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    suite = tests / "models" / "vanilla" / "test_modeling_vanilla.py"
    subprocess.run([*command, suite], cwd=tests.parent, env=environment, stdout=sys.stderr)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname").rpartition(".")[2], case.get("name")
        parts = {part.tag: part.get("message") or part.text or "" for part in case}
        outcome = next((tag for tag in ("failure", "error", "skipped") if tag in parts), "passed")
        if outcomes.get(name, ("passed", ""))[0] == "passed":  # a test has a case of its own and one a subtest
            outcomes[name] = outcome, " ".join(parts.get(outcome, "").split())[:160]
    return outcomes


def report(version, outcomes):
    """Counts for both models, and each test that is skipped or fails for ours alone, with the reason."""
    print(f"transformers {version}\n\n| model | passed | skipped | failed |\n|---|---|---|---|")
    for model in ("Vanilla", "Marian"):
        counts = Counter(outcome for (name, _), (outcome, _) in outcomes.items() if name == f"{model}Test")
        failed = counts["failure"] + counts["error"]
        print(f"| {model} | {counts['passed']} | {counts['skipped']} | {failed} |")
    print("\nOnly ours:\n")
    for (model, test), (outcome, reason) in sorted(outcomes.items()):
        beside = outcomes.get(("MarianTest", test), ("absent", ""))[0]
        if model == "VanillaTest" and outcome != "passed" and outcome != beside:
            print(f"- {outcome} `{test}` (Marian: {beside}): {reason}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=[installed("transformers")], help="of transformers")
    failed = False
    for version in parser.parse_args().versions:
        python = environment(version)
        with tempfile.TemporaryDirectory() as folder:
            outcomes = run(python, fetch(version, Path(folder)), Path(folder))
        report(version, outcomes)
        ours = {outcome for (model, _), (outcome, _) in outcomes.items() if model == "VanillaTest"}
        failed = failed or not ours or bool(ours & {"failure", "error"})
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
