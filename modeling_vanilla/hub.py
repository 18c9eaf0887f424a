"""Model folders on the Hugging Face Hub.

python -m modeling_vanilla.hub out/mine you/my-translator
"""

import argparse
import sys
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HFValidationError, HTTPError

from . import card, errors
from .errors import InputError


# Everything that from_pretrained reads and the card. By name, as the folder of a run also holds optimizer states,
# logs and predictions.
TRAVELLING = (
    *("README.md", "config.json", "generation_config.json", "*_vanilla.py"),
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.json", "target_vocab.json", "*.spm"),  # of a tokenizer from Marian
)
# HTTPError is that of the client's own library, which was requests, then httpx, then httpx2.
FAILURES = (HTTPError, OSError)


def travelling_files(folder: str | Path) -> list[Path]:
    """The files of a model folder that go to the Hub; InputError when there is no model among them."""
    files = [path for path in sorted(Path(folder).iterdir()) if any(fnmatch(path.name, name) for name in TRAVELLING)]
    names = {path.name for path in files}
    if not names & {"model.safetensors", "model.safetensors.index.json"} or "config.json" not in names:
        raise InputError(f"{folder} holds no trained model (config.json and model.safetensors)")
    return files


def create_repository(repo_id: str, *, private: bool = False, token: str | None = None) -> str:
    """Make sure that the repository exists and may be written to; its full name, "you/name" for "name".

    Called before training, so that a missing login shows at once and not hours later.
    """
    try:
        return HfApi(token=token).create_repo(repo_id, private=private, exist_ok=True).repo_id
    except (*FAILURES, HFValidationError) as error:
        raise _explained(error, repo_id) from error


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    message: str = "Upload model",
) -> str:
    """Upload a model folder in one commit and return the address of the repository.

    The token is the one of `hf auth login` or HF_TOKEN unless given. The snippets in the uploaded card load from the
    Hub.
    """
    files = travelling_files(folder)
    repo_id = create_repository(repo_id, private=private, token=token)
    additions = [CommitOperationAdd(path.name, _content(path, repo_id)) for path in files]
    api = HfApi(token=token)
    try:
        api.create_commit(repo_id, additions, commit_message=message)
    except FAILURES as error:
        raise _explained(error, repo_id) from error
    return f"{api.endpoint}/{repo_id}"


def _content(path: Path, repo_id: str) -> bytes | Path:
    if path.name == "README.md":
        return card.readdress(path.read_text(encoding="utf-8"), repo_id).encode()
    return path


def _explained(error: Exception, repo_id: str) -> InputError:
    reason = str(error).strip().splitlines()[0]
    return InputError(f"{repo_id} was not written on the Hub: {reason} (to log in: `hf auth login`)")


def main() -> None:
    parser = argparse.ArgumentParser(description="Upload a trained folder to the Hugging Face Hub.")
    parser.add_argument("folder", help="written by run_translation.py")
    parser.add_argument("repo_id", help="you/name")
    parser.add_argument("--private", action="store_true", help="for your eyes only")
    arguments = parser.parse_args()
    print(push_to_hub(arguments.folder, arguments.repo_id, private=arguments.private))


if __name__ == "__main__":
    sys.exit(errors.run(main))
