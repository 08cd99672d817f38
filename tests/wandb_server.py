"""A W&B server in a thread: as much of the protocol as wandb needs to track a run online."""

import json
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Event, Thread
from typing import Any

ENTITY = "someone"
JSON = dict[str, Any]  # Any: whatever JSON holds


def teardown() -> None:
    """Wait for W&B's service to write what it was told, and end it.

    W&B is imported here: it takes seconds, which only those processes spend that test it.
    """
    import wandb

    wandb.teardown()


@dataclass(frozen=True)
class Request:
    """What came in, as it came in."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    operation: str  # of GraphQL, or else ""


@dataclass
class ReceivedRun:
    """A run as the server knows it."""

    id: str
    upserts: list[JSON] = field(default_factory=list)  # what each told of the run
    history: list[str] = field(default_factory=list)  # the lines
    places: list[int] = field(default_factory=list)  # where each line that came was to be put
    summary: JSON = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def told(self, name: str) -> list[Any]:
        """The values that a field of the run was given, in order."""
        return [upsert[name] for upsert in self.upserts if upsert.get(name) is not None]

    def rows(self) -> list[JSON]:
        """Everything that was logged, a dict a step, wandb's own keys but the step left out."""
        return [
            {k: v for k, v in row.items() if not k.startswith("_")} | {"step": row["_step"]}
            for row in map(json.loads, self.history)
        ]

    def config(self) -> JSON:
        """As it was told last, with wandb's own."""
        return {key: given["value"] for key, given in json.loads(self.told("config")[-1]).items()}

    def resume_status(self) -> JSON:
        """What someone who wants to go on with this run has to know."""
        return {
            "id": self.id,
            "name": self.id,
            "displayName": self.told("displayName")[0],
            "summaryMetrics": json.dumps(self.summary),
            "logLineCount": 0,
            "historyLineCount": len(self.history),
            "eventsLineCount": 0,
            "historyTail": json.dumps(self.history[-1:]),
            "eventsTail": "[]",
            "config": self.told("config")[-1],
            "tags": [],
            "notes": None,
            "wandbConfig": json.dumps({"t": self.config()["_wandb"]["t"]}),
        }

    def stream(self, told: JSON) -> None:
        """Take what came by the file stream. A line is put where the sender says."""
        for name, part in told.get("files", {}).items():
            if name == "wandb-history.jsonl":
                places = range(part["offset"], part["offset"] + len(part["content"]))
                self.history[places.start : places.stop] = part["content"]
                self.places += places
            elif name == "wandb-summary.json":
                self.summary = json.loads(part["content"][-1])
        if told.get("complete"):
            self.exit_codes.append(told["exitcode"])


