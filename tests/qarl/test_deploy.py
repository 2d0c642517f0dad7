"""From an export to others: its model card, the Hub (a stub of its HTTP API), answers for eyes, the table of runs."""

import io
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from qarl.cli.main import main
from qarl.configs.load import config_file, load_config
from qarl.report.run_folder import RunFolder
from qarl.run.export_note import add_to_note, export_note
from qarl.run.model_card import write_card
from tests.support.transformers_engine import TransformersEngine, use_transformers_engine

LICENSED = "---\nlicense: other\nlicense_name: made-up\ntags: [a]\n---\n# Base\n"


@pytest.fixture
def run(tmp_path: Path, random_policy, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A finished run of three steps, its export from a base whose card states a licence."""
    monkeypatch.chdir(tmp_path)
    base = Path(shutil.copytree(random_policy(True), tmp_path / "base"))
    (base / "README.md").write_text(LICENSED)
    config = load_config(config_file("tiny-qwen3"), {"output": "runs/one", "model": "base", "steps": "3"})
    run = RunFolder.create(config)
    shutil.copytree(base, run.export)
    note = export_note(run.path, config, 3, run.export, base)
    (run.export / "qarl.json").write_text(json.dumps(note))
    add_to_note(run.export, digest="d1ce", heldout_accuracy=0.5, heldout_interval=[0.4, 0.6], heldout_problems=256)
    write_card(run.export)
    lines = ({"step": step, "accuracy": 0.25} if step == 2 else {"step": step} for step in (1, 2, 3))
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.start.write_text(json.dumps({"audit": [], "canary": None, "accuracy": 0.125}))
    return run


def test_a_model_card_says_what_the_note_does(run: RunFolder, tmp_path: Path):
    text = (run.export / "README.md").read_text()
    front = re.match(r"---\n(.*?)---\n", text, re.DOTALL)
    assert front is not None
    tree = yaml.safe_load(front[1])
    assert (tree["license"], tree["license_name"]) == ("other", "made-up")
    assert "base_model" not in tree, "a folder's name is no id"
    assert tree["tags"] == ["qarl", "reinforcement-learning", "compressed-tensors", "w4a16"]
    for part in ("# one\n", "`base`, trained", "step 3", "50.0% [40.0, 60.0] of 256 problems", "`d1ce`", "qarl 0.1.0"):
        assert part in text, part
    assert str(tmp_path) not in text + (run.export / "qarl.json").read_text()
    add_to_note(run.export, base="Qwen/Qwen3-8B-Base", ptq="gptq", licence={})
    write_card(run.export)
    text = (run.export / "README.md").read_text()
    assert "base_model: Qwen/Qwen3-8B-Base\nlibrary_name" in text and "by gptq after reinforcement" in text


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's HTTP API as an upload of small files asks for."""

    asked: list[tuple[str, bytes]]
    refuses = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.path, body))
        answer: dict[str, Any] = {"url": f"{self.server_url}/me/policy"}
        if self.path.endswith("/preupload/main"):
            files = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in files]}
        elif "/commit/" in self.path:
            answer = {"commitUrl": f"{self.server_url}/me/policy/commit/1", "commitOid": "1", "success": True}
        self._answer(403 if self.refuses else 200, answer)

    def do_GET(self) -> None:
        self._answer(403 if self.refuses else 200, {"siblings": [], "id": "me/policy", "sha": "0"})

    @property
    def server_url(self) -> str:
        return f"http://{self.headers['Host']}"

    def _answer(self, status: int, tree: dict[str, Any]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        text = json.dumps(tree).encode()
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    import huggingface_hub

    Hub.asked, Hub.refuses = [], False
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    api = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api(endpoint=url))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    yield Hub
    server.shutdown()


def test_push_uploads_every_file_of_the_export(run: RunFolder, hub: type[Hub], capsys: pytest.CaptureFixture[str]):
    assert main(["push", str(run.path), "me/policy"]) == 0
    paths = [path for path, _ in hub.asked]
    assert paths[0] == "/api/repos/create" and paths[-1] == "/api/models/me/policy/commit/main"
    lines = [json.loads(line) for line in hub.asked[-1][1].splitlines()]
    assert lines[0]["value"]["summary"] == "one, step 3"
    uploaded = {line["value"]["path"] for line in lines[1:]}
    assert uploaded == {file.name for file in run.export.iterdir()} and "README.md" in uploaded
    assert "pushed: http://127.0.0.1" in capsys.readouterr().out
    hub.refuses = True
    assert main(["push", str(run.export), "me/policy"]) == 1
    assert "push: me/policy: " in (told := capsys.readouterr().err) and "403" in told


