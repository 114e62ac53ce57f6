"""A scripted OpenAI-compatible endpoint on loopback: answers, or fails in the ways that endpoints do."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Endpoint:
    """`answer(body, number) -> text | dict | Fault` for request `number` (from 0); a dict is the body as it stands."""

    def __init__(self, answer):
        self.answer = answer
        self.bodies, self.headers, self.times = [], [], []
        self.most = self._open = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer._lock:
                    number = len(outer.bodies)
                    outer.bodies.append(body)
                    outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                    outer.times.append(time.monotonic())
                    outer._open += 1
                    outer.most = max(outer.most, outer._open)
                try:
                    result = outer.answer(body, number)
                finally:
                    with outer._lock:
                        outer._open -= 1
                result = result if isinstance(result, Fault) else Fault(200, completion(result))
                result.send(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


class Fault:
    """An answer that is spelled out. `cut`: bytes after which the connection is closed; `hang`: seconds before."""

    def __init__(self, status=200, body=b"", headers=None, cut=None, hang=0.0):
        self.status, self.headers, self.cut, self.hang = status, headers or {}, cut, hang
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()

    def send(self, handler):
        time.sleep(self.hang)
        try:
            handler.send_response(self.status)
            handler.send_header("content-type", "application/json")
            handler.send_header("content-length", str(len(self.body)))
            for name, value in self.headers.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(self.body if self.cut is None else self.body[: self.cut])
            handler.wfile.flush()
            if self.cut is not None:
                handler.connection.shutdown(socket.SHUT_RDWR)
                handler.close_connection = True
        except OSError:
            handler.close_connection = True  # the client went away


def completion(reply, reason="stop", usage=(10, 5)):
    """The body of an answer; `reply` is its text, or a whole body."""
    if isinstance(reply, dict):
        return reply
    body = {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": reason}],
    }  # fmt: skip
    if usage is not None:
        prompt, sampled = usage
        body["usage"] = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return body


def error(status, message="trouble", code=None, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return Fault(status, {"error": {"message": message, "type": "x", "param": None, "code": code}}, headers)


@contextmanager
def endpoint(answer):
    """A running `Endpoint`; `answer` as there."""
    running = Endpoint(answer)
    thread = threading.Thread(target=running.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.server.shutdown()
        running.server.server_close()
        thread.join()


class Expert:
    """`answer` that plays an environment's expert: it finds the world by what the messages say and plays them again."""

    def __init__(self, environment, tasks, protocol, kind=None):
        self.protocol, self.kind = protocol, kind
        self._environment, self._lock = environment, threading.Lock()
        self._batch = environment.make_batch(1)
        self._tasks = {}
        for task in tasks:
            (text,), (info,) = self._batch.reset([0], [task], [0])
            self._tasks[protocol.user_message(text, info.get("admissible"))] = task

    def __call__(self, body, number):
        said = [m for m in body["messages"] if m["role"] != "system"]
        with self._lock:
            self._batch.reset([0], [self._tasks[said[0]["content"]]], [0])
            for message in said:
                if message["role"] == "assistant":
                    self._batch.step([0], [self.protocol.parse(message["content"]).action])
            (action,), (thought,) = self._batch.expert([0], self.kind)
        return self.protocol.render(thought, action)
