"""Opens NAME.html in Chromium, light and dark, wide and narrow, and compares it with NAME.json.

usage: report_page.py CHROMIUM PATH/NAME PICTURES

Speaks the browser's protocol through its pipe, with the standard library alone. Fails with a list of
what is wrong.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# What the page is, as numbers and texts; runs in the page.
LOOK = """(() => {
  const box = (e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
  const rgb = (e, p) => getComputedStyle(e)[p].match(/[0-9.]+/g).map(Number);
  const figures = [...document.querySelectorAll('figure')].map((figure) => {
    const svg = figure.querySelector('.chart > svg');
    const labels = (svg.getAttribute('aria-labelledby') || '').split(' ');
    const texts = [...svg.querySelectorAll('text')];
    return {
      id: figure.id,
      title: figure.querySelector('h2').textContent,
      named: labels.map((id) => (document.getElementById(id) || {}).textContent || ''),
      role: svg.getAttribute('role'),
      marks: svg.querySelectorAll('g > title').length,
      rows: figure.querySelectorAll('tbody tr').length,
      caption: (figure.querySelector('caption') || {}).textContent,
      legend: figure.querySelectorAll('.legend li').length,
      svg: box(svg),
      texts: texts.map((t) => ({ text: t.textContent, box: box(t), fill: rgb(t, 'fill') })),
      fills: [...svg.querySelectorAll('[class^=f],[class^=line],[class^=hollow]')].map((e) => {
        const name = e.getAttribute('class').startsWith('f') ? 'fill' : 'stroke';
        return rgb(e, name);
      }),
    };
  });
  return {
    title: document.title,
    scripts: document.scripts.length,
    loaded: performance.getEntriesByType('resource').map((e) => e.name),
    text: rgb(document.body, 'color'),
    page: rgb(document.body, 'backgroundColor'),
    overflow: document.documentElement.scrollWidth - window.innerWidth,
    figures,
  };
})()"""


class Browser:
    def __init__(self, program, home):
        commands_read, self.commands = os.pipe()
        self.answers, answers_write = os.pipe()

        def connect():
            # Through high numbers, so that neither end is lost when the other takes its place.
            os.dup2(commands_read, 203)
            os.dup2(answers_write, 204)
            os.dup2(203, 3)
            os.dup2(204, 4)

        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={home}"],
            preexec_fn=connect, close_fds=False, stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL)
        os.close(commands_read)
        os.close(answers_write)
        self.buffer = b""
        self.number = 0
        self.events = []
        self.session = None

    def read(self):
        while b"\0" not in self.buffer:
            part = os.read(self.answers, 1 << 16)
            if not part:
                raise SystemExit("the browser ended")
            self.buffer += part
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def wait(self, method):
        while True:
            for event in self.events:
                if event.get("method") == method:
                    self.events.remove(event)
                    return event
            self.events.append(self.read())

    def close(self):
        os.close(self.commands)
        self.process.wait(timeout=30)


def luminance(colour):
    parts = [c / 255 for c in colour[:3]]
    parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def overlap(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return width > 1 and height > 1


def faults(look, document, scheme):
    """What is wrong with a page."""
    wrong = []

    def check(fine, text):
        if not fine:
            wrong.append(text)

    check(look["title"] == document["title"], f"the title is {look['title']!r}")
    check(look["scripts"] == 0, "the page has scripts")
    check(not look["loaded"], f"the page loads {look['loaded']}")
    check(look["overflow"] <= 0, f"the page is {look['overflow']} px wider than the window")
    check(contrast(look["text"], look["page"]) >= 7, "the text is hard to read")
    dark = luminance(look["page"]) < 0.2
    check(dark == (scheme == "dark"), f"the page is not {scheme}")
    ids = [figure["id"] for figure in document["figures"]]
    check([figure["id"] for figure in look["figures"]] == ids, f"the figures are not {ids}")
    check("kv-memory" in ids, "there is no figure of memory")
    for figure, meant in zip(look["figures"], document["figures"]):
        name = figure["id"]
        points = sum(len(series["points"]) for series in meant["series"])
        check(figure["title"] == meant["title"], f"{name}: the title is {figure['title']!r}")
        check(figure["named"] == [meant["title"], meant["description"]], f"{name}: not described")
        check(figure["role"] == "img", f"{name}: is no picture")
        check(figure["marks"] == points, f"{name}: {figure['marks']} marks of {points} points")
        check(figure["rows"] == points, f"{name}: {figure['rows']} rows of {points} points")
        check(figure["caption"] == meant["title"], f"{name}: the table has no caption")
        series = len(meant["series"])
        check(figure["legend"] == (series if series > 1 else 0), f"{name}: the legend")
        left, top, right, bottom = figure["svg"]
        for text in figure["texts"]:
            x0, y0, x1, y1 = text["box"]
            inside = x0 >= left - 1 and y0 >= top - 1 and x1 <= right + 1 and y1 <= bottom + 1
            check(inside, f"{name}: {text['text']!r} is cut off")
            check(contrast(text["fill"], look["page"]) >= 4.5, f"{name}: {text['text']!r} is pale")
        for index, one in enumerate(figure["texts"]):
            for other in figure["texts"][index + 1:]:
                both = f"{one['text']!r} and {other['text']!r}"
                check(not overlap(one["box"], other["box"]), f"{name}: {both} overlap")
        for colour in figure["fills"]:
            check(contrast(colour, look["page"]) >= 3, f"{name}: a mark in {colour} is pale")
    return wrong


def main():
    program, stem, pictures = sys.argv[1:]
    page, name = Path(stem + ".html").resolve(), Path(stem).name
    document = json.loads(Path(stem + ".json").read_text())
    wrong = []
    with tempfile.TemporaryDirectory() as home:
        browser = Browser(program, home)
        try:
            target = browser.call("Target.createTarget", url="about:blank")["targetId"]
            attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
            browser.session = attached["sessionId"]
            for domain in ["Page", "Runtime", "Log", "Network"]:
                browser.call(f"{domain}.enable")
            for scheme, width in [("light", 1000), ("dark", 1000), ("light", 380), ("dark", 380)]:
                feature = {"name": "prefers-color-scheme", "value": scheme}
                browser.call("Emulation.setEmulatedMedia", features=[feature])
                browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                             deviceScaleFactor=1, mobile=False)
                browser.call("Page.navigate", url=page.as_uri())
                browser.wait("Page.loadEventFired")
                result = browser.call("Runtime.evaluate", expression=LOOK, returnByValue=True)
                if "exceptionDetails" in result:
                    raise SystemExit(f"{name}: {result['exceptionDetails']}")
                found = faults(result["result"]["value"], document, scheme)
                wrong += [f"{scheme}, {width} px: {text}" for text in found]
                size = browser.call("Page.getLayoutMetrics")["cssContentSize"]
                clip = {"x": 0, "y": 0, "width": width, "height": size["height"], "scale": 1}
                shot = browser.call("Page.captureScreenshot", clip=clip,
                                    captureBeyondViewport=True)["data"]
                picture = Path(pictures) / f"{name}-{scheme}-{width}.png"
                picture.write_bytes(base64.b64decode(shot))
            for event in browser.events:
                method, details = event.get("method"), event.get("params", {})
                if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled",
                              "Log.entryAdded"):
                    wrong.append(f"the console says {json.dumps(details)[:300]}")
                if method == "Network.requestWillBeSent":
                    url = details["request"]["url"]
                    if url != page.as_uri():
                        wrong.append(f"the page asks for {url}")
        finally:
            browser.session = None
            browser.close()
    if wrong:
        raise SystemExit("\n".join([f"{name}:", *("  " + text for text in wrong)]))
    print(f"{name}: right in light and dark, wide and narrow, figures: {len(document['figures'])}")


main()
