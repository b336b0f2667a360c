"""A headless browser, driven through the WebDriver protocol (w3.org/TR/webdriver2) of the driver that is installed."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1000,900"]
BROWSERS = {
    "chromedriver": {"browserName": "chrome", "goog:chromeOptions": {"args": ARGUMENTS}},
    "geckodriver": {"browserName": "firefox", "moz:firefoxOptions": {"args": ["-headless"]}},
}
DRIVER = next(filter(shutil.which, BROWSERS), None)
"""The driver; None: there is none."""
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """A browser with one page."""

    def __init__(self, address):
        self._address = address
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": BROWSERS[DRIVER]}})
        self._session = f"/session/{session['sessionId']}"

    def open(self, url):
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script, *arguments):
        """The result of a JavaScript function body."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector):
        """The text of an element as it is shown."""
        return self._call("GET", f"{self._element(selector)}/text")

    def click(self, selector):
        self._call("POST", f"{self._element(selector)}/click", {})

    def type(self, selector, text):
        """Replaces the text of a field."""
        self._call("POST", f"{self._element(selector)}/clear", {})
        self._call("POST", f"{self._element(selector)}/value", {"text": text})

    def close(self):
        self._call("DELETE", self._session)

    def _element(self, selector):
        found = self._call("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        return f"{self._session}/element/{found[ELEMENT]}"

    def _call(self, method, path, body=None):
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._address + path, content, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path} {body}: {error.read().decode()[:500]}") from None


@contextlib.contextmanager
def browsing():
    """A browser, which is closed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        browser = Browser(f"http://127.0.0.1:{port}")
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(20)
