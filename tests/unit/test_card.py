"""Model cards say what was measured, the README serves as the card does, and the hub gets both."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner
from huggingface_hub import HfApi, constants

from foredraft.artifacts import Manifest, publish
from foredraft.export import hub
from foredraft.export.card import card, write_cards
from foredraft.export.config import CardConfig
from foredraft.export.serving import commands, readme
from foredraft.layouts.names import served_name
from foredraft.params import read_params
from tests.conftest import ROOT

CONTRACT = {
    "target": "hf:org/target@abc",
    "target_digest": "0123456789abcdef0123",
    "thinking": True,
    "target_layer_ids": [1, 4],
    "mask_token_id": 5,
    "response_origin": {"code": "generated", "tools": "keep"},
}
CARD = CardConfig(name="org/drafter", licence="apache-2.0")


def report(tokens: float) -> dict[str, Any]:
    return {"prompts": 6, "tokens_per_step": tokens, "interval": {"low": tokens - 0.1, "high": tokens + 0.1}}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """An export of two layouts, and its cards."""
    with publish(tmp_path / "export", Manifest("export", contract=CONTRACT)) as folder:
        for layout in ("zlab", "speculators"):
            (folder / layout).mkdir()
            (folder / layout / "config.json").write_text("{}")
            (folder / layout / "model.safetensors").write_bytes(bytes(range(100)))
    evaluated = {
        "pooled": report(2.5),
        "gsm8k": report(3.0),
        "settings": {"dtype": "bfloat16"},
        "baselines": {"prompt_lookup": {"pooled": report(1.4), "gsm8k": report(1.2)}},
    }
    trained = {"documents": 374, "steps": 492, "parameters": 12_345, "commit": "abc"}
    write_cards(CARD, read_params(ROOT / "params.yaml"), tmp_path / "export", evaluated, trained, tmp_path / "card")
    return tmp_path


def test_a_card_has_the_numbers_the_mix_and_the_commands(written: Path) -> None:
    assert sorted(path.name for path in (written / "card").glob("*.md")) == ["speculators.md", "zlab.md"]
    card = (written / "card/zlab.md").read_text()
    assert card.startswith("---\nbase_model: org/target\n") and "license: apache-2.0\n---\n" in card
    for line in (
        "| gsm8k | 6 | 3.00 (2.90 to 3.10) | 1.20 |",
        "| pooled | 6 | 2.50 (2.40 to 2.60) | 1.40 |",
        "| taps | 1, 4 (residual stream after these 0-based blocks) |",
        "| thinking mode | on |",
        "374 documents, 492 steps; adamw at 0.003 (linear), from target, 6 epochs, loss ce 0.4, kl 0.6",
    ):
        assert line in card, line
    sources = read_params(ROOT / "params.yaml")["sources"]
    for name, source in sources.items():
        answers = "as they came" if name == "tools" else "the target's own"
        assert f"| {name} | {source['kind']} | {source['licence']} | {answers} |" in card
    assert commands("zlab", "org/target", "org/drafter", 4, windows=False) in card
    assert "vllm serve org/drafter" in (written / "card/speculators.md").read_text()


@pytest.mark.parametrize("uri", ["file:/home/me/private/Foo", "pypi:a==1/b.gguf"])
def test_a_card_names_no_folder_of_this_machine_and_says_where_the_target_goes(uri: str) -> None:
    trained = {"documents": 1, "steps": 2, "parameters": 3, "commit": None}
    evaluated = {"pooled": report(2.0), "settings": {"dtype": "float32"}}
    evaluated["baselines"] = {"prompt_lookup": {"pooled": report(1.0)}}
    params = read_params(ROOT / "params.yaml")
    params["train"]["start"] = "/home/me/warm/drafter"
    for layout in ("zlab", "speculators", "transformers"):
        text = card(CARD, params, CONTRACT | {"target": uri}, layout, evaluated, trained)
        assert "/home/me" not in text and "Commit unknown." in text and "from drafter" in text
        assert "base_model" not in text and f"`path/to/{'Foo' if 'Foo' in uri else 'target'}` is a folder" in text
        assert ("verifier.name_or_path" in text) == (layout == "speculators")


def test_figures_of_no_whole_run_make_no_card(written: Path) -> None:
    with pytest.raises(ValueError, match=r"not those of a whole run \(KeyError: 'settings'\)"):
        write_cards(CARD, read_params(ROOT / "params.yaml"), written / "export", {}, {}, written / "other")
    assert not (written / "other").exists()


@pytest.mark.parametrize("odd", [{"name": "a b"}, {"name": "a'"}, {"name": "$(x)"}, {"licence": "mit\nbase_model: x"}])
def test_names_that_would_break_a_card_are_refused(odd: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="pattern"):
        CardConfig(**{"name": "org/drafter", "licence": None} | odd)  # type: ignore[arg-type]


def test_a_card_goes_up_with_its_own_drafter_alone(written: Path) -> None:
    with publish(written / "later", Manifest("export", contract=CONTRACT, facts={"best": 1})) as folder:
        (folder / "zlab").mkdir()
        (folder / "zlab/config.json").write_text("{}")
    places = ["--exported", str(written / "later"), "--cards", str(written / "card"), "--yes"]
    told = CliRunner().invoke(hub.main, ["org/d", *places])
    assert told.exit_code == 1 and "was not written of" in told.output and "dvc repro card" in told.output


def test_engines_are_given_the_count_that_they_mean() -> None:
    vllm, sglang, _ = commands("zlab", "org/target", "org/drafter", 16, windows=True).splitlines()
    assert '"num_speculative_tokens": 15' in vllm and vllm.startswith("VLLM_USE_V2_MODEL_RUNNER=1 ")
    assert sglang.endswith("--speculative-num-draft-tokens 16")
    assert [served_name(uri) for uri in ("hf:a/b@c", "file:x/y", "pypi:a==1/b")] == ["a/b", "x/y", "path/to/target"]


def test_the_readme_serves_as_the_card_does() -> None:
    text = (ROOT / "README.md").read_text()
    assert readme(text) == text, "python -m foredraft.export.serving README.md"
    assert commands("zlab", "org/target", "data/export/zlab", 16, windows=False) in text


class Hub(BaseHTTPRequestHandler):
    """As much of a hub's API as an upload asks for."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer hf_secret":
            self.answer(401, {"error": "Unauthorized"})
        elif self.path == "/api/repos/create":
            self.answer(200, {"url": f"{self.server.base}/{json.loads(body)['organization']}/d"})  # type: ignore[attr-defined]
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            plain = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked]
            self.answer(200, {"files": plain})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer(200, {"commitUrl": f"{self.server.base}/org/d/commit/1", "commitOid": "1"})  # type: ignore[attr-defined]

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    Hub.files = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.base = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(hub, "HfApi", lambda: hub_api(server.base, "hf_secret"))  # type: ignore[attr-defined]
    yield server
    server.shutdown()
    server.server_close()


