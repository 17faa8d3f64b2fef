"""The page at /, used in a real browser against a real server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dflash.backends.toy import ToyModel, ToyPair
from dflash.engine import Engine
from tests.serve.conftest import listening, saying, toy_pair

pytestmark = pytest.mark.browser
WIDE, NARROW = (1360, 860), (390, 844)
TOKENS = 40
Opening = Callable[..., Any]


@pytest.fixture
def opening(browser: Any) -> Iterator[Opening]:
    """Opens pages; whatever a page complained of, or asked of others, fails the test at its end."""
    contexts, wrong = [], []

    def make(url: str, size: tuple[int, int] = WIDE, **more: Any) -> Any:
        viewport = {"width": size[0], "height": size[1]}
        context = browser.new_context(viewport=viewport, **more)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda problem: wrong.append(str(problem)))
        home = url.removesuffix("/v1")
        page.on("request", lambda r: r.url.startswith(home) or wrong.append(r.url))
        page.goto(f"{home}/")
        page.wait_for_selector("#draft:not(:empty)")
        return page

    yield make
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture
def url() -> Iterator[str]:
    """A server whose draft is right for 1, 3, 0 tokens in turn, four drafted a pass."""
    with listening(toy_pair(), block_size=5) as found:
        yield found


def ask(page: Any, text: str = "hello") -> None:
    """Type and send, with keys alone; back when the answer is complete."""
    page.fill("#max-tokens", str(TOKENS))
    page.focus("#prompt")
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    finished(page)


def finished(page: Any) -> None:
    page.wait_for_selector("#send.stop, .foot:not(:empty)")
    page.wait_for_selector("#send:not(.stop)")


def expected() -> Any:
    with Engine(toy_pair()) as engine:
        return engine.generate("hello", max_tokens=TOKENS, block_size=5)


def shown(page: Any, place: str = ".text") -> str:
    return str(page.locator(place).first.text_content())


def number(page: Any, place: str) -> int:
    return int(page.text_content(place))


def test_the_answer_is_the_librarys_and_its_origins_add_up(opening: Opening, url: str) -> None:
    page = opening(url)
    ask(page)
    answer = expected()
    assert shown(page) == answer.text
    assert number(page, "#count-draft") == answer.stats.accepted
    made = sum(number(page, f"#count-{origin}") for origin in ("draft", "target", "fallback"))
    assert made == len(answer.token_ids)
    assert "".join(page.locator(".text .draft").all_text_contents())
    assert shown(page, "#mean") == f"{answer.stats.mean_committed:.2f}"


def test_the_strip_has_a_column_for_each_pass_as_high_as_what_it_committed(
    opening: Opening, url: str
) -> None:
    page = opening(url)
    ask(page)
    stats = expected().stats
    columns = page.locator("#strip rect.target, #strip rect.fallback")
    assert columns.count() == stats.rounds
    first = page.locator("#strip rect.draft").nth(0).bounding_box()["height"]
    second = page.locator("#strip rect.draft").nth(1).bounding_box()["height"]
    assert second == pytest.approx(3 * first, rel=0.15)  # 1 draft kept, then 3
    steps = page.get_attribute("#blocks path", "d")
    assert len(re.findall("H", steps)) == stats.rounds


def test_the_table_has_the_acceptance_by_position(opening: Opening, url: str) -> None:
    page = opening(url)
    ask(page)
    page.click("summary")
    rows = page.locator("#position-table tbody tr").all_inner_texts()
    shares = [float(row.split()[3]) / 100 for row in rows]
    wanted = expected().stats.acceptance_by_position
    assert shares[:3] == pytest.approx(wanted[:3], abs=0.006)


def test_the_replay_without_the_draft_stands_beside_it_and_is_the_same_text(
    opening: Opening, url: str
) -> None:
    page = opening(url)
    page.get_by_role("switch", name="Replay without the draft").press("Space")
    ask(page)
    texts = page.locator(".text").all_text_contents()
    assert texts == [expected().text] * 2
    assert page.locator(".badge.same").inner_text().startswith(f"same {TOKENS} tokens")
    assert page.locator(".answer").nth(1).locator(".draft").count() == 0
    boxes = [answer.bounding_box() for answer in page.locator(".answer").all()]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    rates = page.locator(".speed-row b").all_inner_texts()
    assert all(float(rate) > 0 for rate in rates)
    assert "x plain" in shown(page, "#speed-note")


def test_sampling_is_replayed_with_the_same_seed(opening: Opening, url: str) -> None:
    page = opening(url)
    page.fill("#temperature", "1.5")
    page.check("#compare", force=True)
    ask(page)
    first, second = page.locator(".text").all_text_contents()
    assert first == second
    assert page.locator(".badge.same").count() == 1


def test_a_chosen_block_size_is_used(opening: Opening, url: str) -> None:
    page = opening(url)
    page.select_option("#block", "3")
    ask(page)
    assert page.get_attribute("#blocks", "aria-label").startswith("Block sizes from")
    assert " to 3," in page.get_attribute("#blocks", "aria-label")
    page.select_option("#block", "1")
    ask(page, "again")
    assert number(page, "#count-draft") == 0


def test_everything_can_be_reached_by_keyboard(opening: Opening, url: str) -> None:
    page = opening(url)
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(24):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    wanted = ["new-chat", "theme", "prompt", "send", "compare", "block", "temperature"]
    wanted += ["max-tokens", "strip", "blocks", "SUMMARY"]
    assert [name for name in wanted if name not in reached] == []


def test_a_screen_reader_is_told_the_result_and_every_control_by_name(
    opening: Opening, url: str
) -> None:
    page = opening(url)
    ask(page)
    assert shown(page, "#status").startswith(f"Answer complete. {TOKENS} tokens")
    tree = page.locator("body").aria_snapshot()
    for words in (
        'textbox "Your message"',
        'switch "Replay without the draft"',
        'combobox "Block"',
        'spinbutton "Temperature"',
        'spinbutton "Max tokens"',
        'button "Send"',
    ):
        assert words in tree
    assert re.search(r'img "Passes: \d+\. Tokens committed by each, on average: ', tree)
    assert re.search(r'img "draft \d+ %, target \d+ %', tree)


def test_a_long_answer_can_be_stopped_and_the_talk_goes_on(opening: Opening, url: str) -> None:
    page = opening(url)
    page.fill("#max-tokens", "3900")
    page.focus("#prompt")
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    page.wait_for_selector(".text .draft")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:not(.stop)")
    assert shown(page, ".foot") == "stopped"
    ask(page, "and now?")
    assert "tokens" in page.locator(".foot").nth(1).inner_text()


def test_a_refusal_is_shown_in_the_servers_words_and_the_question_is_taken_back(
    opening: Opening, url: str
) -> None:
    page = opening(url)
    ask(page, "x" * 5000)
    assert "context" in shown(page, "#alert")
    ask(page)
    assert shown(page, ".turn:last-child .text") == expected().text


def test_a_server_with_keys_asks_for_one(opening: Opening) -> None:
    with listening(toy_pair(), block_size=5, api_keys=("secret",)) as url:
        page = opening(url)
        assert not page.is_visible("#key")
        ask(page)
        assert "key" in shown(page, "#alert")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        ask(page)
        assert shown(page, ".turn:last-child .text") == expected().text


def test_text_is_text_whatever_is_in_it(opening: Opening) -> None:
    said = '<img src="/nowhere" onerror="document.title=1"> & <b>bold</b>'
    with listening(saying(said)) as url:
        page = opening(url)
        ask(page, "<i>why?</i>")
        assert said.startswith(shown(page)[:TOKENS])
        assert shown(page, ".question") == "<i>why?</i>"
        assert page.locator(".turn img, .turn b, .turn i").count() == 0


def test_a_pair_without_a_draft_says_so(opening: Opening) -> None:
    plain = ToyPair(ToyModel(eos_ids=frozenset()), draft_block_size=None)
    with listening(plain) as url:
        page = opening(url)
        assert shown(page, "#draft") == "no draft"
        assert page.is_disabled("#compare")
        ask(page)
        assert number(page, "#count-draft") == 0


@pytest.mark.parametrize("size", [WIDE, (768, 1024), NARROW, (320, 640)])
def test_nothing_sticks_out_on_any_screen(
    opening: Opening, url: str, size: tuple[int, int]
) -> None:
    page = opening(url, size)
    page.check("#compare", force=True)
    ask(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_light_and_dark_follow_the_system_and_the_button(opening: Opening, url: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = opening(url, color_scheme="light")
    dark = opening(url, color_scheme="dark")
    by_system = {"light": light.evaluate(ground), "dark": dark.evaluate(ground)}
    assert by_system["light"] != by_system["dark"]
    light.click("#theme")  # light
    light.click("#theme")  # dark
    assert light.evaluate(ground) == by_system["dark"]
    light.reload()
    assert light.evaluate(ground) == by_system["dark"]


def test_a_new_chat_begins_with_nothing(opening: Opening, url: str) -> None:
    page = opening(url)
    ask(page)
    page.click("#new-chat")
    assert page.locator(".turn").count() == 0
    assert page.is_visible("#welcome")
    assert number(page, "#count-draft") == 0
    ask(page)
    assert shown(page) == expected().text
