"""The page at /: whole, of this server alone, readable, and in step with what the server sends.

What it does in a browser is tested in a browser: tests/browser, `make test-browser`.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from fastapi.testclient import TestClient

from dflash.serve import page
from tests.serve.conftest import Serving, chat

TEXTS = {name: content.decode() for name, (content, _) in page.files().items()}
SCRIPTS = {name: text for name, text in TEXTS.items() if name.endswith(".js")}


class Elements(HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


ELEMENTS = Elements(TEXTS[page.START]).found
IDS = {attributes["id"] for _, attributes in ELEMENTS if "id" in attributes}


def test_the_page_is_served_with_a_policy_that_lets_nothing_else_in(client: TestClient) -> None:
    reply = client.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


def test_every_file_that_the_page_names_is_served(client: TestClient) -> None:
    named = {
        value
        for _, attributes in ELEMENTS
        for value in (attributes.get("src"), attributes.get("href"))
        if value and not value.startswith("#")
    }
    imported = {
        f"page/{found}"
        for text in SCRIPTS.values()
        for found in re.findall(r'from "\./([\w.]+)"', text)
    }
    assert imported  # else the pattern is wrong
    for path in named | imported:
        assert client.get(f"/{path}").status_code == 200, path


def test_nothing_in_it_comes_from_anywhere_else() -> None:
    for name, text in TEXTS.items():
        others = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[\w./]*", text))
        assert others <= {"http://www.w3.org/2000/svg"}, name  # a name, not an address


def test_only_its_own_files_can_be_asked_for(client: TestClient) -> None:
    for name in ("__init__.py", "..%2fapp.py", "../app.py", "nothing.js"):
        assert client.get(f"/page/{name}").status_code == 404, name


def test_it_opens_without_a_key_where_answers_need_one(serving: Serving) -> None:
    client = serving(api_keys=("secret",))
    assert client.get("/").status_code == 200
    assert client.get("/page/app.js").status_code == 200
    assert client.post("/v1/chat/completions", json=chat()).status_code == 401


def test_scripts_ask_only_for_elements_that_exist() -> None:
    asked = set(re.findall(r'\$\("([\w-]+)"\)', SCRIPTS["app.js"]))
    assert asked
    assert asked <= IDS
    assert {f"count-{origin}" for origin in ("draft", "target", "fallback")} <= IDS


def test_every_control_has_a_name() -> None:
    labelled = {attributes.get("for") for tag, attributes in ELEMENTS if tag == "label"}
    text = TEXTS[page.START]
    for tag, attributes in ELEMENTS:
        if tag in ("input", "select", "textarea"):
            own = re.search(rf'<label[^>]*>[^\n]*id="{attributes["id"]}"', text)
            assert attributes["id"] in labelled or own, attributes
        if tag == "img":
            assert "alt" in attributes


def test_pictures_and_progress_are_told_in_words() -> None:
    roles = {attributes.get("role"): attributes for _, attributes in ELEMENTS}
    assert "status" in roles and "alert" in roles
    for _, attributes in ELEMENTS:
        if attributes.get("role") == "img":
            assert attributes.get("aria-label")


def test_the_server_sends_what_the_page_reads(client: TestClient) -> None:
    body = chat(stream=True, stream_options={"include_origins": True})
    lines = client.post("/v1/chat/completions", json=body).text.split("\n")
    frames = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    origins = [c["origins"] for frame in frames for c in frame["choices"] if "origins" in c]
    read = set(re.findall(r"origins\.(\w+)", "".join(SCRIPTS.values())))
    assert read >= {"pieces", "sources", "token_ids", "drafted", "accepted", "committed"}
    for one in origins:
        assert read <= set(one)
        assert {piece["source"] for piece in one["pieces"]} <= {"draft", "target"}
    assert {"tokens_per_second", "speculative_decoding"} <= set(frames[-1]["metrics"])
    health = client.get("/health").json()
    read = set(re.findall(r"found\.(\w+)", SCRIPTS["app.js"]))
    assert "native_block_size" in read
    assert read <= set(health)


# --- colours ------------------------------------------------------------------------------------


def themes() -> dict[str, dict[str, str]]:
    """Colours by name, light and dark: the style sheet has both in one place."""
    pairs = re.findall(
        r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", TEXTS["page.css"]
    )
    return {
        "light": {name: light for name, light, _ in pairs},
        "dark": {name: dark for name, _, dark in pairs},
    }


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_a_theme_is_chosen_by_the_system_or_by_the_button() -> None:
    schemes = re.findall(r"(:root[^{]*) \{\s+color-scheme: ([^;]+);", TEXTS["page.css"])
    assert dict(schemes) == {
        ":root": "light dark",
        ':root[data-theme="light"]': "light",
        ':root[data-theme="dark"]': "dark",
    }
    light, dark = themes().values()
    assert light["ground"] != dark["ground"] and len(light) > 12


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_pictures_stand_out_from_their_ground(theme: str) -> None:
    colours = themes()[theme]
    texts = [
        *(("ink", "card"), ("ink", "ground"), ("soft", "card"), ("soft", "ground")),
        *(("draft-ink", "draft-fill"), ("target-ink", "card"), ("target-ink", "ground")),
        *(("alarm", "alarm-fill"), ("button-ink", "button")),
    ]
    for text, ground in texts:
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for part in ("draft", "target", "fallback", "focus"):
        assert contrast(colours[part], colours["card"]) >= 3, part
