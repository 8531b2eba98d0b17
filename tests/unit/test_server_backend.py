"""What is sent to an OpenAI-compatible server, and what becomes of its replies; the server here says what a test wants."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from foredraft.chat.render import Renderer
from foredraft.responses.config import RespondConfig, ServerConfig
from foredraft.responses.dialogue import Dialogue
from foredraft.responses.server import ServerBackend
from tests.tokenizers import make_tokenizer
from tests.unit.test_responses import SETTINGS, conversation

TOKENIZER = make_tokenizer("chatml")
END = TOKENIZER.eos_token_id
WORDS = TOKENIZER("Fine words", add_special_tokens=False)["input_ids"]
Reply = tuple[int, dict[str, Any]]


class Stub:
    """An HTTP server that gives the replies of ``say`` and remembers what it was asked."""

    def __init__(self, say: Callable[[int, dict[str, Any]], Reply]):
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.asked.append(body)
                stub.headers.append(self.headers)
                status, content = say(len(stub.asked), body)
                self.send_response(status)
                payload = json.dumps(content).encode()
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def serve() -> Iterator[Callable[..., Stub]]:
    stubs: list[Stub] = []

    def start(say: Callable[[int, dict[str, Any]], Reply]) -> Stub:
        stubs.append(Stub(say))
        return stubs[-1]

    yield start
    for stub in stubs:
        stub.server.shutdown()
        stub.server.server_close()


def backend(url: str, token_ids: bool = False, retries: int = 3) -> tuple[ServerBackend, list[float]]:
    """A backend that notes its pauses instead of making them."""
    server = ServerConfig(url=url, model="m", token_ids=token_ids, concurrency=1, retries=retries, timeout_seconds=5)
    pauses: list[float] = []
    config = RespondConfig(**SETTINGS | {"backend": "server", "server": server, "temperature": 0.7, "top_p": 0.9})
    return ServerBackend(config, TOKENIZER, [END], END, pauses.append), pauses


def dialogue() -> Dialogue:
    return Dialogue(conversation(1, "How are you?"), Renderer(TOKENIZER, False), TOKENIZER, 400)


def completion(prompt: Any, choice: dict[str, Any], completion_tokens: int = len(WORDS) + 1) -> Reply:
    """A reply whose usage counts the prompt as we do."""
    count = len(prompt) if isinstance(prompt, list) else len(TOKENIZER(prompt, add_special_tokens=False)["input_ids"])
    usage = {"prompt_tokens": count, "completion_tokens": completion_tokens}
    return 200, {"choices": [choice], "usage": usage}


def test_the_prompt_goes_out_as_we_rendered_it_with_the_sampling_of_the_params(
    serve: Callable[..., Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the-key")
    stub = serve(lambda n, body: completion(body["prompt"], {"text": "Fine words", "finish_reason": "stop"}))
    talk = dialogue()
    prompt = talk.prompt_ids
    backend(stub.url)[0].answer([talk])
    (body,) = stub.asked
    assert (
        body["prompt"]
        == TOKENIZER.decode(prompt)
        == "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert {key: body[key] for key in ("model", "max_tokens", "temperature", "top_p", "seed")} == {
        "model": "m",
        "max_tokens": 12,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": body["seed"],
    }
    assert stub.asked[0]["seed"] != 1, "drawn from the params' seed, the conversation and the turn"
    assert stub.headers[0]["Authorization"] == "Bearer the-key"
    (answer,) = talk.outcome.answers
    assert (answer.prompt_ids, answer.response_ids, answer.finish_reason) == (prompt, [*WORDS, END], "stop")


@pytest.mark.parametrize(
    ("ids", "finish_reason", "kept"),
    [
        ([*WORDS, END], "stop", [*WORDS, END]),
        (WORDS, "stop", [*WORDS, END]),
        (WORDS, "length", WORDS),
    ],
)
def test_ids_that_the_server_sends_are_used_as_they_are(
    serve: Callable[..., Stub], ids: list[int], finish_reason: str, kept: list[int]
) -> None:
    choice = {"text": "whatever", "token_ids": ids, "finish_reason": finish_reason}
    stub = serve(lambda n, body: completion(body["prompt"], choice))
    talk = dialogue()
    prompt = talk.prompt_ids
    backend(stub.url, token_ids=True)[0].answer([talk])
    assert stub.asked[0]["prompt"] == prompt and stub.asked[0]["return_token_ids"] is True
    assert talk.outcome.answers[0].response_ids == kept
    assert talk.outcome.answers[0].finish_reason == finish_reason


@pytest.mark.parametrize(
    ("counted", "finish_reason", "proven"),
    [
        (1, "stop", True),
        (0, "stop", False),
        (2, "stop", False),
        (0, "length", True),
        (1, "length", False),
    ],
)
def test_text_that_is_not_as_many_tokens_as_were_generated_is_left_out(
    serve: Callable[..., Stub], counted: int, finish_reason: str, proven: bool
) -> None:
    choice = {"text": "Fine words", "finish_reason": finish_reason}
    stub = serve(lambda n, body: completion(body["prompt"], choice, len(WORDS) + counted))
    talk = dialogue()
    backend(stub.url)[0].answer([talk])
    assert bool(talk.outcome.answers) == proven
    assert talk.outcome.stopped == ("" if proven else "tokens_not_proven")


def test_a_busy_server_is_asked_again_after_growing_pauses(serve: Callable[..., Stub]) -> None:
    def say(n: int, body: dict[str, Any]) -> Reply:
        if n < 3:
            return 503, {"error": "loading"}
        return completion(body["prompt"], {"text": "Fine words", "finish_reason": "stop"})

    talk = dialogue()
    asking, pauses = backend(serve(say).url)
    asking.answer([talk])
    assert talk.outcome.answers and len(pauses) == 2
    assert 1 <= pauses[0] <= 2 <= pauses[1] <= 4


@pytest.mark.parametrize(
    ("reply", "token_ids", "message"),
    [
        ((503, {"error": "loading"}), False, r"no answer after 2 tries \(HTTP 503: .*loading.*\); is the server up"),
        ((401, {}), False, "wants a key, or another one; put it into OPENAI_API_KEY"),
        ((404, {"detail": "no model m"}), False, "refuses with HTTP 404: .*no model m"),
        ((200, {"hello": 1}), False, "not a completions endpoint .* it should end in /v1"),
        (
            (200, {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 7, "completion_tokens": 1}}),
            False,
            r"saw 7 tokens in a prompt of \d+",
        ),
        ((200, {"choices": [{"text": "x"}]}), False, r"does not say how many tokens it saw and made \(usage\)"),
    ],
)
def test_what_a_server_refuses_is_one_clear_line(
    serve: Callable[..., Stub], reply: Reply, token_ids: bool, message: str
) -> None:
    stub = serve(lambda n, body: reply)
    with pytest.raises(ValueError, match=f"respond.server.url = {stub.url}: {message}") as caught:
        backend(stub.url, token_ids, retries=1)[0].answer([dialogue()])
    assert "\n" not in str(caught.value)


def test_a_server_that_sends_no_ids_though_asked_for_them_is_refused(serve: Callable[..., Stub]) -> None:
    stub = serve(lambda n, body: completion(body["prompt"], {"text": "x", "finish_reason": "stop"}))
    with pytest.raises(ValueError, match=r"sends no token ids; set respond.server.token_ids: false"):
        backend(stub.url, token_ids=True)[0].answer([dialogue()])
    assert stub.asked[0]["repetition_penalty"] == 1.0, "the checkpoint's own habits are set aside"


def test_turns_are_drawn_from_seeds_of_their_own_and_a_broken_answer_ends_a_conversation(
    serve: Callable[..., Stub],
) -> None:
    def say(n: int, body: dict[str, Any]) -> Reply:
        return completion(body["prompt"], {"text": "Fine words", "finish_reason": "stop" if n < 3 else "abort"})

    stub = serve(say)
    talk = Dialogue(conversation(1, "One?", "Two?", "Three?"), Renderer(TOKENIZER, False), TOKENIZER, 400)
    backend(stub.url)[0].answer([talk])
    assert len({body["seed"] for body in stub.asked}) == 3
    assert (len(talk.outcome.answers), talk.outcome.stopped) == (2, "answer_broken_off")


def test_the_end_of_a_turn_is_the_templates_own_among_several() -> None:
    renderer = Renderer(TOKENIZER, False)
    assert renderer.end_id([3, END, 5]) == END
    assert renderer.end_id([3, 5]) == 3


def test_no_server_is_one_clear_line() -> None:
    asking, pauses = backend("http://127.0.0.1:9/v1", retries=2)
    with pytest.raises(ValueError, match=r"no answer after 3 tries \(ConnectionError\); is the server up"):
        asking.check()
    assert len(pauses) == 2
