"""The page to try prompts, in a real browser."""

import dataclasses

import pytest

from axcore.infer import EngineStats
from axcore.infer.scheduling.pages import PageUsage
from axcore_serve.gate import Limits

from .browser import DRIVER, browsing
from .scripted import Scripted
from .support import KEY, posted, serving, tiny_engine, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(DRIVER is None, reason="neither chromedriver nor geckodriver is installed"),
]


class Busy(Scripted):
    """A scripted engine with any statistics."""

    now = EngineStats(running=2, waiting=5, steps=9, tokens=100, pages=PageUsage(10, 20, 50))

    @property
    def stats(self):
        return self.now


@pytest.fixture(scope="module")
def browser():
    with browsing() as browser:
        yield browser


@pytest.fixture
def held(browser):
    """A server whose engine waits for `Job.step`, and whose page is open."""
    with serving(Busy(b"a<b> \xc3\xa9.", holds=True), Limits(max_samples=8)) as running:
        browser.open(running.url)
        yield running
        browser.open("about:blank")


def shows(browser, selector, text):
    wait_until(lambda: browser.text(selector) == text)


def test_output_appears_while_it_is_sampled(browser, held):
    assert browser.text("h1") == "axcore serve: tiny"
    browser.type("#prompt", "two\nlines")
    browser.type("#max_tokens", "7")
    browser.click("#send")
    wait_until(lambda: held.engine.jobs)
    (job,) = held.engine.jobs
    assert held.engine.tokenizer.decode(job.request.ids).endswith(b"two\nlines")
    assert (job.request.options.max_tokens, job.request.options.temperature) == (7, 0.7)
    job.step(4)
    shows(browser, "#output", "a<b>")  # text, not an element
    assert browser.run("return document.getElementById('send').disabled")
    job.step(2)
    job.step(1)  # the second byte of the character
    shows(browser, "#output", "a<b> é")
    wait_until(lambda: not browser.run("return document.getElementById('send').disabled"))
    assert browser.text("#error") == ""


def test_stop_cancels(browser, held):
    browser.click("#send")
    wait_until(lambda: held.engine.jobs)
    held.engine.jobs[0].step(1)
    shows(browser, "#output", "a")
    browser.click("#stop")
    wait_until(lambda: held.engine.jobs[0].is_cancelled)
    wait_until(lambda: not browser.run("return document.getElementById('send').disabled"))
    assert browser.text("#error") == ""


def test_a_chat_and_errors(browser, held):
    browser.run("document.getElementById('mode').value = 'chat'")
    browser.type("#prompt", "hello")
    browser.click("#send")
    wait_until(lambda: held.engine.jobs)
    (job,) = held.engine.jobs
    assert held.engine.tokenizer.decode(job.request.ids).endswith(b"user: hello\nassistant: ")
    job.step(2)
    shows(browser, "#output", "a<")
    job.fail("the engine failed: boom")
    shows(browser, "#error", "the engine failed: boom")
    browser.run("document.getElementById('max_tokens').value = 1000000")
    browser.click("#send")
    wait_until(lambda: "Use at most" in browser.text("#error"))
    assert browser.text("#output") == ""


def test_the_pool_the_queue_and_the_rate_are_live(browser, held):
    shows(browser, "#waiting", "5")
    assert [browser.text(f"#{name}") for name in ("running", "tokens", "pages")] == ["2", "100", "10, 20, 50"]
    assert browser.run("return document.getElementById('pool').value") == pytest.approx(10 / 80)
    held.engine.now = dataclasses.replace(
        held.engine.now, running=1, waiting=0, tokens=300, pages=PageUsage(40, 20, 20)
    )
    wait_until(lambda: browser.text("#rate") not in ("–", "0.0"))
    assert 0 < float(browser.text("#rate")) <= 220
    assert [browser.text(f"#{name}") for name in ("running", "waiting", "pages")] == ["1", "0", "40, 20, 20"]
    assert browser.run("return document.getElementById('pool').value") == pytest.approx(40 / 80)
    held.engine.now = dataclasses.replace(held.engine.now, pages=None)
    shows(browser, "#pages", "no pages")


def test_a_key_is_asked_for(browser):
    with serving(Scripted(b"ok"), keys=[KEY]) as running:
        browser.open(running.url)
        browser.click("#send")
        wait_until(lambda: "an API key is required" in browser.text("#error"))
        browser.type("#key", KEY)
        browser.type("#max_tokens", "2")
        browser.click("#send")
        shows(browser, "#output", "ok")
        assert browser.text("#error") == ""
        browser.open("about:blank")


def test_a_real_engine_gives_the_text_of_the_api(browser):
    with tiny_engine() as engine, serving(engine) as running:
        browser.open(running.url)
        for name, value in {"prompt": "hello", "max_tokens": "40", "temperature": "0"}.items():
            browser.type(f"#{name}", value)
        browser.click("#send")
        _, found = posted(running, {"model": "tiny", "prompt": "hello", "max_tokens": 40, "temperature": 0})
        wait_until(lambda: not browser.run("return document.getElementById('send').disabled"))
        text = browser.run("return document.getElementById('output').textContent")
        assert text == found["choices"][0]["text"] != ""
        shows(browser, "#tokens", str(engine.stats.tokens))
        pages = engine.stats.pages
        shows(browser, "#pages", f"0, {pages.cached}, {pages.free}")
        browser.open("about:blank")