def hub_api(endpoint: str, token: str) -> HfApi:
    return HfApi(endpoint=endpoint, token=token)


def test_an_upload_shows_its_files_asks_and_sends_the_layout_with_its_card(written: Path, stand_in: Any) -> None:
    places = ["--exported", str(written / "export"), "--cards", str(written / "card")]
    declined = CliRunner().invoke(hub.main, ["org/d", *places], input="n\n")
    assert declined.exit_code == 1 and "README.md" in declined.output and not Hub.files
    told = CliRunner().invoke(hub.main, ["org/d", *places, "--yes"])
    assert told.exit_code == 0, told.output
    assert "model.safetensors" in told.output and f"uploaded: {stand_in.base}/org/d/commit/1" in told.output
    assert Hub.files.keys() == {"config.json", "model.safetensors", "README.md"}
    assert Hub.files["model.safetensors"] == bytes(range(100))
    assert Hub.files["README.md"] == (written / "card/zlab.md").read_bytes()


def test_an_upload_without_a_login_or_a_layout_is_one_line(
    written: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = ["--exported", str(written / "export"), "--cards", str(written / "card"), "--yes"]
    missing = CliRunner().invoke(hub.main, ["org/d", "--layout", "transformers", *places])
    assert missing.exit_code == 1 and "has no layout transformers" in missing.output
    monkeypatch.setattr(hub, "HfApi", lambda: hub_api(stand_in.base, "hf_other"))
    refused = CliRunner().invoke(hub.main, ["org/d", *places])
    assert refused.exit_code == 1 and "hf auth login" in refused.output and "Traceback" not in refused.output
    assert not Hub.files