def test_a_dry_run_lists_and_uploads_nothing(run: RunFolder, hub: type[Hub], capsys: pytest.CaptureFixture[str]):
    assert main(["push", str(run.path), "me/policy", "--dry-run"]) == 0
    out = capsys.readouterr().out
    size = f"{(run.export / 'model.safetensors').stat().st_size:,}"
    assert f"{size}  model.safetensors\n" in out and f" MiB, of {run.export}\n" in out and not hub.asked


def test_what_cannot_be_pushed_is_refused(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refused(*arguments: str) -> str:
        assert main(["push", *arguments]) == 2
        return capsys.readouterr().err

    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "log in by `hf auth login`, or set HF_TOKEN" in refused(str(run.path), "me/policy")
    assert "has no owner; write OWNER/NAME" in refused(str(run.path), "policy")
    assert "is no repository's name" in refused(str(run.path), "me//policy")
    assert "there is no folder" in refused("nope", "me/policy")
    assert "has no qarl.json" in refused(str(tmp_path / "base"), "me/policy")
    (run.checkpoints / "step-000005").mkdir(parents=True)
    (run.checkpoints / "step-000005" / "manifest.json").touch()
    assert "its export is of step 3, its newest checkpoint of step 5" in refused(str(run.path), "me/policy")
    shutil.rmtree(run.export)
    assert "is not complete: it has no export" in refused(str(run.path), "me/policy")


def test_answers_for_eyes(
    run: RunFolder, random_policy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """What a checkpoint answers, beside another, and in a conversation; each of its 8 tokens at most."""
    use_transformers_engine(monkeypatch)
    asked = ["sample", str(run.path), "1 + 1 =", "--max-new-tokens", "3"]
    assert main([*asked, "--beside", str(random_policy(True))]) == 0
    first, answer, second, same = capsys.readouterr().out.splitlines()
    assert (first, second) == (f"— {run.path} (3 tokens, length)", f"— {random_policy(True)} (3 tokens, length)")
    assert answer == same, "the same weights, and the same seed"
    monkeypatch.setattr("sys.stdin", io.StringIO("1 + 1 =\nand 2?\n\nnot asked\n"))
    prompts: list[int] = []
    generate = TransformersEngine.generate

    def counted(engine: TransformersEngine, asked: Any, sampling: Any) -> Any:
        prompts.append(len(asked[0].token_ids))
        return generate(engine, asked, sampling)

    monkeypatch.setattr(TransformersEngine, "generate", counted)
    assert main(["chat", str(run.path), "--max-new-tokens", "3"]) == 0
    assert len(prompts) == 2 and prompts[1] > prompts[0] + 3, "the second turn follows the first and its answer"
    assert main(["sample", str(run.path), "x", "--temperature", "-1"]) == 2
    assert "eval.temperature -1.0 must be a number, at least 0" in capsys.readouterr().err
    assert main(["sample", str(run.path), "x", "--samples", "0"]) == 2
    assert "eval.samples 0 must be a whole number, at least 1" in capsys.readouterr().err


def test_runs_are_a_table(run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    nine = {"steps": "9", "scheme": "w8a8"}
    two, broken = (RunFolder.create(load_config(None, {"output": f"runs/{n}", **nine})) for n in ("two", "broken"))
    (broken.path / "config.yaml").write_text("stpes: 5\n")
    two.metrics.write_text('{"step": 4, "reward": 1}\n{"step": 5, "rew')
    (two.checkpoints / "step-000004").mkdir(parents=True)
    (two.checkpoints / "step-000004" / "manifest.json").touch()

    def table() -> dict[str, list[str]]:
        assert main(["runs"]) == 0
        rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
        assert rows[0] == ["run", "state", "step", "scheme", "accuracy", "age"]
        return {row[0]: row[1:] for row in rows[1:]}

    shown = table()
    assert shown["one"][:4] == ["exported", "3/3", "w4a16", "12.5% → 50.0%"]
    assert shown["two"][:3] == ["stopped", "4/9", "w8a8"]
    assert shown["broken"][0].startswith("unreadable: unknown key 'stpes'")
    with two.locked():
        assert table()["two"][0] == "running"
    assert main(["runs", "nope"]) == 2
    assert "there is no run in 'nope'" in capsys.readouterr().err
