"""The page of the module tree, in a real browser."""

import html
import re
import shutil
import subprocess

import pytest

from axcore.aot import ModuleNode, Parameter, tree_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

WEIGHT = Parameter("weight", "Param", (4, 8), "float32", ("embed", "mlp"), 32, 128)
HEAD = ModuleNode("head", "Linear", "axcore", (WEIGHT,), ())
ROTARY = ModuleNode("position", "Rotary", "axcore-rope 0.1.0", (), ())
ATTENTION = ModuleNode(
    "attention",
    "Attention",
    "axcore",
    (),
    (ROTARY, ModuleNode("query", "Linear", "axcore", (), ())),
    settings={"mask": "Causal()"},
)
TREE = ModuleNode("", "CausalLM", "axcore", (), (ATTENTION, HEAD))

REPORT = """
<script>
const seen = () => [...document.querySelectorAll('[data-path]')].filter(row => row.checkVisibility())
  .map(row => row.querySelector('code').textContent.split(' ')[0]).join(' ');
const type = words => { box.value = words; box.dispatchEvent(new Event('input')); };
const said = [];
const say = (what) => said.push(what + ': ' + seen());
say('start');
const summary = [...document.querySelectorAll('summary')].find(row => row.textContent.startsWith('attention'));
summary.click(); say('folded'); summary.click(); say('unfolded');
document.querySelector('#close').click(); say('all folded');
type('rotary'); say('rotary'); said.push('count: ' + shown.textContent);
type('AXCORE-ROPE position'); say('two words');
type('mlp'); say('axes'); type('[4, 8]'); say('shape'); type('attention'); say('subtree');
type('mask=causal'); say('setting');
type('nothing-like-it'); say('none'); type(''); document.querySelector('#open').click(); say('cleared');
document.body.innerHTML = '<pre>' + said.join('\\n') + '</pre>';
</script>
"""


def dumped(page, tmp_path):
    (tmp_path / "page.html").write_text(page)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += ["--disable-component-update", "--disable-sync", "--no-first-run", f"--user-data-dir={tmp_path}/profile"]
    command += ["--dump-dom", f"file://{tmp_path}/page.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
def test_subtrees_collapse_and_the_search_box_filters(tmp_path):
    page = tree_page(TREE, title="tiny").replace("</html>", REPORT + "</html>")
    report = html.unescape(re.search("<pre>(.*)</pre>", dumped(page, tmp_path), re.DOTALL)[1])
    assert dict(line.split(": ") for line in report.splitlines()) == {
        "start": "model attention position query head weight",
        "folded": "model attention head weight",
        "unfolded": "model attention position query head weight",
        "all folded": "model",
        "rotary": "model attention position",
        "count": "1 of 6 match",
        "two words": "model attention position",
        "axes": "model head weight",
        "shape": "model head weight",
        "subtree": "model attention position query",
        "setting": "model attention position query",
        "none": "",
        "cleared": "model attention position query head weight",
    }


def test_names_are_escaped():
    evil = ModuleNode("<b>", "A'\"&", "<script>alert(1)</script>", (), ())
    page = tree_page(evil, title="</title><script>alert(2)</script>")
    assert page.count("<script>") == 1 and "<b>" not in page and "alert(2)</script>" not in page


def test_totals_and_suppliers_are_shown():
    page = tree_page(TREE, title="tiny")
    assert page.count("<span class='count'>32</span>") == 2 and "axcore-rope 0.1.0" in page and "128 B" in page
