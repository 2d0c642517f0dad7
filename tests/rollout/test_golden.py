"""A run's whole life on two servers, step by step: what it asks of each and says, what comes of it,
and what it leaves behind; kept, so that a change of any request, time limit, answer or message is
seen, and so are limits and defaults. Our side of a server is real: middleware, worker, files. Blind
spots: vLLM (tests/engine); HTTP (test_replicas.py).

Record anew, where a change is meant: python -m tests.rollout.test_golden; the steps are the
record's own.
"""

import importlib
import inspect
import json
import pkgutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse

from qarl import rollout
from qarl.configs.schema.run import RolloutConfig
from qarl.quant.types import LayerReport, LowBitTensor
from qarl.rollout.absent import AbsentEngine
from qarl.rollout.servers import engine, replicas
from qarl.rollout.servers.vllm import access, client, receive, replica, start, worker
from qarl.rollout.types import Prompt, Sampling, ServerSpec
from qarl.rollout.vllm.options import VllmOptions
from tests.support.servers import altered

GOLDEN = Path(__file__).with_suffix(".json")
PROMPTS = [
    Prompt("a", "", (1, 2)),
    Prompt("b", "", (3,), (7, 8, 9)),
    Prompt("c", "", (4, 5, 6)),
]


class StandIn(worker.ServerExtension):
    """One server with a model of layers a and b. fails: methods it refuses once. diary: what it did
    in a step.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        patch.setenv(receive.RECEIVED, str(folder))
        self.fails = list[str]()
        self.label = "default"
        self.diary = list[str]()
        settings: Any = SimpleNamespace(max_model_len=100, logprobs_mode="raw_logprobs")
        self.vllm_config = SimpleNamespace(model_config=settings)  # type: ignore[assignment]
        self.model_runner = SimpleNamespace(get_model=list)  # type: ignore[assignment]
        self.app = Starlette(
            middleware=[
                Middleware(access.RequireKey),
                Middleware(receive.ReceiveVersions),
            ]
        )
        self.app.add_route("/{path:path}", self.answer, ["POST"])
        self.app.state.engine_client, self.app.middleware_stack = (
            self,
            self.app.build_middleware_stack(),
        )

    async def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        while (answer := getattr(self, method)(**arguments)) is None and method == "qarl_stage":
            time.sleep(0.001)
        return [answer, answer]  # of two workers

    def qarl_layers(self) -> list[LayerReport]:
        return [LayerReport("a", self.label[:3], 16, "bfloat16", "k")]

    async def answer(self, request: Request) -> JSONResponse:
        body = json.loads(await request.body())
        method = body.get("method", request.url.path)
        asked = body.get("sampling_params", {})
        self.diary.append(method)
        if method in self.fails:
            return JSONResponse(
                self.fails.remove(method),
                500 if method == "qarl_layer_reports" else 400,
            )
        if "method" in body:
            return JSONResponse({"results": await self.collective_rpc(method, **body["kwargs"])})
        self.label = body.get("new_version", self.label)
        spans = [{"version": self.label, "start": 0, "end": asked.get("max_tokens")}]
        return JSONResponse(
            altered(weight_versions=spans) | {"output_mode": body.get("output_mode")}
        )


def life(
    folder: Path, patch: pytest.MonkeyPatch, changes: dict[str, Any], steps: list[str]
) -> list[Any]:
    log = list[str]()
    lost = set[str]()
    loaded = AbsentEngine().load
    runs = list[engine.ServerEngine]()

    async def request(
        self: client.Server, kind: str, path: str, seconds: float, **content: Any
    ) -> Any:
        headers = self._session.headers
        log.append(f"{self.url} {path} {seconds} {content} {dict(headers)}")
        if self.url in lost:
            raise client.BrokenAnswerError(f"{self.url} is absent")
        data = {"content": content["data"].read()} if "data" in content else content
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(servers[self.url].app), headers=headers
        ) as asking:
            answer = await asking.request(kind, f"{self.url}{path}", **data)
        if answer.status_code != 200:
            raise self._refused(path.partition("?")[0], answer.status_code, answer.text)
        return answer.json()

    def join(name: str = "key", value: str = "k") -> None:
        options: dict[str, Any] = (
            {"max_prompt_tokens": 60, "max_new_tokens": 40, "server_full_every": 3}
            | changes
            | {name: value}
        )
        key, *own = (
            options.pop("key", "k"),
            options.pop("learner", "run"),
            options.pop("lead", "1") == "1",
        )
        settings = VllmOptions(RolloutConfig(servers=tuple(servers), **options))
        urls = [f"{url}/" for url in servers]

        def end() -> None:
            log.append("end")

        runs.append(
            engine.ServerEngine(urls, key, folder / "versions", folder, settings, *own, at_end=end)
        )

    def load(version: str, *more: str) -> Any:
        rows = torch.arange(4096) * int(version) if int(version) == 2 else torch.arange(4096)
        rows[int(version)] += int(version)
        return runs[-1].load(
            (LowBitTensor(f"{n}.weight", rows.int()) for n in ("a", "b", *more)),
            int(version),
        )

    said = SimpleNamespace(warning=lambda words, *fields: log.append(words % fields))
    patch.setenv("VLLM_API_KEY", "k")
    patch.setenv(start.ON_CPU, "1")
    patch.setattr(torch.cuda, "is_available", lambda: False)
    servers = {f"http://{n}": StandIn(folder / f"received-{n}", patch) for n in "01"}
    for holder, name, value in [
        (engine, "_log", said),
        (replicas, "_log", said),
        (replicas, "_PAUSE_SECONDS", 0.001),
        (client.Server, "_request", request),
        (
            replica.VllmReplica,
            "allow_pause",
            lambda self, seconds: said.warning("%s pauses %s", self.url, seconds),
        ),
        (engine, "load_tokenizer", str),
        (engine, "text_of", lambda *all_of: str(all_of)),
        (worker, "trace_names", lambda model, _: model.extend("ab")),
        (worker, "checkpoint_names", lambda m: {0: [*m]}),
        (worker, "load_stream", lambda _, __, stream: loaded(stream, 0)),
    ]:
        patch.setattr(holder, name, value)
    acts: dict[str, Any] = {
        "join": join,
        "load": load,
        "leave": lambda: runs.pop().close(),
        "audit": lambda: runs[-1].layers(),
        "sample": (
            lambda *stop: runs[-1].generate(
                PROMPTS, Sampling(2, 2, seed=5, first_prompt=4, stop=stop)
            )
        ),
        "score": lambda: [
            runs[-1].logprobs_of_each([[1, 7], [4, 7]]),
            runs[-1].logprobs([[1, 7]]),
        ],
        "fail": lambda n, *methods: servers[f"http://{n}"].fails.extend(methods),
        "find": lost.clear,
        "lose": lambda *numbers: lost.update(f"http://{n}" for n in numbers),
        "claim": lambda n, learner: servers[f"http://{n}"].qarl_claim(learner),
        "command": lambda *n: start.server_command(
            ServerSpec(folder, "n", "half", *map(int, n)), "h", 1, ["-x"]
        )[1:],
        "replica": lambda: start.replica_command(folder, VllmOptions(), "h", 1, ["-x"])[1:],
        "restart": lambda n: servers.update(
            {f"http://{n}": StandIn(folder / f"received-{n}", patch)}
        ),
    }
    journal = list[Any]()
    for step in steps:
        try:
            result = acts[step.split()[0]](*step.split()[1:])
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        left = [[s.label, str(s.qarl_state()), " ".join(s.diary)] for s in servers.values()]
        journal.append([step, str(result), left, sorted(map(str, folder.rglob("*"))), sorted(log)])
        for record in (log, *(server.diary for server in servers.values())):
            record.clear()
    return json.loads(json.dumps(journal).replace(str(folder), "FOLDER"))


def limits() -> dict[str, str]:
    """Numbers and words at the top of every file, and what its functions take where nothing is
    said.
    """
    plain = (int, float, str, tuple, range)
    all_of = dict[str, str]()
    for module in pkgutil.walk_packages(rollout.__path__, "qarl.rollout."):
        for name, value in vars(importlib.import_module(module.name)).items():
            values = {name: value} if name.isupper() else {}
            own = getattr(value, "__module__", "") == module.name
            if own and (inspect.isfunction(value) or hasattr(value, "__dataclass_fields__")):
                values = {
                    f"{name}.{key}": one.default
                    for key, one in inspect.signature(value).parameters.items()
                }
            all_of |= {
                f"{module.name}.{key}": repr(one)
                for key, one in values.items()
                if isinstance(one, plain)
            }
    return all_of


LIMITS, *LIVES = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize(("changes", "rows"), [(changes, rows) for changes, *rows in LIVES])
def test_a_run_leaves_its_servers_as_recorded(
    changes: Any, rows: list[Any], tmp_path: Path, monkeypatch: Any
):
    assert limits() == LIMITS
    assert life(tmp_path, monkeypatch, changes, [step for step, *_ in rows]) == rows


if __name__ == "__main__":
    for number, (settings, *rows) in enumerate(LIVES):
        with (
            tempfile.TemporaryDirectory() as parent,
            pytest.MonkeyPatch.context() as patched,
        ):
            LIVES[number] = (
                settings,
                *life(Path(parent), patched, settings, [step for step, *_ in rows]),
            )
    GOLDEN.write_text(json.dumps([limits(), *LIVES], indent=1) + "\n")
