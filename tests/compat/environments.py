"""Virtual environments, one for each version of transformers, with what that version wants beside it."""

import configparser
import os
import platform
import re
import subprocess
import sys
import tempfile
import venv
from importlib import metadata
from pathlib import Path


ROOT = Path(__file__).parents[2]
VERSIONS = ["4.57.6", "5.0.0", "5.8.0", "5.16.1", "5.24.0"]
TORCH = "2.13.0"
FOLDER = Path(os.environ.get("VANILLA_VENVS", Path(tempfile.gettempdir()) / "vanilla-compat"))


def environment(version, torch=TORCH):
    """The Python of an environment with these versions of transformers and torch, and with this script's Python.

    It is the script's own if that has them; else one under $VANILLA_VENVS, made unless it is there already.
    """
    if (installed("transformers"), installed("torch")) == (version, torch):
        return sys.executable
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = setup["options"]["install_requires"] + setup["options.extras_require"]["test"]
    wanted = [f"torch=={torch}", *(line for line in wanted.split() if not line.startswith("torch"))]
    wanted = [re.sub("^transformers.*", f"transformers=={version}", line) for line in wanted]
    folder = FOLDER / f"{version}-torch{torch}-python{platform.python_version()}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists() or complete.read_text().split() != wanted:
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", *wanted], check=True)
        complete.write_text("\n".join(wanted))
    return python


def installed(package):
    """The version of a package here, without the part that tells a CPU build."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None
