"""`qarl push`: an export to the Hugging Face Hub, with its model card."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from qarl.cli.environment import quiet_libraries
from qarl.cli.options import refuse_rest
from qarl.configs.errors import InputError, QarlError
from qarl.report.run_folder import RunFolder
from qarl.run.export_note import read_note


class PushError(InputError):
    """What cannot be pushed, or not there."""

    heading = "push"


class RefusedPushError(QarlError):
    """The Hub's own refusal, or none could be reached."""

    heading = "push"


def add_push(commands: Any) -> None:
    """Add `qarl push` to the commands."""
    push = commands.add_parser(
        "push",
        help="upload a run's export, with its model card, to the Hugging Face Hub",
        description="Upload a run's export, with its model card (README.md), to the Hugging Face Hub, as whom `hf auth "
        "login` or HF_TOKEN says. The repository is made where it is missing.",
    )
    push.add_argument("target", metavar="TARGET", help="run folder (its export), or an exported checkpoint")
    push.add_argument("repository", metavar="OWNER/NAME", help="model repository on the Hub")
    push.add_argument("--private", action="store_true", help="make the repository private, where it is made")
    push.add_argument("--dry-run", action="store_true", help="list files and sizes, and upload nothing")
    push.set_defaults(run=_push)


def _push(known: argparse.Namespace, rest: list[str], console: Console) -> int:
    refuse_rest(rest)
    folder = _pushable(Path(known.target))
    quiet_libraries()
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(known.repository)
    except HFValidationError as error:
        raise PushError(f"{known.repository!r} is no repository's name: {error}; write OWNER/NAME") from error
    if "/" not in known.repository:
        raise PushError(f"{known.repository!r} has no owner; write OWNER/NAME")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in files:
        console.print(f"{file.stat().st_size:>15,}  {file.relative_to(folder)}", markup=False, highlight=False)
    size = sum(file.stat().st_size for file in files) / 2**20
    console.print(f"{len(files)} files, {size:.1f} MiB, of {folder}", soft_wrap=True, markup=False, highlight=False)
    if known.dry_run:
        return 0
    if hub.get_token() is None:
        raise PushError("there is no token of the Hub: log in by `hf auth login`, or set HF_TOKEN")
    note = read_note(folder)
    try:
        api = hub.HfApi()
        api.create_repo(known.repository, private=known.private or None, exist_ok=True)
        message = f"{note['run']}, step {note['step']}"
        done = api.upload_folder(repo_id=known.repository, folder_path=folder, commit_message=message)
    except (HfHubHTTPError, OSError) as error:
        raise RefusedPushError(f"{known.repository}: {' '.join(str(error).split())[:300]}") from error
    console.print(f"pushed: {done.commit_url}", soft_wrap=True, markup=False, highlight=False)
    return 0


def _pushable(target: Path) -> Path:
    """The export of a complete run, or an exported checkpoint. Raises `PushError` for anything else."""
    if not target.is_dir():
        raise PushError(f"there is no folder {str(target)!r}; give a run folder, or a checkpoint `qarl export` wrote")
    run = RunFolder(target) if (target / "config.yaml").is_file() else None
    folder = run.export if run else target
    if run and not folder.is_dir():
        raise PushError(
            f"run {str(target)!r} is not complete: it has no export; finish it (qarl train --resume {target}), or push "
            f"one of its newest checkpoint (qarl export {target} -o DIR)"
        )
    note = read_note(folder)
    if not note:
        raise PushError(f"{str(folder)!r} has no qarl.json: it is no export of QaRL's; upload it by `hf upload`")
    newest = max(run.steps(), default=0) if run else note["step"]
    if note["step"] < newest:
        raise PushError(
            f"run {str(target)!r} is not complete: its export is of step {note['step']}, its newest checkpoint of step "
            f"{newest}; finish it (qarl train --resume {target}), or push a `qarl export` of it"
        )
    return folder
