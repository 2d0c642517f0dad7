"""Check of a side's checkpoint folder before anything heavy is imported."""

from pathlib import Path

from qarl.verify.findings import VerifyInputError


def require_folder(folder: Path, role: str) -> None:
    """Raise `VerifyInputError` if a folder does not exist, or is a file.

    role: "trainer" or "engine".
    """
    if folder.is_file():
        raise VerifyInputError(
            f"the {role}'s folder {str(folder)!r} is a file; give the checkpoint folder, with"
            " config.json and *.safetensors"
        )
    if not folder.is_dir():
        raise VerifyInputError(
            f"the {role}'s folder {str(folder)!r} does not exist; give a checkpoint folder with"
            " config.json and *.safetensors"
        )
