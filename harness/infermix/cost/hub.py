"""Hugging Face hub: local cache first, then a download. `huggingface_hub` is imported only here, when asked."""

from __future__ import annotations

from pathlib import Path

from infermix.cost.safetensors_header import is_complete
from infermix.errors import UserError

_SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt")
_WEIGHT_FILES = ("*.safetensors",)


def snapshot(repo_id: str, revision: str | None, *, weights: bool) -> Path:
    """The folder of a repository's files. Raises `UserError` when it does not exist or cannot be reached."""
    cached = _cached(repo_id, revision)
    if cached is not None and (not weights or is_complete(cached)):
        return cached
    return _download(repo_id, revision, weights)


def _cached(repo_id: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, FileNotFoundError):
        return None
    except HFValidationError as error:
        raise UserError(f"{repo_id!r} is no Hugging Face id: {error}", key="model.source") from None
    return folder if (folder / "config.json").is_file() else None


def _download(repo_id: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    patterns = [*_SMALL_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        why, hint = "is gated", "accept its terms on huggingface.co and log in with `hf auth login`"
    except RevisionNotFoundError:
        why, hint = f"has no revision {revision!r}", None
    except RepositoryNotFoundError:
        why, hint = "does not exist on the Hugging Face hub, or is private", "check the spelling"
    except Exception as error:  # connection errors come from whatever HTTP library the hub client uses
        why = f"is not in the local cache and the hub cannot be reached ({type(error).__name__})"
        hint = "go online once, or give a local directory"
    raise UserError(f"the model {repo_id!r} {why}", key="model.source", hint=hint)