class WandbServer:
    """Listens at `url` and keeps everything that it receives."""

    def __init__(self, runs: Mapping[str, ReceivedRun]) -> None:
        self.requests: list[Request] = []
        self.runs = dict(runs)
        self.artifact_files: dict[str, bytes] = {}
        self.faults: list[str] = []  # requests that it could not answer
        self._changed = Condition()
        self._is_silent, self._is_over = Event(), Event()
        self._connections: set[socket.socket] = set()
        self._listener = _Listener(self)
        self.url = f"http://127.0.0.1:{self._listener.server_port}"
        self._thread = Thread(target=self._listener.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def wait_for(self, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until something that depends on requests holds."""
        with self._changed:
            if not self._changed.wait_for(holds, timeout_s):
                asked = [(request.path, request.operation) for request in self.requests]
                raise TimeoutError(f"not in {timeout_s} s, received: {asked}")

    def fall_silent(self) -> None:
        """Take requests and answer none, from now on."""
        self._is_silent.set()

    def die(self) -> None:
        """Refuse connections and break those that are open, from now on."""
        self._is_over.set()
        self._listener.shutdown()
        self._listener.server_close()
        with self._changed:
            for connection in self._connections:
                _break(connection)
        self._thread.join(10)

    def opened(self, connection: socket.socket) -> None:
        with self._changed:
            self._connections.add(connection)
            if self._is_over.is_set():
                _break(connection)

    def closed(self, connection: socket.socket) -> None:
        with self._changed:
            self._connections.discard(connection)

    def answer(self, request: Request) -> JSON | None:
        """What to reply, as JSON; None if nothing is."""
        with self._changed:
            self.requests.append(request)
            reply = None if self._is_silent.is_set() else self._reply(request)
            self._changed.notify_all()
        if reply is None:
            self._is_over.wait()
        return reply

    def _reply(self, request: Request) -> JSON:
        kind, _, rest = request.path.strip("/").partition("/")
        owner, _, name = rest.partition("/")
        if request.operation:
            given = json.loads(request.body).get("variables") or {}
            return {"data": self._answers()[request.operation](given)}
        if kind == "files":
            self.runs[name.split("/")[1]].stream(json.loads(request.body))
        elif kind == "run":
            self.runs[owner].files[name] = request.body
        elif kind == "artifact":
            self.artifact_files[name] = request.body
        else:
            raise KeyError(request.path)
        return {}

    def _answers(self) -> dict[str, Callable[[JSON], JSON]]:
        """What is replied to the operations of GraphQL."""
        return {
            "ArtifactType": lambda _: {"project": None},
            "CommitArtifact": lambda given: {
                "commitArtifact": {"artifact": {"id": given["artifactID"], "digest": ""}}
            },
            "CreateArtifact": self._create_artifact,
            "CreateArtifactFiles": self._create_artifact_files,
            "CreateArtifactManifest": self._create_artifact_manifest,
            "CreateRunFiles": self._create_run_files,
            "RunResumeStatus": self._run_resume_status,
            "ServerFeaturesQuery": lambda _: {"serverInfo": {"features": []}},
            "UpsertBucket": self._upsert_bucket,
            "Viewer": lambda _: {"viewer": {"id": ENTITY, "entity": ENTITY, "flags": "{}"}},
        }

    def _run_resume_status(self, given: JSON) -> JSON:
        run = self.runs.get(given["name"])
        bucket = run.resume_status() if run else None
        return {"model": _project(given["project"]) | {"bucket": bucket}}

    def _upsert_bucket(self, given: JSON) -> JSON:
        run_id = given["name"]
        is_new = run_id not in self.runs
        run = self.runs.setdefault(run_id, ReceivedRun(run_id))
        run.upserts.append(given)
        bucket = {
            "id": run_id,
            "name": run_id,
            "displayName": run.told("displayName")[0],
            "config": run.told("config")[-1],
            "project": _project(given["project"]),
            "historyLineCount": len(run.history),
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}

    def _create_run_files(self, given: JSON) -> JSON:
        folder = f"{self.url}/run/{given['run']}"
        files = [{"name": name, "uploadUrl": f"{folder}/{name}"} for name in given["files"]]
        return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}

    def _create_artifact(self, given: JSON) -> JSON:
        artifact = {
            "id": given["input"]["clientID"],
            "state": "PENDING",
            "artifactSequence": {"latestArtifact": None},
        }
        return {"createArtifact": {"artifact": artifact}}

    def _create_artifact_files(self, given: JSON) -> JSON:
        nodes = [
            {
                "storagePath": file["name"],
                "uploadUrl": f"{self.url}/artifact/{file['artifactID']}/{file['name']}",
                "uploadHeaders": [],
                "artifact": {"id": file["artifactID"]},
            }
            for file in given["input"]["artifactFiles"]
        ]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def _create_artifact_manifest(self, given: JSON) -> JSON:
        artifact_id, name = given["artifactID"], given["name"]
        url = f"{self.url}/artifact/{artifact_id}/{name}"
        file = {"id": name, "uploadUrl": url, "uploadHeaders": []}
        manifest = {"id": artifact_id, "file": file}
        return {"createArtifactManifest": {"artifactManifest": manifest}}


def _project(name: str) -> JSON:
    return {"id": name, "name": name, "entity": {"id": ENTITY, "name": ENTITY}}


def _break(connection: socket.socket) -> None:
    with suppress(OSError):  # it is broken
        connection.shutdown(socket.SHUT_RDWR)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, owner: WandbServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.owner = owner

    def handle_error(self, *_: object) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):  # whoever asked went away
            self.owner.faults.append(repr(error))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener

    def setup(self) -> None:
        super().setup()
        self.server.owner.opened(self.connection)

    def finish(self) -> None:
        self.server.owner.closed(self.connection)
        super().finish()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        operation = ""
        if self.path == "/graphql":
            found = re.search(r"\b(?:query|mutation)\s+(\w+)", json.loads(body)["query"])
            operation = found[1] if found else "unnamed"
        request = Request(self.command, self.path, dict(self.headers.items()), body, operation)
        reply = self.server.owner.answer(request)
        if reply is None:
            self.close_connection = True
            return
        text = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_PUT = do_POST

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def wandb_server(runs: Mapping[str, ReceivedRun] | None = None) -> Iterator[WandbServer]:
    """A server that knows these runs."""
    server = WandbServer(runs or {})
    try:
        yield server
    finally:
        server.die()
